"""Offloaded activations: tensors that autograd saves for the backward pass, in an arena of their own.

What autograd saves is copied to a place of the arena, and torch may free its own memory. The backward pass gets a
tensor over the place, which stays acquired on the device until torch frees that tensor. The place with the lowest
address is taken first. So a loop that repeats itself uses the same places in each step, and the plan knows them.

torch frees tensors at any time, on any thread. The next call of this module frees their places.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import weakref

import torch

from .. import abi
from .internals import StorageWeakRef, counter_of, counts_for, plain as _plain
from .layout import Space
from .memory import wrap
from .tensors import ManagedParameter, ManagedTensor

ALIGNMENT = 512  # bytes, of places
WHOLE_CHUNKS = 4  # places of at least so many chunks share none with others
# A view of less than 1/VIEW_SHARE of its storage stays with torch: the whole storage would be saved.
VIEW_SHARE = 4
# An operator that saves or unpacks more than 1/OPERATOR_SHARE of the device budget is split.
OPERATOR_SHARE = 8


class _Kept:
    """A tensor that stays with torch. It checks the version of the tensor, which torch does only without hooks."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor):
        self.tensor, self.version = tensor.detach(), None if tensor.is_inference() else tensor._version

    def get(self):
        now = None if self.version is None else self.tensor._version
        if now != self.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.tensor.shape)} that the backward pass needs has been modified "
                f"by an inplace operation: it is at version {now}; expected version {self.version} instead"
            )
        return self.tensor


class _Range:
    """Bytes of an arena."""

    __slots__ = ("arena", "offset", "size", "address")

    def __init__(self, arena, offset, size, address):
        self.arena, self.offset, self.size, self.address = arena, offset, size, address


class _There(_Range):
    """A saved tensor whose bytes are in an arena already, such as a parameter."""

    __slots__ = ("kept",)

    def __init__(self, tensor, *where):
        super().__init__(*where)
        self.kept = _Kept(tensor)


class _Stored(_Range):
    """The bytes of a tensor's storage in the arena of activations. The place becomes free when nothing refers to this
    object.
    """

    __slots__ = ("storage", "pointer", "version", "counter", "dead", "__weakref__")

    def __init__(self, where, tensor, dead):
        super().__init__(*where)
        storage = tensor.untyped_storage()
        self.storage = StorageWeakRef(storage)  # while it exists, no other storage gets its number
        self.pointer = storage.data_ptr()
        self.version = tensor._version
        self.counter = counter_of(tensor)
        self.dead = dead

    def has(self, tensor):
        """Whether these are the bytes of a tensor's storage, which has this one's number."""
        return (
            self.version == tensor._version
            and self.pointer == tensor.untyped_storage().data_ptr()
            and counts_for(self.counter, tensor)
        )

    def __del__(self):
        self.dead.append((self.offset, self.size))


