#!/usr/bin/env python3
"""Runs files of pytest, each in a process of its own, which is a fork of one that has imported torch and transformers.

    run_files.py [--jobs N] --log FOLDER FILE[::TEST]... [-- ARGUMENT OF PYTEST...]

Importing takes seven seconds of a core, and there are about 45 files. A line for each file says how it ended; the
output of one that failed follows. The exit status is 0 if no file failed, and 77 if all were skipped. A file is skipped
of which pytest runs no test (its exit status 5), because a package is missing that all of it needs.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import pathlib
import signal
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
NO_TESTS = 5  # pytest's exit status
CUT_SHORT = 99  # a test ended the process with status 0
SECONDS = 1800.0  # of one file, which has two minutes of work: a limit is for files that hang
# What most files use, and nothing that starts threads, as transformers.trainer does. What is not installed is passed
# over: the files that need it say so.
IMPORTED = (
    "pytest",
    "torch",
    "transformers",
    "torch._dynamo",
    "torch.distributed.tensor.parallel",
    "torch.nn.utils.parametrizations",
    "torch.nn.utils.prune",
    "torch.utils.checkpoint",
    "accelerate",
    "libgemini.torch",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama", "mixtral", "opt", "t5")),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", nargs="+", help="what pytest takes: a file, or a test of one")
    parser.add_argument("--jobs", type=int, default=2, help="files that run at a time")
    parser.add_argument("--log", type=pathlib.Path, required=True, help="the folder of their output")
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    arguments = parser.parse_args(words[:split])
    arguments.log.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    prepare()
    print(f"imported in {time.monotonic() - begin:.1f} s", flush=True)
    waiting, running, failed, skipped = list(arguments.files), {}, [], 0
    while waiting or running:
        while waiting and len(running) < arguments.jobs:
            file = waiting.pop(0)
            log = arguments.log / f"{name_of(file)}.log"
            running[start(file, log, words[split + 1 :])] = file, log, time.monotonic()
        pid, status = ended(running)
        if pid:
            file, log, begun = running.pop(pid)
            how = os.waitstatus_to_exitcode(status)
            if how == 0 and not log.with_suffix(".ended").exists():
                how = CUT_SHORT
            tell(name_of(file), log, how, time.monotonic() - begun)
            skipped += how == NO_TESTS
            if how not in (0, NO_TESTS):
                failed.append(name_of(file))
    count = len(arguments.files)
    print(f"{count} files, {skipped} skipped, {len(failed)} failed{': ' * bool(failed)}{', '.join(failed)}")
    return 77 if skipped == count else bool(failed)


def name_of(file: str) -> str:
    """A file's name without its ending; a test of it has the same, so that a file is given once."""
    return pathlib.Path(file.partition("::")[0]).stem


def prepare() -> None:
    """Imports what files use, and leaves no thread behind, which a fork would lack."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a context of CUDA is none in a fork
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # as conftest.py does before it imports
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise SystemExit(f"run_files.py: {threads} threads run after importing: forks would lack them")
    gc.collect()
    gc.freeze()  # no collection of a fork goes through what is imported


def start(file: str, log: pathlib.Path, more: list[str]) -> int:
    """The process that runs a file, and is the first of a group of processes."""
    log.with_suffix(".ended").unlink(missing_ok=True)
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):  # it has ended
            os.setpgid(pid, pid)
        return pid
    status = 3  # pytest's for an error of its own
    try:
        os.setpgid(0, 0)
        with open(os.devnull, "rb") as nothing, open(log, "wb") as out:
            os.dup2(nothing.fileno(), 0)
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        import pytest

        # What was imported before pytest began has no assertions of its own.
        quiet = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        arguments = ["-p", "no:cacheprovider", *quiet, "-rs", *more, file]
        sys.argv = ["pytest", *arguments]
        sys.path[0] = os.getcwd()  # as python -m pytest has it
        status = int(pytest.main(arguments))
        log.with_suffix(".ended").touch()
        sys.stdout.flush()
        sys.stderr.flush()
        # As Python ends: what a session or torch leaves must not fail there. exit() would unwind into main().
        import atexit

        atexit._run_exitfuncs()
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        status = status or 3
    finally:
        os._exit(status)


def ended(running: dict) -> tuple[int, int]:
    """A process that has ended, and its status; 0 if none has within a moment. Those that hang are killed."""
    pid, status = os.waitpid(-1, os.WNOHANG)
    if pid in running:
        with contextlib.suppress(OSError):  # nothing of its group is left
            os.killpg(pid, signal.SIGKILL)
        return pid, status
    for one, (_, log, begun) in running.items():
        if time.monotonic() - begun > SECONDS:
            with open(log, "a") as out:
                out.write(f"\nrun_files.py: killed after {SECONDS:.0f} s\n")
            os.killpg(one, signal.SIGKILL)
    time.sleep(0.05)
    return 0, 0


def tell(name: str, log: pathlib.Path, status: int, seconds: float) -> None:
    """Prints how a file ended; of one that failed all of its output."""
    text = log.read_text(errors="replace")
    if status in (0, NO_TESTS):
        last = text.rstrip().rpartition("\n")[2].strip("= ")
        print(f"{'skipped' if status else 'passed'} {seconds:6.1f} s  {name}: {last}", flush=True)
        for line in text.splitlines():
            if line.startswith("SKIPPED"):
                print(f"    {line}", flush=True)
        return
    how = signal.Signals(-status).name if status < 0 else f"status {status}"
    print(f"FAILED {seconds:6.1f} s  {name}: {how}\n{text}\nend of {name}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
