"""The backward pass: its operators, and gradients on their way to their arenas.

The operators of the forward pass come again in reverse order. Each begins when autograd reaches the first node of the
function that used the parameters in the forward pass. It ends when the next one begins.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import functools
import itertools
import threading
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


# Gradients are stored together as long as they take less than this part of the device budget. Large ones are not held
# up by single calls, and would have to fit together.
BATCHES = 16
# Those of a whole model are stored when they take this part of it: each call of the library costs the calling thread
# time, and other models' gradients are stored block by block.
LANDED = 256


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
        # What the function that the backward pass has reached has acquired, and on which stream; before it, the unit
        # that the function is in.
        self.held: list[tuple[Use, int]] = []
        # While a pass within the backward pass runs: how many of these belong to the outer one, and stay.
        self.kept = 0
        self.task = -1  # autograd's number of the backward pass in progress
        self.shared = False  # whether it runs in a thread of autograd's, as all other passes there
        # Gradients of parameters of the function that the backward pass has reached.
        self.landed: list[Landed] = []
        self.landed_bytes = 0  # of those of a whole model
        # Whether norms of gradients are computed while they are stored, when their bytes are there anyway, as somebody
        # has asked for one in the last step; and whether somebody has in this one.
        self.norms, self.norm_asked = True, False

    def step_ends(self) -> None:
        """An optimizer has made its step."""
        self.norms, self.norm_asked = self.norm_asked, False

    def begin(self) -> None:
        """Called by hooks of autograd. The first call in a backward pass begins its phase."""
        task = internals.graph_task()
        if self.task == task:
            return
        brackets = self.session.brackets
        if brackets.threads and not internals.runs_backward(brackets.threads[0]):  # nor is it within that forward pass
            brackets.refuse("backward()", "a forward pass of a model")
        # On a GPU one thread of autograd's runs the functions of all passes, but those of models with blocks.
        shared = self.session.cuda and internals.has_threads()
        if self.is_open and not (shared and self.shared) and internals.runs_backward_beside(threading.get_ident()):
            brackets.refuse("backward()", "a backward pass")
        self.shared = shared
        self.task = task  # the one before has ended, by an exception, or this one is inside it
        self.kept = self.held_outside()
        internals.after_backward(functools.partial(self.end, self.kept))
        self.session.brackets.set_phase(abi.PHASE_BACKWARD)
        for rule in self.session.rules:
            rule.backward_begins()
        if self.session.ranks:
            try:
                self.session.ranks.backward_begins()
            except BaseException:
                self.task = -1  # nothing of this pass counts
                raise
        elif not self.landed and not any(record.has_grad for record in self.session.records):
            self.session.arenas.gradients_zero()

    def held_outside(self) -> int:
        """How many of self.held stay while the pass runs that begins now, within another one.

        A hook runs in the middle of a function, which goes on afterwards: all stay. Nothing tells when autograd comes
        to a custom function such as a checkpoint, so the function before it, which has ended, may still be there: only
        units stay that call custom functions, as they go on afterwards.
        """
        if not self.held:
            return 0
        caller = internals.caller_of_backward()
        if caller == "hook":
            return len(self.held)
        units = (use.unit for use, _ in self.held)
        nesting = itertools.takewhile(lambda unit: unit is not None and unit.nests, units)
        return sum(1 for _ in nesting) if caller == "function" else 0

    @property
    def is_open(self) -> bool:
        """Whether a backward pass is under way, or was ended by an exception, so that gradients may not be stored."""
        return self.task != -1 or bool(self.landed)

    def operator(self, use: Use, within: Use | None = None) -> None:
        """Autograd has reached the function of a use: acquires what it reads, until autograd reaches the next function.

        Activation checkpointing may run forward functions in between. They are operators of their own, and what is held
        here stays acquired beside them.

        Args:
            use: What the function has used.
            within: What the unit has used whose forward pass has called the function, or None.
        """
        if torch.is_grad_enabled():
            raise GeminiError(
                f"{use.forward_name.decode()}: its gradient is to be differentiated again (create_graph=True), "
                "and what that reads cannot be known: this is not supported for parameters in a session"
            )
        self.session.refuse_closed(use.forward_name.decode())
        self.begin()
        if self.holds(use):  # another node of the same function
            return
        self.leave_function(
            max(next((number for number, (one, _) in enumerate(self.held, 1) if one is within), 0), self.holds_whole())
        )
        if self.session.ranks and self.session.ranks.parts and not self.held:
            self.session.ranks.parts.update()
        self.session.brackets.op_begin(use.backward_name)
        stream = self.session.holds.stream()
        self.session.holds.acquire_use(use, stream)
        self.held.append((use, stream))

    def holds_whole(self) -> bool:
        """Whether the pass has acquired a whole model, which it keeps until it ends."""
        unit = self.held[0][0].unit if self.held else None
        return unit is not None and unit.keeper is not None

    def failed(self) -> None:
        """An exception has ended a backward pass. What it had reached is released: until then a unit's parameters are
        plain, also for who reads or clears their gradients. The gradients are stored where they are wanted next.
        """
        if not in_backward() and not internals.runs_backward_beside(threading.get_ident()):
            while self.held:
                self.session.holds.release_use(*self.held.pop())

    def holds(self, use: Use) -> bool:
        """Whether the function that was reached last has acquired a use, for the stream that is torch's current one."""
        if not self.held or self.held[-1][0] is not use:
            return False
        return not self.session.cuda or self.held[-1][1] == self.session.holds.stream()

    def leave_function(self, kept: int = 0) -> None:
        """The backward pass has left a function: releases what it held, and stores its gradients.

        kept: how many of self.held stay.
        """
        while len(self.held) > max(kept, self.kept):
            self.session.holds.release_use(*self.held.pop())
        self.store_landed()
        if self.session.activations:
            self.session.activations.drain()

    def store_many(self) -> None:
        """Stores the gradients of a whole model that have come since the last ones were stored, if they are many."""
        if self.landed and self.holds_whole():
            self.landed_bytes += self.landed[-1].gradient.nbytes
            if self.landed_bytes > self.session.manager.config.device_bytes // LANDED:
                self.store_landed()

    def store_landed(self, only: Record | None = None) -> None:
        """Stores gradients that autograd has put into .grad in their arenas.

        only: the record of one parameter, or None for all.
        """
        self.landed_bytes = 0
        if not self.landed:
            return
        early: list[Record] = []
        ahead: dict[typing.Any, list[Record]] = {}  # by the Speculation of their rule
        for batch in self.batches([one for one in self.landed if only is None or one.record is only]):
            self.store_batch(batch)
            for one in batch:
                self.landed.remove(one)
                if one.record.early and one.record in self.session.rule_of:
                    early.append(one.record)
                else:
                    ahead.setdefault(getattr(one.record.rule, "speculation", None), []).append(one.record)
        if early:
            self.session.brackets.op_end()
        for record in early:
            self.session.rule_of[record].landed(record)
        for speculation, records in ahead.items():
            if speculation is not None:
                speculation.landed(records)

    def batches(self, landed: list[Landed]) -> list[list[Landed]]:
        """Divides gradients into batches that may be on the device together, each parameter's once in a batch."""
        batches: list[list[Landed]] = []
        most = self.session.manager.config.device_bytes // BATCHES
        left = 0
        records: set[Record] = set()  # of the last batch
        for one in landed:
            size = one.record.grad_place.size_bytes
            left -= size
            if not batches or left < 0 or one.record in records:
                batches.append([])
                left, records = most - size, set()
            batches[-1].append(one)
            records.add(one.record)
        return batches

    def store_batch(self, batch: list[Landed]) -> None:
        """Stores gradients, except those that were stored before an interrupt. If it fails, it can be called again."""
        with internals.plain():
            native = self.session.holds.native_stream()
            parts = [
                (one.record, one.gradient, one.record.has_grad) for one in batch if self.begins_storing(one, native)
            ]
        try:
            self.store(parts)
        except GeminiError as error:
            if error.status != "OOM_DEVICE" or len(parts) < 2:
                raise
            for part in parts:
                self.store([part])

    def store(self, parts: list[tuple[Record, torch.Tensor, bool]]) -> None:
        """Stores gradients together, in the open operator or in a new one.

        Args:
            parts: Records, values of their gradients, and whether the stored values stay, so that these add to them.
        """
        session = self.session
        ranges: list[typing.Any] = []
        stored: list[tuple[Record, torch.Tensor]] = []
        adds: list[tuple[torch.Tensor, torch.Tensor]] = []
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for record, values, add in parts:
            if record.early and record.place.written and not session.ranks:  # by the forward pass
                record.renew_master()
            if values.is_sparse:
                values = values.to_dense()
            place, mode = record.grad_place, abi.READ_WRITE if add else abi.WRITE
            if session.ranks:
                session.ranks.store(record, values)
            elif not place.size_bytes:  # to the library, size 0 means all of the arena
                record.has_grad, record.norm = True, torch.linalg.vector_norm(place.tensor, dtype=torch.float32)
            else:
                if record.factor != 1.0 or record.multiplying != -1:
                    record.settle(mode)
                record.known_norm = None
                ranges.append((place, 0, place.size_bytes, mode))
                stored.append((record, place.tensor))
                (adds if add else copies).append((place.tensor, values))
        if not ranges:
            return
        use, stream = session.holds.use(ranges, "grad"), session.holds.stream()
        if not session.brackets.op_open:
            session.brackets.op_begin(use.forward_name)
        session.holds.acquire_use(use, stream)
        try:
            for tensor, values in adds:
                tensor.add_(values)
            if len(copies) > 1:
                internals.foreach_copy([tensor for tensor, _ in copies], [values for _, values in copies])
            elif copies:
                copies[0][0].copy_(copies[0][1])
            for record, tensor in stored:
                # Gradients of early updates cannot be clipped, so nobody needs their norms.
                known = self.norms and not record.early
                record.known_norm = torch.linalg.vector_norm(tensor, dtype=torch.float32) if known else None
                record.has_grad = True
        finally:
            session.holds.release_use(use, stream)

    def begins_storing(self, one: Landed, native: int | None) -> bool:
        """Prepares a gradient for being stored. Returns False if it was stored before an interrupt.

        native: torch's current stream; see Holds.native_stream().
        """
        record, gradient, stored = one.record, one.gradient, one.record.grad_place.tensor
        param = record.param
        if param is not None and internals.get_grad(param) is gradient:  # an interrupt came before it was cleared
            internals.set_grad(param, None)
        if one.version not in (-1, internals.version(stored)):
            record.has_grad, record.norm = True, None
            return False
        if one.stream != native:  # where autograd made it
            torch.cuda.current_stream(self.session.device).wait_stream(
                torch.cuda.ExternalStream(one.stream, self.session.device)
            )
            gradient.record_stream(torch.cuda.current_stream(self.session.device))
        if record.has_grad and record.grad_place.size_bytes and not self.session.ranks:
            record.settle(abi.READ_WRITE)  # which writes, too
        one.version = internals.version(stored)
        return True

    def queue(self, record: Record, gradient: torch.Tensor) -> None:
        """Queues a gradient to be stored, unless it was queued before an interrupt."""
        for one in self.landed:
            if one.gradient is gradient:
                return
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

    def settle(self, goes_on: bool = False) -> None:
        """Stores all gradients that autograd has made, and ends a backward pass that an exception has ended.

        Within a backward pass, in a hook of the user's, what the pass has reached stays acquired.

        Args:
            goes_on: Whether a forward pass follows: a whole model stays acquired for the graphs that there are.
        """
        if in_backward():
            self.store_landed()
        else:
            self.end()
            if not goes_on:
                self.session.let_models_go()

    def end(self, kept: int = 0) -> None:
        """The backward pass is over, or an exception ended it. Releases what is held and ends the operator.

        kept: how many of self.held stay, as the pass was within another one.
        """
        ends, self.task = self.task != -1, -1
        self.kept = 0
        self.leave_function(kept)
        self.session.brackets.op_end()
        if ends and self.session.ranks:
            self.session.ranks.backward_ends()
        for rule in self.session.rules:
            rule.backward_ends()
