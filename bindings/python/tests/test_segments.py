"""The simulation of torch's allocator beside a simple one, and the segments that follow from it.

SPDX-License-Identifier: Apache-2.0
"""

import random

import pytest

from libgemini.torch import segments

MIB = 1 << 20
STREAM = 5


class Simple:
    """What Simulation does, by a list of all blocks in the order of their addresses."""

    def __init__(self, size):
        self.blocks = [[0, size, True]]  # offset, bytes, whether it is free

    def allocate(self, size):
        size = max(512, -(-size // 512) * 512)
        fits = [(block[1], block[0], i) for i, block in enumerate(self.blocks) if block[2] and block[1] >= size]
        if not fits:
            return None
        whole, offset, index = min(fits)
        if whole - size > MIB:
            self.blocks[index : index + 1] = [[offset, size, False], [offset + size, whole - size, True]]
        else:
            self.blocks[index][2] = False
        return offset

    def release(self, offset):
        next(block for block in self.blocks if block[0] == offset)[2] = True
        joined = []
        for block in self.blocks:
            if joined and joined[-1][2] and block[2]:
                joined[-1][1] += block[1]
            else:
                joined.append(block)
        self.blocks = joined


@pytest.mark.parametrize("seed", range(20))
def test_blocks_lie_where_simple_rules_put_them(seed):
    draw, refused = random.Random(seed), 0
    size = draw.randrange(20, 100) * MIB
    simulation, simple, live = segments.Simulation(size), Simple(size), []
    for _ in range(400):
        if live and draw.random() < 0.45:
            offset = live.pop(draw.randrange(len(live)))
            simulation.release(offset)
            simple.release(offset)
        else:
            wanted = draw.choice([draw.randrange(1, 20 * MIB), 3 * MIB, 5 * MIB + 1])
            offset = simulation.allocate(wanted)
            assert offset == simple.allocate(wanted)
            if offset is None:
                refused += 1
            else:
                live.append(offset)
        assert simulation.free == sorted((block[1], block[0]) for block in simple.blocks if block[2])
    assert refused
    for offset in live:
        simulation.release(offset)
    assert simulation.free == [(size, 0)] and simulation.sizes == {0: size} and not simulation.before


def steps(draw):
    """Random allocations and frees of a step, with what it leaves, and then frees of the step's end."""
    events, live, addresses = [], {}, list(range(1000, 1040))
    for _ in range(draw.randrange(20, 120)):
        if live and draw.random() < 0.5 or len(live) > 30:
            address = draw.choice(list(live))
            events.append((False, address, live.pop(address)))
        else:
            address = draw.choice([one for one in addresses if one not in live])
            live[address] = draw.choice([draw.randrange(1, 30 * MIB), 100 * MIB, 1000])
            events.append((True, address, live[address]))
    for address in list(live)[2:]:
        events.append((False, address, live.pop(address)))
    end = len(events)
    return events + [(False, address, size) for address, size in list(live.items())[:1]], end


def test_a_step_has_room_in_the_smallest_segment_and_in_none_an_eighth_smaller():
    found, more = 0, 0
    for seed in range(60):
        events, end = steps(random.Random(seed))
        numbered, _ = segments.number(events[:end])
        stay = {block for block, size in segments.number(events)[0][len(numbered) :] if not size}
        size, most = segments.smallest(events, end), segments.most_at_once(numbered)
        largest = max(size for _, size in numbered)
        if not size:
            assert not segments.has_room(most + 2 * largest, numbered, stay)
            continue
        assert most <= size <= most + 2 * largest and segments.has_room(size, numbered, stay)
        assert size == most or not segments.has_room(size - largest // 8 - 8, numbered, stay)
        found, more = found + 1, more + (size > most)
    assert found >= 40 and more >= 20


def test_what_a_step_allocates_for_good_counts_once_and_what_it_leaves_twice():
    events = [(True, 1, 32 * MIB), (True, 2, 8 * MIB), (True, 3, 8 * MIB), (False, 2, 8 * MIB)]
    assert segments.smallest([*events, (False, 3, 8 * MIB)]) == 48 * MIB + 24 * MIB + 8 * MIB  # 1 twice, 2 and 3
    assert segments.smallest([*events, (False, 3, 8 * MIB), (False, 1, 32 * MIB)], 5) == 48 * MIB


@pytest.mark.parametrize("events", [[], [(True, 1, MIB), (False, 1, MIB)], [(False, 1, 8 * MIB)]])
def test_a_step_without_large_tensors_needs_no_segment(events):
    assert segments.smallest(events) == 0


def segment(mib, active=0, stream=STREAM):
    """What torch says of a segment of a pool."""
    kind = "large" if mib > 2 else "small"
    return {"total_size": mib * MIB, "active_size": active, "segment_type": kind, "stream": stream}


@pytest.mark.parametrize(
    "pool, size, sizes",
    [
        ([], MIB, []),
        ([segment(2)], MIB, []),
        ([segment(20), segment(20)], 28 * MIB, [28 * MIB]),
        ([segment(20), segment(2), segment(20), segment(2)], 28 * MIB, [28 * MIB] + [MIB] * 4),
        ([segment(20), segment(60)], 75 * MIB, [75 * MIB]),
        ([segment(20), segment(60)], 75 * MIB + 1, []),  # a sixteenth is gained at least
        ([segment(20), segment(20), segment(2, active=512)], 28 * MIB, [28 * MIB] + [MIB] * 2),
        ([segment(20, active=512), segment(20)], 28 * MIB, []),
        ([segment(20), segment(20, stream=6)], 28 * MIB, []),
    ],
)
def test_segments_are_exchanged_if_that_gains_something(pool, size, sizes):
    assert segments.exchange(pool, size, STREAM) == sizes
    assert segments.largest(pool) == max([0, *(one["total_size"] for one in pool)])
