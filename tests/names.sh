#!/usr/bin/env bash
# Is there what CONTRIBUTING.md names? Each file and function between `` that looks like one of this project's. A file
# may be named by the end of its path, if that fits one file, or one in a folder that its row or paragraph named before.
# tests/names.sh [FILE.md]... SPDX-License-Identifier: Apache-2.0
set -euo pipefail
cd "$(dirname "$0")/.."

pages=("$@")
((${#pages[@]})) || pages=(CONTRIBUTING.md)
mapfile -t files < <(find . \( -path ./build -o -path ./.git \) -prune -o -type f -printf '%P\n')
functions=$(grep -rhoE '[A-Za-z_][A-Za-z_0-9]*\(' --include='*.[ch]' --include='*.py' include src bindings tests bench | sort -u)
declare -A tails=() # by the end of a path, the paths that have it, each between newlines
for file in "${files[@]}"; do
  tail=$file
  while tails[$tail]+=$'\n'$file$'\n'; [[ $tail == */* ]]; do tail=${tail#*/}; done
done

# shellcheck disable=SC2016
quoted='`[^` ]*`'
failed=0 count=0
miss() {
  echo "names.sh: $1 names '$2', which is not there" >&2
  failed=1
}
# Looks a file up, and adds its folder to folders.
file_named() { # PAGE NAME
  local found=${tails[$2]:-} folder path='' fits=0
  if [[ -e $2 ]]; then
    path=$2
  elif [[ ! $found ]]; then
    miss "$1" "$2"
  elif (($(wc -w <<<"$found") == 1)); then
    path=${found//[[:space:]]/}
  else
    for folder in "${!folders[@]}"; do
      if [[ $found == *$'\n'"$folder/$2"$'\n'* ]]; then path=$folder/$2 fits=$((fits + 1)); fi
    done
    if ((fits != 1)); then
      echo "names.sh: $1 names '$2', which may be any of ${found//$'\n'/ }" >&2
      failed=1
    fi
  fi
  if [[ $path == */* ]]; then folders[${path%/*}]=1; fi
}
for page in "${pages[@]}"; do
  declare -A folders=()
  while read -r name; do
    if [[ $name == "" ]]; then folders=(); fi # the next row or paragraph
    if [[ $name == */* && -d $name ]]; then folders[${name%/}]=1; fi
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
        file_named "$page" "$name" ;;
    esac
  done < <(sed -e 's/^$/``/' -e 's/^|/``|/' "$page" | grep -o "$quoted" | tr -d '`')
done
if ((!failed)); then echo "$count names are there"; fi
if ((count == 0)); then echo "names.sh: found no name" >&2; failed=1; fi
exit "$failed"
