"""Iterations, phases and operators: where in a training step a session is, as the library is told.

Each use of a parameter is an operator. An iteration begins with a forward pass of a prepared model. It includes further
forward passes while there are gradients, or while the autograd graph of an earlier pass exists. It ends with an
optimizer's step, or, without gradients, with the forward pass.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import sys
import threading
import typing
import warnings
import weakref

import torch

from .. import abi
from ..abi import GeminiError
from . import internals
from .arenas import in_backward

if typing.TYPE_CHECKING:
    from .session import Session

# The most forward passes in an iteration without a gradient. A loop that never calls backward() may keep losses.
MOST_PASSES = 64


def level_of_caller() -> int:
    """Finds the stacklevel for a warning, so that it points to code outside of torch and libgemini.

    The number of torch's frames around a step depends on its version and on whether anything was compiled.
    """
    frame = sys._getframe(1)
    level = 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "libgemini"):
        frame = frame.f_back
        level += 1
    return level


class Graph:
    """A mark that exists as long as the autograd graph of a forward pass."""


class Brackets:
    """Where in a training step a session is.

    Attributes:
        iteration: "train" or "infer" while an iteration is open; otherwise None.
        called: Whether there has been an iteration.
        graph: The mark of the forward pass that is running; otherwise None.
        graphs: The marks of all forward passes of the iteration.
        phase: The phase that the library was told last.
        op_open: Whether an operator is open.
        op_number: How many operators have begun so far.
        depth: How many forward passes of prepared models are running, one inside another.
        threads: The threads of these, the outermost first, by number.
    """

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
        self.threads: list[int] = []

    @contextlib.contextmanager
    def one_thread(self, name: str) -> typing.Iterator[None]:
        """A context manager around a forward pass: while it runs, other threads are refused.

        Args:
            name: Of the module that is called, for messages.

        Raises:
            GeminiError: Status "BUSY": a forward or a backward pass runs in another thread.
        """
        me = threading.get_ident()
        try:
            self.threads.append(me)  # one of two threads comes first: this is one step to Python
            self.refuse_others(name)
            yield
        finally:
            if me in self.threads:
                self.threads.remove(me)

    def refuse_others(self, name: str) -> None:
        """Raises GeminiError if a forward or a backward pass runs in another thread. name: of what is called."""
        me = threading.get_ident()
        if in_backward():  # whose functions, such as a checkpoint's, run on threads of autograd's
            return
        if self.threads and self.threads[0] != me:
            self.refuse(name, "a forward pass of a model")
        if self.session.backward.is_open and internals.runs_backward_beside(me):
            self.refuse(name, "a backward pass")

    def refuse(self, name: str, what: str) -> typing.NoReturn:
        raise GeminiError(
            f"{name} is called while another thread runs {what} of this session: one thread at a time may use its "
            "models and optimizers. Let threads take turns, for example by a threading.Lock around each step or text",
            "BUSY",
        )

    def op_begin(self, name: bytes, chosen: bool = False) -> None:
        """Ends the open operator. Begins another one if an iteration is open.

        Args:
            name: Its name.
            chosen: Whether it is chosen at run time, so that other passes may have others; see experts.py.
        """
        self.op_end()
        if self.iteration:
            self.op_open = True
            self.op_number += 1
            begin = self.session.lib.op_begin_chosen if chosen else self.session.lib.op_begin
            begin(self.session.handle, name, self.session.holds.stream())

    def op_end(self) -> None:
        """Ends the operator if one is open."""
        if self.op_open:
            try:
                self.session.lib.op_end(self.session.handle)
            except GeminiError as error:
                self.op_open = False
                if error.status != "STATE":  # else an interrupt came before it had begun, or after it had ended
                    raise
            self.op_open = False

    def set_phase(self, phase: int) -> None:
        """Tells the library the phase if it has changed. An operator that is open ends."""
        if self.iteration and self.phase != phase:
            self.op_end()
            self.session.lib.phase_set(self.session.handle, phase)
            self.phase = phase

    def iteration_begin(self, kind: str, label: int) -> None:
        """Begins an iteration.

        Args:
            kind: "train" or "infer".
            label: See Model.label().
        """
        try:
            self.session.lib.iteration_begin_with(self.session.handle, label)
        except GeminiError as error:
            if error.status != "STATE":
                raise
            self.session.lib.iteration_end(self.session.handle)  # which an interrupt came before
            self.session.lib.iteration_begin_with(self.session.handle, label)
        self.iteration, self.called = kind, True
        self.phase = abi.PHASE_NONE
        self.graphs.clear()

    def pass_begin(self) -> None:
        """Notes that a forward pass of the iteration begins."""
        if torch.is_grad_enabled():
            self.graph = Graph()
            self.graphs.append(weakref.ref(self.graph))

    def awaits_backward(self) -> bool:
        """Whether the iteration may still get a backward pass, or an optimizer step for gradients that exist."""
        return (
            bool(self.session.given)
            or any(record.has_grad for record in self.session.records)
            or len(self.graphs) < MOST_PASSES
            and any(graph() for graph in self.graphs)
        )

    def iteration_end(self) -> None:
        """Ends the iteration if one is open. Warns if the library cannot plan for such iterations."""
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
