"""The states of a prepared optimizer, as the user sees them in `optimizer.state`.

SPDX-License-Identifier: Apache-2.0
"""

import collections.abc
import weakref

import torch

from ..abi import GeminiError
from .narrow import seen
from .tensors import managed_view


def copies(value, device="cpu"):
    """Copies the tensors in nested lists and dicts. device: where to; None: each to its own device."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device or value.device, copy=True)
    if isinstance(value, dict):
        return {key: copies(one, device) for key, one in value.items()}
    return [copies(one, device) for one in value] if type(value) is list else value


def count_of(step):
    """A number of steps as torch's optimizers keep it: an fp32 tensor on the CPU."""
    return torch.tensor(float(step), dtype=torch.float32, device="cpu")


def whole_step(name, step):
    """The number of steps of a parameter, an int. Raises GeminiError if it is negative or not whole: the library counts
    whole steps, so a part of one would be lost."""
    value = float(step)
    if not value.is_integer() or value < 0:
        raise GeminiError(f"parameter {name}: step is {value:g}, want a whole number of steps from 0 on")
    return int(value)


class Held:
    """What users hold of something that is about to have other bytes, while in torch it would be another object.

    Such as the state of a parameter that is deleted: who has got it keeps its values.
    """

    def __init__(self):
        self.refs = []

    def note(self, holder):
        """Notes an object that is handed out, and returns it."""
        if len(self.refs) > 15:
            self.refs = [ref for ref in self.refs if ref() is not None]
        self.refs.append(weakref.ref(holder))
        return holder

    def let_go(self, detach, but=None):
        """Calls detach(holder) for each that somebody still has, and forgets them. but: One that stays as it is."""
        for ref in self.refs:
            holder = ref()
            if holder is not None and holder is not but:
                detach(holder)
        self.refs = [ref for ref in self.refs if but is not None and ref() is but]


class States(collections.abc.MutableMapping):
    """The `state` of a prepared optimizer: a mapping from each parameter to a mapping of names to values.

    The names are those of torch, and the values are those that the next step uses. Writing to a tensor, setting a value
    and clearing work as with torch. The fp32 copy of a 16-bit parameter is not included.

    Attributes:
        copied: Copies of all, once optimizer.state is something else; None: it is what the optimizer has.
    """

    def __init__(self, optimizer):
        self.optimizer, self.rule = optimizer, optimizer.rule
        self.copied = None
        optimizer.held.note(self)

    def detach(self):
        """Becomes what the states are now, of which the optimizer knows nothing any more."""
        values = {param: self[param] for param in self}
        self.copied = {
            param: copies(dict(value), None) if isinstance(value, collections.abc.Mapping) else copies(value, None)
            for param, value in values.items()
        }

    def record(self, param):
        """The record of a parameter that the optimizer updates; otherwise None."""
        record = getattr(param, "_gm_record", None)
        return record if record is not None and record.rule is self.rule else None

    def __getitem__(self, param):
        if self.copied is not None:
            return self.copied[param]
        record = self.record(param)
        if record is not None:
            return self.rule.state_of(record)
        if isinstance(param, torch.Tensor):
            raise KeyError("the tensor is no parameter that the optimizer updates")
        return self.rule.others()[param]

    def __setitem__(self, param, values):
        if self.copied is not None:
            self.copied[param] = values
            return
        record = self.record(param)
        if record is not None:
            self.rule.set_state(record, values)
        else:
            self.rule.check_others([param])
            self.rule.set_others({**self.rule.others(), param: values})

    def __delitem__(self, param):
        if param not in self:
            raise KeyError(param)
        if self.copied is not None:
            del self.copied[param]
            return
        record = self.record(param)
        if record is not None:
            self.rule.set_state(record, {})
        else:
            self.rule.set_others({key: value for key, value in self.rule.others().items() if key != param})

    def get(self, param, default=None):
        return self[param] if param in self else default

    def pop(self, param, *default):
        """Removes a state and returns a copy of it."""
        if default and param not in self:
            return default[0]
        values = self[param]
        values = copies(dict(values) if isinstance(values, collections.abc.Mapping) else values, None)
        del self[param]
        return values

    def clear(self):
        for param in list(self):
            del self[param]

    def __contains__(self, param):
        if self.copied is not None:
            return param in self.copied
        record = self.record(param)
        return self.rule.has_state(record) if record is not None else param in self.rule.others()

    def __iter__(self):
        if self.copied is not None:
            yield from list(self.copied)
            return
        yield from [
            record.param
            for record in self.optimizer.records
            if record.rule is self.rule and self.rule.has_state(record)
        ]
        yield from list(self.rule.others())

    def __len__(self):
        return sum(1 for _ in self)

    def __repr__(self):
        return f"States of {len(self)} parameters"


