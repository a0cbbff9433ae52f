"""Repeated blocks, which are units by themselves where all fits: what a steady step costs, and equality to the bit.

SPDX-License-Identifier: Apache-2.0
"""

import collections
import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import libgemini.torch as gm
from libgemini.torch import blocks as blocks_module, tensors, whole as whole_module

VOCAB, WIDTH, BLOCKS, STEPS = 50, 64, 4, 5


class Block(nn.Module):
    """Seven parameters. What `tap` is, is called in the middle of the forward pass."""

    tap = staticmethod(lambda block, x: None)

    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        y = functional.gelu(self.up(self.norm(x)))
        type(self).tap(self, y)
        return x + self.down(y) * self.scale


class Recomputed(Block):
    """A checkpoint within the block: it is not called again in the backward pass, and its functions are."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Net(nn.Module):
    def __init__(self, reentrant=None, block=Block, width=WIDTH, count=BLOCKS):
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)
        self.blocks = nn.ModuleList(block(width) for _ in range(count))
        self.reentrant = reentrant
        for index, block in enumerate(self.blocks):
            block.index = index

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.out(x)


class InPlace(nn.Sequential):
    """Changes in place what its last linear layer has returned."""

    def __init__(self, width):
        super().__init__(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(inplace=True))


class Copied(Block):
    """Decides for itself what of it is copied, as modules with locks or files do."""

    def __getstate__(self):
        return self.__dict__.copy()


class Around(nn.Module):
    """A module that calls blocks which are not within it, between its own functions."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, blocks):
        x = functional.gelu(functional.linear(functional.gelu(self.up(x)), self.up.weight))
        for block in blocks:
            x = block(x)
        return x


class WithAround(Net):
    def __init__(self):
        super().__init__(count=24)
        self.around = Around()

    def forward(self, ids):
        return self.out(self.around(self.embed(ids), self.blocks))


@pytest.fixture(autouse=True, params=("blocks", "whole"))
def kind(request, monkeypatch):
    """Whether models that fit are acquired block by block in all steps, or whole from the second one on."""
    if request.param == "blocks":
        monkeypatch.setattr(whole_module.Whole, "suits", lambda self: False)
    yield request.param
    Block.tap = staticmethod(lambda block, x: None)
    gm.close()


by_block = pytest.mark.parametrize("kind", ["blocks"], indirect=True)  # for what is of blocks alone


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def start(**more):
    gm.init(
        **{
            "device": "cpu",
            "strict": True,
            "chunk_size": "64KiB",
            "host_memory": "64MiB",
            "device_memory": "32MiB",
            **more,
        }
    )


def prepared(make=Net, optimizer=adamw, **more):
    torch.manual_seed(0)
    model = make()
    start(**more)
    return gm.prepare(model, optimizer(model))


def loss_of(model, number):
    ids = torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(number))
    return functional.cross_entropy(model(ids).view(-1, VOCAB), ids.view(-1))


def step(model, optimizer, number):
    loss = loss_of(model, number)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def trained(model, optimizer, one=step, steps=STEPS):
    """Losses, and what the parameters are afterwards."""
    losses = [one(model, optimizer, number) for number in range(steps)]
    return losses, [param.detach().clone() for param in model.parameters()]


def alike(one=step, make=Net, optimizer=sgd, steps=STEPS, **more):
    """Trains without and with libgemini, and compares. Returns the prepared model."""
    torch.manual_seed(0)
    model = make()
    plain = trained(model, optimizer(model), one, steps)
    model, prepared_optimizer = prepared(make, optimizer, **more)
    ours = trained(model, prepared_optimizer, one, steps)
    assert ours[0] == plain[0]
    assert all(torch.equal(mine, other) for mine, other in zip(ours[1], plain[1]))
    return model


def blocks():
    return gm.session().model.blocks


# ---- what a steady step costs
# Calls of a steady step, beside those for parameters and gradients.
STEP_CALLS = {
    "phase_set": 3,
    "iteration_begin_with": 1,
    "iteration_end": 1,
    "update": 1,
    "zero": 1,
    "discard": 1,
    "stats": 2,
    "tier_stats": 1,
}


