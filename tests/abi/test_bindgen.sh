#!/usr/bin/env bash
# Makes Rust of the public headers by bindgen: is every function there? With rustc: do layouts agree, and does
# consumer/consumer.rs run? Skipped where there is no bindgen (Debian, Ubuntu: package bindgen, and libclang).
#   test_bindgen.sh BUILD_DIR        SPDX-License-Identifier: Apache-2.0
set -euo pipefail
build=$1
here=$(cd "$(dirname "$0")" && pwd)
root=$here/../..

fail() { echo "test_bindgen.sh: $*" >&2; exit 1; }

bindgen=${GEMINI_BINDGEN:-$(command -v bindgen || true)}
[[ $bindgen ]] || { echo "skipped: there is no bindgen (Debian, Ubuntu: apt-get install bindgen)"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

(cd "$root/include" && printf '#include <%s>\n' gemini.h gemini/*.h gemini_update.h) >"$work/all.h"
if ! "$bindgen" "$work/all.h" --allowlist-function 'gemini_.*' --allowlist-type 'gemini_.*' --allowlist-var 'GEMINI_.*' \
  --no-prepend-enum-name -o "$work/bindings.rs" -- -I"$root/include" -I"$root/bindings/update" 2>"$work/log"; then
  cat "$work/log"
  grep -qi libclang "$work/log" && { echo "skipped: bindgen finds no libclang"; exit 77; }
  fail "bindgen failed"
fi
count=0
while read -r name _; do
  grep -qE "pub fn $name\b" "$work/bindings.rs" || fail "the bindings have no $name()"
  count=$((count + 1))
done < <(grep -hE '^gemini_' "$here/symbols.txt" "$here/update/symbols.txt")
((count > 100)) || fail "found only $count functions in symbols.txt"
grep -q 'pub struct gemini_access ' "$work/bindings.rs" || fail "the bindings have no struct gemini_access"

if ! command -v rustc >/dev/null; then
  echo "bindings of $count functions; there is no rustc to compile them"
  exit 0
fi
allow=(-A non_camel_case_types -A non_snake_case -A non_upper_case_globals -A dead_code -A deref_nullptr)
rustc --edition 2021 --test "${allow[@]}" "$work/bindings.rs" -o "$work/layouts"
"$work/layouts" --quiet >"$work/log" || { cat "$work/log"; fail "layouts differ"; }
GEMINI_BINDINGS=$work/bindings.rs rustc --edition 2021 "$here/consumer/consumer.rs" -L "$build" -l gemini -o "$work/consumer"
version=$(sed -n 's/^#define GEMINI_VERSION_STRING "\(.*\)"/\1/p' "$root/include/gemini.h")
said=$(LD_LIBRARY_PATH=$build "$work/consumer") || fail "consumer.rs failed"
[[ $said == "gemini $version" ]] || fail "consumer.rs says '$said', want 'gemini $version'"
echo "bindings of $count functions; $(grep -c '#\[test\]' "$work/bindings.rs") layouts agree"
