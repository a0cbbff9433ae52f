"""libgemini.Manager and parse_bytes(), on the simulated device.

SPDX-License-Identifier: Apache-2.0
"""

import ctypes
import logging
import threading
import time

import pytest

from libgemini import GeminiError, Manager, abi, parse_bytes

KIB, MIB = 2**10, 2**20
WINDOW = 64 * KIB


@pytest.fixture
def manager():
    with Manager(device_memory="1MiB", host_memory="4MiB", window=WINDOW, strict=True) as manager:
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
    assert str(error.value).startswith(f"host_memory is {value!r}: want bytes, or")


@pytest.mark.parametrize("value", [-1, 2**64, "16777216TiB"])
def test_parse_bytes_refuses_what_does_not_fit(value):
    with pytest.raises(ValueError) as error:
        parse_bytes(value, "window")
    assert str(error.value) == f"window is {value!r}: want 0 to 2**64 - 1 bytes"


# ---- opening and closing
@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"device_memory": 0}, "device_bytes is 0"),
        ({"device_memory": "1KiB", "window": WINDOW}, "window_bytes is 65536, more than .* 1024"),
        ({"device_memory": "1MiB", "window": 1000}, "window_bytes is 1000, must be a power of two"),
        ({"device_memory": "1MiB", "file_memory": "1MiB"}, "file_dir is not set"),
        ({"device_memory": "1MiB", "device_ordinal": 7}, "device_ordinal is 7"),
        ({"device_memory": "1MiB", "warmup_iterations": 1001}, "warmup_iterations is 1001, at most 1000"),
        ({"device_memory": "1MiB", "update_threads": 257}, "update_threads is 257, at most 256"),
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
        Manager(device_memory="1MiB", host_memory="1MiB", window=WINDOW, file=path, file_memory="1MiB")
    assert error.value.status == "IO" and error.value.native_code == 2  # ENOENT


def test_arguments_arrive(tmp_path):
    with Manager(
        placement="cpu",
        device_memory="1MiB",
        device_margin="128KiB",
        host_memory="2MiB",
        file_memory="3MiB",
        file=tmp_path,
        window="128KiB",
        update_threads=1,
        keep_name="kept",
    ) as manager:
        assert manager.stats()["budget_bytes"] == {"device": MIB, "host": 2 * MIB, "file": 3 * MIB}
        assert manager.config.device_margin_bytes == 128 * KIB and manager.config.placement == abi.PLACEMENTS["cpu"]
        arena = manager.arena(abi.KIND_OTHER)
        manager.take(arena, 1)
        release(manager, acquire(manager, arena, 0, 1))
        assert manager.arena_info(arena).window_bytes == 128 * KIB
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
    manager = Manager(device_memory="1MiB", host_memory="1MiB", window=WINDOW)
    arena = manager.arena(abi.KIND_PARAM, name="weights")
    manager.take(arena, WINDOW)
    access = acquire(manager, arena, 0, WINDOW)
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
    assert info.size_bytes == 1048 and info.base % WINDOW == 0
    masters = manager.arena(abi.KIND_MASTER, element_bytes=4, like=params)
    assert manager.arena_info(masters).size_bytes == 2 * info.size_bytes
    grads = manager.arena(abi.KIND_GRAD, element_bytes=2, reuse=params)
    assert manager.arena_info(grads).kind == abi.KIND_GRAD
    with pytest.raises(GeminiError, match="element_bytes") as error:
        manager.arena(abi.KIND_GRAD, element_bytes=4, reuse=params)
    assert error.value.status == "INVALID"


def step(manager, arena, windows):
    manager.lib.iteration_begin(manager.handle)
    for i in range(windows):
        manager.lib.op_begin(manager.handle, f"op{i}".encode(), abi.STREAM_CALLER)
        release(manager, acquire(manager, arena, i * WINDOW, WINDOW))
        manager.lib.op_end(manager.handle)
    manager.lib.iteration_end(manager.handle)


def test_stats_and_explain(manager):
    assert manager.explain().startswith("No plan yet")
    windows = 20  # of which 16 fit on the device
    arena = manager.arena(abi.KIND_PARAM)
    manager.take(arena, windows * WINDOW)
    step(manager, arena, windows)
    stats = manager.stats()
    assert not any(name.startswith(("struct", "reserved")) for name in stats)
    assert stats["model_bytes"] == windows * WINDOW and stats["window_bytes"] == WINDOW
    assert stats["used_bytes"]["device"] <= MIB and stats["used_bytes"]["host"] >= 4 * WINDOW
    assert stats["peak_bytes"]["device"] == MIB and stats["iterations"] == 1 and stats["plans"] == 1
    out = stats["moved_bytes"]["device to host"]
    assert sum(out.values()) == sum(stats["moved_chunks"]["device to host"].values()) * WINDOW > 0
    assert out["demand"] + out["caller"] + out["update"] == 0  # it was pressed out, or planned out at the end
    assert set(stats["moved_bytes"]) == set(abi.LINKS) and set(out) == set(abi.REASONS)
    text = manager.explain()
    assert "placement: auto" in text and f"of {windows} windows" in text and text.endswith("\n")
    step(manager, arena, windows)
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
    with Manager(device_memory="1MiB", host_memory="4MiB", window=WINDOW, watchdog=0.05) as manager:
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
