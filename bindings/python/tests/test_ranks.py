"""Training by several processes on the simulated device, against one process of torch alone with the whole batch.

SPDX-License-Identifier: Apache-2.0
"""

import contextlib
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import time

import pytest
import torch

import libgemini.torch as gm
import rank_programs
import started
from conftest import far_apart, tiny
from libgemini.torch import narrow, ranks as ranks_of_torch
from test_trainers import source_of, without

HERE = os.path.dirname(os.path.abspath(__file__))
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no torch.distributed")


def start(where, ranks, program, more=None, forked=True, **arguments):
    """Starts the ranks of a program of rank_programs.py, with more in the environment. Returns their processes and the
    paths of their outcomes.

    forked: they begin sooner, but sets of strings, and of what has addresses, have the same order in all ranks.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes, paths = [], []
    for rank in range(ranks):
        environment = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(ranks),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "PYTHONHASHSEED": str(rank + 1),
            **(more or {}),
        }
        paths.append(where / f"{program}-{rank}.pt")
        script = os.path.join(HERE, "rank_programs.py")
        processes.append(started.start(script, [program, str(paths[-1]), json.dumps(arguments)], environment, forked))
    return processes, paths


def run(where, ranks, program, more=None, seconds=300, **arguments):
    """The outcome of each rank."""
    processes, paths = start(where, ranks, program, more, **arguments)
    assert started.ends(processes, seconds) == [0] * ranks
    outcomes = [torch.load(path, weights_only=False) for path in paths]
    return outcomes


def left_of(folder, shared):
    """What processes have left that worked in a folder for temporary files: processes that still do, and files. shared:
    what was in /dev/shm before; "sem.mp-" is of multiprocessing, in any program.
    """
    out = [f"/dev/shm/{name}" for name in {*os.listdir("/dev/shm")} - shared if not name.startswith("sem.mp-")]
    out += map(str, folder.rglob("*"))
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            if os.readlink(f"/proc/{pid}/cwd") == str(folder):
                out.append(f"process {pid}")
    return out


@contextlib.contextmanager
def traceless(where):
    """A context manager: what is started within it ends, and leaves nothing. Gives what the ranks get in their
    environment: a folder of their own for temporary files, by which they are known. What a rank forks or starts has it,
    too; /proc shows the environment of the server that all ranks are forks of.
    """
    folder, shared = where / "temporary", {*os.listdir("/dev/shm")}
    folder.mkdir()
    yield {"RANK_PROGRAMS_FOLDER": str(folder)}
    end = time.monotonic() + 5  # the system may still be ending them
    while (left := left_of(folder, shared)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left


OPTIMIZERS = {  # by name: options, and of the training
    "SGD": ({"lr": 0.05}, {"zero": 1}),
    "SGD with momentum": ({"lr": 0.05, "momentum": 0.9, "dampening": 0.5, "maximize": True}, {"zero": 2}),
    "SGD of Nesterov": ({"lr": 0.05, "momentum": 0.9, "nesterov": True}, {"zero": 3, "clip": 0.5}),
    "AdamW, amsgrad": ({"lr": 3e-3, "amsgrad": True}, {"zero": 1, "clip": 0.5}),
    "Adagrad": ({"lr": 1e-2, "initial_accumulator_value": 0.1}, {"zero": 2}),
    "RMSprop": ({"lr": 1e-3, "momentum": 0.9, "centered": True}, {"zero": 3}),
    "Adamax": ({"lr": 3e-3}, {"zero": 1}),
    "NAdam": ({"lr": 3e-3}, {"zero": 2}),
    "RAdam": ({"lr": 3e-3}, {"zero": "auto"}),
    "Adadelta": ({"lr": 0.5}, {"zero": 1}),
    "ASGD": ({"lr": 0.05}, {"zero": 2}),
    "Rprop": ({"lr": 1e-3}, {"zero": 3}),
}
NADAM = {"name": "NAdam", "lr": 3e-3}


def case_of_optimizer(name):
    options, more = OPTIMIZERS[name]
    return "training", {"model": "branches", "optimizer": {"name": re.split("[ ,]", name)[0], **options}, **more}


def by_one_process(model, *, frozen=(), dtype="float32", optimizer=None, **more):
    """What torch alone computes from the whole batch."""
    made = rank_programs.build(model, dtype).to(rank_programs.DEVICE)
    for name, param in made.named_parameters():
        param.requires_grad_(not any(part in name for part in frozen))
    optimizer = rank_programs.optimizer_of(made, **(optimizer or {}))
    out = rank_programs.steps(made, optimizer, model, begin=0, end=rank_programs.ROWS, **more)
    return {**out, "state": rank_programs.state(made, optimizer)}


def check(outcomes, wanted, tolerance=1e-6):
    """All ranks have the same bits, which are close to what was wanted; clipping clipped."""
    for outcome in outcomes:
        assert outcome["state"].keys() == outcomes[0]["state"].keys()
        for name, value in outcomes[0]["state"].items():
            assert torch.equal(outcome["state"][name], value), name
        assert outcome["norms"] == outcomes[0]["norms"] and outcome["after"] == outcomes[0]["after"]
    assert far_apart(outcomes[0]["state"], wanted["state"]) <= tolerance
    losses = [sum(values) / len(outcomes) for values in zip(*(outcome["losses"] for outcome in outcomes))]
    assert losses == pytest.approx(wanted["losses"], rel=1e-5)
    assert outcomes[0]["norms"] == pytest.approx(wanted["norms"], rel=1e-5)
    assert outcomes[0]["after"] == pytest.approx(wanted["after"], rel=1e-5)


CLIPPED = {"model": "gpt2", "clip": 0.5}
FROZEN = {"model": "gpt2", "frozen": ["wte", "h.1.", "bias"]}
CASES = {  # by name: the program and its arguments; processes that train all of them cost less than some for each
    "zero 1": ("training", {**CLIPPED, "zero": 1}),
    "zero 2": ("training", {**CLIPPED, "zero": 2}),
    "zero 3": ("training", {**CLIPPED, "zero": 3}),
    "zero auto": ("training", {**CLIPPED, "zero": "auto"}),
    "llama": ("training", {"model": "llama", "clip": 0.5}),
    "t5": ("training", {"model": "t5", "clip": 0.01}),
    # Of texts so short that on some ranks some experts have no token.
    "mixtral": ("training", {"model": "mixtral", "clip": 0.5, "columns": 2}),
    "zero 1, accumulation": ("training", {**CLIPPED, "zero": 1, "micro": 2, "wrapped": True}),
    "zero 2, accumulation": ("training", {**CLIPPED, "zero": 2, "micro": 2}),
    "zero 3, accumulation": ("training", {**CLIPPED, "zero": 3, "micro": 2, "wrapped": True}),
    "frozen": ("training", FROZEN),
    "int8": ("training", {"model": "quantized", "frozen": ["base"]}),
    "built in": ("built_in", {"model": "gpt2"}),
    "lora": ("training", {"model": "lora", "frozen": ["base_layer", "wte", "wpe", "ln_", "mlp", "c_proj"]}),
}
BF16 = {"model": "llama", "dtype": "bfloat16"}
# Of 8 branches, both ranks lack one, and rank 1 another one: it can update less of the arena before the pass ends. Not
# strict: rank 0 would wait until a chunk of gradients can be unmapped, that is for rank 1.
LACKING = {"branches": [[0, 2, 3, 4, 5, 6, 7], [0, 2, 3, 5, 6, 7]], "unit": "choice", "memory": "4MiB", "strict": False}
LACKING_OF_16 = {  # likewise of 16, with 4 ranks, too: in 16 bits, fewer would be less than one part
    **LACKING,
    "model": "16 branches",
    "dtype": "bfloat16",
    "branches": [[0, *range(2, 16)], [0, 2, 3, *range(5, 16)]] * 2,
}
KEPT = {  # by name: how AdamW keeps its states and masters, and what is divided
    "split16": ({"masters": "split16"}, 3),
    "bf16": ({"states": "bf16"}, 1),
    "bf16, split16": ({"states": "bf16", "masters": "split16"}, 2),
    "8bit, split16": ({"states": "8bit", "masters": "split16"}, "auto"),
}
SPLIT = KEPT["split16"][0]
RESUMED = {"fp32": ({}, 3), **{name: KEPT[name] for name in ("split16", "8bit, split16")}}
AT_THE_END = {  # of the backward pass, by name
    **{f"{name} at the end": ("training", {**BF16, "zero": zero, "kept": kept}) for name, (kept, zero) in KEPT.items()},
    "split16, lacking at the end": ("training", {**LACKING_OF_16, "kept": SPLIT}),
    "gpt2 at the end": ("training", {"model": "gpt2", "memory": "640KiB"}),
    "bf16 at the end": ("training", {**BF16, "zero": 2}),
    "lacking at the end": ("training", {"model": "8 branches", **LACKING}),
}
EARLY = {  # what updates in it, and computes the same
    "early, zero 1": ("gpt2 at the end", {"zero": 1, "memory": "1MiB"}),
    "early, zero 3, 30 %": ("gpt2 at the end", {}),
    "early, zero 2": ("bf16 at the end", {}),
    "early, zero auto, 100 %": ("bf16 at the end", {"zero": "auto", "memory": "4MiB"}),
    "early, lacking": ("lacking at the end", {}),
    "early, split16": ("split16 at the end", {"zero": 1}),
    "early, 8bit, split16": ("8bit, split16 at the end", {"zero": 2}),
    "early, split16, lacking": ("split16, lacking at the end", {}),
}
# With 4 ranks, too.
LARGER_EARLY = ("gpt2 at the end", "early, zero 3, 30 %", "split16, lacking at the end", "early, split16, lacking")
AT_THE_END_AND_EARLY = {
    **AT_THE_END,
    **{name: ("training", {**AT_THE_END[base][1], **more, "early": True}) for name, (base, more) in EARLY.items()},
}
# Two replicas of two ranks.
REPLICAS = {
    "replicas": ("training", {**CLIPPED, "zero": 3, "batches": 2, "shard_size": 2, "mesh": True}),
    "replicas at the end": ("training", {"model": "gpt2", "zero": 2, "shard_size": 2}),
    "replicas, early": ("training", {"model": "gpt2", "zero": 2, "shard_size": 2, "early": True}),
}
# Over torch.distributed; by the number of ranks, names of cases that do the same over shared memory.
TORCH = {2: ("zero 1, accumulation", "zero 2", "bf16 at the end"), 4: ("zero 3", "replicas")}
# Whether parameters of blocks are acquired together, on each rank.
UNITS = {
    "blocks": {"units": ["auto", "auto"], "memory": "32MiB"},
    "large blocks": {"units": ["auto", "auto"], "memory": "2MiB"},
    "large blocks all the same": {"units": ["always", "always"], "memory": "2MiB"},
    "blocks on one rank": {"units": ["always", "never"], "memory": "32MiB"},
    "no blocks": {"units": ["never", "never"], "memory": "32MiB"},
}
TIED = {  # by model
    "gpt2": ["transformer.wte.weight", "lm_head.weight"],
    "lora": ["base_model.model.transformer.wte.weight", "base_model.model.lm_head.weight"],
    "t5": ["shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"],
}
SKIPPED = ("backward", "step")
LARGER = ("zero 1", "zero 3", "mixtral")  # with 4 ranks, too
OTHERS = {
    "bf16, NAdam": ("training", {"model": "branches", "dtype": "bfloat16", "optimizer": NADAM}),
    **{name: case_of_optimizer(name) for name in OPTIMIZERS},
    "bf16": ("training", {"model": "gpt2", "dtype": "bfloat16", "clip": 0.5}),
    "branches": ("training", {"model": "branches", "branches": [[0, 1], [0, 2]], "unit": "choice", "clip": 0.5}),
    "no unit": ("training", {"model": "branches", "branches": [[0, 1], [0, 2]]}),
    "resumed": ("resumed", {"model": "gpt2"}),
    **{f"{name} resumed": ("resumed", {**BF16, "kept": kept}) for name, (kept, _) in RESUMED.items()},
    "goes on": ("goes_on", {"model": "gpt2"}),
    "written": ("written", {}),
    "written, zero 1": ("written", {"zero": 1}),
    "clamped": ("clamped", {}),
    "clamped, split16": ("clamped", {"kept": SPLIT}),
    "written, split16": ("written", {"kept": SPLIT}),
    "split16, clipped": ("training", {**BF16, "kept": SPLIT, "clip": 0.5, "micro": 2}),
    "joined, split16": (
        "joined",
        {"model": "branches", "dtype": "bfloat16", "kept": SPLIT, "counts": [3, 2], "spare": [0, 3]},
    ),
    "saving": ("saving", {}),
    "another model": ("another_model", {}),
    "late": ("late", {}),
    "watched": ("watched", {}),
    "refusals": ("refusals", {}),
    "left out": ("left_out", {}),
    **AT_THE_END_AND_EARLY,
    "early": ("early", {"model": "gpt2"}),
    **{name: ("training", {"model": "llama", "clip": 0.5, "micro": 2, **case}) for name, case in UNITS.items()},
    **{f"skips {what}": ("skips", {"what": what}) for what in SKIPPED},
    "skips step, torch": ("skips", {"what": "step", "transport": "torch", "deadline": 2.0}),
    "pretrained": ("pretrained", {}),
    "shares": ("shares", {}),
    "columns": ("columns", {"model": "gpt2", "lengths": [12, 7]}),
    "joined": ("joined", {"model": "branches", "counts": [5, 2], "spare": [0, 3]}),
    "joined, early": ("joined", {"model": "8 branches", "counts": [2, 5], "spare": [0, 4, 5, 6, 7], "early": True}),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """By number of ranks and name of a case, the outcome of each rank."""
    out = {}
    larger = {name: {**CASES, **AT_THE_END_AND_EARLY}[name] for name in LARGER + LARGER_EARLY}
    for ranks, cases in (2, {**CASES, **OTHERS}), (4, {**larger, **REPLICAS}):
        folder = tmp_path_factory.mktemp("ranks")
        for name in TORCH[ranks]:
            program, arguments = cases[name]
            cases[f"{name}, torch"] = program, {**arguments, "transport": "torch"}
        if importlib.util.find_spec("transformers"):
            large = {"folder": str(folder / "large")}
            rank_programs.large().save_pretrained(large["folder"], max_shard_size="3MB")
            if ranks == 2:
                cases["pretrained"] = "pretrained", large
            else:
                cases["in all"] = "in_all", {**large, "kept": SPLIT}
        if "saving" in cases:
            cases["lora"] = "training", {**CASES["lora"][1], "adapters": str(folder / "adapters")}
            cases["full disk"] = "full_disk", {"folder": str(folder / "full" / "checkpoint")}
            cases["files"] = "training", {**CASES["zero 3"][1], "files": str(folder / "tier")}
            cases["full tier"] = "full_tier", {"folder": str(folder / "full tier")}
            cases["alone for long"] = "alone_for_long", {"folder": str(folder / "alone")}
            cases["saving"] = "saving", {"folder": str(folder / "saved"), "model": "gpt2", "count": 2}
        with traceless(folder) as more:
            by_rank = run(folder, ranks, "several", more, forked=False, cases=list(cases.values()))
        out.update({(ranks, name): outcome for name, *outcome in zip(cases, *by_rank)})
    return out


def good(outcomes):
    for rank, outcome in enumerate(outcomes):
        assert "text" not in outcome, f"rank {rank}: {outcome['text']}"
    return outcomes


@pytest.mark.parametrize(("ranks", "name"), [*((2, name) for name in CASES), *((4, name) for name in LARGER)])
def test_ranks_compute_what_one_process_computes(outcomes, ranks, name):
    arguments = {key: value for key, value in CASES[name][1].items() if key not in ("zero", "wrapped")}
    wanted = by_one_process(**arguments)
    if "clip" in arguments:
        assert min(wanted["norms"]) > arguments["clip"]
    found = good(outcomes[ranks, name])
    check(found, wanted)
    for outcome in found if "tied" in found[0] else ():
        wanted_ties = [TIED[arguments["model"]]] if arguments["model"] in TIED else []
        assert [sorted(names) for names in outcome["tied"]] == [sorted(names) for names in wanted_ties]
    if name == "mixtral":  # one rank has no token for an expert of which another one has some, in the same step
        tokens = torch.tensor([outcome["experts"] for outcome in found])
        assert len(tokens[0]) == 2 * len(wanted["losses"])
        assert ((tokens == 0).any(0) & (tokens > 0).any(0)).any()


def test_blocks_are_acquired_together_on_all_ranks_or_on_none(outcomes):
    """By their size, which is the same on all ranks; results have the same bits in any way."""
    without_blocks = good(outcomes[2, "no blocks"])
    check(without_blocks, by_one_process("llama", clip=0.5, micro=2))
    for name in UNITS:
        for outcome, other in zip(good(outcomes[2, name]), without_blocks):
            assert outcome["blocks"] == ([2] if name in ("blocks", "large blocks all the same") else [])
            same_state(outcome, other)
            assert outcome["losses"] == other["losses"] and outcome["norms"] == other["norms"]


def test_ranks_go_on_after_a_backward_pass_that_an_exception_has_ended(outcomes):
    check(good(outcomes[2, "goes on"]), by_one_process("gpt2"))


def test_replicas_compute_what_one_process_computes(outcomes):
    """Ranks of a replica divide the model; gradients are those of all ranks, and so are norms."""
    wanted = by_one_process(**CLIPPED, batches=2)
    assert min(wanted["norms"]) > CLIPPED["clip"]
    found = good(outcomes[4, "replicas"])
    check(found, wanted)
    for rank, outcome in enumerate(found):
        stats, all_ranks = outcome["stats"], outcomes[4, "zero 3"][rank]["stats"]
        assert (stats["rank"], stats["ranks"], stats["shard_ranks"]) == (rank, 4, 2)
        assert all_ranks["shard_ranks"] == 4
        # Of a chunk, half comes from another rank, and not three quarters.
        per_chunk, of_all = (one["gathered_bytes"] / one["gathered_chunks"] for one in (stats, all_ranks))
        assert per_chunk == pytest.approx(of_all * 2 / 3, rel=0.05)
    early = good(outcomes[4, "replicas, early"])
    for outcome, end in zip(early, good(outcomes[4, "replicas at the end"])):
        same_state(outcome, end)
        assert outcome["losses"] == end["losses"] and all(outcome["parts"])


def test_adapters_load_elsewhere(outcomes):
    """PEFT loads, without libgemini, the adapters that each rank has saved, and they are all that was trained."""
    peft, before = pytest.importorskip("peft"), rank_programs.build("lora").state_dict()
    for rank, outcome in enumerate(good(outcomes[2, "lora"])):
        folder = os.path.join(outcome["adapters"], str(rank))
        loaded = peft.PeftModel.from_pretrained(tiny("gpt2"), folder).state_dict()
        assert loaded.keys() == before.keys()
        for name, value in loaded.items():
            assert torch.equal(value, outcome["state"][name]), name
            assert torch.equal(value, before[name]) == ("lora_" not in name), name


def test_parameters_in_16_bits(outcomes):
    """They have fp32 copies, so they come close to what fp32 computes."""
    found, wanted = good(outcomes[2, "bf16"]), by_one_process("gpt2", clip=0.5)
    check(found, {**found[0], "losses": [sum(both) / 2 for both in zip(*(one["losses"] for one in found))]})
    assert found[0]["losses"] != wanted["losses"]
    assert sum(one["losses"][-1] for one in found) / 2 == pytest.approx(wanted["losses"][-1], rel=2e-2)
    for number, (name, _) in enumerate(rank_programs.build("gpt2").named_parameters()):
        master, param = found[0]["state"][f"{number}.master"], wanted["state"][name]
        assert (master - param).abs().mean() < 1e-3, name


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_make_the_steps_of_torch(outcomes, name):
    """The same bits as torch alone that adds the gradients of the ranks' parts in order, unless norms, whose last bits
    differ, scale the gradients. Options differ between matrices and vectors.
    """
    arguments = {key: value for key, value in case_of_optimizer(name)[1].items() if key != "zero"}
    wanted = by_one_process(**arguments, micro=2)
    check(good(outcomes[2, name]), wanted, tolerance=1e-6 if "clip" in arguments else 0.0)


def test_optimizers_update_the_fp32_copies_of_16_bits(outcomes):
    """The same bits as torch with fp32 copies of its own."""
    made = rank_programs.build("branches", "bfloat16")
    masters = torch.nn.ParameterList(param.detach().float() for param in made.parameters())
    optimizer = rank_programs.optimizer_of(masters, **NADAM)
    for step in range(4):
        for rank in range(2):
            batch = rank_programs.rows("branches", step, **rank_programs.share(2, rank), dtype=torch.bfloat16)
            (made(**batch)["loss"] / 2).backward()
        for param, master in zip(made.parameters(), masters):
            master.grad, param.grad = None if param.grad is None else param.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(made.parameters(), masters):
                param.copy_(master)
    found = good(outcomes[2, "bf16, NAdam"])[0]["state"]
    wanted = rank_programs.state(made, optimizer)
    ordered = [master for group in optimizer.param_groups for master in group["params"]]
    wanted.update({f"{number}.master": master.detach() for number, master in enumerate(ordered)})
    same_state({"state": found}, {"state": wanted})


def test_what_some_ranks_or_none_use(outcomes):
    """Rank 0 uses branches 0 and 1, rank 1 branches 0 and 2; nobody uses 3, which keeps its values and has no state.
    The norm is that of all gradients, also those that only one rank has.
    """
    branches, clip = [[0, 1], [0, 2]], OTHERS["branches"][1]["clip"]
    made = rank_programs.build("branches")
    optimizer = rank_programs.adamw(made)
    before = made.choice[3].weight.detach().clone()
    losses, norms, after = [], [], []
    for step in range(4):
        parts = [
            made(**rank_programs.rows("branches", step, **rank_programs.share(2, rank)), branches=branches[rank])[
                "loss"
            ]
            for rank in range(2)
        ]
        (sum(parts) / 2).backward()
        losses.append(sum(parts).item() / 2)
        for most, found in (clip, norms), (0.8 * clip, after):
            found.append(float(torch.nn.utils.clip_grad_norm_(made.parameters(), most)))
        optimizer.step()
        optimizer.zero_grad()
    assert min(norms) > clip
    wanted = {"losses": losses, "norms": norms, "after": after, "state": rank_programs.state(made, optimizer)}
    check(good(outcomes[2, "branches"]), wanted)
    assert torch.equal(outcomes[2, "branches"][0]["state"]["choice.3.weight"], before)
    for outcome in outcomes[2, "no unit"]:
        assert "ranks differ: rank" in outcome["text"]
        assert "choice.1.weight" in outcome["text"] and "choice.2.weight" in outcome["text"]


@pytest.mark.parametrize(
    ("ranks", "name"), [*((2, name) for name in EARLY), *((4, name) for name in LARGER_EARLY[1::2])]
)
def test_updates_in_the_backward_pass(outcomes, ranks, name):
    """The same bits as by step(), with the same collectives, and parts are updated before the pass ends."""
    late, early = good(outcomes[ranks, EARLY[name][0]]), good(outcomes[ranks, name])
    for one in early:
        same_state(one, late[0])
        assert len(one["parts"]) == 4 and all(one["parts"])
        if not EARLY[name][1]:
            for what in "gathered_chunks", "reduced_chunks":
                assert one["stats"][what] == late[0]["stats"][what], what
    assert [one["losses"] for one in early] == [one["losses"] for one in late]
    assert (early[0]["parts"] == early[1]["parts"]) == (name != "early, lacking")  # that of 16 bits has few parts


def test_updates_in_the_backward_pass_are_refused(outcomes):
    first, second = good(outcomes[2, "early"])
    for one in first, second:
        same_state({"state": one["after"]}, {"state": one["before"]})
        assert "rank 0 has lr=0.001 in group 0, rank 1 has lr=0.002 in group 0" in one["options"]
        assert "the gradient of parameter transformer.wte.weight is gone" in one["clip"]
        assert "has a second gradient" in one["second"] and "call optimizer.step()" in one["second"]
        assert one["raises"] == "all give up"
        assert "parameter last.bias was added to the optimizer after prepare()" in one["added"]
    for name in "state", "after raising":
        same_state({"state": first[name]}, {"state": second[name]})
    made = rank_programs.build("gpt2")
    optimizer = rank_programs.adamw(made)
    whole = {"begin": 0, "end": rank_programs.ROWS}
    rank_programs.steps(made, optimizer, "gpt2", **whole, count=1)
    made(**rank_programs.rows("gpt2", 1, **whole))["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()
    rank_programs.steps(made, optimizer, "gpt2", **whole, count=2)
    assert far_apart(first["state"], rank_programs.state(made, optimizer)) <= 1e-6
    changed = [name for name, value in first["state"].items() if not torch.equal(value, first["after raising"][name])]
    assert len(changed) == len(first["state"])


def test_states_are_copied_and_loaded(outcomes):
    made = rank_programs.build("gpt2")
    optimizer = rank_programs.adamw(made)
    whole = {"begin": 0, "end": rank_programs.ROWS, "count": 2}
    rank_programs.steps(made, optimizer, "gpt2", **whole)
    wanted = rank_programs.steps(made, optimizer, "gpt2", **whole)
    check(good(outcomes[2, "resumed"]), {**wanted, "state": rank_programs.state(made, optimizer)})


def same_state(outcome, wanted):
    assert outcome["state"].keys() == wanted["state"].keys()
    for name, value in wanted["state"].items():
        assert torch.equal(outcome["state"][name], value), name


def test_checkpoints_know_no_number_of_ranks(tmp_path, outcomes):
    """Saved by 4 ranks, loaded by 1, 2 and 3; saved by 1, loaded by 2; saved by 2, loaded by transformers."""

    def all_run(ranks, program, where, count):
        cases = [
            (program, {**kind, "folder": str(tmp_path / where / name), "model": "branches", "count": count})
            for name, kind in kinds.items()
        ]
        cases[-1][1]["shard_size"] = {4: 2, 2: 1}.get(ranks)  # two replicas
        return [good(outcome) for outcome in zip(*run(tmp_path, ranks, "several", cases=cases))]

    kinds = {
        "adamw": {},
        "nadam": {"optimizer": NADAM},
        **{name: {"dtype": "bfloat16", "kept": KEPT[name][0]} for name in ("split16", "8bit, split16")},
        "replicas": {"dtype": "bfloat16", "kept": KEPT["split16"][0]},
    }
    for where, saving, loading in ("four", 4, (1, 2, 3)), ("one", 1, (2,)):
        saved = [outcome[0] for outcome in all_run(saving, "saving", where, 2)]
        for ranks in loading:
            for found, wanted in zip(all_run(ranks, "loading", where, 1), saved):
                for outcome in found:
                    same_state(outcome, wanted)
                    assert outcome["extra"] == {"step": 2}
    saved = good(outcomes[2, "saving"])[0]
    model = pytest.importorskip("transformers").GPT2LMHeadModel.from_pretrained(saved["folder"])
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved["state"][name]), name


def test_a_rank_that_dies_while_saving_leaves_the_checkpoint_before(tmp_path):
    folder = str(tmp_path / "checkpoint")
    saved = good(run(tmp_path, 3, "saving", folder=folder, model="branches", count=2))[0]
    with traceless(tmp_path) as more:
        processes, paths = start(tmp_path, 3, "saving", more, folder=folder, model="branches", count=2, dies=True)
        assert started.ends(processes, 120) == [0, -9, 0]
    for rank in 0, 2:
        outcome = torch.load(paths[rank], weights_only=False)
        assert outcome["type"] == "GeminiError" and "rank 1" in outcome["text"], outcome
        assert outcome["seconds"] < 10, outcome
    assert not os.path.exists(folder + ".saving")
    for outcome in good(run(tmp_path, 2, "loading", folder=folder, model="branches", count=1)):
        same_state(outcome, saved)


def test_a_full_disk_on_one_rank_leaves_the_checkpoint_before(outcomes):
    for rank, outcome in enumerate(good(outcomes[2, "full disk"])):
        assert ("rank 1: " in outcome["error"]) == (rank != 1) and "was not written" in outcome["error"]
        assert outcome["left"] == ["checkpoint"] and outcome["seconds"] < 10
        same_state({"state": outcome["older"]}, {"state": outcome["saved"]})
        assert "libgemini.json" in outcome["again"]


def test_ranks_with_texts_of_other_lengths(outcomes):
    """The loss is the mean of the ranks' losses, as with DistributedDataParallel, however long their texts are."""
    name, lengths = "gpt2", OTHERS["columns"][1]["lengths"]
    made = rank_programs.build(name)
    optimizer = rank_programs.adamw(made)
    losses = []
    for step in range(4):
        shares = [rank_programs.share(2, rank) for rank in range(2)]
        batches = [rank_programs.rows(name, step, **part, length=length) for part, length in zip(shares, lengths)]
        loss = sum(made(**batch)["loss"] for batch in batches) / 2
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    wanted = {"losses": losses, "norms": [], "after": [], "state": rank_programs.state(made, optimizer)}
    check(good(outcomes[2, "columns"]), wanted)


