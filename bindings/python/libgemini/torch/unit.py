"""Modules whose parameters come and go as one: for torch.compile, TorchScript, CUDA graphs, and small modules.

To torch.compile a module is one function, and what it traces must be torch's own; what torch.jit made of one runs
without Python. So around each call of a unit all its parameters are acquired in one batch, as one operator, and are
plain nn.Parameters; in the backward pass again, from the first node that the call made until the first one of another
operator.

SPDX-License-Identifier: Apache-2.0
"""
import contextlib
import functools
import sys

import torch
from torch import nn

from .. import abi
from ..abi import GeminiError
from .tensors import ManagedParameter, Use, grad_nodes, hook_nodes, mark_views, refuse_tracing, run_with, with_managed


def optimized(module):
  """Whether torch.compile() returned it; its hooks are not compiled, what it calls forward is."""
  dynamo = sys.modules.get("torch._dynamo")  # loaded when it is first used, which takes seconds
  return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def compiled_in_place(module):
  """By module.compile(), with its hooks."""
  return hasattr(module._compiled_call_impl, "_torchdynamo_orig_callable")


def scripted(module):
  """Whether torch.jit.script() or trace() made it: all of its methods run in C++, and those of the modules within."""
  return isinstance(module, torch.jit.ScriptModule)


def graphed(module):
  """Whether torch.compile() was told to make CUDA graphs of it."""
  of = module if optimized(module) else module._compiled_call_impl
  config = getattr(of, "get_compiler_config", lambda: None)() or {}
  return bool(config.get("triton.cudagraphs"))


def _refuse_compiling():
  raise GeminiError("torch.compile() came after libgemini.torch.prepare(), or compiles a function that calls the model: "
                    "compile the model's blocks, before prepare()")


_refuse_compiling._torchdynamo_disable = True  # called, not traced: not every torch can trace what raises this


def refuse_compiling():
  """The caller must not be part of what torch.compile() compiles."""
  if torch._C._dynamo.eval_frame.get_eval_frame_callback() not in (None, False):
    _refuse_compiling()


def find(module):
  """The unit that a module is, or None."""
  call = module.forward if optimized(module) or scripted(module) else module._compiled_call_impl
  return getattr(call, "_gm_unit", None)


class Unit:
  """A module of which everything is on the device while it runs."""

  def __init__(self, session, module, name):
    self.session = session
    self.params = [param for param in module.parameters() if isinstance(param, ManagedParameter) and param.numel()]
    self.users = 0  # calls that run, a backward pass that has reached one
    self.graphed = False  # within resident(): nothing may be queued beside what is captured
    ranges = tuple((param._gm_place, 0, param._gm_place.size_bytes, abi.READ) for param in self.params)
    size = sum(size for _, _, size, _ in ranges)
    limit = session.manager.stats()["budget_bytes"]["device"]
    if size > limit:
      raise GeminiError(f"{name} is compiled, scripted, or a unit, so that its parameters come as one: {size} bytes, "
                        f"of which the device may hold {limit} (device_memory); compile or script its blocks instead")
    self.use = Use(ranges, "unit", self) if ranges else None

  def enter(self):
    self.users += 1
    for param in self.params:
      param.__class__ = nn.Parameter

  def leave(self):
    self.users -= 1
    if not self.users:
      for param in self.params:
        param.__class__ = ManagedParameter

  def reset(self):
    """Nobody uses it."""
    self.users = 1
    self.leave()

  def run(self, call, args, kwargs):
    if self.use is None or self.graphed:
      return call(*args, **kwargs)
    refuse_tracing(self.params[0]._gm_place.name)
    inputs = set()
    if torch.is_grad_enabled():
      grad_nodes((args, kwargs), inputs)
    out = run_with(self.session, self.use, call, args, kwargs)
    mark_views(out, self.params)
    if torch.is_grad_enabled():
      nodes = set()
      grad_nodes((out, args, kwargs), nodes)  # arguments: what was changed in place
      hook_nodes(self.session, self.use, nodes - inputs)
    return out


