"""Tensors over the bytes of others: parameters made of parameters, buffers and kept views of them, copies of both.

The reference is torch alone: the same values, and the same bits after training. What torch would share and a session cannot
is refused.
SPDX-License-Identifier: Apache-2.0
"""
import copy
import inspect
import pickle

import numpy
import pytest
import torch
from torch import nn

import libgemini.torch as gm
from conftest import alike, off_the_device

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


@pytest.mark.parametrize("take", (lambda weight: weight.detach().numpy(), lambda weight: weight.data[1:].numpy(),
                                  lambda weight: numpy.asarray(weight.detach()), lambda weight: weight.grad.numpy(),
                                  lambda weight: weight.detach().cpu().numpy()))
def test_p7_what_numpy_gets_cannot_be_written(session, take):
  """It is a copy: a write would be lost."""
  session()
  model = gm.prepare(nn.Linear(SIZE, SIZE))
  square(model, 0).backward()
  array = take(model.weight)
  with pytest.raises(ValueError, match="read-only"):
    array[:] = 1
  numpy.array(model.weight.detach())[:] = 1  # that is one's own


def test_p7_a_copy_cannot_be_forbidden(session):
  session()
  weight = gm.prepare(nn.Linear(SIZE, SIZE)).weight.detach()
  if "copy" not in inspect.signature(torch.Tensor.__dlpack__).parameters:
    pytest.skip("this torch's __dlpack__() has no such argument")
  with pytest.raises(gm.GeminiError, match=r"weight: __dlpack__\(copy=False\): only a copy of it can leave torch"):
    weight.__dlpack__(copy=False)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_p7_storages_tell_where_they_are_but_no_bytes(session):
  session()
  model = gm.prepare(nn.Linear(SIZE, SIZE))
  off_the_device()
  for take in (lambda tensor: tensor.untyped_storage(), lambda tensor: tensor.detach()[3:].untyped_storage()):
    storage = take(model.weight)
    assert storage.data_ptr() == model.weight.data_ptr() and storage.nbytes() == 4 * SIZE * SIZE == len(storage)
    assert storage.device == model.weight.device
    for use in (lambda: storage.tolist(), lambda: storage[0], lambda: bytes(storage), lambda: storage.clone(),
                lambda: storage.cpu(), lambda: list(storage), lambda: storage.copy_(storage), lambda: copy.deepcopy(storage),
                lambda: pickle.dumps(storage), lambda: storage.__setitem__(0, 1), lambda: storage.resize_(3)):
      with pytest.raises(gm.GeminiError, match=r"weight: the bytes of its storage may be elsewhere.* clone\(\)"):
        use()
    with pytest.raises(gm.GeminiError, match="the bytes of its storage"):
      torch.empty(0).set_(storage)
    assert storage is take(model.weight)  # as it is of any tensor
  typed = model.weight.storage()
  assert typed.data_ptr() == model.weight.data_ptr()
  for use in (typed.tolist, lambda: typed[0], typed.clone):
    with pytest.raises(gm.GeminiError, match="the bytes of its storage"):
      use()
  assert model.weight.detach().clone().untyped_storage().tolist()
