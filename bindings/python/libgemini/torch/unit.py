"""Modules whose parameters come and go as one: for torch.compile, TorchScript, CUDA graphs, and small modules.

To torch.compile a module is one function, and what it traces must be torch's own; what torch.jit made of one runs
without Python. So around each call of a unit all its parameters are acquired in one batch, as one operator, and are
plain nn.Parameters; in the backward pass again, from the first node that the call made until the first one of another
operator.

SPDX-License-Identifier: Apache-2.0
"""
import contextlib
import functools

import torch
from torch import nn

from .. import abi
from ..abi import GeminiError
from . import internals
from .tensors import ManagedParameter, ManagedTensor, Use, grad_nodes, hook_nodes, mark_views, refuse_tracing
from .tensors import run_with, with_managed


def optimized(module):
  """Whether torch.compile() returned it; its hooks are not compiled, what it calls forward is."""
  return isinstance(module, internals.optimized_module())


def compiled_in_place(module):
  """By module.compile(), with its hooks."""
  return hasattr(internals.compiled_call_of(module), "_torchdynamo_orig_callable")


def scripted(module):
  """Whether torch.jit.script() or trace() made it: all of its methods run in C++, and those of the modules within."""
  return isinstance(module, torch.jit.ScriptModule)


def graphed(module):
  """Whether torch.compile() was told to make CUDA graphs of it."""
  of = module if optimized(module) else internals.compiled_call_of(module)
  config = getattr(of, "get_compiler_config", lambda: None)() or {}
  return bool(config.get("triton.cudagraphs"))


@internals.not_traced  # not every torch can trace what raises this
def _refuse_compiling():
  raise GeminiError("torch.compile() came after libgemini.torch.prepare(), or compiles a function that calls the model: "
                    "compile the model's blocks, before prepare()")


def refuse_compiling():
  """The caller must not be part of what torch.compile() compiles."""
  if internals.within_compiled():
    _refuse_compiling()


def find(module):
  """The unit that a module is, or None."""
  call = module.forward if optimized(module) or scripted(module) else internals.compiled_call_of(module)
  return getattr(call, "_gm_unit", None)


class Unit:
  """A module of which everything is on the device while it runs."""

  def __init__(self, session, module, name):
    self.session = session
    tensors = [tensor for tensor in (*module.parameters(), *module.buffers()) if isinstance(tensor, ManagedTensor)]
    self.kinds = [(tensor, type(tensor)) for tensor in tensors]  # parameters, and buffers over some
    self.tensors = [tensor for tensor in tensors if tensor.numel()]
    self.users = 0  # calls that run, a backward pass that has reached one
    self.graphed = False  # within resident(): nothing may be queued beside what is captured
    places = dict.fromkeys(tensor._gm_place for tensor in self.tensors)
    ranges = tuple((place, 0, place.size_bytes, abi.READ) for place in places)
    size = sum(size for _, _, size, _ in ranges)
    limit = session.manager.stats()["budget_bytes"]["device"]
    if size > limit:
      raise GeminiError(f"{name} is compiled, scripted, or a unit, so that its parameters come as one: {size} bytes, "
                        f"of which the device may hold {limit} (device_memory); compile or script its blocks instead")
    self.use = Use(ranges, "unit", self) if ranges else None

  def enter(self):
    self.users += 1
    for tensor, kind in self.kinds:
      tensor.__class__ = nn.Parameter if kind is ManagedParameter else torch.Tensor

  def leave(self):
    self.users -= 1
    if not self.users:
      for tensor, kind in self.kinds:
        tensor.__class__ = kind

  def reset(self):
    """Nobody uses it."""
    self.users = 1
    self.leave()

  def run(self, call, args, kwargs):
    if self.use is None or self.graphed:
      return call(*args, **kwargs)
    refuse_tracing(self.tensors[0]._gm_place.name)
    inputs = set()
    if torch.is_grad_enabled():
      grad_nodes((args, kwargs), inputs)
    out = run_with(self.session, self.use, call, args, kwargs)
    mark_views(out, self.tensors)
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
  call = module.forward if optimized(module) else internals.call_of(module)
  unit = Unit(session, module, name)

  def run(*args, **kwargs):
    return unit.run(call, args, kwargs)

  run._gm_unit = unit
  if optimized(module):
    module.forward = run
  else:
    internals.set_call(module, run)
  return unit


_SCRIPT_METHODS = ("save", "save_to_buffer", "_save_for_lite_interpreter", "_save_to_buffer_for_lite_interpreter",
                   "__deepcopy__")  # which read its parameters, as those do that were scripted


def make_scripted(session, module, name):
  """Each method of a scripted module, and of those within, is called with the parameters there. The modules within are
  units of their own, as methods may be called of them, too; the methods of the outer one do not call theirs."""
  for path, inner in module.named_modules():
    unit = Unit(session, inner, f"{name}.{path}" if path else name)
    for method in (*internals.script_methods(inner), *_SCRIPT_METHODS):
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
  """Of torch.jit: what makes a scripted module of a module. It would read them by itself."""

  @functools.wraps(function)
  def call(module, *args, **kwargs):
    for kind, tensors in ("parameter", module.named_parameters()), ("buffer", module.named_buffers()):
      name = next((name for name, tensor in tensors if isinstance(tensor, ManagedTensor)), None)
      if name is not None:
        raise GeminiError(f"{kind} {name} of a {type(module).__name__} that torch.jit is to script, trace or freeze is "
                          "in a session: do that before libgemini.torch.prepare(), and outside of init()")
    return function(module, *args, **kwargs)

  return call


def _call_script(function, *args, **kwargs):
  """A function that torch.jit made is no torch function either."""
  return with_managed(functools.partial(internals.script_call.original, function), f"torch.jit.{function.name}", args, kwargs)


_REPLACED = {internals.script_module: _refuse_scripting(internals.script_module.original),
             internals.freeze: _refuse_scripting(internals.freeze.original), internals.script_call: _call_script}


def watch_scripting(on):
  """Replaces these functions while there is a session."""
  internals.replace(_REPLACED, on)


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
