"""Models that fit, whose parameters are acquired for whole passes from the second training step on.

test_blocks.py trains its models in this way, too, and compares the bits; here is what is of whole models alone.

SPDX-License-Identifier: Apache-2.0
"""

import concurrent.futures
import importlib
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional

import libgemini.torch as gm
from conftest import off_the_device, overwrite_the_device
from libgemini.torch.tensors import ManagedParameter, ManagedTensor
from libgemini.torch.whole import HeldParameter
from test_blocks import STEP_CALLS, Net, adamw, blocks, counted, loss_of, prepared, sgd, start, step, trained

unit_module = importlib.import_module("libgemini.torch.unit")  # of which libgemini.torch has a function


@pytest.fixture(autouse=True)
def closed():
    yield
    gm.close()


def whole():
    return gm.session().model.whole


def running(*numbers, optimizer=adamw, **more):
    """A model that has made steps, and its optimizer."""
    model, made = prepared(optimizer=optimizer, **more)
    for number in numbers or range(3):
        step(model, made, number)
    return model, made


def alone_and_in_a_session():
    """The same new model and its optimizer twice, with torch alone and in a session; and whether it is in one."""
    for managed in (False, True):
        torch.manual_seed(0)
        model = Net()
        optimizer = sgd(model)
        if managed:
            start()
            model, optimizer = gm.prepare(model, optimizer)
        yield model, optimizer, managed


def at(model, call, index=1):
    """Has call(module, *args) called in the middle of forward passes, by a block. Returns the hook."""
    return model.blocks[index].register_forward_hook(call)


# ---- what a steady step costs
def test_steady_step_costs_as_many_calls_as_one_function():
    model, optimizer = running(speculate=False, device_memory="64MiB")
    assert whole().active
    counts = counted(lambda: step(model, optimizer, 5))
    assert counts == {
        "acquire": 2,  # of all parameters, and of all gradients
        "release": 2,
        "op_begin": 2,
        "op_end": 2,
        **STEP_CALLS,
    }
    stats = gm.stats()
    assert stats["departures"] == 0 and stats["planned_iterations"] > 0


