"""Acquired ranges as arrays of other libraries, without a copy: DLPack, and the array interfaces of NumPy and of CUDA.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ctypes
import math
import sys
import typing

from . import abi

if typing.TYPE_CHECKING:
    from .manager import Range

CPU, CUDA = 1, 2  # DLPack's kDLCPU and kDLCUDA
_INT, _UINT, _FLOAT, _BFLOAT, _BOOL = 0, 1, 2, 4, 6  # DLPack's kinds of elements
# By name: DLPack's kind, bits, and the character of the array interfaces, which have none for bfloat16.
_DTYPES = {
    "float16": (_FLOAT, 16, "f"),
    "float32": (_FLOAT, 32, "f"),
    "float64": (_FLOAT, 64, "f"),
    "bfloat16": (_BFLOAT, 16, None),
    "bool": (_BOOL, 8, "b"),
    **{f"int{bits}": (_INT, bits, "i") for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (_UINT, bits, "u") for bits in (8, 16, 32, 64)},
}


class _Tensor(ctypes.Structure):
    """DLManagedTensor of dlpack.h, which begins with a DLTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


# A tensor and its shape lie in one block of malloc(), and its deleter is free(): whoever has it can end it at any time
# and on any thread, also when Python has ended. libgemini.jax puts a deleter of its own there.
_libc = ctypes.CDLL(None)
_malloc, free = _libc.malloc, _libc.free
_malloc.argtypes, _malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
free.argtypes, free.restype = [ctypes.c_void_p], None
_new = ctypes.pythonapi.PyCapsule_New
_new.argtypes, _new.restype = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p], ctypes.py_object
_is_valid, _pointer = ctypes.pythonapi.PyCapsule_IsValid, ctypes.pythonapi.PyCapsule_GetPointer
_is_valid.argtypes = _pointer.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
_pointer.restype = ctypes.c_void_p
_NAME = b"dltensor"  # a capsule keeps the pointer


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _drop(capsule: int) -> None:
    """The destructor of a capsule: ends a tensor that nobody took. Whoever takes it renames the capsule."""
    if _is_valid(capsule, _NAME):
        block = _pointer(capsule, _NAME)
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_Tensor.from_address(block).deleter)(block)


def replace_deleter(capsule: typing.Any, deleter: typing.Any) -> int:
    """Has a function called when the array that is made of a capsule is not used any more.

    Args:
        capsule: What View.__dlpack__() returned, before an array is made of it.
        deleter: A ctypes function that takes the address below, which it gives to free(). It must never go.

    Returns:
        The address of the capsule's tensor.
    """
    block = int(_pointer(id(capsule), _NAME))
    _Tensor.from_address(block).deleter = ctypes.cast(deleter, ctypes.c_void_p)
    return block


class View:
    """The bytes of an acquired range, with a dtype and a shape. Range.view() makes one.

    It and what is made of it are valid until the range is released: neither keeps the bytes where they are.

    Attributes:
        dtype: The elements' type, such as "float32".
        shape: Elements by dimension; rows first, without gaps.
    """

    def __init__(self, range: Range, dtype: str, shape: typing.Sequence[int] | None) -> None:
        if dtype not in _DTYPES:
            raise ValueError(f"dtype is {dtype!r}: want one of {', '.join(_DTYPES)}")
        size = _DTYPES[dtype][1] // 8
        self._range = range
        self.dtype = dtype
        self.shape = (range.size_bytes // size,) if shape is None else tuple(map(int, shape))
        if min(self.shape, default=1) < 0 or math.prod(self.shape) * size != range.size_bytes:
            raise ValueError(f"an array of {self.shape} {dtype} is not the {range.size_bytes} bytes of {range}")

    def _address(self) -> int:
        if self._range.address is None:
            raise abi.GeminiError(f"{self._range} was released: its bytes may be elsewhere")
        return self._range.address

    def _interface(self, device: int) -> dict[str, typing.Any]:
        _, bits, character = _DTYPES[self.dtype]
        if self._range._device[0] != device:  # as if there were no such attribute, by which libraries choose
            raise AttributeError("the range is in a GPU's memory" if device == CPU else "the range is in host memory")
        if character is None:
            raise AttributeError(f"array interfaces have no {self.dtype}: use DLPack, or a view as uint16")
        order = "|" if bits == 8 else "<" if sys.byteorder == "little" else ">"
        return {
            "shape": self.shape,
            "typestr": f"{order}{character}{bits // 8}",
            "data": (self._address(), self._range.mode == "read"),
            "version": 3,
        }

    @property
    def __array_interface__(self) -> dict[str, typing.Any]:
        """NumPy's array interface, of host memory and of the simulated device. A range of mode "read" is read-only."""
        return self._interface(CPU)

    @property
    def __cuda_array_interface__(self) -> dict[str, typing.Any]:
        """CUDA's array interface, version 3, of a GPU's memory."""
        return {**self._interface(CUDA), "stream": self._range._stream}

    def __array__(self, *_: object, **__: object) -> typing.Any:
        """NumPy comes here if there is no array interface; otherwise it would make an array of this one object.

        Raises:
            TypeError: The range is in a GPU's memory, or its elements are of no dtype of NumPy's.
        """
        try:
            self._interface(CPU)
        except AttributeError as error:
            raise TypeError(f"NumPy cannot make an array of this view: {error}") from None
        raise TypeError("NumPy takes this view by its array interface")

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's kind and number of the device."""
        return self._range._device

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> typing.Any:
        """A DLPack capsule, of the layout before version 1.0, in which all arrays may be written.

        Args:
            stream: The CUDA stream that will use the bytes, as the array API standard names it.
            max_version: Ignored.
            dl_device: Where the bytes are wanted; only where they are.
            copy: True is refused.

        Raises:
            BufferError: A copy is wanted, or another device.
            GeminiError: The range was released.
        """
        device = self._range._device
        if copy or dl_device not in (None, device):
            raise BufferError("a range is given as it is: neither as a copy nor on another device")
        address = self._address()
        if self._range._wait and stream not in (-1, self._range._stream):
            self._range._wait()  # the other stream is not the library's, and cannot be made to wait
        code, bits, _ = _DTYPES[self.dtype]
        dimensions = len(self.shape)
        block = _malloc(ctypes.sizeof(_Tensor) + 16 * dimensions)
        if not block:
            raise MemoryError
        shape = block + ctypes.sizeof(_Tensor)
        strides = [math.prod(self.shape[axis + 1 :]) for axis in range(dimensions)]
        (ctypes.c_int64 * (2 * dimensions)).from_address(shape)[:] = [*self.shape, *strides]
        tensor = _Tensor.from_address(block)
        tensor.data, tensor.byte_offset, tensor.manager_ctx = address, 0, None
        tensor.device_type, tensor.device_id = device
        tensor.ndim, tensor.shape, tensor.strides = dimensions, shape, shape + 8 * dimensions
        tensor.code, tensor.bits, tensor.lanes = code, bits, 1
        tensor.deleter = ctypes.cast(free, ctypes.c_void_p)
        return _new(block, _NAME, ctypes.cast(_drop, ctypes.c_void_p))
