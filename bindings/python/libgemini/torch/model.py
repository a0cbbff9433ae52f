"""Prepared models: how parameters get into a session, what becomes of gradients, and where a training step begins.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import inspect
import itertools
import operator
import os
import sys
import types
import typing
import warnings
import weakref

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .. import abi
from ..abi import GeminiError
from . import experts, internals, narrow, patches, rows
from .arenas import DTYPES, Place, in_backward
from .blocks import Blocks
from .division import Division, ManagedLocalParameter, local_view, localize
from .internals import get_grad as _get_grad, plain as _plain, set_grad as _set_grad
from .layout import dense_stride, span
from .memory import FLOATS_OF_8_BITS, can_wrap, shared
from .progress import Progress
from .session import Session
from .tensors import (
    ManagedNumber,
    ManagedParameter,
    ManagedTensor,
    _copy,
    _gradient_of,
    become_number,
    become_tensor,
    is_exact,
    is_number,
    keeps_class,
    managed_view,
    parameter_class,
    weights_only_models,
)
from .unit import find, make_units, refuse_compiling, scripted
from .whole import Whole


class Record:
    """The session's record of a parameter: where the parameter, its gradient and its states are stored.

    The parameter refers to its record. The record refers to the parameter weakly, so that it exists as long as the
    parameter does.
    """

    def __init__(self, session: Session, param: nn.Parameter, name: str) -> None:
        self.session = session
        # A weak reference to the parameter, which refers to this record.
        self.reference: weakref.ref[nn.Parameter] | None = None
        self.name = name
        self.place = typing.cast(Place, None)  # until allocate()
        self.grad_place: typing.Any = None  # a Place, from attach() on
        # How torch divides the parameter, of which this is a part; otherwise None.
        self.division: Division | None = getattr(param, "_gm_division", None)
        # Places by kind, once an optimizer needs them.
        self.states: dict[str, Place] = {}
        # The rule of the optimizer that updates the parameter.
        self.rule: typing.Any = None
        self.has_grad = False  # a gradient is stored in grad_place
        # A gradient was assigned: it stays the caller's tensor, in torch's memory, until nothing else refers to it.
        self.given = False
        self.factor = 1.0  # see scale
        # The version of the stored gradient before it is multiplied by the factor, which tells after an interrupt
        # whether it was; -1: that has not begun.
        self.multiplying = -1
        # See norm.
        self.known_norm: torch.Tensor | None = None
        self.view: ManagedTensor | None = None  # param.grad, once it was read
        self.generation = 0  # how many gradients came before the stored one
        self.hook: typing.Any = None
        self.former: typing.Any = None  # of one without dimensions that was frozen: see thaw()
        # Hooks before and after those of the user; see show(). None while there was none in a unit.
        self.around: tuple[typing.Any, typing.Any] | None = None
        self.early = False  # whether the backward pass updates it, as soon as its gradient is complete
        self.spent = False  # whether that update has used the gradient of this step
        self.split = False  # whether states["master"] has lower halves alone; see narrow.py
        # How many updates the C library's AdamW has made, as a tensor; None without states.
        self.step: torch.Tensor | None = None
        self.refer(param)

    def refer(self, param):
        own = weakref.ref(self)

        def gone(_):
            record = own()
            if record is not None:
                record.view = None  # which refers to the record
                record.session.given.pop(record, None)

        self.reference = weakref.ref(param, gone)

    @property
    def param(self):
        """The parameter, or None if it was deleted."""
        return self.reference and self.reference()

    @property
    def reuses_bytes(self):
        """Whether its gradient has the bytes of the parameter: an early update leaves no gradient behind, and makes the
        parameter anew. On several ranks it may skip the parameter, if no rank has made a gradient; and an update with
        split masters reads the parameter.
        """
        return self.early and self.place.dtype != torch.float32 and not self.session.ranks and not self.split

    @property
    def trainable(self):
        """Whether there is a place for its gradient."""
        return self.grad_place is not None

    @property
    def norm(self):
        """The norm of the gradient (the stored one, times scale), as a tensor on the device; None: not known.

        If torch divides the parameter, that of the whole.
        """
        return self.division.norm(self) if self.division is not None and self.has_grad else self.part_norm()

    @norm.setter
    def norm(self, value):
        self.known_norm = value

    def part_norm(self):
        """The norm of what this session has of the gradient. See norm."""
        self.session.backward.norm_asked = True
        if self.known_norm is None and self.session.ranks and self.has_grad:
            self.known_norm = self.session.ranks.norm(self)
        return self.known_norm

    def rename(self, name):
        """Gives the parameter, its gradient and its states a name, which messages have."""
        self.name = name
        self.place.name = name
        if self.place.object == self.place.arena and self.place.elements:
            self.place.register(name)
        for place in (self.grad_place, *self.states.values()):
            if place:
                place.name = f"{name}.{place.name.rpartition('.')[2]}"

    @property
    def scale(self):
        """A factor that the stored gradient has to be multiplied by."""
        if self.multiplying != -1 and self.multiplying != internals.version(self.grad_place.tensor):
            self.factor = 1.0  # an interrupt came after the multiplication
        self.multiplying = -1
        return self.factor

    @scale.setter
    def scale(self, factor):
        self.factor = factor
        self.multiplying = -1

    # ---- the bytes
    def move_in(self, values):
        """Copies values from any device but meta into the session, and makes the parameter a managed one."""
        before = self.place
        try:
            self.allocate(values.shape, values.dtype, dense_stride(values))
            if values.numel():
                self.place.origin = span(values)
                self.place.write(_copy(values) if isinstance(values, ManagedTensor) else values)
        except BaseException:
            self.place = before
            raise
        self.become_managed()

    def allocate(self, shape, dtype, stride=None):
        """Takes a place, which reads as zero. become_managed() then gives it to the parameter."""
        kind = "param" if self.param.requires_grad else self.session.arenas.frozen
        if self.division is not None and self.division.owners is not None:
            kind += f" in {self.division.owners.name}"
        self.place = self.session.arenas.place(kind, shape, dtype, self.name, stride)

    def become_managed(self):
        """Makes the parameter a managed one, over its place."""
        param = self.param
        with _plain():
            # A parameter on the meta device cannot be given data. One that was made in inference mode would have no
            # versions afterwards, which tell what was written. So they are swapped.
            if param.is_meta or param.is_inference():
                with torch.inference_mode(False):
                    other = nn.Parameter(self.place.tensor, param.requires_grad)
                other.__class__ = type(param)
                other.__dict__.update(param.__dict__)
                self.reference = None  # torch refuses to swap objects with weak references
                torch.utils.swap_tensors(param, other)
                self.refer(param)
            else:
                put_over(param, self.place.tensor)
            if _get_grad(param) is not None:  # it had a gradient before
                self.note_given()
        param.__class__ = parameter_class(param) if self.division is None else ManagedLocalParameter
        param._gm_place = self.place
        if isinstance(param, ManagedNumber):
            param._gm_raw = self.place.tensor.detach()
        param._gm_record = self
        param._gm_grad = None  # it may have been a view of a gradient
        self.place.owner = weakref.ref(self)
        self.session.known[id(self)] = self

    def guard(self):
        """Prepares a frozen parameter without dimensions for being used as a number; see ManagedNumber."""
        param = self.param
        if type(param) is ManagedParameter and is_number(param) and not param._gm_unit:
            become_number(param)

    def renew_master(self, whole=False):
        """Updates the fp32 copy from the parameter, where it does not round to it.

        whole: everywhere: the copy is new, or the parameter was loaded without one.
        """
        self.place.written = False
        if "master" not in self.states:
            return
        place, master, ranks = self.place, self.states["master"], self.session.ranks
        if whole and master.dtype == narrow.HALF:
            master.zero()
        elif ranks:
            for values, piece in ranks.slices_of_both(place, master):
                new = values if whole else narrow.renewed(values, piece)
                if new is not None:
                    piece.copy_(new)
        elif whole:
            master.copy_from(place)
        else:
            narrow.renew(place, master)

    def replace(self, values):
        """Serves `parameter.data = values`.

        This is allowed until the model is prepared; afterwards addresses are fixed.
        """
        self.refuse_replacing()
        if isinstance(values, ManagedTensor):
            self.share(values)
        else:
            self.move_in(values)

    def refuse_replacing(self):
        """Raises GeminiError if the model is prepared."""
        if self.settled:
            raise GeminiError(
                f"parameter {self.name} would be moved or replaced (by .data, set_(), .to(), .half() or the like) "
                "after libgemini.torch.prepare(): do that before"
            )

    @property
    def settled(self):
        """Whether the address is fixed, as the parameter was prepared."""
        return self.trainable or self.session.prepared(self.param)

    def share(self, values):
        """Puts the parameter over the bytes of other managed values, as torch does, and ends this record.

        prepare() finds out which of the parameters over a place gets it.
        """
        param = self.param
        with _plain():
            param.data = values
        param._gm_place = values._gm_place
        param._gm_record = None

    def give_up(self):
        """Leaves the place to another parameter that covers all of it.

        This parameter stays over the same bytes, as in torch, with a gradient in torch's memory, and is no longer
        managed as a parameter.
        """
        session, param = self.session, self.param
        self.take_left()
        session.backward.settle()
        gradient = _copy(self.gradient()) if self.has_grad and not self.spent else None
        self.set_gradient(None)
        if self.rule:
            self.rule.let_go(self)
        self.rule = GIVEN_UP
        session.rule_of.pop(self, None)
        session.known.pop(id(self), None)
        if self.hook:
            self.hook.remove()
        self.hook = self.grad_place = None
        self.states.clear()
        param._gm_record = None
        with _plain():
            _set_grad(param, gradient)

    # ---- its gradient
    def attach(self):
        """Creates the place of the gradient, and stores gradients that autograd makes there from now on."""
        if self.place.dtype not in DTYPES:
            raise GeminiError(_wants_dtype(self.name, self.place.dtype))
        if not self.grad_place:
            place = self.place
            kind = "reused grad" if self.reuses_bytes else "grad"
            self.grad_place = self.session.arenas.counterpart(place, kind, place.dtype)
            self.grad_place.name = f"{self.name}.grad"
        with _plain():
            if self.hook is None and self.param.requires_grad:
                self.hook = self.param.register_post_accumulate_grad_hook(self.take_gradient)
                if _get_grad(self.param) is not None:  # it had a gradient before it was prepared
                    self.note_given()

    def thaw(self):
        """Serves requires_grad_() of a parameter without dimensions, which has got another C++ tensor when it was
        frozen: a graph from before gives its gradient to the former one."""
        with _plain():
            trained, former = self.param.requires_grad, self.former
            if trained and self.trainable and self.hook is None:
                self.attach()
            if former is None or former.requires_grad == trained:
                return
            former.requires_grad_(trained)
            if trained and not getattr(former, "_post_accumulate_grad_hooks", None):
                own = weakref.ref(self)  # Python's garbage collector does not see hooks, and self refers to the tensor
                former.register_post_accumulate_grad_hook(lambda one: (record := own()) and record.take_over(one))

    def take_over(self, former):
        """The former C++ tensor has a gradient, which is the parameter's."""
        with _plain(), torch.no_grad():
            param, left, gradient = self.param, _get_grad(self.param), _get_grad(former)
            _set_grad(former, None)
            _set_grad(param, gradient if left is None else left + gradient)
        self.take_gradient(param)

    def unhook(self):
        """Ends what attach() has begun, as the session is closed. Python's garbage collector does not see such a hook,
        by which the parameter, and with it the model, would refer to itself."""
        for hook in (self.hook, *(self.around or ())):
            if hook is not None:
                hook.remove()
        self.hook = self.around = None

    def show(self, unit, kind):
        """Has the parameter, which a unit has made plain, managed as long as hooks run that the user has registered for
        its gradient: they shall read the stored one, which a plain parameter does not have.

        Args:
            unit: The unit.
            kind: The class of the parameter when it is managed.
        """
        hooks = typing.cast(typing.Any, self.param)._post_accumulate_grad_hooks
        if self.hook is None or len(hooks) == 1 + len(self.around or ()):
            return

        def begin(param):
            param.__class__ = kind

        def end(param):
            if unit.users:
                param.__class__ = kind._gm_plain

        if self.around is None:
            register = self.param.register_post_accumulate_grad_hook
            self.around = register(begin), register(end)
        before, after = self.around
        own = self.hook.id, before.id, after.id
        order = [*own[:2], *(number for number in hooks if number not in own), after.id]
        if list(hooks) != order:
            ordered = {number: hooks[number] for number in order}
            hooks.clear()  # torch calls them in the order in which they came into the dict, which moves do not change
            hooks.update(ordered)

    def take_gradient(self, _):
        """A hook: autograd has put a gradient into param.grad.

        It is queued to be stored in its arena, and param.grad is cleared.
        """
        with _plain():
            fresh = _get_grad(self.param)
            if fresh is None:
                return
            if self.given:
                if not self.early:  # autograd has added to a tensor that others may have, too
                    return
                self.forget_given()
            if self.spent:
                _set_grad(self.param, None)
                self.refuse_second()
            rule = self.session.rule_of.get(self)
            if rule and not rule.updates(self):
                _set_grad(self.param, None)
                self.refuse_left()
            self.session.backward.begin()
            self.queue(fresh)
            self.session.backward.store_many()

    def refuse_second(self):
        """Raises GeminiError: the backward pass has updated the parameter, and there is another one."""
        raise GeminiError(
            f"parameter {self.name} has a second gradient, but was updated with its first (step_in_backward=True): "
            "call optimizer.step() after each backward pass. Accumulation, and modules that reentrant checkpoints use "
            "several times, need prepare() without"
        )

    def refuse_left(self):
        """Raises GeminiError: no update would follow, and the gradient would have taken the parameter's bytes."""
        raise GeminiError(
            f"parameter {self.name} has a gradient, but has been taken from the groups of the optimizer, which was "
            "prepared with step_in_backward=True: freeze it, too, by requires_grad_(False)",
            "STATE",
        )

    def queue(self, fresh):
        """Queues a gradient that autograd holds to be stored, and clears autograd's slot.

        An interrupt may come between any two steps. A gradient that is both in the queue and in the slot is the same
        tensor, and counts once; see Backward.store_landed().
        """
        if fresh.requires_grad:
            _set_grad(self.param, None)
            raise GeminiError(
                f"{self.name}: backward(create_graph=True) would make a gradient that has a graph itself, "
                "which an arena cannot hold"
            )
        if fresh.dtype != self.place.dtype:
            _set_grad(self.param, None)
            raise GeminiError(
                f"{self.name}: its gradient is {fresh.dtype} and itself {self.place.dtype} (torch.Tensor.grad_dtype): "
                "in a session gradients have the type of their parameter"
            )
        self.session.backward.queue(self, fresh)
        _set_grad(self.param, None)

    def take_left(self):
        """Takes a gradient that autograd still holds, because an exception or an interrupt has ended the backward
        pass, or the hook of the user that is running came before take_gradient().

        It adds to the stored gradient, as it does in torch.
        """
        with _plain(), torch.no_grad():
            # Within the backward pass the first gradient may stay with autograd: take_gradient() comes.
            if self.has_left() and (self.has_grad or not in_backward()):
                self.queue(_get_grad(self.param))

    def has_left(self):
        """Whether autograd holds a gradient that nobody has assigned."""
        if self.given or self.hook is None:
            return False
        param = self.param
        return param is not None and _get_grad(param) is not None

    def catch_up(self):
        """Stores the gradients of the parameter that autograd has made so far."""
        if not self.early:
            self.take_left()
        self.session.backward.land(self)

    def settle(self, mode):
        """Applies the pending factor, as the stored gradient is about to be read or written as plain bytes."""
        scale = self.scale
        if scale != 1.0 and mode & abi.READ:
            place, session = self.grad_place, self.session
            access = place.access(abi.READ_WRITE)
            with session.holds.acquired(access, 1, session.holds.stream()):
                self.multiplying = internals.version(place.tensor)
                place.tensor.mul_(scale)
        self.scale = 1.0
        if mode & abi.WRITE:
            self.norm = None

    def multiply(self, factor):
        """Multiplies the stored gradient when it is read next, or in the update. No bytes move for it.

        Returns:
            Whether that gives the same result as torch, which rounds after each factor: one of two factors has to
                be a power of two, and the gradient not float16, where a value between the two may be too small or too
                large. On several ranks, whose elements cannot be multiplied now, always True.
        """
        exact = self.place.dtype != torch.float16 and (is_exact(self.scale) or is_exact(factor))
        if not self.session.ranks and self.scale != 1.0 and not exact:
            return False
        self.scale *= factor
        self.norm = None
        torch.autograd.graph.increment_version(self.grad_place.tensor)
        return True

    def gradient(self):
        """The value of param.grad."""
        self.catch_up()
        if self.spent:
            raise GeminiError(
                f"the gradient of parameter {self.name} is gone: it was prepared with step_in_backward=True. To "
                "read, clip or unscale gradients, prepare without"
            )
        if not self.has_grad:
            with _plain():
                return _get_grad(self.param)
        if self.view is None:
            place = self.grad_place
            self.view = managed_view(place) if self.division is None else local_view(place, self.division)
            self.view._gm_grad = self
            self.view._gm_generation = self.generation
        return self.view

    def set_gradient(self, values):
        """Serves `param.grad = values`.

        The tensor itself becomes the gradient, as others may have it and write to it.
        """
        if values is not None:
            self.session.backward.land(self)
            if self.session.ranks:
                raise GeminiError(
                    f"{self.name}.grad is set, on one of several ranks: gradients come from backward passes, of which "
                    "all ranks make their part"
                )
        place = self.place
        if self.division is not None and values is not None and values is not self.view:
            raise GeminiError(
                f"{self.name}.grad is set, of a DTensor of which this process has a part: its gradients come from "
                "backward passes"
            )
        if isinstance(values, torch.Tensor):
            if values.shape != place.shape or values.dtype != place.dtype:
                raise GeminiError(
                    f"{self.name}.grad is set to a tensor of {tuple(values.shape)}, {values.dtype}: want "
                    f"{tuple(place.shape)}, {place.dtype}"
                )
            if isinstance(values, ManagedTensor):
                record = _gradient_of(values)
                if (
                    record is self
                    and values.data_ptr() == self.grad_place.address
                    and values.stride() == self.grad_place.tensor.stride()
                ):
                    self.view = values
                    return
                if record is None:
                    raise GeminiError(
                        f"{self.name}.grad is set to a tensor that shares its bytes with {values._gm_place.name}: set "
                        "it to a clone()"
                    )
                record.give_out(values)
        if values is not None:
            self.keep_view()
        with _plain():
            _set_grad(self.param, values)
        self.session.backward.forget(self)
        self.forget_given()
        self.drop()
        if values is not None:
            # When gradients are assigned one after another, the previous one may have no other reference by now.
            if self.session.given:
                next(reversed(self.session.given)).keep_given()
            self.note_given()

    def drop(self):
        """Forgets the stored gradient."""
        self.has_grad = False
        self.scale, self.norm, self.view = 1.0, None, None
        self.generation += 1

    # ---- gradients that were assigned
    def note_given(self):
        """Notes that the gradient is a tensor that the user assigned."""
        if self.session.ranks:  # which would add nobody's
            self.session.ranks.refuse_gradient(self.param, self.name)
        self.given = True
        self.session.given[self] = None

    def find_given(self):
        """Looks for an assigned gradient of a parameter that has not needed gradients so far."""
        with _plain():
            if _get_grad(self.param) is not None:
                self.attach()
                self.note_given()

    def forget_given(self):
        """The gradient is no longer one that the user assigned."""
        self.given = False
        self.session.given.pop(self, None)

    def keep_given(self):
        """Stores an assigned gradient that nobody else refers to, so that it may leave the device."""
        with _plain(), torch.no_grad():
            if self.early or not self.trainable or not is_alone(self.param):
                return
            values = _get_grad(self.param)
            if tuple(values.stride()) != self.grad_place.stride:
                return
            self.forget_given()
            self.queue(values)
            self.session.brackets.op_end()
            self.session.backward.store_landed(self)

    def store_given(self):
        """Stores an assigned gradient, for an update that reads it from the arena."""
        with _plain(), torch.no_grad():
            self.store_whole(_get_grad(self.param))

    def store_whole(self, values):
        # Otherwise all gradients that are stored one after another would belong to one operator and have to fit
        # together.
        """Stores a gradient in an operator of its own."""
        self.session.brackets.op_end()
        self.session.backward.store([(self, values, False)])

    def keep_view(self):
        """Before another gradient takes its place: who has this one, such as for exchanging two, keeps its values."""
        if self.has_grad and self.view is not None and sys.getrefcount(self.view) > 2:
            become_copy(self.view)

    def give_out(self, alias):
        """Moves the stored gradient to torch's memory, as if it had been assigned, together with a view of it that
        somebody else gets.

        Other views of it become unusable.
        """
        place, whole = self.grad_place, self.gradient()
        with torch.no_grad():
            copy = _copy(whole)
        first = (alias.data_ptr() - place.address) // place.dtype.itemsize
        with _plain():
            become_plain(whole, copy)
            if alias is not whole:
                become_plain(alias, copy.as_strided(alias.shape, alias.stride(), first))
            _set_grad(self.param, whole)
        self.drop()
        self.note_given()


