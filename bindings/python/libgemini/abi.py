"""The C library as ctypes sees it: gemini.h, declaration for declaration, and the library found and loaded.

Not for users: libgemini.Manager and libgemini.torch are. A test compares the layouts with the header's.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
import sys
import typing
from ctypes import (
    POINTER,
    c_char,
    c_char_p,
    c_double,
    c_int32,
    c_int64,
    c_ssize_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)

OK = 0
ERR_PEER = -16
STATUS = {
    -1: "INVALID",
    -2: "HANDLE",
    -3: "STATE",
    -4: "BUSY",
    -5: "OOM_DEVICE",
    -6: "OOM_HOST",
    -7: "OOM_FILE",
    -8: "OOM_SYSTEM",
    -9: "IO",
    -10: "FORMAT",
    -11: "NOT_FOUND",
    -12: "EXISTS",
    -13: "UNSUPPORTED",
    -14: "DEVICE",
    -15: "PENDING",
    -16: "PEER",
}
STREAM_CALLER = 0
TIER_DEVICE, TIER_HOST, TIER_FILE = 0, 1, 2
TIERS = ("device", "host", "file")
FILE_ENGINES = {"auto": 0, "uring": 1, "threads": 2}
PLACEMENTS = {"auto": 0, "cuda": 1, "cpu": 2, "static": 3}
CACHE_POLICIES = {"lru": 0, "frequent": 1, "least-stale": 2}
DEVICE_SIMULATED, DEVICE_CUDA = 0, 1
CONFIG_STRICT, CONFIG_EXPLAIN_FAULTS = 1, 2
KIND_PARAM, KIND_GRAD, KIND_MASTER, KIND_MOMENTUM, KIND_VARIANCE, KIND_OTHER = range(6)
ARENA_GROWS = 1
OFFSET_NEXT = 2**64 - 1
PHASE_NONE, PHASE_FORWARD, PHASE_BACKWARD, PHASE_UPDATE = range(4)
READ, WRITE, READ_WRITE = 1, 2, 3
DTYPE_F32, DTYPE_BF16, DTYPE_F16, DTYPE_F64 = range(4)
UPDATE_LATE, UPDATE_SPECULATE, UPDATE_COMMIT, UPDATE_PART, UPDATE_PASSES = 1, 2, 4, 8, 16
TRANSPORT_SHARED = 0
TRANSPORT_NCCL = 1
GROUP_RANK_ORDER = 1
GROUP_REGISTER = 2
COMM_QUEUES = 1
ZERO_AUTO, ZERO_STATES, ZERO_GRADIENTS, ZERO_PARAMS = range(4)
REASON_ALL = 2**32 - 1
LINKS = ("host to device", "device to host", "host to file", "file to host")
BINDS = ("compute", "fetches", "evicts", "updates", "files", "gathers", "sums")
REASONS = ("demand", "plan", "pressure", "caller", "update")

LogFn = ctypes.CFUNCTYPE(None, c_void_p, c_int32, c_char_p)
CallFn = ctypes.CFUNCTYPE(None, c_void_p)


class _Sized(ctypes.Structure):
    """A struct whose first member says its size, as GEMINI_..._INIT sets it."""

    def __init__(self, **fields: typing.Any) -> None:
        super().__init__(struct_size=ctypes.sizeof(self), **fields)


class ErrorInfo(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("status", c_int32),
        ("native_code", c_int64),
        ("operation", c_char * 64),
        ("message", c_char * 440),
    ]


class Config(_Sized):
    _fields_: typing.ClassVar[typing.Any] = (
        [
            (name, c_uint32)
            for name in (
                "struct_size",
                "flags",
                "placement",
                "device",
                "device_ordinal",
                "warmup_iterations",
                "update_threads",
                "log_level",
            )
        ]
        + [
            (name, c_uint64)
            for name in ("device_bytes", "device_margin_bytes", "host_bytes", "file_bytes", "chunk_bytes")
        ]
        + [
            ("static_param_fraction", c_double),
            ("static_optim_fraction", c_double),
            ("sim_h2d_bytes_per_s", c_uint64),
            ("sim_d2h_bytes_per_s", c_uint64),
            ("file_dir", c_char_p),
            ("log_fn", LogFn),
            ("log_user", c_void_p),
            ("file_engine", c_uint32),
            ("cache_policy", c_uint32),
            ("checkpoint_name", c_char_p),
            ("watchdog_ns", c_uint64),
        ]
    )


class ArenaConfig(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("kind", c_uint32),
        ("element_bytes", c_uint32),
        ("flags", c_uint32),
        ("capacity_bytes", c_uint64),
        ("name", c_char_p),
        ("like", c_uint64),
        ("reuse", c_uint64),
        ("group", c_uint64),
        ("zero_stage", c_uint32),
        ("dtype", c_uint32),
    ]


class ArenaInfo(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("kind", c_uint32),
        ("base", c_uint64),
        ("size_bytes", c_uint64),
        ("capacity_bytes", c_uint64),
        ("chunk_bytes", c_uint64),
        ("tensor_count", c_uint64),
        ("element_bytes", c_uint32),
        ("reserved", c_uint32),
    ]


class TensorInfo(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("state", c_uint32),
        ("address", c_uint64),
        ("size_bytes", c_uint64),
        ("offset_bytes", c_uint64),
        ("arena", c_uint64),
        ("users", c_uint64),
        ("name", c_char * 128),
    ]


class Access(ctypes.Structure):
    """Arrays of it are made of such structs, or each one's struct_size is set: ctypes starts with zeros there."""

    _fields_ = [
        ("struct_size", c_uint32),
        ("mode", c_uint32),
        ("tier", c_uint32),
        ("reserved", c_uint32),
        ("object", c_uint64),
        ("offset_bytes", c_uint64),
        ("size_bytes", c_uint64),
        ("ptr", c_void_p),
    ]

    def __init__(
        self,
        object: int = 0,
        offset_bytes: int = 0,
        size_bytes: int = 0,
        mode: int = 0,
        tier: int = 0,
        ptr: int | None = None,
    ) -> None:
        super().__init__(ctypes.sizeof(self), mode, tier, 0, object, offset_bytes, size_bytes, ptr)


