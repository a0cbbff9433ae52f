"""The bound of a training step that benches print (bench/peers/bounds.py). SPDX-License-Identifier: Apache-2.0"""

import importlib.util
import pathlib

import pytest
import torch

PATH = pathlib.Path(__file__).parents[3] / "bench" / "peers" / "bounds.py"
SPEC = importlib.util.spec_from_file_location("bounds", PATH)
assert SPEC and SPEC.loader
bounds = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(bounds)

BILLION = 10**9
FAST = {"update": 1e18, "up": 1e18, "down": 1e18, "memory": 1e18}
GPU = {"value": 1.0, "forward_share": 0.25, "work_bytes": 0}


def bound(rates, device_bytes=0, accumulate=1, clipped=False, gpu=None):
    """Of a billion parameters."""
    return bounds.bound(FAST | rates, gpu or GPU, BILLION, device_bytes, accumulate, clipped)


def test_a_step_takes_as_long_as_its_computation():
    assert bound({}) == (1.0, "compute")
    # A third of it is beside the update of three micro-batches, and of that one a quarter behind the norm.
    assert bound({"update": 1e9, "up": 1e6}, 14 * BILLION, accumulate=3, clipped=True) == (1.0, "compute")


@pytest.mark.parametrize(
    ("rates", "seconds", "binds"),
    [
        # What the host updates: 28 bytes of memory and copies of 4; carried to the device and back: 24; parameters of
        # both passes: 4.
        ({"memory": 14e9}, 2.0, "memory"),
        # 12 bytes each way, of which the host's updates save 10, at no rate: all is carried.
        ({"up": 4e9, "down": 4e9, "update": 1.0}, 4.0, "link"),
        # The host updates the share x, and the link takes as long: 2 x = (2 x + 12 (1 - x) + 4) / 4.
        ({"up": 4e9, "down": 4e9, "update": 5e8}, 2 * 16 / 18, "host and link"),
    ],
)
def test_what_does_not_fit_is_updated_where_it_takes_least(rates, seconds, binds):
    found, by = bound(rates, gpu=GPU | {"value": 0.0})
    assert (pytest.approx(found, rel=2e-3), by) == (seconds, binds)


def test_updates_lie_beside_what_they_may():
    rates = {"memory": 14e9}  # two seconds
    assert bound(rates, gpu=GPU | {"value": 2.5})[0] == 2.5
    assert bound(rates)[0] == pytest.approx(2.0)
    assert bound(rates, accumulate=2)[0] == pytest.approx(1 - 0.5 + 2)
    assert bound(rates, clipped=True)[0] == pytest.approx(1 - 0.25 + 2)


def test_states_on_the_device_are_not_moved():
    some = bound({"memory": 14e9}, device_bytes=(2 + 6) * BILLION, gpu=GPU | {"value": 0.0})[0]
    assert some == pytest.approx(24 / 2 / 14)  # half of the states, and no parameters
    assert bound({"memory": 14e9}, device_bytes=14 * BILLION)[0] == 1.0


def test_rates_of_the_memory_are_those_that_were_reached():
    found = bounds.rates(torch, False)
    assert found["memory"] >= bounds.UPDATE_BYTES * found["update"] > 0
