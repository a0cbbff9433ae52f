#!/usr/bin/env bash
# Looks at the library's sources with clang-tidy, by the checks of .clang-tidy; by hand, not in CI, as the versions of
# clang-tidy differ in what they see. tests/tidy.sh [FILE...]. GEMINI_CLANG_TIDY: another clang-tidy.
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail
cd "$(dirname "$0")/.."

tool=${GEMINI_CLANG_TIDY:-clang-tidy}
if ! command -v "$tool" >/dev/null; then
  echo "tidy.sh: there is no $tool (Debian, Ubuntu: clang-tidy)" >&2
  exit 1
fi
files=("$@")
if ((${#files[@]} == 0)); then
  mapfile -t files < <(find src bindings/update -name '*.c' | sort)
fi
cmake --preset clang >/dev/null # for its compile_commands.json
printf '%s\0' "${files[@]}" | xargs -0 -n 1 -P "$(nproc)" "$tool" -p build/clang --quiet
echo "${#files[@]} files are clean"
