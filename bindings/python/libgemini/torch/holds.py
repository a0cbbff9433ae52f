"""What a session has acquired. Each use of a parameter is acquired before it is queued and released afterwards.

A hold is recorded before it is acquired and until it is released. So a hold that a KeyboardInterrupt leaves behind can
be released later, and the training loop can go on.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import types
import typing

from .. import abi
from ..abi import GeminiError
from . import internals
from .arenas import in_backward
from .tensors import Use, blocks, run_with

if typing.TYPE_CHECKING:
    from .arenas import Place
    from .blocks import Block
    from .session import Session
    from .unit import Unit
    from .whole import Keeper

MOST_USES = 1 << 16  # how many uses are cached


def _runs(function: typing.Callable[..., typing.Any]) -> bool:
    """Whether a function is on the call stack of the current thread."""
    frame: types.FrameType | None = sys._getframe()
    while frame and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


# What was acquired together: accesses as the library takes them, their number, the stream, and the unit, block, keeper
# of a unit, or None.
Hold = tuple[typing.Any, int, int, "Unit | Block | Keeper | None"]
# A place, an offset there, a size in bytes, and a mode: abi.READ, WRITE or both.
Range = tuple["Place", int, int, int]


class Holds:
    """The holds of a session and the streams that they are made on."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.streams: dict[int | None, int] = {}  # handles by native stream
        # What is acquired, except activations.
        self.noted: list[Hold] = []
        self.uses: dict[tuple[typing.Any, ...], Use] = {}

    def native_stream(self) -> int | None:
        """torch's current CUDA stream as a number, or None on the simulated device."""
        return internals.raw_stream(self.session.device.index or 0) if self.session.cuda else None

    def stream(self) -> int:
        """The library's handle of torch's current stream."""
        if not self.session.cuda:
            return abi.STREAM_CALLER
        native = self.native_stream()
        stream = self.streams.get(native)
        if stream is None:
            out = ctypes.c_uint64()
            self.session.lib.stream_adopt(self.session.handle, native, out)
            stream = self.streams[native] = out.value
        return stream

    @contextlib.contextmanager
    def acquired(self, accesses: typing.Any, count: int, stream: int) -> typing.Iterator[None]:
        """A context manager: accesses are acquired within it."""
        hold = ctypes.byref(accesses), count, stream, None
        self.hold(hold)
        try:
            yield
        finally:
            self.let_go(hold)

    def hold(self, hold: Hold) -> None:
        """Acquires. The hold is recorded first: a KeyboardInterrupt can come between any two steps."""
        self.noted.append(hold)
        try:
            self.session.lib.acquire(self.session.handle, *hold[:3])
        except GeminiError:
            self.noted.remove(hold)
            raise

    def let_go(self, hold: Hold) -> None:
        """Releases."""
        self.session.lib.release(self.session.handle, *hold[:3])
        self.noted.remove(hold)

    def recover(self) -> None:
        """Releases the holds that an interrupt has left behind, if nothing is in use now."""
        left = [hold for hold in self.noted if not (hold[3] and hold[3].graphed)]
        if not (left or blocks or self.session.running) or in_backward() or _runs(run_with):
            return
        blocks.clear()
        self.session.running.clear()
        self.session.backward.held.clear()
        for hold in left:
            with contextlib.suppress(GeminiError):  # it was released already, or not acquired yet
                if hold[3]:
                    hold[3].reset()
            with contextlib.suppress(GeminiError):
                self.session.lib.release(self.session.handle, *hold[:3])
            self.noted.remove(hold)

    def use(self, ranges: typing.Sequence[Range], name: str) -> Use:
        """The Use of a function name and ranges, which is cached."""
        # By number, so that the cache keeps no place alive.
        key = name, *((place.number, *where) for place, *where in ranges)
        use = self.uses.get(key)
        if use is None:
            if len(self.uses) >= MOST_USES:  # the program makes new slices all the time
                self.uses.clear()
            use = self.uses[key] = Use(ranges, name)
        return use

    def acquire_use(self, use: Use, stream: int) -> None:
        """Acquires what a function reads and writes. An error names the parameter and the function."""
        try:
            if use.unit and use.unit.keeper:
                use.unit.keeper.acquire(stream)
            else:
                self.hold((use.pointer, use.count, stream, use.unit))
        except GeminiError as error:
            name = use.forward_name.decode()
            if name in str(error):
                raise
            raise GeminiError(f"{name}: {error}", error.status, error.native_code) from None
        if use.unit:
            use.unit.enter()

    def release_use(self, use: Use, stream: int) -> None:
        """Releases what acquire_use() acquired."""
        try:
            if use.unit:
                use.unit.leave()
        finally:
            if use.unit and use.unit.keeper:
                use.unit.keeper.settle()
            else:
                self.let_go((use.pointer, use.count, stream, use.unit))

    def note_writes(self, written: typing.Sequence[abi.Access], stream: int) -> None:
        """Marks ranges as written that were acquired for reading only.

        Otherwise the copies on the host would still count as the newest.
        """
        accesses = (abi.Access * len(written))(*written)
        for access in accesses:
            access.mode = abi.READ_WRITE
        with self.acquired(accesses, len(accesses), stream):
            pass