def put_over(tensor, data):
    """Puts a tensor over bytes in the session.

    A graph from before would read these where nobody acquires them. torch refuses its backward pass, as the version of
    the tensor says that it was written.
    """
    moves = tensor.data_ptr() != data.data_ptr()
    tensor.data = data
    if moves:
        internals.note_write(tensor)


def become_plain(tensor, data):
    """Makes a managed tensor a plain one, over other memory."""
    if isinstance(tensor, ManagedNumber):
        become_tensor(tensor)
    tensor.data = data
    tensor.__class__ = nn.Parameter if isinstance(tensor, nn.Parameter) else torch.Tensor
    for name in [name for name in vars(tensor) if name.startswith("_gm_")]:
        delattr(tensor, name)


def become_copy(tensor):
    """Makes a managed tensor a plain one, with a copy of its values."""
    with torch.no_grad():
        copy = _copy(tensor)
    with _plain():
        become_plain(tensor, copy)


def _holders(param):
    """Counts the references to a parameter's gradient: to the Python object, to the C++ tensor and to the storage."""
    grad = _get_grad(param)
    return sys.getrefcount(grad), internals.tensor_users(grad), internals.storage_users(grad.untyped_storage())


def _holders_of_one():
    """What _holders() gives for a gradient that only its parameter refers to; None if torch does not report enough to
    tell.
    """
    param, other = (nn.Parameter(torch.empty(1, device="cpu")) for _ in range(2))
    param.grad = torch.empty(1, device="cpu")
    alone = _holders(param)
    if None in alone:
        return None
    kept = param.grad
    objects = _holders(param)[0]
    other.grad = kept
    del kept
    tensors = _holders(param)[1]
    other.grad = param.grad.detach()
    return alone if objects > alone[0] and tensors > alone[1] and _holders(param)[2] > alone[2] else None