class Location(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("arena", c_uint64),
        ("arena_offset_bytes", c_uint64),
        ("tensor", c_uint64),
        ("tensor_offset_bytes", c_uint64),
    ]


class Forecast(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("lacks", c_uint32),
        ("binds", c_uint32),
        ("placement", c_uint32),
        *(
            (name, c_uint64)
            for name in (
                "chunk_bytes",
                "model_bytes",
                "device_needed",
                "host_needed",
                "file_needed",
                "device_bytes",
                "host_bytes",
                "file_bytes",
                "stays_bytes",
                "fetch_bytes",
                "evict_bytes",
                "read_bytes",
                "device_pieces",
                "host_pieces",
                "step_ns",
                "stall_ns",
                "compute_ns",
                "fetch_ns",
                "evict_ns",
                "update_ns",
                "file_ns",
            )
        ),
    ]


class UpdateSpan(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("tier", c_uint32),
        ("first_element", c_uint64),
        ("element_count", c_uint64),
        ("stream", c_uint64),
        ("arena_count", c_uint32),
        ("pass", c_uint32),
        ("ptr", c_void_p * 8),
        ("out", c_void_p * 8),
    ]


UpdateFn = ctypes.CFUNCTYPE(None, c_void_p, POINTER(UpdateSpan))


class Update(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("arenas", POINTER(c_uint64)),
        ("modes", POINTER(c_uint32)),
        ("arena_count", c_uint32),
        ("reserved", c_uint32),
        ("first_element", c_uint64),
        ("element_count", c_uint64),
        ("stream", c_uint64),
        ("fn", UpdateFn),
        ("user", c_void_p),
        ("user_bytes", c_uint64),
        ("try_fn", c_void_p),
    ]


class Stats(_Sized):
    _fields_: typing.ClassVar[typing.Any] = [("struct_size", c_uint32), ("file_engine", c_uint32)] + [
        (name, c_uint64)
        for name in (
            "model_bytes",
            "nonmodel_bytes",
            "nonmodel_peak_bytes",
            "chunk_bytes",
            "acquire_hits",
            "acquire_misses",
            "stall_ns",
            "iterations",
            "planned_iterations",
            "departures",
            "plans",
            "predicted_step_ns",
            "measured_step_ns",
            "planned_fetch_bytes",
            "planned_evict_bytes",
            "op_peak_error_bytes",
            "pending_updates",
            "host_alloc_bytes",
            "speculated_elements",
            "committed_elements",
            "dropped_elements",
        )
    ]