def counted(function):
    """How often a function calls each function of the library, and how often torch asks for a parameter's dispatch."""
    lib, counts, inner = gm.session().lib, collections.Counter(), {}
    for name, value in list(vars(lib).items()):
        if callable(value) and not name.startswith("stream_"):
            inner[name] = value

            def call(*args, _name=name, _value=value):
                counts[_name] += 1
                return _value(*args)

            setattr(lib, name, call)
    dispatch = tensors._run

    def run(func, args, kwargs):
        counts["dispatched"] += 1
        return dispatch(func, args, kwargs)

    tensors._run = run
    try:
        function()
    finally:
        tensors._run = dispatch
        for name, value in inner.items():
            setattr(lib, name, value)
    return dict(counts)


@by_block
def test_steady_step_costs_three_calls_a_block():
    model, optimizer = prepared(speculate=False)  # updates ahead of the step are calls of their own
    for number in range(4):
        step(model, optimizer, number)
    counts = counted(lambda: step(model, optimizer, 5))
    uses = BLOCKS + 2  # the embedding and the output layer
    assert counts.pop("dispatched") == 2
    # One in the forward pass, one in the backward pass, and one for the gradients of the function.
    assert counts == {
        "acquire": 3 * uses,
        "release": 3 * uses,
        "op_begin": 2 * uses,
        "op_end": 2 * uses,
        **STEP_CALLS,
    }
    stats = gm.stats()
    assert stats["departures"] == 0 and stats["planned_iterations"] > 0


@by_block
def test_checkpoint_within_a_block_costs_no_calls():
    model, optimizer = prepared(lambda: Net(block=Recomputed))
    for number in range(3):
        step(model, optimizer, number)
    counts = counted(lambda: step(model, optimizer, 5))
    assert counts["dispatched"] == 2 and counts["acquire"] == 3 * (BLOCKS + 2)


def test_steady_evaluation_costs_one_call_a_block():
    model, optimizer = prepared()
    for number in range(3):
        step(model, optimizer, number)
    with torch.no_grad():
        loss_of(model, 10)
        counts = counted(lambda: loss_of(model, 11))
    assert counts["acquire"] == counts["release"] == counts["op_begin"] == BLOCKS + 2
    assert counts["dispatched"] == 2


@by_block
def test_backward_passes_run_in_the_calling_thread_where_blocks_are_acquired():
    def threads():
        loss = loss_of(model, 3)
        loss.register_hook(lambda grad: seen.append(torch._C._is_multithreading_enabled()))
        loss.backward()

    for more, expected in (({}, False), ({"units": "never"}, True), ({"device_memory": "512KiB"}, True)):
        model, _ = prepared(**more)
        seen = []
        threads()
        assert seen == [expected] and torch._C._is_multithreading_enabled()
        gm.close()


def test_names_of_modules_are_not_walked_in_a_steady_step(monkeypatch):
    model, optimizer = prepared()
    step(model, optimizer, 0)
    step(model, optimizer, 1)
    walked = []
    for name in ("named_modules", "named_parameters"):
        inner = getattr(nn.Module, name)

        def walk(self, *args, _inner=inner, **kwargs):
            walked.append(self)
            return _inner(self, *args, **kwargs)

        monkeypatch.setattr(nn.Module, name, walk)
    step(model, optimizer, 2)
    assert not walked


# ---- when they are units
def test_blocks_are_units_only_where_all_fits():
    model, optimizer = prepared(device_memory="32MiB")
    step(model, optimizer, 0)
    assert blocks().active and list(blocks().found) == [f"blocks.{i}" for i in range(BLOCKS)]
    gm.close()
    del model, optimizer
    model, optimizer = prepared(device_memory="512KiB")
    step(model, optimizer, 0)
    assert not blocks().active
    counts = counted(lambda: step(model, optimizer, 1))
    assert counts["dispatched"] == 2 + 4 * BLOCKS


