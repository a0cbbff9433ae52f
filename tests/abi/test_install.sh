#!/usr/bin/env bash
# Installs a build, moves the installed tree, then builds and runs consumers against it in every way that is offered.
#   test_install.sh CMAKE BUILD_DIR CC CXX        SPDX-License-Identifier: Apache-2.0
set -euo pipefail
cmake=$1 build=$2 cc=$3 cxx=$4
here=$(cd "$(dirname "$0")" && pwd)
version=$(sed -n 's/^#define GEMINI_VERSION_STRING "\(.*\)"/\1/p' "$here/../../include/gemini.h")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fail() { echo "test_install.sh: $*" >&2; exit 1; }

"$cmake" --install "$build" --prefix "$work/installed" >"$work/log" || { cat "$work/log"; fail "cannot install"; }
# Nothing in it may name the place where it was installed first.
prefix=$work/elsewhere
mv "$work/installed" "$prefix"
headers=$(find "$prefix/include" -type f -printf '%P\n' | sort | xargs)
want="gemini.h gemini.hpp gemini/address.h gemini/chosen.h gemini/graph.h gemini/group.h gemini/hook.h gemini/plan.h gemini/topology.h gemini_update.h"
[[ $headers == "$want" ]] || fail "installed headers are '$headers', want '$want'"

# What the headers refer to is there, and so is the licence.
doc=$prefix/share/doc/gemini
pages=$(grep -rhoE 'docs/[a-z_]+\.md' "$prefix/include" | sort -u)
[[ $pages == *docs/states.md* ]] || fail "the headers name no page of the documentation: $pages"
while read -r page; do
  [[ -s $doc/$page ]] || fail "the headers name $page, which is not installed"
done <<<"$pages"
cmp -s "$here/../../LICENSE" "$doc/LICENSE" || fail "LICENSE is not installed"
[[ -s $doc/COPYING.jemalloc ]] || fail "jemalloc's licence is not installed"

