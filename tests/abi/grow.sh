#!/usr/bin/env bash
# Writes copies of public headers in which every struct that says its size has one field more, as a later version may.
#   grow.sh OUT FOLDER...        SPDX-License-Identifier: Apache-2.0
# Each header below a FOLDER goes to the same place below OUT.
set -euo pipefail
out=$1
shift
mkdir -p "$out"
for folder in "$@"; do
  (cd "$folder" && find . -name '*.h') | while read -r name; do
    case $name in ./gemini*) ;; *) continue ;; esac
    mkdir -p "$(dirname "$out/$name")"
    awk '
      /^typedef struct .*\{$/ { sized = 0 }
      /^  uint32_t struct_size;/ { sized = 1 }
      /^} gemini_[a-z_]*_t;/ { if (sized) { print "  uint64_t grown; /* 0 */"; grown++ } sized = 0 }
      { print }
      END { if (!grown) exit 3 }' "$folder/$name" >"$out/$name.new" || [[ $? == 3 ]]
    mv "$out/$name.new" "$out/$name"
  done
done
grown=$(grep -rl 'uint64_t grown;' "$out" | wc -l)
((grown)) || { echo "grow.sh: no struct has grown" >&2; exit 1; }
