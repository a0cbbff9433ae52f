"""libgemini.jax and examples/train_jax.py, with JAX on CPUs: skipped where there is no jax.

SPDX-License-Identifier: Apache-2.0
"""

import ctypes
import os
import pathlib
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

import libgemini.jax as gj  # noqa: E402
import page  # noqa: E402
from libgemini import GeminiError, Manager  # noqa: E402

EXAMPLE = pathlib.Path(__file__).parents[3] / "examples" / "train_jax.py"
KIB = 2**10
WIDTH = 96  # a matrix of it in float32 is 36 KiB


@pytest.fixture
def manager():
    """A device of 256 KiB; a chunk that left it is not mapped, so that a read too late ends the process."""
    with Manager(device_memory=256 * KIB, host_memory="8MiB", chunk_size=64 * KIB, strict=True) as manager:
        yield manager


def values(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape or (WIDTH, WIDTH)).astype(dtype)


def flush(manager):
    """Everything leaves the device, and what it leaves behind there is overwritten."""
    with manager.allocated(manager.config.device_bytes) as address:
        ctypes.memset(address, 255, manager.config.device_bytes)


def same(tree, other):
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for one, another in zip(jax.tree.leaves(tree), jax.tree.leaves(other)):
        assert one.dtype == another.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(another))


def test_a_transformer_trains_within_30_percent_like_plain_jax():
    run = subprocess.run(
        [sys.executable, EXAMPLE, "--chunk-size", "64KiB"], stdout=subprocess.PIPE, text=True, timeout=600
    )
    said = re.search(
        r"libgemini: (\d+) bytes of model data, at most (\d+) of (\d+) bytes .*, (\d+) of 16 steps", run.stdout
    )
    assert run.returncode == 0 and said, run.stdout  # which compares all losses, to 1e-6
    model, peak, budget, planned = map(int, said.groups())
    assert peak <= budget <= 0.31 * model and planned >= 12
    assert len(re.findall(r"\d\.\d{7}", run.stdout)) == 32


