#!/usr/bin/env bash
# From a fresh checkout to the main job's result: sets up, builds build/release, trains a GPT whose model data are
# several times the device budget. Arguments replace the default ones. SPDX-License-Identifier: Apache-2.0
set -euo pipefail
cd "$(dirname "$0")/.."

# 14.3 million parameters, 192 MiB of model data with their optimizer states: four times the device budget.
main_job=(--policy auto --device-mem 48MiB --layers 8 --width 384 --heads 6 --context 128 --batch 4 --steps 100)

tests/setup.sh --bench
cmake -S . -B build/release -G Ninja -DCMAKE_BUILD_TYPE=Release -DGEMINI_BENCH=ON -DGEMINI_TESTS=OFF
cmake --build build/release
if (($#)); then main_job=("$@"); fi
echo "build/release/bench/train_gpt ${main_job[*]}"
exec build/release/bench/train_gpt "${main_job[@]}"