class TierStats(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("tier", c_uint32),
        ("budget_bytes", c_uint64),
        ("used_bytes", c_uint64),
        ("peak_bytes", c_uint64),
    ]


class LinkStats(_Sized):
    _fields_: typing.ClassVar[typing.Any] = [
        (name, c_uint32) for name in ("struct_size", "reason", "from_tier", "to_tier", "from_ordinal", "to_ordinal")
    ] + [(name, c_uint64) for name in ("bw_bytes_per_s", "moved_bytes", "moved_chunks")]


class GroupId(ctypes.Structure):
    _fields_ = [("bytes", c_uint8 * 512)]


AllGatherFn = ctypes.CFUNCTYPE(c_int32, c_void_p, c_void_p, c_uint64, c_void_p, c_char_p)
BroadcastFn = ctypes.CFUNCTYPE(c_int32, c_void_p, c_void_p, c_uint64, c_uint32, c_void_p, c_char_p)
ReduceScatterFn = ctypes.CFUNCTYPE(c_int32, c_void_p, c_void_p, c_uint64, c_uint32, c_void_p, c_char_p)
AllReduceFn = ctypes.CFUNCTYPE(c_int32, c_void_p, c_void_p, c_uint64, c_uint32, c_void_p, c_char_p)
ExchangeFn = ctypes.CFUNCTYPE(c_int32, c_void_p, c_void_p, c_uint64, c_void_p, c_char_p)
PollFn = ctypes.CFUNCTYPE(c_int32, c_void_p)
AbortFn = ctypes.CFUNCTYPE(None, c_void_p, c_char_p)
RegisterMemoryFn = ctypes.CFUNCTYPE(c_int32, c_void_p, c_void_p, c_uint64, POINTER(c_void_p))
UnregisterMemoryFn = ctypes.CFUNCTYPE(None, c_void_p, c_void_p)


class Comm(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("user", c_void_p),
        ("all_gather", AllGatherFn),
        ("broadcast", BroadcastFn),
        ("reduce_scatter", ReduceScatterFn),
        ("all_reduce", AllReduceFn),
        ("exchange", ExchangeFn),
        ("poll", PollFn),
        ("abort", AbortFn),
        ("register_memory", RegisterMemoryFn),
        ("unregister_memory", UnregisterMemoryFn),
    ]


class GroupConfig(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("rank", c_uint32),
        ("ranks", c_uint32),
        ("id", POINTER(GroupId)),
        ("deadline_ns", c_uint64),
        ("nccl_comms", POINTER(c_void_p)),
        ("comms", POINTER(POINTER(Comm))),
        ("shard_ranks", c_uint32),
        ("reserved", c_uint32),
        ("bucket_bytes", c_uint64),
    ]


class GroupStats(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("rank", c_uint32),
        ("ranks", c_uint32),
        ("shard_ranks", c_uint32),
        ("gathered_chunks", c_uint64),
        ("gathered_bytes", c_uint64),
        ("reduced_chunks", c_uint64),
        ("fetched_bytes", c_uint64),
        ("stored_bytes", c_uint64),
        ("reduced_bytes", c_uint64),
        ("planned_gathered_bytes", c_uint64),
        ("planned_reduced_bytes", c_uint64),
        ("planned_fetched_bytes", c_uint64),
        ("gather_wait_ns", c_uint64),
        ("sum_wait_ns", c_uint64),
        ("bucket_chunks", c_uint32),
        ("plan_changes", c_uint32),
    ]


class TopologyObject(_Sized):
    _fields_: typing.ClassVar[typing.Any] = [
        (name, c_uint32) for name in ("struct_size", "kind", "system_index", "node", "cpus", "reserved")
    ] + [
        ("size_bytes", c_uint64),
        ("pci", c_char * 16),
        ("name", c_char * 128),
    ]


# ---- gemini_update.h
ADAMW_L2, ADAMW_SPLIT = 1, 2
DTYPE_BLOCK8 = 16  # of states in Adamw alone
SGD_NESTEROV = 1
INDEX_NONE = 2**32 - 1
UPDATE_SKIP = 2**64 - 1


