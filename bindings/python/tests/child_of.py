"""What a process does that test_several.py spawns: a module of its own, which imports no libgemini by itself.

SPDX-License-Identifier: Apache-2.0
"""


def sums(queue, model, state):
    queue.put([param.sum().item() for param in model.parameters()] + [value.sum().item() for value in state.values()])
