#!/usr/bin/env bash
# Formats every C and C++ file with the pinned clang-format. tests/format.sh [--check] [FILE...]
# --check changes nothing and fails when a file would change. SPDX-License-Identifier: Apache-2.0
set -euo pipefail
cd "$(dirname "$0")/.."

check=0
if [[ ${1:-} == --check ]]; then check=1; shift; fi

tool=${GEMINI_CLANG_FORMAT:-build/venv/bin/clang-format}
want=$(sed -n 's/^clang-format==//p' tests/requirements.txt)
if [[ ! -x $tool ]]; then
  echo "format.sh: $tool: no such program, run tests/setup.sh --test first" >&2
  exit 1
fi
have=$("$tool" --version | sed -n 's/.*version \([0-9.]*\).*/\1/p')
if [[ $have != "$want" ]]; then
  echo "format.sh: $tool: version is $have, tests/requirements.txt wants $want" >&2
  exit 1
fi

files=("$@")
if ((${#files[@]} == 0)); then
  mapfile -t files < <(find include src bindings tests bench examples \( -name '*.[ch]' -o -name '*.cc' -o -name '*.hpp' \) -type f | sort)
fi
if ((${#files[@]} == 0)); then
  echo "format.sh: found no file to format" >&2
  exit 1
fi

# One process for all files first: one for each takes eight times as long.
if "$tool" --style=file --dry-run -Werror "${files[@]}" 2>/dev/null; then
  if ((check)); then echo "${#files[@]} files are formatted"; fi
  exit 0
fi
result=$(mktemp)
trap 'rm -f "$result"' EXIT
failed=0
for file in "${files[@]}"; do
  "$tool" --style=file "$file" >"$result"
  cmp -s "$file" "$result" && continue
  if ((check)); then
    echo "format.sh: $file is not formatted:" >&2
    diff -u "$file" "$result" | head -n 20 >&2 || true
    failed=1
  else
    cat "$result" >"$file"
    echo "formatted $file"
  fi
done
exit "$failed"
