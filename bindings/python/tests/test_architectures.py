"""Each architecture of the table is trained, evaluated and saved in a session, with the bits that torch alone gives.

In less device memory than its parameters, gradients and momentum take: 40 % of that by default, the model built within
gm.init(); or 12 %, strict, the model built before. Each architecture in one of the two ways, the next in the other one;
GEMINI_ARCHITECTURES=both runs it in both, and GEMINI_ARCHITECTURES=all with both shares strict and by default, built
within and before. `-k falcon` runs one architecture.

SPDX-License-Identifier: Apache-2.0
"""

import functools
import importlib
import itertools
import os
import pathlib
import tempfile
import warnings
import zlib

import pytest
import safetensors.torch
import torch
from torch import nn

import libgemini.torch as gm
from apart import apart
from architectures import ARCHITECTURES
from bits import described, differing
from conftest import overwrite_the_device
from libgemini.torch import torchrule
from libgemini.torch.backward import Backward

WHICH = os.environ.get("GEMINI_ARCHITECTURES", "one")
ALL = WHICH == "all"
BOTH = False, True
WAYS = list(itertools.product((40, 12), BOTH, BOTH)) if ALL else [(40, False, True), (12, True, False)]
STAGES = ("built", "trained", "clipped", "accumulated", "evaluated", "generated", "trained again")
SAVES = ("files", "state", "checkpoint", "trained on")
# What fails, and the point of the list of defects that says why: by architecture, by architecture and way, or by way.
INSIDE, BEFORE = "40-default-inside", "12-strict-before"
KNOWN_TRAINING = {
    (name, INSIDE): "P8: scripting and tracing within gm.init() is refused" for name in ("scripted", "traced")
}
KNOWN_SAVING = KNOWN_TRAINING


def way(share, strict, inside):
    return f"{share}-{'strict' if strict else 'default'}-{'inside' if inside else 'before'}"


def data_bytes(model):
    """Parameters, gradients and momentum."""
    return sum(param.nbytes * (3 if param.requires_grad else 1) for param in model.parameters())


def library(name):
    """Skips an architecture whose library is not there."""
    if ARCHITECTURES[name].library:
        pytest.importorskip(ARCHITECTURES[name].library)


# ---- the life of a model, with libgemini or without
def make(name):
    torch.manual_seed(zlib.crc32(name.encode()))
    return ARCHITECTURES[name].build().train()


