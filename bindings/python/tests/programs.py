"""Random programs of tensor operations, each run by torch alone and on a model in a session: the same bits all along.

A program is a list of lines of Python. A seed makes it, without running anything: what a line works on, earlier lines
have made. A forked process runs it on a model in a session, another one runs it with torch alone. After each line both
tell what they see: parameters, gradients, buffers, states of the optimizer, all tensors that lines have named. What
fails is shrunk to the few lines that matter.

  programs.py --seeds 0:1000                   runs these seeds, and shrinks the first one that fails; with --all, all
  programs.py --seed 17 [--shrink]             runs one seed, and prints the program, what differs and where
  programs.py --file failing.txt [--shrink]    runs a program from a file, in the form in which they are printed
  programs.py --seeds 0:1000 --known           with the operations that are known to fail, too
  programs.py --seeds 0:1000 --only unit,views  with these operations alone, beside training steps

It needs LIBGEMINI_DIR and PYTHONPATH, as pytest does (CONTRIBUTING.md).

SPDX-License-Identifier: Apache-2.0
"""

import argparse
import collections
import contextlib
import copy
import dataclasses
import importlib
import io
import pickle
import re
import sys
import tempfile
import warnings
from collections.abc import Callable

import numpy
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import libgemini.torch as gm
from apart import apart
from bits import described, differing
from conftest import overwrite_the_device
from operations import BATCH, LENGTH, TOKENS, Counting, GlobalNorm, Line, Net, Program, Sam, Sub, parse, write

torch.set_num_threads(1)

# What the library may refuse, as its words say: what the caller did has no effect then, and torch alone leaves the line
# out. A refusal that is not here is a failure. docs/pytorch.md tells users of each.
REFUSALS = (
    r"was replaced by another tensor|was added after libgemini\.torch\.prepare\(\): call prepare\(\) again",
    r"would be moved or replaced",
    r"would give it other memory",
    r"would change the layout that a parameter",
    r"the data of a gradient or of a view cannot be replaced",
    r"this gradient was cleared or replaced",
    r"is set to a tensor of .*: want",
    r"is set to a tensor that shares its bytes with .*: set it to a clone",
    r"cannot both be units|is no module in the models that were prepared",
    r"create_graph=True",
    r"a transform of torch\.func cannot take it|within a transform of torch\.func",
    r"over its bytes would not know when these are elsewhere",
    r"is another optimizer's, which was prepared later",
    r"are two tensors that share their bytes",
    r"shares bytes with parameter .*, but is not a plain view of a part of it",
    r"can be neither copied nor pickled",
    r"the optimizer has a parameter, .*, that is not in the model|"
    r"is of an optimizer with parameter .* where this one has",
    r"is not one of the model's: make the optimizer from the model|needs no gradient, and is not in the session",
    r"bytes of device memory are needed",
    r"was not prepared, but parameter",
    r"the bytes of its storage may be elsewhere, and cannot be used as a storage",
)
MOST_REFUSED = 0.04  # of the lines of all programs; more would mean that the programs hardly test anything
MOST_RAISED = 0.05  # likewise, of lines that torch alone refuses, too
MOST_UNSEEN = 0.01  # of the values that are compared: kept gradients that were cleared


# ---- running
def refusal(error: BaseException) -> bool:
    """Whether the library refused, by an error of its own that is documented, or torch because of one."""
    ours = type(error).__module__.startswith("libgemini") and reason(str(error)) is not None
    return ours or error.__cause__ is not None and refusal(error.__cause__)


def reason(words: str) -> str | None:
    """Which of REFUSALS an error says."""
    return next((one for one in REFUSALS if re.search(one, words)), None)


