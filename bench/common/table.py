"""What the tables of bench/training_gpu.sh, bench/ranks_gpu.sh and bench/inference_gpu.sh have in common.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]


def line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """The cells below their titles, the first one to the left."""
    return " ".join([cells[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:])])


def ratio(value: float, of: float | None) -> str:
    """value in terms of `of`, or a dash."""
    return f"{value / of:.3f}" if of else "-"


def seconds(value: float | None) -> str:
    """Seconds, or a dash."""
    return f"{value:.4f}" if value else "-"


def print_table(columns: Sequence[tuple[str, int]], lines: Callable[[str, list[Row]], list[str]]) -> None:
    """Prints a table of the logs that the command names.

    Args:
        columns: Titles and widths.
        lines: Makes the lines of one log, of what it is called and its rows.
    """
    print(line([title for title, _ in columns], [width for _, width in columns]))
    for path in map(pathlib.Path, sys.argv[1:]):
        with path.open(errors="replace") as log:
            rows = [json.loads(text[4:]) for text in log if text.startswith("ROW ")]
        print("\n".join(lines(path.stem, rows) or [f"{path.stem}: no row"]))
