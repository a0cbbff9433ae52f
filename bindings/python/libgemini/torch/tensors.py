"""Tensors whose bytes are in libgemini's arenas: parameters and views of them.

Every torch function that is called with such a tensor comes to __torch_function__, which acquires the bytes that the
function reads or writes, queues the function, and releases the bytes. So a parameter can be used anywhere: in several
modules, several times, under any control flow. No function reads bytes that are elsewhere. If the result needs a
gradient, the bytes are acquired again when the backward pass reaches the first node of the function
(Backward.operator()).

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import functools
import io
import math
import typing
import weakref
from multiprocessing.reduction import ForkingPickler

import torch
import torch.nn.functional as F
from torch import nn

from .. import abi
from ..abi import GeminiError
from . import internals, narrow, patches, rows
from .internals import plain as _plain
from .layout import is_dense

if typing.TYPE_CHECKING:
    from .arenas import Place
    from .blocks import Block
    from .division import Division
    from .model import Model, Record
    from .unit import Unit

_Tensor: typing.Any = torch.Tensor  # type checkers do not know its descriptors
units: list[Unit] = []  # the units that are in use now
blocks: list[Block] = []  # the repeated blocks that run now, one within the other
weights_only_models: weakref.WeakSet[Model] = weakref.WeakSet()  # those of libgemini.torch.infer()


class Use:
    """What a function reads and writes in arenas, as the library takes it.

    It is made once for each function and ranges.
    """

    __slots__ = ("accesses", "pointer", "count", "forward_name", "backward_name", "unit", "chosen")

    def __init__(self, ranges, name, unit=None):
        """
        Args:
            ranges: For each tensor its place, an offset and a size in bytes, and abi.READ, WRITE or both.
            name: The name of the function.
            unit: The unit whose parameters they are, or None; see unit.py.
        """
        self.unit = unit
        # Whether it is chosen at run time; see experts.py.
        self.chosen = all(mode == abi.READ and size < place.chosen_below for place, _, size, mode in ranges)
        first = ranges[0][0].name
        self.count = len(ranges)
        self.accesses = (abi.Access * self.count)(
            *(place.access(mode, offset=offset, size_bytes=size) for place, offset, size, mode in ranges)
        )
        self.pointer = ctypes.cast(self.accesses, ctypes.c_void_p)
        name = f"{first}:{name}"[-118:]
        self.forward_name = name.encode()[:127]
        self.backward_name = (name + ".backward").encode()[:127]


def _where(tensor):
    """The place of a tensor that has elements; the offset there, and the length, of all its elements in bytes."""
    place = tensor._gm_place
    try:
        at = tensor.data_ptr()
    except RuntimeError:  # a torch.func transform has wrapped it
        tensor = internals.unwrapped(tensor)
        at = tensor.data_ptr()
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
    offset, size = at - place.address, (last + 1) * tensor.dtype.itemsize
    if offset < 0 or offset + size > place.size_bytes:
        raise GeminiError(f"{place.name} was moved behind libgemini's back: its address is no longer its own")
    return place, offset, size


def _range(tensor):
    """The place of a tensor that has elements; the offset there, and the length, in bytes, of what is acquired."""
    place, offset, size = _where(tensor)
    return place, *place.spread(offset, size)


def _collect(values, found):
    """Appends the managed tensors in nested lists, tuples and dicts to a list, each once."""
    for value in values:
        if isinstance(value, ManagedTensor):
            if value._gm_place is not None and not any(value is other for other in found):
                found.append(value)
        elif isinstance(value, (list, tuple)):
            _collect(value, found)
        elif isinstance(value, dict):
            _collect(value.values(), found)


def _changes_first(name):
    """Whether a function of this name writes its first argument. torch's in-place functions end with one underscore."""
    return (
        name == "__setitem__"
        or (name.endswith("_") and not name.endswith("__"))
        or (name.startswith("__i") and name in _INPLACE)
    )


_INPLACE = {
    "__iadd__",
    "__isub__",
    "__imul__",
    "__itruediv__",
    "__ifloordiv__",
    "__imod__",
    "__ipow__",
    "__iand__",
    "__ior__",
    "__ixor__",
    "__ilshift__",
    "__irshift__",
    "__idiv__",
}


def mark_views(out: typing.Any, tensors: typing.Iterable[ManagedTensor]) -> typing.Any:
    """Makes a result managed if it shares memory with one of the arguments.

    Args:
        out: What a function returned: a tensor, or nested lists, tuples and dicts.
        tensors: The managed tensors among its arguments.

    Returns:
        The result, with a ManagedNumber in the place of each view that may be used as a number.
    """
    if isinstance(out, _Tensor):
        if type(out) is not _Tensor and not isinstance(out, ManagedTensor) and hasattr(out, "__tensor_flatten__"):
            # A tensor that consists of others, such as a nested tensor.
            for part in out.__tensor_flatten__()[0]:
                mark_views(getattr(out, part), tensors)
                if isinstance(getattr(out, part), ManagedTensor):
                    _refuse_class(getattr(out, part), type(out))
            return out
        if not isinstance(out, ManagedTensor) and out.numel():
            inner = out
            try:
                at = out.data_ptr()
            except RuntimeError:
                inner = internals.unwrapped(out)  # the tensor that a torch.func transform has wrapped
                if inner is out:
                    return out
                at = inner.data_ptr()
            for tensor in tensors:
                place = tensor._gm_place
                if place.address <= at < place.address + place.size_bytes:
                    if inner is out and not out.dim() and not out.requires_grad:
                        out = number_over(out)
                    else:
                        out.__class__ = ManagedTensor
                    out._gm_place = place
                    out._gm_grad = tensor._gm_grad
                    out._gm_generation = tensor._gm_generation
                    break
    elif isinstance(out, (list, tuple)):
        marked = [mark_views(one, tensors) for one in out]
        if any(one is not old for one, old in zip(marked, out)):
            return type(out)(*marked) if hasattr(out, "_fields") else type(out)(marked)
    return out


_WITHOUT_NODES = {type(None), bool, int, float, str}


def grad_nodes(value, nodes):
    """Adds the autograd nodes that made the tensors in a value to a set."""
    if type(value) in _WITHOUT_NODES:
        return
    if isinstance(value, _Tensor):
        try:
            node = value.grad_fn
        except RuntimeError:
            # torch no longer lets this view be used in a graph, so no new node has made it.
            return
        if node is not None:
            nodes.add(node)
            if value._is_view() and value._base.grad_fn is not None:  # a view that was written has the node of its base
                nodes.add(value._base.grad_fn)
    elif isinstance(value, (list, tuple)):
        for one in value:
            grad_nodes(one, nodes)
    elif isinstance(value, dict):
        grad_nodes(tuple(value.values()), nodes)
    elif dataclasses.is_dataclass(value):
        grad_nodes(tuple(vars(value).values()), nodes)


def run_with(session, use, func, args, kwargs, read=()):
    """Runs a function as one operator, with what it uses on the device.

    read: tensors that it is not expected to write.
    """
    session.brackets.op_begin(use.forward_name, use.chosen)
    stream = session.holds.stream()
    versions = [tensor._version for tensor in read]
    session.holds.acquire_use(use, stream)
    try:
        return func(*args, **kwargs)
    finally:
        written = [tensor for tensor, version in zip(read, versions) if tensor._version != version]
        if written:  # such as relu(inplace=True) and embedding(max_norm=1.0)
            session.holds.note_writes(use.accesses, stream)
            for tensor in written:
                tensor._gm_place.written = True
                if tensor._gm_grad is not None:
                    tensor._gm_grad.norm = None
        session.holds.release_use(use, stream)


