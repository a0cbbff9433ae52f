"""Whatever is done wrong gives a Python error that says what and what to do; the session goes on or closes cleanly.

SPDX-License-Identifier: Apache-2.0
"""

import gc
import subprocess
import sys
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import libgemini.torch as gm
from conftest import off_the_device, overwrite_the_device, sgd, values

SIZE = 96


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(3)))


def works(model, optimizer=None):
    """The session goes on."""
    model(torch.ones(2, SIZE)).sum().backward()
    if optimizer:
        before = values(model)
        optimizer.step()
        assert any(not torch.equal(param, before[name]) for name, param in model.named_parameters())
    model.zero_grad()


# ---- sessions
def test_no_session():
    for call in (gm.stats, gm.explain, gm.session, lambda: gm.prepare(mlp())):
        with pytest.raises(gm.GeminiError, match="call libgemini.torch.init"):
            call()
    gm.close()  # nothing to close


def test_second_session(session):
    session()
    with pytest.raises(gm.GeminiError, match="a session already: close"):
        gm.init(device="cpu", device_memory="1MiB")
    works(gm.prepare(mlp()))


@pytest.mark.parametrize(
    "wrong, match",
    (
        ({"device_memory": "much"}, "device_memory is 'much'"),
        ({"device_memory": -1}, "device_memory is -1"),
        ({"placement": "gpu"}, "placement is 'gpu': want one of auto, cuda, cpu, static"),
        ({"chunk_size": 100}, "chunk_bytes"),
        ({"host_memory": "1GiX"}, "host_memory is '1GiX'"),
    ),
)
def test_bad_settings(wrong, match):
    with pytest.raises((ValueError, gm.GeminiError), match=match):
        gm.init(**{"device": "cpu", "device_memory": "1MiB", "host_memory": "64MiB", **wrong})
    with pytest.raises(gm.GeminiError, match="there is no session"):
        gm.session()


def test_closed_session():
    gm.init(device="cpu", device_memory="1MiB", host_memory="64MiB", chunk_size="64KiB")
    model = gm.prepare(mlp())
    weight = model[0].weight
    gm.close()
    for use in (
        lambda: model(torch.ones(1, SIZE)),
        lambda: weight.sum(),
        lambda: weight[0] + 1,
        lambda: print(weight),
        lambda: torch.nn.init.zeros_(weight),
    ):
        with pytest.raises(gm.GeminiError, match="session.*closed"):
            use()
    assert weight.shape == (SIZE, SIZE)
    gm.init(device="cpu", device_memory="1MiB", host_memory="64MiB", chunk_size="64KiB")
    with pytest.raises(gm.GeminiError, match="0.weight belongs to a session that was closed"):
        gm.prepare(model)
    works(gm.prepare(mlp()))
    gm.close()


def test_a_model_ends_after_its_session(session):
    """It is a cycle, of which Python's garbage collector has to see all."""
    session()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model, optimizer = gm.prepare(model, torch.optim.AdamW(model.parameters()))
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    gone = weakref.ref(model), weakref.ref(model[0].weight), weakref.ref(optimizer)
    del model, optimizer
    gm.close()
    gc.collect()
    assert not any(one() is not None for one in gone)


def test_close_in_the_middle(session):
    """Of a step, of a backward pass: what is open is ended."""
    session("512KiB")
    model, optimizer = gm.prepare(*(lambda model: (model, sgd(model.parameters())))(mlp()))
    loss = model(torch.ones(2, SIZE)).sum()
    gm.close()
    with pytest.raises(gm.GeminiError, match="session.*closed"):
        loss.backward()
    session("512KiB")
    model = gm.prepare(mlp())

    def stop(*_):
        raise KeyError("stop")

    model[0].register_full_backward_hook(stop)
    with pytest.raises(KeyError):
        model(torch.ones(2, SIZE, requires_grad=True)).sum().backward()
    gm.close()


