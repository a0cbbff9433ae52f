"""Commands of the package: python -m libgemini plan --help.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import sys


def main() -> int:
    """Runs the command that the arguments name. Returns the exit status."""
    if sys.argv[1:2] != ["plan"]:
        print("usage: python -m libgemini plan --help", file=sys.stderr)
        return 2
    try:
        from .torch import plan
    except ModuleNotFoundError as error:
        print(
            f"python -m libgemini plan needs {error.name}: pip install 'libgemini[torch]' transformers", file=sys.stderr
        )
        return 2
    return plan.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
