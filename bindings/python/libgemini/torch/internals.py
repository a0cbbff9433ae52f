"""Everything undocumented that libgemini uses of torch. patches.py lists what it replaces in torch.

TESTED says which versions of torch libgemini is tested with. tests/run.sh has lanes for the oldest version, the newest
one and one between. A newer torch causes a warning when libgemini.torch is imported. If torch lacks one of the names
below, the import succeeds, and init() raises an error that lists the missing names.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import importlib
import re
import sys
import threading
import types
import typing
import warnings

import torch
from torch import nn

from ..abi import GeminiError

# The oldest and the newest (major, minor). Tests compare pyproject.toml, the docs and tests/torch with it.
TESTED = (2, 6), (2, 15)


def _text(version):
    return ".".join(map(str, version))


TESTED_TEXT = " to ".join(map(_text, TESTED))


def check_version(version):
    """Raises ImportError if a version of torch is older than TESTED, and warns if it is newer."""
    found = re.match(r"(\d+)\.(\d+)", version)
    number = tuple(map(int, found.groups())) if found else TESTED[1]
    if number < TESTED[0]:
        raise ImportError(f"libgemini.torch needs torch {_text(TESTED[0])} or later: this is torch {version}")
    if number > TESTED[1]:
        # The stack level is that of the import of libgemini.torch.
        warnings.warn(
            f"this is torch {version}; libgemini is tested with torch {TESTED_TEXT}. It may not notice all that a "
            f"newer torch does with parameters: compare some losses with torch alone, or install torch "
            f"{_text(TESTED[1])}",
            stacklevel=4,
        )


check_version(torch.__version__)


# ---- names that torch may not have
missing: list[str] = []
missing_cuda: list[str] = []  # names that only a GPU needs


class Missing:
    """Stands for a name that torch does not have. Every use of it raises GeminiError."""

    def __init__(self, name):
        self._name = name

    def refuse(self, *_, **__):
        raise GeminiError(
            f"torch {torch.__version__} has no {self._name}, which libgemini needs: it is tested with torch "
            f"{TESTED_TEXT}"
        )

    __call__ = __enter__ = refuse


def find(owner, path, missing=missing):
    """Looks up an attribute by a dotted path.

    Args:
        owner: The module or class that the path begins at.
        path: Names with dots between them.
        missing: The list that a missing name is added to.

    Returns:
        The attribute; a Missing if torch does not have it.
    """
    value = owner
    for name in path.split("."):
        if not hasattr(value, name):
            missing.append(f"{owner.__name__}.{path}")
            return Missing(missing[-1])
        value = getattr(value, name)
    return value


def module_or_empty(name):
    """Imports a module. Returns an empty module if there is none, so that find() reports its names as missing."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return types.ModuleType(name)  # an empty one, in which find() finds nothing


def check(cuda):
    """Raises GeminiError if torch lacks a name that libgemini needs. cuda: whether names for GPUs are needed, too."""
    names = missing + (missing_cuda if cuda else [])
    if names:
        Missing(", ".join(names)).refuse()


# ---- tensors
plain = find(torch, "_C.DisableTorchFunctionSubclass")  # a context in which no __torch_function__ of tensors is called
no_function = find(torch, "_C._disabled_torch_function_impl")  # a __torch_function__ that torch never calls
as_usual = find(torch, "_C._EnableTorchFunction")  # a context within that one, in which they are
get_grad, set_grad = find(torch, "_C.TensorBase.grad.__get__"), find(torch, "_C.TensorBase.grad.__set__")
parse_to = find(torch, "_C._nn._parse_to")  # of the arguments of Tensor.to(): device, dtype, non_blocking, format
same_kind = find(torch, "_has_compatible_shallow_copy_type")  # which Module.to() asks
foreach_mul, foreach_norm = find(torch, "_foreach_mul_"), find(torch, "_foreach_norm")
foreach_copy, foreach_add = find(torch, "_foreach_copy_"), find(torch, "_foreach_add_")
unscale = find(torch, "_amp_foreach_non_finite_check_and_unscale_")  # torch.amp.GradScaler's
Overload, Overloads = find(torch, "_ops.OpOverload"), find(torch, "_ops.OpOverloadPacket")  # of an operator
StorageWeakRef = find(module_or_empty("torch.multiprocessing.reductions"), "StorageWeakRef")


transform_level = find(torch, "_C._functorch.maybe_current_level")  # how many transforms of torch.func run, or None
_is_wrapped = find(torch, "_C._functorch.is_functorch_wrapped_tensor")
_get_unwrapped = find(torch, "_C._functorch.get_unwrapped")


def unwrapped(tensor):
    """Removes the wrappers of torch.func transforms from a tensor, and returns the tensor that has the bytes."""
    while _is_wrapped(tensor):
        tensor = _get_unwrapped(tensor)
    return tensor


