#!/usr/bin/env bash
# Python's tests with another torch than build/venv has. SPDX-License-Identifier: Apache-2.0
#   tests/torch.sh oldest|gpu|newest [ARGUMENT OF PYTEST]...
# tests/torch/NAME.txt says which torch; everything else is as in tests/requirements.txt. The environment is
# build/venv-torch-NAME: 5.5 GB, as PyPI's torch brings CUDA along, which it needs to be imported.
# newest also runs the page of the PyTorch package, docs/pytorch.md, as a reader would: after pip install in a new
# environment, where there is nothing but what that installs.
set -euo pipefail
cd "$(dirname "$0")/.."

name=${1:-}
case $name in
  oldest | gpu | newest) shift ;;
  *) echo "torch.sh: ${name:-no name}: want oldest, gpu or newest" >&2; exit 2 ;;
esac
uv=build/venv/bin/uv # of tests/setup.sh; pip takes 220 seconds for what takes uv 20
export UV_CACHE_DIR=$PWD/build/uv UV_NO_PROGRESS=1

# The stamp says for which lists the environment was made; one that is half made has none.
venv=$PWD/build/venv-torch-$name
if ! cat tests/requirements.txt "tests/torch/$name.txt" | cmp -s - "$venv/requirements.txt" ||
  ! "$venv/bin/python" -c '' 2>/dev/null; then
  echo "torch.sh: installing $(grep '^torch==' "tests/torch/$name.txt") into build/venv-torch-$name"
  rm -rf "$venv"
  python3 -m venv "$venv"
  if ! timeout 900 "$uv" pip install --quiet --python "$venv/bin/python" -r tests/requirements.txt \
    -r "tests/torch/$name.txt" --override "tests/torch/$name.txt"; then
    rm -rf "$venv"
    # As in tests/setup.sh: without a network there is nothing to test with. Any other reason is a failure: a disk that
    # is full must not pass for a test that passed.
    if "$uv" pip install --quiet --refresh --dry-run --no-deps --python build/venv/bin/python \
      "$(grep '^torch==' "tests/torch/$name.txt")"; then
      echo "torch.sh: could not install tests/torch/$name.txt though PyPI can be reached; $(df -h --output=avail . |
        tail -n 1 | tr -d ' ') of disk are free, 6 GB are needed" >&2
      exit 1
    fi
    echo "torch.sh: no $(grep '^torch==' "tests/torch/$name.txt") to be had from PyPI: the lane torch-$name is skipped" >&2
    exit 0
  fi
  cat tests/requirements.txt "tests/torch/$name.txt" >"$venv/requirements.txt"
fi

if [[ $name == newest ]]; then
  echo "torch.sh: pip install '.[torch]' transformers, and the page of docs"
  page=$PWD/build/venv-page
  rm -rf "$page"
  python3 -m venv "$page"
  # First, and by uv, what pip would take from the network, of the versions that are known to work.
  "$uv" pip install --quiet --python "$page/bin/python" torch "$(grep -o '^transformers==[^;]*' tests/requirements.txt |
    head -n 1)" --override "tests/torch/$name.txt"
  "$page/bin/pip" install --quiet --disable-pip-version-check '.[torch]' transformers
  env -u LIBGEMINI_DIR -u PYTHONPATH "$page/bin/python" bindings/python/tests/page.py docs/pytorch.md
fi

cmake -S . -B build/torch -G Ninja -DCMAKE_BUILD_TYPE=Release -DGEMINI_TESTS=OFF -DGEMINI_CHECK=ON -DGEMINI_BENCH=OFF
cmake --build build/torch --target gemini gemini_update

# What does not depend on torch, and what takes long and depends on it in no way that something else does not, is for the
# lane release. The longest files come first.
files=(checkpoint unit models optimizers training activations versions savers views numbers several random scripted)
case $name in
  gpu) files=(unit training versions views numbers random) ;; # between the two others: what depends on torch most
  newest) files=(trainers "${files[@]}") ;;                   # of libraries that change with torch
esac
paths=()
for file in "${files[@]}"; do paths+=("bindings/python/tests/test_$file.py"); done
# Of several processes: what uses most of torch in 15 seconds of one core. Gloo, DTensors of parallelize_module() that
# ranks divide once more, checkpoints. The rest of test_ranks.py trains its cases together, for minutes.
[[ $name == gpu ]] || paths+=('bindings/python/tests/test_ranks.py::test_dtensors_are_divided[4]')
# uv installs sources alone: what is imported is compiled once, not in each process, and kept out of the sources.
env -u PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX="$PWD/build/pycache" PYTHONPATH="$PWD/bindings/python" \
  LIBGEMINI_DIR="$PWD/build/torch" OMP_NUM_THREADS=1 timeout 3600 "$venv/bin/python" \
  bindings/python/tests/run_files.py --jobs 3 --log "build/torch/$name" "${paths[@]}" -- -q --durations=5 \
  -k 'not kill and not torchrun and not inductor and not processes and not second_copy' "$@"
