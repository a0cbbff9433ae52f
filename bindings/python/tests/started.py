"""Processes that run a script with torch imported: forks of a server that has imported it, as importing takes seconds.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import sys
from multiprocessing.process import BaseProcess
from unittest import mock

_context = multiprocessing.get_context("forkserver")
# None of these starts a thread, or asks for a GPU. Those that are not installed are passed over.
_context.set_forkserver_preload(
    [
        "libgemini.torch",
        "torch.distributed.tensor.parallel",
        *(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama", "mixtral", "t5")),
    ]
)


def start(script: str, arguments: list[str], environment: dict[str, str]) -> BaseProcess:
    """Starts `python script arguments` in the script's folder.

    Args:
      script: the path of a file of Python.
      arguments: what follows it in sys.argv.
      environment: the whole environment.

    Returns:
      The process; wait() below waits for it.
    """
    # What asks whether there is a GPU while it is imported may not open a context, which forks cannot use.
    with mock.patch.dict(os.environ, {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}):
        multiprocessing.forkserver.ensure_running()
    process = _context.Process(target=_run, args=(script, arguments, environment))
    process.start()
    return process


def wait(process: BaseProcess, seconds: float) -> int | None:
    """The exit status of a process, the number of the signal that ended it below 0, or None if it still runs."""
    process.join(seconds)
    return process.exitcode


def _run(script: str, arguments: list[str], environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(os.path.dirname(script))
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