pc=$(find "$prefix" -name gemini.pc)
export PKG_CONFIG_PATH=${pc%/*}
have=$(pkg-config --modversion gemini)
[[ $have == "$version" ]] || fail "gemini.pc says version $have, gemini.h says $version"
libdir=$(pkg-config --variable=libdir gemini)
soname=$(readelf -d "$libdir/libgemini.so" | sed -n 's/.*(SONAME).*\[\(.*\)\]/\1/p')
[[ $soname == "libgemini.so.${version%%.*}" ]] || fail "soname is $soname"

# PROGRAM shared|static: does it say the version, and use the library it was meant to use?
check() {
  local output needed
  output=$(LD_LIBRARY_PATH=$libdir "$1") || fail "$1 failed"
  [[ $output == "gemini $version" ]] || fail "$1 says '$output', want 'gemini $version'"
  needed=$(readelf -d "$1" | grep -c "NEEDED.*\[$soname\]" || true)
  [[ $2 == shared && $needed == 1 || $2 == static && $needed == 0 ]] || fail "$1 is not $2"
}

strict=(-Wall -Wextra -pedantic -Werror)
read -ra cflags <<<"$(pkg-config --cflags gemini)"
read -ra shared <<<"$(pkg-config --libs gemini)"
read -ra static <<<"$(pkg-config --static --libs gemini | sed 's/-lgemini/-Wl,-Bstatic -lgemini -Wl,-Bdynamic/')"
for kind in shared static; do
  libs=("${shared[@]}")
  if [[ $kind == static ]]; then libs=("${static[@]}"); fi
  "$cc" -std=c99 "${strict[@]}" "${cflags[@]}" "$here/consumer/consumer.c" -o "$work/c_$kind" "${libs[@]}"
  "$cxx" -std=c++11 "${strict[@]}" "${cflags[@]}" "$here/consumer/consumer.cc" -o "$work/cxx_$kind" "${libs[@]}"
  check "$work/c_$kind" "$kind"
  check "$work/cxx_$kind" "$kind"
done

"$cmake" -S "$here/consumer" -B "$work/consumer" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_C_COMPILER="$cc" \
  -DCMAKE_CXX_COMPILER="$cxx" -DWANT_VERSION="$version" >"$work/log" 2>&1 || { cat "$work/log"; fail "cannot configure"; }
"$cmake" --build "$work/consumer" >"$work/log" 2>&1 || { cat "$work/log"; fail "cannot build"; }
for language in c cxx; do
  check "$work/consumer/${language}_shared" shared
  check "$work/consumer/${language}_static" static
done

# gemini.hpp: objects.cc tests all of it.
"$cxx" -std=c++11 "${strict[@]}" "${cflags[@]}" "$here/consumer/objects.cc" -o "$work/objects" "${shared[@]}"
check "$work/objects" shared
check "$work/consumer/objects_shared" shared
"$cxx" -std=c++20 "${strict[@]}" -Wold-style-cast "${cflags[@]}" -fsyntax-only -x c++ - <<<'#include <gemini.hpp>'

# The fused updates are a library of their own.
for kind in shared static; do
  output=$(LD_LIBRARY_PATH=$libdir "$work/consumer/update_$kind") || fail "update_$kind failed"
  [[ $output == 0.5000 ]] || fail "update_$kind says '$output', want 0.5000"
  needed=$(readelf -d "$work/consumer/update_$kind" | grep -c "NEEDED.*\[libgemini_update" || true)
  [[ $kind == shared && $needed == 1 || $kind == static && $needed == 0 ]] || fail "update_$kind is not $kind"
done
# Their gemini_update.pc names libgemini, too.
read -ra update_flags <<<"$(pkg-config --cflags --libs gemini_update)"
"$cc" -std=c99 "${strict[@]}" "$here/consumer/update.c" -o "$work/update_pc" "${update_flags[@]}"
[[ $(LD_LIBRARY_PATH=$libdir "$work/update_pc") == 0.5000 ]] || fail "update_pc failed"
[[ " ${update_flags[*]} " == *" -lgemini_update -lgemini "* ]] || fail "gemini_update.pc has flags ${update_flags[*]}"
have=$(pkg-config --modversion gemini_update)
[[ $have == "$version" ]] || fail "gemini_update.pc says version $have"
read -ra update_flags <<<"$(pkg-config --static --cflags --libs gemini_update |
  sed -E 's/-lgemini(_update)? /-Wl,-Bstatic & -Wl,-Bdynamic /g')"
"$cc" "$here/consumer/update.c" -o "$work/update_pc_static" "${update_flags[@]}"
[[ $("$work/update_pc_static") == 0.5000 ]] || fail "update_pc_static failed"

# Without the .pc files of hwloc and liburing the shared libraries are found all the same, and only they.
without=(env PKG_CONFIG_LIBDIR="$work/nowhere" PKG_CONFIG_PATH= "$cmake" -S "$here/consumer" -DCMAKE_PREFIX_PATH="$prefix"
  -DCMAKE_C_COMPILER="$cc" -DCMAKE_CXX_COMPILER="$cxx" -DWANT_VERSION="$version" -DSHARED_ONLY=ON)
"${without[@]}" -B "$work/shared_only" >"$work/log" 2>&1 || { cat "$work/log"; fail "cannot configure without hwloc.pc"; }
"$cmake" --build "$work/shared_only" >"$work/log" 2>&1 || { cat "$work/log"; fail "cannot build without hwloc.pc"; }
check "$work/shared_only/c_shared" shared
if "${without[@]}" -B "$work/no_static" -DWANT_COMPONENTS="COMPONENTS;static" >"$work/log" 2>&1; then
  fail "the component static is found without hwloc.pc"
fi
grep -q "static linking needs" "$work/log" || { cat "$work/log"; fail "the refusal does not say why"; }

for standard in "$cc -std=c99" "$cxx -x c++ -std=c++11"; do
  read -ra compiler <<<"$standard"
  "${compiler[@]}" "${strict[@]}" -Wpadded "${cflags[@]}" -c "$here/consumer/update.c" -o "$work/update.o"
done