def refuse_divided(record, name):
    """Raises GeminiError: a state of a parameter is nowhere whole."""
    raise GeminiError(
        f"parameter {record.name}: {name} is divided among the ranks: take optimizer.state_dict(), on all ranks"
    )


class AdamwState(collections.abc.MutableMapping):
    """The state of a parameter of AdamW or Adam: step, exp_avg and exp_avg_sq. It is empty before the first step.

    Attributes:
        copied: Copies of all, once the parameter has another state; None: it is what the optimizer has.
    """

    def __init__(self, rule, record):
        self.rule, self.record = rule, record
        self.copied = None

    def detach(self):
        """Becomes what the state is now, of which the optimizer knows nothing any more."""
        self.copied = copies(dict(self), None)

    def __iter__(self):
        if self.copied is not None:
            return iter(list(self.copied))
        return iter([name for name in self.rule.states(self.record) if name != "master"])

    def __len__(self):
        if self.copied is not None:
            return len(self.copied)
        return 3 if self.rule.has_state(self.record) else 0

    def __getitem__(self, name):
        if name not in list(self):
            raise KeyError(name)
        if self.copied is not None:
            return self.copied[name]
        if name == "step":
            return self.record.step
        place = self.record.states[self.rule.NAMES[name]]
        if not place.address:
            refuse_divided(self.record, name)
        if place.dtype == torch.uint8:  # in blocks: nothing that torch could compute with
            return seen(self.record, self.rule.NAMES[name]).read()
        return self.rule.held(place).note(managed_view(place))

    def __setitem__(self, name, value):
        if self.copied is not None:
            self.copied[name] = value
            return
        if name not in list(self):
            raise GeminiError(
                f"parameter {self.record.name}: {name!r} is set in a state that has "
                f"{', '.join(self) or 'nothing'}: set step, exp_avg and exp_avg_sq, all together"
            )
        if name == "step":
            self.record.step.fill_(whole_step(self.record.name, value))
        else:
            place = self.record.states[self.rule.NAMES[name]]
            own = self[name]
            if value.shape != own.shape:
                raise GeminiError(
                    f"parameter {self.record.name}: {name} is set to a tensor of {tuple(value.shape)}: want "
                    f"{tuple(own.shape)}"
                )
            if place.dtype == torch.uint8:
                seen(self.record, self.rule.NAMES[name]).write(value)
            else:
                value = value.clone()  # it may be what is let go, or what it is set to
                self.rule.detach(place, own)
                own.copy_(value)

    def __delitem__(self, name):
        raise GeminiError(
            f"parameter {self.record.name}: step() needs {name}: clear() the whole state, or zero_() {name}"
        )

    def clear(self):
        if self.copied is not None:
            self.copied.clear()
        else:
            self.rule.set_state(self.record, {}, self)

    def update(self, *args, **kwargs):
        values = dict(*args, **kwargs)
        if self.copied is None and not len(self) and values:  # from nothing, a state is set as a whole
            self.rule.set_state(self.record, values, self)
        else:
            super().update(values)

    def __repr__(self):
        return repr(dict(self))
