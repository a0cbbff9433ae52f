"""Gradients after an exception or an interrupt has ended a backward pass: those of torch alone, neither lost nor twice.

SPDX-License-Identifier: Apache-2.0
"""

import copy
import sys

import pytest
import torch
from torch import nn

import libgemini.torch as gm
from conftest import same_bits, sgd, values
from libgemini.torch.backward import Backward
from libgemini.torch.model import Record

SIZE = 96


class Stop(Exception):
    """Raised by a hook of the user."""


def mlp(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, 8)).to(
        dtype
    )


def loss_of(model, step):
    data = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(step))
    return model(data.to(model[0].weight.dtype)).square().mean()


def gradients(model):
    return [None if param.grad is None else param.grad.detach().clone() for param in model.parameters()]


def same_gradients(ours, theirs):
    assert [one is None for one in ours] == [one is None for one in theirs]
    same_bits([one for one in ours if one is not None], [one for one in theirs if one is not None])


def leave_alone(model, optimizer):
    """The gradients that there are stay."""


def clear(model, optimizer):
    optimizer.zero_grad()


def clear_model(model, optimizer):
    model.zero_grad()


def set_none(model, optimizer):
    for param in model.parameters():
        param.grad = None


def fill(model, optimizer):
    optimizer.zero_grad(set_to_none=False)


def scale(model, optimizer):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def replace(model, optimizer):
    for param in model.parameters():
        if param.grad is not None:
            param.grad = param.grad * 2


def step(model, optimizer):
    optimizer.step()


def read(model, optimizer):
    return gradients(model)


@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize("which", [0, 3])
@pytest.mark.parametrize("after", [leave_alone, clear, clear_model, set_none, fill, scale, replace, step, read])
@pytest.mark.parametrize("first", [True, False], ids=["before prepare", "after prepare"])
def test_a_hook_that_raises_leaves_the_gradients_that_torch_leaves(session, first, after, which, accumulated):
    """The hook that was registered before prepare() comes before the library's."""
    outcomes = []
    for managed in (False, True):
        model = mlp()
        optimizer = sgd(model.parameters())
        raising = [False]

        def hook(param, raising=raising):
            if raising[0]:
                raise Stop

        param = list(model.parameters())[which]
        if first:
            param.register_post_accumulate_grad_hook(hook)
        if managed:
            session("768KiB")
            model, optimizer = gm.prepare(model, optimizer)
        if not first:
            param.register_post_accumulate_grad_hook(hook)
        found = []
        for number in range(6):
            if number == 3:
                if accumulated:
                    loss_of(model, 20).backward()
                raising[0] = True
                with pytest.raises(Stop):
                    loss_of(model, number).backward()
                raising[0] = False
                found.append(after(model, optimizer) or [])
                continue
            loss_of(model, number).backward()
            found.append(gradients(model))
            optimizer.step()
            optimizer.zero_grad()
        outcomes.append((found, values(model)))
    for ours, theirs in zip(outcomes[1][0], outcomes[0][0]):
        same_gradients(ours, theirs) if theirs else None
    same_bits(outcomes[1][1], outcomes[0][1])


def test_a_hook_before_the_librarys_reads_the_accumulated_gradient(session):
    seen = []
    for managed in (False, True):
        model = mlp()
        optimizer = sgd(model.parameters())
        seen.append([])
        model[2].weight.register_post_accumulate_grad_hook(lambda param: seen[-1].append(param.grad.detach().clone()))
        if managed:
            session("768KiB")
            model, optimizer = gm.prepare(model, optimizer)
        for number in range(3):
            loss_of(model, number).backward()
        seen[-1] += gradients(model)
    same_bits(seen[1], seen[0])


def test_a_gradient_that_was_read_before_an_exception_has_what_came_until_then(session):
    seen = []
    for managed in (False, True):
        model = mlp()
        optimizer = sgd(model.parameters())
        raising = [False]

        def hook(param, raising=raising):
            if raising[0]:
                raise Stop

        model[2].weight.register_post_accumulate_grad_hook(hook)
        if managed:
            session("768KiB")
            model, optimizer = gm.prepare(model, optimizer)
        loss_of(model, 0).backward()
        kept = model[2].weight.grad
        raising[0] = True
        with pytest.raises(Stop):
            loss_of(model, 1).backward()
        seen.append([kept.clone(), kept.sum()])
    same_bits(seen[1], seen[0])


