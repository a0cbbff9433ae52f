"""Parameters that torch divides among processes, each of which has a part: DTensors, as of parallelize_module().

prepare() replaces such a parameter by a managed one, a ManagedLocalParameter, over this process's part. Arenas,
gradients, updates and checkpoints know the part only. Functions of torch get a DTensor over the part, while its bytes
are acquired, and do what they do without libgemini. What would compute something else from the part is refused.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import array
import contextlib
import math
import sys
import typing

import torch
import torch.distributed as dist
from torch import nn

from ..abi import GeminiError
from . import internals
from .internals import plain as _plain
from .ranks import EXPERTS, fail_together, gather_objects, processes_of
from .tensors import (
    _AUTOGRAD,
    _DATA,
    _KINDS,
    _NO_BYTES,
    ManagedParameter,
    ManagedTensor,
    _autograd,
    _changes_first,
    _collect,
    _dispatch,
    _gradient_of,
    _names,
    _replaced,
    _run,
    host_copy,
    managed_view,
)

if typing.TYPE_CHECKING:
    from .model import Record
    from .owners import Owners
    from .ranks import Ranks
    from .session import Session

_Tensor: typing.Any = torch.Tensor  # type checkers do not know its descriptors


def _of_torch() -> typing.Any:
    """torch.distributed.tensor. If nobody has imported it, there are no DTensors: None."""
    return sys.modules.get("torch.distributed.tensor")


def divided(value: typing.Any) -> bool:
    """Whether a value is a DTensor."""
    of_torch = _of_torch()
    return of_torch is not None and isinstance(value, of_torch.DTensor)


class Division:
    """How torch divides one parameter.

    Attributes:
        mesh: The DeviceMesh of torch, of one dimension, whose processes have the parts.
        placement: Shard(dim), or Replicate(): each process has all of it.
        shape: Of the whole parameter.
        stride: Likewise, in elements.
        owners: If the processes of the mesh are ranks of the session: those that have the same part.
    """

    def __init__(self, whole: typing.Any, owners: Owners | None = None) -> None:
        self.owners = owners
        self.mesh = whole.device_mesh
        self.placement = whole.placements[0]
        self.shape, self.stride = whole.shape, whole.stride()
        self.known: tuple[typing.Any, typing.Any] = None, None  # the norm of the part, and that of the whole

    @property
    def is_saved_whole(self) -> bool:
        """Whether checkpoints have the parameter as if it were not divided."""
        return self.owners is not None or self.mesh.size() == 1

    def where(self) -> str:
        """The layout, in words that the ranks that divide the parameter among themselves have in common."""
        part = "" if self.owners else f"part {self.mesh.get_local_rank()} of {self.mesh.size()}, "
        return part + self.layout()

    def layout(self) -> str:
        """The placement and the shape of the whole, in words that checkpoints have."""
        where = f"divided along dimension {self.placement.dim}" if self.placement.is_shard() else "whole on each"
        return f"{tuple(self.shape)}, {where} of {self.mesh.size()} processes"

    def whole(self, part: torch.Tensor) -> typing.Any:
        """The DTensor whose local tensor is a plain tensor. The gradient of that is a part of the DTensor's."""
        if part.requires_grad:
            part.register_hook(_arrived)
        return _of_torch().DTensor.from_local(
            part, self.mesh, [self.placement], run_check=False, shape=self.shape, stride=self.stride
        )

    def is_of(self, value: typing.Any) -> bool:
        """Whether a DTensor is divided alike."""
        return bool(
            value.shape == self.shape
            and tuple(value.placements) == (self.placement,)
            and value.device_mesh.mesh.tolist() == self.mesh.mesh.tolist()
        )

    def norm(self, record: Record) -> torch.Tensor:
        """The norm of all parts of a gradient. All processes of the mesh have to ask for it.

        Args:
            record: Of the parameter. It has a gradient.
        """
        part = record.part_norm()
        if part is None:
            with _plain(), torch.no_grad():
                norm = _run(torch.linalg.vector_norm, (record.gradient(), 2), {"dtype": torch.float32})
            part = record.known_norm = norm
        if not self.placement.is_shard():
            return part
        if self.known[0] is not part:
            square = self.add_squares(record, part.detach().double().square().reshape(1))
            self.known = part, square.sqrt().to(part.dtype).reshape(part.shape)
        return typing.cast(torch.Tensor, self.known[1])

    def add_squares(self, record: Record, square: torch.Tensor) -> torch.Tensor:
        """The sum of what all processes of the mesh have, in their order where these are ranks."""
        if not self.owners:
            dist.all_reduce(square, group=self.mesh.get_group())
            return square
        ranks = typing.cast("Ranks", record.session.ranks)
        theirs = array.array("d", b"".join(ranks.exchange(array.array("d", square.tolist()).tobytes())))
        return square.new_tensor([math.fsum(theirs[rank] for rank in self.owners.row)])


