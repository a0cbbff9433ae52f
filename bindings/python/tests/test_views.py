"""Tensors over the bytes of others: parameters made of parameters, buffers and kept views of them, copies of both.

The reference is torch alone: the same values, and the same bits after training. What torch would share and a session
cannot is refused.
SPDX-License-Identifier: Apache-2.0
"""

import copy
import gc
import importlib
import inspect
import io
import pickle

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

import libgemini.torch as gm
from conftest import alike, off_the_device, same_bits, sgd, train, values
from libgemini.torch import internals
from libgemini.torch.arenas import Place
from libgemini.torch.layout import dense_stride, is_dense, span

SIZE = 96
CHUNK = 64 << 10


def data(step=0, rows=5):
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(step))


def square(model, step):
    return model(data(step)).square().mean()


def built(session, make, loss_of=square, steps=3, budget="768KiB"):
    """Asserts that a model that make() builds within init() trains to the bits of one that torch alone has built."""
    outcomes = []
    for managed in (False, True):
        torch.manual_seed(0)
        if managed:
            with session(budget):
                model = make()
        else:
            model = make()
        optimizer = sgd(model.parameters())
        if managed:
            off_the_device()
            model, optimizer = gm.prepare(model, optimizer)
            off_the_device()
        torch.manual_seed(1)
        losses = train(model, optimizer, steps, loss_of)
        outcomes.append((losses, values(model)))
    same_bits(outcomes[1][0], outcomes[0][0])
    same_bits(outcomes[1][1], outcomes[0][1])
    return model


def bytes_of(kind):
    """That the session has of a kind of arenas, wherever they are."""
    gc.collect()  # modules refer to themselves
    gm.session().arenas.free_places()
    return sum(
        sum(gm.session().manager.tier_bytes(arena).values())
        for (name, *_), arena in gm.session().arenas.handles.items()
        if name == kind
    )


