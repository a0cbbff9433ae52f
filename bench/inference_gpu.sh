#!/usr/bin/env bash
# Inference with models that do not fit on the GPU, by bench/peers/generate_torch.py, beside the same all on the GPU and
# beside Accelerate's offloading; on a GPU with 128 GiB of host memory. SPDX-License-Identifier: Apache-2.0
#   bench/inference_gpu.sh [--try] [GROUP...]
# GROUP, all but huge and huge-30 when left out, about half an hour:
#   memory   7B with 8, 4 and 2 GiB of the GPU's memory: seconds a token beside the bound of the link
#   start    7B from a folder of safetensors: time to the first token beside the time to read the folder
#   files    13B from a folder, with 8 GiB of the GPU and 8 GiB of the host: what the disk brings for each token
#   experts  mixtures of the shapes of Mixtral, with 30 % of their experts on the GPU, by each policy of the cache
#   cache    7B with 4 texts of 8192 tokens, whose keys and values are 16 GiB: gm.Cache beside transformers' caches
#   huge     70B from a folder, with 24 GiB of the GPU and 100 GiB of the host; needs 140 GB of disk
#   huge-30  30 of its 80 blocks, and as many parts of the memory; needs 53 GB of disk
# --try: tiny models on the simulated device, to try the script without a GPU; their figures mean nothing.
# GEMINI_INFERENCE_OUT: folder for logs and for the weights' folders, which stay there; build/inference when not set.
# GEMINI_INFERENCE_LIMIT: seconds for each row, 400 when not set.
# python3 is one that has libgemini with torch (docs/pytorch.md), transformers and accelerate.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

groups=() try=0
while (($#)); do
  case $1 in
    --try) try=1 ;;
    memory | start | files | experts | cache | huge | huge-30) groups+=("$1") ;;
    *) echo "inference_gpu.sh: $1: want --try, or a group (see the first lines of this file)" >&2; exit 2 ;;
  esac
  shift
done
((${#groups[@]})) || groups=(memory start files experts cache)
out=${GEMINI_INFERENCE_OUT:-build/inference}
mkdir -p "$out" || exit 1
rm -f "$out"/*.log
bad=0

row() { # NAME, options of generate_torch.py; with --try, those after "or" replace the sizes
  local name=$1 begin=$SECONDS given=() tried=()
  shift
  while (($#)) && [[ $1 != or ]]; do given+=("$1"); shift; done
  if ((try)); then tried=(--device cpu --vocabulary 512 --tokens 8 "${@:2}"); fi
  if timeout "${GEMINI_INFERENCE_LIMIT:-400}" python3 bench/peers/generate_torch.py "${given[@]}" "${tried[@]}" \
    >"$out/$name.log" 2>&1; then
    echo "$name: $((SECONDS - begin)) s"
  else
    echo "inference_gpu.sh: $name failed (exit status $?): see $out/$name.log" >&2
    bad=1
  fi
}

tiny=(--size tiny --device-mem 256KiB)
for group in "${groups[@]}"; do
  case $group in
    memory) row memory --size 7b --device-mem 8GiB,4GiB,2GiB or "${tiny[@]}" ;;
    start) row start --size 7b --device-mem 8GiB --folder "$out/weights" --system gemini,gpu \
      or "${tiny[@]}" --folder "$out/tiny" ;;
    files) row files --size 13b --device-mem 8GiB --host-mem 8GiB --folder "$out/weights-13b" --system gemini,gpu \
      or "${tiny[@]}" --host-mem 256KiB --folder "$out/tiny" ;;
    experts)
      row experts-8b --size mixtral-8b --sample --tokens 64 --device-mem 30% --policy lru,frequent,least-stale,all \
        --system gemini,gpu or --size mixtral-tiny
      ((try)) || row experts --size mixtral --sample --tokens 64 --device-mem 30% --policy frequent --system gemini ;;
    cache)
      row cache-24 --size 7b --batch 4 --prompt 8192 --tokens 12 --device-mem 24GiB --system gemini,gpu \
        --cache dynamic,offloaded,gemini or "${tiny[@]}" --prompt 200 --device-mem 512KiB --cache dynamic,gemini
      row cache-12 --size 7b --batch 4 --prompt 8192 --tokens 12 --device-mem 12GiB --system gemini \
        --cache offloaded,gemini or "${tiny[@]}" --prompt 200 --cache gemini ;;
    huge) row huge --size 70b --device-mem 24GiB --host-mem 100GiB --tokens 8 --folder "$out/weights-70b" \
      --system gemini or "${tiny[@]}" --folder "$out/tiny" ;;
    huge-30) row huge-30 --size 70b-30 --device-mem 9GiB --host-mem 37.5GiB --tokens 12 --folder "$out/weights-70b-30" \
      --system gemini or "${tiny[@]}" --host-mem 256KiB --folder "$out/tiny" ;;
  esac
done

python3 bench/common/inference_table.py "$out"/*.log || bad=1
exit "$bad"
