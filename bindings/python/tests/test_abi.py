"""What abi.py declares is what the headers declare: layouts, values, functions. A compiler says what theirs are.

SPDX-License-Identifier: Apache-2.0
"""

import ctypes
import os
import pathlib
import re
import shlex
import subprocess

import pytest

import libgemini
from libgemini import abi

ROOT = pathlib.Path(__file__).resolve().parents[3]
CORE = [
    "gemini.h",
    "gemini/address.h",
    "gemini/chosen.h",
    "gemini/graph.h",
    "gemini/group.h",
    "gemini/hook.h",
    "gemini/plan.h",
    "gemini/topology.h",
]  # of the library itself
HEADERS = {**dict.fromkeys(CORE, ROOT / "include"), "gemini_update.h": ROOT / "bindings" / "update"}
CONSTANTS = [
    name for name, value in vars(abi).items() if isinstance(value, int) and re.fullmatch("[A-Z][A-Z0-9_]*", name)
]
STRUCTS = {
    value
    for value in vars(abi).values()
    if isinstance(value, type) and issubclass(value, ctypes.Structure) and not value.__name__.startswith("_")
}

NUMBERS = {
    ctypes.c_int32: "int32_t",
    ctypes.c_uint32: "uint32_t",
    ctypes.c_int64: "int64_t",
    ctypes.c_uint64: "uint64_t",
    ctypes.c_double: "double",
}
HANDLES = [f"gemini_{name}_t" for name in ("manager", "arena", "tensor", "stream", "graph", "group", "topology")]


def header(name):
    """A header's text without comments."""
    return re.sub(r"/\*.*?\*/", "", (HEADERS[name] / name).read_text(), flags=re.S)


def c_type(struct):
    return "gemini_" + re.sub("(?<=[a-z])(?=[A-Z])", "_", struct.__name__).lower() + "_t"


def enumerators(prefix):
    found = set(re.findall(rf"\b{prefix}(\w+) = ", header("gemini.h")))
    assert found, prefix
    return found


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """What C expressions are worth, as numbers of 64 bits without a sign."""
    folder = tmp_path_factory.mktemp("abi")

    def ask(expressions):
        lines = "".join(f'  printf("%llu\\n", (unsigned long long)({one}));\n' for one in expressions)
        (folder / "ask.c").write_text(
            "#include <stddef.h>\n#include <stdio.h>\n"
            + "".join(f'#include "{name}"\n' for name in HEADERS)
            + f"int main(void) {{\n{lines}  return 0;\n}}\n"
        )
        compiler = shlex.split(os.environ.get("CC", "cc"))
        subprocess.run(
            [*compiler, "-std=c11", *(f"-I{path}" for path in set(HEADERS.values())), "ask.c", "-o", "ask"],
            cwd=folder,
            check=True,
        )
        said = subprocess.run([folder / "ask"], stdout=subprocess.PIPE, text=True, check=True).stdout.split()
        return dict(zip(expressions, map(int, said), strict=True))

    return ask


def same(ask, expected):
    said = ask(list(expected))
    assert said == {expression: value % 2**64 for expression, value in expected.items()}


def test_every_struct_is_declared():
    named = {f"gemini_{name}_t" for file in HEADERS for name in re.findall(r"^} gemini_(\w+)_t;", header(file), re.M)}
    named.remove("gemini_object_t")  # a union of handles: a number
    assert named == {c_type(struct) for struct in STRUCTS}


@pytest.mark.parametrize("struct", sorted(STRUCTS, key=c_type), ids=c_type)
def test_layout(ask, struct):
    name = c_type(struct)
    expected, end = {f"sizeof({name})": ctypes.sizeof(struct)}, 0
    for field, kind in struct._fields_:
        at = getattr(struct, field)
        assert at.offset == end, f"{field}: something is left out before it"
        end = at.offset + at.size
        expected[f"offsetof({name}, {field})"] = at.offset
        expected[f"sizeof((({name} *)0)->{field})"] = at.size
        if kind in NUMBERS:
            types = [NUMBERS[kind]]
            if kind is ctypes.c_uint64:  # handles are pointers in C, and numbers here
                types += [*HANDLES, "gemini_object_t"]
            known = ", ".join(f"{one}: 1" for one in types)
            expected[f"_Generic((({name} *)0)->{field}, {known}, default: 0)"] = 1
    assert end == ctypes.sizeof(struct)
    same(ask, expected)


def test_sized_structs_say_their_size():
    assert abi.Config().struct_size == ctypes.sizeof(abi.Config)
    assert abi.Stats().struct_size == ctypes.sizeof(abi.Stats)
    assert abi.Access(1, 2, 3, 4, 5).struct_size == ctypes.sizeof(abi.Access)


