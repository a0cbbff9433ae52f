#!/usr/bin/env python3
"""How far 8-bit and bf16 variances are from those of fp32, when gradients become smaller.

  bench/peers/variances_torch.py [--steps N] [--blocks N] [--decades X] [--beta2 X ...] [--factor X]

An element has random normal gradients, whose magnitude is its own: evenly spread over so many decades of what a block
has. After half of the steps they are multiplied by the factor. Each step is gemini_adamw_host(). Prints, of all
elements, the root of the variance over that of fp32: its median and those of which 10 and 90 of 100 are less, the same
median among the first 16 of a block, whose codes are coarse, and the mean of variances over those of fp32, which is 1
if rounding is right on average. Needs a build (LIBGEMINI_DIR) and PYTHONPATH=bindings/python.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import ctypes
import json

import torch

from libgemini import abi
from libgemini.torch import narrow

BLOCK, COARSE = narrow.BLOCK, narrow.SCALE_BITS
STATES = ("fp32", "bf16", "8bit")


class Run:
    """The states of all elements, kept in one way.

    Args:
        states: "fp32", "bf16" or "8bit".
        beta2: The rule's.
        elements: How many there are, a multiple of 256.
    """

    def __init__(self, states: str, beta2: float, elements: int) -> None:
        self.variance = torch.zeros(elements, dtype=narrow.STATES[states])
        self.momentum, self.master = torch.zeros(elements), torch.zeros(elements)
        self.rule = abi.Adamw(
            param_dtype=abi.DTYPE_F32,
            grad_dtype=abi.DTYPE_F32,
            beta1=0.9,
            beta2=beta2,
            eps=1e-8,
            grad_scale=1.0,
            variance_dtype=narrow.LIBRARY[narrow.STATES[states]],
        )

    def step(self, number: int, gradients: torch.Tensor) -> None:
        """Computes an update of all elements.

        Args:
            number: Of the step, from 1.
            gradients: fp32, one of each element.

        Raises:
            GeminiError: The library refused it.
        """
        self.rule.step = number
        arrays = (gradients, self.master, self.momentum, self.variance)
        status = abi.update_library().cdll.gemini_adamw_host(
            ctypes.byref(self.rule),
            ctypes.c_uint64(gradients.numel()),
            None,
            *(ctypes.c_void_p(array.data_ptr()) for array in arrays),
            None,
        )
        if status:
            raise abi.GeminiError(abi.library().error_text().decode())

    def values(self) -> torch.Tensor:
        """The variances, in double precision."""
        if self.variance.dtype == torch.uint8:
            return narrow.decoded(self.variance.view(-1, BLOCK), 7).view(-1).double()
        return self.variance.double()


def main() -> None:
    parser = argparse.ArgumentParser(description="variances in 8 bits and in bf16 beside those of fp32")
    parser.add_argument("--steps", type=int, default=6000, help="of which the second half has smaller gradients")
    parser.add_argument("--blocks", type=int, default=64, help="of 256 elements")
    parser.add_argument("--decades", type=float, default=1.0, help="over which the gradients of a block are spread")
    parser.add_argument("--beta2", type=float, nargs="+", default=[0.999, 0.99, 0.95])
    parser.add_argument("--factor", type=float, default=0.1, help="of the gradients of the second half")
    options = parser.parse_args()
    elements, half = options.blocks * BLOCK, options.steps // 2
    for beta2 in options.beta2:
        generator = torch.Generator().manual_seed(1)
        magnitudes = 10 ** (-options.decades * torch.rand(elements, generator=generator))
        runs = {states: Run(states, beta2, elements) for states in STATES}
        for number in range(1, options.steps + 1):
            gradients = magnitudes * torch.randn(elements, generator=generator)
            if number > half:
                gradients *= options.factor
            for run in runs.values():
                run.step(number, gradients)
            if number not in (half, options.steps):
                continue
            for states in STATES[1:]:
                ratio = runs[states].values() / runs["fp32"].values()
                low, middle, high = ratio.sqrt().quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
                coarse = ratio.view(-1, BLOCK)[:, :COARSE].sqrt().median()
                row = {"bench": "variances_torch", "states": states, "beta2": beta2, "step": number}
                row |= {"decades": options.decades, "median_root": middle, "root_10": low, "root_90": high}
                row |= {"median_root_coarse": float(coarse), "mean_variance": float(ratio.mean())}
                print("ROW " + json.dumps({key: round(x, 4) if isinstance(x, float) else x for key, x in row.items()}))


if __name__ == "__main__":
    main()
