#!/usr/bin/env bash
# The same training under every placement and budget: losses and parameters must be the same to the bit, the budget
# never passed, peaks predicted to the byte. Arguments go to train_gpt. SPDX-License-Identifier: Apache-2.0
#   bench/parity.sh [BUILD] [--interrupted] [train_gpt options]
# BUILD: build folder, build/release when left out. --interrupted: evaluations, longer sequences and skipped layers come
# between the steps; then peaks are not compared, as an interruption's own is unknown when it begins.
set -euo pipefail
cd "$(dirname "$0")/.."
build=build/release
if (($#)) && [[ $1 != --* ]]; then build=$1; shift; fi
interrupted=()
if [[ ${1:-} == --interrupted ]]; then shift; interrupted=(--eval-every 3 --context-every 5 --skip-layer-every 4); fi
program=$build/bench/train_gpt
[[ -x $program ]] || { echo "parity.sh: $program: no such program, run bench/quickstart.sh first" >&2; exit 1; }
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

# shellcheck source=common/row.sh
. bench/common/row.sh
run() { # NAME, options
  local name=$1; shift
  "$program" "$@" "${interrupted[@]}" --quiet >"$out/$name" || { echo "parity.sh: train_gpt $* failed" >&2; exit 1; }
}

run none --policy none "$@"
hash=$(field "$out/none" params_hash)
losses=$(field "$out/none" losses)
first=$(tr -d '[] ' <<<"$losses" | cut -d, -f1)
last=$(tr -d '[] ' <<<"$losses" | awk -F, '{ print $NF }')
printf '%-8s %6s %-18s %12s %12s %9s %9s %7s\n' policy budget hash peak budget "s/step" predicted error
printf '%-8s %6s %-18s %12s %12s %9.4f\n' none - "${hash//\"/}" - - "$(field "$out/none" sec_per_step)"
bad=0
for policy in cuda cpu auto static; do
  for budget in 100% 50% 30% 15%; do
    name=$policy-$budget
    run "$name" --policy "$policy" --device-mem "$budget" "$@"
    f=$out/$name
    printf '%-8s %6s %-18s %12s %12s %9.4f %9.4f %7s\n' "$policy" "$budget" "$(field "$f" params_hash | tr -d '"')" \
      "$(field "$f" device_peak)" "$(field "$f" device_budget)" "$(field "$f" sec_per_step)" \
      "$(field "$f" predicted_sec_per_step)" "$(field "$f" op_peak_error_bytes)"
    [[ $(field "$f" params_hash) == "$hash" && $(field "$f" losses) == "$losses" ]] ||
      { echo "parity.sh: $name: losses or parameters differ from none" >&2; bad=1; }
    (($(field "$f" device_peak) <= $(field "$f" device_budget))) || { echo "parity.sh: $name: peak above budget" >&2; bad=1; }
    ((${#interrupted[@]})) || [[ $(field "$f" op_peak_error_bytes) == 0 ]] || { echo "parity.sh: $name: a peak was predicted wrong" >&2; bad=1; }
  done
done
echo "loss from $first to $last: $(awk -v a="$first" -v b="$last" 'BEGIN { printf "%.1f %% of its start", 100 * b / a }')"
printf 'ROW {"bench": "parity", "case": "16 runs against none", "value": %d, "unit": "runs that differ", "params_hash": %s, "loss_ratio": %s}\n' \
  "$bad" "$hash" "$(awk -v a="$first" -v b="$last" 'BEGIN { printf "%.6f", b / a }')"
exit "$bad"
