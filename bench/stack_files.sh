#!/usr/bin/env bash
# bench_stack in three tiers, a host budget of two fifths and files for the rest; and its timeline, explained without a
# remainder. SPDX-License-Identifier: Apache-2.0
#   bench/stack_files.sh PROGRAM [bench_stack options]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
program=$1
shift
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
"$program" "$@" --policy auto --device-mem 12% --host-mem 40% --file "$out" --timeline "$out/timeline.json" | tee "$out/log"
grep -q '"file_read_bytes": [1-9]' "$out/log" || { echo "stack_files.sh: nothing was read from files" >&2; exit 1; }
if ! command -v python3 >/dev/null; then
  echo "stack_files.sh: there is no python3: the timeline is not looked at"
  exit 0
fi
python3 "$here/stalls.py" "$out/timeline.json" --least 1 >"$out/stalls"
tail -n 12 "$out/stalls"
# Waits and work are the whole step, and every operator of its two steps is in the timeline.
python3 - "$out/stalls" "$out/timeline.json" <<'PYTHON'
import json, sys
row = json.loads([l for l in open(sys.argv[1]) if l.startswith("ROW ")][0][4:])
ops = sum(e.get("cat") == "op" for e in json.load(open(sys.argv[2]))["traceEvents"])
assert ops == 2 * (2 + 2 * 8 + 3 * 8 + 1), f"operators in the timeline: {ops}, 86 were queued"
assert row["lost_events"] == 0, row
assert 0 <= row["value"] < row["step_seconds"] and row["items"] > 0, row
PYTHON
