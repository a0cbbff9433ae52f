#!/usr/bin/env bash
# Makes kernels_ptx.h of kernels.cu; needs nvcc and ptxas. --check: only says whether it is of this source, comments and
# blanks aside; needs a C compiler. SPDX-License-Identifier: Apache-2.0
set -euo pipefail
cd "$(dirname "$0")"
. ../../cmake/ptx.sh
sum=$("${CC:-cc}" -w -fpreprocessed -dD -E -P -x c kernels.cu | tr -d ' \t\n' | sha256sum | cut -d' ' -f1)
if [[ ${1:-} == --check ]]; then
  grep -q "$sum" kernels_ptx.h || { echo "kernels_ptx.sh: kernels_ptx.h is behind kernels.cu: run this without --check" >&2; exit 1; }
  exit 0
fi
ptx_compile kernels.cu
ptx_header kernels stack_kernels_ptx BENCH_STACK_KERNELS_PTX_H "Source: $sum"
