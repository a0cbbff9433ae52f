"""PyTorch's fused AdamW on the CPU, with the two casts that training in low precision needs beside it.

bench/peers/update_torch.py [--threads N] [--parameters N] [--tensors N] [--dtype bf16|f16] [--passes N]
A pass takes low-precision gradients to fp32, updates the fp32 parameters, and writes them back in low precision.
Arguments are those of bench_update, whose parameters it has in all. SPDX-License-Identifier: Apache-2.0
"""

import argparse
import json
import os
import statistics
import time

import torch

arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
arguments.add_argument("--threads", type=int, default=0, help="0: all cores")
arguments.add_argument("--parameters", type=int, default=1 << 29, help="in all")
arguments.add_argument("--tensors", type=int, default=16, help="that they are cut into")
arguments.add_argument("--dtype", choices=["bf16", "f16"], default="bf16")
arguments.add_argument("--passes", type=int, default=11)
options = arguments.parse_args()
threads = options.threads or os.cpu_count()
torch.set_num_threads(threads)

low = {"bf16": torch.bfloat16, "f16": torch.float16}[options.dtype]
each = options.parameters // options.tensors
masters = [torch.nn.Parameter(torch.rand(each)) for _ in range(options.tensors)]
gradients = [(torch.rand(each) * 1e-3).to(low) for _ in range(options.tensors)]
params = [torch.empty(each, dtype=low) for _ in range(options.tensors)]
for master in masters:
    master.grad = torch.empty(each)
optimizer = torch.optim.AdamW(masters, lr=1e-3, fused=True)

seconds, update_seconds = [], []
for number in range(options.passes + 2):  # the first makes the states, the second warms up
    begin = time.perf_counter()
    with torch.no_grad():
        for master, gradient in zip(masters, gradients):
            master.grad.copy_(gradient)
        before = time.perf_counter()
        optimizer.step()
        after = time.perf_counter()
        for param, master in zip(params, masters):
            param.copy_(master)
    end = time.perf_counter()
    if number >= 2:
        seconds.append(end - begin)
        update_seconds.append(after - before)

count = each * options.tensors
print(
    "ROW "
    + json.dumps(
        {
            "bench": "update_torch",
            "case": options.dtype,
            "value": statistics.median(seconds) / count,
            "unit": "s/parameter",
            "update_alone_s_per_parameter": statistics.median(update_seconds) / count,
            "threads": threads,
            "parameters": count,
            "torch": torch.__version__,
        }
    )
)
