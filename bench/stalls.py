#!/usr/bin/env python3
"""What the GPU waited for inside a step, item by item, from a timeline of libgemini (docs/timeline.md).

  bench/stalls.py FILE [--least MICROSECONDS] [--alone SECONDS]

The last step in it is explained, which begins where its first operator comes for the last time; what that step waits
for may have been queued in the one before. An item is a time in which the stream of the operators stood still: inside
an operator for chunks, or between two operators. Each is split by what was under way meanwhile: what ended it (a copy,
a gather, a sum or an update), other work of the same queue before it, and, where that queue was idle, the evictions and
host updates that were under way elsewhere.
SPDX-License-Identifier: Apache-2.0
"""

import argparse
import collections
import json
import sys

NEAR_US = 100.0  # an event that ended a wait is at most so far from its end


def busy(events, begin, end):
    """Microseconds of [begin, end] in which at least one of the events was under way."""
    total, reached = 0.0, begin
    for e in sorted(events, key=lambda e: e["ts"]):
        first, last = max(e["ts"], reached), min(e["ts"] + e["dur"], end)
        if last > first:
            total += last - first
            reached = last
    return total


def between(events, begin, end):
    return [e for e in events if e["ts"] < end and e["ts"] + e["dur"] > begin]


def explain(tracks, kinds, begin, end, outside):
    """(what ended the wait, {reason: microseconds}) for one wait; outside: of operators."""
    enders = [e for kind in ("fetch", "evict", "gather", "sum", "device update") for e in kinds[kind]]
    near = [(abs(e["ts"] + e["dur"] - end), e) for e in enders if abs(e["ts"] + e["dur"] - end) <= NEAR_US]
    if not near:
        return "-", {"nothing was queued" if outside else "not explained": end - begin}
    ender = min(near, key=lambda pair: pair[0])[1]
    shares = collections.OrderedDict()
    start = min(max(ender["ts"], begin), end)
    shares["its own " + ender["kind"]] = end - start
    others = [e for e in between(tracks[ender["tid"]], begin, start) if e is not ender]
    queue = busy(others, begin, start)
    shares["others of its queue"] = queue
    idle = start - begin - queue
    evicts = between(kinds["evict"], begin, start) if ender["kind"] != "evict" else []
    for reason, events in (("evictions", evicts), ("updates on the host", between(kinds["host update"], begin, start))):
        share = min(idle, busy(others + events, begin, start) - queue)
        shares[f"{reason}, its queue idle"] = share
        idle -= share
    shares["nothing under way"] = idle
    return ender["name"], {reason: us for reason, us in shares.items() if us > 0.05}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--least", type=float, default=100.0, help="items below this many microseconds are only summed")
    parser.add_argument("--alone", type=float, help="seconds of the same step all on the GPU, to compare with")
    arguments = parser.parse_args()
    try:
        with open(arguments.file) as f:
            data = json.load(f)
        events = [e for e in data["traceEvents"] if e["ph"] == "X"]
        lost = int(data["otherData"]["lost_events"])
    except (OSError, ValueError, KeyError) as error:
        print(f"stalls.py: cannot read the timeline: {arguments.file}: {error}", file=sys.stderr)
        return 1
    kinds, tracks = collections.defaultdict(list), collections.defaultdict(list)
    for e in events:
        e["kind"] = e["cat"] if e["cat"] != "update" else "device update" if "device" in e["name"] else "host update"
        kinds[e["kind"]].append(e)
        tracks[e["tid"]].append(e)
    ops = sorted(kinds["op"], key=lambda e: e["ts"])
    if not ops:
        print(f"stalls.py: no operator in the timeline: {arguments.file}", file=sys.stderr)
        return 1
    step_begin = max(o["ts"] for o in ops if o["name"] == ops[0]["name"])
    ops = [o for o in ops if o["ts"] >= step_begin]
    step_end = max(e["ts"] + e["dur"] for e in ops)

    items = []  # operator, begin, end
    for before, after in zip(ops, ops[1:]):
        if after["ts"] > before["ts"] + before["dur"]:
            items.append((f"before {after['name']}", before["ts"] + before["dur"], after["ts"]))
    for wait in [w for w in kinds["wait"] if w["ts"] >= step_begin]:
        op = [o for o in ops if o["ts"] <= wait["ts"] + wait["dur"] / 2 <= o["ts"] + o["dur"]]
        items.append((op[0]["name"] if op else "no operator", wait["ts"], wait["ts"] + wait["dur"]))
    items.sort(key=lambda item: item[1])

    total, small, sums = 0.0, 0.0, collections.Counter()
    print(f"{'at ms':>9} {'wait ms':>8}  {'operator':<28} {'ended by':<28} because")
    for name, begin, end in items:
        total += end - begin
        if end - begin < arguments.least:
            small += end - begin
            continue
        ender, shares = explain(tracks, kinds, begin, end, name.startswith("before "))
        sums.update(shares)
        text = ", ".join(f"{reason} {us / 1e3:.3f}" for reason, us in shares.items())
        print(f"{(begin - step_begin) / 1e3:9.3f} {(end - begin) / 1e3:8.3f}  {name:<28} {ender:<28} {text}")
    if small > 0:
        sums[f"items below {arguments.least:g} us"] = small
    print(f"\n{'wait ms':>9} {'share':>6}  of a step of {(step_end - step_begin) / 1e3:.3f} ms")
    for reason, us in sums.most_common():
        print(f"{us / 1e3:9.3f} {100 * us / (step_end - step_begin):5.2f}%  {reason}")
    step = step_end - step_begin
    working = step - total
    print(f"{total / 1e3:9.3f} {100 * total / step:5.2f}%  in all; {len(items)} items, {lost} events lost")
    beside = f", {(working / 1e3 - arguments.alone * 1e3):+.3f} ms beside all on the GPU" if arguments.alone else ""
    print(f"{working / 1e3:9.3f} {100 * working / step:5.2f}%  operators at work{beside}")
    row = {
        "bench": "stalls",
        "case": "one step",
        "value": total * 1e-6,
        "unit": "s",
        "step_seconds": (step_end - step_begin) * 1e-6,
        "items": len(items),
        "lost_events": lost,
        "working_seconds": working * 1e-6,
        "not_explained_seconds": sums["not explained"] * 1e-6,
    }
    print("ROW " + json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
