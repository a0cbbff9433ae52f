"""A LLaMA in PyTorch: all on the GPU, under FSDP2 with or without CPU offload, under libgemini.torch, side by side.

  bench/peers/llama_torch.py [--size 1.3b,3b,7b] [--system gpu,fsdp2,fsdp2-gpu,gemini] [--batch 16] [--seq 1024]
                             [--device-mem 24GiB] ...

Each system runs in a process of its own, one after another. bf16 compute, fp32 master copies and moments, activation
checkpointing on every block, AdamW, random tokens. Without arguments it is the reference: three sizes, three systems,
on a GPU about five minutes and 112 GiB of host memory. Beside system gpu, gemini has a row with the bound of bounds.py
and what binds it. 1.5 billion parameters within 6 GiB, on text; and 13 billion with files, where host and files
together take the 14 bytes a parameter:

  llama_torch.py --system gemini --size 1.5b --batch 4 --device-mem 6GiB --steps 15 \\
      --text /usr/share/common-licenses/GPL-3
  llama_torch.py --system gemini --size 13b --host-mem 110GiB --file DIR --file-mem 62GiB --lr 5e-6 --warmup 1 \\
      --steps 4 --text FILE

With several --states and --masters gemini runs once with each pair, and rows compare bytes, time and losses with those
of the first pair; the same kernels, so the difference is that of the states. 300 steps on text, without a GPU:

  llama_torch.py --system gemini --device cpu --size tiny --vocabulary 256 --batch 4 --seq 128 --steps 300 --warmup 0 \\
      --device-mem 2MiB --lr 1e-3 --states fp32,bf16,8bit --masters fp32,split16 --text /usr/share/common-licenses/GPL-3

Under torchrun on one machine, several processes train one model, each with a GPU and a batch of its own, and the first
one prints the rows:

  torchrun --nproc-per-node 2 bench/peers/llama_torch.py --system fsdp2-gpu,fsdp2,gemini --size 7b
SPDX-License-Identifier: Apache-2.0
"""

import argparse
import contextlib
import ctypes
import datetime
import faulthandler
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time

import weights

BEGAN = time.perf_counter()

SIZES = {  # width, width of the MLP, blocks, heads, heads for keys and values
    "tiny": (64, 160, 3, 4, 4),
    "grouped": (64, 160, 3, 4, 2),
    "125m": (768, 2048, 12, 12, 12),
    "0.5b": (1024, 2752, 40, 8, 8),
    "1.3b": (2048, 5504, 24, 16, 16),
    "1.5b": (2048, 5504, 27, 16, 16),
    "3b": (3200, 8640, 26, 32, 32),
    "7b": (4096, 11008, 32, 32, 32),
    "13b": (5120, 13824, 40, 40, 40),
    "30b": (6656, 17920, 60, 52, 52),
    "70b": (8192, 28672, 80, 64, 8),
    # A thousandth of the parameters in as many blocks: with a thousandth of each budget, and of the activations by
    # texts of 32 tokens in the place of 1024, what fits and what moves is as with the large one.
    "7b-small": (128, 344, 32, 4, 4),
    "13b-small": (160, 432, 40, 5, 5),
    "30b-small": (208, 560, 60, 4, 4),
    "70b-small": (256, 896, 80, 8, 1),
}

STEPS = {
    "gpu": (2, 5),
    "fsdp2": (1, 3),
    "fsdp2-gpu": (2, 5),
    "gemini": (13, 7),  # by then a plan that is tried after eight has been compared with the one before it
}  # before those that are timed, and these
RANK, RANKS, LOCAL_RANK = (
    int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
)

arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
arguments.add_argument("--size", default="1.3b,3b,7b", help="of " + ", ".join(SIZES) + "; several with commas")
arguments.add_argument("--system", default="gpu,fsdp2,gemini", help="of " + ", ".join(STEPS) + "; several with commas")
arguments.add_argument("--batch", type=int, default=16, help="of each process")
arguments.add_argument("--seq", type=int, default=1024)
arguments.add_argument("--accumulate", type=int, default=1, help="micro-batches of that size in a step")
arguments.add_argument("--vocabulary", type=int, default=32000)
arguments.add_argument("--steps", type=int, default=None, help="that are timed")
arguments.add_argument("--warmup", type=int, default=None, help="steps before those")
arguments.add_argument("--text", default=None, help="a file whose bytes are the tokens, in the place of random ones")
arguments.add_argument("--lr", type=float, default=1e-4)
arguments.add_argument("--clip", type=float, default=0.0, help="global norm of gradients; 0: no clipping")
arguments.add_argument("--device-mem", default="24GiB", help="of gemini and fsdp2")
arguments.add_argument("--host-mem", default=None, help="of gemini; left out: 16 bytes a parameter and 2 GiB")
arguments.add_argument("--file", default=None, help="of gemini: directory of the file tier")
arguments.add_argument("--file-mem", default="0")
arguments.add_argument("--placement", default="auto")
arguments.add_argument("--allocator", default="pool", choices=["pool", "process", "torch"], help="of gemini")
arguments.add_argument("--chunk-size", default="0", help="bytes of a chunk; 0: searched")
arguments.add_argument("--device", default=None, help="cpu: the simulated device")
arguments.add_argument(
    "--tile",
    action="store_true",
    help="weights repeat 16 million random numbers: as many as parameters take minutes for large sizes",
)
arguments.add_argument(
    "--folder", default=None, help="of gemini: its weights are read from there, and written there first if need be"
)
arguments.add_argument("--update-threads", type=int, default=0, help="of gemini: as of gm.init()")
arguments.add_argument("--bucket-size", default="0", help="of gemini: as of gm.init()")
arguments.add_argument("--timeline", default=None, help="of gemini (rank 0), the last step, to this file")
arguments.add_argument("--trace", default=None, help="of gemini, saved to this file")
arguments.add_argument("--hf", action="store_true", help="the module of transformers in the place of the one below")
arguments.add_argument(
    "--offload-activations",
    action="store_true",
    help="gemini: what blocks keep for the backward pass may leave the GPU",
)
arguments.add_argument(
    "--loss-pieces",
    type=int,
    default=1,
    help="pieces of a text whose logits are computed one after another, and again in the backward pass",
)
arguments.add_argument("--units", default="auto", help="of gemini: whether a block's parameters are acquired together")
arguments.add_argument("--step-at-end", action="store_true", help="gemini: no updates within the backward pass")
arguments.add_argument("--no-speculation", action="store_true", help="gemini: nor ahead of the step")
arguments.add_argument(
    "--repeatable", action="store_true", help="kernels that add in one order: the same losses in each run"
)
arguments.add_argument("--states", default="fp32", help="of gemini, several with commas: as of gm.prepare()")
arguments.add_argument("--masters", default="fp32", help="likewise")
arguments.add_argument("--explain", action="store_true")
arguments.add_argument("--zero", default="auto", choices=["1", "2", "3", "auto"], help="gemini on several processes")
arguments.add_argument("--rank-order", action="store_true", help="gemini on several GPUs: sums in the order of ranks")
arguments.add_argument("--register-frames", action="store_true", help="gemini on GPUs: gather into registered memory")
arguments.add_argument("--deadline", type=float, default=0, help="seconds that gemini waits for another process")
arguments.add_argument(
    "--limit", type=int, default=1200, help="seconds after which a process that hangs ends; 0: never"
)
arguments.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
options = arguments.parse_args()


