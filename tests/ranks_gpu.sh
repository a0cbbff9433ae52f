#!/usr/bin/env bash
# Several processes over NCCL on this machine: communicators and groups from C (nccl_check.sh), PyTorch
# (bindings/python/tests/test_cuda_ranks.py), and a LLaMA (bench/peers/llama_torch.py). SPDX-License-Identifier: Apache-2.0
#
# tests/ranks_gpu.sh [--shared-gpu] BUILD [LOG_DIR]: BUILD is the folder of libgemini.so, and of libgemini_update.so or
# bindings/update below it. Logs go to LOG_DIR. Without --shared-gpu it needs two GPUs; with it one, which two processes
# share, and NCCL 2.30 or later. Each step has a time limit; a failed one does not keep the others from running.
#
#   GEMINI_NCCL=DIR   the folder of libnccl.so.2, where it is not to be torch's
#   PYTHON=PROGRAM    with torch and pytest (python3)
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
check=()
if [[ ${1:-} == --shared-gpu ]]; then
  check=(--shared-gpu)
  export NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_MAX_CTAS=${NCCL_MAX_CTAS:-2} NCCL_NVLS_ENABLE=0
  shift
fi
[[ ${1:-} && -d $1 ]] || { echo "want the folder of libgemini.so"; exit 2; }
LIBGEMINI_DIR=$(cd "$1" && pwd)
logs=${2:-build/ranks}
python=${PYTHON:-python3}
mkdir -p "$logs"
if [[ ${GEMINI_NCCL:-} ]]; then
  GEMINI_NCCL=$(cd "$GEMINI_NCCL" && pwd) || exit 1
  export GEMINI_NCCL
fi
export LIBGEMINI_DIR PYTHONPATH=$PWD/bindings/python${PYTHONPATH:+:$PYTHONPATH}
export NCCL_DEBUG=${NCCL_DEBUG:-WARN} NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo}
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}

failed=0
step() { # SECONDS NAME COMMAND...
  local seconds=$1 name=$2 status begin=$SECONDS
  shift 2
  timeout --kill-after=10 "$seconds" "$@" >"$logs/$name.log" 2>&1
  status=$?
  tail -n 25 "$logs/$name.log"
  echo "== $name: exit status $status after $((SECONDS - begin)) s"
  ((status == 0)) || failed=1
}
step 240 nccl_check tests/nccl_check.sh "${check[@]}" --library "$LIBGEMINI_DIR" "$logs" 2
step 200 test_cuda_ranks "$python" -m pytest -q -rs -p no:cacheprovider bindings/python/tests/test_cuda_ranks.py
step 120 llama_torch "$python" -m torch.distributed.run --nnodes 1 --nproc-per-node 2 --master-addr 127.0.0.1 \
  --master-port 29511 bench/peers/llama_torch.py --system gemini --size 125m --batch 4 --seq 512 --device-mem 4GiB \
  --steps 3 --limit 110 --deadline 40
exit "$failed"