class Life:
    """What is done with a model, stage after stage; each tells what came of it."""

    def __init__(self, name, model, optimizer, managed, folder):
        self.architecture, self.model, self.optimizer, self.managed = ARCHITECTURES[name], model, optimizer, managed
        self.name, self.folder, self.number = name, folder, 0

    def leave(self):
        """Nothing of the model is on the device."""
        if self.managed:
            overwrite_the_device()

    def batch(self):
        self.number += 1
        torch.manual_seed(self.number)
        return self.architecture.batch(self.number)

    def backward(self, share=1.0):
        loss = self.architecture.loss(self.model(**self.batch())) * share
        self.leave()
        loss.backward()
        return loss.detach()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self, **more):
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        return {name: described(value) for name, value in {**more, **tensors}.items()}

    # ---- stages
    def built(self):
        return self.values()

    def trained(self, steps=2):
        losses = []
        for _ in range(steps):
            losses.append(self.backward())
            self.step()
        return self.values(losses=losses)

    def clipped(self):
        loss = self.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        gradients = {f"{name}.grad": param.grad for name, param in self.model.named_parameters()}
        gradients = {name: described(value) for name, value in gradients.items()}
        self.step()
        return {**gradients, **self.values(loss=loss, norm=norm)}

    def accumulated(self):
        losses = [self.backward(0.5) for _ in range(2)]
        self.step()
        return self.values(losses=losses)

    def outputs(self, model):
        model.eval()
        torch.manual_seed(0)
        out = self.architecture.output(model(**self.architecture.batch(99)))
        model.train()
        return out

    def evaluated(self):
        with torch.no_grad():
            first = described(self.outputs(self.model))
        self.leave()
        with torch.inference_mode() if self.architecture.inference else torch.no_grad():
            return {"without gradients": first, "inference": described(self.outputs(self.model)), **self.values()}

    def generated(self):
        if not self.architecture.generate:
            return {}
        self.model.eval()
        torch.manual_seed(0)
        tokens = self.model.generate(**self.architecture.generate(self.architecture.batch(98)))
        self.model.train()
        return {"tokens": described(tokens)}

    def trained_again(self):
        return self.trained(1)

    def momentum(self):
        return self.optimizer.state_dict()["state"]

    # ---- saves: what is loaded elsewhere, into a plain model
    def state(self):
        """torch.save() of state_dict(), torch.load()."""
        self.leave()
        file = self.folder / "state.pt"
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
        loaded = torch.load(file, weights_only=True)
        return {"model": described(loaded["model"]), "momentum": described(loaded["optimizer"]["state"])}

    def elsewhere(self, folder):
        """A plain model of the bytes in a folder of the library's, or of safetensors'."""
        torch.manual_seed(1)
        if self.architecture.library == "transformers" or (folder / "diffusion_pytorch_model.safetensors").exists():
            return type(self.model).from_pretrained(folder).train()
        other = self.architecture.build()
        state = safetensors.torch.load_file(folder / "model.safetensors")
        missing, unexpected = other.load_state_dict(state, strict=False)  # of tied weights, one is in the file
        tied = {id(param) for name, param in other.named_parameters(remove_duplicate=False) if name in state}
        assert not unexpected
        assert all(
            id(param) in tied for name, param in other.named_parameters(remove_duplicate=False) if name in missing
        )
        return other.train()

    def loaded(self, folder):
        other = self.elsewhere(folder)
        for tensor in (*other.parameters(), *other.buffers()):
            tensor.data = tensor.data.clone()  # where it begins in a mapped file decides how torch's kernels round
        assert not any("anaged" in type(param).__name__ for param in other.parameters())
        look = {name: described(param) for name, param in other.named_parameters()}
        with torch.no_grad():
            return {**look, "outputs": described(self.outputs(other))}

    def files(self):
        """save_pretrained() of the library that it is of, or safetensors' save_model(); loaded by the same."""
        self.leave()
        folder = self.folder / "files"
        if self.architecture.library:
            self.model.save_pretrained(folder)
        else:
            folder.mkdir()
            safetensors.torch.save_model(self.model, folder / "model.safetensors")
        return self.loaded(folder)

    def checkpoint(self):
        """gm.save(), loaded by the library that the model is of, or safetensors."""
        folder = self.folder / "checkpoint"
        if self.managed:
            self.leave()
            gm.save(folder, self.model, self.optimizer)
        else:
            folder = self.folder / "files"
        return self.loaded(folder)

    def trained_on(self):
        return {**self.trained(1), "momentum": described(self.momentum())}

    def live(self, send, stages):
        for stage in stages:
            try:
                look = getattr(self, stage.replace(" ", "_"))()
            except Exception as error:
                look = {"raised": f"{type(error).__name__}: {error}"}
            send((stage, look))


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)


