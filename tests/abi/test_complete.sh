#!/usr/bin/env bash
# Does caller.c use each function and each sized struct of the frozen headers? SPDX-License-Identifier: Apache-2.0
set -euo pipefail
cd "$(dirname "$0")"
mapfile -t headers < <(find frozen -name '*.h')
functions=$(sed -n 's/^GEMINI_API [^(]*\b\(gemini_[a-z0-9_]*\)(.*/\1/p' "${headers[@]}")
structs=$(awk '/^typedef struct .*\{$/ { sized = 0 } /^  uint32_t struct_size;/ { sized = 1 }
  /^} gemini_[a-z_]*_t;/ { if (sized) { gsub(/[};]/, ""); print $1 } sized = 0 }' "${headers[@]}")
[[ $(wc -w <<<"$functions") -gt 70 && $(wc -w <<<"$structs") -ge 15 ]] || { echo "found too little in frozen/" >&2; exit 1; }
missing=0
for name in $functions $structs; do
  grep -qw "$name" caller.c || { echo "caller.c does not use $name" >&2; missing=1; }
done
for name in $structs; do
  grep -q "^V1($name, " caller.c || { echo "caller.c does not compare the size of $name" >&2; missing=1; }
done
exit $missing
