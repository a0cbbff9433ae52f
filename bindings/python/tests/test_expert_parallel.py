"""Experts that torch divides among ranks of a session, against one process of torch alone that has them all.

SPDX-License-Identifier: Apache-2.0
"""

import pytest
import torch

import libgemini.torch as gm
import rank_programs
import started
from conftest import VOCAB
from expert_parallel import Mixture
from libgemini.torch import owners
from test_ranks import check, good, run, same_bits, same_state, start, traceless

CLIP = 0.2
TWO = {"batches": 2}  # batches a step, whose gradients are added
SGD = {"name": "SGD", "lr": 0.05, "momentum": 0.9}
BF16 = {"dtype": "bfloat16", "kept": {"masters": "split16", "states": "8bit"}}
CASES = {  # by ranks and name: how many ranks divide the experts, and more
    (2, "all on a rank"): {"parts": 2, "clip": CLIP, "zero": 2},
    (4, "zero 1"): {"parts": 2, "clip": CLIP, "zero": 1, "options": {"device_memory": "2MiB"}},
    (4, "zero 2"): {"parts": 2, "clip": CLIP, "zero": 2, **TWO},
    (4, "zero 3"): {"parts": 2, "clip": CLIP, **TWO},
    (4, "zero auto"): {"parts": 2, "clip": CLIP, "zero": "auto"},
    (4, "30 %"): {"parts": 2, "clip": CLIP, **TWO, "options": {"device_memory": "640KiB"}},
    (4, "one each"): {"parts": 4, "clip": CLIP},
    (4, "replicas"): {"parts": 2, "clip": CLIP, "options": {"shard_size": 2}},
    (4, "replicas of replicas"): {"parts": 1, "clip": CLIP, "options": {"shard_size": 2, "device_memory": "2MiB"}},
    (4, "torch"): {"parts": 2, "clip": CLIP, **TWO, "options": {"transport": "torch"}},
    (4, "SGD"): {"parts": 2, "clip": CLIP, "optimizer": SGD},
    (4, "rows in other orders"): {"parts": 2, "clip": CLIP, "rows": [[0, 1], [3, 2]]},
    (4, "unclipped"): {"parts": 2},
    (4, "early"): {"parts": 2, "early": True},
    (4, "bf16"): {"parts": 2, "clip": CLIP, **BF16},
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """By number of ranks and name of a case, the outcome of each rank."""
    out = {}
    for ranks in (2, 4):
        folder = tmp_path_factory.mktemp("ranks")
        names = [name for count, name in CASES if count == ranks]
        cases = [("expert_parallel", CASES[ranks, name]) for name in names]
        if ranks == 4:
            cases.append(("refused_experts", {}))
        out.update(
            {(ranks, name): one for name, *one in zip([*names, "refused"], *run(folder, ranks, "several", cases=cases))}
        )
    return out


LEFT_OUT = ("parts", "zero", "early", "options", "kept", "rows")  # of what one process does


def alone(*, dtype="float32", optimizer=None, loaded=None, **more):
    """What torch alone computes from the whole batch, with all experts."""
    made = Mixture(VOCAB, rank_programs.WIDTH).to(rank_programs.DEVICE)
    optimizer = rank_programs.optimizer_of(made, **(optimizer or {}))
    more = {name: value for name, value in more.items() if name not in LEFT_OUT}
    out = rank_programs.steps(made, optimizer, "tokens", begin=0, end=rank_programs.ROWS, **more)
    return {**out, "counts": [layer.counts for layer in made.layers], "state": rank_programs.state(made, optimizer)}


@pytest.mark.parametrize(("ranks", "name"), [key for key in CASES if key[1] != "bf16"])
def test_ranks_compute_what_one_process_computes(outcomes, ranks, name):
    wanted, found = alone(**CASES[ranks, name]), good(outcomes[ranks, name])
    if "clip" in CASES[ranks, name]:
        assert min(wanted["norms"]) > CLIP
    check(found, wanted)
    tokens = torch.tensor([outcome["counts"] for outcome in found])  # of ranks, layers, passes, experts
    assert torch.equal(tokens.sum(0).sum(1), torch.tensor(wanted["counts"]).sum(1))
    assert (tokens.sum(dim=(0, 1, 2)) > 0).all()  # all experts have some


def test_parts_are_divided_among_their_owners(outcomes):
    """Each rank keeps as much of an expert as of the rest: no part is on two ranks."""
    host = [outcome["host"] for outcome in good(outcomes[4, "zero 3"])]
    values = sum(param.numel() for param in Mixture(VOCAB, rank_programs.WIDTH).parameters())
    spare = 4 * 10 * (64 << 10)  # of five arenas of both sorts, parts of chunks on each rank
    assert 16 * values <= sum(host) <= 16 * values + spare
    assert all(min(outcome["gathered"]) > 0 for outcome in good(outcomes[4, "zero 3"]))
    parts = [outcome["parts"] for outcome in good(outcomes[4, "early"])]
    assert all(len(steps) == 4 and all(steps) for steps in parts)  # some part of each before the pass ends
    for one, other in zip(good(outcomes[4, "torch"]), good(outcomes[4, "zero 3"])):
        same_state(one, other)


def test_narrow_states_have_the_same_bits_on_all_ranks(outcomes):
    found = good(outcomes[4, "bf16"])
    for one in found:
        same_bits(one["state"], found[0]["state"])
    wanted = alone(clip=CLIP)
    losses = [sum(values) / len(found) for values in zip(*(one["losses"] for one in found))]
    assert losses == pytest.approx(wanted["losses"], rel=2e-2)


def test_a_rank_that_ends_is_named(tmp_path):
    """By the rank that has the same experts, in whose group the ranks have other numbers."""
    with traceless(tmp_path) as more:
        processes, paths = start(tmp_path, 4, "expert_ends", more)
        assert started.ends(processes, 60) == [0, 0, 0, -9]
    for rank in 0, 1, 2:
        outcome = torch.load(paths[rank], weights_only=False)
        assert (outcome["type"], outcome["status"]) == ("GeminiError", "PEER"), outcome
        assert f"rank 3 has ended (process {processes[3].pid})" in outcome["text"] and outcome["seconds"] < 10, outcome
        assert f"in the group of experts, ranks 0, 1 are ranks {rank % 2}, {rank % 2 + 2}" in outcome["text"], outcome


REFUSED = {  # calls, meshes and DTensors, and words of why
    "foreach": "1 norm",  # is told
    "join": "give all processes equally many batches",
    "columns": "want Shard(0)",
    "whole": "want Shard(0)",
    "no experts": "give it their mesh as expert_mesh",
    "two dimensions": "a mesh of 2 dimensions: want a DeviceMesh of one",
    "some ranks": "want process",
    "other rows": "each of the 4 ranks of the session is once",
    "only one": "rank 0 has expert_mesh of 2 processes, rank 1 has None",
}


def test_other_meshes_and_divisions_are_refused(outcomes):
    for one in good(outcomes[4, "refused"]):
        for name, words in REFUSED.items():
            assert words in one["said"].pop(name), name
        assert not one["said"]


def test_checkpoints_know_no_number_of_parts(tmp_path):
    """What 4 ranks save, whose experts are in 2 parts, is loaded by 2 ranks with 2 parts, by 4 with 4, and by one
    process; and what that saves by 4 ranks. The bits are the same.
    """
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    kept = {"kept": {"states": "8bit"}}
    (saved, *_) = good(run(tmp_path, 4, "expert_parallel", parts=2, clip=CLIP, saved=first, **kept))
    with gm.init(device="cpu", **rank_programs.SIZES):
        made = Mixture(VOCAB, rank_programs.WIDTH)
        made, optimizer = gm.prepare(made, rank_programs.adamw(made), states="8bit")
        assert gm.load(first, made, optimizer) == {"step": 4}
        same_bits(rank_programs.state(made, optimizer), saved["state"])
        gm.save(second, made, optimizer, extra={"step": 4})
    gm.close(force=True)
    reversed_rows = {"rows": [[1, 0], [3, 2]]}
    for ranks, parts, folder, more in (
        (2, 2, first, {}),
        (4, 4, first, {}),
        (4, 2, second, reversed_rows),
        (2, 1, second, {"options": {"device_memory": "2MiB"}}),
    ):
        for one in good(run(tmp_path, ranks, "expert_parallel", parts=parts, loaded=folder, **kept, **more)):
            same_bits(one["state"], saved["state"])
            assert one["extra"] == {"step": 4}


def test_rows_have_all_ranks_once():
    assert owners.check_rows([(0, 1), (0, 1), (2, 3), (2, 3)], 4) == [(0, 1), (2, 3)]
    for rows in [(0, 1), (0, 1), (2,), (3,)], [(0, 1), (1, 0), (2, 3), (2, 3)], [(0, 1), (0, 1)]:
        with pytest.raises(gm.GeminiError, match="each of the 4 ranks of the session is once"):
            owners.check_rows(rows, 4)


@pytest.mark.parametrize(
    ("members", "shard_size", "wanted"), [([0, 2], 4, 2), ([0, 2], 2, 1), ([0, 2, 4, 6], 4, 2), ([0, 1, 4], 4, 3)]
)
def test_owners_in_a_replica_divide_what_they_have(members, shard_size, wanted):
    assert owners.shard_size_of(members, shard_size) == wanted
