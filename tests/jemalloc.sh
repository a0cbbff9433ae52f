#!/usr/bin/env bash
# Builds the library's private jemalloc, once, into build/deps/jemalloc. SPDX-License-Identifier: Apache-2.0
#   tests/jemalloc.sh [--source PATH] [--prefix DIR]
# --source: a jemalloc release, archive or unpacked folder; also GEMINI_JEMALLOC_SOURCE. Without it, the distribution's
# source package is fetched with apt-get: as any user, and without changing what apt-get is set up for.
# --prefix: where to build and install instead. DIR/include/jemalloc/jemalloc.h, DIR/lib/libjemalloc_pic.a, and
# DIR/lib/gmi_jemalloc.o, the same in one object file that shows nothing but the functions the library calls.
# CC, AR, LD and OBJCOPY name the tools.
set -euo pipefail

source=${GEMINI_JEMALLOC_SOURCE:-}
prefix=
while (($#)); do
  case $1 in
    --source | --prefix)
      if [[ -z ${2:-} ]]; then echo "jemalloc.sh: $1: want a path after it" >&2; exit 2; fi
      if [[ $1 == --source ]]; then source=$2; else prefix=$2; fi
      shift 2 ;;
    --help) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "jemalloc.sh: $1: unknown option, want --source or --prefix" >&2; exit 2 ;;
  esac
done
fail() { echo "jemalloc.sh: $*" >&2; exit 1; }
if [[ -n $source ]]; then
  given=$source
  source=$(realpath -e -- "$given" 2>/dev/null) || fail "$given: no such file or folder"
fi
script=$(realpath "$0")
if [[ -z $prefix ]]; then prefix=${script%/*}/../build/deps/jemalloc; fi
prefix=$(realpath -m -- "$prefix")
cc=${CC:-gcc}

# The names of one's own keep it apart from any other jemalloc of the process. Without initial-exec TLS it can be loaded
# into a program that runs; without caches and retained memory what is freed goes back at once; without
# cache-obliviousness a large block is exactly as long as its pages. It keeps 320 bytes of records of each slab, which are
# 8 % of one of 4 KiB and a quarter of a percent of one of 128 KiB: hence pages of 16 KiB, and eight of them to a slab.
options=(--with-jemalloc-prefix=gmi_je_ --with-private-namespace=gmi_private_ --without-export
  --disable-initial-exec-tls --disable-cxx --disable-cache-oblivious --disable-doc --with-lg-page=14
  --with-malloc-conf=retain:false,tcache:false,narenas:1,dirty_decay_ms:0,muzzy_decay_ms:0,slab_sizes:1-57344:8)
functions=(mallocx dallocx sallocx mallctl)

# What the build is made from; when it says the same again, there is nothing to do. Without a source named, one that was
# made from any will do.
stamp=$prefix/stamp
recipe="$(sha256sum <"$script")
$("$cc" --version | head -n 1) $("$cc" -dumpmachine)
source: ${source:-of the distribution}"
if [[ -n $source && -f $source ]]; then recipe+=" $(sha256sum <"$source")"; fi
is_there() {
  local file have
  for file in lib/gmi_jemalloc.o lib/libjemalloc_pic.a include/jemalloc/jemalloc.h; do
    [[ -f $prefix/$file ]] || return 1
  done
  have=$(cat "$stamp" 2>/dev/null) || return 1
  if [[ -z $source ]]; then [[ ${have%source: *} == "${recipe%source: *}" ]]; else [[ $have == "$recipe" ]]; fi
}
if is_there; then exit 0; fi

tools=("$cc" make "${AR:-ar}" "${LD:-ld}" "${OBJCOPY:-objcopy}")
if [[ -z $source ]]; then tools+=(apt-get dpkg-source); fi
for tool in "${tools[@]}"; do
  command -v "$tool" >/dev/null ||
    fail "$tool: no such program; install gcc, make, binutils and dpkg-dev, or name a source with --source"
done

mkdir -p "$prefix"
# Two at once would build the same: the second waits, and finds it done.
exec 9>"$prefix/lock"
if command -v flock >/dev/null && ! flock -n 9; then
  flock 9
  if is_there; then exit 0; fi
fi
rm -f "$stamp"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work" # apt-get as root fetches as a user of its own

# The source entries are those of the machine, asked for sources instead of programs, in a configuration of our own.
fetch() {
  local file options=()
  mkdir -p "$work"/apt/{lists/partial,cache/archives/partial,parts} "$work/source"
  if ((EUID == 0)) && id _apt >/dev/null 2>&1; then chown -R _apt "$work/apt/lists/partial" "$work/source"; fi
  if [[ -f /etc/apt/sources.list ]]; then
    sed -n 's/^[[:space:]]*deb[[:space:]]/deb-src /p' /etc/apt/sources.list >"$work/apt/parts/main.list"
  fi
  for file in /etc/apt/sources.list.d/*.list; do
    [[ -f $file ]] || continue
    sed -n 's/^[[:space:]]*deb[[:space:]]/deb-src /p' "$file" >"$work/apt/parts/${file##*/}"
  done
  for file in /etc/apt/sources.list.d/*.sources; do
    [[ -f $file ]] || continue
    sed 's/^Types:.*/Types: deb-src/' "$file" >"$work/apt/parts/${file##*/}"
  done
  options=(-q -o Dir::Etc::SourceList=/dev/null -o "Dir::Etc::SourceParts=$work/apt/parts"
    -o "Dir::State::Lists=$work/apt/lists" -o "Dir::Cache=$work/apt/cache" -o Acquire::Languages=none
    -o Acquire::Retries=3)
  # A third party's entry may have no sources: what counts is whether jemalloc's can be had.
  apt-get "${options[@]}" update >"$work/log" 2>&1 || true
  if ! (cd "$work/source" && apt-get "${options[@]}" source jemalloc >>"$work/log" 2>&1); then
    cat "$work/log" >&2
    fail "apt-get cannot get jemalloc's source; name an archive with --source or GEMINI_JEMALLOC_SOURCE"
  fi
  tree=$(find "$work/source" -mindepth 1 -maxdepth 1 -type d)
}

