"""What the rules that make an optimizer's steps have in common: TorchRule in torchrule.py, SliceRule in
slicerule.py and AdamwRule in adamw.py.

All have these methods for states. Names are those of torch, and "master" for the fp32 copy of a 16-bit parameter:

    let_go(record): Another rule takes over the parameter. Its states end and are freed, except the fp32 copy.
    states(record): By name, the place of a state, or the value of a state that is not in an arena.
    layout_of(record, state): The layout of a state that torch's optimizer has. By name, the dtype of a state in an
        arena, or the value of another one.
    check(record, layout): Raises GeminiError if renew() would refuse the layout.
    renew(record, layout): Makes states of a layout, which are zero. Returns their places by name.
    has_state(record), state_of(record), set_state(record, values): The state as the user sees it.
    others(), set_others(values): Entries of the optimizer's state that belong to no parameter.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import functools

import torch


def groups_of(groups):
    """The parameter group of each record, by the id of the record."""
    return {id(param._gm_record): group for group in groups for param in group["params"]}


def master_place(session, record):
    """The place of the fp32 copy of a parameter, which an earlier optimizer may have made."""
    if "master" not in record.states:
        record.states["master"] = session.arenas.counterpart(record.place, "master", torch.float32)
        record.renew_master(whole=True)
    return record.states["master"]


def own_step(inner):
    """The step of an optimizer without torch's hooks, which the prepared optimizer calls once a step.

    Returns:
        The function, and whether it is the one of the class, rather than one that was set for this optimizer alone.
    """
    own, step = vars(inner).get("step"), type(inner).step
    own = getattr(own, "_torchdynamo_orig_callable", own)  # the function that torch.compile() has wrapped
    if getattr(own, "_wrapped_by_lr_sched", False):  # a scheduler has wrapped it to count steps
        own = own.__wrapped__
    if own not in (None, step) and getattr(own, "__func__", None) is not step:
        return own, False
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return functools.partial(step, inner), True
