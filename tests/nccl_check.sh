#!/usr/bin/env bash
# Builds nccl_check.c with the plain compiler and runs it over this machine's NCCL, a process for each GPU.
# tests/nccl_check.sh [--fake] [--shared-gpu] [--library DIR] [LOG_DIR [RANKS...]]: groups of these sizes; without any, 2 to
# the number of GPUs. The log is LOG_DIR/nccl_check.log. Needs a C compiler, the driver and libnccl.so.2, no toolkit and no
# network. Exits 77 without 2 GPUs or NCCL. SPDX-License-Identifier: Apache-2.0
#
#   GEMINI_NCCL=DIR  the folder of libnccl.so.2; without it the linker's, then that of the package nvidia-nccl-cu12 or
#                    nvidia-nccl-cu13 of python3
#   --shared-gpu     all processes, 2 to 4, without RANKS 2 and 3, on GPU 0, which NCCL 2.30 and later can do
#                    (NCCL_MULTI_RANK_GPU_ENABLE=1); exits 77 with an older one. They take turns: times say nothing
#   --library DIR    the folder of a libgemini.so: groups of its managers train a small model, too
#   --fake           the stand-ins of the unit tests for NCCL and the driver, with threads for processes; no rank is
#                    killed, it stays away instead
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
fake=0
library=
arguments=()
if [[ ${1:-} == --fake ]]; then fake=1; shift; fi
if [[ ${1:-} == --shared-gpu ]]; then
  arguments+=(--shared-gpu)
  # Kernels of all communicators of all ranks wait for each other on one GPU: each is to be small.
  export NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_MAX_CTAS=${NCCL_MAX_CTAS:-2} NCCL_NVLS_ENABLE=0
  export NCCL_DEBUG=${NCCL_DEBUG:-WARN} NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo}
  shift
fi
if [[ ${1:-} == --library ]]; then library=$(cd "$2" && pwd) || exit 1; shift 2; fi
logs=${1:-build/nccl}
mkdir -p "$logs"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

flags=(-std=c11 -D_GNU_SOURCE= -O2 -g -Wall -Wextra -ffp-contract=off -fno-math-errno
  -Isrc -Itests -Itests/reference -Iinclude)