# As on a GPU, as far as the manager knows: its CUDA device over the fake driver, whose copies run on threads
# of their own. JAX is on CPUs, for which that memory is the process's. The fake driver has no kernels of updates.
ON_A_FAKE_GPU = """
import ctypes, runpy, sys
import libgemini.manager, libgemini.views
libgemini.manager.CUDA = libgemini.views.CPU
import libgemini.jax

class Driver:
    def __init__(self, ordinal):
        pass

    def copy(self, parts):
        for to, source, size in parts:
            ctypes.memmove(to, source, size)

libgemini.jax._Driver = Driver
sys.argv = [sys.argv[1], "--cuda", "--placement", "cpu", "--width", "256", "--layers", "8", "--steps", "4"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_transformer_trains_in_a_fake_gpus_memory(tmp_path):
    build = os.environ.get("LIBGEMINI_DIR") or pytest.skip("LIBGEMINI_DIR names no build, in which the driver would be")
    driver = pathlib.Path(build) / "tests" / "tester" / "libfake_cuda_driver.so"
    (tmp_path / "libcuda.so.1").symlink_to(driver.resolve(strict=True))
    found = f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    run = subprocess.run(
        [sys.executable, "-c", ON_A_FAKE_GPU, EXAMPLE],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        env={**os.environ, "LD_LIBRARY_PATH": found, "JAX_PLATFORMS": "cpu"},
    )
    assert run.returncode == 0 and "(30.0%)" in run.stdout, run.stdout


def test_the_page_trains_as_it_stands():
    names = page.run(EXAMPLE.parents[1] / "docs" / "frameworks.md")
    losses = names["losses"]
    assert len(losses) == 5 and losses[4] < losses[3] < losses[0]


def test_values_of_all_layers_come_back(manager):
    layers = gj.Layers(manager)
    trees = [{"w": values(i), "b": [values(i, 7), values(i, 1, 3, 5)], "s": values(i, 1)[0]} for i in range(20)]
    for i, tree in enumerate(trees):
        layers.add(f"layer {i}", tree)
    assert manager.stats()["model_bytes"] > 8 * manager.config.device_bytes
    flush(manager)
    for i, tree in enumerate(trees):
        same(layers.values(f"layer {i}"), jax.tree.map(np.asarray, tree))
    other = jax.tree.map(lambda x: x + 1, trees[3])
    layers.set_values("layer 3", jax.tree.map(jnp.asarray, other))
    same(layers.values("layer 3"), jax.tree.map(np.asarray, other))
    same(layers.values("layer 4", "variance"), jax.tree.map(np.zeros_like, jax.tree.map(np.asarray, trees[4])))


def powers(params, x):
    """Takes JAX long, on threads of its own: the call returns at once."""
    return jax.lax.fori_loop(0, 400, lambda _, y: jnp.tanh(y @ params["w"]), x)


def test_bytes_stay_until_jax_has_read_them(manager):
    layers = gj.Layers(manager)
    wanted = []
    for i in range(12):
        layers.add(f"layer {i}", {"w": values(i) / 8})
        wanted.append(powers({"w": values(i) / 8}, values(100)))
    for _ in range(2):
        with manager.iteration():
            for i in range(12):
                y = layers.call(f"layer {i}", powers, values(100))
                flush(manager)  # leaves no address of the layer mapped
                same(y, wanted[i])


def test_bytes_stay_although_nobody_waits(manager, monkeypatch):
    """As when an interrupt comes between the call of JAX and the wait for it: what the program gives is lost."""
    layers = gj.Layers(manager)
    layers.add("layer", {"w": values(0) / 8})
    with manager.iteration():
        layers.call("layer", powers, values(1))  # compiled

    def interrupt(self, out):
        raise KeyboardInterrupt

    monkeypatch.setattr(gj.Layers, "_finish", interrupt)
    with pytest.raises(KeyboardInterrupt), manager.iteration():
        layers.call("layer", powers, values(1))
    flush(manager)
    manager.close()  # nothing is acquired


def test_what_jax_returns_as_it_is_becomes_a_copy(manager, monkeypatch):
    layers = gj.Layers(manager)
    layers.add("layer", {"w": values(0)})
    kept = []

    def as_it_is(function, *args):  # JAX is free to return an argument itself
        kept.append(args[0]["w"])
        return args[0], args[0]["w"].sum()

    with manager.iteration():
        same(layers.call("layer", lambda params: params), {"w": values(0)})
        monkeypatch.setattr(gj, "_call", as_it_is)
        tree, _ = layers.call("layer", None)
    layers.set_values("layer", {"w": values(1)})
    flush(manager)
    same(tree, {"w": jnp.asarray(values(0))})
    with pytest.raises(RuntimeError, match="deleted"):  # who keeps an array over an arena cannot read it
        kept[0].sum()


def test_a_function_that_donates_its_parameters_does_not_get_them(manager):
    layers = gj.Layers(manager)
    layers.add("layer", {"w": values(0)})
    donating = jax.jit(lambda params: jax.tree.map(lambda x: 2 * x, params), donate_argnums=0)
    with manager.iteration():
        same(layers.call("layer", donating), {"w": jnp.asarray(2 * values(0))})
    flush(manager)
    same(layers.values("layer"), {"w": values(0)})


def test_what_is_still_in_use_stays_acquired(manager, monkeypatch):
    layers = gj.Layers(manager)
    layers.add("layer", {"w": values(0)})
    kept = []

    def keep(function, *args):
        kept.append(np.asarray(args[0]["w"]))  # NumPy's array over the same bytes
        return args[0]["w"].sum()

    monkeypatch.setattr(gj, "_call", keep)
    monkeypatch.setattr(gj._Loan, "PATIENCE", 0.1)
    with pytest.raises(GeminiError, match="'layer' was called with are still in use") as error, manager.iteration():
        layers.call("layer", None)
    assert error.value.status == "BUSY"
    flushed = pytest.raises(GeminiError, flush, manager)
    assert flushed.value.status == "OOM_DEVICE"  # as the bytes cannot leave
    np.testing.assert_array_equal(kept[0], values(0))
    del kept[:]
    left = manager._accesses(layers._ranges(layers._layers["layer"], "param", "read"))
    manager.lib.release(manager.handle, left, len(left), 0)  # so that the fixture can close it


def loss_of(params, x, labels, scale):
    y = jnp.tanh(x @ params["w"] + params["b"])
    return scale * jnp.square(jnp.take(y, labels, axis=1)).mean(), {"aux": y}


def test_gradients_add_up_and_are_those_of_jax(manager):
    layers = gj.Layers(manager)
    params = {"w": values(0) / 8, "b": values(1, WIDTH)}
    layers.add("layer", params)
    layers.add("other", {"w": values(9)})
    layers.set_values("other", {"w": values(8)}, "grad")
    layers.adamw(1, lr=0.0)  # has used the gradient, whose bytes are there still
    layers.add("third", {"w": values(9)})
    layers.set_values("third", {"w": values(8)}, "grad")
    np.testing.assert_array_equal(layers.values("third", "grad")["w"], values(8))
    layers.adamw(1, lr=0.0)
    np.testing.assert_array_equal(layers.values("third", "grad")["w"], 0 * values(8))
    labels = np.arange(5, dtype=np.int32)
    for _ in range(2):  # steps
        total = jax.tree.map(jnp.zeros_like, params)
        with manager.iteration():
            for i in range(3):  # micro-batches
                x = values(10 + i)
                cotangent = (1.0, {"aux": values(20)})
                value, pull = jax.vjp(lambda p, x, s: loss_of(p, x, labels, s), params, x, 0.5)  # noqa: B023
                expected = pull((jnp.float32(1), cotangent[1]))
                total = jax.tree.map(jnp.add, total, expected[0])
                got, cotangents = layers.vjp("layer", loss_of, cotangent, x, labels, 0.5)
                assert cotangents[1] is None  # of integers
                for ours, theirs in ((got, value), (cotangents[0], expected[1]), (cotangents[2], expected[2])):
                    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)):
                        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)
            flush(manager)
            for one, other in zip(jax.tree.leaves(layers.values("layer", "grad")), jax.tree.leaves(total)):
                np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-5)
            norm = np.sqrt(sum(np.square(leaf, dtype=np.float64).sum() for leaf in jax.tree.leaves(total)))
            assert layers.grad_norm() == pytest.approx(norm, rel=1e-5)  # "other" has none: zeros
            layers.adamw(1, lr=0.0)


def adamw(params, grads, momentum, variance, step, rate):
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, momentum, grads)
    variance = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, variance, grads)

    def one(p, m, v):
        size = jnp.sqrt(v / (1 - 0.999**step)) + 1e-8
        return p * (1 - 0.01 * rate) - rate / (1 - 0.9**step) * m / size

    return jax.tree.map(one, params, momentum, variance), momentum, variance


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_a_rule_in_jax_and_the_fused_one_agree(manager, dtype):
    """One layer is updated by a function of JAX's, the other one by adamw(); "unused" has no gradients."""
    manager.budget_set("device", 512 * KIB)
    low = jnp.dtype(dtype)
    tree, unused = {"w": values(0).astype(low), "b": values(1, 17).astype(low)}, {"w": values(5, 8, 8).astype(low)}
    ours, fused = gj.Layers(manager, dtype), gj.Layers(manager, dtype)
    ours.add("custom", tree)
    fused.add("fused", tree)
    fused.add("unused", unused)
    for step in range(1, 4):
        grads = jax.tree.map(lambda x: values(step, *x.shape).astype(low), tree)  # noqa: B023
        ours.set_values("custom", grads, "grad")
        fused.set_values("fused", grads, "grad")
        with manager.iteration():
            ours.update("custom", adamw, jnp.float32(step), jnp.float32(0.01), master=dtype == "bfloat16")
            fused.adamw(step, lr=0.01)
    assert ours.grad_norm() == fused.grad_norm() == 0  # they are of the step before
    flush(manager)
    for what in "param", "master", "momentum", "variance":
        left, right = ours.values("custom", what), fused.values("fused", what)
        for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right)):
            assert one.dtype == other.dtype == (low if what == "param" else np.float32)
            tolerance = 1e-2 if one.dtype == "bfloat16" else 1e-5
            np.testing.assert_allclose(one.astype(np.float32), other.astype(np.float32), rtol=tolerance, atol=1e-6)
    decayed = unused["w"].astype(np.float32) * (1 - 1e-4) ** 3
    np.testing.assert_allclose(fused.values("unused", "master")["w"], decayed, rtol=1e-6)