# ---- P3: places live as long as views of them
def test_p3_a_parameter_made_of_a_part_of_another(session):
    def make():
        first, last = nn.Linear(SIZE, 2 * SIZE), nn.Linear(SIZE, SIZE)
        first.weight = nn.Parameter(first.weight.data[SIZE // 2 : 3 * SIZE // 2])
        first.bias = nn.Parameter(first.bias.data[:SIZE])
        last.weight = nn.Parameter(last.weight.data.t())
        last.bias = nn.Parameter(last.bias.detach()[torch.arange(SIZE)])
        return nn.Sequential(first, last)

    built(session, make)


def test_p3_the_data_of_two_parameters_swapped(session):
    def make():
        one, two, three = (nn.Linear(SIZE, SIZE) for _ in range(3))
        one.weight.data, two.weight.data = two.weight.data, one.weight.data
        two.weight.data, three.weight.data = three.weight.data, two.weight.data
        one.bias.data = torch.cat((two.bias.data[3:], two.bias.data[:3]))
        return nn.Sequential(one, two, three)

    built(session, make)


def test_p3_views_of_a_parameter_that_was_replaced(session):
    with session():
        layer = nn.Linear(SIZE, SIZE)
        wanted = layer.weight.detach().clone()
        kept = layer.weight.detach()
        row = kept[3]
        layer.register_buffer("first", layer.weight.data[:7].t())
        layer.weight = nn.Parameter(torch.ones(SIZE, SIZE))
        bias = layer.bias
        layer.bias = nn.Parameter(torch.ones(SIZE))
        other = nn.Linear(SIZE, SIZE)  # which may get what has become free
        off_the_device()
        assert torch.equal(kept, wanted) and torch.equal(row, wanted[3]) and torch.equal(layer.first, wanted[:7].t())
        del kept, layer.bias
    gm.prepare(nn.Sequential(layer, other))
    off_the_device()
    assert torch.equal(row, wanted[3]) and torch.equal(layer.first, wanted[:7].t()) and bias.any()
    with torch.no_grad():
        row.add_(1)
    assert torch.equal(layer.first, wanted[:7].t() + (torch.arange(7) == 3))  # one memory


@pytest.mark.parametrize("how", ("replaced", "tied", "data", "deleted", "half"))
def test_p3_bytes_that_nobody_refers_to_cost_nothing(session, how):
    with session():
        layer = nn.Linear(256, 256, bias=False)
        keeper = layer.weight.detach()[0] if how == "replaced" else None
        size = 256 * 256 * 4
        assert bytes_of("param") == size
        if how == "replaced":
            layer.weight = nn.Parameter(torch.ones(2, 2))
            assert bytes_of("param") > size  # as the row needs it
            del keeper
            assert bytes_of("param") < CHUNK
        elif how == "tied":
            other = nn.Linear(256, 256, bias=False)
            assert bytes_of("param") == 2 * size
            layer.weight = other.weight
            assert bytes_of("param") == size
        elif how == "data":
            layer.weight.data = torch.ones(2, 2)
            assert bytes_of("param") < CHUNK
        elif how == "deleted":
            del layer
            assert not bytes_of("param") and not gm.session().records
        else:
            layer.half()
            assert bytes_of("param") == size // 2


def test_p3_a_view_that_autograd_has_saved(session):
    """No tensor of Python's refers to it."""
    with session():
        layer = nn.Linear(SIZE, SIZE)
        wanted = layer.weight.detach().clone()
        x = data().requires_grad_()
        y = F.linear(x, layer.weight)
        layer.weight = nn.Parameter(torch.zeros(SIZE, SIZE))
        gc.collect()
        gm.session().arenas.free_places()
        nn.Linear(SIZE, SIZE)
        off_the_device()
        y.sum().backward()
    assert torch.equal(x.grad, torch.ones(5, SIZE) @ wanted)


@pytest.mark.parametrize("what", ("parameter", "gradient"))
def test_p3_a_storage_that_only_torch_refers_to(session, what):
    """As of tensors that were made where no torch function is seen, such as in units."""
    session()
    layer = gm.prepare(nn.Linear(256, 256, bias=False))
    layer(torch.ones(1, 256)).sum().backward()
    kept = layer.weight if what == "parameter" else layer.weight.grad
    with internals.plain():
        kept = kept.detach()
    gm.session().models.clear()
    del layer
    assert bytes_of("param") == bytes_of("grad") == 256 * 256 * 4
    del kept
    assert bytes_of("param") == bytes_of("grad") == 0


def test_p3_what_is_free_is_used_again(session):
    with session("256KiB", host_memory="1MiB") as owner:
        kept = []
        for _ in range(20):
            layer = nn.Linear(128, 128)
            tensors = nn.Parameter(layer.weight.data[::2]), layer.bias.detach()
            kept = [*kept[-2:], (tensors, [tensor.detach().clone() for tensor in tensors])]
            for tensors, wanted in kept:
                same_bits(tensors, wanted)
    del layer, kept, tensors
    assert bytes_of("param") == 0
    assert (
        owner.manager.arena_info(owner.arenas.handles["param", torch.float32, 0]).size_bytes
        <= 6 * (128 * 128 + 256) * 4
    )
    assert not owner.arenas.place("param", (4 * 128, 128), torch.float32, "new").read().any()


# ---- P4: parameters that are views of managed ones
@pytest.mark.parametrize(
    "part",
    (
        lambda w: w.data,
        lambda w: w.data[2:5],
        lambda w: w.detach()[:, ::2],
        lambda w: w.data.t(),
        lambda w: w.data.view(torch.int32).view(torch.float32),
        lambda w: w.data[:1].expand(4, SIZE),
    ),
)
def test_p4_a_parameter_that_is_a_view_of_a_managed_one(session, part):
    """Whose module does not train: it is a parameter of its own."""
    with session("256KiB"):
        source = nn.Linear(SIZE, SIZE)
        wanted = part(source.weight.detach().clone())  # with the same strides
        model = nn.Module()
        model.weight = nn.Parameter(part(source.weight))
        off_the_device()
        assert torch.equal(model.weight.norm(), wanted.norm())  # of a model that is not prepared yet
    off_the_device()
    gm.prepare(model)
    off_the_device()
    assert torch.equal(model.weight.detach(), wanted) and model.weight.stride() == dense_stride(wanted)
    off_the_device()
    plain = nn.Parameter(model.weight.detach().clone())
    assert torch.equal(model.weight.norm(), plain.norm())
    for one in model.weight, plain:
        (one * one).sum().backward()
    assert torch.equal(nn.utils.clip_grad_norm_(model.parameters(), 0.5), nn.utils.clip_grad_norm_([plain], 0.5))
    assert torch.allclose(model.weight.grad, plain.grad)


SHARED = (
    r"parameters \w+ and \w+ are two tensors that share their bytes: "
    r"give both modules the same parameter, or clone\(\) one"
)


@pytest.mark.parametrize("part", (lambda w: w.data, lambda w: w.data[2:5], lambda w: w.detach()[:, 3:]))
@pytest.mark.parametrize("where", ("one model", "plain", "two models", "the other one later"))
def test_p4_two_parameters_that_share_bytes_and_both_train_are_refused(session, part, where):
    started = session()
    if where == "plain":
        source = other = nn.Linear(SIZE, SIZE)
    else:
        with started:
            source = nn.Linear(SIZE, SIZE)
        other = source if where == "one model" else nn.Module()
    if where == "two models":
        gm.prepare(source)
    other.extra = nn.Parameter(part(source.weight))
    second = other
    if where == "the other one later":
        gm.prepare(other)
        second = source
    before = values(other)
    with pytest.raises(gm.GeminiError, match=SHARED):
        gm.prepare(second)
    same_bits(values(other), before)
    del other.extra
    gm.prepare(second)


class Scaled(nn.Parameter):
    """A class of a user's."""


@pytest.mark.parametrize(
    "make",
    (
        lambda values: (Scaled(values), Scaled(values)),
        lambda values: (values, Scaled(values)),
        lambda values: (Scaled(values[:64]), nn.Parameter(values[40:104])),
    ),
)
def test_n5_two_parameters_of_other_classes_that_share_bytes_are_refused(session, make):
    session()
    model = nn.Module()
    model.one, model.two = make(nn.Parameter(torch.randn(104, SIZE)))
    with pytest.raises(gm.GeminiError, match=SHARED):
        gm.prepare(model)
    model.one, model.two = (nn.Parameter(param.detach().clone()) for param in (model.one, model.two))
    gm.prepare(model)


def test_n5_a_buffer_of_another_class_over_a_parameter_is_refused(session):
    session()
    model = nn.Linear(SIZE, SIZE)
    model.register_buffer("mask", model.weight.data.as_subclass(type("Mask", (torch.Tensor,), {})))
    with pytest.raises(
        gm.GeminiError, match=r"buffer mask shares bytes with parameter weight, but is not .* clone\(\) one"
    ):
        gm.prepare(model)


@pytest.mark.parametrize("known", (False, True))
@pytest.mark.parametrize("what", ("grad", "momentum"))
def test_n5_a_parameter_over_a_gradient_or_a_state_is_refused(session, what, known):
    """Its bytes would go with those of the parameter that has them."""
    session()
    model = nn.Linear(SIZE, SIZE)
    model, optimizer = gm.prepare(model, torch.optim.AdamW(model.parameters()))
    square(model, 0).backward()
    optimizer.step()
    taken = model.weight.grad if what == "grad" else optimizer.state[model.weight]["exp_avg"]
    wanted = taken.detach().clone()
    other = model if known else nn.Module()
    other.extra = nn.Parameter(taken.detach()[3:])
    with pytest.raises(gm.GeminiError, match=rf"parameter extra shares its bytes with weight.{what}: clone\(\) that"):
        gm.prepare(other)
    other.extra = nn.Parameter(taken.clone())
    gm.prepare(other)
    optimizer.zero_grad()
    square(model, 1).backward()
    off_the_device()
    assert torch.equal(other.extra.detach(), wanted)


@pytest.mark.parametrize("kind", (sgd, lambda params: torch.optim.AdamW(params, 0.01)))
@pytest.mark.parametrize("graded", (False, True))
def test_n5_a_parameter_takes_the_place_of_one_that_somebody_has_still(session, kind, graded):
    """As an optimizer and the session have it; all that is over the bytes of one is over those of the other."""

    def run(model, optimizer):
        managed = isinstance(model[0].weight, gm.tensors.ManagedTensor)
        losses = train(model, optimizer, 2, square)
        if graded:
            square(model, 3).backward()
        old, view, bias = model[0].weight, model[0].weight.detach()[3:], model[0].bias
        model[0].weight = nn.Parameter(old.data)
        model[0].load_state_dict(model[0].state_dict(), assign=True)
        again = kind(model.parameters())
        if managed:
            model, again = gm.prepare(model, again)
            off_the_device()
        found = [old.detach().clone(), view.clone()] + ([old.grad.clone(), bias.grad.clone()] if graded else [])
        assert model[0].weight.grad is None and model[0].bias.grad is None and (old.grad is not None) == graded
        model[1].zero_grad()
        losses += train(model, again, 2, square)
        if managed:
            off_the_device()
        for one in old, view:
            assert one.data_ptr() - old.data_ptr() in (0, 3 * SIZE * 4)
            found.append(one.detach().clone())
        with torch.no_grad():
            view.zero_()
        found += train(model, again, 1, square)
        if managed:
            with pytest.raises(gm.GeminiError, match="0.weight is another optimizer's, which was prepared later"):
                optimizer.step()
        (old * 2).sum().backward()
        return losses + found + [old.grad]

    if kind is sgd:
        alike(session, lambda: nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)), run, kind)
    else:  # the session has arithmetic of its own
        session()
        model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE))
        model, optimizer = gm.prepare(model, kind(model.parameters()))
        run(model, optimizer)