def test_exit_without_close():
    """A process that ends with a session open, and tensors in it alive, ends as any other."""
    code = (
        "import torch, libgemini.torch as gm\n"
        "gm.init(device='cpu', device_memory='1MiB', host_memory='64MiB', strict=True)\n"
        "model = torch.nn.Linear(9, 9); model, optimizer = gm.prepare(model, torch.optim.AdamW(model.parameters()))\n"
        "loss = model(torch.ones(9)).sum(); loss.backward(); optimizer.step(); loss = model(torch.ones(9)).sum()\n"
        "grad = model.weight.grad; print('done')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_an_optimizer_after_close(session):
    for kind in (torch.optim.AdamW, sgd):
        session("512KiB")
        model = mlp()
        model, optimizer = gm.prepare(model, kind(model.parameters()))
        works(model, optimizer)
        state = optimizer.state_dict()
        states = optimizer.state[model[0].weight]
        gm.close()
        for use in (
            optimizer.state_dict,
            optimizer.step,
            lambda optimizer=optimizer, state=state: optimizer.load_state_dict(state),
            lambda states=states: [one.sum() for one in states.values() if one is not None and one.dim()],
        ):
            with pytest.raises(gm.GeminiError, match="the session was closed"):
                use()
        with pytest.raises(gm.GeminiError, match="the session was closed"):
            model[0].weight._gm_place.read()


def converted(model, how):
    """half() under one of torch's settings of how a module's parameters are replaced."""
    change = getattr(torch.__future__, f"set_{how}")
    change(True)
    try:
        model.half()
    finally:
        change(False)


# ---- parameters
@pytest.mark.parametrize(
    "move",
    (
        lambda model: model.half(),
        lambda model: model.to(torch.bfloat16),
        lambda model: model.to("meta"),
        lambda model: model.to_empty(device="meta"),
        lambda model: model.to_empty(device="cpu"),
        lambda model: converted(model, "overwrite_module_params_on_conversion"),
        lambda model: converted(model, "swap_module_params_on_conversion"),
        lambda model: setattr(model[0].weight, "data", torch.zeros(SIZE, SIZE)),
        lambda model: model[0].weight.requires_grad_(False).set_(torch.ones(SIZE)),
        lambda model: nn.utils.vector_to_parameters(torch.zeros(3 * SIZE * (SIZE + 1)), model.parameters()),
    ),
)
def test_moved_by_data(session, move):
    session()
    model, optimizer = gm.prepare(*(lambda model: (model, sgd(model.parameters())))(mlp()))
    before = values(model)
    with pytest.raises(gm.GeminiError, match=r"parameter 0.weight would be moved or replaced .* do that before"):
        move(model)
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())
    works(model, optimizer)


@pytest.mark.parametrize("name", ("resize_", "share_memory_"))
def test_other_memory(session, name):
    session()
    model = gm.prepare(mlp())
    with pytest.raises(gm.GeminiError, match=rf"0.weight: {name}\(\) would give it other memory"), torch.no_grad():
        getattr(model[0].weight, name)(*([4] if name == "resize_" else []))
    works(model)


@pytest.mark.parametrize(
    "change",
    (
        lambda weight: torch.ops.aten.resize_(weight, (4, 4)),
        lambda weight: torch.resize_as_(weight, torch.zeros(4, 4)),
        lambda weight: torch.ops.aten.set_(weight, torch.zeros(SIZE, SIZE)),
    ),
)
def test_other_memory_by_an_operator(session, change):
    session()
    model = gm.prepare(mlp())
    with pytest.raises(gm.GeminiError, match=r"0.weight: .*\(\) would give it other memory"), torch.no_grad():
        change(model[0].weight)
    assert torch.zeros(3).resize_as_(model[0].weight).shape == (SIZE, SIZE)
    with torch.no_grad():
        bytes_of = torch.ops.aten.set_(torch.zeros(3), model[0].weight)  # managed now, as by the method
    assert torch.equal(bytes_of.clone(), model[0].weight)
    works(model)


LAYOUTS = {
    "t_": (),
    "transpose_": (0, 1),
    "swapaxes_": (0, 1),
    "swapdims_": (0, 1),
    "squeeze_": (),
    "unsqueeze_": (0,),
    "as_strided_": ((SIZE, SIZE), (1, SIZE)),
}


