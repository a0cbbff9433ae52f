"""What ranks talk over with gm.init(transport="torch"): torch.distributed's backends in the place of the library's own.

A group of the library takes three tables of functions (`gemini_comm_t` of `gemini/group.h`): for gathers, for sums and
for exchanges of a few bytes. They are used at the same time, in any order among each other, so each has backends of its
own, which are made from the store of the caller's process group: gloo on the simulated device, NCCL on GPUs. With
several replicas, gathers are among the ranks of a replica (the team "inside"); sums are made there first, and then over
the ranks that have the same slices in the other replicas (the team "across").

gloo does not compare what ranks call: of different calls it would mix up the bytes, or end the process. So on the host
ranks tell each other what they call before each collective. Nor is gloo's order of additions that of ranks. So ranks
send each other their values and add them as the library does over shared memory, with the same bits.

A rank that ends closes its connections, and so does one that has failed (abort); the calls of others that need it end
then. A call that waits for a rank which does nothing ends at the deadline, which is the timeout of the backends.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import re
import threading
import typing

import torch
import torch.distributed as dist

from .. import abi
from ..abi import GeminiError
from . import internals
from .arenas import DTYPES
from .memory import host_tensor, wrap

if typing.TYPE_CHECKING:
    from .ranks import Start

KINDS = ("auto", "torch")
CALL_BYTES = 192  # of the text that says what a rank calls
_DTYPES = {code: dtype for dtype, code in DTYPES.items()}
_TYPES = {
    "all_gather": abi.AllGatherFn,
    "broadcast": abi.BroadcastFn,
    "reduce_scatter": abi.ReduceScatterFn,
    "all_reduce": abi.AllReduceFn,
    "exchange": abi.ExchangeFn,
}


def check_group(process_group: typing.Any, cuda: bool) -> None:
    """Raises GeminiError unless a process group has the backend that carries bytes of the session's device."""
    wanted = "cuda:nccl" if cuda else "cpu:gloo"
    config = dist.get_backend_config(process_group)
    if wanted not in config.split(","):
        raise GeminiError(
            f'transport is "torch", but the process group has the backends {config}: want {wanted} among them, as of '
            f'init_process_group("{"cpu:gloo,cuda:nccl" if cuda else "gloo"}"), or transport="auto"',
            "UNSUPPORTED",
        )


class Team:
    """Ranks that call collectives together, over a backend of torch.distributed.

    Attributes:
        backend: Of torch.distributed.
        ranks: Their numbers in the session, in order.
        index: Which of them this process is.
    """

    def __init__(self, backend: typing.Any, ranks: typing.Sequence[int], index: int) -> None:
        self.backend, self.ranks, self.index = backend, ranks, index

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor that has an equal part for each rank."""
        size = whole.numel() // len(self.ranks)
        return whole[self.index * size : (self.index + 1) * size]

    def broadcast(self, values: torch.Tensor, root: int) -> None:
        """Brings the values of the rank with the index root to all ranks."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        self.backend.broadcast([values], options).wait()

    def gather(self, whole: torch.Tensor, mine: torch.Tensor) -> None:
        """Brings the bytes of each rank to all of them."""
        self.backend._allgather_base(whole, mine).wait()

    # ---- on the host
    def agree(self, call: str) -> None:
        """Raises GeminiError unless all ranks make the same call."""
        mine = bytearray(call.encode()[:CALL_BYTES].ljust(CALL_BYTES, b"\0"))
        theirs = torch.empty(len(self.ranks) * CALL_BYTES, dtype=torch.uint8, device="cpu")
        self.gather(theirs, torch.frombuffer(mine, dtype=torch.uint8))
        for rank, other in zip(self.ranks, theirs.view(-1, CALL_BYTES).tolist()):
            if bytes(other) != mine:
                said = bytes(other).rstrip(b"\0").decode(errors="replace")
                raise GeminiError(
                    f"ranks differ: rank {self.ranks[self.index]} calls {call}, rank {rank} calls {said}", "PEER"
                )

    def add(self, values: torch.Tensor) -> None:
        """Values of one dimension become their sum over the ranks."""
        theirs = torch.empty(len(self.ranks), values.numel(), dtype=values.dtype, device="cpu")
        self.gather(theirs.view(-1).view(torch.uint8), values.view(torch.uint8))
        add_up(theirs, values)

    def add_parts(self, whole: torch.Tensor) -> None:
        """This rank's part of a tensor becomes its sum over the ranks."""
        theirs = torch.empty(whole.numel(), dtype=whole.dtype, device="cpu")
        self.backend.alltoall_base(theirs.view(torch.uint8), whole.view(torch.uint8), [], []).wait()
        add_up(theirs.view(len(self.ranks), -1), self.part(whole))


def add_up(rows: torch.Tensor, out: torch.Tensor) -> None:
    """Adds rows in their order, 16-bit values in fp32, and rounds once. The rows are undefined afterwards."""
    total = rows[0] if rows.element_size() > 2 else rows[0].float()
    for row in rows[1:]:
        total += row
    out.copy_(total)


