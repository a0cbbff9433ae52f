"""Loads libgemini.so into a Python that runs already, and sees that its malloc stays what it is.

  python3 test_load.py LIBRARY PROBE VERSION

PROBE is tests/unit/host_probe.c: it uses the private jemalloc through the library's own objects.
SPDX-License-Identifier: Apache-2.0
"""

import _ctypes
import ctypes
import os
import struct
import subprocess
import sys
import threading
import time

NAMES = ["malloc", "free", "calloc", "realloc", "posix_memalign", "aligned_alloc", "mallinfo2", "pthread_create"]


class Symbol(ctypes.Structure):
    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("at", ctypes.c_void_p),
    ]


class Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


process = ctypes.CDLL(None)
process.dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(Symbol)]
process.malloc.restype = ctypes.c_void_p
process.malloc.argtypes = [ctypes.c_size_t]
process.free.argtypes = [ctypes.c_void_p]


def where(library, name):
    at = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    symbol = Symbol()
    assert process.dladdr(at, symbol), name
    return at, symbol.file.decode()


def expect_threads(count):
    for _ in range(1000):  # a thread that was joined may still be on its way out
        if len(os.listdir("/proc/self/task")) == count:
            return
        time.sleep(0.01)
    raise AssertionError(f"{len(os.listdir('/proc/self/task'))} threads, not {count}")


def used_by_malloc():
    process.mallinfo2.restype = Mallinfo
    return process.mallinfo2().uordblks


def dynamic_flags(path):
    """DT_FLAGS of a 64-bit ELF file."""
    with open(path, "rb") as file:
        data = file.read()
    assert data[:5] == b"\x7fELF\x02", path
    order = "<" if data[5] == 1 else ">"
    (table,) = struct.unpack_from(order + "Q", data, 32)
    size, count = struct.unpack_from(order + "HH", data, 54)
    for i in range(count):
        kind, _, offset, _, _, length = struct.unpack_from(order + "IIQQQQ", data, table + i * size)
        if kind == 2:
            entries = struct.iter_unpack(order + "QQ", data[offset : offset + length])
            return dict(entries).get(30, 0)
    raise AssertionError(path + " has no dynamic section")


def check_names(library, before):
    for name in before:
        # A name looked up in the library itself is found in what it depends on: libc.
        assert where(ctypes.CDLL(None), name) == before[name] == where(library, name), name
    for prefix in ["", "je_", "gmi_je_", "gmi_private_je_", "gmi_"]:
        for name in ["mallocx", "dallocx", "mallctl", "malloc_conf", "arena_new", "blocks_alloc", "reserve_open"]:
            assert not hasattr(library, prefix + name), prefix + name


def check_malloc():
    begin = used_by_malloc()
    block = process.malloc(100000)
    assert 100000 <= used_by_malloc() - begin < 110000
    process.free(block)
    assert used_by_malloc() == begin


def check_blocks(probe):
    results = []
    threads = [threading.Thread(target=lambda: results.append(probe.host_probe())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [0] * 8, results
    child = os.fork()  # jemalloc's locks must be free in the child
    if not child:
        os._exit(probe.host_probe() != 0)
    assert os.waitpid(child, 0)[1] == 0


def check_calls(library, version):
    library.gemini_version.restype = ctypes.c_char_p
    assert library.gemini_version().decode() == version
    topology, count = ctypes.c_uint64(), ctypes.c_uint32()
    assert library.gemini_topology_open(None, ctypes.byref(topology)) == 0
    assert library.gemini_topology_count(topology, 0, ctypes.byref(count)) == 0 and count.value > 0
    assert library.gemini_topology_close(topology) == 0


def inner(library_path, probe_path, version):
    before = {name: where(process, name) for name in NAMES}
    # A program that is not position-independent may show its own table's entry instead.
    where_malloc = before["malloc"][1]
    assert "libc.so" in where_malloc or "python" in where_malloc, before
    check_malloc()
    expect_threads(1)
    library = ctypes.CDLL(library_path, mode=ctypes.RTLD_GLOBAL)
    expect_threads(1)
    check_names(library, before)
    probe = ctypes.CDLL(probe_path, mode=ctypes.RTLD_GLOBAL)
    check_calls(library, version)
    check_blocks(probe)
    expect_threads(1)  # jemalloc started none
    check_names(library, before)
    check_malloc()
    _ctypes.dlclose(library._handle)
    check_malloc()


def main():
    # Whether it would fit into the static TLS that is left depends on the process; so it must not need any.
    for path in sys.argv[1:3]:
        assert not dynamic_flags(path) & 0x10, path + " needs static TLS (DF_STATIC_TLS)"
    # Settings meant for some other jemalloc, which this one must not see: it would say what it thinks of them, or
    # abort.
    settings = "abort_conf:true,no_such_option:true,stats_print:true,background_thread:true"
    environment = dict(os.environ)
    for prefix in ["", "JE_", "GMI_JE_", "gmi_je_"]:
        environment[prefix + "MALLOC_CONF"] = settings
    command = [sys.executable, "-B", os.path.abspath(__file__), "--inner"] + sys.argv[1:]
    for env in [os.environ, environment]:
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=500)
        assert done.returncode == 0 and not done.stdout, (done.returncode, done.stdout.decode())
    print("python", sys.version.split()[0], "with gemini", sys.argv[3])


if __name__ == "__main__":
    if sys.argv[1] == "--inner":
        inner(*sys.argv[2:])
    else:
        main()
