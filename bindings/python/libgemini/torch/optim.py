"""Prepared optimizers, which have torch's interface and update each parameter where it is.

adamw.py has the steps of AdamW and Adam, torchrule.py those of all other classes, and slicerule.py those on several
ranks. States are in arenas.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import copy
import typing
import warnings

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import abi
from ..abi import GeminiError
from . import internals, narrow
from .adamw import AdamwRule, fused_rule
from .arenas import Place, in_backward
from .brackets import level_of_caller
from .division import localize_groups, refuse_rule, to_parts
from .internals import plain as _plain
from .slicerule import slice_rule
from .states import Held, States, copies
from .tensors import ManagedTensor
from .torchrule import TorchRule

if typing.TYPE_CHECKING:
    from .session import Session


class Optimizer(torch.optim.Optimizer):
    """The optimizer that libgemini.torch.prepare() returns in the place of the one that it was given.

    It has the groups, the defaults and the hooks of that one. An optimizer of a class that is not torch.optim's also
    gives the attributes and methods of that class.
    """

    # Tells torch.amp.GradScaler to leave gradients as they are: step() divides them, in fp32.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        session: Session,
        inner: torch.optim.Optimizer,
        step_in_backward: bool = False,
        states: str = "fp32",
        masters: str = "fp32",
    ) -> None:
        """
        Args:
            session: The session whose parameters it updates.
            inner: The optimizer that it is made from.
            step_in_backward: As of prepare().
            states: As of prepare().
            masters: As of prepare().

        Raises:
            GeminiError: The optimizer was prepared before, has made steps, has a parameter that is not in the session,
                is of a class that is not supported, or is another one on another rank.
            TypeError: inner is not a torch.optim.Optimizer.
            ValueError: states or masters is none of the values of prepare().
        """
        narrow.check(states, masters)
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
        self.held = Held()  # objects of `state` that users have
        localize_groups(inner)
        self.records = self.find(inner.param_groups)
        rule: typing.Any = fused_rule(session, inner, states, masters)
        if (states, masters) != ("fp32", "fp32"):
            self.check_narrow(rule, inner, states, masters)
        if rule is None and not session.ranks:
            refuse_rule(inner, self.records)
        if rule is None:
            rule = slice_rule(session, inner) if session.ranks else TorchRule(session, inner)
        initial = {}
        if rule.by_parameter:
            if any(float(state.get("step", 1)) for state in inner.state.values()):
                raise GeminiError("the optimizer has made steps before: prepare it first, then load its state")
            initial = {id(param): state for param, state in inner.state.items()}  # Adagrad makes states at once
            inner.state.clear()
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups = inner.param_groups  # the same list, which schedulers change
        self.shared_groups = inner.param_groups  # which it was when find_new() looked last
        # Both optimizers have the same dicts of hooks, so it does not matter which one a hook is registered with.
        for hooks in _HOOKS:
            setattr(self, hooks, getattr(inner, hooks))
        self.rule = rule
        if session.ranks and session.rules:
            raise GeminiError("a second optimizer is not supported on several ranks: want one for all parameters")
        if step_in_backward and not isinstance(self.rule, AdamwRule):
            raise GeminiError(
                f"step_in_backward is for torch.optim.AdamW and Adam, without amsgrad or maximize: the optimizer "
                f"is a {type(inner).__name__}"
            )
        for record in self.records:
            if record.early and record.rule:
                raise GeminiError(
                    f"parameter {record.name} is updated in the backward pass, by the optimizer that was prepared "
                    "first, and cannot have another one"
                )
            if record.early and not step_in_backward:  # the prepare() that attached it failed
                raise GeminiError(
                    f"parameter {record.name} keeps its gradient in its own bytes, as a prepare() with "
                    "step_in_backward=True wanted, which failed: set step_in_backward in this one, too"
                )
            if step_in_backward and record.trainable and not record.early:
                raise GeminiError(
                    "step_in_backward has to be known when the model is prepared: give it to the first prepare()"
                )
        if session.ranks:
            kind = f"{type(inner).__name__} with states={states!r}, masters={masters!r}"
            session.ranks.check_layout("optimizers", [f"{kind}, step_in_backward={step_in_backward}"])
        session.backward.settle()
        for former in session.rules:  # some of which end below
            former.finish()
        # The states of an earlier optimizer end.
        for record in self.records:
            if record.rule:
                record.rule.let_go(record)
        for record in self.records:
            with _plain():
                wanted = record.param.requires_grad
            if wanted:
                record.early = step_in_backward
                record.split = masters == "split16" and rule.splits_master(record)
                record.attach()
        self.rule.prepare(self.records)
        for record in self.records:
            self.start_from(record, initial.get(id(record.param), {}))
        self.rule.adopt_states()
        if isinstance(self.rule, AdamwRule):
            inner.register_state_dict_pre_hook(self.refuse_inner)
            inner.register_load_state_dict_pre_hook(self.refuse_inner)
        used = {id(record.rule) for record in session.records}  # another rule would only keep its states alive
        session.rules[:] = [rule for rule in session.rules if id(rule) in used] + [self.rule]
        if step_in_backward:
            self.rule.step_in_backward(lambda: self.param_groups)
            if not session.ranks:
                session.rule_of.update((record, self.rule) for record in self.records if record.early)

    def refuse_inner(self, optimizer, *_):
        """A hook before state_dict() and load_state_dict(), of this optimizer and of the one that prepare() was given.

        The latter has no states: it would save none, and nobody would use what it loads.
        """
        if optimizer is self.inner and self.session.manager.handle:
            raise GeminiError(
                f"the states of this {type(optimizer).__name__} are in the session: call state_dict() and "
                "load_state_dict() of the optimizer that libgemini.torch.prepare(model, optimizer) returned"
            )

    def check_narrow(self, rule, inner, states, masters):
        """Raises GeminiError if the optimizer cannot have narrow states."""
        options = f"states={states!r} and masters={masters!r}"
        if rule is None:
            raise GeminiError(
                f"{options} are for torch.optim.AdamW and Adam, without amsgrad or maximize: the optimizer is a "
                f"{type(inner).__name__}, which keeps its states as it makes them"
            )
        for record in self.records:
            rule.splits_master(record)

    def find(self, groups):
        """The records of the parameters in groups."""
        known, found = {id(record.param): record for record in self.session.records}, []
        for number, group in enumerate(groups):
            for index, param in enumerate(group["params"]):
                if id(param) not in known:
                    why = "is not one of the model's: make the optimizer from the model that is prepared"
                    if not param.requires_grad:  # torch leaves it alone, whosever it is
                        why = (
                            "needs no gradient, and is not in the session: give the optimizer those that need one, "
                            "[p for p in model.parameters() if p.requires_grad]"
                        )
                    raise GeminiError(
                        f"parameter {index} of the optimizer's group {number}, of shape {tuple(param.shape)}, {why}"
                    )
                found.append(known[id(param)])
        return found

    def find_new(self):
        """Looks for parameters and groups that have been added, or that the program has replaced by others."""
        if self.param_groups is not self.shared_groups:
            self.inner.param_groups = self.param_groups
        elif self.inner.param_groups is not self.shared_groups:  # a method of its class has
            self.param_groups = self.inner.param_groups
        self.shared_groups = self.param_groups
        params = [param for group in self.param_groups for param in group["params"]]
        if len(params) != len(self.records) or any(
            record.param is not param for record, param in zip(self.records, params)
        ):
            self.records = self.find(self.param_groups)
            self.rule.groups_changed()

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
            self.held.let_go(States.detach)
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
        if self.session.ranks:  # a pass that an exception has ended ends here, and makes no gradients afterwards
            self.session.backward.settle()
        for record in self.records:
            if set_to_none or self.session.ranks:
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
            GeminiError: The session was closed, a parameter belongs to an optimizer that was prepared later, there is
                no room for a parameter's chunks, or a hook calls it within a backward pass.
            TypeError: There are args or kwargs, and the class is torch.optim's.
            AssertionError: A torch.amp.GradScaler calls it, and has scaled no gradient.
        """
        try:
            if internals.compiler_loaded():  # torch.compile() must not trace the step
                return self.make_step_untraced(closure, args, kwargs)
            return self.make_step(closure, args, kwargs)
        except BaseException:
            # What a GradScaler sets before a step and deletes after it. It would multiply the next scale by this one.
            for name in "grad_scale", "found_inf":
                self.__dict__.pop(name, None)
            raise

    def make_step(self, closure, args, kwargs):
        """Makes a step; see step()."""
        session, loss = self.session, None
        session.refuse_closed("optimizer.step()")
        session.brackets.refuse_others("optimizer.step()")
        if in_backward():
            raise GeminiError(
                "optimizer.step() is called within a backward pass, by a hook: call it after backward(), or prepare "
                "AdamW or Adam with step_in_backward=True, which updates a parameter once its gradient is complete"
            )
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
            session.take_left(early=True)
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
                        f"parameter {record.name} is another optimizer's, which was prepared later: this "
                        "optimizer cannot step() any more"
                    )
                record.spent = False
            session.renew_masters()
            if session.ranks and not session.ranks.parts:
                session.ranks.check_options(self.param_groups)
            going = self.unscale()
            if going and self.rule.by_parameter:
                self.rule.step(self.param_groups)
            elif isinstance(self.rule, AdamwRule):
                self.rule.skipped()
        if going and not self.rule.by_parameter:
            loss = self.rule.step_whole(args, kwargs)
        with torch.no_grad():
            if session.allocator and session.brackets.iteration:
                session.allocator.step_ends()
            session.brackets.iteration_end()
            session.backward.step_ends()
        inner: typing.Any = self.inner
        inner._opt_called = True  # a scheduler that was made with it checks this
        return loss

    make_step_untraced = internals.never_compiled(make_step)

    def unscale(self):
        """With a torch.amp.GradScaler: divides gradients by the loss scale, if that was not done.

        Returns whether to make the step.
        """
        found, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if isinstance(found, int):  # a sum of nothing
            raise AssertionError("No inf checks were recorded for this optimizer.")  # as torch says it
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
        self.session.refuse_closed("optimizer.state_dict()")
        self.session.backward.settle()
        self.session.take_over_written()
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
                name: value.read() if isinstance(value, (Place, narrow.Narrow)) else copies(value)
                for name, value in self.rule.states(record).items()
            }
            if record.division is not None:
                values = {
                    name: record.division.whole(value) if isinstance(value, torch.Tensor) and value.dim() else value
                    for name, value in values.items()
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
        self.session.refuse_closed("optimizer.load_state_dict()")
        self.session.backward.settle()
        self.session.take_over_written()
        self.find_new()
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
        state = {number: to_parts(record, state.get(number, {})) for number, record in zip(numbers, self.records)}
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
        self.rule.groups_changed()

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
