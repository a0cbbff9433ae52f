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


class Through(DistributedDataParallel):
    """DDP that leaves all to the session: nothing is broadcast or reduced here, for which torch would keep pointers to
    the parameters. no_sync() needs nothing: gradients add up over backward passes, whenever ranks add theirs.
    """

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def no_sync(self):
        return contextlib.nullcontext()

    def join(self, *args, **kwargs):
        raise GeminiError("in the place of `with model.join():` iterate over libgemini.torch.join(batches)")


def _make(self, module, *args, **kwargs):
    if not any(isinstance(param, ManagedParameter) for param in module.parameters()):
        return patches.ddp_init.original(self, module, *args, **kwargs)
    count = torch.distributed.get_world_size(kwargs.get("process_group"))
    sessions = {param._gm_place.session for param in module.parameters() if isinstance(param, ManagedParameter)}
    ranks = max(one.ranks.count if one.ranks else 1 for one in sessions)
    if count != ranks:
        raise GeminiError(
            f"DistributedDataParallel of {count} processes around a model whose session has {ranks}: call "
            "libgemini.torch.init() after torch.distributed.init_process_group()"
        )
    nn.Module.__init__(self)
    self.module = module
    self.__class__ = Through


def replacements() -> dict[patches.Replaced, typing.Any]:
    """See patches.py: DistributedDataParallel knows of sessions while there is one."""
    return {patches.ddp_init: _make}
