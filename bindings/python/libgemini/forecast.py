"""Plans before a run: what the library would do with a recorded iteration within given budgets.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ctypes
import dataclasses
import os

from . import abi
from .manager import parse_bytes


@dataclasses.dataclass(frozen=True)
class Forecast:
    """What gemini_plan_forecast() says of a trace; include/gemini/plan.h describes the figures.

    Attributes:
        lacks: Tiers whose budgets are too small; empty: the iteration fits.
        binds: What limits the duration: one of abi.BINDS.
        needed_bytes: By tier, the least budget with which it fits, the others as they are.
        used_bytes: By tier.
        model_bytes, chunk_bytes, stays_bytes, fetch_bytes, evict_bytes, read_bytes: Bytes, an iteration those that
            move.
        seconds: Of an iteration; 0 where the device lacks room.
        busy_seconds: By resource, as in abi.BINDS.
        device_pieces, host_pieces: Parts of updates by where they run.
        text: The plan in words.
    """

    lacks: tuple[str, ...]
    binds: str
    needed_bytes: dict[str, int]
    used_bytes: dict[str, int]
    model_bytes: int
    chunk_bytes: int
    stays_bytes: int
    fetch_bytes: int
    evict_bytes: int
    read_bytes: int
    device_pieces: int
    host_pieces: int
    seconds: float
    busy_seconds: dict[str, float]
    text: str

    @property
    def fits(self) -> bool:
        """Whether the iteration fits."""
        return not self.lacks


def forecast(
    trace: str | os.PathLike[str],
    *,
    device_memory: int | str,
    host_memory: int | str = 0,
    file_memory: int | str = 0,
    placement: str = "auto",
    cuda: bool = False,
    chunk_size: int | str = 0,
    device_margin: int | str = 0,
    update_threads: int = 0,
) -> Forecast:
    """Plans a recorded iteration, without a manager, a GPU, or the memory of the budgets.

    Args:
        trace: A file, as Manager.trace_save() writes it.
        device_memory, host_memory, file_memory: Budgets, as of Manager; more than the machine has is fine.
        placement, cuda, chunk_size, device_margin, update_threads: As of Manager. chunk_size 0: the trace's.

    Returns:
        The forecast.

    Raises:
        GeminiError: A value is refused; status "FORMAT": the file is no trace.
        ValueError: A size is none.
    """
    lib = abi.library()
    config = abi.Config(
        placement=abi.PLACEMENTS[placement],
        device=abi.DEVICE_CUDA if cuda else abi.DEVICE_SIMULATED,
        update_threads=update_threads,
        device_bytes=parse_bytes(device_memory, "device_memory"),
        device_margin_bytes=parse_bytes(device_margin, "device_margin"),
        host_bytes=parse_bytes(host_memory, "host_memory"),
        file_bytes=parse_bytes(file_memory, "file_memory"),
        chunk_bytes=parse_bytes(chunk_size, "chunk_size"),
    )
    out, length, size = abi.Forecast(), ctypes.c_uint64(), 4096
    while True:
        text = ctypes.create_string_buffer(size)
        lib.plan_forecast(config, os.fsencode(trace), out, size, text, length)
        if length.value < size:
            break
        size = length.value + 1
    return Forecast(
        lacks=tuple(name for number, name in enumerate(abi.TIERS) if out.lacks >> number & 1),
        binds=abi.BINDS[out.binds],
        needed_bytes=dict(zip(abi.TIERS, (out.device_needed, out.host_needed, out.file_needed))),
        used_bytes=dict(zip(abi.TIERS, (out.device_bytes, out.host_bytes, out.file_bytes))),
        model_bytes=out.model_bytes,
        chunk_bytes=out.chunk_bytes,
        stays_bytes=out.stays_bytes,
        fetch_bytes=out.fetch_bytes,
        evict_bytes=out.evict_bytes,
        read_bytes=out.read_bytes,
        device_pieces=out.device_pieces,
        host_pieces=out.host_pieces,
        seconds=out.step_ns * 1e-9,
        busy_seconds={
            name: ns * 1e-9
            for name, ns in zip(abi.BINDS, (out.compute_ns, out.fetch_ns, out.evict_ns, out.update_ns, out.file_ns))
        },
        text=text.value.decode(errors="replace"),
    )