_transform = find(torch, "_C._functorch.peek_interpreter_stack")
_dispatch_modes = find(torch, "_C._len_torch_dispatch_stack")


def is_watched():
    """Whether a torch.func transform or a dispatch mode of the user is active.

    Both may refuse operations that torch itself accepts.
    """
    return _dispatch_modes() > 0 or _transform() is not None


def untyped(storage):
    """The untyped storage of a TypedStorage; any other object unchanged."""
    return storage._untyped_storage if isinstance(storage, torch.TypedStorage) else storage


_use_count = getattr(torch._C, "_storage_Use_Count", None)  # not in each version


def storage_users(storage):
    """The number of references to a storage, or None if this version of torch does not report it."""
    return _use_count and _use_count(storage._cdata)


def tensor_users(tensor):
    """The number of C++ references to a tensor object, or None if this version of torch does not report it."""
    return tensor._use_count() if hasattr(tensor, "_use_count") else None


swap_bytes = find(torch, "_C._swap_tensor_impl")  # of two tensor objects, with what autograd knows of them


def storage_number(tensor):
    """A number that is equal for tensors of one storage, or None for a tensor without storage."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


# ---- autograd
graph_task = find(torch, "_C._current_graph_task_id")  # the number of the backward pass that calls us, or -1
# queue_callback(function): autograd calls the function when the backward pass is over.
after_backward = find(torch, "autograd.Variable._execution_engine.queue_callback")


_engine = find(torch, "autograd.graph._engine_run_backward")  # which backward() and grad() call
# Each node of a graph has the number that the thread which made it had come to. This is the next node's.
next_node_number = find(torch, "_C._autograd._get_sequence_nr")


def node_number(node: torch.autograd.graph.Node) -> int:
    """The number of a node; see next_node_number. Those that put gradients into parameters have one above all."""
    return node._sequence_nr()  # type: ignore[attr-defined]


has_threads = find(torch, "_C._is_multithreading_enabled")  # whether autograd runs functions on GPUs in its own threads


def is_of_autograd() -> bool:
    """Whether the current thread is one that autograd has made."""
    return isinstance(threading.current_thread(), threading._DummyThread)  # Python has no Thread for those


def runs_backward(thread):
    """Whether a thread, given by its number, has called backward() or grad(), and waits for the end."""
    frame = sys._current_frames().get(thread)
    while frame and frame.f_code is not _engine.__code__:
        frame = frame.f_back
    return frame is not None


_preserve_version = find(torch, "autograd._unsafe_preserve_version_counter")


def counter_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without bytes that shares the version counter of a tensor. It does not keep that one's bytes."""
    alias = tensor.detach()
    alias.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias


