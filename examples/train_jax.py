#!/usr/bin/env python3
"""Trains a small GPT in JAX, within 30 % of the device memory that its model data takes, and compares with plain JAX.

    python examples/train_jax.py            # JAX on CPUs: the device is the simulated one
    python examples/train_jax.py --cuda     # JAX on a GPU: pip install 'jax[cuda12]'

Model data are parameters, gradients and both moments of AdamW: 16 bytes a parameter. The first quarter of the steps
warms the learning rate up. SPDX-License-Identifier: Apache-2.0
"""

import argparse
import os
import sys
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else JAX takes three quarters of the GPU for itself

import jax
import jax.numpy as jnp
import numpy as np

import libgemini.jax
from libgemini import Manager, parse_bytes


# ---- the model: functions of one layer's parameters
def normal(random, *shape):
    return random.normal(0, 0.02, shape).astype(np.float32)


def init_embedding(random, args):
    return {"tokens": normal(random, args.vocabulary, args.width), "places": normal(random, args.length, args.width)}


def init_block(random, args):
    width = args.width
    return {
        "norm1": np.ones(width, np.float32),
        "qkv": normal(random, width, 3 * width),
        "out": normal(random, width, width),
        "norm2": np.ones(width, np.float32),
        "up": normal(random, width, 4 * width),
        "down": normal(random, 4 * width, width),
    }


def init_head(random, args):
    return {"norm": np.ones(args.width, np.float32), "out": normal(random, args.width, args.vocabulary)}


def rms_norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def embed(params, tokens):
    return params["tokens"][tokens] + params["places"]


def block(params, x):
    batch, length, width = x.shape
    heads = max(1, width // 64)
    qkv = rms_norm(x, params["norm1"]) @ params["qkv"]
    q, k, v = (part.reshape(batch, length, heads, -1) for part in jnp.split(qkv, 3, axis=-1))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(width // heads)
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e30)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape)
    x = x + mixed @ params["out"]
    return x + jax.nn.gelu(rms_norm(x, params["norm2"]) @ params["up"]) @ params["down"]


def head(params, x, targets):
    logits = jax.nn.log_softmax(rms_norm(x, params["norm"]) @ params["out"])
    return -jnp.take_along_axis(logits, targets[..., None], -1).mean()


# ---- data and learning rate, the same for both
def batch_of(args):
    """Runs of numbers that go up by one, the same in each step, so that the loss falls."""
    start = np.random.default_rng(1).integers(args.vocabulary, size=(args.batch, 1))
    tokens = (start + np.arange(args.length + 1)) % args.vocabulary
    return tokens[:, :-1].astype(np.int32), tokens[:, 1:].astype(np.int32)


def learning_rate(args, step):
    return args.learning_rate * min(1.0, 4 * step / args.steps)


