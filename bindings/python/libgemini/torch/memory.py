"""torch tensors over memory that torch has not allocated, made by DLPack.

SPDX-License-Identifier: Apache-2.0
"""

import ctypes

import torch

from . import internals


class _DLDevice(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _DLType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int),
        ("dtype", _DLType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    _fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_CPU, _CUDA = 1, 2
_TYPES = {  # DLPack: int 0, uint 1, float 2, bfloat 4, bool 6
    torch.float64: (2, 64),
    torch.float32: (2, 32),
    torch.float16: (2, 16),
    torch.bfloat16: (4, 16),
    torch.int64: (0, 64),
    torch.int32: (0, 32),
    torch.int16: (0, 16),
    torch.int8: (0, 8),
    torch.uint8: (1, 8),
    torch.bool: (6, 8),
}
FLOATS_OF_8_BITS = {  # which not every version of DLPack has: they pass as bytes
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
}
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
# The description is freed by C, as tensors can outlive the Python interpreter.
_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]


def can_wrap(dtype):
    """Whether wrap() takes a dtype."""
    return dtype in _TYPES or dtype in FLOATS_OF_8_BITS


def wrap(address, shape, dtype, device, stride=None):
    """Makes a tensor over device memory. Nothing is read or written.

    Args:
        address: The first byte. The memory has to outlive the tensor.
        shape: The shape in elements.
        dtype: The dtype.
        device: The torch device.
        stride: The strides in elements; None: contiguous.

    Raises:
        TypeError: It is none of the dtypes of can_wrap().
        MemoryError: There is no memory for the description of the tensor.
    """
    if dtype in FLOATS_OF_8_BITS:
        raw = wrap(address, shape, torch.uint8, device, stride)
        return torch.empty(0, dtype=dtype, device=device).set_(raw.untyped_storage(), 0, raw.shape, raw.stride())
    if dtype not in _TYPES:
        raise TypeError(f"{dtype} is none of {', '.join(map(str, (*_TYPES, *FLOATS_OF_8_BITS)))}")
    code, bits = _TYPES[dtype]
    head = ctypes.sizeof(_DLManagedTensor)
    at = _libc.malloc(head + 16 * len(shape))
    if not at:
        raise MemoryError("no memory for the description of a tensor")
    managed = _DLManagedTensor.from_address(at)
    managed.context = None
    managed.deleter = ctypes.cast(_libc.free, ctypes.c_void_p)
    tensor = managed.tensor
    tensor.data = address
    tensor.device = _DLDevice(_CUDA, device.index or 0) if device.type == "cuda" else _DLDevice(_CPU, 0)
    tensor.ndim = len(shape)
    tensor.dtype = _DLType(code, bits, 1)
    tensor.shape = ctypes.cast(at + head, ctypes.POINTER(ctypes.c_int64))
    for i, size in enumerate(shape):
        tensor.shape[i] = size
    if stride is not None:
        tensor.strides = ctypes.cast(at + head + 8 * len(shape), ctypes.POINTER(ctypes.c_int64))
        for i, step in enumerate(stride):
            tensor.strides[i] = step
    else:
        tensor.strides = None
    tensor.byte_offset = 0
    return torch.from_dlpack(_new_capsule(at, b"dltensor", None))


def host_tensor(address, elements, dtype):
    """A CPU tensor of one dimension over host memory, valid while the memory is acquired."""
    return torch.frombuffer((ctypes.c_char * (elements * dtype.itemsize)).from_address(address), dtype=dtype)


def _users(tensor):
    return internals.storage_users(tensor.untyped_storage())  # this storage object counts as one reference


def _alone():
    """What _users() gives for a tensor whose memory no other tensor has; None if torch does not report it."""
    tensor = torch.empty(1, device="cpu")
    alone, other = _users(tensor), tensor.detach()
    return alone if alone is not None and _users(other) == alone + 1 else None


_ALONE = _alone()


def shared(tensor, among=1):
    """Whether more tensors than so many, a tensor among them, share its memory; None if torch does not report it."""
    return None if _ALONE is None else _users(tensor) > _ALONE + among - 1
