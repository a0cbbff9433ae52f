"""Optimizers that update each parameter where it lives.

AdamW and Adam run in the C library's workers and kernels, chunk by chunk, overlapping the next forward pass. Any other
torch optimizer runs its own step, one parameter after another, over states that live in arenas.

SPDX-License-Identifier: Apache-2.0
"""
import torch
from torch import nn

from .. import abi
from ..abi import GeminiError
from .tensors import ManagedParameter, managed_view, _plain, _set_grad


class Optimizer(torch.optim.Optimizer):
  """In the place of the torch optimizer it was made from, whose groups it shares; see libgemini.torch.prepare()."""

  def __init__(self, session, inner):
    if isinstance(inner, Optimizer):
      raise GeminiError("this optimizer was prepared before")
    if not isinstance(inner, torch.optim.Optimizer):
      raise TypeError(f"the optimizer is a {type(inner).__name__}: want a torch.optim.Optimizer")
    known = {id(record.param): record for record in session.records}
    self.session = session
    self.inner = inner
    self.records = []
    for number, group in enumerate(inner.param_groups):
      for index, param in enumerate(group["params"]):
        record = known.get(id(param))
        if record is None:
          raise GeminiError(f"parameter {index} of the optimizer's group {number}, of shape {tuple(param.shape)}, is not "
                            "one of the model's: make the optimizer from the model that is prepared")
        self.records.append(record)
    if inner.state:
      raise GeminiError("the optimizer has made steps before: prepare it first, then load its state")
    super().__init__(inner.param_groups, inner.defaults)
    self.param_groups = inner.param_groups  # schedulers change these
    for record in self.records:
      with _plain():
        wanted = record.param.requires_grad
      if wanted:
        record.attach()
    self.rule = fused_rule(inner) or TorchRule(session, inner)
    self.rule.prepare(self.records)

  def zero_grad(self, set_to_none=True):
    for record in self.records:
      record.set_gradient(None)

  def step(self, closure=None):
    loss = None
    if closure is not None:
      with torch.enable_grad():
        loss = closure()
    session = self.session
    with torch.no_grad():
      session.settle()
      session.set_phase(abi.PHASE_UPDATE)
      self.rule.step(self.param_groups)
      session.iteration_end()
    return loss

  def state_dict(self):
    """In torch's layout, with copies of all states on the CPU: as much memory again as the states take. libgemini's
    save() writes them without. Beside torch's names, "master" is the fp32 copy of a parameter of fewer bits."""
    self.session.settle()
    state, groups = {}, []
    for group in self.param_groups:
      first = sum(len(before["params"]) for before in groups)
      groups.append({**group, "params": list(range(first, first + len(group["params"])))})
    for number, record in enumerate(self.records):
      values = {name: value.read() if isinstance(value, Place) else value.detach().cpu().clone()
                if isinstance(value, torch.Tensor) else value for name, value in self.rule.states(record).items()}
      if values:
        state[number] = values
    return {"state": state, "param_groups": groups}

  def load_state_dict(self, state_dict):
    """Takes what state_dict() gave, or that of the torch optimizer: without "master", the parameters are the masters."""
    groups, state = state_dict["param_groups"], state_dict["state"]
    self.check_groups([len(group["params"]) for group in groups])
    layouts, numbers = [], [number for group in groups for number in group["params"]]
    for number, record in zip(numbers, self.records):
      layout = {name: torch.float32 if isinstance(value, torch.Tensor) and value.shape == record.place.shape and
                name != "step" else value for name, value in state.get(number, {}).items()}
      if "master" in record.states:
        layout.setdefault("master", torch.float32)
      self.rule.check(record, layout)
      layouts.append(layout)
    self.session.settle()
    for number, record, layout in zip(numbers, self.records, layouts):
      for name, place in self.rule.renew(record, layout).items():
        place.write(state.get(number, {}).get(name, record.param))
    for group, saved in zip(self.param_groups, groups):
      group.update({key: value for key, value in saved.items() if key != "params"})

  def check_groups(self, counts):
    """counts: parameters in each group that is to be loaded."""
    own = [len(group["params"]) for group in self.param_groups]
    if counts != own:
      raise GeminiError(f"the state to be loaded is of an optimizer with groups of {counts} parameters, this one's are of "
                        f"{own}")


# What a rule tells of its states, and takes back: names are torch's, and "master".
#   states(record): name: the place, or for what does not live in arenas the value.
#   check(record, layout): whether renew() would take the layout, name: the dtype in an arena, or the value.
#   renew(record, layout): makes states of that layout, all zero, and returns the places: name: place.
class TorchRule:
  """The step of any torch optimizer whose states are like their parameters: one parameter at a time, on the device."""

  def __init__(self, session, inner):
    self.session = session
    self.inner = inner
    self.work = {}  # id of a parameter: the one of fp32 that is updated in its place

  def prepare(self, records):
    for record in records:
      if record.trainable and record.place.dtype != torch.float32:
        self.work[id(record.param)] = self.master(record)

  def master(self, record):
    place = record.states["master"] = self.session.counterpart(record.place, "master", torch.float32)
    place.write(record.place.read())
    with _plain():
      param = nn.Parameter(place.tensor.detach())
    param.__class__ = ManagedParameter
    param._gm_place = place
    return param

  def new_state(self, like, dtype):
    return managed_view(self.session.place("state", like.shape, dtype, f"{like._gm_place.name}.state"))

  def step(self, groups):
    inner, session = self.inner, self.session
    session.in_optimizer = self.new_state
    try:
      for group in groups:
        options = {key: value for key, value in group.items() if key != "params"}
        options.update({key: False for key in ("foreach", "fused") if key in options})
        after = options
        for param in group["params"]:
          record = param._gm_record
          if not record.has_grad:
            continue
          after = dict(options)
          self.step_one(record, after)
        group.update({key: value for key, value in after.items() if key not in ("params", "foreach", "fused")})
    finally:
      session.in_optimizer = None
      inner.param_groups = groups

  def step_one(self, record, options):
    work = self.work.get(id(record.param))
    if work is not None:
      gradient = record.gradient().float()  # a tensor of torch's own
      with _plain():
        _set_grad(work, gradient)
    options["params"] = [record.param if work is None else work]
    self.inner.param_groups = [options]
    self.inner.step()
    if work is not None:
      with _plain():
        _set_grad(work, None)
      record.param.copy_(work)


def fused_rule(inner):
  """The C library's rule for an optimizer, or None."""
  return None
