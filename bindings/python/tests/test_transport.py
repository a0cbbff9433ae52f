"""The functions of gm.init(transport="torch"), which ranks in threads of this process call as the library does.

test_ranks.py trains with them.

SPDX-License-Identifier: Apache-2.0
"""

import contextlib
import ctypes
import datetime
import os
import signal
import threading
import time
import types

import pytest
import torch
import torch.distributed as dist

import libgemini.torch as gm
from libgemini import abi
from libgemini.torch import transport
from libgemini.torch.arenas import DTYPES

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="torch has no torch.distributed with gloo"
)
GATHERS, SUMS, EXCHANGES = range(3)
LIB = abi.library()


@pytest.fixture(autouse=True)
def group_of_gloo(monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:gloo")


def on_ranks(count, function, shard_size=None, seconds=30.0, gpu=False):
    """What a function of a rank and its three structs returns, of each rank, in a thread."""
    store, out = dist.HashStore(), [None] * count
    store.set_timeout(datetime.timedelta(seconds=30))

    def run(rank):
        start = types.SimpleNamespace(
            process_group=None, rank=rank, count=count, device=torch.device("cpu"), seconds=seconds, store=store
        )
        made = transport.Transport(start, shard_size or count, LIB)
        try:
            out[rank] = function(rank, made)
        finally:
            made.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return out


def said():
    """The text of this thread's last error."""
    info = abi.ErrorInfo()
    LIB.last_error(info)
    return info.message.decode()


def values_of(rank, count, dtype):
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)


def added(parts, replicas=1):
    """The sum in the order of ranks, in fp32, rounded within each replica and once more over these."""
    if replicas > 1:
        size = len(parts) // replicas
        parts = [added(parts[i * size : (i + 1) * size]) for i in range(replicas)]
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


@pytest.mark.parametrize("shard_size", [4, 2, 1])
def test_what_the_functions_bring(shard_size):
    """Gathers and broadcasts within a replica; sums over all ranks, with the bits of the order of ranks."""
    size, count, replicas = 24, 1000, 4 // shard_size

    def call(rank, made):
        gathers, sums, exchanges = made.comms
        first, place = rank // shard_size * shard_size, rank % shard_size
        out = {}
        gathered = torch.zeros(shard_size * size, dtype=torch.uint8)
        gathered[place * size : (place + 1) * size] = 10 + rank
        assert gathers.all_gather(None, gathered.data_ptr(), size, None, b"gather") == abi.OK
        assert gathered.view(-1, size)[:, 3].tolist() == [10 + first + one for one in range(shard_size)]
        sent = torch.full((size,), 10 + rank, dtype=torch.uint8)
        assert gathers.broadcast(None, sent.data_ptr(), size, shard_size - 1, None, b"rest") == abi.OK
        assert sent.tolist() == [10 + first + shard_size - 1] * size
        for dtype, code in DTYPES.items():
            whole, rest = values_of(rank, shard_size * count, dtype), values_of(rank + 9, 7, dtype)
            assert sums.reduce_scatter(None, whole.data_ptr(), count, code, None, b"sum") == abi.OK
            assert sums.all_reduce(None, rest.data_ptr(), 7, code, None, b"rest") == abi.OK
            out[dtype] = whole[place * count : (place + 1) * count].clone(), rest
        for length in 5, 0:
            mine, all_out = bytes([rank] * length), ctypes.create_string_buffer(4 * length + 1)
            assert exchanges.exchange(None, mine, length, ctypes.addressof(all_out), b"exchange") == abi.OK
            assert all_out.raw[: 4 * length] == b"".join(bytes([one] * length) for one in range(4))
        return out

    found = on_ranks(4, call, shard_size)
    for dtype in DTYPES:
        whole = added([values_of(rank, shard_size * count, dtype) for rank in range(4)], replicas)
        rest = added([values_of(rank + 9, 7, dtype) for rank in range(4)], replicas)
        for rank, out in enumerate(found):
            place = rank % shard_size
            assert torch.equal(out[dtype][0], whole[place * count : (place + 1) * count])
            assert torch.equal(out[dtype][1], rest)


def test_ranks_that_call_other_functions_are_named():
    """Nothing is written, and no later call is made."""

    def call(rank, made):
        values = torch.full((8,), float(rank))
        function, code = made.comms[SUMS].all_reduce, DTYPES[torch.float32]
        status = function(None, values.data_ptr(), 8 if rank < 2 else 4, code, None, b"chunk 5 of arena \xc3\xa4")
        return status, said(), values.tolist()

    for rank, (status, text, values) in enumerate(on_ranks(3, call)):
        other = (2, 2, 0)[rank]
        assert status == abi.ERR_PEER and values == [float(rank)] * 8
        assert text.startswith(f"ranks differ: rank {rank} calls all_reduce() of {4 if rank == 2 else 8} values"), text
        assert f"rank {other} calls all_reduce() of {4 if other == 2 else 8} values for chunk 5" in text


def test_a_rank_that_gives_up_ends_the_calls_of_others():
    """And its own later ones, which say so."""
    ended = threading.Semaphore(0)

    def call(rank, made):
        buffer, began = torch.zeros(3 * 8, dtype=torch.uint8), time.monotonic()
        if rank == 1:
            time.sleep(0.3)
            for table in made.comms:
                table.abort(None, b"rank 1 gives up")
            assert all(ended.acquire(timeout=10) for _ in range(2))
        status = made.comms[GATHERS].all_gather(None, buffer.data_ptr(), 8, None, b"gather")
        ended.release()
        return status, said(), time.monotonic() - began

    for rank, (status, text, seconds) in enumerate(on_ranks(3, call)):
        assert status == abi.ERR_PEER and seconds < 10
        assert ("the connections to the other ranks are closed" in text) == (rank == 1)
        assert "/gloo/" not in text


