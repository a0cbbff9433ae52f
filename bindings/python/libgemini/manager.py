"""A manager of the C library as a Python object: budgets in, bytes by tier and the plan in words out.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ctypes
import fractions
import logging
import os
import re
import types
import typing

from . import abi

logger = logging.getLogger("libgemini")
_LEVELS = {1: logging.ERROR, 2: logging.WARNING, 3: logging.INFO, 4: logging.DEBUG}
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_bytes(value: int | str, what: str = "size") -> int:
    """24 << 30, "24GiB", "24 GB" or "1.5T" as a number of bytes."""
    match = None
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*((?:[KMGT]I?)?)B?\s*", value.upper())
    if match:
        size = int(fractions.Fraction(match.group(1)) * _UNITS[match.group(2)])
    elif isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        raise ValueError(f'{what} is {value!r}: want bytes, or a text such as "24GiB"')
    if not 0 <= size < 2**64:
        raise ValueError(f"{what} is {value!r}: want 0 to 2**64 - 1 bytes")
    return size


def bytes_text(count: float) -> str:
    """A number of bytes for people: "1.5 GiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


@abi.LogFn
def _log(_: int | None, level: int, message: bytes) -> None:
    logger.log(_LEVELS.get(level, logging.INFO), "%s", message.decode(errors="replace"))


class Manager:
    """One device, one set of budgets. Fields are those of gemini_config_t; close() or a with block ends it."""

    def __init__(
        self,
        *,
        placement: str = "auto",
        device_memory: int | str,
        host_memory: int | str = 0,
        file_memory: int | str = 0,
        file: str | os.PathLike[str] | None = None,
        cuda: bool = False,
        device_ordinal: int = 0,
        device_margin: int | str = 0,
        window: int | str = 0,
        warmup_iterations: int = 1,
        update_threads: int = 0,
        strict: bool = False,
        static_param_fraction: float = 0.0,
        static_optim_fraction: float = 0.0,
        keep_name: str | None = None,
        watchdog: float = 0.0,
        file_engine: str = "auto",
    ) -> None:
        if placement not in abi.PLACEMENTS:
            raise ValueError(f"placement is {placement!r}: want one of {', '.join(abi.PLACEMENTS)}")
        if file_engine not in abi.FILE_ENGINES:
            raise ValueError(f"file_engine is {file_engine!r}: want one of {', '.join(abi.FILE_ENGINES)}")
        if not 0 <= watchdog < 2**33:
            raise ValueError(f"watchdog is {watchdog!r}: want seconds, or 0 for none")
        self.lib = abi.library()
        self.config = abi.Config(
            placement=abi.PLACEMENTS[placement],
            device=abi.DEVICE_CUDA if cuda else abi.DEVICE_SIMULATED,
            device_ordinal=device_ordinal,
            flags=abi.CONFIG_STRICT if strict else 0,
            warmup_iterations=warmup_iterations,
            update_threads=update_threads,
            device_bytes=parse_bytes(device_memory, "device_memory"),
            device_margin_bytes=parse_bytes(device_margin, "device_margin"),
            host_bytes=parse_bytes(host_memory, "host_memory"),
            file_bytes=parse_bytes(file_memory, "file_memory"),
            window_bytes=parse_bytes(window, "window"),
            static_param_fraction=static_param_fraction,
            static_optim_fraction=static_optim_fraction,
            file_dir=str(file).encode() if file else None,
            log_fn=_log,
            file_engine=abi.FILE_ENGINES[file_engine],
            keep_name=keep_name.encode() if keep_name else None,
            watchdog_ns=round(watchdog * 1e9),
        )
        handle = ctypes.c_uint64()
        self.handle = 0
        self.lib.manager_open(self.config, handle)
        self.handle = handle.value

    def close(self) -> None:
        """Finishes updates and frees everything; twice is once."""
        handle, self.handle = self.handle, 0
        if handle:
            try:
                self.lib.manager_close(handle)
            except abi.GeminiError as error:
                if error.status == "BUSY":  # nothing was closed
                    self.handle = handle
                raise

    def __enter__(self) -> Manager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self.close()

    def arena(
        self,
        kind: int,
        *,
        name: str | None = None,
        element_bytes: int = 1,
        like: int = 0,
        reuse: int = 0,
        capacity: int = 0,
    ) -> int:
        """A new arena's handle; see gemini_arena_create()."""
        config = abi.ArenaConfig(
            kind=kind,
            element_bytes=element_bytes,
            capacity_bytes=capacity,
            like=like,
            reuse=reuse,
            name=name.encode() if name else None,
        )
        arena = ctypes.c_uint64()
        self.lib.arena_create(self.handle, config, arena)
        return arena.value

    def arena_info(self, arena: int) -> abi.ArenaInfo:
        info = abi.ArenaInfo()
        self.lib.arena_info(self.handle, arena, info)
        return info

    def take(self, arena: int, size_bytes: int) -> int:
        """The offset of the arena's next size_bytes."""
        offset = ctypes.c_uint64()
        self.lib.arena_take(self.handle, arena, size_bytes, offset)
        return offset.value

    def stats(self) -> dict[str, typing.Any]:
        """gemini_stats() as a dict; tiers, links and reasons by name."""
        stats = abi.Stats()
        self.lib.stats(self.handle, stats)
        out = {}
        for name, _ in abi.Stats._fields_:
            value = getattr(stats, name)
            if name in ("budget_bytes", "used_bytes", "peak_bytes"):
                value = dict(zip(abi.TIERS, value))
            elif name in ("moved_bytes", "moved_chunks"):
                value = {link: dict(zip(abi.REASONS, row)) for link, row in zip(abi.LINKS, value)}
            if not name.startswith(("struct", "reserved")):
                out[name] = value
        return out

    def explain(self) -> str:
        """The plan in words."""
        length = ctypes.c_uint64()
        self.lib.plan_explain(self.handle, None, 0, length)
        text = ctypes.create_string_buffer(length.value + 1)
        self.lib.plan_explain(self.handle, text, length.value + 1, None)
        return text.value.decode()

    def dump(self) -> str:
        """The manager's state in words, waits of all threads among it; see gemini_manager_dump(). Never waits
        itself."""
        size, length = 1 << 16, ctypes.c_uint64()
        while True:
            text = ctypes.create_string_buffer(size)
            self.lib.manager_dump(self.handle, text, size, length)
            if length.value < size:
                return text.value.decode(errors="replace")
            size = 2 * length.value  # it may have grown meanwhile
