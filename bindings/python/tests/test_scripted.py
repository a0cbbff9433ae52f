"""Modules that torch.jit made: they run without Python, with their parameters there.

SPDX-License-Identifier: Apache-2.0
"""

import copy
import io

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import libgemini.torch as gm
from conftest import off_the_device, same_bits, sgd, values

SIZE = 96

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.second = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        return torch.tanh(self.second(torch.relu(self.first(x)))) + x

    @torch.jit.export
    def half(self, x):
        return self.first(x)


def sample():
    return torch.zeros(2, SIZE)


def blocks(make):
    return nn.Sequential(*(make(Block()) for _ in range(5)), nn.Linear(SIZE, 3))


def mixed():
    """A scripted module among others, of which it shares a parameter, within two more."""
    inner = nn.Sequential(Block(), Block())
    model = nn.Sequential(Block(), nn.ModuleList([Block(), nn.ModuleDict({"a": torch.jit.script(inner)})]), Block())
    model[2].first.weight = inner[0].first.weight
    model.forward = lambda x: model[2](model[1][1]["a"](model[1][0](model[0](x))))
    return model


MODELS = {
    "scripted": lambda: blocks(torch.jit.script),
    "traced": lambda: blocks(lambda block: torch.jit.trace(block, sample())),
    "scripted whole": lambda: torch.jit.script(blocks(lambda block: block)),
    "traced whole": lambda: torch.jit.trace(blocks(lambda block: block), sample()),
    "mixed": mixed,
}


def train(model, optimizer, leave, checkpointed=False):
    losses = []
    for step in range(5):
        x = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(step))
        if checkpointed:
            loss = checkpoint(model, x.requires_grad_(), use_reentrant=True).square().mean()
        else:
            loss = model(x).square().mean()
        leave()
        loss.backward()
        leave()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


@pytest.mark.parametrize("strict", (False, True), ids=("default", "strict"))
@pytest.mark.parametrize("name", MODELS)
def test_modules_of_torch_jit_train_alike(session, name, strict):
    """The first plain run is for torch.jit, which makes other kernels after it has seen some calls."""
    outcomes = []
    for managed in (False, False, True):
        torch.manual_seed(0)
        model = MODELS[name]()
        optimizer = sgd(model.parameters())
        if managed:
            session("1152KiB" if "whole" in name else "448KiB", strict=strict)
            model, optimizer = gm.prepare(model, optimizer)
        losses = train(model, optimizer, off_the_device if managed else lambda: None)
        outcomes.append((losses, values(model)))
    same_bits(outcomes[2][0], outcomes[1][0])
    same_bits(outcomes[2][1], outcomes[1][1])
    assert gm.stats()["planned_iterations"] > 0


def test_modules_of_torch_jit_within_checkpoints(session):
    outcomes = []
    for managed in (False, False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(torch.jit.script(Block()) for _ in range(5)))
        optimizer = sgd(model.parameters())
        if managed:
            session("448KiB")
            model, optimizer = gm.prepare(model, optimizer)
        losses = train(model, optimizer, off_the_device if managed else lambda: None, True)
        outcomes.append((losses, values(model)))
    same_bits(outcomes[2][0], outcomes[1][0])
    same_bits(outcomes[2][1], outcomes[1][1])


@pytest.mark.parametrize("strict", (False, True), ids=("default", "strict"))
def test_all_that_reads_a_scripted_module_has_its_parameters(session, tmp_path, strict):
    """Its methods, those of the modules within, copies and files of it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(torch.jit.script(Block()) for _ in range(6)))
    x = torch.randn(2, SIZE)
    calls = (
        lambda block: block(x),
        lambda block: block.forward(x),
        lambda block: block.half(x),
        lambda block: block.first(x),
        lambda block: block.second.forward(x),
        lambda block: copy.deepcopy(block)(x),
        lambda block: saved(block, tmp_path / "a")(x),
        lambda block: saved(block, io.BytesIO())(x),
        lambda block: block.first.weight.clone(),
        lambda block: saved(block.first, io.BytesIO())(x),
    )
    with torch.no_grad():
        wanted = [[call(block).clone() for call in calls] for block in model]
        session("256KiB", strict=strict)
        model = gm.prepare(model)
        for number, call in enumerate(calls):
            for block, results in zip(model, wanted):
                off_the_device()
                same_bits([call(block)], [results[number]])


def saved(module, file):
    torch.jit.save(module, file)
    if isinstance(file, io.BytesIO):
        file.seek(0)
    return torch.jit.load(file)


def test_functions_of_torch_jit_take_parameters(session):
    @torch.jit.script
    def scale(x, weight):
        return x @ weight.t() * 2

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(8)))
    x = torch.randn(2, SIZE)
    wanted = [scale(x, layer.weight).detach() for layer in model]
    session("256KiB")
    model = gm.prepare(model)
    off_the_device()
    same_bits([scale(x, layer.weight).detach() for layer in model], wanted)


def test_scripting_after_prepare_is_refused(session):
    """What it makes would read parameters by itself."""
    with session("448KiB"):
        built = Block()
    model = nn.Sequential(*(Block() for _ in range(5)), torch.jit.script(Block()).eval())
    model, optimizer = gm.prepare(model, sgd(model.parameters()))
    for wrong in (
        lambda: torch.jit.script(model[0]),
        lambda: torch.jit.trace(model[1], sample()),
        lambda: torch.jit.script(built),
        lambda: torch.jit.freeze(model[5]),
    ):
        off_the_device()
        with pytest.raises(
            gm.GeminiError,
            match=r"parameter first.weight of a \w+ that torch.jit is to script, trace or "
            r"freeze is in a session: do that before libgemini.torch.prepare\(\)",
        ):
            wrong()
    frozen = model[2].requires_grad_(False)
    for wrong in (
        lambda: torch.jit.trace(lambda x: frozen(x), sample()),
        lambda: torch.jit.trace(lambda x: model[5](x), sample()),
    ):
        with pytest.raises(
            gm.GeminiError, match=r"first.weight: torch.jit.trace\(\) would keep the parameter's address"
        ):
            wrong()
    loss = model(sample() + 1).sum()
    loss.backward()
    optimizer.step()
    plain = torch.jit.script(Block())
    assert plain(sample()).shape == (2, SIZE)


def test_scripting_what_shares_bytes_of_a_session_is_refused(session):
    """A parameter that is over another one's bytes, and a buffer that is, have no record of their own."""
    with session():
        first, second, third = (nn.Linear(SIZE, SIZE, bias=False) for _ in range(3))
        second.weight.data = first.weight.data
    del third.weight
    third.register_buffer("weight", first.weight.detach()[1:])
    gm.prepare(first)
    for module, name in (second, "parameter weight"), (third, "buffer weight"):
        off_the_device()
        for make in (torch.jit.script, lambda module: torch.jit.trace(module, sample())):
            with pytest.raises(
                gm.GeminiError, match=rf"{name} of a \w+ that torch.jit is to script, trace or freeze is in a session"
            ):
                make(module)


def test_a_scripted_module_larger_than_the_device_is_refused_by_name(session):
    session("256KiB")
    model = nn.Sequential(nn.Linear(4, SIZE), torch.jit.script(nn.Sequential(*(Block() for _ in range(5)))))
    with pytest.raises(
        gm.GeminiError,
        match=r"1 is compiled, scripted, or a unit.* \d+ bytes, device_memory is "
        "262144;.*script its blocks instead",
    ):
        gm.prepare(model)
