#!/usr/bin/env bash
# Makes kernels_ptx.h of kernels.cu; needs nvcc and ptxas. SPDX-License-Identifier: Apache-2.0
set -euo pipefail
cd "$(dirname "$0")"
. ../../cmake/ptx.sh
ptx_compile kernels.cu -std=c++17 -fmad=false -I.. -I../../include
ptx_header kernels kernels_ptx GMI_KERNELS_PTX_H
