#!/usr/bin/env bash
# Is there what CONTRIBUTING.md names? Each file and function between `` that looks like one of this project's.
# tests/names.sh [FILE.md]... SPDX-License-Identifier: Apache-2.0
set -euo pipefail
cd "$(dirname "$0")/.."

pages=("$@")
((${#pages[@]})) || pages=(CONTRIBUTING.md)
mapfile -t files < <(find . \( -path ./build -o -path ./.git \) -prune -o -type f -printf '%P\n')
functions=$(grep -rhoE '[A-Za-z_][A-Za-z_0-9]*\(' --include='*.[ch]' --include='*.py' include src bindings tests bench | sort -u)
declare -A tails=()
for file in "${files[@]}"; do # a file is found by its path, or by the end of it
  tail=$file
  while tails[$tail]=1; [[ $tail == */* ]]; do tail=${tail#*/}; done
done

# shellcheck disable=SC2016
quoted='`[^` ]*`'
failed=0 count=0
miss() {
  echo "names.sh: $1 names '$2', which is not there" >&2
  failed=1
}
for page in "${pages[@]}"; do
  while read -r name; do
    case $name in
      build/* | *[*N]*) ;; # made by the build; a pattern, or a name to be chosen
      unit/test_* | integration/test_* | stress/test_*) count=$((count + 1)); [[ -f tests/$name.c ]] || miss "$page" "$name" ;;
      *'()')
        count=$((count + 1))
        function=${name##*[.@]} # gm.init(), @op()
        grep -qxF -- "${function%?}" <<<"$functions" || miss "$page" "$name" ;;
      */x.c | *test_x.* | .cu | compile_commands.json) ;; # examples, kinds of files, what builds make
      *.c | *.h | *.py | *.sh | *.md | *.json | *.cu | *.toml | *.map | *.in | tests/*/*)
        count=$((count + 1))
        [[ -e $name || -n ${tails[$name]:-} ]] || miss "$page" "$name" ;;
    esac
  done < <(grep -o "$quoted" "$page" | tr -d '`' | sort -u)
done
if ((!failed)); then echo "$count names are there"; fi
if ((count == 0)); then echo "names.sh: found no name" >&2; failed=1; fi
exit "$failed"