_HOLDERS_OF_ONE = _holders_of_one()


def is_alone(param):
    """Whether only the parameter refers to its gradient, so that nobody notices if the tensor is replaced."""
    grad = _get_grad(param)
    plain = (
        type(grad) is torch.Tensor
        and grad.layout is torch.strided
        and not grad.requires_grad
        and not grad.is_inference()
        and not vars(grad)
        and not weakref.getweakrefcount(grad)
    )
    del grad
    return plain and _HOLDERS_OF_ONE is not None and _holders(param) == _HOLDERS_OF_ONE


# The rule of a record that no optimizer updates any more.
GIVEN_UP = object()
CLOSED = "parameter {} belongs to a session that was closed: its bytes are gone, make the model anew"


def _is_plain(param):
    """Whether a parameter is of no subclass, which it would lose, as the session gives it a class of its own.

    One of a subclass is refused. A frozen one is managed if it can keep its class, and stays with torch otherwise.
    """
    return type(param) is nn.Parameter or isinstance(param, ManagedParameter)


def _stays(param: torch.Tensor) -> str | None:
    """Why a frozen parameter, which is not managed yet, stays with torch, in words; None: it does not."""
    if not param.is_floating_point() and param.nbytes < LEAST_BUFFER:  # perhaps a counter, which a model replaces
        return "small"
    if type(param) is nn.Parameter:
        return None if can_wrap(param.dtype) else f"of {param.dtype}"
    if type(param).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return "made of other tensors"
    if not keeps_class(type(param)):
        return "of a class that serves functions of torch itself"
    return None if has_storage(param) and shared(param) is False else "over bytes that another tensor has, too"