def test_blocks_are_units_where_they_are_small_beside_the_device(monkeypatch):
    """Two thirds of the model's data have to come and go."""
    count = 24
    block = sum(param.nbytes for param in Block(WIDTH).parameters())
    for share, are_units in ((count // 2, True), (2 * count, False)):
        monkeypatch.setattr(blocks_module, "SHARE_BESIDE", share)
        alike(make=lambda: Net(count=count), device_memory=count * block)  # as much again are gradients, and momenta
        assert blocks().active == are_units and sum(gm.stats()["moved_bytes"]["host to device"].values()) > 0
        gm.close()


def test_units_never_and_always():
    alike(units="never")
    assert not blocks().active and not blocks().found
    gm.close()
    alike(units="always", device_memory="1MiB")
    assert blocks().active
    gm.close()
    with pytest.raises(gm.GeminiError, match="units is 'sometimes': want 'auto', 'always', 'never'"):
        start(units="sometimes")


def test_blocks_that_call_each_other_train_alike():
    class Nested(Net):
        def forward(self, ids):
            x = self.embed(ids)
            first, second, *_ = self.blocks
            hook = first.up.register_forward_hook(lambda module, args, out: second(out))
            try:
                for block in (first, *self.blocks[2:]):
                    x = block(x)
            finally:
                hook.remove()
            return self.out(x)

    alike(make=Nested)
    assert blocks().active


def test_small_modules_and_single_ones_are_no_blocks():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH)))
    start()
    gm.prepare(model)
    assert not blocks().found


def test_unit_and_prepare_take_the_place_of_blocks():
    model, optimizer = prepared(optimizer=sgd)
    step(model, optimizer, 0)
    gm.unit(model.blocks[1])
    assert list(blocks().found) == ["blocks.0", "blocks.2", "blocks.3"]
    step(model, optimizer, 1)
    gm.prepare(model)
    assert list(blocks().found) == ["blocks.0", "blocks.2", "blocks.3"]
    step(model, optimizer, 2)
    gm.unit(model.blocks[2].up)  # it is within a block
    assert list(blocks().found) == ["blocks.0", "blocks.3"]
    ours = [step(model, optimizer, 3), *(param.detach().clone() for param in model.parameters())]
    gm.close()
    torch.manual_seed(0)
    model = Net()
    optimizer = sgd(model)
    plain = [[step(model, optimizer, number) for number in range(4)][-1], *model.parameters()]
    assert ours[0] == plain[0] and all(torch.equal(a, b) for a, b in zip(ours[1:], plain[1:]))


# ---- equal to the bit
@pytest.mark.parametrize("reentrant, block", [(None, Block), (False, Block), (True, Block), (None, Recomputed)])
def test_blocks_train_alike(reentrant, block):
    alike(make=lambda: Net(reentrant, block))
    assert blocks().active


@pytest.mark.parametrize("when", ["between steps", "before backward"])
def test_budget_that_shrinks_and_grows_changes_no_bits(when):
    def one(model, optimizer, number):
        def set_budget():
            if gm._current is not None and number in (2, 4):
                gm.session().manager.budget_set("device", "512KiB" if number == 2 else "32MiB")

        if when == "between steps":
            set_budget()
        loss = loss_of(model, number)
        if when == "before backward":
            set_budget()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    alike(one, steps=7)
    assert blocks().stopped and not blocks().active
    assert sum(gm.stats()["moved_bytes"]["host to device"].values()) > 0


def test_evaluation_and_edits_between_steps():
    def one(model, optimizer, number):
        out = step(model, optimizer, number)
        block = model.blocks[number % BLOCKS]
        with torch.no_grad():
            before = loss_of(model, 100).item()
            block.up.weight.mul_(1.5)
            block.down.weight.data[3:5] = 0.25
            block.scale.data = block.scale.data  # nothing
            model.load_state_dict(
                {**model.state_dict(), f"blocks.{number % BLOCKS}.up.bias": torch.full((WIDTH,), 0.5)}
            )
            after = loss_of(model, 100).item()
        assert before != after
        return out, before, after, block.up.weight.sum().item(), block.norm.weight.tolist()

    alike(one)


