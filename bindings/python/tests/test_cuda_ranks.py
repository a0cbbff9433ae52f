"""Training by two processes over NCCL, against torch alone with the whole batch on the same GPU.

Needs two GPUs, or one and an NCCL of 2.30 or later with NCCL_MULTI_RANK_GPU_ENABLE=1 in the environment; skipped
without.
CONTRIBUTING.md has the command. Every process ends by itself: it says where it hangs if it takes too long.

SPDX-License-Identifier: Apache-2.0
"""

import os

import pytest
import torch

import rank_programs
import started
from libgemini.torch import narrow
from test_expert_parallel import alone as experts_of_one_process
from test_ranks import NADAM, by_one_process, check, good, run, same_bits, same_state, start

SHARED = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
DRY = os.environ.get("RANK_PROGRAMS_DRY") == "1"  # on the simulated device: tries the programs without a GPU
pytestmark = pytest.mark.skipif(
    not DRY
    and (
        not torch.distributed.is_available()
        or not torch.cuda.is_available()
        or torch.cuda.device_count() < (1 if SHARED else 2)
    ),
    reason="torch sees less than 2 GPUs, or 1 with NCCL_MULTI_RANK_GPU_ENABLE=1",
)
ENVIRONMENT = {
    "RANK_PROGRAMS_DEVICE": "cpu" if DRY else "cuda",
    "RANK_PROGRAMS_SIZES": "dry" if DRY else "cuda",
    "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN"),
    # All ranks are on this machine, which may have no network.
    **{name: os.environ.get(name, "lo") for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")},
    # Kernels of all communicators of all ranks wait for each other on one GPU: each is to be small.
    **({"NCCL_MAX_CTAS": os.environ.get("NCCL_MAX_CTAS", "2")} if SHARED else {}),
}
CLIPPED = {"model": "gpt", "clip": 0.5}
CASES = {
    "zero 1": ("training", {**CLIPPED, "zero": 1}),
    "zero 2, accumulation": ("training", {**CLIPPED, "zero": 2, "micro": 2, "wrapped": True}),
    "zero 3": ("training", {**CLIPPED, "zero": 3}),
    "zero auto, accumulation": ("training", {**CLIPPED, "zero": "auto", "micro": 2}),
    "replicas of one": ("training", {**CLIPPED, "zero": 3, "batches": 2, "shard_size": 1}),
    "zero 3, order of ranks": ("training", {**CLIPPED, "zero": 3, "micro": 2, "rank_order": True}),
    "NAdam": ("training", {"model": "gpt", "zero": 2, "optimizer": {**NADAM, "eps": 1e-3}}),
    "resumed": ("resumed", {"model": "gpt"}),
}
SPLIT = {"model": "gpt", "dtype": "bfloat16", "kept": {"masters": "split16"}, "strict": False}
KEPT = {
    "split16": ("training", SPLIT),
    "split16, early": ("training", {**SPLIT, "early": True}),
    "split16, clipped": ("training", {**SPLIT, "clip": 0.5, "zero": 2}),
    "8bit, split16": (
        "resumed",
        {"model": "gpt", "dtype": "bfloat16", "kept": {"states": "8bit", "masters": "split16"}},
    ),
}


@pytest.fixture(scope="module", autouse=True)
def here():
    """The test's own models are on the GPU, too, and compute in fp32."""
    device, rank_programs.DEVICE = rank_programs.DEVICE, ENVIRONMENT["RANK_PROGRAMS_DEVICE"]
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    rank_programs.DEVICE, torch.backends.cuda.matmul.allow_tf32 = device, before


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    cases = {
        **CASES,
        **KEPT,
        "saving": ("saving", {"folder": str(folder / "saved"), "model": "gpt", "count": 2}),
        "loading": ("loading", {"folder": str(folder / "saved"), "model": "gpt", "count": 1}),
    }
    more = {**ENVIRONMENT, "RANK_PROGRAMS_SECONDS": "240"}
    by_rank = run(folder, 2, "several", more, 260, cases=list(cases.values()))
    return {name: outcome for name, *outcome in zip(cases, *by_rank)}


