"""Models of transformers train as without libgemini, in less device memory than their parameters and states take.

SPDX-License-Identifier: Apache-2.0
"""
import functools

import pytest
import torch

import libgemini.torch as gm
from conftest import MODELS, batch, far_apart, model_data_bytes, same_bits, tiny, train, values

STEPS = 20
BUDGET = 0.4  # of model data
LR = 1e-3


def loss_of(name, dtype=torch.float32):
  return lambda model, step: model(**batch(name, step, dtype)).loss


@functools.cache
def plain(name, dtype=torch.float32):
  """Losses and final parameters of torch alone."""
  model = tiny(name, dtype)
  optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
  return train(model, optimizer, STEPS, loss_of(name, dtype)), values(model)


def managed(name, dtype=torch.float32):
  """The same in the session that is open."""
  model = tiny(name, dtype)
  model, optimizer = gm.prepare(model, torch.optim.AdamW(model.parameters(), lr=LR))
  return train(model, optimizer, STEPS, loss_of(name, dtype)), values(model)


@functools.cache
def resident(name):
  """The same where everything fits on the device: nothing is offloaded."""
  gm.init(device="cpu", strict=True, window="64KiB", device_memory="64MiB", host_memory="256MiB", placement="cuda")
  try:
    return managed(name)
  finally:
    gm.close()


@pytest.mark.parametrize("placement", ("auto", "cuda", "cpu"))
@pytest.mark.parametrize("name", MODELS)
def test_parity(session, name, placement):
  resident_losses, resident_params = resident(name)
  budget = int(BUDGET * model_data_bytes(tiny(name)))
  session(budget, placement=placement)
  losses, params = managed(name)
  stats = gm.stats()
  assert stats["peak_bytes"]["device"] <= budget
  assert sum(stats["moved_bytes"]["host to device"].values()) > 0
  same_bits(losses, resident_losses)
  same_bits(params, resident_params)
  plain_losses, plain_params = plain(name)
  assert far_apart(params, plain_params) <= 1e-6
  assert far_apart(dict(enumerate(losses)), dict(enumerate(plain_losses))) <= 1e-6
  assert far_apart(plain_params, values(tiny(name))) > LR  # they were trained


def with_masters(name):
  """Torch alone, with parameters of bf16 and an AdamW over masters of fp32."""
  model = tiny(name, torch.bfloat16)
  masters = [param.detach().float() for param in model.parameters()]
  optimizer = torch.optim.AdamW(masters, lr=LR)

  class Step:
    def step(self):
      for master, param in zip(masters, model.parameters()):
        master.grad = None if param.grad is None else param.grad.float()
      optimizer.step()
      with torch.no_grad():
        for master, param in zip(masters, model.parameters()):
          param.copy_(master)

    def zero_grad(self):
      model.zero_grad()

  return train(model, Step(), STEPS, loss_of(name, torch.bfloat16)), values(model)


@pytest.mark.parametrize("name", ("llama", "t5"))
def test_bf16(session, name):
  session(int(BUDGET * model_data_bytes(tiny(name))))  # 16 bytes an element here, too: 2 + 2 + 4 + 4 + 4
  losses, params = managed(name, torch.bfloat16)
  theirs, their_params = with_masters(name)
  for ours, their in zip(losses, theirs):
    assert abs(ours - their) <= 2**-7 * abs(their)  # one step of bf16
  for key, their in their_params.items():
    assert params[key].dtype == their.dtype
    assert (params[key] - their).abs().max() <= 2**-7 * their.abs().max(), key
