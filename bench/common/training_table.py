"""Prints the table of bench/training_gpu.sh: a line for each log of bench/peers/llama_torch.py.

  training_table.py LOG...
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from table import Row, line, print_table, ratio, seconds

COLUMNS = (  # title, width
    ("row", 30),
    ("step", 8),
    ("on GPU", 8),
    ("bound", 8),
    ("binds", 24),
    ("/GPU", 6),
    ("/bound", 6),
    ("plan", 8),
    ("off", 6),
    ("clipped", 7),
    ("dep", 3),
    ("peak", 9),
)


def lines(name: str, rows: list[Row]) -> list[str]:
    """The lines of one log.

    Args:
        name: What the log is called.
        rows: Its rows.
    """
    bound = next((row for row in rows if row.get("against") == "bound"), {})
    alone = {row["case"].split()[0]: row["value"] for row in rows if "losses" in row}
    out = []
    for row in rows:
        if "departures" in row:
            step, planned = row["value"], row["predicted_sec_per_step"]
            cells = [" ".join([name, *row["case"].split()[2:]]), seconds(step), seconds(alone.get("gpu"))]
            cells += [seconds(bound.get("bound_seconds")), bound.get("binds", "-"), ratio(step, alone.get("gpu"))]
            cells += [ratio(step, bound.get("bound_seconds")), seconds(planned), f"{100 * (planned / step - 1):.1f}%"]
            cells += [str(row.get(key, "-")) for key in ("clipped_steps", "departures", "op_peak_error_bytes")]
            out.append(line(cells, [width for _, width in COLUMNS]))
            if "fsdp2" in alone:
                out.append(f"  FSDP2 with offload: {alone['fsdp2']:.4f} s, {alone['fsdp2'] / step:.2f} times as long")
        elif "mean_losses" in row:
            out.append(
                f"  {row['case']}: {row['bytes_per_param']:.2f} bytes a parameter, {row['ratio']:.2f} times as fast"
            )
            out.append(f"    mean losses {row['mean_losses']}")
            out.append(f"    beside      {row['against_mean_losses']}")
    return out


if __name__ == "__main__":
    print_table(COLUMNS, lines)