def _arrived(gradient: typing.Any) -> typing.Any:
    """A hook: the gradient of a part, which may still come from other processes, as a plain tensor."""
    return gradient.wait() if hasattr(gradient, "trigger_wait") else gradient


# ---- functions of parts
class ManagedLocal(ManagedTensor):
    """This process's part of a parameter that is divided, or of its gradient. Functions see the whole; see _serve()."""

    _gm_division: Division

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in _AUTOGRAD:
            out = _autograd(func, args, kwargs or {})
            if func is torch.autograd.grad:
                inputs = args[1] if isinstance(args[1], (list, tuple)) else (args[1],)
                out = tuple(
                    one._gm_division.whole(value) if isinstance(one, ManagedLocal) and value is not None else value
                    for one, value in zip(inputs, out)
                )
            return out
        with _plain():
            return _serve(func, args, kwargs or {})

    @property
    def device_mesh(self) -> typing.Any:
        """As of a DTensor."""
        return self._gm_division.mesh

    @property
    def placements(self) -> tuple[typing.Any, ...]:
        """As of a DTensor."""
        return (self._gm_division.placement,)

    def to_local(self, *, grad_placements: typing.Sequence[typing.Any] | None = None) -> ManagedTensor:
        """This process's part: a managed tensor over the same bytes, through which gradients go to the parameter.

        Args:
            grad_placements: As of a DTensor; of which only that of the parameter is supported.
        """
        if grad_placements is not None and tuple(grad_placements) != self.placements:
            _refuse(self, f"to_local(grad_placements={tuple(grad_placements)}): want {self.placements}, or none")
        with _plain():
            out = self.view_as(self)
        out.__class__ = ManagedTensor
        managed = typing.cast(ManagedTensor, out)
        managed._gm_place, managed._gm_grad, managed._gm_generation = (
            self._gm_place,
            self._gm_grad,
            self._gm_generation,
        )
        return managed

    def full_tensor(self, *, grad_placements: typing.Sequence[typing.Any] | None = None) -> torch.Tensor:
        """A copy of the whole, as of a DTensor. All processes of the mesh have to call it.

        Args:
            grad_placements: As of a DTensor.
        """
        whole = typing.cast(typing.Any, self.clone())
        return typing.cast(torch.Tensor, whole.full_tensor(grad_placements=grad_placements))

    def __deepcopy__(self, memo):
        with torch.no_grad():
            out: typing.Any = self.detach().clone()
        memo[id(self)] = out = nn.Parameter(out, self.requires_grad) if isinstance(self, nn.Parameter) else out
        return out

    def __reduce_ex__(self, protocol):
        whole = self._gm_division.whole(host_copy(self))
        whole = nn.Parameter(whole, self.requires_grad) if isinstance(self, nn.Parameter) else whole
        return whole.__reduce_ex__(protocol)


class ManagedLocalParameter(ManagedLocal, ManagedParameter):
    """This process's part of a parameter that is divided."""


_KINDS |= {ManagedLocal, ManagedLocalParameter}

