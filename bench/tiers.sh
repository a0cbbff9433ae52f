#!/usr/bin/env bash
# The same training in three tiers: device and host together hold less than half of the model data, the rest lives in
# files; losses and parameters must be those of none to the bit. SPDX-License-Identifier: Apache-2.0
#   bench/tiers.sh [BUILD] [--dir DIR] [train_gpt options]
# BUILD: build folder, build/release when left out. DIR: directory for the files, $TMPDIR or /tmp when left out.
set -euo pipefail
cd "$(dirname "$0")/.."
build=build/release
if (($#)) && [[ $1 != --* ]]; then build=$1; shift; fi
dir=${TMPDIR:-/tmp}
if [[ ${1:-} == --dir ]]; then dir=$2; shift 2; fi
program=$build/bench/train_gpt
[[ -x $program ]] || { echo "tiers.sh: $program: no such program, run bench/quickstart.sh first" >&2; exit 1; }
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

# shellcheck source=common/row.sh
. bench/common/row.sh
"$program" --policy none "$@" --quiet >"$out/none"
hash=$(field "$out/none" params_hash)
losses=$(field "$out/none" losses)
printf '%-7s %-13s %-18s %9s %9s %6s %11s %11s\n' policy device+host hash s/step predicted ratio read/step written/step
printf '%-7s %-13s %-18s %9.4f\n' none - "${hash//\"/}" "$(field "$out/none" sec_per_step)"
bad=0 worst=0
for policy in auto cuda cpu static; do
  for budgets in "15% 30%" "20% 25%" "25% 22%"; do
    read -r device host <<<"$budgets"
    f=$out/run
    "$program" --policy "$policy" --device-mem "$device" --host-mem "$host" --file "$dir" "$@" --quiet >"$f"
    ratio=$(awk -v p="$(field "$f" predicted_sec_per_step)" -v m="$(field "$f" sec_per_step)" 'BEGIN { printf "%.3f", p / m }')
    printf '%-7s %-13s %-18s %9.4f %9.4f %6s %11d %11d\n' "$policy" "$device+$host" "$(field "$f" params_hash | tr -d '"')" \
      "$(field "$f" sec_per_step)" "$(field "$f" predicted_sec_per_step)" "$ratio" \
      "$(($(field "$f" file_read_bytes) / $(field "$f" steps)))" "$(($(field "$f" file_written_bytes) / $(field "$f" steps)))"
    [[ $(field "$f" params_hash) == "$hash" && $(field "$f" losses) == "$losses" ]] ||
      { echo "tiers.sh: $policy $budgets: losses or parameters differ from none" >&2; bad=1; }
    (($(field "$f" file_bytes) > 0)) || { echo "tiers.sh: $policy $budgets: nothing was in files" >&2; bad=1; }
    (($(field "$f" host_peak) <= $(field "$f" host_budget) && $(field "$f" device_peak) <= $(field "$f" device_budget))) ||
      { echo "tiers.sh: $policy $budgets: peak above budget" >&2; bad=1; }
    worst=$(awk -v r="$ratio" -v w="$worst" 'BEGIN { d = r > 1 ? r - 1 : 1 - r; print (d > w ? d : w) }')
  done
done
printf 'ROW {"bench": "tiers", "case": "12 runs against none", "value": %s, "unit": "largest error of the predicted step", "params_hash": %s}\n' \
  "$worst" "$hash"
exit "$bad"
