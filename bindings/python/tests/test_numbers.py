"""Tensors without dimensions, where torch wants a number: it reads them without asking __torch_function__.

SPDX-License-Identifier: Apache-2.0
"""

import copy
import gc
import math
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import libgemini.torch as gm
from conftest import alike, off_the_device, overwrite_the_device, same_bits, sgd, values
from libgemini.torch.tensors import ManagedNumber, ManagedParameter

SIZE = 64
X = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(3))


def seeded(function):
    """A function that draws random numbers."""

    def call(z):
        torch.manual_seed(0)
        return function(z)

    return call


USES = {
    "full": lambda z: torch.full((2,), z),
    "full_like": lambda z: torch.full_like(X, z),
    "fill_": lambda z: X.clone().fill_(z),
    "alpha": lambda z: torch.add(X, X, alpha=z),
    "alpha of sub": lambda z: torch.sub(X, X, alpha=z),
    "rsub": lambda z: torch.rsub(X, 1, alpha=z),
    "arange": lambda z: torch.arange(z, 2, 0.1),
    "linspace": lambda z: torch.linspace(z, 2, 4),
    "logspace": lambda z: torch.logspace(z, 2, 4),
    "clamp": lambda z: torch.clamp(X, min=z, max=5.0),
    "clamp_": lambda z: X.clone().clamp_(max=z),
    "leaky_relu": lambda z: F.leaky_relu(X, z),
    "elu": lambda z: F.elu(X, z),
    "celu": lambda z: F.celu(X, z),
    "softplus": lambda z: F.softplus(X, z),
    "threshold": lambda z: F.threshold(X, z, z),
    "hardtanh": lambda z: F.hardtanh(X, -1, z),
    "dropout": seeded(lambda z: F.dropout(X, z)),
    "uniform_": seeded(lambda z: X.clone().uniform_(z, 1.5)),
    "normal_": seeded(lambda z: X.clone().normal_(z, z)),
    "lerp": lambda z: X.lerp(X * 2, z),
    "addcmul": lambda z: torch.addcmul(X, X, X, value=z),
    "addcdiv": lambda z: torch.addcdiv(X, X, X + 9, value=z),
    "addmm": lambda z: torch.addmm(X, X, X, beta=z, alpha=z),
    "baddbmm": lambda z: torch.baddbmm(X[None], X[None], X[None], alpha=z),
    "masked_fill": lambda z: X.masked_fill(X > 0, z),
    "setitem": lambda z: X.clone().__setitem__((0, 0), z),
    "pow": lambda z: torch.pow(2.0, z),
    "nan_to_num": lambda z: torch.nan_to_num(X, z),
    "pad": lambda z: F.pad(X, (1, 1), value=z),
    "norm": lambda z: torch.norm(X, z),
    "dist": lambda z: torch.dist(X, X * 2, z),
    "quantile": lambda z: torch.quantile(X, z),
    "layer_norm": lambda z: F.layer_norm(X, (SIZE,), eps=z),
    "batch_norm": lambda z: F.batch_norm(X, torch.zeros(SIZE), torch.ones(SIZE), momentum=z, eps=z),
    "tensor": lambda z: torch.tensor([[z, 1], [z, z]]),
    "new_tensor": lambda z: X.new_tensor([z, z]),
    "new_full": lambda z: X.new_full((2,), z),
    "FloatTensor": lambda z: torch.FloatTensor([z, z]),
    "scalar_tensor": lambda z: torch.scalar_tensor(z),
    "where": lambda z: torch.where(X > 0, z, z),
    "huber_loss": lambda z: F.huber_loss(X, X * 3, delta=z),
    "label_smoothing": lambda z: F.cross_entropy(X, torch.zeros(SIZE, dtype=torch.long), label_smoothing=z),
    "foreach": lambda z: torch._foreach_add([X, X], z),
    "foreach list": lambda z: torch._foreach_add([X, X], [z, z]),
    "attention": lambda z: F.scaled_dot_product_attention(X[None], X[None], X[None], scale=z),
    "format": lambda z: f"{z:.5f}",
    "item": lambda z: z.item(),
    "tolist": lambda z: z.tolist() + z.detach().tolist() + z.data.view(1).tolist()[0],
    "float": lambda z: float(z) + math.exp(z) + complex(z).real,
    "numpy": lambda z: float(z.detach().numpy()),
    "renorm": lambda z: torch.renorm(X, 2, 0, z),
    "isclose": lambda z: torch.isclose(X, X + 0.1, atol=z),
    "exponential_": seeded(lambda z: X.clone().exponential_(z)),
    "trunc_normal_": seeded(lambda z: nn.init.trunc_normal_(X.clone(), z, 1.0)),
    "gumbel_softmax": seeded(lambda z: F.gumbel_softmax(X, tau=z)),
    "fill_diagonal_": lambda z: X.clone().fill_diagonal_(z),
    "mul": lambda z: X * z,
    "index": lambda z: X[(z * 10).long()],
    "without functions": lambda z: without_functions(z),
}


