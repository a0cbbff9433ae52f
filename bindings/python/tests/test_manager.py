"""libgemini.Manager and parse_bytes(), on the simulated device. Models are trained with NumPy, without torch.

SPDX-License-Identifier: Apache-2.0
"""

import ctypes
import gc
import json
import logging
import math
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest

from libgemini import GeminiError, Manager, abi, parse_bytes, updates

KIB, MIB = 2**10, 2**20
CHUNK = 64 * KIB


@pytest.fixture
def manager():
    with Manager(device_memory="1MiB", host_memory="4MiB", chunk_size=CHUNK, strict=True) as manager:
        yield manager


def acquire(manager, arena, offset, size, mode=abi.READ_WRITE, tier=abi.TIER_DEVICE):
    access = abi.Access(object=arena, offset_bytes=offset, size_bytes=size, mode=mode, tier=tier)
    manager.lib.acquire(manager.handle, ctypes.byref(access), 1, abi.STREAM_CALLER)
    return access


def release(manager, access):
    manager.lib.release(manager.handle, ctypes.byref(access), 1, abi.STREAM_CALLER)


# ---- parse_bytes
@pytest.mark.parametrize(
    "value, size",
    [
        (0, 0),
        (24 << 30, 24 << 30),
        (2**64 - 1, 2**64 - 1),
        ("0", 0),
        ("123", 123),
        ("123B", 123),
        ("24GiB", 24 << 30),
        ("24 GB", 24 * 10**9),
        ("24g", 24 * 10**9),
        ("24gi", 24 << 30),
        (" 1.5T ", 1500 * 10**9),
        ("1.5KiB", 1536),
        ("0.5k", 500),
        ("2MiB", 2 << 20),
        ("3 mb", 3 * 10**6),
        ("4tib", 4 << 40),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_parse_bytes(value, size):
    assert parse_bytes(value) == size


@pytest.mark.parametrize(
    "value", [None, True, 1.5, b"1", "", "GiB", "1.2.3", "-1", "1e6", "5iB", "12 parsecs", "1 KB 2"]
)
def test_parse_bytes_refuses_what_is_no_size(value):
    with pytest.raises(ValueError) as error:
        parse_bytes(value, "host_memory")
    assert str(error.value).startswith(f"host_memory is {value!r}: want a number of bytes, or a text")


@pytest.mark.parametrize("value", [-1, 2**64, "16777216TiB"])
def test_parse_bytes_refuses_what_does_not_fit(value):
    with pytest.raises(ValueError) as error:
        parse_bytes(value, "chunk_size")
    assert str(error.value) == f"chunk_size is {value!r}: want 0 to 2**64 - 1 bytes"


# ---- opening and closing
@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"device_memory": 0}, "device_bytes is 0"),
        ({"device_memory": "1KiB", "chunk_size": CHUNK}, "chunk_bytes is 65536, more than .* 1024"),
        ({"device_memory": "1MiB", "chunk_size": 1000}, "chunk_bytes is 1000, must be a power of two"),
        ({"device_memory": "1MiB", "file_memory": "1MiB"}, "file_dir is not set"),
        ({"device_memory": "1MiB", "device_ordinal": 7}, "device_ordinal is 7"),
        ({"device_memory": "1MiB", "warmup_iterations": 1001}, "warmup_iterations is 1001, must be at most 1000"),
        ({"device_memory": "1MiB", "update_threads": 257}, "update_threads is 257, must be at most 256"),
        ({"device_memory": "1MiB", "placement": "static", "static_param_fraction": 2.0}, "static_param_fraction is 2"),
        (
            {"device_memory": "1MiB", "placement": "static", "static_optim_fraction": -1.0},
            "static_optim_fraction is -1",
        ),
    ],
)
def test_refused_by_the_library(arguments, message):
    with pytest.raises(GeminiError, match=f"^gemini_manager_open: .*{message}") as error:
        Manager(**arguments)
    assert error.value.status == "INVALID" and error.value.native_code == 0


def test_refused_before():
    with pytest.raises(ValueError, match="placement is 'best': want one of auto, cuda, cpu, static"):
        Manager(placement="best", device_memory=MIB)
    with pytest.raises(ValueError, match="device_memory is 'much'"):
        Manager(device_memory="much")


def test_a_failure_of_the_system_has_its_number(tmp_path):
    path = tmp_path / "nowhere"
    with pytest.raises(GeminiError, match=str(path)) as error:
        Manager(device_memory="1MiB", host_memory="1MiB", chunk_size=CHUNK, file=path, file_memory="1MiB")
    assert error.value.status == "IO" and error.value.native_code == 2  # ENOENT


