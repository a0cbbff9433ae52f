# shellcheck shell=bash
# Finds the cuBLAS for programs that open it; sourced by the scripts of bench/. SPDX-License-Identifier: Apache-2.0
# Sets GEMINI_CUBLAS to the newest of python3's packages, unless it is set already or there is none: then the programs
# use the system's.
if [[ -z ${GEMINI_CUBLAS:-} ]]; then
  found=$(python3 -c 'import glob, sys
print(*sorted(f for p in sys.path for f in glob.glob(p + "/nvidia/*/lib/libcublas.so.*")), sep="\n")' 2>/dev/null |
    tail -n 1 || true)
  [[ -z $found ]] || export GEMINI_CUBLAS=$found
fi
