"""Units: modules whose parameters come and go together, for torch.compile, TorchScript, CUDA graphs and small modules.

torch.compile() makes one function of a module and has to trace plain tensors. What torch.jit makes of a module runs
without Python. So around each call of a unit all its parameters are acquired in one batch, as one operator, and become
plain nn.Parameters. In the backward pass the same happens from the first node that the call made until the first node
of another operator.

libgemini does not see what is done with plain tensors. So the unit afterwards compares the versions that torch counts,
to find what was written, and looks for views that somebody has kept. These become managed.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import operator
import sys
import typing

import torch
from torch import nn

from .. import abi
from ..abi import GeminiError
from . import internals, patches
from .tensors import (
    ManagedNumber,
    ManagedParameter,
    ManagedTensor,
    Use,
    become_number,
    become_tensor,
    grad_nodes,
    hook_nodes,
    is_number,
    refuse_tracing,
    run_with,
    statistics,
    units,
    with_managed,
)

if typing.TYPE_CHECKING:
    from .arenas import Place

# Whether a collection moves the objects that survive it to the next generation.
_YOUNG = sys.version_info < (3, 14)


def optimized(module):
    """Whether torch.compile() returned the module.

    Its hooks are not compiled; the forward function that it calls is.
    """
    return isinstance(module, internals.optimized_module())


def compiled_in_place(module):
    """Whether module.compile() compiled it, together with its hooks."""
    return hasattr(internals.compiled_call_of(module), "_torchdynamo_orig_callable")


def scripted(module):
    """Whether torch.jit.script() or trace() made it. All its methods, and those of its children, run in C++."""
    return isinstance(module, torch.jit.ScriptModule)


def graphed(module):
    """Whether torch.compile() was told to make CUDA graphs of it."""
    of = module if optimized(module) else internals.compiled_call_of(module)
    config = getattr(of, "get_compiler_config", lambda: None)() or {}
    return bool(config.get("triton.cudagraphs"))


@internals.not_traced  # some versions of torch cannot trace an exception
def _refuse_compiling():
    raise GeminiError(
        "torch.compile() came after libgemini.torch.prepare(), or compiles a function that calls the model: "
        "compile the model's blocks, before prepare()"
    )


def refuse_compiling():
    """Raises GeminiError if torch.compile() compiles the caller."""
    if internals.within_compiled():
        _refuse_compiling()


def find(module):
    """The unit that a module is, or None."""
    call = module.forward if optimized(module) or scripted(module) else internals.compiled_call_of(module)
    return getattr(call, "_gm_unit", None)


class _Kinds(dict):
    """A cache: whether a class is one of tensors that are not managed."""

    def __missing__(self, kind):
        if len(self) > 4096:
            self.clear()  # the program makes classes all the time
        self[kind] = found = issubclass(kind, torch.Tensor) and not issubclass(kind, ManagedTensor)
        return found


_is_plain = _Kinds().__getitem__
_version = operator.attrgetter("_version")
_address = torch.Tensor.data_ptr


def _address_or_0(tensor):
    try:
        return _address(tensor)
    except (NotImplementedError, RuntimeError):  # a tensor without storage
        return 0


def collections():
    """How often Python's garbage collector has collected each generation."""
    return [generation["collections"] for generation in gc.get_stats()]


def tensors_since(before):
    """Tensors that are not managed: at least those that were made since collections() returned `before`."""
    oldest = max((i for i, (old, new) in enumerate(zip(before, collections())) if new != old), default=-1)
    if oldest > 0 or oldest == 0 and not _YOUNG:
        generations = [gc.get_objects()]
    else:
        generations = [gc.get_objects(generation) for generation in range(oldest + 2)]
    return [one for objects in generations for one in itertools.compress(objects, map(_is_plain, map(type, objects)))]