@functools.cache
def expected(name):
    """What torch alone gives, by stage. In this process: what torch and the libraries import when they are first used,
    they import here, and not again in each process that is forked."""
    for module in ("torch.nn.utils.prune", "torch.nn.utils.parametrizations", "torch.utils.checkpoint"):
        importlib.import_module(module)
    if ARCHITECTURES[name].library:
        importlib.import_module(f"{ARCHITECTURES[name].library}.utils.logging").disable_progress_bar()
    out = {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = make(name)
        out["bytes"] = data_bytes(model)
        life = Life(name, model, sgd(model), False, pathlib.Path(folder))
        life.live(lambda message: out.update([message]), STAGES + SAVES)
    for stage, look in out.items():
        assert stage == "bytes" or "raised" not in look, f"torch alone, {stage}: {look['raised']}"
    return out


def in_session(send, name, share, strict, inside, size, defect=None):
    warnings.simplefilter("ignore")
    if defect:
        defect()
    with tempfile.TemporaryDirectory() as folder:
        budget = size * share // 100
        model = None if inside else make(name)
        opened = gm.init(device="cpu", strict=strict, chunk_size="64KiB", device_memory=budget, host_memory="256MiB")
        if inside:
            with opened:
                model = make(name)
        model, optimizer = gm.prepare(model, sgd(model))
        life = Life(name, model, optimizer, True, pathlib.Path(folder))
        life.live(send, STAGES)
        stats = gm.stats()
        send(("peak", stats["peak_bytes"]["device"]))
        send(("moved", sum(stats["moved_bytes"]["host to device"].values())))
        life.live(send, SAVES)
        del life, model, optimizer
        gm.close()


@functools.cache
def outcome(name, *way):
    """What the session gives, by stage, and how the process ended."""
    messages, ended = apart(in_session, name, *way, expected(name)["bytes"])
    return dict(messages), ended


def compare(name, way, stages):
    """Fails with all that is different, by stage."""
    theirs = expected(name)
    ours, ended = outcome(name, *way)
    wrong = []
    for stage in stages:
        if stage not in ours:
            wrong.append(f"{stage}: {ended}")
            break
        difference = differing(ours[stage], theirs[stage]) if "raised" not in ours[stage] else ours[stage]["raised"]
        if difference:
            wrong.append(f"{stage}: {difference}")
    assert not wrong, f"{name} {way}:\n" + "\n".join(wrong)
    return ours


def parameters(known):
    """Each architecture in each way; what is known to fail is marked. Other ways than CI's may fail or not."""
    out = []
    in_turn = zip(ARCHITECTURES, itertools.cycle(WAYS))
    for name, one in in_turn if WHICH == "one" else itertools.product(ARCHITECTURES, WAYS):
        built = INSIDE if one[2] else BEFORE
        reason = known.get(name) or known.get((name, built)) or known.get(built)
        marks = [pytest.mark.xfail(strict=not ALL, raises=AssertionError, reason=reason)] if reason else []
        out.append(pytest.param(name, one, id=f"{name}-{way(*one)}", marks=marks))
    return out


@pytest.mark.parametrize("name, one", parameters(KNOWN_TRAINING))
def test_trains_and_evaluates_as_torch_alone(name, one):
    library(name)
    ours = compare(name, one, STAGES)
    assert ours["peak"] <= expected(name)["bytes"] * one[0] // 100 and ours["moved"] > 0


@pytest.mark.parametrize("name, one", parameters(KNOWN_SAVING))
def test_saves_what_a_plain_model_loads(name, one):
    library(name)
    compare(name, one, SAVES)
    assert not outcome(name, *one)[1]  # how the process ended


def test_there_are_at_least_40_architectures():
    assert len(ARCHITECTURES) >= 40


# ---- what the tester notices
def gradients_replaced():
    """A second gradient takes the place of the first one."""
    store = Backward.store
    Backward.store = lambda self, parts: store(self, [(record, values, False) for record, values, _ in parts])


def backward_unacquired():
    """In the backward pass nothing comes to the device."""

    def operator(backward, use):
        backward.begin()
        backward.leave_function()

    Backward.operator = operator


def state_uncopied():
    """state_dict() hands out addresses, as they are."""
    state_dict = nn.Module.state_dict

    def uncopied(module, *args, **kwargs):
        out = state_dict(module, *args, **kwargs)
        places = {name: getattr(param, "_gm_place", None) for name, param in module.named_parameters()}
        out.update({name: place.tensor for name, place in places.items() if place})
        return out

    nn.Module.state_dict = uncopied


def last_bit():
    """One bit of one element of a parameter is another one after a step."""
    step = torchrule.TorchRule.step

    def flip(rule, groups):
        step(rule, groups)
        param = groups[0]["params"][0]
        param.data.view(-1)[:1].view(torch.int32).bitwise_xor_(torch.ones(1, dtype=torch.int32))

    torchrule.TorchRule.step = flip


@pytest.mark.parametrize(
    "defect, stage",
    (
        (gradients_replaced, "accumulated"),
        (backward_unacquired, "trained"),
        (state_uncopied, "files"),
        (last_bit, "trained"),
    ),
)
@pytest.mark.parametrize("name", ("tied", "resnet"))
def test_planted_defect_is_caught(name, defect, stage):
    way = 40, False, False
    messages, ended = apart(in_session, name, *way, expected(name)["bytes"], defect)
    ours, theirs = dict(messages), expected(name)
    assert "built" in ours, f"the defect could not be planted: {ended}"
    assert stage == next(one for one in STAGES + SAVES if one not in ours or differing(ours[one], theirs[one]))
    compare(name, way, STAGES + SAVES)  # without it nothing is wrong