_Teams = dict[str, Team]


class OnHost:
    """Functions that block, for the simulated device. Arguments are the teams, and those of `gemini/group.h`."""

    flags = 0

    def all_gather(self, teams: _Teams, buffer: int, slice_bytes: int, _stream: int | None, label: bytes) -> None:
        inside = teams["inside"]
        inside.agree(f"all_gather() of {slice_bytes} bytes for {label.decode(errors='replace')}")
        whole = host_tensor(buffer, len(inside.ranks) * slice_bytes, torch.uint8)
        inside.gather(whole, inside.part(whole))

    def broadcast(self, teams: _Teams, buffer: int, size: int, root: int, _stream: int | None, label: bytes) -> None:
        inside = teams["inside"]
        inside.agree(f"broadcast() of {size} bytes of rank {inside.ranks[root]} for {label.decode(errors='replace')}")
        inside.broadcast(host_tensor(buffer, size, torch.uint8), root)

    def reduce_scatter(
        self, teams: _Teams, buffer: int, count: int, dtype: int, _stream: int | None, label: bytes
    ) -> None:
        inside = teams["inside"]
        call = f"reduce_scatter() of {count} values for {label.decode(errors='replace')}"
        whole = host_tensor(buffer, len(inside.ranks) * count, _DTYPES[dtype])
        inside.agree(call)
        inside.add_parts(whole)
        if "across" in teams:
            teams["across"].agree(call)
            teams["across"].add(inside.part(whole))

    def all_reduce(self, teams: _Teams, buffer: int, count: int, dtype: int, _stream: int | None, label: bytes) -> None:
        values = host_tensor(buffer, count, _DTYPES[dtype])
        for team in teams.values():  # inside, then across
            team.agree(f"all_reduce() of {count} values for {label.decode(errors='replace')}")
            team.add(values)

    def exchange(self, teams: _Teams, mine: int, size: int, out: int, label: bytes) -> None:
        everyone = teams["all"]
        everyone.agree(f"exchange() of {size} bytes for {label.decode(errors='replace')}")
        if size:
            whole = host_tensor(out, len(everyone.ranks) * size, torch.uint8)
            everyone.gather(whole, host_tensor(mine, size, torch.uint8))


class OnGpu(OnHost):
    """Functions that queue on the stream that they get; exchanges are on the host. NCCL chooses how it adds."""

    flags = abi.COMM_QUEUES

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def _queued(self, stream: int | None) -> typing.ContextManager[None]:
        """A context manager: torch's work within it is queued on a stream, and so are its waits."""
        return torch.cuda.stream(torch.cuda.ExternalStream(stream, self.device))

    def all_gather(self, teams: _Teams, buffer: int, slice_bytes: int, stream: int | None, label: bytes) -> None:
        inside = teams["inside"]
        whole = wrap(buffer, (len(inside.ranks) * slice_bytes,), torch.uint8, self.device)
        with self._queued(stream):
            inside.gather(whole, inside.part(whole))

    def broadcast(self, teams: _Teams, buffer: int, size: int, root: int, stream: int | None, label: bytes) -> None:
        with self._queued(stream):
            teams["inside"].broadcast(wrap(buffer, (size,), torch.uint8, self.device), root)

    def reduce_scatter(
        self, teams: _Teams, buffer: int, count: int, dtype: int, stream: int | None, label: bytes
    ) -> None:
        inside = teams["inside"]
        whole = wrap(buffer, (len(inside.ranks) * count,), _DTYPES[dtype], self.device)
        with self._queued(stream):
            inside.backend._reduce_scatter_base(inside.part(whole), whole).wait()
            if "across" in teams:
                teams["across"].backend.allreduce([inside.part(whole)]).wait()

    def all_reduce(self, teams: _Teams, buffer: int, count: int, dtype: int, stream: int | None, label: bytes) -> None:
        values = wrap(buffer, (count,), _DTYPES[dtype], self.device)
        with self._queued(stream):
            for team in teams.values():
                team.backend.allreduce([values]).wait()


