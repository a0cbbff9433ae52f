"""A timeline as a picture: bytes by tier over time, above the operators, copies and waits of the same time.

One HTML file with its drawing inside, which needs nothing else. Each panel is reduced to a thousand columns: a line
keeps the highest, the lowest and the last value of each, spans that are closer than a column become one.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import html
import json
import math
import os
import typing

from ..manager import bytes_text

LEFT, WIDTH, RIGHT = 96, 1000, 16  # of the drawing: labels, columns, margin
PANEL, GAP, LANE = 150, 34, 22  # heights
SERIES = (("device", "on the device", "device"), ("host", "on the host", "host"), ("file", "in files", "file"))
LANES = (
    ("op", "operators"),
    ("fetch", "to the device"),
    ("evict", "from the device"),
    ("read", "from files"),
    ("write", "to files"),
    ("wait", "waiting"),
    ("update", "updates"),
)
PHASES = ("forward", "backward", "update", "none")

STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --text: #1f2328; --dim: #59636e; --grid: #d8dee4;
  --device: #2f6fdf; --nonmodel: #e08600; --host: #12855b; --file: #8250df; --budget: #cf222e;
  --forward: #4c8bf5; --backward: #c2571a; --update: #12855b; --none: #8c959f; --wait: #cf222e; --copy: #59636e; }
@media (prefers-color-scheme: dark) { :root { --back: #0d1117; --text: #e6edf3; --dim: #9198a1; --grid: #30363d;
  --device: #58a6ff; --nonmodel: #f0b040; --host: #3fb97f; --file: #b392f0; --budget: #ff7b72;
  --forward: #58a6ff; --backward: #f0883e; --update: #3fb97f; --none: #6e7681; --wait: #ff7b72; --copy: #9198a1; } }
body { background: var(--back); color: var(--text); font: 14px system-ui, sans-serif; max-width: 1140px;
  margin: 24px auto; padding: 0 16px; }
h1 { font-size: 18px; } p, .label, .tick { color: var(--dim); }
svg { width: 100%; height: auto; } text { fill: var(--text); font-size: 12px; }
.tick { fill: var(--dim); font-size: 11px; }
.grid { stroke: var(--grid); } .budget { stroke: var(--budget); stroke-dasharray: 6 4; }
table { border-collapse: collapse; margin: 12px 0; } td, th { padding: 3px 12px; text-align: right;
  border-bottom: 1px solid var(--grid); } td:first-child, th:first-child { text-align: left; }
.key { display: inline-block; width: 12px; height: 12px; margin: 0 6px 0 14px; vertical-align: -1px;
  border-radius: 2px; }
"""


def _load(timeline):
    with open(timeline, encoding="utf-8") as file:
        data = json.load(file)
    events = data.get("traceEvents", []) if isinstance(data, dict) else []
    counters = sorted(
        (
            (event["ts"], event["args"])
            for event in events
            if event.get("ph") == "C" and event.get("name") == "bytes by tier"
        ),
        key=lambda one: one[0],
    )
    if not counters:
        raise ValueError(
            f'{timeline} has no counters "bytes by tier": want a file that libgemini.torch.timeline() wrote'
        )
    spans = sorted((event for event in events if event.get("ph") == "X"), key=lambda event: event["ts"])
    return counters, spans, data.get("otherData", {})


def _ticks(most, count):
    """About count round numbers from 0 to most."""
    if most <= 0:
        return [0]
    raw = most / count
    scale = 10 ** math.floor(math.log10(raw))
    step = next(scale * k for k in (1, 2, 5, 10) if scale * k >= raw)
    return [step * i for i in range(int(most / step) + 1)]


