#!/usr/bin/env bash
# Makes sum_squares_ptx.h of sum_squares.cu; needs nvcc and ptxas. SPDX-License-Identifier: Apache-2.0
set -euo pipefail
cd "$(dirname "$0")"
. ../../cmake/ptx.sh
ptx_compile sum_squares.cu
ptx_header sum_squares sum_squares_ptx GMI_SUM_SQUARES_PTX_H
