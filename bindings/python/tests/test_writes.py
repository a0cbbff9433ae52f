"""Who writes to parameters, and how: what was written stays, and what was not is as it was.

The reference is torch alone, to the bit. What leaves the device becomes NaN there, so that no test passes by chance.
SPDX-License-Identifier: Apache-2.0
"""
import pytest
import torch
from torch import nn

import libgemini.torch as gm
from conftest import off_the_device, overwrite_the_device, same_bits

SIZE = 200


def layer(session, dtype=torch.float32):
  """A prepared layer whose weight has more than a chunk, a gradient, and its optimizer."""
  torch.manual_seed(0)
  session("1MiB", strict=False)
  model = nn.Linear(512, SIZE, bias=False).to(dtype)
  model, optimizer = gm.prepare(model, torch.optim.AdamW(model.parameters(), 0.1))
  model(torch.ones(1, 512, dtype=dtype)).sum().backward()
  return model, optimizer


def from_the_host():
  return sum(gm.stats()["moved_bytes"]["host to device"].values())


# ---- N2: what torch refuses changes nothing
REFUSED = {
    "copy_ of another shape": lambda w: w.copy_(torch.ones(3, 5, 7)),
    "copy_ of another layout": lambda w: w.copy_(torch.ones_like(w).to_sparse()),
    "copy_ of no bytes": lambda w: w.copy_(torch.ones(w.shape, device="meta")),
    "copy_ of no tensor": lambda w: w.copy_("no"),
    "fill_ with a vector": lambda w: w.fill_(torch.ones(3)),
    "fill_ with too much": lambda w: w.fill_(1e39),
    "uniform_ of an empty range": lambda w: w.uniform_(2, 1),
    "uniform_ of too wide a range": lambda w: w.uniform_(-3e38, 3e38),
    "normal_ of less than nothing": lambda w: w.normal_(0, -1),
    "normal_ of less than nothing, by name": lambda w: w.normal_(std=-1, mean=2),
    "exponential_": lambda w: w.exponential_(-1),
    "bernoulli_": lambda w: w.bernoulli_(2.0),
    "nn.init.normal_": lambda w: nn.init.normal_(w, 0, -1),
    "nn.init.uniform_": lambda w: nn.init.uniform_(w, 2, 1),
    "copy_ within vmap": lambda w: torch.vmap(lambda one: w.copy_(one.expand(w.shape)))(torch.ones(3)),
    "normal_ within vmap": lambda w: torch.vmap(lambda one: one + w.normal_()[0, 0])(torch.ones(3)),
}


@pytest.mark.parametrize("what", ("parameter", "gradient", "scaled gradient"))
@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED)
def test_n2_what_is_refused_changes_nothing(session, what, refused):
  model, _ = layer(session)
  target = model.weight if what == "parameter" else model.weight.grad
  wanted = target.detach().clone()
  if what == "scaled gradient":
    target.mul_(0.5)
    wanted.mul_(0.5)
  overwrite_the_device()
  with torch.no_grad(), pytest.raises((RuntimeError, TypeError, NotImplementedError)):
    refused(target)
  assert torch.equal(target, wanted)


@pytest.mark.parametrize("refused", (lambda w: w.zero_(), lambda w: w.normal_(), lambda w: w.copy_(torch.ones_like(w)),
                                     lambda w: w[:].zero_(), lambda w: w.add_(1)))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_n2_a_leaf_that_requires_a_gradient(session, dtype, refused):
  """Outside of no_grad(). Parameters of 16 bits are made of fp32 copies, which stay as they are, too."""
  model, optimizer = layer(session, dtype)
  optimizer.step()
  wanted = model.weight.detach().clone()
  masters = [place.read() for record in optimizer.records for kind, place in record.states.items() if kind == "master"]
  assert len(masters) == (dtype == torch.bfloat16)
  overwrite_the_device()
  with pytest.raises(RuntimeError, match="requires grad"):
    refused(model.weight)
  assert torch.equal(model.weight, wanted)
  gm.session().renew_masters()
  for master in masters:
    same_bits([place.read() for record in optimizer.records for kind, place in record.states.items() if kind == "master"],
              [master])


