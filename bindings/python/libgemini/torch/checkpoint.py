"""Checkpoints: weights in the format of transformers, and what an optimizer needs to go on. Each is written as a whole
or not at all.

A folder holds model.safetensors (or shards and their index), config.json, optimizer.safetensors (or shards), and
training.pt: groups and small states of the optimizer, random states, and what the caller adds. libgemini.json has the
checksums. A checkpoint is written beside the folder, and replaces the folder in one step once it is complete and on the
disk.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import errno
import fcntl
import io
import json
import logging
import os
import re
import shutil
import typing
import zlib

import torch
from torch import nn

from ..abi import GeminiError
from ..manager import parse_bytes
from . import internals, tensorfile
from .arenas import DTYPES, Place
from .division import Mesh, divided
from .memory import can_wrap
from .model import Record, adopt_buffer, are_weights
from .narrow import Narrow
from .optim import Optimizer
from .progress import Progress
from .states import copies

logger = logging.getLogger("libgemini")
VERSION = 1
AHEAD_BYTES = 64 << 20  # that the system is asked to read before they are waited for
MARK, TRAINING, SAVING = "libgemini.json", "training.pt", ".saving"
OURS = re.compile(
    r"(model|optimizer)(-part-\d{5}-of-\d{5})?(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?|training\.pt|libgemini\.json"
)


# ---- one folder in the place of another
def _exchange(one, other):
    """Exchanges two names in one step. Returns False if the system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    at_cwd, exchange = -100, 2
    if rename is None:
        return False
    if rename(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), one, None, other)


