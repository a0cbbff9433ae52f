"""Activations that autograd saves go to an arena, leave the device and come back, with the bits they had.

The simulated device does not count torch's own tensors: that activations leave is shown by the arena's bytes by tier,
and that nothing is read where it was by strict sessions, which unmap what leaves.
SPDX-License-Identifier: Apache-2.0
"""

import gc
import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import libgemini.torch as gm
from conftest import same_bits, values
from libgemini import abi
from libgemini.torch.layout import Space

KIB, MIB = 1 << 10, 1 << 20
CHUNK = 64 * KIB
WIDTH, ROWS = 64, 512  # an activation has 2 chunks


class Block(nn.Module):
    """Attention with one projection for q, k and v, which are views of its output, and an MLP."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).view(8, ROWS // 8, 3, WIDTH).unbind(2)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).reshape(ROWS, WIDTH))
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, blocks, reentrant=None):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.reentrant = reentrant

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def batch(step):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).requires_grad_()


def train(model, optimizer, steps, between=lambda: None):
    """Losses, and the gradients of inputs; between() is called when forward passes end."""
    out = []
    for step in range(steps):
        x = batch(step)
        loss = model(x).square().mean()
        between()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out += [loss.detach().clone(), x.grad]
    return out


def make(blocks=4, reentrant=None):
    torch.manual_seed(0)
    model = Net(blocks, reentrant)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.fixture
def offloading(session):
    """offloading(model, optimizer, device_memory, **more) prepares them to save activations of a chunk or more; gives
    a function that tells bytes by tier of the activations' arena."""

    def start(model, optimizer=None, device_memory="16MiB", **more):
        session(device_memory, **more)
        prepared = gm.prepare(model, optimizer) if optimizer else (gm.prepare(model), None)
        gm.session().model.saving = lambda: gm.offload_activations(CHUNK)
        return *prepared, lambda: list(gm.session().manager.tier_bytes(gm.session().activations.arena).values())

    return start


def live():
    """Chunks in use, once torch's notes are worked off; those of two places twice."""
    state = gm.session().activations
    state.drain()
    return sum(state.users.values())


def nothing_left():
    gc.collect()
    state = gm.session().activations
    assert live() == 0 and not state.held and not state.stored
    return not any(gm.session().manager.tier_bytes(state.arena).values())


# ---- places
def test_space_gives_the_lowest_range_and_joins_what_comes_back():
    """Against a map of bytes."""
    draw = random.Random(1)
    space, used, places = Space(), bytearray(4096), {}
    space.give(0, 4096)
    for _ in range(3000):
        if places and draw.random() < 0.5:
            offset = draw.choice(list(places))
            size = places.pop(offset)
            used[offset : offset + size] = bytes(size)
            space.give(offset, size)
        else:
            size, alignment = draw.randrange(1, 300), draw.choice([1, 16, 64])
            wanted = next((i for i in range(0, 4096 - size + 1, alignment) if not any(used[i : i + size])), None)
            assert space.take(size, alignment) == wanted
            if wanted is not None:
                used[wanted : wanted + size] = b"x" * size
                places[wanted] = size
    free = sum(end - begin for begin, end in space.ranges)
    assert free == used.count(0) and all(a[1] < b[0] for a, b in zip(space.ranges, space.ranges[1:]))


# ---- training
@pytest.mark.parametrize("tier", ["host", "file"])
def test_activations_leave_the_device_and_come_back_with_their_bits(offloading, tmp_path, tier):
    model, optimizer = make()
    plain = train(model, optimizer, 5)
    weights = values(model)
    model, optimizer = make()
    more = {"file": tmp_path, "file_memory": "64MiB", "host_memory": "2MiB"} if tier == "file" else {}
    model, optimizer, tiers = offloading(model, optimizer, "1.5MiB", **more)
    seen, before = [], []

    def between():
        seen.append(tiers())
        before.append(gm.stats()["moved_bytes"]["host to device"])

    ours = train(model, optimizer, 5, between)
    same_bits(ours, plain)
    same_bits(values(model), weights)
    budget = gm.stats()["budget_bytes"]
    for on_device, on_host, in_files in seen:
        assert on_device <= budget["device"] < on_device + on_host + in_files  # they do not fit
        assert in_files > 0 if tier == "file" else on_host > 0
        assert sum((on_device, on_host, in_files)) > 3 * MIB
    assert nothing_left()