class Adamw(_Sized):
    _fields_: typing.ClassVar[typing.Any] = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("param_dtype", c_uint32),
        ("grad_dtype", c_uint32),
        ("step", c_uint64),
    ]
    _fields_ += [(name, c_double) for name in ("lr", "beta1", "beta2", "eps", "weight_decay", "grad_scale")]
    _fields_ += [("momentum_dtype", c_uint32), ("variance_dtype", c_uint32)]
    _fields_ += [("seed", c_uint64), ("first_element", c_uint64)]


class Sgd(_Sized):
    _fields_: typing.ClassVar[typing.Any] = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("param_dtype", c_uint32),
        ("grad_dtype", c_uint32),
        ("step", c_uint64),
    ] + [(name, c_double) for name in ("lr", "momentum", "dampening", "weight_decay", "grad_scale")]


class UpdateRange(ctypes.Structure):
    _fields_ = [("end_element", c_uint64), ("rule", c_uint64)]


class UpdateWalk(_Sized):
    _fields_: typing.ClassVar[typing.Any] = (
        [
            ("struct_size", c_uint32),
            ("flags", c_uint32),
            ("adamws", POINTER(Adamw)),
            ("sgds", POINTER(Sgd)),
            ("rule_count", c_uint64),
            ("ranges", POINTER(UpdateRange)),
            ("range_count", c_uint64),
        ]
        + [(name + "_index", c_uint32) for name in ("param", "grad", "master", "momentum", "variance")]
        + [
            ("failing", c_uint32),
            ("mgr", c_uint64),
            ("stream_native", c_void_p),
            ("stream_call", c_void_p),
            ("status", c_int32),
            ("reserved", c_uint32),
            ("native_code", c_int64),
            ("message", c_char * 440),
        ]
    )


class UpdateArenas(_Sized):
    _fields_: typing.ClassVar[typing.Any] = (
        [("struct_size", c_uint32), ("flags", c_uint32)]
        + [(name, c_uint64) for name in ("param", "grad", "master", "momentum", "variance")]
        + [(name, c_uint64) for name in ("first_element", "element_count", "stream")]
    )


