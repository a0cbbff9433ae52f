#!/usr/bin/env bash
# Training on a GPU: under every placement and budget the same losses and parameters, to the bit, as in plain GPU memory
# (parity.sh, plain and interrupted), and losses that differ from the CPU's by no more than fp32 rounding does.
# SPDX-License-Identifier: Apache-2.0
#   bench/parity_gpu.sh [BUILD] [train_gpt options]
# BUILD: build folder, build/release when left out. cuBLAS: GEMINI_CUBLAS, the system's, or python's nvidia-cublas.
#
# How much rounding does is measured: the CPU trains with several of OpenBLAS's kernels, which add the same terms in
# other orders, as a GPU's does. A step's spread is the largest relative difference of two of them in it or a step before.
# The GPU's loss may be MARGIN spreads, and one unit of an fp32, off the CPU's. (Products by TF32 are not:
# NVIDIA_TF32_OVERRIDE=1 makes this fail.)
set -euo pipefail
cd "$(dirname "$0")/.."
build=build/release margin=8
if (($#)) && [[ $1 != --* ]]; then build=$1; shift; fi
program=$build/bench/train_gpt
[[ -x $program ]] || { echo "parity_gpu.sh: $program: no such program, run bench/quickstart.sh first" >&2; exit 1; }
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
# shellcheck source=common/cublas.sh
. bench/common/cublas.sh
shape=(--layers 12 --width 512 --heads 8 --context 128 --batch 1 --steps 8 "$@")

# shellcheck source=common/row.sh
. bench/common/row.sh
kernels=(default Haswell Sandybridge Nehalem)
"$program" --device cuda --policy none "${shape[@]}" --quiet >"$out/gpu"
echo "$(field "$out/gpu" device | tr -d "\"") with cuBLAS $(field "$out/gpu" cublas)"
for kernel in "${kernels[@]}"; do
  if [[ $kernel != default ]]; then export OPENBLAS_CORETYPE=$kernel; fi
  "$program" --policy none "${shape[@]}" --quiet >"$out/$kernel" &
done
unset OPENBLAS_CORETYPE
for _ in "${kernels[@]}"; do wait -n; done
for run in gpu "${kernels[@]}"; do field "$out/$run" losses | tr -d '[] ' | tr ',' '\n' >"$out/$run.losses"; done

bad=0
(cd "$out" && paste gpu.losses "${kernels[@]/%/.losses}") >"$out/table"
awk -v margin="$margin" '
  function apart(a, b) { d = a > b ? a - b : b - a; return d / (b > 0 ? b : 1) }
  BEGIN { printf "%4s %12s %12s %12s %12s %12s\n", "step", "CPU", "GPU", "difference", "CPU spread", "bound" }
  {
    for (i = 2; i <= NF; i++) for (j = 2; j < i; j++) if (apart($i, $j) > spread) spread = apart($i, $j)
    difference = apart($1, $2); bound = margin * spread + 2 ^ -23
    printf "%4d %12s %12s %12.2e %12.2e %12.2e\n", NR, $2, $1, difference, spread, bound
    if (difference > largest) largest = difference
    if (!(difference <= bound) || NF < 5) { print "parity_gpu.sh: step " NR ": the losses differ by more than rounding" > "/dev/stderr"; bad = 1 }
  }
  END {
    if (NR == 0 || spread == 0) { print "parity_gpu.sh: the CPU runs do not differ: is its BLAS OpenBLAS with several kernels?" > "/dev/stderr"; bad = 1 }
    printf "ROW {\"bench\": \"parity_gpu\", \"case\": \"GPU against CPU\", \"value\": %.3e, \"unit\": \"largest relative difference of a loss\", \"cpu_spread\": %.3e, \"steps\": %d}\n", largest, spread, NR
    exit bad
  }' "$out/table" || bad=1

bench/parity.sh "$build" --device cuda "${shape[@]}" || bad=1
bench/parity.sh "$build" --interrupted --device cuda "${shape[@]}" || bad=1
exit "$bad"