@pytest.mark.parametrize("name", ["joined", "joined, early"])
def test_ranks_with_less_data_join(outcomes, name):
    """They count as zeros in the mean of all ranks. Branches that only their repeated batches use have no step."""
    arguments = OTHERS[name][1]
    counts, clip = arguments["counts"], 0.0 if arguments.get("early") else 0.5
    made = rank_programs.build(arguments["model"])
    unused, norms = f"choice.{arguments['spare'][-1]}.weight", []
    optimizer, before = rank_programs.adamw(made), made.get_parameter(unused).detach().clone()
    for step in range(max(counts)):
        for rank in range(2):
            if step < counts[rank]:
                (made(**rank_programs.rows("branches", step, **rank_programs.share(2, rank)))["loss"] / 2).backward()
        if clip:
            norms.append(float(torch.nn.utils.clip_grad_norm_(made.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
    assert all(norm > clip for norm in norms)
    wanted = rank_programs.state(made, optimizer)
    for rank, one in enumerate(good(outcomes[2, name])):
        assert one["idle"] == [step >= counts[rank] for step in range(max(counts))] and not one["left"]
        assert one["norms"] == pytest.approx(norms, rel=1e-5)
        assert far_apart(one["state"], wanted) <= 1e-6
        same_state(one, outcomes[2, name][0])
        assert torch.equal(one["state"][unused], before)
        assert "rank 1 has no batch at all" in one["empty"] and "libgemini.torch.join" in one["wrapper"]


REFUSED = {  # what is refused of DTensors, and words of why; and norms of gradients that go through functions
    "full_tensor()": "292.14",  # the root of the sum of the squares of 0 to 63
    "to_local()": "292.14",
    "uneven": "cannot be divided into 2 equal parts",
    "two dimensions": "over a mesh of 2 dimensions",
    "gradient": "gradient from before prepare()",
    "view": "make it of a clone()",
    "unit": "need plain parameters",
    "other gradients": "want (Shard(dim=0),), or none",
    "mixed": "mixed torch.Tensor and DTensor",
    "tensor()": "give it a to_local() or a clone()",
    "other norm": "only the 2-norm",
    "scaler": "without GradScaler",
}


@pytest.mark.parametrize("processes", [2, 4])
def test_dtensors_are_divided(tmp_path, processes):
    """Models of parallelize_module() against torch alone over the same processes: tensor parallel 2, alone and x ZeRO 2
    with accumulation.
    """
    ranks, folder = processes // 2, str(tmp_path / "checkpoint")
    micro = {"micro": 2} if ranks > 1 else {}
    found = good(run(tmp_path, processes, "divided", parts=2, folder=folder, **micro))
    for one in found:
        check([one["made"]], one["wanted"])
        assert min(one["made"]["norms"]) > 1 and one["extra"] == {"step": 4}
        if "early" in one:
            check([one["early"]], one["unclipped"])
        same_state({"state": one["loaded"]}, one["made"])
        same_state({"state": one["again"]}, one["made"])
        same_state(one["made"], found[0]["made"])
        assert not any(value.any() for value in one["zero"].values())
        if rank_programs.DIVIDES_TWO_DTYPES:
            fp32, kept = one["kept"]["fp32"], one["kept"]["narrow"]
            same_bits(kept["loaded"], kept["state"])
            same_bits(kept["state"], found[0]["kept"]["narrow"]["state"])
            assert kept["losses"] == pytest.approx(fp32["losses"], rel=2e-2)  # in bfloat16
            masters = [{name: one["state"][name] for name in fp32["state"] if "master" in name} for one in (kept, fp32)]
            assert masters[0] and far_apart(*masters) < 0.02
        assert one["shape"] == ((rank_programs.VOCAB, rank_programs.WIDTH), rank_programs.VOCAB * rank_programs.WIDTH)
        assert one["mean"] == pytest.approx(one["made"]["state"]["blocks.0.up.weight"].mean().item(), rel=1e-4)
        assert {"model-part-00001-of-00002.safetensors", "model-part-00002-of-00002.safetensors"} < {*one["files"]}
        assert "not divided by torch in the model" in one["undivided"]
        more = {"ranks": "are also ranks", "elements": "clipped, scaled and dropped only"}
        if "Found TP device_mesh on the 0 dimension" in one["refused"].get("ranks", ""):
            more["ranks"] = "Found TP device_mesh"  # torch 2.6 does not make that mesh, with one rank either
            if ranks == 1:
                del one["refused"]["ranks"]
        for name, words in {**REFUSED, **(more if ranks > 1 else {"sgd": "want torch.optim.AdamW"})}.items():
            assert words in one["refused"].pop(name)
        assert not one["refused"]


def test_tensor_parallel_parts_are_divided(tmp_path):
    """Tensor parallel 2 x ZeRO 2 on 4 processes, against one process that has the whole model. The ranks of a session
    are some of all processes, which torch.distributed connects as well.
    """
    clip = 0.5
    found = good(run(tmp_path, 4, "tensor_parallel", parts=2, clip=clip))
    for one, other in zip(good(run(tmp_path, 4, "tensor_parallel", parts=2, clip=clip, transport="torch")), found):
        same_state(one, other)
    made, norms = rank_programs.Parallel(), []
    optimizer = rank_programs.adamw(made)
    optimizer.register_step_pre_hook(
        lambda *_: norms.append(float(torch.nn.utils.clip_grad_norm_(made.parameters(), clip)))
    )
    wanted = rank_programs.steps(made, optimizer, "parallel", begin=0, end=rank_programs.ROWS)
    assert min(norms) > clip
    for one in found:
        assert one["norms"] == pytest.approx(norms, rel=1e-5)
    whole = rank_programs.state(made, optimizer)
    dims = {name: 0 if name.startswith("up") else 1 for name, _ in made.named_parameters() if "last" not in name}
    for number, (name, _) in enumerate(made.named_parameters()):
        if name in dims:
            dims.update({f"{number}.{kind}": dims[name] for kind in ("exp_avg", "exp_avg_sq")})
    for replica in found[:2], found[2:]:
        joined = {
            name: torch.cat([one["state"][name] for one in replica], dims[name]) if name in dims else value
            for name, value in replica[0]["state"].items()
        }
        sizes = {name: max(1.0, value.abs().max().item()) for name, value in whole.items()}  # of sums of squares
        assert far_apart(*({name: one[name] / sizes[name] for name in whole} for one in (joined, whole))) <= 1e-6
    for first, second in zip(found[:2], found[2:]):
        same_state(first, second)
    assert [sum(both) / 2 for both in zip(found[0]["losses"], found[2]["losses"])] == pytest.approx(
        wanted["losses"], rel=1e-5
    )


def same_bits(outcome, wanted):
    """Also of numbers of steps."""
    assert outcome.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(torch.as_tensor(outcome[name]), torch.as_tensor(value)), name


def test_narrow_states_have_the_bits_of_one_process(outcomes, tmp_path):
    """Two ranks compute what one process does that adds the gradients of their parts."""
    names = [f"{name} at the end" for name in KEPT]
    cases = [("training", {**AT_THE_END[name][1], "micro": 2}) for name in names]
    (alone,) = run(tmp_path, 1, "several", cases=cases)
    by_name = dict(zip(names, good(alone)))
    for name in names:
        for found in good(outcomes[2, name]):
            same_bits(found["state"], by_name[name]["state"])
    masters = [name for name in alone[0]["state"] if name.endswith(".master")]
    assert masters
    for one, other in zip(alone, alone[1:]):
        assert any(not torch.equal(one["state"][name], other["state"][name]) for name in masters)


def test_split_masters_are_clipped_and_accumulate(outcomes):
    """On all ranks the same bits, near fp32's: a master has all of its bits, but parameters have 16."""
    found, wanted = good(outcomes[2, "split16, clipped"]), by_one_process("llama", clip=0.5, micro=4)
    check(found, {**found[0], "losses": [sum(both) / 2 for both in zip(*(one["losses"] for one in found))]})
    assert min(found[0]["norms"]) > 0.5 and found[0]["norms"] == pytest.approx(wanted["norms"], rel=5e-2)
    for number, (name, _) in enumerate(rank_programs.build("llama").named_parameters()):
        master, param = found[0]["state"][f"{number}.master"], found[0]["state"][name]
        assert torch.equal(narrow.halves(master.contiguous())[0].view(torch.int16), param.view(torch.int16)), name
        assert (master - wanted["state"][name]).abs().mean() < 1e-3, name


def test_ranks_with_less_data_join_with_split_masters(outcomes):
    """Branches that only repeated batches use, or none, have no step."""
    before = rank_programs.build("branches", "bfloat16").state_dict()
    for rank, one in enumerate(good(outcomes[2, "joined, split16"])):
        same_state(one, outcomes[2, "joined, split16"][0])
        assert one["idle"] == [False, False, rank == 1]
        for name, value in before.items():
            assert torch.equal(one["state"][name], value) == name.startswith(("choice.2", "choice.3")), name


@pytest.mark.parametrize("name", RESUMED)
def test_masters_and_narrow_states_are_copied_and_loaded(outcomes, name):
    """To the bit, also where parameters were loaded just before; and the training goes on as it would have."""
    for one in good(outcomes[2, f"{name} resumed"]):
        same_bits(one["loaded"], one["saved"])
        same_bits(one["state"], one["first"])
        for number, (parameter, _) in enumerate(rank_programs.build("llama").named_parameters()):
            same_masters(one["state"], one["renewed"], number, parameter)
            assert torch.equal(one["renewed"][parameter], one["saved"][parameter])


def same_masters(before, after, number, name):
    """Asserts that a parameter's fp32 copy changed where the parameter did, and only there. Returns whether some did,
    and whether some did not."""
    old, new, master = before[name], after[name], before[f"{number}.master"]
    changed = old.view(torch.int16) != new.view(torch.int16)
    assert torch.equal(after[f"{number}.master"], torch.where(changed, new.float(), master)), name
    return bool(changed.any()), bool((~changed & (master != old)).any())


@pytest.mark.parametrize("name", ["written", "written, zero 1", "written, split16"])
def test_masters_change_where_parameters_are_written(outcomes, name):
    """On all ranks, and those that are loaded before the parameters stay."""
    names = [name for name, _ in rank_programs.build("branches").named_parameters()]
    for one in good(outcomes[2, name]):
        found = {
            name: same_masters(one["before"], one["after"], *pair) for pair in enumerate(names) for name in pair[1:]
        }
        assert found["first.weight"] == found["last.weight"] == (True, True) and not found["last.bias"][0]
        same_bits(one["loaded"], one["after"])


@pytest.mark.parametrize("name", ["clamped", "clamped, split16"])
def test_what_the_forward_pass_writes_is_in_updates_of_the_backward_pass(outcomes, name):
    """The same bits as by step()."""
    for one in good(outcomes[2, name]):
        same_bits(one["early"], one["at the end"])
        assert one["early"]["first.weight"].abs().max() > 0.05  # by the last step
        assert one["early"]["first.weight"].abs().max() < 0.1


def test_each_rank_keeps_its_part(outcomes):
    """Host memory of four ranks, in all, is that of one model and its states, and what chunks and slices waste."""
    made = rank_programs.build("gpt2")
    model = 16 * sum(param.numel() for param in made.parameters())
    for outcome in good(outcomes[4, "zero 3"]):
        assert outcome["stats"]["gathered_bytes"] > 0 and outcome["stats"]["reduced_chunks"] > 0
        assert outcome["host"] <= model / 4 + 5 * (64 << 10)


def test_ranks_load_a_model_in_the_memory_of_one(outcomes):
    """Of a folder of transformers: each rank keeps its slices, and reads no other bytes of the files."""
    transformers, found = pytest.importorskip("transformers"), good(outcomes[2, "pretrained"])
    made = transformers.LlamaForCausalLM.from_pretrained(found[0]["folder"], dtype=torch.bfloat16)
    size = 2 * sum(param.numel() for param in made.parameters())
    with torch.no_grad():
        wanted = made(input_ids=torch.arange(rank_programs.LENGTH)[None]).logits
    for one in found:
        for way in "from_pretrained", "load_weights":
            assert torch.equal(one[way, "logits"], wanted)
            assert 0 < one[way, "host"] <= size / 2 + 2 * (64 << 10)
            assert 0.45 * size < one[way, "read"] <= 0.55 * size
        assert one["load_weights", "grown"] <= 0.8 * size


# What a rank takes beside the model: 10 MiB are of the program (graph, activations, objects of Python), and pages of
# 2 MiB of the host tier make up to 4. Measured: 14 to 16 MiB. A second copy of the parameters takes 12.
BESIDE_BYTES = 24 << 20


def test_ranks_train_a_model_in_14_and_a_half_bytes_a_parameter(outcomes):
    """Host memory of 4 ranks in all, of a model in bfloat16 with split masters: while it is loaded from files, and
    trained with clipping or with updates in the backward pass. Parts of chunks, of which ranks have one at the end of
    each of five arenas at most, are in it. The system says the same of the processes, with what they take beside it.
    """
    pytest.importorskip("transformers")
    found = good(outcomes[4, "in all"])
    parameters = found[0]["parameters"]
    for way in "from_pretrained", "load_weights":
        loaded, trained, grown = (sum(one[way][i] for one in found) for i in range(3))
        assert 2 * parameters <= loaded <= 2.1 * parameters
        assert 14 * parameters <= trained <= 14.5 * parameters, f"{trained / parameters:.2f} bytes a parameter"
        assert trained < grown <= 14.5 * parameters + len(found) * BESIDE_BYTES, f"{grown >> 20} MiB"


def test_ranks_have_one_folder_for_files(outcomes):
    """Each has a file of its own there, which has no name. Values have the same bits as without."""
    found = good(outcomes[2, "files"])
    for outcome, other in zip(found, good(outcomes[2, "zero 3"])):
        same_state(outcome, other)
        assert outcome["losses"] == other["losses"] and outcome["norms"] == other["norms"]
        assert outcome["filed"] > 0 and len(outcome["files"]) == 1
    first, second = (outcome["files"][0] for outcome in found)
    assert first != second and os.path.dirname(first) == os.path.dirname(second)
    assert os.listdir(os.path.dirname(first)) == []


def test_the_watchdog_tells_what_a_rank_waits_for(outcomes):
    """Rank 0, while rank 1 does other things: for chunks that it gathers, and for what ranks tell each other."""
    first, _ = good(outcomes[2, "watched"])
    waited = r"watchdog: thread \d+ \(.*\) has waited \d+\.\d+ s in "
    chunks = r"gemini_acquire\(\).* for the work queued on stream \d+, which gathers chunks"
    ranks = r"gemini_group_exchange\(\).* for the other ranks of its group, as rank 0, in an exchange"
    for what, where in ("pass", chunks), ("exchange", ranks):
        assert any(re.fullmatch(waited + where, text) for text in first[what]), first


def test_a_full_file_tier_on_one_rank(outcomes):
    """Where it is made, and where a step has to write there. The other rank hears of it; nothing is left."""
    first, second = good(outcomes[2, "full tier"])
    for name in "made", "full":
        assert second[name][1] != "PEER", second
        assert first[name][1] == "PEER" and "rank 1" in first[name][0], first
        assert max(one[name][2] for one in (first, second)) < 10
    assert second["made"][1] == "OOM_FILE" and "could not reserve" in second["made"][0]
    assert first["made"][0] == f"rank 1: {second['made'][0]}"
    assert "does not fit in files" in second["full"][0]
    assert first["left"] == second["left"] == []


def test_another_model_on_one_rank(outcomes):
    for outcome in outcomes[2, "another model"]:
        assert outcome["type"] == "GeminiError" and outcome["seconds"] < 10
        assert "rank 0 has parameter 1.weight of (10, 8)" in outcome["text"]
        assert "rank 1 has parameter 1.weight of (9, 8)" in outcome["text"]


@pytest.mark.parametrize("what", SKIPPED)
def test_a_rank_that_leaves_out_a_call_is_found_out(outcomes, what):
    for rank, outcome in enumerate(outcomes[2, f"skips {what}"]):
        assert outcome["type"] == "GeminiError" and f"rank {1 - rank}" in outcome["text"], outcome
        assert outcome["seconds"] < 10, outcome


@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks, names in TORCH.items() for name in names])
def test_torch_distributed_carries_the_same_bits(outcomes, ranks, name):
    found, wanted = (good(outcomes[ranks, one]) for one in (f"{name}, torch", name))
    for one, other in zip(found, wanted):
        same_state(one, other)
        for what in "losses", "norms", "after":
            assert one[what] == other[what]
        for what in "gathered_bytes", "reduced_bytes":
            assert one["stats"][what] == other["stats"][what]


def test_over_torch_distributed_a_rank_that_leaves_out_a_call_is_waited_for_until_the_deadline(outcomes):
    for outcome in outcomes[2, "skips step, torch"]:
        assert (outcome["type"], outcome["status"]) == ("GeminiError", "PEER"), outcome
        assert outcome["seconds"] < 8, outcome


@pytest.mark.parametrize("where", ["all_gather", "reduce_scatter"])
def test_over_torch_distributed_a_rank_that_is_killed_is_named(tmp_path, where):
    """While the others are in a collective with it."""
    with traceless(tmp_path) as more:
        processes, paths = start(tmp_path, 3, "ends", more, point=where, how="killed", deadline=30.0, transport="torch")
        assert started.ends(processes, 60) == [0, -9, 0]
    for rank in 0, 2:
        outcome = torch.load(paths[rank], weights_only=False)
        assert (outcome["type"], outcome["status"]) == ("GeminiError", "PEER"), outcome
        assert "() of comms[" in outcome["text"], outcome
        assert f"rank 1 has ended (process {processes[1].pid})" in outcome["text"], outcome
        assert outcome["seconds"] < 10, outcome


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
@pytest.mark.parametrize("how", ["killed", "raises"])
def test_a_rank_that_ends_is_named(tmp_path, where, how):
    early = where == "backward" and how == "killed"
    with traceless(tmp_path) as more:
        processes, paths = start(tmp_path, 3, "ends", more, point=where, how=how, early=early)
        assert started.ends(processes, 60) == [0, -9 if how == "killed" else 0, 0]
    for rank in 0, 2:
        outcome = torch.load(paths[rank], weights_only=False)
        assert outcome["type"] == "GeminiError" and "rank 1" in outcome["text"], outcome
        assert outcome["seconds"] < 10, outcome
        assert how != "killed" or f"rank 1 has ended (process {processes[1].pid})" in outcome["text"], outcome


def test_the_watchdog_says_which_rank_waits_in_what_and_where_its_group_is(tmp_path):
    first, second = good(run(tmp_path, 2, "stops"))
    assert second["lines"] == [] and all(
        torch.equal(value, second["state"][name]) for name, value in first["state"].items()
    )
    state = [line.removeprefix("watchdog: state: ") for line in first["lines"] if line.startswith("watchdog: state: ")]
    waits = [line for line in first["lines"] if re.match(r"watchdog: thread \d+", line)]
    assert any(float(re.search(r"has waited (\d+\.\d+) s in ", line)[1]) >= 0.2 for line in waits)
    assert any("for the other ranks of its group, as rank 0, in a gather for " in line for line in waits), waits
    assert "group 0: rank 0 of 2, in 1 replica of 2 ranks" in state
    assert any(
        re.match(r"group 0: gathers of \d+ chunks queued so far; \d+ calls, of \d+ chunks, have not", s) for s in state
    )
    assert any(re.match(r"group 0: arena .*: of \d+ chunks \d+ gathered, of these [1-9]", s) for s in state), state
    assert any(re.match(r"group 0: arena .* chunks of gradients \d+ added", s) for s in state), state
    assert any(s.startswith("device: ") for s in state) and any(s.startswith("waits: thread ") for s in state)


AT_THE_START = {  # by name: the program's arguments, and what the others say
    "before": ({"point": "before"}, "waits for rank 1: a process has ended, as torch's connection to it is closed"),
    "within": ({"point": "within"}, "rank 1 has ended (process {pid})"),
    "the first one, within": ({"point": "within", "who": 0}, "rank 0 has ended (process {pid})"),
    "unwatched": ({"point": "unwatched", "deadline": 3.0}, "waits for rank 1: 3 s have passed"),
}


@pytest.mark.parametrize("name", AT_THE_START)
def test_a_rank_that_ends_at_the_start_is_named(tmp_path, name):
    """Though torch itself would wait half an hour. When rank 0 has said so and ends, so does the store."""
    arguments, said = AT_THE_START[name]
    who = arguments.get("who", 1)
    with traceless(tmp_path) as more:
        processes, paths = start(tmp_path, 4, "ends_at_start", more, **arguments)
        assert started.ends(processes, 60) == [-9 if rank == who else 0 for rank in range(4)]
    said = [said.format(pid=processes[who].pid), "waits for rank 1: the store of torch.distributed is gone"]
    for rank in {0, 1, 2, 3} - {who}:
        outcome = torch.load(paths[rank], weights_only=False)
        assert (outcome["type"], outcome["status"]) == ("GeminiError", "PEER"), outcome
        assert any(text in outcome["text"] for text in said[: 1 if rank == 0 else 2]), outcome
        assert outcome["seconds"] < 10, outcome


def test_a_rank_may_be_late_at_the_start(outcomes):
    """Until the deadline, if there is one, and otherwise as long as torch waits. The others hear of what one meets."""
    first, second = good(outcomes[2, "late"])
    assert first["late"][:2] == ("init(): waits for rank 1: 1 s have passed", "PEER") and 1 < first["late"][2] < 2.5
    assert second["late"][:2] == (f"rank 0: {first['late'][0]}", "PEER") and second["late"][2] < 1
    assert "/proc/nowhere" in second["alone"][0] and second["alone"][1] != "PEER"
    assert first["alone"][:2] == (f"rank 1: {second['alone'][0]}", "PEER")
    assert max(one["alone"][2] for one in (first, second)) < 5


class Gpus:
    """A Ranks, as far as it looks at processes."""

    _refuse_shared_gpus = ranks_of_torch.Ranks._refuse_shared_gpus

    def __init__(self, *processes):
        self.processes = [ranks_of_torch.Process(f"host{host} pid:[1]", 1, "1", gpu) for host, gpu in processes]


def test_each_rank_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    Gpus((0, "a"), (0, "b"), (1, "a"))._refuse_shared_gpus()
    Gpus((0, ""), (0, ""))._refuse_shared_gpus()
    shared = Gpus((0, "a"), (1, "b"), (1, "b"))
    with pytest.raises(gm.GeminiError, match="ranks 1 and 2 have the same GPU, b"):
        shared._refuse_shared_gpus()
    with pytest.raises(gm.GeminiError, match="rank 0 has a GPU, rank 1 has the simulated device"):
        Gpus((0, "a"), (0, ""))._refuse_shared_gpus()
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    shared._refuse_shared_gpus()


def test_processes_of_a_machine_share_it(monkeypatch):
    """Its memory, and its cores unless they are bound to others; also with those of other groups, as torchrun tells."""
    shared, bound, elsewhere = ("here", 800, [*range(16)]), ("here", 900, [*range(16, 20)]), ("there", 7, [0])
    monkeypatch.setattr(ranks_of_torch, "host_default", lambda: shared[1])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*shared[2]})
    monkeypatch.setattr(socket, "gethostname", lambda: "here")

    class Start:
        def __init__(self, processes):
            self.processes = processes

        def exchange(self, mine):
            return [mine, *self.processes]

    def share(processes, *more):
        return ranks_of_torch.Share.of(processes and Start(processes), *more)

    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert share(None) == share([elsewhere]) == (0, 0)
    assert share([shared, elsewhere]) == (400, 7)
    assert share([bound]) == (400, 15)
    assert share([("here", 300, [*range(16)])] * 19) == (15, 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert share(None) == (200, 3)
    assert share([shared]) == (200, 3)
    assert share([bound, elsewhere]) == (200, 7)
    assert share([("here", 0, [*range(16)])]) == (200, 3), "one that has been given its budgets has not looked"

    def looked():
        raise AssertionError("nobody asks for the machine's memory")

    monkeypatch.setattr(ranks_of_torch, "host_default", looked)
    assert share([shared], False) == (0, 3)
    given = {"device": "cpu", "device_memory": "1MiB", "host_memory": "1MiB"}
    gm.init(**given)
    gm.close()
    for missing in "device_memory", "host_memory":
        with pytest.raises(AssertionError, match="nobody asks"):
            gm.init(**{**given, missing: 0})


def test_a_session_takes_its_share(outcomes):
    for outcome in good(outcomes[2, "shares"]):
        assert 0.1 < outcome["host"] < 0.4 and outcome["threads"] == 2


def test_the_gpu_of_a_process(monkeypatch):
    """By LOCAL_RANK, unless the script has chosen one, or sees one only."""
    chosen = []
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)

    def choose(current, count, local, group=True):
        monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setenv("LOCAL_RANK", local)
        return ranks_of_torch.choose_gpu(group or None).index

    assert choose(0, 4, "2") == 2 and chosen == [2]
    assert [choose(3, 4, "2"), choose(0, 1, "2"), choose(0, 4, "2", group=False)] == [3, 0, 0] and chosen == [2]
    with pytest.raises(gm.GeminiError, match="LOCAL_RANK is 4, but this process sees 4 GPUs"):
        choose(0, 4, "4")
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert choose(0, 4, "5") == 1