def count(size):
    """Parameters of a size."""
    width, inner, blocks, heads, pairs = SIZES[size]
    attention = 2 * width * width + 2 * width * (width // heads * pairs)
    return (attention + 3 * width * inner + 2 * width) * blocks + 2 * options.vocabulary * width + width


def host_peak():
    """The most bytes that were resident of this process. getrusage() counts the one that started it, too."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))


def write_weights(folder):
    """Writes the model's weights into a folder unless they are there."""
    if weights.is_written(folder):
        return
    import torch

    with torch.device("meta"):
        model = build(torch, torch.bfloat16)
    weights.write(torch, folder, model.named_parameters())


def variant(states, masters):
    """What a case is called behind its size."""
    return "" if (states, masters) == ("fp32", "fp32") else f" {states} {masters}"


def means(losses):
    """The mean loss of each tenth of a run."""
    ends = [len(losses) * i // 10 for i in range(11)]
    return [round(statistics.mean(losses[begin:end]), 4) for begin, end in zip(ends, ends[1:]) if end > begin]


def compared(row, first):
    """The row of one pair of states and masters beside the first pair's."""
    out = {key: row[key] for key in ("bench", "case", "value", "unit", "bytes_per_param", "host_bytes_per_param")}
    out |= {"against": first["case"], "ratio": first["value"] / row["value"]}
    out |= {"bytes_ratio": row["bytes_per_param"] / first["bytes_per_param"]}
    out |= {"mean_losses": means(row["losses"]), "against_mean_losses": means(first["losses"])}
    return out


def build_hf(torch, dtype):
    """The same shapes by transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, inner, blocks, heads, pairs = SIZES[options.size]
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=pairs,
        max_position_embeddings=max(2048, options.seq),
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        use_cache=False,
    )

    class Llama(LlamaForCausalLM):
        def forward(self, ids):
            return super().forward(input_ids=ids, labels=ids).loss

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = Llama(config)
    finally:
        torch.set_default_dtype(before)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def build(torch, dtype):
    """The model; parameters are made on torch's default device, one after another."""
    if options.hf:
        return build_hf(torch, dtype)
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.checkpoint import checkpoint

    width, inner, blocks, heads, pairs = SIZES[options.size]
    tile = torch.empty(1 << 24, dtype=dtype).uniform_(-0.035, 0.035) if options.tile else None

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width, dtype=dtype))

        def forward(self, x):
            return F.rms_norm(x, (width,), self.weight, 1e-6)

    def linear(n, k):
        if tile is None:
            return nn.Linear(n, k, bias=False, dtype=dtype)
        weight = torch.empty(n * k, dtype=dtype)
        for part in weight.split(tile.numel()):
            part.copy_(tile[: part.numel()])
        layer = nn.Linear(n, k, bias=False, dtype=dtype, device="meta")
        layer.weight = nn.Parameter(weight.view(k, n))
        return layer

    def rotate(x, cos, sin):
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm_1, self.norm_2 = Norm(), Norm()
            self.q, self.o = linear(width, width), linear(width, width)
            self.k, self.v = (linear(width, width // heads * pairs) for _ in range(2))
            self.gate, self.up, self.down = linear(width, inner), linear(width, inner), linear(inner, width)

        def forward(self, x, cos, sin):
            y = self.norm_1(x)
            q, k, v = (
                layer(y).unflatten(-1, (-1, width // heads)).transpose(1, 2) for layer in (self.q, self.k, self.v)
            )
            grouped = {"enable_gqa": True} if pairs < heads else {}
            y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, **grouped)
            x = x + self.o(y.transpose(1, 2).flatten(2))
            y = self.norm_2(x)
            return x + self.down(F.silu(self.gate(y)) * self.up(y))

    class Llama(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(options.vocabulary, width, dtype=dtype)
            nn.init.normal_(self.embedding.weight, std=0.02)
            self.blocks = nn.ModuleList(Block() for _ in range(blocks))
            self.norm = Norm()
            self.head = linear(width, options.vocabulary)

        def forward(self, ids):
            x = self.embedding(ids)
            half = width // heads // 2
            angle = torch.arange(ids.shape[1], device=ids.device)[:, None] * 10000.0 ** (
                -torch.arange(half, device=ids.device) / half
            )
            cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
            for block in self.blocks:
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
            x = self.norm(x)
            if options.loss_pieces == 1:
                logits = self.head(x)[:, :-1]
                return F.cross_entropy(logits.reshape(-1, options.vocabulary).float(), ids[:, 1:].reshape(-1))
            targets = ids[:, 1:]
            pieces = zip(x[:, :-1].chunk(options.loss_pieces, 1), targets.chunk(options.loss_pieces, 1))
            losses = [checkpoint(self.sum_losses, *piece, use_reentrant=False) for piece in pieces]
            return sum(losses) / targets.numel()

        def sum_losses(self, x, targets):
            logits = self.head(x)
            return F.cross_entropy(logits.reshape(-1, options.vocabulary).float(), targets.reshape(-1), reduction="sum")

    return Llama()


class MasterAdamw:
    """AdamW over fp32 master copies of bf16 parameters, all on the GPU, by torch's fused kernel."""

    def __init__(self, torch, params):
        self.torch = torch
        self.params = params
        self.masters = [param.detach().float() for param in params]
        self.momenta = [torch.zeros_like(master) for master in self.masters]
        self.variances = [torch.zeros_like(master) for master in self.masters]
        self.steps = [torch.zeros((), device=param.device) for param in params]

    def step(self):
        torch = self.torch
        with torch.no_grad():
            for i in range(0, len(self.params), 9):
                part = slice(i, i + 9)
                gradients = [param.grad.float() for param in self.params[part]]
                for step in self.steps[part]:
                    step += 1
                torch._fused_adamw_(
                    self.masters[part],
                    gradients,
                    self.momenta[part],
                    self.variances[part],
                    [],
                    self.steps[part],
                    lr=options.lr,
                    beta1=0.9,
                    beta2=0.999,
                    weight_decay=0.01,
                    eps=1e-8,
                    amsgrad=False,
                    maximize=False,
                )
                torch._foreach_copy_(self.params[part], self.masters[part])

    def zero_grad(self):
        for param in self.params:
            param.grad = None


def measure():
    """Prints this machine's rates as a row."""
    import torch

    import bounds

    row = {"bench": "llama_torch", "case": "rates", "unit": "1/s"}
    print("ROW " + json.dumps(row | bounds.rates(torch, torch.cuda.is_available() and options.device != "cpu")))


def main():
    import torch

    cuda = torch.cuda.is_available() and options.device != "cpu"
    device = torch.device("cuda", LOCAL_RANK % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda and (options.system != "gemini" or options.allocator != "process"):  # that one must be first to use CUDA
        torch.cuda.set_device(device)
    torch.manual_seed(1)
    if options.system == "gpu" and RANKS > 1:
        sys.exit("llama_torch: system gpu is one process: want fsdp2-gpu under torchrun")
    if options.repeatable:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    begin = time.perf_counter()
    gm = None
    if options.system == "gpu":
        with device:
            model = build(torch, torch.bfloat16)
        optimizer = MasterAdamw(torch, list(model.parameters()))
    elif options.system.startswith("fsdp2"):
        import torch.distributed as dist
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29533")
        offload = options.system == "fsdp2"
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            rank=RANK,
            world_size=RANKS,
            timeout=datetime.timedelta(seconds=options.deadline or 300),
        )
        if cuda and offload:
            import libgemini

            whole = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, libgemini.parse_bytes(options.device_mem) / whole))
        with torch.device("meta"):
            model = build(torch, torch.float32)
        policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)}
        if offload:
            policy["offload_policy"] = CPUOffloadPolicy(pin_memory=cuda)
        for block in model.model.layers if options.hf else model.blocks:
            fully_shard(block, **policy)
        fully_shard(model, **policy)
        model.to_empty(device="cpu" if offload else device)
        tile = torch.empty(1 << 24).uniform_(-0.035, 0.035)
        with torch.no_grad():
            for param in model.parameters():
                local = param.to_local()
                if local.dim() == 1:
                    local.fill_(1)
                else:  # random numbers for all of them take minutes on the CPU; the times do not depend on it
                    flat = local.view(-1)
                    for first in range(0, flat.numel(), tile.numel()):
                        flat[first : first + tile.numel()].copy_(tile[: flat.numel() - first])
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, fused=True)
    else:
        import libgemini.torch as gm

        host = options.host_mem or 16 * count(options.size) // RANKS + (2 << 30)
        init = gm.init(
            options.placement,
            device_memory=options.device_mem,
            host_memory=host,
            file=options.file,
            file_memory=options.file_mem,
            chunk_size=options.chunk_size,
            device=device,
            allocator=options.allocator if cuda else None,
            zero=options.zero if options.zero == "auto" else int(options.zero),
            rank_order=options.rank_order,
            register_frames=options.register_frames,
            deadline=options.deadline,
            speculate=not options.no_speculation,
            units=options.units,
            bucket_size=options.bucket_size,
            update_threads=options.update_threads,
        )
        host_before = host_peak()
        with init:
            with torch.device("meta") if options.folder else contextlib.nullcontext():
                model = build(torch, torch.bfloat16)
            if options.folder:
                gm.load_weights(model, options.folder, verify=False)
        made, host_made = time.perf_counter(), host_peak()
        model, optimizer = gm.prepare(
            model,
            torch.optim.AdamW(model.parameters(), lr=options.lr),
            offload_activations=options.offload_activations,
            step_in_backward=not (options.step_at_end or options.clip or options.accumulate > 1),
            states=options.states,
            masters=options.masters,
        )
        if RANK == 0:
            print(f"made in {made - begin:.1f} s, prepared in {time.perf_counter() - made:.1f} s", file=sys.stderr)
    ranks = gm.session().ranks if gm else None
    params = sum(param.numel() for param in model.parameters())
    assert params == count(options.size)
    warmup, steps = (
        STEPS[options.system][i] if given is None else given for i, given in enumerate((options.warmup, options.steps))
    )
    ready = time.perf_counter() - begin
    generator = torch.Generator().manual_seed(2)
    text = torch.frombuffer(bytearray(open(options.text, "rb").read()), dtype=torch.uint8) if options.text else None
    seconds, losses, before, third = [], [], (0, {}), None
    forward_shares, clipped, work = [], 0, 0  # of timed steps: the forward passes' share; norms over the limit; bytes
    batch = options.batch * options.accumulate  # of this process in a step
    begin = time.perf_counter()
    for step in range(warmup + steps):
        if text is None:
            ids = torch.randint(0, options.vocabulary, (RANKS * batch, options.seq), generator=generator)
        else:
            starts = torch.randint(0, len(text) - options.seq, (RANKS * batch,), generator=generator)
            ids = torch.stack([text[start : start + options.seq] for start in starts]).long()
        ids = ids[RANK * batch : (RANK + 1) * batch].to(device)
        if gm and step == warmup:
            before = gm.stats()["stall_ns"], gm.session().manager.group_stats(ranks.group) if ranks else {}
        if gm and options.timeline and not RANK and step == warmup + steps - 1:
            gm.session().lib.timeline_start(gm.session().handle, options.timeline.encode())
        measured = cuda and options.system == "gpu" and step >= warmup
        if measured:
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated() + 2 * params  # and the gradients
            events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        times, total = [0.0, 0.0], 0  # in calls of the forward and of the backward passes
        for part in ids.split(options.batch):
            called = time.perf_counter()
            if measured:
                events[0].record()
            loss = model(part) / options.accumulate
            if measured:
                events[1].record()
            times[0] += time.perf_counter() - called
            loss.backward()
            times[1] += time.perf_counter() - called
            total = total + loss.detach()
        times[1] -= times[0]
        backward = time.perf_counter()
        if measured:
            events[2].record()
            work = max(work, torch.cuda.max_memory_allocated() - held)
        if options.clip:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        optimizer.zero_grad()
        stepped = time.perf_counter()
        losses.append(total.item())
        # From one step's end to the next: what a step leaves to be done beside the next one is part of that.
        seconds.append(time.perf_counter() - begin)
        begin += seconds[-1]
        if options.clip and step >= warmup:
            clipped += float(norm) > options.clip
        if step == 2:
            third = time.perf_counter() - BEGAN
        if measured:
            forward = events[0].elapsed_time(events[1])
            forward_shares.append(forward / (forward + events[1].elapsed_time(events[2])))
        if RANK == 0:
            print(
                f"step {step}: {seconds[-1]:.3f} s (calls: forward {times[0]:.3f}, "
                f"backward {times[1]:.3f}, update {stepped - backward:.3f}), loss {losses[-1]:.4f}",
                file=sys.stderr,
                flush=True,
            )
    value = statistics.median(seconds[warmup:])
    row = {
        "bench": "llama_torch",
        "case": f"{options.system} {options.size}" + variant(options.states, options.masters),
        "params": params,
        "value": value,
        "unit": "s",
        "ranks": RANKS,
        "tokens_per_second": RANKS * batch * options.seq / value,
        "seconds": [round(s, 4) for s in seconds],
        "losses": losses,
        "ready_seconds": round(ready, 1),
        "third_step_seconds": third and round(third, 1),  # from the script's begin to that step's end
        "host_peak_bytes": host_peak(),
    }
    if gm:
        if options.timeline and not RANK:
            gm.session().lib.timeline_stop(gm.session().handle)
        if options.trace:
            gm.session().lib.trace_save(gm.session().handle, options.trace.encode())
        stats = gm.stats()
        row.update(
            states=options.states,
            masters=options.masters,
            # Parameters, gradients and states, and the most that lay on the host, padding included.
            bytes_per_param=stats["model_bytes"] / params,
            host_bytes_per_param=stats["peak_bytes"]["host"] / params,
            device_budget=stats["budget_bytes"]["device"],
            device_peak=stats["peak_bytes"]["device"],
            host_peak=stats["peak_bytes"]["host"],
            file_peak=stats["peak_bytes"]["file"],
            predicted_sec_per_step=stats["predicted_step_ns"] / 1e9,
            measured_sec_per_step=stats["measured_step_ns"] / 1e9,
            chunk_bytes=stats["chunk_bytes"],
            departures=stats["departures"],
            plans=stats["plans"],
            op_peak_error_bytes=stats["op_peak_error_bytes"],
            stall_seconds=stats["stall_ns"] / 1e9,
            # Of the timed steps: the share in which operators waited for chunks, among them those to be gathered.
            stall_share=(stats["stall_ns"] - before[0]) / 1e9 / sum(seconds[warmup:]),
            speculated_elements=stats["speculated_elements"],
            committed_elements=stats["committed_elements"],
            dropped_elements=stats["dropped_elements"],
        )
        # Of all processes together: resident before the session, at most until the model was made, and in all.
        mine = [value.to_bytes(8, "little") for value in (host_before, host_made, row["host_peak_bytes"])]
        theirs = ranks.exchange(b"".join(mine)) if ranks else [b"".join(mine)]
        for i, name in enumerate(("host_before_bytes", "host_made_bytes", "host_all_peak_bytes")):
            row[name] = sum(int.from_bytes(one[8 * i : 8 * i + 8], "little") for one in theirs)
        if ranks:  # bytes of this rank in a timed step
            group = gm.session().manager.group_stats(ranks.group)
            for name in ("gathered_bytes", "reduced_bytes", "fetched_bytes", "stored_bytes"):
                row[name] = (group[name] - before[1][name]) // steps
            row["planned_gathered_bytes"], row["zero"] = group["planned_gathered_bytes"], options.zero
            for name in ("gather_wait", "sum_wait"):  # parts of stall_share, of each rank: the slowest waits least
                theirs = ranks.exchange((group[f"{name}_ns"] - before[1][f"{name}_ns"]).to_bytes(8, "little"))
                shares = [int.from_bytes(one, "little") / 1e9 / sum(seconds[warmup:]) for one in theirs]
                row[f"{name}_share"], row[f"{name}_shares"] = shares[RANK], shares
        if options.explain:
            print(gm.explain(), file=sys.stderr)
            print(json.dumps(stats), file=sys.stderr)
    elif cuda:
        row["device_peak"] = torch.cuda.max_memory_reserved()
    if options.clip:
        row["clipped_steps"] = clipped
    if forward_shares:
        row.update(work_bytes=work, forward_share=statistics.median(forward_shares))
    if RANK == 0:
        print("ROW " + json.dumps(row), flush=True)
    if gm:
        if ranks:
            ranks.meet()  # no rank leaves while others need it
        del model, optimizer, loss
        gm.close(force=True)
    if options.system.startswith("fsdp2"):
        dist.destroy_process_group()