def test_writes_in_a_block_and_between_forward_and_backward_are_kept():
    def tap(block, x):
        with torch.no_grad():
            block.scale.mul_(0.75)
            block.norm.bias.data.add_(0.125)

    def one(model, optimizer, number):
        Block.tap = staticmethod(tap)
        loss = loss_of(model, number)
        Block.tap = staticmethod(lambda block, x: None)
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), saved["blocks.1.scale"].tolist(), saved["blocks.2.norm.bias"].tolist()

    # On 16 bits a write that nobody notices would be lost in the next step, which is made on the fp32 copy.
    alike(
        one, make=lambda: Net().to(torch.bfloat16), optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.0)
    )


@pytest.mark.parametrize("when", ["before the step", "after the step"])
def test_views_that_a_block_keeps_are_of_its_parameter(when):
    def tap(block, x):
        block.kept = block.up.weight.detach()[2:4]

    def one(model, optimizer, number):
        Block.tap = staticmethod(tap)
        loss = loss_of(model, number)
        loss.backward()
        if when == "before the step":
            model.blocks[1].kept.mul_(0.5)
        optimizer.step()
        if when == "after the step":
            model.blocks[1].kept.mul_(0.5)
        optimizer.zero_grad()
        return loss.item(), model.blocks[2].kept.tolist(), model.blocks[1].up.weight[2].tolist()

    model = alike(one)
    assert all(isinstance(block.kept, tensors.ManagedTensor) for block in model.blocks)


def test_view_that_is_written_before_parameters_are_saved():
    model, optimizer = prepared()
    step(model, optimizer, 0)
    Block.tap = staticmethod(lambda block, x: setattr(block, "kept", block.up.weight.detach()[2:4]))
    loss = loss_of(model, 1)
    model.blocks[0].kept.fill_(7.0)
    assert pickle.loads(pickle.dumps(model.blocks[0].up.weight))[2:4].eq(7.0).all()
    assert model.blocks[0].up.weight.cpu()[2:4].eq(7.0).all()
    del loss


def test_gradients_are_seen_within_a_block():
    seen = []

    def tap(block, x):
        seen.append(None if block.up.weight.grad is None else block.up.weight.grad.sum().item())
        if block.index == 2:
            block.down.bias.grad = None

    def one(model, optimizer, number):
        Block.tap = staticmethod(tap)
        losses = []
        for part in range(2):  # accumulates
            loss = loss_of(model, 2 * number + part)
            if part and number == 1:
                model.zero_grad()
            loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
        return losses

    alike(one)
    half = len(seen) // 2
    assert seen[:half] == seen[half:] and any(value is not None for value in seen)


def test_hooks_see_gradients_in_the_backward_pass():
    seen = []

    def one(model, optimizer, number):
        weight = model.blocks[1].up.weight
        hook = weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.sum().item()))
        out = step(model, optimizer, number)
        hook.remove()
        return out

    alike(one)
    assert seen[:STEPS] == seen[STEPS:]


def test_losses_of_what_a_block_leaves_aside():
    def tap(block, x):
        block.aside = x

    def one(model, optimizer, number):
        Block.tap = staticmethod(tap)
        loss = loss_of(model, number)
        aside = sum(block.aside.square().mean() for block in model.blocks)
        if number % 2:  # nothing of the model's output, so that no backward pass comes by a block's results
            aside.backward()
        else:
            (loss + aside).backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), aside.item()

    alike(one)


def tap_aside(block, x):
    block.aside = x


