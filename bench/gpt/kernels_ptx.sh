#!/usr/bin/env bash
# Makes kernels_ptx.h of kernels.cu; needs nvcc and ptxas. --check: only says whether it is of these sources, comments and
# blanks aside; needs a C compiler. SPDX-License-Identifier: Apache-2.0
#
# As of src/device/sum_squares_ptx.sh: the oldest PTX version and GPU that know all of its instructions are written instead
# of the compiler's newest, and ptxas proves that they do.
set -euo pipefail
cd "$(dirname "$0")"
sum=$(cat scalar.h gpt.h kernels.h kernels.cu | "${CC:-cc}" -w -fpreprocessed -dD -E -P -x c - | tr -d ' \t\n' | sha256sum | cut -d' ' -f1)
if [[ ${1:-} == --check ]]; then
  grep -q "$sum" kernels_ptx.h || { echo "kernels_ptx.sh: kernels_ptx.h is behind its sources: run this without --check" >&2; exit 1; }
  exit 0
fi
ptx=$(mktemp --suffix=.ptx)
trap 'rm -f "$ptx" "$ptx.cubin"' EXIT
nvcc -ptx -O3 -fmad=false -arch=compute_75 -o "$ptx" kernels.cu
sed -i -e 's/^\.version .*/.version 6.3/' -e 's/^\.target .*/.target sm_70/' \
  -e '\:^//:d' -e 's/[ \t]*\/\/.*$//' -e '/^[ \t]*$/d' "$ptx"
if grep -qE '(fma\.rn|mul|add|sub)\.f(32|64)' <(grep -v fma.rn.f64 "$ptx"); then # fused, or left to ptxas to fuse
  echo "kernels_ptx.sh: kernels.cu has products fused with sums" >&2
  exit 1
fi
ptxas -arch=sm_75 -o "$ptx.cubin" "$ptx"
ptxas -arch=sm_90 -o "$ptx.cubin" "$ptx"
{
  echo '/* The PTX of kernels.cu, made by kernels_ptx.sh. SPDX-License-Identifier: Apache-2.0'
  echo " * Sources: $sum */"
  echo '#ifndef BENCH_KERNELS_PTX_H'
  echo '#define BENCH_KERNELS_PTX_H'
  echo
  echo '/* clang-format off */'
  echo 'static const char kernels_ptx[] ='
  sed -e 's/\t/ /g' -e 's/["\\]/\\&/g' -e 's/.*/  "&\\n"/' -e '$s/$/;/' "$ptx"
  echo '/* clang-format on */'
  echo
  echo '#endif'
} >kernels_ptx.h