def test_arguments_arrive(tmp_path):
    with Manager(
        placement="cpu",
        device_memory="1MiB",
        device_margin="128KiB",
        host_memory="2MiB",
        file_memory="3MiB",
        file=tmp_path,
        chunk_size="128KiB",
        update_threads=1,
        checkpoint_name="kept",
    ) as manager:
        assert manager.stats()["budget_bytes"] == {"device": MIB, "host": 2 * MIB, "file": 3 * MIB}
        assert manager.config.device_margin_bytes == 128 * KIB and manager.config.placement == abi.PLACEMENTS["cpu"]
        arena = manager.arena(abi.KIND_OTHER)
        manager.take(arena, 1)
        release(manager, acquire(manager, arena, 0, 1))
        assert manager.arena_info(arena).chunk_bytes == 128 * KIB
        manager.lib.checkpoint(manager.handle)
        assert [path.name for path in tmp_path.iterdir() if "kept" in path.name]


def test_close_twice_is_once():
    manager = Manager(device_memory="1MiB", host_memory="1MiB")
    manager.close()
    manager.close()
    with pytest.raises(GeminiError) as error:
        manager.stats()
    assert error.value.status == "HANDLE"


def test_close_is_refused_while_something_is_acquired():
    manager = Manager(device_memory="1MiB", host_memory="1MiB", chunk_size=CHUNK)
    arena = manager.arena(abi.KIND_PARAM, name="weights")
    manager.take(arena, CHUNK)
    access = acquire(manager, arena, 0, CHUNK)
    with pytest.raises(GeminiError, match="weights") as error:
        manager.close()
    assert error.value.status == "BUSY"
    release(manager, access)  # it is open still
    manager.close()
    assert manager.handle == 0


def test_with_closes_also_after_an_exception():
    with pytest.raises(KeyError):
        with Manager(device_memory="1MiB", host_memory="1MiB") as manager:
            raise KeyError
    assert manager.handle == 0


# ---- arenas, statistics, the plan
def test_arena(manager):
    params = manager.arena(abi.KIND_PARAM, name="weights", element_bytes=2, capacity=2 * MIB)
    assert manager.take(params, 1000) == 0
    assert manager.take(params, 24) == 1024  # places begin at multiples of 256 elements
    info = manager.arena_info(params)
    assert info.kind == abi.KIND_PARAM and info.capacity_bytes == 2 * MIB
    assert info.size_bytes == 1048 and info.base % CHUNK == 0
    masters = manager.arena(abi.KIND_MASTER, element_bytes=4, like=params)
    assert manager.arena_info(masters).size_bytes == 2 * info.size_bytes
    grads = manager.arena(abi.KIND_GRAD, element_bytes=2, reuse=params)
    assert manager.arena_info(grads).kind == abi.KIND_GRAD
    with pytest.raises(GeminiError, match="element_bytes") as error:
        manager.arena(abi.KIND_GRAD, element_bytes=4, reuse=params)
    assert error.value.status == "INVALID"


def step(manager, arena, chunks):
    manager.lib.iteration_begin(manager.handle)
    for i in range(chunks):
        manager.lib.op_begin(manager.handle, f"op{i}".encode(), abi.STREAM_CALLER)
        release(manager, acquire(manager, arena, i * CHUNK, CHUNK))
        manager.lib.op_end(manager.handle)
    manager.lib.iteration_end(manager.handle)


def test_stats_and_explain(manager):
    assert manager.explain().startswith("No plan yet")
    chunks = 20  # of which 16 fit on the device
    arena = manager.arena(abi.KIND_PARAM)
    manager.take(arena, chunks * CHUNK)
    step(manager, arena, chunks)
    stats = manager.stats()
    assert not any(name.startswith(("struct", "reserved")) for name in stats)
    assert stats["model_bytes"] == chunks * CHUNK and stats["chunk_bytes"] == CHUNK
    assert stats["used_bytes"]["device"] <= MIB and stats["used_bytes"]["host"] >= 4 * CHUNK
    assert stats["peak_bytes"]["device"] == MIB and stats["iterations"] == 1 and stats["plans"] == 1
    out = stats["moved_bytes"]["device to host"]
    assert sum(out.values()) == sum(stats["moved_chunks"]["device to host"].values()) * CHUNK > 0
    assert out["demand"] + out["caller"] + out["update"] == 0  # it was pressed out, or planned out at the end
    assert set(stats["moved_bytes"]) == set(abi.LINKS) and set(out) == set(abi.REASONS)
    assert sum(manager.tier_bytes(arena).values()) == chunks * CHUNK
    for at in range(chunks):  # a chunk is in one tier
        assert sorted(manager.tier_bytes(arena, at * CHUNK, CHUNK).values()) == [0, 0, CHUNK]
    with pytest.raises(GeminiError, match="is not inside"):
        manager.tier_bytes(arena, chunks * CHUNK, 1)
    text = manager.explain()
    assert "placement: auto" in text and f"of {chunks} chunks" in text and text.endswith("\n")
    step(manager, arena, chunks)
    assert manager.stats()["planned_iterations"] == 1
    manager.lib.stats_reset(manager.handle)
    assert not any(map(any, (row.values() for row in manager.stats()["moved_bytes"].values())))