# Answered for the whole, without its bytes.
_WHOLE = _names(
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "__len__", "is_same_size")
) | {
    *(_Tensor.shape.__get__, _Tensor.ndim.__get__, _Tensor.nbytes.__get__, torch.numel, torch.is_same_size),
    *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like),
}
# Tensors over the same bytes, divided alike.
_SAME = {_Tensor.detach, torch.detach, _Tensor.data.__get__, _DATA.__get__}
# Answered for the part.
_PART = (_NO_BYTES - _WHOLE - _names("register_hook")) | {
    *(_Tensor.grad.__get__, _Tensor.grad.__set__, _Tensor.grad.__delete__, internals.same_kind),
    *(_Tensor.requires_grad_, _Tensor.requires_grad.__set__, _Tensor.untyped_storage, _Tensor.storage),
    *(_Tensor.resize_, _Tensor.resize_as_, _Tensor.share_memory_, _Tensor.data.__set__, _DATA.__set__),
}
# Properties that are views: the others are answered for the part.
_PROPERTIES = {getattr(_Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag")}


def _refuse(tensor: ManagedTensor, what: str) -> typing.NoReturn:
    raise GeminiError(f"{tensor._gm_place.name} is this process's part of a DTensor: {what}")


def _is_gradient(value: typing.Any) -> bool:
    return isinstance(value, ManagedLocal) and value._gm_grad is not None


def _norm_of(tensor: typing.Any, order: typing.Any, **kwargs: typing.Any) -> torch.Tensor:
    """The norm of the whole of a gradient, or of another managed tensor."""
    if not _is_gradient(tensor):
        serve = _serve if isinstance(tensor, ManagedLocal) else _dispatch
        return typing.cast(torch.Tensor, serve(torch.linalg.vector_norm, (tensor, order), kwargs))
    if order != 2 or set(kwargs) - {"dtype"}:
        _refuse(tensor, f"of its gradient only the 2-norm of all elements is known, not vector_norm(ord={order})")
    norm = _gradient_of(tensor).norm
    return norm.to(kwargs.get("dtype") or tensor.dtype)


def _same_place(args: typing.Any, kwargs: typing.Any) -> bool:
    """Whether Tensor.to() returns the tensor itself."""
    if len(args) > 4 or "copy" in kwargs or kwargs.get("memory_format"):
        return False
    device, dtype, _, _ = internals.parse_to(*args[1:], **kwargs)
    there = device is None or device.type == args[0].device.type and device.index in (None, args[0].device.index)
    return there and dtype in (None, args[0].dtype)


def _serve(func: typing.Any, args: typing.Any, kwargs: typing.Any) -> typing.Any:
    """Runs a torch function that has a ManagedLocal among its arguments."""
    first = args[0] if args else None
    if func in _SAME:
        out = _dispatch(func, args, kwargs)
        out.__class__, out._gm_division = ManagedLocal, args[0]._gm_division
        return out
    if func is internals.foreach_norm:
        order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
        return [_norm_of(one, order) for one in args[0]]
    if func is torch.linalg.vector_norm and _is_gradient(first):
        return _norm_of(
            first, *(args[1:] or (kwargs.get("ord", 2),)), **{k: v for k, v in kwargs.items() if k != "ord"}
        )
    if func is internals.foreach_mul and all(_is_gradient(one) or type(one) is not ManagedLocal for one in args[0]):
        return _dispatch(func, args, kwargs)
    if func in (_Tensor.mul_, _Tensor.zero_) and _is_gradient(first):
        return _dispatch(func, args, kwargs)
    if func is internals.unscale:
        _refuse(
            next(one for one in args[0] if isinstance(one, ManagedLocal)),
            "a loss scale would differ between the processes that have the parts: train without GradScaler",
        )
    if func is _Tensor.register_hook:
        _refuse(args[0], "register_hook() would get a part of its gradient: want a hook of the module's output")
    if func in _PART:
        return _dispatch(func, args, kwargs)
    if func is _Tensor.to and _same_place(args, kwargs):
        return first
    if func not in _WHOLE and func not in _PROPERTIES and getattr(func, "__name__", "") in ("__get__", "__set__"):
        return _dispatch(func, args, kwargs)
    return _on_wholes(func, args, kwargs)


def _on_wholes(func: typing.Any, args: typing.Any, kwargs: typing.Any) -> typing.Any:
    """Runs a function on DTensors."""
    name = getattr(func, "__name__", "function")
    tensors: list[ManagedTensor] = []
    _collect(args, tensors)
    _collect(kwargs.values(), tensors)
    parts = [one for one in tensors if isinstance(one, ManagedLocal)]
    if internals.transform_level() is not None:
        _refuse(parts[0], f"{name}() of it within a transform of torch.func is not supported")
    for one in parts:
        record = _gradient_of(one)
        if record is not None and record.session.ranks:
            _refuse(one, "its gradient, which ranks divide further, can be clipped, scaled and dropped only")
    if (
        _changes_first(name)
        and getattr(func, "__module__", "") != "torch.nn.init"
        and torch.is_grad_enabled()
        and isinstance(args[0], ManagedLocal)
        and args[0].requires_grad
    ):
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")

    def call(*args, **kwargs):
        wholes = [(one, one._gm_division.whole(one.view_as(one))) for one in parts]
        out = func(*_replaced(tuple(args), wholes), **_replaced(kwargs, wholes))
        return next((one for one, whole in wholes if whole is out), out)

    call.__name__ = name
    return call(*args, **kwargs) if func in _WHOLE else _run(call, args, kwargs)


def local_view(place: typing.Any, division: Division) -> ManagedLocal:
    """A ManagedLocal over the whole of a place."""
    out = managed_view(place)
    out.__class__ = ManagedLocal
    out._gm_division = division
    return typing.cast(ManagedLocal, out)


# ---- models and optimizers
def _check(session: Session, name: str, param: typing.Any) -> None:
    """Raises GeminiError, which says what to do, unless a parameter that is a DTensor can be managed."""
    mesh, placement = param.device_mesh, param.placements[0]
    of_torch, start, own = _of_torch(), f"parameter {name} is a DTensor", dist.get_rank()
    if mesh.ndim != 1:
        raise GeminiError(
            f"{start} over a mesh of {mesh.ndim} dimensions: want one, as of mesh['tensor']; what fully_shard() does "
            "over the other one, libgemini does, with init(process_group=mesh.get_group('data'))"
        )
    if type(placement) not in (of_torch.Shard, of_torch.Replicate):
        raise GeminiError(f"{start} with the placement {placement}: want Shard() or Replicate()")
    if mesh.device_type != session.device.type:
        raise GeminiError(f"{start} over a mesh of {mesh.device_type}: the session is on {session.device.type}")
    if mesh.get_coordinate() is None:
        raise GeminiError(f"{start} over a mesh that this process, {own}, is not in")
    if not param.dim():
        raise GeminiError(f"{start} without dimensions: keep it out of the parallel style, as an nn.Parameter")
    if placement.is_shard() and param.shape[placement.dim] % mesh.size():
        raise GeminiError(
            f"{start} whose dimension {placement.dim}, of {param.shape[placement.dim]}, cannot be divided into "
            f"{mesh.size()} equal parts: pad it, or keep it out of the parallel style"
        )
    members = mesh.mesh.tolist()
    if _owners_of(session, mesh):
        if not placement.is_shard() or placement.dim:
            raise GeminiError(f"{start} over expert_mesh of init(), with the placement {placement}: want Shard(0)")
    elif (both := sorted({own, *_processes(session)} & set(members))) != [own]:
        raise GeminiError(
            f"{start} over processes {members}, of which {both} are also ranks of the session: give init() the group "
            "of those that have the same part, such as process_group=mesh.get_group('data'); of experts, for which "
            "each process has tokens of its own, give it their mesh as expert_mesh"
        )
    with torch.no_grad():
        local = param.to_local()
    if isinstance(local, ManagedTensor):
        raise GeminiError(f"{start} over bytes of the session: build and parallelize the model outside of init()")
    if type(local) is not torch.Tensor:
        raise GeminiError(f"{start} whose local tensor is a {type(local).__name__}: want a plain tensor")
    if internals.get_grad(param) is not None:
        raise GeminiError(f"{start} with a gradient from before prepare(): call zero_grad() before")


def _processes(session: Session) -> list[int]:
    """The processes, as torch.distributed counts them, that are ranks of the session, in the order of ranks."""
    return dist.get_process_group_ranks(session.ranks.process_group) if session.ranks else []


def _owners_of(session: Session, mesh: typing.Any) -> Owners | None:
    """The ranks of the session that have the same part of what is divided over a mesh, if that is one of experts."""
    owners, processes = session.ranks and session.ranks.owners.get(EXPERTS), _processes(session)
    if not owners or mesh.get_coordinate() is None or processes_of(mesh) != [processes[one] for one in owners.row]:
        return None
    return owners


def localize(session: Session, module: nn.Module) -> None:
    """Replaces the DTensors among the parameters of a module by parameters over their local tensors.

    Raises:
        GeminiError: One of them, or a buffer, cannot be managed. Nothing has been replaced.
    """
    found: list[tuple[str, typing.Any]] = [(name, one) for name, one in module.named_parameters() if divided(one)]
    for name, param in found:
        _check(session, name, param)
    for name, buffer in module.named_buffers():
        if divided(buffer):
            raise GeminiError(f"buffer {name} is a DTensor: want a plain tensor, such as its local one (to_local())")
    for _, param in found:
        if not hasattr(param, "_gm_local"):
            with torch.no_grad():
                local: typing.Any = nn.Parameter(param.to_local().detach(), param.requires_grad)
            local._gm_division = Division(param, _owners_of(session, param.device_mesh))
            param._gm_local = local
    for one in module.modules():
        for name, param in one._parameters.items():
            if divided(param):
                one._parameters[name] = typing.cast(typing.Any, param)._gm_local


def localize_groups(inner: torch.optim.Optimizer) -> None:
    """Has an optimizer of torch that is to be prepared update what localize() has put in the place of DTensors."""
    for group in inner.param_groups:
        group["params"] = [getattr(param, "_gm_local", param) for param in group["params"]]
    for param in [param for param in inner.state if hasattr(param, "_gm_local")]:
        parts = {name: value.to_local() if divided(value) else value for name, value in inner.state.pop(param).items()}
        inner.state[typing.cast(typing.Any, param)._gm_local] = parts


def refuse_rule(inner: torch.optim.Optimizer, records: typing.Iterable[Record]) -> None:
    """Raises GeminiError if parameters are divided: a step that may look at more than one element would see a part."""
    for record in records:
        if record.division is not None:
            raise GeminiError(
                f"parameter {record.name} is a DTensor, of which {type(inner).__name__} would see this process's part: "
                "in a session of one rank want torch.optim.AdamW or Adam"
            )


def to_parts(record: Record, state: typing.Mapping[str, typing.Any]) -> dict[str, typing.Any]:
    """A parameter's state that is to be loaded, with the local tensors of DTensors.

    Raises:
        GeminiError: One is divided otherwise than the parameter.
    """
    out = dict(state)
    for name, value in state.items():
        if divided(value):
            if record.division is None or not record.division.is_of(value):
                raise GeminiError(f"{name} of parameter {record.name}, to be loaded, is divided otherwise than that is")
            out[name] = value.to_local()
        elif record.division is not None and isinstance(value, torch.Tensor) and value.dim():
            raise GeminiError(f"{name} of parameter {record.name}, to be loaded, is no DTensor, as the parameter is")
    return out


# ---- checkpoints
class Mesh:
    """The processes that have the parts of a model, for what they do together in a checkpoint.

    Attributes:
        index: Which of them this process is.
        count: How many there are; 1: nothing is divided.
        layouts: How each parameter that is divided is, in words, by name.
    """

    def __init__(self, model: nn.Module) -> None:
        """
        Raises:
            GeminiError: Parameters are divided among different processes.
        """
        divisions: dict[str, Division] = {
            name: typing.cast(typing.Any, param)._gm_division
            for name, param in model.named_parameters(remove_duplicate=False)
            if getattr(param, "_gm_division", None) is not None
            and not typing.cast(typing.Any, param)._gm_division.is_saved_whole
        }
        self.layouts = {name: one.layout() for name, one in divisions.items()}
        meshes = [one.mesh for one in divisions.values()]
        if any(mesh.mesh.tolist() != meshes[0].mesh.tolist() for mesh in meshes):
            raise GeminiError("parameters are divided among different processes: such a model has no checkpoints yet")
        self.group = meshes[0].get_group() if meshes else None
        self.index: int = meshes[0].get_local_rank() if meshes else 0
        self.count: int = meshes[0].size() if meshes else 1

    def gather(self, mine: typing.Any) -> list[typing.Any]:
        """Brings an object of each process to all of them."""
        return [mine] if self.group is None else gather_objects(self.group, mine)

    @contextlib.contextmanager
    def together(self, ranks: Ranks | None) -> typing.Iterator[None]:
        """A context manager: an exception within it on one process is one on all that have parts, and on the ranks of
        each. All of them meet at its end.
        """
        of_ranks = ranks.together() if ranks else contextlib.nullcontext()
        with fail_together(self.gather, "the process that has part"), of_ranks:
            yield

    def stem(self, name: str) -> str:
        """The name of a file that has this process's part."""
        return name if self.group is None else f"{name}-part-{self.index + 1:05}-of-{self.count:05}"
