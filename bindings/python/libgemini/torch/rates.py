"""How fast a machine computes and moves bytes, as a plan before a run has to know: measured once, and kept in a file.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import platform
import tempfile
import time
import typing

import torch

from .. import abi
from ..abi import GeminiError

if typing.TYPE_CHECKING:
    from .session import Session

VERSION = 1  # of how rates are measured: other versions' files are not used
DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass
class Rates:
    """Rates of a machine.

    Attributes:
        flops: By dtype ("bfloat16"), operations of matrix products each second, two for a multiplication and addition.
        device_memory: Bytes each second that an operator reads and writes on the device.
        operator_seconds: The least that one of torch's operators takes.
        to_device, from_device: Bytes each second between host and device.
        host_update: Elements that AdamW updates each second on the host, by update_threads threads.
        update_threads: As of gm.init().
        device_update: The same on the device.
        file_read, file_write: Bytes each second; 0: not measured.
        source: Where the rates come from, in words.
    """

    flops: dict[str, float]
    device_memory: float
    operator_seconds: float
    to_device: float
    from_device: float
    host_update: float
    update_threads: int
    device_update: float
    file_read: float = 0.0
    file_write: float = 0.0
    source: str = ""

    def flops_of(self, dtype: torch.dtype) -> float:
        """The rate of matrix products of a dtype; without one, that of fp32."""
        return self.flops.get(str(dtype).removeprefix("torch."), self.flops["float32"])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the rates to a JSON file, which is whole or not there."""
        path = pathlib.Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump({"version": VERSION, **dataclasses.asdict(self)}, file, indent=2)
        os.replace(file.name, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Rates:
        """Reads a JSON file, as save() writes it.

        Raises:
            OSError: It cannot be read.
            ValueError: It has no rates, or a rate that is none.
        """
        try:
            values = json.loads(pathlib.Path(path).read_text())
            version = values.pop("version")
            rates = cls(**values)
            positive = [rates.device_memory, rates.to_device, rates.from_device, rates.host_update, rates.device_update]
            positive += [rates.update_threads, rates.flops["float32"], *rates.flops.values()]
            good = all(value > 0 for value in positive) and all(
                value >= 0 for value in (rates.operator_seconds, rates.file_read, rates.file_write)
            )
        except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is no file of rates: {error!r}") from None
        if version != VERSION:
            raise ValueError(f"{path} has rates of version {version}, want {VERSION}: measure again")
        if not good:
            raise ValueError(f"{path}: rates are greater than 0 (of files, and operator_seconds, 0 or greater)")
        return rates


def digest(device: torch.device, file: str | None) -> str:
    """A digest of what rates depend on: the processor, the GPU, torch and the library; the disk of a directory."""
    parts = [platform.machine(), str(len(os.sched_getaffinity(0))), torch.__version__, abi.library().version().decode()]
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        parts += sorted({line for line in lines if line.startswith(("model name", "flags", "CPU part"))})
    except OSError:
        parts.append(platform.processor())
    if device.type == "cuda":
        parts += [torch.cuda.get_device_name(device), str(torch.version.cuda)]
    if file:
        parts += [str(os.stat(path).st_dev) for path in file.split(":")]
    return hashlib.sha256("\n".join([str(VERSION), device.type, *parts]).encode()).hexdigest()[:16]


def cache_path(device: torch.device, file: str | None) -> pathlib.Path:
    """Where the rates of this machine are kept."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return pathlib.Path(root).expanduser() / "libgemini" / f"rates-{digest(device, file)}.json"


def _seconds(device: torch.device, call: typing.Callable[[], object], least: float = 0.05) -> float:
    """How long a call takes: the shortest of several rounds, each of as many calls as take least seconds or more."""

    def rounds(count: int) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        for _ in range(count):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    count, taken = 1, rounds(1)
    while taken < least:
        count *= 2
        taken = rounds(count)
    return min(taken, rounds(count), rounds(count)) / count


def _trained(owner: Session, sizes: tuple[int, int], steps: int) -> list[list[float]]:
    """Trains a few layers in a session, and returns the numbers of its trace's lines "rates" and "files"."""
    from . import prepare

    width, layers = sizes
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    model, optimizer = prepare(model.to(torch.bfloat16), torch.optim.AdamW(model.parameters(), lr=1e-3))
    values = torch.randn(1, width, dtype=torch.bfloat16, device=owner.device)
    for _ in range(steps):
        model(values).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(values)  # which ends the last step's updates
    with tempfile.NamedTemporaryFile("r") as file:
        owner.lib.trace_save(owner.handle, os.fsencode(file.name))
        lines = file.read().splitlines()
    found = [next(line.split()[1:] for line in lines if line.startswith(word + " ")) for word in ("rates", "files")]
    return [[float(value) for value in values] for values in found]


def measure(
    device: torch.device, file: str | None = None, say: typing.Callable[[str], object] = lambda _: None
) -> Rates:
    """Measures this machine, in about half a minute. There must be no session.

    Args:
        device: A GPU, or the CPU, which stands for the simulated device.
        file: A directory on the disk for files, or several with ":" between them. None: files are not measured.
        say: Called with what is measured next.

    Returns:
        The rates.
    """
    from . import close, init

    cuda = device.type == "cuda"
    flops: dict[str, float] = {}
    width = 8192 if cuda else 512
    for name in DTYPES:
        say(f"matrix products of {name}")
        left = torch.randn(width, width, device=device).to(getattr(torch, name))
        flops[name] = 2 * width**3 / _seconds(device, functools.partial(torch.mm, left, left))
    say("device memory")
    left = torch.randn(64 << 20 if cuda else 4 << 20, device=device)
    out = torch.empty_like(left)
    device_memory = 3 * left.nbytes / _seconds(device, functools.partial(torch.add, left, left, out=out))
    small = torch.zeros(16, device=device)
    operator_seconds = _seconds(device, functools.partial(torch.add, small, 1.0))
    del left, out, small
    if cuda:
        torch.cuda.empty_cache()
    sizes = (4096, 8) if cuda else (1024, 4)
    chunk = 16 << 20 if cuda else 256 << 10
    params = 2 * sizes[0] ** 2 * sizes[1]  # bytes
    room = 8 * params + (1 << 30 if cuda else 0)
    found: dict[str, list[list[float]]] = {}
    threads = min(256, max(1, (os.sysconf("SC_NPROCESSORS_ONLN") or 1) - 1))  # what the library takes by itself
    places: list[tuple[str, dict[str, typing.Any]]] = [("cpu", {"host_memory": room}), ("cuda", {"host_memory": room})]
    if file:
        places.append(("files", {"host_memory": 2 * params, "file": file, "file_memory": room}))
    for name, more in places:
        say({"cpu": "links, updates on the host", "cuda": "updates on the device", "files": "files"}[name])
        placement = "cpu" if name == "files" else name
        with init(
            placement,
            device=device,
            device_memory=room,
            chunk_size=chunk,
            update_threads=threads,
            units="never",
            speculate=False,
            progress=False,
            **more,
        ) as owner:
            pass
        try:
            found[name] = _trained(owner, sizes, 6)
        finally:
            close(force=True)
    to_device, from_device, host_ps, _ = found["cpu"][0]
    device_ps = found["cuda"][0][3]
    unknown = [
        what for what, value in (("links", to_device * from_device), ("updates on the host", host_ps)) if not value
    ]
    if unknown:
        raise GeminiError(f"the library has not measured {' and '.join(unknown)}: give rates by options")
    read, write = found["files"][1] if file else (0.0, 0.0)
    where = torch.cuda.get_device_name(device) if cuda else "the simulated device"
    return Rates(
        flops,
        device_memory,
        operator_seconds,
        to_device,
        from_device,
        1e12 * threads / host_ps,
        threads,
        1e12 / device_ps if device_ps else device_memory / 28,
        read,
        write,
        f"measured on {where}, {time.strftime('%Y-%m-%d')}",
    )


def of_machine(
    device: torch.device,
    file: str | None = None,
    again: bool = False,
    say: typing.Callable[[str], object] = lambda _: None,
) -> Rates:
    """The rates of this machine: those that were measured before, if there are any.

    Args:
        device, file, say: As of measure().
        again: Measure in any case.

    Returns:
        The rates.
    """
    path = cache_path(device, file)
    if not again:
        try:
            return Rates.load(path)
        except (OSError, ValueError):
            pass
    rates = measure(device, file, say)
    try:
        rates.save(path)
    except OSError as error:
        say(f"rates are not kept: {error}")
    return rates