class Runner:
    """What a program's lines see, in a session or not."""

    def __init__(self, program: Program, managed: bool):
        self.program, self.managed = program, managed
        self.seen = []
        self.building = None
        self.folder = None
        self.kept = None
        modules = {"torch": torch, "nn": nn, "F": F, "copy": copy, "pickle": pickle, "io": io, "numpy": numpy}
        classes = {one.__name__: one for one in (AveragedModel, Counting, GlobalNorm, Net, Sam, Sub)}
        called = (
            self.calm,
            self.closure,
            self.fetch,
            self.inp,
            self.leave,
            self.obs,
            self.offload,
            self.prepare,
            self.rand,
            self.store,
            self.through_file,
            self.through_safetensors,
            self.unit,
        )
        self.names = {
            **modules,
            **classes,
            **{one.__name__: one for one in called},
            "checkpoint": checkpoint,
            "forward_ad": forward_ad,
            "loss": None,
        }
        self.given = set(self.names)

    # ---- what lines call
    @staticmethod
    def rand(seed, *shape):
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 10

    @staticmethod
    def inp(seed):
        return torch.randint(TOKENS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))

    def obs(self, value):
        """Notes a value, as it is now. None, so that a hook may end with it."""
        self.seen.append(described(value))

    def leave(self):
        """Nothing of the model is on the device."""
        if self.managed:
            overwrite_the_device()

    def prepare(self, model, optimizer):
        if not self.managed:
            return optimizer
        if self.building:
            self.building.__exit__(None, None, None)
            self.building = None
        return gm.prepare(model, optimizer)[1]

    def calm(self):
        """After a line that was refused in its middle: no gradients, no graph, the same buffers."""
        model = self.names["model"]
        model.zero_grad()
        self.names["loss"] = None
        for name, buffer in model.named_buffers():
            if name != "extra":
                buffer.fill_(0.1)

    def closure(self, seed):
        self.names["opt"].zero_grad()
        loss = self.names["model"](self.inp(seed)).square().mean()
        loss.backward()
        return loss.detach()

    def store(self, model, optimizer):
        if self.managed:
            self.folder = tempfile.mkdtemp(dir=self.names["folder"])
            gm.save(self.folder, model, optimizer)
        else:
            self.kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def fetch(self, model, optimizer):
        if self.managed:
            gm.load(self.folder, model, optimizer)
            return
        weights, states = self.kept  # of which gm.load() takes all or nothing
        shapes = ({name: value.shape for name, value in one.items()} for one in (weights, model.state_dict()))
        groups = ([len(group["params"]) for group in one] for one in (states["param_groups"], optimizer.param_groups))
        if next(shapes) != next(shapes) or next(groups) != next(groups):
            raise ValueError("saved from something else")
        model.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(states))

    def unit(self, module):
        if self.managed:
            gm.unit(module)

    def offload(self):
        if not self.managed:
            return contextlib.nullcontext()
        return gm.offload_activations("1KiB")

    def through_file(self, state):
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    def through_safetensors(self, state):
        distinct = {}
        for name, value in state.items():
            distinct.setdefault(value.data_ptr(), name)  # tied weights are one
        return safetensors.torch.load(safetensors.torch.save({name: state[name] for name in distinct.values()}))

    # ---- one line after another
    def run(self, send: Callable, skip: frozenset[int] = frozenset(), stop: int | None = None):
        """Sends ("begin", number) and (number, outcome, words, look) for each line."""
        warnings.simplefilter("ignore")
        torch.manual_seed(self.program.seed)
        with tempfile.TemporaryDirectory() as folder:
            self.names["folder"] = folder
            if self.managed:
                opened = gm.init(
                    device="cpu",
                    strict=self.program.strict,
                    chunk_size="64KiB",
                    device_memory=self.program.memory,
                    host_memory="256MiB",
                    placement=self.program.placement,
                )
                if self.program.inside:
                    self.building = opened
                    self.building.__enter__()
            self.names["model"] = Net()
            for number, line in enumerate(self.program.lines):
                if stop is not None and number > stop:
                    break
                send(("begin", number))
                torch.manual_seed(number)
                outcome, words, seen = "refused", "", len(self.seen)
                if number not in skip:
                    outcome, words = self.line(number, line)
                if outcome == "refused" and line.after == "stop":
                    send((number, outcome, words, {}))
                    break
                if outcome == "refused":
                    del self.seen[seen:]  # what hooks have seen before
                    exec(line.after, self.names)
                look = {}
                if number % self.program.every == 0 or number + 1 == len(self.program.lines):
                    look = self.look()
                    self.leave()  # else what was looked at is on the device, where nothing can go wrong
                send((number, outcome, words, look))
            if self.managed:
                if self.building:
                    self.building.__exit__(None, None, None)
                self.names.clear()
                gm.close()

    def line(self, number, line):
        try:
            exec(compile(line.text, f"<line {number}>", "exec"), self.names)
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
            if self.managed and refusal(error):
                while reason(words) is None:
                    error = error.__cause__
                    words = str(error)
                return "refused", words
            return "raised", words
        return "done", ""

    def look(self):
        """All that a user could see, by name."""
        out = {"seen": ("list", tuple(self.seen))}
        # Modules last: after that their bytes are on the device, where also who does not ask for them finds them.
        for name, value in sorted(self.names.items(), key=lambda item: isinstance(item[1], nn.Module)):
            if name in self.given or name.startswith("__") or name in ("folder", "loss", "p", "g"):  # p, g: of loops
                continue
            if isinstance(value, nn.Module):
                self.look_at_module(name, value, out)
            elif isinstance(value, torch.optim.Optimizer):
                out[name] = self.looked(
                    lambda value=value: [
                        value.state_dict()["state"],
                        [{key: of for key, of in group.items() if key != "params"} for group in value.param_groups],
                    ]
                )
            elif isinstance(value, (torch.Tensor, numpy.ndarray, dict, list)):
                out[name] = self.looked(lambda value=value: value)
        return out

    def look_at_module(self, name, module, out):
        for key, param in module.named_parameters():
            out[f"{name}.{key}"] = self.looked(lambda param=param: param)
            out[f"{name}.{key}.grad"] = self.looked(lambda param=param: param.grad)
            out[f"{name}.{key}.requires_grad"] = param.requires_grad
        for key, buffer in module.named_buffers():
            out[f"{name}.{key}"] = self.looked(lambda buffer=buffer: buffer)

    def looked(self, get):
        try:
            return described(get())
        except Exception as error:
            if self.managed and refusal(error):
                return "refused"
            return f"raised {type(error).__name__}: {error}"


