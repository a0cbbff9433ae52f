"""Random programs of tensor operations, on a model in a session and with torch alone: the same bits after each line.

GEMINI_PROGRAMS says how many seeds are run, GEMINI_PROGRAMS_FROM which is the first. What fails is shrunk, and its
message says how to run it again. programs.py runs seeds by hand, any number of them.

SPDX-License-Identifier: Apache-2.0
"""

import collections
import dataclasses
import functools
import os
import signal
import string
import time

import pytest
import torch

import libgemini.torch as gm
from again import again
from apart import apart
from libgemini.torch import model as gm_model, tensors, torchrule, unit
from libgemini.torch.backward import Backward
from libgemini.torch.holds import Holds
from operations import KNOWN, OPS, parse, write
from programs import MOST_RAISED, MOST_REFUSED, MOST_UNSEEN, Verdict, judge, shrink, told, warm

FIRST, COUNT = int(os.environ.get("GEMINI_PROGRAMS_FROM", "0")), int(os.environ.get("GEMINI_PROGRAMS", "50"))
SEEDS = range(FIRST, FIRST + COUNT)
PROGRAMS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "programs.py")


@functools.cache
def verdict_of(seed):
    warm()
    return judge(write(seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_program(seed):
    verdict = verdict_of(seed)
    if verdict.kind:
        program = write(seed)
        shrunk = told(*shrink(program, verdict))
        command = again(PROGRAMS, "--seed", seed, "--shrink")
        pytest.fail(f"{told(program, verdict)}\n\nshrunk: {shrunk}\n\n{command}", pytrace=False)


def too_many(verdicts):
    """What there is too much of for the programs to mean anything, in words."""
    shares = ("refused", "lines", MOST_REFUSED), ("raised", "lines", MOST_RAISED), ("unseen", "seen", MOST_UNSEEN)
    sums = {name: sum(getattr(verdict, name) for verdict in verdicts) for share in shares for name in share[:2]}
    return [
        f"{sums[part]} {part} of {sums[whole]} {whole}, want {most:.0%} at most"
        for part, whole, most in shares
        if sums[part] > most * sums[whole]
    ]


def test_few_lines_are_refused():
    """Else programs would be equal because nothing happens in them."""
    verdicts = [verdict_of(seed) for seed in SEEDS]
    reasons = sum((verdict.reasons for verdict in verdicts), collections.Counter())
    assert not too_many(verdicts), reasons.most_common(10)
    assert len(too_many([Verdict(lines=90, refused=2, raised=2), Verdict(lines=10, refused=3, raised=4)])) == 2


def test_all_operations_are_used():
    """Each that is not known to fail is in one of a thousand programs."""
    used = {line.op for seed in range(1000) for line in write(seed).lines}
    assert {name for name in OPS if name not in KNOWN} <= used


# ---- a program for each operation that is known to fail, or was
HEAD = "# seed=0 strict=True inside=False memory=832KiB placement=auto every=1\n"
SGD = "opt = prepare(model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)) ;;"
TRAINED = "loss = model(inp(1)).square().mean() ;; loss.backward() ;;"
STEP = TRAINED + "opt.step() ;;"
# Of an operation: where the model is built, lines with ;; between, and settings that are not those of HEAD.
EXAMPLES = {
    "safetensors_state": ("before", "$SGD $STEP s1 = through_safetensors(model.state_dict())", {"strict": False}),
    "keep_detached": (
        "inside",
        "v1 = model.first.weight.detach() ;; model.first.weight = nn.Parameter(rand(1, 96, 96))",
    ),
    "halve_weight": ("inside", "model.wide.weight = nn.Parameter(model.wide.weight.data[:120])"),
    "swap_data": (
        "inside",
        """model.first.weight.data, model.second.weight.data =
      model.second.weight.data, model.first.weight.data""",
    ),
    "aliasing_buffer": ("before", "model.register_buffer('extra', model.head.weight.detach()[1]) ;; $SGD $STEP"),
    "buffer_of_replaced": (
        "inside",
        """model.register_buffer('extra', model.first.weight.data)
      ;; model.first.weight = nn.Parameter(rand(1, 96, 96))""",
    ),
    "parameter_of_another": ("inside", "model.first.weight = nn.Parameter(model.second.weight.data) ;; $SGD $STEP"),
    "parameter_of_itself": (
        "before",
        """$SGD v1 = model.table.detach() ;; model.table = nn.Parameter(model.table.data) ;; $SGD
      with torch.no_grad(): model.table.add_(1)""",
    ),
    "load_assign_uncopied": (
        "before",
        """$SGD v1 = model.table.detach()
      ;; model.load_state_dict(model.state_dict(), assign=True) ;; $SGD with torch.no_grad(): model.table.add_(1)""",
    ),
    "load_assign_early": (
        "inside",
        "model.first.load_state_dict(model.second.state_dict(), assign=True) ;; $SGD $STEP",
    ),
    "load_assign_of_tied": (
        "before",
        """model.head.weight = model.embed.weight
      ;; $SGD model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True) ;; $SGD $STEP""",
    ),
    "optimizer_over_all": ("before", "opt = prepare(model, GlobalNorm(model.parameters())) ;; $STEP"),
    "optimizer_with_closure": (
        "before",
        """opt = prepare(model, Sam(model.parameters()))
      ;; obs(opt.step(lambda: closure(1)))""",
    ),
    "optimizer_hook": (
        "before",
        """raw = torch.optim.SGD(model.parameters(), 0.05)
      ;; h0 = raw.register_step_pre_hook(lambda *_: obs('step')) ;; opt = prepare(model, raw) ;; $STEP""",
    ),
    "optimizer_state_of_a_parameter": ("before", "$SGD $STEP obs(opt.state[model.first.weight]['momentum_buffer'])"),
    "scale_gradient_by_changed_factor": (
        "before",
        """$SGD $TRAINED f1 = torch.tensor(0.5) ;; model.scale.grad.mul_(f1)
      ;; f1.data.fill_(0.25) ;; model.scale.grad.mul_(f1)""",
    ),
    "scale_gradient_often": (
        "before",
        """$SGD $TRAINED model.first.weight.grad.mul_(0.3)
      ;; model.first.weight.grad.mul_(0.7)""",
        {"every": 9},
    ),
    "plain_write": ("before", "$SGD model.first.weight.detach().numpy()[...] = 1"),
    "plain_alias": ("before", "$SGD n1 = model.first.weight.detach().numpy() ;; $STEP"),
    "storage": ("before", "$SGD obs(bytes(model.first.weight.untyped_storage().tolist()[:64]))"),
    "storage_write": ("before", "$SGD model.first.weight.untyped_storage().fill_(0) ;; leave()", {"strict": False}),
    "same_parameter": ("inside", "model.first.weight = nn.Parameter(model.first.weight)"),
    "weight_norm_early": ("inside", "nn.utils.parametrizations.weight_norm(model.first)"),
    "weight_norm_late": ("before", "$SGD nn.utils.parametrizations.weight_norm(model.first) ;; $SGD $STEP"),
    "remove_parametrization_early": (
        "inside",
        """nn.utils.parametrizations.orthogonal(model.first)
      ;; nn.utils.parametrize.remove_parametrizations(model.first, 'weight')""",
    ),
    "remove_parametrization_late": (
        "before",
        """$SGD nn.utils.parametrizations.orthogonal(model.first)
      ;; nn.utils.parametrize.remove_parametrizations(model.first, 'weight') ;; $SGD $STEP""",
    ),
    "assign_gradient_that_changes": (
        "before",
        "$SGD g1 = rand(1, 96, 96) ;; model.first.weight.grad = g1 ;; g1.mul_(2)",
    ),
    "gradient_of_another": (
        "before",
        """$SGD $TRAINED model.first.weight.grad = model.second.weight.grad
      ;; model.second.weight.grad.mul_(2)""",
    ),
    "gradient_of_another_layout": (
        "before",
        """$SGD model.first.weight.grad = rand(1, 96, 96).t()
      ;; obs(model.first.weight.grad.stride())""",
    ),
    "assign_kept_gradients": (
        "before",
        """opt = prepare(model, torch.optim.SGD(model.parameters(), 0.05))
      ;; $STEP opt.zero_grad()
      ;; $TRAINED kept = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
      ;; for p, g in zip(model.parameters(), kept): p.grad = g
      ;; opt.step()""",
        {"every": 99, "memory": "448KiB"},
    ),
    "gradient_of_frozen": (
        "before",
        """model.first.weight.requires_grad_(False) ;; $SGD
      model.first.weight.grad = rand(1, 96, 96) ;; opt.step()""",
    ),
    "delete_gradient": ("before", "$SGD $TRAINED del model.first.weight.grad"),
    "refused_by_torch": ("before", "$SGD with torch.no_grad(): model.table.copy_(rand(0, 3, 5, 7))"),
    "overwrite_by_itself": ("before", "$SGD with torch.no_grad(): model.table.copy_(model.table)"),
    "transform_over_closure": (
        "before",
        """$SGD
      obs(torch.func.grad(lambda x: (x @ model.first.weight[:4].t()).sum())(rand(1, 3, 96)))""",
    ),
    "write_in_unit": (
        "before",
        """$SGD unit(model.first)
      ;; h1 = model.first.register_forward_pre_hook(lambda m, i: obs(m.weight.data.clamp_(-0.01, 0.01)))
      ;; obs(model(inp(1))) ;; leave()""",
    ),
    "keep_of_unit": (
        "before",
        """$SGD unit(model.first) ;; k1 = []
      ;; h1 = model.first.register_forward_hook(lambda m, i, o: k1.append(m.weight.detach())) ;; obs(model(inp(1)))
      ;; leave()""",
    ),
    "other_class": ("before", "$SGD obs(model.first.weight.as_subclass(torch.Tensor).sum())"),
    "view_without_gradient": (
        "before",
        """$SGD $TRAINED with torch.no_grad(): v1 = model.wide.weight.unsqueeze(1)
      ;; opt.step() ;; obs(v1.cpu())""",
    ),
    "scaled_far": (
        "before",
        """$SGD scaler = torch.amp.GradScaler('cpu', init_scale=2.0 ** 10)
      ;; scaler.scale(model(inp(1)).square().mean() * 1e25).backward() ;; scaler.step(opt)""",
    ),
    "prepare_after_stop": (
        "before",
        """$SGD loss = model.head(model.second(rand(1, 2, 96))).square().sum()
      ;; loss.backward(retain_graph=True) ;; opt.step() ;; loss.backward() ;; model.norm = nn.LayerNorm(96)
      ;; $SGD""",
        {"every": 99},
    ),
    "shallow_copy": ("before", "$SGD v1 = copy.copy(model.first.weight) ;; $STEP"),
}


def program_of(lines, **settings):
    """Of lines with ;; between."""
    lines = string.Template(lines).substitute(SGD=SGD, TRAINED=TRAINED, STEP=STEP).split(";;")
    program = parse(HEAD + "\n".join(" ".join(line.split()) for line in lines))
    return dataclasses.replace(program, **settings)


def example(name):
    built, lines, *settings = EXAMPLES[name]
    return program_of(lines, inside=built == "inside", **dict(*settings))


def known(name):
    """The mark of an operation that is known to fail."""
    return [pytest.mark.xfail(strict=True, raises=AssertionError, reason=KNOWN[name])] if name in KNOWN else []


@pytest.mark.parametrize("name", [pytest.param(name, marks=known(name)) for name in EXAMPLES])
def test_example(name):
    warm()
    verdict = judge(example(name))
    assert not verdict.kind, told(example(name), verdict)


def test_each_known_operation_has_an_example():
    assert set(KNOWN) <= set(EXAMPLES) <= set(OPS)


# ---- what the tester notices
def views_unmanaged():
    """A view of a parameter is a plain tensor: nobody acquires what it reads."""
    tensors.mark_views = unit.mark_views = lambda out, tensors: None


def halves_acquired():
    """Of each tensor the first half is acquired."""
    where = tensors._where

    def half(tensor):
        place, offset, size = where(tensor)
        return place, offset, (size + 1) // 2

    tensors._where = half


def writes_unnoticed():
    """What a function writes that does not say so by its name is dropped."""
    Holds.note_writes = lambda *_: None


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


def clipping_forgotten():
    """The factor of a gradient is dropped."""
    settle = gm_model.Record.settle

    def forget(record, mode):
        record.scale = 1.0
        settle(record, mode)

    gm_model.Record.settle = forget


def state_uncopied():
    """state_dict() hands out addresses, as they are."""
    state_dict = torch.nn.Module.state_dict

    def uncopied(module, *args, **kwargs):
        out = state_dict(module, *args, **kwargs)
        places = {name: getattr(param, "_gm_place", None) for name, param in module.named_parameters()}
        out.update({name: place.tensor for name, place in places.items() if place})
        return out

    torch.nn.Module.state_dict = uncopied


def copies_shared():
    """deepcopy() of a parameter is a view of it."""
    tensors.ManagedTensor.__deepcopy__ = lambda tensor, memo: tensor.detach()


def momentum_forgotten():
    """Each step begins with new states."""
    step_one = torchrule.TorchRule.step_one

    def forget(rule, record, options):
        rule.inner.state.clear()
        step_one(rule, record, options)

    torchrule.TorchRule.step_one = forget


# Each with a program that has noticed it, which is tried first.
DEFECTS = {
    views_unmanaged: 1,
    halves_acquired: 1,
    writes_unnoticed: 36,
    gradients_replaced: 2,
    backward_unacquired: 2,
    clipping_forgotten: 6,
    state_uncopied: 1,
    copies_shared: 3,
    momentum_forgotten: 2,
}


def caught(defect, most=40):
    """A program that fails because of a defect, and its verdict."""
    warm()
    for seed in (DEFECTS[defect], *range(most)):
        program = write(seed)
        verdict = judge(program, defect)
        if verdict.kind and not judge(program).kind:
            return program, verdict
    pytest.fail(f"{most} programs have not noticed: {defect.__doc__}")


@pytest.mark.parametrize("defect", DEFECTS)
def test_planted_defect_is_caught(defect):
    caught(defect)


def test_failing_program_is_shrunk():
    program, verdict = caught(gradients_replaced)
    shrunk, again = shrink(program, verdict, gradients_replaced)
    assert len(shrunk.lines) <= 6 < len(program.lines)
    assert again.kind == verdict.kind and again.number == len(shrunk.lines) - 1
    copied = parse(str(shrunk))
    assert judge(copied, gradients_replaced).kind == verdict.kind and not judge(copied).kind


def refusing():
    """A function is refused, in words that are documented."""

    def refuse(func, args, kwargs):
        raise gm.GeminiError("this would give it other memory")

    tensors._SPECIAL[torch.Tensor.neg_] = refuse


def refused_too_late():
    """The same, after the function has done its work."""

    def refuse(func, args, kwargs):
        tensors._run(func, args, kwargs)
        raise gm.GeminiError("this would give it other memory")

    tensors._SPECIAL[torch.Tensor.neg_] = refuse


def test_what_is_refused_does_nothing():
    warm()
    program = program_of("$SGD $STEP with torch.no_grad(): model.first.weight.neg_() ;; $STEP")
    verdict = judge(program)
    assert (verdict.kind, verdict.refused) == ("", 0)
    verdict = judge(program, refusing)
    assert (verdict.kind, verdict.refused, verdict.lines) == ("", 1, len(program.lines))
    assert judge(program, refused_too_late).kind == "value"


def undocumented():
    """A refusal in words that nobody can read in the docs."""

    def refuse(func, args, kwargs):
        raise gm.GeminiError("no")

    tensors._SPECIAL[torch.Tensor.share_memory_] = refuse


def test_refusal_that_is_not_documented_is_a_failure():
    warm()
    program = program_of("$SGD model.first.weight.detach().share_memory_()")
    verdict = judge(program)
    assert (verdict.kind, verdict.refused) == ("", 1)
    assert judge(program, undocumented).kind == "raises"


# ---- processes
def test_how_a_process_ends_is_told():
    def sends(send, then):
        send([1])
        then()
        send("two")

    assert apart(sends, lambda: None) == ([[1], "two"], "")
    assert apart(sends, lambda: os.kill(os.getpid(), signal.SIGSEGV)) == ([[1]], "SIGSEGV")
    assert apart(sends, lambda: os._exit(3)) == ([[1]], "exit 3")
    assert apart(sends, lambda: time.sleep(1000), seconds=1.0) == ([[1]], "hang")
    messages, ended = apart(sends, lambda: 1 / 0)
    assert messages == [[1]] and "ZeroDivisionError" in ended
