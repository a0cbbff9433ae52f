"""Everything outside of libgemini that libgemini replaces: functions, methods and classes of torch and its friends.

No other file assigns to anything of torch's (tests/test_versions.py checks that). This file says what is replaced. The
file that knows by what has a function replacements(), whose result __init__.py gives to install(), or calls during().

    what is replaced                                  while              by what, and why
    ------------------------------------------------  -----------------  -----------------------------------------------
    autograd.Function.apply                           a session is open  tensors.py: parameters are there while it runs
    nn.Parameter.__new__, Tensor._make_subclass       a session is open  tensors.py: over managed bytes stays managed
    Tensor.set_, Tensor.data                          a session is open  tensors.py: a plain tensor over managed bytes
    autograd._make_grads, torch.tensor and its like   a session is open  tensors.py: they read bytes unseen
    autograd._engine_run_backward                     a session is open  passes.py: where a backward pass begins, fails
    serialization._save, _legacy_save                 a session is open  tensors.py: shared bytes are saved once
    torch._functorch's wrapping and unwrapping        a session is open  tensors.py: results of transforms stay managed
    torch.jit's scripting, ScriptFunction.__call__    a session is open  unit.py: they read parameters in C++
    torch.jit.trace, trace_module                     a session is open  unit.py: they keep parameters' addresses
    Tensor.numpy, Tensor.__dlpack__                   a session is open  whole.py: they hand out a view's address
    DistributedDataParallel.__init__                  a session is open  ddp.py: one process needs no reduction
    torch.to_dlpack, safetensors.torch's readers      a session is open  savers.py: they read at a tensor's address
    nn.Module.register_parameter                      a model is built   model.py: each parameter goes in at once
    transformers' PreTrainedModel.from_pretrained     a model is built   model.py: one tensor after another, on the CPU
    torch.batch_norm, torch.native_batch_norm         a unit is running  unit.py: they write statistics without a trace
    torch._dynamo's TensorVariable.method_attr_data   a unit has run     watch_compiler(), below; stays replaced

All of it is tested with the versions of torch that internals.TESTED has: 2.6 to 2.15. tests/run.sh has a lane for the
oldest, for the newest and for one between. Where torch lacks a name, libgemini.torch.init() refuses and says which.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import typing

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from . import internals
from .internals import TESTED as TESTED, Missing, find, module_or_empty


class Replaced:
    """An attribute of a class or a module that libgemini replaces for a time.

    Attributes:
        owner: The class or module.
        name: The attribute's name.
        original: What it is without libgemini, as it is in the class itself: a descriptor, not what that gives.
    """

    def __init__(self, owner: typing.Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.inherited = name not in vars(owner)
        self.original: typing.Any = getattr(owner, name, None) if self.inherited else vars(owner)[name]
        if self.original is None:
            internals.missing.append(f"{owner.__name__}.{name}")

    def replace(self, value: typing.Any) -> None:
        setattr(self.owner, self.name, value)

    def restore(self) -> None:
        if not self.inherited:
            setattr(self.owner, self.name, self.original)
        elif self.name in vars(self.owner):
            delattr(self.owner, self.name)


class Standing:
    """What stands for a function of torch's. It equals that: torch keeps functions in sets that it makes once, at some
    time, such as those of the functions that a torch.device() is for; and it can be pickled."""

    def __init__(self, function: typing.Any, call: typing.Callable[..., typing.Any]) -> None:
        functools.update_wrapper(self, function)
        self._function, self._call = function, call

    def __call__(self, *args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        return self._call(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._function

    def __hash__(self) -> int:
        return hash(self._function)

    def __reduce__(self) -> str:
        return self._function.__name__


# ---- what is replaced
function_apply = Replaced(torch.autograd.Function, "apply")
new_parameter = Replaced(nn.Parameter, "__new__")
set_ = Replaced(torch.Tensor, "set_")
data = Replaced(torch.Tensor, "data")
make_subclass = Replaced(torch.Tensor, "_make_subclass")
make_grads = Replaced(torch.autograd, "_make_grads")  # which backward() and grad() give the gradients of outputs to
run_backward = Replaced(torch.autograd, "_engine_run_backward")  # which these call then
savers = [Replaced(torch.serialization, name) for name in ("_save", "_legacy_save")]  # what torch.save() comes to
# What makes tensors of tensors, and asks no __torch_function__ of these.
makers = [
    Replaced(owner, name)
    for owner, names in (
        (torch, ("tensor", "as_tensor", "asarray")),
        (torch.Tensor, ("__new__", "new", "new_tensor")),
        (torch.autograd.Variable, ("__new__",)),
        (getattr(torch._C, "_nested", types.ModuleType("torch._C._nested")), ("nested_tensor",)),
    )
    for name in names
]
# What makes sparse tensors. They keep the values that they are made of, without a copy.
sparse_makers = [Replaced(torch, f"sparse_{kind}_tensor") for kind in ("coo", "compressed", "csr", "csc", "bsr", "bsc")]
# Of torch.func's transforms: what they wrap their arguments with, and what they take from the results again.
wrap_for_grad = Replaced(module_or_empty("torch._functorch.eager_transforms"), "_wrap_for_grad")
unwrap_for_grad = Replaced(module_or_empty("torch._functorch.eager_transforms"), "_unwrap_for_grad")
add_batch_dim = Replaced(module_or_empty("torch._functorch.vmap"), "_add_batch_dim")
remove_batch_dim = Replaced(module_or_empty("torch._functorch.vmap"), "_remove_batch_dim")
# Of torch.jit: what makes scripted modules of others, and what calls scripted functions.
script_module = Replaced(module_or_empty("torch.jit._recursive"), "create_script_module")
freeze = Replaced(torch.jit, "freeze")
numpy, dlpack = Replaced(torch.Tensor, "numpy"), Replaced(torch.Tensor, "__dlpack__")
tracers = [Replaced(torch.jit, name) for name in ("trace", "trace_module")]
script_call = Replaced(torch.jit.ScriptFunction, "__call__")
# What writes running statistics without an increment of their versions.
batch_norms = [Replaced(torch, name) for name in ("batch_norm", "native_batch_norm")]
ddp_init = Replaced(DistributedDataParallel, "__init__")


# What others may have replaced since they were imported is looked up when it is replaced.
def register_parameter() -> Replaced:
    """nn.Module.register_parameter, which Accelerate replaces, too."""
    return Replaced(nn.Module, "register_parameter")


def to_dlpack() -> list[Replaced]:
    """The functions of that name, which not each version of torch has."""
    return [Replaced(owner, "to_dlpack") for owner in (torch, torch.utils.dlpack) if hasattr(owner, "to_dlpack")]


def readers(module: types.ModuleType, names: typing.Iterable[str]) -> list[Replaced]:
    """Those functions of safetensors.torch that the installed version has."""
    return [Replaced(module, name) for name in names if hasattr(module, name)]


def from_pretrained() -> Replaced | None:
    """transformers' PreTrainedModel.from_pretrained, if transformers was imported."""
    if "transformers" not in sys.modules:
        return None
    from transformers import PreTrainedModel

    return Replaced(PreTrainedModel, "from_pretrained")