def test_a_call_that_waits_is_in_the_dump_and_in_the_log(caplog):
    go_on, entered = threading.Event(), threading.Event()

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def wait(_):
        entered.set()
        go_on.wait()

    with pytest.raises(ValueError, match="file_engine is 'aio': want one of auto, uring, threads"):
        Manager(device_memory="1MiB", host_memory="4MiB", file_engine="aio")
    with pytest.raises(ValueError, match="watchdog is -1"):
        Manager(device_memory="1MiB", host_memory="4MiB", watchdog=-1)
    with Manager(device_memory="1MiB", host_memory="4MiB", chunk_size=CHUNK, watchdog=0.05) as manager:
        stream = ctypes.c_uint64()
        manager.lib.stream_create(manager.handle, stream)
        manager.lib.stream_call(manager.handle, stream.value, wait, None)
        assert entered.wait(60) and "waits: none" in manager.dump()
        waiter = threading.Thread(target=lambda: manager.lib.stream_synchronize(manager.handle, stream.value))
        waiter.start()
        try:
            with caplog.at_level(logging.WARNING, logger="libgemini"):
                until = time.monotonic() + 60
                while not caplog.records and time.monotonic() < until:
                    time.sleep(0.01)
            text = manager.dump()
        finally:
            go_on.set()
            waiter.join()
    what = f"thread {waiter.native_id} "
    assert f"waits: {what}" in text and "in gemini_stream_synchronize() for the work queued on stream" in text
    assert caplog.records[0].getMessage().startswith(f"watchdog: {what}")


def test_the_librarys_log_is_pythons(manager, caplog):
    manager.lib.hook_set(manager.handle, 0)
    assert manager.lib.torch_malloc(2 * MIB, 0, None) is None  # is told when another function returns
    with caplog.at_level(logging.DEBUG, logger="libgemini"):
        manager.stats()
    (record,) = caplog.records
    assert record.name == "libgemini" and record.levelno == logging.WARNING and str(2 * MIB) in record.getMessage()


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_the_log_is_as_verbose_as_pythons_logger(level, caplog):
    with caplog.at_level(level, logger="libgemini"), Manager(device_memory=4 * MIB, host_memory=8 * MIB) as manager:
        manager.arena("param", capacity=MIB)
        with manager.iteration():
            pass
        manager.stats()
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert any("chunks of" in text for text in said) == (level == logging.INFO)


# ---- what a training loop needs, with numpy alone
BATCH, WIDTH, STEPS = 32, 256, 6
BUDGET = 768 * KIB  # of 2 MiB: two weights of 256 KiB, their gradients and moments


def adamw(param, grad, momentum, variance, step):
    """In place, and element by element, so that parts give the same bits as the whole."""
    param *= np.float32(1 - 1e-3 * 0.01)
    momentum *= np.float32(0.9)
    momentum += np.float32(0.1) * grad
    variance *= np.float32(0.999)
    variance += np.float32(0.001) * grad * grad
    size = np.sqrt(variance / np.float32(1 - 0.999**step)) + np.float32(1e-8)
    param -= np.float32(1e-3 / (1 - 0.9**step)) * momentum / size


def first_weights():
    random = np.random.default_rng(0)
    return [random.standard_normal((WIDTH, WIDTH), dtype=np.float32) / np.float32(16) for _ in range(2)]


def batch(step):
    random = np.random.default_rng(step + 1)
    return (random.standard_normal((BATCH, WIDTH), dtype=np.float32) for _ in range(2))


def loss_of(difference):
    return float(np.square(difference).mean()), difference * np.float32(2 / difference.size)