def _wants_dtype(name, dtype):
    return f"parameter {name} is of {dtype}: want {', '.join(map(str, DTYPES))}, or one that needs no gradient"


def adopt(session, param, name):
    """Makes a parameter a managed one, if it is not managed already and has bytes. Returns its record, or None."""
    record = getattr(param, "_gm_record", None)
    if record is not None:
        if record.session is not session:
            raise GeminiError(CLOSED.format(name))
        return record
    if nn.parameter.is_lazy(param):
        raise GeminiError(f"parameter {name} has no shape yet: call the model once before libgemini.torch.prepare()")
    if param.is_meta:
        return None
    if not _is_plain(param):
        if param.requires_grad:
            raise GeminiError(
                f"parameter {name} is a {type(param).__name__}, which would lose its class: want nn.Parameter itself"
            )
    if param.requires_grad and param.dtype not in DTYPES:
        raise GeminiError(_wants_dtype(name, param.dtype))
    if not isinstance(param, ManagedTensor) and _stays(param):
        return None
    record = Record(session, param, name)
    place = getattr(param, "_gm_place", None)
    if place is None:
        with _plain():
            record.move_in(param.data)
    elif place.session is not session:
        raise GeminiError(CLOSED.format(name))
    elif place.has(param):
        owner = place.owner and place.owner()
        if owner is not None and owner.param is not None:
            owner.give_up()
        record.place = place
        record.become_managed()
    else:
        record.move_in(param.detach())
    return record