def test_the_backward_pass_runs_in_the_calling_thread():
    """Which tells on a GPU alone; test_cuda.py looks at the threads."""
    model, optimizer = prepared(make=lambda: nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50)))  # it has no blocks
    seen = []
    for number in range(3):
        loss = loss_of(model, number)
        loss.register_hook(lambda grad: seen.append(torch._C._is_multithreading_enabled()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert seen == [True, False, False] and torch._C._is_multithreading_enabled()
    loss = torch.ones(2, requires_grad=True).sum()
    loss.register_hook(lambda grad: seen.append(torch._C._is_multithreading_enabled()))
    loss.backward()
    assert seen[3:] == [True]  # it is none of the model's


def test_a_steady_step_searches_no_objects(monkeypatch):
    model, optimizer = running()
    searched = []
    monkeypatch.setattr(unit_module, "tensors_since", lambda before: searched.append(before) or [])
    step(model, optimizer, 3)
    with torch.no_grad():
        loss_of(model, 4)
    assert whole().active is False and not searched
    step(model, optimizer, 5)
    loss = loss_of(model, 6)
    gm.session().let_models_go()  # its graph has saved some
    assert len(searched) == 1
    loss.backward()


def test_gradients_are_stored_when_they_are_many():
    size = sum(param.nbytes for param in Net().parameters())
    for memory, acquires in ((256 * size, 1), (64 * size, 4)):
        model, optimizer = running(speculate=False, device_memory=memory)
        counts = counted(lambda model=model, optimizer=optimizer: step(model, optimizer, 5))
        assert whole().active and 1 + acquires <= counts["acquire"] <= 2 + acquires
        gm.close()


# ---- when it is
def test_a_model_is_whole_from_its_second_step_on():
    model, optimizer = prepared()
    step(model, optimizer, 0)
    assert not whole().active and blocks().active
    seen = []
    at(model, lambda module, args, out: seen.append({type(param) for param in model.parameters()}))
    for number in range(1, 4):
        step(model, optimizer, number)
        assert whole().active
    assert seen == [{HeldParameter}] * 3
    assert all(type(param) is ManagedParameter for param in model.parameters())
    assert not gm.session().holds.noted


@pytest.mark.parametrize(
    "more",
    (
        {"units": "never"},
        {"units": "always"},
        {"placement": "cpu"},
        {"device_memory": "512KiB"},  # not all fits
    ),
)
def test_models_that_are_not_whole(more):
    running(**more)
    assert not whole().active


def test_parameters_of_more_than_a_quarter_of_the_device_are_not_held():
    size = sum(param.nbytes for param in Net().parameters())
    for share, active in ((5, True), (3, False)):
        model, _ = prepared(optimizer=sgd, device_memory=share * size)
        for number in range(3):  # without states
            loss_of(model, number).backward()
            model.zero_grad()
        assert whole().active == active
        gm.close()


def test_updates_in_the_backward_pass_are_not_put_off():
    torch.manual_seed(0)
    model = Net()
    start()
    model, optimizer = gm.prepare(model, adamw(model), step_in_backward=True)
    for number in range(3):
        step(model, optimizer, number)
    assert not whole().active


def test_what_ends_it_for_good():
    def another():
        torch.manual_seed(1)
        gm.prepare(nn.Linear(4, 4))

    def thread():
        one = threading.Thread(target=lambda: step(model, optimizer, 3))
        one.start()
        one.join()

    def out_of_memory():
        def fails(*_):
            raise torch.OutOfMemoryError("none left")

        hook = at(model, fails)
        with pytest.raises(torch.OutOfMemoryError):
            step(model, optimizer, 3)
        hook.remove()

    def out_of_memory_in_the_backward_pass():
        def fails(grad):
            raise torch.OutOfMemoryError("none left")

        hook = at(model, lambda module, args, out: out.register_hook(fails) and None)
        with pytest.raises(torch.OutOfMemoryError):
            step(model, optimizer, 3)
        hook.remove()

    def offload():
        with gm.offload_activations():
            step(model, optimizer, 3)

    def unit():
        gm.unit(model.blocks[0])

    for end in (
        another,
        thread,
        offload,
        out_of_memory,
        out_of_memory_in_the_backward_pass,
        unit,
        lambda: gm.session().manager.budget_set("device", "512KiB"),
    ):
        model, optimizer = running()
        assert whole().active
        ours = gm.session().models[0].whole
        end()
        optimizer.zero_grad()
        for number in range(4, 6):
            step(model, optimizer, number)
        assert not ours.active and ours.stopped
        assert all(type(param) is ManagedParameter for param in model.parameters())
        gm.close()


# ---- what is asked of a parameter while it runs
def test_hooks_and_modules_see_gradients_that_are_stored():
    model, optimizer = running()
    loss_of(model, 3).backward()
    weight = model.blocks[2].up.weight
    wanted = weight.grad.clone()
    seen = []

    def look(module, args, out):
        assert type(weight) is HeldParameter
        seen.append(weight.grad.clone())

    hook = at(model, look)
    loss = loss_of(model, 4)
    hook.remove()
    assert torch.equal(seen[0], wanted)
    after = weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))
    loss.backward()
    after.remove()
    assert torch.equal(seen[1], weight.grad) and not torch.equal(seen[1], wanted)

    def clear(module, args, out):
        weight.grad = None

    hook = at(model, clear)
    loss_of(model, 5)
    hook.remove()
    assert weight.grad is None
    optimizer.step()


def test_what_hands_out_or_replaces_memory_is_served_as_elsewhere():
    model, optimizer = running()
    weight = model.blocks[2].up.weight
    wanted = weight.detach().clone()
    seen = []

    def look(module, args, out):
        seen.append(True)
        assert type(weight) is HeldParameter and isinstance(weight, nn.Parameter) and weight.is_leaf
        array = weight.data.numpy()
        assert not array.flags.writeable and (array == wanted.numpy()).all()
        assert weight.tolist() == wanted.tolist()
        assert isinstance(weight.data, ManagedTensor)
        with pytest.raises(gm.GeminiError, match="would give it other memory"):
            weight.resize_(1)
        with pytest.raises(gm.GeminiError, match="would change the layout"):
            weight.t_()
        with pytest.raises(gm.GeminiError, match="would be moved or replaced"):
            weight.data = torch.zeros_like(wanted)
        with pytest.raises(gm.GeminiError, match="cannot be used as a storage"):
            torch.empty(0).set_(weight.untyped_storage())

    hook = at(model, look)
    step(model, optimizer, 3)
    hook.remove()
    assert seen and whole().active


