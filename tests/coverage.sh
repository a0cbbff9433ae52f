#!/usr/bin/env bash
# Which lines of the library the tests run: builds build/coverage, runs tests, and writes build/coverage/report.
#   tests/coverage.sh [OPTION of ctest]...   by default the unit and integration tests: -L '^(unit|integration)$'
# GEMINI_GCOVR: the gcovr to use, by default that of the system, else what uv gets. SPDX-License-Identifier: Apache-2.0
set -euo pipefail
cd "$(dirname "$0")/.."

options=("$@")
((${#options[@]})) || options=(-L '^(unit|integration)$')
if [[ -n ${GEMINI_GCOVR:-} ]]; then gcovr=("$GEMINI_GCOVR")
elif command -v gcovr >/dev/null; then gcovr=(gcovr)
else gcovr=(build/venv/bin/uv tool run gcovr==8.3)
fi
"${gcovr[@]}" --version | head -n 1

cmake --preset coverage
cmake --build --preset coverage
find build/coverage -name '*.gcda' -delete
failed=0
ctest --preset coverage "${options[@]}" || failed=1
mkdir -p build/coverage/report
"${gcovr[@]}" --root . --filter src/ --filter bindings/update/ --gcov-ignore-parse-errors=negative_hits.warn \
  --print-summary --txt build/coverage/report/summary.txt --html-details build/coverage/report/index.html build/coverage
echo "coverage.sh: build/coverage/report/index.html has each line, summary.txt each file"
exit "$failed"