def without_functions(z):
    with torch._C.DisableTorchFunctionSubclass():
        return [z + 1, X * z, z.detach() + 1, z.view(1) * 2]


class Slope(nn.Module):
    """A frozen parameter without dimensions, between others."""

    def __init__(self, requires_grad=False):
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.slope = nn.Parameter(torch.tensor(0.3), requires_grad=requires_grad)
        self.second = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        return self.second(F.leaky_relu(self.first(x), self.slope)).square().mean()


def frozen(session):
    model = Slope()
    session("768KiB")
    model, _ = gm.prepare(model, sgd(model.parameters()))
    return model.slope


def frozen_later(session):
    model = Slope(requires_grad=True)
    session("768KiB")
    model, _ = gm.prepare(model, sgd(model.parameters()))
    model.requires_grad_(False)
    return model.slope


def frozen_by_setting(session):
    model = Slope(requires_grad=True)
    session("768KiB")
    model, _ = gm.prepare(model, sgd(model.parameters()))
    model.slope.requires_grad = False
    return model.slope


def built_in_the_session(session):
    with session("768KiB"):
        return Slope().slope


def prepared_linear(session, optimizer=sgd):
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE))
    session("1MiB")
    return gm.prepare(model, optimizer(model.parameters()))


def part_of_a_parameter(session):
    model, _ = prepared_linear(session)
    return model[0].weight.detach()[3, 3].fill_(0.3)


def part_of_data(session):
    model, _ = prepared_linear(session)
    model[0].weight.data[3, 3] = 0.3
    return model[0].weight.data[3, 3]


def part_of_a_list(session):
    model, _ = prepared_linear(session)
    model[0].weight.data.fill_(0.3)
    return model[0].weight.detach()[3].unbind()[3]


def part_that_was_detached(session):
    model, _ = prepared_linear(session)
    model[0].weight.data.fill_(0.3)
    with torch.no_grad():
        return model[0].weight[3, 3].detach()


def part_that_was_squeezed(session):
    model, _ = prepared_linear(session)
    return model[0].weight.data[:1, :1].squeeze_().fill_(0.3)


def part_put_over(session):
    model, _ = prepared_linear(session)
    model[0].weight.data.fill_(0.3)
    out = torch.tensor(7.0)
    out.data = model[0].weight.data[3, 3]
    return out


def made_in_a_unit(session):
    kept = []

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.full((SIZE, SIZE), 0.3))

        def forward(self, x):
            kept.append(self.weight.detach()[3, 3])
            return x @ self.weight

    model = nn.Sequential(Block())
    session("1MiB")
    model, _ = gm.prepare(model, sgd(model.parameters()))
    gm.unit(model[0])
    model(X)
    return kept[0]


def part_of_a_gradient(session):
    model, _ = prepared_linear(session)
    model(X).sum().backward()
    return model[0].weight.grad.fill_(0.3)[3, 3]


def gradient_without_dimensions(session):
    model = Slope(requires_grad=True)
    session("768KiB")
    model, _ = gm.prepare(model, sgd(model.parameters()))
    (model.slope * 0.3).backward()
    return model.slope.grad


