"""States of AdamW in fewer bytes than fp32: momentum and variance in bf16, and split masters.

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
from .arenas import Place

if typing.TYPE_CHECKING:
    from .model import Record

STATES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # the dtype of momentum and variance, by prepare()'s option
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


def _take(place: Place, begin: int, count: int) -> torch.Tensor:
    out = torch.empty(count, dtype=place.dtype, device="cpu")
    place.read_to(out, begin)
    return out


def _put(place: Place, begin: int, values: torch.Tensor) -> None:
    """Writes elements from begin on. A host without room has them written on the device."""
    end = begin + values.numel()
    for pieces in place.host_pieces, place.device_pieces:
        try:
            for first, piece in pieces(abi.WRITE, begin=begin, end=end):
                piece.copy_(values[first - begin : first - begin + piece.numel()])
            return
        except GeminiError as error:
            if error.status != "OOM_HOST" or pieces == place.device_pieces:
                raise


class Narrow:
    """A state as the fp32 tensor that it stands for.

    Attributes:
        place: Where the state is, of bf16, or the lower halves of split masters.
        upper: Of split masters, the place of the parameter.
        dtype: float32.
    """

    dtype = torch.float32

    def __init__(self, place: Place, upper: Place | None = None) -> None:
        self.place = place
        self.upper = upper
        self.shape, self.elements = place.shape, place.elements
        self.contiguous = place.contiguous

    def pieces(self) -> typing.Iterator[tuple[int, torch.Tensor]]:
        """Copies the values, in the order of the elements in memory.

        Yields:
            The first element of a piece, and a CPU tensor of one dimension.
        """
        for first in range(0, self.elements, PIECE_ELEMENTS):
            count = min(PIECE_ELEMENTS, self.elements - first)
            values = _take(self.place, first, count)
            if self.upper is None:
                yield first, values.float()
            else:
                yield first, joined(_take(self.upper, first, count), values)

    def put(self, first: int, values: torch.Tensor) -> None:
        """Writes fp32 values of one dimension, on the CPU, from the element first on. Masters bring their parameter."""
        if self.upper is None:
            _put(self.place, first, values.to(self.place.dtype))
            return
        upper, lower = halves(values)
        _put(self.upper, first, upper)
        _put(self.place, first, lower)
        self.upper.written = False  # both halves agree

    def read(self) -> torch.Tensor:
        """Copies the values to a CPU tensor with the strides of the place."""
        out = torch.empty_strided(self.shape, self.place.stride, dtype=torch.float32, device="cpu")
        flat = out.as_strided((self.elements,), (1,))
        for first, piece in self.pieces():
            flat[first : first + piece.numel()].copy_(piece)
        return out

    def write(self, values: torch.Tensor) -> None:
        """Copies values of the same number of elements, of any dtype and device."""
        flat = self.place.in_order(values.detach())
        for first in range(0, self.elements, PIECE_ELEMENTS):
            some = flat[first : first + PIECE_ELEMENTS]
            self.put(first, torch.empty(some.numel(), dtype=torch.float32, device="cpu").copy_(some))


def seen(record: Record, kind: str) -> Place | Narrow:
    """A state of a parameter as everything outside of the session sees it."""
    place = record.states[kind]
    if place.dtype == torch.float32:
        return place
    return Narrow(place, record.place if kind == "master" else None)
