#!/usr/bin/env bash
# Makes kernels_ptx.h of kernels.cu; needs nvcc and ptxas. SPDX-License-Identifier: Apache-2.0
#
# As src/device/sum_squares_ptx.sh: the oldest PTX version and GPU that know all of its instructions are written, and
# ptxas proves that they do.
set -euo pipefail
cd "$(dirname "$0")"
ptx=$(mktemp --suffix=.ptx)
trap 'rm -f "$ptx" "$ptx.cubin"' EXIT
nvcc -ptx -O3 -std=c++17 -fmad=false -arch=compute_75 -I.. -I../../include -o "$ptx" kernels.cu
sed -i -e 's/^\.version .*/.version 6.3/' -e 's/^\.target .*/.target sm_70/' \
  -e '\:^//:d' -e 's/[ \t]*\/\/.*$//' -e '/^[ \t]*$/d' "$ptx"
ptxas -arch=sm_75 -o "$ptx.cubin" "$ptx"
ptxas -arch=sm_90 -v -o "$ptx.cubin" "$ptx"
{
  echo '/* The PTX of kernels.cu, made by kernels_ptx.sh. SPDX-License-Identifier: Apache-2.0 */'
  echo '#ifndef GMI_KERNELS_PTX_H'
  echo '#define GMI_KERNELS_PTX_H'
  echo
  echo '/* clang-format off */'
  echo 'static const char kernels_ptx[] ='
  sed -e 's/\t/ /g' -e 's/["\\]/\\&/g' -e 's/.*/  "&\\n"/' -e '$s/$/;/' "$ptx"
  echo '/* clang-format on */'
  echo
  echo '#endif'
} >kernels_ptx.h
