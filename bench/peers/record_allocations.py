#!/usr/bin/env python3
"""Records what a GPT's training allocates beside its parameters, as PyTorch does it: bench/data/gpt_1.3b.trace.

SPDX-License-Identifier: Apache-2.0

Nothing is computed: under FakeTensorMode tensors have shapes and storages with sizes, but no bytes. Every storage that
an operator makes is an allocation, from then until Python and autograd have let go of it. What an operator allocates
and frees inside itself is not seen. Gradients of parameters are copied into chunks and cleared as soon as they are
complete, as docs/hook.md describes. Sequences differ in length from step to step, and a step without gradients comes in
between.

Needs torch only (any build); prints what PyTorch's own caching allocator would reserve for it by its rules.
"""

import argparse
import sys
import weakref

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.events = []  # ("a", id, size) and ("f", id)
        self.spare = []  # ids that are free again
        self.ids = 0
        self.known = {}  # address of a storage: its size

    def ignore(self, tensor):
        self.known[tensor.untyped_storage()._cdata] = 0

    def _freed(self, address, number):
        del self.known[address]
        self.events.append(("f", number))
        self.spare.append(number)

    def _made(self, tensor):
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self.known or not storage.nbytes():
            return
        if self.spare:
            number = self.spare.pop()
        else:
            number = self.ids
            self.ids += 1
        self.known[address] = storage.nbytes()
        self.events.append(("a", number, storage.nbytes()))
        weakref.finalize(storage, self._freed, address, number)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._made(leaf)
        return out


class Block(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (
            t.reshape(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(self.ln1(x)).split(width, dim=2)
        )
        scores = (q @ k.transpose(2, 3)) * (width // self.heads) ** -0.5
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        y = F.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1) @ v
        x = x + F.dropout(self.out(y.transpose(1, 2).reshape(batch, length, width)), 0.1, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.ln2(x)))), 0.1, self.training)


class GPT(torch.nn.Module):
    def __init__(self, layers, width, heads, context, words):
        super().__init__()
        self.words, self.places = torch.nn.Embedding(words, width), torch.nn.Embedding(context, width)
        self.blocks = torch.nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln = torch.nn.LayerNorm(width)

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.ln(x), self.words.weight)


def record(options):
    recorder = Recorder()
    torch.set_default_dtype(torch.half)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = GPT(options.layers, options.width, options.heads, options.context, options.words)
        for p in model.parameters():
            recorder.ignore(p)
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        with recorder:
            for step, length in enumerate(options.lengths):
                training = step % 4 != 3
                model.train(training)
                tokens = torch.zeros(options.batch, length + 1, dtype=torch.int64)
                with torch.set_grad_enabled(training):
                    logits = model(tokens[:, :-1])
                    loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
                if training:
                    loss.backward()
                del logits, loss, tokens
    return recorder.events


class TorchRules:
    """PyTorch's caching allocator (c10/cuda/CUDACachingAllocator.cpp), its rules for sizes only, on one stream."""

    MIB = 1 << 20

    def __init__(self):
        self.reserved = 0
        self.free = {True: [], False: []}  # small, large: blocks; a block is a list [size, is_free, before, after]
        self.live = {}

    def alloc(self, number, asked):
        size = max(512, (asked + 511) // 512 * 512)
        small = size <= self.MIB
        fits = [b for b in self.free[small] if b[0] >= size]
        if fits:
            block = min(fits, key=lambda b: b[0])
            self._take(small, block)
        else:
            total = (
                2 * self.MIB
                if small
                else 20 * self.MIB
                if size < 10 * self.MIB
                else -(-size // (2 * self.MIB)) * 2 * self.MIB
            )
            self.reserved += total
            block = [total, False, None, None]
        rest = block[0] - size
        if rest >= 512 if small else rest > self.MIB:
            other = [rest, True, block, block[3]]
            if block[3]:
                block[3][2] = other
            block[3] = other
            block[0] = size
            self.free[small].append(other)
        self.live[number] = (small, block)

    def _take(self, small, block):
        self.free[small] = [b for b in self.free[small] if b is not block]
        block[1] = False

    def free_block(self, number):
        small, block = self.live.pop(number)
        for other in (block[2], block[3]):
            if not other or not other[1]:
                continue
            self._take(small, other)
            if other is block[2]:
                other[0] += block[0]
                other[3] = block[3]
                if block[3]:
                    block[3][2] = other
                block = other
            else:
                block[0] += other[0]
                block[3] = other[3]
                if other[3]:
                    other[3][2] = block
        block[1] = True
        self.free[small].append(block)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--words", type=int, default=50257)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument(
        "--lengths",
        type=lambda s: [int(x) for x in s.split(",")],
        default=[1024, 1024, 896, 1024, 640, 1000, 768],
        help="of sequences, one a step",
    )
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    events = record(options)
    live = peak = 0
    sizes, rules = {}, TorchRules()
    for event in events:
        if event[0] == "a":
            sizes[event[1]] = event[2]
            live += event[2]
            peak = max(peak, live)
            rules.alloc(event[1], event[2])
        else:
            live -= sizes.pop(event[1])
            rules.free_block(event[1])
    with open(options.out, "w", encoding="ascii") as out:
        out.write(
            "# Allocations of a GPT's training beside its parameters: record_allocations.py, "
            f"torch {torch.__version__}\n"
            f"# {options.layers} layers of width {options.width}, {options.heads} heads, {options.words} words, batch "
            f"{options.batch}, lengths {options.lengths}, half precision, each fourth step without gradients\n"
            f"# a ID BYTES allocates, f ID frees. What PyTorch's caching allocator would reserve for it by its rules:\n"
            f"# reserved {rules.reserved}\n"
        )
        for event in events:
            out.write(" ".join(str(x) for x in event) + "\n")
    print(
        f"{len(events)} events, {peak} bytes live at most, {live} left; PyTorch's rules reserve {rules.reserved}, "
        f"{rules.reserved / peak:.4f} of that"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
