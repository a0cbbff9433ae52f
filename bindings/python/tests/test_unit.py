"""Compiled modules, and others that come and go as one, beside the same without libgemini: equal to the bit.

SPDX-License-Identifier: Apache-2.0
"""

import contextlib
import ctypes
import dataclasses
import functools
import re
import threading

import pytest
import torch
import torch._dynamo.utils as dynamo_utils
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import libgemini.torch as gm
from conftest import leave_where_nobody_holds

VOCAB, WIDTH, BLOCKS = 50, 96, 4
STEPS = 4


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.LayerNorm(width)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, reentrant=None, block=Block, width=WIDTH):
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)
        self.blocks = nn.ModuleList(block(width) for _ in range(BLOCKS))
        self.reentrant = reentrant  # None: no checkpointing

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.out(x)


@pytest.fixture(autouse=True)
def closed():
    torch._dynamo.reset()
    dynamo_utils.counters.clear()
    yield
    gm.close()


def start(model, share=0.4):
    """A session whose device holds a share of a model's data, under SGD with momentum: 12 bytes an element."""
    size = sum(param.numel() for param in model.parameters()) * 12
    gm.init(device="cpu", strict=True, chunk_size="64KiB", host_memory="64MiB", device_memory=int(size * share))


def ids_of(step):
    return torch.randint(0, VOCAB, (4, 8), generator=torch.Generator().manual_seed(step))


def loss_of(model, step):
    ids = ids_of(step)
    return functional.cross_entropy(model(ids).view(-1, VOCAB), ids.view(-1))


def losses(model, optimizer, between=lambda step: None):
    out = []
    for step in range(STEPS):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out.append(loss.item())
        between(step)
        with torch.no_grad():
            out.append(loss_of(model, 100 + step).item())
    return out


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def both(make, prepared=lambda model: None, share=0.4, between=lambda step: None):
    """The losses without and with libgemini, for a model that make() makes."""
    torch.manual_seed(0)
    model = make()
    plain = losses(model, sgd(model))
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make()
    start(model, share)
    model, optimizer = gm.prepare(model, sgd(model))
    prepared(model)
    ours = losses(model, optimizer, between)
    assert all(isinstance(param, nn.Parameter) and type(param) is not nn.Parameter for param in model.parameters())
    return plain, ours


def compiled(how, backend, reentrant=None):
    model = Net(reentrant)
    for i, block in enumerate(model.blocks):
        if how == "wrapped":
            model.blocks[i] = torch.compile(block, backend=backend, fullgraph=True)
        else:
            block.compile(backend=backend, fullgraph=True)
    return model


@pytest.mark.parametrize(
    "how, backend, reentrant",
    [
        ("wrapped", "aot_eager", None),
        ("in place", "aot_eager", None),
        ("wrapped", "eager", None),
        ("wrapped", "aot_eager", False),
        ("in place", "aot_eager", False),
        ("in place", "eager", True),
    ],
)
def test_compiled_blocks_train_alike_and_compile_once(how, backend, reentrant):
    graphs = []

    def count(step):
        graphs.append(dynamo_utils.counters["stats"]["unique_graphs"])

    plain, ours = both(lambda: compiled(how, backend, reentrant), between=count)
    assert ours == plain
    assert not dynamo_utils.counters["graph_break"]
    assert graphs[1:] == [graphs[1]] * (STEPS - 1), "parameters that come and go are no reason to compile again"
    stats = gm.stats()
    assert stats["peak_bytes"]["device"] <= stats["budget_bytes"]["device"] < stats["model_bytes"]
    assert stats["planned_iterations"] > 0


def test_compiled_by_inductor_trains_alike():
    plain, ours = both(lambda: compiled("in place", "inductor"))
    assert ours == plain


@pytest.mark.parametrize("in_place", [False, True])
def test_whole_model_is_a_unit_within_its_iteration(in_place):
    def make():
        model = Net()
        if in_place:
            model.compile(backend="aot_eager")
            return model
        return torch.compile(model, backend="aot_eager")

    plain, ours = both(make, share=1.0)
    assert ours == plain
    assert gm.stats()["iterations"] == 2 * STEPS
    assert not dynamo_utils.counters["graph_break"]


