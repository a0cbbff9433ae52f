#!/usr/bin/env python3
"""libgemini's allocations of non-model memory against PyTorch's own caching allocator, in one process and in turns.

SPDX-License-Identifier: Apache-2.0

The loops are compiled (alloc_torch.cpp), so that neither pays for Python. Needs torch with a GPU and a C++ compiler;
--device cpu compares with PyTorch's CPU allocator instead, on the simulated device: that shows only that it works.

  alloc_torch.py --library build/release/libgemini.so --trace bench/data/gpt_1.3b.trace
"""

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile

import torch

HERE = os.path.dirname(os.path.abspath(__file__))
TORCH, OURS, ASKING = 0, 1, 2
ROUNDS = 7


def compile_loops(library, folder):
    out, base = os.path.join(folder, "alloc_torch.so"), os.path.dirname(torch.__file__)
    ctypes.CDLL(os.path.abspath(library), ctypes.RTLD_GLOBAL)  # where the loops find its functions
    command = [
        os.environ.get("CXX", "g++"),
        "-shared",
        "-fPIC",
        "-O2",
        os.path.join(HERE, "alloc_torch.cpp"),
        "-o",
        out,
        f"-I{HERE}/../../include",
        f"-I{base}/include",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-L{base}/lib",
        "-lc10",
        f"-Wl,-rpath,{base}/lib",
    ]
    for standard in "c++17", "c++20":  # newer headers need the newer one
        done = subprocess.run(command + [f"-std={standard}"], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            break
    else:
        sys.exit(f"alloc_torch: the loops do not compile:\n{done.stderr[-3000:]}")
    loops = ctypes.CDLL(out)
    loops.peer_torch.argtypes = [ctypes.c_int, ctypes.c_void_p]
    loops.peer_open.argtypes = [ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p]
    loops.peer_close.argtypes = [ctypes.c_uint64, ctypes.c_void_p]
    loops.peer_pairs.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64]
    loops.peer_trace.argtypes = [
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint64,
        ctypes.c_uint64,
    ]
    loops.peer_pairs.restype = loops.peer_trace.restype = ctypes.c_double
    return loops


def own_allocator():
    """c10::cuda::CUDACachingAllocator::allocator, which is a c10::Allocator first of all; None: go by the registered
    one."""
    try:
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10_cuda.so"))
        return ctypes.c_void_p.in_dll(library, "_ZN3c104cuda20CUDACachingAllocator9allocatorE").value
    except (OSError, ValueError):
        return None


def read_trace(path, scale):
    events, live, peak, ids, sizes = [], 0, 0, 0, {}
    with open(path, encoding="ascii") as file:
        for line in file:
            word = line.split()
            if word[0] == "a":
                size = max(1, int(word[2]) // scale)
                sizes[word[1]] = size
                live += size
                peak = max(peak, live)
                events += [int(word[1]), size]
                ids = max(ids, int(word[1]) + 1)
            elif word[0] == "f":
                live -= sizes.pop(word[1])
                events += [int(word[1]), 0]
    return (ctypes.c_uint64 * len(events))(*events), len(events) // 2, ids, peak


def in_turns(run):
    """Medians of the rounds, by which; the first round warms up."""
    seconds = {which: [] for which in (TORCH, OURS, ASKING)}
    for turn in range(-1, ROUNDS):
        for which, values in seconds.items():
            value = run(which)
            if value < 0:
                sys.exit(f"alloc_torch: an allocation failed (which: {which})")
            if turn >= 0:
                values.append(value)
    return [statistics.median(seconds[which]) for which in (TORCH, OURS, ASKING)]


def row(case, **fields):
    print("ROW " + json.dumps({"bench": "alloc_torch", "case": case, **fields}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True, help="libgemini.so")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--pairs", type=int, default=200000, help="allocations and frees a round")
    parser.add_argument("--trace", help="recorded trace: bench/data/gpt_1.3b.trace")
    parser.add_argument("--scale", type=int, default=1, help="the trace's sizes are divided by this")
    options = parser.parse_args()
    cuda = options.device == "cuda"
    if cuda:
        if not torch.cuda.is_available():
            sys.exit("alloc_torch: torch sees no GPU")
        torch.empty(1, device="cuda")  # its allocator starts
    trace = read_trace(options.trace, options.scale) if options.trace else None
    live = trace[3] if trace else 0
    with tempfile.TemporaryDirectory() as folder:
        loops = compile_loops(options.library, folder)
        if loops.peer_torch(cuda, own_allocator() if cuda else None):
            sys.exit("alloc_torch: torch has no allocator")
        mgr, stream, held = ctypes.c_uint64(), ctypes.c_void_p(), ctypes.c_uint64()
        status = loops.peer_open(cuda, live * 2 + (256 << 20), ctypes.byref(mgr), ctypes.byref(stream))
        if status:
            sys.exit(f"alloc_torch: no manager: status {status}")
        common = {"unit": "s", "against": f"torch {torch.__version__} {options.device}"}
        for name, size in ("512B", 512), ("1MiB", 1 << 20), ("32MiB", 32 << 20):
            theirs, ours, asking = in_turns(lambda w, s=size: loops.peer_pairs(w, cuda, stream, s, options.pairs))
            row(
                name,
                value=ours,
                ratio=theirs / ours,
                torch=theirs,
                asking=asking,
                asking_ratio=theirs / asking,
                size_bytes=size,
                **common,
            )
        if trace:
            if cuda:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            theirs, ours, asking = in_turns(
                lambda w: loops.peer_trace(w, cuda, stream, ctypes.addressof(trace[0]), trace[1], trace[2])
            )
            reserved = torch.cuda.memory_stats()["reserved_bytes.all.peak"] if cuda else None
            row(
                "trace",
                value=ours,
                ratio=theirs / ours,
                torch=theirs,
                asking=asking,
                asking_ratio=theirs / asking,
                events=trace[1],
                **common,
            )
        status = loops.peer_close(mgr, ctypes.byref(held))
        if status:
            sys.exit(f"alloc_torch: the manager did not close: status {status}")
        if trace:
            row(
                "fragmentation",
                value=held.value / live,
                unit="ratio",
                live_peak_bytes=live,
                held_peak_bytes=held.value,
                torch_reserved_bytes=reserved,
                ratio=reserved / held.value if reserved else None,
                against=common["against"],
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
