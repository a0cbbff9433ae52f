"""Random programs: modules, graphs and training steps drawn by a seed, which give the bits that torch alone gives.

SPDX-License-Identifier: Apache-2.0
"""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import libgemini.torch as gm
from conftest import off_the_device, same_bits, values

SEEDS = range(40)
STEPS = 6
SIZE = 80  # a weight is 25 KiB: some share a chunk of 64 KiB, some span two


class Stop(Exception):
    pass


class Double(torch.autograd.Function):
    """Twice its input, by a kernel that torch functions do not see; in the backward pass of some it raises."""

    @staticmethod
    def forward(ctx, x, weight, stop):
        ctx.stop = stop
        ctx.save_for_backward(weight)
        with torch._C.DisableTorchFunctionSubclass():
            return x * 2 + weight.sum() * 0

    @staticmethod
    def backward(ctx, grad):
        if ctx.stop:
            raise Stop
        (weight,) = ctx.saved_tensors
        with torch._C.DisableTorchFunctionSubclass():
            return grad * 2 + weight[0, 0] * 0, weight * 0.01, None


class Program(nn.Module):
    """Layers, some of which are the same module, or have the same weight, or are frozen; and what is done with them."""

    def __init__(self, seed):
        super().__init__()
        dice = random.Random(seed)
        torch.manual_seed(seed)
        layers = [nn.Linear(SIZE, SIZE, bias=dice.random() < 0.7) for _ in range(dice.randint(3, 6))]
        for layer in layers[1:]:
            if dice.random() < 0.2:
                layer.weight = layers[0].weight
            if dice.random() < 0.2:
                layer.requires_grad_(False)
        layers += dice.sample(layers, 2)
        self.layers = nn.ModuleList(layers)
        self.table = nn.Parameter(torch.randn(3, SIZE, SIZE) / 9)
        self.norm = nn.BatchNorm1d(SIZE)

    def part(self, x, layer, dice):
        """One of the things that are done with a layer."""
        weight, row = layer.weight, dice.randrange(3)
        kind = dice.randrange(16)
        if kind < 3:
            return torch.tanh(layer(x))
        if kind == 3:
            return x + F.linear(x, weight[:, : SIZE // 2].t().contiguous().t().repeat(1, 2)) * 0.1
        if kind == 4:
            return x * self.table[row, 1] + self.table[torch.tensor(row)].mean(0)
        if kind == 5:
            y = x * 2
            y[1:].mul_(weight[row])
            return y
        if kind == 6:
            y = x.clone()
            y[:, dice.randrange(SIZE) :] += self.table[0, 0, 0]
            y[0] = weight.diagonal()
            return y
        if kind == 7:
            return x - (x @ weight.detach()).detach() * 0.1  # a branch that has no gradient
        if kind == 8:
            return checkpoint(lambda x: torch.tanh(layer(x)) + weight[0], x, use_reentrant=False)
        if kind == 9:
            return checkpoint(lambda x: torch.tanh(layer(x)) + weight[0], x, use_reentrant=True)
        if kind == 10:
            return self.norm(layer(x))
        if kind == 11:
            first, second = weight.chunk(2)
            return torch.cat([x @ first.t(), x @ second.t()], 1).sigmoid()
        if kind == 12:
            return torch.einsum("bi,eij->bj", x, self.table) * 0.1
        if kind == 13:
            return Double.apply(x, weight, dice.random() < 0.1)
        if kind == 14:
            if dice.random() < 0.3:
                raise Stop
            return sum(x * one for one in weight[:3])
        return F.scaled_dot_product_attention(x[None], layer(x)[None], self.table[:1, :4])[0]

    def forward(self, x, dice):
        for layer in self.layers:
            x = self.part(x, layer, dice)
        return x


def run(seed, managed):
    """What a program gives: losses, gradients, parameters."""
    dice = random.Random(seed)
    model = Program(seed)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    if managed:
        model, optimizer = gm.prepare(model, optimizer)
    leave = off_the_device if managed else lambda: None
    out = []
    for step in range(STEPS):
        # What step it is decides about chance in the model, whatever happened in those before.
        torch.manual_seed(1000 * seed + step)
        x = torch.randn(4, SIZE).requires_grad_()
        again, inner = dice.random(), random.Random(1000 * seed + step)
        try:
            y = model(x, inner)
            leave()
            loss = y.square().mean()
            loss.backward(retain_graph=again < 0.3)
            if again < 0.3:
                leave()
                y.sum().backward()
            out += [loss.detach(), x.grad]
        except Stop:
            out.append(torch.tensor(step))
        params = [param for param in model.parameters() if param.grad is not None]
        kind = dice.randrange(8)
        if kind == 0 and params:
            out.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        elif kind == 1 and params:
            params[0].grad[1:3] *= 0.5
        elif kind == 2:
            with torch.no_grad():
                model.table[1].mul_(0.5)
                model.layers[0].weight[2:5, ::2] += 0.01
                F.relu(model.table[2], inplace=True)
        elif kind == 3:
            with torch.no_grad():
                model.eval()
                try:
                    out.append(model(x, random.Random(step)).detach())
                except Stop:
                    pass
                model.train()
        elif kind == 4:
            continue  # accumulates
        leave()
        out += [param.grad.clone() for param in params]
        optimizer.step()
        if dice.random() < 0.8:
            optimizer.zero_grad(set_to_none=dice.random() < 0.7)
    return out, values(model)


@pytest.mark.parametrize("seed", SEEDS)
def test_program(session, seed):
    theirs, their_values = run(seed, False)
    session("512KiB", placement=("auto", "cuda", "cpu")[seed % 3])
    ours, our_values = run(seed, True)
    same_bits(ours, theirs)
    same_bits(our_values, their_values)
