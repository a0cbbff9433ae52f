"""The example that fine-tunes OPT: killed in the middle, and gone on with the same losses.

SPDX-License-Identifier: Apache-2.0
"""

import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLE = pathlib.Path(__file__).parent.parent / "examples" / "finetune_opt.py"


def start(*arguments):
    return subprocess.Popen([sys.executable, EXAMPLE, *map(str, arguments)], stdout=subprocess.PIPE, text=True)


def losses(lines):
    return {int(step): loss for step, loss in re.findall(r"^step (\d+) loss (\S+)$", "".join(lines), re.MULTILINE)}


def test_killed_run_goes_on_with_the_same_losses(tmp_path):
    pytest.importorskip("transformers")
    text = tmp_path / "text"
    text.mkdir()
    (text / "example.txt").write_text(EXAMPLE.read_text())
    assert start("--make", tmp_path / "start", "--size", "tiny").wait(120) == 0
    run = [
        "--start",
        tmp_path / "start",
        "--run",
        tmp_path / "run",
        "--text",
        text,
        "--resume",
        "--steps",
        24,
        "--every",
        12,
        "--batch",
        2,
        "--length",
        64,
        "--lr",
        1e-2,
        "--recompute",
        "--device",
        "cpu",
        "--device-memory",
        "900KiB",
        "--host-memory",
        "900KiB",
        "--file",
        tmp_path,
        "--file-memory",
        "64MiB",
    ]
    with start(*run) as process:
        before = []
        for line in process.stdout:
            before.append(line)
            if line.startswith("step 14 "):
                process.kill()
    assert process.returncode == -9
    with start(*run) as process:
        after = list(process.stdout)
    assert process.returncode == 0
    before, after = losses(before), losses(after)
    assert list(after) == list(range(12, 24)) and {12, 13, 14} <= before.keys()
    assert [after[step] for step in (12, 13, 14)] == [before[step] for step in (12, 13, 14)]
    assert float(after[23]) < 0.8 * float(before[0]) and len(set(after.values())) == 12
