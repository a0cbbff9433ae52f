#!/usr/bin/env python3
"""Compiles the .cu files of KERNELS below to the .ptx beside them. SPDX-License-Identifier: Apache-2.0

  cmake/ptx.py            compiles all of them anew; needs nvcc and ptxas
  cmake/ptx.py --check    needs no compiler: every .ptx is of the .cu beside it and was not edited by hand
  cmake/ptx.py --compare  compiles all of them and compares the results with the .ptx byte by byte; exits 77 without the
                          nvcc that made them

The build embeds the .ptx files (cmake/ptx.cmake) and needs no nvcc. The first lines of a .ptx are comments: the command
that made it, the version of nvcc, and checksums of its sources and of its own text. Comments and white space of sources
do not count: they do not change what nvcc makes of them.
"""

import hashlib
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
# The kernels in each .cu: options of nvcc, and the headers whose change may change the kernels. bindings/update takes
# constants from gemini.h too; these are part of the ABI, which tests/abi keeps.
KERNELS = {
    "src/device/sum_squares.cu": ([], []),
    "src/device/rank_sum.cu": (["-fmad=false"], []),
    "bindings/update/kernels.cu": (["-std=c++17", "-fmad=false", "-I..", "-I../../include"], ["update.h"]),
    "bench/model/gpt_kernels.cu": (["-fmad=false"], ["gpt_kernels.h", "gpt.h", "scalar.h"]),
    "bench/model/task_kernels.cu": ([], []),
}
# Kernels that must round like the CPU. An fp32 or fp64 operation without .rn may be fused by ptxas.
FUSED = r"(fma\.rn\.f32|(mul|add|sub)\.f(32|64))"
NEVER_FUSED = {"bench/model/gpt_kernels.cu": FUSED, "src/device/rank_sum.cu": FUSED}


class Failure(Exception):
    """What is wrong, in words for the user."""


def sha256(text):
    return hashlib.sha256(text.encode()).hexdigest()


def sum_of_sources(cu, headers):
    text = "".join((cu.parent / name).read_text() for name in [*headers, cu.name])
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
    return sha256("".join(text.split()))


def nvcc_version():
    """The version of nvcc, or None without nvcc."""
    try:
        output = subprocess.run(["nvcc", "--version"], check=True, capture_output=True, text=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return re.search(r"V([\d.]+)", output).group(1)


def compile_text(cu, options):
    """The PTX of cu, without comments and empty lines.

    nvcc names its own newest version of PTX, which older drivers refuse although the kernels need nothing of it. The
    text names the oldest version and GPU that have all instructions in use instead; ptxas shows that they do.
    """
    with tempfile.TemporaryDirectory() as folder:
        ptx = pathlib.Path(folder, "kernels.ptx")
        subprocess.run(["nvcc", *options, "-o", ptx, cu.name], cwd=cu.parent, check=True)
        text = ptx.read_text()
        text = re.sub(r"^\.version .*", ".version 6.3", text, flags=re.MULTILINE)
        text = re.sub(r"^\.target .*", ".target sm_70", text, flags=re.MULTILINE)
        lines = (re.sub(r"[ \t]*//.*", "", line).replace("\t", " ") for line in text.splitlines())
        text = "".join(line + "\n" for line in lines if line.strip())
        ptx.write_text(text)
        for gpu in "sm_75", "sm_90":
            subprocess.run(["ptxas", f"-arch={gpu}", "-o", ptx.with_suffix(".cubin"), ptx], check=True)
    return text


def make(name, version):
    """The whole .ptx of the .cu with this name."""
    cu = ROOT / name
    options, headers = KERNELS[name]
    options = ["-ptx", "-O3", *options, "-arch=compute_75"]
    text = compile_text(cu, options)
    if name in NEVER_FUSED and (found := re.search(NEVER_FUSED[name], text)):
        raise Failure(f"{name}: has operations that are or may be fused: {found[0]}")
    return (
        f"// Generated from {cu.name} by cmake/ptx.py; do not edit. SPDX-License-Identifier: Apache-2.0\n"
        f"// Command: nvcc {' '.join(options)} {cu.name}\n"
        f"// Compiler: {version}\n"
        f"// Sources: {sum_of_sources(cu, headers)} {' '.join([cu.name, *headers])}\n"
        f"// Text: {sha256(text)}\n{text}"
    )


def fields_of(name):
    """What the first lines of the .ptx of this .cu say, and the text below them."""
    ptx = ROOT / pathlib.Path(name).with_suffix(".ptx")
    if not ptx.exists():
        raise Failure(f"{ptx.relative_to(ROOT)}: no such file; run cmake/ptx.py")
    found = re.fullmatch(r"((?://[^\n]*\n)+)(.*)", ptx.read_text(), flags=re.DOTALL)
    fields = dict(re.findall(r"^// (\w+): (\S+)", found[1], flags=re.MULTILINE)) if found else {}
    if not {"Compiler", "Sources", "Text"} <= fields.keys():
        raise Failure(f"{ptx.relative_to(ROOT)}: its first lines are not those that cmake/ptx.py writes; run it")
    return fields, found[2]


def check():
    folders = [ROOT / folder for folder in ("bench", "bindings", "examples", "src", "tests")]
    of_suffix = {
        suffix: {str(file.relative_to(ROOT).with_suffix(".cu")) for folder in folders for file in folder.rglob(suffix)}
        for suffix in ("*.cu", "*.ptx")
    }
    for suffix, found in of_suffix.items():
        if found != KERNELS.keys():
            odd = ", ".join(sorted(found ^ KERNELS.keys()))
            raise Failure(f"the files {suffix} are not those of KERNELS in cmake/ptx.py: {odd}")
    for name, (_, headers) in KERNELS.items():
        fields, text = fields_of(name)
        if fields["Sources"] != sum_of_sources(ROOT / name, headers):
            raise Failure(f"{name}: its .ptx is older than {' or '.join([name, *headers])}; run cmake/ptx.py")
        if fields["Text"] != sha256(text):
            raise Failure(f"{name}: its .ptx was edited by hand; run cmake/ptx.py")


def compare(version):
    for name in KERNELS:
        made_by = fields_of(name)[0]["Compiler"]
        if made_by != version:
            print(f"skipped: the .ptx of {name} was made by nvcc {made_by}, and here is {version or 'none'}")
            return 77
        if (ROOT / name).with_suffix(".ptx").read_text() != make(name, version):
            raise Failure(f"{name}: its .ptx is not what nvcc makes of it; run cmake/ptx.py")
    return 0


def main(arguments):
    if arguments == ["--check"]:
        check()
    elif arguments == ["--compare"]:
        return compare(nvcc_version())
    elif arguments:
        print(__doc__)
        return 0 if arguments == ["--help"] else 2
    else:
        version = nvcc_version()
        if version is None:
            raise Failure("nvcc: no such program; install CUDA's compiler, version 11 or newer")
        for name in KERNELS:
            (ROOT / name).with_suffix(".ptx").write_text(make(name, version))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (Failure, subprocess.CalledProcessError) as failure:
        print(f"ptx.py: {failure}", file=sys.stderr)
        sys.exit(1)
