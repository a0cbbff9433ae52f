"""Files of the safetensors format, tensor by tensor: the length of a header in 8 bytes, the header in JSON, the bytes.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import ctypes
import json
import math
import os
import typing
import zlib

import torch

from .. import abi
from ..abi import GeminiError
from .arenas import Place
from .narrow import Narrow
from .ranks import SlicedPlace
from .tensors import ManagedTensor, managed_view

CODES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}
NAMES = {dtype: code for code, dtype in CODES.items()}
PIECE_BYTES = 4 << 20  # held at once while bytes are summed or converted
HEADER_MOST = 100_000_000  # bytes, as the format's own reader has it
SUMMING_THREADS = min(4, os.cpu_count() or 1)

Entry = collections.namedtuple("Entry", "file name dtype shape offset size_bytes")  # offset: in the file


def _bytes_of(tensor):
    """The bytes of a contiguous CPU tensor, as an object with the buffer protocol, which keeps the tensor alive."""
    size = tensor.numel() * tensor.dtype.itemsize
    if not size:
        return memoryview(b"")
    array = (ctypes.c_char * size).from_address(tensor.data_ptr())
    array.tensor = tensor
    return memoryview(array).cast("B")


def _write(fd, data, offset):
    while len(data):
        count = os.pwrite(fd, data[: 1 << 30], offset)
        data, offset = data[count:], offset + count


def _read(fd, data, offset):
    while len(data):
        count = os.preadv(fd, [data[: 1 << 30]], offset)
        if not count:
            raise GeminiError(f"ends at offset {offset}, {len(data)} bytes are missing", "FORMAT")
        data, offset = data[count:], offset + count


def checksum(path, offset, size_bytes):
    """The CRC-32 of a part of a file."""
    crc, buffer = 0, memoryview(bytearray(min(size_bytes, PIECE_BYTES)))
    fd = os.open(path, os.O_RDONLY)
    try:
        for at in range(0, size_bytes, PIECE_BYTES):
            part = buffer[: min(PIECE_BYTES, size_bytes - at)]
            _read(fd, part, offset + at)
            crc = zlib.crc32(part, crc)
    finally:
        os.close(fd)
    return crc


def summing():
    """An executor for checksum(), which releases Python's global lock while it computes."""
    return concurrent.futures.ThreadPoolExecutor(SUMMING_THREADS)


# ---- parts that ranks have
def is_sliced(value):
    """Whether a Place, Narrow or tensor is divided among ranks."""
    return value.sliced if isinstance(value, Narrow) else isinstance(value, SlicedPlace)


def entire(value):
    """The shape that a Place, Narrow or tensor has in files, and the element there that its own ones begin at."""
    return value.entire if is_sliced(value) else (tuple(value.shape), 0)


def size_bytes(value):
    """How many bytes a file has of a Place, Narrow or tensor."""
    return math.prod(entire(value)[0]) * value.dtype.itemsize


def part_of(entry, value):
    """Of an entry that has the shape of entire(value): what is read into the value."""
    begin = entire(value)[1] * entry.dtype.itemsize
    return entry._replace(
        shape=tuple(value.shape),
        offset=entry.offset + begin,
        size_bytes=value.shape.numel() * entry.dtype.itemsize,
    )


# ---- writing
def split(tensors, most_bytes):
    """Splits (name, Place, Narrow or tensor) into lists of at most most_bytes each. A larger one gets its own list."""
    shards: list[list[tuple[str, typing.Any]]] = [[]]
    size = 0
    for name, value in tensors:
        own = size_bytes(value)
        if shards[-1] and size + own > most_bytes:
            shards.append([])
            size = 0
        shards[-1].append((name, value))
        size += own
    return shards


