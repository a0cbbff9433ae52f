#!/usr/bin/env bash
# The predicted step of LLaMAs on 64 and 512 GPUs, 8 a host, as a table; docs/bench.md has one.
# SPDX-License-Identifier: Apache-2.0
#   bench/plan_ranks.sh [BUILD] [options of bench_plan ...]
#   bench/plan_ranks.sh [BUILD] --check   compares it with docs/bench.md: predictions are computed, so they are the same
# BUILD: build folder, build/release when left out.
set -euo pipefail
cd "$(dirname "$0")/.."
build=build/release
if (($#)) && [[ $1 != -* ]]; then build=$1; shift; fi
program=$build/bench/bench_plan
[[ -x $program ]] || { echo "plan_ranks.sh: $program: no such program, run bench/quickstart.sh first" >&2; exit 1; }
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
# shellcheck source=common/row.sh
. bench/common/row.sh

if [[ ${1:-} == --check ]]; then
  bench/plan_ranks.sh "$build" >"$out/table"
  sed -n '/^| LLaMA | sharding/,/^$/p' docs/bench.md | sed '/^$/d' | diff - "$out/table" && exit 0
  echo "plan_ranks.sh: docs/bench.md has another table than this prints: bench/plan_ranks.sh $build" >&2
  exit 1
fi
gib() { awk -v b="$(field "$out/row" "$1")" 'BEGIN { printf "%.1f", b / 1073741824 }'; }
echo "| LLaMA | sharding | hosts x GPUs | tokens a GPU | step, s | bound, s | binds | gathered, GiB | summed, GiB | kept, GiB |"
echo "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
for tokens in 16384 2048; do
  for size in 7b 70b 405b; do
    for sharding in full hybrid; do
      for ranks in 64 512; do
        head="| $size | $sharding | $((ranks / 8)) x 8 | $tokens"
        if "$program" --ranks $ranks --size $size --sharding $sharding --tokens $tokens "$@" >"$out/row" 2>"$out/error"; then
          echo "$head | $(field "$out/row" value) | $(field "$out/row" bound_seconds) | $(field "$out/row" binds | tr -d '"') |" \
            "$(gib gathered_bytes) | $(gib reduced_bytes) | $(gib rank_bytes) |"
        else
          grep -q 'ranks of a host keep' "$out/error" || { cat "$out/error" >&2; exit 1; }
          echo "$head | does not fit: a host keeps $(sed 's/.*host keep \([0-9]*\) bytes.*/\1/' "$out/error") bytes | | | | | |"
        fi
      done
    done
  done
done
