"""The ranks that have the same bytes of a model, and divide them among themselves by a group of the library.

Of most parameters these are all ranks of a session. Of a DTensor over a mesh of such ranks, as the experts of a mixture
are, each rank of the mesh has another part, and the owners of a part are the ranks that have it in their meshes.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import collections
import dataclasses
import typing

from ..abi import GeminiError


@dataclasses.dataclass(frozen=True)
class Owners:
    """Ranks that divide parameters, their gradients and states among themselves.

    Attributes:
        name: Which parameters these are, in the names of arenas; "": all that have no owners of their own.
        members: The ranks' numbers in the session, in ascending order.
        index: Which of them this process is.
        shard_size: How many of them divide the parameters; several replicas of so many have the same.
        group: The library's handle of their group.
        row: The ranks of the row of the mesh that has this process, in the order of the parts; a row has all of them.
    """

    name: str
    members: list[int]
    index: int
    shard_size: int
    group: int
    row: tuple[int, ...]

    @property
    def writes(self) -> bool:
        """Whether this process is in the first replica, which writes checkpoints."""
        return self.index < self.shard_size


def check_rows(rows: typing.Iterable[typing.Sequence[int]], count: int) -> list[tuple[int, ...]]:
    """The rows of a mesh of which every rank has told its own.

    Args:
        rows: Those of all ranks; ranks of one row give the same.
        count: How many ranks the session has.

    Raises:
        GeminiError: The rows do not divide all ranks, or have different lengths.
    """
    out = sorted({tuple(row) for row in rows})
    if sorted(rank for row in out for rank in row) != list(range(count)) or len({len(row) for row in out}) != 1:
        raise GeminiError(
            f"expert_mesh has the rows {[list(row) for row in out]} of ranks: want rows of equal length in which each "
            f"of the {count} ranks of the session is once"
        )
    return out


def shard_size_of(members: typing.Sequence[int], shard_size: int) -> int:
    """How many of some owners divide among themselves what they have: those in one replica of the session.

    Args:
        members: The owners, in ascending order.
        shard_size: Ranks of a replica of the session.
    """
    counts = set(collections.Counter(rank // shard_size for rank in members).values())
    return counts.pop() if len(counts) == 1 else len(members)
