"""step_in_backward on several ranks: updates of parts of arenas while the backward pass runs.

An update of a part adds the gradients of its chunks over the ranks, from the last chunk down. Which gradients some rank
has made is known without an exchange where this rank has made them: a part whose gradients it has made all is updated
at once. The other parts wait for the end of the pass, where ranks tell each other once which gradients they have made.
So ranks may cut an arena into other parts, which gives the same values.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import typing

import torch

from ..abi import GeminiError
from .rules import groups_of
from .speculate import first_of

if typing.TYPE_CHECKING:
    from .adamw import AdamwRule
    from .model import Record

# What an update in the backward pass may lack, and has at its end: room, and chunks that nobody uses.
LATER = ("BUSY", "OOM_DEVICE", "OOM_HOST")


class Arena:
    """An arena in one backward pass.

    Attributes:
        waits: The records that get gradients, in the order of their places; those behind the last one whose gradient
            this rank has not made are taken off.
        end: The first element that was updated.
        step: Parts begin at multiples of so many elements.
        begun: Whether a part was updated.
    """

    def __init__(self, records: list[Record], end: int, step: int) -> None:
        self.waits = sorted((record for record in records if record.place.elements), key=first_of)
        self.end = end
        self.step = step
        self.begun = False

    def complete(self, made: typing.Container[Record]) -> int:
        """The element, a multiple of step or 0, from which on all gradients are made."""
        while self.waits and self.waits[-1] in made:
            self.waits.pop()
        if not self.waits:
            return 0
        last = self.waits[-1]
        return -(-(first_of(last) + last.place.elements) // self.step) * self.step


class Parts:
    """The updates of an AdamwRule in the backward pass, on several ranks."""

    def __init__(self, rule: AdamwRule, groups: typing.Callable[[], list[dict[str, typing.Any]]]) -> None:
        self.rule = rule
        self.session = rule.session
        self.ranks = rule.session.ranks
        self.groups = groups  # of the optimizer, now
        self.group_of: dict[int, dict[str, typing.Any]] = {}  # by id of a record, as of the beginning of the pass
        self.arenas: dict[int, Arena] = {}  # of the pass, with parameters of the rule
        self.open = False  # a pass has begun, and its updates are not all made
        self.since_step = False  # a pass has made updates since the last step()
        self.updated: set[Record] = set()  # which parts of this pass had elements of
        self.present: set[Record] | None = None  # whose gradients some rank has made, once the ranks have told

    @property
    def records(self) -> list[Record]:
        """The records of the rule, in the same order on all ranks."""
        return [record for records in self.rule.arenas.values() for record in records]

    def begin(self) -> None:
        """A backward pass begins. All ranks find the same errors here, before anything is updated.

        Raises:
            GeminiError: Ranks have different options; or there was a backward pass since the last step.
        """
        if self.since_step:
            self.records[0].refuse_second()
        if self.open:
            raise GeminiError(
                "a backward pass begins within another one, or after one that an exception has ended: with "
                "step_in_backward on several ranks call optimizer.step() first, and use no reentrant checkpoints"
            )
        groups = self.groups()
        self.ranks.check_options(groups)
        self.rule.check_options(groups)
        self.group_of = groups_of(
            {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
            for group in groups
        )
        by_arena: dict[int, list[Record]] = {arena: [] for arena in self.rule.arenas}
        for record in self.ranks.trained():
            if record.place.arena in by_arena:
                by_arena[record.place.arena].append(record)
        self.arenas = {
            arena: Arena(
                records,
                self.ranks.elements(arena, records[0].place.dtype.itemsize),
                self.ranks.part_elements(arena, records[0].place.dtype.itemsize),
            )
            for arena, records in by_arena.items()
            if records
        }
        self.session.renew_masters()  # of parameters that the forward pass has written
        self.updated.clear()
        self.present = None
        self.open = True

    def update(self) -> None:
        """Gradients were stored, and no function holds parameters: updates what waited for nothing else."""
        if not self.open:
            return
        for arena, part in self.arenas.items():
            all_records = self.rule.arenas[arena]
            made: typing.Collection[Record] = () if self.ranks.idle else self.ranks.stored
            begin = part.complete(made)
            if begin < part.end:
                try:
                    self.submit(arena, part, [record for record in all_records if record in made], begin)
                except GeminiError as error:
                    if error.status not in LATER:
                        raise

    def submit(self, arena: int, part: Arena, records: list[Record], begin: int) -> None:
        """Updates the elements of records from begin on that have not been updated."""
        self.session.brackets.op_end()
        some = [
            record
            for record in records
            if id(record) in self.group_of
            and first_of(record) < part.end
            and first_of(record) + record.place.elements > begin
        ]
        self.rule.submit_part(arena, some, self.group_of, begin, part.end)
        part.end, part.begun = begin, True
        self.updated.update(some)

    def end(self) -> None:
        """The backward pass is over: updates the rest. Parameters whose gradients no rank has made are skipped.

        If it fails, it can be called again.
        """
        if not self.open:
            return
        self.session.brackets.op_end()
        records = self.records
        if self.present is None:
            made = [
                record in self.updated or (record.has_grad and record not in self.ranks.absent) for record in records
            ]
            flags = self.ranks.on_any(made + [part.begun for part in self.arenas.values()])
            self.present = {record for record, flag in zip(records, flags) if flag}
            for part, flag in zip(self.arenas.values(), flags[len(records) :]):
                part.begun = flag
        for arena, part in self.arenas.items():
            present = [record for record in self.rule.arenas[arena] if record in self.present]
            if part.end and (part.begun or any(id(record) in self.group_of for record in present)):
                self.submit(arena, part, present, 0)
        for record in records:
            record.has_grad, record.spent = False, True
            self.ranks.absent.discard(record)
        self.since_step, self.open = bool(self.present), False

    def step(self) -> None:
        """The optimizer's step(), which has nothing to update.

        Raises:
            GeminiError: A parameter was added to the optimizer after prepare().
        """
        self.session.brackets.op_end()
        self.since_step = False
        for record in self.records:
            if not record.early:
                raise GeminiError(
                    f"parameter {record.name} was added to the optimizer after prepare(), which step_in_backward does "
                    "not support on several ranks"
                )