# ---- when
_installed: list[Replaced] = []


def install(*tables: typing.Mapping[Replaced, typing.Any]) -> None:
    """Replaces attributes until remove().

    Args:
        *tables: What takes the place of what.
    """
    for table in tables:
        for replaced, ours in table.items():
            replaced.replace(ours)
            _installed.append(replaced)
    _forget_names()


def remove() -> None:
    """Restores what install() has replaced."""
    while _installed:
        _installed.pop().restore()
    _forget_names()


def _forget_names() -> None:
    """Has torch.compile() look up torch's functions again; it keeps those that were there when it was loaded."""
    rules: typing.Any = sys.modules.get("torch._dynamo.trace_rules")
    getattr(rules, "clear_lru_cache", lambda: None)()


def keep_names() -> None:
    """Has torch.compile(), if it is loaded, look up torch's functions now, before one is replaced that it traces."""
    rules: typing.Any = sys.modules.get("torch._dynamo.trace_rules")
    getattr(rules, "get_torch_obj_rule_map", lambda: None)()


@contextlib.contextmanager
def during(replaced: Replaced, ours: typing.Any) -> typing.Iterator[None]:
    """A context within which one attribute is replaced.

    Args:
        replaced: The attribute.
        ours: What it is within.
    """
    replaced.replace(ours)
    try:
        yield
    finally:
        replaced.restore()


# ---- torch.compile
_data_compiled: bool | None = None  # whether a .data was compiled since anybody looks for it


def watch_compiler() -> None:
    """Makes torch.compile() record, from now on, whether it compiles a use of .data.

    A compiled write to .data changes no version and runs no Python. What was compiled before is compiled anew.
    """
    global _data_compiled
    if _data_compiled is not None or not internals.compiler_loaded():
        return
    variable = find(module_or_empty("torch._dynamo.variables.tensor"), "TensorVariable.method_attr_data", [])
    seen = find(module_or_empty("torch._dynamo.convert_frame"), "input_codes.seen", [])
    reset = find(torch, "_C._dynamo.eval_frame.reset_code", [])
    for one in (variable, seen, reset):
        if isinstance(one, Missing):
            one.refuse()

    @functools.wraps(variable)
    def method_attr_data(*args, **kwargs):
        compiles_data()
        return variable(*args, **kwargs)

    tensors: typing.Any = sys.modules["torch._dynamo.variables.tensor"]
    Replaced(tensors.TensorVariable, "method_attr_data").replace(method_attr_data)
    _data_compiled = False
    for code in [reference() for reference in seen]:
        if code is not None:
            reset(code)


def compiles_data() -> None:
    """A .data is being compiled."""
    global _data_compiled
    _data_compiled = True


def data_is_compiled() -> bool:
    """Whether compiled functions may write to a .data."""
    return bool(_data_compiled)