def hook_nodes(session, use, nodes, within=None):
    """Has the backward pass acquire a use when it reaches one of the nodes.

    Within a unit, which goes on behind the nodes, what the unit has acquired stays acquired.

    within: what the unit has used; None: that of the running one, if there is one.
    """
    reached = use, within or (session.running[-1] if session.running else None)
    for node in nodes:
        node.register_prehook(
            lambda _, graph=session.brackets.graph: session.backward.operator(*reached)
        )  # which keeps the graph's mark alive


def _one_by_one(func, args, kwargs):
    """Runs a function of lists once for each element, so that the elements need not fit on the device together."""
    count = len(args[0])
    outs = []
    for i in range(count):
        part = [[value[i]] if isinstance(value, (list, tuple)) and len(value) == count else value for value in args]
        out = _dispatch(func, part, kwargs)
        outs += list(out) if isinstance(out, (list, tuple)) else []
    return outs or None


def _gradient_of(tensor):
    """The record of the parameter whose gradient, or part of a gradient, a tensor is; otherwise None."""
    record = getattr(tensor, "_gm_grad", None)
    if record is not None and tensor._gm_generation != record.generation:
        raise GeminiError(
            f"{record.name}.grad: this gradient was cleared or replaced (by zero_grad(), or by setting it) "
            "since it was read, and its memory holds another one: clone() a gradient that is to be kept"
        )
    if record is not None and record.session.backward.is_open:
        record.catch_up()
    return record


def _copy(tensor):
    """Copies a managed tensor to torch's own memory."""
    return _run(_Tensor.clone, (tensor,), {})


def refuse_tracing(name):
    """Raises GeminiError if the use of a parameter is being traced."""
    if internals.is_tracing():
        raise GeminiError(
            f"{name}: torch.jit.trace() would keep the parameter's address, and read what may not be there: "
            "trace before libgemini.torch.prepare()"
        )