@pytest.mark.parametrize(
    "reentrant, block, aside", [(None, Block, True), (None, Recomputed, False), (False, Block, False)]
)
def test_blocks_that_come_and_go_train_alike(reentrant, block, aside):
    """Where chunks that nobody holds are elsewhere, and their addresses fault."""

    def one(model, optimizer, number):
        Block.tap = staticmethod(tap_aside if aside else lambda block, x: None)
        loss = loss_of(model, number)
        if aside:
            parts = [block.aside.square().mean() for block in model.blocks]
            parts[number].backward(retain_graph=True)  # it does not come by the block's result
            loss = loss + parts[number + 1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    alike(one, make=lambda: Net(reentrant, block, 128, 8), units="always", device_memory="1152KiB")
    assert blocks().active and len(blocks().found) == 8
    assert sum(gm.stats()["moved_bytes"]["host to device"].values()) > 4 << 20


@by_block
def test_parameters_of_others_are_acquired_within_a_block():
    model, optimizer = prepared()
    for number in range(2):
        step(model, optimizer, number)
    other = model.out.weight
    Block.tap = staticmethod(lambda block, x: functional.linear(x, other) if block.index == 1 else None)
    counts = counted(lambda: loss_of(model, 2))
    assert counts["dispatched"] == 3 and counts["acquire"] == BLOCKS + 3


def test_results_that_nobody_can_look_into():
    class Opaque:
        def __init__(self, x):
            self.x = x

    class Inner(Block):
        def forward(self, x):
            return Opaque(super().forward(x.x))

    class Outer(Net):
        def __init__(self):
            super().__init__(block=Inner)

        def forward(self, ids):
            x = Opaque(self.embed(ids))
            for block in self.blocks:
                x = block(x)
            return self.out(x.x)

    alike(make=Outer)


def test_what_a_unit_holds_stays_while_it_uses_parameters_of_others():
    model, optimizer = prepared()
    gm.unit(model.blocks[1])
    held = []
    model.blocks[1].down.register_forward_hook(lambda module, args, out: out + model.out.weight[:1].mean())
    Block.tap = staticmethod(
        lambda block, x: x.register_hook(lambda grad: held.append(gm.session().backward.held[0][0].count))
    )
    loss_of(model, 1).backward()
    # In the order of the backward pass. In the unit, behind the use of the other parameter, all seven are still there.
    assert held == [7, 7, 7, 7]


def test_updates_in_the_backward_pass():
    ended = []
    for units in ("never", "auto"):
        torch.manual_seed(0)
        model = Net().to(torch.bfloat16)
        start(units=units)
        model, optimizer = gm.prepare(model, adamw(model), step_in_backward=True)
        ended.append(trained(model, optimizer))
        assert blocks().active == (units == "auto")
        gm.close()
    assert ended[0][0] == ended[1][0]
    assert all(torch.equal(one, other) for one, other in zip(ended[0][1], ended[1][1]))


def test_transforms_copies_and_moves_of_a_block():
    model, optimizer = prepared()
    step(model, optimizer, 0)
    block, x = model.blocks[0], torch.randn(2, WIDTH)
    want = block(x)
    params = {name: param.detach().clone() for name, param in block.named_parameters()}
    grads = torch.func.grad(lambda values: torch.func.functional_call(block, values, (x,)).sum())(params)
    assert set(grads) == set(params)
    assert torch.equal(torch.func.vmap(block)(x[None])[0], want)
    twin = copy.deepcopy(block)
    assert type(twin.up.weight) is nn.Parameter and torch.equal(twin(x), want)

    with pytest.raises(gm.GeminiError, match=r"blocks\.0\.scale would be moved or replaced"):
        Block.tap = staticmethod(lambda block, x: setattr(block.scale, "data", torch.ones(WIDTH)))
        block(x)


def test_parameters_that_are_added_or_replaced_are_noticed_in_the_next_forward_pass():
    model, optimizer = prepared()
    step(model, optimizer, 0)
    step(model, optimizer, 1)
    model.blocks[2].more = nn.Parameter(torch.ones(3))
    with pytest.raises(gm.GeminiError, match=r"blocks\.2\.more was added"):
        loss_of(model, 2)
    del model.blocks[2].more
    step(model, optimizer, 2)
    model.blocks[1].extra = nn.Linear(3, 3)
    with pytest.raises(gm.GeminiError, match=r"blocks\.1\.extra\.weight was added"):
        loss_of(model, 3)
    del model.blocks[1].extra
    model.blocks[3].down.more = nn.Parameter(torch.ones(3))
    with pytest.raises(gm.GeminiError, match=r"blocks\.3\.down\.more was added"):
        loss_of(model, 3)
    del model.blocks[3].down.more
    linear, model.blocks[2].up = model.blocks[2].up, nn.Linear(WIDTH, WIDTH)
    with pytest.raises(gm.GeminiError, match=r"blocks\.2\.up\.weight was replaced"):
        loss_of(model, 3)
    model.blocks[2].up = linear
    kept = model.out.bias
    model.out.bias = nn.Parameter(torch.ones(VOCAB))
    with pytest.raises(gm.GeminiError, match=r"out\.bias was replaced"):
        loss_of(model, 3)
    model.out.bias = kept
    step(model, optimizer, 3)
    model.blocks[0].up.weight.requires_grad_(False)
    step(model, optimizer, 4)
    model.blocks[0].up.weight.requires_grad_(True)
    loss_of(model, 5).backward()
    assert model.blocks[0].up.weight.grad is not None


def test_frozen_when_prepared_and_thawed_later():
    def make():
        model = Net()
        model.blocks[1].requires_grad_(False)
        return model

    def one(model, optimizer, number):
        if number == 2:
            model.blocks[1].requires_grad_(True)
        return step(model, optimizer, number)

    alike(one, make=make)


def test_parameters_that_are_thawed_are_noticed_in_the_next_forward_pass():
    model = Net()
    model.blocks[1].requires_grad_(False)
    start()
    gm.prepare(model)
    loss_of(model, 0)
    record = model.blocks[1].up.weight._gm_record
    assert record.hook is None
    model.blocks[1].requires_grad_(True)
    loss_of(model, 1).backward()
    assert record.hook is not None and record.has_grad


# ---- what readers of this code found
TIGHT = {"units": "always", "device_memory": "640KiB"}  # blocks are fetched one by one


def test_results_changed_in_place_are_differentiated_with_their_weights():
    alike(make=lambda: Net(block=InPlace, count=24), **TIGHT)


def test_blocks_within_a_unit_that_does_not_contain_them():
    def one(model, optimizer, number):
        if isinstance(model.around.up.weight, tensors.ManagedTensor) and number == 0:
            gm.unit(model.around)
        return step(model, optimizer, number)

    alike(one, WithAround, **TIGHT)


def test_copies_of_blocks_compute_with_their_own_parameters():
    model, optimizer = prepared(lambda: Net(block=Copied), sgd)
    step(model, optimizer, 0)
    assert gm.session().models[0].blocks.active
    twin = copy.deepcopy(model)
    with torch.no_grad():
        before = loss_of(twin, 1).item()
    step(model, optimizer, 1)
    with torch.no_grad():
        assert loss_of(twin, 1).item() == before
        for param in twin.blocks.parameters():
            param.zero_()
        x = torch.randn(2, WIDTH)
        assert torch.equal(twin.blocks[0](x), x)
    assert pickle.loads(pickle.dumps(twin.blocks[0]))(x).equal(x)


def test_forward_passes_whose_results_are_dropped_end_their_iterations():
    model, optimizer = prepared(optimizer=sgd)
    for number in range(3):
        step(model, optimizer, number)
    before = gm.stats()["iterations"]
    for number in range(5):
        loss_of(model, number)
    assert gm.stats()["iterations"] >= before + 4
    assert not gm.session().brackets.awaits_backward()


def test_tracing_within_a_block_is_refused_as_elsewhere():
    model, optimizer = prepared(optimizer=sgd)
    step(model, optimizer, 0)

    def traces(block, y):
        block.up.requires_grad_(False)
        torch.jit.trace(lambda x: functional.linear(x, block.up.weight), (y.detach(),), check_trace=False)

    Block.tap = staticmethod(traces)
    with pytest.raises(gm.GeminiError, match="trac"):
        step(model, optimizer, 1)