def test_what_is_refused(outcomes):
    wanted = {
        "zero": 'zero is 4: want 1, 2, 3 or "auto"',
        "shard_size": "shard_size is 3: want a divisor of the number of processes, 2",
        "shard_sizes": "rank 0 has shard_size 1, rank 1 has 2: want the same",
        "transport": "transport is 'gloo': want 'auto' or 'torch'",
        "transports": "rank 0 has transport auto, rank 1 has torch: want the same",
        "mesh": "process_group is a mesh of 1 dimensions: want 2",
        "adafactor": "Adafactor is not supported on several ranks",
        "another class": "Mine is not supported on several ranks",
        "early": "step_in_backward is for torch.optim.AdamW and Adam",
        "gradient before": "parameter transformer.wpe.weight has a gradient from before prepare()",
        "second": "a second optimizer",
        "kept": "rank 1 has AdamW with states='fp32', masters='split16'",
        "read": "transformer.wte.weight.grad: a gradient is divided among the ranks",
        "write": "transformer.wte.weight.grad: a gradient is divided among the ranks",
        "assign": "transformer.wte.weight.grad is set",
        "options": "rank 0 has lr=0.001 in group 0, rank 1 has lr=0.002 in group 0",
        "state": "take optimizer.state_dict()",
        "sliced state": "parameter last.weight: exp_avg is divided among the ranks: take optimizer.state_dict()",
        "set state": "parameter last.weight: its state is divided among the ranks",
    }
    for rank, outcome in enumerate(good(outcomes[2, "refusals"])):
        wanted["failed"] = ("rank 1: " if rank == 0 else "") + "'NoneType' object is not callable"
        assert outcome.keys() == wanted.keys()
        for name, text in wanted.items():
            assert text in outcome[name], outcome[name]