def test_steps_have_the_same_places_and_are_planned(offloading):
    model, optimizer, tiers = offloading(*make(), device_memory="1.5MiB")
    places = []

    def between():
        state = gm.session().activations
        places.append(sorted((stored.offset, stored.size) for stored in state.stored.values()))

    train(model, optimizer, 2, between)
    size = gm.session().manager.arena_info(gm.session().activations.arena).size_bytes
    train(model, optimizer, 4, between)
    assert len(places[0]) > 20 and all(one == places[0] for one in places)
    stats = gm.stats()
    assert stats["departures"] == 0 and stats["planned_iterations"] >= 4
    assert gm.session().manager.arena_info(gm.session().activations.arena).size_bytes == size
    assert stats["moved_bytes"]["device to host"]["plan"] > 0 and stats["moved_bytes"]["host to device"]["plan"] > 0


def test_operators_of_many_activations_are_divided(offloading):
    """40 activations without an operator of a parameter between them: all of them together do not fit."""

    class Chain(nn.Linear):
        def forward(self, x):
            x = super().forward(x)
            for _ in range(40):
                x = torch.tanh(x) * 1.01
            return x

    torch.manual_seed(0)
    model = Chain(WIDTH, WIDTH)
    model, optimizer, _ = offloading(model, torch.optim.SGD(model.parameters()), "1MiB")
    train(model, optimizer, 3)
    before, counts = gm.stats(), [gm.session().brackets.op_number]
    train(model, optimizer, 2, lambda: counts.append(gm.session().brackets.op_number))
    after = gm.stats()
    # tanh saves its output, the factor none: 40 of 128 KiB, each as much as an operator may have
    assert counts[1] - counts[0] == 1 + 40
    assert after["planned_iterations"] == before["planned_iterations"] + 2 and after["departures"] == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_of_checkpointed_blocks_only_the_inputs_are_saved(offloading, reentrant):
    plain = train(*make(4, reentrant), 4)
    model, optimizer, _ = offloading(*make(4, reentrant), device_memory="1MiB")
    seen = []
    same_bits(train(model, optimizer, 4, lambda: seen.append(len(gm.session().activations.stored))), plain)
    assert seen == [4] * 4
    assert nothing_left()


