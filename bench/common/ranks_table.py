"""Prints the table of bench/ranks_gpu.sh: a line for each log of bench/peers/llama_torch.py and of bench_gather.

  ranks_table.py LOG...
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from table import Row, line, print_table, seconds

COLUMNS = (  # title, width
    ("row", 16),
    ("ranks", 5),
    ("step", 8),
    ("tokens/s", 9),
    ("plan", 8),
    ("gathers", 9),
    ("sums", 10),
    ("dep", 3),
    ("peak", 9),
    ("GPU GiB", 7),
    ("host B/param", 12),
    ("losses", 16),
)


def shares(values: list[float] | None) -> str:
    """Parts of the step, in percent, of the rank with the least and of that with the most; or a dash."""
    return f"{100 * min(values):.1f}-{100 * max(values):.1f}%" if values else "-"


def lines(name: str, rows: list[Row]) -> list[str]:
    """The lines of one log.

    Args:
        name: What the log is called.
        rows: Its rows.
    """
    out = []
    for row in rows:
        if row.get("bench") == "bench_gather":
            out.append(f"{name}: gathers {row['ratio']:.3f} of the ring, sums {row['reduce_ratio']:.3f}")
        elif "losses" in row:
            cells = [name, str(row["ranks"]), seconds(row["value"]), f"{row['tokens_per_second']:.0f}"]
            cells += [seconds(row.get("predicted_sec_per_step"))]
            cells += [shares(row.get(f"{what}_wait_shares")) for what in ("gather", "sum")]
            cells += [str(row.get(key, "-")) for key in ("departures", "op_peak_error_bytes")]
            cells += [f"{row['device_peak'] / 2**30:.1f}" if "device_peak" in row else "-"]
            # Of all processes, beyond what they had before the session.
            grown = row.get("host_all_peak_bytes", 0) - row.get("host_before_bytes", 0)
            cells += [f"{grown / row['params']:.2f}" if grown else "-"]
            cells += [f"{row['losses'][0]:.3f} - {row['losses'][-1]:.3f}"]
            out.append(line(cells, [width for _, width in COLUMNS]))
            if "host_made_bytes" in row:
                made, base = row["host_made_bytes"], row["host_before_bytes"]
                out.append(
                    f"  host memory of all processes: {base / 2**30:.2f} GiB before, {made / 2**30:.2f} once the model "
                    f"was made, {row['host_all_peak_bytes'] / 2**30:.2f} at most"
                )
    return out


if __name__ == "__main__":
    print_table(COLUMNS, lines)
