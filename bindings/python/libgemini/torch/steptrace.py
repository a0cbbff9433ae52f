"""The trace of a training step that has not been made: a model on the meta device, which has shapes and no bytes.

The operators are those that a session would have (tensors.py, backward.py, activations.py): one for each function that
uses parameters, and one more when the backward pass reaches it. Their times are estimated from what torch's operators
compute and move, and the rates of a machine.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import typing
import urllib.parse
import warnings
import weakref

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from .. import abi
from ..abi import GeminiError
from .activations import OPERATOR_SHARE, VIEW_SHARE, WHOLE_CHUNKS
from .arenas import ALIGNMENT, DTYPES
from .layout import Space
from .rates import Rates

COMPUTING = "mm", "conv", "attention", "matmul", "einsum"  # in names of operators that compute more than they move
ACTIVATION_BYTES = 1 << 20  # as in offload_activations()


def _storage(tensor: torch.Tensor) -> int:
    """The number of a tensor's storage, unique as long as the storage exists."""
    return tensor.untyped_storage()._cdata


def _tensors(values: typing.Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a parameter lies in its arena, and, with the sizes of elements there, its gradient and its states."""

    number: int  # of the arena of parameters
    first: int  # element
    count: int  # of elements
    name: str


@dataclasses.dataclass(frozen=True)
class Use:
    """What an operator accesses: a parameter ("param"), its gradient ("grad") or an activation ("activation")."""

    kind: str
    number: int  # of the arena of parameters
    first: int  # element; of an activation byte
    count: int
    mode: int


class Operator:
    """An operator of the step."""

    def __init__(self, name: str, phase: int) -> None:
        self.name = name
        self.phase = phase
        self.ns = 0.0
        self.uses: list[Use] = []


@dataclasses.dataclass
class Step:
    """A training step: what Recorder has found out about it.

    Attributes:
        dtypes: Of each arena of parameters.
        elements: In each arena of parameters.
        operators: In their order.
        peak_bytes: The most memory that tensors of torch take at a time: activations, gradients on their way.
        activation_bytes: The most bytes of activations that lie in the session.
        flops: Of the whole step.
        parameters: Elements of all trained parameters.
    """

    dtypes: list[torch.dtype]
    elements: list[int]
    operators: list[Operator]
    peak_bytes: int
    activation_bytes: int
    flops: int
    parameters: int

    def write(
        self, path: str | os.PathLike[str], rates: Rates, device_memory: int, chunk_size: int, cuda: bool
    ) -> None:
        """Writes the trace (docs/trace.md).

        Args:
            path: The file.
            rates: Of the machine that the step is to run on; of them links, updates and files.
            device_memory: Bytes.
            chunk_size: Bytes of a chunk.
            cuda: Whether torch's tensors take memory of the session, as on a GPU.
        """
        lines = [
            "gemini-trace 1",
            f"budget {chunk_size} {device_memory}",
            # The library's figure is that of one of the threads that update on the host.
            f"rates {rates.to_device:.0f} {rates.from_device:.0f} "
            f"{1e12 * rates.update_threads / rates.host_update:.0f} {1e12 / rates.device_update:.0f}",
            f"files {rates.file_read:.0f} {rates.file_write:.0f}",
            "outside 0",
        ]
        arenas: dict[tuple[str, int], int] = {}

        def arena(
            kind: str, number: int, code: int, itemsize: int, elements: int, like: tuple[str, int] | None
        ) -> None:
            index = arenas[kind, number] = len(arenas)
            base = index if like is None else arenas[like]
            lines.append(f"arena {index} {code} {itemsize} {base} {index} {elements * itemsize} {kind}.{number}")

        for number, (dtype, elements) in enumerate(zip(self.dtypes, self.elements)):
            arena("param", number, abi.KIND_PARAM, dtype.itemsize, elements, None)
        for number, (dtype, elements) in enumerate(zip(self.dtypes, self.elements)):
            like = "param", number
            arena("grad", number, abi.KIND_GRAD, dtype.itemsize, elements, like)
            if dtype != torch.float32:
                arena("master", number, abi.KIND_MASTER, 4, elements, like)
            arena("momentum", number, abi.KIND_MOMENTUM, 4, elements, like)
            arena("variance", number, abi.KIND_VARIANCE, 4, elements, like)
        if self.activation_bytes:
            arena("activation", 0, abi.KIND_OTHER, 1, self.activation_bytes, None)
        lines += [f"zeroed {index}" for (kind, _), index in arenas.items() if kind == "grad"]
        heap = self.peak_bytes if cuda else 0
        for operator in self.operators:
            name = urllib.parse.quote(operator.name[-100:], safe=":.")
            lines.append(f"op {operator.phase} {max(1, round(operator.ns))} {heap} {heap} {name}")
            for use in operator.uses:
                key = use.kind, use.number
                itemsize = 1 if use.kind == "activation" else self.dtypes[use.number].itemsize
                begin, end = use.first * itemsize, (use.first + use.count) * itemsize
                lines.append(f"use {arenas[key]} {begin} {end - begin} {use.mode}")
        for number, dtype in enumerate(self.dtypes):
            parts = [(("param", number), abi.READ_WRITE if dtype == torch.float32 else abi.WRITE)]
            parts += [(("grad", number), abi.READ)]
            parts += [((kind, number), abi.READ_WRITE) for kind in ("master", "momentum", "variance")]
            known = " ".join(f"{arenas[key]}:{mode}" for key, mode in parts if key in arenas)
            lines.append(f"update 0 {self.elements[number]} {known}")
        lines.append("end\n")
        with open(path, "w", encoding="ascii") as file:
            file.write("\n".join(lines))


class Costs(TorchDispatchMode):
    """Counts what torch's operators compute, move and allocate."""

    def __init__(self, rates: Rates, none_of: set[int]) -> None:
        super().__init__()
        self.rates = rates
        self.none_of = none_of  # storages that are no allocations: those of parameters
        self.flops = 0
        self.live = self.peak = 0
        self.known: dict[int, weakref.ref[typing.Any]] = {}
        self.spend: typing.Callable[[float], None] = lambda ns: None

    def __torch_dispatch__(
        self,
        func: typing.Any,
        types: typing.Any,
        args: tuple[typing.Any, ...] = (),
        kwargs: dict[str, typing.Any] | None = None,
    ) -> typing.Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            return True  # "is the mask all ones?", "is there one sequence?": the step without special cases
        out = func(*args, **(kwargs or {}))
        read, made = _tensors((args, kwargs)), _tensors(out)
        there = {_storage(tensor) for tensor in read}
        new = [tensor for tensor in made if _storage(tensor) not in there]
        for tensor in new:
            self.allocated(tensor)
        if not new and not func._schema.is_mutable:
            return out  # a view
        count = flop_registry.get(func._overloadpacket)
        if count is None and any(part in func._overloadpacket.__name__ for part in COMPUTING):
            raise GeminiError(
                f"how much {func} computes is not known: there is no plan for such a model", "UNSUPPORTED"
            )
        flops = count(*args, **(kwargs or {}), out_val=out) if count else 0
        self.flops += flops
        moved = sum(tensor.nbytes for tensor in (*read, *made)) if made else 0
        dtype = made[0].dtype if made else torch.float32
        self.spend(
            1e9 * max(flops / self.rates.flops_of(dtype), moved / self.rates.device_memory, self.rates.operator_seconds)
        )
        return out

    def allocated(self, tensor: torch.Tensor) -> None:
        """Counts the storage of a new tensor until it is freed."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, -(-storage.nbytes() // 512) * 512
        if key in self.known or key in self.none_of or not size:
            return

        def gone(_: typing.Any) -> None:
            if self.known.pop(key, None) is not None:
                self.live -= size

        self.known[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)

    def exempt(self, tensor: torch.Tensor) -> None:
        """Notes that a tensor is no allocation of torch's: it lies in the session."""
        storage = tensor.untyped_storage()
        if self.known.pop(storage._cdata, None) is not None:
            self.live -= -(-storage.nbytes() // 512) * 512


class Saved:
    """An activation that lies in the session, until the backward pass has dropped it."""

    def __init__(self, recorder: Recorder, tensor: torch.Tensor, offset: int, size: int) -> None:
        self.recorder = recorder
        self.shape, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        self.offset, self.size = offset, size

    def __del__(self) -> None:
        self.recorder.space.give(self.offset, self.size)


class Recorder(TorchFunctionMode):
    """Records the operators of a step, as a function mode of torch around it.

    Args:
        model: A model on the meta device.
        rates: Of the machine that the step is to run on.
        device_memory, chunk_size: As of the session, for activations that lie there.
        offload: Whether activations do.
    """

    def __init__(
        self, model: torch.nn.Module, rates: Rates, device_memory: int, chunk_size: int, offload: bool
    ) -> None:
        super().__init__()
        self.places: dict[int, Place] = {}  # by storage
        self.dtypes: list[torch.dtype] = []
        self.elements: list[int] = []
        self.operators: list[Operator] = []
        self.phase = abi.PHASE_FORWARD
        self.landed: set[int] = set()  # storages of parameters whose gradients were written in this step
        self.offload = offload
        self.chunk_size, self.operator_bytes = chunk_size, device_memory // OPERATOR_SHARE
        self.space, self.activation_bytes, self.op_bytes = Space(), 0, 0
        self.saved: weakref.WeakValueDictionary[tuple[int, int], Saved] = weakref.WeakValueDictionary()
        self.hooks: list[typing.Any] = []
        self.params = [param for param in model.parameters() if param.numel()]
        names = {id(param): name for name, param in model.named_parameters()}
        for param in self.params:
            if param.dtype not in DTYPES:
                raise GeminiError(
                    f"parameter {names[id(param)]} is of {param.dtype}: want {', '.join(map(str, DTYPES))}"
                )
            if param.dtype not in self.dtypes:
                self.dtypes.append(param.dtype)
                self.elements.append(0)
            number = self.dtypes.index(param.dtype)
            self.places[_storage(param)] = Place(number, self.elements[number], param.numel(), names[id(param)])
            self.elements[number] += -(-param.numel() // ALIGNMENT) * ALIGNMENT
            self.hooks.append(param.register_post_accumulate_grad_hook(self.take_gradient))
        buffers = {_storage(buffer) for buffer in model.buffers()}
        self.costs = Costs(rates, {*self.places, *buffers})
        self.costs.spend = self.spend
        self.early_ns = 0.0

    def spend(self, ns: float) -> None:
        """Counts time for the operator that was begun last."""
        if self.operators:
            self.operators[-1].ns += ns
        else:
            self.early_ns += ns

    def begin(self, name: str, uses: list[Use]) -> None:
        self.operators.append(Operator(name, self.phase))
        self.operators[-1].uses = uses
        self.op_bytes = 0

    def __torch_function__(
        self,
        func: typing.Any,
        types: typing.Any,
        args: tuple[typing.Any, ...] = (),
        kwargs: dict[str, typing.Any] | None = None,
    ) -> typing.Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return attention(func, args, kwargs)
        used = {_storage(one): one for one in _tensors((args, kwargs)) if _storage(one) in self.places}
        if not used:
            return func(*args, **kwargs)
        earlier = len(self.operators)
        places = [self.places[key] for key in used]
        uses = [Use("param", place.number, place.first, place.count, abi.READ) for place in places]
        name = f"{places[0].name}:{getattr(func, '__name__', 'function')}"
        self.begin(name, uses)
        out = func(*args, **kwargs)
        made = [tensor for tensor in _tensors(out) if _storage(tensor) not in used]
        if not made:  # a view, or a property
            del self.operators[earlier:]
            return out
        for tensor in made:
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(functools.partial(self.reach, name, uses))
        return out

    def reach(self, name: str, uses: list[Use], _: typing.Any) -> None:
        """Autograd has reached a function that has used parameters."""
        self.phase = abi.PHASE_BACKWARD
        self.begin(f"{name}.backward", list(uses))

    def take_gradient(self, param: torch.Tensor) -> None:
        """Autograd has made a gradient, which is stored in its arena."""
        key = _storage(param)
        place = self.places[key]
        mode = abi.READ_WRITE if key in self.landed else abi.WRITE
        self.landed.add(key)
        self.operators[-1].uses.append(Use("grad", place.number, place.first, place.count, mode))
        self.spend(2e9 * param.nbytes / self.costs.rates.device_memory)
        param.grad = None

    # ---- activations in the session
    def pack(self, tensor: torch.Tensor) -> typing.Any:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if storage._cdata in self.costs.none_of or size < ACTIVATION_BYTES or tensor.nbytes * VIEW_SHARE < size:
            return tensor
        saved = self.saved.get((storage._cdata, tensor._version))
        if saved is None:
            alignment = self.chunk_size if size >= WHOLE_CHUNKS * self.chunk_size else ALIGNMENT
            size = -(-size // alignment) * alignment
            offset = self.space.take(size, alignment)
            if offset is None:
                more = -(-size // self.chunk_size) * self.chunk_size
                self.space.give(self.activation_bytes, more)
                self.activation_bytes += more
                offset = self.space.take(size, alignment)
                assert offset is not None
            saved = self.saved[storage._cdata, tensor._version] = Saved(self, tensor, offset, size)
            self.access(saved, abi.WRITE)
        return saved, tensor.shape, tensor.stride(), tensor.dtype

    def unpack(self, packed: typing.Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        saved, shape, stride, dtype = packed
        self.access(saved, abi.READ)
        out = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        self.costs.exempt(out)
        return out

    def access(self, saved: Saved, mode: int) -> None:
        if not self.operators or self.op_bytes and self.op_bytes + saved.size > self.operator_bytes:
            beside = self.operators[-1].uses if self.operators else []
            self.begin(f"saved at {saved.offset}", [use for use in beside if use.kind == "param"])
        self.op_bytes += saved.size
        self.operators[-1].uses.append(Use("activation", 0, saved.offset, saved.size, mode))

    # ---- a step
    def run(self, loss: typing.Callable[[], torch.Tensor], passes: int) -> Step:
        """Makes a step on the meta device.

        Args:
            loss: Makes the forward pass and returns its loss.
            passes: How many forward and backward passes there are before the update.
        """
        hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        with self.costs:
            for _ in range(passes):
                self.phase = abi.PHASE_FORWARD
                with self, hooks if self.offload else contextlib.nullcontext():
                    value = loss()
                value.backward()
                del value
        for hook in self.hooks:
            hook.remove()
        self.operators[0].ns += self.early_ns
        return Step(
            self.dtypes,
            self.elements,
            self.operators,
            self.costs.peak,
            self.activation_bytes,
            self.costs.flops,
            sum(param.numel() for param in self.params),
        )


def attention(func: typing.Any, args: tuple[typing.Any, ...], kwargs: dict[str, typing.Any]) -> torch.Tensor:
    """Attention without the matrix of scores, as GPUs have it; on the meta device torch would make that matrix."""
    query, key, value = args[:3]
    if len(args) > 3 or query.dim() != 4 or query.shape[-1] != value.shape[-1] or kwargs.get("dropout_p"):
        return func(*args, **kwargs)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    causal = bool(kwargs.get("is_causal"))
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal)[0]


def record(
    model: torch.nn.Module,
    loss: typing.Callable[[], torch.Tensor],
    rates: Rates,
    device_memory: int,
    chunk_size: int,
    passes: int = 1,
    checkpoint: bool = False,
    offload: bool = False,
) -> Step:
    """Records a training step of a model on the meta device.

    Args:
        model: The model, of transformers if checkpoint is true. It is not used for anything else afterwards.
        loss: Makes the forward pass and returns its loss.
        rates: Of the machine that the step is to run on.
        device_memory: Bytes of the device.
        chunk_size: Bytes of a chunk.
        passes: How many forward and backward passes there are before the update.
        checkpoint: Whether blocks are computed again in the backward pass, as after gradient_checkpointing_enable().
        offload: Whether activations lie in the session, as with offload_activations().

    Returns:
        The step.

    Raises:
        GeminiError: A parameter has a type that sessions do not train; or the model computes with the values of its
            tensors, which the meta device does not have.
    """
    recorder = Recorder(model, rates, device_memory, chunk_size, offload)
    if checkpoint:
        # A function mode is off while a function runs, and the backward pass is one.
        contexts = {"use_reentrant": False, "context_fn": lambda: (contextlib.nullcontext(), recorder)}
        with warnings.catch_warnings():  # transformers 5 has a new name for it, besides
            warnings.simplefilter("ignore")
            typing.cast(typing.Any, model).gradient_checkpointing_enable(gradient_checkpointing_kwargs=contexts)
    try:
        return recorder.run(loss, passes)
    except GeminiError:
        raise
    except Exception as error:  # whatever the model's code raises
        raise GeminiError(
            f"the model cannot make a step without data (on torch's meta device), so there is no plan before a run: "
            f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
            "UNSUPPORTED",
        ) from error
