"""Optimizers that update each parameter where it lives.

AdamW and Adam run in the C library's workers and kernels, chunk by chunk, overlapping the next forward pass. The other
classes of torch.optim run their own step, one parameter after another. Any other class may look at all parameters in
its step (a global norm, a counter): it runs that once over all of them. States live in arenas.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import copy
import ctypes
import functools
import heapq
import itertools
import typing
import warnings

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import abi
from ..abi import GeminiError
from . import internals
from .arenas import ALIGNMENT, DTYPES, Place
from .brackets import level_of_caller
from .internals import plain as _plain, set_grad as _set_grad
from .layout import dense_stride
from .memory import can_wrap, shared
from .states import AdamwState, States, copies, count_of
from .tensors import ManagedParameter, ManagedTensor, managed_view

if typing.TYPE_CHECKING:
    from .model import Record
    from .session import Session

# After so many backward passes that began with updates pending, the next one waits for them. A GPU may always be one
# step behind.
MOST_UNSURE = 16
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


class Optimizer(torch.optim.Optimizer):
    """The optimizer that libgemini.torch.prepare() returns in the place of the one that it was given.

    It has the groups, the defaults and the hooks of that one. An optimizer of a class that is not torch.optim's also
    gives the attributes and methods of that class.
    """

    # Tells torch.amp.GradScaler to leave gradients as they are: step() divides them, in fp32.
    _step_supports_amp_scaling = True

    def __init__(self, session: Session, inner: torch.optim.Optimizer, step_in_backward: bool = False) -> None:
        """
        Args:
            session: The session whose parameters it updates.
            inner: The optimizer that it is made from.
            step_in_backward: As of prepare().

        Raises:
            GeminiError: The optimizer was prepared before, has made steps, has a parameter that is not in the session,
                or is of a class that is not supported.
            TypeError: inner is not a torch.optim.Optimizer.
        """
        if isinstance(inner, Optimizer):
            raise GeminiError("this optimizer was prepared before")
        if not isinstance(inner, torch.optim.Optimizer):
            raise TypeError(f"the optimizer is a {type(inner).__name__}: want a torch.optim.Optimizer")
        if isinstance(inner, (torch.optim.LBFGS, torch.optim.SparseAdam)):
            raise GeminiError(
                f"the optimizer is a {type(inner).__name__}: want one that updates each parameter by itself, "
                "from a dense gradient"
            )
        self.session = session
        self.inner = inner
        self.records = self.find(inner.param_groups)
        rule: typing.Any = fused_rule(session, inner) or TorchRule(session, inner)
        initial = {}
        if rule.by_parameter:
            if any(float(state.get("step", 1)) for state in inner.state.values()):
                raise GeminiError("the optimizer has made steps before: prepare it first, then load its state")
            initial = {id(param): state for param, state in inner.state.items()}  # Adagrad makes states at once
            inner.state.clear()
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups = inner.param_groups  # the same list, which schedulers change
        # Both optimizers have the same dicts of hooks, so it does not matter which one a hook is registered with.
        for hooks in _HOOKS:
            setattr(self, hooks, getattr(inner, hooks))
        self.rule = rule
        if step_in_backward and not isinstance(self.rule, AdamwRule):
            raise GeminiError(
                f"step_in_backward is for torch.optim.AdamW and Adam, without amsgrad or maximize: the optimizer "
                f"is a {type(inner).__name__}"
            )
        for record in self.records:
            if record.early:
                raise GeminiError(
                    f"parameter {record.name} is updated in the backward pass, by the optimizer that was prepared "
                    "first, and cannot have another one"
                )
            if step_in_backward and record.trainable:
                raise GeminiError(
                    "step_in_backward has to be known when the model is prepared: give it to the first prepare()"
                )
        session.backward.settle()
        # The states of an earlier optimizer end.
        for record in self.records:
            if record.rule:
                record.rule.let_go(record)
        for record in self.records:
            with _plain():
                wanted = record.param.requires_grad
            if wanted:
                record.early = step_in_backward
                record.attach()
        self.rule.prepare(self.records)
        for record in self.records:
            self.start_from(record, initial.get(id(record.param), {}))
        self.rule.adopt_states()
        session.rules.append(self.rule)
        if step_in_backward:
            self.rule.step_in_backward(self.param_groups)
            session.rule_of.update((record, self.rule) for record in self.records if record.early)

    def find(self, groups):
        """The records of the parameters in groups."""
        known, found = {id(record.param): record for record in self.session.records}, []
        for number, group in enumerate(groups):
            for index, param in enumerate(group["params"]):
                if id(param) not in known:
                    raise GeminiError(
                        f"parameter {index} of the optimizer's group {number}, of shape {tuple(param.shape)}, is "
                        "not one of the model's: make the optimizer from the model that is prepared"
                    )
                found.append(known[id(param)])
        return found

    def find_new(self):
        """Looks for parameters that add_param_group() has added."""
        if sum(len(group["params"]) for group in self.param_groups) != len(self.records):
            self.records = self.find(self.param_groups)

    def __getattr__(self, name: str) -> typing.Any:
        """Attributes of the class that was prepared, such as train() of schedule-free optimizers, or first_step() of
        SAM.
        """
        rule = self.__dict__.get("rule")
        if rule is None or rule.by_parameter or name.startswith("__"):
            raise AttributeError(f"a prepared optimizer has no {name}")
        value = getattr(self.inner, name)
        return rule.stepping(value) if getattr(value, "__self__", None) is self.inner else value

    @property  # type: ignore[override]
    def state(self) -> States:
        """States by parameter, as torch has them. Their tensors are those that the next step uses; see States."""
        return States(self)

    @state.setter
    def state(self, values: typing.Mapping[typing.Any, typing.Any]) -> None:
        """The states by parameter, under the names that torch has.

        Their tensors are those that the next step uses; see States.
        """
        if "rule" in self.__dict__:  # otherwise torch's __init__ assigns an empty dict
            values = dict(values)
            self.state.clear()
            self.state.update(values)

    def add_param_group(self, param_group: dict[str, typing.Any]) -> None:
        """Adds a group of parameters, as torch's optimizers do.

        Args:
            param_group: "params", which are parameters of a prepared model, and the options that differ from the
                defaults.
        """
        known = self.param_groups is self.inner.param_groups  # otherwise torch's __init__ is running
        if known:
            self.inner.add_param_group(param_group)
        else:
            super().add_param_group(param_group)

    def start_from(self, record, state):
        """Takes over the state that torch's optimizer has made for a parameter."""
        layout = self.rule.layout_of(record, state)
        if layout and "master" in record.states:
            layout["master"] = torch.float32
        for name, place in self.rule.renew(record, layout).items() if layout else ():
            place.write(record.param if name == "master" else state[name])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the optimizer's parameters.

        Args:
            set_to_none: Drop the gradients, whose memory is free afterwards. Otherwise they are filled with zeros.
        """
        if type(self.inner).zero_grad is not torch.optim.Optimizer.zero_grad:  # it may clear more than gradients
            return self.inner.zero_grad(set_to_none)
        self.find_new()
        for record in self.records:
            if set_to_none:
                record.set_gradient(None)
            elif not record.spent and record.gradient() is not None:
                record.gradient().zero_()

    def step(  # type: ignore[override]
        self, closure: typing.Callable[[], typing.Any] | None = None, *args: typing.Any, **kwargs: typing.Any
    ) -> typing.Any:
        """Makes a step, and ends the iteration that the model's forward pass began.

        Args:
            closure: Computes the loss and its gradients, and returns the loss. An optimizer of another class than
                torch.optim's calls it when and as often as it likes; the others call it once, before their step.
            *args: For an optimizer of another class than torch.optim's: what its step takes.
            **kwargs: Likewise.

        Returns:
            What closure returned; or, for an optimizer of another class, what its step returned.

        Raises:
            GeminiError: The session was closed, a parameter belongs to an optimizer that was prepared later, or there
                is no room for a parameter's chunks.
            TypeError: There are args or kwargs, and the class is torch.optim's.
        """
        if internals.compiler_loaded():  # torch.compile() must not trace the step
            return self.make_step_untraced(closure, args, kwargs)
        return self.make_step(closure, args, kwargs)

    def make_step(self, closure, args, kwargs):
        """Makes a step; see step()."""
        session, loss = self.session, None
        session.refuse_closed("optimizer.step()")
        if self.rule.by_parameter:
            if args or kwargs:
                raise TypeError(f"step() of {type(self.inner).__name__} takes a closure and nothing else")
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
        elif closure is not None or args:
            args = closure and self.rule.within(closure), *args
        for model in session.models:
            model.check_call()
        with torch.no_grad():
            session.holds.recover()
            session.backward.settle()
            if not session.brackets.called and any(record.has_grad or record.given for record in self.records):
                warnings.warn(
                    "no call of a prepared model, by model(...) or model.forward(...), has made these gradients: such "
                    "a step is no iteration to libgemini, which plans nothing for it. Prepare the module that is "
                    "called",
                    stacklevel=level_of_caller(),
                )
            session.brackets.set_phase(abi.PHASE_UPDATE)
            self.find_new()
            for record in self.records:
                if record.hook is None:  # it is frozen; torch's optimizers update it if it has a gradient
                    record.find_given()
            self.rule.prepare(self.records)  # parameters may be new, or need gradients since the last step
            for record in self.records:
                if record.rule not in (None, self.rule):
                    raise GeminiError(
                        f"parameter {record.name} is another optimizer's, which was prepared later: this one cannot "
                        "make a step any more"
                    )
                record.spent = False
            session.renew_masters()
            going = self.unscale()
            if going and self.rule.by_parameter:
                self.rule.step(self.param_groups)
        if going and not self.rule.by_parameter:
            loss = self.rule.step_whole(args, kwargs)
        with torch.no_grad():
            session.brackets.iteration_end()
        inner: typing.Any = self.inner
        inner._opt_called = True  # a scheduler that was made with it checks this
        return loss

    make_step_untraced = internals.never_compiled(make_step)

    def unscale(self):
        """With a torch.amp.GradScaler: divides gradients by the loss scale, if that was not done.

        Returns whether to make the step.
        """
        found, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if scale is not None:
            factor = float(torch.as_tensor(scale).double().reciprocal().float())  # rounded as GradScaler rounds it
            for record in self.records:
                if factor != 1.0 and (record.has_grad or record.given):
                    record.gradient().mul_(factor)
        return found is None or not found.item()

    def __getstate__(self):
        raise GeminiError(
            "an optimizer in a session can be neither copied nor pickled: its states stay where they are; take "
            "state_dict(), or libgemini.torch.save()"
        )

    def state_dict(self) -> dict[str, typing.Any]:
        """The optimizer's state in torch's layout.

        The states are copies on the CPU, which take as much memory again as the states themselves.
        libgemini.torch.save() writes them without copies.

        Returns:
            "state" by number of parameter and "param_groups", as torch's optimizers have it. "master" in a parameter's
            state is its fp32 copy, if the parameter is of 16 bits.
        """
        self.session.backward.settle()
        self.find_new()
        if self.rule.overrides("state_dict"):
            return copies(self.inner.state_dict())
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        state: dict[int, dict[str, typing.Any]] = {}
        groups: list[dict[str, typing.Any]] = []
        for group in self.param_groups:
            first = sum(len(before["params"]) for before in groups)
            groups.append({**group, "params": list(range(first, first + len(group["params"])))})
        for number, record in enumerate(self.records):
            values = {
                name: value.read() if isinstance(value, Place) else copies(value)
                for name, value in self.rule.states(record).items()
            }
            if values:
                state[number] = values
        out = {"state": {**state, **copies(self.rule.others())}, "param_groups": groups}
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, out)
            out = out if changed is None else changed
        return out

    def load_state_dict(self, state_dict: dict[str, typing.Any]) -> None:
        """Takes a state, which is copied.

        Args:
            state_dict: What state_dict() of this or of torch's optimizer returned. Without "master" the fp32 copy of a
                parameter becomes what the parameter is.

        Raises:
            GeminiError: The state is of an optimizer with other parameters or options.
        """
        self.session.backward.settle()
        if self.rule.overrides("load_state_dict"):
            self.inner.load_state_dict(copies(state_dict, None))  # a copy, as the optimizer may keep it
            self.param_groups = self.inner.param_groups
            self.rule.adopt_states()
            return
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        groups, state = state_dict["param_groups"], state_dict["state"]
        self.check_groups(groups)
        layouts, numbers = [], [number for group in groups for number in group["params"]]
        others = {key: value for key, value in state.items() if key not in set(numbers)}
        self.rule.check_others(others)
        for number, record in zip(numbers, self.records):
            layout = self.rule.layout_of(record, state.get(number, {}))
            if "master" in record.states:
                layout.setdefault("master", torch.float32)
            self.rule.check(record, layout)
            layouts.append(layout)
        for number, record, layout in zip(numbers, self.records, layouts):
            for name, place in self.rule.renew(record, layout).items():
                values = state.get(number, {}).get(name)
                place.write(record.place.read() if values is None else values)
        self.rule.set_others(copies(others, None))
        self.set_groups(groups)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def set_groups(self, saved):
        """Takes the options of saved groups, as torch does. Options that the saved groups lack get their defaults."""
        groups = []
        for group, one in zip(self.param_groups, saved):
            groups.append(
                {
                    **copy.deepcopy({key: value for key, value in one.items() if key != "params"}),
                    "params": group["params"],
                }
            )
            if "param_names" in group:
                groups[-1].setdefault("param_names", group["param_names"])
        self.inner.__setstate__({"state": self.inner.state, "param_groups": groups})
        self.param_groups = self.inner.param_groups
        self.rule.groups_changed(self.param_groups)

    def check_groups(self, groups):
        """Raises GeminiError if groups that are to be loaded do not fit."""
        self.rule.check_options(groups)
        counts, own = ([len(group["params"]) for group in some] for some in (groups, self.param_groups))
        if counts != own:
            raise GeminiError(
                f"the state to be loaded is of an optimizer with groups of {counts} parameters, this one's are of {own}"
            )


_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def groups_of(groups):
    """The parameter group of each record, by the id of the record."""
    return {id(param._gm_record): group for group in groups for param in group["params"]}


def master_place(session, record):
    """The place of the fp32 copy of a parameter, which an earlier optimizer may have made."""
    if "master" not in record.states:
        record.states["master"] = session.arenas.counterpart(record.place, "master", torch.float32)
        record.renew_master()
    return record.states["master"]


# The rules, TorchRule and AdamwRule, make the steps. Both have these methods for states. Names are those of torch,
# and "master" for the fp32 copy of a 16-bit parameter:
#   let_go(record): Another rule takes over the parameter. Its states end and are freed, except the fp32 copy.
#   states(record): By name, the place of a state, or the value of a state that is not in an arena.
#   layout_of(record, state): The layout of a state that torch's optimizer has. By name, the dtype of a state in an
#     arena, or the value of another one.
#   check(record, layout): Raises GeminiError if renew() would refuse the layout.
#   renew(record, layout): Makes states of a layout, which are zero. Returns their places by name.
#   has_state(record), state_of(record), set_state(record, values): The state as the user sees it.
#   others(), set_others(values): Entries of the optimizer's state that belong to no parameter.
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

    def forget_done(self):
        """Nothing to do: a step ends before it returns."""

    def backward_ends(self):
        """Nothing to do: nothing waits for the end of the backward pass."""

    def check_options(self, groups):
        """Nothing to do: torch's own step knows all options."""

    def groups_changed(self, groups):
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
                f"{name} has a state_dict() of its own, of which a checkpoint would lack what that adds: save "
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
                f"master copy, a parameter of {record.place.dtype} has {'one' if record.states else 'none'}"
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