@pytest.mark.parametrize("owner", (torch.Tensor, torch.ops.aten))
@pytest.mark.parametrize("name", LAYOUTS)
def test_another_layout(session, name, owner):
    """Updates and checkpoints pair the elements of a parameter, its gradient and its states by their layout."""
    session()
    model = mlp()
    model, optimizer = gm.prepare(model, torch.optim.AdamW(model.parameters(), 0.1))
    works(model, optimizer)
    model(torch.ones(2, SIZE)).sum().backward()
    weight = model[0].weight
    before = weight.detach().clone()
    for what in (weight, weight.grad, optimizer.state[weight]["exp_avg"]):
        with pytest.raises(gm.GeminiError, match=rf"0.weight.*: {name}\(\) would change the layout"), torch.no_grad():
            getattr(owner, name)(what, *LAYOUTS[name])
    getattr(owner, name)(weight.data, *LAYOUTS[name])  # of a view of its own
    assert torch.equal(weight, before) and weight.stride() == (SIZE, 1)
    works(model, optimizer)


def test_moved_behind_our_back(session):
    session()
    model = gm.prepare(mlp())
    weight = model[1].weight
    with torch.no_grad():
        torch._C.TensorBase.set_(weight, torch.zeros(SIZE, SIZE))
    for use in (lambda: model(torch.ones(1, SIZE)), lambda: weight.sum()):
        with pytest.raises(gm.GeminiError, match="1.weight was moved behind libgemini's back"):
            use()
    with torch.no_grad():
        torch._C.TensorBase.set_(weight, weight._gm_place.tensor)
    works(model)


def test_replaced(session):
    session()
    model = gm.prepare(mlp())
    weight = model[1].weight
    model.load_state_dict({name: value.detach().clone() for name, value in model.state_dict().items()}, assign=True)
    with pytest.raises(gm.GeminiError, match=r"parameter 0.weight was replaced .*assign=True.* copy into it instead"):
        model(torch.ones(1, SIZE))
    gm.prepare(model)
    works(model)
    assert model[1].weight is not weight


def test_came_later(session):
    session()
    model = gm.prepare(mlp())
    model.append(nn.Linear(SIZE, SIZE))
    with pytest.raises(
        gm.GeminiError, match=r"parameter 3.weight was added after .*prepare\(\): call prepare\(\) again"
    ):
        model(torch.ones(1, SIZE))
    gm.prepare(model)
    works(model)


def test_what_cannot_be_a_parameter(session):
    session()
    for model, match in (
        (nn.Linear(4, 4, dtype=torch.float64), "parameter weight is of torch.float64: want"),
        (nn.Linear(4, 4, dtype=torch.complex64), "parameter weight is of torch.complex64"),
        (nn.Linear(4, 4, device="meta"), "parameter weight is on the meta device: load it"),
    ):
        with pytest.raises(gm.GeminiError, match=match):
            gm.prepare(model)
    model = mlp()
    model[1].weight = nn.Parameter(model[0].weight.data)
    with pytest.raises(gm.GeminiError, match="parameters 0.weight and 1.weight are two tensors that share their bytes"):
        gm.prepare(model)
    works(gm.prepare(mlp()))


def test_parameters_leave_as_copies(session):
    """What hands out a pointer, or pickles, gives bytes that stay."""
    session()
    model = gm.prepare(mlp())
    weight = model[0].weight.detach()
    taken = weight.numpy(), torch.from_dlpack(weight), torch.tensor(weight.tolist())
    assert f"{weight[0, 0]:.3f}" == f"{taken[2][0, 0].item():.3f}"
    off_the_device()
    for one in taken:
        assert torch.equal(torch.as_tensor(one), model[0].weight)


# ---- gradients
def test_gradient_kept_too_long(session):
    session()
    model = gm.prepare(mlp())
    model(torch.ones(1, SIZE)).sum().backward()
    kept, part = model[0].weight.grad, model[0].weight.grad[2:]
    model.zero_grad()
    for grad in (kept, part):
        with pytest.raises(gm.GeminiError, match=r"0.weight.grad: this gradient was cleared .* clone\(\)"):
            grad.sum()
    works(model)