def _sync(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _identity(path):
    """A value that changes when a file is written or replaced; None if there is no file."""
    try:
        now = os.lstat(path)
    except FileNotFoundError:
        return None
    return now.st_ino, now.st_size, now.st_mtime_ns


@contextlib.contextmanager
def _alone(folder):
    """A context manager: no other process saves into the folder.

    The lock is a separate file, as the folders exchange their names.
    """
    path = folder + ".saving.lock"
    parent = os.path.dirname(folder)
    try:
        os.makedirs(parent, exist_ok=True)
    except OSError as error:
        raise OSError(
            error.errno, f"{parent}, where the checkpoint {os.path.basename(folder)} is to be, cannot be made", path
        ) from error
    while True:
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise OSError(error.errno, f"no checkpoint can be written to {parent}: {error.strerror}", path) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException as error:
            os.close(lock)
            if isinstance(error, BlockingIOError):
                raise GeminiError(f"another process is saving to {folder}", "BUSY") from None
            raise
        mine, there = os.fstat(lock).st_ino, _identity(path)
        if there and there[0] == mine:
            break
        os.close(lock)  # its owner has removed the file since it was opened
    try:
        yield
    finally:
        os.unlink(path)
        os.close(lock)


def _keep_others(old, folder, taken, ours):
    """Removes an old folder. Files that others have put into it since its files were taken over are moved to the new
    one.

    Args:
        old: The old folder.
        folder: The new folder.
        taken: By name: the identities of a file that was taken over, in the old folder and in the new one.
        ours: The names of files that the save itself has written.
    """
    while True:
        for name in os.listdir(old):
            path, target = os.path.join(old, name), os.path.join(folder, name)
            before, copied = taken.get(name, (None, None))
            other = not OURS.fullmatch(name) and name not in ours and _identity(path) != before
            if os.path.isdir(path) and not os.path.islink(path):
                os.rename(path, target if not os.path.lexists(target) else f"{target}.previous")
            elif other and _identity(target) == copied:  # otherwise somebody has put a newer file there
                os.rename(path, target)
            else:
                os.unlink(path)
        try:
            os.rmdir(old)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # new files have appeared
                raise


def _clear(left, folder):
    """Removes what a killed save has left behind."""
    if os.path.isdir(left):
        if os.path.isdir(folder):
            _keep_others(left, folder, {}, ("config.json", "generation_config.json"))
        else:
            shutil.rmtree(left)


@contextlib.contextmanager
def _replacing(folder):
    """A context manager: gives an empty folder, which at the end is on the disk and gets the name `folder`.

    At any time either the old folder or the new one has that name. Other files of the old folder, such as a
    tokenizer's, are taken over, also those that appear in the meantime.

    If the file system cannot exchange two names, the old folder is FOLDER.previous for a moment. After a kill at that
    moment load() and the next save() find it there.
    """
    new, previous = folder + SAVING, folder + ".previous"
    with _alone(folder):
        if not os.path.exists(folder) and os.path.isdir(previous):
            os.rename(previous, folder)
        if os.path.isdir(folder):
            inner = [entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
            if inner:
                raise GeminiError(
                    f"{folder} holds a folder, {inner[0]}: give checkpoints a folder of their own", "INVALID"
                )
        elif os.path.exists(folder):
            raise GeminiError(f"{folder} is no folder", "INVALID")
        _clear(previous, folder)
        _clear(new, folder)
        os.mkdir(new)
        taken = {}
        try:
            yield new
            ours = os.listdir(new)
            for entry in os.scandir(folder) if os.path.isdir(folder) else ():
                if (
                    not OURS.fullmatch(entry.name)
                    and entry.name not in ours
                    and not entry.is_dir(follow_symlinks=False)
                ):
                    before = _identity(entry.path)
                    copy = os.path.join(new, entry.name)
                    _link(entry.path, copy)
                    taken[entry.name] = before, _identity(copy)
            for name in os.listdir(new):
                _sync(os.path.join(new, name))
            _sync(new)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        old = new
        if not os.path.exists(folder):
            os.rename(new, folder)
        elif not _exchange(new, folder):
            os.rename(folder, previous)
            os.rename(new, folder)
            old = previous
        _sync(os.path.dirname(folder))
        if os.path.exists(old):
            _keep_others(old, folder, taken, ours)
            _sync(folder)


def _link(old, new):
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError:
        shutil.copy2(old, new, follow_symlinks=False)


def together(session, mesh):
    """A context manager: an exception on one of several processes is one on all of them."""
    return mesh.together(session.ranks)


# ---- what is saved
def _tensors_of(model):
    """Each tensor of the model's state dict once, as (names, tensor). It is saved under the first name."""
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    ties = getattr(model, "all_tied_weights_keys", None) or ()
    patterns = getattr(model, "_tied_weights_keys", None) or ()
    groups: dict[typing.Any, typing.Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if name in ignored:
            continue
        if not isinstance(value, torch.Tensor):
            raise GeminiError(
                f"{name} of the model's state dict is a {type(value).__name__}: only tensors can be saved"
            )
        groups.setdefault(id(value), ([], value))[0].append(name)
    for names, _ in groups.values():
        names.sort(key=lambda name: name in ties or any(re.search(pattern, name) for pattern in patterns))
    return list(groups.values())


def _stored(value):
    """Where the bytes are: the place of a managed parameter or buffer, or the tensor itself."""
    record, place = getattr(value, "_gm_record", None), getattr(value, "_gm_place", None)
    if record is not None:
        return record.place
    return value if place is None or place.owner is not None or not place.has(value) else place


def _parameter_names(optimizer, model):
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"the optimizer is a {type(optimizer).__name__}: want the one that libgemini.torch.prepare() gave"
        )
    optimizer.rule.refuse_saving()
    optimizer.find_new()
    names = {id(param): name for name, param in model.named_parameters()}
    for record in optimizer.records:
        if id(record.param) not in names:
            raise GeminiError(f"the optimizer has a parameter, {record.name}, that is not in the model")
    return [names[id(record.param)] for record in optimizer.records]


def _training_state(session, optimizer, model, mesh):
    """The tensors for optimizer.safetensors, and the rest for training.pt."""
    names = _parameter_names(optimizer, model)
    tensors: list[typing.Any] = []
    small: dict[typing.Any, typing.Any] = {}
    arena: dict[typing.Any, typing.Any] = {}
    for name, record in zip(names, optimizer.records):
        for state, value in optimizer.rule.states(record).items():
            if isinstance(value, (Place, Narrow)):
                arena.setdefault(name, []).append(state)
                tensors.append((f"{name}.{state}", value))
            else:
                small.setdefault(name, {})[state] = copies(value)
    rng = {"cpu": torch.get_rng_state()}
    if session.cuda:
        rng["cuda"] = torch.cuda.get_rng_state(session.device)
    rngs = session.ranks.meet(rng) if session.ranks else [rng]
    # Of each rank, the processes with its parts one after the other.
    rngs = [rng for row in zip(*mesh.gather(rngs)) for rng in row]
    left = iter(names)
    groups = [{**group, "params": [next(left) for _ in group["params"]]} for group in optimizer.param_groups]
    training = {
        "groups": groups,
        "small": small,
        "arena": arena,
        "rng": rngs[0],
        "rngs": rngs,  # of all processes
        "others": copies(optimizer.rule.others()),
    }
    return tensors, training


def _pickled(training):
    """The bytes of training.pt, after a check that they can be read without running code."""
    file = io.BytesIO()
    try:
        torch.save(training, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:
        raise GeminiError(
            f"extra and the optimizer's groups must be of numbers, texts, tensors, lists, tuples and dicts: {error}",
            "INVALID",
        ) from error
    return file.getvalue()


def _write_shards(folder, stem, tensors, most_bytes, sums, progress, ranks):
    shards = tensorfile.split(tensors, most_bytes)
    where = {}
    for number, shard in enumerate(shards, 1):
        file = f"{stem}.safetensors" if len(shards) == 1 else f"{stem}-{number:05}-of-{len(shards):05}.safetensors"
        sums[file] = tensorfile.write(os.path.join(folder, file), shard, progress, ranks)
        where.update({name: file for name, _ in shard})
    if len(shards) > 1 and (ranks is None or ranks.rank == 0):
        _write_json(
            os.path.join(folder, f"{stem}.safetensors.index.json"),
            {
                "metadata": {"total_size": sum(tensorfile.size_bytes(value) for _, value in tensors)},
                "weight_map": where,
            },
        )


def _write_json(path, value):
    with open(path, "w") as file:
        json.dump(value, file, indent=1)


def _write_config(model, folder):
    """Writes the files that transformers expects beside the weights."""
    config: typing.Any = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained"):
        return
    config = copy.deepcopy(config)
    config.architectures = [type(model).__name__]
    setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", str(model.dtype).removeprefix("torch."))
    config.save_pretrained(folder)
    if hasattr(model, "can_generate") and model.can_generate():
        model.generation_config.save_pretrained(folder)


def save(session, folder, model, optimizer, extra, max_shard, progress):
    """See libgemini.torch.save()."""
    most_bytes = parse_bytes(max_shard, "max_shard")
    if not most_bytes:
        raise ValueError("max_shard is 0: want at least 1 byte")
    folder = os.path.realpath(folder)
    ranks, mesh = session.ranks, Mesh(model)
    if ranks:
        ranks.meet()
    session.backward.settle()
    session.take_over_written()
    weights = []
    for names, value in _tensors_of(model):
        if value.is_meta:
            raise GeminiError(f"{names[0]} is on the meta device: load it before the model is saved")
        weights.append((names[0], _stored(value)))
    states, training = _training_state(session, optimizer, model, mesh) if optimizer is not None else ([], {})
    data = _pickled({**training, "extra": extra})
    total = sum(tensorfile.size_bytes(value) for _, value in weights + states)
    first = (ranks is None or ranks.rank == 0) and mesh.index == 0
    # An exception on any rank is one on all ranks, so that the first one, which has the folder, leaves the old one.
    with contextlib.ExitStack() as stack, Progress(f"saving {folder}", total, progress) as bar:
        new = folder + SAVING
        with together(session, mesh):
            if first:
                stack.enter_context(_replacing(folder))
        sums: dict[str, int] = {}
        with mesh.together(None):
            _write_shards(new, mesh.stem("model"), weights, most_bytes, sums, bar, ranks)
            if optimizer is not None:
                _write_shards(new, mesh.stem("optimizer"), states, most_bytes, sums, bar, ranks)
        sums = {file: sum for part in mesh.gather(sums) for file, sum in part.items()}
        with together(session, mesh):
            if first:
                with open(os.path.join(new, TRAINING), "wb") as file:
                    file.write(data)
                _write_config(model, new)
                mark = {"version": VERSION, "training": zlib.crc32(data), "tensors": sums}
                if mesh.layouts:
                    mark["parts"] = mesh.layouts
                _write_json(os.path.join(new, MARK), mark)
        with together(session, mesh):
            stack.close()


# ---- what is loaded
def _read_json(path):
    with open(path) as file:
        try:
            return json.load(file)
        except ValueError as error:
            raise GeminiError(f"{path} is damaged: {error}", "FORMAT") from None


class Folder:
    """A checkpoint of ours or of another library, as described by the headers of its files."""

    def __init__(self, folder):
        self.path = os.path.realpath(folder)
        if not os.path.exists(self.path) and os.path.isdir(self.path + ".previous"):
            self.path += ".previous"
        if not os.path.isdir(self.path):
            raise GeminiError(f"there is no checkpoint {folder}", "NOT_FOUND")
        self.mark = None
        if os.path.exists(self.file(MARK)):
            self.mark = _read_json(self.file(MARK))
            if not isinstance(self.mark, dict) or self.mark.get("version") != VERSION:
                raise GeminiError(f"{self.file(MARK)} is damaged, or of a later version than {VERSION}", "FORMAT")

    def file(self, name):
        return os.path.join(self.path, name)

    def check_parts(self, mesh):
        """Raises GeminiError unless it was saved of a model that torch divides in the same way."""
        saved = (self.mark or {}).get("parts", {})
        for name in [*mesh.layouts, *saved]:
            theirs, own = (layouts.get(name, "not divided by torch") for layouts in (saved, mesh.layouts))
            if theirs != own:
                raise GeminiError(
                    f"{self.path}: parameter {name} is {theirs} there, and {own} in the model: load it before "
                    "parallelize_module(), or into a model that is divided in the same way",
                    "FORMAT",
                )

    def entries(self, stem):
        """The Entry of each tensor in model.safetensors, optimizer.safetensors or their shards, by name."""
        single, index = self.file(f"{stem}.safetensors"), self.file(f"{stem}.safetensors.index.json")
        if os.path.exists(single):
            return tensorfile.read_header(single)
        if not os.path.exists(index):
            raise GeminiError(f"{self.path} holds neither {stem}.safetensors nor an index of its shards", "NOT_FOUND")
        try:
            where = dict(_read_json(index)["weight_map"])
        except (KeyError, TypeError, ValueError):
            raise GeminiError(f"{index} is damaged: it has no weight_map", "FORMAT") from None
        entries, headers = {}, {}
        for name, file in where.items():
            path = self.file(os.path.basename(file))
            if path not in headers:
                if not os.path.exists(path):
                    raise GeminiError(f"{path}, which {index} names, is not there", "NOT_FOUND")
                headers[path] = tensorfile.read_header(path)
            if name not in headers[path]:
                raise GeminiError(f"{path} lacks {name}, which {index} says it has", "FORMAT")
            entries[name] = headers[path][name]
        return entries

    def training(self):
        path = self.file(TRAINING)
        if not self.mark or not os.path.exists(path):
            return None
        with open(path, "rb") as file:
            data = file.read()
        if zlib.crc32(data) != self.mark.get("training"):
            raise GeminiError(f"{path} is damaged: its checksum is {zlib.crc32(data):08x}", "FORMAT")
        return torch.load(io.BytesIO(data), weights_only=True)

    def verify(self, entries, progress):
        """Reads all bytes once and compares them with their checksums, if there are any."""
        sums = self.mark["tensors"] if self.mark else {}
        known = [(entry, sums.get(os.path.basename(entry.file), {}).get(entry.name)) for entry in entries]
        known = [(entry, sum) for entry, sum in known if sum is not None]
        total = sum(entry.size_bytes for entry, _ in known)
        with Progress(f"checking {self.path}", total, progress) as bar, tensorfile.summing() as executor:
            tasks = [
                executor.submit(tensorfile.checksum, entry.file, entry.offset, entry.size_bytes) for entry, _ in known
            ]
            for (entry, want), task in zip(known, tasks):
                if task.result() != want:
                    executor.shutdown(cancel_futures=True)
                    raise GeminiError(
                        f"{entry.file}: {entry.name} is damaged: its checksum is {task.result():08x}, not {want:08x}",
                        "FORMAT",
                    )
                bar.add(entry.size_bytes)


def _refuse_others(entry, others):
    """Raises GeminiError if one of the other entries, of names that are one tensor in the model, has other bytes."""
    for other in others:
        if (entry.dtype, entry.shape) == (other.dtype, other.shape) and tensorfile.same_bytes(entry, other):
            continue
        raise GeminiError(
            f"{entry.file}: {entry.name} and {other.name} are one tensor in the model (tied), and differ in the files: "
            'untie them ("tie_word_embeddings": false in config.json), or have transformers build the model, by '
            "from_pretrained()",
            "FORMAT",
        )


def _plan_weights(folder, model, entries):
    """For each tensor of the model what is read into it: (entry, name, tensor)."""
    prefix = getattr(model, "base_model_prefix", "")
    plan, missing, used = [], [], set()
    for names, value in _tensors_of(model):
        if divided(value):
            raise GeminiError(f"{names[0]} is a DTensor: load it before parallelize_module(), or after prepare()")
        candidates = list(names)
        if prefix:
            candidates += [name.removeprefix(prefix + ".") for name in names] + [f"{prefix}.{name}" for name in names]
        found = next((name for name in candidates if name in entries), None)
        if found is None:
            missing.append(names[0])
            continue
        entry = entries[found]
        _refuse_others(entry, [entries[name] for name in names if name in entries and name != found])
        used.update(candidates)
        shape, _ = tensorfile.entire(_stored(value))
        if entry.shape != shape:
            raise GeminiError(f"{entry.file}: {found} has shape {entry.shape}, in the model it has {shape}", "FORMAT")
        if entry.dtype != value.dtype and entry.dtype.is_floating_point and entry.dtype.itemsize == 1:
            raise GeminiError(
                f"{entry.file}: {found} is of {entry.dtype}, the numbers of a quantized weight, which have scales "
                f"beside them; in the model it is of {value.dtype}",
                "FORMAT",
            )
        if entry.dtype != value.dtype and not (entry.dtype.is_floating_point and value.dtype.is_floating_point):
            raise GeminiError(
                f"{entry.file}: {found} is of {entry.dtype}, in the model it is of {value.dtype}", "FORMAT"
            )
        plan.append((entry, names[0], value))
    if missing:
        raise GeminiError(
            f"{folder.path} lacks {len(missing)} of the model's tensors, first {missing[0]}; if transformers "
            "knows how to convert it, call from_pretrained() within libgemini.torch.init()",
            "NOT_FOUND",
        )
    return plan, [name for name in entries if name not in used]


REAL_BUFFERS = "build the model with real buffers, as within accelerate.init_empty_weights(include_buffers=False)"


def _meta_buffers(model):
    """Buffers on the meta device that no file has, which have to be computed."""
    saved = model.state_dict(keep_vars=True)
    out = [(name, buffer) for name, buffer in model.named_buffers() if buffer.is_meta and name not in saved]
    if out and not (hasattr(model, "initialize_weights") and hasattr(model, "all_tied_weights_keys")):
        raise GeminiError(f"buffer {out[0][0]} is on the meta device and in no file: {REAL_BUFFERS}")
    return out


def _compute_buffers(session, model, buffers):
    """Has transformers compute buffers. It leaves those alone that have a value."""
    if not buffers:
        return
    known = {id(buffer) for _, buffer in buffers}
    for value in (*model.parameters(), *model.buffers()):
        value._is_hf_initialized = id(value) not in known
    for _, buffer in buffers:
        value = torch.empty_like(buffer, device=session.device)
        if value.is_floating_point():
            value.fill_(torch.nan)
        torch.utils.swap_tensors(buffer, value)
    model.initialize_weights()
    for name, buffer in buffers:
        if buffer.is_floating_point() and buffer.isnan().any():
            raise GeminiError(f"transformers did not compute the buffer {name}: {REAL_BUFFERS}")


def _opened(entry, fds):
    """The descriptor of an entry's file, from fds, by file."""
    if entry.file not in fds:
        fds[entry.file] = os.open(entry.file, os.O_RDONLY)
    return fds[entry.file]


def _ask_for(entry, fds):
    """Has the system start to read an entry, so that the disk has more to do than what is waited for."""
    with contextlib.suppress(OSError):  # a file system without such advice
        os.posix_fadvise(_opened(entry, fds), entry.offset, entry.size_bytes, os.POSIX_FADV_WILLNEED)


def _read_all(jobs, progress, borrows, asks):
    """Reads entries into their targets, in the given order; where these borrow bytes of files, in that of the files.

    jobs: (entry, function that makes the target, function to call when it is filled).
    borrows: See tensorfile.read().
    asks: Whether the system is asked to read what comes next, as all of it is read here.
    """
    if borrows:
        jobs = sorted(jobs, key=lambda job: (job[0].file, job[0].offset))
    fds: dict[str, int] = {}
    asked = ahead = 0
    try:
        for entry, target, then in jobs:
            while asks and asked < len(jobs) and ahead < AHEAD_BYTES:
                _ask_for(jobs[asked][0], fds)
                ahead += jobs[asked][0].size_bytes
                asked += 1
            tensorfile.read(entry, _opened(entry, fds), target(), borrows)
            then()
            ahead -= entry.size_bytes
            progress.add(entry.size_bytes)
    finally:
        for fd in fds.values():
            os.close(fd)


def _gets_place(value):
    """Whether a value that is no place yet is a parameter on the meta device that gets one."""
    return (
        value.is_meta
        and isinstance(value, nn.Parameter)
        and (value.dtype in DTYPES or type(value) is nn.Parameter and can_wrap(value.dtype))
    )


def _weight_job(session, entry, name, value, quantized):
    """Where a weight goes: into the existing place or tensor; for a parameter on the meta device into a new place.

    quantized: the ids of buffers that go into a new place as well.
    """
    if not value.is_meta:
        return tensorfile.part_of(entry, _stored(value)), lambda: _stored(value), lambda: internals.note_write(value)
    if id(value) in quantized:
        return entry, lambda: adopt_buffer(session, value, name, fill=False), lambda: None
    if _gets_place(value):
        record = Record(session, value, name)

        def allocate():
            record.allocate(value.shape, value.dtype)
            return record.place

        return entry, allocate, record.become_managed

    def make():
        new = torch.empty_like(value, device=session.device)
        if isinstance(value, nn.Parameter):
            new = nn.Parameter(new, value.requires_grad)
        new.__dict__.update(value.__dict__)
        torch.utils.swap_tensors(value, new)
        return value

    return entry, make, lambda: None


def _plan_states(folder, training, optimizer, model, mesh):
    """For each record (record, layout, {state: entry}). rules.py explains layouts."""
    names = _parameter_names(optimizer, model)
    entries = folder.entries(mesh.stem("optimizer"))
    groups = training["groups"]
    optimizer.rule.check_others(training.get("others", {}))
    optimizer.check_groups(groups)
    saved = [name for group in groups for name in group["params"]]
    for own, other in zip(names, saved):
        if own != other:
            raise GeminiError(
                f"{folder.path} is of an optimizer with parameter {other} where this one has {own}", "FORMAT"
            )
    plan = []
    for name, record in zip(names, optimizer.records):
        layout, parts = dict(training["small"].get(name, {})), {}
        for state in training["arena"].get(name, ()):
            entry = entries.get(f"{name}.{state}")
            if entry is None:
                raise GeminiError(f"{folder.path}: optimizer.safetensors, or its shards, lack {name}.{state}", "FORMAT")
            shape, _ = tensorfile.entire(record.place)
            if entry.shape != shape:
                raise GeminiError(
                    f"{entry.file}: {entry.name} has shape {entry.shape}, the parameter has {shape}", "FORMAT"
                )
            layout[state], parts[state] = entry.dtype, entry
        optimizer.rule.check(record, layout)
        plan.append((record, layout, parts))
    return plan


def load_weights(session, model, folder, verify, progress, strict=False, states=(), optimizer=None, borrows=False):
    """See libgemini.torch.load_weights(); borrows as of tensorfile.read()."""
    mesh = Mesh(model)
    with together(session, mesh):
        folder.check_parts(mesh)
        if any(param.is_meta for param in model.parameters()) and hasattr(model, "tie_weights"):
            model.tie_weights()
        entries = folder.entries(mesh.stem("model"))
        plan, unexpected = _plan_weights(folder, model, entries)
        if unexpected:
            text = f"{folder.path} has {len(unexpected)} tensors that the model has not, first {unexpected[0]}"
            if strict:
                raise GeminiError(text, "FORMAT")
            logger.warning("%s", text)
        buffers = _meta_buffers(model)
        if not borrows and not session.ranks:
            _refuse_too_many_bytes(session, folder, plan)
    wanted = [entry for entry, _, _ in plan] + [entry for _, _, parts in states for entry in parts.values()]
    if verify:
        with together(session, mesh):
            if not session.ranks or session.ranks.rank == 0:  # one rank reads all bytes for the others
                folder.verify(wanted, progress)
    session.holds.recover()  # an interrupt may be why the caller loads
    session.backward.settle()
    session.take_over_written()
    with torch.no_grad():
        quantized = (
            set() if session.ranks else {id(one) for inner in model.modules() for one in are_weights(inner).values()}
        )
        # In the order of the model, in which new places then lie: ranks add gradients from the last place to the first,
        # and in the files block 10 comes before block 2.
        jobs = [_weight_job(session, entry, name, value, quantized) for entry, name, value in plan]
        for record, layout, parts in states:
            places = optimizer.rule.renew(record, layout)
            jobs += [
                (tensorfile.part_of(entry, places[state]), lambda place=places[state]: place, lambda: None)
                for state, entry in parts.items()
            ]
        total = sum(entry.size_bytes for entry, *_ in jobs)
        with together(session, mesh), Progress(f"loading {folder.path}", total, progress) as bar:
            _read_all(jobs, bar, borrows, asks=not borrows and not session.ranks)
        _compute_buffers(session, model, buffers)
        if optimizer is None:
            for _, _, value in plan:
                if getattr(value, "_gm_record", None) is not None:
                    value._gm_record.renew_master(whole=True)


def _refuse_too_many_bytes(session, folder, plan):
    """Raises GeminiError if weights that are to be read into the session need more than all of its memory, before any
    of the old ones is overwritten. Of weights that lie in files the session may have less memory.

    plan: See _plan_weights().
    """
    stored = [_stored(value) for _, _, value in plan]
    needed = sum(one.size_bytes if isinstance(one, Place) else one.nbytes * _gets_place(one) for one in stored)
    budgets = session.manager.stats()["budget_bytes"]
    if needed > sum(budgets.values()):
        held = ", ".join(f"{name} {size}" for name, size in budgets.items())
        raise GeminiError(
            f"{folder.path}: {needed} bytes of weights are to be read into the session, whose budgets are {held}: want "
            "more in all",
            "OOM_HOST",
        )


@contextlib.contextmanager
def _default_dtype(dtype):
    """A context manager: floating-point tensors are of this dtype where none is given."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _refuse_unread(source, config):
    """Raises GeminiError if transformers reads more from a folder than weights that are the model's as they are."""
    build = "have transformers build the model, by from_pretrained(), and give infer() that"
    configs = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))]
    if any(getattr(one, "quantization_config", None) is not None for one in configs):
        raise GeminiError(f"{source.file('config.json')} has a quantization_config: {build}", "UNSUPPORTED")
    if os.path.exists(source.file("adapter_config.json")):
        raise GeminiError(f"{source.path} holds an adapter of PEFT beside the model: {build}", "UNSUPPORTED")


