"""A mixture of experts of which each process has some, as expert parallelism has it: a DTensor for each matrix.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import typing

import torch
import torch.distributed
from torch import nn

EXPERTS = 4


class Exchanged(torch.autograd.Function):
    """Sends a slice of the first dimension to each process of a group, and back what gradients these have."""

    @staticmethod
    def forward(ctx: typing.Any, values: torch.Tensor, group: typing.Any) -> torch.Tensor:
        ctx.group = group
        out = torch.empty_like(values, memory_format=torch.contiguous_format)
        torch.distributed.all_to_all_single(out, values.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: typing.Any, *gradients: torch.Tensor) -> typing.Any:
        return Exchanged.apply(gradients[0], ctx.group), None


class Experts(nn.Module):
    """Matrices, of which a router chooses one for each token. Processes of a mesh send tokens to that with the expert.

    Attributes:
        up: Of all experts; with a mesh a DTensor, divided along the first dimension.
        down: Likewise.
    """

    def __init__(self, width: int, mesh: typing.Any = None) -> None:
        super().__init__()
        self.router = nn.Linear(width, EXPERTS)
        self.mesh = mesh
        up, down = torch.randn(EXPERTS, width, 2 * width) * 0.1, torch.randn(EXPERTS, 2 * width, width) * 0.1
        if mesh is not None:
            from torch.distributed.tensor import Shard, distribute_tensor

            up, down = (distribute_tensor(one, mesh, [Shard(0)]) for one in (up, down))
        self.up, self.down = nn.Parameter(up), nn.Parameter(down)
        self.counts: list[list[int]] = []  # tokens of each expert, of this process, in each pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        weights = self.router(tokens).softmax(-1)
        chosen = weights.argmax(-1)
        self.counts.append(torch.bincount(chosen, minlength=EXPERTS).tolist())
        mine = nn.functional.one_hot(chosen, EXPERTS).to(tokens.dtype)
        sent = mine.T[:, :, None] * tokens  # for each expert, zeros where a token has another one
        group = None if self.mesh is None else self.mesh.get_group()
        up, down = (one.to_local() if group is not None else one for one in (self.up, self.down))
        parts = EXPERTS // len(up)
        if group is not None:  # a process gets, of all of them, the tokens of its experts
            sent = Exchanged.apply(sent, group).view(parts, len(up), *tokens.shape).transpose(0, 1).flatten(1, 2)
        out = torch.tanh(sent @ up) @ down
        if group is not None:
            out = out.view(len(up), parts, *tokens.shape).transpose(0, 1).flatten(0, 1)
            out = Exchanged.apply(out, group)
        out = (out * mine.T[:, :, None]).sum(0) * weights.gather(1, chosen[:, None])
        return out.view(x.shape)


class Mixture(nn.Module):
    """An embedding, layers of experts, and a head.

    Attributes:
        layers: Of Experts.
    """

    def __init__(self, vocabulary: int, width: int, mesh: typing.Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Experts(width, mesh) for _ in range(2))
        self.last = nn.Linear(width, vocabulary)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.tokens(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return {
            "loss": nn.functional.cross_entropy(self.last(x * (1 + self.scale / 100)).flatten(0, 1), labels.flatten())
        }
