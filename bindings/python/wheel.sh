#!/usr/bin/env bash
# Makes a wheel that needs no compiler and no library of the system, and tests it. SPDX-License-Identifier: Apache-2.0
#   bindings/python/wheel.sh [--from WHEEL] [--torch PYTHON] OUT
# OUT: the folder for the wheel. It is py3-none-manylinux_A_B: for any Python 3 and every glibc from A.B on, which
# auditwheel reads from the symbols that the libraries use. Built on Debian 12, that is 2.34 at the oldest; for older
# systems, run this on an older one. hwloc, liburing and what they need are inside, with their licences.
# --from: a wheel that pip has built already, instead of building one.
# --torch: a Python that has torch, with which the test also makes a training step.
# PYTHON names the Python that builds and tests (python3). It needs auditwheel and patchelf; without --from, pip fetches
# what builds the wheel, and tests/jemalloc.sh builds the private jemalloc if that has not been done.
set -euo pipefail
fail() { echo "wheel.sh: $*" >&2; exit 1; }

from='' torch='' out=''
while (($#)); do
  case $1 in
    --from | --torch)
      if [[ ! -f ${2:-} ]]; then fail "$1: want a file after it"; fi
      if [[ $1 == --from ]]; then from=$(realpath -- "$2"); else torch=$(realpath -s -- "$2"); fi
      shift 2 ;;
    --help) sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 0 ;;
    -*) fail "$1: unknown option, want --from or --torch" ;;
    *) out=$1; shift ;;
  esac
done
[[ -n $out ]] || fail "want the folder for the wheel"
root=$(realpath -- "$(dirname "$0")/../..")
python=${PYTHON:-python3}
path=$(dirname "$(command -v "$python")"):$PATH # pip installs patchelf beside its Python
if ! "$python" -m auditwheel --version >/dev/null 2>&1 || ! PATH=$path command -v patchelf >/dev/null; then
  fail "$python lacks auditwheel or patchelf: pip install auditwheel patchelf"
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"

if [[ -z $from ]]; then
  if [[ -z ${GEMINI_JEMALLOC_ROOT:-} ]]; then "$root/tests/jemalloc.sh"; fi
  echo "wheel.sh: building the wheel"
  define=()
  if [[ -n ${GEMINI_JEMALLOC_ROOT:-} ]]; then define=(-C "cmake.define.GEMINI_JEMALLOC_ROOT=$GEMINI_JEMALLOC_ROOT"); fi
  "$python" -m pip wheel --quiet --no-deps "${define[@]}" -w "$work" "$root"
  from=$(echo "$work"/*.whl)
fi

echo "wheel.sh: putting libraries into $(basename "$from")"
# libgemini_update.so needs libgemini.so.0, which is libgemini.so beside it: the package loads that one first.
PATH=$path "$python" -m auditwheel repair --exclude libgemini.so.0 -w "$work/repaired" "$from" >"$work/log" 2>&1 ||
  { cat "$work/log" >&2; fail "auditwheel could not repair it"; }
made=$(echo "$work"/repaired/*.whl)
"$python" - "$made" "$out" <<'END'
"""Adds the licences of the libraries inside to a wheel."""
import base64, hashlib, pathlib, subprocess, sys, zipfile

wheel, out = map(pathlib.Path, sys.argv[1:])
libraries = []
with zipfile.ZipFile(wheel) as file:
    names = file.namelist()
    (record,) = (name for name in names if name.endswith(".dist-info/RECORD"))
    libraries = sorted({pathlib.PurePath(name).name.split("-")[0] for name in names if ".libs/lib" in name})
    more = {}
    for library in libraries:
        listed = subprocess.run(["dpkg", "-S", f"*/{library}.so*"], capture_output=True, text=True).stdout
        packages = {line.split(":")[0] for line in listed.splitlines()}
        texts = [pathlib.Path("/usr/share/doc", package, "copyright") for package in sorted(packages)]
        text = next((path for path in texts if path.is_file()), None)
        if text is None:
            sys.exit(f"wheel.sh: the licence of {library} was not found; this is written for Debian and Ubuntu")
        more[f"{record.rpartition('/')[0]}/licenses/COPYING.{library}"] = text.read_bytes()
    lines = [line for line in file.read(record).decode().splitlines() if not line.startswith(record)]
    for name, data in more.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}")
    lines.append(f"{record},,")
    with zipfile.ZipFile(out / wheel.name, "w", zipfile.ZIP_DEFLATED) as to:
        for info in file.infolist():
            if info.filename != record:
                to.writestr(info, file.read(info))
        for name, data in more.items():
            to.writestr(name, data)
        to.writestr(record, "\n".join(lines) + "\n")
print(f"wheel.sh: inside are {', '.join(libraries)}")
END
wheel=$out/$(basename "$made")

echo "wheel.sh: testing $(basename "$wheel")"
"$python" -m venv --without-pip "$work/venv"
"$python" -m pip --python "$work/venv/bin/python" install --quiet --no-index --no-deps --disable-pip-version-check "$wheel"
site=$(echo "$work"/venv/lib/python3*/site-packages)
mkdir "$work/home"
# No compiler, no LD_LIBRARY_PATH, no folder of the sources, nothing else of the environment.
bare() { (cd "$work/home" && env -i PATH="$work/venv/bin" HOME="$work/home" "$@"); }
bare python - <<'END'
import ctypes, os, sys
import libgemini
from libgemini.abi import update_library

for name in "cc", "gcc", "clang", "cmake":
    assert not any(os.access(os.path.join(path, name), os.X_OK) for path in os.environ["PATH"].split(":")), name
folder = os.path.dirname(os.path.dirname(libgemini.__file__))
with libgemini.Manager(device_memory="1MiB", host_memory="16MiB", chunk_size="64KiB") as manager:
    arena = manager.arena("param", element_bytes=4)
    offsets = [manager.take(arena, 256 << 10) for _ in range(8)]  # twice what the device has
    for step in range(3):
        with manager.iteration():
            for i, offset in enumerate(offsets):
                with manager.operator(f"layer {i}"):
                    with manager.acquired(manager.range(arena, "read_write", offset, 256 << 10)) as (data,):
                        values = memoryview(data).cast("B")
                        assert values[77] == step
                        values[77] += 1
    assert manager.stats()["planned_iterations"] == 2
update_library()
assert "numpy" not in sys.modules and "torch" not in sys.modules
maps = {line.split()[-1] for line in open("/proc/self/maps") if "/" in line}
for name in "libgemini.so", "libgemini_update.so", "libhwloc", "liburing":
    paths = [path for path in maps if os.path.basename(path).startswith(name)]
    assert paths and all(path.startswith(folder) for path in paths), (name, paths)
print("wheel.sh: a manager works, in Python", sys.version.split()[0])
END
if [[ -n $torch ]]; then
  bare PYTHONPATH="$site" OMP_NUM_THREADS=1 "$torch" - <<'END'
import torch
import libgemini.torch as gm

with gm.init(device="cpu", device_memory="1MiB", host_memory="64MiB"):
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(8)))
model, optimizer = gm.prepare(model, torch.optim.AdamW(model.parameters()))
loss = model(torch.ones(2, 128)).sum()
loss.backward()
optimizer.step()
assert gm.stats()["iterations"] == 1
gm.close(force=True)
print("wheel.sh: a training step works, with torch", torch.__version__)
END
fi
echo "wheel.sh: $wheel"