def test_gradients_that_add_up_over_passes(offloading):
    def run(model, optimizer):
        for step in range(3):
            for part in range(2):
                model(batch(2 * step + part)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return values(model)

    plain = run(*make(2))
    same_bits(run(*offloading(*make(2), device_memory="1MiB")[:2]), plain)


# ---- what is saved
def saved_by(session_start, function, *tensors, least=CHUNK):
    """Runs a function of tensors with and without; returns both results' gradients, and how many storages were
    saved."""
    function(*tensors).square().sum().backward()
    plain = [tensor.grad.clone() for tensor in tensors if tensor.requires_grad]
    for tensor in tensors:
        tensor.grad = None
    if gm._current is None:
        session_start()
    with gm.offload_activations(least):
        out = function(*tensors)
        count = len(gm.session().activations.stored)
    out.square().sum().backward()
    same_bits([tensor.grad for tensor in tensors if tensor.requires_grad], plain)
    return count


def tensor(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(5)).requires_grad_()


def test_what_is_saved_several_times_is_one_place(session):
    assert (
        saved_by(session, lambda a: torch.tanh(a).sin() + a.cos() + a.sinh() + a.t().cosh().t(), tensor(128, 128)) == 2
    )


def test_tensors_that_change_are_saved_again(session):
    """Without, torch refuses to use what was changed; what was saved here is as it was."""

    def change(a):
        b = a * 1
        c = b.sin()
        b.mul_(2)
        return b.sin() + c

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        change(tensor(128, 128)).sum().backward()
    session()
    a = tensor(128, 128)
    with gm.offload_activations(CHUNK):
        out = change(a)
        assert len(gm.session().activations.stored) == 1 and live() == 2  # the storage's number tells the newer one
    out.sum().backward()
    exact = a.detach()
    torch.testing.assert_close(a.grad, exact.cos() + 2 * (2 * exact).cos())
    del out
    assert nothing_left()


def test_parts_of_a_tensor_that_count_their_changes_apart_are_saved_as_they_are(session):
    """As in a GRU: the parts of unsafe_chunk() have the same version though one was changed after another was saved."""

    def gates(a):
        first, second, third = torch.unsafe_chunk(a * 1, 3)
        return first.sigmoid_() * second.tanh_() + third.sigmoid_()

    assert saved_by(session, gates, tensor(384, 128))
    assert live() == 0


@pytest.mark.parametrize("layer", (nn.GRU, nn.LSTM, nn.RNN))
def test_recurrent_layers(session, layer):
    torch.manual_seed(0)
    recurrent = layer(WIDTH, WIDTH, 2, batch_first=True, bidirectional=True)
    tensors = tensor(8, 16, WIDTH), *recurrent.parameters()
    assert saved_by(session, lambda a, *_: recurrent(a)[0], *tensors, least=KIB)


def test_what_stays_with_torch_must_not_change(session):
    session()
    with gm.offload_activations(CHUNK):
        a = tensor(8, 8) * 1
        b = a.sin()
        a.add_(1)
    with pytest.raises(
        RuntimeError, match=r"\(8, 8\).*modified by an inplace operation: it is at version 1; expected v.* 0"
    ):
        b.sum().backward()


def test_parameters_must_not_change_before_the_backward_pass(offloading):
    model, optimizer, _ = offloading(*make(2))
    loss = model(batch(0)).square().mean()
    with torch.no_grad():
        model.blocks[0].up.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_views_keep_their_strides(session):
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            ctx.save_for_backward(a)
            return a * 2

        @staticmethod
        def backward(ctx, grad):
            (a,) = ctx.saved_tensors
            seen.append((a.shape, a.stride(), a.storage_offset(), a.dtype, a.clone()))
            return grad * a

    views = [
        lambda a: a.t(),
        lambda a: a[3:100, 5::2],
        lambda a: a.view(2, -1, 128).transpose(0, 1),
        lambda a: a[:, 64:],
        lambda a: a.to(torch.bfloat16).t(),
    ]
    for view in views:
        del seen[:]
        assert saved_by(session, lambda a, view=view: Look.apply(view(a * 1)), tensor(128, 128), least=32 * KIB) == 1
        assert seen[0][:4] == seen[1][:4] and torch.equal(seen[0][4], seen[1][4])


def test_what_gains_nothing_stays_with_torch(session):
    session()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.ones(256, 256))
            self.weight = nn.Parameter(torch.ones(256, 256))

        def forward(self, a):
            return a * self.mask * self.weight

    model = gm.prepare(Model())
    with gm.offload_activations(CHUNK):

        def count(function, a):
            out = function(a)
            assert out.grad_fn is not None
            return len(gm.session().activations.stored)

        a = tensor(256, 256)
        assert count(lambda a: a * model.mask, a) == 0  # a buffer of the model
        assert count(lambda a: (a * 1)[:8].sin(), a) == 0  # a small view of a large storage
        assert count(lambda a: a[:8, :8].contiguous().sin(), a) == 0  # small
        out = (a * 1).sin()
        assert len(gm.session().activations.stored) == 1
    out.sum().backward()
    expected = torch.cos(a.detach())
    same_bits([a.grad], [expected])


def test_parameters_that_custom_functions_save_are_there_when_they_are_read(offloading):
    """autograd.Function hands them to Python without their class, so that nothing else would acquire them."""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return grad * weight, (grad * x)

    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(torch.rand(ROWS, WIDTH)) for _ in range(12))

        def forward(self, x):
            for weight in self.weights:
                x = Scale.apply(x, weight)
            return x

    def build():
        torch.manual_seed(0)
        model = Layers()
        return model, torch.optim.SGD(model.parameters())

    plain = train(*build(), 3)
    model, optimizer, _ = offloading(*build(), device_memory="768KiB")  # 6 of the 12 weights
    same_bits(train(model, optimizer, 3), plain)


# ---- graphs that are used twice, or never
def test_a_graph_that_is_retained_is_used_again(offloading):
    model, _ = make(2)
    x = batch(0)
    plain_loss = model(x).square().mean()
    plain_loss.backward(retain_graph=True)
    plain_loss.backward()
    plain = x.grad.clone()
    model, _, _ = offloading(make(2)[0], device_memory="1MiB")
    x = batch(0)
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    assert live() > 10
    loss.backward()
    same_bits([x.grad], [plain])
    del loss
    assert nothing_left()


def test_gradients_of_gradients(session):
    def run():
        a = tensor(128, 128)
        out = (a * 1).sin().exp().sum()
        (first,) = torch.autograd.grad(out, a, create_graph=True)
        first.square().sum().backward()
        return [a.grad]

    plain = run()
    session()
    with gm.offload_activations(CHUNK):
        ours = run()
    same_bits(ours, plain)
    assert nothing_left()