def test_n2_what_a_failed_function_has_written_stays(session):
  """As torch's index_put_() does on a CPU, one index after another. It is in the fp32 copy, too."""
  model, optimizer = layer(session, torch.bfloat16)
  optimizer.step()
  weight = model.weight

  class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
      tensor[0] = 7
      raise ValueError("half")

  with torch.no_grad(), pytest.raises(ValueError):
    Half.apply(weight)
  overwrite_the_device()
  assert (weight[0] == 7).all()
  gm.session().renew_masters()
  assert (optimizer.records[0].states["master"].read()[0] == 7).all()


def test_n2_what_is_overwritten_does_not_come(session):
  """Where torch takes the call, the old bytes are not brought."""
  model, _ = layer(session)
  source = torch.ones(SIZE, 512)
  for overwrite in (lambda w: w.zero_(), lambda w: w.fill_(2), lambda w: w.copy_(source), lambda w: w.normal_(0.0, 0.1),
                    lambda w: w.normal_(mean=0.0, std=0.1), lambda w: w.uniform_(-1, 1),
                    lambda w: w.copy_(source.bfloat16()), nn.init.normal_, nn.init.uniform_):
    off_the_device()
    before = from_the_host()
    with torch.no_grad():
      overwrite(model.weight)
    assert from_the_host() - before < SIZE * 512, "all but chunks that it has in part"


# ---- N3: who overwrites a parameter with itself
def test_n3_a_parameter_overwritten_with_itself(session):
  model, _ = layer(session)
  weight, first = model.weight, model.weight[0, 0].item()
  wanted = weight.detach().clone()
  for overwrite in (lambda: model.load_state_dict(model.state_dict()), lambda: weight.copy_(weight),
                    lambda: weight.copy_(weight.detach()), lambda: weight.data.copy_(weight.data),
                    lambda: torch._foreach_copy_([weight], [weight]), lambda: weight.view(-1).copy_(weight.view(-1)),
                    lambda: weight.grad.copy_(weight.grad)):
    overwrite_the_device()
    with torch.no_grad():
      overwrite()
    assert torch.equal(weight, wanted) and (weight.grad == 1).all()
  overwrite_the_device()
  with torch.no_grad():
    weight.fill_(weight[0, 0])
  assert (weight == first).all()


def test_n3_as_many_elements_as_lie_between_its_first_and_its_last(session):
  """But not those: the others keep their values."""
  model, _ = layer(session)
  wanted = model.weight.detach().clone()
  for weight in wanted, model.weight.detach():
    overwrite_the_device()
    weight.as_strided((25600, 2), (0, 51199)).zero_()
  assert torch.equal(model.weight, wanted)


# ---- N12: parameters made in inference mode
def test_n12_a_parameter_made_in_inference_mode_is_written(session):
  """By a function whose name does not tell. Torch counts no versions of such a tensor."""
  with torch.inference_mode():
    torch.manual_seed(0)
    plain, table = nn.Linear(512, SIZE, bias=False), nn.Embedding(SIZE, 512, max_norm=1.0)
    wanted = torch.relu(plain.weight), table(torch.arange(SIZE)).clone()
    torch.manual_seed(0)
    session("1MiB", strict=False)
    model = gm.prepare(nn.ModuleList((nn.Linear(512, SIZE, bias=False), nn.Embedding(SIZE, 512, max_norm=1.0))))
    overwrite_the_device()
    nn.functional.relu(model[0].weight, inplace=True)
    model[1](torch.arange(SIZE))
    overwrite_the_device()
    same_bits([model[0].weight.clone(), model[1].weight.clone()], wanted)


# ---- N13: views that torch lets nobody write any more
@pytest.mark.parametrize("split", (lambda w: w.chunk(2)[1], lambda w: w.split(7)[2], lambda w: w.unbind()[3],
                                   lambda w: w[:, ::2].chunk(2, 1)[0]))
@pytest.mark.parametrize("grad", (True, False))
def test_n13_a_kept_view_of_what_has_changed(session, grad, split):
  """Torch makes no node for it any more, but gives its values."""
  model, optimizer = layer(session)
  with torch.set_grad_enabled(grad):
    view = split(model.weight)
  optimizer.step()
  overwrite_the_device()
  with torch.no_grad():
    model.weight.add_(1)
    wanted = split(model.weight.detach().clone())
  overwrite_the_device()
  assert torch.equal(view.cpu(), wanted) and torch.equal(view.detach().clone(), wanted)
  with pytest.raises(RuntimeError, match="view"):  # as torch says
    view.double()
