"""CuPy's memory out of a manager's budget, and acquired ranges as CuPy's arrays (docs/frameworks.md).

It needs the package cupy (pip install cupy-cuda12x) and a manager of a GPU: Manager(cuda=True, ...).
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ctypes
import typing
import weakref

from . import abi
from .manager import Manager, Range
from .views import CUDA

try:
    import cupy
    from cupy.cuda.memory import OutOfMemoryError
except ImportError as missing:
    raise ImportError("libgemini.cupy needs the package cupy, such as pip install cupy-cuda12x") from missing


def _address(function: typing.Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


_served: weakref.WeakSet[Manager] = weakref.WeakSet()  # managers of an Allocator that is open


class Allocator:
    """CuPy's allocations out of a manager's device budget, from its making to close(), or the end of a with block.

    Memory that CuPy frees can be reused at once, by work behind what its stream has queued so far. CuPy's own pool is
    not used: the manager takes its place. Meanwhile Manager.update() and stream_call() are refused, as CuPy holds
    Python's lock while it allocates.
    """

    def __init__(self, manager: Manager) -> None:
        if not manager._cuda:
            raise abi.GeminiError("CuPy computes on GPUs: open the manager with cuda=True", "UNSUPPORTED")
        if manager in _served:
            raise abi.GeminiError("CuPy allocates from this manager already", "EXISTS")
        manager._calls.bar(
            "CuPy allocates from this manager, and holds Python's lock meanwhile: a function of Python's that an "
            "allocation waits for would wait for the lock. Use adamw(), or close the allocator first"
        )
        self._lib = manager.lib
        self._manager = manager
        # By stream, as each allocator of functions is for one. The streams are kept: the manager refers to them.
        self._by_stream: dict[int, tuple[typing.Any, typing.Any]] = {}
        try:
            manager.hook_set()
        except abi.GeminiError:
            manager._calls.bar("")
            raise
        _served.add(manager)
        self._before = cupy.cuda.get_allocator()
        cupy.cuda.set_allocator(self.malloc)
        self._open = True

    def malloc(self, size: int) -> typing.Any:
        """Allocates memory for work on CuPy's current stream. CuPy calls it.

        Args:
            size: Bytes.

        Returns:
            A cupy.cuda.MemoryPointer.

        Raises:
            OutOfMemoryError: CuPy's. Its cause is a GeminiError that says what holds the memory.
        """
        stream = cupy.cuda.get_current_stream()
        if stream.ptr not in self._by_stream:
            functions = _address(self._lib.cupy_malloc), _address(self._lib.cupy_free)
            self._by_stream[stream.ptr] = cupy.cuda.CFunctionAllocator(stream.ptr, *functions, self), stream
        memory = self._by_stream[stream.ptr][0].malloc(size)
        if size and not memory.ptr:
            info = abi.ErrorInfo()
            self._lib.last_error(info)
            cause = abi.GeminiError(self._lib.error_text().decode(), abi.STATUS.get(info.status, str(info.status)))
            stats = self._manager.stats()
            raise OutOfMemoryError(size, stats["nonmodel_bytes"], self._manager.config.device_bytes) from cause
        return memory

    def close(self) -> None:
        """Gives CuPy the allocator back that it had before. Arrays stay valid until the manager is closed."""
        if self._open:
            self._open = False
            cupy.cuda.set_allocator(self._before)
            _served.discard(self._manager)
            self._manager._calls.bar("")
            if self._manager.handle:  # closing it has ended the service, too
                self._manager.hook_clear()

    def __enter__(self) -> Allocator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def use(manager: Manager) -> Allocator:
    """Has CuPy allocate its arrays out of a manager's device budget, for which chunks leave the device.

    Args:
        manager: A manager of the current GPU, opened with cuda=True.

    Returns:
        The allocator, for its close() or a with block; it may be ignored.

    Raises:
        GeminiError: Status "UNSUPPORTED": the manager is of the simulated device. "BUSY": a function of stream_call()
            has not run yet. "EXISTS": CuPy allocates from this
            manager already, or another one serves the GPU.
    """
    return Allocator(manager)


_streams: weakref.WeakKeyDictionary[Manager, dict[int, tuple[int, typing.Any]]] = weakref.WeakKeyDictionary()


def stream(manager: Manager) -> int:
    """The manager's handle of CuPy's current stream, for operator(), acquire(), release() and updates.

    Args:
        manager: The manager, which refers to the stream until it is closed.

    Returns:
        A handle, which is the same each time.

    Raises:
        GeminiError: The manager has no room for another stream, or is of the simulated device.
    """
    current, known = cupy.cuda.get_current_stream(), _streams.setdefault(manager, {})
    if current.ptr not in known:
        known[current.ptr] = manager.stream_adopt(current.ptr or None), current
    return known[current.ptr][0]


def array(range: Range, dtype: str = "float32", shape: typing.Sequence[int] | None = None) -> typing.Any:
    """An acquired range as CuPy's array, without a copy and, on the stream that it was acquired on, without a wait.

    Args:
        range: A range of a GPU's memory, acquired on CuPy's current stream, stream(manager), or on another one, for
            which the call waits.
        dtype: As of Range.view().
        shape: As of Range.view().

    Returns:
        A cupy.ndarray, which may be used until the range is released.

    Raises:
        GeminiError: The range is not acquired, or is not in a GPU's memory.
        ValueError: As Range.view().
    """
    view = range.view(dtype, shape)
    kind, ordinal = range._device
    if kind != CUDA:
        raise abi.GeminiError(f"{range} is in host memory: numpy.asarray() takes its view()")
    if range._wait and range._stream != (cupy.cuda.get_current_stream().ptr or 1):
        range._wait()
    memory = cupy.cuda.UnownedMemory(range.address, range.size_bytes, view, ordinal)
    return cupy.ndarray(view.shape, dtype, cupy.cuda.MemoryPointer(memory, 0))
