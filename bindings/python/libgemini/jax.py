"""JAX models whose parameters, gradients and optimizer states are in arenas, layer by layer (docs/frameworks.md).

It needs the package jax (pip install 'libgemini[jax]'; for GPUs pip install 'jax[cuda12]').
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import threading
import typing

from . import abi
from .manager import Manager, Range
from .views import free, replace_deleter

try:
    import jax
    import jax.numpy as jnp
    import numpy as np
except ImportError as missing:
    raise ImportError(
        "libgemini.jax needs the package jax: pip install 'libgemini[jax]', or for GPUs pip install 'jax[cuda12]'"
    ) from missing

_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


@functools.partial(jax.jit, static_argnums=0)
def _call(function: typing.Callable[..., typing.Any], *args: typing.Any) -> typing.Any:
    # Donations of the function itself have no effect in here: nothing but the library writes to arenas.
    return function(*args)


@functools.partial(jax.jit, static_argnums=0)
def _vjp(
    function: typing.Callable[..., typing.Any], params: typing.Any, args: tuple[typing.Any, ...], cotangent: typing.Any
) -> typing.Any:
    """The function's value, and the cotangents of params and of args; None for what has none, such as integers."""
    leaves, tree = jax.tree.flatten(args)
    smooth = [bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)) for leaf in leaves]

    def of(params: typing.Any, parts: list[typing.Any]) -> typing.Any:
        rest = iter(parts)
        merged = [next(rest) if one else leaf for leaf, one in zip(leaves, smooth)]
        return function(params, *jax.tree.unflatten(tree, merged))

    value, pull = jax.vjp(of, params, [leaf for leaf, one in zip(leaves, smooth) if one])
    like = jax.tree.map(lambda out, one: jnp.broadcast_to(jnp.asarray(one, out.dtype), out.shape), value, cotangent)
    of_params, parts = pull(like)
    rest = iter(parts)
    return value, of_params, jax.tree.unflatten(tree, [next(rest) if one else None for one in smooth])


@jax.jit
def _add(one: typing.Any, other: typing.Any) -> typing.Any:
    return jax.tree.map(jnp.add, one, other)


def _bytes(one: Range) -> typing.Any:
    """The bytes of an acquired range as NumPy's array."""
    return np.asarray(one.view())


class _Loan:
    """A range's bytes that JAX has an array over.

    On CPUs JAX ends a tensor of DLPack when its array was deleted and the last program that reads it has run, so that
    taken_back() is exact, also when an interrupt has lost what the program gives. On GPUs JAX may end it earlier.
    """

    PATIENCE = 60.0  # seconds that JAX may take to end what nobody uses
    _open: typing.ClassVar[dict[int, _Loan]] = {}  # by the address of the tensor

    def __init__(self, one: Range, dtype: str, shape: tuple[int, ...]) -> None:
        self._view = one.view(dtype, shape)
        self.address, self.size_bytes = one.address or 0, one.size_bytes
        self._ended = threading.Event()
        self.array: typing.Any = None
        self.array = jax.dlpack.from_dlpack(self)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._view.__dlpack_device__()

    def __dlpack__(self, **options: typing.Any) -> typing.Any:
        capsule = self._view.__dlpack__(**options)
        self._open[replace_deleter(capsule, _end_loan)] = self
        return capsule

    def taken_back(self) -> bool:
        """Deletes the array, and waits until nothing reads its bytes. False: after PATIENCE something still does."""
        self.array.delete()
        return self._ended.wait(self.PATIENCE)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _end_loan(tensor: int) -> None:
    loan = _Loan._open.pop(tensor)
    free(tensor)
    loan._ended.set()