@functools.cache  # compiled code is compiled anew for another function
def _noting(replaced):
    """Wraps a function that writes running statistics, which has their places in units noted."""
    function = replaced.original

    @functools.wraps(function)
    def call(*args, **kwargs):
        if torch.compiler.is_compiling():
            _compiles_statistics()
        else:
            note_statistics(statistics(function, args, kwargs))
        return function(*args, **kwargs)

    return call


def _compiles_statistics():
    """torch.compile() compiles such a function: with some of its backends it will change no version."""
    for unit in units:
        unit.unseen = unit.unseen or unit.has_statistics


_compiles_statistics._dynamo_marked_constant = True  # type: ignore[attr-defined]  # called when it is compiled


def note_statistics(tensors):
    """Running statistics are written. Those of units that run are in their parameters or buffers, which are plain."""
    for tensor in tensors:
        number = internals.storage_number(tensor)
        for unit in units:
            if number in unit.storages:
                unit.statistics.add(unit.storages[number][1])


def watch_statistics():
    """Replaces what writes running statistics while a unit runs that may have some, and only then: torch.jit.script()
    knows these functions by what they are."""
    wanted = any(unit.has_statistics for unit in units)
    if wanted and not _noting_now:
        patches.keep_names()
    for replaced in patches.batch_norms:
        if wanted != (replaced in _noting_now):
            replaced.replace(_noting(replaced)) if wanted else replaced.restore()
            (_noting_now.add if wanted else _noting_now.remove)(replaced)


_noting_now: set[patches.Replaced] = set()  # those that are replaced


