"""Experts of a mixture, which a router chooses anew for each token.

A function that reads the weights of one expert is an operator *chosen at run time*: no plan knows it, so tokens whose
routers choose differently follow one plan, which is made of what all of them read, and the experts are a cache in the
memory that the plan leaves (gemini/chosen.h). Experts are known by the names that transformers and others give them:
what lies below a module named "experts". A function that reads a whole stack of experts reads all of them in each
pass, so it is none of these.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import itertools
import typing

import torch
from torch import nn

from .. import abi
from ..abi import GeminiError

if typing.TYPE_CHECKING:
    from .arenas import Place
    from .session import Session

NAME = "experts"  # of the module that has them; shared experts, which all tokens use, have other names


def chosen_below(name: str, size_bytes: int) -> int:
    """How much of a tensor functions read that were chosen at run time: less than this many bytes.

    Args:
        name: The tensor's name in the model.
        size_bytes: Its size.

    Returns:
        0 for a tensor of no expert. Of one expert, as in "experts.3.w1.weight", all reads are chosen. Of a tensor that
        all experts share, as "experts.gate_up_proj" with a first dimension of experts, those of a part are.
    """
    parts = name.split(".")[:-1]
    if NAME not in parts:
        return 0
    last = len(parts) - 1 - parts[::-1].index(NAME)
    return size_bytes + 1 if parts[last + 1 : last + 2] and parts[last + 1].isdigit() else size_bytes


def mark(module: nn.Module) -> None:
    """Has functions that read an expert of a model for inference be operators chosen at run time.

    Args:
        module: The model, whose parameters are in a session.
    """
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        place: Place | None = getattr(tensor, "_gm_place", None)
        if place is not None:
            place.chosen_below = chosen_below(name, place.size_bytes)


def hint(session: Session, tensors: typing.Sequence[torch.Tensor]) -> None:
    """Has weights come to the device ahead of their use; see libgemini.torch.hint().

    Args:
        session: The session.
        tensors: Weights in it, or parts of them.

    Raises:
        GeminiError: One of the tensors is not in the session.
    """
    tensors = [tensor for tensor in tensors if tensor.numel()]
    accesses = (abi.Access * len(tensors))()
    for number, tensor in enumerate(tensors):
        place: Place | None = getattr(tensor, "_gm_place", None)
        if place is None or place.session is not session:
            raise GeminiError(
                f"hint(): tensor {number} of {len(tensors)} is not in the session: give parameters of a prepared "
                "model, or views of them",
                "INVALID",
            )
        offset = tensor.data_ptr() - place.address
        elements = 1 + sum((count - 1) * step for count, step in zip(tensor.shape, tensor.stride()))
        accesses[number] = place.access(abi.READ, offset=offset, size_bytes=elements * tensor.dtype.itemsize)
    session.lib.hint(session.handle, accesses, len(tensors))