def make_unit(session, module, name):
  """Wraps what a module's call comes to; for one that torch.compile() made, what its hooks are around."""
  if session.allocator and graphed(module):
    raise GeminiError(f"{name} is compiled to CUDA graphs (mode=\"reduce-overhead\" or \"max-autotune\"), whose memory must "
                      "be torch's own: call libgemini.torch.init(allocator=\"torch\")")
  call = module.forward if optimized(module) else module._compiled_call_impl or module._call_impl
  unit = Unit(session, module, name)

  def run(*args, **kwargs):
    return unit.run(call, args, kwargs)

  run._gm_unit = unit
  if optimized(module):
    module.forward = run
  else:
    module._compiled_call_impl = run
  return unit


_SCRIPT_METHODS = ("save", "save_to_buffer", "_save_for_lite_interpreter", "_save_to_buffer_for_lite_interpreter",
                   "__deepcopy__")  # which read its parameters, as those do that were scripted


def make_scripted(session, module, name):
  """Each method of a scripted module, and of those within, is called with the parameters there. The modules within are
  units of their own, as methods may be called of them, too; the methods of the outer one do not call theirs."""
  for path, inner in module.named_modules():
    unit = Unit(session, inner, f"{name}.{path}" if path else name)
    for method in (*inner._c._method_names(), *_SCRIPT_METHODS):
      call = getattr(inner, method)

      def run(*args, _gm_unit=unit, _gm_call=call, **kwargs):
        return _gm_unit.run(_gm_call, args, kwargs)

      run._gm_unit = unit
      inner.__dict__[method] = run


def make_units(session, module, name=""):
  """Makes each module in a tree that is compiled or scripted a unit, but those within one."""
  if find(module):
    return
  if scripted(module):
    make_scripted(session, module, name or type(module).__name__)
    return
  if optimized(module) or compiled_in_place(module):
    make_unit(session, module, name or type(module).__name__)
    return
  for child, inner in module.named_children():
    make_units(session, inner, f"{name}.{child}" if name else child)


def unit(session, module):
  """See libgemini.torch.unit()."""
  tree, name = next(((model.module, name) for model in session.models for name, inner in model.module.named_modules()
                     if inner is module and name), (None, None))
  if not name:
    raise GeminiError(f"the {type(module).__name__} is no module in the models that were prepared")
  for other, inner in tree.named_modules():
    if find(inner) and inner is not module and (module in inner.modules() or inner in module.modules()):
      raise GeminiError(f"{name} and {other} cannot both be units: one is in the other")
  return find(module) or make_unit(session, module, name)


def _refuse_scripting(function):
  """Of torch.jit: what makes a scripted module of a module. It would read parameters by itself."""

  @functools.wraps(function)
  def call(module, *args, **kwargs):
    name = next((name for name, param in module.named_parameters() if getattr(param, "_gm_record", None)), None)
    if name is not None:
      raise GeminiError(f"parameter {name} of a {type(module).__name__} that torch.jit is to script, trace or freeze is "
                        "in a session: do that before libgemini.torch.prepare(), and outside of init()")
    return function(module, *args, **kwargs)

  return call


_script_call = torch.jit.ScriptFunction.__call__


def _call_script(function, *args, **kwargs):
  """A function that torch.jit made is no torch function either."""
  return with_managed(functools.partial(_script_call, function), f"torch.jit.{function.name}", args, kwargs)


_scripting = [(module, name, getattr(module, name)) for module, name in
              ((torch.jit._recursive, "create_script_module"), (torch.jit, "freeze")) if hasattr(module, name)]


def watch_scripting(on):
  """Replaces these functions while there is a session."""
  for module, name, function in _scripting:
    setattr(module, name, _refuse_scripting(function) if on else function)
  torch.jit.ScriptFunction.__call__ = _call_script if on else _script_call


@contextlib.contextmanager
def resident(session, module):
  """See libgemini.torch.resident()."""
  one = unit(session, module)
  if one.use is None:
    yield
    return
  stream = session.stream()
  session.acquire_use(one.use, stream)
  one.graphed = True
  try:
    with session.allocator.suspended() if session.allocator else contextlib.nullcontext():
      yield
  finally:
    one.graphed = False
    session.release_use(one.use, stream)
