"""AdamW and Adam by libgemini_update: chunk by chunk, where each chunk is, beside the next forward pass.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import typing

import torch

from .. import abi
from ..abi import GeminiError
from . import internals, narrow
from .arenas import ALIGNMENT, DTYPES
from .parts import Parts
from .rules import groups_of, master_place, own_step
from .speculate import Speculation, first_of, padded
from .states import AdamwState, Held, count_of, whole_step

if typing.TYPE_CHECKING:
    from .model import Record

# After so many backward passes that began with updates pending, the next one waits for them. A GPU may always be one
# step behind.
MOST_UNSURE = 16
# Whether torch's Adam and AdamW ask each group how weights decay; before, the class alone said it.
DECOUPLED_BY_GROUP = "decoupled_weight_decay" in inspect.signature(torch.optim.Adam).parameters


def is_whole(ranges, start):
    """Whether ranges of an update skip no element from start on."""
    return all(rule != abi.UPDATE_SKIP for end, rule in ranges if end > start)


class AdamwRule:
    """Runs AdamW and Adam by libgemini_update. Each chunk is updated where it is, beside the next forward pass.

    States are fp32. Parameters of 16 bits have fp32 copies. Both can be narrower: see narrow.py.
    """

    STATES = ("master", "momentum", "variance")
    NAMES = {"master": "master", "exp_avg": "momentum", "exp_avg_sq": "variance"}  # kinds by torch's names of states
    by_parameter = True

    def __init__(self, session, decoupled, states="fp32", masters="fp32"):
        self.session = session
        self.decoupled = decoupled
        self.state_dtype = narrow.STATES[states]  # of momentum and variance
        self.splits = masters == "split16"
        self.kernels = abi.update_library()
        # By arena of parameters: their records, in the order of their places.
        self.arenas = {}
        self.walks = []  # updates that may not be done: (walk, what it borrows)
        self.unsure = 0  # backward passes since all updates were known to be done
        self.groups: typing.Callable[[], list[dict[str, typing.Any]]] = list  # now; none: no updates in the pass
        self.group_of: dict[int, dict[str, typing.Any]] | None = None  # by id of a record, in this backward pass
        self.holders: dict[typing.Any, Held] = {}  # by record or place of a state: what users have of it
        self.neighbours = {}  # by record: the records that share chunks with it, and itself
        self.waiting = {}  # records whose gradients are complete, in their order
        self.parts: Parts | None = None  # on several ranks: what is updated in the backward pass
        self.speculation = Speculation(self) if session.speculate and not session.ranks else None

    def prepare(self, records):
        before, ended = {}, []  # the states that records had; masters that others take the place of
        try:
            for record in records:
                if not record.trainable or record.rule:
                    continue
                before[record] = dict(record.states)
                record.split = self.splits_master(record)
                record.rule = self
                for kind in ("momentum", "variance"):
                    record.states[kind] = narrow.state_place(record, kind, self.state_dtype)
                if record.split:
                    ended.append(self.split_master(record))
                elif record.place.dtype != torch.float32:
                    master_place(self.session, record)
            self.session.arenas.expect(
                place for record in before for kind, place in record.states.items() if kind != "master" or record.split
            )
        except BaseException:
            for record, states in before.items():
                for kind, place in record.states.items():
                    if states.get(kind) is not place:
                        with contextlib.suppress(GeminiError):
                            place.zero()
                record.states, record.rule, record.split = states, None, False
            raise
        for master in filter(None, ended):
            master.zero()
        for record in before:
            self.arenas.setdefault(record.place.arena, []).append(record)
        for records in self.arenas.values():
            records.sort(key=lambda record: record.place.offset)

    def splits_master(self, record):
        """Whether a parameter gets a split master. Raises GeminiError if it should, and cannot."""
        if self.splits and record.place.dtype == torch.float16:
            raise GeminiError(
                f"parameter {record.name} is of float16, which is no half of an fp32 number: masters='split16' wants "
                "bfloat16"
            )
        return self.splits and record.place.dtype == torch.bfloat16

    def split_master(self, record):
        """Makes the lower half of a parameter's master, from the fp32 copy that an earlier optimizer may have made.

        Returns:
            The place of that copy, to be zeroed, or None.
        """
        former = record.states.get("master")
        if former is not None and record.place.written:
            record.renew_master()
        values = None if former is None else former.read()
        record.states["master"] = self.session.arenas.counterpart(record.place, "master", narrow.HALF)
        if values is not None:
            narrow.seen(record, "master").write(values)
        else:
            record.renew_master(whole=True)
        return former

    def let_go(self, record):
        if self.speculation:
            self.speculation.forget()
        self.detach_all(record)
        for owner in (record, record.states["momentum"], record.states["variance"]):
            self.holders.pop(owner, None)
        self.arenas[record.place.arena].remove(record)
        record.step = None
        if record.split:
            values = narrow.seen(record, "master").read()
            record.states.pop("master").zero()
            record.split = False
            record.states["master"] = self.session.arenas.counterpart(record.place, "master", torch.float32)
            record.states["master"].write(values)
        for kind in ("momentum", "variance"):
            record.states.pop(kind).zero()
        record.rule = None

    def rule(self, record, group, factor=None):
        """The rule of a parameter's next step; factor: of its gradient, or None for the one that it has."""
        beta1, beta2 = map(float, group["betas"])
        dtype = DTYPES[record.place.dtype]
        step = 1 if record.step is None else 1 + whole_step(record.name, record.step)
        decoupled = group.get("decoupled_weight_decay", self.decoupled) if DECOUPLED_BY_GROUP else self.decoupled
        flags = 0 if decoupled else abi.ADAMW_L2
        return (
            flags | (abi.ADAMW_SPLIT if record.split else 0),
            dtype,
            dtype,
            step,
            float(group["lr"]),
            beta1,
            beta2,
            float(group["eps"]),
            float(group["weight_decay"]),
            record.scale if factor is None else factor,
            narrow.LIBRARY[self.state_dtype],
            narrow.LIBRARY[self.state_dtype],
        )

    def step(self, groups):
        self.forget_done()
        self.check_options(groups)
        group_of = groups_of(groups)
        if self.session.ranks:
            self.step_of_ranks(group_of)
            return
        speculation = self.speculation
        if speculation:
            # What this step takes over has to be its own: updates of others' parameters would be made here, too.
            for rule in self.session.rules:
                if rule is not self and isinstance(rule, AdamwRule) and rule.speculation:
                    rule.speculation.take_back()
            speculation.settle(group_of)
        updated = []
        for arena, records in self.arenas.items():
            given = [record for record in records if record.given]
            for record in given:
                record.store_given()
            updated += [record for record in records if self.is_ready(record, group_of)]
            try:
                self.submit(arena, records, group_of, abi.UPDATE_LATE | (abi.UPDATE_COMMIT if speculation else 0))
            finally:
                for record in given:
                    record.drop()
        if speculation:
            speculation.made(updated, group_of)

    def skipped(self):
        """The optimizer makes no step of these gradients."""
        if self.speculation:
            self.speculation.skipped()

    def is_ready(self, record, group_of):
        return record.has_grad and record.place.elements and id(record) in group_of

    def end_of(self, record):
        """The end of an update that ends with a parameter, in elements: that of the padding behind it."""
        return padded(first_of(record) + record.place.elements)

    def last_of(self, record):
        """The element behind a parameter; behind its last block, where states are in blocks."""
        return self.end_of(record) if self.state_dtype == torch.uint8 else first_of(record) + record.place.elements

    def step_of_ranks(self, group_of):
        """One update of each arena, of all its elements: those of a rank's slices."""
        ranks = self.session.ranks
        self.session.brackets.op_end()
        if self.parts:
            self.parts.step()
            return
        present = ranks.present([record for records in self.arenas.values() for record in records])
        for arena, records in self.arenas.items():
            self.submit(arena, [record for record in records if record in present], group_of)

    # ---- updates in the backward pass
    def step_in_backward(self, groups):
        """Finds out, before the first step, which gradients the update of each parameter waits for.

        An update makes chunks leave the device. A chunk that parameters share would have to come back at once for its
        other parameters. So these are updated together, when all of them have their gradients.
        """
        if self.session.ranks:
            self.parts = self.session.ranks.parts = Parts(self, groups)
            return
        self.groups = groups
        chunk_size = self.session.manager.config.chunk_bytes
        for records in self.arenas.values():
            lasts = [(record.place.offset + record.place.size_bytes - 1) // chunk_size for record in records]
            for i, record in enumerate(records):
                begin = end = i
                while begin and lasts[begin - 1] >= record.place.offset // chunk_size:
                    begin -= 1
                while end + 1 < len(records) and records[end + 1].place.offset // chunk_size <= lasts[i]:
                    end += 1
                self.neighbours[record] = records[begin : end + 1]

    def check_options(self, groups):
        for number, group in enumerate(groups):
            for option in ("amsgrad", "maximize"):
                if group.get(option):
                    raise GeminiError(
                        f"group {number} of the optimizer has {option}={group[option]}, which was not set when the "
                        "optimizer was prepared: make an optimizer with it, and prepare that one"
                    )

    def groups_changed(self):
        if self.speculation:
            self.speculation.forget()
        self.group_of = None

    def updates(self, record):
        """Whether this backward pass updates a parameter: it is in a group of the optimizer."""
        if id(record) not in self.current_groups():
            self.group_of = None  # the program may have changed them since an exception ended a pass
        return id(record) in self.current_groups()

    def current_groups(self):
        """The parameter group of each record, by the id of the record, in this backward pass."""
        if self.group_of is None:
            self.group_of = groups_of(self.groups())
        return self.group_of

    def landed(self, record):
        """A gradient was stored: updates the parameters that waited for nothing else."""
        self.waiting[record] = None
        record.spent = True
        ready = [
            other
            for other in self.neighbours[record]
            if other in self.waiting and all(one.spent for one in self.neighbours[other])
        ]
        self.update_landed(ready)

    def backward_ends(self):
        """Updates parameters that share chunks with parameters without a gradient."""
        if self.parts:
            self.parts.end()
        self.update_landed(list(self.waiting))
        self.group_of = None  # the program may replace groups before the next pass

    def update_landed(self, records):
        """Submits one update for each run of neighbours."""
        if not records:
            return
        records.sort(key=lambda record: (record.place.arena, record.place.offset))
        group_of = self.current_groups()
        run: list[Record] = []
        for record in records:
            del self.waiting[record]
            if run and (
                record.place.arena != run[-1].place.arena
                or record.place.offset - run[-1].place.offset - run[-1].place.size_bytes
                >= ALIGNMENT * record.place.dtype.itemsize
            ):
                self.submit(run[0].place.arena, run, group_of)
                run = []
            run.append(record)
        if run:
            self.submit(run[0].place.arena, run, group_of)
        for record in records:
            record.has_grad = False

    def submit(self, arena, records, group_of, flags=abi.UPDATE_LATE):
        """Submits one update for parameters of an arena, from the first one with a gradient to the last."""
        ready = [record for record in records if self.is_ready(record, group_of)]
        if not ready:
            return
        ranks = self.session.ranks
        if ranks:
            start, end = 0, ranks.elements(arena, ready[0].place.dtype.itemsize)
        else:
            start, end = first_of(ready[0]), self.last_of(ready[-1])
        rules, ranges = self.ranges_of(ready, group_of, start, end)
        if flags & abi.UPDATE_COMMIT:  # which takes whole units over, the last one with its padding
            end = self.end_of(ready[-1])
            ranges[-1] = end, ranges[-1][1]
        self.run(arena, ready[0], start, end - start, rules, ranges, is_whole(ranges, start), flags)
        for record in ready:  # the library has accepted the update
            if record.step is None:
                record.step = count_of(0)
        internals.foreach_add([record.step for record in ready], 1)

    def submit_part(self, arena, records, group_of, start, end):
        """Submits an update of the elements from start to end, to which these parameters belong, in part or whole."""
        rules, ranges = self.ranges_of(records, group_of, start, end)
        some = self.arenas[arena][0]
        rules = rules or [self.rule(some, next(iter(group_of.values())))]  # nothing has it, but there has to be one
        flags = abi.UPDATE_LATE | abi.UPDATE_PART
        self.run(arena, some, start, end - start, rules, ranges, is_whole(ranges, start), flags)
        for record in records:
            if first_of(record) >= start:  # parts come in descending order: it was the last one with elements of it
                self.count_step(record)

    def count_step(self, record):
        record.step = count_of(0) if record.step is None else record.step
        record.step += 1

    def ranges_of(self, records, group_of, start, end):
        """The rules of parameters, and the ranges of elements of an update from start to end, by rule or skipped."""
        rules: dict[typing.Any, int] = {}
        ranges, at = [(start, abi.UPDATE_SKIP)] if start else [], start
        with internals.plain():
            for record in records:
                internals.note_write(record.param)
        for record in records:
            rule = rules.setdefault(self.rule(record, group_of[id(record)]), len(rules))
            first = max(first_of(record), start)
            if first - at >= ALIGNMENT:
                ranges.append((first, abi.UPDATE_SKIP))
            elif first > at:  # padding between parameters, which stays zero
                ranges[-1] = first, ranges[-1][1]
            at = min(self.last_of(record), end)
            if ranges and ranges[-1][1] == rule:
                ranges[-1] = at, rule
            else:
                ranges.append((at, rule))
        if end > at:
            ranges.append((end, abi.UPDATE_SKIP))
        return list(rules), ranges

    def run(self, arena, record, start, count, rules, ranges, whole, flags):
        session = self.session
        param = abi.WRITE if whole and not record.split else abi.READ_WRITE
        parts = [(arena, param), (record.grad_place.arena, abi.READ)]
        parts += [(record.states[kind].arena, abi.READ_WRITE) for kind in self.STATES if kind in record.states]
        walk = abi.UpdateWalk(rule_count=len(rules), range_count=len(ranges), mgr=session.handle)
        walk.adamws = (abi.Adamw * len(rules))(*(abi.Adamw(**dict(zip(_RULE, rule))) for rule in rules))
        walk.ranges = (abi.UpdateRange * len(ranges))(*ranges)
        walk.stream_native = ctypes.cast(session.lib.stream_native, ctypes.c_void_p).value
        walk.stream_call = ctypes.cast(session.lib.stream_call, ctypes.c_void_p).value
        walk.param_index, walk.grad_index, walk.master_index = 0, 1, 2
        walk.momentum_index, walk.variance_index = 3, 4
        if "master" not in record.states:
            parts[0] = arena, abi.READ_WRITE
            walk.param_index, walk.master_index, walk.momentum_index, walk.variance_index = abi.INDEX_NONE, 0, 2, 3
        update = abi.Update(
            flags=flags | abi.UPDATE_PASSES,
            arena_count=len(parts),
            first_element=start,
            element_count=count,
            stream=session.holds.stream(),
            fn=self.kernels.walk,
            arenas=(ctypes.c_uint64 * len(parts))(*(part[0] for part in parts)),
            modes=(ctypes.c_uint32 * len(parts))(*(part[1] for part in parts)),
        )
        update.user = ctypes.addressof(walk)
        self.walks.append((walk, update))
        self.kernels.walk_check(update)
        session.lib.update(session.handle, update)

    def forget_done(self, waits=False):
        """Frees what finished updates have borrowed, and raises their errors. waits: all of them are to be finished."""
        if not self.walks:
            return
        if waits:
            self.session.lib.update_wait(self.session.handle)
        stats = abi.Stats()
        self.session.lib.stats(self.session.handle, stats)
        for walk, _ in self.walks:  # behind the statistics: one that has ended has its error by now
            self.kernels.walk_status(walk)
        if waits or not stats.pending_updates:
            self.walks.clear()
            self.unsure = 0

    def backward_begins(self):
        """As forget_done(), but what is borrowed does not grow without bounds."""
        self.unsure += bool(self.walks)
        self.forget_done(self.unsure > MOST_UNSURE)

    def finish(self):
        """Waits until no update reads options that it has borrowed from the rule, and raises errors of updates. The
        rule may be freed then."""
        self.forget_done(waits=True)

    def states(self, record):
        out = {name: narrow.seen(record, kind) for name, kind in self.NAMES.items() if kind in record.states}
        if record.step is None:
            return {name: place for name, place in out.items() if name == "master"}
        return {"step": record.step, **out}

    def layout_of(self, record, state):
        return {
            name: torch.float32
            if isinstance(value, torch.Tensor) and value.shape == record.place.shape and name != "step"
            else value
            for name, value in state.items()
        }

    def check(self, record, layout):
        want = {name for name, kind in self.NAMES.items() if kind in record.states} | {"step"}
        if set(layout) - {"master"} and set(layout) != want or ("master" in layout) != ("master" in record.states):
            raise GeminiError(
                f"parameter {record.name}: the state to be loaded has {', '.join(layout) or 'nothing'}, want "
                f"{', '.join(sorted(want))}"
            )
        if "step" in layout:
            whole_step(record.name, layout["step"])
        for name, value in layout.items():
            if name != "step" and value != torch.float32:
                raise GeminiError(
                    f"parameter {record.name}: {name} to be loaded is of "
                    f"{tuple(value.shape) if isinstance(value, torch.Tensor) else value}, want "
                    f"{tuple(record.place.shape)} of torch.float32"
                )

    def renew(self, record, layout):
        record.step = count_of(layout["step"]) if "step" in layout else None
        for place in record.states.values():
            place.zero()
        return {name: narrow.seen(record, kind) for name, kind in self.NAMES.items() if name in layout}

    # ---- as the user sees it
    def overrides(self, name):
        return False

    def refuse_saving(self):
        """Nothing to do: a checkpoint has all of it."""

    def adopt_states(self):
        """Nothing to do: all states are in arenas."""

    def others(self):
        return {}

    def check_others(self, values):
        if values:
            raise GeminiError(f"AdamW has states of its parameters only, and no {next(iter(values))!r}")

    def set_others(self, values):
        """There are no other states."""

    def has_state(self, record):
        return record.step is not None

    def state_of(self, record):
        return self.held(record).note(AdamwState(self, record))

    def held(self, owner):
        """What users have of the state of a record, or of the bytes of a place."""
        return self.holders.setdefault(owner, Held())

    def detach(self, place, but=None):
        """Before the bytes of a place are those of another tensor: who has the one that was there keeps its values."""
        from .model import become_copy

        if place in self.holders:
            self.holders[place].let_go(become_copy, but)

    def detach_all(self, record, own=None):
        """Before a parameter has another state: who has the one that it had keeps its values, but for own."""
        if record in self.holders:
            self.holders[record].let_go(AdamwState.detach, own)
        for kind in ("momentum", "variance"):
            self.detach(record.states[kind])

    def set_state(self, record, values, own=None):
        """own: The AdamwState that stays the parameter's; others that users have keep their values."""
        values = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in values.items()}
        layout = self.layout_of(record, values)
        self.check(record, {**layout, "master": torch.float32} if "master" in record.states else layout)
        self.session.backward.settle()
        self.detach_all(record, own)
        record.step = count_of(values["step"]) if values else None
        for kind in ("momentum", "variance"):
            record.states[kind].zero()
        for name in set(values) - {"step"}:
            narrow.seen(record, self.NAMES[name]).write(values[name])


_RULE = (
    *("flags", "param_dtype", "grad_dtype", "step", "lr", "beta1", "beta2", "eps", "weight_decay", "grad_scale"),
    *("momentum_dtype", "variance_dtype"),
)


def fused_rule(session, inner, states="fp32", masters="fp32"):
    """The rule that uses the C library's update for an optimizer, or None if there is none."""
    if type(inner) not in (torch.optim.AdamW, torch.optim.Adam) or not own_step(inner)[1]:
        return None
    for group in inner.param_groups:
        if any(group.get(option) for option in ("amsgrad", "maximize", "capturable", "differentiable")):
            return None
    return AdamwRule(session, type(inner) is torch.optim.AdamW, states, masters)
