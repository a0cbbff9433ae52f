"""What of tensors, and of anything that holds tensors, can be compared to the bit, and sent to another process.

SPDX-License-Identifier: Apache-2.0
"""

import hashlib
import itertools
import re

import numpy
import torch

HOW_TENSORS_ARE_PRINTED = r"\s|[()]|managed|number|parameter|containing:|tensor|,requires_grad=true|,grad_fn=<\w+>"
# Of an optimizer's groups: how it computes, not what; and what a scheduler leaves there.
NOT_COMPARED = ("foreach", "fused", "initial_lr")


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The bytes of a copy, which is plain memory of torch's."""
    copied = tensor.detach().clone(memory_format=torch.contiguous_format)
    return copied.reshape(-1).view(torch.uint8).numpy().tobytes() if copied.numel() else b""


def described(value: object) -> object:
    """Of anything that a program has: equal if and only if all bits are. A few numbers are there for people to read."""
    if isinstance(value, torch.Tensor):
        data = hashlib.blake2b(bytes_of(value), digest_size=8).hexdigest()
        return "tensor", str(value.dtype), tuple(value.shape), data, str(value.detach().reshape(-1)[:3].tolist())
    if isinstance(value, numpy.ndarray):
        return (
            "array",
            str(value.dtype),
            value.shape,
            hashlib.blake2b(value.tobytes(), digest_size=8).hexdigest(),
            str(value.flat[:3]),
        )
    if isinstance(value, dict):
        return "dict", tuple(
            sorted(((str(key), described(one)) for key, one in value.items() if key not in NOT_COMPARED), key=str)
        )
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return "list", tuple(described(one) for one in value)
    if isinstance(value, str):
        return re.sub(HOW_TENSORS_ARE_PRINTED, "", value.lower())
    if isinstance(value, (bytes, bool, int, float, type(None), torch.dtype, torch.Size)):
        return repr(value)
    return type(value).__name__.removeprefix("Managed")


def differing(look: dict, their_look: dict, but: object = "refused") -> str:
    """The first thing that is not the same in two dicts of descriptions, in words; "" if there is none.

    Args:
      look: what there is with libgemini.
      their_look: what torch alone has.
      but: what stands in look for something that is not to be compared.
    """
    for name in (*their_look, *(look.keys() - their_look.keys())):
        one, other = look.get(name, "nothing"), their_look.get(name, "nothing")
        if one == but or one == other:
            continue
        if isinstance(one, tuple) and isinstance(other, tuple) and one[0] == other[0] in ("list", "dict"):
            index, a, b = next(
                (index, a, b) for index, (a, b) in enumerate(itertools.zip_longest(one[1], other[1])) if a != b
            )
            return f"{name}[{index}] is {short(a)}, torch alone: {short(b)}"
        return f"{name} is {short(one)}, torch alone: {short(other)}"
    return ""


def short(value: object) -> str:
    """A description that fits on a line."""
    if isinstance(value, tuple) and value and value[0] in ("tensor", "array"):
        return f"{value[1].removeprefix('torch.')}{list(value[2])} {value[4]} ({value[3][:6]})"
    text = str(value)
    return text if len(text) < 600 else text[:600] + " ..."
