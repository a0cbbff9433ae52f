#!/usr/bin/env bash
# Sets up, builds and tests, lane by lane; every lane runs, then any failure fails. SPDX-License-Identifier: Apache-2.0
#   tests/run.sh [--tidy] [--lane release|clang|asan|tsan|valgrind|torch-oldest|torch-gpu|torch-newest]...
# release: build/test, all tests with the library's own checks. clang: build/clang, the unit and integration tests built
# by clang; skipped where setup.sh cannot install clang. asan: build/asan, address and undefined-behaviour sanitizers.
# tsan: build/tsan, thread sanitizer. valgrind: build/valgrind, what makes sense in Memcheck, which sees the code as it is
# delivered. torch-oldest, torch-gpu, torch-newest: Python's tests with the oldest version of torch that is promised,
# that of the machines with GPUs (a part of the tests) and the newest one (tests/torch.sh). GEMINI_STRESS_STEPS sets the
# length of stress tests in every lane, GEMINI_STRESS_SEED their programs, which otherwise follow from the commit and the
# lane: the same commit is tested by the same ones. --tidy removes what a torch lane installed once it has run, 5.5 GB
# each, so that 12 GB of disk are enough for all lanes instead of 22 GB.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

every_lane=(release clang asan tsan valgrind torch-oldest torch-gpu torch-newest)
lanes=()
tidy=0
while (($#)); do
  case $1 in
    --lane)
      if [[ " ${every_lane[*]} " != *" ${2:-?} "* ]]; then
        echo "run.sh: --lane ${2:-}: want one of ${every_lane[*]}" >&2
        exit 2
      fi
      lanes+=("$2"); shift 2 ;;
    --tidy) tidy=1; shift ;;
    --help) sed -n '2,13s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "run.sh: $1: unknown option, want --lane or --tidy" >&2; exit 2 ;;
  esac
done
((${#lanes[@]})) || lanes=("${every_lane[@]}")

tests/setup.sh --test || exit 1
took="setup $SECONDS s"
# What one lane has compiled another one need not: nothing of it depends on the build folder but a name in the debugger's
# tables. Who wants other settings has set them.
if command -v ccache >/dev/null; then
  export CMAKE_C_COMPILER_LAUNCHER=${CMAKE_C_COMPILER_LAUNCHER-ccache}
  export CMAKE_CXX_COMPILER_LAUNCHER=${CMAKE_CXX_COMPILER_LAUNCHER-ccache}
  export CCACHE_DIR=${CCACHE_DIR:-$PWD/build/ccache} CCACHE_NOHASHDIR=1 CCACHE_MAXSIZE=${CCACHE_MAXSIZE:-2G}
fi

# What each lane builds, and how its tests run, says CMakePresets.json.
lane() {
  local name=$1 preset=$1
  if [[ $name == torch-* ]]; then
    echo "run.sh: lane $name"
    tests/torch.sh "${name#torch-}"
    return
  fi
  if [[ $name == release ]]; then preset="test"; fi
  if [[ $name == clang ]] && ! { command -v clang && command -v clang++; } >/dev/null; then
    echo "run.sh: lane clang is skipped: there is no clang, and tests/setup.sh could not install it"
    return
  fi
  echo "run.sh: lane $name in build/$preset"
  cmake --preset "$preset" && cmake --build --preset "$preset" && ctest --preset "$preset"
}

# Lengths that take about five to ten seconds each on two cores, in the lane release half a minute;
# stress.test_group_random, whose steps need several processes, takes two to three times as long.
steps_of() {
  case $1 in release) echo 100000 ;; asan) echo 8000 ;; tsan) echo 2000 ;; valgrind) echo 500 ;; *) echo 0 ;; esac
}

# Of the tester's programs, which take the thread sanitizer longest.
tester_steps_of() { if [[ $1 == tsan ]]; then echo 5000; fi; }

# Nothing where there is no commit: then they follow from the clock.
seed_of() {
  local commit
  commit=$(git rev-parse HEAD 2>/dev/null) && echo $((16#${commit:0:7} + 10#$(cksum <<<"$1" | cut -c1-7)))
}

failed=()
for name in "${lanes[@]}"; do
  begin=$SECONDS
  GEMINI_STRESS_SEED=${GEMINI_STRESS_SEED:-$(seed_of "$name")} \
    GEMINI_STRESS_STEPS=${GEMINI_STRESS_STEPS:-$(steps_of "$name")} \
    GEMINI_TESTER_STEPS=${GEMINI_TESTER_STEPS:-$(tester_steps_of "$name")} lane "$name" || failed+=("$name")
  if ((tidy)) && [[ $name == torch-* ]]; then rm -rf "build/venv-$name" build/venv-page build/uv; fi
  took+=", $name $((SECONDS - begin)) s"
done
echo "run.sh: $took, in all $SECONDS s"
if ((${#failed[@]})); then
  echo "run.sh: failed lanes: ${failed[*]}" >&2
  exit 1
fi
