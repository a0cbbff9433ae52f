"""The brackets of a training step: iterations, phases and operators, as the library is told of them.

Every use of a parameter is an operator. An iteration begins with a forward pass of a prepared model, goes on with
others while there are gradients or a graph of an earlier one lives, and ends with an optimizer's step.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import sys
import typing
import warnings
import weakref

import torch

from .. import abi
from ..abi import GeminiError

if typing.TYPE_CHECKING:
    from .session import Session

MOST_PASSES = 64  # forward passes in an iteration without a gradient: who never calls backward() may keep losses, too


def level_of_caller() -> int:
    """The stacklevel for a warning of the function that asks: of who called it from outside of torch and libgemini. How
    many frames of torch are around a step depends on its version, and on whether anything was compiled."""
    frame = sys._getframe(1)
    level = 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "libgemini"):
        frame = frame.f_back
        level += 1
    return level


class Graph:
    """Lives as long as the autograd graph of a forward pass."""


class Brackets:
    """Where in a training step a session is."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.iteration: str | None = None  # "train" or "infer" while one is open
        self.called = False  # whether there has been one
        self.graph: Graph | None = None  # while a forward pass runs: a mark that the autograd graph it makes refers to
        self.graphs: list[weakref.ref[Graph]] = []  # of the iteration's forward passes, as weak references
        self.phase = abi.PHASE_NONE
        self.op_open = False
        self.op_number = 0  # operators that began so far
        self.depth = 0  # forward passes of these that run, one within the other

    def op_begin(self, name: bytes) -> None:
        """Ends the operator before, and begins one if we are in an iteration."""
        self.op_end()
        if self.iteration:
            self.op_open = True
            self.op_number += 1
            self.session.lib.op_begin(self.session.handle, name, self.session.holds.stream())

    def op_end(self) -> None:
        if self.op_open:
            try:
                self.session.lib.op_end(self.session.handle)
            except GeminiError as error:
                self.op_open = False
                if error.status != "STATE":  # else an interrupt came before it had begun, or after it had ended
                    raise
            self.op_open = False

    def set_phase(self, phase: int) -> None:
        if self.iteration and self.phase != phase:
            self.op_end()
            self.session.lib.phase_set(self.session.handle, phase)
            self.phase = phase

    def iteration_begin(self, kind: str) -> None:
        try:
            self.session.lib.iteration_begin(self.session.handle)
        except GeminiError as error:
            if error.status != "STATE":
                raise
            self.session.lib.iteration_end(self.session.handle)  # which an interrupt came before
            self.session.lib.iteration_begin(self.session.handle)
        self.iteration, self.called = kind, True
        self.phase = abi.PHASE_NONE
        self.graphs.clear()

    def pass_begin(self) -> None:
        """A forward pass of the iteration begins."""
        if torch.is_grad_enabled():
            self.graph = Graph()
            self.graphs.append(weakref.ref(self.graph))

    def awaits_backward(self) -> bool:
        """Whether a backward pass may come for what was done in this iteration, or has come and a step may."""
        return (
            bool(self.session.given)
            or any(record.has_grad for record in self.session.records)
            or len(self.graphs) < MOST_PASSES
            and any(graph() for graph in self.graphs)
        )

    def iteration_end(self) -> None:
        self.session.backward.settle()
        if self.iteration:
            self.iteration = None
            self.phase = abi.PHASE_NONE
            try:
                self.session.lib.iteration_end(self.session.handle)
            except GeminiError as error:
                if not error.status.startswith("OOM"):
                    raise
                # All that was to be done has been done: an exception would say that it has not.
                warnings.warn(
                    f"this step was made, but there is no plan for those like it, whose bytes are fetched when they "
                    f"are wanted: {error}. They are faster with more device_memory",
                    stacklevel=level_of_caller(),
                )
