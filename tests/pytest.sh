#!/bin/sh
# Runs one file of Python's tests, or says that it is skipped where tests/setup.sh found no torch, or where the package
# that all of the file is for is missing (pytest's exit status 5: no test was there to run).
#   tests/pytest.sh PYTHON FILE      SPDX-License-Identifier: Apache-2.0
"$1" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' ||
  { echo "skipped: $1 has no torch"; exit 77; }
status=0
"$1" -B -m pytest -p no:cacheprovider -rs "$2" || status=$?
[ $status -ne 5 ] || exit 77
exit $status