@dataclasses.dataclass
class Verdict:
    """What came of a program.

    Attributes:
      kind: "" if all was equal, else "value", "crash", "hang", "raises" or "does not raise".
      number: of the line.
      what: is different, in words.
      lines, refused, raised: how many lines ran, libgemini refused, torch alone refused, too.
      seen, unseen: how many values were compared, and not, as libgemini refused to read them.
      reasons: how often which operation was refused in which words.
    """

    kind: str = ""
    number: int = -1
    what: str = ""
    lines: int = 0
    refused: int = 0
    raised: int = 0
    seen: int = 0
    unseen: int = 0
    reasons: collections.Counter = dataclasses.field(default_factory=collections.Counter)


def _session(send, program, defect):
    if defect:
        defect()
    send(("begin", -1))
    Runner(program, True).run(send)


def _torch(send, program, skip, stop):
    Runner(program, False).run(send, skip, stop)


def judge(program: Program, defect: Callable[[], None] | None = None) -> Verdict:
    """Runs a program both ways and compares.

    Args:
      program: what to run.
      defect: breaks the library, in the process that runs it; to see that somebody notices.

    Returns:
      The first difference, if there is one.
    """
    verdict = Verdict()
    ours, ended = apart(_session, program, defect)
    assert ours, f"the defect could not be planted: {ended}"
    steps = [message for message in ours if message[0] != "begin"]
    skip = frozenset(number for number, outcome, *_ in steps if outcome == "refused")
    theirs, their_end = apart(_torch, program, skip, steps[-1][0] if steps else -1)
    assert not their_end, f"torch alone: {their_end}\n{program}"
    for step, their_step in zip(steps, (message for message in theirs if message[0] != "begin")):
        compare(program, step, their_step, verdict)
        if verdict.kind:
            return verdict
    if ended:
        verdict.number = [message[1] for message in ours if message[0] == "begin"][-1]
        verdict.kind = "hang" if ended == "hang" else "crash" if ended.startswith("SIG") else "raises"
        verdict.what = ended
    return verdict


def compare(program: Program, step: tuple, their_step: tuple, verdict: Verdict):
    """Adds to a verdict what a line has done, with libgemini and with torch alone."""
    (number, outcome, words, look), (_, expected, their_words, their_look) = step, their_step
    verdict.number, verdict.lines = number, verdict.lines + 1
    verdict.seen += len(look)
    verdict.unseen += sum(one == "refused" for one in look.values())
    if outcome == "refused":
        verdict.refused += 1
        verdict.reasons[program.lines[number].op, reason(words)] += 1
    elif outcome != expected:
        verdict.kind = "raises" if outcome == "raised" else "does not raise"
        verdict.what = words or f"torch alone: {their_words}"
    elif outcome == "raised":
        verdict.raised += 1
        verdict.reasons[program.lines[number].op, their_words[:60]] += 1
        if words.split(":")[0] not in (their_words.split(":")[0], "GeminiError"):
            verdict.kind, verdict.what = "raises", f"{words} (torch alone: {their_words})"
    difference = differing(look, their_look)
    if difference and not verdict.kind:
        verdict.kind, verdict.what = "value", difference


