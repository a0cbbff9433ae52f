"""States of AdamW in fewer bytes than fp32: momentum and variance in bf16 or in blocks of 8-bit codes; split masters.

A split master is the fp32 copy of a bf16 parameter without what the parameter says already: the parameter is its upper
half, rounded to nearest, ties away from zero, and the arena of masters has its lower 16 bits. docs/update.md has both.

Everything outside of the session sees fp32: files, state dicts, and the states of another optimizer that follows.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import typing

import torch

from .. import abi
from ..abi import GeminiError
from .arenas import ALIGNMENT, DTYPES, Place
from .ranks import SlicedPlace

if typing.TYPE_CHECKING:
    from .model import Record
    from .owners import Owners
    from .ranks import Ranks

# The dtype of momentum and variance in arenas, by prepare()'s option, and what the C library calls it.
STATES = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}
LIBRARY = {**DTYPES, torch.uint8: abi.DTYPE_BLOCK8}
BLOCK, SCALE_BITS = 256, 16  # elements of a block, and those of them that have a bit of its scale
assert BLOCK == ALIGNMENT  # a parameter begins with a block
MASTERS = ("fp32", "split16")
HALF = torch.int16  # the dtype of the lower halves of split masters
PIECE_ELEMENTS = 1 << 20  # converted at once


def check(states: str, masters: str) -> None:
    """Raises ValueError if prepare() has no such option."""
    for name, value, known in (("states", states, tuple(STATES)), ("masters", masters, MASTERS)):
        if value not in known:
            raise ValueError(f"{name} is {value!r}: want {' or '.join(map(repr, known))}")


def joined(upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """fp32 masters of bf16 parameters and int16 lower halves: a half with a sign is added to the upper one."""
    return ((upper.view(HALF).to(torch.int32) << 16) + lower.to(torch.int32)).view(torch.float32)


def halves(masters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bf16 parameters and the int16 lower halves of fp32 masters."""
    bits, nan = masters.view(torch.int32), masters.isnan()
    upper = ((bits + 0x8000) >> 16).masked_fill(nan, 0x7FC0).to(HALF).view(torch.bfloat16)
    return upper, bits.masked_fill(nan, 0).to(HALF)


def renewed(values: torch.Tensor, master: torch.Tensor) -> torch.Tensor | None:
    """What fp32 copies, or their lower halves, have to be now that some elements of the parameters may have been
    written.

    A copy that rounds to its parameter stays: the element was not written, or its value did not change. Lower halves go
    with nearly every upper one, so that forget_halves() has to be told which elements changed; here those become 0 that
    no number has, such as a negative half beside the upper half of 0.

    Args:
        values: The parameters.
        master: What their copies, or lower halves, are.

    Returns:
        New values for master, or None: it stays as it is.
    """
    if master.dtype != HALF:
        other = master.to(values.dtype).view(HALF) != values.view(HALF)
        return torch.where(other, values.to(master.dtype), master) if other.any() else None
    upper, _ = halves(joined(values, master))
    other = upper.view(HALF) != values.view(HALF)
    return master.masked_fill(other, 0) if other.any() else None


def renew(param: Place, master: Place) -> None:
    """Updates fp32 copies, or their lower halves, from parameters of one process; see renewed()."""
    for first in range(0, param.elements, PIECE_ELEMENTS):
        count = min(PIECE_ELEMENTS, param.elements - first)
        new = renewed(_take(param, first, count, own=False), _take(master, first, count, own=False))
        if new is not None:
            _put(master, first, new)