def test_n5_prepare_again_without_a_parameter(session):
    session()
    model = gm.prepare(nn.Linear(SIZE, SIZE))
    model.bias = None
    gc.collect()
    gm.prepare(model)
    assert list(gm.session().model.records) == ["weight"]
    square(model, 0).backward()


def test_p4_parameters_that_lie_between_one_another_share_nothing(session):
    def make():
        both = torch.randn(SIZE, 2 * SIZE)
        model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE))
        model[0].weight, model[1].weight = nn.Parameter(both[:, ::2]), nn.Parameter(both[:, 1::2])
        return model

    built(session, make)
    gm.close()
    alike(session, make, lambda model, optimizer: train(model, optimizer, 3, square))


def test_which_bytes_tensors_share():
    base = torch.zeros(6, 6)
    for part, other, shared in (
        (base, base[2], True),
        (base[:2], base[2:], False),
        (base[:, :3], base[:, 3:], False),
        (base[:, :3], base[:, 2:], True),
        (base[:, ::2], base[1, 1::2], False),
        (base[:, ::2], base[1], True),
        (base.t(), base[5, 5:], True),
        (base, torch.zeros(6), False),
        (base[:1].expand(4, 6), base[0, 2:3], True),
        (base[:1].expand(4, 6), base[1:], False),
        (base.view(torch.int16)[:, 3:], base, True),
        (base[0], base.view(torch.int16)[0, 12:], False),
    ):
        assert span(part).shares_with(span(other)) == span(other).shares_with(span(part)) == shared
    for tensor, dense in (
        (base, True),
        (base.t(), True),
        (base[:, 1:], False),
        (base[:1], True),
        (base[:, :1], False),
        (base[:1].expand(4, 6), False),
        (base.as_strided((2, 2), (3, 0)), False),
        (base[0, 0], True),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.zeros(0, 3), True),
    ):
        assert is_dense(tensor.shape, tensor.stride()) == dense, (tensor.shape, tensor.stride())


# ---- N4: functions of torch.func that close over parameters
class Quadratic(nn.Module):
    """Uses parameters themselves, views of them, and one of its own kernels."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x):
        x = torch.tanh(self.one(x)) @ self.two.weight[:12].t()
        return (x * x).sum(-1) * self.two.bias[0].item() + (x * self.two.bias[3:15].detach()).sum(-1)


def linearized(model, x):
    """The function that it returns runs after the transform has ended."""
    out, pull = torch.func.vjp(model, x)
    if isinstance(model.one.weight, gm.tensors.ManagedTensor):
        off_the_device()
    return out + pull(torch.ones_like(out))[0].sum()


TRANSFORMS = {
    "grad": lambda model, x: torch.func.grad(model)(x[0]),
    "grad of grad": lambda model, x: torch.func.grad(lambda x: torch.func.grad(model)(x).square().sum())(x[0]),
    "jacfwd": lambda model, x: torch.func.jacfwd(model)(x),
    "jacrev": lambda model, x: torch.func.jacrev(model)(x),
    "hessian": lambda model, x: torch.func.hessian(model)(x[0]),
    "jvp": lambda model, x: torch.stack(torch.func.jvp(model, (x,), (torch.ones_like(x),))),
    "vjp": linearized,
    "vmap": lambda model, x: torch.func.vmap(model)(x),
    "vmap of rows": lambda model, x: torch.func.vmap(lambda i: model.one.weight[i] * x[0])(torch.tensor([3, 1, 3])),
    "vmap of columns": lambda model, x: torch.func.vmap(lambda i: model.one.weight[:, i] * x[0])(torch.tensor([2, 0])),
    "vmap of grad": lambda model, x: torch.func.vmap(torch.func.grad(model))(x),
    "an expression": lambda model, x: torch.func.grad(lambda x: (x * model.one.weight * x).sum())(x[0]),
}


def vmap_takes_indexes():
    """Whether torch maps over the index of a tensor. 2.6 does not: it calls item()."""
    try:
        torch.func.vmap(lambda i: torch.zeros(2)[i])(torch.tensor([0]))
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_n4_transforms_that_close_over_parameters(session, transform):
    """To the bit, and the gradients of parameters that a backward pass through the transform gives."""
    if transform in ("vmap of rows", "vmap of columns") and not vmap_takes_indexes():
        pytest.skip("this torch does not map over an index")

    def run(model, optimizer):
        if gm.tensors.ManagedTensor in type(model.one.weight).__mro__:
            off_the_device()
        x = data(rows=3).requires_grad_()
        out = TRANSFORMS[transform](model, x)
        if gm.tensors.ManagedTensor in type(model.one.weight).__mro__:
            off_the_device()
        out.square().sum().backward()
        found = [out.detach().clone(), x.grad] + [
            param.grad.clone() for param in model.parameters() if param.grad is not None
        ]
        optimizer.step()
        return found

    alike(session, Quadratic, run)


@pytest.mark.parametrize(
    "part", (lambda weight: weight[2:5], lambda weight: weight.t(), lambda weight: weight.detach())
)
def test_n4_views_that_come_out_of_a_transform(session, part):
    session()
    model = gm.prepare(nn.Linear(SIZE, SIZE))
    wanted, kept = part(model.weight).detach().clone(), []
    x = data()[0]
    for transform in (
        lambda f: torch.func.grad(f, has_aux=True)(x)[1],
        lambda f: torch.func.vjp(f, x, has_aux=True)[2],
        lambda f: torch.func.vmap(f)(x[None])[1][0],
        lambda f: torch.func.jvp(f, (x,), (x,), has_aux=True)[2],
    ):
        off_the_device()
        out = transform(lambda x: (kept.append(part(model.weight)), (x.sum(), part(model.weight)))[1])
        off_the_device()
        assert torch.equal(out, wanted)
        off_the_device()
        assert torch.equal(kept.pop(), wanted)


def test_n4_writing_within_a_transform_is_refused(session):
    session()
    model = gm.prepare(nn.Linear(SIZE, SIZE))
    wanted = model.weight.detach().clone()
    for write in (
        lambda: model.weight.data.zero_(),
        lambda: model.weight.detach()[:3].zero_(),
        lambda: torch.add(torch.ones(SIZE, SIZE), 1, out=model.weight.data),
    ):
        for transform in torch.func.grad, torch.func.vmap:
            with pytest.raises(
                gm.GeminiError, match=r"weight: \w+\(\) would write it within a transform of torch.func: do that out"
            ):
                transform(lambda x, write=write: write().sum() + x.sum())(data()[0])
    assert torch.equal(model.weight, wanted)


def test_n4_a_unit_within_a_transform_is_refused(session):
    session()
    model = gm.prepare(nn.Sequential(nn.Linear(SIZE, SIZE)))
    gm.unit(model[0])
    for transform in torch.func.grad, torch.func.vmap:
        with pytest.raises(gm.GeminiError, match="0.weight.*a unit.* within a transform of torch.func"):
            transform(lambda x: model(x).sum())(data()[0] if transform is torch.func.grad else data())
    assert model(data()).sum().isfinite()


# ---- N10: what makes tensors of tensors, and is no torch function
class Other(torch.Tensor):
    """A class of a user's."""