@pytest.mark.parametrize("after", [clear, step])
def test_early_updates_after_an_exception(session, after):
    """step_in_backward: a gradient that the exception left with autograd is cleared, or its update is made."""
    session("768KiB")
    raising = [True]

    def hook(param):
        if raising[0]:
            raise Stop

    made = []
    for managed in (False, True):
        model = mlp()
        model[0].weight.register_post_accumulate_grad_hook(hook)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        if managed:
            model, optimizer = gm.prepare(model, optimizer, step_in_backward=True)
        with pytest.raises(Stop):
            loss_of(model, 1).backward()
        made.append((model, optimizer))
    raising[0] = False
    before = made[1][0][0].weight.detach().clone()
    for model, optimizer in made:
        after(model, optimizer)
        optimizer.step()
    if after is clear:
        assert torch.equal(made[1][0][0].weight, before)
    else:
        theirs, ours = (values(model) for model, _ in made)
        # torch's second step() uses the gradients again, which early updates have used up.
        assert (ours["0.weight"] - before).abs().max() > 0.005
        assert (ours["0.weight"] - theirs["0.weight"]).abs().max() < 0.011


def test_a_gradient_without_elements_is_accumulated_after_clipping(session):
    found = []
    for managed in (False, True):
        model = mlp()
        model[4].register_parameter("empty", nn.Parameter(torch.empty(0, 3)))
        optimizer = sgd(model.parameters())
        if managed:
            session("768KiB")
            model, optimizer = gm.prepare(model, optimizer)
        for number in range(2):
            (loss_of(model, number) + model[4].empty.sum()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3, foreach=False)
        found.append(gradients(model))
    same_gradients(found[1], found[0])


WATCHED = {
    function.__code__
    for function in (
        Record.take_gradient,
        Record.queue,
        Record.settle,
        Backward.queue,
        Backward.store_landed,
        Backward.store_batch,
        Backward.begins_storing,
        Backward.store,
    )
}


def interrupted(function, at):
    """Calls a function, and raises KeyboardInterrupt before the instruction number `at` of the functions that are
    watched.

    Returns how many of their instructions there were.
    """
    count = 0

    def instruction(frame, event, _):
        nonlocal count
        if event == "opcode":
            count += 1
            if count == at:
                raise KeyboardInterrupt
        return instruction

    def call(frame, event, _):
        if frame.f_code in WATCHED:
            frame.f_trace_opcodes = True
            frame.f_trace_lines = False
            return instruction
        return None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        function()
    except KeyboardInterrupt:
        assert count == at
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("accumulated", [False, True])
def test_an_interrupt_between_any_two_instructions_neither_loses_a_gradient_nor_counts_it_twice(session, accumulated):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, SIZE, bias=False), nn.Linear(SIZE, 8, bias=False))
    reference = copy.deepcopy(model)
    session("768KiB")
    model, optimizer = gm.prepare(model, torch.optim.SGD(model.parameters(), 0.0))

    def plain(number):
        reference.zero_grad()
        loss_of(reference, number).backward()
        return gradients(reference)

    once, base = plain(1), plain(0)
    total = interrupted(lambda: loss_of(model, 1).backward(), -1)
    same_gradients(gradients(model), once)
    assert total > 100
    outcomes = set()
    for at in range(1, total + 1):
        optimizer.zero_grad()
        if accumulated:
            loss_of(model, 0).backward()
            for param in model.parameters():  # read, and multiplied when it is read next
                param.grad.mul_(0.5)
        loss = loss_of(model, 1)
        interrupted(loss.backward, at)
        if accumulated:
            without = [0.5 * one for one in base]
            with_it = [0.5 * first + second for first, second in zip(base, once)]
        else:
            without, with_it = [None, None], once
        found = gradients(model)
        for number, (have, old, new) in enumerate(zip(found, without, with_it)):
            came = have is not None and torch.equal(have, new)
            assert came or (have is None if old is None else torch.equal(have, old)), (at, number)
            outcomes.add((number, came))
            # The first parameter's gradient comes last: it is there only if the other one is.
            assert number or not came or torch.equal(found[1], with_it[1]), at
        # What there is adds to the next one.
        loss_of(model, 1).backward()
        for have, old, more in zip(gradients(model), found, once):
            want = more if old is None else old + more
            assert torch.equal(have, want), at
    assert (1, True) in outcomes and (0, False) in outcomes
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    same_gradients(gradients(model), once)
