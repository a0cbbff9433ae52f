#!/usr/bin/env bash
# Makes adamw_ptx.h of adamw.cu; needs nvcc and ptxas. SPDX-License-Identifier: Apache-2.0
#
# As src/device/sum_squares_ptx.sh: the oldest PTX version and GPU that know all of its instructions are written, and
# ptxas proves that they do.
set -euo pipefail
cd "$(dirname "$0")"
ptx=$(mktemp --suffix=.ptx)
trap 'rm -f "$ptx" "$ptx.cubin"' EXIT
nvcc -ptx -O3 -std=c++17 -fmad=false -arch=compute_75 -I.. -I../../include -o "$ptx" adamw.cu
sed -i -e 's/^\.version .*/.version 6.3/' -e 's/^\.target .*/.target sm_70/' \
  -e '\:^//:d' -e 's/[ \t]*\/\/.*$//' -e '/^[ \t]*$/d' "$ptx"
ptxas -arch=sm_75 -o "$ptx.cubin" "$ptx"
ptxas -arch=sm_90 -v -o "$ptx.cubin" "$ptx"
{
  echo '/* The PTX of adamw.cu, made by adamw_ptx.sh. SPDX-License-Identifier: Apache-2.0 */'
  echo '#ifndef GMI_ADAMW_PTX_H'
  echo '#define GMI_ADAMW_PTX_H'
  echo
  echo '/* clang-format off */'
  echo 'static const char adamw_ptx[] ='
  sed -e 's/\t/ /g' -e 's/["\\]/\\&/g' -e 's/.*/  "&\\n"/' -e '$s/$/;/' "$ptx"
  echo '/* clang-format on */'
  echo
  echo '#endif'
} >adamw_ptx.h
