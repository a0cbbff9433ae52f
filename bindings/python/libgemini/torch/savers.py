"""Savers that read a tensor's bytes at its address are given copies.

safetensors takes `tensor.data_ptr()` of a CPU tensor and reads the memory there, which torch does not see. Tensors of
the simulated device are CPU tensors, whose addresses hold their bytes only while these are acquired. So the function of
safetensors that takes the address is replaced while there is a session; all that is built on it gets the right bytes:
save_file(), save_model(), save_pretrained(), trainers. DLPack capsules are made likewise.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import functools
import importlib
import typing

import torch

from ..abi import GeminiError
from . import patches
from .tensors import ManagedTensor, host_copy
from .whole import is_held

# Functions of safetensors.torch that are given a tensor and read at its address: until 0.7, and since 0.8.
_READERS = "_tobytes", "_to_ndarray"
_WRITERS = "serialize", "serialize_file"  # what save() and save_file() of every version end in


def _of_copy(function, copy=host_copy):
    """The function, for which a managed tensor becomes a plain copy."""

    @functools.wraps(function)
    def call(tensor, *args, **kwargs):
        if isinstance(tensor, ManagedTensor):
            tensor = copy(tensor)
        elif is_held(tensor):
            tensor = tensor.clone()
        return function(tensor, *args, **kwargs)

    return call


def _refuse(*args, **kwargs):
    import safetensors

    raise GeminiError(
        f"safetensors {safetensors.__version__} reads tensors by functions that this libgemini does not "
        "know, and might write wrong bytes of parameters in a session: save with libgemini.torch.save(), "
        "or install safetensors 0.8"
    )


def replacements() -> dict[patches.Replaced, typing.Any]:
    """See patches.py: functions that read at a tensor's address."""
    out = {one: _of_copy(one.original, torch.clone) for one in patches.to_dlpack()}
    try:
        module = importlib.import_module("safetensors.torch")
    except ImportError:  # it is not installed
        return out
    readers = patches.readers(module, _READERS)
    if readers:
        return {**out, **{one: _of_copy(one.original) for one in readers}}
    return {**out, **{one: _refuse for one in patches.readers(module, _WRITERS)}}