def train_plainly():
    """Two layers with a ReLU between: losses, weights, first moments, norms of the gradients."""
    weights, losses, norms = first_weights(), [], []
    moments, variances = ([np.zeros_like(one) for one in weights] for _ in range(2))
    for step in range(STEPS):
        x, wanted = batch(step)
        hidden = np.maximum(x @ weights[0], 0)
        loss, upper = loss_of(hidden @ weights[1] - wanted)
        grads = [None, hidden.T @ upper]
        grads[0] = x.T @ ((upper @ weights[1].T) * (hidden > 0))
        norms.append(math.sqrt(sum(float(np.square(grad, dtype=np.float64).sum()) for grad in grads)))
        for state in zip(weights, grads, moments, variances):
            adamw(*state, step + 1)
        losses.append(loss)
    return losses, weights, moments, norms


def array(buffer):
    return np.frombuffer(buffer, np.float32).reshape(WIDTH, WIDTH)


class Model:
    """The same two layers, whose weights, gradients and moments are in arenas."""

    def __init__(self, manager):
        self.manager = manager
        self.weights = manager.arena("param", element_bytes=4)
        self.tensors = [manager.tensor(self.weights, f"layer {i}", WIDTH * WIDTH * 4) for i in range(2)]
        self.grads, self.momentum, self.variance = (
            manager.arena(kind, element_bytes=4, like=self.weights) for kind in ("grad", "momentum", "variance")
        )

    def fill(self):
        for tensor, values in zip(self.tensors, first_weights()):
            with self.manager.acquired(self.manager.range(tensor, "write", tier="host")) as (weight,):
                array(weight)[:] = values

    def read(self, arena):
        """Copies of the tensors in an arena."""
        out = []
        for tensor in self.tensors:
            tensor = tensor if arena == self.weights else self.manager.tensor_counterpart(tensor, arena)
            with self.manager.acquired(self.manager.range(tensor, "read", tier="host")) as (buffer,):
                out.append(array(buffer).copy())
        return out

    def step(self, step, late):
        manager, arenas = self.manager, (self.weights, self.grads, self.momentum, self.variance)
        grads = [manager.tensor_counterpart(tensor, self.grads) for tensor in self.tensors]
        x, wanted = batch(step)
        with manager.iteration():
            manager.phase_set("forward")
            with manager.operator("layer 0"), manager.acquired(manager.range(self.tensors[0], "read")) as (weight,):
                hidden = np.maximum(x @ array(weight), 0)
            with manager.operator("layer 1"), manager.acquired(manager.range(self.tensors[1], "read")) as (weight,):
                loss, upper = loss_of(hidden @ array(weight) - wanted)
            manager.phase_set("backward")
            used = manager.range(self.tensors[1], "read"), manager.range(grads[1], "write")
            with manager.operator("layer 1 backward"), manager.acquired(*used) as (weight, grad):
                array(grad)[:] = hidden.T @ upper
                lower = (upper @ array(weight).T) * (hidden > 0)
            with manager.operator("layer 0 backward"), manager.acquired(manager.range(grads[0], "write")) as (grad,):
                array(grad)[:] = x.T @ lower
            norm = manager.norm(manager.range(self.grads))
            manager.phase_set("update")

            def update(span):
                adamw(*(np.frombuffer(buffer, np.float32) for buffer in span.buffers()), step + 1)

            manager.update(update, dict(zip(arenas, ("read_write", "read", "read_write", "read_write"))), late=late)
        return loss, norm


@pytest.mark.parametrize("placement", ("auto", "cpu", "cuda"))
@pytest.mark.parametrize("late", (False, True))
def test_numpy_trains_a_model_that_does_not_fit(placement, late):
    with Manager(
        placement=placement, device_memory=BUDGET, host_memory="4MiB", chunk_size=CHUNK, strict=True, update_threads=2
    ) as manager:
        model = Model(manager)
        model.fill()
        losses, norms = zip(*(model.step(step, late) for step in range(STEPS)))
        manager.update_wait()
        weights, moments = model.read(model.weights), model.read(model.momentum)
        stats = manager.stats()
    wanted_losses, wanted_weights, wanted_moments, wanted_norms = train_plainly()
    assert list(losses) == wanted_losses and losses[-1] < losses[0]
    for got, wanted in zip(weights + moments, wanted_weights + wanted_moments):
        assert got.tobytes() == wanted.tobytes()
    assert norms == pytest.approx(wanted_norms, rel=1e-10)  # added in another order
    assert stats["model_bytes"] == 8 * WIDTH * WIDTH * 4 > 2 * BUDGET
    assert stats["peak_bytes"]["device"] <= BUDGET
    assert stats["iterations"] == STEPS and stats["planned_iterations"] >= STEPS - 2
    assert sum(stats["moved_bytes"]["host to device"].values()) > 0


