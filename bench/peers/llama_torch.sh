#!/usr/bin/env bash
# LLaMAs of 1.3, 3 and 7 billion parameters in PyTorch on one GPU: all on it, under FSDP2 with CPU offload, under libgemini
# within 24 GiB; then 1.5 billion within 6 GiB, on text. SPDX-License-Identifier: Apache-2.0
#   bench/peers/llama_torch.sh [SIZE]...    of 7b, 3b, 1.3b, 1.5b; all when left out
# Needs torch, and libgemini where Python finds it. Host memory: 14 bytes a parameter for libgemini, 16 for FSDP2.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
sizes=("$@")
((${#sizes[@]})) || sizes=(7b 3b 1.3b 1.5b)
python=${PYTHON:-python3}
failed=0
run() { "$python" bench/peers/llama_torch.py "$@" || failed=1; }
for size in "${sizes[@]}"; do
  case $size in
    1.5b)
      run --system gemini --size 1.5b --batch 4 --device-mem 6GiB --host-mem 28GiB --step-in-backward --warmup 3 --steps 15 \
        --text /usr/share/common-licenses/GPL-3 ;;
    7b | 3b | 1.3b)
      run --system gpu --size "$size" --warmup 2 --steps 5
      run --system fsdp2 --size "$size" --warmup 1 --steps 2
      case $size in 7b) host=112GiB ;; 3b) host=70GiB ;; *) host=40GiB ;; esac
      run --system gemini --size "$size" --host-mem $host --step-in-backward --warmup 3 --steps 5 ;;
    *) echo "llama_torch.sh: $size: want 7b, 3b, 1.3b or 1.5b" >&2; exit 2 ;;
  esac
done
exit $failed
