"""What a session's memory holds and what moved, in words and tables; timelines.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import os

from .. import abi
from ..manager import bytes_text

BIGGEST = 10  # parameters that the report names
TITLES = {
    "param": "parameters",
    "frozen": "frozen parameters",
    "grad": "gradients",
    "master": "master weights",
    "momentum": "momentum",
    "variance": "variance",
    "state": "optimizer states",
    "activations": "activations",
}


def _table(head, rows):
    """Rows of texts in columns: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(row[1:], widths[1:]))])
        for row in [head, *rows]
    ]
    return [line.rstrip() for line in lines]


def _bytes(count):
    return bytes_text(count) if count else "-"


def _share(part, whole):
    return f"{100 * part / whole:.1f} %" if whole else "none"


def _memory(owner, stats):
    """Budgets and use by tier, and by kind of what is there."""
    rows = [
        [name, "", *(_bytes(stats[key][tier]) for tier in abi.TIERS)]
        for name, key in (("budget", "budget_bytes"), ("in use", "used_bytes"), ("in use at most", "peak_bytes"))
    ]
    kinds: dict[str, list[int]] = {}
    for (kind, *_), arena in owner.arenas.handles.items():
        info = owner.manager.arena_info(arena)
        sums = kinds.setdefault(TITLES.get(kind.partition(" in ")[0], kind), [0, 0, 0, 0])
        for i, count in enumerate([info.size_bytes, *owner.manager.tier_bytes(arena).values()]):
            sums[i] += count
    rows += [["  " + kind, *map(_bytes, sums)] for kind, sums in kinds.items()]
    other = stats["nonmodel_bytes"], stats["nonmodel_peak_bytes"]
    rows.append(["  allocations", _bytes(other[0]), _bytes(other[0]), "", ""])
    rows.append(["  allocations at most", _bytes(other[1]), _bytes(other[1]), "", ""])
    if stats["host_alloc_bytes"]:
        rows.append(
            ["  blocks on the host", _bytes(stats["host_alloc_bytes"]), "", _bytes(stats["host_alloc_bytes"]), ""]
        )
    return _table(["memory", "size", *abi.TIERS], rows) + [
        "Kinds are listed where their newest bytes are; bytes that nobody has written are nowhere."
    ]


def _moves(stats, steps):
    each = max(1, steps)
    rows = [
        [link, *(_bytes(row[reason] / each) for reason in abi.REASONS), _bytes(sum(row.values()) / each)]
        for link, row in stats["moved_bytes"].items()
    ]
    return _table(["moved a step" if steps > 1 else "moved", *abi.REASONS, "in all"], rows)


def _times(stats, steps):
    lookups = stats["acquire_hits"] + stats["acquire_misses"]
    lines = [
        f"chunks that were there when wanted: {stats['acquire_hits']} of {lookups}, "
        f"{_share(stats['acquire_hits'], lookups)}",
        f"waiting for chunks: {stats['stall_ns'] / max(1, steps) / 1e6:.3f} ms a step",
        f"last step: {stats['measured_step_ns'] / 1e6:.3f} ms",
    ]
    if stats["predicted_step_ns"]:
        lines[-1] += f", predicted {stats['predicted_step_ns'] / 1e6:.3f} ms"
    lines.append(
        f"steps: {steps} since the last reset, {stats['iterations']} in all, {stats['planned_iterations']} of "
        f"them under a plan, {stats['departures']} left theirs"
    )
    return lines


def _biggest(owner):
    records = sorted(
        (record for record in owner.records if record.place.size_bytes), key=lambda record: -record.place.size_bytes
    )[:BIGGEST]
    rows = []
    for record in records:
        place = record.place
        shape = "x".join(map(str, place.shape))
        rows.append(
            [
                record.name,
                f"{shape} {str(place.dtype).removeprefix('torch.')}",
                _bytes(place.size_bytes),
                *map(_bytes, owner.manager.tier_bytes(place.arena, place.offset, place.size_bytes).values()),
            ]
        )
    return _table(["biggest parameters", "shape", "size", *abi.TIERS], rows)


def report(owner):
    """See libgemini.torch.report()."""
    owner.arenas.free_places()
    stats = owner.manager.stats()
    steps = stats["iterations"] - owner.reset_iterations
    where = str(owner.device) if owner.cuda else "the host-simulated device"
    parts = [
        [f"libgemini {owner.lib.version().decode()} on {where}, chunks of {bytes_text(stats['chunk_bytes'])}"],
        _memory(owner, stats),
        _moves(stats, steps),
        _times(stats, steps),
    ]
    if owner.records and not owner.backward.held:  # what a backward pass holds cannot be queried
        parts.append(_biggest(owner))
    parts.append(["plan", *("  " + line for line in owner.manager.explain().splitlines())])
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def stats_reset(owner):
    owner.lib.stats_reset(owner.handle)
    owner.reset_iterations = owner.manager.stats()["iterations"]


@contextlib.contextmanager
def timeline(owner, path):
    """See libgemini.torch.timeline()."""
    owner.lib.timeline_start(owner.handle, os.fsencode(path))
    try:
        yield
    finally:
        if owner.manager.handle:  # otherwise close() has written the timeline
            owner.lib.timeline_stop(owner.handle)
