"""Acquired ranges as arrays of NumPy, PyTorch and CuPy, and the examples of NumPy and CuPy. JAX has test_jax.py.

CuPy is a stand-in over NumPy, on the fake CUDA driver of the C tests. SPDX-License-Identifier: Apache-2.0
"""

import ctypes
import gc
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

import page
from libgemini import GeminiError, Manager, Range, views

EXAMPLES = pathlib.Path(__file__).parents[3] / "examples"
KIB = 2**10


@pytest.fixture
def manager():
    with Manager(device_memory="1MiB", host_memory="4MiB", chunk_size=64 * KIB, strict=True) as manager:
        yield manager


@pytest.fixture
def filled(manager):
    """A range of 600 float32, acquired for reading, and what it holds."""
    tensor = manager.tensor(manager.arena("param", element_bytes=4), "weights", 2400)
    values = np.arange(600, dtype=np.float32).reshape(20, 30)
    with manager.acquired(one := manager.range(tensor, "write", tier="host")):
        np.asarray(one.view("float32", (20, 30)))[:] = values
    with manager.acquired(one := manager.range(tensor, "read")):
        yield one, values


def address(array):
    return array.__array_interface__["data"][0]


def test_numpy_takes_a_range_without_a_copy(filled):
    one, values = filled
    array = np.asarray(one.view("float32", (20, 30)))
    assert address(array) == one.address and array.dtype == np.float32
    np.testing.assert_array_equal(array, values)
    with pytest.raises(ValueError, match="read-only"):  # as the range is
        array[0, 0] = 1
    for taken in (np.from_dlpack(one.view("float32", (20, 30))), torch.from_dlpack(one.view("float32", (20, 30)))):
        assert (taken.data_ptr() if isinstance(taken, torch.Tensor) else address(taken)) == one.address
        np.testing.assert_array_equal(np.asarray(taken), values)
    assert np.asarray(one.view("int16", (2, 3, 200))).strides == (1200, 400, 2)


def test_the_page_adds_as_it_stands():
    """The first of its blocks; test_jax.py runs all."""
    names = {}
    exec(page.BLOCK.findall((EXAMPLES.parent / "docs" / "frameworks.md").read_text())[0], names)
    assert names["total"] == pytest.approx(8 * 256 * 256 * 9)


def test_what_is_written_to_an_array_is_in_the_arena(manager):
    tensor = manager.tensor(manager.arena("param", element_bytes=2), "weights", 256)
    with manager.acquired(one := manager.range(tensor, "write")):
        taken = torch.from_dlpack(one.view("bfloat16", (2, 64)))
        assert taken.dtype == torch.bfloat16 and taken.data_ptr() == one.address
        taken.copy_(torch.arange(128).reshape(2, 64))
        del taken
    manager.move(manager.range(tensor), tier="host")
    with manager.acquired(one := manager.range(tensor, "read_write", tier="host")):
        bits = np.asarray(one.view("uint16"))
        expected = torch.arange(128).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        np.testing.assert_array_equal(bits, expected)
        bits[:] = 0
    assert manager.norm(manager.range(tensor), "bf16") == 0


@pytest.mark.parametrize("dtype", sorted(set(views._DTYPES) - {"bfloat16"}))
def test_each_dtype_is_numpys_of_its_name(filled, dtype):
    view = filled[0].view(dtype)
    assert np.asarray(view).dtype == np.dtype(dtype)
    assert np.from_dlpack(view).dtype == np.dtype(dtype)