class Unit:
    """A module whose parameters are all on the device while it runs."""

    def __init__(self, session, module, name, unseen=False, kinds=None):
        """
        Args:
            session: The session.
            module: The module.
            name: Its name, for messages.
            unseen: Whether the module may write to its parameters without an increment of their versions.
            kinds: Of a whole model (whole.py): the classes that its tensors have while it runs, by those that they
                have otherwise. None: they are plain.
        """
        self.session = session
        self.whole = kinds is not None
        tensors = [tensor for tensor in (*module.parameters(), *module.buffers()) if isinstance(tensor, ManagedTensor)]
        for tensor in tensors:
            if tensor._gm_division is not None:
                raise GeminiError(
                    f"{tensor._gm_place.name} is this process's part of a DTensor, which a unit, here {name}, would "
                    "take for the whole: compiled modules and gm.unit() need plain parameters"
                )
        # Of a whole model: those that may become numbers, which they are not while it runs.
        self.scalars = [tensor for tensor in tensors if self.whole and not tensor.dim()]
        for tensor in () if self.whole else tensors:
            tensor._gm_unit = True
            if isinstance(tensor, ManagedNumber):  # within a unit it is a plain tensor, and its bytes are there
                become_tensor(tensor)
        self.keeper = None  # what has acquired a whole model; see whole.py
        # Parameters, and buffers over parameters; their class, and that while the unit runs.
        self.kinds = [
            (tensor, type(tensor), type(tensor)._gm_plain if kinds is None else kinds[type(tensor)])
            for tensor in tensors
        ]
        self.tensors = [tensor for tensor in tensors if tensor.numel()]
        # Inference tensors have no versions.
        self.counted = [tensor for tensor in self.tensors if not tensor.is_inference()]
        self.unseen = unseen or len(self.counted) < len(self.tensors)
        self.name = name
        self.users = 0  # running calls, and the backward pass that has reached one
        self.watched, self.versions = [], []  # tensors that may be written, while there are users
        self.before = [0]  # collections() when the first user came
        # Whether its forward pass calls custom functions. Their backward may call backward(), as that of a reentrant
        # checkpoint does.
        self.nests = False
        self.graphed = False  # within resident(): nothing else may be queued during a capture
        self.captured = set()  # places that were written then: replays may write them again
        # Whether some of its tensors may be running statistics, and the places of those that were written.
        self.has_statistics = any(not one.requires_grad and one.is_floating_point() for one in tensors)
        self.statistics = set()
        self.places = list(dict.fromkeys(tensor._gm_place for tensor in self.tensors))
        self.begin = min((place.address for place in self.places), default=0)
        self.end = max((place.address + place.size_bytes for place in self.places), default=0)
        # By number of a storage: the storage, its place, and how many tensors refer to it if there is no view.
        self.storages = {}
        for place in self.places:
            storage = place.tensor.untyped_storage()
            # The place's tensor and this storage object are two references.
            known = 2 + sum(tensor._gm_place is place for tensor in self.tensors)
            self.storages[storage._cdata] = storage, place, known
        ranges = tuple((place, 0, place.size_bytes, abi.READ) for place in self.places)
        size = sum(size for _, _, size, _ in ranges)
        limit = session.manager.stats()["budget_bytes"]["device"]
        if size > limit:
            raise GeminiError(
                f"{name} is compiled, scripted, or a unit, so all its parameters are on the device at once: "
                f"{size} bytes, device_memory is {limit}; compile or script its blocks instead"
            )
        self.use = Use(ranges, "model" if self.whole else "unit", self) if ranges else None

    def enter(self):
        """Makes the tensors plain. They have been acquired before."""
        self.users += 1
        if self.users > 1:
            return
        units.append(self)
        if self.has_statistics:
            watch_statistics()
        self.become_running()
        for tensor, kind, _ in () if self.whole else self.kinds:
            if len(tensor._post_accumulate_grad_hooks or ()) > 1:  # its own, and others
                record = getattr(tensor, "_gm_record", None)  # plain tensors have none
                if record is not None:
                    record.show(self, kind)
        if self.watched:  # since a call whose views may be left
            self.note_writes()
            return
        self.watched = list(self.counted)
        self.versions = list(map(_version, self.watched))
        self.before = collections()

    def become_running(self):
        """Gives the tensors the classes that they have while the unit runs."""
        for tensor, _, running in self.kinds:
            tensor.__class__ = running  # type: ignore[assignment]
        for tensor in self.scalars:
            tensor._gm_unit = True

    def become_managed(self):
        """Gives the tensors the classes that they have otherwise."""
        for tensor, kind, _ in self.kinds:
            tensor.__class__ = kind
        for tensor in self.scalars:
            tensor._gm_unit = False
            if is_number(tensor):  # it was frozen meanwhile
                become_number(tensor)

    def leave(self):
        """Notes writes and makes the tensors managed again. They are still acquired."""
        try:
            self.note_writes()
        finally:
            self.users -= 1
            if not self.users:
                units[:] = [unit for unit in units if unit is not self]
                if self.has_statistics:
                    watch_statistics()
                self.become_managed()
                if not self.whole:
                    self.settle()

    def reset(self):
        """Ends all uses, after an interrupt."""
        self.users = 1
        self.leave()

    def took_data(self, data):
        """Watches the result of `tensor.data`, whose versions torch counts separately."""
        if not data.is_inference() and internals.storage_number(data) in self.storages:
            self.watched.append(data)
            self.versions.append(data._version)

    def note_writes(self):
        """Finds the parameters that were written, by their versions, and marks their places."""
        with internals.plain():
            versions = list(map(_version, self.watched))
        written: set[Place] = set()
        if versions != self.versions:
            written = {
                self.storages[internals.storage_number(tensor)][1]
                for tensor, old, new in zip(self.watched, self.versions, versions)
                if old != new
            }
            self.versions = versions
        written |= self.statistics
        self.statistics.clear()
        if self.graphed:
            self.captured.update(written)
        written.update(self.places if self.unseen or patches.data_is_compiled() else self.captured)
        if not written:
            return
        self.session.holds.note_writes([place.access(abi.READ_WRITE) for place in written], self.session.holds.stream())
        for place in written:
            place.written = True

    def settle(self):
        """Ends the watch of tensors that may be written, and finds views."""
        self.watched, self.versions = [], []
        self.find_views()

    def is_alone(self):
        """Whether nobody has a tensor over the parameters but the module; so have graphs with what they have saved."""
        return all(internals.storage_users(storage) == known for storage, _, known in self.storages.values())

    def find_views(self):
        """Makes tensors managed that were made over the parameters in the meantime and that somebody has kept."""
        if self.is_alone():
            return
        found, begin, end = [], self.begin, self.end
        with internals.plain():
            made = tensors_since(self.before)
            try:
                addresses = list(map(_address, made))
            except (NotImplementedError, RuntimeError):
                addresses = list(map(_address_or_0, made))
            for one, address in zip(made, addresses):
                if begin <= address < end:
                    storage = internals.storage_number(one)
                    if storage in self.storages:
                        found.append((one, self.storages[storage][1]))
        for one, place in found:
            self.manage(one, place)

    def manage(self, tensor, place):
        kinds: dict[typing.Any, type[ManagedTensor]] = {torch.Tensor: ManagedTensor, nn.Parameter: ManagedParameter}
        kind = kinds.get(type(tensor))
        if kind is None:
            raise GeminiError(
                f"{place.name}: a {type(tensor).__name__} over its bytes was made in unit {self.name}, and "
                "kept: make it of a clone()"
            )
        tensor.__class__ = kind
        tensor._gm_place = place
        if is_number(tensor):
            become_number(tensor)

    def run(self, call, args, kwargs):
        """Runs a call of the module as one operator, and has the backward pass acquire the unit's parameters again."""
        if self.use is None or self.graphed:
            return call(*args, **kwargs)
        name = self.tensors[0]._gm_place.name
        refuse_tracing(name)
        if internals.transform_level() is not None:
            raise GeminiError(
                f"{name}: it is of a unit, which cannot be called within a transform of torch.func: give that a "
                "deepcopy of the module"
            )
        patches.watch_compiler()
        inputs: set[typing.Any] = set()
        if torch.is_grad_enabled():
            grad_nodes((args, kwargs), inputs)
        running, first = self.session.running, internals.next_node_number()
        running.append(self.use)
        try:
            out = run_with(self.session, self.use, call, args, kwargs)
        finally:
            running.pop()
        if torch.is_grad_enabled():
            nodes: set[typing.Any] = set()
            grad_nodes((out, args, kwargs), nodes)  # arguments may have been changed in place
            nodes -= inputs
            self.session.passes.note_call(self.use, first, nodes)
            hook_nodes(self.session, self.use, nodes)
        return out


