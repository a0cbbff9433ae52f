"""Training by several processes, the ranks: what a session does otherwise than one of a single process.

Parameters, gradients and optimizer states are divided among the ranks (ZeRO): of every chunk each rank keeps a slice.
The library gathers parameters for the operators that use them, and adds gradients. So all ranks have to make the same
calls in the same order: the same forward and backward passes, clipping, steps, and copies of parameters.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import array
import contextlib
import copy
import ctypes
import hashlib
import importlib.util
import itertools
import math
import os
import pickle
import socket
import time
import types
import typing

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import abi
from ..abi import GeminiError
from ..manager import STATES, Manager
from . import internals
from .arenas import DTYPES, PIECE_BYTES, Place
from .memory import host_tensor
from .owners import Owners, check_rows, shard_size_of
from .transport import Transport

if typing.TYPE_CHECKING:
    from .model import Record
    from .parts import Parts
    from .session import Session

BUCKET_BYTES = 128 << 20  # of gradients that are added in one call, at most
BUCKET_PARTS = 64  # buckets that would fill the device: gradients wait there until their bucket is whole
EXPERTS = "experts"  # the name of the owners of a part of the experts
GRACE_SECONDS = 2.0  # that others have to come after one is known to be lost, so that only that one is named

_Pieces = typing.Iterator[tuple[int, torch.Tensor]]
_Batch = typing.TypeVar("_Batch")


def find(process_group: typing.Any, shard_size: int | None = None, backend: str = "gloo") -> tuple[typing.Any, int]:
    """The process group whose processes are the ranks of a session, and how many of them divide a model.

    Args:
        process_group: What init() was given.
        shard_size: Likewise.
        backend: Of the default group, where it is made.

    Returns:
        That group; without one, the default group of torch.distributed, which is made here if the script, under
        torchrun, has made none; or None: there is one process. And the processes of a replica.

    Raises:
        GeminiError: shard_size, or a mesh that was given as the group, does not fit.
    """
    if dist.is_available() and isinstance(process_group, DeviceMesh):
        process_group, shard_size = _of_mesh(process_group, shard_size)
    process_group = _find_group(process_group, backend)
    count = 1 if process_group is None else dist.get_world_size(process_group)
    if shard_size is not None and (shard_size < 1 or count % shard_size):
        raise GeminiError(f"shard_size is {shard_size}: want a divisor of the number of processes, {count}", "INVALID")
    return process_group, shard_size or count


def _of_mesh(mesh: DeviceMesh, shard_size: int | None) -> tuple[typing.Any, int]:
    """The group and shard_size of a mesh, whose first dimension is of replicas."""
    if mesh.ndim != 2:
        raise GeminiError(
            f"process_group is a mesh of {mesh.ndim} dimensions: want 2, of replicas and of the processes of each; of "
            "another one give the process group of a dimension: mesh.get_group()",
            "INVALID",
        )
    if mesh.mesh.flatten().tolist() != list(range(dist.get_world_size())):
        raise GeminiError(
            "process_group is a mesh that is not of all processes in their order: give a process group of those that "
            "train one model, and shard_size",
            "INVALID",
        )
    if shard_size not in (None, mesh.size(1)):
        raise GeminiError(
            f"shard_size is {shard_size}, but the mesh has {mesh.size(1)} processes in a replica", "INVALID"
        )
    return dist.group.WORLD, mesh.size(1)


def processes_of(mesh: typing.Any) -> list[int]:
    """The processes of a mesh of one dimension, in the order of the parts that they have of a DTensor: that of torch's
    group, which is not always the mesh's."""
    return list(dist.get_process_group_ranks(mesh.get_group()))


def expert_row(mesh: typing.Any, process_group: typing.Any) -> list[int]:
    """The ranks of a session among which a mesh of experts divides these, in the order of the parts; [] without one.

    Args:
        mesh: What init() was given.
        process_group: Of the session, or None: there is one process.

    Raises:
        GeminiError: The mesh has more dimensions, or not only ranks of the session, this one among them.
    """
    if mesh is None:
        return []
    if not dist.is_available() or not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        what = f"a mesh of {mesh.ndim} dimensions" if isinstance(mesh, DeviceMesh) else f"a {type(mesh).__name__}"
        raise GeminiError(f"expert_mesh is {what}: want a DeviceMesh of one, such as mesh['experts']", "INVALID")
    if mesh.get_coordinate() is None:
        raise GeminiError(f"expert_mesh is of processes {mesh.mesh.tolist()}, without this one", "INVALID")
    members, own = processes_of(mesh), dist.get_rank()
    processes = [own] if process_group is None else dist.get_process_group_ranks(process_group)
    if own not in members or not {*members} <= {*processes}:
        raise GeminiError(
            f"expert_mesh is of processes {members}: want process {own}, which calls init(), and others of its "
            f"process_group, {processes}",
            "INVALID",
        )
    return [processes.index(one) for one in members] if len(members) > 1 else []


def _find_group(process_group: typing.Any, backend: str) -> typing.Any:
    if not dist.is_available():
        return None
    if process_group is None and not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if "MASTER_ADDR" in os.environ and "RANK" in os.environ:
            dist.init_process_group(backend)
    if process_group is None and dist.is_initialized():
        process_group = dist.group.WORLD
    if process_group is None or dist.get_world_size(process_group) == 1:
        return None
    return process_group