def _byte_ticks(most):
    step = 2 ** max(0, math.ceil(math.log2(most / 4))) if most else 1
    return [step * i for i in range(int(most // step) + 1)]


class _Drawing:
    def __init__(self, begin, end):
        self.begin, self.end = begin, end
        self.parts = []
        self.y = 0

    def x(self, ts):
        return LEFT + (min(max(ts, self.begin), self.end) - self.begin) / (self.end - self.begin) * WIDTH

    def text(self, x, y, text, kind="", anchor="start"):
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{html.escape(text)}</text>'
        )

    def line(self, x1, y1, x2, y2, kind):
        self.parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>')

    def area(self, values, y_of, base, color):
        """values: (ts, value), each holds until the next one."""
        columns: list[tuple[int, float, float, float]] = []  # (column, highest, lowest, last)
        for ts, value in values:
            x = round(self.x(ts))
            if columns and columns[-1][0] == x:
                _, high, low, _ = columns[-1]
                columns[-1] = x, max(high, value), min(low, value), value
            else:
                columns.append((x, value, value, value))
        path = [f"M{columns[0][0]} {base:.1f}"]
        for x, *points in columns:
            path.append(f"H{x}" + "".join(f"V{y_of(value):.1f}" for value in points))
        path.append(f"H{LEFT + WIDTH}V{base:.1f}Z")
        self.parts.append(
            f'<path d="{"".join(path)}" fill="var(--{color})" fill-opacity="0.3" stroke="var(--{color})"/>'
        )

    def panel(self, title, layers, budget):
        """layers: (name, color, values), from the back to the front; the first is the highest."""
        top, base = self.y + GAP, self.y + GAP + PANEL
        most = max([value for _, value in layers[0][2]] + [1])
        near = budget and budget < most * 4  # otherwise the line would flatten what there is to see
        scale = max(most, budget if near else 0) * 1.05

        def y_of(value):
            return base - value / scale * PANEL

        self.text(LEFT, top - 8, title)
        for value in _byte_ticks(scale):
            self.line(LEFT, y_of(value), LEFT + WIDTH, y_of(value), "grid")
            self.text(LEFT - 8, y_of(value) + 4, bytes_text(value), "tick", "end")
        for _, color, values in layers:
            self.area(values, y_of, base, color)
        if near:
            self.line(LEFT, y_of(budget), LEFT + WIDTH, y_of(budget), "budget")
            self.text(LEFT + WIDTH, y_of(budget) - 4, f"budget {bytes_text(budget)}", "tick", "end")
        self.y = base

    def lane(self, title, spans, colors):
        """spans: in the order of their begin; colors: the name of each one's color."""
        top = self.y + 6
        self.text(LEFT - 8, top + LANE - 8, title, "tick", "end")
        drawn: list[list[typing.Any]] = []  # [first x, last x, color, names]
        for span, color in zip(spans, colors):
            first, last = self.x(span["ts"]), self.x(span["ts"] + span["dur"])
            if (
                drawn
                and drawn[-1][2] == color
                and first < drawn[-1][1] + 1
                and (last - first < 1 or drawn[-1][1] - drawn[-1][0] < 1)
            ):
                drawn[-1][1] = max(drawn[-1][1], last)
                drawn[-1][3].append(span)
            else:
                drawn.append([first, last, color, [span]])
        for first, last, color, some in drawn:
            name = some[0]["name"] if len(some) == 1 else f"{some[0]['name']} and {len(some) - 1} more"
            took = sum(span["dur"] for span in some)
            self.parts.append(
                f'<rect x="{first:.1f}" y="{top}" width="{max(last - first, 0.5):.1f}" height="{LANE - 4}" '
                f'fill="var(--{color})"><title>{html.escape(name)}: {took / 1e3:.3f} ms</title></rect>'
            )
        self.y += LANE

    def axis(self, top):
        base = self.y + 10
        span_ms = (self.end - self.begin) / 1e3
        ticks = _ticks(span_ms, 10)
        digits = max(0, -math.floor(math.log10(ticks[1]))) if len(ticks) > 1 else 0
        for ms in ticks:
            x = LEFT + ms / span_ms * WIDTH
            self.parts.insert(0, f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{base}" class="grid"/>')
            self.text(x, base + 14, f"{ms:.{digits}f} ms", "tick", "middle")
        self.y = base + 20


def _key(color, text):
    return f'<span class="key" style="background: var(--{color})"></span>{html.escape(text)}'


def picture(path: str | os.PathLike[str], timeline: str | os.PathLike[str]) -> None:
    """Draws a timeline as an HTML file, which needs no other file and no network.

    Bytes count for a tier from when they are given their place: on a GPU, where work is queued ahead, earlier than the
    operators that use them.

    Args:
        path: The HTML file to write.
        timeline: What libgemini.torch.timeline() wrote.

    Raises:
        GeminiError: The file is no timeline.
        OSError: A file cannot be read or written.
    """
    counters, spans, other = _load(timeline)
    budgets = {tier: int(count) for tier, count in other.get("budget_bytes", {}).items()}
    begin = min(0, counters[0][0])
    end = max([counters[-1][0]] + [span["ts"] + span["dur"] for span in spans])
    drawing = _Drawing(begin, max(end, begin + 1))
    rows, keys = [], []
    for tier, title, color in SERIES:
        values = [(ts, args[tier]) for ts, args in counters]
        most = max(value for _, value in values)
        if not most:
            continue
        layers = [(tier, color, values)]
        keys.append(_key(color, title))
        rows.append((title, values, budgets.get(tier)))
        if tier == "device":
            allocated = [(ts, args["non-model"]) for ts, args in counters]
            if any(value for _, value in allocated):
                layers.append(("non-model", "nonmodel", allocated))
                keys.append(_key("nonmodel", "of it allocations"))
                rows.append(("of it allocations", allocated, None))
        drawing.panel(title, layers, budgets.get(tier))
    drawing.y += 10
    used_phases = []
    for category, title in LANES:
        those = [span for span in spans if span["cat"] == category]
        if not those:
            continue
        if category == "op":
            phases = {span.get("args", {}).get("phase", "none") for span in those}
            used_phases = [phase for phase in PHASES if phase in phases]
            colors = [span.get("args", {}).get("phase", "none") for span in those]
        else:
            colors = [{"wait": "wait", "update": "update"}.get(category, "copy")] * len(those)
        drawing.lane(title, those, colors)
    drawing.axis(GAP)
    keys += [_key(phase, {"none": "no phase"}.get(phase, phase)) for phase in used_phases]
    keys += [_key("wait", "waiting for chunks")] if any(span["cat"] == "wait" for span in spans) else []
    table = "".join(
        f"<tr><td>{html.escape(title)}</td>"
        + "".join(
            f'<td title="{value} bytes">{bytes_text(value)}</td>' if value is not None else "<td></td>"
            for value in (budget, values[0][1], max(v for _, v in values), values[-1][1])
        )
        + "</tr>"
        for title, values, budget in rows
    )
    lost = int(other.get("lost_events", 0))
    note = f"<p>{lost} events were lost.</p>" if lost else ""
    document = f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Memory by tier</title><style>{STYLE}</style></head><body>
<h1>Memory by tier over {(end - begin) / 1e3:.3f} ms</h1>
<p>{"".join(keys)}</p>
<svg viewBox="0 0 {LEFT + WIDTH + RIGHT} {drawing.y:.0f}" role="img" aria-label="memory by tier over time">
{chr(10).join(drawing.parts)}
</svg>
<table><thead><tr><th></th><th>budget</th><th>at the start</th><th>at most</th><th>at the end</th></tr></thead>
<tbody>{table}</tbody></table>{note}
<p>Point at a span for its name and time. Bytes count from when they are given their place: where work is queued ahead,
earlier than the operators that use them.</p>
</body></html>
"""
    with open(path, "w", encoding="utf-8") as file:
        file.write(document)
