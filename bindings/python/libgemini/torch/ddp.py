"""DistributedDataParallel around a model in a session, which torchrun's scripts and trainers make even of one process.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import typing

import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..abi import GeminiError
from . import patches
from .tensors import ManagedParameter


class OneProcess(DistributedDataParallel):
    """Of one process: there is nothing to broadcast or to reduce, which torch would do by pointers."""

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def no_sync(self):
        return contextlib.nullcontext()


def _make(self, module, *args, **kwargs):
    if not any(isinstance(param, ManagedParameter) for param in module.parameters()):
        return patches.ddp_init.original(self, module, *args, **kwargs)
    count = torch.distributed.get_world_size(kwargs.get("process_group"))
    if count != 1:
        raise GeminiError(
            f"DistributedDataParallel of {count} processes around a prepared model: a session is of one GPU and "
            "one process"
        )
    nn.Module.__init__(self)
    self.module = module
    self.__class__ = OneProcess


def replacements() -> dict[patches.Replaced, typing.Any]:
    """See patches.py: DistributedDataParallel knows of sessions while there is one."""
    return {patches.ddp_init: _make}
