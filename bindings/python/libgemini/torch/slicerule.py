"""The own step of torch's optimizers on several ranks: each rank updates its slices, on the host.

Only the classes whose step computes each element by itself can do that. States are divided like the parameters.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import collections
import collections.abc
import contextlib
import ctypes
import typing

import torch

from .. import abi
from ..abi import GeminiError
from .arenas import DTYPES, Place
from .internals import note_write, plain as _plain, set_grad as _set_grad
from .memory import host_tensor
from .rules import groups_of, master_place, own_step
from .states import refuse_divided
from .torchrule import TorchRule

if typing.TYPE_CHECKING:
    from .model import Record

# Classes of torch.optim whose step computes each element from the same element of the gradient and the states.
BY_ELEMENT = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
# Their states that are one number for a parameter.
NUMBERS = ("step", "mu_product", "mu", "eta")
PIECE_ELEMENTS = 1 << 20  # updated at once


def slice_rule(session, inner):
    """The rule of an optimizer on several ranks.

    Raises:
        GeminiError: Its step may need more than a rank has.
    """
    if type(inner) not in BY_ELEMENT or not own_step(inner)[1]:
        raise GeminiError(
            f"{type(inner).__name__} is not supported on several ranks, as its step may look at more than one element "
            f"at a time: want one of torch.optim's {', '.join(one.__name__ for one in BY_ELEMENT)}"
        )
    return SliceRule(session, inner)


class SliceRule(TorchRule):
    """Runs the own step of a class of BY_ELEMENT, on slices as tensors of one dimension.

    States are fp32. Parameters of 16 bits have fp32 copies.
    """

    def __init__(self, session, inner):
        super().__init__(session, inner)
        self.kept: dict[Record, dict[str, typing.Any]] = {}  # the states of each parameter by name, some as places

    def at_once(self, record):
        """Nothing: the device is not used."""
        return []

    def prepare(self, records):
        for record in records:
            if record.trainable and record.rule is None:
                record.rule = self
                self.kept[record] = {}
                if record.place.dtype != torch.float32:
                    master_place(self.session, record)

    def let_go(self, record):
        self.renew(record, {})
        del self.kept[record]
        record.rule = None

    def place(self, record, name):
        """The place of a state, which is made at its first use."""
        if name not in record.states:
            record.states[name] = self.session.arenas.counterpart(record.place, name, torch.float32)
        return record.states[name]

    # ---- a step
    def step(self, groups):
        """Updates the parameters whose gradients some rank has made.

        The iteration ends first: while it is open, other ranks may have gathered parameters.
        """
        session, group_of = self.session, groups_of(groups)
        session.brackets.op_end()
        present = session.ranks.present(list(self.kept))
        records = [record for record in self.kept if record in present and id(record) in group_of]
        self.add_gradients(records)
        session.brackets.iteration_end()
        state = self.inner.state
        with session.ranks.together():
            try:
                for record in records:
                    self.step_one(record, group_of[id(record)])
            finally:
                self.inner.param_groups, self.inner.state = groups, state

    def add_gradients(self, records):
        """Has the library add gradients over the ranks that it has not added yet, as it does for a norm."""
        session = self.session
        for arena, dtype in {record.grad_place.arena: record.grad_place.dtype for record in records}.items():
            whole = abi.Access(arena, 0, 0, abi.READ, abi.TIER_DEVICE, None)
            session.lib.norm(
                session.handle, ctypes.byref(whole), DTYPES[dtype], session.holds.stream(), ctypes.c_double()
            )

    def step_one(self, record, group):
        """Updates this rank's elements of a parameter.

        Without any it makes the step with none, so that all ranks have the same states.
        """
        note_write(record.param)
        parts = record.place.parts(0, record.place.elements, PIECE_ELEMENTS)
        before = self.kept[record]
        for part in list(parts) or [(0, 0)]:
            self.kept[record] = self.step_part(record, group, before, *part)

    def step_part(self, record, group, before, begin, end):
        """Updates a part of a parameter. Returns the states, of which places have got the values of this part."""
        with contextlib.ExitStack() as stack:

            def part_of(place, mode):
                """The elements of a place, in its own memory, until the stack is left."""
                if begin == end:
                    return torch.empty(0, dtype=place.dtype, device="cpu")
                itemsize = place.dtype.itemsize
                access = place.access(mode, abi.TIER_HOST, begin * itemsize, (end - begin) * itemsize)
                stack.enter_context(self.session.holds.acquired(access, 1, abi.STREAM_CALLER))
                return host_tensor(access.ptr, end - begin, place.dtype)

            values = part_of(record.states.get("master", record.place), abi.READ_WRITE)
            gradient = part_of(record.grad_place, abi.READ).to(torch.float32, copy=True)
            if record.scale != 1.0:
                gradient.mul_(record.scale)
            given = {
                name: part_of(value, abi.READ_WRITE) if isinstance(value, Place) else copy_of(value)
                for name, value in before.items()
            }
            after = self.call(values, gradient, dict(given), group)
            for name, value in after.items():
                if isinstance(value, torch.Tensor) and value.dim():
                    after[name] = self.place(record, name)
                    if value is not given.get(name):
                        (given[name] if name in given else part_of(after[name], abi.WRITE)).copy_(value)
            if "master" in record.states:
                part_of(record.place, abi.WRITE).copy_(values)
            return after

    def call(self, values, gradient, state, group):
        """Calls the optimizer's step for values of one dimension. Returns their states."""
        with _plain():
            _set_grad(values, gradient)
            options = {**group, "params": [values]}
            options.update({key: False for key in ("foreach", "fused") if key in options})
            self.inner.param_groups = [options]
            self.inner.state = collections.defaultdict(dict, {values: state} if state else {})
            self.own_step()
            return self.inner.state.get(values, {})

    # ---- states
    def states(self, record):
        master = {"master": record.states["master"]} if "master" in record.states else {}
        return {**master, **self.kept.get(record, {})}

    def has_state(self, record):
        return bool(self.kept[record])

    def state_of(self, record):
        return SlicedState(record, self.kept[record])

    def set_state(self, record, values):
        if values:
            raise GeminiError(
                f"parameter {record.name}: its state is divided among the ranks, and cannot be set: use "
                "optimizer.load_state_dict(), on all ranks"
            )
        self.renew(record, {})

    def adopt_states(self):
        """Nothing to do: all states are in arenas."""

    def layout_of(self, record, state):
        return {
            name: torch.float32
            if isinstance(value, torch.Tensor) and value.shape == record.place.shape and name not in NUMBERS
            else value
            for name, value in state.items()
        }

    def check(self, record, layout):
        super().check(record, layout)
        for name, value in layout.items():
            number = name in NUMBERS
            if isinstance(value, torch.dtype) and (number or value != torch.float32):
                raise GeminiError(
                    f"parameter {record.name}: {name} to be loaded is a tensor of {value}, want "
                    f"{'a number' if number else 'torch.float32'}"
                )
            if isinstance(value, torch.Tensor) and value.dim():
                raise GeminiError(
                    f"parameter {record.name}: {name} to be loaded is of {tuple(value.shape)}, want "
                    f"{tuple(record.place.shape)}"
                )

    def renew(self, record, layout):
        for value in self.kept[record].values():
            if isinstance(value, Place):
                value.zero()
        kept = self.kept[record] = {}
        for name, value in layout.items():
            if name != "master":
                kept[name] = self.place(record, name) if isinstance(value, torch.dtype) else copy_of(value)
        if "master" in layout:
            record.states["master"].zero()
        return {name: record.states[name] for name, value in layout.items() if isinstance(value, torch.dtype)}


class SlicedState(collections.abc.Mapping):
    """The state of a parameter, of which only the numbers can be read."""

    def __init__(self, record, kept):
        self.record, self.kept = record, kept

    def __iter__(self):
        return iter(self.kept)

    def __len__(self):
        return len(self.kept)

    def __getitem__(self, name):
        value = self.kept[name]
        if isinstance(value, Place):
            refuse_divided(self.record, name)
        return value


def copy_of(value):
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
