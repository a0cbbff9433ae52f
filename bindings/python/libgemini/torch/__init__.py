"""PyTorch on libgemini: models that do not fit on the GPU, trained with a few lines more.

    import libgemini.torch as gm

    with gm.init(placement="auto", device_memory="24GiB", host_memory="100GiB"):
        model = LlamaForCausalLM(config)  # each parameter goes to the host as it is made
    model, optimizer = gm.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    loss = model(ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import atexit as _atexit
import contextlib as _contextlib
import os as _os
import types as _types
import typing as _typing
import warnings as _warnings

import torch as _torch

from ..abi import ZERO_AUTO as _ZERO_AUTO, GeminiError
from ..manager import parse_bytes as _parse_bytes

# First, as it looks at torch's version.
from .internals import check as _check_torch  # isort: split

from . import (
    activations as _activations,
    allocator as _allocator,
    checkpoint as _checkpoint,
    ddp as _ddp,
    experts as _experts,
    model as _model,
    narrow as _narrow,
    passes as _passes,
    patches as _patches,
    ranks as _ranks,
    report as _report,
    savers as _savers,
    tensors as _tensors,
    unit as _unit,
    whole as _whole,
)
from .blocks import WANTED as _UNITS
from .optim import Optimizer, watch_steps as _watch_steps
from .picture import picture
from .session import Session, device_default as _device_default, simulated_default as _simulated_default
from .transport import KINDS as _TRANSPORTS

__all__ = [
    "GeminiError",
    "close",
    "dump",
    "explain",
    "hint",
    "infer",
    "init",
    "join",
    "load",
    "load_weights",
    "offload_activations",
    "picture",
    "prepare",
    "report",
    "resident",
    "save",
    "session",
    "stats",
    "stats_reset",
    "timeline",
    "unit",
]

if _typing.TYPE_CHECKING:
    from .cache import Cache as Cache


def __getattr__(name: str) -> _typing.Any:
    """Imports what needs transformers when it is used."""
    if name == "Cache":
        from .cache import Cache

        globals()[name] = Cache
        return Cache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_Module = _typing.TypeVar("_Module", bound=_torch.nn.Module)
_Batch = _typing.TypeVar("_Batch")
_Path = _typing.Union[str, "_os.PathLike[str]"]
_current: Session | None = None


def session() -> Session:
    """The open session.

    Returns:
        The session that init() made.

    Raises:
        GeminiError: There is none.
    """
    if _current is None:
        raise GeminiError("there is no session: call libgemini.torch.init() first")
    return _current


def _watch(on: bool) -> None:
    """Replaces, or puts back, the functions of torch that have no hook: they are replaced while there is a session."""
    if on:
        _patches.install(*(one.replacements() for one in (_tensors, _ddp, _savers, _unit, _passes, _whole)))
    else:
        _patches.remove()
    _watch_steps(on)


class _Init:
    """What init() returns. As a context manager: modules built within put each parameter into the session at once."""

    def __init__(self, owner: Session) -> None:
        self.session = owner
        self.building: _typing.ContextManager[None] | None = None

    def __enter__(self) -> Session:
        self.building = _model.building(self.session)
        self.building.__enter__()
        return self.session

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: _types.TracebackType | None,
    ) -> bool | None:
        assert self.building is not None
        return self.building.__exit__(kind, error, trace)


def init(
    placement: str = "auto",
    *,
    device_memory: int | str = 0,
    host_memory: int | str = 0,
    file: _Path | None = None,
    file_memory: int | str = 0,
    device: _torch.device | str | None = None,
    margin: int | str = 0,
    chunk_size: int | str = 0,
    warmup_iterations: int = 1,
    update_threads: int = 0,
    strict: bool = False,
    progress: bool | None = None,
    allocator: str | None = None,
    watchdog: float = 0.0,
    file_engine: str = "auto",
    static_param_fraction: float = 0.0,
    static_optim_fraction: float = 0.0,
    process_group: _typing.Any = None,
    zero: int | str = 3,
    deadline: float = 0.0,
    rank_order: bool = False,
    register_frames: bool = False,
    shard_size: int | None = None,
    units: str = "auto",
    speculate: bool = True,
    cache_policy: str = "lru",
    bucket_size: int | str = 0,
    transport: str = "auto",
    expert_mesh: _typing.Any = None,
) -> _Init:
    """Opens the session: one device and one set of budgets. There is one session at a time.

    As a context manager, `with init(...):`, the call also builds a model in the session: each parameter that a module
    registers within the block goes into the session at once, so that the model may be larger than the GPU.

    Sizes are bytes, or texts such as "24GiB".

    Args:
        placement: "auto": the placement with the shortest predicted step. "cuda": as much as fits stays on the device.
            "cpu": optimizer states stay on the host and are updated there. "static": the two static fractions decide.
        device_memory: Bytes of the device for parameters, gradients, optimizer states and, except with
            allocator="torch", all other tensors that torch allocates there. 0: what is free on the GPU, less a
            thirty-second, at least 1 GiB; of the simulated device an eighth of what host_memory is by itself, at most
            8 GiB.
        host_memory: Bytes of page-locked host memory. 0: four fifths of what the process may still take, of which each
            of several processes of a machine takes an equal part.
        file: A directory on a fast disk, or several with ":" between them, for what fits neither on the device nor on
            the host.
        file_memory: Bytes in these directories.
        device: A torch device. None: the current GPU if there is one, of several processes of a machine that of
            LOCAL_RANK, unless the script has chosen another one by torch.cuda.set_device(); otherwise the simulated
            device, which is host memory with a budget, and whose tensors are CPU tensors.
        margin: Bytes of device_memory that stay unused.
        chunk_size: Bytes of a chunk, a power of two from 64 KiB to 1 GiB. 0: about a thousandth of device_memory,
            at most 32 MiB; on a GPU at least 2 MiB, and below 8 MiB a 256th of device_memory.
        warmup_iterations: Training steps that are watched before the first plan is made.
        update_threads: Threads that run optimizer updates on the host. 0: the cores less one; of several processes of a
            machine, of an equal part of the cores.
        strict: Unmap each chunk as soon as it has left the device, so that a stray access faults. For tests.
        progress: Whether long operations report their progress on stderr. None: if stderr is a terminal, otherwise in
            the log.
        allocator: Where torch's other tensors on the GPU are allocated. "pool": torch's caching allocator takes its
            segments from the session, so that these tensors and the model share device_memory. "process": the session
            serves every allocation of the process; nothing may have used CUDA before. "torch": torch's own memory,
            beside device_memory. None: "pool", where torch can do it (since 2.8), otherwise "torch". CUDA graphs need
            "torch", or resident().
        watchdog: Seconds. A thread that waits longer inside the library is reported in the log, with what it waits
            for and what dump() says. 0: never.
        file_engine: How files are read and written: "uring" (io_uring), "threads", or "auto": io_uring if the system
            permits it.
        static_param_fraction: For placement="static": the share of parameters that stays on the device, from 0 to 1.
        static_optim_fraction: For placement="static": the share of optimizer states that stays on the device, from 0
            to 1.
        process_group: A process group of torch.distributed whose processes train one model together, each with a device
            of its own; the budgets are those of one process. None: the default group, which is made if the script runs
            under torchrun and has made none. All these processes have to call init(). A DeviceMesh of all processes
            with the dimensions ("replicate", "shard") stands for the default group and shard_size.
        zero: With several processes, what they divide: 1: optimizer states, 2: gradients, too, 3: parameters, too;
            "auto": as 3, and the plan chooses how many parameters stay whole on the device between their uses.
        deadline: With several processes: the seconds to wait for one that makes no progress, and, here, for one that
            has not called init() yet. 0: 10, on GPUs 60; and here, as processes may load data before, as long as the
            process group waits (its timeout, half an hour unless the script has set another one). A process that has
            ended is not waited for; see "Several processes" in docs/pytorch.md.
        rank_order: With several processes on GPUs: add gradients in fp32 and in rank order, that of the processes, and
            round the sums once (fp32 sums), with the same bits in each run; slower. False: as fast as NCCL goes, in an
            order that it chooses and in the gradients' dtype (bf16 sums of bfloat16 gradients). On the simulated device
            sums are always in fp32 and in rank order.
        register_frames: With several processes on GPUs: register the memory into which parameters are gathered with
            NCCL, 2.19 or later, which may gather faster. Takes time in the first steps. No bit depends on it.
        shard_size: With several processes: how many of them, such as those of a machine, divide the model among
            themselves (hybrid sharding): the first so many, the next ones, and so on. Each such replica has the whole
            model, and gradients are added over all. It divides the number of processes. None: all of them.
        units: Whether parameters are acquired together, which costs the calling thread less. "auto": those of the model
            where all parameters, gradients, states and other tensors of the session fit on the device, and those of
            each repeated block where the blocks are small beside device_memory; with several processes only the
            latter. "always": those of each block, in any case. "never": each use by itself, except in unit().
        speculate: Compute updates of AdamW and Adam while the backward pass runs, as if nothing were clipped, in host
            memory that is not used otherwise. Results have the same bits with and without.
        cache_policy: Which expert of a mixture, in a model of infer(), leaves the device first: "lru", the one used
            longest ago; "frequent", the one used for the fewest tokens; "least-stale", the one whose block has just
            been passed. Results are the same.
        bucket_size: With several processes: bytes of gradients that are added over them in one call, once all of these
            are there; they stay on the device until then. At most 16 chunks; less than two: each chunk by itself. 0:
            128 MiB, or a 64th of the smallest device_memory if that is less.
        transport: With several processes, how they exchange parameters and gradients. "auto": by NCCL on GPUs, and on
            the simulated device by memory that the processes of one machine share. "torch": by torch.distributed, with
            the backends of the process group: nccl on GPUs, gloo on the simulated device.
        expert_mesh: With several processes, of which each computes some experts of a mixture for the tokens of all: a
            DeviceMesh of one dimension over those processes that have all experts together, such as
            `mesh["experts"]`. Parameters that are DTensors over it, with the placement Shard(0), are divided further
            among the processes that have the same experts. None: there are no such DTensors.

    Returns:
        A context manager, which gives the session. Its use is optional.

    Raises:
        GeminiError: There is a session already; a budget or another option is refused; torch lacks what libgemini
            needs.
        ValueError: An argument is not one of those above.
    """
    global _current
    if _current is not None:
        raise GeminiError("there is a session already: close() it first")
    cuda = _torch.cuda.is_available() if device is None else _torch.device(device).type == "cuda"
    _check_torch(cuda)
    if zero not in (1, 2, 3, "auto"):
        raise GeminiError(f'zero is {zero!r}: want 1, 2, 3 or "auto"', "INVALID")
    if units not in _UNITS:
        raise GeminiError(f"units is {units!r}: want {', '.join(map(repr, _UNITS))}", "INVALID")
    if transport not in _TRANSPORTS:
        raise GeminiError(f"transport is {transport!r}: want {' or '.join(map(repr, _TRANSPORTS))}", "INVALID")
    # Without "torch" also with GPUs, whose bytes the library's own communicators carry.
    backend = "cpu:gloo,cuda:nccl" if cuda and transport == "torch" else "gloo"
    process_group, shard_size = _ranks.find(process_group, shard_size, backend)
    expert_row = _ranks.expert_row(expert_mesh, process_group)
    if cuda and transport == "torch" and process_group is not None:
        if rank_order or register_frames or allocator not in (None, "torch"):
            asked = "rank_order" if rank_order else "register_frames" if register_frames else ""
            what = f"{asked} is True" if asked else f"allocator is {allocator!r}"
            raise GeminiError(
                f'{what}: with transport="torch" on GPUs want rank_order=False, register_frames=False, '
                'allocator="torch"',
                "INVALID",
            )
        allocator = "torch"  # a collective that allocates must not ask the session, which is within the call
    allocator = _allocator.choose(allocator, cuda)  # before the GPU is asked anything
    if cuda and (device is None or _torch.device(device).index is None):
        device = _ranks.choose_gpu(process_group)
    device = _torch.device(device or "cpu")
    several = _contextlib.nullcontext() if process_group is None else _ranks.Start(process_group, device, deadline)
    with several as start:
        wants_host = not _parse_bytes(host_memory, "host_memory")
        wants_device = not _parse_bytes(device_memory, "device_memory")
        share = _ranks.Share.of(start, wants_host or wants_device and not cuda)
        update_threads = update_threads or share.update_threads
        if wants_host:
            host_memory = share.host_bytes
        if wants_device:
            if cuda and (allocator == "torch" or start is not None and _ranks.may_share_gpus()):
                takes = 'allocator="torch" takes memory beside it'
                what = takes if allocator == "torch" else "processes may share the GPU"
                raise GeminiError(f"device_memory is 0, but {what}: set device_memory", "INVALID")
            if cuda:
                device_memory = _device_default(_torch.cuda.mem_get_info(device)[0])
            else:
                host_bytes = share.host_bytes or _ranks.host_default()
                device_memory = _simulated_default(host_bytes)
                host_memory = host_memory or host_bytes  # a second look at the machine finds another figure
        owner = Session(
            device=device,
            placement=placement,
            device_memory=device_memory,
            host_memory=host_memory,
            file=file,
            file_memory=file_memory,
            device_margin=margin,
            chunk_size=chunk_size,
            warmup_iterations=warmup_iterations,
            update_threads=update_threads,
            strict=strict,
            progress=progress,
            watchdog=watchdog,
            file_engine=file_engine,
            static_param_fraction=static_param_fraction,
            static_optim_fraction=static_optim_fraction,
            start=start,
            zero=_ZERO_AUTO if isinstance(zero, str) else zero,
            deadline=deadline,
            rank_order=rank_order,
            register_frames=register_frames,
            shard_size=shard_size,
            units=units,
            speculate=speculate,
            cache_policy=cache_policy,
            bucket_size=bucket_size,
            transport=transport,
            expert_row=expert_row,
        )
        try:
            owner.allocator = _allocator.start(allocator, owner)
        except BaseException:
            owner.close(force=True)
            raise
    _current = owner
    _watch(True)
    return _Init(owner)


@_typing.overload
def prepare(
    model: _Module,
    optimizer: None = None,
    *,
    step_in_backward: bool = False,
    offload_activations: bool = False,
    states: str = "fp32",
    masters: str = "fp32",
) -> _Module: ...


@_typing.overload
def prepare(
    model: _Module,
    optimizer: _torch.optim.Optimizer,
    *,
    step_in_backward: bool = False,
    offload_activations: bool = False,
    states: str = "fp32",
    masters: str = "fp32",
) -> tuple[_Module, Optimizer]: ...


def prepare(
    model: _Module,
    optimizer: _torch.optim.Optimizer | None = None,
    *,
    step_in_backward: bool = False,
    offload_activations: bool = False,
    states: str = "fp32",
    masters: str = "fp32",
) -> _Module | tuple[_Module, Optimizer]:
    """Moves a model's parameters into the session, and makes an optimizer that updates them where they are.

    A call of the prepared model begins a training step, so prepare the module that the training loop calls.

    Args:
        model: Its parameters stay the same objects, of the same shapes, and keep their addresses from now on; in the
            place of DTensors, as of parallelize_module(), come others (docs/pytorch.md). Its floating-point parameters
            are float32, bfloat16 or float16, and none is on the meta device.
        optimizer: An optimizer over the model's parameters, which has not made a step.
        step_in_backward: Each backward pass is a step: a parameter is updated as soon as its gradient is complete, and
            optimizer.step() only ends the step. This hides most of the update, and gradients of 16 bits need no memory
            of their own, unless there are several processes. For torch.optim.AdamW and Adam, without accumulation,
            clipping or loss scaling: reading a gradient is an error.
        offload_activations: Every forward pass of the model runs as if within offload_activations().
        states: How AdamW and Adam keep momentum and variance: "fp32"; "bf16", which takes half the memory and rounds
            each new value stochastically; or "8bit", which takes a fourth: codes in blocks of 256 elements with a
            scale each, of which variances get the one above or below stochastically. Losses differ slightly from those
            of fp32.
        masters: How AdamW and Adam keep the fp32 copies of bfloat16 parameters: "fp32", whole; or "split16", the 16
            bits that the parameter lacks. Nothing is lost, and each parameter takes 2 bytes less, unless one process
            with step_in_backward has its gradient in the parameter's bytes, which it then cannot. Parameters that lie
            exactly between two values of bfloat16 are rounded away from zero.

    Returns:
        The same model; with an optimizer, a pair of the model and the optimizer that makes the steps from now on.

    Raises:
        GeminiError: There is no session; or the model or the optimizer is refused, which the message explains.
        TypeError: The optimizer is not a torch.optim.Optimizer.
        ValueError: states or masters is none of the values above; or is given without an optimizer.
    """
    owner = session()
    _narrow.check(states, masters)
    if optimizer is None and (states, masters) != ("fp32", "fp32"):
        raise ValueError("states and masters are of an optimizer's: give the optimizer, too")
    inside = set(model.modules())
    if any(one.weights_only and one.module in inside for one in owner.models):
        raise GeminiError(
            f"the {type(model).__name__} was given to infer(), which keeps weights only, or has a module that was: to "
            "train it, call prepare() in place of infer()",
            "STATE",
        )
    prepared_model = _take(owner, model, False)
    if offload_activations:
        prepared_model.saving = _offload
    prepared = Optimizer(owner, optimizer, step_in_backward, states, masters) if optimizer is not None else None
    room = owner.manager.stats()["budget_bytes"]["device"] - owner.manager.config.device_margin_bytes
    needs: list[tuple[_typing.Any, str, str]] = [(lambda record: [record.place.dtype.itemsize], "", "will fail")]
    if prepared is not None and hasattr(prepared.rule, "at_once"):
        kind = type(prepared.inner).__name__
        needs.append(
            (prepared.rule.at_once, f", and updates it by {kind} together with gradient or states,", "may fail")
        )
    needs.append((None, ", and makes its gradient,", "has no plan, which makes it slow"))
    for at_once, what, then in needs:
        least, record = prepared_model.least_bytes(at_once)
        if least > room:
            _warnings.warn(
                f"device_memory leaves {room} bytes: a step that uses all of parameter {record.name} at once{what} "
                f"needs {least}, in chunks of {owner.manager.config.chunk_bytes}, and {then}",
                stacklevel=2,
            )
            break
    return model if prepared is None else (model, prepared)


def _take(owner: Session, model: _torch.nn.Module, weights_only: bool) -> _model.Model:
    """Puts a model into the session, or again one that is there: the models of a session in the order of that."""
    known = next((one for one in owner.models if one.module is model), None)
    owner.let_models_go()
    if known:
        known.take()
        owner.models.remove(known)
    taken = known or _model.Model(owner, model, weights_only)
    owner.models.append(taken)
    return taken


@_typing.overload
def infer(
    model: _Module, *, in_place: bool | None = None, verify: bool = True, progress: bool | None = None
) -> _Module: ...


@_typing.overload
def infer(
    model: _Path, *, in_place: bool | None = None, verify: bool = True, progress: bool | None = None
) -> _typing.Any: ...


def infer(
    model: _typing.Any, *, in_place: bool | None = None, verify: bool = True, progress: bool | None = None
) -> _typing.Any:
    """Moves a model's weights into the session, for inference.

    There are weights only: no gradients, no optimizer states. Parameters are frozen, and as nothing changes them, they
    are not copied back when they leave the device. The model is in eval mode, and its passes run without gradients.

    Args:
        model: A model, as of prepare(); or a folder that transformers or save() wrote, whose model is built and gets
            its weights from the files straight to where they will live.
        in_place: For a folder: whether weights stay in its files, which must not change, until they are wanted, and
            are read again when they have left the host. None: they do, and as many as the host has room for are read
            at once, in the background, so that the first pass begins before all have come. False: all are read before
            infer() returns, and the files are not needed any more. With several ranks it is always False.
        verify: For a folder: compare checksums first, if it has any, which reads all bytes once more.
        progress: For a folder: as of init(). None: what init() was given.

    Returns:
        The same model, or that of the folder.

    Raises:
        GeminiError: There is no session; the model was prepared for training, shares a parameter that needs gradients
            with one that was, or is refused as by prepare(); the folder names no model that transformers has, or lacks
            a weight, or one is damaged.
        OSError: A file cannot be read.
    """
    owner = session()
    from_files = not isinstance(model, _torch.nn.Module)
    if not isinstance(model, _torch.nn.Module):
        show = owner.progress if progress is None else progress
        model = _checkpoint.from_folder(owner, model, verify, show, in_place)
    elif in_place is not None:
        raise GeminiError("in_place is for folders: the weights of a model are where it has them", "INVALID")
    elif any(one.module is model and not one.weights_only for one in owner.models):
        raise GeminiError(
            f"the {type(model).__name__} was given to prepare(), so it may have gradients: call infer() in place of "
            "prepare(), or evaluate it as it is",
            "STATE",
        )
    trained = {id(record.param) for one in owner.models if not one.weights_only for record in one.records.values()}
    for name, param in model.named_parameters():
        if id(param) in trained and param.requires_grad:
            raise GeminiError(
                f"parameter {name} belongs to a model that was given to prepare() as well, where infer() would freeze "
                "it: give infer() a copy.deepcopy(), or freeze it before",
                "STATE",
            )
    model.requires_grad_(False).eval()
    taken = _take(owner, model, True)
    taken.move_to_files()
    if from_files and in_place is None:
        taken.read_soon()
    least, record = taken.least_bytes(lambda record: [record.place.dtype.itemsize])
    room = owner.manager.stats()["budget_bytes"]["device"] - owner.manager.config.device_margin_bytes
    if least > room:
        _warnings.warn(
            f"device_memory leaves {room} bytes: a pass that uses all of parameter {record.name} at once needs "
            f"{least}, in chunks of {owner.manager.config.chunk_bytes}, and will fail",
            stacklevel=2,
        )
    return model


def offload_activations(min_bytes: int | str = "1MiB") -> _typing.ContextManager[None]:
    """A context manager: what autograd saves within it for the backward pass may leave the device.

    Tensors that autograd saves are copied into the session, where they leave the device for the host and files, and
    come back ahead of their use, as the plan says. With activation checkpointing these are the inputs of the
    checkpointed blocks. Tensors that share their memory are saved once. They are not saved again if only something
    that torch does not count as a change (`.data`, a kernel of one's own) has changed them.

    Args:
        min_bytes: Bytes, or a text such as "64KiB". Smaller tensors stay with torch.

    Raises:
        GeminiError: There is no session.
        ValueError: min_bytes is not a size.
    """
    return _activations.activations(session()).saving(_parse_bytes(min_bytes, "min_bytes"))


_offload = offload_activations  # prepare() has an argument of the same name


def unit(module: _Module) -> _Module:
    """Makes a module of the prepared model a unit: all of its parameters come and go together.

    prepare() does so with modules that torch.compile() or module.compile() has compiled. Modules whose kernels torch
    does not see, and those that a CUDA graph replays, need it; many small operators cost less as one unit. All
    parameters of a unit have to fit on the device at the same time.

    Args:
        module: A module within a prepared model. It is not within another unit, and has none within it.

    Returns:
        The same module.

    Raises:
        GeminiError: There is no prepared model, the module is not in one, it overlaps with another unit, or its
            parameters do not fit on the device.
    """
    _unit.unit(_prepared(), module)
    return module


def resident(module: _torch.nn.Module) -> _typing.ContextManager[None]:
    """A context manager: within it a unit's parameters are on the device, and plain parameters for torch.

    It is for capturing the module in a CUDA graph:

        with gm.resident(block):
            torch.cuda.make_graphed_callables(block, (sample,))

    Nothing else of the model may be used within. Afterwards each call of the module brings its parameters before the
    graph is replayed.

    Args:
        module: A module within a prepared model. It becomes a unit if it is none.

    Raises:
        GeminiError: As unit(); or there is no room on the device.
    """
    return _unit.resident(_prepared(), module)


def join(batches: _typing.Iterable[_Batch]) -> _ranks.Join[_Batch]:
    """Iterates over batches as long as any process has one, so that processes with less data join the others' steps.

    A process whose batches have ended gets its last one again: it makes the same calls as the others, and what it
    computes counts for nothing. Its gradients are zeros in the mean over all processes. Each step begins when all
    processes have told whether they have a batch.

    Args:
        batches: Of this process, at least one; another number in each process.

    Returns:
        An object to iterate over, such as in `for batch in join(loader):`. Its attribute idle says whether the latest
        batch was a repeated one, whose loss is not to be counted.

    Raises:
        GeminiError: There is no session; processes have experts of their own (expert_mesh of init()); or, while
            iterating, a process has no batch at all.
    """
    return _ranks.Join(session().ranks, batches)


def _prepared() -> Session:
    owner = session()
    if owner.model is None:
        raise GeminiError("there is no model: call libgemini.torch.prepare() first")
    return owner


def save(
    folder: _Path,
    model: _torch.nn.Module,
    optimizer: _torch.optim.Optimizer | None = None,
    *,
    extra: _typing.Any = None,
    max_shard: int | str = "5GB",
    progress: bool | None = None,
) -> None:
    """Writes a checkpoint.

    The folder gets model.safetensors, or its shards, and config.json, which transformers loads; with an optimizer also
    its states and torch's random states, from which training goes on to the bit. Bytes go to the files from wherever
    they are, chunk by chunk. A checkpoint that is there already stays until the new one is complete and on the disk:
    a kill at any time leaves one of the two, and the disk needs room for both. Files of other names in the folder
    stay. Gradients are not saved: call it between optimizer.step() and the next backward pass.

    Args:
        folder: The directory. It is made if it does not exist.
        model: The prepared model.
        optimizer: The prepared optimizer.
        extra: What load() returns: numbers, texts, tensors, lists, tuples and dicts, such as the position in the data
            or scheduler.state_dict().
        max_shard: Bytes of a file of weights at most, or a text such as "5GB"; a larger tensor has a file of its own.
        progress: As of init(). None: what init() was given.

    Raises:
        GeminiError: There is no session, another process saves into the folder, or the model or the optimizer has
            something that a checkpoint cannot hold. The old checkpoint is unchanged.
        OSError: A file cannot be written. The old checkpoint is unchanged.
        ValueError: max_shard is 0 or not a size.
    """
    owner = session()
    _checkpoint.save(
        owner, folder, model, optimizer, extra, max_shard, owner.progress if progress is None else progress
    )


def load(
    folder: _Path,
    model: _torch.nn.Module,
    optimizer: _torch.optim.Optimizer | None = None,
    *,
    verify: bool = True,
    progress: bool | None = None,
) -> _typing.Any:
    """Loads a checkpoint into a prepared model and, if given, a prepared optimizer.

    With an optimizer torch's random states are set, too. A folder that transformers wrote has weights only. An error
    comes before anything has changed.

    Args:
        folder: What save() wrote.
        model: The prepared model, with the parameters that the checkpoint has.
        optimizer: The prepared optimizer.
        verify: Compare checksums first, which reads all bytes once more.
        progress: As of init(). None: what init() was given.

    Returns:
        What save() was given as extra.

    Raises:
        GeminiError: There is no session, or the checkpoint is damaged or does not fit the model; the message names the
            tensor or the file.
        OSError: A file cannot be read.
    """
    owner = session()
    return _checkpoint.load(owner, folder, model, optimizer, verify, owner.progress if progress is None else progress)


def load_weights(model: _torch.nn.Module, folder: _Path, *, verify: bool = True, progress: bool | None = None) -> None:
    """Reads weights into a model, which may be on the meta device and larger than any memory.

    Each parameter on the meta device gets its place in the session, and its bytes straight from the file.
    Floating-point values of another dtype than the parameter's are converted. Tensors that the model does not have are
    passed over with a warning. Weights that transformers would have to split or merge first need from_pretrained()
    within init().

    Args:
        model: The model, before or after prepare().
        folder: A checkpoint, or a folder of the Hugging Face hub.
        verify: Compare checksums first, if the folder has any, which reads all bytes once more.
        progress: As of init(). None: what init() was given.

    Raises:
        GeminiError: There is no session, or a tensor is missing, damaged, or of another shape than the parameter's.
        OSError: A file cannot be read.
    """
    owner = session()
    with _checkpoint.together(owner, _checkpoint.Mesh(model)):
        source = _checkpoint.Folder(folder)
    _checkpoint.load_weights(owner, model, source, verify, owner.progress if progress is None else progress)


def stats() -> dict[str, _typing.Any]:
    """The session's statistics.

    Returns:
        The fields of gemini_stats_t by name: sizes in bytes, times in nanoseconds; what it has by tier, link or reason
        as a dict by the name of that. docs/pytorch.md explains the most useful ones.

    Raises:
        GeminiError: There is no session.
    """
    session().arenas.free_places()
    return session().manager.stats()


def stats_reset() -> None:
    """Starts peaks, moved bytes, hits, stalls and report()'s count of steps anew.

    Raises:
        GeminiError: There is no session.
    """
    _report.stats_reset(session())


def hint(*tensors: _torch.Tensor) -> None:
    """Says which experts of a mixture the running pass is expected to use, so that they come ahead of their use.

    It is for programs that predict a router's choice, as from the input of the block before. Where the device is full,
    experts that were not named in this pass make room. A wrong prediction costs a copy and changes no result. Outside
    of passes that follow a plan only free memory is taken.

    Args:
        tensors: Weights of experts in the session: parameters, or parts of them such as `experts.gate_up_proj[3]`.

    Raises:
        GeminiError: There is no session, or one of the tensors is not in it.
    """
    _experts.hint(session(), tensors)


def explain() -> str:
    """The plan in words.

    Returns:
        What stays on the device, what comes and goes, and what a step waits for; several lines.

    Raises:
        GeminiError: There is no session.
    """
    return session().manager.explain()


def dump() -> str:
    """The session's state in words, for when the program hangs.

    It never waits, so that any thread, such as a timer's, can call it.

    Returns:
        What is in use, which operator is open, and which threads wait inside the library, for what and since when.

    Raises:
        GeminiError: There is no session.
    """
    return session().manager.dump()


def report(path: _Path | None = None) -> str:
    """A text for people: memory by tier and kind, what moved and why, stalls, the largest parameters, the plan.

    Args:
        path: A file to write the text to as well.

    Returns:
        The text. Numbers that add up count from init() or stats_reset().

    Raises:
        GeminiError: There is no session.
        OSError: The file cannot be written.
    """
    text = _report.report(session())
    if path is not None:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    return text


def timeline(path: _Path) -> _typing.ContextManager[None]:
    """A context manager: records what the library does within it.

    Args:
        path: The file that gets operators, copies, waits, updates and bytes by tier, as Chrome trace events, which
            ui.perfetto.dev opens; picture() draws them.

    Raises:
        GeminiError: There is no session, it records a timeline already, or the file cannot be written.
    """
    return _report.timeline(session(), path)


def close(force: bool = False) -> None:
    """Ends the session. Its tensors must not be used any more.

    Without a session it does nothing.

    Args:
        force: Close even if tensors on the GPU are left that torch allocated in the session (see init(): allocator).
            They must not be used afterwards either.

    Raises:
        GeminiError: Such tensors are left, and the session stays open; or an update on the way has failed.
    """
    global _current
    if _current is not None:
        try:
            _current.close(force)
        finally:
            if not _current.manager.handle:  # closed; else close() was refused and changed nothing
                _current = None
                _watch(False)


def _forked() -> None:
    """Gives the session up in a forked child: it lacks the threads and the locks, and CUDA does not work there."""
    global _current
    if _current is not None:
        _current.forked()
        _current = None
        _watch(False)


_os.register_at_fork(after_in_child=_forked)


@_atexit.register
def _leave() -> None:
    """Before Python and CUDA go: updates that are under way use memory, and torch frees what it has allocated here."""
    with _contextlib.suppress(Exception):
        close(force=True)