def over(tensor, weight):
    tensor.data = weight
    return tensor


VIEWS = {
    "as_subclass": lambda weight: weight.as_subclass(torch.Tensor),
    "_make_subclass": lambda weight: torch.Tensor._make_subclass(torch.Tensor, weight),
    "_make_subclass of a parameter": lambda weight: torch.Tensor._make_subclass(nn.Parameter, weight, True),
    "set_": lambda weight: torch.empty(0).set_(weight),
    "set_ of a parameter": lambda weight: nn.Parameter(torch.empty(0), False).set_(weight),
    "data": lambda weight: over(torch.empty(0), weight),
    "data of a parameter": lambda weight: over(nn.Parameter(torch.empty(0)), weight),
    "Tensor": lambda weight: torch.Tensor(weight),
    "new": lambda weight: torch.ones(3).new(weight),
    "Variable": lambda weight: torch.autograd.Variable(weight),
    "as_tensor": lambda weight: torch.as_tensor(weight),
    "asarray": lambda weight: torch.asarray(weight),
}
COPIES = {
    "tensor": lambda weight: torch.tensor(weight),
    "tensor of a list": lambda weight: torch.tensor([weight[0, 0], 2.0]),
    "tensor of lists": lambda weight: torch.tensor([[1.0, 2.0], (weight[0, 0], weight[1, 1])]),
    "new_tensor": lambda weight: torch.ones(3).new_tensor(weight),
    "as_tensor": lambda weight: torch.as_tensor(weight, dtype=torch.float64),
    "asarray": lambda weight: torch.asarray(weight, copy=True),
    "sparse": lambda weight: torch.sparse_coo_tensor(torch.tensor([[0, 1]]), weight[0, :2]).to_dense(),
    "nested": lambda weight: torch.nested.nested_tensor([weight, weight[:3]]).to_padded_tensor(0),
    "jagged": lambda weight: torch.nested.nested_tensor([weight, weight[:3]], layout=torch.jagged).values(),
    "to_dlpack": lambda weight: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(weight)),
}


@pytest.mark.filterwarnings(
    "ignore:To copy construct from a tensor",
    "ignore:The PyTorch API of nested tensors",
    "ignore:Sparse invariant checks",
)
@pytest.mark.parametrize("kind, make", [*VIEWS.items(), *COPIES.items()], ids=[*VIEWS, *COPIES])
def test_n10_tensors_that_are_made_of_managed_ones(session, kind, make):
    session()
    model = gm.prepare(nn.Linear(SIZE, SIZE))
    plain = model.weight.detach().clone()
    off_the_device()
    made, wanted = make(model.weight.detach()), make(plain)
    off_the_device()
    assert torch.equal(made.detach(), wanted.detach()) and made.dtype == wanted.dtype
    assert made.requires_grad == wanted.requires_grad and isinstance(made, nn.Parameter) == isinstance(
        wanted, nn.Parameter
    )
    if make in VIEWS.values():
        off_the_device()
        with torch.no_grad():
            made.detach()[3].fill_(7)
        off_the_device()
        assert (model.weight[3] == 7).all()


@pytest.mark.parametrize(
    "make",
    (
        lambda weight: weight.as_subclass(Other),
        lambda weight: torch.Tensor._make_subclass(Other, weight),
        lambda weight: Scaled(weight),
        lambda weight: torch.ones(3).as_subclass(Other).set_(weight),
        lambda weight: torch.nested.nested_tensor_from_jagged(weight, torch.tensor([0, 3, SIZE])),
    ),
)
def test_n10_other_classes_over_a_parameter_are_refused(session, make):
    session()
    model = gm.prepare(nn.Linear(SIZE, SIZE))
    with pytest.raises(
        gm.GeminiError, match=r"weight: a \w+ over its bytes would not know when .* make it of a clone\(\)"
    ):
        make(model.weight.detach())
    assert make(model.weight.detach().clone()) is not None


def test_n10_gradients_of_outputs(session):
    """backward() and grad() of plain tensors."""
    session()
    model = gm.prepare(nn.Linear(SIZE, SIZE))
    wanted = model.weight[3].detach().clone()
    for give in (
        lambda y, x: y.backward(model.weight[3]),
        lambda y, x: torch.autograd.backward([y], [model.weight.detach()[3]]),
        lambda y, x: setattr(x, "grad", torch.autograd.grad(y, x, model.weight[3])[0]),
    ):
        x = torch.ones(SIZE, requires_grad=True)
        y = 2 * x
        off_the_device()
        give(y, x)
        assert torch.equal(x.grad, 2 * wanted)


def test_n10_torch_is_as_it_was_when_the_session_is_closed(session):
    def now():
        return [
            vars(owner).get(name)
            for owner, names in (
                (torch, ("tensor", "as_tensor", "asarray", "sparse_coo_tensor", "sparse_csr_tensor")),
                (torch.Tensor, ("__new__", "new", "new_tensor", "data", "set_", "_make_subclass")),
                (torch.autograd.Variable, ("__new__",)),
                (torch._C._nested, ("nested_tensor",)),
            )
            for name in names
        ]

    before = now()
    session()
    assert None not in now()
    gm.close()
    assert now() == before and torch.equal(torch.Tensor([1, 2]), torch.tensor([1.0, 2.0]))