def test_writes_and_kept_tensors_of_a_pass():
    """A write through the data, one to the parameter, and a view that is kept, with everything off the device
    afterwards."""
    outcomes = []
    for model, optimizer, managed in alone_and_in_a_session():
        kept = []

        def change(module, args, out, model=model, kept=kept):
            model.out.bias.data.mul_(0.5)
            with torch.no_grad():
                model.blocks[3].up.bias.add_(0.25)
            kept[:] = [model.blocks[2].up.weight.detach()[1:], model.blocks[2].down.weight.t()]

        seen = []
        for number in range(4):
            hook = at(model, change)
            loss = loss_of(model, number)
            hook.remove()
            if managed and number % 2:
                overwrite_the_device()
            seen += [loss.item(), *(one.clone() for one in kept)]
            loss.backward()
            if managed:
                overwrite_the_device()
            optimizer.step()
            optimizer.zero_grad()
            if managed:
                assert all(isinstance(one, ManagedTensor) for one in kept)
                overwrite_the_device()
            seen += [one.detach().clone() for one in (*kept, *model.parameters())]
        outcomes.append(seen)
        assert not managed or whole().active
    for ours, theirs in zip(*outcomes):
        assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))


def test_graphs_of_several_passes_and_none():
    """Two passes before their backward passes, one twice, one never, and one after the step, which torch refuses."""
    outcomes = []
    for model, optimizer, managed in alone_and_in_a_session():
        for number in range(4):
            one, other, _ = (loss_of(model, 3 * number + i) for i in range(3))
            if managed:
                off_the_device()
            one.backward(retain_graph=True)
            other.backward()
            if managed:
                off_the_device()
            one.backward()
            late = loss_of(model, number)
            optimizer.step()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                late.backward()
            optimizer.zero_grad()
        outcomes.append([param.detach().clone() for param in model.parameters()])
        assert not managed or whole().active
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*outcomes))


def test_a_write_to_what_a_pass_has_kept_counts():
    model, _ = running()
    wanted = model.out.bias.detach().clone() + 1
    kept = []
    overwrite_the_device()  # so that what comes from the host is not written back if nobody says that it has changed
    hook = at(model, lambda module, args, out: kept.append(model.out.bias.detach()))
    loss = loss_of(model, 3)
    hook.remove()
    assert type(kept[0]) is torch.Tensor  # until its bytes may move
    kept[0].add_(1)  # which no graph has saved
    overwrite_the_device()
    assert torch.equal(model.out.bias, wanted) and torch.equal(kept[0], wanted)
    loss.backward()


def test_a_loss_that_leaves_the_model_beside_its_result():
    grads = []
    for model, optimizer, managed in alone_and_in_a_session():
        for number in range(2):
            step(model, optimizer, number)
        aside = []
        at(model, lambda module, args, out, aside=aside: aside.append(module.up(out).square().mean()))
        for number in range(3):
            aside.clear()
            loss_of(model, number)
            if managed:
                overwrite_the_device()
            aside[0].backward()
        grads.append([param.grad.clone() for param in model.parameters() if param.grad is not None])
        assert not managed or whole().active
    assert len(grads[0]) > 7 and all(torch.equal(ours, theirs) for ours, theirs in zip(*grads))


def test_a_pass_has_the_model_until_it_ends():
    """Also behind functions outside of it that use its parameters."""
    model, optimizer = running()
    seen, aside = [], []
    hook = at(model, lambda module, args, out: aside.append(out))
    at(model, lambda module, args, out: out.register_hook(lambda grad: seen.append(type(model.out.weight))) and None, 0)
    loss_of(model, 3)
    hook.remove()
    loss = functional.linear(aside[0], model.out.weight).square().mean()
    overwrite_the_device()
    loss.backward()
    assert seen == [HeldParameter] and type(model.out.weight) is ManagedParameter
    optimizer.step()


def test_modules_that_are_removed_are_no_longer_acquired():
    model, optimizer = running(optimizer=lambda model: sgd(nn.ModuleList([model.embed, model.out])))
    removed = set(model.blocks[3].parameters())
    before = len(whole().unit.tensors)
    del model.blocks[3]
    step(model, optimizer, 3)
    assert whole().active and len(whole().unit.tensors) == before - len(removed)


def test_a_graph_outlives_a_change_of_the_model():
    """It is prepared again, or has other parameters that are trained, between a pass and its backward pass."""

    def again(model):
        return gm.prepare(model, sgd(model))[1]

    def freeze(model):
        model.blocks[0].up.bias.requires_grad_(False)
        with torch.no_grad():
            loss_of(model, 7)
        return None

    for change in (again, freeze):
        outcomes = []
        for model, optimizer, managed in alone_and_in_a_session():
            for number in range(3):
                step(model, optimizer, number)
            loss = loss_of(model, 3)
            if managed:
                optimizer = change(model) or optimizer
                overwrite_the_device()
            elif change is freeze:
                freeze(model)
            else:
                optimizer = sgd(model)
            loss.backward()
            if managed:
                overwrite_the_device()
            optimizer.step()
            outcomes.append([param.detach().clone() for param in model.parameters()])
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(*outcomes))
        assert not gm.session().holds.noted
        gm.close()


