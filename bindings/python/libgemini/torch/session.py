"""The state behind libgemini.torch: one manager, its arenas by dtype, and where in the training step we are.

Every use of a parameter is an operator: it is opened, what it reads is acquired, it is queued, what it read is
released. In the backward pass the same operators come in reverse order; each begins when autograd reaches the first
node of the function that used the parameters in the forward pass, and ends when the next one begins.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import itertools
import sys
import types
import typing
import warnings
import weakref

import torch

from .. import abi
from ..abi import GeminiError
from ..manager import Manager, parse_bytes
from . import internals
from .internals import StorageWeakRef
from .layout import Space, dense_stride
from .memory import host_tensor, wrap
from .tensors import Use, run_with

if typing.TYPE_CHECKING:
    from .activations import Activations
    from .allocator import Process
    from .model import Model, Record

KINDS = {
    "param": abi.KIND_PARAM,
    "frozen": abi.KIND_PARAM,
    "grad": abi.KIND_GRAD,
    "reused grad": abi.KIND_GRAD,
    "master": abi.KIND_MASTER,
    "momentum": abi.KIND_MOMENTUM,
    "variance": abi.KIND_VARIANCE,
}
DTYPES = {torch.float32: abi.DTYPE_F32, torch.bfloat16: abi.DTYPE_BF16, torch.float16: abi.DTYPE_F16}
PIECE_BYTES = 32 << 20  # what is held at once while a tensor is read or written whole
ALIGNMENT = 256  # elements, of gemini_arena_take()
MOST_USES = 1 << 16  # that are remembered
MOST_PASSES = 64  # forward passes in an iteration without a gradient: who never calls backward() may keep losses, too


def in_backward():
    """Whether autograd is calling us."""
    return internals.graph_task() != -1


def _runs(function):
    """Whether we are called by it."""
    frame: types.FrameType | None = sys._getframe()
    while frame and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


def level_of_caller():
    """The stacklevel for a warning of the function that asks: of who called it from outside of torch and libgemini. How
    many frames of torch are around a step depends on its version, and on whether anything was compiled."""
    frame = sys._getframe(1)
    level = 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "libgemini"):
        frame = frame.f_back
        level += 1
    return level


class Graph:
    """Lives as long as the autograd graph of a forward pass."""


class Place:
    """Where a tensor's bytes live: a range of an arena, with one address on the device for life.

    tensor is the plain torch tensor over that address: to be read and written only between acquire and release. The
    bytes
    live as long as any tensor over its storage does, whoever has it: see Session.free_places().
    """

    __slots__ = (
        "session",
        "arena",
        "offset",
        "object",
        "base",
        "size_bytes",
        "dtype",
        "shape",
        "stride",
        "address",
        "tensor",
        "name",
        "written",
        "number",
        "origin",
        "owner",
        "follows",
        "storages",
    )
    numbers = itertools.count()

    def __init__(self, session, arena, offset, shape, dtype, name, stride=None):
        self.tensor = typing.cast(torch.Tensor, None)  # while wrap() may still fail
        self.session: Session = session
        self.number = next(self.numbers)
        self.origin = None  # of a parameter's: where its values were before, as a layout.Span
        self.owner = None  # of a parameter's: its record, as a weak reference
        self.follows = None  # of a gradient's or a state's: the parameter's place, whose bytes go with these
        self.storages = []  # whose tensors need the bytes, when nobody knows the place any more
        self.arena = arena
        self.offset = offset
        self.written = (
            False  # or True, UNSURE: by the user's functions, since it was last known to be as its master copy
        )
        self.object, self.base = arena, offset  # what the library knows it by, and where it begins there
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.size_bytes = self.shape.numel() * dtype.itemsize
        self.name = name
        self.address = session.arena_base(arena) + offset
        self.tensor = wrap(self.address, self.shape, dtype, session.device, stride)
        self.stride = tuple(self.tensor.stride())  # in elements, without gaps

    def __del__(self):
        """Nobody knows it any more; torch may still have its storage. Any thread can be here at any time."""
        if self.tensor is None or not self.elements:
            return
        (self.follows or self).storages.append(StorageWeakRef(self.tensor.untyped_storage()))
        if not self.follows:
            self.session.left.append((self.arena, self.offset, self.size_bytes, self.object, self.storages))

    @property
    def elements(self):
        return self.shape.numel()

    @property
    def contiguous(self):
        return self.tensor.is_contiguous()

    def has(self, tensor):
        """Whether a managed tensor is all of it, in its order."""
        return (tensor.data_ptr(), tensor.shape, tensor.dtype) == (self.address, self.shape, self.dtype) and tuple(
            tensor.stride()
        ) == self.stride

    def in_order(self, values):
        """Values, of the same number of elements, as one dimension, in the order in which they lie here."""
        order = sorted(range(len(self.shape)), key=lambda i: (-self.stride[i], i))
        return values.reshape(self.shape).permute(order).reshape(-1)

    def register(self, name):
        """A parameter's place becomes a tensor of the library's, with a name that its messages have."""
        lib, handle, out = self.session.lib, self.session.handle, ctypes.c_uint64()
        for number in itertools.count(1):
            unique = (name if number == 1 else f"{name}#{number}").encode()[-127:]
            try:
                lib.tensor_register(handle, self.arena, unique, self.size_bytes, self.offset, out)
                break
            except abi.GeminiError as error:
                if error.status != "EXISTS":
                    raise
        self.object, self.base = out.value, 0

    def access(self, mode, tier=abi.TIER_DEVICE, offset=0, size_bytes=None):
        return abi.Access(
            self.object, self.base + offset, self.size_bytes if size_bytes is None else size_bytes, mode, tier, None
        )

    def host_pieces(self, mode, begin=0, end=None):
        """Yields (first element, CPU tensor of one dimension) over the elements from begin to end, or all, acquired on
        the host one after another."""
        end = self.elements if end is None else end
        step = PIECE_BYTES // self.dtype.itemsize
        if (
            self.session.held and not in_backward()
        ):  # an exception has ended the backward pass, and it holds chunks on the device
            self.session.settle()
        for first in range(begin, end, step):
            count = min(step, end - first)
            access = self.access(mode, abi.TIER_HOST, first * self.dtype.itemsize, count * self.dtype.itemsize)
            with self.session.acquired(access, 1, abi.STREAM_CALLER):
                yield first, host_tensor(access.ptr, count, self.dtype)

    def device_pieces(self, mode, piece_bytes=PIECE_BYTES, begin=0, end=None):
        """Yields (first element, plain tensor of one dimension) over the elements from begin to end, or all, acquired
        on
        the device one after another: for when the host has no room, through which the library itself would go."""
        end = self.elements if end is None else end
        flat, step = self.tensor.as_strided((self.elements,), (1,)), piece_bytes // self.dtype.itemsize
        for first in range(begin, end, step):
            piece = flat[first : min(first + step, end)]
            access = self.access(mode, abi.TIER_DEVICE, first * self.dtype.itemsize, piece.nbytes)
            with self.session.acquired(access, 1, self.session.stream()):
                yield first, piece

    def read(self):
        """A copy on the CPU, in memory of its own, with the place's strides."""
        out = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu")
        self.read_to(out.as_strided((self.elements,), (1,)))
        return out

    def read_to(self, out, begin=0):
        """Fills a CPU tensor of one dimension with the elements from begin on, in the order in which they lie."""
        for pieces in self.host_pieces, self.device_pieces:
            try:
                for first, piece in pieces(abi.READ, begin=begin, end=begin + out.numel()):
                    out[first - begin : first - begin + piece.numel()].copy_(piece)
                return
            except GeminiError as error:
                if error.status != "OOM_HOST" or pieces == self.device_pieces:
                    raise

    def write(self, values):
        """Copies values, of the same number of elements and any dtype, from the CPU or the session's device."""
        flat = self.in_order(values.detach())
        # What is page-locked in several parts, as the host tier may be, CUDA does not copy at once.
        pieces = self.device_pieces if self.session.cuda and flat.is_cuda else self.host_pieces
        for first, piece in pieces(abi.WRITE):
            piece.copy_(flat[first : first + piece.numel()])

    def zero(self):
        if self.elements:  # else it would be all of the arena
            self.session.lib.zero(self.session.handle, ctypes.byref(self.access(0)))


