"""Tensors over the bytes of others: parameters made of parameters, buffers and kept views of them, copies of both.

The reference is torch alone: the same values, and the same bits after training. What torch would share and a session cannot
is refused.
SPDX-License-Identifier: Apache-2.0
"""

import torch
from torch import nn

from conftest import alike

SIZE = 96


def data(step=0, rows=5):
  return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(step))


def square(model, step):
  return model(data(step)).square().mean()


# ---- P7: what others have of a parameter or a gradient
def test_p7_a_gradient_is_scaled_with_what_a_factor_is_now(session):
  """Powers of 2: scaling is put off, which rounds once."""
  def run(model, optimizer):
    square(model, 0).backward()
    factor = torch.tensor(0.5)
    for change in (lambda: None, lambda: factor.data.fill_(4), lambda: factor.detach().numpy().fill(0.25),
                   lambda: factor.mul_(2)):
      change()
      model.weight.grad.mul_(factor)
      torch._foreach_mul_([model.weight.grad, model.bias.grad], factor)
    optimizer.step()
    return [model.weight.grad.clone(), model.bias.grad.clone()]

  alike(session, lambda: nn.Linear(SIZE, SIZE), run)