def test_a_loss_without_the_model_is_no_pass_of_it():
    model, optimizer = running()
    weight = torch.ones(4, requires_grad=True)
    counts = counted(lambda: (weight * 2).sum().backward())
    assert counts == {"acquire": 1, "release": 1} and torch.equal(weight.grad, torch.full((4,), 2.0))
    step(model, optimizer, 3)
    assert gm.stats()["departures"] == 0


def test_a_device_that_becomes_smaller():
    model, optimizer = prepared(make=lambda: Net(count=12), optimizer=sgd)
    for number in range(3):
        step(model, optimizer, number)
    assert whole().active
    loss = loss_of(model, 3)
    with pytest.raises(gm.GeminiError, match="more bytes of device memory are needed"):  # its graph may read them
        gm.session().manager.budget_set("device", "320KiB")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(gm.GeminiError, match="embed.weight:model: .* bytes of device memory, .* more than"):
        gm.session().manager.budget_set("device", "320KiB")  # smaller than the parameters
    gm.session().manager.budget_set("device", "768KiB")
    for number in range(4, 7):
        step(model, optimizer, number)
    assert whole().stopped and not gm.session().keepers
    assert not counted(lambda: (torch.ones(2, requires_grad=True) * 2).sum().backward())


def of_a_view_that_is_returned(model, z):
    kept = []
    hook = at(model, lambda module, args, out: kept.append(model.out.weight.detach()[:4]))
    loss_of(model, 3)
    hook.remove()
    return (kept[0] * z).sum()


def of_a_hook_of_the_backward_pass(model, z):
    losses = []

    def look(grad):
        with torch.enable_grad():
            losses.append(functional.linear(z, model.out.weight).square().sum() + (z[0] * model.out.weight).sum())

    hook = at(model, lambda module, args, out: out.register_hook(look) and None)
    loss_of(model, 3).backward()
    hook.remove()
    return losses[0]


def of_another_thread(model, z):
    losses = []

    def look(module, args, out):
        thread = threading.Thread(target=lambda: losses.append((model.out.weight[:4] * z).sum()))
        thread.start()
        thread.join()

    hook = at(model, look)
    loss_of(model, 3)
    hook.remove()
    return losses[0]


@pytest.mark.parametrize("make", (of_a_view_that_is_returned, of_a_hook_of_the_backward_pass, of_another_thread))
def test_graphs_that_lead_to_no_call_of_the_model(make):
    grads = []
    for model, optimizer, managed in alone_and_in_a_session():
        for number in range(3):
            step(model, optimizer, number)
        z = torch.linspace(-1, 1, 4 * 64).view(4, 64).requires_grad_()
        loss = make(model, z)
        if managed:
            assert whole().active
            overwrite_the_device()
        loss.backward()
        grads.append(z.grad)
    assert torch.equal(grads[0], grads[1])


def test_loads_and_prepares_while_there_are_graphs(tmp_path):
    model, optimizer = running(optimizer=sgd)
    gm.save(tmp_path / "saved", model, optimizer)
    wanted = [param.detach().clone() for param in model.parameters()]
    step(model, optimizer, 3)
    losses = [loss_of(model, 4)]
    gm.load(tmp_path / "saved", model, optimizer)
    assert all(torch.equal(param, one) for param, one in zip(model.parameters(), wanted))
    losses.append(loss_of(model, 5))
    gm.load_weights(model, tmp_path / "saved")
    losses.append(loss_of(model, 6))
    model.added = nn.Linear(64, 64)
    gm.prepare(model)
    losses.append(loss_of(model, 7))
    gm.prepare(nn.Linear(64, 64))
    losses.append(loss_of(model, 8))
    assert all(torch.equal(param, one) for param, one in zip(model.parameters(), wanted))
    losses[-1].backward()