def _dtype_of_files(source):
    """The dtype of a model whose config.json names none: that of its first weight, as transformers has it."""
    floating = (entry.dtype for entry in source.entries("model").values() if entry.dtype.is_floating_point)
    return next(floating, torch.get_default_dtype())


def _keep_in_fp32(model, dtype):
    """Makes those tensors fp32 that transformers keeps so whatever the model's dtype is, such as biases of routers."""
    from transformers import modeling_utils

    names: set[str] = set()
    if dtype in (torch.float16, torch.bfloat16):
        names.update(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        names.update(getattr(model, "_keep_in_fp32_modules", None) or ())
    if not names:
        return
    # Since version 5 a name, or a pattern with *, may be anywhere in that of a tensor; before, it is of whole modules.
    anywhere = hasattr(modeling_utils.PreTrainedModel, "_get_dtype_plan")
    patterns = [name.replace("*", ".*") if anywhere else rf"(^|\.){name}($|\.)" for name in names]
    wanted = re.compile("|".join(patterns))
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if wanted.search(name) and value.is_floating_point():
            value.data = value.data.to(torch.float32)


def from_folder(session, folder, verify, progress, in_place):
    """Builds the model that a folder's config.json names, frozen, with the weights of the folder's files.

    See libgemini.torch.infer(); in_place: None is as True, and infer() goes on from there.
    """
    source = Folder(folder)
    try:
        import transformers
    except ImportError:
        raise GeminiError(
            f"{folder} is a folder, whose model transformers builds, which is not installed: give a model"
        ) from None
    config = transformers.AutoConfig.from_pretrained(source.path)
    _refuse_unread(source, config)
    names = getattr(config, "architectures", None) or ["none"]
    build = getattr(transformers, names[0], None)
    if build is None:
        raise GeminiError(
            f"{source.file('config.json')} names the model {names[0]}, which transformers does not have: build the "
            "model, and give that",
            "NOT_FOUND",
        )
    dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None) or _dtype_of_files(source)
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    with _default_dtype(dtype), torch.device("meta"):
        model = build(config)
    model.requires_grad_(False)
    _keep_in_fp32(model, dtype)
    if model.can_generate() and os.path.exists(source.file("generation_config.json")):
        model.generation_config = transformers.GenerationConfig.from_pretrained(source.path)
    if in_place is False or session.ranks:
        load_weights(session, model, source, verify, progress)
        return model
    with session.arenas.apart((*model.parameters(), *model.buffers())):
        load_weights(session, model, source, verify, progress, borrows=True)
    return model


def load(session, folder, model, optimizer, verify, progress):
    """See libgemini.torch.load()."""
    states, mesh = (), Mesh(model)
    with together(session, mesh):
        folder = Folder(folder)
        folder.check_parts(mesh)
        training = folder.training()
        if optimizer is not None:
            if training is None or "groups" not in training:
                raise GeminiError(f"{folder.path} holds no state of an optimizer: load it without one", "NOT_FOUND")
            states = _plan_states(folder, training, optimizer, model, mesh)
    load_weights(session, model, folder, verify, progress, folder.mark is not None, states, optimizer)
    if optimizer is not None:
        optimizer.zero_grad()
        optimizer.rule.set_others(training.get("others", {}))
        optimizer.set_groups(training["groups"])
        rngs = training.get("rngs", [training["rng"]])
        rank = (session.ranks.rank if session.ranks else 0) * mesh.count + mesh.index
        if rank < len(rngs):  # otherwise there were fewer ranks: this one keeps its own
            torch.set_rng_state(rngs[rank]["cpu"])
            if session.cuda and "cuda" in rngs[rank]:
                torch.cuda.set_rng_state(rngs[rank]["cuda"], session.device)
    return training["extra"] if training else None
