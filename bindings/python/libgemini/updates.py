"""Python functions that the library calls: work queued on streams, and updates of arenas.

The library calls them on threads of its own. It is given one function of C for all of them, which is never freed, and a
number for each; so nothing that C may still be running is ever freed.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import typing

from . import abi


def buffer(address: int, size_bytes: int) -> ctypes.Array[ctypes.c_char]:
    """Memory of the process as an object with Python's buffer protocol, such as numpy.frombuffer() takes.

    Args:
        address: Its first byte. Nothing keeps the memory there: it has to outlive the buffer.
        size_bytes: Its length.

    Returns:
        A ctypes array of bytes over that memory, which is not copied.
    """
    return (ctypes.c_char * size_bytes).from_address(address)


class Span:
    """What an update's function is called with: a part of the update's range, in one place.

    Attributes:
        tier: Where the bytes are: "host" or "device".
        first_element: The first element of the part, counted from the beginning of the arenas.
        element_count: Elements of the part, the same number in each arena.
        addresses: The address of first_element in each arena, in the order in which the update names the arenas.
        stream: The stream that the work has to be queued on, if tier is "device" and the device is a GPU.
    """

    def __init__(
        self, tier: str, first_element: int, element_count: int, stream: int, addresses: list[int], sizes: list[int]
    ) -> None:
        self.tier = tier
        self.first_element = first_element
        self.element_count = element_count
        self.stream = stream
        self.addresses = addresses
        self._element_bytes = sizes

    def buffers(self) -> list[ctypes.Array[ctypes.c_char]]:
        """The bytes of the part in each arena, valid until the function returns. Not for a GPU's memory.

        Returns:
            Objects with the buffer protocol, such as numpy.frombuffer() takes, in the order of addresses.
        """
        return [
            buffer(address, self.element_count * size) for address, size in zip(self.addresses, self._element_bytes)
        ]


class _Update:
    """An update that was submitted, or is about to be."""

    def __init__(self, owner: Calls, function: typing.Callable[[Span], object], element_bytes: list[int]) -> None:
        self.owner = owner
        self.function = function
        self.element_bytes = element_bytes
        self.submitted = False


class _Thread(threading.local):
    """Of each thread: the functions of which manager it is calling, the innermost one."""

    calls: Calls | None = None


_thread = _Thread()
_numbers = itertools.count(1)
_calls: dict[int, tuple[Calls, typing.Callable[[], object]]] = {}  # queued and not run; by number
_updates: dict[int, _Update] = {}  # not known to be done; by number


@abi.CallFn
def _call(number: int) -> None:
    owner, function = _calls.pop(number)
    owner.run(function)


@abi.UpdateFn
def _span(number: int, span: typing.Any) -> None:
    update, at = _updates[number], span.contents
    owner, sizes = update.owner, update.element_bytes
    part = Span(
        abi.TIERS[at.tier], at.first_element, at.element_count, at.stream, list(at.ptr[: at.arena_count]), sizes
    )

    def run() -> None:
        update.function(part)

    if at.tier == abi.TIER_DEVICE and not owner.cuda:  # where a stream is a thread
        owner.keep(lambda: owner.queue(part.stream, run))
    else:
        owner.run(run)


class Calls:
    """The Python functions of one manager that the library may still call, and the first one that has failed.

    An exception cannot pass through the library. So it is kept: as an update that has failed leaves wrong bytes behind,
    check() raises from then on.
    """

    def __init__(self, lib: abi.Library, cuda: bool) -> None:
        self.lib = lib
        self.cuda = cuda
        self.handle = 0
        self.failure: BaseException | None = None
        self._barred = ""
        self._lock = threading.Lock()  # guards failure

    def run(self, function: typing.Callable[[], object]) -> None:
        """Calls a function of the user's on a thread of the library's, and keeps its exception."""
        before, _thread.calls = _thread.calls, self
        try:
            self.keep(function)
        finally:
            _thread.calls = before

    def refuse_inside(self) -> None:
        """Raises GeminiError if one of the functions calls the manager. The library waits for the function, so what the
        manager would wait for may never come.
        """
        if _thread.calls is self:
            raise abi.GeminiError(
                "a function that the library called, for update() or stream_call(), calls the same manager, which may "
                "wait for that function: call the manager before or afterwards",
                "STATE",
            )

    def keep(self, function: typing.Callable[[], object]) -> None:
        """Calls a function, and keeps its exception."""
        try:
            function()
        except BaseException as error:  # which the library does not know: KeyboardInterrupt, too
            with self._lock:
                self.failure = self.failure or error

    def check(self) -> None:
        """Raises GeminiError if a function that the library called has failed."""
        if self.failure is not None:
            raise abi.GeminiError(
                f"a function that was called by the library has raised {type(self.failure).__name__}: {self.failure}; "
                "the bytes that it should have written are wrong",
                "STATE",
            ) from self.failure

    def bar(self, reason: str) -> None:
        """Refuses further functions, or with "" accepts them again, for callers of the library that hold Python's lock.

        Such a caller may wait for a function, which waits for the lock.
        """
        if reason:
            self.wait()
            if any(owner is self for owner, _ in list(_calls.values())):
                raise abi.GeminiError("a function of stream_call() has not run yet", "BUSY")
        self._barred = reason

    def _check_bar(self) -> None:
        self.refuse_inside()
        if self._barred:
            raise abi.GeminiError(self._barred)

    def queue(self, stream: int, function: typing.Callable[[], object]) -> None:
        """Queues a function behind the work of a stream."""
        self._check_bar()
        number = next(_numbers)
        _calls[number] = self, function
        try:
            self.lib.stream_call(self.handle, stream, ctypes.cast(_call, ctypes.c_void_p), number)
        except BaseException:
            _calls.pop(number, None)
            raise

    def update(
        self,
        function: typing.Callable[[Span], object],
        arenas: typing.Sequence[int],
        modes: typing.Sequence[int],
        element_bytes: list[int],
        first_element: int,
        element_count: int,
        stream: int,
        late: bool,
    ) -> None:
        """Submits an update; see Manager.update()."""
        self._check_bar()
        self._forget_done()
        number, one = next(_numbers), _Update(self, function, element_bytes)
        _updates[number] = one
        request = abi.Update(
            flags=abi.UPDATE_LATE if late else 0,
            arenas=(ctypes.c_uint64 * len(arenas))(*arenas),
            modes=(ctypes.c_uint32 * len(modes))(*modes),
            arena_count=len(arenas),
            first_element=first_element,
            element_count=element_count,
            stream=stream,
            fn=_span,
            user=number,
        )
        try:
            self.lib.update(self.handle, request)
        except BaseException as error:
            if not isinstance(error, abi.GeminiError) or error.status == "PENDING":
                one.submitted = True  # it was accepted, or nobody knows
            else:
                del _updates[number]
            raise
        if late:
            one.submitted = True
        else:
            del _updates[number]

    def wait(self) -> None:
        """Waits for all updates that were submitted."""
        self.refuse_inside()
        submitted = self._submitted()
        self.lib.update_wait(self.handle)
        for number in submitted:
            _updates.pop(number, None)

    def _submitted(self) -> list[int]:
        return [number for number, one in list(_updates.items()) if one.owner is self and one.submitted]

    def _forget_done(self) -> None:
        """Forgets late updates that were done without a wait: they are all done when the library has none pending."""
        submitted = self._submitted()  # before the library is asked
        if submitted:
            stats = abi.Stats()
            self.lib.stats(self.handle, stats)
            if not stats.pending_updates:
                for number in submitted:
                    _updates.pop(number, None)

    def closed(self) -> None:
        """Forgets all functions: the manager is closed, and the library calls none of them any more."""
        self.handle = 0
        for number, (owner, _) in list(_calls.items()):
            if owner is self:
                _calls.pop(number, None)
        for number, update in list(_updates.items()):
            if update.owner is self:
                _updates.pop(number, None)