def test_constants(ask):
    assert {"OK", "STREAM_CALLER", "KIND_VARIANCE", "OFFSET_NEXT", "READ_WRITE", "UPDATE_SKIP"} < set(CONSTANTS)
    same(ask, {f"GEMINI_{name}": getattr(abi, name) for name in CONSTANTS})


def test_named_values(ask):
    assert set(abi.STATUS.values()) == enumerators("GEMINI_ERR_")
    assert {name.upper() for name in abi.PLACEMENTS} == enumerators("GEMINI_PLACEMENT_")
    assert {name for name in CONSTANTS if name.startswith("DEVICE_")} == {
        f"DEVICE_{name}" for name in enumerators("GEMINI_DEVICE_")
    }
    same(
        ask,
        {
            **{f"GEMINI_ERR_{name}": code for code, name in abi.STATUS.items()},
            **{f"GEMINI_PLACEMENT_{name.upper()}": value for name, value in abi.PLACEMENTS.items()},
            **{f"GEMINI_TIER_{name.upper()}": value for value, name in enumerate(abi.TIERS)},
            **{f"GEMINI_REASON_{name.upper()}": value for value, name in enumerate(abi.REASONS)},
            "GEMINI_TIER_COUNT": len(abi.TIERS),
            "GEMINI_REASON_COUNT": len(abi.REASONS),
        },
    )


# ---- functions
SCALARS = {
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
    "int": ctypes.c_int,
    "size_t": ctypes.c_size_t,
    "ptrdiff_t": ctypes.c_ssize_t,
    "gemini_status_t": ctypes.c_int32,
    "void": None,
    **{name: ctypes.c_uint64 for name in HANDLES},
}


def prototypes(name):
    """The functions of a header: what each returns and takes, without names of parameters."""
    found = {}
    for result, function, arguments in re.findall(
        r"GEMINI_API\s+([\w\s]+?[\s*]+)gemini_(\w+)\(([^)]*)\)", header(name)
    ):
        words = [argument.split() for argument in arguments.split(",")] if arguments.strip() != "void" else []
        types = [" ".join(argument)[: -len(re.search(r"\w+$", argument[-1])[0])].strip() for argument in words]
        found[function] = result.strip(), types
    return found


def is_pointer(kind):
    return kind in (ctypes.c_void_p, ctypes.c_char_p) or hasattr(kind, "contents")


def check(function, types, arguments):
    assert len(arguments) == len(types), f"{function}: {types}"
    for c_name, kind in zip(types, arguments):
        if c_name.endswith(("*", "_fn")):
            assert is_pointer(kind), f"{function}: {c_name} is {kind}"
            pointed = getattr(kind, "_type_", None) if hasattr(kind, "contents") else None
            if pointed in STRUCTS:
                assert c_type(pointed) in c_name, f"{function}: {c_name} is {kind}"
            elif kind is ctypes.c_char_p:
                assert "char" in c_name, f"{function}: {c_name} is {kind}"
            elif pointed is not None and c_name != "void **":
                assert SCALARS.get(c_name[:-1].strip(), ctypes.c_double) is pointed, f"{function}: {c_name} is {kind}"
        else:
            assert SCALARS[c_name] is kind, f"{function}: {c_name} is {kind}"


def test_every_function_is_declared():
    want = {name: found for file in CORE for name, found in prototypes(file).items()}
    exported = [
        line.split()[0]
        for line in (ROOT / "tests/abi/symbols.txt").read_text().splitlines()
        if line.startswith("gemini_")
    ]
    assert sorted(want) == sorted(name.removeprefix("gemini_") for name in exported)
    statuses = {name for name, (result, _) in want.items() if result == "gemini_status_t"}
    assert statuses == set(abi._FUNCTIONS)
    assert set(want) - statuses == set(abi._OTHERS)
    for name, (result, types) in want.items():
        if name in statuses:
            check(name, types, abi._FUNCTIONS[name])
        else:
            kind, arguments = abi._OTHERS[name]
            check(name, types, arguments)
            check(name, [result], [kind])


def test_functions_of_the_update_library():
    want = {name.removeprefix("update_"): found for name, found in prototypes("gemini_update.h").items()}
    for name, arguments in abi._UPDATE_FUNCTIONS.items():
        result, types = want[name]
        assert result == "gemini_status_t"
        check(name, types, arguments)
    assert abi.update_library().walk


def test_the_library_is_of_the_header():
    said = re.search(r'#define GEMINI_VERSION_STRING "(.*)"', header("gemini.h"))[1]
    assert libgemini.version() == said


def test_a_library_that_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setenv("LIBGEMINI_DIR", str(tmp_path))
    with pytest.raises(ImportError, match=f"libgemini.so is in none of {tmp_path}.*LIBGEMINI_DIR"):
        abi.find("libgemini")