# ---- functions
_M, _H, _U32, _U64 = c_uint64, c_uint64, c_uint32, c_uint64
_FUNCTIONS: dict[str, list[typing.Any]] = {  # name: argument types; each returns a status, except those below
    "last_error": [POINTER(ErrorInfo)],
    "error_set": [POINTER(ErrorInfo)],
    "manager_open": [POINTER(Config), POINTER(_M)],
    "manager_close": [_M],
    "budget_set": [_M, _U32, _U64],
    "stream_create": [_M, POINTER(_H)],
    "stream_adopt": [_M, c_void_p, POINTER(_H)],
    "stream_native": [_M, _H, POINTER(c_void_p)],
    "stream_destroy": [_M, _H],
    "stream_call": [_M, _H, c_void_p, c_void_p],
    "stream_synchronize": [_M, _H],
    "arena_create": [_M, POINTER(ArenaConfig), POINTER(_H)],
    "arena_destroy": [_M, _H],
    "arena_info": [_M, _H, POINTER(ArenaInfo)],
    "arena_take": [_M, _H, _U64, POINTER(_U64)],
    "arena_take_pointer": [_M, _H, _U64, POINTER(c_void_p)],
    "locate": [_M, c_void_p, POINTER(Location)],
    "explain_address": [_M, c_void_p, _U64, c_char_p, POINTER(_U64)],
    "plan_forecast": [POINTER(Config), c_char_p, POINTER(Forecast), _U64, c_char_p, POINTER(_U64)],
    "tensor_register": [_M, _H, c_char_p, _U64, _U64, POINTER(_H)],
    "tensor_unregister": [_M, _H],
    "tensor_find": [_M, c_char_p, POINTER(_H)],
    "tensor_counterpart": [_M, _H, _H, POINTER(_H)],
    "tensor_state_set": [_M, _H, _U32],
    "tensor_info": [_M, _H, POINTER(TensorInfo)],
    "iteration_begin": [_M],
    "iteration_begin_with": [_M, _U64],
    "iteration_end": [_M],
    "phase_set": [_M, _U32],
    "op_begin": [_M, c_char_p, _H],
    "op_begin_with": [_M, c_char_p, _H, c_void_p, _U64],
    "op_begin_chosen": [_M, c_char_p, _H],
    "op_end": [_M],
    "acquire": [_M, c_void_p, _U64, _H],
    "release": [_M, c_void_p, _U64, _H],
    "row_accesses": [c_void_p, _U64, _U32, _U64, c_void_p, _U64, c_void_p, POINTER(_U64)],
    "hint": [_M, c_void_p, _U64],
    "priority_set": [_M, c_void_p, _U64, _U32],
    "move": [_M, c_void_p, _U64],
    "pin": [_M, c_void_p],
    "unpin": [_M, c_void_p],
    "graph_begin": [_M, _H, _U64, POINTER(_H)],
    "graph_end": [_M, _H],
    "graph_enter": [_M, _H, _H],
    "graph_leave": [_M, _H],
    "graph_destroy": [_M, _H],
    "alloc": [_M, _U64, _H, POINTER(c_void_p)],
    "free": [_M, c_void_p, _H],
    "host_alloc": [_M, _U64, _U64, POINTER(c_void_p)],
    "host_free": [_M, c_void_p],
    "zero": [_M, c_void_p],
    "discard": [_M, c_void_p],
    "load": [_M, c_void_p, ctypes.c_int, _U64],
    "borrow": [_M, c_void_p, ctypes.c_int, _U64],
    "store": [_M, c_void_p, ctypes.c_int, _U64],
    "norm": [_M, c_void_p, _U32, _H, POINTER(c_double)],
    "update": [_M, POINTER(Update)],
    "update_drop": [_M],
    "update_wait": [_M],
    "checkpoint": [_M],
    "resume": [_M],
    "hook_set": [_M, _U32],
    "hook_clear": [_M],
    "hook_forget": [_M, c_void_p],
    "hook_compacted": [_M],
    "group_id_make": [_U32, _U32, POINTER(GroupId)],
    "group_open": [_M, POINTER(GroupConfig), POINTER(_H)],
    "group_close": [_M, _H],
    "group_exchange": [_M, _H, c_void_p, _U64, c_void_p],
    "group_stats": [_M, _H, POINTER(GroupStats)],
    "group_checkpoint": [_M, _H, c_char_p, c_char_p],
    "group_resume": [_M, _H, c_char_p, c_char_p],
    "slice_next": [_M, POINTER(Access), _U64, POINTER(_U64), POINTER(_U64)],
    "topology_open": [c_char_p, POINTER(_H)],
    "topology_close": [_H],
    "topology_count": [_H, _U32, POINTER(_U32)],
    "topology_object": [_H, _U32, _U32, POINTER(TopologyObject)],
    "topology_distance": [_H, _U32, _U32, _U32, _U32, POINTER(_U32)],
    "topology_nearest": [_H, _U32, _U32, _U32, POINTER(_U32)],
    "topology_directory": [_H, c_char_p, _U32, POINTER(_U32), POINTER(_U32), POINTER(_U32)],
    "stats": [_M, POINTER(Stats)],
    "stats_reset": [_M],
    "tier_stats": [_M, _U32, POINTER(TierStats)],
    "link_count": [_M, POINTER(_U32)],
    "link_stats": [_M, _U32, _U32, POINTER(LinkStats)],
    "tier_bytes": [_M, c_void_p, POINTER(_U64)],
    "plan_explain": [_M, _U64, c_char_p, POINTER(_U64)],
    "manager_dump": [_M, _U64, c_char_p, POINTER(_U64)],
    "stats_text": [_M, _U64, c_char_p, POINTER(_U64)],
    "trace_save": [_M, c_char_p],
    "trace_load": [_M, c_char_p],
    "timeline_start": [_M, c_char_p],
    "timeline_stop": [_M],
}
_UPDATE_FUNCTIONS: dict[str, list[typing.Any]] = {"walk_check": [POINTER(Update)], "walk_status": [POINTER(UpdateWalk)]}
_ARENAS_FUNCTIONS: dict[str, list[typing.Any]] = {  # of libgemini_update, with the other library's prefix
    "adamw_arenas": [_M, POINTER(Adamw), POINTER(UpdateArenas)]
}
_OTHERS: dict[str, tuple[typing.Any, list[typing.Any]]] = {
    "version": (c_char_p, []),
    "status_string": (c_char_p, [c_int32]),
    "error_text": (c_char_p, []),
    "torch_malloc": (c_void_p, [c_ssize_t, ctypes.c_int, c_void_p]),
    "torch_free": (None, [c_void_p, c_ssize_t, ctypes.c_int, c_void_p]),
    "cupy_malloc": (c_void_p, [c_void_p, ctypes.c_size_t, ctypes.c_int]),
    "cupy_free": (None, [c_void_p, c_void_p, ctypes.c_int]),
}