def make_unit(session, module, name):
    """Wraps the call of a module; for one that torch.compile() returned, the function inside its hooks."""
    if session.allocator and graphed(module):
        raise GeminiError(
            f'{name} is compiled to CUDA graphs (mode="reduce-overhead" or "max-autotune"), whose memory must '
            'be torch\'s own: call libgemini.torch.init(allocator="torch")'
        )
    call = module.forward if optimized(module) else internals.call_of(module)
    unit = Unit(session, module, name)

    def call_unit(*args, **kwargs):
        return unit.run(call, args, kwargs)

    run: typing.Any = call_unit
    run._gm_unit = unit
    if optimized(module):
        module.forward = run
    else:
        internals.set_call(module, run)
    return unit


# Methods of torch.jit that read parameters, like the scripted methods do.
_SCRIPT_METHODS = (
    "save",
    "save_to_buffer",
    "_save_for_lite_interpreter",
    "_save_to_buffer_for_lite_interpreter",
    "__deepcopy__",
)


def make_scripted(session, module, name):
    """Wraps each method of a scripted module and of its children, which are units of their own, as the user may call
    their methods, too.

    Methods of the outer module do not call the wrapped ones.
    """
    for path, inner in module.named_modules():
        unseen = internals.scripts_data(inner) or internals.scripts_statistics(inner)
        unit = Unit(session, inner, f"{name}.{path}" if path else name, unseen)
        for method in (*internals.script_methods(inner), *_SCRIPT_METHODS):
            call = getattr(inner, method)

            def call_unit(*args, _gm_unit=unit, _gm_call=call, **kwargs):
                return _gm_unit.run(_gm_call, args, kwargs)

            run: typing.Any = call_unit
            run._gm_unit = unit
            inner.__dict__[method] = run


