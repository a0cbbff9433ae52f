"""Optimizers that update each parameter where it lives.

AdamW and Adam run in the C library's workers and kernels, chunk by chunk, overlapping the next forward pass. Any other
torch optimizer runs its own step, one parameter after another, over states that live in arenas.

SPDX-License-Identifier: Apache-2.0
"""
import ctypes
import warnings

import torch
from torch import nn

from .. import abi
from ..abi import GeminiError
from .internals import plain as _plain, set_grad as _set_grad
from .layout import dense_stride
from .session import ALIGNMENT, DTYPES, Place
from .tensors import ManagedParameter, ManagedTensor, managed_view

MOST_UNSURE = 16  # backward passes begun while updates did not seem to be done: a GPU may always be one behind


class Optimizer(torch.optim.Optimizer):
  """In the place of the torch optimizer it was made from, whose groups it shares; see libgemini.torch.prepare()."""
  _step_supports_amp_scaling = True  # torch.amp.GradScaler leaves gradients as they are: step() divides them, in fp32

  def __init__(self, session, inner, step_in_backward=False):
    if isinstance(inner, Optimizer):
      raise GeminiError("this optimizer was prepared before")
    if not isinstance(inner, torch.optim.Optimizer):
      raise TypeError(f"the optimizer is a {type(inner).__name__}: want a torch.optim.Optimizer")
    if isinstance(inner, (torch.optim.LBFGS, torch.optim.SparseAdam)):
      raise GeminiError(f"the optimizer is a {type(inner).__name__}: want one that updates each parameter by itself, "
                        "from a dense gradient")
    self.session = session
    self.inner = inner
    self.records = self.find(inner.param_groups)
    if any(float(state.get("step", 1)) for state in inner.state.values()):
      raise GeminiError("the optimizer has made steps before: prepare it first, then load its state")
    initial = {id(param): state for param, state in inner.state.items()}  # Adagrad has one from the beginning
    inner.state.clear()
    super().__init__(inner.param_groups, inner.defaults)
    self.param_groups = inner.param_groups  # schedulers change these
    self.rule = fused_rule(session, inner) or TorchRule(session, inner)
    if step_in_backward and not isinstance(self.rule, AdamwRule):
      raise GeminiError(f"step_in_backward is for torch.optim.AdamW and Adam, without amsgrad or maximize: the optimizer "
                        f"is a {type(inner).__name__}")
    for record in self.records:
      if record.early:
        raise GeminiError(f"parameter {record.name} is updated in the backward pass, by the optimizer that was prepared "
                          "first, and cannot have another one")
      if step_in_backward and record.trainable:
        raise GeminiError("step_in_backward has to be known when the model is prepared: give it to the first prepare()")
    session.settle()
    for record in self.records:  # those of an optimizer before, whose states end
      if record.rule:
        record.rule.let_go(record)
    for record in self.records:
      with _plain():
        wanted = record.param.requires_grad
      if wanted:
        record.early = step_in_backward
        record.attach()
    self.rule.prepare(self.records)
    for record in self.records:
      self.start_from(record, initial.get(id(record.param), {}))
    session.rules.append(self.rule)
    if step_in_backward:
      self.rule.step_in_backward(self.param_groups)
      session.rule_of.update((record, self.rule) for record in self.records if record.early)

  def find(self, groups):
    """The records of the groups' parameters."""
    known, found = {id(record.param): record for record in self.session.records}, []
    for number, group in enumerate(groups):
      for index, param in enumerate(group["params"]):
        if id(param) not in known:
          raise GeminiError(f"parameter {index} of the optimizer's group {number}, of shape {tuple(param.shape)}, is "
                            "not one of the model's: make the optimizer from the model that is prepared")
        found.append(known[id(param)])
    return found

  def start_from(self, record, state):
    """Takes the state that torch's optimizer had made for a parameter."""
    layout = layout_of(record, state)
    if layout and "master" in record.states:
      layout["master"] = torch.float32
    for name, place in self.rule.renew(record, layout).items() if layout else ():
      place.write(record.param if name == "master" else state[name])

  def zero_grad(self, set_to_none=True):
    for record in self.records:
      if set_to_none:
        record.set_gradient(None)
      elif record.has_grad:
        record.gradient().zero_()

  def step(self, closure=None):
    loss = None
    if closure is not None:
      with torch.enable_grad():
        loss = closure()
    session = self.session
    session.refuse_closed("optimizer.step()")
    for model in session.models:
      model.check_call()
    with torch.no_grad():
      session.recover()
      session.settle()
      if not session.called and any(record.has_grad for record in self.records):
        warnings.warn("no call of a prepared model, by model(...) or model.forward(...), has made these gradients: such a step "
                      "is no iteration to libgemini, which plans nothing for it. Prepare the module that is called",
                      stacklevel=3)  # torch wraps this
      session.set_phase(abi.PHASE_UPDATE)
      if sum(len(group["params"]) for group in self.param_groups) != len(self.records):  # add_param_group()
        self.records = self.find(self.param_groups)
      self.rule.prepare(self.records)  # those that are new, or need gradients only since the last step
      for record in self.records:
        if record.rule not in (None, self.rule):
          raise GeminiError(f"parameter {record.name} is another optimizer's, which was prepared later: this one cannot "
                            "make a step any more")
        record.spent = False
      session.renew_masters()
      if self.unscale():
        self.rule.step(self.param_groups)
      session.iteration_end()
    self.inner._opt_called = True  # for a scheduler that was made with it
    return loss

  def unscale(self):
    """With a torch.amp.GradScaler: divides by its scale what it has not. Returns whether there is to be a step."""
    found, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
    if found is not None and found.item():
      return False
    if scale is not None:
      for record in self.records:
        record.scale /= float(scale)
    return True

  def __getstate__(self):
    raise GeminiError("an optimizer in a session can be neither copied nor pickled: its states stay where they are; take "
                      "state_dict(), or libgemini.torch.save()")

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
    """Takes what state_dict() gave, or the torch optimizer's: without "master", the parameters are the masters."""
    groups, state = state_dict["param_groups"], state_dict["state"]
    self.check_groups([len(group["params"]) for group in groups])
    layouts, numbers = [], [number for group in groups for number in group["params"]]
    for number, record in zip(numbers, self.records):
      layout = layout_of(record, state.get(number, {}))
      if "master" in record.states:
        layout.setdefault("master", torch.float32)
      self.rule.check(record, layout)
      layouts.append(layout)
    self.session.settle()
    for number, record, layout in zip(numbers, self.records, layouts):
      for name, place in self.rule.renew(record, layout).items():
        values = state.get(number, {}).get(name)
        place.write(record.place.read() if values is None else values)
    for group, saved in zip(self.param_groups, groups):
      group.update({key: value for key, value in saved.items() if key != "params"})

  def check_groups(self, counts):
    """counts: parameters in each group that is to be loaded."""
    own = [len(group["params"]) for group in self.param_groups]
    if counts != own:
      raise GeminiError(f"the state to be loaded is of an optimizer with groups of {counts} parameters, this one's are "
                        f"of {own}")


