"""PyTorch on libgemini: models that do not fit on the GPU, trained with a few lines more.

    import libgemini.torch as gm

    with gm.init(placement="auto", device_memory="24GiB", host_memory="100GiB"):
      model = LlamaForCausalLM(config)      # each parameter goes to the host as it is made
    model, optimizer = gm.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    loss = model(ids, labels=ids).loss
    loss.backward(); optimizer.step(); optimizer.zero_grad()

SPDX-License-Identifier: Apache-2.0
"""

import atexit as _atexit
import contextlib as _contextlib
import os as _os
import warnings as _warnings

import torch as _torch

from ..abi import GeminiError
from ..manager import parse_bytes as _parse_bytes

# First, as it looks at torch's version.
from .internals import check as _check_torch  # isort: split

from . import (
    activations as _activations,
    allocator as _allocator,
    checkpoint as _checkpoint,
    model as _model,
    report as _report,
    unit as _unit,
)
from .ddp import watch_ddp as _watch_ddp
from .optim import Optimizer, watch_steps as _watch_steps
from .picture import picture
from .savers import watch_savers as _watch_savers
from .session import Session
from .tensors import watch_functions as _watch_functions

__all__ = [
    "GeminiError",
    "close",
    "dump",
    "explain",
    "init",
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

_current = None


def session():
    """The session that init() made."""
    if _current is None:
        raise GeminiError("there is no session: call libgemini.torch.init() first")
    return _current


def _watch(on):
    """What torch does not ask us about is replaced while there is a session."""
    for watch in (_watch_functions, _watch_ddp, _watch_savers, _watch_steps, _unit.watch_scripting):
        watch(on)


class _Init:
    """Of init(): as a context manager, modules built within put each parameter into the session at once."""

    def __init__(self, owner):
        self.session = owner
        self.building = None

    def __enter__(self):
        self.building = _model.building(self.session)
        self.building.__enter__()
        return self.session

    def __exit__(self, *error):
        return self.building.__exit__(*error)


def init(
    placement="auto",
    *,
    device_memory,
    host_memory=0,
    file=None,
    file_memory=0,
    device=None,
    margin=0,
    window=0,
    warmup_iterations=1,
    update_threads=0,
    strict=False,
    progress=None,
    allocator=None,
    watchdog=0.0,
    file_engine="auto",
    **more,
):
    """Opens the session: one device, one set of budgets. Sizes are bytes, or texts such as "24GiB".

    placement: "auto" (what predicted step time says), "cuda" (as much as fits stays on the device), "cpu" (everything
    visits it), "static" (with static_param_fraction and static_optim_fraction).
    host_memory: 0: four fifths of what the process may still take. file, file_memory: a directory, or several with ":"
    between, for what does not fit in memory either.
    device: a torch device; by default the GPU if there is one, else the host-simulated device, with tensors on the CPU.
    margin: of device_memory, left unused. window: bytes of a chunk; 0: a thousandth of device_memory, about.
    progress: whether operations that take long say on stderr how far they are; None: if it is a terminal, otherwise in
    the log.
    allocator: whose memory torch's other tensors on the GPU are: "pool" (the usual one): torch asks the session for
    segments, so that these and the model share device_memory; "process": every allocation is the session's, which must
    come before CUDA is used; "torch": torch's own, for which device_memory should leave room. CUDA graphs want "torch",
    or resident().
    strict: chunks that left the device are unmapped at once, so that a stray access faults: for tests.
    watchdog: seconds after which a thread that waits inside the library is told of in the log, with what it waits for;
    0: never.
    file_engine: "auto", "uring" or "threads".
    """
    global _current
    if _current is not None:
        raise GeminiError("there is a session already: close() it first")
    cuda = _torch.cuda.is_available() if device is None else _torch.device(device).type == "cuda"
    _check_torch(cuda)
    allocator = _allocator.choose(allocator, cuda)  # before the GPU is asked anything
    if device is None:
        device = _torch.device("cuda", _torch.cuda.current_device()) if cuda else "cpu"
    owner = Session(
        device=_torch.device(device),
        placement=placement,
        device_memory=device_memory,
        host_memory=host_memory,
        file=file,
        file_memory=file_memory,
        device_margin=margin,
        window=window,
        warmup_iterations=warmup_iterations,
        update_threads=update_threads,
        strict=strict,
        progress=progress,
        watchdog=watchdog,
        file_engine=file_engine,
        **more,
    )
    try:
        owner.allocator = _allocator.start(allocator, owner)
    except BaseException:
        owner.close(force=True)
        raise
    _current = owner
    _watch(True)
    return _Init(owner)


def prepare(model, optimizer=None, *, step_in_backward=False, offload_activations=False):
    """Moves a model's parameters into the session and returns (model, optimizer): the same model, and an optimizer that
    updates each parameter where it lives. Only the model, if there is no optimizer.

    step_in_backward: every backward pass is a step, in which each parameter is updated as soon as its gradient is
    there; optimizer.step() only ends it. It hides most of the update, and gradients of 16 bits take no memory of their
    own. For
    AdamW and Adam, without accumulation, clipping or loss scaling: reading a gradient is an error.
    offload_activations: the model's forward passes are as within offload_activations().
    """
    owner = session()
    known = next((one for one in owner.models if one.module is model), None)
    if known:
        known.take()
        owner.models.remove(known)
    owner.models.append(known or _model.Model(owner, model))
    if offload_activations:
        owner.model.saving = _offload
    prepared = Optimizer(owner, optimizer, step_in_backward) if optimizer is not None else None
    room = owner.manager.stats()["budget_bytes"]["device"] - owner.manager.config.device_margin_bytes
    for gradients, what, then in (
        (False, "", "will fail"),
        (True, ", and makes its gradient,", "has no plan, which makes it slow"),
    ):
        least, record = owner.model.least_bytes(gradients)
        if least > room:
            _warnings.warn(
                f"device_memory leaves {room} bytes: a step that uses all of parameter {record.name} at once{what} "
                f"needs {least}, in chunks of {owner.manager.config.window_bytes}, and {then}",
                stacklevel=2,
            )
            break
    return model if optimizer is None else (model, prepared)


def offload_activations(min_bytes="1MiB"):
    """`with offload_activations(): ...`: tensors of min_bytes or more that autograd saves for the backward pass are
    copied into the session, where they leave the device for the host and files, and come back, as the plan says.

    With activation checkpointing that is what its blocks begin with. Tensors that share their memory are saved once,
    and not again if only something that torch does not count as a change (`.data`, a kernel of one's own) has changed
    them.
    """
    return _activations.activations(session()).saving(_parse_bytes(min_bytes, "min_bytes"))


_offload = offload_activations  # which prepare() has an argument of the same name as


def unit(module):
    """Has all parameters of a module of the prepared model come and go as one; returns the module.

    prepare() does so with what torch.compile() or module.compile() compiled; what CUDA graphs replay needs it, and many
    small operators cost less as one. A unit has to fit on the device, and cannot be within another.
    """
    _unit.unit(_prepared(), module)
    return module


def resident(module):
    """As a context: a unit's parameters are on the device and plain ones, for whoever captures it in a CUDA graph.

        with gm.resident(block):
          torch.cuda.make_graphed_callables(block, (sample,))

    What is within may do nothing else of the model. Outside, each call brings the parameters before the graph is
    replayed.
    """
    return _unit.resident(_prepared(), module)


def _prepared():
    owner = session()
    if owner.model is None:
        raise GeminiError("there is no model: call libgemini.torch.prepare() first")
    return owner


def save(folder, model, optimizer=None, *, extra=None, max_shard="5GB", progress=None):
    """Writes a checkpoint: model.safetensors or its shards, and config.json, which transformers loads; with an
    optimizer what it needs to go on to the bit, and torch's random states.

    Bytes go to the files from wherever they are, chunk by chunk. The old checkpoint stays until the new one is whole
    and
    on the disk: a kill at any time leaves one of the two (room for both is needed). Files of other names in the folder
    stay. Gradients are not saved: call it between a step and the next backward pass.
    extra: what load() shall return: numbers, texts, tensors, lists, tuples and dicts, such as the position in the data
    or scheduler.state_dict(). progress: as of init()."""
    owner = session()
    _checkpoint.save(
        owner, folder, model, optimizer, extra, max_shard, owner.progress if progress is None else progress
    )


def load(folder, model, optimizer=None, *, verify=True, progress=None):
    """Loads a checkpoint into a prepared model, and optimizer, and returns its extra; with an optimizer, torch's random
    states are set, too. A folder that transformers wrote has weights only.

    Whatever does not fit or is damaged is an error that names it, before anything has changed. verify: compare
    checksums first, for which all bytes are read once more."""
    owner = session()
    return _checkpoint.load(owner, folder, model, optimizer, verify, owner.progress if progress is None else progress)


def load_weights(model, folder, *, verify=True, progress=None):
    """Reads the weights of a checkpoint, or of a folder of the Hugging Face hub, into a model that may be on the meta
    device: each of its parameters there gets its place in the session and its bytes straight from the file, so that the
    model may be larger than any memory. Floating-point values of another dtype than the parameter's are converted.

    Tensors the model has not are passed over with a warning. Weights that transformers would have to split or merge
    first need from_pretrained() within init(), which brings them in one after another, too."""
    owner = session()
    folder = _checkpoint.Folder(folder)
    _checkpoint.load_weights(owner, model, folder, verify, owner.progress if progress is None else progress)


def stats():
    """gemini_stats() of the session, as a dict."""
    session().free_places()
    return session().manager.stats()


def stats_reset():
    """Starts peaks, moved bytes, hits, stalls and the count of steps in report() anew."""
    _report.stats_reset(session())


def explain():
    """The plan in words."""
    return session().manager.explain()


def dump():
    """The session's state in words, for when it hangs: what is in use, which operator is open, which threads wait
    inside the library, for what and since when. Never waits itself, so that any thread, such as a timer's, can call
    it."""
    return session().manager.dump()


def report(path=None):
    """What memory holds by tier and kind, what moved and why, stalls, the biggest parameters and the plan, as a text
    for people; path: a file to write it to, too. Numbers that add up are those since init() or stats_reset()."""
    text = _report.report(session())
    if path is not None:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    return text


def timeline(path):
    """`with timeline(path): ...` records operators, copies, waits, updates and bytes by tier, and writes them to path
    as Chrome trace events, which ui.perfetto.dev opens; picture() draws them."""
    return _report.timeline(session(), path)


def close(force=False):
    """Ends the session. Its tensors must not be used any more.

    force: even while tensors on the GPU are left that torch allocated in the session (see init(): allocator), which
    must not be used either. Buffers of the model go to the CPU.
    """
    global _current
    if _current is not None:
        try:
            _current.close(force)
        finally:
            if not _current.manager.handle:  # else it was refused, and nothing has changed
                _current = None
                _watch(False)


def _forked():
    """The child has neither the threads nor the locks, and on a GPU nothing that would work."""
    global _current
    if _current is not None:
        _current.forked()
        _current = None
        _watch(False)


_os.register_at_fork(after_in_child=_forked)


@_atexit.register
def _leave():
    """Before Python and CUDA go: updates that are under way use memory, and torch frees what it has allocated here."""
    with _contextlib.suppress(Exception):
        close(force=True)