def host_copy(tensor):
    """Copies a managed tensor to plain CPU memory.

    The bytes are read where they are, without moving them to the device.
    """
    place = tensor._gm_place
    session = place.session
    session.refuse_closed(place.name)
    with _plain(), torch.no_grad():
        record = _gradient_of(tensor)
        pending = record is not None and record.scale != 1.0
        whole = tensor.numel() and tensor.dtype == place.dtype and is_dense(tensor.shape, tensor.stride())
        # What is read within an operator belongs to the operator.
        if not whole or pending or session.holds.noted:
            return _copy(tensor).detach().cpu()
        _, offset, _ = _where(tensor)
        session.brackets.op_end()
        out = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        place.read_to(out.as_strided((tensor.numel(),), (1,)), offset // tensor.dtype.itemsize)
        return out


def _replaced(value, copies):
    """Replaces managed tensors in a value by copies. copies: collects (tensor, copy) pairs."""
    if isinstance(value, ManagedTensor):
        return next((copy for tensor, copy in copies if tensor is value), value)
    if isinstance(value, (list, tuple)):
        values = [_replaced(one, copies) for one in value]
        return type(value)(*values) if hasattr(value, "_fields") else type(value)(values)
    if isinstance(value, dict):
        return {key: _replaced(one, copies) for key, one in value.items()}
    return value


def _run_on_copies(func, name, args, kwargs, tensors, changed):
    """Runs a function within a torch.func transform on copies in torch's memory.

    The backward passes of a transform can run at any time and can themselves be differentiated, so that acquired bytes
    could not be held for them.
    """
    for tensor in tensors:
        if any(tensor is one for one in changed):
            raise GeminiError(
                f"{tensor._gm_place.name}: {name}() would write it within a transform of torch.func: do that outside"
            )
    copies = []
    for tensor in tensors:
        if tensor.numel():
            session = tensor._gm_place.session
            record = _gradient_of(tensor)
            if record is not None:
                record.settle(abi.READ)
            use = session.holds.use(((*_range(tensor), abi.READ),), "clone")
            copies.append((tensor, run_with(session, use, _Tensor.clone, (tensor,), {})))
    return func(*_replaced(tuple(args), copies), **_replaced(kwargs, copies))


def _attributes(tensor):
    """The attributes that the user has set on a tensor."""
    return {name: value for name, value in tensor.__dict__.items() if not name.startswith("_gm_")}


# While torch.save() runs: copies of whole places, by place and what becomes of a gradient.
_saving: dict[typing.Any, torch.Tensor] | None = None


def _saved_copy(tensor):
    """As host_copy(), but within torch.save() tensors that share bytes get copies that share bytes."""
    place, record = tensor._gm_place, _gradient_of(tensor)
    if _saving is None or not tensor.numel() or tensor.dtype != place.dtype or place.grows:
        return host_copy(tensor)
    key = place.number, record and tensor._gm_generation
    if key not in _saving:
        whole = managed_view(place)
        whole._gm_grad, whole._gm_generation = tensor._gm_grad, tensor._gm_generation
        _saving[key] = host_copy(whole)
    _, offset, _ = _where(tensor)
    return _saving[key].as_strided(tensor.shape, tensor.stride(), offset // place.dtype.itemsize)


def _sharing(replaced):
    """Wraps a function that torch.save() calls."""

    @functools.wraps(replaced.original)
    def save(*args, **kwargs):
        global _saving
        outer = _saving
        _saving = {} if outer is None else outer
        try:
            return replaced.original(*args, **kwargs)
        finally:
            _saving = outer

    return save


# ---- functions that write all of their first argument without reading it
# Its old bytes need not come for it. But they are lost then, also if torch refuses the call: so each check says
# whether torch takes it for sure. Where that is not sure the old bytes come.
_FLOATS = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
_MOST = 32768.0  # twice this value is finite in each of these dtypes
_USUAL = {_Tensor, nn.Parameter}  # the managed classes are added below


def _takes_zero(tensor):
    return True


def _takes_number(tensor, value):
    return tensor.dtype in _FLOATS and isinstance(value, (int, float)) and abs(value) <= _MOST


def _takes_copy(tensor, source, non_blocking=False):
    """What needs memory for the moment, as a copy between devices that changes the dtype, is not sure either."""
    if (
        type(source) not in _USUAL
        or source.layout is not torch.strided
        or source.is_nested
        or source.is_quantized
        or source.shape != tensor.shape
        or source.is_complex()
        or tensor.dtype not in _FLOATS
    ):
        return False
    try:
        place, at = tensor._gm_place, source.data_ptr()
    except RuntimeError:  # a torch.func transform has wrapped it: no address
        return False
    if not at or place.address <= at < place.address + place.size_bytes:  # on the meta device, or it reads the place
        return False
    return source.device == tensor.device or source.dtype == tensor.dtype and source.stride() == tensor.stride()


def _takes_normal(tensor, mean=0.0, std=1.0, *, generator=None):
    return generator is None and _takes_number(tensor, mean) and _takes_number(tensor, std) and std >= 0


def _takes_uniform(tensor, low=0.0, high=1.0, /, *, generator=None):
    return generator is None and _takes_number(tensor, low) and _takes_number(tensor, high) and low <= high


_OVERWRITES = {
    _Tensor.zero_: _takes_zero,
    _Tensor.fill_: _takes_number,
    _Tensor.copy_: _takes_copy,
    _Tensor.normal_: _takes_normal,
    _Tensor.uniform_: _takes_uniform,
    nn.init.normal_: lambda tensor, mean, std, generator: _takes_normal(tensor, mean, std, generator=generator),
    nn.init.uniform_: lambda tensor, a, b, generator: _takes_uniform(tensor, a, b, generator=generator),
}
_WITHOUT_GRAD = {nn.init.normal_, nn.init.uniform_}


def _overwrites(func: typing.Any, tensor: torch.Tensor, args: typing.Any, kwargs: typing.Any) -> bool:
    """Whether a function certainly writes every element of its first argument and reads none of them."""
    takes: typing.Any = _OVERWRITES.get(func)
    if takes is None or not is_dense(tensor.shape, tensor.stride()) or tensor.is_inference() or internals.is_watched():
        return False
    if (
        torch.is_grad_enabled()
        and func not in _WITHOUT_GRAD
        and any(isinstance(one, _Tensor) and one.requires_grad for one in (tensor, *args[1:]))
    ):
        return False
    try:
        return takes(*args, **kwargs)
    except TypeError:  # wrong arguments: torch will raise
        return False


def _functions(*names):
    """The functions and methods of torch of these names."""
    owners = _Tensor, torch, torch.nn.functional
    return {getattr(owner, name) for owner in owners for name in names if hasattr(owner, name)}


def _operators(*names):
    """The operators of torch.ops.aten of these names, and their overloads."""
    packets = [packet for name in names if (packet := getattr(torch.ops.aten, name, None)) is not None]
    return {*packets, *(getattr(packet, one) for packet in packets for one in packet.overloads())}


# Functions that write running statistics without incrementing a version: which arguments these are.
_STATISTICS: dict[typing.Any, tuple[int, int]] = {
    F.batch_norm: (1, 2),
    torch.batch_norm: (3, 4),
    torch.native_batch_norm: (3, 4),
    **dict.fromkeys(_operators("batch_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"), (3, 4)),
}
_OPERATORS = {internals.Overload, internals.Overloads}


def statistics(func, args, kwargs):
    """The running statistics among the arguments of a function, if it writes them."""
    if not (args[5] if len(args) > 5 else kwargs.get("training", False)):
        return []
    found = [args[number] for number in _STATISTICS[func] if number < len(args)]
    found += [kwargs.get(name) for name in ("running_mean", "running_var")]
    return [one for one in found if isinstance(one, _Tensor)]


def _run(func, args, kwargs):
    tensors: list[ManagedTensor] = []
    _collect(args, tensors)
    _collect(kwargs.values(), tensors)
    if not tensors:
        return func(*args, **kwargs)
    session = tensors[0]._gm_place.session
    session.refuse_closed(tensors[0]._gm_place.name)
    refuse_tracing(tensors[0]._gm_place.name)
    name = getattr(func, "__name__", "function")
    first = args[0] if args else next(iter(kwargs.values()))
    if len(tensors) > 4 and isinstance(first, (list, tuple)) and name.startswith("_foreach_"):
        return _one_by_one(func, args, kwargs)
    changed = []
    if _changes_first(name):
        changed = [first] if isinstance(first, _Tensor) else list(first) if isinstance(first, (list, tuple)) else []
    if kwargs.get("out") is not None:
        out = kwargs["out"]
        changed += [out] if isinstance(out, _Tensor) else list(out)
    if type(func) in _OPERATORS:
        changed += [one for one in _written_by(func, args, kwargs) if isinstance(one, _Tensor)]
    if func in _STATISTICS:
        changed += statistics(func, args, kwargs)
    if internals.transform_level() is not None:
        return _run_on_copies(func, name, args, kwargs, tensors, changed)
    ranges, read, written, split, replaced = [], [], [], [], None
    for tensor in tensors:
        if not tensor.numel():
            continue
        place, offset, size = _range(tensor)
        mode, record = abi.READ, _gradient_of(tensor)
        if any(tensor is one for one in changed):
            mode = abi.READ_WRITE
            owner = record is None and place.owner and place.owner()
            if owner and owner.split:  # what it changes is found by comparing with what was there
                begin = offset // place.dtype.itemsize
                split.append((place, begin, -(-(offset + size) // place.dtype.itemsize) - begin))
            elif tensor is first and _overwrites(func, tensor, args, kwargs):
                mode = abi.WRITE
                if record is None or (record.grad_place is place and tensor.numel() == place.tensor.numel()):
                    replaced = record
                else:  # a part of a gradient: the rest keeps its values, multiplied by what was put off
                    record.settle(abi.READ_WRITE)
            written.append(place)
        elif tensor.is_inference():  # inference tensors have no versions to tell whether they were written
            mode = abi.READ_WRITE
            written.append(place)
        else:
            read.append(tensor)
        if record is not None and mode != abi.WRITE:
            record.settle(mode)
        ranges.append((place, offset, size, mode))
    if not ranges:
        return func(*args, **kwargs)
    use = session.holds.use(tuple(ranges), name)
    inputs: set[typing.Any] = set()
    if torch.is_grad_enabled():  # a result may be an argument, as of type_as(), or a view of one
        grad_nodes(args, inputs)
        if kwargs:
            grad_nodes(kwargs, inputs)
    watch = narrow.Watch(split) if split else None
    try:
        out = run_with(session, use, functools.partial(watch.call, func) if watch else func, args, kwargs, read)
    finally:  # a function that failed may have written, too
        for place in written:
            place.written = True
        if watch:
            watch.forget_halves()
    if replaced is not None:
        replaced.settle(abi.WRITE)
    out = mark_views(out, tensors)
    if changed:
        for one in changed:
            if type(one) in (ManagedTensor, ManagedParameter) and is_number(one) and not one._gm_unit:
                become_number(one)  # as after squeeze_() and detach_()
    if torch.is_grad_enabled():
        nodes: set[typing.Any] = set()
        grad_nodes(out, nodes)
        nodes -= inputs
        if nodes:
            if any(mode != abi.READ for *_, mode in ranges):
                use = session.holds.use(tuple((*where, abi.READ) for *where, _ in ranges), name)
            hook_nodes(session, use, nodes)
    return out


# ---- functions that need no bytes, or other ones than their arguments say
def _names(*names):
    return {getattr(_Tensor, name) for name in names if hasattr(_Tensor, name)}


# Functions that read no bytes. Properties read none either, except those in _SPECIAL.
_NO_BYTES = _names(
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "stride",
    "element_size",
    "is_contiguous",
    "is_floating_point",
    "is_complex",
    "data_ptr",
    "storage_offset",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "__len__",
    "__hash__",
    "get_device",
    "is_same_size",
    "is_inference",
    "is_pinned",
    "has_names",
    "retain_grad",
    "_is_view",
    "is_shared",
    "is_signed",
) | {
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
    torch.is_same_size,
    torch.is_inference,
    torch.empty_like,
    torch.zeros_like,
    torch.ones_like,
    torch.full_like,
    torch.rand_like,
    torch.randn_like,
    torch.result_type,
}
# Functions that return a view and read no bytes.
_VIEWS = _names(
    "detach",
    "view",
    "view_as",
    "t",
    "transpose",
    "permute",
    "narrow",
    "select",
    "unsqueeze",
    "squeeze",
    "expand",
    "expand_as",
    "chunk",
    "split",
    "unbind",
    "unflatten",
    "diagonal",
    "swapaxes",
    "as_strided",
    "unfold",
    "movedim",
) | {
    torch.detach,
    torch.t,
    torch.transpose,
    torch.permute,
    torch.narrow,
    torch.select,
    torch.unsqueeze,
    torch.squeeze,
    torch.chunk,
    torch.split,
    torch.unbind,
    torch.diagonal,
    torch.as_strided,
    _Tensor.T.__get__,
    _Tensor.mT.__get__,
    _Tensor.data.__get__,
}


def _view(func, args, kwargs):
    out = func(*args, **kwargs)
    tensors: list[ManagedTensor] = []
    _collect(args, tensors)
    return mark_views(out, tensors)


def _is_int(index):
    """Whether torch treats a tensor in an index like an int. Of those that vmap() has wrapped it makes a gather."""
    return (
        isinstance(index, _Tensor)
        and index.dim() == 0
        and index.dtype in (torch.int64, torch.int32, torch.int16, torch.int8)
        and internals.transform_level() is None
    )


def _getitem(func, args, kwargs):
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    plain = all(
        i is None or i is Ellipsis or isinstance(i, (int, slice)) and not isinstance(i, bool) or _is_int(i)
        for i in index
    )
    return _view(func, args, kwargs) if plain else _run(func, args, kwargs)


def _copied(func, args, kwargs):
    """Serves functions that hand out a pointer: they get a copy."""
    if kwargs.get("copy") is False:
        raise GeminiError(f"{args[0]._gm_place.name}: {func.__name__}(copy=False): only a copy of it can leave torch")
    return func(_copy(args[0]), *args[1:], **kwargs)


def _read_only(func, args, kwargs):
    """Serves conversions to NumPy: they get a read-only copy, so that nobody takes a write to it for a write to the
    parameter.
    """
    out = _copied(func, args, kwargs)
    out.flags.writeable = False
    return out


class Storage(torch.UntypedStorage):
    """The storage of a managed tensor.

    It has an address and a size; reading its bytes is an error, as they may be elsewhere.
    """

    _TOLD = {
        "data_ptr",
        "device",
        "element_size",
        "filename",
        "get_device",
        "is_cuda",
        "is_hpu",
        "is_pinned",
        "is_shared",
        "is_sparse",
        "is_sparse_csr",
        "nbytes",
        "resizable",
        "size",
        "type",
        "untyped",
    } | {name for name in dir(torch.UntypedStorage) if "weak" in name}


def _refuse_bytes(storage, *_, **__):
    raise GeminiError(
        f"{storage._gm_name}: the bytes of its storage may be elsewhere, and cannot be used as a storage: take the "
        "storage of a clone()"
    )


for _name in {"__copy__", "__deepcopy__", "__delitem__", "__getitem__", "__iter__", "__reduce_ex__", "__setitem__"} | {
    name
    for name in dir(torch.UntypedStorage)
    if not name.startswith("__") and name not in Storage._TOLD and callable(getattr(torch.UntypedStorage, name))
}:
    setattr(Storage, _name, _refuse_bytes)


def _storage(func, args, kwargs):
    """untyped_storage(), storage()"""
    out = func(*args, **kwargs)
    storage = internals.untyped(out)
    storage.__class__ = Storage
    storage._gm_name = args[0]._gm_place.name
    return out


def _come_over(tensor, source):
    """A plain tensor was put over the bytes of another tensor. It becomes managed if those are."""
    if isinstance(source, ManagedTensor) and tensor.numel():
        if type(tensor) not in (_Tensor, nn.Parameter):
            _refuse_class(source, type(tensor))
        tensor.__class__ = ManagedParameter if isinstance(tensor, nn.Parameter) else ManagedTensor
        tensor._gm_place = source._gm_place
        tensor._gm_grad, tensor._gm_generation = source._gm_grad, source._gm_generation
        if is_number(tensor):
            become_number(tensor)


def _refuse_class(tensor, kind):
    raise GeminiError(
        f"{tensor._gm_place.name}: a {kind.__name__} over its bytes would not know when these are elsewhere: make "
        "it of a clone()"
    )


_set = patches.set_.original


def _set_source(tensor, source=None, *args, **kwargs):
    """Replaces Tensor.set_(), which does not ask __torch_function__."""
    if isinstance(internals.untyped(source), Storage):
        _refuse_bytes(internals.untyped(source))
    if not isinstance(tensor, ManagedTensor):
        out = _set(tensor, *(() if source is None else (source,)), *args, **kwargs)
        _come_over(tensor, source)
        return out
    if args or kwargs or not isinstance(source, _Tensor):
        _refuse(_set, (tensor,), {})
    tensor.data = source
    return tensor


def _refuse(func, args, kwargs):
    if not isinstance(args[0], ManagedTensor):  # plain.resize_as_(managed) reads no more than a shape
        with _plain():
            return func(*args, **kwargs)
    raise GeminiError(
        f"{args[0]._gm_place.name}: {func.__name__}() would give it other memory, but its address is "
        "libgemini's: do it with a clone()"
    )


def _set_by_operator(func, args, kwargs):
    """Serves torch.ops.aten.set_(), as the method is served by _set_source()."""
    if isinstance(args[0], ManagedTensor):
        _refuse(func, args, kwargs)
    return _set_source(*args, **kwargs)


def _layout(func, args, kwargs):
    """Serves functions that change a tensor's shape or strides in place."""
    tensor = args[0]
    place = tensor._gm_place
    if isinstance(tensor, ManagedParameter) or (place.follows is not None and place.has(tensor)):  # gradient, state
        raise GeminiError(
            f"{place.name}: {func.__name__}() would change the layout that a parameter, its gradient and its states "
            "have in common: take what it returns without the underscore"
        )
    return _run(func, args, kwargs)


def _autograd(func, args, kwargs):
    """Runs torch.autograd.grad() and backward(), which call hooks and recompute checkpoints.

    They run outside of this dispatch, with stand-ins for managed tensors. They read no bytes of managed tensors
    themselves.
    """
    grad = func is torch.autograd.grad
    outputs, inputs = args[0], list(args[1] if grad else kwargs.get("inputs") or ())
    kwargs = dict(kwargs)
    materialize = kwargs.pop("materialize_grads", False)
    with _plain(), torch.enable_grad():
        plain = [
            out.view_as(out) if isinstance(out, ManagedTensor) else out
            for out in ([outputs] if isinstance(outputs, _Tensor) else outputs)
        ]
        edges = [
            torch.autograd.graph.get_gradient_edge(one) if isinstance(one, ManagedTensor) else one for one in inputs
        ]
    if func is _Tensor.backward:
        return func(plain[0], **kwargs)
    if not grad:
        return func(plain, **{**kwargs, "inputs": edges or None})
    if materialize:
        kwargs["allow_unused"] = True
    found = func(plain, edges, **kwargs)
    if materialize:
        found = tuple(torch.zeros_like(one) if value is None else value for one, value in zip(inputs, found))
    return found


def _to(func, args, kwargs):
    """Serves Tensor.to(). A model that a trainer moves to where it already is keeps its tensors."""
    if len(args) > 4 or "copy" in kwargs or kwargs.get("memory_format"):
        return _run(func, args, kwargs)
    tensor = args[0]
    device, dtype, _, _ = internals.parse_to(*args[1:], **kwargs)
    if device is not None and device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    # "cpu:0" is the same device as "cpu".
    there = device is None or device == tensor.device or device.type == tensor.device.type == "cpu"
    return tensor if there and dtype in (None, tensor.dtype) else _run(func, args, kwargs)


def _requires_grad(func, args, kwargs):
    """Serves requires_grad_() and the setter of requires_grad. A tensor that is frozen may be used as a number."""
    out = func(*args, **kwargs)
    tensor = args[0]
    if is_number(tensor) and not isinstance(tensor, ManagedNumber) and not tensor._gm_unit:
        try:
            become_number(tensor)
        except BaseException:
            tensor.requires_grad_()
            raise
    record = tensor._gm_record
    if record is not None:
        record.thaw()
    return out


def _embedding(func, args, kwargs):
    """Serves nn.functional.embedding(), of which a model for inference may have the table on the host."""
    if len(args) > 1 and rows.serves(args[0], args[1], args[3] if len(args) > 3 else kwargs.get("max_norm")):
        out = rows.embedding(func, *args, **kwargs)
        if out is not None:
            return out
    return _run(func, args, kwargs)


def _grad_get(func, args, kwargs):
    record = args[0]._gm_record
    return func(*args, **kwargs) if record is None else record.gradient()


def _grad_set(func, args, kwargs):
    record = args[0]._gm_record
    if record is None:
        return func(*args, **kwargs)
    return record.set_gradient(args[1] if len(args) > 1 else None)  # del param.grad


def _same_kind(func, args, kwargs):
    """Serves what Module.to() and its like ask first: whether a parameter can take the data of its successor, or has
    to be replaced by it.
    """
    old, new = args
    record = getattr(old, "_gm_record", None)
    if record is not None and not _same_bytes(old, new):
        record.refuse_replacing()
    return func(*args, **kwargs)


def _same_bytes(old, new):
    """Whether a tensor has the bytes of a managed one, in the same layout."""
    return (
        isinstance(new, ManagedTensor)
        and new.data_ptr() == old.data_ptr()
        and new.shape == old.shape
        and new.dtype == old.dtype
        and new.stride() == old.stride()
    )


def _data_set(func, args, kwargs):
    old: ManagedTensor = args[0]
    new = args[1]
    record = old._gm_record
    if _same_bytes(old, new):
        return None
    # It shares the bytes of another parameter, as the model was not prepared yet.
    if record is None and isinstance(old, nn.Parameter):
        from .model import Record

        record = Record(old._gm_place.session, old, old._gm_place.name)
    if record is None:
        raise GeminiError(
            f"{old._gm_place.name}: the data of a gradient or of a view cannot be replaced: copy_() into it"
        )
    return record.replace(new)


# Squares of smaller values vanish in fp32 beside larger ones without a change of the last bit.
LEAST_NORM = 1e-10


def is_exact(factor):
    """Whether a multiplication by the factor rounds nothing: the factor is a power of two from 2**-64 to 1.

    Results below 2**-126, which lose digits in fp32, are disregarded.
    """
    return 2.0**-64 <= factor <= 1.0 and math.frexp(factor)[0] == 0.5


def _is_whole(grad, record):
    """Whether a tensor is all of a gradient, each element once, as a number of the gradient's dtype."""
    return grad is record.view or (
        grad.numel() == record.place.elements
        and grad.dtype == record.place.dtype
        and is_dense(grad.shape, grad.stride())
    )


def _norm(grad):
    """The fp32 norm of a parameter's gradient, or of a part of it."""
    record = _gradient_of(grad)
    if record.norm is not None and _is_whole(grad, record):
        return record.norm
    return _dispatch(torch.linalg.vector_norm, (grad, 2), {"dtype": torch.float32})


def _known_norm(args, kwargs):
    """The norm of a gradient that was computed before, for the arguments of vector_norm(), or None."""
    record = _gradient_of(args[0])
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    if (
        record is not None
        and record.norm is not None
        and _is_whole(args[0], record)
        and order == 2
        and len(args) < 3
        and not set(kwargs) - {"ord"}
    ):
        return record.norm.to(args[0].dtype)
    return None


def _vector_norm(func, args, kwargs):
    known = _known_norm(args, kwargs)
    return _run(func, args, kwargs) if known is None else known.clone()  # the caller may change it


def _number(value):
    """The value of a scalar now, or None if it is not one. Later values of the same tensor are not known."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if (
        isinstance(value, _Tensor)
        and not isinstance(value, ManagedTensor)
        and not value.dim()
        and not value.requires_grad
    ):
        return float(value.item())
    return None


def _mul(func, args, kwargs):
    """Multiplies a gradient, as clipping does, when it is read next. No bytes move for it."""
    record = _gradient_of(args[0])
    factor = _number(args[1]) if record is not None and len(args) == 2 and not kwargs else None
    if factor is not None and isinstance(args[1], _Tensor) and not args[0].dim() and not record.session.ranks:
        factor = None  # two tensors without dimensions: their dtypes count alike
    if factor is None or not _is_whole(args[0], record) or not record.multiply(factor):
        return _run(func, args, kwargs)
    return args[0]


def _foreach_mul(func, args, kwargs):
    factors = args[1]
    if not isinstance(factors, (list, tuple)):
        number = _number(factors)  # read once for all of them, as reading waits for a GPU
        factors = [factors if number is None else number] * len(args[0])
    for tensor, factor in zip(args[0], factors):
        _dispatch(_Tensor.mul_, (tensor, factor), kwargs)


def _foreach_norm(func, args, kwargs):
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    more = {} if dtype is None else {"dtype": dtype}
    norms = []
    for tensor in args[0]:  # clipping changes none of them: no copies
        known = _known_norm((tensor, order), more) if isinstance(tensor, ManagedTensor) else None
        norms.append(_dispatch(torch.linalg.vector_norm, (tensor, order), more) if known is None else known)
    return norms


def _unscale(func, args, kwargs):
    """Serves torch.amp.GradScaler: divides gradients by the loss scale, and reports infinities and NaN."""
    grads, found, inverse = args
    managed = [grad for grad in grads if getattr(grad, "_gm_grad", None) is not None]
    others = [grad for grad in grads if getattr(grad, "_gm_grad", None) is None]
    if others:
        func(others, found, inverse)
    if not managed:
        return
    # A finite norm means finite elements. An infinite one does not mean infinite elements: squares may overflow.
    norms = [_norm(grad) for grad in managed]
    # In one read, as reading waits for a GPU.
    factor, *sizes = torch.stack([inverse.float().reshape(()), *norms]).tolist()
    if not all(
        math.isfinite(size) or bool(_dispatch(torch.isfinite, (grad,), {}).all()) for grad, size in zip(managed, sizes)
    ):
        found.fill_(1.0)
    if factor == 1.0:
        return
    for grad, norm, size in zip(managed, norms, sizes):
        _dispatch(_Tensor.mul_, (grad, factor), {})
        # The norm of the product has exactly this value if no square overflows or vanishes before or afterwards.
        if grad._gm_grad.scale == factor and is_exact(factor) and (not size or LEAST_NORM <= size * factor < math.inf):
            grad._gm_grad.norm = norm * factor


def _like(func, args, kwargs):
    """Serves zeros_like() and its kind.

    Within an optimizer's own step, what is made like a parameter is a state and is stored in an arena.
    """
    session = args[0]._gm_place.session if isinstance(args[0], ManagedTensor) else None
    if session is None or session.in_optimizer is None:
        return func(*args, **kwargs)
    if kwargs.get("device", args[0].device) not in (None, args[0].device):
        return func(*args, **kwargs)
    out = session.in_optimizer(args[0], kwargs.get("dtype") or args[0].dtype)
    if func is not torch.zeros_like and func is not torch.empty_like:
        _dispatch(_Tensor.copy_, (out, func(*args, **kwargs)), {})
    return out


_RESIZES = "resize_", "resize_as_", "share_memory_"
_LAYS_OUT = "t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "as_strided_"
_SPECIAL = {
    _Tensor.grad.__get__: _grad_get,
    _Tensor.grad.__set__: _grad_set,
    _Tensor.grad.__delete__: _grad_set,
    _Tensor.data.__set__: _data_set,
    internals.same_kind: _same_kind,
    _Tensor.requires_grad_: _requires_grad,
    _Tensor.requires_grad.__set__: _requires_grad,
    _Tensor.__getitem__: _getitem,
    torch.linalg.vector_norm: _vector_norm,
    _Tensor.mul_: _mul,
    internals.foreach_mul: _foreach_mul,
    internals.foreach_norm: _foreach_norm,
    internals.unscale: _unscale,
    _Tensor.to: _to,
    torch.nn.functional.embedding: _embedding,
    _Tensor.numpy: _read_only,
    _Tensor.__array__: _read_only,
    _Tensor.tolist: _copied,  # which torch refuses for a subclass that has __torch_dispatch__
    _Tensor.__dlpack__: _copied,
    _Tensor.__format__: _copied,
    _Tensor.untyped_storage: _storage,
    _Tensor.storage: _storage,
    **dict.fromkeys(_functions(*_RESIZES) | _operators(*_RESIZES), _refuse),
    **dict.fromkeys(_functions(*_LAYS_OUT) | _operators(*_LAYS_OUT), _layout),
    **dict.fromkeys(_operators("set_"), _set_by_operator),
    torch.zeros_like: _like,
    torch.empty_like: _like,
    torch.full_like: _like,
    torch.ones_like: _like,
    **{view: _view for view in _VIEWS},
}


@internals.not_traced
def _data(tensor):
    """Replaces the getter of Tensor.data. Units that are running watch whether the result is written."""
    out = patches.data.original.__get__(tensor)
    if units:
        if type(out) not in _USUAL:  # a fake tensor: torch.compile() is tracing
            patches.compiles_data()
        for unit in units:
            unit.took_data(out)
    return out


def _set_data(tensor, values):
    """Replaces the setter of Tensor.data. A plain tensor can be put over the bytes of a managed one."""
    patches.data.original.__set__(tensor, values)
    if not isinstance(tensor, ManagedTensor):
        _come_over(tensor, values)


_DATA = property(_data, _set_data)
_SPECIAL[_DATA.__get__], _SPECIAL[_DATA.__set__] = _view, _data_set


def serve(function, original):
    """Has a function that replaces one of torch's served as that is."""
    _SPECIAL[function] = _SPECIAL[original]


_AUTOGRAD = {torch.autograd.grad, torch.autograd.backward, _Tensor.backward}


def _dispatch(func, args, kwargs):
    special = _SPECIAL.get(func)
    if special is not None:
        return special(func, args, kwargs)
    if func in _NO_BYTES:
        return func(*args, **kwargs)
    if getattr(func, "__name__", "") in ("__get__", "__set__"):
        out = func(*args, **kwargs)
        return mark_views(out, args[:1]) if type(out) is _Tensor else out
    return _run(func, args, kwargs)


# Functions that write no argument, return one tensor that is no view of one, and take tensors as arguments only, not in
# lists: a block that has all of its parameters on the device has nothing to look at before it calls them.
_PURE = _functions(
    *("linear", "layer_norm", "rms_norm", "group_norm", "conv1d", "conv2d", "conv3d"),
    *("addmm", "matmul", "mm", "bmm", "baddbmm", "mv", "mul", "add", "sub", "div"),
    *(f"__{side}{name}__" for side in ("", "r") for name in ("matmul", "mul", "add", "sub", "truediv")),
)


def _in_block(block, func, args, kwargs):
    """Runs a function of _PURE with parameters of a block that is running. Returns None if it is not to be run so."""
    places = block.places
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, ManagedTensor) and (
            value._gm_place not in places or value._gm_grad is not None or type(value) not in _PLAIN_KINDS
        ):
            return None
    if (
        internals.transform_level() is not None
        or block.stream is not None
        and block.stream != block.session.holds.native_stream()
        or internals.is_tracing()
        or kwargs
        and kwargs.get("out") is not None
    ):
        return None
    with _plain():
        out = func(*args, **kwargs) if kwargs else func(*args)
        # linear() may return a view of what it has computed. A change in place replaces the node of the view.
        nodes = out.grad_fn, out._base.grad_fn if out._is_view() else None
    for node in nodes:
        if node is not None:
            node.register_prehook(block.hook)
    return out


class ManagedTensor(torch.Tensor):
    """A tensor in an arena, or a view of one."""

    _gm_place: Place = typing.cast("Place", None)  # the place that has its bytes
    _gm_record: Record | None = None  # of a parameter
    _gm_grad: Record | None = None  # of a parameter's gradient: the record of the parameter
    _gm_generation = 0  # of a parameter's gradient: how many gradients the parameter had before
    _gm_unit = False  # whether it is a parameter, or a buffer, of a unit
    _gm_division: Division | None = None  # of a part of a parameter that torch divides; see division.py
    _gm_plain: type[torch.Tensor] = torch.Tensor  # the class that it has while the unit runs

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if blocks and func in _PURE:
            out = _in_block(blocks[-1], func, args, kwargs)
            if out is not None:
                return out
        if func in _AUTOGRAD:
            return _autograd(func, args, kwargs or {})
        with _plain():
            return _dispatch(func, args, kwargs or {})

    def as_subclass(self, cls):
        """A view. torch's own as_subclass() does not ask __torch_function__."""
        if cls not in (_Tensor, ManagedTensor):
            _refuse_class(self, cls)
        return self.view_as(self)

    def __deepcopy__(self, memo):
        """Copies as torch does.

        Each parameter gets bytes of its own; within init(), where models are built, these are in the session. Other
        tensors that share bytes get copies that share bytes. Everything else is copied to torch's memory.
        """
        place = self._gm_place
        with torch.no_grad():
            if isinstance(self, nn.Parameter):
                kind = "param" if self.requires_grad else "frozen"
                copy = (
                    managed_view(place.session.arenas.place_of(self, kind))
                    if place.session.building
                    else self.detach().clone()
                )
                copy = nn.Parameter(copy, self.requires_grad)
            elif self._gm_grad is not None or self.dtype != place.dtype or place.grows:
                copy = self.detach().clone()
            else:
                key = "libgemini", place.number
                if key not in memo:
                    memo[key] = _copy(managed_view(place))
                first = (self.data_ptr() - place.address) // self.dtype.itemsize
                copy = memo[key].as_strided(self.shape, self.stride(), first).detach()
        memo[id(self)] = copy
        return copy

    def __copy__(self):
        """Another tensor over the same bytes, as torch's copy.copy() gives."""
        out = self.detach()
        if isinstance(self, nn.Parameter):
            out = nn.Parameter(out, self.requires_grad)
        elif self.requires_grad:
            out.requires_grad_()
        out.__dict__.update(_attributes(self))
        return out

    def __reduce_ex__(self, protocol):
        copy = _saved_copy(self)
        copy = nn.Parameter(copy, self.requires_grad) if isinstance(self, nn.Parameter) else copy
        copy.__dict__.update(_attributes(self))
        return copy.__reduce_ex__(protocol)


class ManagedParameter(ManagedTensor, nn.Parameter):
    """A parameter in an arena."""

    _gm_plain = nn.Parameter


# ---- tensors that torch takes for numbers
class ManagedNumber(ManagedTensor):
    """A managed tensor without dimensions that needs no gradient.

    Where torch wants a number (`torch.full(shape, tensor)`, `leaky_relu(input, tensor)`, `alpha=tensor`), it reads such
    a tensor without calling __torch_function__. So torch has to call __torch_dispatch__ for it. This is a property of
    the C++ tensor, with which an object has to be made (number_over()) or to be exchanged (become_number()).
    """

    _gm_raw: torch.Tensor = typing.cast("torch.Tensor", None)  # a plain tensor over the same bytes

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        return _use_numbers(func, args, kwargs or {})


class ManagedNumberParameter(ManagedNumber, ManagedParameter):
    """A parameter in an arena that was frozen, and has no dimensions."""


_PLAIN_KINDS = {ManagedTensor, ManagedParameter}
_USUAL |= {ManagedTensor, ManagedParameter, ManagedNumber, ManagedNumberParameter}


def is_number(tensor):
    """Whether torch takes a tensor where it wants a number."""
    with _plain():
        return not tensor.dim() and not tensor.requires_grad


def number_over(tensor):
    """Makes a ManagedNumber, or for a parameter a ManagedNumberParameter, over the bytes of a plain tensor."""
    kind = ManagedNumberParameter if isinstance(tensor, nn.Parameter) else ManagedNumber
    with _plain():
        raw = tensor.detach()  # which has the versions of the tensor
        out: typing.Any = _make_subclass(kind, raw)
    out._gm_raw = raw
    return out


def become_number(tensor):
    """Makes a managed tensor, which exists already and may be used as a number, a ManagedNumber.

    Raises:
        GeminiError: Something refers to the C++ tensor.
    """
    record = tensor._gm_record
    if record is not None and record.hook is not None:
        record.hook.remove()  # check() makes another one when it needs gradients again
        record.hook = None
    with _plain():
        if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
            raise GeminiError(
                f"{tensor._gm_place.name}: it has no dimensions, and was frozen while it has hooks: remove these first"
            )
        out = number_over(tensor)
        raw = out._gm_raw
        _exchange(tensor, out, type(out))
    tensor._gm_raw = raw
    if record is not None:
        record.former = out  # which has the C++ tensor now


def become_tensor(tensor):
    """Makes a ManagedNumber a ManagedTensor, or a ManagedParameter, again."""
    with _plain():
        out = tensor._gm_raw.detach()
        out.requires_grad_(tensor.requires_grad)
        _exchange(tensor, out, ManagedParameter if isinstance(tensor, nn.Parameter) else ManagedTensor)
    del tensor._gm_raw


def _exchange(tensor, other, kind):
    """Exchanges the C++ tensors of two objects, keeps the gradient, and sets the class of the first one."""
    grad = internals.get_grad(tensor)
    try:
        internals.swap_bytes(tensor, other)
    except RuntimeError as error:
        raise GeminiError(
            f"{tensor._gm_place.name}: it has no dimensions and needs no gradient, so that torch may use it as a "
            f"number, and something else refers to it, which prevents that libgemini notices ({error})"
        ) from None
    other.__class__, tensor.__class__ = _Tensor, kind
    internals.set_grad(tensor, grad)


def _use_numbers(func, args, kwargs):
    """Runs an operator of torch's dispatcher that has managed numbers among its arguments, with their bytes on the
    device: within a function that __torch_function__ serves, or called by torch itself.
    """
    tensors: list[ManagedTensor] = []
    _collect(args, tensors)
    _collect(kwargs.values(), tensors)
    numbers = [tensor for tensor in tensors if isinstance(tensor, ManagedNumber)]
    raws = [(tensor, tensor._gm_raw) for tensor in numbers]
    session = tensors[0]._gm_place.session
    session.refuse_closed(tensors[0]._gm_place.name)
    call = functools.partial(func, *_replaced(tuple(args), raws), **_replaced(kwargs, raws))
    if func.is_view:
        out = call()
    else:
        changed = _written_by(func, args, kwargs)
        ranges = []
        for tensor in tensors:
            mode = abi.READ_WRITE if any(tensor is one for one in changed) else abi.READ
            record = _gradient_of(tensor)
            if record is not None:
                record.settle(mode)
            if tensor.numel():
                ranges.append((*_range(tensor), mode))
        use = session.holds.use(tuple(ranges), func._schema.name)
        if session.holds.noted:  # within a function
            with session.holds.acquired(use.accesses, use.count, session.holds.stream()):
                out = call()
        else:
            out = run_with(session, use, call, (), {})
        for tensor in changed:
            if isinstance(tensor, ManagedTensor):
                tensor._gm_place.written = True
    for tensor, raw in raws:
        if out is raw:
            return tensor
    return mark_views(out, tensors)


def _written_by(func, args, kwargs):
    """The arguments that an operator of torch's dispatcher writes, or may write if it has several overloads."""
    out: list[typing.Any] = []
    overloads = [func]
    if isinstance(func, internals.Overloads):
        overloads = [getattr(func, name) for name in func.overloads()]
    for overload in overloads:
        for number, argument in enumerate(overload._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                by_number = number < len(args) and not argument.kwarg_only
                value = args[number] if by_number else kwargs.get(argument.name)
                out += value if isinstance(value, (list, tuple)) else [value]
    return out


def _loaded(data):
    return torch.load(io.BytesIO(data), weights_only=True)


def _saved(tensor):
    """Pickles a tensor for another process by value.

    torch would share the memory of a temporary copy, which is freed before the other process reads it.
    """
    file = io.BytesIO()
    torch.save(tensor, file)
    return _loaded, (file.getvalue(),)


for _kind in (ManagedTensor, ManagedParameter, ManagedNumber, ManagedNumberParameter):
    ForkingPickler.register(_kind, _saved)


def _function_apply(cls, *args, **kwargs):
    """torch's own autograd.Function.apply()."""
    return patches.function_apply.original.__get__(None, cls)(*args, **kwargs)


def with_managed(function, name, args, kwargs):
    """Calls a function that does not ask __torch_function__, but takes parameters, as if it were a torch function of
    that name.
    """
    tensors: list[ManagedTensor] = []
    _collect(args, tensors)
    _collect(kwargs.values(), tensors)
    if not tensors:
        return function(*args, **kwargs)
    for tensor in tensors:
        if tensor._gm_division is not None:
            raise GeminiError(
                f"{tensor._gm_place.name} is this process's part of a DTensor, which {name}() takes for all of it: "
                "give it a to_local() or a clone()"
            )

    def apply(*args, **kwargs):
        with internals.as_usual():
            return function(*args, **kwargs)

    apply.__name__ = name
    with _plain():
        return _run(apply, args, kwargs)


def _apply(cls, *args, **kwargs):
    """Replaces torch.autograd.Function.apply().

    The bytes are acquired while forward and backward of a custom function run, as these may pass pointers to kernels.
    """
    for unit in units:
        unit.nests = True
    return with_managed(functools.partial(_function_apply, cls), cls.__name__, args, kwargs)


def _refuse_managed(wrap):
    """Wraps a function by which torch.func transforms wrap their arguments.

    Managed tensors are refused: __torch_function__ is not asked for what runs on the wrapped ones.
    """

    def refuse(value, *args):
        if isinstance(value, ManagedTensor):
            raise GeminiError(f"{value._gm_place.name}: a transform of torch.func cannot take it: give it a clone()")
        return wrap(value, *args)

    return refuse


def _marked(unwrap):
    """Wraps a function by which torch.func transforms unwrap their results.

    A view of a managed tensor stays managed.
    """

    def of(value, *args):
        out = unwrap(value, *args)
        return mark_views(out, (value,)) if isinstance(value, ManagedTensor) else out

    return of


_new_parameter = patches.new_parameter.original


def _parameter(cls, data=None, requires_grad=True):
    """Replaces nn.Parameter.__new__(). A parameter over managed bytes stays managed."""
    if not isinstance(data, ManagedTensor):
        return _new_parameter.__get__(None, cls)(cls, data, requires_grad)
    if cls not in (nn.Parameter, ManagedParameter, ManagedNumberParameter):
        _refuse_class(data, cls)
    out = data.detach()
    if not isinstance(out, ManagedTensor):  # without elements it is no view of bytes
        return _new_parameter.__get__(None, cls)(nn.Parameter, out, requires_grad)
    with _plain():
        out.requires_grad_(requires_grad)
    out.__class__ = parameter_class(out)
    return out


def parameter_class(tensor):
    """The class of a managed parameter that a tensor becomes."""
    kind: typing.Any = type(tensor)
    if keeps_class(kind):
        return _kept_class(kind)
    return ManagedNumberParameter if isinstance(tensor, ManagedNumber) else ManagedParameter


# Subclasses of nn.Parameter whose __torch_function__ is known to leave the call to that of the next class.
_CALL_SUPER = {("bitsandbytes.nn.modules", "Params4bit")}


def keeps_class(kind: type) -> bool:
    """Whether a frozen parameter of a class keeps the class when it becomes managed: it is a subclass of nn.Parameter,
    its tensors have bytes of their own, and functions of torch with them come to ManagedTensor."""
    return (
        issubclass(kind, nn.Parameter)
        and kind is not nn.Parameter
        and not issubclass(kind, ManagedTensor)
        and kind.__torch_dispatch__ is _Tensor.__torch_dispatch__
        and all(
            "__torch_function__" not in vars(one) or (one.__module__, one.__name__) in _CALL_SUPER
            for one in kind.__mro__[: kind.__mro__.index(nn.Parameter)]
        )
    )


@functools.cache
def _kept_class(kind: typing.Any) -> type[ManagedParameter]:
    """The class of managed parameters that keep a class, see keeps_class(): its methods and attributes come first, but
    for those that would copy or move the parameter."""

    def unmanaged(self, values):
        values = values.detach()
        values.__class__ = kind
        return values

    def deep_copy(self, memo):
        out = memo[id(self)] = unmanaged(self, _copy(self))
        out.__dict__.update(copy.deepcopy(_attributes(self), memo))
        return out

    def reduce(self, protocol):
        out = unmanaged(self, _saved_copy(self))
        out.__dict__.update(_attributes(self))
        return out.__reduce_ex__(protocol)

    def shallow_copy(self):
        _refuse_class(self, kind)

    own = {"__deepcopy__": deep_copy, "__reduce_ex__": reduce, "__copy__": shallow_copy, "_gm_plain": kind}
    moves = {name: getattr(_Tensor, name) for name in ("to", "cpu", "cuda")}
    kept = type(kind)(kind.__name__, (kind, ManagedParameter), {"__module__": kind.__module__, **own, **moves})
    _USUAL.add(kept)
    _KINDS.add(kept)
    ForkingPickler.register(kept, _saved)
    return kept


_make_subclass = patches.make_subclass.original


def _subclass(cls, data, requires_grad=False, **kwargs):
    """Replaces Tensor._make_subclass(), with the signature that torch.compile() expects."""
    if not isinstance(data, ManagedTensor):
        return _make_subclass(cls, data, requires_grad, **kwargs)
    requires_grad = kwargs.get("require_grad", requires_grad)
    if issubclass(cls, nn.Parameter):
        return _parameter(cls, data, requires_grad)
    if cls is not _Tensor:
        _refuse_class(data, cls)
    return data.detach().requires_grad_(requires_grad)


_KINDS = {ManagedTensor, ManagedParameter, ManagedNumber, ManagedNumberParameter}


def _have_managed(values):
    """Whether there is a managed tensor among arguments, or in lists among them.

    Lists of numbers, which may be long, are not searched one by one.
    """
    return any(
        isinstance(value, ManagedTensor) or isinstance(value, (list, tuple)) and not _KINDS.isdisjoint(map(type, value))
        for value in values
    )


def _served(replaced):
    """Wraps a function that makes tensors from tensors, so that it is served like a torch function."""
    function, bound = replaced.original, isinstance(replaced.owner, type)

    @functools.wraps(function)
    def make(*args, **kwargs):
        if (
            bound
            and isinstance(args[0], ManagedTensor)
            or not _have_managed(args)
            and not _have_managed(kwargs.values())
        ):
            return function(*args, **kwargs)
        return with_managed(function, replaced.name, args, kwargs)

    if not bound:
        return patches.Standing(function, make)
    return staticmethod(make) if replaced.name == "__new__" else make


def _of_copies(replaced):
    """Wraps a function whose result keeps its arguments' bytes where mark_views() cannot see them: it gets copies."""
    function = replaced.original

    @functools.wraps(function)
    def make(*args, **kwargs):
        def copy(value):
            return value.clone() if isinstance(value, ManagedTensor) else value

        return function(*map(copy, args), **{name: copy(value) for name, value in kwargs.items()})

    return patches.Standing(function, make)


def _make_grads(outputs, grads, *args, **kwargs):
    """Replaces autograd._make_grads(), which does not know managed tensors."""
    inferring = [model for model in weights_only_models if model.session.manager.handle]
    if inferring and not any(one.requires_grad for one in outputs):
        names = ", ".join(sorted({type(model.module).__name__ for model in inferring}))
        raise GeminiError(
            f"backward() of a tensor that was made without gradients: libgemini.torch.infer() keeps the weights of "
            f"{names} only, and its passes make no graph. To train a model, call prepare() in place of infer()",
            "STATE",
        )
    grads = [one.clone() if isinstance(one, ManagedTensor) else one for one in grads]
    return patches.make_grads.original(outputs, grads, *args, **kwargs)


@functools.cache
def replacements() -> dict[patches.Replaced, typing.Any]:
    """See patches.py: what is no torch function. Custom functions, transforms, .data of a plain tensor, and what makes
    tensors over the bytes of others or of their values."""
    return {
        patches.function_apply: classmethod(_apply),
        patches.new_parameter: staticmethod(_parameter),
        patches.set_: _set_source,
        patches.data: _DATA,
        patches.make_subclass: staticmethod(_subclass),
        patches.make_grads: _make_grads,
        **{one: _served(one) for one in patches.makers},
        **{one: _of_copies(one) for one in patches.sparse_makers},
        **{one: _sharing(one) for one in patches.savers},
        patches.wrap_for_grad: _refuse_managed(patches.wrap_for_grad.original),
        patches.unwrap_for_grad: _marked(patches.unwrap_for_grad.original),
        patches.add_batch_dim: _refuse_managed(patches.add_batch_dim.original),
        patches.remove_batch_dim: _marked(patches.remove_batch_dim.original),
    }


def managed_view(place):
    """A managed tensor over the whole of a place."""
    out = place.tensor.detach()
    if out.dim():
        out.__class__ = ManagedTensor
    else:
        out = number_over(out)
    out._gm_place = place
    return out
