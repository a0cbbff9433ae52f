"""Rows of an embedding, read where the table lies on the host.

A pass needs a few rows of the table. Only the device knows which ones, and the calling thread would have to wait for
it. But a GPU's kernels can read page-locked host memory, so nobody has to know: the function gets the table's address
on the host, and nothing is fetched. It is done where a model for inference does not fit on the device, its pass reads
a small part of the table, and the host has room for the table beside the rest. The rows come over the link, outside
of the copies that the library counts.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import typing

import torch
from torch import nn

from .. import abi
from ..abi import GeminiError
from . import internals
from .memory import can_wrap, wrap

if typing.TYPE_CHECKING:
    from .arenas import Place

SHARE = 2  # of the table: a pass that reads more than one part of so many has it fetched, as copies are faster
HOST_SHARE = 4  # of the host budget: the most that a table may take, as it has to lie in one piece


def mark(module: nn.Module) -> None:
    """Has the embeddings of a model for inference read their rows on the host where that is better.

    Args:
        module: The model, whose parameters are in a session.
    """
    for one in module.modules():
        place: Place | None = getattr(getattr(one, "weight", None), "_gm_place", None)
        if isinstance(one, nn.Embedding) and place is not None:
            place.has_rows = True


def serves(ids: typing.Any, weight: typing.Any, limit: typing.Any) -> bool:
    """Whether an embedding is to read its rows on the host.

    Args:
        ids: The numbers of the rows.
        weight: The table, a managed tensor.
        limit: max_norm of the embedding, with which it changes the table.
    """
    place = getattr(weight, "_gm_place", None)
    if place is None or not place.has_rows or limit is not None or type(ids) is not torch.Tensor:
        return False
    session = place.session
    config = session.manager.config
    if (
        session.ranks
        or session.running
        or ids.device != weight.device
        or weight.requires_grad
        and torch.is_grad_enabled()
        or weight._gm_grad is not None
        or weight.dim() != 2
        or not place.has(weight)
        or not place.contiguous
        or not can_wrap(weight.dtype)
        or ids.numel() * (place.size_bytes // max(weight.shape[0], 1)) * SHARE > place.size_bytes
        or place.size_bytes < 2 * config.chunk_bytes
        or place.size_bytes * HOST_SHARE > config.host_bytes
        or internals.transform_level() is not None
        or internals.is_tracing()
        or session.cuda
        and torch.cuda.is_current_stream_capturing()
    ):
        return False
    return not session.arenas.fit_on_device()


def embedding(func: typing.Any, ids: torch.Tensor, weight: typing.Any, *more: typing.Any, **options: typing.Any):
    """Runs torch.nn.functional.embedding() as one operator, with the table on the host.

    Args:
        func: The function; see there for the other arguments.
        ids: The numbers of the rows.
        weight: The table, of which serves() has said yes.
        more: Further arguments.
        options: Further arguments by name.

    Returns:
        The function's result, or None if the host has no room for the table in one piece: nothing was done then.
    """
    place = weight._gm_place
    session = place.session
    access = place.access(abi.READ, abi.TIER_HOST)
    stream = session.holds.stream()
    session.brackets.op_begin(f"{place.name}:rows"[-118:].encode()[:127])
    try:
        with session.holds.acquired(access, 1, stream):
            table = wrap(access.ptr, place.shape, place.dtype, session.device)
            return func(ids, table, *more, **options)
    except GeminiError as error:
        if error.status != "OOM_HOST":
            raise
        place.has_rows = False  # for good, as passes that differ would leave their plan again and again
        return None
