"""Updates ahead of the step: while the backward pass runs, parameters whose gradients are complete are updated as if
nothing were clipped, beside their old values. The step takes over what it would have computed itself, to the bit, and
drops everything else.

The library drops what was computed from bytes that have changed since. Here is what else a step depends on: which
parameters have gradients, their options, their number of steps, and the factor of their gradients.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import bisect
import math
import statistics
import time
import typing

from .. import abi
from .arenas import ALIGNMENT

if typing.TYPE_CHECKING:
    from .adamw import AdamwRule
    from .model import Record

# Elements of a parameter on average: with smaller ones the calling thread loses more time than overlap can win.
LEAST_ELEMENTS = 1 << 16
MOST_PATIENCE = 32  # steps that are not clipped, before it tries again

# Smaller models are tried with and without, as what limits their steps may be the calling thread: beside updates on the
# host it is slower, whose threads share cores and memory with it.
TRIED_ELEMENTS, TRIED_SECONDS = 1 << 28, 0.25
FIRST_TRIAL = 17  # behind steps that the library tries plans in
PART = 3  # steps of a trial with, as many without; of each the first is not counted, as it shares work with the last
PARTS = 4


def is_power_of_two(factor: float) -> bool:
    return math.frexp(factor)[0] == 0.5


def is_of_clipping(factor: float, before: float | None) -> bool:
    """Whether a factor of gradients is one of clipping, and neither 1 nor that of a loss scale: a power of two that the
    step before had as well. (One in 128 factors of clipping in bfloat16 is a power of two by chance.)

    Args:
        factor: Of a parameter's gradient in this step.
        before: In the step before, or None.

    Returns:
        False also for a factor of clipping that is the same power of two twice; then something is computed in vain.
    """
    return factor != 1.0 and not (is_power_of_two(factor) and factor == before)


class Units:
    """The units of an arena: what belongs to one chunk of the smallest elements, those of the parameters or of a state,
    as the library divides an update.

    Attributes:
        records: The records that the last step has updated, in the order of their places.
        elements: Of a unit.
        end: The element behind the last one that a step updates.
        of: By record, its units.
        whole: Whether the step skips no elements.
        records_of: By unit, how many records have elements in it. Units with gaps are left out, and the first one if
            the step begins within it.
    """

    def __init__(self, records: list[Record], elements: int, end: int) -> None:
        self.records = records
        self.elements = elements
        self.end = end
        self.of: dict[Record, range] = {}
        self.records_of: dict[int, int] = {}
        self.firsts = [first_of(record) for record in records]
        gaps: set[int] = set()
        self.whole = True
        at = self.firsts[0]
        if at % elements:
            gaps.add(at // elements)
        for record, first in zip(records, self.firsts):
            last = first + record.place.elements - 1
            if first - at >= ALIGNMENT:
                self.whole = False
                gaps.update(range(at // elements, (first - 1) // elements + 1))
            at = last + 1
            self.of[record] = range(first // elements, last // elements + 1)
            for unit in self.of[record]:
                self.records_of[unit] = self.records_of.get(unit, 0) + 1
        for unit in gaps:
            self.records_of.pop(unit, None)

    def within(self, begin: int, end: int) -> list[Record]:
        """The records that have elements from begin to end."""
        first = max(bisect.bisect_right(self.firsts, begin) - 1, 0)
        return self.records[first : bisect.bisect_left(self.firsts, end)]


def padded(elements: int) -> int:
    """With the padding behind a parameter."""
    return -(-elements // ALIGNMENT) * ALIGNMENT


def first_of(record: Record) -> int:
    """The first element of a parameter in its arena."""
    return record.place.offset // record.place.dtype.itemsize


class Trials:
    """Whether a small model's steps are shorter with updates ahead.

    Attributes:
        wanted: Whether they are, as the last trial has found.
        at: The step of the trial that is made now, from 0 on; None: there is no trial.
    """

    def __init__(self) -> None:
        self.wanted = True
        self.at: int | None = None
        self.number = 0  # of steps so far
        self.next, self.gap = FIRST_TRIAL, 256
        self.times: dict[bool, list[float]] = {True: [], False: []}
        self.begun = 0.0  # when the step began

    @property
    def ahead(self) -> bool:
        """Whether the step that is made now is to be computed ahead."""
        return self.wanted if self.at is None else self.at // PART % 2 == 0

    def step_ends(self, elements: int, tried: bool) -> None:
        """A step has been made.

        Args:
            elements: That it has updated.
            tried: Whether it was computed ahead.
        """
        now = time.perf_counter()
        took, self.begun = now - self.begun, now
        self.number += 1
        if elements >= TRIED_ELEMENTS or took >= TRIED_SECONDS or (self.at is not None and tried != self.ahead):
            if self.at is not None or self.number >= self.next:  # one that tells nothing: later
                self.at, self.next = None, self.number + FIRST_TRIAL
            return
        if self.at is None:
            if self.number >= self.next and (tried or not self.wanted):
                self.at, self.times = 0, {True: [], False: []}
            return
        if self.at % PART:
            self.times[self.ahead].append(took)
        self.at += 1
        if self.at == PARTS * PART:
            self.at = None
            self.wanted = statistics.median(self.times[True]) <= statistics.median(self.times[False])
            self.next, self.gap = self.number + self.gap, 2 * self.gap


class Speculation:
    """What an AdamwRule computes ahead.

    It expects of a step what the last one was: as many gradients of each parameter (several micro-batches), and the
    same factor. It begins after a step that was not clipped, or, when that was wrong, after twice as many as the last
    time.
    """

    def __init__(self, rule: AdamwRule) -> None:
        self.rule = rule
        self.session = rule.session
        self.units: dict[int, Units] = {}  # by arena
        self.group_of: dict[int, dict[str, typing.Any]] = {}  # by id of a record, as of the last step
        self.expected: dict[Record, int] = {}  # gradients that were stored for a step
        self.factors: dict[Record, float] = {}  # that these were multiplied by
        self.stored: dict[Record, int] = {}  # gradients that were stored since the last step
        self.left: dict[tuple[int, int], int] = {}  # by arena and unit, records whose gradient is not complete
        self.assumed: dict[Record, tuple[typing.Any, ...]] = {}  # by record, the rule that was applied ahead
        self.armed = False  # whether this step is computed ahead
        self.steps, self.patience = 0, 1  # steps without clipping, and how many there have to be
        self.tried = False  # whether the step that is made was computed ahead, be it in vain
        self.taken = 0  # elements that steps have taken over
        self.trials = Trials()

    # ---- in the backward pass
    def landed(self, records: typing.Iterable[Record]) -> None:
        """Gradients were stored: computes the units ahead that waited for nothing else."""
        ready: dict[int, list[int]] = {}
        for record in records:
            count = self.stored[record] = self.stored.get(record, 0) + 1
            units = self.units.get(record.place.arena)
            if not self.armed or count != self.expected.get(record) or units is None or record not in units.of:
                continue
            for unit in units.of[record]:
                key = record.place.arena, unit
                if key in self.left:
                    self.left[key] -= 1
                    if not self.left[key]:
                        ready.setdefault(record.place.arena, []).append(unit)
        for arena, numbers in ready.items():
            numbers.sort()
            begin = numbers[0]
            for unit, behind in zip(numbers, [*numbers[1:], -1]):
                if behind != unit + 1:
                    self.compute(arena, begin, unit + 1)
                    begin = behind

    def compute(self, arena: int, begin: int, end: int) -> None:
        """Submits the units from begin to end. What cannot be computed is left to the step, which says why."""
        try:
            done = self.submit(arena, begin, end)
        except Exception:
            done = False
        if not done:
            self.drop()
            self.arm(False)

    def submit(self, arena: int, begin: int, end: int) -> bool:
        """As compute(). Returns False if a record was to be updated by two rules: its options have changed since."""
        units = self.units[arena]
        start, stop = begin * units.elements, min(end * units.elements, units.end)
        rules: dict[typing.Any, int] = {}
        ranges = [(start, abi.UPDATE_SKIP)] if start else []
        records = units.within(start, stop)
        for record in records:
            rule = self.rule.rule(record, self.group_of[id(record)], self.factors[record])
            if self.assumed.setdefault(record, rule) != rule:
                return False
            number = rules.setdefault(rule, len(rules))
            last = min(padded(first_of(record) + record.place.elements), stop)
            if ranges and ranges[-1][1] == number:
                ranges[-1] = last, number
            else:
                ranges.append((last, number))
        flags = abi.UPDATE_SPECULATE
        self.rule.run(arena, records[0], start, stop - start, list(rules), ranges, units.whole, flags)
        return True

    # ---- at the step
    def settle(self, group_of: dict[int, dict[str, typing.Any]]) -> None:
        """Before the update: drops everything if the step is another one than was expected."""
        if any(
            not record.has_grad
            or record.given
            or id(record) not in group_of
            or self.rule.rule(record, group_of[id(record)]) != rule
            for record, rule in self.assumed.items()
        ):
            self.drop()
        self.tried = self.armed and bool(self.left)

    def drop(self) -> None:
        self.assumed.clear()
        self.session.lib.update_drop(self.session.handle)

    def take_back(self) -> None:
        """Another optimizer makes a step, which must not take over what was computed for this one."""
        if self.assumed:
            self.drop()

    def forget(self) -> None:
        """The parameters change: what is known of them is of no use."""
        if self.assumed:
            self.drop()
        self.units.clear()
        self.arm(False)

    def committed(self) -> int:
        """Elements that steps have taken over so far."""
        stats = abi.Stats()
        self.session.lib.stats(self.session.handle, stats)
        return stats.committed_elements

    def made(self, records: list[Record], group_of: dict[int, dict[str, typing.Any]]) -> None:
        """The step has updated these records: learns what to expect of the next one."""
        if self.tried:
            before, self.taken = self.taken, self.committed()
            self.patience = 1 if self.taken > before else min(2 * self.patience, MOST_PATIENCE)
            self.steps = 0 if self.taken == before else self.steps
        self.assumed.clear()
        self.group_of = group_of
        self.expected, self.stored = self.stored, {}
        clipped = any(is_of_clipping(record.scale, self.factors.get(record)) for record in records)
        self.factors = {record: record.scale for record in records}
        by_arena: dict[int, list[Record]] = {}
        for record in records:
            by_arena.setdefault(record.place.arena, []).append(record)
        for arena, ones in by_arena.items():
            if arena not in self.units or self.units[arena].records != ones:
                places = ones[0].place, *ones[0].states.values()
                elements = self.session.manager.config.chunk_bytes // min(place.dtype.itemsize for place in places)
                self.units[arena] = Units(ones, elements, self.rule.end_of(ones[-1]))
        for arena in [arena for arena in self.units if arena not in by_arena]:
            del self.units[arena]
        self.steps = 0 if clipped else self.steps + 1
        elements = sum(record.place.elements for record in records)
        pays = elements >= LEAST_ELEMENTS * len(records)
        if pays and not self.session.ranks:
            self.trials.step_ends(elements, self.tried)
        self.arm(pays and self.trials.ahead and self.steps >= self.patience)

    def skipped(self) -> None:
        """The step is not made, as a gradient is infinite: the next one has another factor."""
        self.stored = {}
        if self.assumed:
            self.drop()
        self.arm(False)

    def arm(self, armed: bool) -> None:
        self.armed = armed
        self.left = (
            {(arena, unit): count for arena, units in self.units.items() for unit, count in units.records_of.items()}
            if armed
            else {}
        )
