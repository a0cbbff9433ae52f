"""Runs a function in a forked process, so that a segmentation fault or a hang of it is an outcome like any other.

SPDX-License-Identifier: Apache-2.0
"""

import faulthandler
import gc
import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable

HANG_SECONDS = 300.0  # of silence, after which a process hangs: far more than any message takes on a loaded machine


def apart(function: Callable, *args: object, seconds: float = HANG_SECONDS) -> tuple[list, str]:
    """Calls function(send, *args) in a child process.

    Args:
      function: is given send(message), which hands an object that pickle knows to the caller, at once.
      seconds: how long the child may be silent before it is killed.

    Returns:
      The messages, and how the child ended: "" if function returned, else "SIGSEGV", "hang" or an exception's
      traceback.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    read, write = os.pipe()
    gc.freeze()  # what is imported is a million objects, which each full collection of the child would go through
    child = os.fork()
    if child == 0:
        os.close(read)
        _child(function, args, write)
    gc.unfreeze()
    os.close(write)
    try:
        data, hangs = _receive(read, seconds)
    finally:
        os.close(read)
        os.kill(child, signal.SIGKILL)  # it has ended, or hangs, or the caller was interrupted
        status = os.waitpid(child, 0)[1]
    messages, at = [], 0
    while len(data) - at >= 8 and len(data) - at - 8 >= (size := int.from_bytes(data[at : at + 8], "little")):
        messages.append(pickle.loads(data[at + 8 : at + 8 + size]))
        at += 8 + size
    if messages and messages[-1] is _end:
        return messages[:-1], ""
    if messages and isinstance(messages[-1], _Raised):
        return messages[:-1], messages[-1].text
    if hangs:
        return messages, "hang"
    if os.WIFSIGNALED(status):
        return messages, signal.Signals(os.WTERMSIG(status)).name
    return messages, f"exit {os.WEXITSTATUS(status)}"


class _Raised:
    """The last message of a function that raised."""

    def __init__(self, text):
        self.text = text


class _End:
    """The last message of a function that returned."""

    def __reduce__(self):
        return "_end"


_end = _End()


def _child(function, args, write):
    """Calls the function and ends the process, without what Python does at its end: the parent's state is not ours."""
    try:
        faulthandler.disable()  # pytest's, which would print what the parent tells
        with os.fdopen(write, "wb") as pipe:

            def send(message):
                data = pickle.dumps(message)
                pipe.write(len(data).to_bytes(8, "little") + data)
                pipe.flush()

            try:
                function(send, *args)
                send(_end)
            except BaseException:
                send(_Raised(traceback.format_exc()))
    finally:
        os._exit(0)


def _receive(read, seconds):
    """All bytes until the child closes the pipe, or is silent for so long."""
    data = bytearray()
    last = time.monotonic()
    while True:
        ready, _, _ = select.select([read], [], [], 1.0)
        if ready:
            part = os.read(read, 1 << 20)
            if not part:
                return data, False
            data += part
            last = time.monotonic()
        elif time.monotonic() - last > seconds:
            return data, True