def test_a_parameter_that_no_optimizer_has(outcomes):
    """Its gradient does not add up over steps, though no update of its arena takes it."""
    for outcome in good(outcomes[2, "left out"]):
        assert outcome["norms"] == [outcome["norms"][0]] * 4
        assert all(outcome["norms"][0])


def test_a_rank_may_work_alone_for_longer_than_the_deadline(outcomes):
    first, second = good(outcomes[2, "alone for long"])
    assert first["state"].keys() == second["state"].keys()
    assert all(torch.equal(value, second["state"][name]) for name, value in first["state"].items())


def test_the_example_of_the_page(tmp_path):
    """torchrun with 2 processes prints the losses of one process, and saves what transformers loads."""
    example = os.path.join(HERE, "..", "examples", "several_processes.py")
    transformers = pytest.importorskip("transformers")
    said, models = [], []
    for name, command in ("one", []), ("two", ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]):
        folder = tmp_path / name
        done = subprocess.run(
            [sys.executable, *command, example, folder], capture_output=True, text=True, cwd=tmp_path, timeout=300
        )
        assert done.returncode == 0, done.stderr
        said.append([float(word) for word in done.stdout.split("losses:")[1].split()])
        models.append(transformers.LlamaForCausalLM.from_pretrained(folder).state_dict())
    assert said[1] == pytest.approx(said[0], abs=2e-4) and said[0][-1] < said[0][0]
    assert far_apart(*models) < 1e-3


@pytest.mark.parametrize("name", ["trainer", "accelerate", "lightning"])
def test_trainers(tmp_path, name):
    """The example of a trainer on 2 ranks, beside itself without libgemini, where torch's DDP adds gradients."""
    code = source_of(name, "AdamW")
    plain = without(code).replace("devices=1", "devices=2")  # without libgemini, Lightning counts those of all ranks
    cases = [("example", {"code": part, "folder": str(tmp_path)}) for part in (code, plain)]
    for ours, plain in run(tmp_path, 2, "several", more={"TORCHELASTIC_RUN_ID": "1"}, cases=cases):
        good([ours, plain])
        assert len(set(ours["losses"])) >= 8
        assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        assert far_apart(ours["values"], plain["values"]) < 1e-5
    if name == "lightning":  # rank 0 has written the whole model
        (file,) = (tmp_path / "checkpoints").glob("epoch=1-step=?.ckpt")
        assert far_apart(torch.load(file, weights_only=False)["state_dict"], ours["values"]) == 0
