#!/usr/bin/env bash
# Looks at every shell script with shellcheck, of which none may complain. tests/shellcheck.sh [FILE...]
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail
cd "$(dirname "$0")/.."

if ! command -v shellcheck >/dev/null; then
  echo "shellcheck.sh: there is no shellcheck, run tests/setup.sh --test first" >&2
  exit 1
fi
files=("$@")
if ((${#files[@]} == 0)); then
  mapfile -t files < <(find .ci/run bench bindings cmake src tests \( -name '*.sh' -o -path .ci/run \) -type f | sort)
fi
if ((${#files[@]} == 0)); then
  echo "shellcheck.sh: found no script" >&2
  exit 1
fi
# SC2054 takes the commas within an option for commas between elements of an array.
shellcheck --shell=bash --external-sources --source-path=SCRIPTDIR --exclude=SC2054 "${files[@]}"
echo "${#files[@]} scripts are clean"
