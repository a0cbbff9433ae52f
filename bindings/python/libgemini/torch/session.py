"""The session behind libgemini.torch: one manager, and the state of training with it.

arenas.py has where tensors are stored, holds.py what is acquired, brackets.py where in a training step the session is,
and backward.py the backward pass. Each use of a parameter is an operator: the operator begins, the parameter's bytes
are acquired, the function is queued, and the bytes are released.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import os
import typing
import weakref

import torch

from ..abi import GeminiError
from ..manager import Manager, parse_bytes
from . import internals
from .arenas import Arenas, chunk_bytes
from .backward import Backward
from .brackets import Brackets
from .holds import Holds
from .passes import Passes
from .ranks import Ranks, Start

if typing.TYPE_CHECKING:
    from .activations import Activations
    from .allocator import Process
    from .cache import Caches
    from .model import Model, Record
    from .tensors import Use
    from .whole import Keeper


# Without device_memory, this much of a GPU's free memory is left: at least MARGIN bytes, and 1/MARGIN_SHARE. Kernels
# that are loaded later, NCCL, and libraries that allocate by themselves need some. The simulated device takes
# 1/SIMULATED_SHARE of what the host tier takes by itself, and at most SIMULATED_MOST.
MARGIN, MARGIN_SHARE = 1 << 30, 32
SIMULATED_SHARE, SIMULATED_MOST = 8, 8 << 30


def device_default(free: int) -> int:
    """How much of a GPU's free memory a session takes by itself, in whole 2 MiB.

    Raises:
        GeminiError: There is too little.
    """
    taken = (free - max(MARGIN, free // MARGIN_SHARE)) >> 21 << 21
    if taken < MARGIN:
        raise GeminiError(
            f"the GPU has {free} bytes free, of which at least {MARGIN} are left to others by default: free some, or "
            "set device_memory",
            "OOM_DEVICE",
        )
    return taken


def simulated_default(host_bytes: int) -> int:
    """How much memory the simulated device has by itself, in whole 2 MiB. host_bytes: of the host tier by itself."""
    return max(min(host_bytes // SIMULATED_SHARE, SIMULATED_MOST) >> 21 << 21, 2 << 20)


class Session:
    """What libgemini.torch.init() opens: one manager, and what is in it.

    Attributes:
        device: The torch device that tensors of the session are on.
        progress: Whether long operations report their progress, as of init().
        units: Whether parameters of repeated blocks are acquired together, as of init(); see blocks.py.
        speculate: Whether updates are computed ahead of the step; see speculate.py.
        cuda: Whether device is a GPU; otherwise it is the simulated device.
        manager: The libgemini.Manager, whose handle is 0 once the session was closed.
        arenas: Where tensors live; see arenas.py.
        holds: What is acquired; see holds.py.
        brackets: Iterations, phases and operators; see brackets.py.
        backward: The backward pass that is under way; see backward.py.
        passes: Where backward passes begin and fail; see passes.py.
        models: The models that were prepared, the last one last.
        ranks: See ranks.py; None if there is one process.
        activations: See activations.py; None until offload_activations() is used.
        caches: See cache.py; None until there is a Cache.
        allocator: See allocator.py; None if torch's other tensors are in memory of torch's own.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        placement: str,
        device_memory: int | str,
        host_memory: int | str,
        file: str | os.PathLike[str] | None,
        file_memory: int | str,
        device_margin: int | str,
        chunk_size: int | str,
        warmup_iterations: int,
        update_threads: int,
        strict: bool,
        progress: bool | None,
        watchdog: float,
        file_engine: str,
        static_param_fraction: float,
        static_optim_fraction: float,
        start: Start | None,
        zero: int,
        deadline: float,
        rank_order: bool,
        register_frames: bool,
        units: str,
        speculate: bool = True,
        shard_size: int = 0,
        cache_policy: str = "lru",
        bucket_size: int | str = 0,
        transport: str = "auto",
        expert_row: typing.Sequence[int] = (),
    ) -> None:
        """Arguments are those of libgemini.torch.init(); device_margin is its margin.

        start: of several processes, or None. shard_size: 0: all of these. expert_row: see ranks.expert_row().
        """
        self.device = device
        self.speculate = speculate
        self.progress = progress
        self.units = units
        self.cuda = device.type == "cuda"
        memory, margin = parse_bytes(device_memory, "device_memory"), parse_bytes(device_margin, "device_margin")
        chunk_size = parse_bytes(chunk_size, "chunk_size") or chunk_bytes(memory, self.cuda)
        if memory - margin < chunk_size:
            raise GeminiError(
                f"device_memory is {memory} bytes, of which margin leaves {max(memory - margin, 0)}: want at least a "
                f"chunk, which has {chunk_size} bytes (chunk_size), and for a step all of a parameter and its gradient",
                "INVALID",
            )
        self.manager = Manager(
            cuda=self.cuda,
            device_ordinal=device.index or 0,
            placement=placement,
            cache_policy=cache_policy,
            device_memory=memory,
            host_memory=host_memory,
            file=file,
            file_memory=file_memory,
            device_margin=margin,
            chunk_size=chunk_size,
            warmup_iterations=warmup_iterations,
            update_threads=update_threads,
            strict=strict,
            watchdog=watchdog,
            file_engine=file_engine,
            static_param_fraction=static_param_fraction,
            static_optim_fraction=static_optim_fraction,
        )
        self.lib = self.manager.lib
        self.handle = self.manager.handle
        self.ranks: Ranks | None = None  # see ranks.py; None: there is one process
        if start is not None:
            try:
                self.ranks = Ranks(
                    self,
                    start,
                    zero,
                    deadline,
                    rank_order,
                    register_frames,
                    shard_size,
                    parse_bytes(bucket_size, "bucket_size"),
                    transport,
                    expert_row,
                )
            except BaseException:
                self.manager.close()
                raise
        self.arenas = Arenas(self)
        self.holds = Holds(self)
        self.brackets = Brackets(self)
        self.backward = Backward(self)
        self.passes = Passes(self)
        # Set while an optimizer's own step() runs: returns state of a dtype, of the shape of a parameter.
        self.in_optimizer: typing.Callable[[torch.Tensor, torch.dtype], torch.Tensor] | None = None
        self.in_closure = 0  # closures that this step() has called and that have not returned
        self.activations: Activations | None = None
        self.caches: Caches | None = None
        self.allocator: Process | None = None
        # Records of all parameters that live here, each as long as its parameter; by their id.
        self.known: weakref.WeakValueDictionary[int, Record] = weakref.WeakValueDictionary()
        self.building = False  # whether models are being built in the session
        # The text of the error for a use after the manager is closed.
        self.gone = "the session was closed, and its parameters with it"
        self.models: list[Model] = []
        self.model_count = 0  # models that were prepared so far
        self.keepers: dict[Keeper, None] = {}  # those that hold something
        self.running: list[Use] = []  # of the units that run, one within the other: what their backward passes use
        self.reset_iterations = 0  # iterations that had ended when statistics were last started anew
        # Records of parameters whose gradient was assigned, in the order of the assignments.
        self.given: dict[Record, None] = {}
        self.rules: list[typing.Any] = []  # the rule of each prepared optimizer
        self.rule_of: dict[Record, typing.Any] = {}  # by record of a parameter that is updated in the backward pass

    def let_models_go(self) -> None:
        """Releases the parameters of models that are acquired for whole passes; see whole.py."""
        for keeper in list(self.keepers):
            keeper.settle(final=True)

    def renew_masters(self) -> None:
        """Updates the fp32 copies of 16-bit parameters that the user has written to, as load_state_dict() does."""
        for record in self.records:
            if record.place.written:
                record.renew_master()

    def take_over_written(self) -> None:
        """Does so before states are read or replaced: otherwise the next pass would, over what was loaded."""
        self.renew_masters()

    def take_left(self, early: bool) -> None:
        """Takes the gradients that autograd still holds after an exception or an interrupt.

        Args:
            early: Also those of parameters that are updated in the backward pass, for which that is their update.
        """
        get_grad = internals.get_grad
        with internals.plain():  # the same questions as Record.has_left() asks, of all records in each step
            left = [
                record
                for record in self.records
                if record.hook is not None
                and not record.given
                and (param := record.param) is not None
                and get_grad(param) is not None
            ]
        for record in left:
            if early or not record.early:
                record.take_left()

    def prepared(self, param: typing.Any) -> bool:
        """Whether a parameter belongs to a model that was prepared."""
        return any(param._gm_record in model.records.values() for model in self.models)

    @property
    def model(self) -> Model | None:
        """The model that was prepared last, or None."""
        return self.models[-1] if self.models else None

    @property
    def records(self) -> list[Record]:
        """The records of all parameters in the session."""
        return list(self.known.values())

    def refuse_closed(self, name: str) -> None:
        """Raises GeminiError if the session was closed. name: what the message begins with."""
        if not self.manager.handle:
            raise GeminiError(f"{name}: {self.gone}")

    def forked(self) -> None:
        """Ends the session in a process that os.fork() made, such as a worker of a DataLoader. The parent keeps it."""
        self.handle = self.manager.handle = 0
        if self.ranks:
            self.ranks.forked()
        self.brackets.iteration, self.brackets.op_open, self.backward.held = None, False, []
        self.gone = (
            "the session is in the process that forked this one, and so are its parameters: give this process copies, "
            'made before, or begin it by "spawn"'
        )

    def close(self, force: bool = False) -> None:
        """See libgemini.torch.close()."""
        self.backward.landed.clear()  # of a backward pass that an exception has ended
        self.holds.recover()
        self.let_models_go()
        self.backward.kept = 0
        with self._without_ranks():
            self.backward.leave_function()
        with self._without_ranks():
            self.brackets.op_end()
        with contextlib.suppress(GeminiError):  # of an update that failed, which the manager's end tells, too
            self.lib.update_wait(self.handle)
        if self.activations:
            self.activations.close()
        if self.allocator:
            self.close_allocator(force)
        if self.cuda:
            torch.cuda.synchronize(self.device)
        if self.ranks:
            self.ranks.close()
        try:
            with self._without_ranks():
                self.manager.close()  # and streams, on one of which an operator is open still if ranks failed
        finally:
            if self.ranks and not self.manager.handle:
                self.ranks.disconnect()
        for record in self.records:
            record.unhook()

    @contextlib.contextmanager
    def _without_ranks(self) -> typing.Iterator[None]:
        """A context manager: if ranks have failed, the session can still be closed, without them."""
        try:
            yield
        except GeminiError as error:
            if error.status != "PEER":
                raise

    def close_allocator(self, force: bool) -> None:
        """Ends the service of torch's allocator.

        Models that only the session refers to are deleted first, with the tensors that they hold, such as the inputs of
        CUDA graphs.
        """
        models: list[weakref.ref[Model]] = []
        while self.models:
            model = self.models.pop()
            model.move_buffers(torch.device("cpu"))
            models.insert(0, weakref.ref(model))
            del model
        assert self.allocator is not None
        try:
            self.allocator.close(force)
        finally:
            self.models = [model for model in (reference() for reference in models) if model is not None]