def part_of_a_state(session):
    model, optimizer = prepared_linear(session, torch.optim.AdamW)
    model(X).sum().backward()
    optimizer.step()
    return optimizer.state[model[0].weight]["exp_avg"].fill_(0.3)[3, 3]


def state_of_sgd(session):
    model, optimizer = prepared_linear(session)
    model(X).sum().backward()
    optimizer.step()
    return optimizer.state[model[0].weight]["momentum_buffer"].fill_(0.3)[3, 3]


def state_without_dimensions(session):
    model = Slope(requires_grad=True)
    session("768KiB")
    model, optimizer = gm.prepare(model, torch.optim.AdamW(model.parameters()))
    (model.slope * 2).backward()
    optimizer.step()
    return optimizer.state[model.slope]["exp_avg"].fill_(0.3)


def buffer_over_a_parameter(session):
    model = nn.Linear(SIZE, SIZE)
    with torch.no_grad():
        model.weight.fill_(0.3)
    model.register_buffer("part", model.weight.detach()[3, 3])
    session("768KiB")
    return gm.prepare(model).part


def through_a_parameter(session):
    model, _ = prepared_linear(session)
    model[0].weight.data.fill_(0.3)
    return nn.Parameter(model[0].weight.detach()[3, 3], requires_grad=False)


SOURCES = [
    frozen,
    frozen_later,
    frozen_by_setting,
    built_in_the_session,
    part_of_a_parameter,
    part_of_data,
    part_of_a_list,
    part_that_was_detached,
    part_that_was_squeezed,
    part_put_over,
    made_in_a_unit,
    part_of_a_gradient,
    gradient_without_dimensions,
    part_of_a_state,
    state_of_sgd,
    state_without_dimensions,
    buffer_over_a_parameter,
    through_a_parameter,
]


def flat(value):
    if isinstance(value, torch.Tensor):
        return [value.detach().clone()]
    if isinstance(value, (list, tuple)):
        return [one for part in value for one in flat(part)]
    return [torch.tensor(float(value), dtype=torch.float64)] if value is not None else [torch.zeros(1)]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
def test_a_number_is_read_where_it_is(session, source):
    """Without a guard this is an access of memory that is not there, or an old number."""
    number, plain = source(session), torch.tensor(0.3)
    assert isinstance(number, ManagedNumber) and not number.requires_grad
    for name, use in USES.items():
        overwrite_the_device()
        ours, theirs = use(number), use(plain)
        assert all(map(torch.equal, flat(ours), flat(theirs))), name


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
def test_a_number_shares_its_bytes_with_what_it_is_of(session, source):
    number = source(session)
    other = number.detach()
    assert isinstance(other, ManagedNumber)
    for write in (
        lambda one: one.fill_(2),
        lambda one: one.add_(1.5),
        lambda one: one.copy_(torch.tensor(5.0)),
        lambda one: torch.mul(torch.tensor(2.0), 3.0, out=one),
        lambda one: one.data.zero_(),
        lambda one: one.__setitem__((), 8.0),
    ):
        for one, another in ((number, other), (other, number)):
            plain = torch.tensor(float(one))
            overwrite_the_device()
            with torch.no_grad():
                write(one)
                write(plain)
            overwrite_the_device()
            assert torch.full((1,), another).item() == another.item() == plain.item()
    version = number._version
    other.add_(1)
    assert number._version > version


def test_a_part_written_through_torch_alone_counts_as_written(session):
    """Without __torch_function__, as some functions of torch call each other: 16-bit parameters have fp32 copies."""
    model = nn.Linear(SIZE, SIZE).bfloat16()
    session("1MiB")
    model, optimizer = gm.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0))
    model(X.bfloat16()).sum().backward()
    optimizer.step()
    part = model.weight.detach()[3, 3]
    overwrite_the_device()
    with torch._C.DisableTorchFunctionSubclass():
        part.fill_(0.5)
    overwrite_the_device()
    assert model.weight[3, 3].item() == 0.5
    model(X.bfloat16()).sum().backward()
    optimizer.step()
    assert model.weight[3, 3].item() == 0.5