def make_units(session, module, name=""):
    """Makes units of the compiled and scripted modules in a tree, except those within another unit."""
    if find(module):
        return
    if scripted(module):
        make_scripted(session, module, name or type(module).__name__)
        return
    if optimized(module) or compiled_in_place(module):
        make_unit(session, module, name or type(module).__name__)
        return
    for child, inner in module.named_children():
        make_units(session, inner, f"{name}.{child}" if name else child)


def unit(session, module):
    """See libgemini.torch.unit()."""
    found: tuple[nn.Module, str] | None = next(
        (
            (model.module, name)
            for model in session.models
            for name, inner in model.module.named_modules()
            if inner is module and name
        ),
        None,
    )
    if found is None:
        raise GeminiError(f"the {type(module).__name__} is no module in the models that were prepared")
    tree, name = found
    for other, inner in tree.named_modules():
        if find(inner) and inner is not module and (module in inner.modules() or inner in module.modules()):
            raise GeminiError(f"{name} and {other} cannot both be units: one is in the other")
    if not find(module):
        for model in session.models:
            model.blocks.unwrap(module)
            model.whole.stop()
    return find(module) or make_unit(session, module, name)


def _refuse_scripting(function):
    """Wraps a function of torch.jit that makes a scripted module.

    It reads parameters without libgemini, so managed ones are refused.
    """

    @functools.wraps(function)
    def call(module, *args, **kwargs):
        for kind, tensors in ("parameter", module.named_parameters()), ("buffer", module.named_buffers()):
            name = next((name for name, tensor in tensors if isinstance(tensor, ManagedTensor)), None)
            if name is not None:
                raise GeminiError(
                    f"{kind} {name} of a {type(module).__name__} that torch.jit is to script, trace or freeze is "
                    "in a session: do that before libgemini.torch.prepare(), and outside of init()"
                )
        return function(module, *args, **kwargs)

    return call


def _traces(function):
    """Wraps a function of torch.jit that calls a function and keeps the addresses of what it has used.

    The parameters of a whole model are managed meanwhile, which refuses that for them.
    """

    @functools.wraps(function)
    def call(*args, **kwargs):
        running = [unit for unit in units if unit.whole]
        for unit in running:
            unit.become_managed()
        try:
            return function(*args, **kwargs)
        finally:
            for unit in running:
                unit.become_running()

    return call


def _call_script(function, *args, **kwargs):
    """Replaces ScriptFunction.__call__(), which does not ask __torch_function__."""
    return with_managed(
        functools.partial(patches.script_call.original, function), f"torch.jit.{function.name}", args, kwargs
    )


@functools.cache
def replacements() -> dict[patches.Replaced, typing.Any]:
    """See patches.py: what torch.jit makes of modules and functions runs without Python."""
    return {
        patches.script_module: _refuse_scripting(patches.script_module.original),
        patches.freeze: _refuse_scripting(patches.freeze.original),
        patches.script_call: _call_script,
        **{replaced: _traces(replaced.original) for replaced in patches.tracers},
    }


@contextlib.contextmanager
def resident(session, module):
    """See libgemini.torch.resident()."""
    one = unit(session, module)
    if one.use is None:
        yield
        return
    patches.watch_compiler()
    stream = session.holds.stream()
    session.holds.acquire_use(one.use, stream)
    one.graphed = True
    try:
        with session.allocator.suspended() if session.allocator else contextlib.nullcontext():
            yield
    finally:
        try:
            session.holds.release_use(one.use, stream)
        finally:
            one.graphed = False
