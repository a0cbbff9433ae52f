"""What libgemini.torch costs where all fits: the steps of a small LLaMA beside the same steps of torch alone.

  bench/peers/small_torch.py [--batch 4] [--seq 64] [--blocks 12] [--width 64] [--checkpoint] [--unit] [--profile]

Both run in one process, by turns, so that a change of the machine's speed meets both. It prints the median step of
each, their ratio, and how often a step calls the library.
SPDX-License-Identifier: Apache-2.0
"""

import argparse
import collections
import os
import statistics
import time

arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
arguments.add_argument("--batch", type=int, default=4)
arguments.add_argument("--seq", type=int, default=64)
arguments.add_argument("--blocks", type=int, default=12)
arguments.add_argument("--width", type=int, default=64)
arguments.add_argument("--inner", type=int, default=160)
arguments.add_argument("--vocabulary", type=int, default=256)
arguments.add_argument("--rounds", type=int, default=60)
arguments.add_argument("--steps", type=int, default=1, help="of each in a round")
arguments.add_argument("--clip", type=float, default=0.0, help="global norm of gradients; 0: no clipping")
arguments.add_argument("--device-mem", default="256MiB")
arguments.add_argument("--checkpoint", action="store_true", help="recompute the blocks in the backward pass")
arguments.add_argument("--unit", action="store_true", help="call gm.unit() on the blocks")
arguments.add_argument("--units", default="auto", help="of gm.init()")
arguments.add_argument("--no-speculation", action="store_true", help="no updates ahead of the step")
arguments.add_argument("--threads", type=int, default=1)
arguments.add_argument("--dtype", default="float32")
arguments.add_argument("--profile", action="store_true", help="of 20 steps of libgemini.torch")
options = arguments.parse_args()

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

import libgemini.torch as gm  # noqa: E402

torch.set_num_threads(options.threads)


def make():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.width,
        intermediate_size=options.inner,
        num_hidden_layers=options.blocks,
        num_attention_heads=max(options.width // 64, 4),
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(getattr(torch, options.dtype)).train()
    if options.checkpoint:
        model.gradient_checkpointing_enable()
    return model


def runner(model, optimizer):
    ids = torch.randint(0, options.vocabulary, (options.batch, options.seq), generator=torch.Generator().manual_seed(1))

    def step(mark=lambda: None):
        loss = model(input_ids=ids, labels=ids).loss
        mark()
        loss.backward()
        if options.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        mark()
        optimizer.step()
        optimizer.zero_grad()
        mark()
        return loss

    return step


def timed(step):
    """The time of a step in seconds, what of it the calling thread ran, and that of forward, backward and update."""
    begin, marks = time.perf_counter(), [time.thread_time()]
    step(lambda: marks.append(time.thread_time()))
    return [time.perf_counter() - begin, marks[-1] - marks[0], *(b - a for a, b in zip(marks, marks[1:]))]


def count_calls(step, steps=4):
    """Calls of the library per step, by name."""
    lib, counts, inner = gm.session().lib, collections.Counter(), {}

    def counting(name, function):
        def call(*args):
            counts[name] += 1
            return function(*args)

        return call

    for name, value in list(vars(lib).items()):
        if callable(value) and not name.startswith("stream_"):
            inner[name] = value
            setattr(lib, name, counting(name, value))
    for _ in range(steps):
        step()
    for name, value in inner.items():
        setattr(lib, name, value)
    return {name: count / steps for name, count in counts.most_common() if count >= steps}


model = make()
plain = runner(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
gm.init(
    device="cpu",
    units=options.units,
    speculate=not options.no_speculation,
    device_memory=options.device_mem,
    host_memory=options.device_mem,
)
ours_model = make()
ours_model, optimizer = gm.prepare(ours_model, torch.optim.AdamW(ours_model.parameters(), lr=1e-3))
if options.unit:
    for layer in ours_model.model.layers:
        gm.unit(layer)
ours = runner(ours_model, optimizer)
for _ in range(6):
    one, other = plain().item(), ours().item()
    print(f"loss {one:.6f} {other:.6f} {'same' if one == other else f'differs by {other - one:.2g}'}")
times = {"torch": [], "libgemini": []}
for _ in range(options.rounds):
    for name, step in (("torch", plain), ("libgemini", ours)):
        step()  # whose code and data are in no cache
        times[name] += [timed(step) for _ in range(options.steps)]
for kind, what in enumerate(("a step", "of the calling thread", "- forward", "- backward", "- update")):
    columns = {name: [values[kind] * 1e3 for values in rows] for name, rows in times.items()}
    one, other = (statistics.median(values) for values in columns.values())
    least, least_ours = (statistics.quantiles(values, n=10)[0] for values in columns.values())
    print(
        f"{what}: torch {one:.2f} ms, libgemini {other:.2f} ms, ratio {other / one:.3f}; of the fastest tenth "
        f"{least:.2f} ms, {least_ours:.2f} ms, ratio {least_ours / least:.3f}"
    )
calls = count_calls(ours)
print(f"{sum(calls.values()):.0f} calls of the library per step: " + ", ".join(f"{n} {c:g}" for n, c in calls.items()))
if options.profile:
    import cProfile
    import pstats

    profile = cProfile.Profile()
    profile.enable()
    for _ in range(20):
        ours()
    profile.disable()
    stats = pstats.Stats(profile)
    print(f"{stats.total_calls / 20:.0f} Python calls per step")
    stats.sort_stats("tottime").print_stats(45)
    stats.sort_stats("cumtime").print_stats(60)
gm.close()