def test_a_forward_pass_without_a_backward_pass_leaves_nothing(offloading):
    model, _, tiers = offloading(make(2)[0], device_memory="1MiB")
    size = None
    for step in range(3):
        out = model(batch(step))
        assert live() > 10 and sum(tiers()) > MIB
        del out
        assert nothing_left()
        size = size or gm.session().manager.arena_info(gm.session().activations.arena).size_bytes
    assert gm.session().manager.arena_info(gm.session().activations.arena).size_bytes == size


def test_a_tensor_that_backward_got_stays_while_somebody_has_it(session):
    session("1MiB")
    with gm.offload_activations(CHUNK):
        a = tensor(128, 128)
        b = (a * 1).sin()
    saved = b.grad_fn._saved_self
    expected = saved.clone()
    del b
    gc.collect()
    assert live() == 1 and len(gm.session().activations.held) == 1  # not even its graph is left
    with gm.offload_activations(CHUNK):
        others = [(a * i).sin() for i in range(30)]  # takes all of the device but that
    assert torch.equal(saved, expected)
    del saved, others
    assert nothing_left()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_pass_that_fails_leaves_nothing(offloading, where):
    plain = train(*make(2), 3)
    model, optimizer, _ = offloading(*make(2), device_memory="1MiB")

    def fail(*_):
        raise ZeroDivisionError

    block = model.blocks[1 if where == "forward" else 0]
    handle = block.register_forward_hook(fail) if where == "forward" else block.register_full_backward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        model(batch(0)).sum().backward()
    handle.remove()
    assert nothing_left()
    optimizer.zero_grad()
    same_bits(train(model, optimizer, 3), plain)


def test_a_device_that_is_too_small_for_one_is_named(session):
    session("256KiB")
    with gm.offload_activations(CHUNK):
        a = tensor(512, 512)
        with pytest.raises(gm.GeminiError) as error:
            (a * 1).sin()
    assert error.value.status == "OOM_DEVICE"
    del error  # whose frames have what was saved
    assert nothing_left()


def test_a_session_closes_with_what_is_left(session):
    session()
    with gm.offload_activations(CHUNK):
        graph = (tensor(128, 128) * 1).sin()
    saved = graph.grad_fn._saved_self
    assert len(gm.session().activations.held) == 1
    gm.close()
    del graph, saved
    gc.collect()


def test_what_backward_got_is_released_with_the_next_operator_and_the_last_at_its_end(offloading):
    model, _, _ = offloading(make(4)[0], device_memory="1.5MiB")
    seen = []
    for block in model.blocks:
        block.norm.weight.register_hook(lambda _: seen.append(len(gm.session().activations.held)))
    model(batch(0)).square().mean().backward()
    assert len(seen) == 4 and max(seen) <= 3
    assert gm.session().activations.held == []


def test_divided_operators_use_what_is_held_beside_them(offloading, tmp_path):
    """A unit's parameters are acquired while its activations are saved: the plan must count both."""

    class Deep(nn.Linear):
        def forward(self, x):
            x = super().forward(x)
            for _ in range(6):
                x = torch.tanh(x)
            return x

    torch.manual_seed(0)
    model = nn.Sequential(Deep(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model, optimizer, _ = offloading(model, torch.optim.SGD(model.parameters()), "1MiB")
    gm.unit(model[0])
    train(model, optimizer, 2)
    owner = gm.session()
    owner.lib.trace_save(owner.handle, str(tmp_path / "trace").encode())
    operators = (tmp_path / "trace").read_text().split("\nop ")[1:]
    names = [text.splitlines()[0].split()[-1].partition("%20")[0] for text in operators]
    names = names[: next(i for i, name in enumerate(names) if "_" in name)]  # without the optimizer's
    assert names == [
        "0.weight:unit",
        *["saved"] * 6,
        "1.weight:linear",
        "1.weight:linear.backward",
        "0.weight:unit.backward",
        *["saved"] * 6,
    ]
    weight, each = "\nuse 0 0 16384 1\n", 2 * CHUNK
    for name, text in zip(names, operators):
        if name == "saved":
            assert weight in text and text.count("\nuse 2 ") == 1 and f" {each} " in text


def test_prepare_has_the_option(session):
    session()
    model = gm.prepare(nn.Linear(1024, 512), offload_activations=True)
    x = torch.randn(512, 1024)
    out = model(x)
    state = gm.session().activations
    assert gm.session().brackets.op_number == 1
    assert [stored.size for stored in state.stored.values()] == [2 * MIB]
    with torch.no_grad():
        model(x)
    out.sum().backward()
    assert state.chunk_size == CHUNK and abi.TIERS[0] == "device"