class Watch:
    """Finds out which elements of parameters with split masters a function changes.

    Attributes:
        ranges: By place of a parameter, the first element and the number of those that the function may write.
        found: Likewise, for each range its place, the first element, and which ones the function has changed.
    """

    def __init__(self, ranges: typing.Sequence[tuple[Place, int, int]]) -> None:
        self.ranges = ranges
        self.found: list[tuple[Place, int, torch.Tensor]] = []

    def call(self, func: typing.Any, *args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        """Calls the function, with the elements on the device."""
        with torch.no_grad():
            flats = [place.tensor.as_strided((place.elements,), (1,)) for place, _, _ in self.ranges]
            parts = [flat.view(HALF)[first : first + n] for flat, (_, first, n) in zip(flats, self.ranges)]
            before = [part.clone() for part in parts]
        try:
            return func(*args, **kwargs)
        finally:
            with torch.no_grad():
                for (place, first, _), old, new in zip(self.ranges, before, parts):
                    self.found.append((place, first, old != new))

    def forget_halves(self) -> None:
        """Makes the lower halves of changed elements 0: their masters are what was written."""
        for place, begin, changed in self.found:
            record = place.owner() if place.owner is not None else None
            if record is None or not record.split or not changed.any():
                continue
            changed, master = changed.cpu(), record.states["master"]
            end = begin + changed.numel()
            sliced = isinstance(master, SlicedPlace)
            steps = ((at, min(at + PIECE_ELEMENTS, end)) for at in range(begin, end, PIECE_ELEMENTS))
            for first, last in master.parts(begin, end, PIECE_ELEMENTS) if isinstance(master, SlicedPlace) else steps:
                some = changed[first - begin : last - begin]
                if some.any():
                    _put(master, first, _take(master, first, last - first, own=sliced).masked_fill(some, 0))


# ---- 8-bit codes, as bindings/update/kernel.h reads and writes them; update.h says what they are
def _f32(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device="cpu")


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


_EDGES = {
    6: _f32(1.028125e-01, 1.05625e-02, 1.1125e-03, 1.225e-04, 1.45e-05, 1.9e-06),
    7: _f32(1.0140625e-01, 1.028125e-02, 1.05625e-03, 1.1125e-04, 1.225e-05, 1.45e-06),
}
_ZERO_OF_MOMENTA, _ONE_OF_MOMENTA = 2.75e-07, 9.964844e-01
_ABOVE_VARIANCES, _ABOVE_COARSE = 1.003528, 1.0035405


def _codes(top: int, coarse: bool) -> torch.Tensor:
    """What each of the 256 codes stands for, in fp32. top: 6 for the momentum, 7 for the variance."""
    code = torch.arange(256, dtype=torch.int32, device="cpu")
    magnitude = code & (0x7F if top == 6 else 0xFF) & (0xFE if coarse else 0xFF)
    number = magnitude.to(torch.float32).clamp(min=1)
    exponent = torch.frexp(number).exponent - 1
    count = _power_of_two(exponent)
    middle = (1 if coarse else 0.5) / count
    power = _f32(1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1)[exponent + 7 - top]
    value = (_f32(0.9) * (number / count - 1 + middle) + _f32(0.1)) * power
    value[magnitude == 0] = 0
    if top == 6:
        if not coarse:
            value[0x80] = 1
        value[0x81:] *= -1
    else:
        value[1] = 0  # no variance has it
    return value


_FINE, _COARSE = ({top: _codes(top, coarse) for top in (6, 7)} for coarse in (False, True))
_LOWEST = (1 << torch.arange(SCALE_BITS, dtype=torch.int32, device="cpu")).to(torch.int32)


def decoded(codes: torch.Tensor, top: int) -> torch.Tensor:
    """The fp32 values of blocks of codes, of shape (blocks, BLOCK)."""
    index = codes.to(torch.int64)
    bits = ((codes[:, :SCALE_BITS] & 1).to(torch.int32) * _LOWEST).sum(1, dtype=torch.int32)
    scale = (bits << 16).view(torch.float32)[:, None]
    return torch.cat((_COARSE[top][index[:, :SCALE_BITS]], _FINE[top][index[:, SCALE_BITS:]]), 1) * scale


def _with_scale(values: torch.Tensor, scale: torch.Tensor, top: int) -> torch.Tensor:
    """The nearest codes with this scale. (A step rounds variances by random bits.)"""
    x = values.abs() / scale[:, None]
    of_numbers = x.isfinite()  # not in blocks of zeros, and of no numbers
    x = torch.where(of_numbers, x, 0)
    decade = (x[:, :, None] < _EDGES[top]).sum(2)
    count = _power_of_two(top - decade)
    power = _f32(1, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6)[decade]
    place = (x * power - _f32(0.1)) * _f32(1.1111112) * count
    codes = (count + torch.where(place < count, place.trunc(), count - 1)).to(torch.int32)
    codes[:, :SCALE_BITS] &= 0xFE
    # Of variances 0 alone: anything else that became 0 would make a step of momentum / eps.
    codes[x < _f32(_ZERO_OF_MOMENTA) if top == 6 else (values == 0) | ~of_numbers] = 0
    negative = values.signbit()
    if top == 6:
        codes |= torch.where(negative & (codes > 0), 0x80, 0)
        ones = (x >= _f32(_ONE_OF_MOMENTA)) & ~negative
        ones[:, :SCALE_BITS] = False
        codes[ones] = 0x80
    codes[:, :SCALE_BITS] |= scale.view(torch.int32)[:, None] >> 16 & _LOWEST > 0
    return codes.to(torch.uint8)


def encoded(values: torch.Tensor, top: int) -> torch.Tensor:
    """The codes of fp32 values, in blocks of shape (blocks, BLOCK).

    Values that codes stand for become these codes again: of the scales that the largest magnitude of a block may come
    from, one gives all its values back. Other values get the scale that a step gives them, and the nearest codes.
    """
    magnitudes = values.abs()
    most = above = magnitudes.amax(1)
    if top == 7:  # the highest code is not below the largest
        coarse = magnitudes[:, :SCALE_BITS].amax(1) * _f32(_ABOVE_COARSE)
        above = torch.maximum(magnitudes[:, SCALE_BITS:].amax(1), coarse) * _f32(_ABOVE_VARIANCES)
    bits = above.view(torch.int32)
    bits = torch.where((bits > 0x7F7F0000) | above.isnan(), 0x7FC00000, (bits + 0xFFFF) & ~0xFFFF).to(torch.int32)
    codes = _with_scale(values, bits.view(torch.float32), top)
    # What the largest of a block may be, of its scale: a variance may have lost a step between codes.
    highest = (2 << top) - 1
    parts = [1.0, *_FINE[top][[highest, highest - 1, highest - 2]].tolist()]
    parts += _COARSE[top][[highest, highest - 2]].tolist()
    left = torch.ones(len(values), dtype=torch.bool, device="cpu")
    for part in parts:
        scale = (most / _f32(part)).to(torch.bfloat16).to(torch.float32)
        tried = _with_scale(values, scale, top)
        exact = left & (decoded(tried, top) == values).all(1)
        codes[exact] = tried[exact]
        left &= ~exact
    return codes


def state_place(record: Record, kind: str, dtype: torch.dtype) -> Place:
    """Makes the place of a parameter's momentum or variance. In blocks it has the padding behind the parameter, too."""
    place, arenas = record.place, record.session.arenas
    if dtype != torch.uint8:
        return arenas.counterpart(place, kind, dtype)
    elements = -(-place.elements // BLOCK) * BLOCK
    first = place.offset // place.dtype.itemsize
    arena = arenas.arena(kind, dtype, place.arena)
    out = arenas.place_type(arena)(record.session, arena, first, (elements,), dtype, f"{place.name}.{kind}")
    out.follows = place
    return out


def _take(place: Place, begin: int, count: int, own: bool) -> torch.Tensor:
    """Copies elements from begin on; own: this rank keeps all of them, otherwise all ranks have to call it."""
    out = torch.empty(count, dtype=place.dtype, device="cpu")
    if own and isinstance(place, SlicedPlace):
        for first, piece in place.host_pieces(abi.READ, begin, begin + count):
            out[first - begin : first - begin + piece.numel()].copy_(piece)
    else:
        place.read_to(out, begin)
    return out


def _put(place: Place, begin: int, values: torch.Tensor) -> None:
    """Writes elements from begin on, on several ranks those of them that this rank keeps. A host without room has them
    written on the device, by one process.
    """
    end = begin + values.numel()
    for pieces in place.host_pieces, place.device_pieces:
        try:
            for first, piece in pieces(abi.WRITE, begin=begin, end=end):
                piece.copy_(values[first - begin : first - begin + piece.numel()])
            return
        except GeminiError as error:
            if error.status != "OOM_HOST" or pieces == place.device_pieces or isinstance(place, SlicedPlace):
                raise


class Narrow:
    """A state as the fp32 tensor that it stands for.

    Attributes:
        place: Where the state is, of bf16 or in blocks, or the lower halves of split masters.
        param: The place of the parameter.
        kind: "master", "momentum" or "variance".
        dtype: float32.
    """

    dtype = torch.float32

    def __init__(self, place: Place, param: Place, kind: str) -> None:
        self.place = place
        self.param = param
        self.kind = kind
        self.shape, self.elements = param.shape, param.elements
        self.contiguous = param.contiguous

    @property
    def sliced(self) -> bool:
        """Whether it is divided among ranks, in the same elements as the parameter."""
        return isinstance(self.place, SlicedPlace)

    @property
    def ranks(self) -> Ranks:
        """The ranks that it is divided among."""
        assert isinstance(self.place, SlicedPlace)
        return self.place.ranks

    @property
    def owners(self) -> Owners:
        """The ranks that have slices of it."""
        assert isinstance(self.place, SlicedPlace)
        return self.place.owners

    @property
    def entire(self) -> tuple[tuple[int, ...], int]:
        """As of the parameter's place, on ranks."""
        assert isinstance(self.param, SlicedPlace)
        return self.param.entire

    def own_ranges(self, most: int) -> typing.Iterator[tuple[int, int]]:
        """The elements that this process keeps, in the order of the elements in memory: whole blocks, but for the end.

        Args:
            most: The elements of a range at most, a multiple of BLOCK.

        Yields:
            The first element of a range, and the element behind it.
        """
        if isinstance(self.place, SlicedPlace):
            yield from self.place.parts(0, self.elements, most)
            return
        for first in range(0, self.elements, most):
            yield first, min(first + most, self.elements)

    def pieces(self, own: bool = False) -> typing.Iterator[tuple[int, torch.Tensor]]:
        """Copies the values, in the order of the elements in memory.

        Args:
            own: Only what this process keeps. Otherwise all ranks have to call it.

        Yields:
            The first element of a piece, and a CPU tensor of one dimension.
        """
        most = PIECE_ELEMENTS
        whole = ((first, min(first + most, self.elements)) for first in range(0, self.elements, most))
        for first, last in self.own_ranges(most) if own else whole:
            count = last - first
            if self.place.dtype == torch.uint8:
                codes = _take(self.place, first, -(-count // BLOCK) * BLOCK, own)
                yield first, decoded(codes.view(-1, BLOCK), self.top).view(-1)[:count]
            elif self.kind == "master":
                yield first, joined(_take(self.param, first, count, own), _take(self.place, first, count, own))
            else:
                yield first, _take(self.place, first, count, own).float()

    @property
    def top(self) -> int:
        """Of states in blocks, which codes they have."""
        return 6 if self.kind == "momentum" else 7

    def put(self, first: int, values: torch.Tensor) -> None:
        """Writes fp32 values of one dimension, on the CPU. Masters bring their parameter. A rank writes what it keeps.

        Args:
            first: The element that they begin with, a multiple of BLOCK.
            values: As many as a multiple of BLOCK, or up to the last element.
        """
        if self.place.dtype == torch.uint8:
            padded = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK))
            _put(self.place, first, encoded(padded.view(-1, BLOCK), self.top).view(-1))
        elif self.kind == "master":
            upper, lower = halves(values)
            _put(self.param, first, upper)
            _put(self.place, first, lower)
            self.param.written = False  # both halves agree
        else:
            _put(self.place, first, values.to(self.place.dtype))

    def read(self) -> torch.Tensor:
        """Copies the values to a CPU tensor with the strides of the place. All ranks have to call it."""
        out = torch.empty_strided(self.shape, self.param.stride, dtype=torch.float32, device="cpu")
        flat = out.as_strided((self.elements,), (1,))
        for first, piece in self.pieces():
            flat[first : first + piece.numel()].copy_(piece)
        return out

    def write(self, values: torch.Tensor) -> None:
        """Copies values of the same number of elements, of any dtype and device."""
        flat = self.param.in_order(values.detach())
        for first in range(0, self.elements, PIECE_ELEMENTS):
            some = flat[first : first + PIECE_ELEMENTS]
            self.put(first, torch.empty(some.numel(), dtype=torch.float32, device="cpu").copy_(some))


def seen(record: Record, kind: str) -> Place | Narrow:
    """A state of a parameter as everything outside of the session sees it."""
    place = record.states[kind]
    if place.dtype == torch.float32:
        return place
    return Narrow(place, record.place, kind)