def write(path, tensors, progress, ranks=None):
    """Writes a file.

    The bytes of a contiguous place go to the file chunk by chunk, from wherever they are. Of several ranks, which all
    call this, each of the first replica writes the slices that it keeps, and the first one the rest.

    Args:
        path: The file.
        tensors: (name, Place, Narrow or tensor).
        progress: Counts the bytes.
        ranks: See ranks.py; None: there is one process.

    Returns:
        The checksums by name; on other ranks than the first one, nothing.
    """
    first, together = (True, contextlib.nullcontext) if ranks is None else (ranks.rank == 0, ranks.together)
    tensors = sorted(tensors, key=lambda item: -item[1].dtype.itemsize)  # so that each is aligned
    header: dict[str, dict[str, typing.Any]] = {"__metadata__": {"format": "pt"}}
    entries, at = [], 0
    for name, value in tensors:
        if value.dtype not in NAMES:
            raise GeminiError(f"{name} is of {value.dtype}, which is none of {', '.join(map(str, NAMES))}")
        size = size_bytes(value)
        header[name] = {"dtype": NAMES[value.dtype], "shape": list(entire(value)[0]), "data_offsets": [at, at + size]}
        entries.append((name, value, at, size))
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    sums = {}
    with contextlib.ExitStack() as stack:
        with together():
            if first:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
                stack.callback(os.close, fd)
                _write(fd, memoryview(len(text).to_bytes(8, "little") + text), 0)
        executor = stack.enter_context(summing())
        with together():
            if not first:
                fd = os.open(path, os.O_RDWR)
                stack.callback(os.close, fd)
            for name, value, at, size in entries:
                try:
                    _store(fd, value, 8 + len(text) + at, size, first)
                except (GeminiError, OSError) as error:
                    raise GeminiError(
                        f"{path}: {name} was not written: {error}", getattr(error, "status", "IO")
                    ) from error
                if ranks is None:
                    sums[name] = executor.submit(checksum, path, 8 + len(text) + at, size)
                progress.add(size)
            if not first:
                os.fsync(fd)
        if ranks is not None and first:
            for name, _, at, size in entries:
                sums[name] = executor.submit(checksum, path, 8 + len(text) + at, size)
        return {name: future.result() for name, future in sums.items()}


def _store(fd, value, offset, size, first):
    sliced = is_sliced(value)
    if not size or not (first or sliced):
        return
    offset += entire(value)[1] * value.dtype.itemsize
    if sliced and not value.contiguous:  # all ranks read it
        value.ranks.meet()  # some have taken longer to write what came before
        values = value.read().contiguous()
        if not value.owners.index:
            _write(fd, _bytes_of(values), offset)
    elif sliced and not value.owners.writes:
        return  # another replica writes them
    elif isinstance(value, Narrow) and value.contiguous:
        for at, piece in value.pieces(own=True):
            _write(fd, _bytes_of(piece), offset + at * value.dtype.itemsize)
    elif isinstance(value, Narrow):
        _write(fd, _bytes_of(value.read().contiguous()), offset)
    elif isinstance(value, Place) and value.contiguous:
        session = value.session
        try:
            session.lib.store(session.handle, ctypes.byref(value.access(abi.READ)), fd, offset)
        except GeminiError as error:
            if error.status != "OOM_HOST" or sliced:
                raise
            for at, piece in value.device_pieces(abi.READ, PIECE_BYTES):
                _write(fd, _bytes_of(piece.cpu()), offset + at * value.dtype.itemsize)
    else:
        values = managed_view(value) if isinstance(value, Place) else value.detach()
        values = (values.clone() if isinstance(values, ManagedTensor) else values).to("cpu").contiguous()
        _write(fd, _bytes_of(values), offset)


# ---- reading
def read_header(path):
    """Reads the Entry of each tensor in a file, by name.

    A file that is not of this format, or not as long as its header says, is refused.
    """

    def refuse(why):
        return GeminiError(f"{path} is not a complete safetensors file: {why}", "FORMAT")

    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, HEADER_MOST):
            raise refuse(f"it has {size} bytes, its first 8 say that the header has {length}")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            entries = {}
            for name, value in header.items():
                begin, end = value["data_offsets"]
                shape, dtype = tuple(value["shape"]), CODES.get(value["dtype"])
                if dtype is None:
                    raise refuse(f"{name} is of dtype {value['dtype']}, which is none of {', '.join(CODES)}")
                if (
                    not 0 <= begin <= end
                    or end - begin != math.prod(shape) * dtype.itemsize
                    or any(n < 0 for n in shape)
                ):
                    raise refuse(
                        f"{name} has the bytes {begin} to {end}, which is not the size of shape {shape} of {dtype}"
                    )
                if 8 + length + end > size:
                    raise refuse(f"it has {size} bytes, {name} ends at {8 + length + end}")
                entries[name] = Entry(str(path), name, dtype, shape, 8 + length + begin, end - begin)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise refuse(f"its header is damaged: {error!r}") from None
    last = 8 + length
    for entry in sorted(entries.values(), key=lambda entry: (entry.offset, entry.size_bytes)):
        if entry.offset != last:
            raise refuse(f"{entry.name} begins at {entry.offset}, what is before it ends at {last}")
        last += entry.size_bytes
    if last != size:
        raise refuse(f"it has {size} bytes, its tensors end at {last}")
    return entries