def test_torch_is_not_needed():
    """Neither the package nor its manager imports torch or NumPy."""
    program = """
import sys
from libgemini import Manager
with Manager(device_memory="1MiB", host_memory="1MiB", chunk_size="64KiB") as manager:
    arena = manager.arena("other")
    manager.take(arena, 100)
    with manager.acquired(manager.range(arena, "write")) as (buffer,):
        buffer[:] = bytes(range(100))
    with manager.acquired(manager.range(arena, "read", 10, 3, "host")) as (buffer,):
        print(list(buffer.raw))
print(sorted({"torch", "numpy"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[10, 11, 12]\n[]\n", "")


# ---- acquire and release
@pytest.fixture
def arena(manager):
    arena = manager.arena("param", element_bytes=4, name="weights")
    manager.take(arena, 20 * CHUNK)
    return arena


def test_ranges_are_checked(manager, arena):
    whole = manager.range(arena, "write")
    assert (whole.offset_bytes, whole.size_bytes) == (0, 20 * CHUNK)
    assert manager.range(arena, offset=CHUNK).size_bytes == 19 * CHUNK
    with pytest.raises(ValueError, match="mode is 'modify': want one of read, write, read_write"):
        manager.range(arena, "modify")
    with pytest.raises(ValueError, match="tier is 'disk': want one of device, host, file"):
        manager.range(arena, tier="disk")
    for offset, size in (-4, 0), (20 * CHUNK + 4, 0), (2**64, 4), (0, -4):  # the first three are no other bytes
        with pytest.raises(ValueError, match=f"offset is {offset} and size_bytes {size}: want a part of the object"):
            manager.range(arena, "read", offset, size)
    twice = manager.range(arena, "read", 0, CHUNK)
    with pytest.raises(GeminiError, match="one range is given twice"):
        manager.acquire(twice, twice)  # of which release(twice) would end one
    assert twice.address is None
    with pytest.raises(GeminiError, match="is not acquired, and its bytes may be in another tier"):
        whole.buffer()
    with pytest.raises(GeminiError, match="is not acquired") as error:
        manager.release(whole)
    assert error.value.status == "STATE"
    with pytest.raises(GeminiError) as error:
        manager.acquire(whole)  # 20 chunks, of which the device has 16
    assert error.value.status == "OOM_DEVICE" and whole.address is None
    part = manager.range(arena, "read", 0, CHUNK)
    manager.acquire(part)
    address = part.address
    with pytest.raises(GeminiError, match="acquired already") as error:
        manager.acquire(part)
    assert error.value.status == "STATE" and part.address == address == manager.arena_info(arena).base
    manager.release(part)
    assert part.address is None


def test_the_end_of_a_block_releases(manager, arena):
    part = manager.range(arena, "read_write", 0, CHUNK)
    with pytest.raises(KeyError), manager.iteration(), manager.operator("op"), manager.acquired(part):
        raise KeyError
    manager.move(part, tier="host")  # which is refused while it is acquired
    with manager.acquired(part), pytest.raises(GeminiError) as error:
        manager.move(part, tier="host")
    assert error.value.status == "BUSY"
    with manager.iteration():  # the one before was ended
        pass
    with pytest.raises(GeminiError) as error:
        manager.op_begin("op")
    assert error.value.status == "STATE"


def test_pin_hint_move_and_budget(manager, arena):
    part, info = manager.range(arena, "write", 0, 4 * CHUNK), manager.arena_info
    with manager.acquired(part):
        pass
    manager.move(part, tier="host")
    assert manager.stats()["used_bytes"]["device"] == 0
    with manager.pinned(part):
        assert manager.stats()["used_bytes"]["device"] == 4 * CHUNK
        with pytest.raises(GeminiError) as error:
            manager.budget_set("device", 2 * CHUNK)
        assert error.value.status == "OOM_DEVICE"
    with pytest.raises(GeminiError) as error:
        manager.unpin(part)
    assert error.value.status == "STATE"
    manager.budget_set("device", "128KiB")
    assert manager.stats()["budget_bytes"]["device"] == 128 * KIB
    manager.hint(part, tier="device")
    assert info(arena).size_bytes == 20 * CHUNK


# ---- tensors
def test_tensors(manager, arena):
    weight = manager.tensor(arena, "weight", 4000)
    assert manager.tensor_find("weight") == weight
    info = manager.tensor_info(weight)
    assert info.name == b"weight" and info.size_bytes == 4000 and info.arena == arena
    assert info.address == manager.arena_info(arena).base + info.offset_bytes
    with pytest.raises(GeminiError) as error:
        manager.tensor(arena, "weight", 4000)
    assert error.value.status == "EXISTS"
    tied = manager.tensor(arena, "tied", 4000, info.offset_bytes)
    assert manager.tensor_info(tied).address == info.address
    half = manager.arena("grad", element_bytes=2, like=arena)
    assert manager.tensor_info(manager.tensor_counterpart(weight, half)).size_bytes == 2000
    with manager.acquired(manager.range(weight, "write")) as (buffer,):
        buffer[:] = bytes(4000)
        assert manager.tensor_info(weight).users == 1
    manager.tensor_state_set(weight, "ready_for_reduce")
    manager.tensor_state_set(weight, "hold")
    manager.tensor_state_set(weight, "free")
    manager.tensor_unregister(weight)
    with pytest.raises(GeminiError) as error:
        manager.tensor_find("weight")
    assert error.value.status == "NOT_FOUND"
    with pytest.raises(GeminiError) as error:
        manager.arena_destroy(arena)  # another follows it
    assert error.value.status == "BUSY"
    manager.arena_destroy(half)
    manager.arena_destroy(arena)


# ---- streams and memory
def test_streams_run_functions_in_order(manager, arena):
    seen, part = [], manager.range(arena, "write", 0, 400)
    with manager.stream() as stream:
        with manager.acquired(part, stream=stream) as (buffer,):
            for i in range(100):
                manager.stream_call(stream, lambda i=i: seen.append(i))
            manager.stream_call(stream, lambda: buffer.__setitem__(slice(None), b"x" * 400))
        manager.stream_synchronize(stream)
        assert seen == list(range(100))
        with pytest.raises(GeminiError) as error:
            manager.stream_native(stream)
        assert error.value.status == "UNSUPPORTED"
    with manager.acquired(manager.range(arena, "read", 0, 400, "host")) as (buffer,):
        assert buffer.raw == b"x" * 400
    with pytest.raises(GeminiError) as error:
        manager.stream_call(stream, seen.clear)
    assert error.value.status == "HANDLE" and seen
    manager.stream_call(abi.STREAM_CALLER, seen.clear)
    assert not seen


def test_an_exception_in_queued_work_is_not_lost(arena, manager):
    def fail():
        raise KeyError("lost")

    with manager.stream() as stream:
        manager.stream_call(stream, fail)
        with pytest.raises(GeminiError, match="has raised KeyError: 'lost'") as error:
            manager.stream_synchronize(stream)
    assert error.value.status == "STATE" and isinstance(error.value.__cause__, KeyError)
    with pytest.raises(GeminiError, match="KeyError"):
        manager.acquire(manager.range(arena))
    with pytest.raises(GeminiError, match="KeyError"):
        manager.close()
    assert manager.handle == 0


def test_memory(manager, arena):
    with manager.allocated("512KiB") as address:
        assert address % 512 == 0 and manager.stats()["nonmodel_bytes"] == 512 * KIB
        with pytest.raises(GeminiError) as error:
            manager.alloc(MIB)
        assert error.value.status == "OOM_DEVICE"
    assert manager.stats()["nonmodel_bytes"] == 0
    with pytest.raises(GeminiError) as error:
        manager.free(address)
    assert error.value.status == "INVALID"
    with manager.host_block("64KiB", 4096) as block:
        assert ctypes.addressof(block) % 4096 == 0 and len(block) == 64 * KIB
        block[:3] = b"abc"
        assert block[:3] == b"abc" and manager.stats()["host_alloc_bytes"] >= 64 * KIB
    assert manager.stats()["host_alloc_bytes"] == 0
    with pytest.raises(GeminiError) as error:
        manager.host_alloc("1GiB")
    assert error.value.status == "OOM_HOST"


# ---- data
def test_discarded_bytes_leave_the_device_without_a_copy(manager, arena):
    def copies():
        return sum(manager.stats()["moved_chunks"]["device to host"].values())

    whole = manager.range(arena, size_bytes=2 * CHUNK)
    for kept in (True, False):
        with manager.acquired(manager.range(arena, size_bytes=2 * CHUNK, mode="write")):
            pass
        if not kept:
            manager.discard(whole)
        before = copies()
        manager.move(whole, tier="host")
        assert copies() - before == (2 if kept else 0)


def test_zero_load_and_store(manager, arena, tmp_path):
    values = np.arange(20 * CHUNK // 4, dtype=np.int32)
    (tmp_path / "in").write_bytes(b"head" + values.tobytes())
    with open(tmp_path / "in", "rb") as file:
        manager.load(manager.range(arena), file, 4)
    manager.zero(manager.range(arena, offset=CHUNK, size_bytes=CHUNK + 8))
    values[CHUNK // 4 : CHUNK // 2 + 2] = 0
    with open(tmp_path / "out", "wb") as file:
        manager.store(manager.range(arena), file)
        manager.store(manager.range(arena, size_bytes=8), file.fileno(), 20 * CHUNK)
    assert (tmp_path / "out").read_bytes() == values.tobytes() + values[:2].tobytes()
    with open(tmp_path / "in", "rb") as file, pytest.raises(GeminiError) as error:
        manager.load(manager.range(arena), file, 8)  # which ends early
    assert error.value.status == "FORMAT"
    with pytest.raises(ValueError, match="dtype is 'int8'"):
        manager.norm(manager.range(arena), "int8")


# ---- updates
def test_updates_cover_the_range_once(manager, arena):
    other = manager.arena("momentum", element_bytes=8, like=arena)
    spans = []

    def count(span):
        values, sums = (np.frombuffer(one, kind) for one, kind in zip(span.buffers(), (np.float32, np.float64)))
        assert len(values) == len(sums) == span.element_count and span.tier in ("host", "device")
        values += 1
        sums += values
        spans.append((span.first_element, span.element_count))

    first, size = 1000, 5 * CHUNK // 4
    for late in False, True, True:
        manager.update(
            count, {arena: "read_write", other: "read_write"}, first_element=first, element_count=size, late=late
        )
    manager.update_wait()
    assert sorted(spans) == sorted(3 * sorted(set(spans))) and sum(length for _, length in set(spans)) == size
    with manager.acquired(manager.range(other, "read", first * 8 - 8, 16, "host")) as (buffer,):
        assert np.frombuffer(buffer, np.float64).tolist() == [0, 1 + 2 + 3]
    with manager.acquired(manager.range(arena, "read", 0, 4)), pytest.raises(GeminiError) as error:
        manager.update(count, {arena: "read_write"})
    assert error.value.status == "BUSY"


def test_late_updates_on_the_device_wait_for_their_turn():
    """A part whose chunks are on the device is computed there, behind the work of the stream."""
    tiers = set()
    with Manager(placement="cuda", device_memory="1MiB", host_memory="2MiB", chunk_size=CHUNK) as manager:
        arena = manager.arena("param", element_bytes=4)
        manager.take(arena, 4 * CHUNK)

        def update(span):
            tiers.add(span.tier)
            (values,) = (np.frombuffer(one, np.float32) for one in span.buffers())
            values += 1

        for _ in range(6):
            with manager.iteration():
                with manager.operator("op"), manager.acquired(manager.range(arena, "read_write")) as (buffer,):
                    values = np.frombuffer(buffer, np.float32)
                    values *= 2
                manager.update(update, {arena: "read_write"}, late=True)
        manager.update_wait()
        with manager.acquired(manager.range(arena, "read", tier="host")) as (buffer,):
            assert set(np.frombuffer(buffer, np.float32).tolist()) == {63.0}
    assert "device" in tiers


@pytest.mark.parametrize("late", (False, True))
def test_an_exception_in_an_update_is_not_lost(late, tmp_path):
    manager = Manager(device_memory="1MiB", host_memory="2MiB", chunk_size=CHUNK)
    arena = manager.arena("param", element_bytes=4)
    manager.take(arena, 4 * CHUNK)

    def fail(span):
        raise ZeroDivisionError("nothing to divide")

    with pytest.raises(GeminiError, match="has raised ZeroDivisionError: nothing to divide") as error:
        manager.update(fail, {arena: "read_write"}, late=late)
        manager.update_wait()
    assert error.value.status == "STATE" and isinstance(error.value.__cause__, ZeroDivisionError)
    with open(tmp_path / "file", "wb") as file:
        for use in (
            lambda: manager.acquire(manager.range(arena)),
            lambda: manager.norm(manager.range(arena)),
            lambda: manager.store(manager.range(arena), file),
            lambda: manager.update(fail, {arena: "read_write"}),
            manager.checkpoint,
        ):
            with pytest.raises(GeminiError, match="ZeroDivisionError"):
                use()
    with pytest.raises(GeminiError, match="ZeroDivisionError"):
        manager.close()
    assert manager.handle == 0 and not updates._updates and not updates._calls


@pytest.mark.parametrize("placement", ("cpu", "cuda"))
@pytest.mark.parametrize(
    "call",
    (
        lambda manager, arena: manager.acquire([manager.range(arena)]),
        lambda manager, arena: manager.update(lambda _: None, {arena: "read"}),
        lambda manager, arena: manager.update_wait(),
        lambda manager, arena: manager.stream_synchronize(abi.STREAM_CALLER),
        lambda manager, arena: manager.close(),
    ),
    ids=("acquire", "update", "update_wait", "stream_synchronize", "close"),
)
def test_a_function_of_an_update_cannot_call_its_manager(placement, call):
    """It would wait for itself. Another manager can be called."""
    other = Manager(device_memory="1MiB", host_memory="2MiB", chunk_size=CHUNK)
    beside = other.arena("param")
    other.take(beside, CHUNK)
    with Manager(placement=placement, device_memory="1MiB", host_memory="2MiB", chunk_size=CHUNK) as manager:
        arena = manager.arena("param", element_bytes=4)
        manager.take(arena, CHUNK)
        if placement == "cuda":
            with manager.acquired(manager.range(arena, "write")):
                pass
        told = []

        def function(span):
            with other.acquired(other.range(beside, "read", tier="host")):
                pass
            try:
                call(manager, arena)
            except GeminiError as error:
                told.append((error.status, str(error)))

        manager.update(function, {arena: "read_write"})
        assert told and all(status == "STATE" and "calls the same manager" in text for status, text in told)
        manager.stream_call(abi.STREAM_CALLER, lambda: told.clear() or function(None))
        assert [status for status, _ in told] == ["STATE"]
        with manager.acquired(manager.range(arena, "read", tier="host")):  # and it goes on
            pass
    other.close()


def test_functions_of_updates_are_let_go(manager, arena):
    class Function:
        def __call__(self, span):
            pass

    one = Function()
    gone = weakref.ref(one)
    for late in False, True:
        manager.update(one, {arena: "read_write"}, late=late)
    manager.update_wait()
    del one
    gc.collect()
    assert gone() is None and not updates._updates


def test_late_updates_that_nobody_waits_for_do_not_pile_up(manager, arena):
    done = []
    for _ in range(5):
        manager.update(done.append, {arena: "read_write"}, late=True)
        with manager.acquired(manager.range(arena, "read", tier="host")):
            assert done  # the update came before
        until = time.monotonic() + 60
        while manager.stats()["pending_updates"] and time.monotonic() < until:
            time.sleep(0.001)
        assert len(updates._updates) == 1


# ---- checkpoints, traces, timelines
def test_checkpoint_and_resume(tmp_path):
    def start():
        manager = Manager(
            device_memory="1MiB",
            host_memory="1MiB",
            file_memory="4MiB",
            file=tmp_path,
            chunk_size=CHUNK,
            checkpoint_name="kept",
        )
        return manager, Model(manager)

    manager, model = start()
    with manager:
        model.fill()
        model.step(0, late=True)
        manager.checkpoint()
        wanted = model.read(model.weights) + model.read(model.variance)
        model.step(1, late=True)
    manager, model = start()
    with manager:
        manager.resume()
        for got, one in zip(model.read(model.weights) + model.read(model.variance), wanted):
            assert got.tobytes() == one.tobytes()
    with (
        Manager(device_memory="1MiB", host_memory="1MiB", chunk_size=CHUNK) as manager,
        pytest.raises(GeminiError) as error,
    ):
        manager.checkpoint()
    assert error.value.status == "STATE"


def test_trace_and_timeline(tmp_path):
    def start():
        manager = Manager(device_memory=BUDGET, host_memory="4MiB", chunk_size=CHUNK)
        return manager, Model(manager)

    manager, model = start()
    with manager:
        with pytest.raises(GeminiError) as error:
            manager.trace_save(tmp_path / "trace")
        assert error.value.status == "STATE"
        model.fill()
        with manager.timeline(tmp_path / "timeline"):
            model.step(0, late=False)
        manager.trace_save(tmp_path / "trace")
        manager.stats_reset()
        assert not any(manager.stats()["moved_bytes"]["host to device"].values())
    names = {event.get("name") for event in json.loads((tmp_path / "timeline").read_text())["traceEvents"]}
    assert {"layer 0", "layer 1 backward"} <= names
    manager, model = start()
    with manager:
        manager.trace_load(tmp_path / "trace")
        assert manager.stats()["plans"] == 1 and not manager.explain().startswith("No plan yet")


@pytest.mark.parametrize("step", [0, -1, 1 << 64])
def test_adamw_refuses_numbers_of_steps(step):
    """A negative one would become a large one, whose moments count as complete."""
    with Manager(device_memory="1MiB", host_memory="4MiB", chunk_size="64KiB") as manager:
        master = manager.arena("master", element_bytes=4)
        manager.tensor(master, "weight", 4096)
        states = {kind: manager.arena(kind, element_bytes=4, like=master) for kind in ("grad", "momentum", "variance")}
        with pytest.raises(abi.GeminiError, match=f"step is {step}, want at least 1") as raised:
            manager.adamw(step=step, master=master, **states)
        assert raised.value.status == "INVALID"
