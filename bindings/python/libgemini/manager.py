"""A manager of the C library as a Python object: arenas, acquire and release, operators, updates, statistics.

It needs neither torch nor NumPy. Memory is given as objects with Python's buffer protocol, over which
numpy.frombuffer() makes arrays without a copy.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import ctypes
import fractions
import functools
import logging
import os
import re
import types
import typing

from . import abi
from .updates import Calls, Span, buffer
from .views import CPU, CUDA, View

logger = logging.getLogger("libgemini")
_LEVELS = {1: logging.ERROR, 2: logging.WARNING, 3: logging.INFO, 4: logging.DEBUG}
# "": 1, "K": 10**3, "KI": 2**10, and so on
_UNITS = {"": 1, **{c + i: (1024 if i else 1000) ** n for n, c in enumerate("KMGTP", 1) for i in ("", "I")}}


def parse_bytes(value: int | str, what: str = "size") -> int:
    """A size as a number of bytes.

    Args:
        value: Bytes, or a text such as "24GiB" (2**30 bytes), "24 GB" (10**9 bytes) or "1.5T": a number and a unit from
            K to P, in upper or lower case. What a fraction leaves below a byte is cut off.
        what: What an error calls the value.

    Returns:
        The number of bytes.

    Raises:
        ValueError: The value is neither, or not from 0 to 2**64 - 1.
    """
    match = None
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*((?:[KMGTP]I?)?)B?\s*", value.upper())
    if match:
        size = int(fractions.Fraction(match.group(1)) * _UNITS[match.group(2)])
    elif isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        raise ValueError(
            f'{what} is {value!r}: want a number of bytes, or a text such as "24GiB" (by 1024: KiB, MiB, GiB, TiB, '
            'PiB), "24GB" (by 1000: KB, MB, GB, TB, PB) or "1.5 TiB"'
        )
    if not 0 <= size < 2**64:
        raise ValueError(f"{what} is {value!r}: want 0 to 2**64 - 1 bytes")
    return size


def bytes_text(count: float) -> str:
    """A number of bytes for people: "1.5 GiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


@abi.LogFn
def _log(_: int | None, level: int, message: bytes) -> None:
    logger.log(_LEVELS.get(level, logging.INFO), "%s", message.decode(errors="replace"))


def _log_level() -> int:
    """The most verbose level that Python's logger takes now: warnings at least, which the watchdog sends."""
    return max(level for level, name in _LEVELS.items() if level <= 2 or logger.isEnabledFor(name))


KINDS = {"param": 0, "grad": 1, "master": 2, "momentum": 3, "variance": 4, "other": 5}
MODES = {"read": abi.READ, "write": abi.WRITE, "read_write": abi.READ_WRITE}
PHASES = {
    "none": abi.PHASE_NONE,
    "forward": abi.PHASE_FORWARD,
    "backward": abi.PHASE_BACKWARD,
    "update": abi.PHASE_UPDATE,
}
DTYPES = {"f32": abi.DTYPE_F32, "bf16": abi.DTYPE_BF16, "f16": abi.DTYPE_F16, "f64": abi.DTYPE_F64}
STATES = {"free": 0, "hold": 1, "hold_after_fwd": 2, "hold_after_bwd": 3, "compute": 4, "ready_for_reduce": 5}
_TIERS = {name: number for number, name in enumerate(abi.TIERS)}
_File = typing.Union[int, "typing.IO[bytes]"]


def _code(table: dict[str, int], value: str | int, what: str) -> int:
    """The library's number for a name; a number as it is."""
    if isinstance(value, str):
        if value not in table:
            raise ValueError(f"{what} is {value!r}: want one of {', '.join(table)}")
        return table[value]
    return value