def test_what_is_refused(filled, manager):
    one, _ = filled
    with pytest.raises(ValueError, match="dtype is 'complex64': want one of float16, float32"):
        one.view("complex64")
    for dtype, shape in ("float32", (599,)), ("float32", (20, 31)), ("float32", (-20, -30)), ("float64", (600,)):
        with pytest.raises(ValueError, match="is not the 2400 bytes of Range"):
            one.view(dtype, shape)
    with pytest.raises(ValueError, match="is not the 2400 bytes"):  # a part is left over
        one.view("float64", ())
    view = one.view("float32")
    for arguments in ({"copy": True}, {"dl_device": (views.CUDA, 0)}):
        with pytest.raises(BufferError, match="neither as a copy nor on another device"):
            view.__dlpack__(**arguments)
    assert not hasattr(view, "__cuda_array_interface__") and not hasattr(one.view("bfloat16"), "__array_interface__")
    with pytest.raises(TypeError, match="array interfaces have no bfloat16: use DLPack, or a view as uint16"):
        np.asarray(one.view("bfloat16"))  # no array of one object
    assert torch.as_tensor(one.view("bfloat16")).dtype == torch.bfloat16
    other = manager.range(one.object, "read")
    with pytest.raises(GeminiError, match="is not acquired"):
        other.view()
    with manager.acquired(other):
        late = other.view("float32")
    for use in (np.asarray, np.from_dlpack, torch.from_dlpack):
        with pytest.raises(GeminiError, match="was released: its bytes may be elsewhere"):
            use(late)


def test_a_capsule_frees_its_tensor_once(filled):
    view, freed = filled[0].view("float32", (20, 30)), []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def free(tensor):
        freed.append(tensor)
        views.free(tensor)

    class Taken:
        def __init__(self):
            self.capsule = view.__dlpack__()
            self.tensor = views.replace_deleter(self.capsule, free)

        def __dlpack__(self, **_):
            return self.capsule

        def __dlpack_device__(self):
            return view.__dlpack_device__()

    dropped, taken = Taken(), Taken()
    expected = [dropped.tensor]
    del dropped
    gc.collect()
    assert freed == expected
    array = np.from_dlpack(taken)
    expected.append(taken.tensor)
    del taken
    gc.collect()
    assert freed == expected[:1] and array[1, 0] == 30
    del array
    assert freed == expected


def test_a_gpus_range_says_its_device_and_stream():
    """Without a GPU: what consumers are told, and whom they have to wait for."""
    waits = []
    one = Range(1, 0, 48, "read", "device", (views.CUDA, 3))
    one.address = 1 << 40
    view = one.view("float16", (4, 6))
    expected = {"shape": (4, 6), "typestr": "<f2", "data": (1 << 40, True), "version": 3, "stream": None}
    assert view.__cuda_array_interface__ == expected and view.__dlpack_device__() == (2, 3)
    assert not hasattr(view, "__array_interface__")
    with pytest.raises(TypeError, match="the range is in a GPU's memory"):
        np.asarray(view)
    one._stream, one._wait = 77, lambda: waits.append(1)
    assert view.__cuda_array_interface__["stream"] == 77 and not waits  # the consumer waits
    view.__dlpack__(stream=77), view.__dlpack__(stream=-1)
    assert not waits
    view.__dlpack__(stream=78), view.__dlpack__()
    assert len(waits) == 2


