#!/usr/bin/env bash
# Makes sum_squares_ptx.h of sum_squares.cu; needs nvcc and ptxas. SPDX-License-Identifier: Apache-2.0
#
# The compiler names its own newest PTX version, which older drivers refuse, though the kernel needs nothing of it: the
# oldest version and GPU that know all of its instructions are written instead, and ptxas proves that they do.
set -euo pipefail
cd "$(dirname "$0")"
ptx=$(mktemp --suffix=.ptx)
trap 'rm -f "$ptx" "$ptx.cubin"' EXIT
nvcc -ptx -O3 -arch=compute_75 -o "$ptx" sum_squares.cu
sed -i -e 's/^\.version .*/.version 6.3/' -e 's/^\.target .*/.target sm_70/' \
  -e '\:^//:d' -e 's/[ \t]*\/\/.*$//' -e '/^[ \t]*$/d' "$ptx"
ptxas -arch=sm_75 -o "$ptx.cubin" "$ptx"
ptxas -arch=sm_90 -o "$ptx.cubin" "$ptx"
{
  echo '/* The PTX of sum_squares.cu, made by sum_squares_ptx.sh. SPDX-License-Identifier: Apache-2.0 */'
  echo '#ifndef GMI_SUM_SQUARES_PTX_H'
  echo '#define GMI_SUM_SQUARES_PTX_H'
  echo
  echo '/* clang-format off */'
  echo 'static const char sum_squares_ptx[] ='
  sed -e 's/\t/ /g' -e 's/["\\]/\\&/g' -e 's/.*/  "&\\n"/' -e '$s/$/;/' "$ptx"
  echo '/* clang-format on */'
  echo
  echo '#endif'
} >sum_squares_ptx.h
