"""The backward pass: its operators, and gradients on their way to their arenas.

The operators of the forward pass come again in reverse order. Each begins when autograd reaches the first node of the
function that used the parameters in the forward pass. It ends when the next one begins.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import typing

import torch

from .. import abi
from ..abi import GeminiError
from . import internals
from .arenas import in_backward

if typing.TYPE_CHECKING:
    from .model import Record
    from .session import Session
    from .tensors import Use


class Landed:
    """A gradient that autograd has made and that is not stored yet."""

    __slots__ = ("record", "gradient", "stream", "version")

    def __init__(self, record: Record, gradient: torch.Tensor, stream: int | None) -> None:
        self.record = record
        self.gradient = gradient
        self.stream = stream  # which autograd made it on, as CUDA names it
        # The version of the stored gradient before this one is added, which tells after an interrupt whether it was;
        # -1: that has not begun.
        self.version = -1


class Backward:
    """The state of the backward pass that is running."""

    def __init__(self, session: Session) -> None:
        self.session = session
        # What the function that the backward pass has reached has acquired, and on which stream.
        self.held: tuple[Use, int] | None = None
        self.task = -1  # autograd's number of the backward pass in progress
        # Gradients of parameters of the function that the backward pass has reached.
        self.landed: list[Landed] = []

    def begin(self) -> None:
        """Called by hooks of autograd. The first call in a backward pass begins its phase."""
        task = internals.graph_task()
        if self.task == task:
            return
        self.task = task  # the one before has ended, by an exception, or this one is inside it
        internals.after_backward(self.settle)
        self.session.brackets.set_phase(abi.PHASE_BACKWARD)
        for rule in self.session.rules:
            rule.forget_done()
        if self.session.ranks:
            self.session.ranks.backward_begins()
        elif not self.landed and not any(record.has_grad for record in self.session.records):
            self.session.arenas.gradients_zero()

    @property
    def is_open(self) -> bool:
        """Whether a backward pass is under way, or was ended by an exception, so that gradients may not be stored."""
        return self.task != -1 or bool(self.landed)

    def operator(self, use: Use) -> None:
        """Autograd has reached the function of a use: acquires what it reads, until autograd reaches the next function.

        Activation checkpointing may run forward functions in between. They are operators of their own, and what is held
        here stays acquired beside them.
        """
        if torch.is_grad_enabled():
            raise GeminiError(
                f"{use.forward_name.decode()}: its gradient is to be differentiated again (create_graph=True), "
                "and what that reads cannot be known: this is not supported for parameters in a session"
            )
        self.session.refuse_closed(use.forward_name.decode())
        self.begin()
        self.leave_function()
        self.session.brackets.op_begin(use.backward_name)
        stream = self.session.holds.stream()
        self.session.holds.acquire_use(use, stream)
        self.held = use, stream

    def leave_function(self) -> None:
        """The backward pass has left a function: releases what it held, and stores its gradients."""
        held, self.held = self.held, None
        if held:
            self.session.holds.release_use(*held)
        self.store_landed()
        if self.session.activations:
            self.session.activations.drain()

    def store_landed(self, only: Record | None = None) -> None:
        """Stores gradients that autograd has put into .grad in their arenas.

        only: the record of one parameter, or None for all.
        """
        early: list[Record] = []
        for one in [one for one in self.landed if only is None or one.record is only]:
            self.store_one(one)
            self.landed.remove(one)
            if one.record in self.session.rule_of:
                early.append(one.record)
        if early:
            self.session.brackets.op_end()
        for record in early:
            self.session.rule_of[record].landed(record)

    def store_one(self, one: Landed) -> None:
        """Stores a gradient, unless an interrupt came after that. If it fails, it can be called again."""
        record, gradient, stored = one.record, one.gradient, one.record.grad_place.tensor
        param = record.param
        with internals.plain():
            if param is not None and internals.get_grad(param) is gradient:  # an interrupt came before it was cleared
                internals.set_grad(param, None)
        if one.version not in (-1, internals.version(stored)):
            record.has_grad, record.norm = True, None
            return
        if one.stream != self.session.holds.native_stream():  # where autograd made it
            torch.cuda.current_stream(self.session.device).wait_stream(
                torch.cuda.ExternalStream(one.stream, self.session.device)
            )
            gradient.record_stream(torch.cuda.current_stream(self.session.device))
        if record.has_grad and record.grad_place.elements and not self.session.ranks:
            record.settle(abi.READ_WRITE)  # which writes, too
        one.version = internals.version(stored)
        record.store(gradient.to_dense() if gradient.is_sparse else gradient, add=record.has_grad)

    def queue(self, record: Record, gradient: torch.Tensor) -> None:
        """Queues a gradient to be stored, unless it was queued before an interrupt."""
        if not any(one.gradient is gradient for one in self.landed):
            self.landed.append(Landed(record, gradient, self.session.holds.native_stream()))

    def forget(self, record: Record) -> None:
        """Forgets the gradients of a parameter that are not stored yet."""
        if self.landed:
            self.landed = [one for one in self.landed if one.record is not record]

    def land(self, record: Record) -> None:
        """Stores a gradient now that is needed before the backward pass has left its function, or after an exception
        has ended the backward pass.
        """
        if not self.landed:
            return
        if not in_backward():
            self.settle()
        elif not record.early:
            self.store_landed(record)

    def settle(self) -> None:
        """The backward pass is over, or an exception ended it. Releases what is held and ends the operator."""
        ends, self.task = self.task != -1, -1
        self.leave_function()
        self.session.brackets.op_end()
        if ends and self.session.ranks:
            self.session.ranks.backward_ends()
        for rule in self.session.rules:
            rule.backward_ends()