def test_gradient_of_another_shape(session):
    session()
    model = gm.prepare(mlp())
    works(model)
    for wrong in (torch.ones(SIZE), torch.ones(SIZE, SIZE, dtype=torch.float64)):
        with pytest.raises(gm.GeminiError, match=r"0.weight.grad is set to a tensor of \(96.*want \(96, 96\), torch"):
            model[0].weight.grad = wrong
    assert model[0].weight.grad is None
    works(model)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch makes gradients of one type only")
@pytest.mark.parametrize("when", ("before", "after"))
def test_gradient_of_another_type(session, when):
    session()
    model = mlp().bfloat16()
    if when == "before":
        model[0].weight.grad_dtype = torch.float32
    model = gm.prepare(model)
    if when == "after":
        model[0].weight.grad_dtype = torch.float32
    with pytest.raises(gm.GeminiError, match="0.weight: its gradient is torch.float32 and itself torch.bfloat16"):
        model(torch.ones(2, SIZE, dtype=torch.bfloat16)).float().sum().backward()
    assert model[0].weight.grad is None
    model[0].weight.grad_dtype = torch.bfloat16
    model(torch.ones(2, SIZE, dtype=torch.bfloat16)).float().sum().backward()
    assert model[0].weight.grad.dtype == torch.bfloat16


def test_second_derivatives(session):
    session()
    model = gm.prepare(mlp())
    x = torch.ones(2, SIZE, requires_grad=True)
    with pytest.raises(gm.GeminiError, match=r"2.weight.*create_graph=True.*not supported"):
        torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with pytest.raises(gm.GeminiError, match=r"0.weight:model: .*create_graph=True"):  # all that fits is one unit
        model(x).square().sum().backward(create_graph=True)
    works(model)


def test_functional_transforms(session):
    session()
    model = gm.prepare(mlp())
    params = dict(model.named_parameters())
    for transform in (torch.func.grad, lambda f: torch.func.vmap(f, ({name: 0 for name in params},))):
        off_the_device()
        with pytest.raises((gm.GeminiError, RuntimeError), match="0.weight|0.bias"):
            transform(lambda params: torch.func.functional_call(model, params, torch.ones(1, SIZE)).sum())(params)
        with pytest.raises((gm.GeminiError, RuntimeError), match="0.weight"):
            torch.func.grad(lambda weight: (weight * 2).sum())(params["0.weight"])
    works(model)


# ---- optimizers
@pytest.mark.parametrize(
    "make, match",
    (
        (lambda model: sgd(mlp().parameters()), r"parameter 0 of the optimizer's group 0, of shape \(96, 96\), is not"),
        (
            lambda model: sgd(
                [{"params": model[0].parameters()}, {"params": [model[1].weight, nn.Parameter(torch.ones(3))]}]
            ),
            r"parameter 1 of the optimizer's group 1, of shape \(3,\)",
        ),
        (lambda model: torch.optim.LBFGS(model.parameters()), "the optimizer is a LBFGS: want one that updates each"),
        (lambda model: torch.optim.SparseAdam(list(model.parameters())), "the optimizer is a SparseAdam"),
    ),
)
def test_wrong_optimizers(session, make, match):
    session()
    model = mlp()
    with pytest.raises(gm.GeminiError, match=match):
        gm.prepare(model, make(model))
    works(*gm.prepare(model, sgd(model.parameters())))


def test_optimizer_of_no_kind(session):
    session()
    with pytest.raises(TypeError, match="the optimizer is a str: want a torch.optim.Optimizer"):
        gm.prepare(mlp(), "adam")


def test_optimizer_twice(session):
    session()
    model, optimizer = gm.prepare(*(lambda model: (model, sgd(model.parameters())))(mlp()))
    with pytest.raises(gm.GeminiError, match="this optimizer was prepared before"):
        gm.prepare(model, optimizer)
    works(model, optimizer)