def layout_of(record, state):
  """Of a parameter's state in torch's optimizer, what a rule's renew() takes; the step counts updates, whatever its shape."""
  return {name: torch.float32 if isinstance(value, torch.Tensor) and value.shape == record.place.shape and
          name != "step" else value for name, value in state.items()}


def groups_of(groups):
  """The group of each record, by its id."""
  return {id(param._gm_record): group for group in groups for param in group["params"]}


def master_place(session, record):
  """Where a parameter's fp32 copy lives; it may have been an optimizer's before."""
  if "master" not in record.states:
    record.states["master"] = session.counterpart(record.place, "master", torch.float32)
    record.renew_master()
  return record.states["master"]


# What a rule tells of its states, and takes back: names are torch's, and "master".
#   let_go(record): the states end, but for the master copy, and cost nothing any more: another rule is to have it.
#   states(record): name: the place, or for what does not live in arenas the value.
#   check(record, layout): whether renew() would take the layout, name: the dtype in an arena, or the value.
#   renew(record, layout): makes states of that layout, all zero, and returns the places: name: place.
class TorchRule:
  """The step of any torch optimizer whose states are like their parameters: one parameter at a time, on the device."""

  def __init__(self, session, inner):
    self.session = session
    self.inner = inner
    self.work = {}  # id of a parameter: the one of fp32 that is updated in its place

  def forget_done(self):
    """Its steps end before they return."""

  def backward_ends(self):
    """Nothing has waited for that."""

  def prepare(self, records):
    for record in records:
      if record.trainable and record.rule is None:
        record.rule = self
        if record.place.dtype != torch.float32:
          self.work[id(record.param)] = self.master(record)

  def let_go(self, record):
    for name, value in self.states(record).items():
      if isinstance(value, Place) and name != "master":
        value.zero()
    self.inner.state.pop(self.work.pop(id(record.param), record.param), None)
    record.rule = None

  def master(self, record):
    place = master_place(self.session, record)
    with _plain():
      param = nn.Parameter(place.tensor.detach())
    param.__class__ = ManagedParameter
    param._gm_place = place
    return param

  def new_state(self, like, dtype):
    name = f"{like._gm_place.name}.state"
    return managed_view(self.session.place("state", like.shape, dtype, name, dense_stride(like)))

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
      scale, record.scale = record.scale, 1.0
      gradient = record.gradient().float().mul_(scale)  # a tensor of torch's own
      record.scale = scale
      with _plain():
        _set_grad(work, gradient)
    param = record.param if work is None else work
    options["params"] = [param]
    self.inner.param_groups = [options]
    self.inner.step()
    for name, value in self.inner.state.get(param, {}).items():
      if isinstance(value, torch.Tensor) and not isinstance(value, ManagedTensor) and value.dim() and \
          value.shape == param.shape:  # not made like the parameter: SGD's momentum is a copy of the first gradient
        self.inner.state[param][name] = self.new_state(param, value.dtype)
        self.inner.state[param][name].copy_(value)
    if work is not None:
      with _plain():
        _set_grad(work, None)
      record.param.copy_(work)
      record.place.written = False

  def states_of(self, record):
    return self.inner.state.get(self.work.get(id(record.param), record.param), {})

  def states(self, record):
    out = {"master": record.states["master"]} if "master" in record.states else {}
    for name, value in self.states_of(record).items():
      managed = isinstance(value, ManagedTensor) and value._gm_place.has(value)
      out[name] = value._gm_place if managed else value
    return out

  def check(self, record, layout):
    if ("master" in layout) != ("master" in record.states):
      raise GeminiError(f"parameter {record.name}: the state to be loaded has {'a' if 'master' in layout else 'no'} "
                        f"master copy, a parameter of {record.place.dtype} has {'one' if record.states else 'none'}")

  def renew(self, record, layout):
    places = {name: place for name, place in self.states(record).items() if isinstance(place, Place)}
    for place in places.values():
      place.zero()
    param = self.work.get(id(record.param), record.param)
    state = self.inner.state[param] = {}
    out = {}
    for name, value in layout.items():
      if name == "master":
        out[name] = places[name]
      elif isinstance(value, torch.dtype):
        old = places.get(name)
        view = managed_view(old) if old and old.dtype == value else self.new_state(param, value)
        state[name], out[name] = view, view._gm_place
      elif isinstance(value, torch.Tensor):
        state[name] = value.detach().to(self.session.device if value.dim() else value.device, copy=True)
      else:
        state[name] = value
    if not state:
      del self.inner.state[param]
    return out


