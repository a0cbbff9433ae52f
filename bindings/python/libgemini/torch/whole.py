"""Models whose parameters are acquired together for whole passes, where all fits on the device.

There nothing has to come and go, so what a use of a parameter costs is the calling thread's time alone. From its second
training step on, such a model is one unit (unit.py): one operator in the forward pass and one in the backward pass, in
which torch's functions take its parameters without asking libgemini. Blocks (blocks.py) serve the first step, which
shows what the passes need beside the model, and calls of modules within the model.

Other units are plain parameters while they run, as compilers want them. A model is not: what user's code asks of a
parameter in hooks, such as its gradient, is served by libgemini as always. Only torch's functions are not.

As a pass has other operators than it had, its iteration has another label, so that it is not taken for a departure.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import threading
import typing

import torch

from .. import abi
from ..abi import GeminiError
from . import internals, patches, tensors
from .arenas import in_backward
from .backward import LANDED
from .tensors import ManagedParameter, ManagedTensor
from .unit import Unit, find, optimized, scripted

if typing.TYPE_CHECKING:
    from .holds import Hold
    from .model import Model
    from .tensors import Use

_Tensor: typing.Any = torch.Tensor  # type checkers do not know its descriptors

# Of the device budget: the most that the parameters may take. While a pass runs they cannot make room for what is
# allocated beside them; gradients and states, of which the rest is, can.
SHARE = 4


def _asks(function: typing.Any) -> typing.Any:
    """A method that has a function of torch's served as for a managed tensor."""

    def call(self: ManagedTensor, *args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        return ManagedTensor.__torch_function__(function, (type(self),), (self, *args), kwargs)

    return call


def _property(descriptor: typing.Any, asks_get: bool = True) -> property:
    """A property that is served as for a managed tensor. asks_get: reading it, too; otherwise torch does that."""
    get = _asks(descriptor.__get__) if asks_get else lambda self: descriptor.__get__(self)
    return property(get, _asks(descriptor.__set__), _asks(descriptor.__delete__))


# What libgemini serves of a parameter while torch's functions do not ask it: whatever does not compute with its values,
# but hands out or replaces its gradient or its memory.
_SERVED: dict[str, typing.Any] = {
    "__torch_function__": internals.no_function,
    "grad": _property(_Tensor.grad),
    "data": _property(_Tensor.data),
    "requires_grad": _property(_Tensor.requires_grad, asks_get=False),
    **{
        name: _asks(getattr(_Tensor, name))
        for name in (
            *("requires_grad_", "numpy", "__array__", "tolist", "__dlpack__", "untyped_storage", "storage"),
            *("resize_", "resize_as_", "share_memory_", "as_strided_"),
            *("t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_"),
        )
    },
}
HeldTensor: typing.Any = type("HeldTensor", (ManagedTensor,), {**_SERVED, "__doc__": "A buffer of a model that runs."})
HeldParameter: typing.Any = type(
    "HeldParameter", (ManagedParameter,), {**_SERVED, "__doc__": "A parameter of a model that runs."}
)
KINDS = {ManagedTensor: HeldTensor, ManagedParameter: HeldParameter}  # by the class that it has otherwise


_holding: dict[Keeper, None] = {}  # of all sessions, those that hold something


def is_held(tensor: torch.Tensor) -> bool:
    """Whether a tensor that is not managed, such as a view that a hook has made in a pass, is over parameters of a
    model that is held."""
    if not _holding or isinstance(tensor, ManagedTensor) or internals.transform_level() is not None:
        return False
    try:
        number = internals.storage_number(tensor)
    except (NotImplementedError, RuntimeError):  # a tensor without storage
        return False
    return any(number in keeper.unit.storages for keeper in list(_holding))


@internals.not_traced
def _numpy(tensor: torch.Tensor, *args: typing.Any, **kwargs: typing.Any) -> typing.Any:
    """Replaces Tensor.numpy(): of a view of a parameter there is a read-only copy, as of the parameter."""
    if not is_held(tensor):
        return patches.numpy.original(tensor, *args, **kwargs)
    out = patches.numpy.original(tensor.clone(), *args, **kwargs)
    out.flags.writeable = False
    return out


@internals.not_traced
def _dlpack(tensor: torch.Tensor, *args: typing.Any, **kwargs: typing.Any) -> typing.Any:
    """Replaces Tensor.__dlpack__(): of a view of a parameter there is a copy."""
    return patches.dlpack.original(tensor.clone() if is_held(tensor) else tensor, *args, **kwargs)


# torch tells __torch_function__ of them by the name, under which it finds these.
tensors.serve(_numpy, _Tensor.numpy)
tensors.serve(_dlpack, _Tensor.__dlpack__)


def replacements() -> dict[patches.Replaced, typing.Any]:
    """See patches.py: what hands out the address of a view, which would not know when the bytes are elsewhere."""
    return {patches.numpy: _numpy, patches.dlpack: _dlpack}


class Keeper:
    """What has acquired a unit's parameters, as long as graphs or somebody's views may read them as plain tensors.

    Attributes:
        unit: The unit.
        holds: What is acquired, by stream.
        streams: On which passes have acquired it.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.session = unit.session
        self.holds: dict[int, Hold] = {}
        self.streams: dict[int, None] = {}

    @property
    def graphed(self) -> bool:
        """As a unit's: whether what is held outlasts the calls of functions; see Holds.recover()."""
        return bool(self.holds) and not self.unit.users

    def reset(self) -> None:
        """As a unit's: an interrupt has left something behind, and what is held will be released."""
        self.holds.clear()
        self.session.keepers.pop(self, None)
        _holding.pop(self, None)
        if self.unit.users:
            self.unit.reset()
            self.unit.settle()

    def acquire(self, stream: int) -> None:
        """Acquires the parameters, unless they still are. stream: the library's handle of torch's current one."""
        if stream not in self.holds:
            use = typing.cast("Use", self.unit.use)
            hold = use.pointer, use.count, stream, self
            self.session.holds.hold(hold)
            self.holds[stream] = hold
            self.streams[stream] = self.session.keepers[self] = _holding[self] = None

    def acquire_for_graphs(self) -> None:
        """Acquires the parameters where passes have: somebody's graph may read them that leads to no call of the
        model, such as one of a view that it has returned, or one that a hook or another thread has made in a pass."""
        for stream in list(self.streams):
            self.acquire(stream)

    def settle(self, final: bool = False) -> None:
        """Releases the parameters after a pass, unless a graph has saved tensors over them, or somebody has kept some.

        Args:
            final: Release them all the same, before they may move or be updated. What somebody has kept becomes
                managed, for which all of Python's objects may have to be searched.
        """
        if not self.holds or self.unit.users or not (final or self.unit.is_alone()):
            return
        try:
            self.unit.note_writes()
            self.unit.settle()
        finally:
            while self.holds:
                self.session.holds.let_go(self.holds.popitem()[1])
            self.session.keepers.pop(self, None)
            _holding.pop(self, None)


class Whole:
    """Whether a prepared model's parameters are acquired for whole passes, and how.

    Attributes:
        active: Whether they are, in this iteration.
        stopped: Whether they will never be.
        unit: What acquires them; None until it is wanted.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.session = model.session
        self.active = False
        self.stopped = not self.suits()
        self.unit: Unit | None = None
        self.thread = 0  # in which the first iteration began
        self.size = 0  # of the parameters in bytes

    def suits(self) -> bool:
        """Whether the model can be a unit whose tensors are of KINDS."""
        session, model = self.session, self.model
        config = session.manager.config
        if session.units != "auto" or session.ranks or model.weights_only or config.placement > abi.PLACEMENTS["cuda"]:
            return False
        tensors = [*model.module.parameters(), *model.module.buffers()]
        return all(
            type(one) in KINDS
            and (one.dim() or one.requires_grad)
            and one._gm_division is None
            and not one.is_inference()
            for one in tensors
            if isinstance(one, ManagedTensor)
        ) and not any(find(one) or scripted(one) or optimized(one) for one in model.module.modules())

    def decide(self) -> None:
        """Called where an iteration begins: whether the parameters are acquired for whole passes in it."""
        self.active = False
        if not torch.is_grad_enabled():
            return
        if self.stopped:
            self.unit = None  # whose graphs would have kept the iteration open that they are of
            return
        session, thread = self.session, threading.get_ident()
        if not self.thread:
            self.thread = thread  # the first iteration shows what is needed beside the model
            self.size = sum(record.place.size_bytes for record in self.model.records.values())
        elif len(session.models) > 1 or thread != self.thread or session.activations or session.caches:
            self.stop()
        elif not self.fits():
            self.stop()
            self.unit = None
        else:
            self.active = True

    def fits(self) -> bool:
        """Whether everything has room on the device, and most of it could make room for more."""
        session, stats = self.session, abi.Stats()
        if any(
            # It is updated while the backward pass goes on; or who writes it has to tell what it has written.
            record.early or record.split
            for record in self.model.records.values()
        ):
            return False
        budget = session.arenas.device_budget()
        room = budget - session.manager.config.device_margin_bytes
        session.lib.stats(session.handle, stats)
        needed = stats.model_bytes + stats.nonmodel_peak_bytes + 2 * (budget // LANDED)
        return self.size * SHARE <= room and bool(needed <= room)

    def stop(self) -> None:
        """Ends it for good: a loop that has it in some steps only would need two plans."""
        self.active, self.stopped = False, True

    def changed(self) -> None:
        """The model has other parameters, or has them in other states, than when it was looked at last."""
        self.unit = None
        self.stopped = self.stopped or not self.suits()

    def run(self, call: typing.Callable[..., typing.Any], args: typing.Any, kwargs: typing.Any) -> typing.Any:
        """Calls the model in a pass that has begun."""
        if (
            not self.active
            or in_backward()
            or self.session.brackets.depth > 1
            or internals.transform_level() is not None
            or internals.is_tracing()
        ):
            return call(*args, **kwargs)
        if self.unit is None:
            self.unit = Unit(self.session, self.model.module, "model", kinds=KINDS)
            self.unit.keeper = Keeper(self.unit)
        begun = False

        def begin(*args: typing.Any, **kwargs: typing.Any) -> typing.Any:
            nonlocal begun
            begun = True
            return call(*args, **kwargs)

        try:
            return self.unit.run(begin, args, kwargs)
        except torch.OutOfMemoryError:
            self.stop()
            raise
        except GeminiError as error:
            if begun or error.status != "OOM_DEVICE":
                raise
        self.stop()  # nothing was done
        return call(*args, **kwargs)
