#!/usr/bin/env bash
# Is the training step at the beginning of gemini.h, line by line, the one that examples/training_step.c compiles?
#   training_step.sh [--write] HEADER EXAMPLE        SPDX-License-Identifier: Apache-2.0
# --write puts the example's lines into the header.
set -euo pipefail
write=
if [[ ${1-} == --write ]]; then write=1 && shift; fi
header=$1 example=$2
first='^ \* A training step'
last='^ \* end of the training step'

of_example() { # as comment lines, without the two spaces of the function
  sed -n '/--- gemini.h begins with this ---/,/--- to here ---/p' "$example" | sed '1d;$d' |
    sed -e 's/^  //' -e 's/^\(.\)/ *     \1/' -e 's/^$/ */'
}
of_header() { sed -n "/$first/,/$last/p" "$header" | sed -n '/^ \*     /,$p' | sed '$d'; }

if [[ $write ]]; then
  of_example >"$header.step"
  begin=$(grep -n "$first" "$header" | cut -d: -f1) end=$(grep -n "$last" "$header" | cut -d: -f1)
  begin=$(awk -v from="$begin" 'NR > from && /^ \*$/ { print NR; exit }' "$header")
  { head -n "$begin" "$header"; cat "$header.step"; tail -n "+$end" "$header"; } >"$header.new"
  rm "$header.step"
  mv "$header.new" "$header"
fi
lines=$(of_example | wc -l)
((lines > 40)) || { echo "training_step.sh: $example has $lines lines between its marks" >&2; exit 1; }
diff -u --label "$example" --label "$header" <(of_example) <(of_header) || {
  echo "training_step.sh: gemini.h has another training step; tests/training_step.sh --write copies the example's" >&2
  exit 1
}
