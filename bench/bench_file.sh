#!/usr/bin/env bash
# bench_file against fio: io_uring, O_DIRECT, same directory, block and depth, in turns in one run, medians of ratios.
# SPDX-License-Identifier: Apache-2.0
#   bench/bench_file.sh [BUILD] [--dir DIR] [--size MIB] [--depth N] [--rounds N] [--chunks "1 4 16 64"]
# BUILD: build folder, build/release when left out. DIR: $TMPDIR or /tmp. Sizes in MiB. Needs fio.
set -euo pipefail
cd "$(dirname "$0")/.."
build=build/release dir=${TMPDIR:-/tmp} size=1024 depth=8 rounds=5 chunks="1 4 16 64"
if (($#)) && [[ $1 != --* ]]; then build=$1; shift; fi
while (($#)); do
  case $1 in
    --dir) dir=$2 ;; --size) size=$2 ;; --depth) depth=$2 ;; --rounds) rounds=$2 ;; --chunks) chunks=$2 ;;
    *) echo "bench_file.sh: $1: unknown option" >&2; exit 2 ;;
  esac
  shift 2
done
program=$build/bench/bench_file
[[ -x $program ]] || { echo "bench_file.sh: $program: no such program, run bench/quickstart.sh first" >&2; exit 1; }
command -v fio >/dev/null || { echo "bench_file.sh: fio is missing (Debian, Ubuntu: fio)" >&2; exit 1; }
work=$(mktemp -d "$dir/bench_file.XXXXXX")
trap 'rm -rf "$work"' EXIT

field() { sed -n "s/.*\"$1\": \([^,}]*\).*/\1/p"; }
# Bytes/s and CPU seconds per GiB. fio's terse fields: 7 and 48 bandwidth in KiB/s, 9 and 50 run time in ms, 88 and 89
# CPU in per cent of it.
with_fio() { # read|write CHUNK
  # bench_file, too, has just written what it reads: the drive may still be at it.
  if [[ $1 == read ]]; then with_fio write "$2" >/dev/null; fi
  fio --name=x --filename="$work/fio" --size="${size}m" --bs="$2m" --rw="rand$1" --ioengine=io_uring --direct=1 \
    --iodepth="$depth" --registerfiles=1 --fixedbufs=1 --norandommap=0 --randrepeat=1 --overwrite=1 --minimal |
    awk -F';' -v w="$1" '{ bw = w == "read" ? $7 : $48; ms = w == "read" ? $9 : $50
      printf "%.0f %.4f\n", bw * 1024, ($88 + $89) / 100 * ms / 1000 / (bw * 1024 * ms / 1000 / 1073741824) }'
}
with_ours() { # read|write CHUNK CHECKSUM
  local out
  out=$("$program" --dir "$work" --size "${size}MiB" --chunk "$2MiB" --depth "$depth" --engine uring --checksum "$3" --rounds 1 --direction "$1")
  echo "$(field value <<<"$out") $(field cpu_seconds_per_gib <<<"$out")"
}
quotient() { awk "BEGIN { print $1 / $2 }"; }
median() { sort -g | awk '{ v[NR] = $1 } END { print NR % 2 ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2 }'; }

fio --name=x --filename="$work/fio" --size="${size}m" --bs=4m --rw=write --ioengine=io_uring --direct=1 --iodepth=8 --minimal >/dev/null
printf '%-6s %6s %9s %12s %12s %7s %9s %9s %7s\n' way MiB checksum fio ours ratio fio ours ratio
printf '%-6s %6s %9s %12s %12s %7s %9s %9s %7s\n' "" "" "" MB/s MB/s "" "CPU s/GiB" "CPU s/GiB" ""
for chunk in $chunks; do
  for way in write read; do
    rm -f "$work"/*.txt
    for ((i = 0; i < rounds; i++)); do
      for ((turn = i; turn < i + 3; turn++)); do # each is first in its turn: a disk may slow down under load
        case $((turn % 3)) in
          0) read -r fio_rate fio_cpu < <(with_fio "$way" "$chunk") ;;
          1) read -r off_rate off_cpu < <(with_ours "$way" "$chunk" off) ;;
          2) read -r on_rate on_cpu < <(with_ours "$way" "$chunk" on) ;;
        esac
      done
      quotient "$off_rate" "$fio_rate" >>"$work/rate.off.txt"
      quotient "$on_rate" "$fio_rate" >>"$work/rate.on.txt"
      quotient "$off_cpu" "$fio_cpu" >>"$work/cpu.off.txt"
      quotient "$on_cpu" "$fio_cpu" >>"$work/cpu.on.txt"
      echo "$off_rate" >>"$work/ours.off.txt"
      echo "$on_rate" >>"$work/ours.on.txt"
      echo "$off_cpu" >>"$work/ourscpu.off.txt"
      echo "$on_cpu" >>"$work/ourscpu.on.txt"
      echo "$fio_rate" >>"$work/fio.txt"
      echo "$fio_cpu" >>"$work/fiocpu.txt"
    done
    for checksum in off on; do
      ratio=$(median <"$work/rate.$checksum.txt") cpu_ratio=$(median <"$work/cpu.$checksum.txt")
      ours=$(median <"$work/ours.$checksum.txt") theirs=$(median <"$work/fio.txt")
      printf '%-6s %6s %9s %12.0f %12.0f %7.3f %9.3f %9.3f %7.2f\n' "$way" "$chunk" "$checksum" "$(quotient "$theirs" 1e6)" \
        "$(quotient "$ours" 1e6)" "$ratio" "$(median <"$work/fiocpu.txt")" "$(median <"$work/ourscpu.$checksum.txt")" "$cpu_ratio"
      printf 'ROW {"bench": "bench_file", "case": "%s %s MiB, checksum %s", "value": %s, "unit": "B/s", "ratio": %s, "against": "fio", "cpu_ratio": %s, "depth": %s, "rounds": %s}\n' \
        "$way" "$chunk" "$checksum" "$ours" "$ratio" "$cpu_ratio" "$depth" "$rounds"
    done
  done
done