def own_step(inner):
    """The step of an optimizer without torch's hooks, which the prepared optimizer calls once a step.

    Returns:
        The function, and whether it is the one of the class, rather than one that was set for this optimizer alone.
    """
    own, step = vars(inner).get("step"), type(inner).step
    own = getattr(own, "_torchdynamo_orig_callable", own)  # the function that torch.compile() has wrapped
    if getattr(own, "_wrapped_by_lr_sched", False):  # a scheduler has wrapped it to count steps
        own = own.__wrapped__
    if own not in (None, step) and getattr(own, "__func__", None) is not step:
        return own, False
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return functools.partial(step, inner), True


class AdamwRule:
    """Runs AdamW and Adam by libgemini_update. Each chunk is updated where it is, beside the next forward pass.

    States are fp32. Parameters of 16 bits have fp32 copies.
    """

    STATES = ("master", "momentum", "variance")
    NAMES = {"master": "master", "exp_avg": "momentum", "exp_avg_sq": "variance"}  # kinds by torch's names of states
    by_parameter = True

    def __init__(self, session, decoupled):
        self.session = session
        self.decoupled = decoupled
        self.kernels = abi.update_library()
        # By arena of parameters: their records, in the order of their places.
        self.arenas = {}
        self.walks = []  # updates that may not be done: (walk, what it borrows)
        self.unsure = 0  # backward passes since all updates were known to be done
        self.group_of = {}
        self.neighbours = {}  # by record: the records that share chunks with it, and itself
        self.waiting = {}  # records whose gradients are complete, in their order

    def prepare(self, records):
        for record in records:
            if not record.trainable or record.rule:
                continue
            record.rule = self
            for kind in ("momentum", "variance"):
                record.states[kind] = self.session.arenas.counterpart(record.place, kind, torch.float32)
            if record.place.dtype != torch.float32:
                master_place(self.session, record)
            self.arenas.setdefault(record.place.arena, []).append(record)
        for records in self.arenas.values():
            records.sort(key=lambda record: record.place.offset)

    def let_go(self, record):
        self.arenas[record.place.arena].remove(record)
        record.step = None
        for kind in ("momentum", "variance"):
            record.states.pop(kind).zero()
        record.rule = None

    def rule(self, record, group):
        beta1, beta2 = map(float, group["betas"])
        dtype = DTYPES[record.place.dtype]
        step = 1 if record.step is None else 1 + int(record.step)
        return (
            0 if self.decoupled or group.get("decoupled_weight_decay") else abi.ADAMW_L2,
            dtype,
            dtype,
            step,
            float(group["lr"]),
            beta1,
            beta2,
            float(group["eps"]),
            float(group["weight_decay"]),
            record.scale,
        )

    def step(self, groups):
        self.check_options(groups)
        group_of = groups_of(groups)
        for arena, records in self.arenas.items():
            given = [record for record in records if record.given]
            for record in given:
                record.store_given()
            try:
                self.submit(arena, records, group_of)
            finally:
                for record in given:
                    record.drop()

    # ---- updates in the backward pass
    def step_in_backward(self, groups):
        """Finds out, before the first step, which gradients the update of each parameter waits for.

        An update makes chunks leave the device. A chunk that parameters share would have to come back at once for its
        other parameters. So these are updated together, when all of them have their gradients.
        """
        self.group_of = groups_of(groups)
        window = self.session.manager.config.window_bytes
        for records in self.arenas.values():
            lasts = [(record.place.offset + record.place.size_bytes - 1) // window for record in records]
            for i, record in enumerate(records):
                begin = end = i
                while begin and lasts[begin - 1] >= record.place.offset // window:
                    begin -= 1
                while end + 1 < len(records) and records[end + 1].place.offset // window <= lasts[i]:
                    end += 1
                self.neighbours[record] = records[begin : end + 1]

    def check_options(self, groups):
        for number, group in enumerate(groups):
            for option in ("amsgrad", "maximize"):
                if group.get(option):
                    raise GeminiError(
                        f"group {number} of the optimizer has {option}={group[option]}, which it had not when it was "
                        "prepared: make the optimizer with it, and prepare that"
                    )

    def groups_changed(self, groups):
        if self.neighbours:
            self.group_of = groups_of(groups)

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
        self.update_landed(list(self.waiting))

    def update_landed(self, records):
        """Submits one update for each run of neighbours."""
        records.sort(key=lambda record: (record.place.arena, record.place.offset))
        run: list[Record] = []
        for record in records:
            del self.waiting[record]
            if run and (
                record.place.arena != run[-1].place.arena
                or record.place.offset - run[-1].place.offset - run[-1].place.size_bytes
                >= ALIGNMENT * record.place.dtype.itemsize
            ):
                self.submit(run[0].place.arena, run, self.group_of)
                run = []
            run.append(record)
        if run:
            self.submit(run[0].place.arena, run, self.group_of)
        for record in records:
            record.has_grad = False

    def submit(self, arena, records, group_of):
        """Submits one update for parameters of an arena, from the first one with a gradient to the last."""
        ready = [record for record in records if record.has_grad and record.place.elements and id(record) in group_of]
        if not ready:
            return
        itemsize = ready[0].place.dtype.itemsize
        start = ready[0].place.offset // itemsize
        rules: dict[typing.Any, int] = {}
        ranges, at = [(start, abi.UPDATE_SKIP)] if start else [], start
        for record in ready:
            internals.note_write(record.param)
            rule = rules.setdefault(self.rule(record, group_of[id(record)]), len(rules))
            first = record.place.offset // itemsize
            if first - at >= ALIGNMENT:
                ranges.append((first, abi.UPDATE_SKIP))
            elif first > at:  # padding between parameters, which stays zero
                ranges[-1] = first, ranges[-1][1]
            at = first + record.place.elements
            if ranges and ranges[-1][1] == rule:
                ranges[-1] = at, rule
            else:
                ranges.append((at, rule))
        whole = all(rule != abi.UPDATE_SKIP for end, rule in ranges if end > start)
        self.run(arena, ready[0], start, at - start, list(rules), ranges, whole)
        for record in ready:  # the library has accepted the update
            record.step = count_of(0) if record.step is None else record.step
            record.step += 1

    def run(self, arena, record, start, count, rules, ranges, whole):
        session = self.session
        param = abi.WRITE if whole else abi.READ_WRITE
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
            flags=abi.UPDATE_LATE,
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

    def forget_done(self):
        """Frees what finished updates have borrowed, and raises their errors."""
        if not self.walks:
            return
        for walk, _ in self.walks:
            self.kernels.walk_status(walk)
        self.unsure += 1
        if self.unsure > MOST_UNSURE:
            self.session.lib.update_wait(self.session.handle)
        elif self.session.manager.stats()["pending_updates"]:
            return
        self.walks.clear()
        self.unsure = 0

    def states(self, record):
        out = {name: record.states[kind] for name, kind in self.NAMES.items() if kind in record.states}
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
        return {name: record.states[kind] for name, kind in self.NAMES.items() if name in layout}

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
        return AdamwState(self, record)

    def set_state(self, record, values):
        values = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in values.items()}
        layout = self.layout_of(record, values)
        self.check(record, {**layout, "master": torch.float32} if "master" in record.states else layout)
        self.session.backward.settle()
        record.step = count_of(values["step"]) if values else None
        for kind in ("momentum", "variance"):
            record.states[kind].zero()
        for name in set(values) - {"step"}:
            record.states[self.NAMES[name]].write(values[name])


