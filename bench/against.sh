#!/usr/bin/env bash
# Compares two builds of libgemini, in turns on one machine: medians of each figure, their ratio, and hashes of what was
# trained. SPDX-License-Identifier: Apache-2.0
#   bench/against.sh [--rounds N] OLD NEW [BENCH...]
# OLD, NEW: build folders of two commits. BENCH: of hot, plan, train (a small GPT on the simulated device), and on a GPU
# stack-24GiB, stack-12GiB (bench_stack 7b); hot, plan and train when left out. --rounds: how often each build runs each
# bench, 5 when left out. cuBLAS: as stack_gpu.sh. For an older commit:
#   git worktree add build/old COMMIT && cmake -S build/old -B build/old/build && cmake --build build/old/build
# Fails if a hash differs. Figures are of a machine that does nothing else.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

rounds=5 builds=() benches=()
while (($#)); do
  case $1 in
    --rounds) rounds=${2:?how many}; shift ;;
    hot | plan | train | stack-24GiB | stack-12GiB) benches+=("$1") ;;
    *) builds+=("$1") ;;
  esac
  shift
done
for build in "${builds[@]}"; do
  [[ -x $build/bench/bench_hot ]] ||
    { echo "against.sh: $build: no build folder with benches, or no bench" >&2; exit 2; }
done
((${#builds[@]} == 2)) || { echo "against.sh: want two build folders, OLD and NEW" >&2; exit 2; }
((${#benches[@]})) || benches=(hot plan train)
out=$(mktemp -d) || exit 1
trap 'rm -rf "$out"' EXIT
# shellcheck source=common/cublas.sh
. bench/common/cublas.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-1}

set_command() { # BUILD BENCH: in command
  case $2 in
    hot) command=("$1/bench/bench_hot") ;;
    plan) command=("$1/bench/bench_plan") ;;
    train) command=("$1/bench/train_gpt" --text /usr/share/common-licenses/GPL-3 --policy auto --device-mem 30%
                    --steps 30 --quiet) ;;
    stack-*) command=("$1/bench/bench_stack" --size 7b --batch 16 --seq 1024 --device-mem "${2#stack-}"
                      --against skip --steps 7) ;;
  esac
}

# Figures as lines "bench value case", hashes as "bench case hash".
bad=0
for bench in "${benches[@]}"; do
  for ((round = 0; round < rounds; round++)); do
    for side in 0 1; do
      set_command "${builds[side]}" "$bench"
      if ! LD_LIBRARY_PATH=${builds[side]}:${LD_LIBRARY_PATH:-} "${command[@]}" >"$out/log" 2>"$out/errors"; then
        echo "against.sh: ${command[*]} failed:" >&2
        tail -n 5 "$out/errors" >&2
        exit 1
      fi
      sed -n "s/^ROW .*\"case\": \"\([^\"]*\)\".*\"value\": \([^,}]*\).*/$bench \2 \1/p" "$out/log" \
        >>"$out/figures.$side"
      sed -n "s/^ROW .*\"params_hash\": \"\([^\"]*\)\".*/$bench \1/p" "$out/log" >>"$out/hashes.$side"
    done
  done
done

medians() { # FILE: "bench case<TAB>median" of each figure
  awk '{ key = $1; for (i = 3; i <= NF; i++) key = key " " $i; print key "\t" $2 }' "$1" | sort -t $'\t' -k1,1 -k2,2g |
    awk -F '\t' 'function done() { if (n) print key "\t" (n % 2 ? at[(n + 1) / 2] : (at[n / 2] + at[n / 2 + 1]) / 2) }
                 $1 != key { done(); key = $1; n = 0 } { at[++n] = $2 } END { done() }'
}
printf '%-44s %12s %12s %7s\n' 'median of each figure' old new ratio
join -t $'\t' <(medians "$out/figures.0" | sort -t $'\t' -k1,1) <(medians "$out/figures.1" | sort -t $'\t' -k1,1) |
  awk -F '\t' '{ printf "%-44s %12.5g %12.5g %7.3f\n", $1, $2, $3, $2 ? $3 / $2 : 0 }'
for bench in "${benches[@]}"; do
  hashes=$(grep -h "^$bench " "$out"/hashes.[01] 2>/dev/null | sort -u)
  [[ -n $hashes ]] || continue
  if (($(wc -l <<<"$hashes") == 1)); then
    echo "params_hash of all runs of $hashes"
  else
    printf 'against.sh: hashes differ:\n%s\n' "$hashes" >&2
    bad=1
  fi
done
exit "$bad"
