#!/usr/bin/env bash
# The same training over several ranks and in one process that adds the gradients of as many micro-batches: losses and
# parameters must be the same to the bit, the norm nearly, and ranks must exchange as many bytes as follow from the
# model. Each iteration that follows a plan must gather, add and fetch as many bytes as its plan says.
# SPDX-License-Identifier: Apache-2.0
#   bench/ranks.sh [BUILD] [RANKS ...]                 these numbers of ranks; 1 2 3 4 when left out
#   bench/ranks.sh [BUILD] --interrupted [RANKS ...]   evaluations, longer sequences and skipped layers between the steps;
#                                                      bytes are compared with plans only, and the chunk size is
#                                                      searched; 2 3
#   bench/ranks.sh [BUILD] --order                     16 ranks: in sums of so many gradients the order of ranks shows, as
#                                                      it does not in sums of a few bf16 values
#   bench/ranks.sh [BUILD] --failures                  ranks that are killed, that have too little memory, bad options
# BUILD: build folder, build/release when left out.
set -euo pipefail
cd "$(dirname "$0")/.."
build=build/release
if (($#)) && [[ $1 == */* ]]; then build=$1; shift; fi
program=$build/bench/train_gpt
[[ -x $program ]] || { echo "ranks.sh: $program: no such program, run bench/quickstart.sh first" >&2; exit 1; }
out=$(mktemp -d)
running=
trap '[[ -z $running ]] || kill -KILL "$running" 2>/dev/null; rm -rf "$out"' EXIT
# shellcheck source=common/row.sh
. bench/common/row.sh

bad=0
wrong() { echo "ranks.sh: $*" >&2; bad=1; }

# ---- failures
alive() { [[ -e /proc/$1 && $(cut -d' ' -f3 "/proc/$1/stat" 2>/dev/null) != [ZX] ]]; }

# A sanitizer's report does not show in the status of a program that fails anyway.
check_sanitizers() { if grep -q Sanitizer "$out/errors"; then wrong "a sanitizer has reported"; fi; }

# kill_rank RANK WORDS: kills it in the middle of three ranks; the program must fail and say WORDS, and none be left.
kill_rank() {
  local rank=$1 words=$2 pid status=0 children
  rm -f "$out/steps" # of the rank before
  "$program" --ranks 3 --batch 3 --layers 4 --width 64 --context 16 --steps 1000000 >"$out/steps" 2>"$out/errors" &
  pid=$! running=$!
  for ((i = 0; i < 600; i++)); do grep -qs '^step *3/' "$out/steps" && break; sleep 0.1; done
  read -ra children <"/proc/$pid/task/$pid/children" || true # its line has no end
  local pids=("$pid" "${children[@]}")
  ((${#pids[@]} == 3)) || wrong "${#pids[@]} processes where 3 ranks are"
  kill -KILL "${pids[rank]}"
  wait "$pid" 2>/dev/null || status=$?
  running=
  cat "$out/errors"
  ((status != 0)) || wrong "rank $rank was killed, and the program ended well"
  grep -q "$words" "$out/errors" || [[ -z $words ]] || wrong "rank $rank was killed, and no message has: $words"
  check_sanitizers
  for ((i = 0; i < 100; i++)); do alive "${pids[1]}" || alive "${pids[2]}" || break; sleep 0.1; done
  for pid in "${pids[@]}"; do if alive "$pid"; then wrong "process $pid is left"; kill -KILL "$pid"; fi; done
}

# refused STATUS WORDS, options: the program must end with this status and say WORDS.
refused() {
  local expected=$1 words=$2 status=0
  shift 2
  "$program" --steps 2 --layers 2 --width 64 --context 16 --quiet "$@" >"$out/row" 2>"$out/errors" || status=$?
  cat "$out/errors"
  check_sanitizers
  ((status == expected)) || wrong "train_gpt $*: status $status, expected $expected"
  grep -q -- "$words" "$out/errors" || wrong "train_gpt $*: no message has: $words"
  [[ ! -s $out/row ]] || wrong "train_gpt $*: printed a row"
}

if [[ ${1:-} == --failures ]]; then
  kill_rank 0 ''
  kill_rank 1 'rank 1 .*has ended'
  kill_rank 2 'rank 2 was ended by signal 9'
  refused 1 'rank 2: .*device memory' --ranks 3 --batch 3 --device-mem 300000
  refused 2 'the batch has no equal parts: 4 sequences, 3 ranks' --ranks 3 --batch 4
  refused 2 'the batch has no equal parts: 4 sequences, 3 micro-batches' --micro-batches 3 --batch 4 --policy none
  refused 2 'ranks need the simulated device and libgemini' --ranks 3 --batch 3 --policy none
  refused 2 'ranks need the simulated device and libgemini' --ranks 3 --batch 3 --device cuda
  refused 2 'needs --policy none' --micro-batches 3 --batch 3
  refused 2 'expected 1 to 64' --ranks 65
  exit "$bad"
fi

# ---- the same bits
interrupted=0
if [[ ${1:-} == --interrupted ]]; then interrupted=1; shift; fi
if ((!$#)); then
  if ((interrupted)); then set -- 2 3; else set -- 1 2 3 4; fi
fi
layers=12 width=128 context=16 batch=12 steps=6 chunk=65536
if [[ $1 == --order ]]; then
  set -- 16
  layers=2 width=64 context=4 batch=16 steps=40
fi
if ((interrupted)); then
  steps=8
  more=(--eval-every 3 --context-every 5 --skip-layer-every 4)
else
  more=(--chunk-size "$chunk")
fi
run() { # NAME, options
  local name=$1; shift
  "$program" --layers $layers --width $width --heads 2 --context $context --batch "$batch" --steps $steps --quiet "$@" \
    "${more[@]}" >"$out/$name" || { echo "ranks.sh: train_gpt $* failed" >&2; exit 1; }
}

# The chunks of the parameters, and those that the operators of a step use, each operator for itself: embedding, blocks
# forwards and backwards, head. Tensors begin at multiples of 256 elements of 2 bytes.
count_chunks() {
  read -r chunks used < <(awk -v l=$layers -v w=$width -v c=$context -v chunk=$chunk '
    function span(first, end) { return int((2 * end - 1) / chunk) - int(2 * first / chunk) + 1 }
    function gap(n) { return int((n + 255) / 256) * 256 }
    BEGIN {
      n[0] = w; n[1] = w; n[2] = 3 * w * w; n[3] = 3 * w; n[4] = w * w; n[5] = w
      n[6] = w; n[7] = w; n[8] = 4 * w * w; n[9] = 4 * w; n[10] = 4 * w * w; n[11] = w
      for (i = 0; i < 12; i++) { if (i == 11) last = block + n[i]; block += gap(n[i]) }
      first = gap(256 * w) + gap(c * w)
      used = span(0, gap(256 * w) + c * w)
      for (i = 0; i < l; i++) used += 2 * span(first + i * block, first + i * block + last)
      norm = first + l * block
      used += span(norm, norm + gap(w) + w) + span(0, 256 * w)
      print span(0, norm + gap(w) + w), used
    }')
}
count_chunks

printf '%5s %4s %6s %6s %-16s %9s %9s %12s %12s\n' ranks zero budget clip params_hash gathered reduced "bytes" "fetched"
compared=0
exact=1 # whether iterations by plan have to move the bytes of their plans, and no more for want of room
compare() { # RANKS ZERO BUDGET CLIP, more options
  local ranks=$1 zero=$2 budget=$3 clip=$4 reference=$out/reference-$1-$4 f=$out/$1-$2-$3-$4 name="$1 ranks, ZeRO $2, $3, clip $4"
  local by_plan difference tries
  # A planned move is left out if it cannot be made at its moment, as where an update of the chunk has not run yet. On a
  # machine with much else to do a slice then is on the device that its plan has on the host, but not each time.
  for ((tries = 1; tries <= 3; tries++)); do
    run "$1-$2-$3-$4" --ranks "$ranks" --zero "$zero" --device-mem "$budget" --clip "$clip" "${@:5}"
    by_plan=$(field "$f" iterations_by_plan) difference=$(field "$f" plan_difference_bytes)
    ((by_plan == 0 || (difference && exact))) || break
    echo "ranks.sh: $name: $by_plan iterations by plan moved $difference bytes more or less than their plans, run $tries"
  done
  local gathered first reduced bytes fetched stored planned
  gathered=$(field "$f" gathered_chunks) first=$(field "$f" gathered_chunks_first_step)
  reduced=$(field "$f" reduced_chunks) bytes=$(field "$f" gathered_bytes)
  fetched=$(field "$f" slices_fetched_bytes) planned=$(field "$f" planned_gathered_bytes) stored=$(field "$f" slices_stored_bytes)
  printf '%5d %4s %6s %6s %-16s %9d %9d %12d %12d\n' "$ranks" "$zero" "$budget" "$clip" \
    "$(field "$f" params_hash | tr -d '"')" "$gathered" "$reduced" "$bytes" "$fetched"
  compared=$((compared + 1))
  [[ $(field "$f" ranks) == "$ranks" && $(field "$f" zero | tr -d '"') == "$zero" ]] || wrong "$name: not what ran"
  [[ -n $(field "$f" params_hash) && $(field "$f" params_hash) == "$(field "$reference" params_hash)" ]] ||
    wrong "$name: parameters differ from the reference"
  [[ -n $(field "$f" losses_hash) && $(field "$f" losses_hash) == "$(field "$reference" losses_hash)" ]] ||
    wrong "$name: losses differ from the reference"
  # Squares are added slice by slice, so the norm may differ in its last bits; the factor that clips is a float. It is
  # above the limit, so that gradients are clipped.
  awk -v a="$(field "$f" norm)" -v b="$(field "$reference" norm)" -v clip="$clip" \
    'BEGIN { d = a - b; if (d < 0) d = -d; exit !(d <= 1e-12 * b && (clip == 0 || b > clip)) }' ||
    wrong "$name: norm $(field "$f" norm), reference $(field "$reference" norm)"
  (($(field "$f" device_peak) <= $(field "$f" device_budget))) || wrong "$name: peak above budget"
  # What an iteration by plan gathers, adds and fetches is what its plan says, and what a full host sends to the device.
  ((by_plan > 0)) || wrong "$name: no iteration by plan was compared with it"
  ((difference == 0 || !exact)) || wrong "$name: iterations by plan moved $difference bytes more or less than their plans"
  ((interrupted)) && return
  # Every number is the sum over the ranks.
  local each=$chunks
  [[ $zero != [12] ]] && each=$used
  local expected_first=$((ranks * each)) expected_later=$((ranks * (steps - 1) * chunks))
  ((first == expected_first)) || wrong "$name: gathered $first chunks in the first step, expected $expected_first"
  if [[ $zero == [12] || $zero-$budget == 3-100% ]]; then
    ((gathered - first == expected_later)) ||
      wrong "$name: gathered $((gathered - first)) chunks after the first step, expected $expected_later"
  else # chunks that leave for others are gathered again
    ((gathered - first >= expected_later)) || wrong "$name: gathered fewer chunks than a step uses"
    ((gathered - first <= ranks * (steps - 1) * used)) || wrong "$name: gathered more chunks than operators use"
  fi
  # A rank gets from the others what it does not keep: (ranks - 1) / ranks of each chunk, on average.
  ((bytes == gathered * (ranks - 1) * chunk / ranks)) || wrong "$name: gathered $bytes bytes"
  # All steps but the first follow plans, which gather the same; ZeRO auto chooses how much twice.
  [[ $zero == auto ]] || ((bytes - first * (ranks - 1) * chunk / ranks == (steps - 1) * planned)) ||
    wrong "$name: gathered $bytes bytes, $planned in a step by plan"
  (($(field "$f" reduced_bytes) == reduced * (ranks - 1) * chunk / ranks)) || wrong "$name: bytes of sums"
  (($(field "$f" planned_reduced_bytes) * steps == $(field "$f" reduced_bytes))) || wrong "$name: bytes of sums by plan"
  ((reduced == ranks * steps * chunks)) || wrong "$name: added $reduced chunks of gradients"
  ((stored == steps * chunks * chunk)) || wrong "$name: stored $stored bytes of slices"
  # Of each gathered chunk, a rank brings its slice, unless that is on the device or zero.
  ((fetched > 0 && fetched <= gathered * chunk / ranks)) || wrong "$name: fetched $fetched bytes of slices"
}

references() { # RANKS, clips
  local ranks=$1 clip; shift
  for clip; do run "reference-$ranks-$clip" --policy none --micro-batches "$ranks" --clip "$clip"; done
}
for ranks; do
  references "$ranks" 0 1
  # ZeRO 1 keeps all parameters and gradients on the device until the update: two sevenths of the model data, and
  # activations.
  for zero in 1 2 3 auto; do
    small=30%
    [[ $zero == 1 ]] && small=40%
    ((interrupted)) && small=50%
    ((ranks == 16)) && small=100% # a model that activations outweigh
    compare "$ranks" "$zero" 100% 0
    compare "$ranks" "$zero" "$small" 1
  done
  if ((ranks < 16)); then # the host has room for 60 % of a rank's part, and the device for the rest
    part=$(($(field "$out/$ranks-3-100%-0" model_bytes) * 6 / 10 / ranks))
    spare=1000000
    ((interrupted)) && spare=2200000 # for longer sequences, which no plan expects
    exact=0
    compare "$ranks" auto $((part + spare)) 1 --host-mem "$part"
    exact=1
  fi
done
# A step that skips a layer begins as the last one did, whose gathers have taken the frames that its operators need.
if ((interrupted)); then
  exact=0 layers=13 width=192 steps=8
  for skip in 2 4; do
    more=(--skip-layer-every "$skip" --chunk-size "$chunk" --strict)
    for ranks; do
      batch=$ranks
      references "$ranks" 0
      compare "$ranks" auto 20% 0
      compare "$ranks" auto 15% 0
    done
  done
fi
# With few tokens in a wide model, activations fit into what two sevenths leave of 30 %.
layers=6 width=256 context=4
if ((interrupted)) || [[ $1 == 16 ]]; then set --; fi
count_chunks
for ranks; do
  references "$ranks" 1
  compare "$ranks" 1 30% 1
done
printf 'ROW {"bench": "ranks", "case": "%d runs against one process", "value": %d, "unit": "failed"}\n' "$compared" "$bad"
exit "$bad"