def gather_objects(process_group: typing.Any, mine: typing.Any) -> list[typing.Any]:
    """Brings an object of each process of a group of torch.distributed to all of them, in their order."""
    theirs: list[typing.Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(theirs, mine, group=process_group)
    return theirs


@contextlib.contextmanager
def fail_together(gather: typing.Callable[[str], list[str]], who: str) -> typing.Iterator[None]:
    """A context manager: an exception within it on one process is one on all of them, which meet at its end.

    Args:
        gather: Brings a text of each process to all of them.
        who: What the processes are, before their number.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    texts = gather((str(error) or repr(error)) if error else "")
    if error:
        raise error
    for number, text in enumerate(texts):
        if text:
            raise GeminiError(f"{who} {number}: {text}", "PEER")


def host_default() -> int:
    """The host memory that the library takes by itself: four fifths of what the process may still take."""
    with Manager(device_memory=64 << 10, chunk_size=64 << 10) as probe:
        return int(probe.stats()["budget_bytes"]["host"])


class Share(typing.NamedTuple):
    """What a process takes of its machine by itself, of which all processes there take an equal part.

    Attributes:
        host_bytes: Host memory. 0: the process is alone, and the library chooses.
        update_threads: Threads for updates. 0: likewise.
    """

    host_bytes: int
    update_threads: int

    @classmethod
    def of(cls, start: Start | None, wants_host: bool = True) -> Share:
        """The share of this process. All processes of a group have to call it.

        The processes of a machine are those of the group there, or those that torchrun has started there
        (LOCAL_WORLD_SIZE) if these are more, as with tensor parallelism. Those that a launcher has bound to other
        cores do not count where cores are divided.

        Args:
            start: Of several processes, or None.
            wants_host: Whether host_bytes is asked for. Otherwise it is 0, and this process does not look at the
                machine's memory.
        """
        local = os.environ.get("LOCAL_WORLD_SIZE", "1")
        started = int(local) if local.isdigit() else 1
        if start is None and started == 1:
            return cls(0, 0)
        mine = socket.gethostname(), host_default() if wants_host else 0, sorted(os.sched_getaffinity(0))
        theirs = [mine] if start is None else start.exchange(mine)
        here = [one for one in theirs if one[0] == mine[0]]
        count = max(len(here), started)
        if count == 1:
            return cls(0, 0)
        beside = count * sum(one[2] == mine[2] for one in here) // len(here)  # those on the same cores
        threads = min(max(1, len(mine[2]) // beside - 1), 256)
        told = [free for _, free, _ in here if free]  # by those that ask
        return cls(min(told) // count if wants_host else 0, threads)


def choose_gpu(process_group: typing.Any) -> torch.device:
    """The GPU of this process: the current one, or that of LOCAL_RANK, which becomes the current one.

    Args:
        process_group: Of several processes, or None.

    Raises:
        GeminiError: LOCAL_RANK has no GPU.
    """
    current, count, local = torch.cuda.current_device(), torch.cuda.device_count(), os.environ.get("LOCAL_RANK", "0")
    # One that a process sees alone is its own; another one than the first was chosen by the script.
    if process_group is None or current or count == 1:
        return torch.device("cuda", current)
    if not local.isdigit() or int(local) >= count and not may_share_gpus():
        raise GeminiError(f"LOCAL_RANK is {local}, but this process sees {count} GPUs: start at most as many processes")
    torch.cuda.set_device(int(local) % count)
    return torch.device("cuda", int(local) % count)


def may_share_gpus() -> bool:
    """Whether NCCL, 2.30 or later, has been told that several ranks may use one GPU. It is meant for tests."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") == "1"


def load_nccl() -> None:
    """Loads the NCCL that came with torch, unless one is loaded, installed in the system, or named by GEMINI_NCCL.

    The library then finds it by its name. If there is none, the library says so.
    """
    if os.environ.get("GEMINI_NCCL"):
        return
    with contextlib.suppress(OSError):
        ctypes.CDLL("libnccl.so.2")
        return
    found = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
    for folder in (found.submodule_search_locations or []) if found else []:
        with contextlib.suppress(OSError):
            ctypes.CDLL(os.path.join(folder, "lib", "libnccl.so.2"))