@pytest.mark.parametrize("name", [name for name in CASES if name != "resumed"])
def test_ranks_compute_what_torch_computes(outcomes, name):
    left_out = ("zero", "wrapped", "rank_order", "shard_size")
    arguments = {key: value for key, value in CASES[name][1].items() if key not in left_out}
    found, wanted = good(outcomes[name]), by_one_process(**arguments)
    if "clip" in arguments:
        assert min(wanted["norms"]) > arguments["clip"]
    check(found, on_the_cpu(wanted))
    for outcome in found:
        assert outcome["stats"]["reduced_chunks"] > 0
        assert (outcome["stats"]["gathered_bytes"] > 0) == (CASES[name][1].get("shard_size") != 1)


def on_the_cpu(outcome):
    state = outcome["state"].items()
    return {**outcome, "state": {key: value.cpu() if torch.is_tensor(value) else value for key, value in state}}


def test_states_are_copied_and_loaded(outcomes):
    """Two steps, the state into another model, and two steps more, on the batches of the first two."""
    made = rank_programs.build("gpt").to(rank_programs.DEVICE)
    optimizer = rank_programs.adamw(made)
    whole = {"begin": 0, "end": rank_programs.ROWS, "count": 2}
    rank_programs.steps(made, optimizer, "gpt", **whole)
    wanted = rank_programs.steps(made, optimizer, "gpt", **whole)
    check(good(outcomes["resumed"]), on_the_cpu({**wanted, "state": rank_programs.state(made, optimizer)}))


def test_split_masters_and_narrow_states(outcomes):
    """The same bits on both ranks, in the backward pass or after it, and after they were copied and loaded."""
    for name in KEPT:
        first, second = good(outcomes[name])
        same_bits(first["state"], second["state"])
        for number, (parameter, _) in enumerate(rank_programs.build("gpt").named_parameters()):
            halves = narrow.halves(first["state"][f"{number}.master"].contiguous())
            assert torch.equal(halves[0].view(torch.int16), first["state"][parameter].view(torch.int16)), parameter
    same_bits(outcomes["split16, early"][0]["state"], outcomes["split16"][0]["state"])
    assert all(outcomes["split16, early"][0]["parts"])
    assert min(outcomes["split16, clipped"][0]["norms"]) > KEPT["split16, clipped"][1]["clip"]
    found = outcomes["8bit, split16"][0]
    same_bits(found["loaded"], found["saved"])
    same_bits(found["state"], found["first"])


def test_checkpoints_bring_back_the_same_bits(outcomes):
    for saved, loaded in zip(good(outcomes["saving"]), good(outcomes["loading"])):
        same_state(loaded, saved)
        assert loaded["extra"] == {"step": 2}


def test_torch_distributed_carries_what_ranks_exchange(tmp_path):
    """By its own NCCL; in processes of its own, as it may hang."""
    more = {**ENVIRONMENT, "RANK_PROGRAMS_SECONDS": "110"}
    found = good(run(tmp_path, 2, "training", more, 120, **CLIPPED, zero=3, transport="torch"))
    check(found, on_the_cpu(by_one_process(**CLIPPED)))


@pytest.mark.skipif(SHARED, reason="torch's own NCCL sends tokens, which wants a GPU for each rank")
@pytest.mark.parametrize("ranks", [2, 4])
def test_experts_are_divided_among_ranks(tmp_path, ranks):
    """Two parts of them, of which each rank, or each two, have one."""
    if not DRY and torch.cuda.device_count() < ranks:
        pytest.skip(f"torch sees less than {ranks} GPUs")
    more = {**ENVIRONMENT, "RANK_PROGRAMS_SECONDS": "110"}
    case = {"parts": 2, "clip": 0.2, "zero": 3, "batches": 2}
    found = good(run(tmp_path, ranks, "expert_parallel", more, 120, **case))
    wanted = experts_of_one_process(**case)
    assert min(wanted["norms"]) > case["clip"]
    check(found, on_the_cpu(wanted))
    assert all((outcome["gathered"][1] > 0) == (ranks > 2) for outcome in found)


def test_a_rank_that_is_killed_is_named(tmp_path):
    more = {**ENVIRONMENT, "RANK_PROGRAMS_SECONDS": "110"}
    processes, paths = start(tmp_path, 2, "ends", more, point="backward", how="killed", deadline=8.0)
    assert started.ends(processes, 120) == [0, -9]
    outcome = torch.load(paths[0], weights_only=False)
    assert outcome["type"] == "GeminiError" and outcome["status"] == "PEER", outcome
    assert f"rank 1 has ended (process {processes[1].pid})" in outcome["text"], outcome