if __name__ == "__main__":
    if options.one:
        if RANKS > 1:
            with contextlib.suppress(OSError):
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: torchrun ends the parent only
            if options.limit:
                faulthandler.dump_traceback_later(options.limit, exit=True)
        measure() if options.system == "rates" else main()
        sys.exit(0)
    if options.folder and options.size not in SIZES:
        print(f"llama_torch: --folder holds one model: want one size, not {options.size}", file=sys.stderr)
        sys.exit(2)
    if options.folder and RANK == 0:
        write_weights(pathlib.Path(options.folder))
    while options.folder and not weights.is_written(pathlib.Path(options.folder)):
        time.sleep(0.1)
    failed, number = False, 0
    for size in options.size.split(","):
        rows = {}
        pairs = [(states, masters) for states in options.states.split(",") for masters in options.masters.split(",")]
        runs = [
            (system, *pair)
            for system in options.system.split(",")
            for pair in (pairs if system == "gemini" else pairs[:1])
        ]
        for system, states, masters in runs:
            if size not in SIZES or system not in STEPS:
                print(
                    f"llama_torch: {size} {system}: want sizes of {', '.join(SIZES)}, systems of {', '.join(STEPS)}",
                    file=sys.stderr,
                )
                sys.exit(2)
            argv = [sys.executable, __file__, *sys.argv[1:], "--one", "--size", size, "--system", system]
            argv += ["--states", states, "--masters", masters]
            environment = dict(os.environ)
            if RANKS > 1:  # each run meets at a port of its own
                number += 1
                environment["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + number)
                environment["TORCHELASTIC_USE_AGENT_STORE"] = "False"
            done = subprocess.run(argv, check=False, stdout=subprocess.PIPE, text=True, env=environment)
            print(done.stdout, end="", flush=True)
            failed |= done.returncode != 0
            if failed and RANKS > 1:
                sys.exit(f"llama_torch: rank {RANK}: {size} {system} failed (exit status {done.returncode})")
            for line in done.stdout.splitlines():
                if line.startswith("ROW ") and system in rows:
                    print("ROW " + json.dumps(compared(json.loads(line[4:]), rows[system])), flush=True)
                elif line.startswith("ROW "):
                    rows[system] = json.loads(line[4:])
        if "gemini" not in rows:
            continue
        row = {"bench": "llama_torch", "case": rows["gemini"]["case"], "value": rows["gemini"]["value"], "unit": "s"}
        for against in set(rows) & {"gpu", "fsdp2", "fsdp2-gpu"}:
            ratio = rows[against]["value"] / row["value"]
            print("ROW " + json.dumps(row | {"against": against, "ratio": ratio}), flush=True)
        # The bound counts the bytes of fp32 states.
        if "work_bytes" in rows.get("gpu", {}) and not options.file and pairs[0] == ("fp32", "fp32"):
            import bounds

            argv = [sys.executable, __file__, *sys.argv[1:], "--one", "--system", "rates"]
            done = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True)
            print(done.stdout, end="", flush=True)
            seconds, binds = bounds.bound(
                json.loads(done.stdout.splitlines()[-1][4:]),
                rows["gpu"],
                rows["gpu"]["params"],
                rows["gemini"]["device_budget"],
                options.accumulate,
                rows["gemini"].get("clipped_steps", 0) > 0,
            )
            row |= {"against": "bound", "ratio": seconds / row["value"], "bound_seconds": seconds, "binds": binds}
            print("ROW " + json.dumps(row), flush=True)
    sys.exit(1 if failed else 0)