def test_training_with_a_frozen_number(session):
    def run(model, optimizer):
        losses = []
        for step in range(6):
            if step == 2:
                with torch.no_grad():
                    model.slope.fill_(0.7)
            if step == 3:
                model.load_state_dict({**model.state_dict(), "slope": torch.tensor(0.1)})
            loss = model(X)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())
        return losses

    model = alike(session, Slope, run)
    assert isinstance(model.slope, ManagedNumber) and isinstance(model.slope, ManagedParameter)


@pytest.mark.parametrize("optimizer", [sgd, lambda params: torch.optim.SGD(params, 0.05, momentum=0.9)])
def test_a_number_is_frozen_and_trained_in_turns(session, optimizer):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(SIZE, SIZE)
            self.scale = nn.Parameter(torch.tensor(1.5))

        def forward(self, x):
            return (self.layer(x) * self.scale.exp()).square().mean()

    def run(model, optimizer):
        found = []
        loss = None
        for step in range(12):
            if step % 3 == 0:  # the graph of the step before is alive
                model.scale.requires_grad_(step % 6 != 3)
            loss = model(X)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            found += [loss.detach().clone(), model.scale.detach().clone()]
            if step % 6 == 3:
                found.append(torch.full((2,), model.scale))
            optimizer.zero_grad()
        return found

    alike(session, Scaled, run, optimizer=optimizer)


