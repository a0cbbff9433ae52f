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


class Backward:
    """The state of the backward pass that is running."""

    def __init__(self, session: Session) -> None:
        self.session = session
        # What the function that the backward pass has reached has acquired, and on which stream.
        self.held: tuple[Use, int] | None = None
        self.task = -1  # autograd's number of the backward pass in progress
        # (record, gradient, stream) of parameters of the function that the backward pass has reached; the stream is
        # the one that autograd made the gradient on, as CUDA names it.
        self.landed: list[tuple[Record, torch.Tensor, int | None]] = []

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
        if not any(record.has_grad for record in self.session.records):
            self.session.arenas.gradients_zero()

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
        landed = [one for one in self.landed if only is None or one[0] is only]
        self.landed = [one for one in self.landed if only is not None and one[0] is not only]
        for record, gradient, stream in landed:
            if stream != self.session.holds.native_stream():  # where autograd made it
                torch.cuda.current_stream(self.session.device).wait_stream(
                    torch.cuda.ExternalStream(stream, self.session.device)
                )
                gradient.record_stream(torch.cuda.current_stream(self.session.device))
            record.store(gradient, add=record.has_grad)
        early = [record for record, *_ in landed if record in self.session.rule_of]
        if early:
            self.session.brackets.op_end()
        for record in early:
            self.session.rule_of[record].landed(record)

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
        self.task = -1
        self.leave_function()
        self.session.brackets.op_end()
        for rule in self.session.rules:
            rule.backward_ends()