class Table:
    """Functions of one communicator as the library calls them. They end together.

    Attributes:
        comm: The struct for the library.
        teams: By name, as long as the table has not ended.
    """

    def __init__(
        self, lib: abi.Library, teams: _Teams, functions: typing.Sequence[typing.Callable[..., None]], flags: int
    ) -> None:
        self.lib, self.teams = lib, teams
        self._lock, self._busy, self._ended = threading.Lock(), False, False  # the lock guards the others, and teams
        called = {one.__name__: _TYPES[one.__name__](functools.partial(self._call, one)) for one in functions}
        self.comm = abi.Comm(flags=flags, abort=abi.AbortFn(lambda _user, _why: self.end()), **called)

    def end(self) -> None:
        """Closes the connections, by which the other ranks' calls end. While a function is called, it does so when that
        returns: gloo cannot end a call before its deadline.
        """
        with self._lock:
            self._ended = True
            if not self._busy:
                self._close()

    def _close(self) -> None:
        for team in self.teams.values():
            if internals.NcclBackend and isinstance(team.backend, internals.NcclBackend):
                team.backend.abort()  # what is queued on the GPU; gloo closes with the last reference
        self.teams.clear()

    def _call(self, function: typing.Callable[..., None], _user: int | None, *arguments: typing.Any) -> int:
        """Calls a function. Returns a status."""
        with self._lock:
            self._busy = True
        try:
            if self._ended:
                raise GeminiError("the connections to the other ranks are closed", "PEER")
            function(self.teams, *arguments)
            return abi.OK
        except BaseException as error:  # which the library does not know: KeyboardInterrupt, too
            said = first_line(error).encode("ascii", "replace")[:400]
            self.lib.error_set(abi.ErrorInfo(status=abi.ERR_PEER, operation=b"torch.distributed", message=said))
            return abi.ERR_PEER
        finally:
            with self._lock:
                self._busy = False
                if self._ended:
                    self._close()


def first_line(error: BaseException) -> str:
    """What an exception says, without the place in gloo's sources where it was raised."""
    return re.sub(r"^\[\S+:\d+\] ", "", str(error).partition("\n")[0]) or repr(error)


class Transport:
    """The three tables of a group.

    Attributes:
        comms: Their structs, for Manager.group_open().
    """

    def __init__(self, start: Start, shard_size: int, lib: abi.Library) -> None:
        """Connects the ranks, all of which have to call it. Blocks until they have.

        Args:
            start: Of the ranks.
            shard_size: Ranks of a replica.
            lib: The library.

        Raises:
            GeminiError: The process group lacks what is needed, or a rank does not come or has ended.
        """
        cuda = start.device.type == "cuda"
        check_group(start.process_group, cuda)
        functions = OnGpu(start.device) if cuda else OnHost()
        first = start.rank // shard_size * shard_size
        ranks_of = {
            "inside": range(first, first + shard_size),
            "across": range(start.rank - first, start.count, shard_size),
            "all": range(start.count),
        }

        def team(table: str, name: str, gpu: bool = cuda) -> Team:
            ranks = ranks_of[name]
            index = ranks.index(start.rank)
            return Team(connect(start, f"{table}/{name}/{ranks[0]}", index, len(ranks), gpu), ranks, index)

        self.tables: list[Table] = []

        def add(teams: _Teams, flags: int, *some: typing.Callable[..., None]) -> None:
            self.tables.append(Table(lib, teams, some, flags))

        try:
            add({"inside": team("gathers", "inside")}, functions.flags, functions.all_gather, functions.broadcast)
            sums = {"inside": team("sums", "inside")}
            if shard_size < start.count:
                sums["across"] = team("sums", "across")
            add(sums, functions.flags, functions.reduce_scatter, functions.all_reduce)
            add({"all": team("exchanges", "all", False)}, 0, functions.exchange)
        except BaseException:
            self.close()
            raise
        self.comms = [table.comm for table in self.tables]

    def close(self) -> None:
        """Closes the connections. The library must not call functions any more."""
        for table in self.tables:
            table.end()

    def forked(self) -> None:
        """In a child that os.fork() made, keeps the backends for ever: freeing one waits for threads that it lacks."""
        for table in self.tables:
            for team in table.teams.values():
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(team.backend))


def connect(start: Start, name: str, index: int, count: int, gpu: bool) -> typing.Any:
    """Makes a backend of torch.distributed. Blocks until its ranks are connected.

    dist.new_group() would do that for any backend; but all processes of the default group have to call it, or, with
    use_local_synchronization, names of groups are used a second time after the first one has ended, before torch 2.15,
    and the new ranks then find the addresses of the old ones in the store.

    Args:
        start: Of the ranks.
        name: Of the backend, the same on its ranks.
        index: Which of its ranks this process is.
        count: How many there are.
        gpu: Whether it is NCCL's, or gloo's.

    Raises:
        GeminiError: Status "PEER": a rank does not come.
    """
    store, timeout = dist.PrefixStore(name, start.store), datetime.timedelta(seconds=start.seconds)
    try:
        if not gpu:
            return internals.GlooBackend(store, index, count, timeout)
        options = internals.NcclBackend.Options()
        options._timeout = timeout
        backend = internals.NcclBackend(store, index, count, options)
        with start.on_gpu():  # the first collective makes the communicator, and waits for the other ranks
            backend.allreduce([torch.zeros(1, device=start.device)]).wait()
            torch.cuda.synchronize(start.device)
        return backend
    except RuntimeError as error:
        said = f'init(): transport="torch" cannot connect the ranks for {name}: {first_line(error)}'
        raise GeminiError(said, "PEER") from error