# Dtypes that weights are packed in. Buffers of int64 and bool are indices and masks.
PACKED = {torch.int8, torch.uint8, torch.int16, torch.int32} | FLOATS_OF_8_BITS
LEAST_BUFFER = 4096  # bytes: for a smaller one, an acquire at each use costs more than its memory is worth


def are_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of a module, without those of modules inside it, that are quantized weights, by name.

    These are buffers of a dtype that weights are packed in. Small ones are left out, and those that share their bytes
    with another tensor, which would no longer see what is written to them. Scales stay with torch: functions such as
    F.batch_norm() write buffers of floating point without a trace, and what nobody knows of would be lost. So do the
    buffers of torch's fake quantization, whose function writes zero points likewise.
    """
    if isinstance(module, torch.ao.quantization.FakeQuantizeBase):
        return {}
    return {
        name: buffer
        for name, buffer in module.named_buffers(recurse=False)
        if type(buffer) is torch.Tensor
        and not buffer.requires_grad
        and buffer.dtype in PACKED
        and can_wrap(buffer.dtype)
        and (buffer.is_meta or has_storage(buffer) and shared(buffer) is False and not buffer.is_shared())
        and buffer.nbytes >= LEAST_BUFFER
    }


def adopt_buffer(session: Session, buffer: torch.Tensor, name: str, fill: bool = True) -> Place:
    """Makes a plain buffer, or one on the meta device, a managed tensor. It stays the same Python object.

    Args:
        session: The session.
        buffer: The buffer.
        name: Its name, for messages.
        fill: Whether its values come along; False: it becomes zero, and somebody will write it.
    """
    place = session.arenas.place(session.arenas.frozen, buffer.shape, buffer.dtype, name, dense_stride(buffer))
    place.register(name)
    if fill:
        place.write(buffer)
    if buffer.is_meta or buffer.is_inference():  # as in Record.become_managed()
        attributes = dict(vars(buffer))
        torch.utils.swap_tensors(buffer, managed_view(place))
        buffer.__dict__.update(attributes)
    else:
        with _plain():
            put_over(buffer, place.tensor)
        buffer.__class__ = ManagedTensor
        typing.cast(ManagedTensor, buffer)._gm_place = place
    return place


@contextlib.contextmanager
def from_pretrained_by_tensor():
    """A context manager: transformers' from_pretrained() reads one tensor after another, on the CPU.

    Otherwise threads of its own read many tensors ahead, or it fills the GPU before the session can take the tensors.
    transformers has to be imported before.
    """
    replaced = patches.from_pretrained()
    if replaced is None:
        yield
        return
    original = replaced.original
    variable = "HF_DEACTIVATE_ASYNC_LOAD"
    setting = os.environ.get(variable)

    def from_pretrained(cls, *args, **kwargs):
        with torch.device("cpu"):
            return original.__func__(cls, *args, **kwargs)

    os.environ[variable] = "1"
    try:
        with patches.during(replaced, classmethod(from_pretrained)):
            yield
    finally:
        del os.environ[variable]
        if setting is not None:
            os.environ[variable] = setting


@contextlib.contextmanager
def building(session):
    """A context manager: each parameter of the modules that are built within it goes into the session at once."""
    replaced = patches.register_parameter()

    def register_parameter(module, name, param):
        replaced.original(module, name, param)
        if param is not None and type(param) is nn.Parameter and not param.is_meta:
            record = adopt(session, param, name)
            if record is not None:
                record.guard()
            progress.add(param.nbytes)

    session.building = True
    try:
        with (
            patches.during(replaced, register_parameter),
            session.device if session.cuda else contextlib.nullcontext(),
            from_pretrained_by_tensor(),
            Progress("building the model", show=session.progress) as progress,
        ):
            yield
    finally:
        session.building = False
        session.arenas.free_places()


def spans_of(param):
    """Where a parameter's bytes are; for a parameter in the session also where they were before."""
    if not has_storage(param):
        return []
    record = getattr(param, "_gm_record", None)
    origin = record.place.origin if record is not None else None
    return [span(param)] + ([origin] if origin else [])


def has_storage(tensor):
    """Whether a tensor has bytes of its own. Uninitialized tensors and tensors that are made of others have none."""
    return (
        not is_lazy(tensor)
        and not tensor.is_meta
        and tensor.layout is torch.strided
        and tensor.numel() > 0
        and (isinstance(tensor, ManagedTensor) or type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__)
    )


def already_over(param, buffer):
    """Whether a buffer is a view of the place of a parameter."""
    place: typing.Any = getattr(param, "_gm_place", None)
    other: typing.Any = getattr(buffer, "_gm_place", None)
    return place is not None and other is place and place.has(param)


def same_values(param, buffer, first):
    """Whether a part of a parameter, from element `first` on, has the bits of a buffer of its shape and strides."""
    part = _copy(managed_view(param._gm_place).as_strided(buffer.shape, buffer.stride(), first))
    return torch.equal(*(one.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for one in (part, buffer)))


def record_of(param):
    """The record of a parameter, or None."""
    return getattr(param, "_gm_record", None)


_needs_gradient = operator.attrgetter("requires_grad")


