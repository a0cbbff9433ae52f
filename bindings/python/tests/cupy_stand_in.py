"""A stand-in for CuPy over NumPy, for tests without a GPU: what libgemini.cupy and its example call, on one stream.

Importing it makes it sys.modules["cupy"]. It is for a process in which tests/reference/fake_cuda.c is the CUDA driver,
whose memory is the process's own. What CuPy queues is computed at once here, so that an array over other memory waits
for the driver first. SPDX-License-Identifier: Apache-2.0
"""

import ctypes
import sys
import types

import numpy as np

driver = ctypes.CDLL("libcuda.so.1")
waits = 0


def wait():
    global waits
    waits += 1
    context = ctypes.c_void_p()
    assert driver.cuInit(0) == 0 and driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert driver.cuCtxSetCurrent(context) == 0 and driver.cuCtxSynchronize() == 0


class OutOfMemoryError(MemoryError):
    def __init__(self, size, total, limit=0):
        super().__init__(
            f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes, limit {limit:,})"
        )


class Memory:
    """What CFunctionAllocator allocates: malloc() in the constructor, free() at the end."""

    def __init__(self, size, param, malloc, free, owner):
        self.param, self.free, self.owner = param, free, owner
        self.ptr = malloc(param, size, 0) or 0 if size else 0

    def __del__(self):
        if self.ptr:
            self.free(self.param, self.ptr, 0)


class CFunctionAllocator:
    def __init__(self, param, malloc, free, owner):
        self.param, self.owner = param, owner
        self._malloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)(malloc)
        self._free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)(free)

    def malloc(self, size):
        return MemoryPointer(Memory(size, self.param, self._malloc, self._free, self.owner), 0)


class MemoryPointer:
    def __init__(self, memory, offset):
        self.mem, self.ptr = memory, memory.ptr + offset


def over(pointer, shape, dtype):
    dtype = np.dtype(dtype)
    buffer = (ctypes.c_char * (int(np.prod(shape)) * dtype.itemsize)).from_address(pointer.ptr)
    buffer.keeps = pointer
    return np.frombuffer(buffer, dtype).reshape(shape)


def ndarray(shape, dtype, pointer):
    wait()
    return over(pointer, shape, dtype)


def asarray(values):
    values = np.asarray(values)
    out = over(cuda.allocator(values.nbytes), values.shape, values.dtype)
    wait()
    out[...] = values
    return out


def zeros_like(values):
    return asarray(np.zeros_like(values))


def plain(size):
    buffer = ctypes.create_string_buffer(max(1, size))
    return MemoryPointer(types.SimpleNamespace(ptr=ctypes.addressof(buffer), keeps=buffer), 0)


null = types.SimpleNamespace(ptr=0)
cuda = types.ModuleType("cupy.cuda")
cuda.memory = types.ModuleType("cupy.cuda.memory")
cuda.memory.OutOfMemoryError = OutOfMemoryError
cuda.CFunctionAllocator = CFunctionAllocator
cuda.MemoryPointer = MemoryPointer
cuda.UnownedMemory = lambda ptr, size, owner, device: types.SimpleNamespace(ptr=ptr, size=size, owner=owner)
cuda.get_current_stream = lambda: null
cuda.allocator = plain
cuda.get_allocator = lambda: cuda.allocator
cuda.set_allocator = lambda allocator: setattr(cuda, "allocator", allocator)
tanh, square, sqrt = np.tanh, np.square, np.sqrt
sys.modules.update({"cupy": sys.modules[__name__], "cupy.cuda": cuda, "cupy.cuda.memory": cuda.memory})
