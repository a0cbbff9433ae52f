#!/usr/bin/env bash
# Builds the CUDA device with the plain compiler and runs its tests, benches and the probe on this machine's GPU.
# tests/cuda_check.sh [--library DIR] [LOG_DIR [probe] [tests] [bench] [copy] [update] [memcheck]]: these parts only. Exits
# 77 without a GPU. DIR: the folder of a build, whose libraries the tests of updates are about: left out without it.
# SPDX-License-Identifier: Apache-2.0
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
built=
if [[ ${1:-} == --library ]]; then built=$(cd "$2" && pwd) || exit 1; shift 2; fi
logs=${1:-build/cuda}
parts=" ${*:2} "
[[ $parts == "  " ]] && parts=" probe tests bench copy update memcheck "
mkdir -p "$logs"
logs=$(cd "$logs" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

flags=(-std=c11 -D_GNU_SOURCE= -O2 -g -Wall -Wextra -ffp-contract=off -fno-math-errno
  -Isrc -Itests -Itests/reference -Ibench/common -Iinclude)
# The PTX beside a .cu as a string, as cmake/ptx.cmake makes it.
ptx() { # FILE.ptx NAME
  echo "extern const char $2[]; const char $2[] ="
  sed -e '/^\/\//d' -e 's/["\\]/\\&/g' -e 's/.*/"&\\n"/' "$1"
  echo ';'
}
ptx src/device/sum_squares.ptx gmi_sum_squares_ptx >"$work/sum_squares_ptx.c"
ptx src/device/rank_sum.ptx gmi_rank_sum_ptx >"$work/rank_sum_ptx.c"
ptx bindings/update/kernels.ptx gmi_update_ptx >"$work/update_ptx.c"
library=(src/device/*.c "$work/sum_squares_ptx.c" "$work/rank_sum_ptx.c" src/base/*.c)
libraries=(-lpthread -lm -ldl)
read -ra rows <<<"$(pkg-config --cflags --libs json-c 2>/dev/null)" # of benches: libjson-c-dev

build() { # NAME SOURCE...
  local name=$1
  shift
  ${CC:-gcc} "${flags[@]}" -o "$work/$name" "$@" "${library[@]}" "${libraries[@]}" || { echo "$name: not built"; exit 1; }
}
step() { # SECONDS NAME COMMAND...
  local limit=$1 name=$2 begin=$SECONDS
  shift 2
  timeout "$limit" "$@" >"$logs/$name.log" 2>&1
  local status=$?
  echo "$name: exit $status after $((SECONDS - begin)) s"
  ((status == 0)) || failed=1
  return "$status"
}

# What cuda_driver.h says, against the toolkit's own header where there is one.
if [[ -e ${CUDA_HOME:-/usr/local/cuda}/include/cuda.h ]]; then
  cat >"$work/header.c" <<'END'
#include <cuda.h>
#include "device/cuda_driver.h"
#define SAME(ours, theirs) _Static_assert((int)(ours) == (int)(theirs), #theirs)
#define SIZE(ours, theirs) _Static_assert(sizeof(ours) == sizeof(theirs), #theirs)
#define PLACE(ours, a, theirs, b) _Static_assert(offsetof(ours, a) == offsetof(theirs, b), #b)
SAME(CU_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE); SAME(CU_OUT_OF_MEMORY, CUDA_ERROR_OUT_OF_MEMORY);
SAME(CU_NOT_INITIALIZED, CUDA_ERROR_NOT_INITIALIZED); SAME(CU_DEINITIALIZED, CUDA_ERROR_DEINITIALIZED);
SAME(CU_NO_DEVICE, CUDA_ERROR_NO_DEVICE); SAME(CU_INVALID_DEVICE, CUDA_ERROR_INVALID_DEVICE);
SAME(CU_INVALID_CONTEXT, CUDA_ERROR_INVALID_CONTEXT); SAME(CU_ECC_UNCORRECTABLE, CUDA_ERROR_ECC_UNCORRECTABLE);
SAME(CU_NVLINK_UNCORRECTABLE, CUDA_ERROR_NVLINK_UNCORRECTABLE); SAME(CU_CONTAINED, CUDA_ERROR_CONTAINED);
SAME(CU_INVALID_HANDLE, CUDA_ERROR_INVALID_HANDLE); SAME(CU_NOT_FOUND, CUDA_ERROR_NOT_FOUND);
SAME(CU_NOT_READY, CUDA_ERROR_NOT_READY); SAME(CU_ILLEGAL_ADDRESS, CUDA_ERROR_ILLEGAL_ADDRESS);
SAME(CU_LAUNCH_TIMEOUT, CUDA_ERROR_LAUNCH_TIMEOUT); SAME(CU_ASSERT, CUDA_ERROR_ASSERT);
SAME(CU_CONTEXT_IS_DESTROYED, CUDA_ERROR_CONTEXT_IS_DESTROYED);
SAME(CU_HOST_MEMORY_ALREADY_REGISTERED, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
SAME(CU_HOST_MEMORY_NOT_REGISTERED, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
SAME(CU_HARDWARE_STACK_ERROR, CUDA_ERROR_HARDWARE_STACK_ERROR); SAME(CU_LAUNCH_FAILED, CUDA_ERROR_LAUNCH_FAILED);
SAME(CU_TENSOR_MEMORY_LEAK, CUDA_ERROR_TENSOR_MEMORY_LEAK); SAME(CU_NOT_SUPPORTED, CUDA_ERROR_NOT_SUPPORTED);
SAME(CU_STREAM_CAPTURE_IMPLICIT, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT); SAME(CU_CAPTURE_NONE, CU_STREAM_CAPTURE_STATUS_NONE);
SAME(CU_CAPTURE_MODE_RELAXED, CU_STREAM_CAPTURE_MODE_RELAXED);
SAME(CU_MPS_CLIENT_TERMINATED, CUDA_ERROR_MPS_CLIENT_TERMINATED);
SAME(CU_EXTERNAL_DEVICE, CUDA_ERROR_EXTERNAL_DEVICE); SAME(CU_UNKNOWN, CUDA_ERROR_UNKNOWN);
SAME(CU_ATTRIBUTE_UNIFIED_ADDRESSING, CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING);
SAME(CU_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM,
     CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM);
SAME(CU_ATTRIBUTE_HOST_REGISTER_SUPPORTED, CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED);
SAME(CU_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
SAME(CU_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
  CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
SAME(CU_HANDLE_POSIX_FILE_DESCRIPTOR, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
SAME(CU_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS);
SAME(CU_STREAM_NON_BLOCKING_FLAG, CU_STREAM_NON_BLOCKING);
_Static_assert(CU_STREAM_PER_THREAD_HANDLE == 2, "CU_STREAM_PER_THREAD");
SAME(CU_EVENT_NO_TIME, CU_EVENT_DISABLE_TIMING);
SAME(CU_WAIT_VALUE_GEQ, CU_STREAM_WAIT_VALUE_GEQ); SAME(CU_GRANULARITY_MINIMUM, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
SAME(CU_ALLOCATION_PINNED, CU_MEM_ALLOCATION_TYPE_PINNED); SAME(CU_LOCATION_DEVICE, CU_MEM_LOCATION_TYPE_DEVICE);
SAME(CU_ACCESS_READ_WRITE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
SAME(CU_HOST_PORTABLE, CU_MEMHOSTALLOC_PORTABLE); SAME(CU_HOST_MAPPED, CU_MEMHOSTALLOC_DEVICEMAP);
SAME(CU_HOST_PORTABLE, CU_MEMHOSTREGISTER_PORTABLE); SAME(CU_HOST_MAPPED, CU_MEMHOSTREGISTER_DEVICEMAP);
SIZE(cu_result_t, CUresult); SIZE(cu_device_t, CUdevice); SIZE(cu_address_t, CUdeviceptr);
SIZE(cu_memory_t, CUmemGenericAllocationHandle); SIZE(cu_location_t, CUmemLocation);
SIZE(cu_allocation_t, CUmemAllocationProp); SIZE(cu_access_t, CUmemAccessDesc);
PLACE(cu_allocation_t, handle_types, CUmemAllocationProp, requestedHandleTypes);
PLACE(cu_allocation_t, location, CUmemAllocationProp, location);
PLACE(cu_allocation_t, windows_only, CUmemAllocationProp, win32HandleMetaData);
PLACE(cu_allocation_t, compression, CUmemAllocationProp, allocFlags);
PLACE(cu_access_t, flags, CUmemAccessDesc, flags);
END
  step 60 header "${CC:-gcc}" "${flags[@]}" "-I${CUDA_HOME:-/usr/local/cuda}/include" -c -o "$work/header.o" "$work/header.c"
fi

export GEMINI_TEST_DEVICE=cuda
build test_device tests/unit/test_device.c tests/reference/fake_cuda.c
step 20 gpu "$work/test_device" open_with_bad_config
(($? == 77)) && { cat "$logs/gpu.log"; exit 77; }
if [[ $parts == *" probe "* ]]; then
  build cuda_probe tests/cuda_probe.c
  step 40 probe "$work/cuda_probe"
  cat "$logs/probe.log"
fi
if [[ $parts == *" tests "* ]]; then
  # One by one, so that one that hangs costs its own limit only.
  for name in $("$work/test_device" --list); do
    step 12 "$name" "$work/test_device" "$name" || tail -n 3 "$logs/$name.log"
  done
fi
if [[ $parts == *" bench "* ]]; then
  step 15 bench_device "$work/test_device" bench
  cat "$logs/bench_device.log"
fi
if [[ $parts == *" copy "* ]]; then
  build bench_copy bench/bench_copy.c bench/common/{cli,row,gpu}.c "${rows[@]}"
  step 30 bench_copy "$work/bench_copy"
  step 30 bench_copy_timed "$work/bench_copy" --timed --passes 3
  cat "$logs/bench_copy.log" "$logs/bench_copy_timed.log"
fi
if [[ $parts == *" update "* ]]; then
  for isa in "avx2 -mavx2 -mf16c" "avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl"; do
    read -ra words <<<"$isa"
    ${CC:-gcc} "${flags[@]}" -Ibindings "${words[@]:1}" -c -o "$work/${words[0]}.o" "bindings/update/${words[0]}.c"
  done
  if [[ $built ]]; then
    for name in test_gpu test_update_gpu; do
      build "$name" -Ibindings "tests/integration/$name.c" "-L$built" "-L$built/bindings/update" -lgemini_update \
        -lgemini "-Wl,-rpath,$built" "-Wl,-rpath,$built/bindings/update"
      step 120 "$name" "$work/$name" || tail -n 3 "$logs/$name.log"
    done
  fi
  build bench_update_gpu -Ibindings -Ibindings/update bench/bench_update_gpu.c bench/common/{cli,row,gpu}.c "${rows[@]}" \
    bindings/update/{update,plain,cuda}.c "$work/update_ptx.c" "$work/avx2.o" "$work/avx512.o"
  step 60 bench_update_gpu "$work/bench_update_gpu"
  cat "$logs/bench_update_gpu.log"
fi
if [[ $parts == *" memcheck "* ]] && command -v compute-sanitizer >"$logs/memcheck.log"; then
  step 40 memcheck compute-sanitizer --error-exitcode 1 "$work/test_device" sum_squares
  tail -n 2 "$logs/memcheck.log"
fi
exit "$failed"
