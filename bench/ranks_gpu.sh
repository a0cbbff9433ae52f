#!/usr/bin/env bash
# Training over several GPUs of one machine, by bench/peers/llama_torch.py under torchrun, beside FSDP2 all on the GPUs
# and with CPU offload, and what bench_gather says of gathers and sums. SPDX-License-Identifier: Apache-2.0
#   bench/ranks_gpu.sh [--ranks N] [--try] [BUILD] [GROUP...]
# GROUP: of 7b, 13b, 30b, 70b, host, gather, tests; all but 70b when left out, about 25 minutes on four GPUs. --ranks:
# how many GPUs, 4 when left out. --try: models, budgets and texts of a thousandth on the simulated device: shows without
# a GPU what fits and whether all goes well; times mean nothing. BUILD: build folder, build/release when left out.
# GEMINI_RANKS_OUT: folder for logs, build/ranks when not set; GEMINI_RANKS_LIMIT: seconds for each row, 300 when not set.
# - 7b, 13b: 16 x 1024 tokens a GPU within 24 GiB, one process (7b), N processes, and both ways of FSDP2; the last step's
#   timeline of rank 0 is kept beside the logs.
# - 30b within 24 GiB a GPU, 70b within 132 GiB (H200): on real text, the sources of Python's library. 70b needs 470 GiB
#   of host memory.
# - host: 7b with split masters, loaded from safetensors: the memory of all processes together.
# - gather: bench_gather with 2 and N ranks, buckets of 64 MiB, 8 and 24 frames. tests: the tests of several GPUs.
# python3 is one that has libgemini with torch (docs/pytorch.md), and NCCL where torch brings it; pytest for tests.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

groups=() build=build/release ranks=4 try=() device=cuda ring=(--chunks 128 --passes 5) small='' unit=GiB
while (($#)); do
  case $1 in
    --ranks) ranks=${2:?}; shift ;;
    --try)
      device=sim ring=(--chunks 8 --chunk 64KiB --passes 2) small=-small unit=MiB
      try=(--device cpu --vocabulary 1000 --seq 32) ;;
    7b | 13b | 30b | 70b | host | gather | tests) groups+=("$1") ;;
    */*) build=$1 ;;
    *) echo "ranks_gpu.sh: $1: want --ranks, --try, a build folder with a slash in its name, or a group (see the first" \
      "lines of this file)" >&2; exit 2 ;;
  esac
  shift
done
((${#groups[@]})) || groups=(7b 13b 30b host gather tests)
out=${GEMINI_RANKS_OUT:-build/ranks}
mkdir -p "$out" || exit 1
rm -f "$out"/*.log
bad=0

# NCCL comes with torch's wheel, where the loader does not look.
if [[ -z ${GEMINI_NCCL:-} ]] &&
  nccl=$(python3 -c 'import nvidia.nccl as n; print(list(n.__path__)[0] + "/lib")' 2>/dev/null); then
  export GEMINI_NCCL=$nccl
fi

run() { # NAME, command
  local name=$1 begin=$SECONDS; shift
  if timeout "${GEMINI_RANKS_LIMIT:-300}" "$@" >"$out/$name.log" 2>&1; then
    echo "$name: $((SECONDS - begin)) s"
  else
    echo "ranks_gpu.sh: $name failed (exit status $?): see $out/$name.log" >&2
    bad=1
  fi
}
train() { # NAME, processes, options of llama_torch.py
  local name=$1 processes=$2 command=(python3); shift 2
  ((processes == 1)) || command=(python3 -m torch.distributed.run --nproc-per-node "$processes")
  run "$name" "${command[@]}" bench/peers/llama_torch.py "$@" "${try[@]}"
}
# FSDP2 offloads nothing on a machine without a GPU, and wants a few steps only: they vary little. Its offload keeps 20
# bytes a parameter in host memory: 13b was killed on a machine of 256 GiB, so its row is left out there.
peers() { # SIZE
  local name=$1 total
  train "$name.fsdp2-gpu" "$ranks" --system fsdp2-gpu --size "$name$small" --warmup 1 --steps 4
  total=$(awk '/^MemTotal/ { print int($2 / 1048576) }' /proc/meminfo)
  if [[ $name == 13b && -z $small ]] && ((total < 280)); then
    echo "$name.fsdp2 is left out: FSDP2's offload of 13b does not fit into this machine's $total GiB"
    return
  fi
  train "$name.fsdp2" "$ranks" --system fsdp2 --size "$name$small" --device-mem "24$unit" --warmup 1 --steps 2
}
text() {
  cat "$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"/*.py >"$out/text"
  echo "$out/text"
}

ours=(--system gemini --device-mem "24$unit")
real=(--tile --masters split16 --loss-pieces 4 --warmup 3 --steps 3 --lr 2e-5) # on real text
for group in "${groups[@]}"; do
  case $group in
    7b)
      train 7b.first "$ranks" --size "7b$small" "${ours[@]}" --warmup 3 --steps 5 # a machine's first run is slower
      train 7b "$ranks" --size "7b$small" "${ours[@]}" --warmup 3 --steps 6 --timeline "$out/7b.timeline.json"
      peers 7b
      train 7b.one 1 --size "7b$small" "${ours[@]}" --warmup 3 --steps 6 ;;
    13b)
      train 13b "$ranks" --size "13b$small" "${ours[@]}" --warmup 3 --steps 6 --tile --timeline "$out/13b.timeline.json"
      peers 13b ;;
    30b)
      train 30b "$ranks" --size "30b$small" "${ours[@]}" "${real[@]}" --host-mem "110$unit" --batch 8 --text "$(text)" ;;
    70b)
      train 70b "$ranks" --size "70b$small" --system gemini "${real[@]}" --device-mem "132$unit" --host-mem "115$unit" \
        --batch 4 --text "$(text)" ;;
    host)
      train 7b.host "$ranks" --size "7b$small" "${ours[@]}" --masters split16 --folder "$out/7b.weights" --warmup 3 \
        --steps 2
      rm -rf "$out/7b.weights" ;;
    gather)
      for count in $(printf '%s\n' 2 "$ranks" | sort -nu); do
        for frames in 8 24; do
          run "gather.$count.$frames" "$build/bench/bench_gather" --device "$device" --ranks "$count" --frames "$frames" \
            --bucket 64MiB "${ring[@]}"
        done
      done ;;
    tests)
      LIBGEMINI_DIR=${LIBGEMINI_DIR:-$PWD/$build} PYTHONPATH=$PWD/bindings/python \
        run tests python3 -m pytest -q -p no:cacheprovider bindings/python/tests/test_cuda_ranks.py ;;
  esac
done

python3 bench/common/ranks_table.py "$out"/*.log || bad=1
exit "$bad"