# ---- N15: copies that share bytes
@pytest.mark.parametrize(
    "of",
    (
        lambda model: model.weight,
        lambda model: model.weight.detach()[3:],
        lambda model: model.weight.grad,
        lambda model: model.bias,
    ),
)
def test_n15_a_shallow_copy_is_over_the_same_bytes(session, of):

    def run(model, optimizer):
        square(model, 0).backward()
        model.bias.requires_grad_(False)
        one = of(model)
        if one is not None:
            one.tag = {"of": "a user"}
        other = copy.copy(one)
        if isinstance(model.weight, gm.tensors.ManagedTensor):
            off_the_device()
        assert (
            other is not one and type(other) is type(one) and other.requires_grad == one.requires_grad and other.is_leaf
        )
        assert other.data_ptr() == one.data_ptr() and other.tag is one.tag and other.stride() == one.stride()
        with torch.no_grad():
            other[2].fill_(7)
            one[0].fill_(3)
        return [other.detach().clone(), one.detach().clone()]

    alike(session, lambda: nn.Linear(SIZE, SIZE), run)


@pytest.mark.parametrize("new", (True, False))
def test_n15_what_is_saved_together_shares_its_bytes(session, new):
    """As in a file of torch's own, which has them once."""

    def through_file(what):
        file = io.BytesIO()
        torch.save(what, file, _use_new_zipfile_serialization=new)
        size = file.tell()
        file.seek(0)
        return torch.load(file, weights_only=True), size

    def run(model, optimizer):
        square(model, 0).backward()
        weight, grad = model[0].weight, model[0].weight.grad.mul_(0.5)
        weight.tag = 3
        if isinstance(weight, gm.tensors.ManagedTensor):
            off_the_device()
        tied, size = through_file(model.state_dict())
        (whole, rows, flat, slope, part), more = through_file(
            [weight, weight.detach()[:2], weight.detach().t()[3:], grad, grad[:2]]
        )
        sizes.append((size // 4096, more // 4096))
        assert tied["0.weight"].data_ptr() == tied["1.weight"].data_ptr() and whole.tag == 3
        assert whole.data_ptr() == rows.data_ptr() == flat.data_ptr() - 12 and slope.data_ptr() == part.data_ptr()
        assert isinstance(whole, nn.Parameter) and flat.stride() == (1, SIZE)
        found = [*tied.values(), *(one.detach().clone() for one in (whole, rows, flat, slope, part))]
        with torch.no_grad():
            weight.add_(1)
        return found + [through_file(weight.detach()[5])[0]]  # of now

    def make():
        model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE))
        model[1].weight = model[0].weight
        return model

    sizes = []
    alike(session, make, run)
    assert sizes[0] == sizes[1]


def test_n15_a_deep_copy_of_what_is_tied_is_tied(session):
    session()
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE))
    model[1].weight = model[0].weight
    gm.prepare(model)
    state = copy.deepcopy(model.state_dict())
    assert state["0.weight"].data_ptr() == state["1.weight"].data_ptr() and type(state["0.weight"]) is torch.Tensor


@pytest.mark.parametrize("first", (True, False))
def test_n10_torch_knows_its_functions_in_a_session_and_after(session, first):
    """It keeps those that a torch.device() is for in a set, which it makes at the first use."""

    def check():
        for make in torch.tensor, torch.as_tensor, torch.asarray:
            with torch.device("meta"):
                assert make(1.0).is_meta
            assert pickle.loads(pickle.dumps(make)) is make

    internals_of_torch = torch.utils._device._device_constructors
    internals_of_torch.cache_clear()
    if not first:
        check()
    session()
    check()
    gm.close()
    check()
    internals_of_torch.cache_clear()


# ---- P7: what others have of a parameter or a gradient
def test_p7_a_gradient_is_scaled_with_what_a_factor_is_now(session):
    """Powers of 2: scaling is put off, which rounds once."""

    def run(model, optimizer):
        square(model, 0).backward()
        factor = torch.tensor(0.5)
        for change in (
            lambda: None,
            lambda: factor.data.fill_(4),
            lambda: factor.detach().numpy().fill(0.25),
            lambda: factor.mul_(2),
        ):
            change()
            model.weight.grad.mul_(factor)
            torch._foreach_mul_([model.weight.grad, model.bias.grad], factor)
        optimizer.step()
        return [model.weight.grad.clone(), model.bias.grad.clone()]

    alike(session, lambda: nn.Linear(SIZE, SIZE), run)


@pytest.mark.parametrize(
    "take",
    (
        lambda weight: weight.detach().numpy(),
        lambda weight: weight.data[1:].numpy(),
        lambda weight: numpy.asarray(weight.detach()),
        lambda weight: weight.grad.numpy(),
        lambda weight: weight.detach().cpu().numpy(),
    ),
)
def test_p7_what_numpy_gets_cannot_be_written(session, take):
    """It is a copy: a write would be lost."""
    session()
    model = gm.prepare(nn.Linear(SIZE, SIZE))
    square(model, 0).backward()
    array = take(model.weight)
    with pytest.raises(ValueError, match="read-only"):
        array[:] = 1
    numpy.array(model.weight.detach())[:] = 1  # that is one's own


def test_p7_a_copy_cannot_be_forbidden(session):
    session()
    weight = gm.prepare(nn.Linear(SIZE, SIZE)).weight.detach()
    if "copy" not in inspect.signature(torch.Tensor.__dlpack__).parameters:
        pytest.skip("this torch's __dlpack__() has no such argument")
    with pytest.raises(gm.GeminiError, match=r"weight: __dlpack__\(copy=False\): only a copy of it can leave torch"):
        weight.__dlpack__(copy=False)


class Masked(nn.Module):
    """With buffers over a parameter, and over another buffer."""

    def __init__(self, first="parameter"):
        super().__init__()
        self.inner = nn.Linear(SIZE, SIZE)
        values = torch.randn(SIZE, SIZE)
        if first == "buffer":
            self.register_buffer("all", values)
        self.weight = nn.Parameter(values)
        if first == "parameter":
            self.register_buffer("all", self.weight.data)
        self.register_buffer("part", self.all[2:5, ::3].t())

    def forward(self, x):
        return self.inner(F.linear(x, self.weight + self.all)) + self.part.sum()


@pytest.mark.parametrize("first", ("parameter", "buffer"))
def test_p7_a_buffer_over_a_parameter_stays_one(session, first):
    def check(model):
        off_the_device()
        assert torch.equal(model.all, model.weight) and torch.equal(model.part, model.weight[2:5, ::3].t())
        with torch.no_grad():
            model.part.fill_(7)
        assert (model.weight[2:5, ::3] == 7).all()

    check(built(session, lambda: Masked(first), budget="256KiB"))
    gm.close()
    check(
        alike(
            session, lambda: Masked(first), lambda model, optimizer: train(model, optimizer, 3, square), budget="256KiB"
        )
    )