# A CUDA driver as far as libgemini.jax calls it: copies happen when their stream is waited for.
FAKE_DRIVER = r"""
#include <stddef.h>
#include <stdint.h>
#include <string.h>
typedef struct { uint64_t to, from; size_t size; } copy_t;
static copy_t copies[16];
static int count, refuse, depth, here;
int test_refuse(int after) { return refuse = after; }
int test_depth(void) { return depth; }
int cuInit(unsigned flags) { return flags ? 1 : 0; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal + 40, ordinal != 3; }
int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = &here, device != 43; }
int cuCtxPushCurrent_v2(void *context) { return depth++, context != &here; }
int cuCtxPopCurrent_v2(void **context) { return *context = &here, depth-- != 1; }
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t size, void *stream) {
  if (depth != 1 || stream != (void *)2 || count == 16) return 1;
  if (refuse > 0 && !--refuse) return 700;
  copies[count++] = (copy_t){ to, from, size };
  return 0;
}
int cuStreamSynchronize(void *stream) {
  for (int i = 0; i < count; i++) memcpy((void *)copies[i].to, (void *)copies[i].from, copies[i].size);
  count = 0;
  if (refuse < 0) return refuse = 0, 719;
  return depth != 1 || stream != (void *)2;
}
int cuCtxSynchronize(void) { return depth != 1; }
"""