class Scaled(nn.Module):
    """Layers whose outputs a number multiplies."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) * self.scale
        return x.square().mean()


@pytest.mark.parametrize("called", [False, True])
def test_a_graph_from_before_a_freezing_that_was_taken_back_trains_the_number(session, called):
    """Several times: at the first one the parameter gets another C++ tensor."""

    def run(model, optimizer):
        found = []
        for _ in range(3):
            loss = model(X)
            model.requires_grad_(False)
            if called:
                with torch.no_grad():
                    found.append(model(X))
            model.requires_grad_(True)
            loss.backward()
            found.append(model.scale.grad.clone())
            model(X).backward()
            found.append(model.scale.grad.clone())
            optimizer.step()
            found.append(model.scale.detach().clone())
            optimizer.zero_grad()
        loss = model(X)
        model.requires_grad_(False)
        loss.backward()
        return [*found, torch.tensor(model.scale.grad is None)]

    alike(session, Scaled, run)


def test_a_number_that_was_frozen_and_trained_is_freed_with_its_model(session):
    session()
    model = Scaled()
    model, optimizer = gm.prepare(model, sgd(model.parameters()))
    model(X).backward()
    model.scale.requires_grad_(False)
    model.scale.requires_grad_(True)
    model(X).backward()
    record = weakref.ref(model.scale._gm_record)
    gm.close(force=True)
    del model, optimizer
    gc.collect()
    assert record() is None


def test_a_number_that_was_frozen_gets_gradients_before_the_next_pass(session):
    def run(model, optimizer):
        found = []
        for _ in range(2):
            model(X).backward()
            model.scale.requires_grad_(False)
            model.scale.requires_grad_(True)
            (model.scale * 2).backward()
            found.append(model.scale.grad.clone())
            optimizer.step()
            found.append(model.scale.detach().clone())
            optimizer.zero_grad()
        return found

    alike(session, Scaled, run)


def test_a_graph_from_before_the_freezing_goes_backward(session):
    def run(model, optimizer):
        loss = (model.first(X) * model.slope).square().mean()
        model.slope.requires_grad_(False)
        loss.backward()
        assert model.slope.grad is None
        found = [model.first.weight.grad.detach().clone()]
        model.slope.requires_grad_(True)
        (model.first(X) * model.slope).square().mean().backward()
        return [*found, model.first.weight.grad.detach().clone(), model.slope.grad.detach().clone()]

    alike(session, lambda: Slope(requires_grad=True), run)


def test_a_frozen_number_is_saved_copied_and_loaded(session, tmp_path):
    slope = frozen(session)
    model = gm.session().model.module
    gm.save(tmp_path / "checkpoint", model)
    before = values(model)
    with torch.no_grad():
        slope.fill_(9.0)
    gm.load(tmp_path / "checkpoint", model)
    off_the_device()
    same_bits(values(model), before)
    off_the_device()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        same_bits(values(other), before)
        assert type(other.slope) is nn.Parameter and not other.slope.requires_grad
    torch.save(model.state_dict(), tmp_path / "state.pt")
    same_bits(torch.load(tmp_path / "state.pt"), before)
    assert "0.3" in repr(slope)
    assert copy.copy(slope).data_ptr() == slope.data_ptr()
    gm.prepare(model)
    assert isinstance(slope, ManagedNumber)


def test_a_frozen_number_on_the_meta_device_is_loaded(session, tmp_path):
    frozen(session)
    gm.save(tmp_path / "checkpoint", gm.session().model.module)
    with torch.device("meta"):
        model = Slope()
    gm.load_weights(model, tmp_path / "checkpoint")
    model = gm.prepare(model)
    overwrite_the_device()
    assert torch.full((1,), model.slope).item() == pytest.approx(0.3)


def test_a_number_of_a_unit(session):
    """Within a unit it is a plain tensor, whose bytes are there."""

    def run(model, optimizer):
        if isinstance(optimizer, torch.optim.SGD):
            return steps(model, optimizer)
        gm.unit(model.block)
        return steps(model, optimizer)

    def steps(model, optimizer):
        losses = []
        for _ in range(4):
            loss = model(X)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())
            with torch.no_grad():
                model.block.slope.mul_(0.9)
        model.block.slope.requires_grad_(True)
        assert model.block.slope.sum().requires_grad
        model.block.slope.requires_grad_(False)
        model(X).backward()
        return losses

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Slope()

        def forward(self, x):
            return self.block(x)

    alike(session, Outer, run)


def test_a_compiled_block_has_a_number(session):
    def make():
        model = nn.Sequential(Slope())
        model[0].compile(backend="eager")
        return model

    def run(model, optimizer):
        losses = []
        for _ in range(3):
            loss = model(X)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())
        return losses

    alike(session, make, run)


def test_freezing_a_number_that_has_hooks_is_refused(session):
    model = Slope(requires_grad=True)
    session("768KiB")
    model, _ = gm.prepare(model, sgd(model.parameters()))
    handle = model.slope.register_hook(lambda grad: grad)
    with pytest.raises(gm.GeminiError, match="slope: it has no dimensions, and was frozen while it has hooks"):
        model.slope.requires_grad_(False)
    assert model.slope.requires_grad
    handle.remove()
    model.slope.requires_grad_(False)
    assert isinstance(model.slope, ManagedNumber)


def test_a_number_in_inference_mode(session):
    model, _ = prepared_linear(session)
    want = model[0].weight[3, 3].item()
    with torch.inference_mode():
        part = model[0].weight.detach()[3, 3]
        overwrite_the_device()
        assert torch.full((1,), part).item() == want
    gm.close(force=True)
    session("1MiB")
    with torch.inference_mode():
        model = gm.prepare(nn.Sequential(Slope()))
        overwrite_the_device()
        assert torch.full((1,), model[0].slope).item() == pytest.approx(0.3)
        model(X)


def test_a_number_after_close(session):
    slope = frozen(session)
    gm.close()
    for use in (lambda: torch.full((1,), slope), lambda: slope.item(), lambda: X * slope):
        with pytest.raises(gm.GeminiError, match="the session was closed"):
            use()


def test_transforms_take_copies_of_numbers(session):
    slope = frozen(session)
    overwrite_the_device()
    found = torch.func.vmap(lambda x: x * slope)(X)
    assert torch.equal(found, X * 0.3)
    found = torch.func.grad(lambda x: F.leaky_relu(x, slope.item()).sum() * slope)(X)
    assert torch.equal(found, torch.where(X > 0, 1.0, 0.3) * 0.3)
