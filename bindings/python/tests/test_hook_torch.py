"""PyTorch on libgemini's allocations: as a pool of segments that evicts chunks, and as its only allocator.

  python3 test_hook_torch.py LIBRARY

Needs a GPU and a torch that sees it; otherwise exits with 77. Each case runs in a process of its own, as an allocator
can be changed only once.
SPDX-License-Identifier: Apache-2.0
"""

import ctypes
import struct
import subprocess
import sys

MIB = 1 << 20
CHUNK = 2 * MIB
READ, READ_WRITE, HOST, DEVICE, PRESSURE = 1, 3, 1, 0, 2


class Access(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("mode", ctypes.c_uint32),
        ("tier", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("object", ctypes.c_uint64),
        ("offset", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("ptr", ctypes.c_void_p),
    ]


class Manager:
    """A manager on the GPU, with an arena of chunks that fill the device, each with bytes of its own."""

    def __init__(self, library, device_mib, chunks):
        self.lib = ctypes.CDLL(library)
        u64 = ctypes.c_uint64
        self.lib.gemini_acquire.argtypes = self.lib.gemini_release.argtypes = [u64, ctypes.c_void_p, u64, u64]
        for name in (
            "gemini_hook_set",
            "gemini_hook_clear",
            "gemini_manager_close",
            "gemini_stats",
            "gemini_tier_stats",
            "gemini_link_count",
            "gemini_link_stats",
            "gemini_arena_take",
            "gemini_arena_create",
            "gemini_stream_create",
            "gemini_stream_synchronize",
        ):
            getattr(self.lib, name).argtypes = {
                "gemini_hook_set": [u64, ctypes.c_uint32],
                "gemini_stats": [u64, ctypes.c_void_p],
                "gemini_tier_stats": [u64, ctypes.c_uint32, ctypes.c_void_p],
                "gemini_link_count": [u64, ctypes.c_void_p],
                "gemini_link_stats": [u64, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p],
                "gemini_arena_take": [u64, u64, u64, ctypes.c_void_p],
                "gemini_arena_create": [u64] + [ctypes.c_void_p] * 2,
                "gemini_stream_create": [u64, ctypes.c_void_p],
                "gemini_stream_synchronize": [u64, u64],
            }.get(name, [u64])
        # gemini_config_t: 8 words, 5 sizes, 2 fractions, 2 rates, 3 pointers, 2 words, a pointer
        config = struct.pack(
            "=8I5Q2d2Q3Q2IQ",
            8 * 4 + 5 * 8 + 2 * 8 + 2 * 8 + 3 * 8 + 2 * 4 + 8,
            0,
            0,
            1,
            0,
            0,
            1,
            0,
            device_mib * MIB,
            0,
            (chunks + 8) * CHUNK,
            0,
            CHUNK,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
        )
        self.mgr, self.stream, self.arena, offset = u64(), u64(), u64(), u64()
        self.check(self.lib.gemini_manager_open(config, ctypes.byref(self.mgr)))
        self.check(self.lib.gemini_stream_create(self.mgr, ctypes.byref(self.stream)))
        # gemini_arena_config_t: 4 words, capacity, name, like, reuse
        arena = struct.pack("=4I4Q", 48, 5, 4, 0, 0, 0, 0, 0)
        self.check(self.lib.gemini_arena_create(self.mgr, arena, ctypes.byref(self.arena)))
        self.chunks = chunks
        if not chunks:
            return
        self.check(self.lib.gemini_arena_take(self.mgr, self.arena, chunks * CHUNK, ctypes.byref(offset)))
        for i in range(chunks):
            with_bytes = self.acquire(i, READ_WRITE, HOST, 0)
            ctypes.memset(with_bytes.ptr, i + 1, CHUNK)
            self.release(with_bytes, 0)
        self.touch()

    def check(self, status):
        if status:
            info = ctypes.create_string_buffer(struct.pack("=IiQ64s440s", 520, 0, 0, b"", b""), 520)
            self.lib.gemini_last_error(info)
            raise AssertionError((status, info.raw[16:80].split(b"\0")[0], info.raw[80:].split(b"\0")[0]))

    def acquire(self, i, mode, tier, stream):
        access = Access(ctypes.sizeof(Access), mode, tier, 0, self.arena.value, i * CHUNK, CHUNK, None)
        self.check(self.lib.gemini_acquire(self.mgr, ctypes.byref(access), 1, stream))
        return access

    def release(self, access, stream):
        self.check(self.lib.gemini_release(self.mgr, ctypes.byref(access), 1, stream))

    def touch(self):
        for i in range(self.chunks):
            self.release(self.acquire(i, READ_WRITE, DEVICE, self.stream), self.stream)

    def holds(self):
        for i in range(self.chunks):
            access = self.acquire(i, READ, HOST, 0)
            assert ctypes.string_at(access.ptr, CHUNK) == bytes([i + 1]) * CHUNK, i
            self.release(access, 0)

    def stats(self):
        """Bytes of allocations now, at most, and evicted under pressure; what the device's budget is and its peak."""
        stats, device, link = ((ctypes.c_uint64 * 128)(128 * 8) for _ in range(3))
        links, evicted = ctypes.c_uint32(), 0
        self.check(self.lib.gemini_stats(self.mgr, stats))
        self.check(self.lib.gemini_tier_stats(self.mgr, DEVICE, device))
        self.check(self.lib.gemini_link_count(self.mgr, ctypes.byref(links)))
        for number in range(links.value):
            self.check(self.lib.gemini_link_stats(self.mgr, number, PRESSURE, link))
            if link[1] == DEVICE | HOST << 32:  # from the one to the other
                evicted += link[4]
            link[0] = 128 * 8
        return {"live": stats[2], "most": stats[3], "evicted": evicted, "budget": device[1], "peak": device[3]}


def allocator(torch, library):
    return torch.cuda.memory.CUDAPluggableAllocator(library, "gemini_torch_malloc", "gemini_torch_free")


def case_pool(library):
    import torch

    m = Manager(library, 256, 126)  # 252 of 256 MiB hold chunks
    m.check(m.lib.gemini_hook_set(m.mgr, 0))
    pool = torch.cuda.MemPool(allocator(torch, library).allocator())
    with torch.cuda.use_mem_pool(pool):
        tensors = [torch.full((10 * MIB,), i, dtype=torch.uint8, device="cuda") for i in range(20)]
        for i, tensor in enumerate(tensors):
            assert bool((tensor == i).all()), i
        s = m.stats()
        assert s["live"] >= 200 * MIB and s["evicted"] >= 190 * MIB and s["peak"] <= s["budget"], s
        del tensors, tensor
        torch.cuda.synchronize()
        m.touch()  # what PyTorch keeps in its cache is live here: chunks go through what is left
        again = [torch.full((10 * MIB,), 99 - i, dtype=torch.uint8, device="cuda") for i in range(20)]
        for i, tensor in enumerate(again):
            assert bool((tensor == 99 - i).all()), i
        del again, tensor
    del pool
    torch.cuda.empty_cache()
    s = m.stats()
    assert s["live"] == 0 and s["peak"] <= s["budget"], s
    m.holds()
    m.check(m.lib.gemini_manager_close(m.mgr))


def train(torch):
    torch.manual_seed(3)
    torch.use_deterministic_algorithms(True)
    model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    side, losses = torch.cuda.Stream(), []
    for step in range(20):
        x = torch.randn(64 + 16 * (step % 5), 512, device="cuda")
        with torch.cuda.stream(side):  # memory of one stream used, and freed, while another works
            side.wait_stream(torch.cuda.default_stream())
            y = torch.sin(x * 3)
            keep = [torch.empty(1 << (12 + i), device="cuda").normal_() for i in range(8)]
        torch.cuda.current_stream().wait_stream(side)
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
        side.wait_stream(torch.cuda.current_stream())  # y's memory goes back on its own stream
        del y, keep
    return losses


def case_plain(library):
    import torch

    print(*(loss.hex() for loss in train(torch)))


def case_all(library):
    import torch

    m = Manager(library, 128, 62)
    m.check(m.lib.gemini_hook_set(m.mgr, 0))
    torch.cuda.memory.change_current_allocator(allocator(torch, library))
    print(*(loss.hex() for loss in train(torch)))
    s = m.stats()
    assert 0 < s["most"] <= s["budget"] and s["evicted"] > 0 and s["peak"] <= s["budget"], s
    m.holds()
    kept = torch.ones(1000, device="cuda")
    torch.cuda.synchronize()
    m.check(m.lib.gemini_manager_close(m.mgr))
    del kept  # too late: ignored


def main():
    library = sys.argv[1]
    if len(sys.argv) > 2:
        globals()["case_" + sys.argv[2]](library)
        return 0
    try:
        import torch

        found = torch.cuda.is_available()
    except ImportError:
        found = False
    if not found:
        print("skipped: no torch that sees a GPU")
        return 77
    outputs = {}
    for case in "pool", "plain", "all":
        done = subprocess.run(
            [sys.executable, __file__, library, case],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            env={**__import__("os").environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
            timeout=900,
        )
        print(case, "ok" if done.returncode == 0 else f"failed: {done.returncode}", flush=True)
        if done.returncode:
            return 1
        outputs[case] = done.stdout
    assert outputs["plain"].split() and outputs["plain"] == outputs["all"], outputs  # the same numbers, to the bit
    return 0


if __name__ == "__main__":
    sys.exit(main())