class Checked:
    """The parameters of a module as Model.check() has seen them: which, in which modules, where, of which record.

    It refers to them, as the module does. Whatever adds, replaces, moves, freezes or thaws one, with or without
    libgemini's notice, changes one of these lists.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = modules
        self.children, self.params = self.inside()
        own = [param for param in self.params if param is not None]
        self.managed = [param for param in own if record_of(param) is not None]
        self.others = [param for param in own if record_of(param) is None]
        self.seen = self.look()

    @classmethod
    def of(cls, module: nn.Module) -> Checked | None:
        """Looks at all modules in one; None if one of them keeps its parameters in its own way, as torch.jit's do."""
        modules = list(module.modules())
        usual = all(
            isinstance(one._parameters, dict)
            and isinstance(one._modules, dict)
            and type(one).named_parameters is nn.Module.named_parameters
            for one in modules
        )
        return cls(modules) if usual else None

    def inside(self) -> tuple[list[typing.Any], list[typing.Any]]:
        """The children of all modules, one module's after another's, and the parameters likewise; None among them."""
        chain = itertools.chain.from_iterable
        return (
            list(chain([module._modules.values() for module in self.modules])),
            list(chain([module._parameters.values() for module in self.modules])),
        )

    def look(self) -> list[typing.Any]:
        """What can change of the parameters themselves: one list for each property, as Python makes these quickly."""
        records: list[typing.Any] = list(map(record_of, self.managed))
        with _plain():
            return [
                records,
                [record and record.hook for record in records],
                list(map(_needs_gradient, self.managed)),
                list(map(torch.Tensor.data_ptr, self.managed)),
                list(map(record_of, self.others)),
                list(map(_needs_gradient, self.others)),
            ]

    def still(self) -> bool:
        """Whether nothing has changed."""
        children, params = self.inside()
        return (
            len(children) == len(self.children)
            and len(params) == len(self.params)
            and all(map(operator.is_, children, self.children))
            and all(map(operator.is_, params, self.params))
            and self.look() == self.seen
        )


# Arguments of a forward pass that have a row for each text and a column for each token.
_TOKENS = "decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds"


def extends(args: tuple[typing.Any, ...], kwargs: dict[str, typing.Any]) -> bool:
    """Whether a forward pass is given one token of each text, as all but the first one of a generation are."""
    named = (kwargs.get(name) for name in _TOKENS)
    tokens = next((one for one in (*named, *args) if isinstance(one, torch.Tensor)), None)
    return tokens is not None and tokens.dim() > 1 and tokens.shape[1] == 1


