"""Prints the table of bench/inference_gpu.sh: a line for each model and budget in logs of generate_torch.py.

  inference_table.py LOG...
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from table import Row, line, print_table, ratio, seconds

COLUMNS = (  # title, width; "least" is the larger of the bound and of the time all on the GPU
    ("row", 42),
    ("token", 8),
    ("on GPU", 8),
    ("bound", 8),
    ("/least", 7),
    ("first", 8),
    ("dep", 4),
    ("there", 6),
    ("start", 8),
    ("/read", 6),
    ("offload", 8),
    ("tokens", 6),
)


def lines(name: str, rows: list[Row]) -> list[str]:
    """The lines of one log.

    Args:
        name: What the log is called.
        rows: Its rows.
    """
    measured = [row for row in rows if "tokens_hash" in row]
    alone = next((row for row in measured if row["case"].startswith("gpu ")), None)
    offload = {row["case"].split(" ", 1)[1]: row for row in measured if row["case"].startswith("accelerate ")}
    out = []
    for row in measured:
        system, case = row["case"].split(" ", 1)
        if system != "gemini":
            continue
        token, peer = row["value"], offload.get(case)
        gpu = alone["value"] if alone else None
        same = {one["first_tokens_hash"] for one in (alone, peer) if one} <= {row["first_tokens_hash"]}
        cells = [f"{name} {case}", seconds(token), seconds(gpu), seconds(row["bound_seconds"])]
        cells += [ratio(token, max(row["bound_seconds"], gpu or 0.0)), seconds(row["first_token_seconds"])]
        cells += [str(row["departures"]), f"{100 * row['hit_share']:.1f}%", seconds(row.get("start_seconds"))]
        cells += [ratio(row.get("start_seconds", 0.0), row.get("reading_seconds"))]
        cells += [seconds(peer["value"] if peer else None), "same" if same else "differ"]
        out.append(line(cells, [width for _, width in COLUMNS]))
    return out


if __name__ == "__main__":
    print_table(COLUMNS, lines)
