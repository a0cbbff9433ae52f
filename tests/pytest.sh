#!/bin/sh
# Runs one file of Python's tests, or says that it is skipped where tests/setup.sh found no torch.
#   tests/pytest.sh PYTHON FILE      SPDX-License-Identifier: Apache-2.0
"$1" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' ||
  { echo "skipped: $1 has no torch"; exit 77; }
exec "$1" -B -m pytest -p no:cacheprovider "$2"