def test_p7_buffers_over_a_parameter_are_saved_and_loaded(session, tmp_path):
    session("256KiB")
    model = gm.prepare(Masked())
    wanted = values(model)
    gm.save(tmp_path / "checkpoint", model)
    with torch.no_grad():
        model.weight.zero_()
    gm.load(tmp_path / "checkpoint", model)
    same_bits(values(model), wanted)


def test_p7_a_unit_with_nothing_but_a_buffer_over_a_parameter(session):
    """What it returns may be a view of it."""

    class First(nn.Module):
        def forward(self):
            return self.rows[1:]

    session("256KiB")
    model = nn.ModuleList([nn.Linear(SIZE, SIZE), First()])
    model[1].register_buffer("rows", model[0].weight.detach()[:7])
    wanted = model[0].weight.detach()[1:7].clone()
    gm.unit(gm.prepare(model)[1])
    off_the_device()
    out = model[1]()
    off_the_device()
    assert torch.equal(out, wanted)
    with torch.no_grad():
        model[0].weight.add_(1)
    assert torch.equal(out, wanted + 1)


def test_p7_a_unit_with_a_buffer_over_a_parameter(session):
    def run(model, optimizer):
        if not isinstance(optimizer, torch.optim.SGD):
            gm.unit(model[0])
            off_the_device()
        return train(model, optimizer, 3, square)

    alike(session, lambda: nn.Sequential(Masked()), run)


@pytest.mark.parametrize(
    "make",
    (
        lambda values: (values[:40], values),
        lambda values: (values[:, ::2], values[:, :4]),
        lambda values: (values, values.view(torch.int32)),
    ),
)
def test_p7_a_buffer_that_cannot_stay_over_a_parameter_is_refused(session, make):
    session()
    model = nn.Linear(SIZE, SIZE)
    parameter, buffer = make(torch.randn(SIZE, SIZE))
    model.weight = nn.Parameter(parameter)
    model.register_buffer("mask", buffer)
    with pytest.raises(
        gm.GeminiError, match=r"buffer mask shares bytes with parameter weight, but is not .* clone\(\) one"
    ):
        gm.prepare(model)
    assert type(model.weight) is nn.Parameter and type(model.mask) is torch.Tensor
    model.mask = buffer.clone()
    gm.prepare(model)


def test_p7_a_buffer_that_was_another_one_meanwhile_is_refused(session):
    with session():
        model = Masked("buffer")
        nn.init.zeros_(model.weight)
    with pytest.raises(gm.GeminiError, match="buffer all shared its bytes with parameter weight until"):
        gm.prepare(model)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_p7_storages_tell_where_they_are_but_no_bytes(session):
    session()
    model = gm.prepare(nn.Linear(SIZE, SIZE))
    off_the_device()
    for take in (lambda tensor: tensor.untyped_storage(), lambda tensor: tensor.detach()[3:].untyped_storage()):
        storage = take(model.weight)
        assert storage.data_ptr() == model.weight.data_ptr() and storage.nbytes() == 4 * SIZE * SIZE == len(storage)
        assert storage.device == model.weight.device
        for use in (
            lambda storage: storage.tolist(),
            lambda storage: storage[0],
            lambda storage: bytes(storage),
            lambda storage: storage.clone(),
            lambda storage: storage.cpu(),
            lambda storage: list(storage),
            lambda storage: storage.copy_(storage),
            lambda storage: copy.deepcopy(storage),
            lambda storage: pickle.dumps(storage),
            lambda storage: storage.__setitem__(0, 1),
            lambda storage: storage.resize_(3),
        ):
            with pytest.raises(gm.GeminiError, match=r"weight: the bytes of its storage may be elsewhere.* clone\(\)"):
                use(storage)
        with pytest.raises(gm.GeminiError, match="the bytes of its storage"):
            torch.empty(0).set_(storage)
        assert storage is take(model.weight)  # as it is of any tensor
    typed = model.weight.storage()
    assert typed.data_ptr() == model.weight.data_ptr()
    for use in (typed.tolist, lambda: typed[0], typed.clone):
        with pytest.raises(gm.GeminiError, match="the bytes of its storage"):
            use()
    assert model.weight.detach().clone().untyped_storage().tolist()


# ---- P9: what makes parameters of parameters
def normed(make):
    def of():
        return nn.Sequential(*(make(nn.Linear(SIZE, SIZE)) for _ in range(2)))

    return of


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "make",
    (
        nn.utils.weight_norm,
        nn.utils.parametrizations.weight_norm,
        nn.utils.spectral_norm,
        nn.utils.parametrizations.spectral_norm,
        lambda layer: nn.utils.parametrizations.orthogonal(
            layer, orthogonal_map="householder", use_trivialization=False
        ),
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    ),
)
def test_p9_parametrizations_within_init(session, make):
    built(session, normed(make))


@pytest.mark.parametrize("removed", (False, True))
def test_n11_orthogonal_within_init(session, removed):
    """It calls set_(), and so does who removes it."""

    def make():
        layer = nn.utils.parametrizations.orthogonal(nn.Linear(SIZE, SIZE))
        return nn.Sequential(nn.utils.parametrize.remove_parametrizations(layer, "weight") if removed else layer)

    built(session, make)


@pytest.mark.parametrize(
    "change",
    (
        lambda layer: layer.weight.set_(torch.zeros(SIZE, SIZE)),
        lambda layer: layer.bias.set_(torch.zeros(3)),
        nn.utils.parametrizations.orthogonal,
    ),
)
def test_n11_set_after_prepare_is_refused_and_changes_nothing(session, change):

    def run(model, optimizer):
        losses = train(model, optimizer, 2, square)
        if isinstance(optimizer, gm.Optimizer):
            with (
                torch.no_grad(),
                pytest.raises(gm.GeminiError, match=r"0.\w+ would be moved or replaced .by .*set_.., .* do that bef"),
            ):
                change(model[0])
            off_the_device()
        return losses + train(model, optimizer, 2, square)

    alike(session, lambda: nn.Sequential(nn.Linear(SIZE, SIZE)), run)


def test_n16_export_of_a_prepared_model_says_what_to_do(session):
    session()
    model = gm.prepare(nn.Sequential(nn.Linear(SIZE, SIZE)))
    with pytest.raises(
        gm.GeminiError, match=r"0.weight was replaced .* torch.export .* take a copy.deepcopy\(\) of the model"
    ):
        torch.export.export(model, (data(),), strict=False)  # the default since torch 2.7
    program = torch.export.export(copy.deepcopy(model), (data(),), strict=False)
    assert torch.equal(program.module()(data()), model(data()))


