"""Where torch allocates its own tensors on the GPU: activations, gradients on their way, workspace.

"pool": torch's caching allocator takes its segments from the session. So these tensors and the chunks of the model
share one budget, and chunks leave when it runs out. "process": the session serves every allocation of the process.
"torch": torch's own memory, for which device_memory has to leave room. See docs/hook.md.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import typing

import torch

from .. import abi
from ..abi import GeminiError
from ..manager import bytes_text
from . import internals, segments

KINDS = ("pool", "process", "torch")
_MOST_EVENTS = 1 << 18  # of a step that is simulated: a second or two
_process = False  # whether this process' allocator is ours, which is for good


def _has_pools():
    """Whether one memory pool can serve all threads, including those of autograd: since torch 2.8."""
    return internals.end_allocating_to is not None


@functools.cache
def _pluggable():
    """The allocator functions of the library, as torch takes them.

    They are never freed, as torch keeps pointers to them.
    """
    return torch.cuda.memory.CUDAPluggableAllocator(abi.library().path, "gemini_torch_malloc", "gemini_torch_free")


def choose(kind, cuda):
    """Chooses the kind: the one that init() was given, or the default. Call it before anything initializes CUDA."""
    global _process
    if kind is not None and kind not in KINDS:
        raise ValueError(f"allocator is {kind!r}: want one of {', '.join(KINDS)}")
    if not cuda:
        if kind not in (None, "torch"):
            raise ValueError(f"allocator is {kind!r}, which needs a GPU: the session runs on the CPU (want torch)")
        return "torch"
    if _process:
        if kind not in (None, "process"):
            raise GeminiError(f'allocator is {kind!r}: it was "process" before, and cannot change in a process')
        return "process"
    if kind == "process":
        if torch.cuda.is_initialized():
            raise GeminiError(
                'allocator is "process", but CUDA is in use already: call libgemini.torch.init() before '
                'anything touches the GPU, or take allocator="pool"'
            )
        torch.cuda.memory.change_current_allocator(_pluggable())
        _process = True
    if kind == "pool" and not _has_pools():
        raise GeminiError(
            f'allocator is "pool", which needs torch 2.8: this is {torch.__version__}; take "process" or "torch"'
        )
    return kind or ("pool" if _has_pools() else "torch")


class Process:
    """The session serves every allocation of the process."""

    def __init__(self, session):
        self.session = session
        session.lib.hook_set(session.handle, 0)

    def suspended(self):
        """A context manager: torch allocates its own memory within it."""
        return contextlib.nullcontext()

    def close(self, force=False):
        """Frees what torch has cached. Raises GeminiError if tensors are left, unless force."""
        self.give_back()
        left = self.session.manager.stats()["nonmodel_bytes"]
        if left and not force:
            raise GeminiError(
                f"{bytes_text(left)} that torch allocated in the session are in use: let go of tensors on the GPU "
                "(losses, outputs, batches) before libgemini.torch.close(), or tell it force=True and do not "
                "use them any more",
                "BUSY",
            )

    def give_back(self):
        """Has torch free its caches and workspaces."""
        internals.clear_workspaces()
        torch.backends.cuda.cufft_plan_cache.clear()
        gc.collect()
        torch.cuda.synchronize(self.session.device)

    def step_begins(self):
        """Called as a training step begins."""

    def step_ends(self):
        """Called as a training step ends. The memory of tensors that are gone is free already."""


class Pool(Process):
    """torch's caching allocator takes its segments from the session, on all threads and streams.

    torch treats this like a permanent capture of a CUDA graph. So memory of tensors with record_stream() comes back
    only when the pool ends, and the capture of a graph needs suspended().
    """

    def __init__(self, session):
        super().__init__(session)
        self.pool: typing.Any = torch.cuda.MemPool(_pluggable().allocator())
        self.index = session.device.index or 0
        self.routed = False
        self.fresh = True  # no training step has ended
        self.records = False  # torch records allocations for this pool
        self.begin()

    def begin(self):
        internals.begin_allocating_to(self.index, self.pool.id)
        self.routed = True

    def end(self):
        self.routed = False
        internals.end_allocating_to(self.index, self.pool.id)
        internals.release_pool(self.index, self.pool.id)

    @contextlib.contextmanager
    def suspended(self):
        """A context manager: torch allocates its own memory within it."""
        was = self.routed
        if was:
            self.end()
        try:
            yield
        finally:
            if was:
                self.begin()

    def step_begins(self):
        """Called as a training step begins. Has torch record the allocations of the first one."""
        if not self.may_compact():
            return
        self.end_recording()  # of a pass that no step followed
        if internals.may_record():
            internals.clear_workspaces()  # else the record would lack those of work before the step
            internals.record_allocations(_MOST_EVENTS)
            self.records = True

    def step_ends(self):
        """Called as a training step ends. Exchanges the pool's segments for fewer ones, if that takes less memory.

        Once, as the first step ends: the plan, which is made next, counts on that. Another pool takes the place of the
        first one, since torch gives nothing back of one in use.
        """
        if not self.may_compact():
            return
        self.fresh = False
        sizes = self.find_sizes()
        if not sizes:
            return
        self.end()
        try:
            self.pool = None
            torch.cuda.empty_cache()
        finally:
            self.pool = torch.cuda.MemPool(_pluggable().allocator())
            self.begin()
        with contextlib.suppress(torch.OutOfMemoryError):  # then the pool grows as the first one did
            tensors = [torch.empty(size, dtype=torch.uint8, device=self.session.device) for size in sizes]
            del tensors
            self.session.lib.hook_compacted(self.session.handle)

    def may_compact(self):
        """Whether the segments may be exchanged.

        Not if the user has configured torch's allocator: some of its options exclude one large segment.
        """
        if not self.fresh or not self.routed or self.session.ranks or not hasattr(self.pool, "snapshot"):
            return False
        return not any(os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))

    def find_sizes(self):
        """Returns which segments the pool should have, as segments.exchange() does."""
        device, size = self.session.device, 0
        if self.records:
            torch.empty(1, device=device)  # the last allocation: what is freed behind it are workspaces
        internals.clear_workspaces()  # they would hold segments
        if self.records:
            events = internals.allocations(self.index, _MOST_EVENTS)
            self.end_recording()
            end = max((i + 1 for i, (allocates, _, _) in enumerate(events) if allocates), default=0)
            size = segments.smallest(events, end)
            if events and not size:
                return []
        pool = self.pool.snapshot()
        if not size:
            size = torch.cuda.max_memory_allocated(device) + segments.largest(pool)
        return segments.exchange(pool, size, torch.cuda.current_stream(device).cuda_stream)

    def end_recording(self):
        if self.records:
            internals.end_recording()
            self.records = False

    def give_back(self):
        self.end_recording()
        if self.routed:
            self.end()
        super().give_back()
        self.pool = None  # torch frees its segments now, or with the next empty_cache()
        torch.cuda.empty_cache()


def start(kind, session):
    """Starts the service of a kind for a session. Returns None for "torch"."""
    return {"pool": Pool, "process": Process}[kind](session) if kind != "torch" else None
