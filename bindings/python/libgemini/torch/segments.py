"""Which segments torch's caching allocator should have for the tensors of a training step.

Its segments grow with the first step, each for a tensor that had no room: small ones at first, in which no tensor of
the logits' size has room later. It never exchanges them, so at the peak a third of their bytes lies idle. One segment
of the right size loses a tenth. The right size depends on the order of the step's allocations, as the allocator splits
blocks and joins free ones. Simulation repeats that order with the rules of c10/cuda/CUDACachingAllocator.cpp, as of
torch 2.11, for blocks of more than 1 MiB: sizes are rounded up to 512 bytes; the smallest free block that is large
enough is taken, at the lowest address among equals; what remains becomes a free block of its own if it has more than
1 MiB; free neighbours become one block.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import bisect
import typing

SMALL = 1 << 20  # tensors of so many bytes at most are in other segments, of 2 MiB

Event = tuple[bool, int, int]  # whether it is an allocation or a free; address; bytes


class Simulation:
    """The allocator with one segment, whose large blocks it simulates."""

    def __init__(self, size: int):
        self.free = [(size, 0)]  # sizes and offsets of free blocks, sorted
        self.sizes = {0: size}  # of all blocks, by offset
        self.before: dict[int, int] = {}  # the offset of the block before, by offset
        self.is_free = {0: True}

    def allocate(self, size: int) -> int | None:
        """Returns the offset of a block, or None if there is no room."""
        size = max(512, -(-size // 512) * 512)
        index = bisect.bisect_left(self.free, (size, 0))
        if index == len(self.free):
            return None
        whole, offset = self.free.pop(index)
        self.is_free[offset] = False
        if whole - size > SMALL:
            self.sizes[offset], rest = size, offset + size
            self.sizes[rest], self.before[rest], self.is_free[rest] = whole - size, offset, True
            if offset + whole in self.sizes:
                self.before[offset + whole] = rest
            bisect.insort(self.free, (whole - size, rest))
        return offset

    def _take_out(self, offset: int) -> int:
        """Removes a free block from the list of free ones. Returns its size."""
        size = self.sizes[offset]
        self.free.pop(bisect.bisect_left(self.free, (size, offset)))
        return size

    def _join(self, offset: int, after: int) -> None:
        """Makes one block of two neighbours that hold nothing."""
        self.sizes[offset] += self.sizes.pop(after)
        del self.before[after], self.is_free[after]
        end = offset + self.sizes[offset]
        if end in self.sizes:
            self.before[end] = offset

    def release(self, offset: int) -> None:
        """Frees a block."""
        after, before = offset + self.sizes[offset], self.before.get(offset)
        if self.is_free.get(after):
            self._take_out(after)
            self._join(offset, after)
        if before is not None and self.is_free[before]:
            self._take_out(before)
            self._join(before, offset)
            offset = before
        self.is_free[offset] = True
        bisect.insort(self.free, (self.sizes[offset], offset))


def number(events: typing.Iterable[Event]) -> tuple[list[tuple[int, int]], dict[int, int]]:
    """Replaces the addresses of a step's large tensors by numbers of blocks.

    Returns:
        For each allocation the number of a block and its bytes, and for each free its number and 0; and the numbers of
        the blocks that are left, by their addresses.
    """
    blocks: dict[int, int] = {}
    numbered, count = [], 0
    for allocates, address, size in events:
        if allocates and size > SMALL:
            blocks[address] = count
            numbered.append((count, size))
            count += 1
        elif not allocates and address in blocks:
            numbered.append((blocks.pop(address), 0))
    return numbered, blocks


def has_room(size: int, events: typing.Sequence[tuple[int, int]], stay: typing.Collection[int]) -> bool:
    """Whether one segment has room for two steps, of which the second one keeps what the first one left.

    Args:
        size: Of the segment.
        events: Of a step, as number() has them.
        stay: Numbers of blocks that the first step allocates for good.
    """
    simulation = Simulation(size)
    blocks: dict[int, int] = {}  # offsets by number
    for second in False, True:
        for block, bytes_ in events:
            if second and block in stay:
                continue
            if not bytes_:
                simulation.release(blocks.pop(block))
                continue
            offset = simulation.allocate(bytes_)
            if offset is None:
                return False
            blocks[block] = offset
    return True


def most_at_once(events: typing.Iterable[tuple[int, int]]) -> int:
    """The most bytes that blocks have at once, of events as number() has them."""
    sizes: dict[int, int] = {}
    most = now = 0
    for block, size in events:
        now += size or -sizes[block]
        sizes[block] = size
        most = max(most, now)
    return most


def smallest(events: typing.Sequence[Event], end: int | None = None) -> int:
    """The size of the segment that a step needs, and those behind it.

    Args:
        events: Allocations and frees of the step, in their order.
        end: How many of the events are the step's. What is freed behind them is what it allocated for good, as the
            workspaces of cuBLAS. Left out: all of them.

    Returns:
        Bytes: the most that large tensors need at once, and as many eighths of the largest one as are needed, sixteen
        at most; 0 if that is too little or no tensor is large.
    """
    end = len(events) if end is None else end
    numbered, left = number(events[:end])
    stay = {left[address] for allocates, address, _ in events[end:] if not allocates and address in left}
    most, largest = most_at_once(numbered), max((size for _, size in numbered), default=0)
    sizes = [most + largest * share // 8 for share in range(17)] if largest else []
    low, high = 0, len(sizes)
    while low < high:
        middle = (low + high) // 2
        if has_room(sizes[middle], numbered, stay):
            high = middle
        else:
            low = middle + 1
    return sizes[low] if low < len(sizes) else 0


def exchange(segments: typing.Sequence[typing.Mapping[str, typing.Any]], size: int, stream: int) -> list[int]:
    """Which segments should take the place of those of a pool.

    Args:
        segments: Those of the pool, as torch.cuda.MemPool.snapshot() has them.
        size: Of the one that is to serve large tensors. There are as many small segments as before.
        stream: The number of the stream that will allocate.

    Returns:
        Bytes of tensors that make torch take these segments; nothing if the pool should stay as it is: because that
        gains less than a sixteenth, as tensors are in the segments which cannot be given back, or because several
        streams allocate.
    """
    if any(segment["stream"] != stream for segment in segments):
        return []
    stuck = sum(segment["total_size"] for segment in segments if segment["active_size"])
    large = [segment["total_size"] for segment in segments if segment["segment_type"] == "large"]
    if not large or stuck + size > sum(large) - sum(large) // 16:
        return []
    return [size] + [SMALL] * (2 * (len(segments) - len(large)))


def largest(segments: typing.Sequence[typing.Mapping[str, typing.Any]]) -> int:
    """The bytes of the largest segment: those of the largest tensor, when segments have grown with a first step."""
    return max((segment["total_size"] for segment in segments), default=0)