def test_unit_larger_than_the_device_is_refused_by_name():
    model = Net()
    model.blocks[1].compile(backend="eager")
    start(model, 0.06)
    size = sum(param.numel() for param in model.blocks[1].parameters()) * 4
    with pytest.raises(gm.GeminiError, match=rf"blocks\.1 is compiled.* {size} bytes.*device_memory is"):
        gm.prepare(model)


def test_compiling_after_prepare_is_refused():
    model = Net()
    start(model)
    gm.prepare(model)
    with pytest.raises(gm.GeminiError, match="came after"):
        loss_of(torch.compile(model, backend="eager"), 0)


def test_compiling_in_place_after_prepare_is_refused():
    model = Net()
    start(model)
    model, optimizer = gm.prepare(model, sgd(model))
    model.compile(backend="eager")
    with pytest.raises(gm.GeminiError, match="before prepare"):
        loss_of(model, 0).backward()
    with pytest.raises(gm.GeminiError, match="before prepare"):
        optimizer.step()


def calls_of(name):
    """Records each call of a function of the library, for as long as the context lasts."""
    session, seen = gm.session(), []
    inner = getattr(session.lib, name)

    @contextlib.contextmanager
    def watch():
        setattr(session.lib, name, lambda *args: (seen.append(args), inner(*args))[1])
        try:
            yield seen
        finally:
            setattr(session.lib, name, inner)

    return watch()


def test_unit_is_one_operator():
    model = Net()
    start(model)
    gm.prepare(model, sgd(model))
    assert gm.unit(model.blocks[0]) is model.blocks[0]
    x = torch.randn(2, WIDTH, requires_grad=True)
    with calls_of("acquire") as seen:
        model.blocks[1](x)
        assert len(seen) == 3  # norm, up, down
        seen.clear()
        y = model.blocks[0](x)
        assert [args[2] for args in seen] == [6]  # all of its parameters at once
        seen.clear()
        y.sum().backward()
        assert seen[0][2] == 6 and sum(args[2] for args in seen) == 6 + 6  # the same again, and each gradient


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_units_that_are_not_compiled_train_alike(reentrant):
    plain, ours = both(lambda: Net(reentrant), lambda model: [gm.unit(block) for block in model.blocks])
    assert ours == plain


class Nested(nn.Module):
    """A block of which a part, maybe with a layer that is not the block's, runs again within the backward pass."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x, aside):
        def inner(x):
            return torch.tanh(self.second(aside(x)))

        return self.last(checkpoint(inner, torch.tanh(self.first(x)), use_reentrant=True))


class Aside(nn.Module):
    """A module that is called within the part that runs again, and may have such a part itself, or others' layers."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.others = [nn.Linear(WIDTH, WIDTH)]  # in a list: not of this module

    def inner(self, x):
        x = self.others[0](x)
        if x.requires_grad and gm._current is not None:
            x.register_hook(lambda _: leave_where_nobody_holds() and None)
        return torch.tanh(x)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        if self.how == "unit with a part":
            x = checkpoint(self.inner, x, use_reentrant=True)
        elif self.how == "unit with another layer":
            x = self.inner(x)
        return self.last(x)


class NestedNet(Net):
    def __init__(self, aside):
        super().__init__(block=Nested)
        self.aside = nn.Identity() if aside == "nothing" else Aside(aside)
        self.others = nn.ModuleList(getattr(self.aside, "others", ()))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x, self.aside)
        return self.out(x)


@pytest.mark.parametrize("aside", ["nothing", "module", "unit", "unit with another layer", "unit with a part"])
def test_a_unit_is_held_while_a_part_of_it_runs_again(aside):
    def units(model):
        for block in model.blocks:
            gm.unit(block)
        if "unit" in aside:
            gm.unit(model.aside)

    plain, ours = both(lambda: NestedNet(aside), units)
    assert ours == plain


def test_activations_of_compiled_blocks_are_offloaded():
    torch.manual_seed(0)
    model = compiled("in place", "aot_eager")
    plain = losses(model, sgd(model))
    torch.manual_seed(0)
    model = compiled("in place", "aot_eager")
    start(model, 0.6)
    model, optimizer = gm.prepare(model, sgd(model))
    ours = []
    for step in range(STEPS):
        with gm.offload_activations(1024):
            loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ours.append(loss.item())
    assert ours == plain[::2]  # every other one is of an evaluation
    (line,) = re.findall(r"^ *activations +(.*)$", gm.report(), re.MULTILINE)
    assert float(line.split()[0]) > 0


