#!/usr/bin/env bash
# The fused AdamW against PyTorch's fused one on the CPU with the two casts it needs: seconds a parameter, at the same
# number of threads, in turns. SPDX-License-Identifier: Apache-2.0
#   bench/bench_update.sh [BUILD] [--threads N] [--elements N] [--dtype bf16|f16] [--turns N] [--passes N]
# BUILD: build folder, build/release when left out. --elements: a thread's. Needs a python3 with torch; GEMINI_PYTHON
# names another one. Exit 77: there is none.
set -euo pipefail
cd "$(dirname "$0")/.."
build=build/release
if (($#)) && [[ $1 != --* ]]; then build=$1; shift; fi
threads=$(nproc) elements=33554432 dtype=bf16 turns=3 passes=7
while (($#)); do
  case $1 in
  --threads | --elements | --dtype | --turns | --passes)
    (($# > 1)) || { echo "bench_update.sh: $1 has no value" >&2; exit 2; }
    declare "${1#--}=$2"
    shift 2
    ;;
  *)
    echo "bench_update.sh: $1: no such option" >&2
    exit 2
    ;;
  esac
done
program=$build/bench/bench_update
python=${GEMINI_PYTHON:-python3}
[[ -x $program ]] || { echo "bench_update.sh: $program: no such program, run bench/quickstart.sh first" >&2; exit 1; }
"$python" -c 'import torch' 2>/dev/null || { echo "bench_update.sh: $python has no torch" >&2; exit 77; }

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
field() { sed -n "s/.*\"$2\": \([^,}]*\).*/\1/p" "$out/$1"; }
median() { sort -g | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'; }
for ((turn = 0; turn < turns; turn++)); do
  "$program" --threads "$threads" --elements "$elements" --dtype "$dtype" --passes "$passes" | tee "$out/ours.$turn"
  # Huge pages for torch's memory, too.
  THP_MEM_ALLOC_ENABLE=1 "$python" bench/peers/update_torch.py --threads "$threads" --parameters $((threads * elements)) --tensors "$threads" \
    --dtype "$dtype" --passes "$passes" | tee "$out/torch.$turn"
done
all() { for ((turn = 0; turn < turns; turn++)); do field "$1.$turn" "$2"; done | median; }
ours=$(all ours value) torch=$(all torch value)
printf 'ROW {"bench": "bench_update.sh", "case": "%s", "value": %s, "unit": "s/parameter", "ratio": %s, "against": "torch fused AdamW and two casts", "torch_s_per_parameter": %s, "ratio_to_plain_pass": %s, "threads": %d, "parameters": %d}\n' \
  "$dtype" "$ours" "$(awk -v a="$torch" -v b="$ours" 'BEGIN { printf "%.4f", a / b }')" "$torch" "$(all ours ratio)" \
  "$threads" $((threads * elements))
