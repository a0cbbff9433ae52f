"""Where tensors are stored: the arenas of a session, one for each kind and dtype, and the places of tensors in them.

A place is a range of an arena. Its device address never changes. The range is reused once no tensor refers to its
storage any more; this is checked before the next place is taken.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import itertools
import sys
import typing
import weakref

import torch

from .. import abi
from ..abi import GeminiError
from . import internals
from .internals import StorageWeakRef
from .layout import Space, Span, dense_stride
from .memory import host_tensor, wrap

if typing.TYPE_CHECKING:
    from .model import Record
    from .owners import Owners
    from .session import Session
    from .tensors import ManagedTensor

KINDS = {
    "param": abi.KIND_PARAM,
    "frozen": abi.KIND_PARAM,
    "grad": abi.KIND_GRAD,
    "reused grad": abi.KIND_GRAD,
    "master": abi.KIND_MASTER,
    "momentum": abi.KIND_MOMENTUM,
    "variance": abi.KIND_VARIANCE,
}
DTYPES = {torch.float32: abi.DTYPE_F32, torch.bfloat16: abi.DTYPE_BF16, torch.float16: abi.DTYPE_F16}
PIECE_BYTES = 32 << 20  # acquired at once while a whole tensor is read or written
MOVED_BYTES = 4 << 20  # a state from here on leaves the device when it is made; smaller ones go with their neighbours
ALIGNMENT = 256  # elements, of gemini_arena_take()


def in_backward() -> bool:
    """Whether autograd is calling us, during a backward pass."""
    return internals.graph_task() != -1


_Pieces = typing.Iterator[tuple[int, torch.Tensor]]


class Place:
    """A range of an arena that stores one tensor. Its device address never changes.

    The range stays in use as long as any tensor over its storage exists, whoever holds that tensor: see
    Arenas.free_places().

    Attributes:
        tensor: A plain torch tensor over the address. It may be read or written only while the range is acquired.
        arena: The handle of the arena.
        offset: Where the range begins in the arena, in bytes.
        object: The handle that the library knows the range by: a registered tensor, or the arena.
        base: Where the range begins in object, in bytes.
        stride: The strides in elements. They are dense: there are no gaps.
        has_rows: Whether it is a table of which an embedding may read rows on the host; see rows.py.
        chosen_below: A function that reads fewer bytes of it was chosen at run time; see experts.py.
    """

    __slots__ = (
        "session",
        "arena",
        "offset",
        "object",
        "base",
        "size_bytes",
        "dtype",
        "shape",
        "stride",
        "address",
        "tensor",
        "name",
        "written",
        "number",
        "origin",
        "owner",
        "follows",
        "storages",
        "has_rows",
        "chosen_below",
    )
    numbers = itertools.count()
    grows = False  # whether it is a layer of a cache, of whose addresses only the first ones are in use; see cache.py

    def __init__(
        self,
        session: Session,
        arena: int,
        offset: int,
        shape: typing.Sequence[int],
        dtype: torch.dtype,
        name: str,
        stride: typing.Sequence[int] | None = None,
    ) -> None:
        self.tensor = typing.cast(torch.Tensor, None)  # until wrap() has succeeded; see __del__()
        self.session: Session = session
        self.number = next(self.numbers)
        self.origin: Span | None = None  # of a parameter: where its values were before it came here
        self.owner: weakref.ref[Record] | None = None  # of a parameter: its record
        # Of a gradient or a state: the place of the parameter, which is freed together with this one.
        self.follows: Place | None = None
        # Storages that may still have tensors when the place is deleted.
        self.storages: list[StorageWeakRef] = []
        self.has_rows = False
        self.chosen_below = 0
        self.arena = arena
        self.offset = offset
        # Whether functions of the user may have written it since it last matched its fp32 copy.
        self.written = False
        self.object, self.base = arena, offset  # the library's handle, and the offset in that
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.size_bytes = self.shape.numel() * dtype.itemsize
        self.name = name
        base = session.arenas.arena_base(arena)
        self.address = base + offset if base else 0  # 0: it has no address on the device
        # Not an inference tensor, wherever it is made: those have no versions, which tell what was written.
        with torch.inference_mode(False):
            self.tensor = self.make_tensor(stride)
        self.stride = tuple(self.tensor.stride())  # in elements; dense

    def make_tensor(self, stride: typing.Sequence[int] | None) -> torch.Tensor:
        """Makes the tensor over the address."""
        return wrap(self.address, self.shape, self.dtype, self.session.device, stride)

    python_ends = staticmethod(sys.is_finalizing)  # of the class: modules may have lost their names by then

    def __del__(self):
        """Queues the range for reuse.

        Python may call this on any thread at any time, and torch may still have tensors over the storage.
        """
        if self.tensor is None or not self.elements or self.python_ends():  # the session is closed by then
            return
        storages = (self.follows or self).storages
        storages[:] = [one for one in storages if not one.expired()]
        storages.append(StorageWeakRef(self.tensor.untyped_storage()))
        if not self.follows:
            self.session.arenas.left.append((self.arena, self.offset, self.size_bytes, self.object, self.storages))

    @property
    def elements(self) -> int:
        return self.shape.numel()

    def spread(self, offset: int, size: int) -> tuple[int, int]:
        """The range, in bytes, that a function acquires for a view of it: offset and size."""
        return offset, size

    @property
    def contiguous(self) -> bool:
        return self.tensor.is_contiguous()

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a managed tensor covers the whole place, with the same shape, dtype and strides."""
        return (tensor.data_ptr(), tensor.shape, tensor.dtype) == (self.address, self.shape, self.dtype) and tuple(
            tensor.stride()
        ) == self.stride

    def in_order(self, values: torch.Tensor) -> torch.Tensor:
        """Reshapes values of the same number of elements to one dimension, in the order of the elements in memory."""
        order = sorted(range(len(self.shape)), key=lambda i: (-self.stride[i], i))
        return values.reshape(self.shape).permute(order).reshape(-1)

    def register(self, name: str) -> None:
        """Registers the place as a tensor of the library, so that messages name the parameter."""
        lib, handle, out = self.session.lib, self.session.handle, ctypes.c_uint64()
        for number in itertools.count(1):
            unique = (name if number == 1 else f"{name}#{number}").encode()[-127:]
            try:
                lib.tensor_register(handle, self.arena, unique, self.size_bytes, self.offset, out)
                break
            except abi.GeminiError as error:
                if error.status != "EXISTS":
                    raise
        self.object, self.base = out.value, 0

    def access(
        self, mode: int, tier: int = abi.TIER_DEVICE, offset: int = 0, size_bytes: int | None = None
    ) -> abi.Access:
        """A request to acquire a part of the place; all of it by default. offset, size_bytes: in bytes."""
        return abi.Access(
            self.object, self.base + offset, self.size_bytes if size_bytes is None else size_bytes, mode, tier, None
        )

    def host_pieces(self, mode: int, begin: int = 0, end: int | None = None) -> _Pieces:
        """Acquires the elements from begin to end on the host, one piece after another.

        Yields:
            The first element of a piece, and a CPU tensor of one dimension over the piece, valid until the next
            one.
        """
        self.session.refuse_closed(self.name)
        end = self.elements if end is None else end
        step = PIECE_BYTES // self.dtype.itemsize
        if self.session.backward.held and not in_backward():
            # An exception has ended a backward pass, which still holds chunks on the device.
            self.session.backward.settle()
        self.session.let_models_go()
        for first in range(begin, end, step):
            count = min(step, end - first)
            access = self.access(mode, abi.TIER_HOST, first * self.dtype.itemsize, count * self.dtype.itemsize)
            with self.session.holds.acquired(access, 1, abi.STREAM_CALLER):
                yield first, host_tensor(access.ptr, count, self.dtype)

    def device_pieces(
        self, mode: int, piece_bytes: int = PIECE_BYTES, begin: int = 0, end: int | None = None
    ) -> _Pieces:
        """Acquires the elements from begin to end on the device, one piece after another.

        This is for a host without room, through which host_pieces() would have to move the bytes.

        Yields:
            The first element of a piece, and a tensor of one dimension over the piece, valid until the next one.
        """
        self.session.refuse_closed(self.name)
        end = self.elements if end is None else end
        flat, step = self.tensor.as_strided((self.elements,), (1,)), piece_bytes // self.dtype.itemsize
        for first in range(begin, end, step):
            piece = flat[first : min(first + step, end)]
            access = self.access(mode, abi.TIER_DEVICE, first * self.dtype.itemsize, piece.nbytes)
            with self.session.holds.acquired(access, 1, self.session.holds.stream()):
                yield first, piece

    def read(self) -> torch.Tensor:
        """Copies the values to a CPU tensor with the strides of the place."""
        out = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu")
        self.read_to(out.as_strided((self.elements,), (1,)))
        return out

    def read_to(self, out: torch.Tensor, begin: int = 0) -> None:
        """Copies elements, from begin on and in memory order, to a CPU tensor of one dimension."""
        for pieces in self.host_pieces, self.device_pieces:
            try:
                for first, piece in pieces(abi.READ, begin=begin, end=begin + out.numel()):
                    out[first - begin : first - begin + piece.numel()].copy_(piece)
                return
            except GeminiError as error:
                if error.status != "OOM_HOST" or pieces == self.device_pieces:
                    raise

    def write(self, values: torch.Tensor) -> None:
        """Copies values of the same number of elements, of any dtype, from the CPU or the device of the session."""
        flat = self.in_order(values.detach())
        # CUDA cannot copy in one call from memory that was page-locked in several parts, as the host tier may be.
        pieces = self.device_pieces if self.session.cuda and flat.is_cuda else self.host_pieces
        for first, piece in pieces(abi.WRITE):
            piece.copy_(flat[first : first + piece.numel()])

    def copy_from(self, other: Place) -> None:
        """Copies the values of a place of as many elements, of any dtype, which may be on the device alone.

        They are converted on the device and go to the host from there: for a model of billions of elements the
        processor would take many seconds. With files they are converted on the host: what comes to the
        device pushes other chunks away, for which a budget that is just enough may have no room.
        """
        if self.session.manager.config.file_bytes:
            self.write(other.read())
            return
        ours, theirs = (place.tensor.as_strided((place.elements,), (1,)) for place in (self, other))
        step, holds = PIECE_BYTES // max(self.dtype.itemsize, other.dtype.itemsize), self.session.holds
        self.session.refuse_closed(self.name)
        try:
            for first in range(0, self.elements, step):
                count = min(step, self.elements - first)
                pair = (abi.Access * 2)(
                    other.access(abi.READ, abi.TIER_DEVICE, first * other.dtype.itemsize, count * other.dtype.itemsize),
                    self.access(abi.WRITE, abi.TIER_DEVICE, first * self.dtype.itemsize, count * self.dtype.itemsize),
                )
                with holds.acquired(pair, 2, holds.stream()):
                    ours[first : first + count].copy_(theirs[first : first + count])
        except GeminiError as error:
            if error.status != "OOM_DEVICE":
                raise
            self.write(other.read())  # what is in use leaves no room there
            return
        if self.size_bytes >= MOVED_BYTES:
            with contextlib.suppress(GeminiError):  # where there is no room they stay, and leave when others need it
                self.session.lib.move(self.session.handle, ctypes.byref(self.access(0, abi.TIER_HOST)), 1)

    def zero(self) -> None:
        """Makes all elements zero."""
        self.session.refuse_closed(self.name)
        if self.elements:  # to the library, size 0 means all of the arena
            self.session.lib.zero(self.session.handle, ctypes.byref(self.access(0)))