class Activations:
    """The activations that autograd has saved in a session."""

    def __init__(self, session):
        self.session = session
        self.arena = session.arenas.arena("activations", torch.uint8)
        self.operator_bytes = session.manager.stats()["budget_bytes"]["device"] // OPERATOR_SHARE
        self.operator = None  # the number of the operator that op_bytes counts
        self.op_bytes = 0
        self.space = Space()
        self.chunk_size = self.first_chunk()
        self.users: collections.Counter[int] = collections.Counter()  # how many places lie in a chunk
        # By the number of a storage: where its bytes are stored.
        self.stored: weakref.WeakValueDictionary[int, _Stored] = weakref.WeakValueDictionary()
        # What is acquired for tensors that the backward pass has got: (storage, access, stream, range).
        self.held = []
        self.dead: collections.deque[tuple[int, int]] = collections.deque()  # places to be freed: (offset, size)
        self.arenas = []  # (base, end, handle) of all arenas

    # ---- places
    def first_chunk(self):
        """Takes the first chunk and returns the chunk size, which the library may choose only now."""
        manager, lib = self.session.manager, self.session.lib
        manager.take(self.arena, ALIGNMENT)
        lib.zero(self.session.handle, ctypes.byref(abi.Access(self.arena, 0, ALIGNMENT, 0, 0, None)))
        chunk_size = manager.arena_info(self.arena).chunk_bytes
        manager.take(self.arena, chunk_size - ALIGNMENT)
        self.space.give(0, chunk_size)
        return chunk_size

    def place(self, size):
        """Takes a new place.

        Returns:
            The arena, the offset, the size, which may be larger than the argument, and the device address.
        """
        large = size >= WHOLE_CHUNKS * self.chunk_size
        alignment = self.chunk_size if large else ALIGNMENT
        size = -(-size // alignment) * alignment
        offset = self.space.take(size, alignment)
        if offset is None:
            more = -(-size // self.chunk_size) * self.chunk_size
            self.space.give(self.session.manager.take(self.arena, more), more)
            offset = self.space.take(size, alignment)
        self.users.update(self.chunks(offset, size))
        return self.arena, offset, size, self.session.arenas.arena_base(self.arena) + offset

    def chunks(self, offset, size):
        """The numbers of the chunks that a range lies in."""
        return range(offset // self.chunk_size, -(-(offset + size) // self.chunk_size))

    def drain(self):
        """Handles what torch has freed: releases it, makes places free, and zeroes chunks without places."""
        held, self.held = self.held, []
        for storage, access, stream, where in held:
            if storage.expired():
                self.session.lib.release(self.session.handle, ctypes.byref(access), 1, stream)
            else:
                self.held.append((storage, access, stream, where))
        del held
        where = None  # drops the last reference to some ranges
        empty = []
        while self.dead:
            offset, size = self.dead.popleft()
            self.space.give(offset, size)
            for chunk in self.chunks(offset, size):
                self.users[chunk] -= 1
                if not self.users[chunk]:
                    del self.users[chunk]
                    empty.append(chunk)
        empty.sort()
        while empty:
            count = next((i for i in range(1, len(empty)) if empty[i] != empty[0] + i), len(empty))
            whole = abi.Access(self.arena, empty[0] * self.chunk_size, count * self.chunk_size, 0, 0, None)
            self.session.lib.zero(self.session.handle, ctypes.byref(whole))
            del empty[:count]

    def close(self):
        """Releases everything. Tensors that torch still has must not be used."""
        self.drain()
        for _, access, stream, _ in self.held:
            self.session.lib.release(self.session.handle, ctypes.byref(access), 1, stream)
        self.held.clear()

    # ---- operators
    def begin(self, where):
        """Prepares to acquire a range in the open operator, or in a new one if that has acquired much already."""
        session = self.session
        if not session.brackets.iteration:
            return
        size = where.size if where.arena == self.arena else 0  # parameters are mostly acquired already
        if session.brackets.op_number != self.operator:
            self.op_bytes = 0
        if not session.brackets.op_open or self.op_bytes and self.op_bytes + size > self.operator_bytes:
            session.brackets.op_begin(f"saved at {where.offset}".encode())
            self.op_bytes = 0
            stream = session.holds.stream()
            beside = [(accesses, count) for accesses, count, *_ in session.holds.noted]
            beside += [(ctypes.byref(access), 1) for _, access, *_ in self.held]
            for accesses, count in beside:  # the new operator uses them, too
                session.lib.acquire(session.handle, accesses, count, stream)
                session.lib.release(session.handle, accesses, count, stream)
        self.operator = session.brackets.op_number
        self.op_bytes += size

    # ---- hooks
    def arena_at(self, address):
        """The handle and base address of the arena that an address is in, or None."""
        if len(self.arenas) != len(self.session.arenas.handles):
            infos = [(self.session.manager.arena_info(arena), arena) for arena in self.session.arenas.handles.values()]
            self.arenas = [(info.base, info.base + info.capacity_bytes, arena) for info, arena in infos]
        return next(((arena, base) for base, end, arena in self.arenas if base <= address < end), None)

    def here(self, tensor):
        """Whether a tensor can be saved here: a plain one on the session's device."""
        device = self.session.device
        return (
            type(tensor) in (torch.Tensor, torch.nn.Parameter, ManagedTensor, ManagedParameter)
            and tensor.layout is torch.strided
            and tensor.device.type == device.type
            and (tensor.device.index or 0) == (device.index or 0)
            and tensor.numel()
            and not tensor.is_inference()
            and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
        )

    def pack(self, kept, least_bytes, tensor):
        """A hook: autograd saves a tensor. Returns what autograd keeps instead."""
        with _plain(), torch.no_grad():
            if not self.here(tensor):
                return _Kept(tensor)
            shape, stride, dtype, pointer = tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr()
            extent = (sum((n - 1) * step for n, step in zip(shape, stride)) + 1) * dtype.itemsize
            arena = self.arena_at(pointer)
            if arena and arena[0] != self.arena:
                where = _There(tensor, arena[0], pointer - arena[1], extent, pointer)
                return where, dtype, shape, stride, 0
            storage = tensor.untyped_storage()
            size = storage.nbytes()
            if arena or size < least_bytes or extent * VIEW_SHARE < size or storage.data_ptr() in kept:
                return _Kept(tensor)
            stored = self.stored.get(storage._cdata)
            if stored is None or not stored.has(tensor):
                stored = self.store(tensor)
            return stored, dtype, shape, stride, tensor.storage_offset()

    def store(self, tensor):
        """Copies a tensor's storage to a new place."""
        session, storage = self.session, tensor.untyped_storage()
        self.drain()
        size = storage.nbytes()
        stored = _Stored(self.place(size), tensor, self.dead)
        self.begin(stored)
        access = abi.Access(stored.arena, stored.offset, stored.size, abi.WRITE, abi.TIER_DEVICE, None)
        with session.holds.acquired(access, 1, session.holds.stream()):
            to = wrap(stored.address, (size,), torch.uint8, session.device)
            to.copy_(torch.empty(0, dtype=torch.uint8, device=to.device).set_(storage, 0, (size,), (1,)))
        self.stored[storage._cdata] = stored
        return stored

    def unpack(self, packed):
        """A hook: autograd needs a saved tensor. It stays acquired on the device until torch frees it."""
        if isinstance(packed, _Kept):
            return packed.get()
        session = self.session
        where, dtype, shape, stride, first = packed
        if isinstance(where, _There):
            where.kept.get()
        self.drain()
        self.begin(where)
        access = abi.Access(where.arena, where.offset, where.size, abi.READ, abi.TIER_DEVICE, None)
        stream = session.holds.stream()
        session.lib.acquire(session.handle, ctypes.byref(access), 1, stream)
        with _plain(), torch.no_grad():
            storage = wrap(where.address, (where.size,), torch.uint8, session.device).untyped_storage()
            self.held.append((StorageWeakRef(storage), access, stream, where))
            return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, first, shape, stride)

    @contextlib.contextmanager
    def saving(self, least_bytes):
        """A context manager: tensors of least_bytes or more that autograd saves within it are saved here."""
        tensors = [
            one for model in self.session.models for one in (*model.module.buffers(), *model.module.parameters())
        ]
        with _plain():  # tensors of the model stay allocated, so a copy would gain nothing
            kept = {tensor.untyped_storage().data_ptr() for tensor in tensors if not isinstance(tensor, ManagedTensor)}
        with torch.autograd.graph.saved_tensors_hooks(functools.partial(self.pack, kept, least_bytes), self.unpack):
            yield


def activations(session):
    """The Activations of a session, made at the first use."""
    if session.activations is None:
        session.activations = Activations(session)
    return session.activations
