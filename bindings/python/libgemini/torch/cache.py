"""Caches of keys and values for the generate() of transformers, in arenas that go to the host and to files.

Each layer has an arena, which grows. A row of it has what is kept of one position: the keys of all texts and heads,
then the values. So a cache grows by appending rows, and nothing that is there is ever moved for that. Attention gets
views of the usual shape, [texts, heads, length, width], as managed tensors: a function that reads one acquires all rows
of the layer, in whole chunks, so that what a pass accesses changes only where the cache grows into another chunk. The
library knows such arenas (GEMINI_ARENA_GROWS), and takes growth for no departure.

Creating an arena has all plans made anew. So the arenas of a cache that is gone serve the next one.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import typing
import weakref

import torch
import transformers
from transformers import cache_utils

from .. import abi
from ..abi import GeminiError
from . import internals
from .arenas import Place
from .internals import StorageWeakRef, plain as _plain
from .memory import can_wrap
from .tensors import ManagedTensor, refuse_tracing, run_with

if typing.TYPE_CHECKING:
    from .session import Session

ATTENTION = None, "eager", "sdpa"  # implementations that consist of functions of torch
ALIGNMENT = 64  # bytes, of the keys and of the values in a row: kernels read several elements at once
# Addresses of a layer's arena: this many times its part of all budgets, as layers may differ.
SHARE = 4
# Rows are rewritten in pieces of so many chunks, or this part of the device budget, whichever is more.
PIECE_CHUNKS, PIECE_SHARE = 4, 32


class Rows(typing.NamedTuple):
    """What a row of a layer has. Sizes in elements."""

    batch: int
    key_heads: int
    key_width: int
    value_heads: int
    value_width: int
    itemsize: int  # bytes

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> Rows:
        """The rows of tensors of shape [texts, heads, length, width]."""
        return cls(keys.shape[0], keys.shape[1], keys.shape[3], values.shape[1], values.shape[3], keys.dtype.itemsize)

    def padded(self, elements: int) -> int:
        """Elements up to where the next part of a row may begin."""
        step = max(ALIGNMENT // self.itemsize, 1)
        return -(-elements // step) * step

    @property
    def values_at(self) -> int:
        """Where the values begin."""
        return self.padded(self.batch * self.key_heads * self.key_width)

    @property
    def length(self) -> int:
        """Elements of a row."""
        return self.values_at + self.padded(self.batch * self.value_heads * self.value_width)

    @property
    def size_bytes(self) -> int:
        return self.length * self.itemsize

    def views(self, flat: torch.Tensor, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of the positions from begin to end: [texts, heads, end - begin, width].

        Args:
            flat: All elements of the layer's arena, of one dimension.
        """
        first = begin * self.length
        return (
            flat.as_strided(
                (self.batch, self.key_heads, end - begin, self.key_width),
                (self.key_heads * self.key_width, self.key_width, self.length, 1),
                first,
            ),
            flat.as_strided(
                (self.batch, self.value_heads, end - begin, self.value_width),
                (self.value_heads * self.value_width, self.value_width, self.length, 1),
                first + self.values_at,
            ),
        )


