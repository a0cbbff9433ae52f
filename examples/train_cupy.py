#!/usr/bin/env python3
"""Trains layers in CuPy on a GPU, within 30 % of the memory that their data take, and compares with plain CuPy.

    python examples/train_cupy.py    # pip install cupy-cuda12x
    python examples/train_cupy.py --layers 48 --width 8192 --device-memory 12GiB --no-compare    # 48 GiB of model data

Weights, gradients and AdamW's moments are in arenas: 16 bytes a parameter. Activations are CuPy's arrays, out of the
same budget. SPDX-License-Identifier: Apache-2.0
"""

import argparse
import sys
import time

import cupy
import numpy as np

import libgemini.cupy
from libgemini import Manager, parse_bytes


def first_weight(args, layer):
    random = np.random.default_rng(layer)
    return random.standard_normal((args.width, args.width), np.float32) / np.float32(np.sqrt(args.width))


def batch_of(args):
    """The same in each step, so that the loss falls."""
    random = np.random.default_rng(1000)
    x = random.standard_normal((args.batch, args.width), np.float32)
    return cupy.asarray(x), cupy.asarray(np.tanh(x[:, ::-1]))


def forward(weight, x):
    return cupy.tanh(x @ weight)


def backward(weight, x, upper):
    """The gradients of the weight and of x."""
    inner = upper * (1 - cupy.square(cupy.tanh(x @ weight)))
    return x.T @ inner, inner @ weight.T


def loss_of(args, difference):
    return cupy.square(difference).sum() / args.batch, difference * np.float32(2 / args.batch)


def train_plain(args):
    weights, losses = [cupy.asarray(first_weight(args, layer)) for layer in range(args.layers)], []
    moments = [(cupy.zeros_like(weight), cupy.zeros_like(weight)) for weight in weights]
    x, wanted = batch_of(args)
    for step in range(1, args.steps + 1):
        inputs = [x]
        for weight in weights:
            inputs.append(forward(weight, inputs[-1]))
        loss, upper = loss_of(args, inputs.pop() - wanted)
        losses.append(loss)
        for weight, (momentum, variance) in zip(reversed(weights), reversed(moments)):
            grad, upper = backward(weight, inputs.pop(), upper)
            momentum += np.float32(0.1) * (grad - momentum)
            variance += np.float32(0.001) * (grad * grad - variance)
            size = cupy.sqrt(variance / np.float32(1 - 0.999**step)) + np.float32(1e-8)
            weight *= np.float32(1 - args.learning_rate * 0.01)
            weight -= np.float32(args.learning_rate / (1 - 0.9**step)) * momentum / size
    return [float(loss) for loss in losses]


def train_managed(args, budget, total):
    shape, losses = (args.width, args.width), []
    host = total + total // 4 + (64 << 20)
    # use() has CuPy allocate from the budget.
    options = {"device_memory": budget, "host_memory": host, "placement": args.placement}
    with Manager(cuda=True, **options) as manager, libgemini.cupy.use(manager):
        stream = libgemini.cupy.stream(manager)
        weights = manager.arena("param", element_bytes=4)
        layers = [manager.tensor(weights, f"layer {layer}", 4 * args.width**2) for layer in range(args.layers)]
        arenas = {kind: manager.arena(kind, element_bytes=4, like=weights) for kind in ("grad", "momentum", "variance")}

        def array(one):  # over the bytes of an acquired range
            return libgemini.cupy.array(one, "float32", shape)

        for number, layer in enumerate(layers):
            with manager.acquired(one := manager.range(layer, "write", tier="host")):
                np.asarray(one.view("float32", shape))[:] = first_weight(args, number)
        start = time.perf_counter()
        x, wanted = batch_of(args)
        for step in range(1, args.steps + 1):
            with manager.iteration():
                inputs = [x]
                for layer in layers:
                    weight = manager.range(layer, "read")
                    with manager.operator("forward", stream), manager.acquired(weight, stream=stream):
                        inputs.append(forward(array(weight), inputs[-1]))
                loss, upper = loss_of(args, inputs.pop() - wanted)
                losses.append(loss)
                for layer in reversed(layers):
                    weight = manager.range(layer, "read")
                    grad = manager.range(manager.tensor_counterpart(layer, arenas["grad"]), "write")
                    with manager.operator("backward", stream), manager.acquired(weight, grad, stream=stream):
                        array(grad)[...], upper = backward(array(weight), inputs.pop(), upper)
                manager.adamw(step=step, master=weights, **arenas, lr=args.learning_rate, late=True, stream=stream)
            if step == 2:  # the first two load kernels and plan
                losses[-1].item()
                start = time.perf_counter()
        manager.update_wait()
        losses = [float(loss) for loss in losses]
        seconds = (time.perf_counter() - start) / max(1, args.steps - 2)
        stats = manager.stats()
        print(
            f"libgemini: {stats['model_bytes']} bytes of model data, at most {stats['peak_bytes']['device']} of "
            f"{budget} bytes on the device, {stats['nonmodel_peak_bytes']} of them CuPy's, "
            f"{stats['planned_iterations']} of {stats['iterations']} steps under a plan, {seconds:.4f} s a step"
        )
        del x, wanted, inputs, upper, loss  # CuPy's arrays do not outlive the manager
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--device-memory", default="30%", help="a share of the model data, or a size such as 8GiB")
    parser.add_argument("--placement", default="auto", help="auto, cuda or cpu")
    parser.add_argument("--no-compare", action="store_true", help="do not train in plain CuPy, too")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="of losses, relative")
    args = parser.parse_args()
    total = 16 * args.layers * args.width**2  # weights, gradients, two moments
    share = args.device_memory
    budget = int(total * float(share[:-1]) / 100) if share.endswith("%") else parse_bytes(share)
    losses = train_managed(args, budget, total)
    print("losses:", *(f"{loss:.6f}" for loss in losses))
    if args.no_compare:
        return 0
    start = time.perf_counter()
    plain = train_plain(args)
    print("plain: ", *(f"{loss:.6f}" for loss in plain), f"({(time.perf_counter() - start) / args.steps:.4f} s a step)")
    worst = max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(losses, plain))
    print(f"largest relative difference: {worst:.2e} (at most {args.tolerance:.0e})")
    return 0 if worst <= args.tolerance and losses[-1] < losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
