"""Whose memory torch's own tensors on the GPU are: activations, gradients on their way, workspace.

"pool": torch's caching allocator asks the session for segments, so that these and the model's chunks share one budget,
and running out means that chunks leave. "process": every allocation of the process is the session's. "torch": torch's
own; device_memory should then leave room beside it. See docs/hook.md.

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
    """Whether one pool can serve all threads, those of autograd, too: since torch 2.8 it is the pool that knows whom to
    ask."""
    return internals.end_allocating_to is not None


@functools.cache
def _pluggable():
    """The library as torch's allocators call it. Never freed: torch keeps pointers to it."""
    return torch.cuda.memory.CUDAPluggableAllocator(abi.library().path, "gemini_torch_malloc", "gemini_torch_free")


def choose(kind, cuda):
    """The kind that init() was told, or that is usual; to be called before anything starts CUDA."""
    global _process
    if kind is not None and kind not in KINDS:
        raise ValueError(f"allocator is {kind!r}: want one of {', '.join(KINDS)}")
    if not cuda:
        if kind not in (None, "torch"):
            raise ValueError(f"allocator is {kind!r}, which is for a GPU: the session's device is none")
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
    """Every allocation comes to the library."""

    def __init__(self, session):
        self.session = session
        session.lib.hook_set(session.handle, 0)

    def suspended(self):
        return contextlib.nullcontext()

    def close(self, force=False):
        """Torch gives back what it holds; tensors that are left are an error, unless they are to be left to their
        fate."""
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
        internals.clear_workspaces()
        torch.backends.cuda.cufft_plan_cache.clear()
        gc.collect()
        torch.cuda.synchronize(self.session.device)


class Pool(Process):
    """Torch's caching allocator, on any thread and stream, asks the library for segments.

    To torch that is as if a graph was captured all the time: memory of tensors with record_stream() comes back only
    when the routing ends, and what a graph captures needs suspended().
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
        """What torch allocates within is its own."""
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
    """What serves a session's torch, or None."""
    return {"pool": Pool, "process": Process}[kind](session) if kind != "torch" else None