def test_units_are_updated_in_the_backward_pass():
    ended = []
    for units in (False, True):
        torch.manual_seed(0)
        model = Net().to(torch.bfloat16)
        if units:
            for block in model.blocks:
                block.compile(backend="aot_eager")
        start(model)
        model, optimizer = gm.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), step_in_backward=True)
        ended.append((losses(model, optimizer), [param.detach().clone() for param in model.parameters()]))
        gm.close()
    assert ended[0][0] == ended[1][0]
    assert all(torch.equal(one, other) for one, other in zip(ended[0][1], ended[1][1]))


class ByPointer(torch.autograd.Function):
    """As a kernel of an extension does it: reads its weight where its pointer says, and torch does not know."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x * ByPointer.read(weight)

    @staticmethod
    def backward(ctx, grad):
        return grad * ByPointer.read(*ctx.saved_tensors), None

    @staticmethod
    def read(weight):
        return torch.frombuffer((ctypes.c_float * weight.numel()).from_address(weight.data_ptr()), dtype=torch.float32)


class PointerNet(Net):
    def __init__(self):
        super().__init__()
        self.scales = nn.ModuleList(Scale() for _ in range(BLOCKS))

    def forward(self, ids):
        x = self.embed(ids)
        for scale, block in zip(self.scales, self.blocks):
            x = block(scale(x))
        return self.out(x)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x):
        return ByPointer.apply(x, self.weight)


def test_units_are_there_for_kernels_that_read_by_pointer():
    plain, ours = both(PointerNet, lambda model: [gm.unit(scale) for scale in model.scales])
    assert ours == plain


@dataclasses.dataclass
class Result:
    hidden: torch.Tensor
    same: torch.Tensor


class Passing(Block):
    """Gives back its argument, too, whose node is not its own; and what it computes in a dataclass, or a dict."""

    def forward(self, x):
        return {"a": [Result(super().forward(x), x)]}


class PassingNet(Net):
    def __init__(self):
        super().__init__(block=Passing)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            result = block(x)["a"][0]
            x = result.hidden + result.same
        return self.out(x)


def test_outputs_in_containers_have_their_bytes_in_the_backward_pass():
    plain, ours = both(PassingNet, lambda model: [gm.unit(block) for block in model.blocks])
    assert ours == plain


def test_arguments_that_a_unit_passes_on_do_not_bring_its_bytes(monkeypatch):
    model = PassingNet()
    start(model)
    gm.prepare(model)
    gm.unit(model.blocks[0])
    hidden = model.blocks[1].up(
        torch.randn(2, WIDTH)
    )  # its backward needs its own weight, to which nothing comes after
    result = model.blocks[0](functional.linear(hidden, model.blocks[1].down.weight))["a"][0]
    reached = []
    monkeypatch.setattr(gm.session().backward, "operator", lambda use, _: reached.append(use.backward_name.decode()))
    (result.same + result.hidden.detach()).sum().backward()
    assert reached == ["blocks.1.down.weight:linear.backward", "blocks.1.up.weight:linear.backward"]


def test_a_unit_that_runs_again_while_the_backward_pass_holds_it_stays_plain():
    model = Net()
    start(model)
    gm.prepare(model)
    block = gm.unit(model.blocks[0])
    x = torch.randn(2, WIDTH, requires_grad=True)
    seen = []
    x.register_hook(lambda grad: seen.append({type(param) for param in block.parameters()}))
    checkpoint(block, x, use_reentrant=False).sum().backward()
    assert seen == [{nn.Parameter}]


def test_a_call_that_fails_leaves_nothing_behind():
    model = Net()
    start(model)
    gm.prepare(model)
    gm.unit(model.blocks[0])
    with pytest.raises(RuntimeError):
        model.blocks[0](torch.zeros(2, WIDTH + 1))
    assert all(type(param) is not nn.Parameter for param in model.parameters())
    gm.close()  # refuses while anything is acquired


def test_units_are_not_nested_and_are_of_the_model():
    model = Net()
    start(model)
    with pytest.raises(gm.GeminiError, match="prepare"):
        gm.unit(model.blocks[0])
    gm.prepare(model)
    gm.unit(model.blocks[0])
    gm.unit(model.blocks[0])  # twice is once
    for module in (model.blocks, model.blocks[0].up):
        with pytest.raises(gm.GeminiError, match="cannot both be units"):
            gm.unit(module)
    with pytest.raises(gm.GeminiError, match="no module in the models that were prepared"):
        gm.unit(nn.Linear(2, 2))


def test_compiled_modules_within_a_compiled_one_are_part_of_it():
    model = Net()
    model.blocks[0].up.compile(backend="eager")
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    start(model)
    gm.prepare(model)
    with calls_of("acquire") as seen:
        model.blocks[0](torch.randn(2, WIDTH))
    assert [args[2] for args in seen] == [6]


def test_resident_units_are_plain_and_nothing_is_asked_of_the_library():
    model = Net()
    start(model)
    gm.prepare(model)
    block = gm.unit(model.blocks[0])
    x = torch.randn(2, WIDTH, requires_grad=True)
    expected = torch.autograd.grad(block(x).sum(), x)[0]
    gm.session().backward.settle()
    with gm.resident(block):
        assert all(type(param) is nn.Parameter for param in block.parameters())
        with calls_of("acquire") as acquires, calls_of("release") as releases, calls_of("op_begin") as ops:
            got = torch.autograd.grad(block(x).sum(), (x, *block.parameters()))
            assert not acquires and not releases and not ops
    assert torch.equal(got[0], expected)
    assert all(type(param) is not nn.Parameter for param in block.parameters())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("how, allocator", [("graphed", "torch"), ("graphed", "pool"), ("reduce-overhead", "torch")])
def test_cuda_graphs_of_blocks_train_alike(how, allocator):
    device, width = torch.device("cuda", torch.cuda.current_device()), 512

    def run(use):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = Net(width=width).to(device)
        size = sum(param.numel() for param in model.parameters()) * 12  # 50 MB
        if how == "reduce-overhead":
            for block in model.blocks:
                block.compile(mode=how)
        optimizer = sgd(model)
        if use:
            room = 0 if allocator == "torch" else 128 << 20  # for what torch allocates, cuBLAS' workspace for one
            gm.init(
                device=device,
                strict=True,
                chunk_size="2MiB",
                host_memory="256MiB",
                device_memory=size // 2 + room,
                allocator=allocator,
            )
            model, optimizer = gm.prepare(model, optimizer)
        if how == "graphed":
            for block in model.blocks:
                sample = torch.randn(4, 8, width, device=device, requires_grad=True)
                with gm.resident(block) if use else contextlib.nullcontext():
                    torch.cuda.make_graphed_callables(block, (sample,))
        out = []
        for step in range(STEPS):
            ids = ids_of(step).to(device)
            loss = functional.cross_entropy(model(ids).view(-1, VOCAB), ids.view(-1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            out.append(loss.item())
        return out

    plain = run(False)
    assert run(True) == plain
    stats = gm.stats()
    assert stats["acquire_misses"] > 0
    assert allocator == "pool" or stats["budget_bytes"]["device"] < stats["model_bytes"]


# ---- gradients of a unit
def stored_together(session, monkeypatch):
    """A list that gets the number of gradients of each use that stores gradients."""
    counts, acquire_use = [], session.holds.acquire_use

    def counted(use, stream):
        if use.forward_name.endswith(b":grad"):
            counts.append(use.count)
        acquire_use(use, stream)

    monkeypatch.setattr(session.holds, "acquire_use", counted)
    return counts


def with_units():
    """What torch alone computes, and a model whose blocks are units in a session with room for all, with its
    optimizer.
    """
    torch.manual_seed(0)
    model = Net()
    expected = losses(model, sgd(model))
    torch.manual_seed(0)
    model = Net()
    start(model, share=4.0)
    model, optimizer = gm.prepare(model, sgd(model))
    for block in model.blocks:
        gm.unit(block)
    return expected, model, optimizer


def test_gradients_of_a_unit_are_stored_together(monkeypatch):
    expected, model, optimizer = with_units()
    counts = stored_together(gm.session(), monkeypatch)
    assert losses(model, optimizer) == expected
    gradients = len(list(model.blocks[0].parameters()))
    assert counts.count(gradients) == STEPS * BLOCKS
    assert sum(counts) == STEPS * len(list(model.parameters()))


def test_gradients_that_do_not_fit_together_are_stored_one_by_one(monkeypatch):
    expected, model, optimizer = with_units()
    holds = gm.session().holds
    counts, acquire_use = stored_together(gm.session(), monkeypatch), holds.acquire_use

    def full(use, stream):
        acquire_use(use, stream)
        if use.forward_name.endswith(b":grad") and use.count > 1:
            holds.release_use(use, stream)
            raise gm.GeminiError("no room for all of them", "OOM_DEVICE")

    monkeypatch.setattr(holds, "acquire_use", full)
    assert losses(model, optimizer) == expected
    assert counts.count(1) == STEPS * len(list(model.parameters())) and max(counts) > 1


def test_norms_of_gradients_are_computed_when_the_last_step_asked_for_one(monkeypatch):
    calls, norm = [], torch.linalg.vector_norm
    monkeypatch.setattr(
        torch.linalg, "vector_norm", lambda *args, **kwargs: (calls.append(1), norm(*args, **kwargs))[1]
    )
    torch.manual_seed(0)
    model = Net()
    start(model, share=4.0)
    model, optimizer = gm.prepare(model, sgd(model))
    params, computed, norms = list(model.parameters()), [], []
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, 0).backward()
        computed.append(len(calls))
        if step in (3, 4):
            norms.append([float(norm(param.grad)) for param in params])
            assert norms[-1] == [float(norm(param.grad.clone())) for param in params]
        optimizer.step()
        calls.clear()
    assert computed == [len(params), 0, 0, 0, len(params), len(params)]
    assert all(value > 0 for values in norms for value in values)


class Balanced(Block):
    """A block that leaves a part of the loss beside its result, as one with experts does."""

    def forward(self, x):
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        self.left = self.down(torch.tanh(self.up(x))).square().mean()
        return x


class BalancedNet(Net):
    """A net whose loss has what its blocks leave: beside the result, given from one to the next, or alone."""

    def __init__(self, how):
        super().__init__(block=Balanced)
        self.how = how

    def forward(self, ids):
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            if self.how == "to the next" and number:
                x = x + self.blocks[number - 1].left
            x = block(x)
            if x.requires_grad and gm._current is not None:
                x.register_hook(lambda _: leave_where_nobody_holds() and None)
        y = self.out(x)
        if self.how == "alone":
            y = y.detach()
        left = sum(block.left for block in self.blocks)
        for block in self.blocks:
            del block.left
        return y + left


def prepared_units(model):
    """Prepares a model whose blocks are units. Returns it and its optimizer."""
    start(model)
    model, optimizer = gm.prepare(model, sgd(model))
    for block in model.blocks:
        gm.unit(block)
    return model, optimizer


@pytest.mark.parametrize("reentrant", [None, True])
@pytest.mark.parametrize("how", ["beside", "to the next", "alone"])
def test_what_leaves_a_unit_beside_its_result_has_its_gradients(how, reentrant):
    def train(prepared):
        torch.manual_seed(0)
        model = BalancedNet(how)
        model, optimizer = prepared_units(model) if prepared else (model, sgd(model))
        out = []
        for step in range(STEPS):
            ids = ids_of(step)
            if reentrant:
                y = checkpoint(lambda ids, _: model(ids), ids, torch.ones(1, requires_grad=True), use_reentrant=True)
            else:
                y = model(ids)
            loss = y.square().mean()
            if prepared:
                leave_where_nobody_holds()
            loss.backward()
            out.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return out

    plain = train(False)
    assert train(True) == plain


def in_a_thread(function):
    """Calls a function in a thread of its own, whose nodes are numbered from 0. Returns its result."""
    done = []

    def run():
        try:
            done.append((function(), None))
        except Exception as error:
            done.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    result, error = done[0]
    if error:
        raise error
    return result


@pytest.mark.parametrize("ended", [False, True])
def test_graphs_of_other_threads_are_not_taken_for_those_of_units(ended):
    """Nodes of a thread without units have the numbers of those of one with units."""
    torch.manual_seed(0)
    model, _ = prepared_units(Net())
    session = gm._current
    ids = torch.zeros(4, 8, dtype=torch.long)
    y = in_a_thread(lambda: model(ids))
    if ended:
        gm.close()
        start(model)  # another one
    begun = session.brackets.op_number

    def differentiate():
        other = Net()
        return torch.autograd.grad(other(ids).square().mean(), list(other.parameters()), create_graph=True)

    in_a_thread(differentiate)
    assert session.brackets.op_number == begun
    if not ended:
        y.square().mean().backward()
        assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("back", ["same", "other", "without units"])
@pytest.mark.parametrize("how", ["beside", "to the next", "alone"])
def test_what_leaves_a_unit_has_its_gradients_in_the_backward_passes_of_all_threads(how, back):
    """Each step has a thread of its own; with "other" its backward pass is run by another one, which calls units, too.
    "without units": one thread calls all units, and each backward pass has one that has made other nodes."""

    def train(prepared):
        torch.manual_seed(0)
        model, out = BalancedNet(how), []
        model, optimizer = prepared_units(model) if prepared else (model, sgd(model))

        def forward(step):
            for more in range(17 * step):  # so that the same numbers come to other units
                torch.ones(1, requires_grad=True) * more
            return model(ids_of(step)).square().mean()

        def backward(loss):
            if prepared:
                leave_where_nobody_holds()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            out.append(loss.item())

        for step in range(STEPS):
            if back == "same":
                in_a_thread(lambda step=step: backward(forward(step)))
            elif back == "without units":
                loss = forward(step)
                in_a_thread(lambda loss=loss: backward(loss * torch.ones(1, requires_grad=True)))
            else:
                forward(step)
                backward(in_a_thread(functools.partial(forward, step)))
        return out

    plain = train(False)
    assert train(True) == plain


def test_units_are_told_apart_when_each_step_has_a_thread_of_its_own():
    """Threads number their nodes from 0, and a later one may have the number of one that has ended."""

    def train(prepared):
        torch.manual_seed(0)
        model, out = Net(), []
        model, optimizer = prepared_units(model) if prepared else (model, sgd(model))
        for block in model.blocks if prepared else ():
            block.down.register_full_backward_hook(lambda *_: leave_where_nobody_holds() and None)

        def step(number):
            for more in range(number):  # so that the same numbers come to other units
                torch.ones(1, requires_grad=True) * more
            loss = loss_of(model, number)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            out.append(loss.item())

        for number in (0, 17, 40, 3):
            in_a_thread(functools.partial(step, number))
        return out

    plain = train(False)
    assert len(plain) == 4 and train(True) == plain


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_a_units_parameters_see_the_sum_of_the_gradients(when):
    def train(prepared):
        torch.manual_seed(0)
        model, seen = Net(), []

        def hook(param):
            seen.append(param.grad.norm().item())

        def hooked():
            for block in model.blocks:
                for param in block.parameters():
                    param.register_post_accumulate_grad_hook(hook)

        if not prepared or when == "before":
            hooked()
        model, optimizer = prepared_units(model) if prepared else (model, sgd(model))
        if prepared and when == "after":
            hooked()
        for step in range(2):
            for part in range(3):
                loss_of(model, 10 * step + part).backward()
            optimizer.step()
            optimizer.zero_grad()
        return seen

    plain = train(False)
    assert train(True) == plain


def test_gradients_of_a_pass_that_failed_can_be_cleared_and_read():
    """Within a unit, too, which the pass had reached when it failed."""

    class Failed(Exception):
        pass

    def train(prepared):
        torch.manual_seed(0)
        model, fails, out = Net(), True, []

        def hook(_):
            if fails:
                raise Failed

        model, optimizer = prepared_units(model) if prepared else (model, sgd(model))
        model.blocks[1].up.weight.register_hook(hook)
        for step in range(STEPS):
            fails = step % 2 == 0
            with pytest.raises(Failed) if fails else contextlib.nullcontext():
                loss_of(model, step).backward()
            grads = [param.grad for block in model.blocks[1:] for param in block.parameters()]
            out += [None if grad is None else grad.norm().item() for grad in grads]
            model.zero_grad()
            if not fails:
                optimizer.step()
        return out

    plain = train(False)
    assert train(True) == plain