class Model:
    """A prepared module: its parameters by name, and the hooks that begin a training step.

    Attributes:
        number: Of the model in its session, from 1 on.
        weights_only: Whether libgemini.torch.infer() has prepared it: its passes run without gradients.
    """

    def __init__(self, session: Session, module: nn.Module, weights_only: bool = False) -> None:
        self.session = session
        self.module = module
        session.model_count += 1
        self.number = session.model_count
        self.weights_only = weights_only
        self.records: dict[str, Record] = {}
        self.blocks = typing.cast(Blocks, None)  # until take()
        self.whole = typing.cast(Whole, None)
        self.checked: Checked | None = None  # what check() has seen when it last found nothing to do
        # A context manager around each forward pass, which says what becomes of the tensors that autograd saves.
        self.saving: typing.Callable[[], typing.ContextManager[object]] = contextlib.nullcontext
        self.take()
        self.wrap_call()
        self.wrap_forward()
        if weights_only:
            rows.mark(module)
            weights_only_models.add(self)

    def take(self):
        """Moves parameters into the session that are not in it, and buffers to the device."""
        session, module = self.session, self.module
        self.checked = None
        for name, param in module.named_parameters():
            if param.is_meta:
                raise GeminiError(
                    f"parameter {name} is on the meta device: load it first, by libgemini.torch.load_weights()"
                )
            if session.ranks:
                session.ranks.refuse_gradient(param, name)
        if not self.weights_only:
            localize(session, module)
        params = dict(module.named_parameters())
        self.refuse_aliases(params)
        views = self.buffers_over(params)
        self.tell_who_stays_behind(params)
        strangers = sum(param.nbytes for param in params.values() if not isinstance(param, ManagedTensor))
        self.records = {}
        with Progress("moving the model in", strangers, session.progress) as progress:
            for name, param in params.items():
                size = 0 if isinstance(param, ManagedTensor) else param.nbytes
                record = adopt(session, param, name)
                if record is not None:
                    record.rename(name)
                    self.records[name] = record
                progress.add(size)
        self.tell_what_stays(params)
        for buffer, name, first in views:
            self.become_view(buffer, self.records[name].place, first)
        self.adopt_buffers()
        self.move_buffers(session.device)
        session.holds.uses.clear()  # cached uses have the old names
        if self.weights_only and not session.ranks:
            experts.mark(module)
        if session.ranks:
            session.ranks.meet()  # some take longer to move the model in
            session.ranks.check_model(self.records)
            session.ranks.share_buffers(module)
        if self.blocks:
            self.blocks.unwrap()
        make_units(session, module)
        self.blocks = Blocks(session, module)
        self.whole = Whole(self)
        for record in self.records.values():
            record.guard()

    def tell_who_stays_behind(self, params: dict[str, nn.Parameter]) -> None:
        """Warns if a tensor that is none of the model's has the bytes of a parameter that is about to be moved: it
        keeps these bytes, which training does not change any more.
        """
        values = [value for value in (*params.values(), *self.module.buffers()) if has_storage(value)]
        bases = [value._base for value in values if value._is_view()]  # which views keep
        distinct = {id(value): value for value in (*values, *bases) if value is not None}
        known = collections.Counter(internals.storage_number(value) for value in distinct.values())
        for name, param in params.items():
            if isinstance(param, ManagedTensor) or not has_storage(param) or _stays(param):
                continue
            if shared(param, known[internals.storage_number(param)]):
                warnings.warn(
                    f"parameter {name} shares its bytes with a tensor that is none of the model, such as a detach() or "
                    "a view of it, an entry of a state dict, or what the graph of an earlier pass has saved: that "
                    "keeps the values of now, and is not trained. Make such tensors after prepare()",
                    stacklevel=6,
                )
                return

    def tell_what_stays(self, params: dict[str, nn.Parameter]) -> None:
        """Warns if frozen parameters stay in torch's memory, and says why."""
        stay = {name: param for name, param in params.items() if name not in self.records}
        name = next((name for name, param in stay.items() if param.numel() * param.itemsize >= LEAST_BUFFER), None)
        if name is not None:
            param = stay[name]
            warnings.warn(
                f"frozen parameter {name}, a {type(param).__name__}, stays in torch's memory, where it is, as it is "
                f"{_stays(param)}; {len(stay)} of {len(params)} parameters do",
                stacklevel=6,
            )

    def adopt_buffers(self) -> None:
        """Moves buffers that are quantized weights into the session, as frozen parameters are; see are_weights()."""
        if self.session.ranks:
            return  # which make buffers those of rank 0 whenever they prepare a model
        for path, module in self.module.named_modules():
            if scripted(module):
                continue
            for name, buffer in are_weights(module).items():
                adopt_buffer(self.session, buffer, f"{path}.{name}" if path else name)

    def places(self) -> list[Place]:
        """Where the weights are that have bytes: the parameters, and buffers that are no views of them."""
        found = [record.place for record in self.records.values()]
        found += [buffer._gm_place for buffer in self.module.buffers() if isinstance(buffer, ManagedTensor)]
        return [place for place in dict.fromkeys(found) if place.elements]

    def move_to_files(self) -> None:
        """Moves the weights to the session's files, if it has files and the host has no room for all.

        A copy on the host is given up first where the bytes are also elsewhere. If that was the only one below the
        device, it has to be made again each time that the bytes leave the device; one in the files stays.
        """
        session, stats = self.session, self.session.manager.stats()
        if not stats["budget_bytes"]["file"] or stats["model_bytes"] <= stats["budget_bytes"]["host"]:
            return
        for place in self.places():
            access = place.access(abi.READ, abi.TIER_FILE)
            try:
                session.lib.move(session.handle, ctypes.byref(access), 1)
            except GeminiError as error:
                if error.status != "OOM_FILE":
                    raise
                return  # the rest has room elsewhere

    def read_soon(self) -> None:
        """Starts to read weights that are in files, in the order of the model, as many as the host has room for.

        Operators wait for what they need; the rest comes meanwhile.
        """
        accesses = [place.access(abi.READ, abi.TIER_HOST) for place in self.places()]
        self.session.lib.hint(self.session.handle, (abi.Access * len(accesses))(*accesses), len(accesses))

    def least_bytes(self, at_once):
        """The device memory that the operator with the largest parameter needs, in whole chunks.

        Args:
            at_once: A function that gives, for a record, the sizes of an element of the tensors of the parameter's
                shape that an operator uses together. One that is None counts those of the parameter and, if it is
                trained, its gradient, which a plan keeps beside it in the backward pass. Without a plan the gradient
                may come afterwards.

        Returns:
            Bytes, and the record of that parameter.
        """
        chunk_size = self.session.manager.config.chunk_bytes

        def with_gradient(record):
            with _plain():
                beside = record.param.requires_grad and not record.reuses_bytes
            return [record.place.dtype.itemsize] * (2 if beside else 1)

        def needs(record):
            place, chunks = record.place, 0
            for itemsize in (at_once or with_gradient)(record):
                first = place.offset // place.dtype.itemsize * itemsize
                chunks += (first + place.elements * itemsize - 1) // chunk_size - first // chunk_size + 1
            return chunks * chunk_size

        return max(
            ((needs(record), record) for record in self.records.values() if record.place.elements),
            key=lambda item: item[0],
            default=(0, None),
        )

    def move_buffers(self, device):
        """Moves the buffers to a device."""
        for buffer in self.module.buffers():
            if buffer.device != device and not buffer.is_meta and not isinstance(buffer, ManagedTensor):
                buffer.data = buffer.data.to(device)

    def wrap_call(self):
        """Makes the module's call begin a step. A hook would be compiled by module.compile()."""
        module = self.module
        call = internals.call_of(module)

        @internals.not_traced
        def run(*args, **kwargs):
            refuse_compiling()
            with self.forward(args, kwargs):
                return self.whole.run(call, args, kwargs)

        run._gm_unit = getattr(call, "_gm_unit", None)
        self.call = run
        internals.set_call(module, run)

    def wrap_forward(self):
        """Makes forward() begin a step, too, when the user calls it directly.

        A module that torch.compile() compiled is left alone, as it may trace forward().
        """
        module = self.module
        if find(module):
            return
        inner: typing.Any = module.forward

        @internals.not_traced
        @functools.wraps(inner)
        def forward(caller, *args, **kwargs):
            if caller is not module:  # a deep copy of the module has copied this function, too
                method = isinstance(inner, types.MethodType) and inner.__self__ is module
                return (types.MethodType(inner.__func__, caller) if method else inner)(*args, **kwargs)
            if self.session.brackets.depth:
                return inner(*args, **kwargs)
            refuse_compiling()
            with self.forward(args, kwargs):
                return self.whole.run(inner, args, kwargs)

        forward.__name__ = "forward"  # pickle looks the method up by this name
        with contextlib.suppress(ValueError, TypeError):  # forward() has no signature that Python can tell
            forward.__signature__ = inspect.Signature(
                [
                    inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY),
                    *inspect.signature(inner).parameters.values(),
                ]
            )
        module.forward = types.MethodType(forward, module)

    def check_call(self):
        if internals.compiled_call_of(self.module) is not self.call:
            raise GeminiError(
                "model.compile() was called after libgemini.torch.prepare(), so the session no longer sees the calls "
                "of the model: compile it, or rather its blocks, before prepare()"
            )

    def refuse_aliases(self, params):
        """Refuses parameters that share bytes with another parameter, a gradient or a state: they would become
        separate.

        One parameter in two modules is fine.
        """
        for name, param in params.items():
            place = getattr(param, "_gm_place", None)
            if place is not None and place.follows:
                raise GeminiError(f"parameter {name} shares its bytes with {place.name}: clone() that")
        others = [pair for model in self.session.models for pair in model.module.named_parameters()]
        spans: dict[internals.StorageWeakRef, list[typing.Any]] = {}  # the spans of parameters by storage
        for name, param in [*others, *params.items()]:
            for where in spans_of(param):
                spans.setdefault(where.storage, []).append((where, name, param))
        for found in spans.values():
            found.sort(key=lambda item: item[0][1:3])
            before: list[typing.Any] = []
            for where, name, param in found:
                before = [item for item in before if item[0].end > where.first]
                for other, other_name, other_param in before:
                    if other_param is not param and where.shares_with(other):
                        raise GeminiError(
                            f"parameters {other_name} and {name} are two tensors that share their bytes: give both "
                            "modules the same parameter, or clone() one"
                        )
                before.append((where, name, param))

    def buffers_over(self, params):
        """Finds buffers that share the bytes of a parameter. They become views of its place.

        Returns:
            For each buffer the buffer, the name of the parameter, and the element where it begins.
        """
        spans: dict[internals.StorageWeakRef, list[typing.Any]] = {}
        for name, param in params.items():
            for where in spans_of(param):
                spans.setdefault(where.storage, []).append((where, name, param))
        found = []
        for buffer_name, buffer in self.module.named_buffers():
            if not has_storage(buffer):
                continue
            own = span(buffer)
            for where, name, param in spans.get(own.storage, ()):
                if not own.shares_with(where) or already_over(param, buffer):
                    continue
                first = own.first - where.first
                if (
                    first < 0
                    or own.end > where.end
                    or first % where.itemsize
                    or not where.dense
                    or buffer.dtype != param.dtype
                    or type(buffer) not in (torch.Tensor, ManagedTensor)
                ):
                    raise GeminiError(
                        f"buffer {buffer_name} shares bytes with parameter {name}, but is not a plain view of a part "
                        "of it, with its dtype: clone() one of them"
                    )
                if getattr(param, "_gm_record", None) is not None and not same_values(
                    param, buffer, first // where.itemsize
                ):
                    raise GeminiError(
                        f"buffer {buffer_name} shared its bytes with parameter {name} until the parameter came into "
                        "the session, and one of the two was changed since: register the buffer after prepare(), "
                        "from the parameter"
                    )
                found.append((buffer, name, first // where.itemsize))
        return found

    def become_view(self, buffer, place, first):
        with _plain():
            view = place.tensor.as_strided(buffer.shape, buffer.stride(), first)
            if buffer.is_inference():  # as in Record.become_managed()
                view.__dict__.update(vars(buffer))
                torch.utils.swap_tensors(buffer, view)
            else:
                put_over(buffer, view)
        buffer.__class__ = ManagedTensor
        buffer._gm_place = place
        if is_number(buffer):
            become_number(buffer)

    def check(self):
        """Checks that parameters are where they were, and that those that need gradients have places for them.

        Walking the names of all modules takes longer than the forward pass of a small one: it is done again only if
        something has changed since it was done.
        """
        if self.checked is None or not self.checked.still():
            self.check_all()
            self.checked = Checked.of(self.module)
            self.whole.changed()

    def check_all(self):
        for name, param in self.module.named_parameters():
            record = getattr(param, "_gm_record", None)
            if record is None:
                if name in self.records:
                    raise GeminiError(
                        f"parameter {name} was replaced by another tensor (by load_state_dict(assign=True), by "
                        "functional_call(), or by setting it): copy into it instead, parameters keep their addresses. "
                        "torch.export and its like, which replace all of them, take a copy.deepcopy() of the model"
                    )
                if param.is_meta or (can_wrap(param.dtype) and _is_plain(param) and not _stays(param)):
                    by = "infer" if self.weights_only else "prepare"
                    raise GeminiError(f"parameter {name} was added after libgemini.torch.{by}(): call {by}() again")
                continue
            with _plain():
                if self.weights_only and param.requires_grad:
                    raise GeminiError(
                        f"parameter {name} needs gradients (requires_grad), but libgemini.torch.infer() keeps weights "
                        "only: to train the model, call prepare() in place of infer()"
                    )
                if param.data_ptr() != record.place.address and param.numel():
                    raise GeminiError(
                        f"parameter {name} was moved behind libgemini's back: its address is no longer its own"
                    )
                if param.requires_grad and record.hook is None:
                    record.attach()

    def label(self, args: tuple[typing.Any, ...], kwargs: dict[str, typing.Any]) -> int:
        """The label of an iteration that begins with a forward pass: a training step, a pass without gradients, one
        over one token of each text, or a training step of a whole model; see gemini_iteration_begin_with()."""
        if torch.is_grad_enabled():
            return 4 * self.number + (3 if self.whole.active else 0)
        return 4 * self.number + (2 if extends(args, kwargs) else 1)

    @contextlib.contextmanager
    def forward(self, args: tuple[typing.Any, ...], kwargs: dict[str, typing.Any]) -> typing.Iterator[None]:
        """A context manager around the model's forward pass, which has these arguments.

        It begins an iteration, or continues one that has gradients.
        """
        with self.session.brackets.one_thread(type(self.module).__name__):
            yield from self.one_pass(args, kwargs)

    def one_pass(self, args: tuple[typing.Any, ...], kwargs: dict[str, typing.Any]) -> typing.Iterator[None]:
        """Yields once, within the pass; see forward()."""
        session = self.session
        outer = session.brackets.depth
        try:
            session.brackets.depth = outer + 1
            with torch.no_grad() if self.weights_only else contextlib.nullcontext():
                if not in_backward():  # except when a checkpoint is recomputed
                    self.begin(args, kwargs)
                with self.saving():
                    yield
        finally:
            session.brackets.depth = outer
            if not outer:
                session.brackets.graph = None
                if session.brackets.iteration == "infer":
                    session.brackets.iteration_end()

    def begin(self, args: tuple[typing.Any, ...], kwargs: dict[str, typing.Any]) -> None:
        session = self.session
        session.refuse_closed(type(self.module).__name__)
        self.check()
        if session.brackets.depth > 1:  # called by another model
            return
        session.holds.recover()
        if session.caches:
            session.caches.drain()
        session.take_left(early=False)
        session.backward.settle(goes_on=True)
        if session.brackets.iteration and not session.in_closure and not session.brackets.awaits_backward():
            session.brackets.iteration_end()
        if not session.brackets.iteration:
            if not session.ranks and not any(record.has_grad for record in session.records):
                session.arenas.gradients_discard()
            kind = "train" if torch.is_grad_enabled() else "infer"
            self.whole.decide()
            session.brackets.iteration_begin(kind, self.label(args, kwargs))
            if session.allocator and kind == "train":
                session.allocator.step_begins()
            for model in session.models:
                model.blocks.decide(self.whole.active)
        session.brackets.pass_begin()
        session.renew_masters()
        for record in list(session.given):
            record.keep_given()
        session.brackets.set_phase(abi.PHASE_FORWARD)
