"""The own step of an optimizer, for all classes but AdamW and Adam.

The classes of torch.optim run their step for one parameter after another, on the device. Any other class may look at
all parameters in its step (a global norm, a counter): its step runs once over all of them.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import functools
import heapq
import itertools
import typing

import torch
from torch import nn

from .. import abi
from ..abi import GeminiError
from .arenas import Place
from .internals import plain as _plain, set_grad as _set_grad
from .layout import dense_stride
from .memory import can_wrap, shared
from .rules import master_place, own_step
from .tensors import ManagedParameter, ManagedTensor, managed_view

# Classes of torch.optim whose step updates each parameter independently of the others. It is called once for each.
BY_PARAMETER = {
    getattr(torch.optim, name)
    for name in (
        "ASGD",
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "Muon",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    )
    if hasattr(torch.optim, name)
}
# How many of the states that were made last may be temporary ones of a step.
RECENT = 4


class TorchRule:
    """Runs the own step of an optimizer, of torch.optim or of another class.

    by_parameter: The step is called once for each parameter, on the device. It updates the fp32 copies of 16-bit
    parameters. Otherwise the step is called once, and each function in it is an operator over the parameters
    themselves, like the functions of the user.
    """

    def __init__(self, session, inner):
        self.session = session
        self.inner = inner
        self.own_step, plain = own_step(inner)
        self.by_parameter = plain and type(inner) in BY_PARAMETER
        self.work = {}  # by id of a parameter: its fp32 copy, which the step updates
        self.records = []
        self.made = {}  # places of states by id, in the order in which they were taken
        # Unused places by (shape, stride, dtype), as heaps of (offset, place).
        self.spare = {}
        # By (id of a parameter, name of a state): the place of the state that was adopted last.
        self.homes = {}

    def backward_begins(self):
        """Nothing to do: a step ends before it returns."""

    def finish(self):
        """Nothing to do, either."""

    def backward_ends(self):
        """Nothing to do: nothing waits for the end of the backward pass."""

    def at_once(self, record):
        """The sizes of an element of the tensors of a parameter's shape that a function of the step uses together: the
        parameter, or its fp32 copy, its gradient and its states.
        """
        if record.rule is not self:
            return []
        count = 3 if type(self.inner) is torch.optim.Adamax else 2
        return [4 if self.by_parameter else record.place.dtype.itemsize] * count

    def check_options(self, groups):
        """Nothing to do: torch's own step knows all options."""

    def groups_changed(self):
        """Nothing to do: each step gets the groups."""

    def overrides(self, name):
        """Whether the optimizer's class replaces a method of torch.optim.Optimizer."""
        return getattr(type(self.inner), name) is not getattr(torch.optim.Optimizer, name) and not self.by_parameter

    def refuse_saving(self):
        """Raises GeminiError if a checkpoint would lack something: it has states in the layout of torch and nothing
        else.
        """
        name = type(self.inner).__name__
        if self.overrides("state_dict") or self.overrides("load_state_dict"):
            raise GeminiError(
                f"{name} overrides state_dict() or load_state_dict(), and a checkpoint would lack what they add: save "
                "and load the model without the optimizer, and extra=optimizer.state_dict()"
            )
        inside = next(
            (key for key, value in vars(self.inner).items() if isinstance(value, torch.optim.Optimizer)), None
        )
        if inside:
            raise GeminiError(
                f"{name} holds another optimizer, {inside}, whose states a checkpoint would lack: save and load "
                "the model without the optimizer, and what both need as extra"
            )

    def prepare(self, records):
        for record in records:
            if record.trainable and record.rule is None:
                record.rule = self
                self.records.append(record)
                if not self.by_parameter:
                    if "master" in record.states:  # made by an earlier optimizer
                        record.states.pop("master").zero()
                elif record.place.dtype != torch.float32:
                    self.work[id(record.param)] = self.master(record)

    def let_go(self, record):
        for name, value in self.states(record).items():
            if isinstance(value, Place) and name != "master":
                value.zero()
        param = self.work.pop(id(record.param), record.param)
        self.inner.state.pop(param, None)
        self.homes = {key: place for key, place in self.homes.items() if key[0] != id(param)}
        self.records.remove(record)
        record.rule = None

    def master(self, record):
        place = master_place(self.session, record)
        with _plain():
            param: typing.Any = nn.Parameter(place.tensor.detach())
        param.__class__ = ManagedParameter
        param._gm_place = place
        return param

    # ---- places of states
    def new_state(self, like, dtype):
        """A managed tensor that reads as zero, with the strides of a parameter."""
        self.reclaim(
            list(itertools.islice(reversed(self.made.values()), RECENT))
        )  # what a step has made for the moment
        stride = dense_stride(like)
        spare = self.spare.get((like.shape, stride, dtype))
        if spare:
            place = heapq.heappop(spare)[1]  # the lowest one, so that each step takes the same places
        else:
            place = self.session.arenas.place("state", like.shape, dtype, f"{like._gm_place.name}.state", stride)
        self.made[id(place)] = place
        return managed_view(place)

    def reclaim(self, places):
        """Makes places reusable, and zeroes them, if no tensor refers to them any more."""
        for place in places:
            if not in_use(place):
                place.zero()
                del self.made[id(place)]
                heapq.heappush(
                    self.spare.setdefault((place.shape, place.stride, place.dtype), []), (place.offset, place)
                )

    def adopt(self, param):
        """Moves states into arenas that were not made like their parameter, such as SGD's momentum, which is a copy of
        the first gradient.

        A state that replaces another one gets its place.
        """
        state = self.inner.state.get(param)
        for name, value in list(state.items()) if isinstance(state, dict) else ():
            if self.adoptable(value, param):
                place = self.homes.get((id(param), name))
                if place is None or id(place) not in self.made or place.dtype != value.dtype or in_use(place):
                    place = self.new_state(param, value.dtype)._gm_place
                self.homes[id(param), name] = place
                new = managed_view(place)
                new.copy_(value)
                # The object stays the same, as the optimizer may refer to it elsewhere, too.
                with _plain():
                    value.data = new.detach()
                value.__class__ = ManagedTensor
                value._gm_place = place

    def adopt_states(self):
        for record in self.records:
            self.adopt(self.key(record))
        self.reclaim(list(self.made.values()))

    def adoptable(self, value, param):
        """Whether a state can be moved into an arena: it has the parameter's shape, and nobody else has its memory."""
        return (
            type(value) is torch.Tensor
            and value.dim()
            and value.shape == param.shape
            and value.numel()
            and value.device == param.device
            and can_wrap(value.dtype)
            and not value.requires_grad
            and not value.is_inference()
            and value.layout is torch.strided
            and value._base is None
            and not shared(value)
        )

    # ---- a step for each parameter
    def step(self, groups):
        inner, session = self.inner, self.session
        self.reclaim(list(self.made.values()))  # states that the user has cleared
        session.in_optimizer = self.new_state
        try:
            for group in groups:
                options = {key: value for key, value in group.items() if key != "params"}
                options.update({key: False for key in ("foreach", "fused") if key in options})
                after = options
                for param in group["params"]:
                    record = param._gm_record
                    if not record.has_grad and not record.given:
                        continue
                    after = dict(options)
                    self.step_one(record, after)
                group.update({key: value for key, value in after.items() if key not in ("params", "foreach", "fused")})
        finally:
            session.in_optimizer = None
            inner.param_groups = groups

    def step_one(self, record, options):
        work = self.work.get(id(record.param))
        if work is not None:
            scale, record.scale = record.scale, 1.0
            gradient = record.gradient().float()  # a tensor in torch's memory
            if scale != 1.0:
                gradient.mul_(scale)
            record.scale = scale
            with _plain():
                _set_grad(work, gradient)
        param = record.param if work is None else work
        options["params"] = [param]
        self.inner.param_groups = [options]
        self.own_step()
        self.adopt(param)
        if work is not None:
            with _plain():
                _set_grad(work, None)
            record.param.copy_(work)
            record.place.written = False

    # ---- one step over all parameters
    def step_whole(self, args, kwargs):
        """Calls the step once, as torch does. Functions of lists work on one element after another."""
        options = [
            (group, key, group[key])
            for group in self.inner.param_groups
            for key in ("foreach", "fused")
            if key in group
        ]
        for group, key, _ in options:
            group[key] = False
        self.reclaim(list(self.made.values()))
        try:
            return self.stepping(self.own_step)(*args, **kwargs)
        finally:
            for group, key, value in options:
                group[key] = value

    def stepping(self, function):
        """Wraps a method of the optimizer: what it makes like a parameter is a state."""

        @functools.wraps(function)
        def run(*args, **kwargs):
            session = self.session
            outer, session.in_optimizer = session.in_optimizer, self.new_state
            try:
                out = function(*args, **kwargs)
            finally:
                session.in_optimizer = outer
            with torch.no_grad():
                self.adopt_states()
            return out

        return run

    def within(self, closure):
        """Wraps a closure for the step: its forward and backward passes belong to the same iteration."""

        @functools.wraps(closure)
        def run(*args, **kwargs):
            session = self.session
            outer, session.in_optimizer = session.in_optimizer, None
            session.in_closure += 1
            try:
                return closure(*args, **kwargs)
            finally:
                session.in_closure -= 1
                session.in_optimizer = outer
                session.backward.settle()
                session.brackets.set_phase(abi.PHASE_UPDATE)

        return run

    # ---- states
    def key(self, record):
        """The parameter object that the optimizer knows a parameter by."""
        return self.work.get(id(record.param), record.param)

    def has_state(self, record):
        return self.key(record) in self.inner.state

    def state_of(self, record):
        return self.inner.state[self.key(record)]

    def set_state(self, record, values):
        if values:
            self.inner.state[self.key(record)] = values
        else:
            self.inner.state.pop(self.key(record), None)

    def others(self):
        return (
            {}
            if self.by_parameter
            else {key: value for key, value in self.inner.state.items() if not isinstance(key, torch.Tensor)}
        )

    def check_others(self, values):
        if values and self.by_parameter:
            raise GeminiError(
                f"{type(self.inner).__name__} has states of its parameters only, and no {next(iter(values))!r}"
            )

    def set_others(self, values):
        for key in self.others():
            del self.inner.state[key]
        self.inner.state.update(values)

    def states(self, record):
        out = {"master": record.states["master"]} if "master" in record.states else {}
        for name, value in self.inner.state.get(self.key(record), {}).items():
            managed = isinstance(value, ManagedTensor) and value._gm_place.has(value)
            out[name] = value._gm_place if managed else value
        return out

    def layout_of(self, record, state):
        """The layout of a state. States of a fp32 copy are fp32, whatever they were."""
        return {
            name: (torch.float32 if self.by_parameter else value.dtype)
            if isinstance(value, torch.Tensor) and value.shape == record.place.shape and name != "step"
            else value
            for name, value in state.items()
        }

    def check(self, record, layout):
        if ("master" in layout) != ("master" in record.states):
            raise GeminiError(
                f"parameter {record.name}: the state to be loaded has {'a' if 'master' in layout else 'no'} "
                f"fp32 master copy, this parameter of {record.place.dtype} has {'one' if record.states else 'none'}"
            )

    def renew(self, record, layout):
        places = {name: place for name, place in self.states(record).items() if isinstance(place, Place)}
        for place in places.values():
            place.zero()
        param = self.key(record)
        state = self.inner.state[param] = {}
        out = {}
        for name, value in layout.items():
            if name == "master":
                out[name] = places[name]
            elif isinstance(value, torch.dtype):
                old = places.get(name)
                view = managed_view(old) if old and old.dtype == value else self.new_state(param, value)
                state[name], out[name] = view, view._gm_place
            elif isinstance(value, torch.Tensor):
                state[name] = value.detach().to(self.session.device if value.dim() else value.device, copy=True)
            else:
                state[name] = value
        if not state:
            del self.inner.state[param]
        return out


def in_use(place):
    """Whether a tensor other than the place's own refers to the place of a state. True if torch does not report it."""
    return shared(place.tensor) is not False
