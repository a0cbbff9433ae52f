#!/usr/bin/env bash
# Training as scripts usually do it (clipped, accumulated, small and long batches, small models, narrow states), by
# bench/peers/llama_torch.py, beside the same all on the GPU; on a GPU with 128 GiB of host memory.
# SPDX-License-Identifier: Apache-2.0
#   bench/training_gpu.sh [--peers] [--try] [GROUP...]
# GROUP: of clipping, accumulation, host, batches, small, long, narrow; all when left out, about half an hour. --peers:
# FSDP2 with CPU offload, too. --try: a tiny model on the simulated device, to try the script without a GPU; its figures
# mean nothing. GEMINI_TRAINING_OUT: folder for logs, build/training when not set; GEMINI_TRAINING_LIMIT: seconds for
# each row, 300 when not set.
# python3 is one that has libgemini with torch (docs/pytorch.md), and transformers is not needed.
# The table has, of each row: seconds of a step (median), all on the GPU, the bound (bench/peers/bounds.py), what binds
# it, the step in terms of the two, what the plan predicted and how far off that is, steps that were clipped, departures,
# and the largest error of a peak in bytes.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

groups=() systems=gpu,gemini try=()
while (($#)); do
  case $1 in
    --peers) systems=gpu,fsdp2,gemini ;;
    --try)
      try=(--device cpu --size tiny --vocabulary 512 --batch 2 --seq 64 --device-mem 1MiB --host-mem 64MiB --steps 2) ;;
    clipping | accumulation | host | batches | small | long | narrow) groups+=("$1") ;;
    *) echo "training_gpu.sh: $1: want --peers, --try, or a group (see the first lines of this file)" >&2; exit 2 ;;
  esac
  shift
done
((${#groups[@]})) || groups=(clipping accumulation host batches small long narrow)
out=${GEMINI_TRAINING_OUT:-build/training}
mkdir -p "$out" || exit 1
rm -f "$out"/*.log
bad=0

run() { # NAME, options of llama_torch.py
  local name=$1 begin=$SECONDS; shift
  if timeout "${GEMINI_TRAINING_LIMIT:-300}" python3 bench/peers/llama_torch.py --explain "$@" "${try[@]}" \
    >"$out/$name.log" 2>&1; then
    echo "$name: $((SECONDS - begin)) s"
  else
    echo "training_gpu.sh: $name failed (exit status $?): see $out/$name.log" >&2
    bad=1
  fi
}
row() { run "$1" --system "$systems" "${@:2}"; }

text=/usr/share/common-licenses/GPL-3
for group in "${groups[@]}"; do
  case $group in
    clipping)
      row 3b-norm-under-limit --size 3b --host-mem 100GB --clip 1e9
      row 3b-clipped --size 3b --host-mem 100GB --clip 1.0 ;;
    accumulation)
      row 3b-4x4 --size 3b --host-mem 100GB --batch 4 --accumulate 4 --clip 1e9
      row 3b-4x4-clipped --size 3b --host-mem 100GB --batch 4 --accumulate 4 --clip 1.0
      row 1.3b-4x4 --size 1.3b --batch 4 --accumulate 4 --clip 1.0 ;;
    host)
      row 7b-norm-under-limit --size 7b --host-mem 110GB --clip 1e9
      row 7b-clipped --size 7b --host-mem 110GB --clip 1.0 ;;
    batches)
      row 7b-batch-4 --size 7b --batch 4
      row 7b-batch-1 --size 7b --batch 1 ;;
    small)
      row 125m-in-backward --size 125m --batch 4 --seq 256 --steps 40
      row 125m-at-end --size 125m --batch 4 --seq 256 --steps 40 --step-at-end
      row 125m-half --size 125m --batch 4 --seq 256 --steps 40 --step-at-end --device-mem 1GiB ;;
    long)
      row 7b-1x32768 --size 7b --batch 1 --seq 32768 --offload-activations --loss-pieces 16 --steps 3
      row 7b-2x16384 --size 7b --batch 2 --seq 16384 --offload-activations --loss-pieces 16 --steps 3 ;;
    narrow) # on a real text, 300 steps: bytes a parameter, times and losses beside those of fp32
      run 125m-states --system gemini --size 125m --batch 8 --seq 256 --steps 300 --warmup 0 --lr 3e-4 --text "$text" \
        --device-mem 1GiB --states fp32,bf16,8bit --masters fp32,split16
      row 7b-8bit --size 7b --batch 4 --states 8bit --masters split16 ;;
  esac
done

python3 bench/common/training_table.py "$out"/*.log || bad=1
exit "$bad"
