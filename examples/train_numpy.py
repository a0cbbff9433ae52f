#!/usr/bin/env python3
"""Trains layers in NumPy, within 30 % of the device memory that their data take, and compares with plain NumPy.

The device is the simulated one: a part of host memory that is exactly as large as its budget. Both ways give the same
bits. Needs numpy only. SPDX-License-Identifier: Apache-2.0
"""

import argparse
import sys

import numpy as np

from libgemini import Manager

BATCH = 16


def first_weight(args, layer):
    random = np.random.default_rng(layer)
    return random.standard_normal((args.width, args.width), np.float32) / np.float32(np.sqrt(args.width))


def batch_of(args, step):
    random = np.random.default_rng(1000 + step)
    x = random.standard_normal((BATCH, args.width), np.float32)
    return x, np.tanh(x[:, ::-1])


def forward(weight, x):
    return np.tanh(x @ weight)


def backward(weight, x, upper):
    """The gradients of the weight and of x."""
    inner = upper * (1 - np.square(np.tanh(x @ weight)))
    return x.T @ inner, inner @ weight.T


def update(weight, grad, momentum):
    """SGD with momentum, in place and element by element, so that parts give the same bits as the whole."""
    momentum *= np.float32(0.9)
    momentum += grad
    weight -= np.float32(0.002) * momentum


def train_plain(args):
    weights, losses = [first_weight(args, layer) for layer in range(args.layers)], []
    momentums = [np.zeros_like(weight) for weight in weights]
    for step in range(args.steps):
        x, wanted = batch_of(args, step)
        inputs = [x]
        for weight in weights:
            inputs.append(forward(weight, inputs[-1]))
        difference = inputs.pop() - wanted
        losses.append(float(np.square(difference).sum() / BATCH))
        upper, grads = difference * np.float32(2 / BATCH), []
        for weight in reversed(weights):
            grad, upper = backward(weight, inputs.pop(), upper)
            grads.insert(0, grad)
        for state in zip(weights, grads, momentums):
            update(*state)
    return losses, weights


def train_managed(args, budget, total):
    shape, bytes_of_layer, losses = (args.width, args.width), 4 * args.width**2, []
    with Manager(device_memory=budget, host_memory=2 * total + (4 << 20), chunk_size="64KiB") as manager:
        weights = manager.arena("param", element_bytes=4)
        layers = [manager.tensor(weights, f"layer {layer}", bytes_of_layer) for layer in range(args.layers)]
        grads = manager.arena("grad", element_bytes=4, like=weights)
        momentums = manager.arena("momentum", element_bytes=4, like=weights)

        def array(one):  # over the bytes of an acquired range
            return np.asarray(one.view("float32", shape))

        for number, layer in enumerate(layers):
            with manager.acquired(one := manager.range(layer, "write", tier="host")):
                array(one)[:] = first_weight(args, number)
        for step in range(args.steps):
            x, wanted = batch_of(args, step)
            with manager.iteration():
                inputs = [x]
                for layer in layers:
                    weight = manager.range(layer, "read")
                    with manager.operator("forward"), manager.acquired(weight):
                        inputs.append(forward(array(weight), inputs[-1]))
                difference = inputs.pop() - wanted
                losses.append(float(np.square(difference).sum() / BATCH))
                upper = difference * np.float32(2 / BATCH)
                for layer in reversed(layers):
                    weight = manager.range(layer, "read")
                    grad = manager.range(manager.tensor_counterpart(layer, grads), "write")
                    with manager.operator("backward"), manager.acquired(weight, grad):
                        array(grad)[:], upper = backward(array(weight), inputs.pop(), upper)
                # Each part where it is, before its next use.
                manager.update(
                    lambda span: update(*(np.frombuffer(buffer, np.float32) for buffer in span.buffers())),
                    {weights: "read_write", grads: "read", momentums: "read_write"},
                    late=True,
                )
        manager.update_wait()
        stats, trained = manager.stats(), []
        for layer in layers:
            with manager.acquired(one := manager.range(layer, "read", tier="host")):
                trained.append(array(one).copy())
        print(
            f"libgemini: {stats['model_bytes']} bytes of model data, at most {stats['peak_bytes']['device']} of "
            f"{budget} bytes on the device, {stats['planned_iterations']} of {stats['iterations']} steps under a plan"
        )
    return losses, trained


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--device-memory", type=float, default=30, help="percent of the model data")
    args = parser.parse_args()
    total = 12 * args.layers * args.width**2  # weights, gradients and momentum
    losses, weights = train_managed(args, int(total * args.device_memory / 100), total)
    plain_losses, plain_weights = train_plain(args)
    print("losses:", *(f"{loss:.5f}" for loss in losses))
    same = losses == plain_losses and all(map(np.array_equal, weights, plain_weights))
    print("the same bits as plain NumPy" if same else f"other than plain NumPy: {plain_losses}")
    return 0 if same and losses[-1] < losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