# ---- AdamW over arenas
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("placement, late", (("cpu", True), ("cuda", False)))
def test_adamw_of_arenas_is_torchs(manager, dtype, placement, late):
    low, count = dtype == torch.bfloat16, 40_000
    short = "bf16" if low else "f32"
    with Manager(placement=placement, device_memory="512KiB", host_memory="8MiB", chunk_size=64 * KIB) as manager:
        first = manager.arena("param", element_bytes=2 if low else 4)
        arenas = {kind: manager.arena(kind, element_bytes=4, like=first) for kind in ("momentum", "variance")}
        arenas["grad"] = manager.arena("grad", element_bytes=2 if low else 4, like=first)
        arenas["master"] = manager.arena("master", element_bytes=4, like=first) if low else first
        tensor = manager.tensor(first, "weights", count * (2 if low else 4))

        def exchange(arena, values=None):
            object = tensor if arena == first else manager.tensor_counterpart(tensor, arena)
            of = torch.float32 if arena not in (first, arenas["grad"]) else dtype
            with manager.acquired(one := manager.range(object, "read_write", tier="host")):
                array = torch.from_dlpack(one.view(str(of).removeprefix("torch."), (count,)))
                return array.copy_(values) if values is not None else array.clone()

        torch.manual_seed(0)
        start = torch.randn(count).to(dtype).float()
        plain = torch.nn.Parameter(start.clone())
        optimizer = torch.optim.AdamW([plain], lr=0.01, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1)
        exchange(arenas["master"], start)
        options = {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1, "grad_scale": 0.5, "late": late}
        for step in range(1, 4):
            grad = torch.randn(count).to(dtype)
            exchange(arenas["grad"], grad)
            plain.grad = grad.float() * 0.5
            optimizer.step()
            more = {"param": first, "param_dtype": "bf16"} if low else {}
            manager.adamw(step=step, **arenas, **more, grad_dtype=short, **options)
        manager.update_wait()
        torch.testing.assert_close(exchange(arenas["master"]), plain.detach(), rtol=1e-6, atol=1e-7)
        if low:
            assert torch.equal(exchange(first), exchange(arenas["master"]).to(dtype))
        for arguments, message in (
            ({"step": 0}, "step"),
            ({"lr": -1.0}, "lr"),
            ({"grad_dtype": "f32" if low else "bf16"}, "elements of . bytes"),
        ):
            with pytest.raises(GeminiError, match=message) as error:
                manager.adamw(**{"step": 4, **arenas, "grad_dtype": short, **arguments})
            assert error.value.status == "INVALID"