def test_gradients_are_copied_by_the_driver_of_a_gpu(manager, tmp_path, monkeypatch):
    (tmp_path / "fake.c").write_text(FAKE_DRIVER)
    compiler = shlex.split(os.environ.get("CC", "cc"))
    library = tmp_path / "libcuda.so.1"
    subprocess.run([*compiler, "-shared", "-fPIC", tmp_path / "fake.c", "-o", library], check=True)
    fake = ctypes.CDLL(library)
    monkeypatch.setattr(ctypes, "CDLL", {"libcuda.so.1": fake}.__getitem__)
    layers = gj.Layers(manager)
    layers._driver = gj._Driver(3)
    params = {"w": values(0) / 8, "b": values(1, WIDTH)}
    layers.add("layer", params)
    with manager.iteration():
        for _ in range(2):
            layers.vjp("layer", lambda p, x: jnp.square(x @ p["w"] + p["b"]).sum(), 1.0, values(2))
    flush(manager)
    expected = jax.grad(lambda p: 2 * jnp.square(values(2) @ p["w"] + p["b"]).sum())(params)
    for one, other in zip(jax.tree.leaves(layers.values("layer", "grad")), jax.tree.leaves(expected)):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-3)
    for refuse, call, code in (2, "cuMemcpyDtoDAsync_v2", 700), (-1, "cuStreamSynchronize", 719):
        fake.test_refuse(refuse)
        with pytest.raises(GeminiError, match=rf"{call}\(\) .* code {code}") as error, manager.iteration():
            layers.vjp("layer", lambda p: p["w"].sum(), 1.0)
        assert error.value.native_code == code and fake.test_depth() == 0
    with pytest.raises(GeminiError, match=r"cuDeviceGet\(\)"):
        gj._Driver(4)


def test_what_is_refused(manager):
    with pytest.raises(ValueError, match="dtype is 'float64': want one of float32, bfloat16, float16"):
        gj.Layers(manager, "float64")
    layers = gj.Layers(manager)
    for leaf in (1.0, values(0).astype(np.float64), np.arange(3), np.zeros((3, 0), np.float32)):
        with pytest.raises(ValueError, match=r"layer\['w'\] is .*: want float32 with at least one element"):
            layers.add("layer", {"w": leaf})
    layers.add("layer", {"w": values(0)})
    with pytest.raises(GeminiError, match="there is a layer 'layer' already"):
        layers.add("layer", {"w": values(0)})
    with pytest.raises(GeminiError, match="no iteration is open"):
        layers.call("layer", lambda params: params)
    with pytest.raises(ValueError, match=r"has shape \(3,\), not \(96, 96\)"):
        layers.set_values("layer", {"w": values(0, 3)})
    with pytest.raises(ValueError, match="the layer 'layer' has PyTreeDef"):
        layers.set_values("layer", [values(0)])
    with pytest.raises(ValueError, match="a layer has no 'rms': want one of param, grad, master"):
        layers.values("layer", "rms")
    with pytest.raises(ValueError, match="float32 have no master copy"):
        layers.update("layer", adamw, 1, 0.1, master=True)
    with manager.iteration():
        with pytest.raises(ValueError, match="the layer has PyTreeDef"):
            layers.update("layer", lambda p, g, m, v: (p["w"], m, v))
        with pytest.raises(ZeroDivisionError):
            layers.call("layer", lambda params: 1 / 0)
        same(layers.call("layer", lambda params: params["w"] + 0), jnp.asarray(values(0)))
    too_large = {"w": values(0, 300, 300)}
    layers.add("large", too_large)
    with manager.iteration():
        with pytest.raises(GeminiError) as error:
            layers.call("large", lambda params: params["w"].sum())
        assert error.value.status == "OOM_DEVICE"
    same(layers.values("large"), too_large)
    for _ in range(2):  # a layer that was not added has left its names
        with pytest.raises(GeminiError) as error:
            layers.add("huge", {"small": values(0, 4), "w": values(0, 1500, 1500)})
        assert error.value.status == "INVALID" and "huge" not in layers._layers  # of addresses
    layers.add("huge", {"small": values(0, 4)})


