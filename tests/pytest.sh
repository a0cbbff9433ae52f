#!/bin/sh
# Runs files of Python's tests, or says that they are skipped where tests/setup.sh found no torch.
#   tests/pytest.sh PYTHON ARGUMENT OF bindings/python/tests/run_files.py...      SPDX-License-Identifier: Apache-2.0
python=$1
shift
"$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' ||
  { echo "skipped: $python has no torch"; exit 77; }
exec "$python" -B "$(dirname "$0")/../bindings/python/tests/run_files.py" "$@"
