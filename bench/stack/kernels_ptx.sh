#!/usr/bin/env bash
# Makes kernels_ptx.h of kernels.cu; needs nvcc and ptxas. --check: only says whether it is of this source, comments and
# blanks aside; needs a C compiler. SPDX-License-Identifier: Apache-2.0
#
# As src/device/sum_squares_ptx.sh: the oldest PTX version and GPU that know all of its instructions are written instead
# of the compiler's own newest, and ptxas proves that they do.
set -euo pipefail
cd "$(dirname "$0")"
sum=$("${CC:-cc}" -w -fpreprocessed -dD -E -P -x c kernels.cu | tr -d ' \t\n' | sha256sum | cut -d' ' -f1)
if [[ ${1:-} == --check ]]; then
  grep -q "$sum" kernels_ptx.h || { echo "kernels_ptx.sh: kernels_ptx.h is behind kernels.cu: run this without --check" >&2; exit 1; }
  exit 0
fi
ptx=$(mktemp --suffix=.ptx)
trap 'rm -f "$ptx" "$ptx.cubin"' EXIT
nvcc -ptx -O3 -arch=compute_75 -o "$ptx" kernels.cu
sed -i -e 's/^\.version .*/.version 6.3/' -e 's/^\.target .*/.target sm_70/' \
  -e '\:^//:d' -e 's/[ \t]*\/\/.*$//' -e '/^[ \t]*$/d' "$ptx"
ptxas -arch=sm_75 -o "$ptx.cubin" "$ptx"
ptxas -arch=sm_90 -o "$ptx.cubin" "$ptx"
{
  echo '/* The PTX of kernels.cu, made by kernels_ptx.sh. SPDX-License-Identifier: Apache-2.0'
  echo " * Source: $sum */"
  echo '#ifndef BENCH_STACK_KERNELS_PTX_H'
  echo '#define BENCH_STACK_KERNELS_PTX_H'
  echo
  echo '/* clang-format off */'
  echo 'static const char stack_kernels_ptx[] ='
  sed -e 's/\t/ /g' -e 's/["\\]/\\&/g' -e 's/.*/  "&\\n"/' -e '$s/$/;/' "$ptx"
  echo '/* clang-format on */'
  echo
  echo '#endif'
} >kernels_ptx.h
