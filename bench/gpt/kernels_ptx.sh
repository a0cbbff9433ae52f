#!/usr/bin/env bash
# Makes kernels_ptx.h of kernels.cu; needs nvcc and ptxas. --check: only says whether it is of these sources, comments and
# blanks aside; needs a C compiler. SPDX-License-Identifier: Apache-2.0
set -euo pipefail
cd "$(dirname "$0")"
. ../../cmake/ptx.sh
sum=$(cat scalar.h gpt.h kernels.h kernels.cu | "${CC:-cc}" -w -fpreprocessed -dD -E -P -x c - | tr -d ' \t\n' | sha256sum | cut -d' ' -f1)
if [[ ${1:-} == --check ]]; then
  grep -q "$sum" kernels_ptx.h || { echo "kernels_ptx.sh: kernels_ptx.h is behind its sources: run this without --check" >&2; exit 1; }
  exit 0
fi
ptx_compile kernels.cu -fmad=false
if grep -qE '(fma\.rn|mul|add|sub)\.f(32|64)' <(grep -v fma.rn.f64 "$ptx"); then # fused, or left to ptxas to fuse
  echo "kernels_ptx.sh: kernels.cu has products fused with sums" >&2
  exit 1
fi
ptx_header kernels kernels_ptx BENCH_KERNELS_PTX_H "Sources: $sum"