class _Driver:
    """Copies within a GPU's memory, by the CUDA driver: JAX has no call that writes to memory of others."""

    _PER_THREAD = ctypes.c_void_p(2)  # CU_STREAM_PER_THREAD, which waits for no other stream

    def __init__(self, ordinal: int) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._must("cuInit", 0)
        self._must("cuDeviceGet", ctypes.byref(device), ordinal)
        # The one that JAX and the library use. It is never given back: both have it until the process ends.
        self._must("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)

    def _must(self, name: str, *arguments: typing.Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            raise abi.GeminiError(f"{name}() of the CUDA driver has failed with code {code}", "DEVICE", code)

    def synchronize(self) -> None:
        """Waits for all work on the GPU of this process."""
        self._must("cuCtxPushCurrent_v2", self._context)
        try:
            self._must("cuCtxSynchronize")
        finally:
            self._must("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def copy(self, parts: typing.Sequence[tuple[int, int, int]]) -> None:
        """Copies parts, each an address to write, one to read and a number of bytes, and waits for that."""
        self._must("cuCtxPushCurrent_v2", self._context)
        try:
            try:
                for to, source, size in parts:
                    where = ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(size)
                    self._must("cuMemcpyDtoDAsync_v2", *where, self._PER_THREAD)
            except abi.GeminiError:
                self._cuda.cuStreamSynchronize(self._PER_THREAD)  # for the copies before
                raise
            self._must("cuStreamSynchronize", self._PER_THREAD)
        finally:
            self._must("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


class _Leaf(typing.NamedTuple):
    shape: tuple[int, ...]
    tensors: tuple[int, ...]  # handles of each of Layers._arenas, in their order


class _Layer(typing.NamedTuple):
    leaves: list[_Leaf]
    tree: typing.Any


class Layers:
    """The layers of a JAX model: each is a tree of parameters, whose bytes, gradients and AdamW states are in arenas.

    A layer's parameters are on the device while a function of it runs. JAX gets them without a copy, and each method
    returns when JAX has computed what it was asked for: only then may the bytes leave the device. What a function
    returns belongs to JAX, even if it is a parameter itself. Activations, too, are JAX's, outside the budgets.

        layers = libgemini.jax.Layers(manager)
        for i in range(12):
            layers.add(f"block {i}", init_block(i))  # a tree of arrays, which may go afterwards
        for step, (x, y) in enumerate(batches, 1):
            with manager.iteration():
                inputs = [x]
                for i in range(12):
                    inputs.append(layers.call(f"block {i}", block, inputs[-1]))
                loss, cotangent = layers.vjp("head", head, 1.0, inputs.pop(), y)  # loss = head(params, x, y)
                ...
                for i in reversed(range(12)):
                    _, (cotangent,) = layers.vjp(f"block {i}", block, cotangent, inputs.pop())
                layers.adamw(step, lr=1e-4)

    A function is compiled once for each object and each shape: use the same object in each step, no new lambda. One
    thread at a time may use a Layers.

    Attributes:
        manager: The manager of the arenas.
        dtype: The dtype of all parameters and gradients.
    """

    def __init__(self, manager: Manager, dtype: str = "float32") -> None:
        """Makes the arenas.

        Args:
            manager: An open manager. Its device is JAX's default device: the simulated one with JAX on CPUs.
            dtype: Of parameters and gradients: "float32", "bfloat16" or "float16". With the latter two there is a
                master copy in fp32, too. AdamW's moments are always fp32.

        Raises:
            GeminiError: The manager refuses.
            ValueError: There is no such dtype.
        """
        if dtype not in _DTYPES:
            raise ValueError(f"dtype is {dtype!r}: want one of {', '.join(_DTYPES)}")
        self.manager = manager
        self.dtype = dtype
        size = 4 if dtype == "float32" else 2
        self._params = manager.arena("param", element_bytes=size)
        self._grads = manager.arena("grad", element_bytes=size, like=self._params)
        self._masters = manager.arena("master", element_bytes=4, like=self._params) if size == 2 else self._params
        self._momentum = manager.arena("momentum", element_bytes=4, like=self._params)
        self._variance = manager.arena("variance", element_bytes=4, like=self._params)
        self._arenas = {
            "param": self._params,
            "grad": self._grads,
            "master": self._masters,
            "momentum": self._momentum,
            "variance": self._variance,
        }
        self._layers: dict[str, _Layer] = {}
        self._loans: list[_Loan] = []  # of the open operator
        self._graded: set[str] = set()  # layers whose gradients are of this step
        self._driver = _Driver(manager.config.device_ordinal) if manager._cuda else None

    def add(self, name: str, tree: typing.Any) -> None:
        """Adds a layer, and copies the values of its parameters to the arenas, by way of the host.

        Args:
            name: 1 to 100 bytes, unique in the manager.
            tree: Its parameters: a tree of arrays of JAX or NumPy of the dtype of all. They are not kept.

        Raises:
            GeminiError: Status "EXISTS": the name is taken. Or there is no room in the tiers below the device; the
                layer's place in the arenas stays taken.
            ValueError: A leaf has another dtype, or no elements.
        """
        if name in self._layers:
            raise abi.GeminiError(f"there is a layer {name!r} already", "EXISTS")
        paths, structure = jax.tree_util.tree_flatten_with_path(tree)
        for path, leaf in paths:
            if str(getattr(leaf, "dtype", type(leaf).__name__)) != self.dtype or not leaf.size:
                raise ValueError(
                    f"{name}{jax.tree_util.keystr(path)} is {getattr(leaf, 'dtype', type(leaf).__name__)} of shape "
                    f"{getattr(leaf, 'shape', ())}: want {self.dtype} with at least one element"
                )
        leaves: list[_Leaf] = []
        try:
            for number, (path, leaf) in enumerate(paths):
                text = f"{name}{jax.tree_util.keystr(path)}".encode()
                title = (text if len(text) <= 127 else text[:110] + f" {number}".encode()).decode(errors="ignore")
                tensor = self.manager.tensor(self._params, title, leaf.size * (4 if self.dtype == "float32" else 2))
                leaves.append(_Leaf(tuple(leaf.shape), (tensor,)))
                handles = [
                    tensor if arena == self._params else self.manager.tensor_counterpart(tensor, arena)
                    for arena in self._arenas.values()
                ]
                leaves[-1] = _Leaf(tuple(leaf.shape), tuple(handles))
            self._layers[name] = _Layer(leaves, structure)
            self.set_values(name, tree)
        except BaseException:
            self._layers.pop(name, None)
            for one in leaves:
                self.manager.tensor_unregister(one.tensors[0])
            raise

    def set_values(self, name: str, tree: typing.Any, what: str = "param") -> None:
        """Overwrites values of a layer, by way of the host, for example with those of a saved file.

        Args:
            name: The layer.
            tree: Arrays of JAX or NumPy, in the tree of the parameters.
            what: "param", which sets the master copy, too; or "grad", "master", "momentum" or "variance".

        Raises:
            GeminiError: There is no room on the host, or an update has failed.
            KeyError: There is no such layer.
            ValueError: It is another tree, or an array has another shape. Nothing was written.
        """
        layer = self._layers[name]
        leaves, structure = jax.tree.flatten(tree)
        if structure != layer.tree:
            raise ValueError(f"the layer {name!r} has {layer.tree}, not {structure}")
        kinds = ["param", "master"] if what == "param" and self._masters != self._params else [what]
        arrays = [np.asarray(values) for values in leaves]
        for leaf, array in zip(layer.leaves, arrays):  # before anything is written
            if array.shape != leaf.shape:
                raise ValueError(f"an array of the layer {name!r} has shape {array.shape}, not {leaf.shape}")
        for kind in kinds:
            for wanted, array in zip(self._ranges(layer, kind, "write", "host"), arrays):
                converted = array.astype(self._dtype_of(kind)).reshape(-1).view(np.uint8)
                with self.manager.acquired(wanted):
                    _bytes(wanted)[:] = converted
        if what == "grad":
            self._graded.add(name)

    def values(self, name: str, what: str = "param") -> typing.Any:
        """Copies values of a layer to NumPy, by way of the host.

        Args:
            name: The layer.
            what: "param", "grad", "master", "momentum" or "variance". Gradients are zeros until vjp() has written them,
                and again after adamw().

        Returns:
            NumPy arrays in the tree of the parameters.

        Raises:
            GeminiError: There is no room on the host, or an update has failed.
            KeyError: There is no such layer.
            ValueError: There is no such value.
        """
        layer, out = self._layers[name], []
        if what == "grad":
            self._complete(name)
        for leaf, wanted in zip(layer.leaves, self._ranges(layer, what, "read", "host")):
            with self.manager.acquired(wanted):
                out.append(_bytes(wanted).copy().view(self._dtype_of(what)).reshape(leaf.shape))
        return jax.tree.unflatten(layer.tree, out)

    def call(self, name: str, function: typing.Callable[..., typing.Any], *args: typing.Any) -> typing.Any:
        """Computes a function of a layer's parameters, as one operator of the manager's open iteration. Blocks.

        Args:
            name: The layer.
            function: Called as function(params, *args) with tracers, once for each shape of args. It gives a tree of
                arrays.
            *args: Trees of arrays.

        Returns:
            What the function gives.

        Raises:
            GeminiError: Status "STATE": no iteration is open. "OOM_DEVICE": the layer's parameters do not fit on the
                device.
            KeyError: There is no such layer.
        """
        layer = self._layers[name]
        params = self._ranges(layer, "param", "read")
        with self._operator(name, params):
            arrays = self._arrays(layer, params)
            return self._finish(_call(function, jax.tree.unflatten(layer.tree, arrays), *args))

    def vjp(
        self, name: str, function: typing.Callable[..., typing.Any], cotangent: typing.Any, *args: typing.Any
    ) -> tuple[typing.Any, tuple[typing.Any, ...]]:
        """Computes a function of a layer once more, and its gradients, as one operator. Blocks.

        The gradient of the parameters goes to the arena, and is added to what other calls for the same layer have put
        there since the last update.

        Args:
            name: The layer.
            function: As of call().
            cotangent: Of what the function gives, in the same tree; a number stands for an array of it. 1.0 for a loss.
            *args: As of call().

        Returns:
            What the function gives; and the cotangents of args, a tuple of trees, which have None for integers.

        Raises:
            GeminiError: As call(). The device has to hold the layer's gradients beside its parameters.
            KeyError: There is no such layer.
        """
        layer = self._layers[name]
        params = self._ranges(layer, "param", "read")
        grads = self._ranges(layer, "grad", "read_write" if name in self._graded else "write")
        with self._operator(f"{name} backward", [*params, *grads]):
            arrays = self._arrays(layer, params)
            tree = jax.tree.unflatten(layer.tree, arrays)
            value, of_params, of_args = self._finish(_vjp(function, tree, args, cotangent))
            self._write(layer, grads, of_params, add=name in self._graded)
            self._graded.add(name)
        return value, of_args

    def update(
        self, name: str, function: typing.Callable[..., typing.Any], *args: typing.Any, master: bool = False
    ) -> None:
        """Updates a layer with a rule written in JAX, as one operator. Blocks. adamw() is the other way.

        Args:
            name: The layer.
            function: Called as function(params, grads, momentum, variance, *args) with trees of one structure. It
                gives the new params, momentum and variance.
            *args: Trees of arrays. What differs between steps is an argument, no part of the function.
            master: Give the function the master copy as its params, in place of the parameters. What it gives becomes
                both, in their dtypes. Not for "float32".

        Raises:
            GeminiError: As call(). The device has to hold all that the layer has.
            KeyError: There is no such layer.
            ValueError: There is no master copy, or the function gives other shapes. Nothing was written.
        """
        layer = self._layers[name]
        if master and self._masters == self._params:
            raise ValueError("parameters in float32 have no master copy")
        if name not in self._graded:
            self._zero_gradient(layer)
        kinds = ["master" if master else "param", "grad", "momentum", "variance"]
        used = [self._ranges(layer, kind, "read" if kind == "grad" else "read_write") for kind in kinds]
        # The copy that the function did not get follows: otherwise the next adamw() would undo this update.
        other = "param" if master else "master"
        follows = self._ranges(layer, other, "write") if self._masters != self._params else []
        every = [one for ranges in used for one in ranges]
        with self._operator(f"{name} update", every):
            arrays = self._arrays(layer, every, [kind for kind in kinds for _ in layer.leaves])
            count = len(layer.leaves)
            trees = [jax.tree.unflatten(layer.tree, arrays[at : at + count]) for at in range(0, len(arrays), count)]
            new = self._finish(_call(function, *trees, *args))
            if len(new) != 3:
                raise ValueError(f"the function of update() gives {len(new)} trees: want params, momentum, variance")
            for tree in new:
                self._check(layer, tree)
            # What is acquired to be written whole loses its bytes: only now, as the function may have raised.
            if follows:
                with self.manager.acquired(*follows):
                    self._write(layer, follows, new[0], kind=other)
            for kind, ranges, tree in zip((kinds[0], "momentum", "variance"), (used[0], used[2], used[3]), new):
                self._write(layer, ranges, tree, kind=kind)
            self._graded.discard(name)

    def adamw(self, step: int, *, late: bool = True, **options: typing.Any) -> None:
        """Updates all layers with AdamW, wherever their bytes are, and forgets their gradients.

        A layer without a gradient is updated with zeros, as in JAX.

        Args:
            step: The number of this update, from 1.
            late: Return at once. Each chunk's update is done before its next use.
            **options: lr, betas, eps, weight_decay and grad_scale, as of Manager.adamw().

        Raises:
            GeminiError: As Manager.adamw().
        """
        self._complete(*self._layers)
        self.manager.adamw(
            step=step,
            grad=self._grads,
            master=self._masters,
            momentum=self._momentum,
            variance=self._variance,
            param=self._params if self._masters != self._params else 0,
            grad_dtype=_DTYPES[self.dtype],
            param_dtype=_DTYPES[self.dtype],
            late=late,
            **options,
        )
        self._graded.clear()

    def grad_norm(self) -> float:
        """The Euclidean norm of all gradients, for clipping by the grad_scale of adamw(). Blocks.

        Returns:
            The norm, summed in double.

        Raises:
            GeminiError: As Manager.norm().
        """
        self._complete(*self._layers)
        return self.manager.norm(self.manager.range(self._grads, "read"), _DTYPES[self.dtype])

    # ---- inside
    def _complete(self, *names: str) -> None:
        """Makes gradients of these layers that no call of vjp() has written zero."""
        for name in names:
            if name not in self._graded:
                self._zero_gradient(self._layers[name])
                self._graded.add(name)

    def _zero_gradient(self, layer: _Layer) -> None:
        for one in self._ranges(layer, "grad", "write"):
            self.manager.zero(one)

    def _dtype_of(self, kind: str) -> typing.Any:
        return jnp.dtype(self.dtype if kind in ("param", "grad") else "float32")

    def _ranges(self, layer: _Layer, kind: str, mode: str, tier: str = "device") -> list[Range]:
        if kind not in self._arenas:
            raise ValueError(f"a layer has no {kind!r}: want one of {', '.join(self._arenas)}")
        at = list(self._arenas).index(kind)
        size = self._dtype_of(kind).itemsize
        return [
            self.manager.range(leaf.tensors[at], mode, 0, math.prod(leaf.shape) * size, tier) for leaf in layer.leaves
        ]

    @contextlib.contextmanager
    def _operator(self, name: str, ranges: list[Range]) -> typing.Iterator[None]:
        """An operator with its ranges, which are released when JAX does not use them any more.

        All is on the calling thread's own stream: the bytes are there for any stream when acquire() returns, and
        nobody may use them any more when release() begins.
        """
        with self.manager.operator(name):
            self.manager.acquire(*ranges)
            try:
                yield
            except BaseException:
                if self._driver:  # nobody may have waited for what JAX computes
                    self._driver.synchronize()
                raise
            finally:
                loans, self._loans = self._loans, []
                if not all([loan.taken_back() for loan in loans]):
                    raise abi.GeminiError(
                        f"parameters that {name!r} was called with are still in use, for example by an array that a "
                        "callback of its function has kept: they stay acquired",
                        "BUSY",
                    )
                self.manager.release(*ranges)

    def _arrays(self, layer: _Layer, ranges: list[Range], kinds: typing.Sequence[str] = ()) -> list[typing.Any]:
        """Ranges of a layer's leaves as JAX arrays over the same bytes; by default of parameters or gradients."""
        for number, one in enumerate(ranges):
            dtype = str(self._dtype_of(kinds[number])) if kinds else self.dtype
            self._loans.append(_Loan(one, dtype, layer.leaves[number % len(layer.leaves)].shape))
        return [loan.array for loan in self._loans[len(self._loans) - len(ranges) :]]

    def _finish(self, out: typing.Any) -> typing.Any:
        """Waits until JAX has computed something, and copies what JAX has returned as it is.

        JAX computes on threads and streams of its own, after the call has returned. What one program computes is there
        only when the whole program has run, so nothing reads the program's arguments afterwards.
        """

        def own(array: typing.Any) -> typing.Any:
            for shard in array.addressable_shards:
                at = shard.data.unsafe_buffer_pointer()
                if any(0 <= at - loan.address < loan.size_bytes for loan in self._loans):
                    return jax.block_until_ready(jnp.copy(array))
            return array

        return jax.tree.map(own, jax.block_until_ready(out))

    def _check(self, layer: _Layer, tree: typing.Any) -> list[typing.Any]:
        """The leaves of a tree. Raises ValueError if it is not one of the layer's shapes."""
        leaves, structure = jax.tree.flatten(tree)
        if structure != layer.tree or any(x.shape != leaf.shape for x, leaf in zip(leaves, layer.leaves)):
            raise ValueError(f"the layer has {layer.tree} of {[leaf.shape for leaf in layer.leaves]}, not {tree}")
        return leaves

    def _write(
        self, layer: _Layer, ranges: list[Range], tree: typing.Any, add: bool = False, kind: str = "grad"
    ) -> None:
        """Copies a tree of arrays, which are computed, to acquired ranges, or adds it to them."""
        leaves = self._check(layer, tree)
        if add:
            leaves = self._finish(_add(leaves, self._arrays(layer, ranges)))
        dtype = self._dtype_of(kind)
        leaves = [jax.block_until_ready(jnp.asarray(array, dtype)) for array in leaves]
        if self._driver:
            self._driver.copy(
                [(one.address or 0, x.unsafe_buffer_pointer(), one.size_bytes) for one, x in zip(ranges, leaves)]
            )
            return
        for one, array in zip(ranges, leaves):
            _bytes(one)[:] = np.asarray(array).reshape(-1).view(np.uint8)