class Process(typing.NamedTuple):
    """What the other ranks know of a process.

    Attributes:
        host: The host's name, and which of its spaces of process ids this is.
        pid: The process id.
        began: When it began, as /proc says: another process may get the same id.
        gpu: Its GPU, or "" on the simulated device.
    """

    host: str
    pid: int
    began: str
    gpu: str

    @classmethod
    def here(cls, device: torch.device) -> Process:
        """This process."""
        space = ""
        with contextlib.suppress(OSError):
            space = os.readlink("/proc/self/ns/pid")
        gpu = ""
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            index = device.index or 0
            gpu = str(getattr(properties, "uuid", "")) or (visible[index] if index < len(visible) else "") or str(index)
        return cls(f"{socket.gethostname()} {space}", os.getpid(), cls._state(os.getpid())[1], gpu)

    @staticmethod
    def _state(pid: int) -> tuple[str, str]:
        """The state of a process of this host and when it began; "" if there is none, or if that cannot be known."""
        try:
            with open(f"/proc/{pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
            return fields[0], fields[19]
        except (OSError, IndexError):
            return "", ""

    def has_ended(self, mine: Process) -> bool:
        """Whether it is known to have ended. Of processes of other hosts it is not known."""
        if self.host != mine.host or not self.began:
            return False
        state, began = self._state(self.pid)
        return began != self.began or state in ("Z", "X")


def ended_text(processes: typing.Sequence[Process], rank: int) -> str:
    """Which processes of this host have ended, in words. NCCL does not tell, nor does a store. rank: of this one."""
    gone = [other for other, one in enumerate(processes) if other != rank and one.has_ended(processes[rank])]
    return ", ".join(f"rank {other} has ended (process {processes[other].pid})" for other in gone)


class Start:
    """What the ranks tell each other within init(), before they have a group of the library's.

    It goes through the store of the process group, which can be asked without waiting. A collective of torch's would
    wait for a rank that never comes for as long as the group's timeout, half an hour, and does not say which one it is.
    Rank 0 puts the values together, so that the store is asked about three times for each rank. As a context manager,
    it tells the others about an exception within it.

    Attributes:
        process_group: Of torch.distributed.
        rank: This process's number.
        count: How many ranks there are.
        processes: Of all ranks.
        seconds: How long an exchange waits. The first one, for which a rank may come late: the deadline, or without one
            as long as torch does. The others: as the library does.
    """

    def __init__(self, process_group: typing.Any, device: torch.device, deadline: float) -> None:
        """Waits for all ranks.

        Args:
            process_group: Of several processes.
            device: Of the session.
            deadline: Of init().

        Raises:
            GeminiError: Status "PEER": a rank does not come.
        """
        self.process_group = process_group
        self.rank, self.count = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.device = device
        self.processes: list[Process] = []
        self.exchanges, self.began = 0, 0.0  # how many, and when the last one began
        # A collective that nobody needs: over gloo it fails as soon as a process has ended that is connected to this
        # one, also one of another host or one that nothing is known of yet. Only while the first exchange lasts, as all
        # ranks have to call it.
        self.beside: typing.Any = None
        self.lost: tuple[float, Exception] | None = None  # when that was noticed, and what torch says
        self.store = internals.store_of(process_group)
        if self.store is not None:
            calls = self.store.add(f"libgemini/{self.rank}", 1)  # of init(), by each rank: all begin with the same keys
            self.seconds = deadline or self.store.timeout.total_seconds()
            self.store = dist.PrefixStore(f"libgemini/{calls}", self.store)
            if "cpu:gloo" in dist.get_backend_config(process_group):
                try:
                    zero = torch.zeros(1, device="cpu")
                    self.beside = dist.all_reduce(zero, group=process_group, async_op=True)
                except RuntimeError as error:
                    self.lost = time.monotonic(), error
        self.processes = self.exchange(Process.here(device))
        self.beside = self.lost = None
        self.seconds = deadline or (60.0 if device.type == "cuda" else 10.0)

    def __enter__(self) -> Start:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        if error is not None:
            self._tell(str(error) or repr(error))

    def on_gpu(self) -> typing.ContextManager[None]:
        """A context manager: the session's GPU is the current one, where a process group of NCCL puts what it sends."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    def exchange(self, mine: typing.Any) -> list[typing.Any]:
        """Brings an object of each rank to all ranks.

        Raises:
            GeminiError: Status "PEER": a rank does not come, or has failed; the message names it.
        """
        if self.store is None:
            with self.on_gpu():
                return gather_objects(self.process_group, mine)
        self.exchanges += 1
        keys = [f"{self.exchanges}/{rank}" for rank in range(self.count)]
        missing, self.began = [rank for rank in range(self.count) if rank != self.rank], time.monotonic()
        try:
            self.store.set(keys[self.rank], pickle.dumps(mine))
            if self.rank == 0:
                values = [self._wait(key, keys, missing) for key in keys]
                self.store.set(f"{self.exchanges}/all", pickle.dumps(values))
            else:
                values = pickle.loads(self._wait(f"{self.exchanges}/all", keys, missing))
        except GeminiError as error:
            self._tell(str(error))
            raise
        except RuntimeError as error:
            gone = "the store of torch.distributed is gone, so the first process, or torchrun, has ended"
            raise self._error(missing, gone) from error
        return [pickle.loads(value) for value in values]

    def among(self, members: typing.Sequence[int], name: str) -> Start:
        """What some of the ranks, this one among them, take for theirs where they connect with each other.

        Args:
            members: Their numbers.
            name: Of what they make, the same on them and on no others.
        """
        out = copy.copy(self)
        out.rank, out.count = members.index(self.rank), len(members)
        if self.store is not None:
            out.store = dist.PrefixStore(name, self.store)
        return out

    def _wait(self, key: str, keys: typing.Sequence[str], missing: list[int]) -> bytes:
        """The value of a key, as soon as it is there. missing: ranks that may be; those that have come are removed."""
        pause = 0.001
        while not self.store.check([key]):
            if self.store.check(["failed"]):
                raise GeminiError(self.store.get("failed").decode(), "PEER")
            why = self._why_not_wait()
            for rank in missing[: None if why else 4]:  # while it waits, some: the store is to have time for others
                if self.store.check([keys[rank]]):
                    missing.remove(rank)
            if why:
                raise self._error(missing, why) from (self.lost and self.lost[1])
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return bytes(self.store.get(key))

    def _why_not_wait(self) -> str:
        """Why it is of no use to wait for others, in words, or that they have had their time; "": it goes on."""
        now = time.monotonic()
        if self.beside is not None and self.beside.is_completed():
            try:
                self.beside.wait()
            except RuntimeError as error:
                self.lost = now, error
            self.beside = None
        if text := self._ended():
            return text
        if self.lost and now - self.lost[0] > GRACE_SECONDS:
            return "a process has ended, as torch's connection to it is closed"
        return f"{self.seconds:g} s have passed" if now - self.began > self.seconds else ""

    def _error(self, missing: typing.Sequence[int], why: str) -> GeminiError:
        names = ", ".join(f"rank {rank}" for rank in missing or [0])  # without missing ones, rank 0 is to go on
        return GeminiError(f"init(): {self._ended() or f'waits for {names}: {why}'}", "PEER")

    def _ended(self) -> str:
        return ended_text(self.processes, self.rank) if self.processes else ""

    def _tell(self, text: str) -> None:
        """Tells the others why this rank has given up, unless one has done so before."""
        with contextlib.suppress(RuntimeError):
            if self.store is not None and not self.store.check(["failed"]):
                self.store.set("failed", f"rank {self.rank}: {text}")


class SlicedPlace(Place):
    """A place in an arena that is divided among ranks. On the host there are only the slices of this rank.

    Parameters can be acquired whole on the device, by all ranks together. States are nowhere whole.
    """

    __slots__ = ()

    def make_tensor(self, stride):
        if self.address:
            return super().make_tensor(stride)
        contiguous = torch.empty(self.shape, dtype=self.dtype, device="meta")
        return contiguous if stride is None else contiguous.as_strided(self.shape, stride)

    @property
    def ranks(self) -> Ranks:
        ranks = self.session.ranks
        assert ranks is not None
        return ranks

    @property
    def owners(self) -> Owners:
        """The ranks that it is divided among."""
        return self.session.arenas.sliced[self.arena]

    @property
    def entire(self) -> tuple[tuple[int, ...], int]:
        """The shape of the tensor of which this is a part that some ranks have, and the first element of the part."""
        shape, owners = tuple(self.shape), self.owners
        if not owners.name:
            return shape, 0
        row = owners.row
        return (shape[0] * len(row), *shape[1:]), row.index(self.ranks.rank) * self.elements

    @property
    def is_gradient(self) -> bool:
        return self.follows is not None and self.address != 0

    def access(
        self, mode: int, tier: int = abi.TIER_DEVICE, offset: int = 0, size_bytes: int | None = None
    ) -> abi.Access:
        if self.is_gradient and tier == abi.TIER_DEVICE and not self.ranks.storing:
            raise GeminiError(
                f"{self.name}: a gradient is divided among the ranks: it can be clipped, scaled and dropped, but its "
                "elements can be neither read nor written"
            )
        return super().access(mode, tier, offset, size_bytes)

    def host_pieces(self, mode: int, begin: int = 0, end: int | None = None) -> _Pieces:
        """As of a place, but only the elements that this rank keeps."""
        self.session.refuse_closed(self.name)
        itemsize = self.dtype.itemsize
        for first, last in self.parts(begin, self.elements if end is None else end, PIECE_BYTES // itemsize):
            access = super().access(mode, abi.TIER_HOST, first * itemsize, (last - first) * itemsize)
            with self.session.holds.acquired(access, 1, abi.STREAM_CALLER):
                yield first, host_tensor(access.ptr, last - first, self.dtype)

    def slices(self, begin: int, end: int) -> typing.Iterator[tuple[int, int]]:
        """The elements from begin to end that this rank keeps, as ranges of elements."""
        itemsize, session = self.dtype.itemsize, self.session
        where = session.manager.range(self.object, "read", begin * itemsize + self.base, (end - begin) * itemsize)
        for offset, size in session.manager.slices(where) if end > begin else ():
            yield (offset - self.base) // itemsize, (offset - self.base + size) // itemsize

    def parts(self, begin: int, end: int, most: int) -> typing.Iterator[tuple[int, int]]:
        """As slices(), in ranges of at most so many elements."""
        for first, last in self.slices(begin, end):
            for at in range(first, last, most):
                yield at, min(at + most, last)

    def read_to(self, out: torch.Tensor, begin: int = 0) -> None:
        """As of a place. All ranks have to call it."""
        end = begin + out.numel()
        if self.address and not self.is_gradient:
            for first, piece in self.device_pieces(abi.READ, begin=begin, end=end):
                out[first - begin : first - begin + piece.numel()].copy_(piece)
            return
        step = PIECE_BYTES // self.dtype.itemsize
        for first in range(begin, end, step):
            self._exchange(out[first - begin : first - begin + step], first)

    def _exchange(self, out: torch.Tensor, begin: int) -> None:
        """Reads elements from the slices of all ranks."""
        ranks, end = self.ranks, begin + out.numel()
        mine = array.array("q", [at for part in self.slices(begin, end) for at in part])
        values = torch.empty(sum(mine[1::2]) - sum(mine[::2]), dtype=self.dtype, device="cpu")
        at = 0
        for _, piece in self.host_pieces(abi.READ, begin, end):
            values[at : at + piece.numel()].copy_(piece)
            at += piece.numel()
        parts = [array.array("q", part) for part in ranks.exchange_any(mine.tobytes())]
        theirs_of = ranks.exchange_any(values.view(torch.uint8).numpy().tobytes())
        for rank in self.owners.members:  # others have other parts of the parameter, or the same bytes
            part, data = parts[rank], theirs_of[rank]
            theirs = torch.frombuffer(bytearray(data), dtype=self.dtype) if data else values[:0]
            at = 0
            for first, last in zip(part[::2], part[1::2]):
                out[first - begin : last - begin].copy_(theirs[at : at + last - first])
                at += last - first

    def write(self, values: torch.Tensor) -> None:
        """As of a place; this rank writes what it keeps."""
        flat = self.in_order(values.detach())
        for first, piece in self.host_pieces(abi.WRITE):
            # From a GPU by way of torch's own memory: see Place.write().
            piece.copy_(flat[first : first + piece.numel()].cpu())


class Join(typing.Generic[_Batch]):
    """The batches of a rank, and as long as another rank has one, the last one again. See libgemini.torch.join().

    Attributes:
        idle: Whether the latest batch was repeated.
    """

    def __init__(self, ranks: Ranks | None, batches: typing.Iterable[_Batch]) -> None:
        """
        Args:
            ranks: Of the session, or None: there is one process.
            batches: Of this rank, at least one.

        Raises:
            GeminiError: The ranks have experts of their own.
        """
        if ranks is not None and EXPERTS in ranks.owners:
            raise GeminiError(
                "join() with expert_mesh of init(): a process without batches would go on computing its experts for "
                "others, whose gradients would be dropped with its own: give all processes equally many batches"
            )
        self.ranks = ranks
        self.batches = batches
        self.idle = False

    def __iter__(self) -> typing.Iterator[_Batch]:
        ranks, rest = self.ranks, iter(self.batches)
        if ranks is None:
            yield from rest
            return
        latest: list[_Batch] = []
        try:
            while True:
                if not self.idle:
                    found = list(itertools.islice(rest, 1))
                    self.idle, latest = not found, found or latest
                flags = ranks.exchange(bytes((not self.idle, bool(latest))))
                if not any(has for has, _ in flags):
                    return
                for rank, (_, had) in enumerate(flags):
                    if not had:
                        raise GeminiError(
                            f"rank {rank} has no batch at all, so it cannot join the steps of the others: each rank "
                            "needs one",
                            "PEER",
                        )
                ranks.idle = self.idle
                yield latest[0]
        finally:
            ranks.idle = self.idle = False


class Ranks:
    """The ranks of a session.

    Attributes:
        rank: This process's number.
        count: How many ranks there are.
        shard_size: How many of them divide the model among themselves: those of a replica.
        owners: By name, ranks that divide among themselves what they have: "": all ranks; EXPERTS: of a part of
            experts, those that have the same one.
        transports: What groups talk over, if that is torch.distributed; otherwise NCCL on GPUs, shared memory on the
            simulated device.
        processes: Of all ranks.
        stage: What is divided: 1: states, 2: gradients, too, 3: parameters, too, abi.ZERO_AUTO: as 3.
        storing: Whether a gradient is being stored.
    """

    place_type = SlicedPlace  # of divided arenas

    def __init__(
        self,
        session: Session,
        start: Start,
        stage: int,
        deadline: float,
        rank_order: bool,
        register_frames: bool,
        shard_size: int = 0,
        bucket_size: int = 0,
        transport: str = "auto",
        expert_row: typing.Sequence[int] = (),
    ) -> None:
        """
        Args:
            session: Whose manager is open.
            start: Of the ranks that these are.
            stage: 1, 2, 3 or abi.ZERO_AUTO.
            deadline: Seconds to wait for a rank that makes no progress. 0: 10, over NCCL 60.
            rank_order: Over NCCL: whether sums are in the order of ranks.
            register_frames: Over NCCL: whether it registers the frames that are gathered into.
            shard_size: Ranks of a replica; 0: all.
            bucket_size: Bytes of gradients that are added in one call; 0: chosen.
            transport: As of init().
            expert_row: The ranks of this process's row of the mesh of experts, in the order of the parts; see
                expert_row().

        Raises:
            GeminiError: Ranks have different options; or a group cannot be made.
        """
        self.session = session
        self.process_group = start.process_group
        self.rank, self.count = start.rank, start.count
        self.on_gpu = start.on_gpu
        self.processes = start.processes
        self.shard_size = shard_size or self.count
        self.stage = stage
        self.storing = False
        self.stored: dict[Record, None] = {}  # whose gradients this backward pass has made
        self.taken = False  # a step has used the gradients
        self.absent: set[Record] = set()  # whose gradients no backward pass of this rank has made: zeros
        self.idle = False  # this rank has no batch, and only accompanies the others: its gradients are zeros; see Join
        self.parts: Parts | None = None  # with step_in_backward
        self.transports: list[Transport] = []
        if session.cuda and transport == "auto":
            load_nccl()
        self._refuse_shared_gpus()
        mine = {
            "transport": transport,
            "shard_size": self.shard_size,
            "bucket_size": bucket_size,
            "expert_mesh": f"of {len(expert_row)} processes" if expert_row else None,
        }
        theirs = start.exchange((mine, session.manager.config.device_bytes))
        for rank, (theirs_of, _) in enumerate(theirs):
            for name, value in theirs_of.items():
                first = theirs[0][0][name]
                if value != first:
                    raise GeminiError(f"rank 0 has {name} {first}, rank {rank} has {value}: want the same", "PEER")
        over_torch = transport == "torch"  # which takes care of the first two of these options
        options: dict[str, typing.Any] = {
            "deadline": 0.0 if over_torch else deadline,
            "rank_order": rank_order and not over_torch,
            "bucket_bytes": bucket_size or min(BUCKET_BYTES, min(budget for _, budget in theirs) // BUCKET_PARTS),
            "register": register_frames and bool(session.cuda) and not over_torch,
        }
        try:
            name = None if over_torch else self._group_id(start)
            group = self._join(start, self.shard_size, name, options)
            everyone = list(range(self.count))
            self.owners = {"": Owners("", everyone, self.rank, self.shard_size, group, (self.rank,))}
            if expert_row:
                self.owners[EXPERTS] = self._join_owners(start, expert_row, options)
        except BaseException:
            self.disconnect()
            raise
        abi.peer_hints.append(self._hint)

    def _join(self, start: Start, shard_size: int, name: bytes | None, options: dict[str, typing.Any]) -> int:
        """Opens a group. Its ranks all have to call it.

        Args:
            start: Of its ranks.
            shard_size: How many of them divide what they have.
            name: The group's id; None: over torch.distributed.
            options: Of Manager.group_open(), the same for all groups.
        """
        comms = []
        if name is None:
            self.transports.append(Transport(start, shard_size, self.session.lib))
            comms = self.transports[-1].comms
        return self.session.manager.group_open(
            name, start.rank, start.count, shard_ranks=shard_size, comms=comms, **options
        )

    def _join_owners(self, start: Start, row: typing.Sequence[int], options: dict[str, typing.Any]) -> Owners:
        """Opens the group of the ranks that have the same experts as this one. All ranks have to call it.

        Args:
            start: Of all ranks.
            row: The ranks of this process's row of the mesh, in the order of the parts.
            options: As of _join().

        Raises:
            GeminiError: The rows do not divide all ranks; or a group cannot be made.
        """
        mine = array.array("q", row).tobytes()
        rows = check_rows((array.array("q", one).tolist() for one in self.exchange_any(mine)), self.count)
        part = list(row).index(self.rank)
        members = sorted(one[part] for one in rows)
        name, among = None, start.among(members, f"experts/{part}")
        if not self.transports:
            name = self.exchange_any(b"" if among.rank else self._make_id(len(members)))[members[0]]
        size = shard_size_of(members, self.shard_size)
        return Owners(EXPERTS, members, among.rank, size, self._join(among, size, name, options), tuple(row))

    def close(self) -> None:
        """The session ends."""
        if self._hint in abi.peer_hints:
            abi.peer_hints.remove(self._hint)

    def forked(self) -> None:
        """This process is a child that os.fork() made."""
        for transport in self.transports:
            transport.forked()

    def disconnect(self) -> None:
        """The session has ended, and its manager with it."""
        for transport in self.transports:
            transport.close()

    def _refuse_shared_gpus(self) -> None:
        """Raises GeminiError, on all ranks, if two have the same GPU or only some have one."""
        first: dict[tuple[str, str], int] = {}
        for rank, process in enumerate(self.processes):
            if bool(process.gpu) != bool(self.processes[0].gpu):
                some = ["a GPU" if one.gpu else "the simulated device" for one in (self.processes[0], process)]
                raise GeminiError(f"rank 0 has {some[0]}, rank {rank} has {some[1]}: want the same sort on all", "PEER")
            other = first.setdefault((process.host.partition(" ")[0], process.gpu), rank)
            if process.gpu and other != rank and not may_share_gpus():
                raise GeminiError(
                    f"ranks {other} and {rank} have the same GPU, {process.gpu}: give each its own, by LOCAL_RANK, "
                    "torch.cuda.set_device(), device= or CUDA_VISIBLE_DEVICES",
                    "INVALID",
                )

    def _make_id(self, count: int) -> bytes:
        """The id of a new group, of which this process is the first rank."""
        transport = abi.TRANSPORT_NCCL if self.session.cuda else abi.TRANSPORT_SHARED
        return self.session.manager.group_id(count, transport)

    def _group_id(self, start: Start) -> bytes:
        """Brings the id that rank 0 makes to all ranks, or the error that it met."""
        made: typing.Any = None
        if self.rank == 0:
            try:
                made = self._make_id(self.count)
            except GeminiError as error:
                made = error
        failed = isinstance(made, GeminiError)
        sent = start.exchange((str(made), made.status) if failed else made)[0]
        if failed:
            raise made
        if isinstance(sent, tuple):
            raise GeminiError(f"rank 0: {sent[0]}", sent[1])
        return typing.cast(bytes, sent)

    def _hint(self) -> str:
        """What an error of a group, which names ranks by their numbers in that, does not say, in words."""
        ended, owners = ended_text(self.processes, self.rank), self.owners.get(EXPERTS)
        if owners is None:
            return ended
        own, here = ", ".join(map(str, range(len(owners.members)))), ", ".join(map(str, owners.members))
        return "; ".join(filter(None, [ended, f"in the group of experts, ranks {own} are ranks {here} of all"]))

    @property
    def group(self) -> int:
        """The library's handle of the group of all ranks."""
        return self.owners[""].group

    # ---- what ranks tell each other
    def exchange(self, mine: bytes) -> list[bytes]:
        """Brings bytes of each rank, of the same number on all, to all ranks. Blocks until all have called it."""
        return self.session.manager.group_exchange(self.group, mine, self.count)

    def exchange_any(self, mine: bytes) -> list[bytes]:
        """Likewise, of any number."""
        sizes = [int.from_bytes(size, "little") for size in self.exchange(len(mine).to_bytes(8, "little"))]
        padded = self.exchange(mine.ljust(max(sizes), b"\0"))
        return [data[:size] for data, size in zip(padded, sizes)]

    def meet(self, mine: typing.Any = None) -> list[typing.Any]:
        """Brings an object of each rank to all ranks, as torch.distributed does: without the deadline of the library.

        A rank may work alone before it comes here for longer than the deadline, such as while it reads files.

        Raises:
            GeminiError: A rank has ended.
        """
        try:
            with self.on_gpu():
                return gather_objects(self.process_group, mine)
        except RuntimeError:
            self.exchange(b"\0")  # which says what has become of the other rank
            raise

    def together(self) -> typing.ContextManager[None]:
        """A context manager: an exception within it on one rank is one on all of them, which meet at its end."""
        return fail_together(self.meet, "rank")

    def on_any(self, flags: typing.Sequence[bool]) -> list[bool]:
        """Which of some flags are set on any rank."""
        return [any(flag) for flag in zip(*self.exchange(bytes(flags)))] if flags else []

    def check_layout(self, what: str, lines: typing.Sequence[str]) -> None:
        """Raises GeminiError unless all ranks have the same lines, which describe a model or an optimizer."""
        text = "\n".join(lines).encode()
        digest = hashlib.sha256(text).digest()
        if len(set(self.exchange(digest))) == 1:
            return
        texts = [one.decode(errors="replace").split("\n") for one in self.exchange_any(text)]
        for rank, other in enumerate(texts):
            for i in range(max(len(other), len(texts[0]))):
                here, there = (some[i] if i < len(some) else "nothing" for some in (texts[0], other))
                if here != there:
                    raise GeminiError(
                        f"ranks have different {what}: rank 0 has {here}, rank {rank} has {there}", "PEER"
                    )

    # ---- models
    def refuse_gradient(self, param: torch.nn.Parameter, name: str) -> None:
        """Raises GeminiError if a parameter that is not prepared yet has a gradient."""
        with internals.plain():
            if internals.get_grad(param) is not None:
                raise GeminiError(
                    f"parameter {name} has a gradient from before prepare(), and on several ranks gradients come from "
                    "backward passes after it, of which all ranks make their part: call zero_grad() before"
                )

    def check_model(self, records: typing.Mapping[str, Record]) -> None:
        """Raises GeminiError unless the parameters of a model are the same, and at the same places, on all ranks."""
        self.check_layout(
            "models",
            [
                f"parameter {name} of {tuple(one.place.shape)}, {str(one.place.dtype).removeprefix('torch.')}, "
                f"{'trained' if one.param.requires_grad else 'frozen'}, at byte {one.place.offset}"
                f"{f', {one.division.where()}' if one.division is not None else ''}"
                for name, one in records.items()
            ],
        )

    def share_buffers(self, module: torch.nn.Module) -> None:
        """Gives the buffers of rank 0 to all ranks, as DistributedDataParallel does.

        As objects, which any process group takes: one of NCCL has no tensors of the CPU, one of gloo few of a GPU.
        """
        for buffer in module.buffers():
            if buffer.numel() and not buffer.is_meta and not hasattr(buffer, "_gm_place"):
                values = [buffer.detach().cpu().contiguous() if self.rank == 0 else None]
                with self.on_gpu():
                    dist.broadcast_object_list(
                        values, dist.get_global_rank(self.process_group, 0), group=self.process_group
                    )
                if self.rank:
                    buffer.data.copy_(typing.cast(torch.Tensor, values[0]))

    def slices_of_both(self, place: Place, state: Place) -> typing.Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Acquires this rank's slices of a state on the host, for reading and writing, one piece after another.

        Yields:
            A copy of the same elements of the parameter, and the piece, both of one dimension; the piece is valid until
            the next one.
        """
        assert isinstance(place, SlicedPlace)
        for first, last in place.parts(0, place.elements, PIECE_BYTES // 4):
            values = torch.empty(last - first, dtype=place.dtype, device="cpu")
            for _, piece in place.host_pieces(abi.READ, first, last):
                values.copy_(piece)
            for _, piece in state.host_pieces(abi.READ_WRITE, first, last):
                yield values, piece

    # ---- gradients
    def backward_begins(self) -> None:
        """A backward pass adds to the gradients of the passes since the last step, or to zeros if they were dropped.

        Raises:
            GeminiError: Only some were dropped, or none after a step; or see Parts.begin().
        """
        if self.parts:
            self.parts.begin()
        self.stored.clear()
        trained = self.trained()
        kept = [record for record in trained if record.has_grad]
        if kept and (self.taken or len(kept) < len(trained)):
            raise GeminiError(
                f"the gradient of parameter {kept[0].name} was not dropped "
                f"{'after the last step' if self.taken else 'together with others'}: on several ranks call "
                "optimizer.zero_grad(), for all parameters, after each step"
            )
        if not kept:
            self.session.arenas.gradients_zero()
            self.absent.clear()
            self.taken = False

    def trained(self) -> list[Record]:
        """The records of parameters that get gradients, in the same order on all ranks."""
        records = {record: None for model in self.session.models for record in model.records.values()}
        return [record for record in records if record.hook is not None and record.trainable]

    def store(self, record: Record, values: torch.Tensor) -> None:
        """Stores this rank's gradient, a part of the mean over all ranks, which the library adds."""
        session, place = self.session, record.grad_place
        if record in self.stored:
            raise GeminiError(
                f"parameter {record.name} gets a second gradient in one backward pass, which ranks cannot add: modules "
                "that reentrant checkpoints use several times are not supported on several ranks"
            )
        if record.scale != 1.0:
            raise GeminiError(
                f"parameter {record.name} gets another gradient after its gradient was clipped or scaled: on several "
                "ranks clip after the last backward pass"
            )
        if place.elements:
            self.storing = True
            try:
                mode = abi.READ_WRITE if record.has_grad else abi.WRITE
                use = session.holds.use(((place, 0, place.size_bytes, mode),), "grad")
                if not session.brackets.op_open:
                    session.brackets.op_begin(use.forward_name)
                stream = session.holds.stream()
                session.holds.acquire_use(use, stream)
                try:
                    if record.has_grad:  # of an earlier pass: what has been added over the ranks is zero here
                        if not self.idle:
                            place.tensor.add_(values / self.count)
                    elif self.idle:
                        place.tensor.zero_()
                    else:
                        torch.div(values, self.count, out=place.tensor)
                finally:
                    session.holds.release_use(use, stream)
            finally:
                self.storing = False
            self.complete(record)
        if not self.idle:
            self.absent.discard(record)
        elif not record.has_grad:
            self.absent.add(record)
        record.has_grad, record.norm = True, None
        record.spent = record.early
        self.stored[record] = None

    def complete(self, record: Record) -> None:
        """Tells the library that the gradient of this pass is complete, also one that is zero."""
        manager, tensor = self.session.manager, record.grad_place.object
        if not record.grad_place.elements:
            return
        state = manager.tensor_info(tensor).state
        if state == STATES["free"]:
            manager.tensor_state_set(tensor, "hold")
        if state != STATES["ready_for_reduce"]:
            manager.tensor_state_set(tensor, "ready_for_reduce")

    def backward_ends(self) -> None:
        """Gradients that this rank has not made are zeros."""
        for record in self.trained():
            if record not in self.stored:
                self.complete(record)
                if not record.has_grad:
                    record.has_grad, record.norm = True, None
                    self.absent.add(record)
        self.stored.clear()

    def norm(self, record: Record) -> torch.Tensor:
        """The norm of a gradient over all ranks, times its factor."""
        session, place, out = self.session, record.grad_place, ctypes.c_double()
        session.brackets.op_end()
        if place.elements:
            access = Place.access(place, abi.READ)
            session.lib.norm(session.handle, ctypes.byref(access), DTYPES[place.dtype], session.holds.stream(), out)
        return torch.tensor(out.value * record.scale, dtype=torch.float32, device=session.device)

    # ---- steps
    def check_options(self, groups: typing.Sequence[dict[str, typing.Any]]) -> None:
        """Raises GeminiError unless the numbers among the options of an optimizer, such as its learning rate, are the
        same on all ranks.
        """
        self.check_layout(
            "options of the optimizer",
            [
                f"{key}={value.tolist() if isinstance(value, torch.Tensor) else value} in group {number}"
                for number, group in enumerate(groups)
                for key, value in group.items()
                if isinstance(value, (bool, int, float, tuple, torch.Tensor))
            ],
        )

    def present(self, records: typing.Sequence[Record]) -> set[Record]:
        """The records whose gradient some rank has made, which a step updates."""
        self.taken = True
        flags = self.on_any([record.has_grad and record not in self.absent for record in records])
        return {record for record, flag in zip(records, flags) if flag}

    def elements(self, arena: int, itemsize: int) -> int:
        """The elements of an arena, all of which an update takes."""
        return self.session.manager.arena_info(arena).size_bytes // itemsize

    def part_elements(self, arena: int, itemsize: int) -> int:
        """The least elements of an arena that an update in the backward pass takes.

        They are as many chunks as there are owners in a replica, or more: this rank's slices of these fill chunks of
        their own, so that gradients that come next do not wait until a worker has read those of this part. They are
        whole buckets, too.
        """
        manager, owners = self.session.manager, self.session.arenas.sliced[arena]
        bucket_chunks = int(manager.group_stats(owners.group)["bucket_chunks"])
        return math.lcm(owners.shard_size, bucket_chunks) * manager.config.chunk_bytes // itemsize