class AdamwRule:
  """AdamW and Adam, by libgemini_update: each chunk where it lives, late, so that it overlaps the next forward pass.

  States are of fp32, and so is the master copy of a parameter that is not.
  """
  STATES = ("master", "momentum", "variance")
  NAMES = {"master": "master", "exp_avg": "momentum", "exp_avg_sq": "variance"}  # torch's of these

  def __init__(self, session, decoupled):
    self.session = session
    self.decoupled = decoupled
    self.kernels = abi.update_library()
    self.arenas = {}  # arena of parameters: their records, in the order of their places
    self.walks = []  # submitted, not known to be done: (walk, what it borrows)
    self.unsure = 0  # backward passes that began since all were known to be done
    self.group_of = {}
    self.neighbours = {}  # of a record: those that share chunks with it, itself among them
    self.waiting = {}  # records whose gradients are there, in their order

  def prepare(self, records):
    for record in records:
      if not record.trainable or record.rule:
        continue
      record.rule = self
      for kind in ("momentum", "variance"):
        record.states[kind] = self.session.counterpart(record.place, kind, torch.float32)
      if record.place.dtype != torch.float32:
        master_place(self.session, record)
      self.arenas.setdefault(record.place.arena, []).append(record)
    for records in self.arenas.values():
      records.sort(key=lambda record: record.place.offset)

  def let_go(self, record):
    self.arenas[record.place.arena].remove(record)
    record.step = 0
    for kind in ("momentum", "variance"):
      record.states.pop(kind).zero()
    record.rule = None

  def rule(self, record, group):
    beta1, beta2 = map(float, group["betas"])
    dtype = DTYPES[record.place.dtype]
    return (0 if self.decoupled or group.get("decoupled_weight_decay") else abi.ADAMW_L2, dtype, dtype, record.step + 1,
            float(group["lr"]), beta1, beta2, float(group["eps"]), float(group["weight_decay"]), record.scale)

  def step(self, groups):
    group_of = groups_of(groups)
    for arena, records in self.arenas.items():
      self.submit(arena, records, group_of)

  # ---- updates in the backward pass
  def step_in_backward(self, groups):
    """Before the first one: what each parameter's update waits for.

    An update takes chunks away from the device. A chunk that a parameter shares with its neighbours would have to come
    back for these at once, so that they are updated when all of them have their gradients.
    """
    self.group_of = groups_of(groups)
    window = self.session.manager.config.window_bytes
    for records in self.arenas.values():
      lasts = [(record.place.offset + record.place.size_bytes - 1) // window for record in records]
      for i, record in enumerate(records):
        begin = end = i
        while begin and lasts[begin - 1] >= record.place.offset // window:
          begin -= 1
        while end + 1 < len(records) and records[end + 1].place.offset // window <= lasts[i]:
          end += 1
        self.neighbours[record] = records[begin:end + 1]

  def landed(self, record):
    """A gradient is there. What waited for nothing else is updated."""
    self.waiting[record] = None
    record.spent = True
    ready = [other for other in self.neighbours[record]
             if other in self.waiting and all(one.spent for one in self.neighbours[other])]
    self.update_landed(ready)

  def backward_ends(self):
    """Also what shares chunks with parameters that got no gradient is updated."""
    self.update_landed(list(self.waiting))

  def update_landed(self, records):
    """One update for each run of neighbours."""
    records.sort(key=lambda record: (record.place.arena, record.place.offset))
    run = []
    for record in records:
      del self.waiting[record]
      if run and (record.place.arena != run[-1].place.arena or record.place.offset - run[-1].place.offset -
                  run[-1].place.size_bytes >= ALIGNMENT * record.place.dtype.itemsize):
        self.submit(run[0].place.arena, run, self.group_of)
        run = []
      run.append(record)
    if run:
      self.submit(run[0].place.arena, run, self.group_of)
    for record in records:
      record.has_grad = False

  def submit(self, arena, records, group_of):
    """One update of an arena's parameters, from the first that has a gradient to the last."""
    ready = [record for record in records if record.has_grad and record.place.elements and id(record) in group_of]
    if not ready:
      return
    itemsize = ready[0].place.dtype.itemsize
    start = ready[0].place.offset // itemsize
    rules, ranges, at = {}, [(start, abi.UPDATE_SKIP)] if start else [], start
    for record in ready:
      torch.autograd.graph.increment_version(record.param)  # a backward pass that comes too late notices
      rule = rules.setdefault(self.rule(record, group_of[id(record)]), len(rules))
      first = record.place.offset // itemsize
      if first - at >= ALIGNMENT:
        ranges.append((first, abi.UPDATE_SKIP))
      elif first > at:  # the zeros that align it, which stay zeros
        ranges[-1] = first, ranges[-1][1]
      at = first + record.place.elements
      if ranges and ranges[-1][1] == rule:
        ranges[-1] = at, rule
      else:
        ranges.append((at, rule))
    whole = all(rule != abi.UPDATE_SKIP for end, rule in ranges if end > start)
    self.run(arena, ready[0], start, at - start, list(rules), ranges, whole)
    for record in ready:  # now that it has not been refused
      record.step += 1

  def run(self, arena, record, start, count, rules, ranges, whole):
    session = self.session
    param = abi.WRITE if whole else abi.READ_WRITE
    parts = [(arena, param), (record.grad_place.arena, abi.READ)]
    parts += [(record.states[kind].arena, abi.READ_WRITE) for kind in self.STATES if kind in record.states]
    walk = abi.UpdateWalk(rule_count=len(rules), range_count=len(ranges), mgr=session.handle)
    walk.adamws = (abi.Adamw * len(rules))(*(abi.Adamw(**dict(zip(_RULE, rule))) for rule in rules))
    walk.ranges = (abi.UpdateRange * len(ranges))(*ranges)
    walk.stream_native = ctypes.cast(session.lib.stream_native, ctypes.c_void_p).value
    walk.stream_call = ctypes.cast(session.lib.stream_call, ctypes.c_void_p).value
    walk.param_index, walk.grad_index, walk.master_index = 0, 1, 2
    walk.momentum_index, walk.variance_index = 3, 4
    if "master" not in record.states:
      parts[0] = arena, abi.READ_WRITE
      walk.param_index, walk.master_index, walk.momentum_index, walk.variance_index = abi.INDEX_NONE, 0, 2, 3
    update = abi.Update(flags=abi.UPDATE_LATE, arena_count=len(parts), first_element=start, element_count=count,
                        stream=session.stream(), fn=self.kernels.walk,
                        arenas=(ctypes.c_uint64 * len(parts))(*(part[0] for part in parts)),
                        modes=(ctypes.c_uint32 * len(parts))(*(part[1] for part in parts)))
    update.user = ctypes.addressof(walk)
    self.walks.append((walk, update))
    self.kernels.walk_check(update)
    session.lib.update(session.handle, update)

  def forget_done(self):
    """What the updates before have borrowed goes when they are done; what failed in them is raised."""
    if not self.walks:
      return
    for walk, _ in self.walks:
      self.kernels.walk_status(walk)
    self.unsure += 1
    if self.unsure > MOST_UNSURE:
      self.session.lib.update_wait(self.session.handle)
    elif self.session.manager.stats()["pending_updates"]:
      return
    self.walks.clear()
    self.unsure = 0

  def states(self, record):
    out = {name: record.states[kind] for name, kind in self.NAMES.items() if kind in record.states}
    if not record.step:
      return {name: place for name, place in out.items() if name == "master"}
    return {"step": torch.tensor(float(record.step)), **out}

  def check(self, record, layout):
    want = {name for name, kind in self.NAMES.items() if kind in record.states} | {"step"}
    if set(layout) - {"master"} and set(layout) != want or ("master" in layout) != ("master" in record.states):
      raise GeminiError(f"parameter {record.name}: the state to be loaded has {', '.join(layout) or 'nothing'}, want "
                        f"{', '.join(sorted(want))}")
    for name, value in layout.items():
      if name != "step" and value != torch.float32:
        raise GeminiError(f"parameter {record.name}: {name} to be loaded is of "
                          f"{tuple(value.shape) if isinstance(value, torch.Tensor) else value}, want "
                          f"{tuple(record.place.shape)} of torch.float32")

  def renew(self, record, layout):
    record.step = int(layout.get("step", 0))
    for place in record.states.values():
      place.zero()
    return {name: record.states[kind] for name, kind in self.NAMES.items() if name in layout}


_RULE = ("flags", "param_dtype", "grad_dtype", "step", "lr", "beta1", "beta2", "eps", "weight_decay", "grad_scale")


def fused_rule(session, inner):
  """The C library's rule for an optimizer, or None."""
  if type(inner) not in (torch.optim.AdamW, torch.optim.Adam):
    return None
  for group in inner.param_groups:
    if any(group.get(option) for option in ("amsgrad", "maximize", "capturable", "differentiable")):
      return None
  return AdamwRule(session, type(inner) is torch.optim.AdamW)