# ---- shrinking
def shrink(
    program: Program, verdict: Verdict, defect: Callable[[], None] | None = None, tries: int = 200
) -> tuple[Program, Verdict]:
    """A program with as few lines as possible that fails in the same way, and its verdict.

    First everything behind the line that failed goes, then runs of lines, ever shorter ones; then the session becomes
    the simplest that fails.
    """
    left = tries

    def fails(candidate):
        nonlocal left, program, verdict
        left -= 1
        try:
            found = judge(candidate, defect) if left >= 0 else Verdict()
        except AssertionError:  # of torch alone
            return False
        if found.kind != verdict.kind or found.number < 0:
            return False
        program, verdict = dataclasses.replace(candidate, lines=candidate.lines[: found.number + 1]), found
        return True

    def with_lines(*lines):
        return dataclasses.replace(program, lines=tuple(lines))

    program = with_lines(*program.lines[: verdict.number + 1])
    # What is off the device by chance is so on purpose then.
    fails(with_lines(*program.lines[:-1], Line("leave()"), *program.lines[-1:]))
    size = max(1, len(program.lines) // 2)
    while size and left > 0:
        shorter, end = False, len(program.lines)
        while end > 0:
            first = max(end - size, 0)
            shorter |= fails(with_lines(*program.lines[:first], *program.lines[end:]))
            end = min(first, len(program.lines))
        size = size if shorter and size == 1 else size // 2
    for simpler in ({"every": 1}, {"memory": "64MiB"}, {"placement": "auto"}, {"strict": False}, {"inside": False}):
        if any(getattr(program, name) != value for name, value in simpler.items()):
            fails(dataclasses.replace(program, **simpler))
    return program, verdict


def told(program: Program, verdict: Verdict) -> str:
    """A failure, in words that somebody can do something with."""
    line = program.lines[verdict.number].text if 0 <= verdict.number < len(program.lines) else "(before the first line)"
    return f"{verdict.kind} at line {verdict.number}, {line}\n  {verdict.what}\n{program}"


def warm():
    """Has torch import what it imports when it is first used: once, before processes are forked."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    importlib.import_module("torch.nn.utils.prune")
    checkpoint(lambda x: x, torch.ones(1), use_reentrant=False)
    torch.func.vmap(lambda x: x)(torch.ones(1))
    str(torch.ones(1))


# ---- by hand
def run_one(program: Program, shrinks: bool) -> bool:
    """Prints a program and what came of it; returns whether it failed."""
    verdict = judge(program)
    if verdict.kind:
        print(told(*(shrink(program, verdict) if shrinks else (program, verdict))))
    else:
        print(f"{program}\nequal: {verdict}")
    return bool(verdict.kind)


def run_many(seeds: range, goes_on: bool, options: dict) -> bool:
    """Runs seeds, and prints the first that fails, shrunk, or all that do, and a summary; returns whether one
    failed."""
    total, failed = Verdict(), collections.Counter()
    for seed in seeds:
        program = write(seed, **options)
        verdict = judge(program)
        for name in ("lines", "refused", "raised", "seen", "unseen", "reasons"):
            setattr(total, name, getattr(total, name) + getattr(verdict, name))
        if verdict.kind:
            failed[program.lines[verdict.number].op if verdict.number >= 0 else "", verdict.kind] += 1
            print(f"{told(*shrink(program, verdict))}\n", flush=True)
            if not goes_on:
                return True
    print(
        f"{len(seeds)} programs, {failed.total()} failed; {total.lines} lines, {total.refused} refused, {total.raised} "
        f"refused by torch alone, too; {total.seen} values, {total.unseen} not read"
    )
    for (op, reason), count in total.reasons.most_common(20):
        print(f"  {count} {op}: {reason}")
    for (op, kind), count in failed.most_common():
        print(f"failed: {count} {op}: {kind}")
    return bool(failed)


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", help="FIRST:END")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--file")
    parser.add_argument("--shrink", action="store_true", help="what --seed or --file says; --seeds does so anyway")
    parser.add_argument("--all", action="store_true", help="go on after a failure")
    parser.add_argument("--known", action="store_true", help="with the operations that are known to fail")
    parser.add_argument("--only", default="", help="operations, with commas between")
    parser.add_argument("--without", default="", help="operations, with commas between")
    given = parser.parse_args()
    options = {
        "known": given.known,
        "only": filter(None, given.only.split(",")),
        "without": filter(None, given.without.split(",")),
    }
    options = {name: list(value) if name != "known" else value for name, value in options.items()}
    warm()
    if given.file:
        with open(given.file, encoding="utf-8") as file:
            return run_one(parse(file.read()), given.shrink)
    if given.seed is not None:
        return run_one(write(given.seed, **options), given.shrink)
    if not given.seeds:
        parser.error("one of --seeds, --seed and --file is needed")
    first, end = given.seeds.split(":")
    return run_many(range(int(first), int(end)), given.all, options)


if __name__ == "__main__":
    sys.exit(main())