def test_a_rank_that_does_not_come_is_waited_for_until_the_deadline():
    """Also where the table is given up meanwhile, which gloo cannot end sooner."""
    gone = threading.Event()

    def call(rank, made):
        if rank == 1:
            assert gone.wait(30)
            return None
        aborts = threading.Timer(0.2, made.comms[EXCHANGES].abort, (None, b"gives up"))
        aborts.start()
        out, began = ctypes.create_string_buffer(16), time.monotonic()
        status = made.comms[EXCHANGES].exchange(None, b"mine", 4, ctypes.addressof(out), b"exchange")
        gone.set()
        aborts.join()
        assert not made.tables[EXCHANGES].teams
        return status, said(), time.monotonic() - began

    (status, text, seconds), _ = on_ranks(2, call, seconds=1.0)
    assert status == abi.ERR_PEER and "Timed out" in text and 0.9 < seconds < 5


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError("no room")])
def test_what_a_function_raises_is_an_error(error):
    """An interrupt, too: Ctrl-C comes to the main thread, which calls exchanges."""

    def exchange(teams, mine, size, out, label):
        if error is KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)
            time.sleep(1)
        raise error

    table = transport.Table(LIB, {}, [exchange], 0)
    assert table.comm.exchange(None, b"mine", 4, 0, b"exchange") == abi.ERR_PEER
    assert said() == ("KeyboardInterrupt()" if error is KeyboardInterrupt else "no room")


def test_a_forked_process_ends():
    """Though it has no thread of a backend's, for which gloo waits where a backend is freed."""

    def call(rank, made):
        child = os.fork()
        if child == 0:
            made.forked()
            made.close()
            os._exit(7)
        for _ in range(500):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        os.kill(child, signal.SIGKILL)
        return os.waitpid(child, 0)

    assert on_ranks(1, call) == [7]


def test_functions_for_gpus(monkeypatch):
    """They queue on the stream that they get: tried with gloo on the CPU, as no GPU is needed to see what they call."""
    streams = []

    @contextlib.contextmanager
    def on_stream(stream):
        streams.append(stream)
        yield

    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda stream, device: (stream, str(device)))
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(transport, "OnHost", lambda: transport.OnGpu(torch.device("cpu")))
    code, count = DTYPES[torch.float32], 10

    def call(rank, made):
        gathers, sums, exchanges = made.comms
        assert (gathers.flags, sums.flags, exchanges.flags) == (abi.COMM_QUEUES, abi.COMM_QUEUES, 0)
        place, out = rank % 2, ctypes.create_string_buffer(16)
        gathered = torch.arange(8, dtype=torch.uint8) + 10 * rank
        assert gathers.all_gather(None, gathered.data_ptr(), 4, 77, b"gather") == abi.OK
        sent = torch.full((4,), rank, dtype=torch.uint8)
        assert gathers.broadcast(None, sent.data_ptr(), 4, 1, 77, b"rest") == abi.OK
        whole, rest = torch.arange(2.0 * count) + rank, torch.full((3,), float(rank))
        assert sums.reduce_scatter(None, whole.data_ptr(), count, code, 78, b"sum") == abi.OK
        assert sums.all_reduce(None, rest.data_ptr(), 3, code, 78, b"rest") == abi.OK
        assert exchanges.exchange(None, bytes([rank] * 4), 4, ctypes.addressof(out), b"exchange") == abi.OK
        return gathered.tolist(), sent.tolist(), whole[place * count : (place + 1) * count], rest.tolist(), out.raw

    for rank, (gathered, sent, own, rest, out) in enumerate(on_ranks(4, call, shard_size=2)):
        first, place = rank // 2 * 2, rank % 2
        assert gathered == [10 * first + i for i in range(4)] + [10 * first + 14 + i for i in range(4)]
        assert sent == [first + 1] * 4 and rest == [6.0] * 3
        assert torch.equal(own, (torch.arange(2.0 * count) * 4 + 6)[place * count : (place + 1) * count])
        assert out == b"".join(bytes([one] * 4) for one in range(4))
    assert sorted(streams) == [(77, "cpu")] * 8 + [(78, "cpu")] * 8


def test_a_process_group_without_the_backend_is_refused(monkeypatch):
    for cuda, config, wanted in (
        (False, "cuda:nccl", "cpu:gloo"),
        (True, "cpu:gloo,cuda:gloo", "cuda:nccl"),
        (False, "cpu:mpi,cuda:mpi", "cpu:gloo"),
    ):
        monkeypatch.setattr(dist, "get_backend_config", lambda group, config=config: config)
        start = types.SimpleNamespace(process_group=None, device=torch.device("cuda" if cuda else "cpu"))
        with pytest.raises(gm.GeminiError, match=f"has the backends {config}: want {wanted} among them") as refused:
            transport.Transport(start, 1, LIB)
        assert refused.value.status == "UNSUPPORTED"
    for cuda in False, True:
        monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
        transport.check_group(None, cuda)
