"""Several models and optimizers in a session, several forward passes in a step, other processes.

SPDX-License-Identifier: Apache-2.0
"""

import copy
import os
import pickle
import re
import signal
import sys
import threading

import pytest
import torch
from torch import nn

import child_of
import libgemini.torch as gm
from conftest import alike, off_the_device, same_bits, sgd, values
from libgemini.torch.tensors import ManagedParameter

SIZE = 96


def mlp(depth=3):
    return nn.Sequential(*(nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh()) for _ in range(depth)))


def data(step=0, rows=5):
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(step))


def adversaries(managed, steps=4):
    """Two models and their optimizers, as of a GAN; returns losses and all parameters."""
    torch.manual_seed(0)
    maker, judge = mlp(), mlp()
    pairs = [(model, sgd(model.parameters())) for model in (maker, judge)]
    if managed:
        pairs = [gm.prepare(*pair) for pair in pairs]
    (maker, make), (judge, judging) = pairs
    out = []
    for step in range(steps):
        judging.zero_grad()
        made = maker(data(step))
        loss = judge(made.detach()).mean() - judge(data(step + 100)).mean()
        if managed:
            off_the_device()
        loss.backward()
        judging.step()
        make.zero_grad()
        loss = judge(made).square().mean()
        loss.backward()
        make.step()
        out.append(loss.detach())
    return out + [value for model in (maker, judge) for value in values(model).values()]


def in_a_thread(function):
    """Calls a function in a thread of its own. Returns what it has raised, or None."""
    raised: list[BaseException | None] = [None]

    def run():
        try:
            function()
        except BaseException as error:
            raised[0] = error

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0]


def test_one_thread_at_a_time(session):
    """Threads may take turns. One that comes in the middle of another one's pass is refused, as it would release what
    that uses; and the step goes on as if nothing had been."""
    said = []

    def run(model, optimizer, managed):
        losses = []

        def step(i):
            loss = model(data(i)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())

        def meddle(*_):
            if managed:
                for call in (
                    lambda: model(data()),
                    lambda: other(data()),
                    lambda: early.backward(retain_graph=True),
                    optimizer.step,
                ):
                    said.append(in_a_thread(call))

        step(0)
        assert in_a_thread(lambda: step(1)) is None
        other = mlp(1)
        if managed:
            other = gm.prepare(other)
        early = model[0](data()).sum()
        hooks = model[1].register_forward_pre_hook(meddle), model[1].register_full_backward_pre_hook(meddle)
        step(2)
        for hook in hooks:
            hook.remove()
        step(3)
        return losses

    torch.manual_seed(0)
    model = mlp()
    wanted = run(model, sgd(model.parameters()), False), values(model)
    session("512KiB")
    torch.manual_seed(0)
    model, optimizer = gm.prepare(ours := mlp(), sgd(ours.parameters()))
    same_bits(run(model, optimizer, True), wanted[0])
    same_bits(values(model), wanted[1])
    forward, backward = said[:4], said[4:]
    names = ("Sequential", "Sequential", r"backward\(\)", r"optimizer.step\(\)")
    for errors, runs in (forward, "forward"), (backward, "backward"):
        assert len(errors) == 4
        for name, error in zip(names, errors):
            assert re.match(rf"{name} is called while another thread runs a {runs} pass.*take turns", str(error)), error
            assert error.status == "BUSY"


def test_two_models_and_optimizers(session):
    wanted = adversaries(False)
    session("512KiB")
    same_bits(adversaries(True), wanted)
    assert gm.stats()["iterations"] == 2 * 4  # each optimizer's step ends one


def test_each_prepared_model_is_guarded(session):
    session()
    first, second = mlp(), mlp()
    gm.prepare(first)
    gm.prepare(second)
    for model in (first, second):
        with pytest.raises(gm.GeminiError, match="0.0.weight would be moved or replaced"):
            model.half()
    gm.prepare(first, sgd(first.parameters()))  # again, now with an optimizer
    first(data())
    gm.unit(first[0])
    gm.unit(second[0])
    with torch.no_grad():
        first(data())
        second(data())
    assert gm.stats()["iterations"] == 3


