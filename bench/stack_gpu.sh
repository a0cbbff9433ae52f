#!/usr/bin/env bash
# The reference rows of bench_stack on a GPU: 16x1024 tokens; 7b under 24 and 12 GiB, 3b and 1.3b under 24 GiB. Before
# them a tiny model, whose losses on the GPU must be those of plain C. SPDX-License-Identifier: Apache-2.0
#   bench/stack_gpu.sh [BUILD [OUT]]
# BUILD: build folder, build/release when left out. OUT: folder for timelines, their explanations and logs; build/stack when
# left out. GEMINI_STACK_LIMIT: seconds for each run, 200 when not set.
set -uo pipefail
cd "$(dirname "$0")/.."
program=${1:-build/release}/bench/bench_stack
out=${2:-build/stack}
limit=${GEMINI_STACK_LIMIT:-200}
[[ -x $program ]] || { echo "stack_gpu.sh: $program: no such program, run bench/quickstart.sh first" >&2; exit 1; }
mkdir -p "$out"
bad=0

field() { sed -n "s/^ROW .*\"$2\": \(\[[^]]*\]\|\"[^\"]*\"\|[^,}]*\).*/\1/p" "$1"; }

tiny=(--size tiny --batch 4 --seq 64 --layers 12 --steps 4 --quiet)
"$program" "${tiny[@]}" --device sim --policy none >"$out/tiny-sim.log" &&
  timeout "$limit" "$program" "${tiny[@]}" --device cuda --policy auto --device-mem 64MiB --host-mem 256MiB \
    --window 2MiB >"$out/tiny-cuda.log" &&
  paste -d' ' <(field "$out/tiny-sim.log" losses | tr -d '[],' | tr ' ' '\n') \
    <(field "$out/tiny-cuda.log" losses | tr -d '[],' | tr ' ' '\n') |
  awk 'NF == 2 { n++; d = ($1 - $2) / $1; if (d < 0) d = -d; if (d > most) most = d }
       END { printf "tiny: losses of the GPU beside those of plain C: %d compared, at most %.3f %% apart\n", n, 100 * most
             exit !(n > 0 && most < 0.02) }' ||
  { echo "stack_gpu.sh: the tiny model failed, or its losses differ: see $out/tiny-*.log" >&2; exit 1; }

run() { # NAME, bench_stack options
  local name=$1 log=$out/$1.log; shift
  echo "== $name: bench_stack $*"
  timeout "$limit" "$program" "$@" --explain --timeline "$out/$name.json" 2>&1 | tee "$log"
  ((PIPESTATUS[0] == 0)) || { echo "stack_gpu.sh: $name failed" >&2; bad=1; return; }
  python3 bench/stalls.py "$out/$name.json" --alone "$(field "$log" bound_gpu_seconds)" >"$out/$name.stalls"
  sed -n '/share  of/,$p' "$out/$name.stalls"
}

run 7b-24GiB --size 7b --batch 16 --seq 1024 --device-mem 24GiB
run 7b-12GiB --size 7b --batch 16 --seq 1024 --device-mem 12GiB
run 3b-24GiB --size 3b --batch 16 --seq 1024 --device-mem 24GiB
run 1.3b-24GiB --size 1.3b --batch 16 --seq 1024 --device-mem 24GiB

echo
printf '%-12s %8s %8s %8s %6s %10s %9s %8s\n' run s/step alone bound ratio 'bound by' predicted 'B/param'
for name in 7b-24GiB 7b-12GiB 3b-24GiB 1.3b-24GiB; do
  log=$out/$name.log
  [[ -n $(field "$log" sec_per_step) ]] || { printf '%-12s failed\n' "$name"; continue; }
  printf '%-12s %8.4f %8.4f %8.4f %6.3f %10s %9.4f %8.2f\n' "$name" "$(field "$log" sec_per_step)" \
    "$(field "$log" bound_gpu_seconds)" "$(field "$log" bound_seconds)" "$(field "$log" step_to_bound)" \
    "$(field "$log" bound_by | tr -d '"')" "$(field "$log" predicted_sec_per_step)" "$(field "$log" host_bytes_per_param)"
done
exit "$bad"