def same_bytes(entry, other):
    """Whether two entries, perhaps of two files, have the same bytes."""
    if entry.size_bytes != other.size_bytes:
        return False
    try:
        with open(entry.file, "rb") as one, open(other.file, "rb") as two:
            one.seek(entry.offset)
            two.seek(other.offset)
            for at in range(0, entry.size_bytes, PIECE_BYTES):
                size = min(PIECE_BYTES, entry.size_bytes - at)
                if one.read(size) != two.read(size):
                    return False
    except OSError as error:
        raise GeminiError(f"{entry.file}, {other.file}: {entry.name} was not read: {error}", "IO") from error
    return True


def read(entry, fd, target, borrows=False):
    """Fills a Place, a Narrow or a tensor from an open file.

    Bytes of the dtype of a contiguous place go where the place is, chunk by chunk. Other dtypes are converted in
    pieces. A place with other strides, or a tensor, is filled from a copy.

    Args:
        entry: What is read.
        fd: The file.
        target: What is filled.
        borrows: Bytes of the dtype of a contiguous place stay in the file until they are wanted.
    """
    if not entry.size_bytes:
        return
    try:
        if isinstance(target, Place) and target.contiguous:
            try:
                _read_place(entry, fd, target, borrows)
            except GeminiError as error:
                if error.status != "OOM_HOST" or isinstance(target, SlicedPlace):
                    raise
                for first, piece in target.device_pieces(abi.WRITE, PIECE_BYTES):
                    _convert(entry, fd, first, piece)
            return
        if isinstance(target, Narrow) and target.contiguous:
            for first, last in target.own_ranges(PIECE_BYTES // 4):
                piece = torch.empty(last - first, dtype=torch.float32)
                _convert(entry, fd, first, piece)
                target.put(first, piece)
            return
        values = torch.empty(entry.shape, dtype=entry.dtype)
        _read(fd, _bytes_of(values), entry.offset)
        if isinstance(target, Narrow):
            target.write(values)
            return
        if not isinstance(target, Place):
            target.copy_(values.view(target.shape))
            return
        try:
            target.write(values)
        except GeminiError as error:
            if error.status != "OOM_HOST" or isinstance(target, SlicedPlace):
                raise
            flat = target.in_order(values)
            for first, piece in target.device_pieces(abi.WRITE, PIECE_BYTES):
                piece.copy_(flat[first : first + piece.numel()])
    except (GeminiError, OSError) as error:
        raise GeminiError(
            f"{entry.file}: {entry.name} was not read: {error}", getattr(error, "status", "IO")
        ) from error


def _read_place(entry, fd, place, borrows):
    if entry.dtype == place.dtype:
        lib = place.session.lib
        get = lib.borrow if borrows and not isinstance(place, SlicedPlace) else lib.load
        get(place.session.handle, ctypes.byref(place.access(abi.WRITE)), fd, entry.offset)
    else:
        for first, piece in place.host_pieces(abi.WRITE):
            _convert(entry, fd, first, piece)


def _convert(entry, fd, first, piece):
    step = PIECE_BYTES // entry.dtype.itemsize
    values = torch.empty(min(step, piece.numel()), dtype=entry.dtype)
    for at in range(0, piece.numel(), step):
        part = values[: min(step, piece.numel() - at)]
        _read(fd, _bytes_of(part), entry.offset + (first + at) * entry.dtype.itemsize)
        piece[at : at + part.numel()].copy_(part)
