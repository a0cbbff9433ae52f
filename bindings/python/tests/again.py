"""The command that runs a random test again, as its failure prints it. SPDX-License-Identifier: Apache-2.0"""

import os
import shlex
import sys

# What decides, beside the arguments, what a test runs with.
VARIABLES = "LIBGEMINI_DIR", "PYTHONPATH", "GEMINI_KILLS"


def again(*arguments: object, **variables: object) -> str:
    """Returns a line for a shell: this Python with these arguments, and with these variables in its environment.

    Args:
      arguments: of Python: a program and its arguments, or -m pytest and a test.
      variables: those that the test itself chose, such as its seed.
    """
    settings = {name: os.environ[name] for name in VARIABLES if name in os.environ} | variables
    words = ["env", *(f"{name}={value}" for name, value in settings.items()), sys.executable, *map(str, arguments)]
    return f"again: {shlex.join(words)}"
