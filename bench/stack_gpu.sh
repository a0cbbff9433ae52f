#!/usr/bin/env bash
# The reference rows of bench_stack on a GPU: 16x1024 tokens; 7b under 24 and 12 GiB, 3b and 1.3b under 24 GiB. Before
# them a tiny model, whose losses on the GPU must be those of plain C, and a small one under each placement.
# SPDX-License-Identifier: Apache-2.0
#   bench/stack_gpu.sh [BUILD [OUT [RUN...]]]
# BUILD: build folder, build/release when left out. OUT: folder for timelines, their explanations, traces, logs; build/stack
# when left out. RUN: of check, 7b-24GiB, 7b-12GiB, 3b-24GiB, 1.3b-24GiB; all when left out. GEMINI_STACK_LIMIT: seconds
# for each run, 200 when not set. cuBLAS: GEMINI_CUBLAS, the system's, or python's nvidia-cublas.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
program=${1:-build/release}/bench/bench_stack
out=${2:-build/stack}
runs=("${@:3}")
((${#runs[@]})) || runs=(check 7b-24GiB 7b-12GiB 3b-24GiB 1.3b-24GiB)
limit=${GEMINI_STACK_LIMIT:-200}
[[ -x $program ]] || { echo "stack_gpu.sh: $program: no such program, run bench/quickstart.sh first" >&2; exit 1; }
mkdir -p "$out"
# shellcheck source=common/cublas.sh
. bench/common/cublas.sh
bad=0

# shellcheck source=common/row.sh
. bench/common/row.sh
losses() { field "$1" losses | tr -d '[] ' | tr ',' '\n'; }

check() {
  local tiny=(--size tiny --batch 4 --seq 64 --layers 12 --steps 4 --policy none --quiet) policy
  "$program" "${tiny[@]}" --device sim >"$out/tiny-sim.log" || return 1
  timeout "$limit" "$program" "${tiny[@]}" --device cuda >"$out/tiny-cuda.log" || return 1
  paste -d' ' <(losses "$out/tiny-sim.log") <(losses "$out/tiny-cuda.log") |
    awk 'NF == 2 { n++; d = ($1 - $2) / $1; if (d < 0) d = -d; if (d > most) most = d }
         END { printf "tiny: %d losses of the GPU are at most %.3f %% off those of plain C\n", n, 100 * most
               exit !(n > 0 && most < 0.01) }' || return 1
  for policy in cuda cpu auto; do
    timeout "$limit" "$program" --size 1.3b --layers 3 --batch 2 --seq 256 --steps 3 --policy "$policy" --device-mem 25% \
      --quiet >"$out/small-$policy.log" || return 1
    echo "small: $policy within a quarter of the model data: the same bits as all on the GPU"
  done
}

run() { # NAME, bench_stack options
  local name=$1 log=$out/$1.log; shift
  echo "== $name: bench_stack $*"
  timeout "$limit" "$program" "$@" --explain --timeline "$out/$name.json" --trace "$out/$name.trace" 2>&1 | tee "$log"
  ((PIPESTATUS[0] == 0)) || { echo "stack_gpu.sh: $name failed" >&2; bad=1; return; }
  python3 bench/stalls.py "$out/$name.json" --alone "$(field "$log" bound_gpu_seconds)" >"$out/$name.stalls"
  sed -n '/share  of/,$p' "$out/$name.stalls"
}

for name in "${runs[@]}"; do
  if [[ $name == check ]]; then
    check || { echo "stack_gpu.sh: the check failed: see $out/tiny-*.log and $out/small-*.log" >&2; exit 1; }
  else
    run "$name" --size "${name%%-*}" --batch 16 --seq 1024 --device-mem "${name#*-}"
  fi
done

echo
printf '%-12s %8s %8s %8s %6s %12s %9s %8s\n' run s/step alone bound ratio 'bound by' predicted B/param
for name in "${runs[@]}"; do
  log=$out/$name.log
  [[ $name != check ]] || continue
  [[ -n $(field "$log" sec_per_step) ]] || { printf '%-12s failed\n' "$name"; continue; }
  printf '%-12s %8.4f %8.4f %8.4f %6.3f %12s %9.4f %8.2f\n' "$name" "$(field "$log" sec_per_step)" \
    "$(field "$log" bound_gpu_seconds)" "$(field "$log" bound_seconds)" "$(field "$log" step_to_bound)" \
    "$(field "$log" bound_by | tr -d '"')" "$(field "$log" predicted_sec_per_step)" "$(field "$log" host_bytes_per_param)"
done
exit "$bad"
