"""Reports, timelines and pictures say what the statistics and counters do.

SPDX-License-Identifier: Apache-2.0
"""

import ctypes
import html.parser
import json
import re
import xml.etree.ElementTree

import pytest
import torch
from torch import nn

import libgemini.torch as gm
from libgemini import abi
from libgemini.manager import bytes_text


@pytest.fixture
def train(session, tmp_path):
    """A model of 8 layers of 64 KiB, of which a device of 768 KiB holds a part, after 3 steps; gives a function that
    makes steps."""
    session("768KiB", host_memory="768KiB", file=tmp_path, file_memory="64MiB")
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(8)])
    model, optimizer = gm.prepare(model, torch.optim.RMSprop(model.parameters()))  # a step of torch's: operators

    def train(steps):
        for _ in range(steps):
            model(torch.ones(2, 128)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    train(3)
    return train


def rows(text, title):
    """The table whose head begins with title: {first column: {column: text}}; columns end where their
    heads do."""
    table = next(part for part in text.split("\n\n") if part.startswith(title)).splitlines()
    names = re.split(r"  +", table[0])
    ends = [match.end() for match in re.finditer(r"\S+( \S+)*", table[0])][1:]  # of all columns but the first
    out = {}
    for line in table[1:]:
        name = re.match(r" *(\S+( \S+)*)", line)
        begins = [name.end(), *ends]
        out[name.group(1)] = {column: line[i:j].strip() for column, i, j in zip(names[1:], begins, ends)}
    return out


def said(count):
    return bytes_text(count) if count else "-"


def test_bytes_for_people():
    assert [bytes_text(n) for n in (0, 1023, 1024, 1536, 5 << 20, 3 << 30, 7 << 40, 2000 << 40)] == [
        "0 bytes",
        "1023 bytes",
        "1.0 KiB",
        "1.5 KiB",
        "5.0 MiB",
        "3.0 GiB",
        "7.0 TiB",
        "2000.0 TiB",
    ]


def test_report_memory_is_that_of_the_statistics(train):
    table, stats = rows(gm.report(), "memory"), gm.stats()
    for name, key in ("budget", "budget_bytes"), ("in use", "used_bytes"), ("in use at most", "peak_bytes"):
        assert {tier: table[name][tier] for tier in abi.TIERS} == {tier: said(n) for tier, n in stats[key].items()}
    size = 4 * 8 * (128 * 128 + 256)  # each tensor has a multiple of 256 elements to itself, a bias has 128
    sizes = {"parameters": size, "gradients": size, "optimizer states": size}
    assert {name: table[name]["size"] for name in sizes} == {name: said(n) for name, n in sizes.items()}
    manager = gm.session().manager
    held = {"param": [0, 0, 0], "state": [0, 0, 0]}
    for (kind, *_), arena in gm.session().arenas.handles.items():
        if kind in held:
            held[kind] = list(manager.tier_bytes(arena).values())
    assert sum(held["state"][1:]) > 0 and held["state"][2] > 0  # the case is one where all tiers are used
    for name, kind in ("parameters", "param"), ("optimizer states", "state"):
        assert [table[name][tier] for tier in abi.TIERS] == [said(n) for n in held[kind]]


def test_report_moves_and_times_are_a_step_s_since_the_reset(train):
    gm.stats_reset()
    assert "steps: 0 since the last reset, 3 in all" in gm.report()
    train(2)
    text, stats = gm.report(), gm.stats()
    table = rows(text, "moved a step")
    assert list(table) == list(abi.LINKS)
    for link, row in stats["moved_bytes"].items():
        assert [table[link][reason] for reason in abi.REASONS] == [said(n / 2) for n in row.values()]
        assert table[link]["in all"] == said(sum(row.values()) / 2) != "-"
    hits, misses = stats["acquire_hits"], stats["acquire_misses"]
    assert f"wanted: {hits} of {hits + misses}, {100 * hits / (hits + misses):.1f} %" in text
    assert f"waiting for chunks: {stats['stall_ns'] / 2e6:.3f} ms a step" in text
    measured, predicted = stats["measured_step_ns"], stats["predicted_step_ns"]
    assert f"last step: {measured / 1e6:.3f} ms, predicted {predicted / 1e6:.3f} ms" in text
    assert (
        f"steps: 2 since the last reset, 5 in all, {stats['planned_iterations']} of them under a plan, 0 left" in text
    )


def test_report_has_the_plan_and_goes_to_a_file(train, tmp_path):
    text = gm.report(tmp_path / "report.txt")
    assert (tmp_path / "report.txt").read_text() == text
    for line in gm.explain().splitlines():
        assert "  " + line in text.splitlines()


def test_report_says_where_the_biggest_parameters_are(train):
    owner = gm.session()
    place = {record.name: record.place for record in owner.records}["4.weight"]
    for tier in abi.TIER_HOST, abi.TIER_FILE, abi.TIER_DEVICE:
        access = abi.Access(place.arena, place.offset, place.size_bytes, 0, tier, None)
        owner.lib.move(owner.handle, ctypes.byref(access), 1)
        table = rows(gm.report(), "biggest parameters")
        assert table["4.weight"] == {
            "shape": "128x128 float32",
            "size": "64.0 KiB",
            **{name: "64.0 KiB" if i == tier else "-" for i, name in enumerate(abi.TIERS)},
        }
    assert len(table) == 10 and sum(row["size"] == "64.0 KiB" for row in table.values()) == 8


def test_reports_between_and_within_steps_change_nothing(train):
    """Not the plan, and not the bytes; in a backward pass it leaves out what is in use."""
    before, texts = gm.stats(), []
    layers = list(gm.session().model.module)
    layers[3].register_forward_hook(lambda *_: texts.append(gm.report()))
    layers[3].register_full_backward_hook(lambda *_: texts.append(gm.report()))
    train(2)
    after = gm.stats()
    assert after["departures"] == before["departures"] == 0
    assert after["planned_iterations"] == before["planned_iterations"] + 2
    assert ["biggest parameters" in text for text in texts] == [True, False] * 2


def test_dump_is_of_the_session(session):
    session()
    text = gm.dump()
    assert "operator: none" in text and "waits: none" in text
    assert f"{gm.stats()['budget_bytes']['device']} bytes used" in text


def test_report_before_the_first_step(session):
    session()
    text = gm.report()
    assert "steps: 0 since the last reset, 0 in all" in text and "wanted: 0 of 0, none" in text
    gm.close()
    with pytest.raises(gm.GeminiError, match="init"):
        gm.report()


# ---- timelines
def test_timeline_has_a_step_s_operators_and_bytes(train, tmp_path):
    path = tmp_path / "step.json"
    with gm.timeline(path):
        train(1)
    events = json.loads(path.read_text())["traceEvents"]
    ops = [event for event in events if event.get("cat") == "op"]
    phases = [event["args"]["phase"] for event in sorted(ops, key=lambda event: event["ts"])]
    assert sorted(set(phases), key=phases.index) == ["forward", "backward", "update"]
    forward = [event["name"] for event in ops if event["name"].endswith(":linear")]
    assert forward == [f"{i}.weight:linear" for i in range(8)]
    last = [event["args"] for event in events if event["ph"] == "C"][-1]
    assert {tier: last[tier] for tier in abi.TIERS} == gm.stats()["used_bytes"]
    with gm.timeline(path):  # another can be recorded
        pass
    with pytest.raises(gm.GeminiError, match="/nowhere/step.json"), gm.timeline("/nowhere/step.json"):
        pass


def test_timeline_of_a_step_that_fails_is_written(train, tmp_path):
    with pytest.raises(ZeroDivisionError), gm.timeline(tmp_path / "step.json"):
        train(1)
        raise ZeroDivisionError
    assert len(json.loads((tmp_path / "step.json").read_text())["traceEvents"]) > 50


def test_timeline_ends_with_the_session(session, tmp_path):
    session("1MiB")
    with gm.timeline(tmp_path / "all.json"):
        gm.close()
    assert json.loads((tmp_path / "all.json").read_text())["otherData"]["budget_bytes"]["device"] == 1 << 20


# ---- pictures
class Page(html.parser.HTMLParser):
    """Elements that are open are closed in their order; nothing is loaded; the cells of its table."""

    EMPTY = {"meta"}

    def __init__(self, text):
        super().__init__()
        self.open, self.table, self.titles = [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        assert tag not in ("script", "link", "img", "iframe") and not {"src", "href"} & dict(attributes).keys()
        if tag not in self.EMPTY:
            self.open.append(tag)
        if tag == "tr":
            self.table.append([])
        if tag == "td":
            self.table[-1].append(dict(attributes).get("title", ""))

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "title":
            self.titles.append(data)


def drawing(text):
    return xml.etree.ElementTree.fromstring(re.search(r"<svg.*</svg>", text, re.S).group())


def test_picture_of_a_step_has_the_numbers_of_its_counters(train, tmp_path):
    with gm.timeline(tmp_path / "step.json"):
        train(2)
    gm.picture(tmp_path / "step.html", tmp_path / "step.json")
    text = (tmp_path / "step.html").read_text()
    page = Page(text)
    assert "url(" not in text and "http" not in text and "@import" not in text
    data = json.loads((tmp_path / "step.json").read_text())
    counters = [event["args"] for event in data["traceEvents"] if event["ph"] == "C"]
    budgets = gm.stats()["budget_bytes"]
    assert page.table[1:] == [
        [
            "",
            *(
                f"{n} bytes"
                for n in (budgets[tier], counters[0][tier], max(c[tier] for c in counters), counters[-1][tier])
            ),
        ]
        for tier in abi.TIERS
    ]
    names = " ".join(page.titles)
    assert "0.weight:linear" in names and "param.float32" in names
    colors = {rect.get("fill") for rect in drawing(text).iter("rect")}
    assert {"var(--forward)", "var(--backward)", "var(--update)"} <= colors


def synthetic(path, counters, spans=(), budget=0):
    """counters: (us, device, non-model, host); spans: (us, us, category, name, phase)."""
    events = [
        {
            "ph": "C",
            "pid": 1,
            "ts": ts,
            "name": "bytes by tier",
            "args": {"device": device, "non-model": other, "host": host, "file": 0},
        }
        for ts, device, other, host in counters
    ]
    events += [
        {"ph": "X", "pid": 1, "tid": 1, "ts": ts, "dur": dur, "cat": category, "name": name, "args": {"phase": phase}}
        for ts, dur, category, name, phase in spans
    ]
    others = {"lost_events": "7", "budget_bytes": {"device": budget}}
    path.write_text(json.dumps({"otherData": others, "traceEvents": events}))


def test_picture_draws_counters_to_scale(tmp_path):
    """1000 columns for 1000 us, so that each is one; what is between two of them shows with its extremes."""
    synthetic(
        tmp_path / "t.json",
        [
            (0, 100, 0, 5),
            (250, 400, 40, 5),
            (500.1, 300, 40, 5),
            (500.2, 50, 40, 5),
            (500.3, 200, 0, 5),
            (1000, 200, 0, 5),
        ],
    )
    gm.picture(tmp_path / "t.html", tmp_path / "t.json")
    text = (tmp_path / "t.html").read_text()
    device, other, host = [path.get("d") for path in drawing(text).iter("path")]

    def values(path, most):
        """(column, bytes) of its points, but for the way back along the base; panels are 150 high."""
        base = float(re.match(r"M96 ([0-9.]+)H96", path).group(1))
        return [
            (int(x) - 96, [round((base - float(y)) / 150 * most * 1.05) for y in ys.split("V")[1:]])
            for x, ys in re.findall(r"H(\d+)((?:V[0-9.]+)+)", path)
        ][:-1]

    assert values(device, 400) == [(0, [100] * 3), (250, [400] * 3), (500, [300, 50, 200]), (1000, [200] * 3)]
    assert values(other, 400) == [(0, [0] * 3), (250, [40] * 3), (500, [40, 0, 0]), (1000, [0] * 3)]
    assert values(host, 5) == [(x, [5] * 3) for x in (0, 250, 500, 1000)]
    assert "of it allocations" in text and "in files" not in text and "7 events were lost" in text


def test_picture_merges_what_is_too_small_to_see_and_nothing_else(tmp_path):
    tiny = [(100 + i * 0.1, 0.05, "op", f"op <{i}>", "forward") for i in range(1000)]
    far = [(ts, 0.05, "op", f"at {ts}", "update") for ts in (800, 810)]
    wide = [(300 + i * 20, 20, "op", f"wide {i}", "backward") for i in range(3)]
    wait = 500, 100, "wait", "wait for chunk", "none"
    synthetic(tmp_path / "t.json", [(0, 1, 0, 0), (1000, 1, 0, 0)], [*tiny, *wide, *far, wait])
    gm.picture(tmp_path / "t.html", tmp_path / "t.json")
    text = (tmp_path / "t.html").read_text()
    Page(text)
    rects = [
        (rect.get("fill"), float(rect.get("x")) - 96, float(rect.get("width")), "".join(rect.itertext()))
        for rect in drawing(text).iter("rect")
    ]
    assert rects == [
        ("var(--forward)", 100, 100, "op <0> and 999 more: 0.050 ms"),
        *(("var(--backward)", 300 + i * 20, 20, f"wide {i}: 0.020 ms") for i in range(3)),
        *(("var(--update)", ts, 0.5, f"at {ts}: 0.000 ms") for ts in (800, 810)),
        ("var(--wait)", 500, 100, "wait for chunk: 0.100 ms"),
    ]


@pytest.mark.parametrize("budget, shown", [(1000, True), (100000, False), (0, False)])
def test_picture_shows_a_budget_that_is_near(tmp_path, budget, shown):
    synthetic(tmp_path / "t.json", [(0, 400, 0, 0), (10, 400, 0, 0)], budget=budget)
    gm.picture(tmp_path / "t.html", tmp_path / "t.json")
    assert ('class="budget"' in (tmp_path / "t.html").read_text()) == shown


def test_picture_of_something_else_is_refused(tmp_path):
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    with pytest.raises(ValueError, match="other.json has no counters"):
        gm.picture(tmp_path / "t.html", tmp_path / "other.json")
    assert not (tmp_path / "t.html").exists()
