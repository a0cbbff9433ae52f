"""Layouts: which bytes of a storage a tensor has, whether two tensors share bytes, and which bytes of an arena are
free.

SPDX-License-Identifier: Apache-2.0
"""

import bisect
import typing

import torch

from .internals import StorageWeakRef, plain


def contiguous_stride(shape):
    """The strides, in elements, of a contiguous tensor of a shape."""
    out, step = [], 1
    for size in reversed(shape):
        out.append(step)
        step *= max(size, 1)
    return tuple(reversed(out))


def is_dense(shape, stride):
    """Whether the elements lie side by side without gaps, in any order of dimensions, such as channels-last."""
    step = 1
    for own, size in sorted(zip(stride, shape)):
        if size > 1 and own != step:
            return False
        step *= max(size, 1)
    return True


def dense_stride(tensor):
    """A tensor's strides if it is dense; otherwise contiguous ones."""
    return tuple(tensor.stride()) if is_dense(tensor.shape, tensor.stride()) else contiguous_stride(tensor.shape)


class Span(typing.NamedTuple):
    """The bytes of its storage that a tensor covers."""

    # Equal for tensors of one storage, also after the storage was freed: its number is not reused.
    storage: StorageWeakRef
    first: int  # byte of the first element
    end: int  # byte after the last one
    shape: tuple
    stride: tuple  # in elements
    itemsize: int

    @property
    def dense(self):
        return is_dense(self.shape, self.stride)

    def shares_with(self, other):
        """Whether two spans have a byte in common."""
        if self.storage != other.storage or self.end <= other.first or other.end <= self.first:
            return False
        begin = min(self.first, other.first)
        if self.dense and other.dense or self.itemsize != other.itemsize or (self.first - other.first) % self.itemsize:
            return True
        marks = torch.zeros((max(self.end, other.end) - begin) // self.itemsize, dtype=torch.bool, device="cpu")
        # Each may lie in gaps of the other, so the elements are marked one by one.
        for one, use in (self, lambda part: part.fill_(True)), (other, torch.any):
            shape = [1 if step == 0 else size for size, step in zip(one.shape, one.stride)]
            shared = use(marks.as_strided(shape, one.stride, (one.first - begin) // one.itemsize))
        return bool(shared)


def span(tensor):
    """The span of a tensor that has elements."""
    with plain():
        size = tensor.dtype.itemsize
        first = tensor.storage_offset() * size
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))
        return Span(
            StorageWeakRef(tensor.untyped_storage()),
            first,
            first + (last + 1) * size,
            tuple(tensor.shape),
            tensor.stride(),
            size,
        )


class Space:
    """The free ranges of an arena. The lowest range that fits is taken; neighbouring ranges are joined."""

    def __init__(self):
        self.ranges = []  # [(offset, end)], in their order; none touches the next

    def take(self, size, alignment):
        """Takes size bytes at a multiple of alignment. Returns their offset, or None if there are none."""
        for i, (begin, end) in enumerate(self.ranges):
            offset = -(-begin // alignment) * alignment
            if offset + size <= end:
                self.ranges[i : i + 1] = [one for one in ((begin, offset), (offset + size, end)) if one[0] < one[1]]
                return offset
        return None

    def give(self, offset, size):
        """Gives bytes back. Returns the begin and end of the free range that they are in now."""
        end = offset + size
        i = bisect.bisect_left(self.ranges, (offset, end))
        if i < len(self.ranges) and self.ranges[i][0] == end:
            end = self.ranges.pop(i)[1]
        if i and self.ranges[i - 1][1] == offset:
            i -= 1
            offset = self.ranges.pop(i)[0]
        self.ranges.insert(i, (offset, end))
        return offset, end