def moved(params, grads, momentum, variance, by):
    return jax.tree.map(lambda p: p + by, params), momentum, variance


@pytest.mark.parametrize("master", (False, True))
def test_a_rule_updates_parameters_and_master_copies(manager, master):
    """Whichever of the two the function gets: otherwise the next fused update would undo what it did."""
    manager.budget_set("device", 1024 * KIB)
    layers = gj.Layers(manager, "bfloat16")
    layers.add("layer", {"w": values(0, 256, 256).astype(jnp.bfloat16)})
    with manager.iteration():
        layers.update("layer", moved, jnp.bfloat16(1), master=master)
    wanted = layers.values("layer")["w"]
    np.testing.assert_array_equal(wanted, values(0, 256, 256).astype(jnp.bfloat16) + jnp.bfloat16(1))
    with manager.iteration():
        layers.adamw(1, lr=0.0)
    np.testing.assert_array_equal(layers.values("layer")["w"], wanted)


def broken(*_):
    raise KeyError("broken")


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_a_function_that_raises_changes_nothing(manager, dtype):
    """The layers fill chunks: what is acquired to be written whole does not keep what it was."""
    manager.budget_set("device", 2048 * KIB)
    layers, values_of = gj.Layers(manager, dtype), {}
    tree = {"w": values(0, 256, 256).astype(jnp.dtype(dtype))}
    layers.add("layer", tree)
    layers.set_values("layer", tree, "grad")
    kinds = "param", "grad", "master", "momentum", "variance"
    for kind in kinds:
        values_of[kind] = layers.values("layer", kind)
    for function in (
        broken,
        lambda p, g, m, v, *_: (p, m),
        lambda p, g, m, v, *_: (p, m, jax.tree.map(jnp.ravel, v)),
    ):
        for call in (
            lambda: layers.update("layer", function, jnp.float32(1), master=dtype != "float32"),  # noqa: B023
            lambda: layers.update("layer", function, jnp.float32(1)),  # noqa: B023
            lambda: layers.vjp("layer", broken, 1.0),
        ):
            flush(manager)
            with pytest.raises((KeyError, ValueError)), manager.iteration():
                call()
            flush(manager)
            for kind in kinds:
                same(layers.values("layer", kind), values_of[kind])
    with pytest.raises((TypeError, ValueError)):
        layers.set_values("layer", {"w": np.full((256, 256), "one")})
    flush(manager)
    same(layers.values("layer"), tree)


def test_values_of_a_wrong_shape_change_nothing(manager):
    layers = gj.Layers(manager)
    layers.add("layer", {"a": values(1), "b": values(2)})
    with pytest.raises(ValueError, match=r"an array of the layer 'layer' has shape \(3,\), not \(96, 96\)"):
        layers.set_values("layer", {"a": values(3), "b": values(4, 3)})
    same(layers.values("layer"), {"a": values(1), "b": values(2)})


def test_without_jax_the_error_says_what_to_install():
    code = "import sys; sys.modules['jax'] = None\nimport libgemini.jax"
    run = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert run.returncode and "libgemini.jax needs the package jax: pip install 'libgemini[jax]'" in run.stderr
