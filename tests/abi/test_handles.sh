#!/usr/bin/env bash
# Compilers refuse a handle of one kind where another is wanted: a program for each pair of kinds, in C and in C++.
#   test_handles.sh CC CXX        SPDX-License-Identifier: Apache-2.0
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
kinds=(manager arena tensor stream graph topology)
wrong=0 refused=0
# What compilers say when types are what is wrong.
types='incompatible|cannot convert|makes pointer from|invalid conversion|no (known conversion|match|viable|matching)'

# WANT WHAT SOURCE: does SOURCE compile, as C99 and as C++11? WANT is yes or no; WHAT says what it is.
expect() {
  local compiler said have
  for compiler in "$cc -xc -std=c99 -Werror=incompatible-pointer-types -Werror=int-conversion" "$cxx -xc++ -std=c++11"; do
    read -ra words <<<"$compiler"
    have=yes
    said=$(printf '%s\n' "$includes" "$3" | "${words[@]}" -I "$here/../../include" -fsyntax-only - 2>&1) || have=no
    if [[ $have == no ]]; then refused=$((refused + 1)); fi
    if [[ $have == "$1" && ($have == yes || $said =~ $types) ]]
    then continue; fi
    echo "test_handles.sh: $2: compiles: $have, wanted: $1 ($compiler)"$'\n'"$said"
    wrong=1
  done
}

cc=$1 cxx=$2
includes=$'#include "gemini.h"\n#include "gemini/graph.h"\n#include "gemini/group.h"\n#include "gemini/topology.h"'
for want in "${kinds[@]}"; do
  for have in "${kinds[@]}"; do
    expect "$([[ $want == "$have" ]] && echo yes || echo no)" "gemini_${have}_t as gemini_${want}_t" \
      "void take(gemini_${want}_t handle); void give(gemini_${have}_t handle); void give(gemini_${have}_t handle) { take(handle); }"
  done
  expect no "a number as gemini_${want}_t" \
    "void take(gemini_${want}_t handle); void give(uint64_t id); void give(uint64_t id) { take(id); }"
done

# In calls and in structs: arguments in the wrong order, a member of the wrong kind.
body() { echo "int f(gemini_manager_t mgr, gemini_arena_t arena, gemini_tensor_t tensor, gemini_stream_t stream); int f(gemini_manager_t mgr, gemini_arena_t arena, gemini_tensor_t tensor, gemini_stream_t stream) { gemini_access_t a; (void)arena, (void)tensor; $1; return gemini_acquire(mgr, &a, 1, stream); }"; }
expect yes "an access of a tensor" "$(body 'a.object.tensor = tensor')"
expect yes "an access of an arena" "$(body 'a.object.arena = arena')"
expect no "an arena as an access's tensor" "$(body 'a.object.tensor = arena')"
expect no "a tensor as an access's arena" "$(body 'a.object.arena = tensor')"
expect no "a tensor as an access's object" "$(body 'a.object = tensor')"
expect no "an arena and its manager exchanged" "$(body '(void)gemini_arena_destroy(arena, mgr)')"
expect no "a stream for a manager" "$(body '(void)gemini_stats_reset(stream)')"

# 30 pairs, 6 numbers and 5 others, in two languages
[[ $refused == 82 ]] || { echo "test_handles.sh: $refused programs were refused, not 82"; wrong=1; }
exit $wrong