def test_p9_a_parameter_of_a_parameter(session):
    """Is another one over the same bytes, as ever; one of them may train."""

    def make():
        model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE))
        model[0].weight = nn.Parameter(model[0].weight)
        model[1].bias = nn.Parameter(model[1].bias, requires_grad=False)
        assert type(model[1].bias).__mro__[-1] is object and isinstance(model[1].bias, nn.Parameter)
        return model

    model = built(session, make)
    assert [param.requires_grad for param in model.parameters()] == [True, True, True, False]
    other = nn.Parameter(model[0].weight)
    assert (
        other.requires_grad and other.is_leaf and torch.equal(other, model[0].weight) and other is not model[0].weight
    )
    model[0].other = other
    with pytest.raises(
        gm.GeminiError,
        match="0.other and 0.weight are two tensors that share|0.weight and 0.other are two tensors that share",
    ):
        gm.prepare(model)
    gm.close()
    assert type(nn.Parameter(torch.ones(3))) is nn.Parameter


# ---- P12: strides, copies, forward()
class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, groups=2))
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.layers(x)


def image(model, step):
    images = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(step))
    return model(images.to(memory_format=torch.channels_last)).square().mean()


@pytest.mark.parametrize("optimizer", (sgd, lambda params: torch.optim.Adagrad(params, 0.01)))
def test_p12_channels_last_stays(session, optimizer):
    def run(model, optimizer):
        losses = train(model, optimizer, 3, image, lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
        image(model, 0).backward()
        return losses + [model.layers[0].weight.grad.clone()]

    for start in (
        lambda make: alike(session, make, run, optimizer, "256KiB"),
        lambda make: built(session, make, image),
    ):
        model = start(Convolutions)
        off_the_device()
        for layer in model.layers[0], model.layers[3]:
            assert layer.weight.is_contiguous(memory_format=torch.channels_last) and not layer.weight.is_contiguous()
            assert layer.weight.detach().clone().is_contiguous(memory_format=torch.channels_last)
        gm.close()


@pytest.mark.parametrize("kind", (torch.optim.AdamW, torch.optim.Adagrad))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_p12_channels_last_is_saved_and_loaded(session, tmp_path, kind, dtype):
    """Files are in the order of dimensions, as others read them."""
    safetensors = pytest.importorskip("safetensors.torch")

    def start():
        model = Convolutions().to(dtype)
        return gm.prepare(model, kind(model.parameters(), 1e-2))

    def loss_of(model, step):
        images = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(step)).to(dtype)
        return model(images.to(memory_format=torch.channels_last)).float().square().mean()

    session("512KiB")
    torch.manual_seed(0)
    model, optimizer = start()
    train(model, optimizer, 2, loss_of)
    gm.save(tmp_path / "checkpoint", model, optimizer)
    same_bits(safetensors.load_file(tmp_path / "checkpoint/model.safetensors"), dict(model.state_dict()))
    states = optimizer.state_dict()["state"]
    wanted = train(model, optimizer, 2, loss_of), values(model)
    gm.close()
    session("512KiB")
    model, optimizer = start()
    gm.load(tmp_path / "checkpoint", model, optimizer)
    for number, state in optimizer.state_dict()["state"].items():
        same_bits(
            {name: torch.as_tensor(value) for name, value in state.items()},
            {name: torch.as_tensor(value) for name, value in states[number].items()},
        )
    same_bits(train(model, optimizer, 2, loss_of), wanted[0])
    same_bits(values(model), wanted[1])


@pytest.mark.parametrize(
    "take",
    (
        lambda weight: pickle.loads(pickle.dumps(weight)),
        lambda weight: pickle.loads(pickle.dumps(weight.detach()[1:5])),
        lambda weight: pickle.loads(pickle.dumps(weight.detach()[2])),
        lambda weight: gm.session().records[0].place.read(),
    ),
    ids=("all", "part", "one", "place"),
)
@pytest.mark.parametrize("host", (True, False))
def test_p12_host_copies_of_channels_last(session, monkeypatch, take, host):
    """They have the same values and strides, and nothing comes to the device for them, unless the host has no room."""
    session()
    torch.manual_seed(0)
    weight = nn.Conv2d(8, 16, 3, bias=False).to(memory_format=torch.channels_last).weight.detach()
    layer = nn.Conv2d(8, 16, 3, bias=False)
    layer.weight = nn.Parameter(weight.clone())
    gm.prepare(layer)
    off_the_device()
    gm.stats_reset()
    if not host:

        def no_room(*args, **kwargs):
            raise gm.GeminiError("no room", "OOM_HOST")

        monkeypatch.setattr(Place, "host_pieces", no_room)
    copied, wanted = (
        take(layer.weight),
        next(part for part in (weight, weight[1:5], weight[2]) if part.shape == take(layer.weight).shape),
    )
    assert not wanted.is_contiguous() and copied.stride() == wanted.stride()
    same_bits([copied.detach()], [wanted])
    assert any(gm.stats()["moved_bytes"]["host to device"].values()) != host


def test_p12_deep_copies_within_init_are_in_the_session(session):
    def make():
        torch.manual_seed(3)
        first = nn.Sequential(Masked(), nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last))
        encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(SIZE, 4, SIZE, dropout=0.0, batch_first=True), 3, enable_nested_tensor=False
        )
        model = nn.ModuleList([first, copy.deepcopy(first), encoder])
        with torch.no_grad():
            model[1][0].part.add_(1)  # of the copy alone: torch's own copies of parameters share nothing
        return model

    def loss_of(model, step):
        out = model[2](data(step)[None])
        return (1e-3 * model[1][0](1e-2 * model[0][0](out)) + model[1][1].weight.sum()).square().mean()

    with session("1MiB", host_memory="64MiB"):
        model = make()
        params = dict(model.named_parameters())
        for name, param in params.items():
            assert getattr(param, "_gm_place", None) is not None, name
        sizes = sum(param.nbytes for param in params.values())
        assert (
            sizes <= bytes_of("param") <= sizes + len(params) * 1024 + CHUNK
        )  # with what aligns each, and the last chunk
    gm.close()
    built(session, make, loss_of, budget="1MiB")


def test_deep_copies_of_parameters_without_elements(session):
    """Also where others are in the session; their optimizers make states like them."""
    with session():
        model = nn.Linear(SIZE, SIZE)
        model.register_parameter("empty", nn.Parameter(torch.empty(0, 3)))
        other = copy.deepcopy(model)
        assert type(other.empty) is nn.Parameter and other.empty.shape == (0, 3)
        other, optimizer = gm.prepare(other, torch.optim.Adagrad(other.parameters(), 0.01))
    before = values(other)
    (other(data()).square().mean() + other.empty.sum()).backward()
    optimizer.step()
    assert not torch.equal(values(other)["weight"], before["weight"])