def counts_for(counter: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a tensor has the version counter of counter_of(), not only the same version.

    Tensors over the same bytes may have counters of their own, such as those of torch.unsafe_chunk().
    """
    before = tensor._version
    if counter._version != before:
        return False
    with _preserve_version(tensor):
        torch.autograd.graph.increment_version(tensor)
        return counter._version != before


find(torch, "autograd.function.BackwardCFunction.apply")
_backward_of_function = {  # what calls the backward pass of a custom function; newer versions have two ways
    function.__code__
    for name in ("apply", "apply_boxed")
    if (function := getattr(torch.autograd.function.BackwardCFunction, name, None))
}


def caller_of_backward() -> typing.Literal["program", "function", "hook"]:
    """Who has called the backward pass of the current thread: a custom function of another pass, a hook of one, or
    neither.

    On a GPU the threads of autograd run functions and hooks, where only the inner pass has a call of the engine.
    """
    frame: types.FrameType | None = sys._getframe()
    passes = 0
    while frame:
        passes += frame.f_code is _engine.__code__
        if passes and frame.f_code in _backward_of_function:
            return "function"
        if passes > 1:
            return "hook"
        frame = frame.f_back
    return "hook" if passes and is_of_autograd() else "program"


def runs_backward_beside(thread):
    """Whether another thread than this one has."""
    return any(other != thread and runs_backward(other) for other in sys._current_frames())


def note_write(tensor):
    """Increments the version of a tensor whose bytes were written without torch.

    A backward pass that still needs the old bytes then raises an error.
    """
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def version(tensor):
    """How often torch has written to a tensor, as far as torch counts; 0 if it does not."""
    return 0 if tensor.is_inference() else tensor._version


# ---- modules and torch.compile
find(nn, "Module._call_impl")
find(nn, "Module._compiled_call_impl")


def call_of(module):
    """The function that module(...) calls."""
    return module._compiled_call_impl or module._call_impl


def compiled_call_of(module):
    """The function that module.compile() or set_call() installed as the call of a module, or None."""
    return module._compiled_call_impl


def set_call(module, call):
    """Installs a function as the call of a module."""
    # Through __dict__, as a module that torch.jit traced sets attributes elsewhere.
    module.__dict__["_compiled_call_impl"] = call


def not_traced(function):
    """A decorator: torch.compile() calls the function instead of tracing it.

    torch.compiler.disable() does the same, but imports the compiler, which takes seconds.
    """
    function._torchdynamo_disable = True
    return function


def compiler_loaded():
    """Whether something may have been compiled. torch imports its compiler when it is first used."""
    return "torch._dynamo" in sys.modules


_disable = find(torch, "_disable_dynamo")


def never_compiled(function):
    """A decorator: torch.compile() compiles neither the function nor what it calls.

    The first call imports the compiler.
    """
    return function if isinstance(_disable, Missing) else _disable(function)


def optimized_module():
    """The class of the modules that torch.compile(module) returns, or () if nothing was compiled so far."""
    return getattr(sys.modules.get("torch._dynamo"), "OptimizedModule", ())


_frame_callback = find(torch, "_C._dynamo.eval_frame.get_eval_frame_callback")


@not_traced
def within_compiled():
    """Whether the caller is being compiled by torch.compile(), or is code that it has compiled."""
    return _frame_callback() not in (None, False)


# ---- torch.jit
is_tracing = find(torch, "_C._is_tracing")


def script_methods(module):
    """The names of a scripted module's methods."""
    return module._c._method_names()


def scripts_data(module):
    """Whether a method of a scripted module reads a `.data` attribute."""
    return any(module._c._get_method(name).inlined_graph.findNode("prim::data") for name in script_methods(module))


def scripts_statistics(module):
    """Whether a method of a scripted module calls a function that may write running statistics that are frozen
    parameters or managed buffers, without an increment of their versions."""
    held = any(
        hasattr(one, "_gm_place") and one.is_floating_point() and not one.requires_grad
        for one in (*module.parameters(), *module.buffers())
    )
    return held and any(
        module._c._get_method(name).inlined_graph.findNode(f"aten::{function}")
        for name in script_methods(module)
        for function in ("batch_norm", "native_batch_norm", "cudnn_batch_norm")
    )


# ---- processes
_get_store = getattr(module_or_empty("torch.distributed.distributed_c10d"), "_get_process_group_store", None)


def store_of(process_group: typing.Any) -> typing.Any:
    """The store of a process group; None if the group has none, as those of MPI, or torch does not tell."""
    return _get_store(process_group) if _get_store else None


# Backends by themselves, without a process group around them, and of their methods allgather, alltoall and
# reduce_scatter with the ending _base, abort and Options; None where torch is built without them.
GlooBackend: typing.Any = getattr(module_or_empty("torch.distributed"), "ProcessGroupGloo", None)
NcclBackend: typing.Any = getattr(module_or_empty("torch.distributed"), "ProcessGroupNCCL", None)


# ---- CUDA
raw_stream = find(torch, "_C._cuda_getCurrentRawStream", missing_cuda)  # (device's number): CUDA's current stream
clear_workspaces = find(torch, "_C._cuda_clearCublasWorkspaces", missing_cuda)
begin_allocating_to = find(torch, "_C._cuda_beginAllocateToPool", missing_cuda)  # (device's number, pool's)
end_allocating_to: typing.Any = getattr(torch._C, "_cuda_endAllocateToPool", None)  # likewise; since torch 2.8
release_pool = find(torch, "_C._cuda_releasePool", missing_cuda)  # likewise
_record: typing.Any = getattr(torch.cuda.memory, "_record_memory_history", None)
_is_recording: typing.Any = getattr(torch._C, "_cuda_isHistoryEnabled", None)
_snapshot: typing.Any = getattr(torch.cuda.memory, "_snapshot", None)


def may_record():
    """Whether torch can record allocations on the GPU, and nobody else has it do so."""
    return bool(_record and _is_recording and _snapshot) and not _is_recording()


def record_allocations(most):
    """Has torch record allocations and frees, the last ones if there are more than so many."""
    _record("all", context=None, stacks="python", max_entries=most)


def allocations(device, most):
    """What was recorded of a device.

    Returns:
        For each event whether it is an allocation or a free, the address, and bytes; nothing if there were too many.
    """
    kinds = {"alloc": True, "free_completed": False}
    traces = _snapshot()["device_traces"]
    events = traces[device] if device < len(traces) else []
    if len(events) >= most:
        return []
    return [(kinds[one["action"]], one["addr"], one["size"]) for one in events if one["action"] in kinds]


def end_recording():
    """Ends what record_allocations() began."""
    _record(None)
