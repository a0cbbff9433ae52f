"""Progress lines: when they come, where they go, what they say.

SPDX-License-Identifier: Apache-2.0
"""

import io
import logging

import pytest
import torch

import libgemini.torch as gm
from libgemini.torch import progress
from libgemini.torch.progress import Progress

MIB = 1 << 20


class Stream(io.StringIO):
    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal

    def isatty(self):
        return self.terminal


@pytest.fixture
def run(monkeypatch):
    """Runs an operation of 10 steps of a MiB, a given time each; gives what came on stderr."""

    def run(step_s, total=10 * MIB, show=None, terminal=False, fail_at=None):
        now = [100.0]
        stream = Stream(terminal)
        monkeypatch.setattr(progress.sys, "stderr", stream)
        with Progress("copying", total, show, clock=lambda: now[0]) as p:
            for i in range(10):
                if i == fail_at:
                    raise OSError("broken")
                now[0] += step_s
                p.add(MIB)
        return stream.getvalue()

    return run


def test_what_ends_soon_says_nothing(run):
    assert run(0.19, show=True) == ""
    assert run(0.19, terminal=True) == ""


def test_lines_say_done_total_rate_and_time_left(run):
    lines = run(1, show=True).splitlines()
    assert lines == [
        f"copying: {done}.0 MiB of 10.0 MiB, 1.0 MiB/s, {10 - done} s left" for done in (2, 4, 6, 8, 10)
    ] + ["copying: 10.0 MiB in 10 s, 1.0 MiB/s"]


def test_a_total_that_nobody_knows_is_left_out(run):
    assert run(1, total=0, show=True).splitlines()[0] == "copying: 2.0 MiB, 1.0 MiB/s"


def test_a_terminal_gets_one_line_written_over(run):
    text = run(0.5, terminal=True)
    assert text.count("\n") == 1 and text.endswith("\n")
    writes = text.rstrip("\n").split("\r")[1:]
    assert len(writes) == 8  # at 2.0, 2.5, ... 5.0 s, and the end
    assert all(len(line) == 79 for line in writes)


def test_elsewhere_it_is_logged_every_ten_seconds(run, caplog):
    with caplog.at_level(logging.INFO, "libgemini"):
        assert run(3) == ""
    assert [r.getMessage() for r in caplog.records] == [
        "copying: 4.0 MiB of 10.0 MiB, 341.3 KiB/s, 18 s left",
        "copying: 8.0 MiB of 10.0 MiB, 341.3 KiB/s, 6 s left",
        "copying: 10.0 MiB in 30 s, 341.3 KiB/s",
    ]
    assert all(r.levelno == logging.INFO for r in caplog.records)


def test_a_terminal_can_be_left_alone(run, caplog):
    with caplog.at_level(logging.INFO, "libgemini"):
        assert run(3, show=False, terminal=True) == ""
    assert len(caplog.records) == 3


def test_an_operation_that_fails_says_how_far_it_came(monkeypatch):
    stream, now = Stream(False), [0.0]
    monkeypatch.setattr(progress.sys, "stderr", stream)
    with pytest.raises(OSError, match="broken"), Progress("copying", 10 * MIB, True, clock=lambda: now[0]) as p:
        now[0] = 4.0
        p.add(2 * MIB)
        raise OSError("broken")
    assert stream.getvalue().splitlines()[-1] == "copying: stopped after 2.0 MiB in 4 s, 512.0 KiB/s"


def test_building_and_preparing_a_model_count_its_bytes(monkeypatch):
    seen = []

    class Recorded(Progress):
        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            seen.append(self)

    monkeypatch.setattr(gm.model, "Progress", Recorded)

    def build():
        return torch.nn.Sequential(torch.nn.Linear(30, 50), torch.nn.Linear(50, 2, bias=False))

    size = 4 * (30 * 50 + 50 + 50 * 2)
    with gm.init(device="cpu", device_memory="16MiB", host_memory="16MiB", chunk_size="64KiB", progress=True):
        inside = build()
    gm.prepare(torch.nn.Sequential(inside, build()))
    gm.close()
    assert [(p.done, p.total, p.shown) for p in seen] == [(size, 0, True), (size, size, True)]
