#!/usr/bin/env bash
# Do both variants of examples/move_loop.c print the same, to the bit, and does the move add at most 40 lines?
#   move_loop.sh SOURCE PLAIN MOVED        SPDX-License-Identifier: Apache-2.0
set -euo pipefail
source=$1 plain=$2 moved=$3
added=$(awk '/^ *#ifdef GEMINI/ { on = 1; next } /^ *#(else|endif|ifndef)/ { on = 0 } on && NF' "$source" | wc -l)
((added > 20 && added <= 40)) || { echo "move_loop.sh: $source adds $added lines, want 20 to 40" >&2; exit 1; }
want=$("$plain") have=$("$moved")
(($(wc -l <<<"$want") >= 6)) || { echo "move_loop.sh: the plain loop printed '$want'" >&2; exit 1; }
diff <(echo "$want") <(echo "$have") || { echo "move_loop.sh: the variants differ" >&2; exit 1; }
