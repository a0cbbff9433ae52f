"""Which allocator torch gets, in which order it is asked to, and what is left at the end; torch.cuda is a fake here.

The fake records what it was told; allocations of the session are real ones, of the simulated device.
SPDX-License-Identifier: Apache-2.0
"""

import types

import pytest
import torch
from torch import nn

import libgemini.torch as gm
from libgemini.torch import allocator, internals

MIB = 1 << 20
STREAM = 5


@pytest.fixture
def cuda(monkeypatch):
    """torch's functions for the GPU, recorded in .told; .segments are what a pool has in its cache."""
    fake = types.SimpleNamespace(
        told=[], initialized=False, segments=[], session=None, snapshot=[], peak=0, events=None, full=False
    )

    def record(name, result=None):
        def function(*args, **kwargs):
            fake.told.append((name, *args))
            return result

        return function

    def clear_workspaces():
        fake.told.append(("clear workspaces",))

    def empty_cache():
        fake.told.append(("empty cache",))
        for pointer in fake.segments:
            fake.session.lib.torch_free(pointer, 0, 0, None)
        del fake.segments[:]

    pluggable = types.SimpleNamespace(allocator=lambda: "ours")
    monkeypatch.setattr(allocator, "_process", False)
    monkeypatch.setattr(allocator, "_pluggable", lambda: pluggable)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: fake.initialized)
    monkeypatch.setattr(torch.cuda, "synchronize", record("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    pool = types.SimpleNamespace(id=(7, "ours"), snapshot=lambda: fake.snapshot)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda ours: ours == "ours" and pool)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: fake.peak)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: types.SimpleNamespace(cuda_stream=STREAM))
    monkeypatch.setattr(torch.cuda.memory, "change_current_allocator", record("change"))
    monkeypatch.setattr(internals, "clear_workspaces", clear_workspaces)
    monkeypatch.setattr(internals, "may_record", lambda: fake.events is not None)
    monkeypatch.setattr(internals, "record_allocations", record("record"))
    monkeypatch.setattr(internals, "allocations", lambda *_: fake.events)
    monkeypatch.setattr(internals, "end_recording", record("end recording"))
    monkeypatch.setattr(torch.backends.cuda, "cufft_plan_cache", types.SimpleNamespace(clear=record("clear plans")))
    for name in "begin_allocating_to", "end_allocating_to", "release_pool":
        monkeypatch.setattr(internals, name, record(name))
    return fake


def begun(cuda, session, kind):
    session("8MiB")
    cuda.session = owner = gm.session()
    owner.allocator = allocator.start(kind, owner)
    return owner


def allocate(owner, size):
    pointer = owner.lib.torch_malloc(size, 0, None)
    assert pointer
    return pointer


BEGIN = ("begin_allocating_to", 0, (7, "ours"))
END = [("end_allocating_to", 0, (7, "ours")), ("release_pool", 0, (7, "ours"))]


# ---- which one
@pytest.mark.parametrize("kind", ["pools", "", 1])
def test_other_names_are_refused(kind):
    with pytest.raises(ValueError, match=f"allocator is {kind!r}: want one of pool, process, torch"):
        gm.init(device="cpu", device_memory="1MiB", allocator=kind)
    assert gm._current is None


@pytest.mark.parametrize("kind", ["pool", "process"])
def test_without_a_gpu_it_is_torch_s(session, kind):
    with pytest.raises(ValueError, match=f"allocator is '{kind}', which needs a GPU"):
        session("1MiB", allocator=kind)
    session("1MiB", allocator="torch")
    assert gm.session().allocator is None


def test_usual_is_the_pool_where_torch_can_have_one_for_all_threads(cuda, monkeypatch):
    assert allocator.choose(None, True) == "pool" and allocator.choose("torch", True) == "torch"
    monkeypatch.setattr(internals, "end_allocating_to", None)  # as there
    assert allocator.choose(None, True) == "torch"
    with pytest.raises(gm.GeminiError, match="needs torch 2.8: this is " + torch.__version__.replace("+", "[+]")):
        allocator.choose("pool", True)
    assert cuda.told == []


def test_process_comes_before_cuda_and_stays(cuda):
    cuda.initialized = True
    with pytest.raises(gm.GeminiError, match="CUDA is in use already"):
        allocator.choose("process", True)
    assert cuda.told == []
    cuda.initialized = False
    assert allocator.choose("process", True) == "process"
    assert [name for name, *_ in cuda.told] == ["change"]
    cuda.initialized = True
    assert allocator.choose(None, True) == allocator.choose("process", True) == "process"
    assert len(cuda.told) == 1
    with pytest.raises(gm.GeminiError, match="cannot change in a process"):
        allocator.choose("pool", True)


# ---- pools
def test_pool_is_routed_until_the_session_closes(cuda, session):
    owner = begun(cuda, session, "pool")
    assert cuda.told == [BEGIN]
    cuda.segments.append(allocate(owner, 2 * MIB))
    assert gm.stats()["nonmodel_bytes"] == 2 * MIB
    gm.close()
    names = [one[0] for one in cuda.told]
    assert cuda.told[1:3] == END
    assert names[3:] == ["clear workspaces", "clear plans", "synchronize", "empty cache"]
    assert gm._current is None


def test_tensors_that_are_left_are_an_error_unless_forced(cuda, session):
    owner = begun(cuda, session, "pool")
    left = allocate(owner, 3 * MIB)
    cuda.segments.append(allocate(owner, MIB))
    with pytest.raises(gm.GeminiError, match=r"3.0 MiB that torch allocated in the session are in use") as error:
        gm.close()
    assert error.value.status == "BUSY" and gm.session() is owner
    assert gm.stats()["nonmodel_bytes"] == 3 * MIB  # the rest has been given back
    with pytest.raises(gm.GeminiError, match="3.0 MiB"):
        gm.close()
    assert cuda.told.count(END[0]) == 1
    owner.lib.torch_free(left, 3 * MIB, 0, None)
    gm.close()
    owner = begun(cuda, session, "pool")
    allocate(owner, MIB)
    gm.close(force=True)
    assert gm._current is None


TIDIED = [("clear workspaces",), *END, ("empty cache",), BEGIN]


def first_steps(cuda, monkeypatch, owner, steps=2):
    """Trains for some steps with a pool of 80 MiB. Returns the sizes that were to take its place."""
    cuda.snapshot = [
        {"total_size": mib * MIB, "active_size": 0, "segment_type": "large", "stream": STREAM} for mib in (20, 60)
    ]
    sizes, told, empty = [], [], torch.empty

    def recorded(*args, **kwargs):
        if kwargs.get("dtype") == torch.uint8:
            sizes.append(args[0])
            if cuda.full:
                raise torch.OutOfMemoryError("no room")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", recorded)
    monkeypatch.setattr(owner.lib, "hook_compacted", lambda handle: told.append(handle), raising=False)
    model = nn.Linear(8, 8)
    model, optimizer = gm.prepare(model, torch.optim.AdamW(model.parameters(), 0.01))
    del cuda.told[:]
    for _ in range(steps):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert owner.allocator is None or told == [owner.handle] * bool(sizes and not cuda.full)
    return sizes


def test_pool_is_compacted_once_as_the_first_step_ends(cuda, session, monkeypatch):
    cuda.peak = 15 * MIB
    assert first_steps(cuda, monkeypatch, begun(cuda, session, "pool")) == [75 * MIB]  # and the largest once more
    assert cuda.told == TIDIED


def test_pool_becomes_as_small_as_a_step_needs(cuda, session, monkeypatch):
    cuda.events = [(True, 1, 8 * MIB), (True, 2, 16 * MIB), (True, 3, 1), (False, 3, 1), (False, 1, 8 * MIB)]
    assert first_steps(cuda, monkeypatch, begun(cuda, session, "pool")) == [40 * MIB]  # 2 is kept by the second step
    recording = [TIDIED[0], ("record", allocator._MOST_EVENTS), TIDIED[0], ("end recording",)]
    assert cuda.told == recording + TIDIED[1:]


@pytest.mark.parametrize("left", [1, 4])
def test_pool_stays_where_no_size_is_enough(cuda, session, monkeypatch, left):
    """As a step leaves so much that two of them need more than is tried."""
    cuda.events = [(True, number, 4 * MIB) for number in range(left)] + [(True, 9, 1)]
    assert first_steps(cuda, monkeypatch, begun(cuda, session, "pool")) == ([8 * MIB] if left == 1 else [])


def test_pool_records_until_a_step_or_the_session_ends(cuda, session):
    owner, cuda.events = begun(cuda, session, "pool"), []
    model = nn.Linear(8, 8)
    model, _ = gm.prepare(model, torch.optim.AdamW(model.parameters(), 0.01))
    for _ in range(2):
        model(torch.ones(2, 8))
    record = [("clear workspaces",), ("record", allocator._MOST_EVENTS)]
    assert cuda.told == [BEGIN, *record, ("end recording",), *record]
    with torch.no_grad():
        model(torch.ones(2, 8))
    assert owner.allocator.records
    gm.close()
    assert cuda.told[6] == ("end recording",) and not owner.allocator.records


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_pool_that_the_user_has_configured_stays(cuda, session, monkeypatch, name):
    monkeypatch.setenv(name, "max_split_size_mb:64")
    assert first_steps(cuda, monkeypatch, begun(cuda, session, "pool")) == [] and cuda.told == []


def test_pool_grows_again_where_one_segment_has_no_room(cuda, session, monkeypatch):
    owner, cuda.full = begun(cuda, session, "pool"), True
    assert first_steps(cuda, monkeypatch, owner) == [60 * MIB] and owner.allocator.routed and cuda.told == TIDIED


def test_other_allocators_are_not_compacted(cuda, session, monkeypatch):
    assert first_steps(cuda, monkeypatch, begun(cuda, session, "process")) == []


def test_suspended_pool_is_not_routed(cuda, session):
    owner = begun(cuda, session, "pool")
    model = gm.prepare(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    del cuda.told[:]
    with gm.resident(model[0]):
        assert cuda.told == END
    assert cuda.told == [*END, BEGIN]
    with pytest.raises(ZeroDivisionError), owner.allocator.suspended():
        raise ZeroDivisionError
    assert cuda.told == [*END, BEGIN] * 2
    with owner.allocator.suspended(), owner.allocator.suspended():
        assert cuda.told == [*END, BEGIN] * 2 + END
    assert cuda.told == [*END, BEGIN] * 3


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_modules_compiled_to_graphs_need_torch_s_own(cuda, session, mode, in_place):
    def build():
        block = nn.Linear(8, 8)
        if in_place:
            block.compile(mode=mode)
        return nn.Sequential(block if in_place else torch.compile(block, mode=mode))

    owner = begun(cuda, session, "pool")
    if mode == "default":
        gm.prepare(build())
    else:
        with pytest.raises(gm.GeminiError, match='CUDA graphs.*allocator="torch"'):
            gm.prepare(build())
    owner.allocator, serving = None, owner.allocator
    gm.prepare(build())
    owner.allocator = serving


def test_process_allocator_is_served_and_checked(cuda, session):
    owner = begun(cuda, session, "process")
    assert cuda.told == []
    left = allocate(owner, MIB)
    with owner.allocator.suspended():
        assert cuda.told == []
    with pytest.raises(gm.GeminiError, match="1.0 MiB that torch allocated"):
        gm.close()
    owner.lib.torch_free(left, MIB, 0, None)


def test_a_device_that_another_session_serves_is_refused(cuda, session, monkeypatch):
    """The session that could not begin is closed."""
    owner = begun(cuda, session, "process")
    gm._current, other = None, gm._current
    monkeypatch.setattr(allocator, "choose", lambda *_: "process")
    close, closed = gm.Session.close, []
    monkeypatch.setattr(gm.Session, "close", lambda session, force: closed.append(session) or close(session, force))
    try:
        with pytest.raises(gm.GeminiError, match="gemini_hook_set"):
            session("1MiB")
        assert gm._current is None and [session.manager.handle for session in closed] == [0]
    finally:
        gm._current = other
    assert gm.session() is owner