# ---- with the library
def train_managed(args, budget, total):
    random, losses = np.random.default_rng(0), []
    options = {"chunk_size": args.chunk_size, "placement": args.placement, "cuda": args.cuda}
    with Manager(device_memory=budget, host_memory=total + total // 4 + (64 << 20), **options) as manager:
        layers = libgemini.jax.Layers(manager)
        layers.add("embedding", init_embedding(random, args))
        names = [f"block {number}" for number in range(args.layers)]
        for name in names:
            layers.add(name, init_block(random, args))
        layers.add("head", init_head(random, args))
        tokens, targets = batch_of(args)
        start = time.perf_counter()
        for step in range(1, args.steps + 1):
            with manager.iteration():
                inputs = [layers.call("embedding", embed, tokens)]
                for name in names:
                    inputs.append(layers.call(name, block, inputs[-1]))
                loss, (cotangent, _) = layers.vjp("head", head, 1.0, inputs.pop(), targets)
                for name in reversed(names):
                    _, (cotangent,) = layers.vjp(name, block, cotangent, inputs.pop())
                layers.vjp("embedding", embed, cotangent, tokens)
                layers.adamw(step, lr=learning_rate(args, step))
            losses.append(float(loss))
            if step == 2:  # the first two compile and plan
                start = time.perf_counter()
        seconds = (time.perf_counter() - start) / max(1, args.steps - 2)
        manager.update_wait()
        stats = manager.stats()
        print(
            f"libgemini: {stats['model_bytes']} bytes of model data, at most {stats['peak_bytes']['device']} of "
            f"{budget} bytes on the device, {stats['planned_iterations']} of {stats['iterations']} steps under a plan, "
            f"{seconds:.4f} s a step"
        )
    return losses


# ---- in plain JAX
def train_plain(args):
    random = np.random.default_rng(0)
    params = [init_embedding(random, args)]
    params += [init_block(random, args) for _ in range(args.layers)]
    params += [init_head(random, args)]
    params = jax.tree.map(jnp.asarray, params)
    momentum = jax.tree.map(jnp.zeros_like, params)
    variance = jax.tree.map(jnp.zeros_like, params)

    def loss_of(params, tokens, targets):
        x = embed(params[0], tokens)
        for one in params[1:-1]:
            x = block(one, x)
        return head(params[-1], x, targets)

    @jax.jit
    def train(params, momentum, variance, rates, tokens, targets):
        loss, grads = jax.value_and_grad(loss_of)(params, tokens, targets)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, momentum, grads)
        variance = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, variance, grads)
        rate, first, second = rates

        def update(p, m, v):
            return p * (1 - rate * 0.01) - rate * (m / first) / (jnp.sqrt(v / second) + 1e-8)

        return loss, jax.tree.map(update, params, momentum, variance), momentum, variance

    losses, start = [], time.perf_counter()
    for step in range(1, args.steps + 1):
        rates = np.float32([learning_rate(args, step), 1 - 0.9**step, 1 - 0.999**step])
        loss, params, momentum, variance = train(params, momentum, variance, rates, *batch_of(args))
        losses.append(float(loss))
        if step == 2:
            start = time.perf_counter()
    print(f"plain JAX: {(time.perf_counter() - start) / max(1, args.steps - 2):.4f} s a step")
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument(
        "--width", type=int, default=None, help="128, with --cuda 512: a GPU's chunks have 2 MiB at least"
    )
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--device-memory", default="30%", help="a share of the model data, or a size such as 8GiB")
    parser.add_argument("--chunk-size", default="0", help="0: the library chooses")
    parser.add_argument("--cuda", action="store_true", help="a GPU; otherwise the simulated device")
    parser.add_argument("--placement", default="auto", help="auto, cuda or cpu")
    parser.add_argument("--no-compare", action="store_true", help="do not train in plain JAX, too")
    parser.add_argument("--tolerance", type=float, default=1e-6, help="of losses, relative")
    args = parser.parse_args()
    if args.width is None:
        args.width = 512 if args.cuda else 128
    if not args.cuda:
        jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")  # GPUs would round products to 11 bits

    width, vocabulary = args.width, args.vocabulary
    count = args.layers * (12 * width * width + 2 * width) + (2 * vocabulary + args.length + 1) * width
    total = 16 * count
    share = args.device_memory
    budget = int(total * float(share[:-1]) / 100) if share.endswith("%") else parse_bytes(share)
    print(f"{count} parameters, {total} bytes of model data, {budget} bytes of device memory ({budget / total:.1%})")

    losses = train_managed(args, budget, total)
    print("losses:", *(f"{loss:.7f}" for loss in losses))
    if args.no_compare:
        return 0
    plain = train_plain(args)
    print("plain: ", *(f"{loss:.7f}" for loss in plain))
    worst = max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(losses, plain))
    print(f"largest relative difference: {worst:.2e} (at most {args.tolerance:.0e})")
    return 0 if worst <= args.tolerance and losses[-1] < losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