build() { # FILE ARGUMENT...
  local file=$1
  shift
  "${CC:-gcc}" "${flags[@]}" -o "$work/$file" "$@" -lpthread -lm -ldl || { echo "$file: not built"; exit 1; }
}
# The PTX beside a .cu as a string, as cmake/ptx.cmake makes it.
ptx() { # FILE.ptx NAME
  echo "extern const char $2[]; const char $2[] ="
  sed -e '/^\/\//d' -e 's/["\\]/\\&/g' -e 's/.*/"&\\n"/' "$1"
  echo ';'
}
ptx src/device/sum_squares.ptx gmi_sum_squares_ptx >"$work/sum_squares_ptx.c"
ptx src/device/rank_sum.ptx gmi_rank_sum_ptx >"$work/rank_sum_ptx.c"
build nccl_check tests/nccl_check.c src/comm/*.c src/device/*.c src/base/*.c "$work/sum_squares_ptx.c" \
  "$work/rank_sum_ptx.c"

if ((fake)); then
  shared=(-shared -fPIC "-Wl,-rpath,$work" src/device/sum.c src/base/check.c)
  build libcuda.so.1 "${shared[@]}" -Wl,-soname,libcuda.so.1 tests/reference/fake_cuda.c src/device/sum_squares.c
  build libnccl.so.2 "${shared[@]}" -Wl,-soname,libnccl.so.2 tests/unit/fake_nccl.c "$work/libcuda.so.1"
  folder=$work
  arguments+=(--threads)
elif [[ ${GEMINI_NCCL:-} ]]; then
  folder=$(cd "$GEMINI_NCCL" && pwd) || exit 1
elif ! ldconfig -p 2>/dev/null | grep -q 'libnccl\.so\.2'; then
  folder=$(python3 -c 'import nvidia.nccl; print(list(nvidia.nccl.__path__)[0] + "/lib")' 2>/dev/null)
fi

# What nccl_library.h says, against NCCL's own header where the package has it.
if [[ -e ${folder:-}/../include/nccl.h ]]; then
  echo '#include <stddef.h>
#define CUDART_VERSION 12000
#define __CUDA_BF16_TYPES_EXIST__
typedef struct CUstream_st *cudaStream_t;' >"$work/cuda_runtime.h"
  touch "$work"/cuda_{fp16,bf16}.h
  cat >"$work/header.c" <<'END'
#include "nccl.h"
#include "comm/comm.h"
#include "comm/nccl_library.h"
#define SAME(ours, theirs) _Static_assert((int)(ours) == (int)(theirs), #theirs)
#define PLACE(ours, theirs) \
  _Static_assert(offsetof(nccl_config_t, ours) == offsetof(ncclConfig_t, theirs), #theirs)
SAME(NCCL_SUCCESS, ncclSuccess); SAME(NCCL_INVALID_ARGUMENT, ncclInvalidArgument);
SAME(NCCL_REMOTE_ERROR, ncclRemoteError); SAME(NCCL_IN_PROGRESS, ncclInProgress);
SAME(NCCL_INT8, ncclInt8); SAME(NCCL_FLOAT16, ncclFloat16); SAME(NCCL_FLOAT32, ncclFloat32);
SAME(NCCL_FLOAT64, ncclFloat64); SAME(NCCL_BFLOAT16, ncclBfloat16); SAME(NCCL_SUM, ncclSum);
SAME(NCCL_UNDEFINED, NCCL_CONFIG_UNDEF_INT); SAME(sizeof(nccl_result_t), sizeof(ncclResult_t));
SAME(sizeof(nccl_id_t), sizeof(ncclUniqueId)); SAME(sizeof(gmi_comm_id_t), sizeof(ncclUniqueId));
PLACE(size, size); PLACE(magic, magic); PLACE(version, version); PLACE(blocking, blocking);
PLACE(cga_cluster_size, cgaClusterSize); PLACE(min_ctas, minCTAs); PLACE(max_ctas, maxCTAs);
PLACE(net_name, netName); PLACE(split_share, splitShare);
#if NCCL_VERSION_CODE >= 22500
PLACE(traffic_class, trafficClass);
#endif
int main(void) {
  const ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
  const nccl_config_t ours = NCCL_CONFIG_NON_BLOCKING;
  ncclResult_t (*init)(ncclComm_t *, int, ncclUniqueId, int, ncclConfig_t *) = ncclCommInitRankConfig;
  ncclResult_t (*gather)(const void *, void *, size_t, ncclDataType_t, ncclComm_t, cudaStream_t) = ncclAllGather;
  ncclResult_t (*scatter)(const void *, void *, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t) =
      ncclReduceScatter;
  ncclResult_t (*send)(const void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) = ncclSend;
  return !init || !gather || !scatter || !send || theirs.magic != ours.magic;
}
END
  build header -Wno-comment "-I$work" "-I$folder/../include" "$work/header.c" "$folder/libnccl.so.2" "-Wl,-rpath,$folder"
  "$work/header" || { echo "header: NCCL's is not as nccl_library.h says"; exit 1; }
  echo "header: as NCCL's"
fi
export LD_LIBRARY_PATH=${folder:+$folder:}${LD_LIBRARY_PATH:-} GEMINI_NCCL=${folder:-}
"$work/nccl_check" "${arguments[@]}" "${@:2}" 2>&1 | tee "$logs/nccl_check.log"
status=${PIPESTATUS[0]}
if ((status == 0)) && [[ $library ]]; then
  "${CC:-gcc}" "${flags[@]}" -o "$work/nccl_group_check" tests/nccl_group_check.c "-L$library" -lgemini \
    "-Wl,-rpath,$library" -lpthread -lm -ldl || { echo "nccl_group_check: not built"; exit 1; }
  sizes=("${@:2}")
  # Those that nccl_check has found.
  ((${#sizes[@]})) || mapfile -t sizes < <(sed -n 's/^\([0-9]*\) ranks: values$/\1/p' "$logs/nccl_check.log")
  "$work/nccl_group_check" "${arguments[@]}" "${sizes[@]}" 2>&1 | tee "$logs/nccl_group_check.log"
  status=${PIPESTATUS[0]}
fi
exit "$status"