class CachePlace(Place):
    """The arena of a layer. Its tensor is over all addresses, of which those behind `taken` cannot be acquired yet.

    Attributes:
        used: Bytes from the begin of the arena that rows are in, in whole chunks.
        taken: Bytes of the arena, in whole chunks.
        chunk: Bytes of a chunk.
    """

    __slots__ = ("used", "taken", "chunk", "pool")
    grows = True

    def __init__(self, pool: Caches, arena: int, capacity: int, dtype: torch.dtype, name: str) -> None:
        """capacity: bytes of addresses."""
        self.pool = pool
        self.used = 0
        info = pool.session.manager.arena_info(arena)
        self.taken, self.chunk = info.size_bytes, pool.session.manager.config.chunk_bytes
        super().__init__(pool.session, arena, 0, (capacity // dtype.itemsize,), dtype, name)

    def __del__(self) -> None:
        """Queues the arena for reuse. Python may call this on any thread at any time."""
        if self.tensor is not None and not self.python_ends():
            storages = [*self.storages, StorageWeakRef(self.tensor.untyped_storage())]
            self.pool.left.append((self.arena, self.size_bytes, self.taken, self.dtype, storages))

    def whole(self, size_bytes: int) -> int:
        """A size, up to the end of its last chunk."""
        return -(-size_bytes // self.chunk) * self.chunk

    def spread(self, offset: int, size: int) -> tuple[int, int]:
        """What is acquired for a view: all rows."""
        return 0, max(self.used, self.whole(offset + size))

    def reach(self, size_bytes: int) -> None:
        """Makes room for size_bytes.

        Raises:
            GeminiError: There are no addresses left.
        """
        if size_bytes > self.taken:
            more = self.whole(size_bytes) - self.taken
            if self.taken + more > self.size_bytes:
                raise GeminiError(
                    f"{self.name}: its keys and values are {size_bytes} bytes; the arena of a layer has addresses for "
                    f"{self.size_bytes}, {SHARE} times its part of what all budgets together have room for",
                    "OOM_DEVICE",
                )
            self.session.manager.take(self.arena, more)
            self.taken += more

    def use_first(self, size_bytes: int) -> None:
        """Notes that the first size_bytes are used. Chunks behind them become zero, and take no memory."""
        before, self.used = self.used, self.whole(size_bytes)
        if self.used < before:
            rest = abi.Access(self.arena, self.used, before - self.used, 0, 0, None)
            with contextlib.suppress(GeminiError):  # then they take memory until the cache is gone
                self.session.lib.zero(self.session.handle, ctypes.byref(rest))

    @contextlib.contextmanager
    def held(self, begin: int, end: int, mode: int) -> typing.Iterator[None]:
        """A context manager: the chunks of these bytes are acquired on the device."""
        begin = begin // self.chunk * self.chunk
        access = self.access(mode, offset=begin, size_bytes=self.whole(end) - begin)
        with self.session.holds.acquired(access, 1, self.session.holds.stream()):
            yield


class Caches:
    """The arenas of a session's caches.

    Attributes:
        free: By dtype: arenas that no cache uses, as (bytes of addresses, handle).
        left: Arenas whose place is gone: (handle, bytes of addresses, bytes taken, dtype, storages).
        numbers: Those of the caches that there are. A cache gets the lowest one that is free, so that the operators of
            one text after another have the same names.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.free: dict[torch.dtype, list[tuple[int, int]]] = collections.defaultdict(list)
        self.left: collections.deque[tuple[typing.Any, ...]] = collections.deque()
        self.numbers: set[int] = set()
        self.count = 0  # arenas made so far

    def number(self) -> int:
        """Takes a number."""
        number = next(i for i in range(len(self.numbers) + 1) if i not in self.numbers)
        self.numbers.add(number)
        return number

    def drain(self) -> None:
        """Zeroes the arenas of caches that are gone, and gives back their memory. One in use is left for later."""
        for _ in range(len(self.left)):
            left = self.left.popleft()
            arena, capacity, taken, dtype, storages = left
            used = ctypes.byref(abi.Access(arena, 0, taken, 0, 0, None))
            try:
                if not all(storage.expired() for storage in storages):
                    raise GeminiError("a tensor over it exists", "BUSY")
                if taken:
                    self.session.lib.zero(self.session.handle, used)
            except GeminiError:
                self.left.append(left)
            else:
                self.free[dtype].append((capacity, arena))
                self.free[dtype].sort()

    def provide(self, dtype: torch.dtype, layers: int) -> None:
        """Makes arenas, so that a cache of so many layers finds its arenas."""
        self.drain()
        capacity = self.capacity(layers)
        for _ in range(layers - sum(size >= capacity for size, _ in self.free[dtype])):
            self.free[dtype].append((capacity, self.make(dtype, capacity)))
        self.free[dtype].sort()

    def capacity(self, layers: int) -> int:
        """Bytes of addresses for each layer, in whole pieces of 1 GiB."""
        budgets = sum(self.session.manager.stats()["budget_bytes"].values())
        return -(-SHARE * budgets // max(layers, 1) >> 30 << 30 or 1 << 30)

    def make(self, dtype: torch.dtype, capacity: int) -> int:
        """Makes an arena."""
        manager = self.session.manager
        self.count += 1
        arena = manager.arena(
            abi.KIND_OTHER,
            name=f"cache.{str(dtype).removeprefix('torch.')}.{self.count}",
            element_bytes=dtype.itemsize,
            capacity=capacity,
            grows=True,
        )
        self.session.arenas.bases[arena] = manager.arena_info(arena).base, len(self.session.arenas.bases)
        return arena

    def place(self, dtype: torch.dtype, layers: int, name: str) -> CachePlace:
        """Takes the arena of a layer, of a cache of so many layers."""
        wanted, free = self.capacity(layers), self.free[dtype]
        index = next((i for i, (size, _) in enumerate(free) if size >= wanted), None)
        capacity, arena = free.pop(index) if index is not None else (wanted, self.make(dtype, wanted))
        return CachePlace(self, arena, capacity, dtype, name)


def caches(session: Session) -> Caches:
    """The Caches of a session, made at the first use."""
    if session.caches is None:
        session.caches = Caches(session)
    return session.caches


class Layer(cache_utils.DynamicLayer):
    """The keys and values of one layer. transformers calls its methods.

    Attributes:
        keys, values: Managed tensors [texts, heads, length, width], as update() returned them last; None without rows.
        length: How many positions it has.
        rows: What a row has; None without rows.
        lost: Whether an exception came while rows were rewritten.
        made: What the layer has set keys and values to.
    """

    def __init__(self, pool: Caches, layers: int, name: str) -> None:
        """layers: how many the cache has."""
        super().__init__()
        self.pool = pool
        self.layers = layers
        self.name = name
        self.place: CachePlace | None = None
        self.rows: Rows | None = None
        self.length = 0
        self.lost = False
        self.made: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)

    def __reduce_ex__(self, protocol: typing.Any) -> typing.Any:
        raise GeminiError(f"{self.name}: a cache of libgemini cannot be pickled: copy its keys and values")

    # ---- what transformers asks
    def get_seq_length(self) -> int:
        """How many positions it has."""
        return self.length

    def offload(self) -> None:
        """Nothing: the session moves its bytes."""

    def prefetch(self) -> None:
        """Nothing: the session moves its bytes."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        """Takes an arena.

        Args:
            key_states: Keys, [texts, heads, positions, width], of which only shape and dtype count.
            value_states: Values likewise. None: as the keys.
        """
        self.rows = Rows.of(key_states, key_states if value_states is None else value_states)
        self.dtype, self.device = key_states.dtype, self.pool.session.device
        if self.place is not None and self.place.dtype != self.dtype:
            self.place = None
        if self.place is None:
            self.place = self.pool.place(self.dtype, self.layers, self.name)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: typing.Any, **kwargs: typing.Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends positions.

        Args:
            key_states: Keys, [texts, heads, positions, width], on the session's device.
            value_states: Values, likewise.
            args: More that transformers gives, which is not used.
            kwargs: Likewise.

        Returns:
            All keys and all values.

        Raises:
            GeminiError: They do not fit to those before, need gradients, or there is no room; nothing has changed.
        """
        self.check(key_states, value_states)
        count = key_states.shape[-2]
        with _plain(), torch.no_grad():
            if not self.length:
                self.lazy_initialization(key_states, value_states)
            rows, place = self.ready()
            begin, end = self.length * rows.size_bytes, (self.length + count) * rows.size_bytes
            place.reach(end)
            if end > begin:
                session, first = self.pool.session, begin // place.chunk * place.chunk
                use = session.holds.use(((place, first, place.whole(end) - first, abi.READ_WRITE),), "append")
                to = rows.views(place.tensor, self.length, self.length + count)
                run_with(session, use, _copy_all, (to, (key_states, value_states)), {})
                self.length += count
                place.use_first(end)
            self.look()
        return typing.cast("tuple[torch.Tensor, torch.Tensor]", (self.keys, self.values))

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last positions.

        Args:
            tokens_to_remove: How many, as a negative number; 0: none; above 0: how many stay.
        """
        left = self.length + tokens_to_remove if tokens_to_remove <= 0 else min(tokens_to_remove, self.length)
        self.shorten(max(left, 0))

    def reset(self) -> None:
        """Removes all, and gives the memory back."""
        self.shorten(0)
        self.rows = None
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        self.lost = self.is_initialized = False

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Chooses texts anew.

        Args:
            beam_idx: For each text, which one it is to be.
        """
        self.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each text.

        Args:
            repeats: How often.
        """
        if self.rows is not None:
            self.select(torch.arange(self.rows.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps some texts.

        Args:
            indices: Their numbers, or a mask of one dimension.
        """
        if self.rows is not None:
            self.select(torch.arange(self.rows.batch, device=indices.device)[indices])

    # ---- rows
    def check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Raises GeminiError if they cannot be appended."""
        session = self.pool.session
        session.refuse_closed(self.name)
        refuse_tracing(self.name)
        if internals.within_compiled() or internals.transform_level() is not None:
            raise GeminiError(
                f"{self.name}: torch.compile() and torch.func cannot trace a cache of libgemini: leave the model "
                "uncompiled, or use transformers' own cache"
            )
        self.refuse_replaced()
        if self.lost:
            raise GeminiError(
                f"{self.name}: an exception came while its texts were reordered, so its keys and values are lost: "
                "reset() it, or take a new cache"
            )
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            raise GeminiError(
                f"{self.name}: the keys or values need gradients: gm.Cache is for passes without (no_grad())"
            )
        if (
            keys.dim() != 4
            or values.dim() != 4
            or (keys.shape[0], keys.shape[2]) != (values.shape[0], values.shape[2])
            or keys.dtype != values.dtype
            or not can_wrap(keys.dtype)
            or keys.device != values.device
            or keys.device.type != session.device.type
            or (keys.device.index or 0) != (session.device.index or 0)
        ):
            raise GeminiError(
                f"{self.name}: keys of {tuple(keys.shape)}, {keys.dtype} on {keys.device} and values of "
                f"{tuple(values.shape)}, {values.dtype} on {values.device}: want [texts, heads, positions, width], of "
                f"one dtype, on {session.device}"
            )
        if self.length and (Rows.of(keys, values) != self.rows or keys.dtype != self.dtype):
            raise GeminiError(
                f"{self.name}: keys of {tuple(keys.shape)}, {keys.dtype} and values of {tuple(values.shape)} do not "
                f"fit to the {self.length} positions that it has: {self.rows}"
            )

    def ready(self) -> tuple[Rows, CachePlace]:
        """The rows and the place of a layer that has an arena."""
        assert self.rows is not None and self.place is not None
        return self.rows, self.place

    def look(self) -> None:
        """Makes keys and values anew."""
        rows, place = self.ready()
        self.keys, self.values = (_managed(view, place) for view in rows.views(place.tensor, 0, self.length))
        self.made = self.keys, self.values

    def refuse_replaced(self) -> None:
        """Raises GeminiError if something else was put in the place of keys or values: the bytes are the arena's."""
        if self.length and (self.keys is not self.made[0] or self.values is not self.made[1]):
            raise GeminiError(
                f"{self.name}: keys or values of the layer have been replaced by another tensor, which a cache of "
                "libgemini does not read: crop() removes positions, and copy_() into keys and values changes them"
            )

    def shorten(self, length: int) -> None:
        """Removes the positions from length on."""
        if length >= self.length or self.pool.session.manager.handle == 0:
            return
        if length:
            self.refuse_replaced()
        with _plain(), torch.no_grad():
            rows, place = self.ready()
            self.length = length
            place.use_first(length * rows.size_bytes)
            self.look()

    def pieces(self, *rows: Rows) -> list[tuple[int, int]]:
        """The positions in pieces, none of which takes much of the device: [(begin, end)]."""
        _, place = self.ready()
        budget = self.pool.session.manager.stats()["budget_bytes"]["device"]
        step = max(PIECE_CHUNKS * place.chunk, budget // PIECE_SHARE) // max(one.size_bytes for one in rows) or 1
        return [(begin, min(begin + step, self.length)) for begin in range(0, self.length, step)]

    def select(self, indices: torch.Tensor) -> None:
        """Rewrites all rows for other texts: those of these numbers."""
        if not self.length:
            return
        self.pool.session.refuse_closed(self.name)
        self.refuse_replaced()
        with _plain(), torch.no_grad():
            old, place = self.ready()
            indices = indices.to(self.device)
            new = old._replace(batch=len(indices))
            pieces = self.pieces(old, new)
            if (
                new.size_bytes > old.size_bytes
            ):  # from the last one on, so that nothing is overwritten that is to be read
                place.reach(self.length * new.size_bytes)
                pieces.reverse()
            for begin, end in pieces:
                with place.held(begin * old.size_bytes, end * old.size_bytes, abi.READ):
                    copies = [view.index_select(0, indices) for view in old.views(place.tensor, begin, end)]
                self.lost = True
                with place.held(begin * new.size_bytes, end * new.size_bytes, abi.READ_WRITE):
                    _copy_all(new.views(place.tensor, begin, end), copies)
            self.rows = new
            place.use_first(self.length * new.size_bytes)
            self.lost = False
            self.look()

    def copy_to(self, other: Layer) -> None:
        """Appends all positions to another layer."""
        if self.length:
            rows, place = self.ready()
            with torch.no_grad():
                for begin, end in self.pieces(rows):
                    with _plain(), place.held(begin * rows.size_bytes, end * rows.size_bytes, abi.READ):
                        copies = [view.clone() for view in rows.views(place.tensor, begin, end)]
                    other.update(*copies)


def _copy_all(to: typing.Iterable[torch.Tensor], source: typing.Iterable[torch.Tensor]) -> None:
    for one, values in zip(to, source):
        one.copy_(values)


def _managed(view: torch.Tensor, place: CachePlace) -> torch.Tensor:
    """Makes a view of a place's tensor a managed one."""
    view.__class__ = ManagedTensor
    typing.cast(ManagedTensor, view)._gm_place = place
    return view


def _layers_of(config: transformers.PreTrainedConfig) -> int:
    """How many layers a cache for a model of this configuration has.

    Raises:
        GeminiError: A layer is not one of full attention, or attention is computed by what is no function of torch.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise GeminiError(
            f"{type(config).__name__}: an encoder with a decoder has a second cache of the encoder's results, which "
            "gm.Cache does not keep: leave past_key_values to generate()"
        )
    decoder = config.get_text_config(decoder=True)
    for one in config, decoder:
        attention = getattr(one, "_attn_implementation", None)
        if attention not in ATTENTION:
            raise GeminiError(
                f"{type(one).__name__}: the attention {attention!r} reads keys and values by functions that are not "
                'torch\'s, which would not know whether the bytes are there: set_attn_implementation("sdpa") or "eager"'
            )
    layers = cache_utils.DynamicCache(config=decoder).layers
    others = {type(layer).__name__ for layer in layers if type(layer) is not cache_utils.DynamicLayer}
    if others or not layers:
        raise GeminiError(
            f"{type(config).__name__}: gm.Cache has layers of full attention, and transformers' cache for it has "
            f"{', '.join(sorted(others)) or 'none'} (sliding windows, states of linear attention, ...): leave "
            "past_key_values to generate()"
        )
    return len(layers)


class Cache(transformers.Cache):
    """A cache of keys and values for generate() that goes to the host, and to files, as weights do.

        model.generate(ids, past_key_values=gm.Cache(model))

    It serves one text, or one batch, after another if it is reset() between them. A cache that nothing refers to gives
    its memory back before the next pass of a model, at the latest.
    """

    def __init__(self, model: torch.nn.Module | transformers.PreTrainedConfig) -> None:
        """Takes what each layer needs from the open session. No memory is taken before the first pass.

        Args:
            model: A model that was given to libgemini.torch.infer() or prepare(), or its configuration.

        Raises:
            GeminiError: There is no session, it is one of several processes, or the model has layers that are not of
                full attention, or is an encoder with a decoder, or its attention is not "sdpa" or "eager".
            TypeError: It is neither a model of transformers nor a configuration.
        """
        import libgemini.torch as gm

        session = gm.session()
        self.config = getattr(model, "config", model)
        if not isinstance(self.config, transformers.PreTrainedConfig):
            raise TypeError(f"gm.Cache: want a model of transformers or its config, not a {type(model).__name__}")
        if session.ranks:
            raise GeminiError("gm.Cache: one process only: this session is one of several ranks")
        count = _layers_of(self.config)
        pool = caches(session)
        dtype = getattr(model, "dtype", None)
        pool.provide(dtype if isinstance(dtype, torch.dtype) else torch.get_default_dtype(), count)
        for one in session.models:
            if one.module is model or getattr(one.module, "config", None) is self.config:
                one.blocks.stop()
        number = pool.number()
        weakref.finalize(self, pool.numbers.discard, number)
        self._layers = [Layer(pool, count, f"cache {number}.{i}") for i in range(count)]
        super().__init__(layers=list(self._layers))

    @contextlib.contextmanager
    def _rewriting(self) -> typing.Iterator[None]:
        """A context manager: an exception within leaves some layers with other texts than others have."""
        try:
            yield
        except BaseException:
            for layer in self._layers:
                layer.lost = layer.length > 0
            raise

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Chooses texts anew.

        Args:
            beam_idx: For each text, which one it is to be.
        """
        with self._rewriting():
            super().reorder_cache(typing.cast("torch.LongTensor", beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each text.

        Args:
            repeats: How often.
        """
        with self._rewriting():
            super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps some texts.

        Args:
            indices: Their numbers, or a mask of one dimension.
        """
        with self._rewriting():
            super().batch_select_indices(indices)

    def __deepcopy__(self, memo: dict[int, typing.Any]) -> Cache:
        """A cache with the same keys and values, such as those of a prompt that several texts begin with."""
        other = memo[id(self)] = Cache(self.config)
        for layer, copy in zip(self._layers, other._layers):
            layer.copy_to(copy)
        return other
