#!/usr/bin/env bash
# Installs what building needs on Debian and Ubuntu; only what is missing. SPDX-License-Identifier: Apache-2.0
#   tests/setup.sh --bench   compiler, CMake, BLAS, hwloc, liburing, json-c; builds the private jemalloc in build/deps/jemalloc
#   tests/setup.sh --test    the same, Doxygen, ShellCheck, Valgrind, clang and ccache if they can be had, and
#                            tests/requirements.txt in build/venv (default)
# GEMINI_JEMALLOC_SOURCE: a jemalloc archive or folder, instead of the distribution's source package.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(gcc g++ make cmake ninja-build pkg-config python3 python3-venv libopenblas-dev libhwloc-dev liburing-dev
  libjson-c-dev dpkg-dev)
case ${1:---test} in
  --bench) tools=0 ;;
  --test) tools=1; packages+=(doxygen shellcheck valgrind) ;;
  *) echo "setup.sh: $1: unknown option, want --bench or --test" >&2; exit 2 ;;
esac

if ! command -v dpkg-query >/dev/null; then
  echo "setup.sh: this is not Debian or Ubuntu; please install the counterparts of: ${packages[*]}" >&2
  exit 1
fi
# Installs those of its arguments that are missing.
install_packages() {
  local missing=() as_root=() package status
  for package in "$@"; do
    status=$(dpkg-query -W -f '${db:Status-Status}\n' "$package" 2>/dev/null || true)
    [[ $status == *installed* && $status != *not-installed* ]] || missing+=("$package")
  done
  ((${#missing[@]})) || return 0
  if ((EUID != 0)); then
    if ! command -v sudo >/dev/null; then
      echo "setup.sh: neither root nor sudo; as root, run: apt-get install ${missing[*]}" >&2
      return 1
    fi
    as_root=(sudo)
  fi
  echo "setup.sh: installing ${missing[*]}"
  # Another apt may hold the lock on a fresh machine; wait for it.
  local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=600)
  "${apt[@]}" update && "${apt[@]}" install -y --no-install-recommends "${missing[@]}"
}
install_packages "${packages[@]}"
# A second compiler is good to have, not necessary.
if ((tools)) && ! { command -v clang && command -v clang++; } >/dev/null; then
  install_packages clang || echo "setup.sh: clang cannot be installed: the lane clang of tests/run.sh is skipped" >&2
fi
# Lanes of tests/run.sh compile much alike.
if ((tools)) && ! command -v ccache >/dev/null; then
  install_packages ccache || echo "setup.sh: ccache cannot be installed: builds take longer" >&2
fi
if ((tools)) && ! command -v bindgen >/dev/null; then # 1 MB
  install_packages bindgen || echo "setup.sh: bindgen cannot be installed: the test abi.bindgen is skipped" >&2
fi

# Beside what pip does, which takes one core.
tests/jemalloc.sh &
jemalloc=$!
trap 'kill "$jemalloc" 2>/dev/null || true' EXIT # nothing goes on when this ends early

if ((tools)); then
  stamp=build/venv/requirements.txt
  # The stamp says for which list the environment was made; a venv that was moved or half made is made anew.
  if ! cmp -s tests/requirements.txt "$stamp" || ! build/venv/bin/clang-format --version >/dev/null 2>&1; then
    echo "setup.sh: installing tests/requirements.txt into build/venv"
    rm -rf build/venv
    python3 -m venv build/venv
    pip=(build/venv/bin/pip install --quiet --disable-pip-version-check)
    "${pip[@]}" "$(grep '^uv==' tests/requirements.txt)"
    # All but torch by uv, which takes a fifth of pip's time; pip may know where to look where uv does not.
    export UV_CACHE_DIR=$PWD/build/uv
    rest() { # FILE
      build/venv/bin/uv pip install --quiet --no-progress --compile-bytecode --python build/venv/bin/python -r "$1" ||
        "${pip[@]}" -r "$1"
    }
    # PyPI's torch brings CUDA along; the one for processors alone is at PyTorch's own index, or where pip is set up for.
    torch=$(grep '^torch==' tests/requirements.txt)
    if "${pip[@]}" "$torch" 2>/dev/null ||
      "${pip[@]}" --extra-index-url https://download.pytorch.org/whl/cpu "$torch"; then
      rest tests/requirements.txt
    else # what does not bring a torch along; Python's tests will be skipped
      echo "setup.sh: no $torch to be had, by pip or from download.pytorch.org: tests of the PyTorch package are skipped" >&2
      grep -vE '^(torch|accelerate|datasets|lightning|peft|trl)==' tests/requirements.txt >build/venv/without_torch.txt
      rest build/venv/without_torch.txt
    fi
    cp tests/requirements.txt "$stamp"
  fi
fi
wait "$jemalloc"