class Twice(nn.Parameter):
    """A parameter that nn.Linear sees doubled."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if func is nn.functional.linear:
                args = [2 * arg if isinstance(arg, cls) else arg for arg in args]
            return func(*args, **(kwargs or {}))


def test_parameters_of_another_class(session):
    """A trainable one would lose its class, and with it what it does; a frozen one stays with torch."""
    session()
    plain = mlp()
    plain[1].weight = Twice(plain[1].weight.detach())
    with pytest.raises(gm.GeminiError, match="parameter 1.weight is a Twice, which would lose its class"):
        gm.prepare(plain)
    plain[1].weight.requires_grad_(False)
    expected = plain(torch.ones(2, SIZE)).detach()
    model = gm.prepare(plain)
    assert type(model[1].weight) is Twice
    assert torch.equal(model(torch.ones(2, SIZE)), expected)
    works(model, None)


def test_parameters_without_a_shape(session):
    session()
    model = nn.Sequential(nn.LazyLinear(SIZE))
    with pytest.raises(gm.GeminiError, match="parameter 0.weight has no shape yet: call the model once before"):
        gm.prepare(model)
    model(torch.ones(2, SIZE))
    works(gm.prepare(model))


def test_optimizer_that_made_steps(session):
    session()
    model = mlp()
    optimizer = sgd(model.parameters())
    works(model, optimizer)
    with pytest.raises(gm.GeminiError, match="has made steps before: prepare it first, then load its state"):
        gm.prepare(model, optimizer)


def test_group_of_strangers(session):
    session()
    model, optimizer = gm.prepare(*(lambda model: (model, sgd(model.parameters())))(mlp()))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with pytest.raises(gm.GeminiError, match=r"parameter 0 of the optimizer's group 1, of shape \(3,\)"):
        works(model, optimizer)
    optimizer.param_groups.pop()
    works(model, optimizer)


# ---- budgets
def test_device_too_small(session):
    """Which operator, how many bytes; what is smaller goes on."""
    session("128KiB")  # two chunks; a weight of the large layer alone has four
    model = gm.prepare(nn.ModuleDict({"small": nn.Linear(64, 64), "large": nn.Linear(256, 256)}))
    for _ in range(2):
        with pytest.raises(gm.GeminiError, match=r"large.weight:linear: .*\d+ more bytes of device memory") as raised:
            model["large"](torch.ones(1, 256))
        assert raised.value.status == "OOM_DEVICE"
        model["small"](torch.ones(1, 64)).sum().backward()


def test_device_too_small_in_a_step(session):
    session("320KiB")
    model, optimizer = gm.prepare(
        *(lambda model: (model, sgd(model.parameters())))(
            nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 1))
        )
    )
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()  # there is no momentum yet
    for _ in range(2):
        model(torch.ones(1, 64)).sum().backward()
        with pytest.raises(gm.GeminiError, match=r"1.weight.* \d+ more bytes of device memory are needed") as raised:
            optimizer.step()
        assert raised.value.status == "OOM_DEVICE"


def test_host_too_small(session):
    session("256KiB", host_memory="512KiB")
    with pytest.raises(gm.GeminiError, match="2.weight: .* more bytes than device, host and files have") as raised:
        gm.prepare(nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))))
    assert raised.value.status == "OOM_HOST"


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("again", (False, True))
def test_taken_from_the_groups_of_a_step_in_backward(session, dtype, again):
    """In bfloat16 its gradient takes its bytes, and no update would write them again."""
    session()
    model = mlp().to(dtype)
    model, optimizer = gm.prepare(model, torch.optim.AdamW(model.parameters(), 0.1), step_in_backward=True)

    def step():
        model(torch.ones(2, SIZE, dtype=dtype)).sum().backward()

    step()
    optimizer.step()
    params = optimizer.param_groups[0]["params"]
    weight = params.pop(2)
    before = weight.detach().clone()
    with pytest.raises(gm.GeminiError, match=r"parameter 1.weight has a gradient, but has been taken from the groups"):
        step()
    assert torch.equal(weight, before) and weight.grad is None
    optimizer.step()
    if again:
        params.insert(2, weight)
    else:
        weight.requires_grad_(False)
    step()
    optimizer.step()
    assert torch.equal(weight, before) is not again


@pytest.mark.parametrize("shared", (False, True))
def test_second_gradient_of_a_step_in_backward(session, shared):
    session()
    model = mlp()
    model, optimizer = gm.prepare(model, torch.optim.AdamW(model.parameters(), 0.1), step_in_backward=True)
    if shared:  # one backward pass, within which reentrant checkpoints have their own
        x = torch.ones(2, SIZE, requires_grad=True)
        for _ in range(2):
            x = checkpoint(model[2], x, use_reentrant=True)
        wrong = x.sum()
    else:
        model(torch.ones(2, SIZE)).sum().backward()
        wrong = model(torch.ones(2, SIZE)).sum()
    with pytest.raises(gm.GeminiError, match=r"parameter 2.\w+ has a second gradient.*optimizer.step\(\) after each"):
        wrong.backward()
    optimizer.step()
    before = values(model)
    model(torch.ones(2, SIZE)).sum().backward()
    optimizer.step()
    assert not any(torch.equal(param, before[name]) for name, param in model.named_parameters())


class Buffered(nn.Module):
    """With a view of a parameter, or with many indices, as a buffer."""

    def __init__(self, what):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(SIZE, SIZE))
        view = self.weight.data[0]
        self.register_buffer("buffer", view if what == "view" else (torch.arange(20 * SIZE) % SIZE).int())

    def forward(self, x):
        if self.buffer.dtype == torch.int32:
            return nn.functional.embedding(self.buffer, self.weight)
        return x * self.weight.sum() * self.buffer


LEFT_BEHIND = {  # what has a parameter's bytes beside the model
    "a view in an attribute": lambda model: setattr(model, "view", model.weight.t()),
    "data in a list": lambda model: [model.weight.data],
    "a state dict": lambda model: model.state_dict(),
}


@pytest.mark.parametrize("name", LEFT_BEHIND)
def test_tensors_over_parameters_that_are_left_behind_are_warned_of(session, name):
    session()
    model = nn.Linear(8, 8)
    kept = LEFT_BEHIND[name](model)
    with pytest.warns(UserWarning, match="parameter weight shares its bytes with a tensor that is none of the model"):
        gm.prepare(model)
    del kept


def test_models_whose_own_tensors_share_bytes_are_not_warned_of(session):
    session()
    model = nn.ModuleList([nn.LSTM(8, 8), nn.Embedding(8, 8), nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8)])
    model[2].weight = model[1].weight
    model.register_buffer("part", model[1].weight.detach()[:2])
    whole = torch.zeros(2, 8)
    model.extend([nn.Linear(8, 1, bias=False) for _ in range(2)])
    model[4].weight.data, model[5].weight.data = whole.split(1)
    del whole
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gm.prepare(model, torch.optim.SGD(model.parameters(), 0.1))


@pytest.mark.parametrize("what", ("view", "indices"))
def test_graph_with_buffers_from_before_prepare_is_refused(session, what):
    model = Buffered(what)
    loss = model(torch.ones(3, SIZE)).square().mean()
    session()
    gm.prepare(model)
    assert type(model.buffer) is not torch.Tensor
    overwrite_the_device()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("layer", (nn.Linear, nn.Bilinear, nn.LayerNorm, nn.GRU, nn.TransformerEncoderLayer))
@pytest.mark.parametrize("frozen", (False, True))
def test_graph_from_before_prepare_is_refused(session, layer, frozen):
    """It would read parameters that nobody has acquired."""
    arguments = {nn.Linear: (SIZE,), nn.Bilinear: (SIZE, SIZE), nn.GRU: (SIZE,), nn.TransformerEncoderLayer: (4,)}
    first, second = nn.Linear(SIZE, SIZE), layer(SIZE, *arguments.get(layer, ())).requires_grad_(not frozen)
    x = first(torch.ones(3, 2, SIZE))
    out = second(x, x) if layer is nn.Bilinear else second(x)
    loss = (out[0] if layer is nn.GRU else out).square().mean()
    session()
    model, optimizer = gm.prepare(nn.ModuleList([first, second]), torch.optim.SGD(first.parameters(), 0.1))
    overwrite_the_device()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert all(param.grad is None or param.grad.isfinite().all() for param in model.parameters())