def chunk_bytes(device_memory: int, cuda: bool) -> int:
    """Chooses the chunk size: about a thousandth of the device budget, up to 32 MiB.

    Fewer chunks cost less; smaller chunks waste less around what an operator needs. On a GPU, which maps at least
    2 MiB, and takes some three microseconds for each copy beside its bytes, it is a 256th up to 8 MiB.
    """
    least = min(device_memory // 256, 8 << 20) if cuda else 0
    chunk = 1 << max(device_memory // 1024, least, 1).bit_length() - 1
    return min(max(chunk, 2 << 20 if cuda else 64 << 10), 32 << 20)


class Arenas:
    """The arenas of a session and their free ranges."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.handles: dict[tuple[str, torch.dtype, int], int] = {}  # by kind, dtype, and the arena it follows or 0
        self.bases: dict[int, tuple[int, int]] = {}  # by arena: its first address and its number
        self.spaces: dict[int, Space] = {}  # by arena: what is free of what was taken
        self.sliced: dict[int, Owners] = {}  # arenas that are divided among ranks: these
        # The kind of arena that frozen parameters go to, and the bytes of addresses that it needs; see apart().
        self.frozen, self.capacity = "frozen", 0
        self.models_apart = 0
        # The ranges of deleted places: (arena, offset, size, object, storages).
        self.left: collections.deque[tuple[typing.Any, ...]] = collections.deque()

    def arena(self, kind: str, dtype: torch.dtype, like: int = 0) -> int:
        """Returns the arena of a kind and dtype, and creates it at its first use.

        like: the arena of the parameters that its tensors belong to, or 0.
        """
        key = kind, dtype, like
        if key not in self.handles:
            ranks = self.session.ranks
            more: dict[str, typing.Any] = {}
            owners = self.sliced.get(like)
            base, _, where = kind.partition(" in ")
            if ranks and base in ("param", "frozen"):
                owners = ranks.owners[where]
                more = {"group": owners.group, "zero_stage": ranks.stage}
            elif ranks and kind == "grad":
                more = {"dtype": DTYPES[dtype]}
            name = f"{kind}.{str(dtype).removeprefix('torch.')}" + (f".{self.bases[like][1]}" if like else "")
            handle = self.session.manager.arena(
                KINDS.get(base, abi.KIND_OTHER),
                name=name,
                capacity=self.capacity if kind == self.frozen else 0,
                element_bytes=dtype.itemsize,
                like=0 if kind == "reused grad" else like,
                reuse=like if kind == "reused grad" else 0,
                **more,
            )
            self.handles[key] = handle
            if owners:
                self.sliced[handle] = owners
            self.bases[handle] = self.session.manager.arena_info(handle).base, len(self.bases)
        return self.handles[key]

    @contextlib.contextmanager
    def apart(self, tensors: typing.Iterable[torch.Tensor]) -> typing.Iterator[None]:
        """A context manager: frozen parameters that are allocated within it go to arenas of their own.

        An arena usually has as many addresses as all budgets together have bytes. Weights that stay in the files of a
        folder may be more than that.

        Args:
            tensors: They, or tensors of their shapes and dtypes.
        """
        self.models_apart += 1
        self.frozen = f"frozen in {self.models_apart}"
        self.capacity = sum(-(-max(1, one.numel()) // ALIGNMENT) * ALIGNMENT * one.dtype.itemsize for one in tensors)
        try:
            yield
        finally:
            self.frozen, self.capacity = "frozen", 0

    def arena_base(self, arena: int) -> int:
        """The first device address of an arena."""
        return self.bases[arena][0]

    def place(
        self,
        kind: str,
        shape: typing.Sequence[int],
        dtype: torch.dtype,
        name: str,
        stride: typing.Sequence[int] | None = None,
    ) -> Place:
        """Takes a place for a new tensor, which reads as zero, in an arena that follows no other arena."""
        self.free_places()
        arena, alignment = self.arena(kind, dtype), ALIGNMENT * dtype.itemsize
        size = -(-max(1, torch.Size(shape).numel()) // ALIGNMENT) * alignment
        offset = self.spaces[arena].take(size, alignment) if arena in self.spaces else None
        if offset is None:
            try:
                offset = self.session.manager.take(arena, size)
            except GeminiError as error:
                if error.status != "INVALID" or kind == self.frozen and self.capacity:
                    raise
                # An arena has as many addresses as the three budgets have bytes.
                what = f"{name}: what is like it needs more bytes than device, host and files have together: {error}"
                raise GeminiError(what, "OOM_HOST") from error
        return self.place_type(arena)(self.session, arena, offset, shape, dtype, name, stride)

    def place_type(self, arena: int) -> type[Place]:
        """The class of places in an arena."""
        return self.session.ranks.place_type if self.session.ranks and arena in self.sliced else Place

    def place_of(self, tensor: ManagedTensor, kind: str) -> Place:
        """Takes a new place and copies the values and strides of a managed tensor to it."""
        place = self.place(kind, tensor.shape, tensor.dtype, tensor._gm_place.name, dense_stride(tensor))
        place.write(tensor.detach().clone())
        return place

    def free_places(self) -> None:
        """Reuses the ranges of deleted places, except those whose storage still has tensors."""
        if self.session.caches:
            self.session.caches.drain()
        for _ in range(len(self.left)):
            left = self.left.popleft()
            if not all(storage.expired() for storage in left[4]) or not self.free_place(*left[:4]):
                self.left.append(left)

    def free_place(self, arena: int, offset: int, size: int, tensor: int) -> bool:
        """Zeroes a range, and the same range in the arenas of its gradient and states, and makes it reusable.

        Returns False if the library refuses it for now.
        """
        (itemsize,) = (dtype.itemsize for (_, dtype, _), handle in self.handles.items() if handle == arena)
        followers = [
            (handle, dtype.itemsize)
            for (kind, dtype, like), handle in self.handles.items()
            if like == arena and kind != "reused grad"
        ]

        def zero(begin, end):
            for handle, other in ((arena, itemsize), *followers):
                where = begin // itemsize * other, (end - begin) // itemsize * other
                self.session.lib.zero(self.session.handle, ctypes.byref(abi.Access(handle, *where, 0, 0, None)))

        try:
            zero(offset, offset + size)
            if tensor != arena:
                self.session.lib.tensor_unregister(self.session.handle, tensor)
        except GeminiError:
            # An update uses it, or there is no room for the rest of its chunk.
            return False
        alignment = ALIGNMENT * itemsize
        space = self.spaces.setdefault(arena, Space())
        with contextlib.suppress(GeminiError):  # a failure costs memory, and nothing else
            zero(*space.give(offset, -(-size // alignment) * alignment))  # whole chunks that are free now
        return True

    def counterpart(self, place: Place, kind: str, dtype: torch.dtype) -> Place:
        """The place of the same elements in the arena of another kind, such as a parameter's gradient."""
        arena = self.arena(kind, dtype, place.arena)
        other = self.place_type(arena)(
            self.session,
            arena,
            place.offset // place.dtype.itemsize * dtype.itemsize,
            place.shape,
            dtype,
            f"{place.name}.{kind}",
            place.stride,
        )
        other.follows = place
        if place.object != place.arena:
            tensor = ctypes.c_uint64()
            self.session.lib.tensor_counterpart(self.session.handle, place.object, arena, tensor)
            other.object, other.base = tensor.value, 0
        return other

    def device_budget(self) -> int:
        """The device budget of now, in bytes."""
        tier = abi.TierStats()
        self.session.lib.tier_stats(self.session.handle, abi.TIER_DEVICE, tier)
        return int(tier.budget_bytes)

    def fit_on_device(self) -> bool:
        """Whether the device budget of now has room for all tensors."""
        stats = abi.Stats()
        self.session.lib.stats(self.session.handle, stats)
        return bool(stats.model_bytes <= self.device_budget())

    def expect(self, places: typing.Iterable[Place]) -> None:
        """Has host memory committed for places that will get their first contents, unless all fits on the device."""
        accesses = [place.access(abi.READ, abi.TIER_HOST) for place in places if place.elements]
        if accesses and not self.fit_on_device():
            self.session.lib.hint(self.session.handle, (abi.Access * len(accesses))(*accesses), len(accesses))

    def gradients_discard(self) -> None:
        """Nobody wants the bytes of any gradient: they do not go to the host. Late updates still read them."""
        self._gradients(self.session.lib.discard)

    def gradients_zero(self) -> None:
        """Zeroes all arenas of gradients. Their chunks take no memory until they are written again."""
        self._gradients(self.session.lib.zero)

    def _gradients(self, call: typing.Callable[[typing.Any, typing.Any], None]) -> None:
        for (kind, *_), arena in self.handles.items():
            if kind == "grad":
                call(self.session.handle, ctypes.byref(abi.Access(arena, 0, 0, 0, 0, None)))
