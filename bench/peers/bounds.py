"""What a training step with updates in one pass cannot be faster than on this machine: measured rates, and the bound
that follows from them.

SPDX-License-Identifier: Apache-2.0
"""

import concurrent.futures
import ctypes
import os
import statistics
import time

STATE_BYTES = 12  # of a parameter: its fp32 master copy and two moments
UPDATE_BYTES = 28  # that an update of a parameter reads and writes: states, a 16-bit gradient, a 16-bit parameter


def _seconds(call, passes=5):
    """The median of a call's times, after one that warms up."""
    call()
    times = []
    for _ in range(passes):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def rates(torch, cuda):
    """Measures this machine.

    Args:
        torch: The module.
        cuda: Whether copies are those of a GPU; without one the bound knows no copies.

    Returns:
        update: parameters a second of the fused AdamW by all cores together, each thread with arrays of its own.
        memory: bytes a second of the host's memory, the most of updates, of all cores reading, which should be more
        than any step reaches, as it writes, too, and on a GPU of copies both ways, alone and beside updates. On a GPU,
        up and down: bytes a second of copies of 64 MiB between page-locked memory and the GPU.
    """
    from libgemini import abi

    adamw_host = abi.update_library().cdll.gemini_adamw_host
    adamw_host.argtypes = (ctypes.c_void_p, ctypes.c_uint64) + (ctypes.c_void_p,) * 6
    compare = ctypes.CDLL(None).memcmp
    compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    threads = len(os.sched_getaffinity(0))
    elements = 1 << (24 if cuda else 20)
    rule = abi.Adamw(
        param_dtype=abi.DTYPE_BF16,
        grad_dtype=abi.DTYPE_BF16,
        step=1,
        lr=1e-3,
        beta1=0.9,
        beta2=0.999,
        eps=1e-8,
        weight_decay=0.01,
        grad_scale=1.0,
    )
    arrays = [
        [torch.zeros(elements, dtype=dtype) for dtype in (torch.bfloat16,) * 2 + (torch.float32,) * 3]
        for _ in range(threads)
    ]
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:

        def update(own):
            status = adamw_host(ctypes.byref(rule), elements, *(array.data_ptr() for array in own), None)
            assert status == 0, status

        found = {"update": threads * elements / _seconds(lambda: list(pool.map(update, arrays)))}

        def read(own):
            """Reads both moments, which equal gradients of zero leave equal, to their ends."""
            moments = own[3:]
            assert compare(*(array.data_ptr() for array in moments), moments[0].nbytes) == 0

        reads = threads * 2 * arrays[0][3].nbytes / _seconds(lambda: list(pool.map(read, arrays)))
        found["memory"] = max(UPDATE_BYTES * found["update"], reads)
        if not cuda:
            return found
        streams = {name: torch.cuda.Stream() for name in ("up", "down")}
        ends = {}
        for name in streams:
            host = torch.empty(1 << 26, dtype=torch.uint8, pin_memory=True)
            device = torch.empty_like(host, device="cuda")
            ends[name] = (device, host) if name == "up" else (host, device)

        def copy(*names):
            for _ in range(16):
                for name in names:
                    with torch.cuda.stream(streams[name]):
                        ends[name][0].copy_(ends[name][1], non_blocking=True)
            torch.cuda.synchronize()

        copied = 16 << 26  # bytes of copy(), each way
        for name in streams:
            found[name] = copied / _seconds(lambda name=name: copy(name))
        both = 2 * copied / _seconds(lambda: copy("up", "down"))
        passes = 8

        def updates(own):
            for _ in range(passes):
                update(own)
            return time.perf_counter()

        begin, copies = time.perf_counter(), 0
        running = [pool.submit(updates, own) for own in arrays[1:] or arrays]  # a core queues the copies
        while not all(one.done() for one in running):
            copy("up", "down")
            copies += 2 * copied
        last, ended = time.perf_counter(), max(one.result() for one in running)
        copies *= (ended - begin) / (last - begin)  # those beside updates
        together = (UPDATE_BYTES * passes * len(running) * elements + copies) / (ended - begin)
    return found | {"memory": max(found["memory"], both, together)}


def bound(rates, gpu, params, device_bytes, accumulate, clipped):
    """The time that a step takes at least, and why.

    States that fit in the device's memory beside 16-bit parameters and what the passes need are updated there. The
    others are updated on the host, or carried to the device, updated there and carried back, in the shares that take
    least time. The host's updates are limited by its cores, what is carried, and gradients and parameters of the host's
    updates, by the link, and all of it by the host's memory. That begins when gradients are complete and ends before
    their parameters are used again. So beside it run, of the passes over micro-batches, the last backward and the next
    forward one; where gradients are clipped, so that the norm of all of them has to be known before, the forward one
    only. What does not fit beside them lengthens the step. That is the bound of updates in one pass: where gradients
    are clipped, updates in two passes, of which the forward pass waits for the first alone, can be faster.

    Args:
        rates: From rates().
        gpu: The row of the same model and batch all on the device: value, forward_share and work_bytes.
        params: Parameters of the model.
        device_bytes: The budget.
        accumulate: Micro-batches in a step.
        clipped: Whether gradients were clipped.

    Returns:
        Seconds, and what binds: "compute", or of "host", "link" and "memory" those that take longest, with "and".
    """
    free = max(0, device_bytes - 2 * params - gpu["work_bytes"])
    moved = max(0, params - free / STATE_BYTES)
    seconds, binds = moved / rates["update"], "host"
    if "up" in rates:
        link = min(rates["up"], rates["down"])
        away = max(0, params - max(0, device_bytes - gpu["work_bytes"]) / 2)  # parameters that come for each pass

        def terms(share):
            """Seconds of what limits it, if that share of what moves is updated on the host."""
            host, carried = share * moved, (1 - share) * moved
            return {
                "host": host / rates["update"],
                "link": (2 * host + STATE_BYTES * carried + 4 * away) / link,
                "memory": ((UPDATE_BYTES + 4) * host + 2 * STATE_BYTES * carried + 4 * away) / rates["memory"],
            }

        least = min((terms(k / 1000) for k in range(1001)), key=lambda each: max(each.values()))
        seconds = max(least.values())
        binds = " and ".join(name for name, value in least.items() if value > 0.99 * seconds)
    compute = gpu["value"]
    beside = compute / accumulate * (gpu["forward_share"] if clipped else 1)
    return (compute, "compute") if seconds <= beside else (compute - beside + seconds, binds)