@contextlib.contextmanager
def _ends(end: typing.Callable[[], object]) -> typing.Iterator[None]:
    """Calls a function when the block ends. If the block raised, that exception goes on, even if the function fails."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(abi.GeminiError):
            end()
        raise
    end()


def _descriptor(file: _File) -> int:
    return file if isinstance(file, int) else file.fileno()


class Range:
    """A part of an arena or a tensor, and what it is wanted for. Manager.range() makes one.

    Attributes:
        object: The arena's or tensor's handle.
        offset_bytes: Where it begins in that.
        size_bytes: Its length.
        mode: "read", "write" or "read_write".
        tier: Where it is wanted: "device", "host" or "file".
        address: Its first byte, while it is acquired; otherwise None. On the device it is the same each time.
    """

    __slots__ = ("object", "offset_bytes", "size_bytes", "mode", "tier", "address", "_device", "_stream", "_wait")

    def __init__(
        self,
        object: int,
        offset_bytes: int,
        size_bytes: int,
        mode: str,
        tier: str,
        device: tuple[int, int] = (CPU, 0),
    ) -> None:
        self.object = object
        self.offset_bytes = offset_bytes
        self.size_bytes = size_bytes
        self.mode = mode
        self.tier = tier
        self.address: int | None = None
        self._device = device  # as DLPack names it
        # A CUDA stream's number, if the range was acquired on one: only its work sees the bytes before _wait().
        self._stream: int | None = None
        self._wait: typing.Callable[[], None] | None = None

    def buffer(self) -> ctypes.Array[ctypes.c_char]:
        """The bytes, valid until the range is released. Not for a GPU's memory.

        Returns:
            An object with the buffer protocol, such as numpy.frombuffer() takes.

        Raises:
            GeminiError: The range is not acquired.
        """
        if self.address is None:
            raise abi.GeminiError(
                "the range is not acquired, and its bytes may be in another tier: use it within the with block"
            )
        return buffer(self.address, self.size_bytes)

    def view(self, dtype: str = "uint8", shape: typing.Sequence[int] | None = None) -> View:
        """The bytes as an array that NumPy, CuPy, PyTorch and JAX take without a copy.

        Args:
            dtype: Of the elements: a name of NumPy's such as "float32", or "bfloat16".
            shape: Elements by dimension, rows first, which take all of the range. None: one dimension.

        Returns:
            What numpy.asarray(), cupy.asarray(), torch.from_dlpack() and jax.dlpack.from_dlpack() make an array of,
            which may be used until the range is released: on the host and the simulated device, or on the range's GPU.

        Raises:
            GeminiError: The range is not acquired.
            ValueError: There is no such dtype, or the shape takes other than all of the range.
        """
        if self.address is None:
            raise abi.GeminiError(f"{self} is not acquired, and its bytes may be in another tier")
        return View(self, dtype, shape)

    def __repr__(self) -> str:
        return f"Range({self.object:#x}, {self.offset_bytes}, {self.size_bytes}, {self.mode!r}, {self.tier!r})"


class Manager:
    """One device, one set of budgets, one sequence of iterations: gemini_manager_t.

    close(), or the end of a with block, ends it. Handles of arenas, tensors and streams are numbers. A method
    raises GeminiError where the C library refuses; its status says why, and nothing has changed. Methods may be called
    from any thread, unless they say otherwise.

    This reads 20 MiB of parameters, of which 8 MiB fit on the device at the same time:

        with Manager(device_memory="8MiB", host_memory="32MiB") as manager:
            weights = manager.arena("param", element_bytes=4)
            offsets = [manager.take(weights, 4 << 20) for _ in range(5)]
            with manager.iteration():
                for number, offset in enumerate(offsets):
                    with manager.operator(f"layer {number}"):
                        with manager.acquired(manager.range(weights, "read", offset, 4 << 20)) as (buffer,):
                            numpy.frombuffer(buffer, numpy.float32).sum()

    Attributes:
        lib: The C library's functions, for what has no method here.
        handle: The manager's handle; 0 once it was closed.
        config: The gemini_config_t that it was opened with.
    """

    def __init__(
        self,
        *,
        placement: str = "auto",
        device_memory: int | str,
        host_memory: int | str = 0,
        file_memory: int | str = 0,
        file: str | os.PathLike[str] | None = None,
        cuda: bool = False,
        device_ordinal: int = 0,
        device_margin: int | str = 0,
        chunk_size: int | str = 0,
        warmup_iterations: int = 1,
        update_threads: int = 0,
        strict: bool = False,
        static_param_fraction: float = 0.0,
        static_optim_fraction: float = 0.0,
        checkpoint_name: str | None = None,
        watchdog: float = 0.0,
        file_engine: str = "auto",
        cache_policy: str = "lru",
    ) -> None:
        """Opens a manager. Sizes are bytes, or texts such as "24GiB".

        It logs to Python's logger "libgemini", as verbosely as that is set when the manager opens, warnings at least.

        Args:
            placement: "auto": by predicted step time. "cuda": as much as fits stays on the device. "cpu": everything
                lives below the device and visits it. "static": the two fractions stay on the device.
            device_memory: The budget of the device, for model data and everything else.
            host_memory: The budget of page-locked host memory. 0: four fifths of what the process may still take.
            file_memory: The budget of files. 0: no file tier.
            file: The directory of these files, or several with ":" between them.
            cuda: Use a GPU. Otherwise the simulated device, which is host memory.
            device_ordinal: Which GPU; 0 on the simulated device.
            device_margin: Bytes of device_memory that stay unused.
            chunk_size: Bytes of a chunk, a power of two from 64 KiB to 1 GiB. 0: the library chooses.
            warmup_iterations: Iterations that are recorded before the first plan, at most 1000.
            update_threads: Workers for updates and norms on the host, at most 256. 0: the library chooses.
            strict: Unmap each chunk as soon as it leaves the device, so that a stray access faults. For tests.
            static_param_fraction: For "static": the share of parameters on the device, from 0 to 1.
            static_optim_fraction: For "static": the share of master copies and moments on the device, from 0 to 1.
            checkpoint_name: Keep the files under this name, for checkpoint() and resume(). Needs chunk_size.
            watchdog: Seconds. A call that waits longer is reported in the log "libgemini", with what it waits for and
                what dump() says. 0: never.
            file_engine: "auto", "uring" or "threads".
            cache_policy: Which chunk of operators chosen at run time leaves the device first. "lru": the one used
                longest ago. "frequent": the one used in the fewest iterations. "least-stale": the one whose place in
                the iteration has just passed.

        Raises:
            GeminiError: The library refuses a value, or cannot reserve memory or files.
            ValueError: A value is not one of those above.
        """
        if placement not in abi.PLACEMENTS:
            raise ValueError(f"placement is {placement!r}: want one of {', '.join(abi.PLACEMENTS)}")
        if file_engine not in abi.FILE_ENGINES:
            raise ValueError(f"file_engine is {file_engine!r}: want one of {', '.join(abi.FILE_ENGINES)}")
        if cache_policy not in abi.CACHE_POLICIES:
            raise ValueError(f"cache_policy is {cache_policy!r}: want one of {', '.join(abi.CACHE_POLICIES)}")
        if not 0 <= watchdog < 2**33:
            raise ValueError(f"watchdog is {watchdog!r}: want seconds, or 0 for none")
        self.lib = abi.library()
        self.config = abi.Config(
            placement=abi.PLACEMENTS[placement],
            device=abi.DEVICE_CUDA if cuda else abi.DEVICE_SIMULATED,
            device_ordinal=device_ordinal,
            flags=abi.CONFIG_STRICT if strict else 0,
            warmup_iterations=warmup_iterations,
            update_threads=update_threads,
            device_bytes=parse_bytes(device_memory, "device_memory"),
            device_margin_bytes=parse_bytes(device_margin, "device_margin"),
            host_bytes=parse_bytes(host_memory, "host_memory"),
            file_bytes=parse_bytes(file_memory, "file_memory"),
            chunk_bytes=parse_bytes(chunk_size, "chunk_size"),
            static_param_fraction=static_param_fraction,
            static_optim_fraction=static_optim_fraction,
            file_dir=str(file).encode() if file else None,
            log_level=_log_level(),
            log_fn=_log,
            file_engine=abi.FILE_ENGINES[file_engine],
            cache_policy=abi.CACHE_POLICIES[cache_policy],
            checkpoint_name=checkpoint_name.encode() if checkpoint_name else None,
            watchdog_ns=round(watchdog * 1e9),
        )
        handle = ctypes.c_uint64()
        self._cuda = cuda
        self._calls = Calls(self.lib, cuda)
        self._comms: list[abi.Comm] = []  # of groups: functions of Python's that the library calls
        self.handle = 0
        self._element_bytes: dict[int, int] = {}  # by arena: the C library has no call that returns it
        self.lib.manager_open(self.config, handle)
        self.handle = handle.value
        self._calls.handle = self.handle

    @property
    def handle(self) -> int:
        """The library's handle. 0: the manager is closed.

        Raises:
            GeminiError: Status "STATE": a function of update() or stream_call() asks for it, to call the manager.
        """
        self._calls.refuse_inside()
        return self._handle

    @handle.setter
    def handle(self, handle: int) -> None:
        self._handle = handle

    def close(self) -> None:
        """Finishes updates and frees everything. A second call does nothing.

        No other method may run at the same time.

        Raises:
            GeminiError: Status "BUSY": something is acquired, and nothing was closed. Otherwise an update or queued
                work has failed, and everything was freed.
        """
        handle, self.handle = self.handle, 0
        if not handle:
            return
        try:
            self.lib.manager_close(handle)
        except abi.GeminiError as error:
            if error.status == "BUSY":  # nothing was closed
                self.handle = handle
                raise
            self._calls.closed()
            raise
        self._calls.closed()
        self._calls.check()

    def __enter__(self) -> Manager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        try:
            self.close()
        except abi.GeminiError as failed:
            if error is None or failed.status == "BUSY":
                raise  # else the block's own error is raised: it says more

    def budget_set(self, tier: str, size: int | str) -> None:
        """Changes a tier's budget. Blocks while chunks leave a tier that shrinks.

        Args:
            tier: "device", "host" or "file".
            size: Bytes, or a text such as "24GiB".

        Raises:
            GeminiError: What the tier must keep does not fit, or a chunk cannot leave. The old budget stays.
        """
        self.lib.budget_set(self.handle, _code(_TIERS, tier, "tier"), parse_bytes(size, "size"))

    # ---- arenas and tensors
    def arena(
        self,
        kind: int | str,
        *,
        name: str | None = None,
        element_bytes: int = 1,
        like: int = 0,
        reuse: int = 0,
        capacity: int | str = 0,
        group: int = 0,
        zero_stage: int = 0,
        dtype: str | int = 0,
        grows: bool = False,
    ) -> int:
        """Reserves a range of device addresses, in which tensors never move. Bytes that nobody has written are zero.

        Args:
            kind: "param", "grad", "master", "momentum", "variance" or "other".
            name: At most 63 bytes. None: after its kind.
            element_bytes: 1, 2, 4, 8 or 16.
            like: An arena whose layout in elements this one follows; 0: none.
            reuse: For "grad": an arena of parameters whose bytes the gradients take; 0: none.
            capacity: Bytes of addresses, which cost no memory. 0: the sum of the three budgets.
            group: For "param": a group of ranks, over which the arena is sharded; 0: none.
            zero_stage: With group: what ranks divide, abi.ZERO_STATES, ZERO_GRADIENTS or ZERO_PARAMS; 0: the library
                chooses.
            dtype: For "grad" that follows a sharded arena: "f32", "bf16", "f16" or "f64", in which ranks add.
            grows: Whether what iterations access in it grows from one to the next, as a cache of keys and values does:
                that is no departure of iterations that write nowhere else.

        Returns:
            The arena's handle.

        Raises:
            GeminiError: A value is refused, or there is no such range of addresses.
        """
        config = abi.ArenaConfig(
            kind=_code(KINDS, kind, "kind"),
            element_bytes=element_bytes,
            flags=abi.ARENA_GROWS if grows else 0,
            capacity_bytes=parse_bytes(capacity, "capacity"),
            like=like,
            reuse=reuse,
            name=name.encode() if name else None,
            group=group,
            zero_stage=zero_stage,
            dtype=_code(DTYPES, dtype, "dtype"),
        )
        arena = ctypes.c_uint64()
        self.lib.arena_create(self.handle, config, arena)
        self._element_bytes[arena.value] = element_bytes or 1
        return arena.value

    def group_id(self, ranks: int, transport: int = abi.TRANSPORT_SHARED) -> bytes:
        """Makes the name of a new group of ranks. This process becomes rank 0, and brings the name to the others.

        Args:
            ranks: How many there will be.
            transport: abi.TRANSPORT_SHARED: processes of one machine, on the simulated device. abi.TRANSPORT_NCCL:
                processes with a GPU each.

        Returns:
            The name, for group_open() of every rank.

        Raises:
            GeminiError: There is no memory that processes can share, or no NCCL, or a value is out of range.
        """
        out = abi.GroupId()
        self.lib.group_id_make(transport, ranks, out)
        return bytes(out.bytes)

    def group_open(
        self,
        name: bytes | None,
        rank: int,
        ranks: int,
        deadline: float = 0.0,
        rank_order: bool = False,
        shard_ranks: int = 0,
        bucket_bytes: int = 0,
        comms: typing.Sequence[abi.Comm] = (),
        register: bool = False,
    ) -> int:
        """Joins a group. Blocks until all ranks have.

        Args:
            name: What group_id() of rank 0 has returned; None: comms say how ranks exchange bytes.
            rank: Of this process, from 0.
            ranks: How many there are.
            deadline: Seconds that the library waits for a rank that makes no progress. 0: 10 seconds, over NCCL 60.
            rank_order: Over NCCL: add in fp32 and in the order of ranks, with the same bits in each run; slower.
                Otherwise NCCL adds in the values' dtype and in an order of its own. Over shared memory sums are always
                in fp32 and in the order of ranks.
            shard_ranks: How many ranks divide arenas among themselves, a divisor of ranks: the group consists of
                replicas of so many ranks, each with all bytes. 0: all ranks.
            bucket_bytes: Gradients of neighbouring chunks, so many bytes of them, are added together; the same on all
                ranks. Less than two chunks: each alone.
            comms: The caller's own functions, three tables, for gathers, sums and exchanges; see gemini_comm_t. Their
                functions end their waits and choose the order of sums themselves, so deadline and rank_order are left
                out. The manager keeps the structs.
            register: Over NCCL 2.19 and later, and over comms: register the frames into which chunks are gathered.

        Returns:
            The group's handle. It ends with the manager, or by group_close().

        Raises:
            GeminiError: Status "PEER": ranks are missing at the deadline; the message names them.
        """
        tables = (ctypes.POINTER(abi.Comm) * len(comms))(*map(ctypes.pointer, comms))
        config = abi.GroupConfig(
            flags=(abi.GROUP_RANK_ORDER if rank_order else 0) | (abi.GROUP_REGISTER if register else 0),
            rank=rank,
            ranks=ranks,
            id=None if name is None else ctypes.pointer(abi.GroupId.from_buffer_copy(name)),
            deadline_ns=round(deadline * 1e9),
            shard_ranks=shard_ranks,
            bucket_bytes=bucket_bytes,
            comms=tables if comms else None,
        )
        group = ctypes.c_uint64()
        self._comms.extend(comms)  # which have the functions that the library calls
        self.lib.group_open(self.handle, config, group)
        return group.value

    def group_close(self, group: int) -> None:
        """Leaves a group.

        Args:
            group: The group; 0 is accepted.

        Raises:
            GeminiError: Status "BUSY": an arena is sharded over it.
        """
        self.lib.group_close(self.handle, group)

    def group_exchange(self, group: int, mine: bytes | bytearray | memoryview, ranks: int) -> list[bytes]:
        """Brings bytes of each rank to all ranks, which call it with the same number of bytes. Blocks until all have.

        Args:
            group: The group.
            mine: Of this rank.
            ranks: How many there are in the group.

        Returns:
            The bytes of each rank, in their order.

        Raises:
            GeminiError: Status "PEER": another rank has failed, or has not called it within the deadline.
        """
        size = len(mine)
        out = ctypes.create_string_buffer(max(1, size * ranks))
        self.lib.group_exchange(self.handle, group, bytes(mine), size, out)
        return [out.raw[rank * size : (rank + 1) * size] for rank in range(ranks)]

    def group_stats(self, group: int) -> dict[str, int]:
        """What a group has done so far.

        Args:
            group: The group.

        Returns:
            The fields of gemini_group_stats_t by name.

        Raises:
            GeminiError: Status "HANDLE": there is no such group.
        """
        stats = abi.GroupStats()
        self.lib.group_stats(self.handle, group, stats)
        names = [field[0] for field in stats._fields_]
        return {name: getattr(stats, name) for name in names if name not in ("struct_size", "reserved")}

    def slices(self, range: Range) -> list[tuple[int, int]]:
        """The parts of a range that this rank keeps, which can be acquired on the host; of an arena that is not
        sharded, all of it.

        Args:
            range: Its tier and mode do not matter.

        Returns:
            Where each part begins in the object, and its length, in bytes.

        Raises:
            GeminiError: The range is not within the object.
        """
        where = abi.Access(range.object, range.offset_bytes, range.size_bytes, abi.READ, abi.TIER_HOST, None)
        at, end = range.offset_bytes, range.offset_bytes + range.size_bytes
        offset, size, parts = ctypes.c_uint64(), ctypes.c_uint64(), []
        while at < end:
            self.lib.slice_next(self.handle, where, at, offset, size)
            if not size.value:
                break
            parts.append((offset.value, size.value))
            at = offset.value + size.value
        return parts

    def arena_destroy(self, arena: int) -> None:
        """Drops an arena, its tensors and its bytes. Blocks until copies and updates that touch it are done.

        Args:
            arena: The arena; 0 is accepted.

        Raises:
            GeminiError: Status "BUSY": a part is acquired or pinned, or another arena follows it.
        """
        self.lib.arena_destroy(self.handle, arena)
        self._element_bytes.pop(arena, None)

    def arena_info(self, arena: int) -> abi.ArenaInfo:
        """What an arena is. tier_bytes() says where its bytes are.

        Args:
            arena: The arena.

        Returns:
            gemini_arena_info_t. Sizes are in bytes.

        Raises:
            GeminiError: Status "HANDLE": there is no such arena.
        """
        info = abi.ArenaInfo()
        self.lib.arena_info(self.handle, arena, info)
        return info

    def take(self, arena: int, size_bytes: int) -> int:
        """Takes the next bytes of an arena as a plain range.

        Args:
            arena: The arena.
            size_bytes: A multiple of its element_bytes, not 0.

        Returns:
            The offset in bytes, a multiple of 256 elements.

        Raises:
            GeminiError: The arena has no such bytes left.
        """
        offset = ctypes.c_uint64()
        self.lib.arena_take(self.handle, arena, size_bytes, offset)
        return offset.value

    def tensor(self, arena: int, name: str, size_bytes: int, offset: int | None = None) -> int:
        """Registers a tensor, whose name messages and traces have.

        Args:
            arena: An arena that follows no other.
            name: 1 to 127 bytes, unique in the manager.
            size_bytes: A multiple of the arena's element_bytes, not 0.
            offset: Bytes; a place in ranges that were taken. None: the arena's next free place.

        Returns:
            The tensor's handle.

        Raises:
            GeminiError: Status "EXISTS": the name is taken; or a value is refused.
        """
        out = ctypes.c_uint64()
        at = abi.OFFSET_NEXT if offset is None else offset
        self.lib.tensor_register(self.handle, arena, name.encode(), size_bytes, at, out)
        return out.value

    def tensor_unregister(self, tensor: int) -> None:
        """Forgets a tensor. Its bytes stay in the arena.

        Args:
            tensor: The tensor; 0 is accepted.

        Raises:
            GeminiError: Status "BUSY": it is acquired.
        """
        self.lib.tensor_unregister(self.handle, tensor)

    def tensor_find(self, name: str) -> int:
        """Finds a tensor by its name.

        Args:
            name: The name.

        Returns:
            The tensor's handle.

        Raises:
            GeminiError: Status "NOT_FOUND": there is none.
        """
        out = ctypes.c_uint64()
        self.lib.tensor_find(self.handle, name.encode(), out)
        return out.value

    def tensor_counterpart(self, tensor: int, arena: int) -> int:
        """Finds the tensor of the same elements in another arena, such as a parameter's gradient.

        Args:
            tensor: The tensor.
            arena: An arena that follows or reuses the tensor's arena.

        Returns:
            The other tensor's handle.

        Raises:
            GeminiError: There is no such tensor or arena, or the arena follows another one.
        """
        out = ctypes.c_uint64()
        self.lib.tensor_counterpart(self.handle, tensor, arena, out)
        return out.value

    def tensor_state_set(self, tensor: int, state: str) -> None:
        """Moves a tensor to another state.

        Args:
            tensor: The tensor.
            state: "hold"; "ready_for_reduce": its gradient is complete; or "free": its bytes are dropped.

        Raises:
            GeminiError: Status "STATE": docs/states.md does not allow the transition; nothing has changed.
            ValueError: There is no such state.
        """
        self.lib.tensor_state_set(self.handle, tensor, _code(STATES, state, "state"))

    def tensor_info(self, tensor: int) -> abi.TensorInfo:
        """What a tensor is, and its state. tier_bytes() says where its bytes are.

        Args:
            tensor: The tensor.

        Returns:
            gemini_tensor_info_t. Sizes are in bytes.

        Raises:
            GeminiError: Status "HANDLE": there is no such tensor.
        """
        info = abi.TensorInfo()
        self.lib.tensor_info(self.handle, tensor, info)
        return info

    def tier_bytes(self, object: int, offset: int = 0, size_bytes: int = 0) -> dict[str, int]:
        """Where the bytes of a range are.

        Args:
            object: A tensor or an arena.
            offset: Where the range begins in it, in bytes.
            size_bytes: Length in bytes. 0, with offset 0: all of the object.

        Returns:
            By tier ("device", "host", "file"), the bytes whose newest copy is there. Bytes that nobody has written are
            nowhere. Chunks that other threads move meanwhile may be counted twice, or not at all.

        Raises:
            GeminiError: Status "HANDLE": there is no such object; "INVALID": the range is not inside it.
        """
        out, count = {}, ctypes.c_uint64()
        for number, name in enumerate(abi.TIERS):
            access = abi.Access(object, offset, size_bytes, tier=number)
            self.lib.tier_bytes(self.handle, ctypes.byref(access), count)
            out[name] = count.value
        return out

    # ---- iterations, phases, operators
    def iteration_begin(self, label: int = 0) -> None:
        """Begins an iteration, which is one training step, or another pass through the model.

        Args:
            label: Says of which sort the iteration is, where the program knows it: each sort is expected to be like
                the ones of its label before, whatever came in between.

        Raises:
            GeminiError: Status "STATE": one is open.
        """
        self.lib.iteration_begin_with(self.handle, label)

    def iteration_end(self) -> None:
        """Ends the iteration. After warm-up the plan is made here.

        Raises:
            GeminiError: Status "OOM_DEVICE": an operator's working set does not fit on the device. The iteration has
                ended, and the next ones run without a plan. Status "BUSY": arenas are sharded, and another thread
                exchanges values of their ranks. The iteration is open: end it again.
        """
        self.lib.iteration_end(self.handle)

    @contextlib.contextmanager
    def iteration(self, label: int = 0) -> typing.Iterator[None]:
        """A context manager: an iteration. An exception in it ends the iteration, too.

        Args:
            label: As of iteration_begin().
        """
        self.iteration_begin(label)
        with _ends(self.iteration_end):
            yield

    def phase_set(self, phase: str) -> None:
        """Says which phase of the iteration begins. Between operators.

        Args:
            phase: "none", "forward", "backward" or "update".

        Raises:
            GeminiError: Status "STATE": no iteration is open, or an operator is.
            ValueError: There is no such phase.
        """
        self.lib.phase_set(self.handle, _code(PHASES, phase, "phase"))

    def op_begin(self, name: str, stream: int = abi.STREAM_CALLER, chosen: bool = False) -> None:
        """Opens an operator.

        Args:
            name: 1 to 127 bytes; the same operator has the same name in each iteration.
            stream: Where its work is queued.
            chosen: Whether it is chosen at run time, as an expert is by a router: other iterations of its kind may
                leave it out, and no plan knows it. See gemini/chosen.h.

        Raises:
            GeminiError: Status "STATE": no iteration is open, or an operator is.
        """
        begin = self.lib.op_begin_chosen if chosen else self.lib.op_begin
        begin(self.handle, name.encode(), stream)

    def op_end(self) -> None:
        """Closes the operator. What was acquired in it may be released later."""
        self.lib.op_end(self.handle)

    @contextlib.contextmanager
    def operator(self, name: str, stream: int = abi.STREAM_CALLER, chosen: bool = False) -> typing.Iterator[None]:
        """A context manager: an operator, which ends also after an exception.

        Args:
            name: As of op_begin().
            stream: As of op_begin().
            chosen: As of op_begin().

        Raises:
            GeminiError: As op_begin().
        """
        self.op_begin(name, stream, chosen)
        with _ends(self.op_end):
            yield

    # ---- acquire and release
    def range(
        self, object: int, mode: str = "read_write", offset: int = 0, size_bytes: int = 0, tier: str = "device"
    ) -> Range:
        """Names a part of an arena or a tensor, for the methods below. Nothing is acquired.

        Args:
            object: An arena or a tensor.
            mode: "read"; "read_write"; or "write": every byte will be written, so the old bytes need not come.
            offset: Bytes from the beginning of the object.
            size_bytes: Length in bytes. 0: to the end of the tensor, or of what is used of the arena now.
            tier: "device" or "host".

        Returns:
            The range, which acquire() and the other methods take.

        Raises:
            GeminiError: There is no such object.
            ValueError: The mode or tier is not one of those above; the offset is below 0 or behind the end; or the
                length is below 0.
        """
        _code(MODES, mode, "mode"), _code(_TIERS, tier, "tier")
        given = size_bytes
        if not size_bytes:
            info = self.arena_info(object) if object in self._element_bytes else self.tensor_info(object)
            size_bytes = info.size_bytes - offset
        if not 0 <= offset < 2**64 or not 0 <= size_bytes < 2**64:  # which ctypes would cut off
            raise ValueError(f"offset is {offset} and size_bytes {given}: want a part of the object")
        device = (CUDA, self.config.device_ordinal) if self._cuda and tier == "device" else (CPU, 0)
        return Range(object, offset, size_bytes, mode, tier, device)

    @staticmethod
    def _accesses(ranges: typing.Sequence[Range], tier: str | None = None) -> typing.Any:
        return (abi.Access * len(ranges))(
            *(
                abi.Access(
                    object=one.object,
                    offset_bytes=one.offset_bytes,
                    size_bytes=one.size_bytes,
                    mode=MODES[one.mode],
                    tier=_code(_TIERS, tier or one.tier, "tier"),
                    ptr=one.address,
                )
                for one in ranges
            )
        )

    def acquire(self, *ranges: Range, stream: int = abi.STREAM_CALLER) -> None:
        """Makes ranges usable, all or none, and sets their address.

        On the device, work that is queued on the stream afterwards sees the bytes; on the host, and with the stream
        that is the caller itself, the call blocks until they are there.

        Args:
            *ranges: What range() returned; none of them is acquired.
            stream: The stream that the work will be queued on. By default the calling thread itself.

        Raises:
            GeminiError: Status "OOM_DEVICE" or "OOM_HOST": they do not fit beside what is acquired, pinned and
                allocated. "BUSY": one is acquired for writing in another tier. "IO": a file could not be read.
                "STATE": one of the ranges is acquired already; an update has failed; or a gradient has taken the bytes.
        """
        self._calls.check()
        for one in ranges:
            if one.address is not None:
                raise abi.GeminiError(f"{one} is acquired already: make another range of the same bytes")
        if len(set(ranges)) != len(ranges):
            raise abi.GeminiError("one range is given twice: make another range of the same bytes")
        accesses = self._accesses(ranges)
        native, wait = None, None
        if self._cuda and stream != abi.STREAM_CALLER:
            native = self.stream_native(stream) or 1  # 1: as DLPack and CUDA's array interface name the default stream
            wait = functools.partial(self.stream_synchronize, stream)
        self.lib.acquire(self.handle, accesses, len(ranges), stream)
        for one, access in zip(ranges, accesses):
            one.address, one._stream, one._wait = access.ptr, native, wait

    def release(self, *ranges: Range, stream: int = abi.STREAM_CALLER) -> None:
        """Ends the use of ranges, after the work that is queued on the stream so far.

        Args:
            *ranges: What acquire() was given.
            stream: The stream that uses them.

        Raises:
            GeminiError: Status "STATE": one of them is not acquired. None was released.
        """
        for one in ranges:
            if one.address is None:
                raise abi.GeminiError(f"{one} is not acquired")
        self.lib.release(self.handle, self._accesses(ranges), len(ranges), stream)
        for one in ranges:
            one.address, one._stream, one._wait = None, None, None

    @contextlib.contextmanager
    def acquired(
        self, *ranges: Range, stream: int = abi.STREAM_CALLER
    ) -> typing.Iterator[list[ctypes.Array[ctypes.c_char]]]:
        """A context manager: ranges are acquired within it, and released also after an exception.

        It gives a list with the bytes of each range, as Range.buffer() does, on the simulated device and for tier
        "host". For a GPU's memory it gives an empty list; Range.address is what kernels take.

        Args:
            *ranges: As of acquire().
            stream: As of acquire().

        Raises:
            GeminiError: As acquire().
        """
        self.acquire(*ranges, stream=stream)
        with _ends(lambda: self.release(*ranges, stream=stream)):
            here = not self._cuda or all(one.tier == "host" for one in ranges)
            yield [one.buffer() for one in ranges] if here else []

    def hint(self, *ranges: Range, tier: str) -> None:
        """Brings ranges to a tier soon, if it has free memory. Nothing leaves for them, except chunks of operators
        chosen at run time in an iteration that has such operators.

        Args:
            *ranges: What range() returned.
            tier: "device", "host" or "file".

        Raises:
            GeminiError: There is no such object.
            ValueError: There is no such tier.
        """
        self.lib.hint(self.handle, self._accesses(ranges, tier), len(ranges))

    def priority_set(self, *ranges: Range, priority: int) -> None:
        """Says how important it is that chunks of operators chosen at run time stay on the device.

        Args:
            *ranges: What range() returned; their chunks get the priority as a whole.
            priority: 0, which all have at first, to 255. Those with a lower one leave first.

        Raises:
            GeminiError: There is no such object, or priority is out of range.
        """
        self.lib.priority_set(self.handle, self._accesses(ranges, "device"), len(ranges), priority)

    def move(self, *ranges: Range, tier: str) -> None:
        """Moves the chunks of ranges to a tier now; others leave for them.

        Args:
            *ranges: What range() returned; their chunks move as a whole.
            tier: "device", "host" or "file".

        Raises:
            GeminiError: Status "BUSY": one of the chunks is acquired or pinned. "OOM_...": there is no room.
        """
        self.lib.move(self.handle, self._accesses(ranges, tier), len(ranges))

    def pin(self, range: Range) -> None:
        """Brings a range to the device and keeps it there until unpin(). Pins nest.

        Args:
            range: What range() returned.

        Raises:
            GeminiError: Status "OOM_DEVICE": it does not fit beside what is acquired, pinned and allocated.
        """
        self.lib.pin(self.handle, self._accesses([range]))

    def unpin(self, range: Range) -> None:
        """Ends one pin().

        Args:
            range: What pin() was given, or a range of the same bytes.

        Raises:
            GeminiError: Status "STATE": the range is not pinned.
        """
        self.lib.unpin(self.handle, self._accesses([range]))

    @contextlib.contextmanager
    def pinned(self, range: Range) -> typing.Iterator[None]:
        """A context manager: a range stays on the device within it.

        Args:
            range: As of pin().

        Raises:
            GeminiError: As pin().
        """
        self.pin(range)
        with _ends(lambda: self.unpin(range)):
            yield

    # ---- streams
    def stream_create(self) -> int:
        """Makes a stream, an in-order queue of device work. There are at most 48.

        Returns:
            The stream's handle, for stream_destroy().
        """
        out = ctypes.c_uint64()
        self.lib.stream_create(self.handle, out)
        return out.value

    def stream_adopt(self, native: int | None) -> int:
        """Makes a CUDA stream of the caller's one of the manager's.

        Args:
            native: The cudaStream_t as a number; None: the default stream. It has to outlive the handle.

        Returns:
            The stream's handle, for stream_destroy(), which leaves the CUDA stream as it is.

        Raises:
            GeminiError: Status "UNSUPPORTED": the device is the simulated one.
        """
        out = ctypes.c_uint64()
        self.lib.stream_adopt(self.handle, native, out)
        return out.value

    def stream_native(self, stream: int) -> int | None:
        """The stream as CUDA names it, for work that the caller queues.

        Args:
            stream: The stream.

        Returns:
            The cudaStream_t as a number; None: the default stream.

        Raises:
            GeminiError: Status "UNSUPPORTED": the device is the simulated one.
        """
        out = ctypes.c_void_p()
        self.lib.stream_native(self.handle, stream, out)
        return out.value

    def stream_destroy(self, stream: int) -> None:
        """Waits for a stream's work, then destroys it.

        Args:
            stream: The stream; 0 is accepted.

        Raises:
            GeminiError: Status "BUSY": the open operator runs on it.
        """
        self.lib.stream_destroy(self.handle, stream)

    @contextlib.contextmanager
    def stream(self) -> typing.Iterator[int]:
        """A context manager: gives a new stream, and destroys it at its end."""
        stream = self.stream_create()
        with _ends(lambda: self.stream_destroy(stream)):
            yield stream

    def stream_call(self, stream: int, function: typing.Callable[[], object]) -> None:
        """Queues a call of a Python function behind a stream's earlier work.

        Args:
            stream: The stream. abi.STREAM_CALLER: the function runs before this method returns.
            function: Runs on a thread of the library's, and must not call the manager. If it raises, acquire() and
                other methods that use what it was to write raise GeminiError from then on.

        Raises:
            GeminiError: There is no such stream.
        """
        self._calls.queue(stream, function)

    def stream_synchronize(self, stream: int) -> None:
        """Blocks until everything that is queued on a stream so far is done.

        Args:
            stream: The stream.

        Raises:
            GeminiError: The stream's work has failed, or a function of stream_call() has raised.
        """
        self.lib.stream_synchronize(self.handle, stream)
        self._calls.check()

    # ---- memory
    def alloc(self, size: int | str, stream: int = abi.STREAM_CALLER) -> int:
        """Allocates device memory that is no model data, for which chunks leave the device.

        Args:
            size: Bytes, or a text such as "1MiB".
            stream: Work that is queued on it may use the memory.

        Returns:
            The address, aligned to 512 bytes.

        Raises:
            GeminiError: Status "OOM_DEVICE": nothing is left that could leave.
        """
        out = ctypes.c_void_p()
        self.lib.alloc(self.handle, parse_bytes(size, "size"), stream, out)
        return out.value or 0

    def free(self, address: int, stream: int = abi.STREAM_CALLER) -> None:
        """Frees device memory.

        Args:
            address: What alloc() returned.
            stream: The memory is free after the work that is queued on it so far.

        Raises:
            GeminiError: Status "INVALID": nothing is allocated at that address.
        """
        self.lib.free(self.handle, address, stream)

    @contextlib.contextmanager
    def allocated(self, size: int | str, stream: int = abi.STREAM_CALLER) -> typing.Iterator[int]:
        """A context manager: gives the address of device memory, and frees it at its end.

        Args:
            size: As of alloc().
            stream: As of alloc() and free().

        Raises:
            GeminiError: As alloc().
        """
        address = self.alloc(size, stream)
        with _ends(lambda: self.free(address, stream)):
            yield address

    def host_alloc(self, size: int | str, alignment: int = 0) -> int:
        """Allocates page-locked host memory out of the host budget. Its bytes are undefined.

        Args:
            size: Bytes, or a text such as "1MiB"; not 0.
            alignment: Bytes, a power of two up to 2 MiB. 0: 16.

        Returns:
            The address.

        Raises:
            GeminiError: Status "OOM_HOST": the budget has no room.
        """
        out = ctypes.c_void_p()
        self.lib.host_alloc(self.handle, parse_bytes(size, "size"), alignment, out)
        return out.value or 0

    def host_free(self, address: int) -> None:
        """Frees page-locked host memory at once: no queued work may use it any more.

        Args:
            address: What host_alloc() returned.

        Raises:
            GeminiError: Status "INVALID": no block begins at that address.
        """
        self.lib.host_free(self.handle, address)

    @contextlib.contextmanager
    def host_block(self, size: int | str, alignment: int = 0) -> typing.Iterator[ctypes.Array[ctypes.c_char]]:
        """A context manager: gives page-locked host memory as a buffer, and frees it at its end.

        Args:
            size: As of host_alloc().
            alignment: As of host_alloc().

        Raises:
            GeminiError: As host_alloc().
        """
        size = parse_bytes(size, "size")
        address = self.host_alloc(size, alignment)
        with _ends(lambda: self.host_free(address)):
            yield buffer(address, size)

    # ---- data
    def zero(self, range: Range) -> None:
        """Makes a range read as zero. Whole chunks cost nothing until they are used.

        Args:
            range: What range() returned.

        Raises:
            GeminiError: Status "BUSY": a part of it is acquired.
        """
        self.lib.zero(self.handle, self._accesses([range]))

    def discard(self, range: Range) -> None:
        """Says that nobody wants the bytes of a range any more: they leave the device without a copy to the host.

        Late updates still read them. Afterwards, until they are written again, they are what they were, or zeros.

        Args:
            range: What range() returned.

        Raises:
            GeminiError: The arena is no more.
        """
        self.lib.discard(self.handle, self._accesses([range]))

    def load(self, range: Range, file: _File, file_offset: int = 0) -> None:
        """Reads a range from a file. Blocks.

        Args:
            range: Where to; the bytes go to the tier below the device.
            file: A file that is open for reading, or its descriptor.
            file_offset: Bytes from the file's beginning. The file's position is neither used nor changed.

        Raises:
            GeminiError: Status "IO" or "FORMAT": reading failed, or the file ends early: a part of the range has
                changed. "BUSY": a part of it is acquired.
        """
        self.lib.load(self.handle, self._accesses([range]), _descriptor(file), file_offset)

    def borrow(self, range: Range, file: _File, file_offset: int = 0) -> None:
        """Makes a range have the bytes of a file without reading them: they are read when they are wanted.

        The file must stay as it is. Bytes that are written leave it for good.

        Args:
            range: What gets the bytes.
            file: A regular file that is open for reading, or its descriptor. It may be closed afterwards.
            file_offset: Bytes from the file's beginning.

        Raises:
            GeminiError: Status "FORMAT": the file ends early, or was changed since ranges were borrowed from it.
                "BUSY": a part of the range is acquired. Where a part has to be loaded, also those of load().
        """
        self.lib.borrow(self.handle, self._accesses([range]), _descriptor(file), file_offset)

    def store(self, range: Range, file: _File, file_offset: int = 0) -> None:
        """Writes a range to a file, from wherever its newest bytes are. Blocks.

        Args:
            range: What is written.
            file: A file that is open for writing, or its descriptor.
            file_offset: Bytes from the file's beginning. The file's position is neither used nor changed.

        Raises:
            GeminiError: Status "IO" or "OOM_FILE": writing failed, and a part may have been written. "BUSY": a part of
                the range is acquired for writing. "STATE": an update has failed.
        """
        self._calls.check()
        self.lib.store(self.handle, self._accesses([range]), _descriptor(file), file_offset)

    def norm(self, range: Range, dtype: str = "f32", stream: int = abi.STREAM_CALLER) -> float:
        """The Euclidean norm of a range, summed in double where each chunk is. Blocks.

        The result has the same bits wherever the chunks are.

        Args:
            range: A multiple of the dtype's size.
            dtype: "f32", "bf16", "f16" or "f64".
            stream: The work that produced the range.

        Returns:
            The norm.

        Raises:
            GeminiError: A chunk could not be brought to the host, or an update has failed.
        """
        self._calls.check()
        out = ctypes.c_double()
        self.lib.norm(self.handle, self._accesses([range]), _code(DTYPES, dtype, "dtype"), stream, out)
        return out.value

    def update(
        self,
        function: typing.Callable[[Span], object],
        arenas: typing.Mapping[int, str],
        *,
        first_element: int = 0,
        element_count: int = 0,
        stream: int = abi.STREAM_CALLER,
        late: bool = False,
    ) -> None:
        """Runs a function over arenas of one layout, part by part, where the bytes of each part are.

        Args:
            function: Called with a Span for each part; the parts cover the range and do not overlap. It computes at
                once, on threads of the library's, several parts at a time, and must not call the manager, which
                raises GeminiError there. Where the device is a GPU and Span.tier is "device", it only queues work on
                Span.stream, and runs alone. If it raises, the update fails.
            arenas: At most 8 arenas, by handle: "read", "write" or "read_write". One arena, and arenas that follow it.
            first_element: Where the range begins.
            element_count: Its length. 0 with first_element 0: all elements that are used.
            stream: The update comes after this stream's work so far.
            late: Return at once. Each chunk's update is done before its next use.

        Raises:
            GeminiError: Status "BUSY": a part of the range is acquired; nothing changed. "PENDING": the update was
                accepted, and waits for room; update_wait() goes on with it. "STATE": the function has raised, now or
                before; the message has its exception, and the bytes are not what they should be.
        """
        self._calls.check()
        self._calls.update(
            function,
            list(arenas),
            [_code(MODES, mode, "mode") for mode in arenas.values()],
            [self._element_bytes.get(arena, 1) for arena in arenas],
            first_element,
            element_count,
            stream,
            late,
        )
        if not late:
            self._calls.check()

    def adamw(
        self,
        *,
        step: int,
        grad: int,
        master: int,
        momentum: int,
        variance: int,
        param: int = 0,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        grad_scale: float = 1.0,
        grad_dtype: str = "f32",
        param_dtype: str = "bf16",
        late: bool = False,
        stream: int = abi.STREAM_CALLER,
    ) -> None:
        """Updates all elements of arenas with AdamW, as torch.optim.AdamW does, wherever the bytes of each part are.

        The arenas follow each other (arena(like=...)). The bits of the results do not depend on where the parts are.

        Args:
            step: The number of this update, from 1.
            grad: The arena of gradients, which is read.
            master: The arena of parameters in fp32; so are the next two.
            momentum: The arena of first moments.
            variance: The arena of second moments.
            param: An arena of parameters of lower precision, which is written from master; 0: there is none.
            lr: The learning rate, at least 0.
            betas: How much of the moments stays, each from 0 to below 1.
            eps: Is added to the root of the second moment, at least 0.
            weight_decay: At least 0; it is multiplied by the learning rate.
            grad_scale: Each gradient is multiplied by it: 1 / loss scale, clipping.
            grad_dtype: "f32", "bf16" or "f16".
            param_dtype: "f32", "bf16" or "f16"; without param it is ignored.
            late: Return at once. Each chunk's update is done before its next use.
            stream: The update comes after this stream's work so far.

        Raises:
            GeminiError: Status "INVALID": a value is out of range, or an arena has elements of another size; nothing
                changed. Otherwise as update().
        """
        self._calls.check()
        if not 1 <= step < 1 << 64:  # ctypes would cut it
            raise abi.GeminiError(f"step is {step}, want at least 1 and less than 2**64", "INVALID")
        rule = abi.Adamw(
            param_dtype=_code(DTYPES, param_dtype, "param_dtype"),
            grad_dtype=_code(DTYPES, grad_dtype, "grad_dtype"),
            step=step,
            lr=lr,
            beta1=betas[0],
            beta2=betas[1],
            eps=eps,
            weight_decay=weight_decay,
            grad_scale=grad_scale,
        )
        arenas = abi.UpdateArenas(
            flags=abi.UPDATE_LATE if late else 0,
            param=param,
            grad=grad,
            master=master,
            momentum=momentum,
            variance=variance,
            stream=stream,
        )
        abi.update_library().adamw_arenas(self.handle, rule, arenas)

    def update_wait(self) -> None:
        """Blocks until every update that was submitted is done.

        Raises:
            GeminiError: Status "STATE": a function of an update has raised. Otherwise an update cannot go on, and stays
                pending.
        """
        self._calls.wait()
        self._calls.check()

    # ---- checkpoints
    def checkpoint(self) -> None:
        """Makes what all arenas hold now what a later process finds in the checkpoint files. Blocks.

        After a kill at any time the previous checkpoint or this one is there, whole.

        Raises:
            GeminiError: Status "STATE": the manager was opened without checkpoint_name, or an update has failed.
                "BUSY": a range is acquired for writing. "OOM_FILE" or "IO": the previous checkpoint stays.
        """
        self._calls.check()
        self.lib.checkpoint(self.handle)

    def resume(self) -> None:
        """Takes up the last checkpoint in its files. No byte is read before it is used.

        Arenas and tensors have been made as they were, by name, kind and size, and hold no bytes yet.

        Raises:
            GeminiError: Status "NOT_FOUND": there is no checkpoint. "FORMAT": it is of other arenas or tensors.
                "STATE": there is no checkpoint_name, or an arena holds bytes, is acquired or pinned, or
                waits for an update.
        """
        self.lib.resume(self.handle)

    # ---- allocators for frameworks
    def hook_set(self) -> None:
        """Has the manager serve the allocators of docs/hook.md for its device.

        Raises:
            GeminiError: Status "EXISTS": another manager serves that device.
        """
        self.lib.hook_set(self.handle, 0)

    def hook_clear(self) -> None:
        """Ends hook_set()."""
        self.lib.hook_clear(self.handle)

    # ---- statistics, plan, trace, timeline
    def stats_reset(self) -> None:
        """Starts peaks, moved bytes and chunks, hits, misses, stalls, departures and op_peak_error_bytes anew."""
        self.lib.stats_reset(self.handle)

    def trace_save(self, path: str | os.PathLike[str]) -> None:
        """Writes the last complete iteration's trace to a text file; docs/trace.md has its format.

        Args:
            path: The file.

        Raises:
            GeminiError: Status "STATE": there is none yet. "IO" or "OOM_FILE": writing failed.
        """
        self.lib.trace_save(self.handle, os.fsencode(path))

    def trace_load(self, path: str | os.PathLike[str]) -> None:
        """Takes a saved trace instead of warm-up, and plans from it.

        Args:
            path: The file.

        Raises:
            GeminiError: Status "FORMAT": the file is no trace, or of other arenas. "STATE": an iteration is open.
        """
        self.lib.trace_load(self.handle, os.fsencode(path))

    @contextlib.contextmanager
    def timeline(self, path: str | os.PathLike[str]) -> typing.Iterator[None]:
        """A context manager: records what happens within, as Chrome trace events that ui.perfetto.dev opens.

        Args:
            path: The file that is written at the end.
        """
        self.lib.timeline_start(self.handle, os.fsencode(path))
        with _ends(lambda: self.lib.timeline_stop(self.handle)):
            yield

    def stats(self) -> dict[str, typing.Any]:
        """Statistics. Never waits.

        Returns:
            The fields of gemini_stats_t by name, in bytes and nanoseconds; those of gemini_tier_stats_t as a dict by
            abi.TIERS; moved_bytes and moved_chunks of gemini_link_stats_t as a dict by abi.LINKS and abi.REASONS,
            where several links join the same two tiers, their sums.
        """
        out: dict[str, typing.Any] = {"budget_bytes": {}, "used_bytes": {}, "peak_bytes": {}}
        tier, link, stats, links = abi.TierStats(), abi.LinkStats(), abi.Stats(), ctypes.c_uint32()
        self.lib.stats(self.handle, stats)
        for number, name in enumerate(abi.TIERS):
            self.lib.tier_stats(self.handle, number, tier)
            for key in "budget_bytes", "used_bytes", "peak_bytes":
                out[key][name] = getattr(tier, key)
        for name, *_ in abi.Stats._fields_:
            if name != "struct_size":
                out[name] = getattr(stats, name)
        for key in "moved_bytes", "moved_chunks":
            out[key] = {name: dict.fromkeys(abi.REASONS, 0) for name in abi.LINKS}
        self.lib.link_count(self.handle, links)
        for number in range(links.value):
            for reason, cause in enumerate(abi.REASONS):
                self.lib.link_stats(self.handle, number, reason, link)
                name = f"{abi.TIERS[link.from_tier]} to {abi.TIERS[link.to_tier]}"
                out["moved_bytes"][name][cause] += link.moved_bytes
                out["moved_chunks"][name][cause] += link.moved_chunks
        return out

    def explain(self) -> str:
        """The plan in words.

        Returns:
            What stays on the device, what comes and goes, and what a step waits for; several lines.
        """
        length = ctypes.c_uint64()
        self.lib.plan_explain(self.handle, 0, None, length)
        text = ctypes.create_string_buffer(length.value + 1)
        self.lib.plan_explain(self.handle, length.value + 1, text, None)
        return text.value.decode()

    def dump(self) -> str:
        """The manager's state in words, for when the program hangs. Never waits.

        Returns:
            What is where, what is acquired, which operator is open, and which threads wait inside the library for what;
            of groups of ranks, which gathers and sums are under way.
        """
        size, length = 1 << 16, ctypes.c_uint64()
        while True:
            text = ctypes.create_string_buffer(size)
            self.lib.manager_dump(self.handle, size, text, length)
            if length.value < size:
                return text.value.decode(errors="replace")
            size = 2 * length.value  # it may have grown meanwhile