def window_bytes(device_memory, cuda):
    """The size of chunks that the budget is about a thousand of: few enough that their number costs nothing, and small
    enough that what an operator needs is not much less than what comes for it. A GPU maps 2 MiB at least."""
    return min(max(1 << max(device_memory // 1024, 1).bit_length() - 1, 2 << 20 if cuda else 64 << 10), 32 << 20)


class Session:
    """See libgemini.torch.init(), which makes one."""

    def __init__(self, *, device, progress=None, **config):
        self.device = device
        self.progress = progress  # as in progress.Progress: show
        self.cuda = device.type == "cuda"
        memory, margin = (parse_bytes(config.get(name, 0), name) for name in ("device_memory", "device_margin"))
        window = parse_bytes(config.get("window", 0), "window") or window_bytes(memory, self.cuda)
        if memory - margin < window:
            raise GeminiError(
                f"device_memory is {memory} bytes, of which margin leaves {max(memory - margin, 0)}: want at least a "
                f"chunk, which has {window} bytes (window), and for a step all of a parameter and its gradient",
                "INVALID",
            )
        config["window"] = window
        self.manager = Manager(cuda=self.cuda, device_ordinal=device.index or 0, **config)
        self.lib = self.manager.lib
        self.handle = self.manager.handle
        self.arenas = {}  # (kind, dtype, arena it follows or 0): handle
        self.bases = {}  # of an arena: its first address, its number
        self.streams = {}
        self.in_optimizer = None  # while an optimizer's own step runs: where its states shall live
        self.in_closure = 0  # closures that such a step has called and that have not returned
        self.iteration = None  # "train" or "infer" while one is open
        self.called = False  # whether there has been one
        self.graph = None  # while a forward pass runs: a mark that the autograd graph it makes refers to
        self.graphs = []  # of the iteration's forward passes, as weak references
        self.phase = abi.PHASE_NONE
        self.op_open = False
        self.op_number = 0  # operators that began so far
        self.holds = []  # what is acquired, but for activations: (accesses, count, stream, unit or None)
        self.activations: Activations | None = None  # of activations.py, once wanted
        self.allocator: Process | None = None  # of allocator.py: whom torch's own allocator asks
        self.held = None  # what the function that the backward pass has reached has acquired: (use, stream)
        self.backward_task = -1  # autograd's number of the backward pass in progress
        self.uses = {}
        # Records of all parameters that live here, each as long as its parameter; by their id.
        self.known: weakref.WeakValueDictionary[int, Record] = weakref.WeakValueDictionary()
        self.spaces = {}  # of an arena: what is free of what was taken
        self.building = False  # whether models are being built in the session
        # Places that nobody knows any more: (arena, offset, size, object, storages).
        self.left: collections.deque[tuple[typing.Any, ...]] = collections.deque()
        # What is said of a use when there is no manager.
        self.gone = "the session was closed, and its parameters with it"
        self.models: list[Model] = []  # that were prepared
        self.depth = 0  # forward passes of these that run, one within the other
        self.reset_iterations = 0  # that had ended when statistics were last started anew
        self.landed = []  # (record, gradient, stream) of parameters of the function that the backward pass has reached
        self.given = {}  # records of parameters with a gradient that was assigned, in the order in which they were
        self.rules = []  # of the optimizers
        self.rule_of = {}  # of a record whose parameter is updated in the backward pass

    # ---- arenas
    def arena(self, kind, dtype, like=0):
        """The arena of a kind for tensors of dtype; like: the arena of the parameters that these belong to."""
        key = kind, dtype, like
        if key not in self.arenas:
            name = f"{kind}.{str(dtype).removeprefix('torch.')}" + (f".{self.bases[like][1]}" if like else "")
            handle = self.manager.arena(
                KINDS.get(kind, abi.KIND_OTHER),
                name=name,
                element_bytes=dtype.itemsize,
                **{"reuse" if kind == "reused grad" else "like": like},
            )
            self.arenas[key] = handle
            self.bases[handle] = self.manager.arena_info(handle).base, len(self.bases)
        return self.arenas[key]

    def arena_base(self, arena):
        return self.bases[arena][0]

    def place(self, kind, shape, dtype, name, stride=None):
        """A new tensor, which reads as zero, in an arena that follows no other."""
        self.free_places()
        arena, alignment = self.arena(kind, dtype), ALIGNMENT * dtype.itemsize
        size = -(-max(1, torch.Size(shape).numel()) // ALIGNMENT) * alignment
        offset = self.spaces[arena].take(size, alignment) if arena in self.spaces else None
        if offset is None:
            offset = self.manager.take(arena, size)
        return Place(self, arena, offset, shape, dtype, name, stride)

    def place_of(self, tensor, kind):
        """A new place with the values and strides of a managed tensor."""
        place = self.place(kind, tensor.shape, tensor.dtype, tensor._gm_place.name, dense_stride(tensor))
        place.write(tensor.detach().clone())
        return place

    def free_places(self):
        """The bytes of places that were left cost nothing from now on, if no tensor is over them any more."""
        for _ in range(len(self.left)):
            left = self.left.popleft()
            if not all(storage.expired() for storage in left[4]) or not self.free_place(*left[:4]):
                self.left.append(left)

    def free_place(self, arena, offset, size, tensor):
        """Also of its gradient and states, which lie likewise in the arenas that follow its own. False: not yet."""
        (itemsize,) = (dtype.itemsize for (_, dtype, _), handle in self.arenas.items() if handle == arena)
        followers = [
            (handle, dtype.itemsize)
            for (kind, dtype, like), handle in self.arenas.items()
            if like == arena and kind != "reused grad"
        ]

        def zero(begin, end):
            for handle, other in ((arena, itemsize), *followers):
                where = begin // itemsize * other, (end - begin) // itemsize * other
                self.lib.zero(self.handle, ctypes.byref(abi.Access(handle, *where, 0, 0, None)))

        try:
            zero(offset, offset + size)
            if tensor != arena:
                self.lib.tensor_unregister(self.handle, tensor)
        except GeminiError:  # an update is using it, or there is no room for what a chunk has beside it
            return False
        alignment = ALIGNMENT * itemsize
        space = self.spaces.setdefault(arena, Space())
        with contextlib.suppress(GeminiError):  # what reads as zero may go on to cost something
            zero(*space.give(offset, -(-size // alignment) * alignment))  # chunks that are free as a whole now
        return True

    def counterpart(self, place, kind, dtype):
        """Of a parameter's place: the same elements in the arena of another kind, which follows the parameter's."""
        arena = self.arena(kind, dtype, place.arena)
        other = Place(
            self,
            arena,
            place.offset // place.dtype.itemsize * dtype.itemsize,
            place.shape,
            dtype,
            f"{place.name}.{kind}",
            place.stride,
        )
        other.follows = place
        if place.object != place.arena:
            tensor = ctypes.c_uint64()
            self.lib.tensor_counterpart(self.handle, place.object, arena, tensor)
            other.object, other.base = tensor.value, 0
        return other

    def renew_masters(self):
        """A parameter of 16 bits that the user has written to, as load_state_dict() does, is what its master copy shall
        be."""
        for record in self.records:
            if record.place.written:
                record.renew_master()

    def gradients_zero(self):
        """Nothing of the gradients' arenas is needed any more: their chunks cost nothing until they are written."""
        for (kind, *_), arena in self.arenas.items():
            if kind == "grad":
                self.lib.zero(self.handle, ctypes.byref(abi.Access(arena, 0, 0, 0, 0, None)))

    def prepared(self, param):
        return any(param._gm_record in model.records.values() for model in self.models)

    @property
    def model(self):
        """The one that was prepared last, or None."""
        return self.models[-1] if self.models else None

    # ---- streams
    def native_stream(self):
        """torch's current stream, as CUDA names it."""
        return internals.raw_stream(self.device.index or 0) if self.cuda else None

    def stream(self):
        """The library's handle of torch's current stream."""
        if not self.cuda:
            return abi.STREAM_CALLER
        native = self.native_stream()
        stream = self.streams.get(native)
        if stream is None:
            out = ctypes.c_uint64()
            self.lib.stream_adopt(self.handle, native, out)
            stream = self.streams[native] = out.value
        return stream

    # ---- acquire and release
    @contextlib.contextmanager
    def acquired(self, accesses, count, stream):
        hold = ctypes.byref(accesses), count, stream, None
        self.hold(hold)
        try:
            yield
        finally:
            self.let_go(hold)

    def hold(self, hold):
        """Acquires. It is noted before, and until it is released: KeyboardInterrupt comes between any two steps."""
        self.holds.append(hold)
        try:
            self.lib.acquire(self.handle, *hold[:3])
        except GeminiError:
            self.holds.remove(hold)
            raise

    def let_go(self, hold):
        self.lib.release(self.handle, *hold[:3])
        self.holds.remove(hold)

    def recover(self):
        """Where nothing is in use: releases what an interrupt has left."""
        left = [hold for hold in self.holds if not (hold[3] and hold[3].graphed)]
        if not left or in_backward() or _runs(run_with):
            return
        self.held = None
        for hold in left:
            with contextlib.suppress(GeminiError):  # it had been released, or was not acquired yet
                if hold[3]:
                    hold[3].reset()
            with contextlib.suppress(GeminiError):
                self.lib.release(self.handle, *hold[:3])
            self.holds.remove(hold)

    @property
    def records(self):
        return list(self.known.values())

    def use(self, ranges, name):
        """What a function of this name reads and writes; ranges: (place, offset, size in bytes, mode) of each."""
        key = name, *((place.number, *where) for place, *where in ranges)  # which keeps no place alive
        use = self.uses.get(key)
        if use is None:
            if len(self.uses) >= MOST_USES:  # of slices that are always others
                self.uses.clear()
            use = self.uses[key] = Use(ranges, name)
        return use

    def acquire_use(self, use, stream):
        try:
            self.hold((use.pointer, use.count, stream, use.unit))
        except GeminiError as error:
            name = use.forward_name.decode()
            if name in str(error):
                raise
            raise GeminiError(f"{name}: {error}", error.status, error.native_code) from None
        if use.unit:
            use.unit.enter()

    def release_use(self, use, stream):
        try:
            if use.unit:
                use.unit.leave()
        finally:
            self.let_go((use.pointer, use.count, stream, use.unit))

    def note_writes(self, accesses, stream):
        """A function has written what it was to read: while that is there it is acquired for writing, too, so that the
        bytes below are no longer taken for the newest."""
        accesses = (abi.Access * len(accesses))(*accesses)
        for access in accesses:
            access.mode = abi.READ_WRITE
        with self.acquired(accesses, len(accesses), stream):
            pass

    # ---- brackets
    def op_begin(self, name):
        """Ends the operator before, and begins one if we are in an iteration."""
        self.op_end()
        if self.iteration:
            self.op_open = True
            self.op_number += 1
            self.lib.op_begin(self.handle, name, self.stream())

    def op_end(self):
        if self.op_open:
            try:
                self.lib.op_end(self.handle)
            except GeminiError as error:
                self.op_open = False
                if error.status != "STATE":  # else an interrupt came before it had begun, or after it had ended
                    raise
            self.op_open = False

    def set_phase(self, phase):
        if self.iteration and self.phase != phase:
            self.op_end()
            self.lib.phase_set(self.handle, phase)
            self.phase = phase

    def iteration_begin(self, kind):
        try:
            self.lib.iteration_begin(self.handle)
        except GeminiError as error:
            if error.status != "STATE":
                raise
            self.lib.iteration_end(self.handle)  # which an interrupt came before
            self.lib.iteration_begin(self.handle)
        self.iteration, self.called = kind, True
        self.phase = abi.PHASE_NONE
        self.graphs.clear()

    def pass_begin(self):
        """A forward pass of the iteration begins."""
        if torch.is_grad_enabled():
            self.graph = Graph()
            self.graphs.append(weakref.ref(self.graph))

    def awaits_backward(self):
        """Whether a backward pass may come for what was done in this iteration, or has come and a step may."""
        return (
            bool(self.given)
            or any(record.has_grad for record in self.records)
            or len(self.graphs) < MOST_PASSES
            and any(graph() for graph in self.graphs)
        )

    def iteration_end(self):
        self.settle()
        if self.iteration:
            self.iteration = None
            self.phase = abi.PHASE_NONE
            try:
                self.lib.iteration_end(self.handle)
            except GeminiError as error:
                if not error.status.startswith("OOM"):
                    raise
                # All that was to be done has been done: an exception would say that it has not.
                warnings.warn(
                    f"this step was made, but there is no plan for those like it, whose bytes are fetched when they "
                    f"are wanted: {error}. They are faster with more device_memory",
                    stacklevel=level_of_caller(),
                )

    # ---- the backward pass
    def backward_begin(self):
        """Autograd is calling us: if for the first time in this backward pass, that begins."""
        task = internals.graph_task()
        if self.backward_task == task:
            return
        self.backward_task = task  # the one before has ended, by an exception, or this one is inside it
        internals.after_backward(self.settle)
        self.set_phase(abi.PHASE_BACKWARD)
        for rule in self.rules:
            rule.forget_done()
        if not any(record.has_grad for record in self.records):
            self.gradients_zero()

    def backward_op(self, use):
        """Autograd has reached the function of a use: what it read is there until it reaches the next one.

        In between, checkpointing may run functions forward again: operators of their own, beside what is held here.
        """
        if torch.is_grad_enabled():
            raise GeminiError(
                f"{use.forward_name.decode()}: its gradient is to be differentiated again (create_graph=True), "
                "and what that reads cannot be known: this is not supported for parameters in a session"
            )
        self.refuse_closed(use.forward_name.decode())
        self.backward_begin()
        self.leave_function()
        self.op_begin(use.backward_name)
        stream = self.stream()
        self.acquire_use(use, stream)
        self.held = use, stream

    def leave_function(self):
        """The backward pass has left a function: what it held may go, and its gradients may take the parameters'
        place."""
        held, self.held = self.held, None
        if held:
            self.release_use(*held)
        self.store_landed()
        if self.activations:
            self.activations.drain()

    def store_landed(self, only=None):
        """What autograd has put into .grad goes to where gradients live; only: one parameter's."""
        landed = [one for one in self.landed if only is None or one[0] is only]
        self.landed = [one for one in self.landed if only is not None and one[0] is not only]
        for record, gradient, stream in landed:
            if stream != self.native_stream():  # where autograd made it
                torch.cuda.current_stream(self.device).wait_stream(torch.cuda.ExternalStream(stream, self.device))
                gradient.record_stream(torch.cuda.current_stream(self.device))
            record.store(gradient, add=record.has_grad)
        early = [record for record, *_ in landed if record in self.rule_of]
        if early:
            self.op_end()
        for record in early:
            self.rule_of[record].landed(record)

    def land(self, record):
        """A gradient is wanted before the backward pass has left its function, or after an exception has ended that."""
        if not self.landed:
            return
        if not in_backward():
            self.settle()
        elif not record.early:
            self.store_landed(record)

    def settle(self):
        """The backward pass is over, or an exception ended it; no operator is open any more."""
        self.backward_task = -1
        self.leave_function()
        self.op_end()
        for rule in self.rules:
            rule.backward_ends()

    def refuse_closed(self, name):
        if not self.manager.handle:
            raise GeminiError(f"{name}: {self.gone}")

    def forked(self):
        """We are in a process that os.fork() made, as workers of a DataLoader are."""
        self.handle = self.manager.handle = 0
        self.iteration, self.op_open, self.held = None, False, None
        self.gone = (
            "the session is in the process that forked this one, and so are its parameters: give this process copies, "
            'made before, or begin it by "spawn"'
        )

    def close(self, force=False):
        self.landed.clear()  # of a backward pass that an exception has ended
        self.recover()
        self.leave_function()
        self.op_end()
        with contextlib.suppress(GeminiError):  # of an update that failed, which the manager's end tells, too
            self.lib.update_wait(self.handle)
        if self.activations:
            self.activations.close()
        if self.allocator:
            self.close_allocator(force)
        if self.cuda:
            torch.cuda.synchronize(self.device)
        for stream in self.streams.values():
            self.lib.stream_destroy(stream)
        self.manager.close()

    def close_allocator(self, force):
        """What torch allocated goes. Models that nobody has any more but the session go before, with what they hold,
        such as the inputs of their graphs."""
        models: list[weakref.ref[Model]] = []
        while self.models:
            model = self.models.pop()
            model.move_buffers(torch.device("cpu"))
            models.insert(0, weakref.ref(model))
            del model
        assert self.allocator is not None
        try:
            self.allocator.close(force)
        finally:
            self.models = [model for model in (reference() for reference in models) if model is not None]