# ---- the examples
def run(code, *arguments, **environment):
    return subprocess.run(
        [sys.executable, *(["-c", code] if code else []), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        env={**os.environ, **environment},
    )


def within_budget(said):
    match = re.search(r"libgemini: (\d+) bytes of model data, at most (\d+) of (\d+) bytes on the device", said)
    assert match, said
    model, peak, budget = map(int, match.groups())
    return peak <= budget <= 0.31 * model


def test_numpy_trains_within_30_percent_with_the_same_bits():
    done = run("", EXAMPLES / "train_numpy.py")
    assert done.returncode == 0 and "the same bits as plain NumPy" in done.stdout, done.stdout
    assert within_budget(done.stdout)


@pytest.fixture
def gpu(tmp_path):
    """The environment of a process in which a fake CUDA driver is the machine's. The C tests build it."""
    driver = pathlib.Path(os.environ.get("LIBGEMINI_DIR", "")) / "tests" / "tester" / "libfake_cuda_driver.so"
    if "LIBGEMINI_DIR" not in os.environ:
        pytest.skip("LIBGEMINI_DIR names no build, in which the fake driver would be")
    (tmp_path / "libcuda.so.1").symlink_to(driver.resolve(strict=True))
    here = pathlib.Path(__file__).parent
    return {
        "LD_LIBRARY_PATH": f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        "PYTHONPATH": f"{here}:{os.environ.get('PYTHONPATH', '')}",
    }


def test_the_example_of_cupy_trains_on_a_stand_in(gpu):
    """The fake driver has no kernels of updates, so that these are to be on the host."""
    code = "import cupy_stand_in, runpy, sys; sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
    sizes = ["--layers", 8, "--width", 1024, "--batch", 32, "--steps", 4, "--placement", "cpu"]
    done = run(code, EXAMPLES / "train_cupy.py", *sizes, **gpu)
    assert done.returncode == 0, done.stdout  # which compares all losses
    assert within_budget(done.stdout) and re.search(r"[1-9]\d* of them CuPy's", done.stdout)


CUPY = """
import cupy_stand_in as cupy
import libgemini.cupy
from libgemini import GeminiError, Manager

try:
    with Manager(device_memory="8MiB", host_memory="16MiB") as manager:
        libgemini.cupy.use(manager)
except GeminiError as error:
    assert error.status == "UNSUPPORTED" and "open the manager with cuda=True" in str(error)
else:
    raise AssertionError("a simulated device")

with Manager(device_memory="8MiB", host_memory="16MiB", chunk_size="2MiB", cuda=True) as manager:
    arena = manager.arena("param", element_bytes=4)
    tensors = [manager.tensor(arena, f"layer {i}", 2 << 20) for i in range(4)]
    for i, tensor in enumerate(tensors):  # all of the device
        with manager.acquired(one := manager.range(tensor, "write")):
            libgemini.cupy.array(one, "int32")[:] = i
    with libgemini.cupy.use(manager) as allocator:
        try:
            libgemini.cupy.use(manager)
        except GeminiError as error:
            assert error.status == "EXISTS"
        else:
            raise AssertionError("hooked twice")
        for use in (lambda: manager.update(print, {arena: "read"}), lambda: manager.stream_call(0, print)):
            try:  # CuPy holds Python's lock while it waits for an allocation
                use()
            except GeminiError as error:
                assert "CuPy allocates from this manager" in str(error)
            else:
                raise AssertionError("a function of Python's")
        array = cupy.zeros_like(cupy.np.ones(3 << 18))  # 6 MiB, for which layers leave
        assert manager.stats()["nonmodel_bytes"] >= 6 << 20
        try:
            cupy.zeros_like(cupy.np.ones(1 << 19))  # 4 MiB more
        except cupy.OutOfMemoryError as error:
            assert "allocating 4,194,304 bytes" in str(error) and "limit 8,388,608" in str(error)
            assert error.__cause__.status == "OOM_DEVICE" and "gemini_cupy_malloc" in str(error.__cause__)
        else:
            raise AssertionError("more than the budget")
        assert cupy.cuda.allocator(0).ptr == 0  # which is no failure
        del array
        assert manager.stats()["nonmodel_bytes"] == 0
        kept = cupy.zeros_like(cupy.np.ones(4))
    assert cupy.cuda.allocator is cupy.plain
    allocator.close()  # again
    libgemini.cupy.use(manager).close()
    ran = []
    manager.stream_call(0, lambda: ran.append(1))
    assert ran
    with Manager(device_memory="8MiB", host_memory="16MiB", cuda=True) as another:
        libgemini.cupy.use(another)
    assert cupy.cuda.allocator != cupy.plain  # of a manager that is closed
    cupy.cuda.allocator = cupy.plain
    assert (kept == 0).all()
    del kept
    assert manager.stats()["nonmodel_bytes"] == 0

    stream = libgemini.cupy.stream(manager)
    assert stream and stream == libgemini.cupy.stream(manager)
    other = manager.stream_create()
    for at in stream, other:
        for i, tensor in enumerate(tensors):
            with manager.acquired(one := manager.range(tensor, "read"), stream=at):
                waited = []
                wait, one._wait = one._wait, lambda: (waited.append(1), wait())
                assert (libgemini.cupy.array(one, "int32", (2, 1 << 18)) == i).all()
                assert bool(waited) == (at == other)  # of another stream than CuPy's
    manager.stream_destroy(other)
    with manager.acquired(one := manager.range(tensors[0], "read", tier="host")):
        try:
            libgemini.cupy.array(one)
        except GeminiError as error:
            assert "is in host memory" in str(error)
        else:
            raise AssertionError("host memory")
print("well")
"""


def test_cupy_allocates_from_the_budget_and_raises_its_own_error(gpu):
    done = run(CUPY, **gpu)
    assert done.returncode == 0 and done.stdout.endswith("well\n"), done.stdout


@pytest.mark.parametrize("name", ("cupy", "jax"))
def test_without_the_package_the_error_says_what_to_install(name):
    done = run(f"import sys; sys.modules[{name!r}] = None\nimport libgemini.{name}")
    assert done.returncode and f"libgemini.{name} needs the package {name}" in done.stdout, done.stdout