if [[ -z $source ]]; then
  echo "jemalloc.sh: fetching the distribution's source package"
  fetch
elif [[ -d $source ]]; then
  cp -R "$source" "$work/tree" # the given one stays as it is
  tree=$work/tree
  if [[ -f $tree/Makefile ]]; then make -s -C "$tree" distclean >/dev/null 2>&1 || true; fi
else
  mkdir "$work/source"
  tar -xf "$source" -C "$work/source" || fail "$source: tar cannot unpack it"
  tree=$(find "$work/source" -mindepth 1 -maxdepth 1 -type d)
fi
[[ -d $tree && -f $tree/src/arena.c ]] || fail "${source:-the source package}: holds no jemalloc"
if [[ ! -x $tree/configure ]]; then # not a release, but a copy of the repository
  command -v autoconf >/dev/null || fail "$source: has no configure and autoconf is missing; take a release archive"
  (cd "$tree" && autoconf) || fail "$source: autoconf failed"
fi
if [[ ! -s $tree/VERSION ]]; then options+=(--with-version=5.3.0-0-g0); fi
grep -q arenas_create_ext "$tree/src/ctl.c" || fail "${source:-the source package}: jemalloc is too old, want 5.3 or later"

echo "jemalloc.sh: building $(basename "$tree") into $prefix"
mkdir "$work/build"
cd "$work/build"
# Configure adds -g3, which makes the objects ten times as large; the last one counts.
build() {
  "$tree/configure" CC="$cc" EXTRA_CFLAGS="-g1 -ffile-prefix-map=$work=." "${options[@]}" &&
    make -j"$(getconf _NPROCESSORS_ONLN)" lib/libjemalloc_pic.a include/jemalloc/jemalloc.h
}
# Up to minutes on a busy machine: says every ten seconds how far it is.
build >"$work/log" 2>&1 &
builder=$!
files=$(($(find "$tree/src" -name '*.c' | wc -l) * 2)) told=$SECONDS # each once more, for the names that it defines
while kill -0 "$builder" 2>/dev/null; do
  sleep 0.2
  ((SECONDS - told >= 10)) || continue
  told=$SECONDS
  if [[ -f Makefile ]]; then
    echo "jemalloc.sh: $SECONDS s, compiled $(find src -name '*.pic.o' -o -name '*.sym.o' | wc -l) of $files files"
  else
    echo "jemalloc.sh: $SECONDS s, configuring ($(grep -c '^checking' "$work/log" || true) checks made)"
  fi
done
if ! wait "$builder"; then
  tail -n 40 "$work/log" >&2
  fail "jemalloc could not be built"
fi

# One object: what it shows are the functions in use, the rest cannot meet anything of the program it is linked into.
# Nor does it read settings that other programs are meant for: neither the environment nor a link in /etc.
outside=(getenv secure_getenv readlink readlinkat)
cat >none.c <<'END'
#define NO_TEXT(name) char *name(const char *); char *name(const char *n) { return (void)n, (char *)0; }
#define NO_LINK(name, ...) long name(__VA_ARGS__); long name(__VA_ARGS__) { return -1; }
NO_TEXT(gmi_je_getenv)
NO_TEXT(gmi_je_secure_getenv)
NO_LINK(gmi_je_readlink, const char *path, char *to, unsigned long size)
NO_LINK(gmi_je_readlinkat, int directory, const char *path, char *to, unsigned long size)
END
"$cc" -std=c11 -O2 -fPIC -Wall -Werror -c none.c
"${LD:-ld}" -r --whole-archive lib/libjemalloc_pic.a -o library.o
rename=()
for name in "${outside[@]}"; do rename+=("--redefine-sym=$name=gmi_je_$name"); done
"${OBJCOPY:-objcopy}" "${rename[@]}" library.o
"${LD:-ld}" -r library.o none.o -o all.o
keep=()
for name in "${functions[@]}"; do keep+=("--keep-global-symbol=gmi_je_$name"); done
"${OBJCOPY:-objcopy}" "${keep[@]}" all.o gmi_jemalloc.o

mkdir -p "$prefix/include/jemalloc" "$prefix/lib"
cp include/jemalloc/jemalloc.h "$prefix/include/jemalloc/"
cp lib/libjemalloc_pic.a gmi_jemalloc.o "$prefix/lib/"
cp "$tree/COPYING" "$prefix/"
printf '%s\n' "$recipe" >"$stamp"
