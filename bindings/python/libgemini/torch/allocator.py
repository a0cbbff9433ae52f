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
import typing

import torch

from .. import abi
from ..abi import GeminiError
from ..manager import bytes_text
from . import internals

KINDS = ("pool", "process", "torch")
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

    def give_back(self):
        if self.routed:
            self.end()
        super().give_back()
        self.pool = None  # torch frees its segments now, or with the next empty_cache()
        torch.cuda.empty_cache()


def start(kind, session):
    """Starts the service of a kind for a session. Returns None for "torch"."""
    return {"pool": Pool, "process": Process}[kind](session) if kind != "torch" else None
