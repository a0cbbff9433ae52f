"""Processes that run a script with torch imported: forks of a server that has imported it, as importing takes seconds.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import sys
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from unittest import mock

_forks = multiprocessing.get_context("forkserver")
_alone = multiprocessing.get_context("spawn")
# What is not installed, or is not to be found by PYTHONPATH, is passed over, and imported by each process.
_forks.set_forkserver_preload(
    [
        "libgemini.torch",
        "torch.distributed.tensor.parallel",
        *(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama", "mixtral", "t5")),
    ]
)


def start(script: str, arguments: list[str], environment: dict[str, str], forked: bool = True) -> BaseProcess:
    """Starts a script of Python in its folder. Where modules are looked for is as in this process.

    Args:
      script: its path.
      arguments: what follows it in sys.argv.
      environment: the whole environment.
      forked: of the server, whose seed of hashes and addresses all forks have. False: a process that imports torch
        itself.

    Returns:
      The process, which ends with this one at the latest; see ends().
    """
    if forked:
        # What asks whether there is a GPU while it is imported may not open a context, which forks cannot use.
        with mock.patch.dict(os.environ, {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}):
            multiprocessing.forkserver.ensure_running()
    process = (_forks if forked else _alone).Process(target=_run, args=(script, arguments, environment), daemon=True)
    with mock.patch.dict(os.environ, {} if forked else environment):  # which Python reads when it begins
        process.start()
    return process


def ends(processes: Sequence[BaseProcess], seconds: float) -> list[int | None]:
    """Waits so long for all processes together, and kills those that still run.

    Returns:
      Their exit statuses: the number of the signal that ended a process below 0, None if it was still running.
    """
    end = time.monotonic() + seconds
    try:
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()


def _run(script: str, arguments: list[str], environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(os.path.dirname(script))
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