_RULE = ("flags", "param_dtype", "grad_dtype", "step", "lr", "beta1", "beta2", "eps", "weight_decay", "grad_scale")


def fused_rule(session, inner):
    """The rule that uses the C library's update for an optimizer, or None if there is none."""
    if type(inner) not in (torch.optim.AdamW, torch.optim.Adam) or not own_step(inner)[1]:
        return None
    for group in inner.param_groups:
        if any(group.get(option) for option in ("amsgrad", "maximize", "capturable", "differentiable")):
            return None
    return AdamwRule(session, type(inner) is torch.optim.AdamW)


@internals.not_traced
def _refuse_unprepared(optimizer, args, kwargs):
    """A hook before the step of every optimizer: refuses one that was not prepared, but has parameters in the session.

    It has no states there, and knows neither pending factors of gradients nor fp32 copies.
    """
    if isinstance(optimizer, Optimizer) or any(isinstance(value, Optimizer) for value in vars(optimizer).values()):
        return  # a prepared one, or a wrapper that steps a prepared one
    for number, group in enumerate(getattr(optimizer, "param_groups", ())):
        for index, param in enumerate(group["params"]):
            if isinstance(param, ManagedTensor):
                if param._gm_place.session.in_optimizer is not None:  # the step of a prepared optimizer calls it
                    return
                raise GeminiError(
                    f"this {type(optimizer).__name__} was not prepared, but parameter {index} of its group "
                    f"{number}, {param._gm_place.name}, is in a session: make steps with the optimizer that "
                    "libgemini.torch.prepare(model, optimizer) returns"
                )


_watch: list[typing.Any] = []


def watch_steps(on):
    """Installs or removes the hook on the steps of all optimizers."""
    while _watch:
        _watch.pop().remove()
    if on:
        _watch.append(register_optimizer_step_pre_hook(_refuse_unprepared))