def in_thread(call):
    """Calls it in a new thread, whose graphs have numbers from 0 on, and returns what it returns."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def test_graphs_of_other_threads_are_none_of_a_closed_session():
    def train():
        first = running()  # alive while the next session runs
        assert whole().active
        gm.close()
        start()
        module = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
        second, optimizer = gm.prepare(module, sgd(module))
        for loss in in_thread(lambda: [second(torch.ones(2, 64)).sum() for _ in range(30)]):
            loss.backward()
        del first, optimizer
        return second

    assert all(param.grad is not None for param in in_thread(train).parameters())


@pytest.mark.parametrize("weights", [False, True])
def test_loads_after_an_interrupt_within_an_acquire(tmp_path, monkeypatch, weights):
    model, optimizer = running(optimizer=sgd)
    gm.save(tmp_path / "saved", model, optimizer)
    wanted = [param.detach().clone() for param in model.parameters()]
    step(model, optimizer, 3)
    lib = gm.session().lib
    acquire = lib.acquire

    def interrupted(*arguments):
        acquire(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(lib, "acquire", interrupted)
        loss_of(model, 4).backward()
    if weights:
        gm.load_weights(model, tmp_path / "saved")
    else:
        gm.load(tmp_path / "saved", model, optimizer)
    assert all(torch.equal(param, one) for param, one in zip(model.parameters(), wanted))
    step(model, optimizer, 3)


def test_writes_between_passes_reach_master_copies():
    outcomes = []
    for units in ("auto", "never"):
        torch.manual_seed(0)
        model = Net().to(torch.bfloat16)
        start(units=units)
        model, optimizer = gm.prepare(model, adamw(model))
        for number in range(4):
            one = loss_of(model, 2 * number)
            with torch.no_grad():
                model.out.bias.add_(0.25)  # which no graph has saved, and master copies follow before the next pass
            (one + loss_of(model, 2 * number + 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert whole().active == (units == "auto")
        outcomes.append([param.detach().clone() for param in model.parameters()])
        gm.close()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*outcomes))


def test_split_masters_are_not_held():
    torch.manual_seed(0)
    model = Net().to(torch.bfloat16)
    start()
    model, optimizer = gm.prepare(model, adamw(model), masters="split16")
    for number in range(3):
        step(model, optimizer, number)
    assert not whole().active  # versions do not tell which elements were written


def test_views_hand_out_copies():
    model, optimizer = running(optimizer=sgd)
    weight = model.blocks[2].up.weight
    wanted, kept = weight.detach().clone(), []

    def look(module, args, out):
        view = weight.detach()[1:]
        array = view.numpy()
        assert type(view) is torch.Tensor and not array.flags.writeable
        kept.extend([array, torch.from_dlpack(view), torch.ones(2).numpy()])
        kept.append(torch.from_dlpack(torch.to_dlpack(view)))
        torch.from_dlpack(view).fill_(7.0)

    hook = at(model, look)
    loss = loss_of(model, 3)
    hook.remove()
    overwrite_the_device()
    assert (kept[0] == wanted[1:].numpy()).all() and torch.equal(kept[1], wanted[1:])
    assert kept[2].flags.writeable and torch.equal(kept[3], wanted[1:]) and torch.equal(weight, wanted)
    loss.backward()


def test_a_number_that_is_trained_and_frozen_in_a_pass():
    class Scaled(Net):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(1.5))

        def forward(self, ids):
            return super().forward(ids) * self.gain

    model, optimizer = prepared(Scaled)
    for number in range(3):
        step(model, optimizer, number)
    assert whole().active
    hook = at(model, lambda module, args, out: model.gain.requires_grad_(False) and None)
    loss_of(model, 3)
    hook.remove()
    off_the_device()
    assert torch.full((1,), model.gain).item() == pytest.approx(model.gain.item())
    step(model, optimizer, 4)
    assert not whole().active  # torch may take it for a number


def test_parameters_that_are_replaced_frozen_or_added():
    model, optimizer = running(optimizer=sgd)
    model.blocks[0].up.weight.requires_grad_(False)
    before = model.blocks[0].up.weight.detach().clone()
    step(model, optimizer, 3)
    assert whole().active and torch.equal(model.blocks[0].up.weight, before)
    model.blocks[0].up.weight.requires_grad_(True)
    step(model, optimizer, 4)
    assert whole().active and not torch.equal(model.blocks[0].up.weight, before)
    model.added = nn.Linear(2, 2)
    with pytest.raises(gm.GeminiError, match="added after"):
        step(model, optimizer, 5)
    del model.added
    step(model, optimizer, 6)
    assert whole().active


def test_trained_alike_with_and_without(monkeypatch):
    ours = trained(*prepared(optimizer=adamw), steps=6)
    assert whole().active
    gm.close()
    theirs = trained(*prepared(optimizer=adamw, units="never"), steps=6)
    assert ours[0] == theirs[0] and all(torch.equal(a, b) for a, b in zip(ours[1], theirs[1]))