# Functions that say what else is known when another rank has failed (status "PEER"), or "".
peer_hints: list[typing.Callable[[], str]] = []


class GeminiError(RuntimeError):
    """A call that the library, or this package, refused. Its text says what was refused, and which limit it breaks.

    Attributes:
        status: The name of the error's code without GEMINI_ERR_, such as "OOM_DEVICE"; STATUS has all of them.
        native_code: errno or the device driver's code, where one of these caused the error; otherwise 0.
    """

    def __init__(self, message: str, status: str = "STATE", native_code: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.native_code = native_code


class _Library:
    """A shared library's functions under their names without the prefix; those that return a status raise instead."""

    def __init__(self, path: str | os.PathLike[str], prefix: str, functions: dict[str, list[typing.Any]]) -> None:
        self.path = str(path)
        self.cdll = ctypes.CDLL(self.path)
        self._declare(prefix, functions)

    def _declare(self, prefix: str, functions: dict[str, list[typing.Any]]) -> None:
        for name, arguments in functions.items():
            function = getattr(self.cdll, prefix + name)
            function.argtypes = arguments
            function.restype = c_int32
            if name != "last_error":
                function.errcheck = self._check
            setattr(self, name, function)

    if typing.TYPE_CHECKING:  # the functions, by their names

        def __getattr__(self, name: str) -> typing.Any: ...

    def _check(self, status: int, function: typing.Any, arguments: tuple[typing.Any, ...]) -> int:
        if status == OK:
            return status
        info = ErrorInfo()
        self.last_error(info)
        said = f"{info.operation.decode()}: {info.message.decode()}" if info.status == status else ""
        if STATUS.get(status) == "PEER":
            said = "; ".join(filter(None, [said, *(hint() for hint in peer_hints)]))
        raise GeminiError(
            said or f"{function.__name__}: {STATUS.get(status, status)}",
            STATUS.get(status, str(status)),
            info.native_code,
        )


class Library(_Library):
    """libgemini.so"""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, "gemini_", _FUNCTIONS)
        for name, (result, arguments) in _OTHERS.items():
            function = getattr(self.cdll, "gemini_" + name)
            function.argtypes = arguments
            function.restype = result
            setattr(self, name, function)


class UpdateLibrary(_Library):
    """libgemini_update.so; walk is the address of its gemini_update_fn."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.last_error = library().last_error  # libgemini.so must be loaded first: this one calls it
        super().__init__(path, "gemini_update_", _UPDATE_FUNCTIONS)
        self._declare("gemini_", _ARENAS_FUNCTIONS)
        self.walk = ctypes.cast(self.cdll.gemini_update_walk, UpdateFn)


def find(name: str) -> pathlib.Path:
    """The path of one of the libraries: in this package, or in a build that the environment names (LIBGEMINI_DIR)."""
    # An editable package has two paths.
    folders = [pathlib.Path(path) / "lib" for path in sys.modules["libgemini"].__path__]
    build = os.environ.get("LIBGEMINI_DIR")
    if build:
        folders = [pathlib.Path(build), pathlib.Path(build) / "bindings" / "update"]
    for folder in folders:
        found = sorted(folder.glob(name + ".so*"))
        if found:
            return found[0]
    raise ImportError(
        f"{name}.so is in none of {', '.join(map(str, folders))}: install the package with pip, "
        "or set LIBGEMINI_DIR to the folder of a build"
    )


@functools.cache
def library() -> Library:
    return Library(find("libgemini"))


@functools.cache
def update_library() -> UpdateLibrary:
    return UpdateLibrary(find("libgemini_update"))