def test_p12_deep_copies_of_a_prepared_model_are_plain(session):
    session()
    model = gm.prepare(Masked())
    other = copy.deepcopy(model)
    assert type(other.weight) is nn.Parameter and type(other.all) is torch.Tensor
    same_bits(values(other), values(model))
    with torch.no_grad():
        other.part.fill_(9)
    assert (other.all[2:5, ::3] == 9).all()
    for tensor in other.weight, model.weight, model.all:  # torch's own copy of a parameter shares nothing, either
        assert not (tensor == 9).any()
    square(model, 0).backward()
    grad = copy.deepcopy(model.weight.grad.mul_(0.5))
    assert type(grad) is torch.Tensor and torch.equal(grad, model.weight.grad)


@pytest.mark.parametrize("call", ("forward", "both"))
def test_p12_forward_makes_iterations_and_a_plan(session, call):
    def run(model, optimizer):
        call_of = {"forward": lambda step: model.forward, "both": lambda step: model.forward if step % 2 else model}[
            call
        ]
        losses = train(model, optimizer, 6, lambda model, step: call_of(step)(data(step)).square().mean())
        model.eval()
        with torch.no_grad():
            losses.append(model.forward(data()))
        return losses

    model = alike(session, lambda: nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(4))), run, budget="256KiB")
    stats = gm.stats()
    assert stats["iterations"] == 7 and stats["planned_iterations"] >= 4
    plain = nn.Sequential(nn.Linear(SIZE, SIZE))
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight.zero_()
        assert torch.equal(other.forward(data()), other(data())) and not torch.equal(other(data()), model(data()))
    assert gm.stats()["iterations"] == 8
    again = pickle.loads(pickle.dumps(other))
    assert torch.equal(again.forward(data()), other(data()))


def test_p12_gradients_without_any_call_of_the_model_are_said(session):
    session()
    model = nn.Sequential(nn.Linear(SIZE, SIZE))
    model, optimizer = gm.prepare(model, sgd(model.parameters()))
    model[0](data()).sum().backward()
    for compiler in False, True:
        if compiler:  # another way to the same step
            importlib.import_module("torch._dynamo")
        with pytest.warns(UserWarning, match=r"no call of a prepared model.* no iteration.* plans? nothing") as said:
            optimizer.step()
        assert [warning.filename for warning in said] == [__file__]  # who calls step()


# ---- P12: budgets
@pytest.mark.parametrize(
    "settings, match",
    (
        (
            {"device_memory": "4KiB"},
            "device_memory is 4096 bytes, of which margin leaves 4096: want at least a chunk, which has 65536",
        ),
        (
            {"device_memory": "256KiB", "margin": "200KiB"},
            "device_memory is 262144 bytes, of which margin leaves 57344: want",
        ),
        (
            {"device_memory": "1MiB", "chunk_size": "2MiB"},
            "device_memory is 1048576 bytes, .* chunk, which has 2097152",
        ),
    ),
)
def test_p12_a_device_without_room_for_a_chunk_is_refused(settings, match):
    with pytest.raises(gm.GeminiError, match=match):
        gm.init(device="cpu", host_memory="1MiB", **settings)


def test_p12_a_budget_that_is_too_small_for_a_step_is_said_before_it(session, recwarn):
    """At the smallest one that is not warned of a step is planned, with a chunk less it is made without a plan, and if
    its parameter does not fit it fails."""
    size = 192  # 147456 bytes, in 3 chunks; the bias is in the last of them

    def start(chunks):
        gm.close()
        del recwarn.list[:]
        session(chunks * CHUNK)
        model = nn.Linear(size, size)
        model, optimizer = gm.prepare(model, torch.optim.AdamW(model.parameters()))
        return model, [str(one.message) for one in recwarn.list if "device_memory" in str(one.message)]

    def step(model):
        for _ in range(3):
            model(torch.ones(2, size)).sum().backward()
            model.zero_grad()

    model, said = start(6)
    assert not said
    step(model)
    assert not [one for one in recwarn.list if "no plan" in str(one.message)] and gm.stats()["planned_iterations"]
    model, said = start(5)
    assert said == [
        f"device_memory leaves {5 * CHUNK} bytes: a step that uses all of parameter weight at once, and makes its "
        f"gradient, needs {6 * CHUNK}, in chunks of {CHUNK}, and has no plan, which makes it slow"
    ]
    with pytest.warns(UserWarning, match="this step was made, but there is no plan"):
        step(model)
    assert not gm.stats()["planned_iterations"]
    model, said = start(2)
    assert said == [
        f"device_memory leaves {2 * CHUNK} bytes: a step that uses all of parameter weight at once needs {3 * CHUNK}, "
        f"in chunks of {CHUNK}, and will fail"
    ]
    with pytest.raises(gm.GeminiError, match="bytes of device memory"):
        step(model)


@pytest.mark.parametrize(
    "make, dtype, operands",
    [
        (lambda params: torch.optim.SGD(params, 0.1), torch.float32, 2),
        (lambda params: torch.optim.SGD(params, 0.1, momentum=0.9), torch.float32, 2),
        (lambda params: torch.optim.SGD(params, 0.1, momentum=0.9), torch.bfloat16, 4),
        (lambda params: torch.optim.RMSprop(params, momentum=0.5, centered=True), torch.float32, 2),
        (torch.optim.Adamax, torch.float32, 3),
        (torch.optim.Adamax, torch.bfloat16, 6),
    ],
)
def test_a_budget_that_is_too_small_for_an_own_step_of_torch_is_said_before_it(session, recwarn, make, dtype, operands):
    """operands: of the size of the parameter, which a function of the step uses at once."""
    size = {torch.float32: 256, torch.bfloat16: 512}[dtype]
    chunks = size * size * dtype.itemsize // CHUNK

    def start(room):
        gm.close()
        del recwarn.list[:]
        session(room * CHUNK)
        model = nn.Linear(size, size, bias=False).to(dtype)
        model, optimizer = gm.prepare(model, make(model.parameters()))
        return model, optimizer, [str(one.message) for one in recwarn.list if "may fail" in str(one.message)]

    def steps(model, optimizer):
        for _ in range(3):
            model(torch.ones(2, size, dtype=dtype)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer, said = start(operands * chunks)
    assert not said
    steps(model, optimizer)
    model, optimizer, said = start(operands * chunks - 1)
    name = type(optimizer.inner).__name__
    assert said == [
        f"device_memory leaves {(operands * chunks - 1) * CHUNK} bytes: a step that uses all of parameter weight at "
        f"once, and updates it by {name} together with gradient or states, needs {operands * chunks * CHUNK}, in "
        f"chunks of {CHUNK}, and may fail"
    ]
    with pytest.raises(gm.GeminiError, match="bytes of device memory"):
        steps(model, optimizer)