def test_a_model_that_calls_another_one_is_one_step(session):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.teacher = mlp(), mlp().requires_grad_(False)

        def forward(self, x):
            with torch.no_grad():
                wanted = self.teacher(x)
            return (self.inner(x) - wanted).square().mean()

    session("512KiB")
    torch.manual_seed(0)
    model = Outer()
    gm.prepare(model.inner)
    gm.prepare(model.teacher)
    model, optimizer = gm.prepare(model, sgd(model.parameters()))
    for step in range(4):
        model(data(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = gm.stats()
    assert (stats["iterations"], stats["departures"]) == (4, 0)


def passes(model, step, teacher=None):
    """Of which there are several before the backward pass."""
    out = model(data(step)) - model(data(step + 100))
    if teacher:
        with torch.no_grad():
            wanted = teacher(data(step))
        out = out - wanted
    return out.square().mean()


@pytest.mark.parametrize("teaching", (False, True))
def test_forward_passes_before_a_backward_pass_are_of_its_step(session, teaching):
    def run(model, optimizer):
        torch.manual_seed(5)
        teacher = mlp() if teaching else None
        losses = []
        for step in range(5):
            loss = passes(model, step, teacher)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    alike(session, mlp, run)
    stats = gm.stats()
    assert (stats["iterations"], stats["departures"]) == (5, 0) and stats["planned_iterations"]


def test_forward_passes_of_which_nothing_comes_are_steps_of_their_own(session, monkeypatch):
    session()
    model = gm.prepare(mlp())
    for _ in range(4):
        model(data())  # whose graph goes at once
    assert gm.stats()["iterations"] == 3  # and one is open
    monkeypatch.setattr(sys.modules["libgemini.torch.brackets"], "MOST_PASSES", 2)
    kept = []
    for _ in range(5):
        kept.append(model(data()))
    assert gm.stats()["iterations"] == 4 + 2


# ---- copies, other processes
def test_optimizers_are_not_copied(session):
    session()
    model = mlp()
    model, optimizer = gm.prepare(model, sgd(model.parameters()))
    for take in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(gm.GeminiError, match=r"can be neither copied nor pickled.* state_dict\(\)"):
            take(optimizer)


def step_of(model, optimizer):
    model(data()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_workers_that_are_forked_load_data(session):
    session("512KiB")
    model = mlp()
    model, optimizer = gm.prepare(model, sgd(model.parameters()))
    loader = torch.utils.data.DataLoader(
        [torch.ones(SIZE)] * 6, batch_size=2, num_workers=2, multiprocessing_context="fork"
    )
    for _ in range(2):
        for rows in loader:
            model(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert gm.stats()["iterations"] == 6


def test_a_forked_process_is_refused_the_parameters(session):
    session("512KiB")
    model = mlp()
    model, optimizer = gm.prepare(model, sgd(model.parameters()))
    plain = copy.deepcopy(model)
    step_of(model, optimizer)
    hanging = model(data()).sum()  # an operator, an iteration and a graph are open
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        said = []
        signal.alarm(20)  # rather than waiting for a lock
        for use in (
            lambda: model(data()),
            lambda: model[0][0].weight + 1,
            hanging.backward,
            optimizer.step,
            gm.stats,
            lambda: model[0][0].weight.copy_(0),
            lambda: copy.deepcopy(model),
        ):
            try:
                use()
                said.append("nothing")
            except RuntimeError as error:
                said.append(str(error))
        said.append(f"{plain(data()).shape[1]} plain")
        gm.close()
        os.write(writing, "\n".join(said).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        said = file.read().split("\n")
    assert os.waitpid(child, 0)[1] == 0
    assert said.pop() == f"{SIZE} plain" and said.pop(4).startswith("there is no session")
    assert len(said) == 6
    if "autograd's threading" in said[2]:  # with a GPU autograd has threads, and refuses by itself
        del said[2]
    assert all("the session is in the process that forked this one" in line for line in said), said
    hanging.backward()
    step_of(model, optimizer)


def test_a_process_that_is_spawned_gets_copies(session):
    session("512KiB")
    model = gm.prepare(mlp())
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child_of.sums, args=(queue, model, dict(model.state_dict())))
    process.start()
    got = queue.get(timeout=600)
    process.join()
    assert process.exitcode == 0
    assert got == [param.sum().item() for param in model.parameters()] * 2


def test_updates_that_never_seem_done_are_forgotten(session, monkeypatch):
    """A loop that never waits for the GPU is always ahead of it."""
    owner = session().session
    model = mlp()
    model, optimizer = gm.prepare(model, torch.optim.AdamW(model.parameters()))
    waits = []
    monkeypatch.setattr(owner, "lib", Watched(owner.lib, waits))
    kept = []
    for _ in range(100):
        step_of(model, optimizer)
        kept.append(len(optimizer.rule.walks))
    assert 10 <= max(kept) <= 3 * 20 and 1 <= len(waits) <= 10  # a step has one update, and up to two ahead of it


class Watched:
    """The library, which always has an update to do, and when it was told to wait for updates."""

    def __init__(self, lib, waits):
        self.lib, self.waits = lib, waits

    def stats(self, handle, stats):
        self.lib.stats(handle, stats)
        stats.pending_updates = 1

    def __getattr__(self, name):
        if name == "update_wait":
            self.waits.append(name)
        return getattr(self.lib, name)


KINDS = {"sgd": sgd, "adamw": lambda params: torch.optim.AdamW(params, 1e-2)}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("first, second", (("adamw", "adamw"), ("sgd", "adamw"), ("adamw", "sgd"), ("sgd", "sgd")))
def test_an_optimizer_that_takes_the_place_of_another_one(session, first, second, dtype):
    """As in a second phase of training: it begins with states of its own."""

    def step(model, optimizer, at):
        model(data(at).to(dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    session("1MiB")
    torch.manual_seed(0)
    other = mlp().to(dtype)
    model = copy.deepcopy(other)
    model, before = gm.prepare(model, KINDS[first](model.parameters()))
    step(model, before, 0)
    other.load_state_dict(model.state_dict())
    masters = [record.states["master"].read() for record in before.records if "master" in record.states]
    other, wanted = gm.prepare(other, KINDS[second](other.parameters()))
    for record, master in zip(wanted.records, masters):  # of the first one, which have more digits than the parameters
        record.states["master"].write(master)
    model, optimizer = gm.prepare(model, KINDS[second](model.parameters()))
    for at in range(1, 4):
        step(model, optimizer, at)
        step(other, wanted, at)
    same_bits(values(model), values(other))
    assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))
    model(data().to(dtype)).square().mean().backward()
    with pytest.raises(gm.GeminiError, match="0.0.weight is another optimizer's, which was prepared later"):
        before.step()
    optimizer.step()


def test_an_optimizer_cannot_take_the_place_of_one_in_the_backward_pass(session):
    session()
    model = mlp()
    model, optimizer = gm.prepare(model, KINDS["adamw"](model.parameters()), step_in_backward=True)
    with pytest.raises(gm.GeminiError, match="0.0.weight is updated in the backward pass, by the optimizer"):
        gm.prepare(model, KINDS["adamw"](model.parameters()))
    before = values(model)
    step_of(model, optimizer)
    assert not any(torch.equal(param, before[name]) for name, param in model.named_parameters())


def test_an_optimizer_that_is_refused_leaves_the_one_before(session):
    session()
    model = mlp()
    model, optimizer = gm.prepare(model, KINDS["adamw"](model.parameters()))
    step_of(model, optimizer)
    state = optimizer.state_dict()["state"]
    with pytest.raises(gm.GeminiError, match="step_in_backward has to be known when the model is prepared"):
        gm.prepare(model, KINDS["adamw"](model.parameters()), step_in_backward=True)
    for number, values_of in optimizer.state_dict()["state"].items():
        same_bits(values_of, state[number])
    step_of(model, optimizer)


# ---- interrupts
class Interrupting:
    """The library: KeyboardInterrupt comes before or after one of the calls that begin or end something."""

    CALLS = {
        "acquire",
        "release",
        "op_begin",
        "op_end",
        "iteration_begin",
        "iteration_end",
        "phase_set",
        "update",
        "zero",
    }

    def __init__(self, lib):
        self.lib, self.left, self.after = lib, -1, False

    def __getattr__(self, name):
        function = getattr(self.lib, name)
        if name not in self.CALLS:
            return function

        def call(*args):
            self.left -= 1
            if self.left == 0 and not self.after:
                raise KeyboardInterrupt
            out = function(*args)
            if self.left == 0:
                raise KeyboardInterrupt
            return out

        return call


@pytest.mark.parametrize(
    "kind, early, units",
    (("sgd", False, False), ("adamw", False, False), ("adamw", True, False), ("adamw", False, True)),
)
def test_a_loop_that_is_interrupted_anywhere_goes_on(session, monkeypatch, kind, early, units):
    owner = session("512KiB").session
    model = mlp()
    model, optimizer = gm.prepare(model, KINDS[kind](model.parameters()), step_in_backward=early)
    if units:
        for block in model:
            gm.unit(block)
    step_of(model, optimizer)
    lib = Interrupting(owner.lib)
    monkeypatch.setattr(owner, "lib", lib)
    number, calls = 0, 0
    while not calls:
        number += 1
        for lib.after in (False, True):
            lib.left = number
            try:
                step_of(model, optimizer)
                calls = number - lib.left  # fewer than that
            except KeyboardInterrupt:
                pass
            lib.left = -1
            optimizer.step()
            optimizer.zero_grad()
            before = values(model)
            step_of(model, optimizer)
            assert not any(torch.equal(param, before[name]) for name, param in model.named_parameters())
            assert not owner.holds.noted and all(type(param) is ManagedParameter for param in model.parameters())
            off_the_device()
    assert number > 20


def test_a_model_that_is_made_in_inference_mode_infers(session):
    session("512KiB")
    with torch.inference_mode():
        model = mlp()
        wanted = model(data())
        model = gm.prepare(model)
        off_the_device()
        assert torch.equal(model(data()), wanted)
