"""Folders of random weights, as safetensors, for the benches of PyTorch.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import time
from collections.abc import Iterable
from typing import Any

TILE = 1 << 22  # random numbers that the weights repeat: to draw billions takes minutes
INDEX = "model.safetensors.index.json"


def make_tile(torch: Any) -> Any:
    """Random numbers that all weights repeat."""
    return torch.empty(TILE).normal_(0, 0.02, generator=torch.Generator().manual_seed(1)).bfloat16()


def fill(tile: Any, number: int, param: Any) -> None:
    """Gives the parameter of this number, in the order of the model, its values."""
    if param.dim() == 1:
        param.fill_(1)
        return
    flat, rolled = param.view(-1), tile.roll(number * 7919)
    for first in range(0, flat.numel(), TILE):
        flat[first : first + TILE].copy_(rolled[: flat.numel() - first])


def block_of(name: str) -> str:
    """The number of a parameter's block, by its name; "rest": it is in none."""
    return next((part for part in name.split(".") if part.isdigit()), "rest")


def is_written(folder: pathlib.Path) -> bool:
    return (folder / INDEX).exists()


def write(torch: Any, folder: pathlib.Path, params: Iterable[tuple[str, Any]]) -> None:
    """Writes weights in bf16, a file for each block, in the memory of one block; says so at the end by the index.

    Args:
        torch: The module.
        folder: Made if it is not there.
        params: Names and parameters, of which only the shapes count.
    """
    import safetensors.torch

    folder.mkdir(parents=True, exist_ok=True)
    tile, files = make_tile(torch), {}
    for number, (name, param) in enumerate(params):
        files.setdefault(f"model-{block_of(name)}.safetensors", []).append((number, name, param.shape))
    for file, members in files.items():
        tensors = {}
        for number, name, shape in members:
            tensors[name] = torch.empty(shape, dtype=torch.bfloat16)
            fill(tile, number, tensors[name])
        safetensors.torch.save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, members in files.items() for _, name, _ in members}}
    written = folder / f"{INDEX}.new"
    written.write_text(json.dumps(index))
    written.rename(folder / INDEX)


def drop_cached(folder: pathlib.Path) -> None:
    """Has the system forget what it holds of the folder's files, which are on the disk."""
    for file in folder.iterdir():
        with open(file, "rb") as one:
            os.fdatasync(one.fileno())
            os.posix_fadvise(one.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(folder: pathlib.Path) -> tuple[float, int]:
    """Seconds in which eight threads read all files, and the bytes."""
    piece = 1 << 24

    def read_piece(job: tuple[pathlib.Path, int]) -> int:
        file, offset = job
        with open(file, "rb", buffering=0) as one:
            return len(os.pread(one.fileno(), piece, offset))

    drop_cached(folder)
    jobs = [(file, at) for file in sorted(folder.iterdir()) for at in range(0, file.stat().st_size, piece)]
    begin = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        count = sum(threads.map(read_piece, jobs))
    return time.perf_counter() - begin, count
