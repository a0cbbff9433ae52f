#!/usr/bin/env python3
"""Plants faults in the library, one at a time, and shows that a build with GEMINI_CHECK catches each where it happens.

    tests/planted.py [NAME]...
    tests/planted.py --places   # only: does each fault still have its one place in the sources?

Works on a copy of the sources in a temporary directory; takes about a minute on two cores. A fault is caught when a
test ends with an assertion of the library that names the expected function.

SPDX-License-Identifier: Apache-2.0
"""

import pathlib
import subprocess
import sys
import tempfile
from typing import NamedTuple


class Fault(NamedTuple):
    name: str
    file: str
    right: str
    wrong: str
    test: str  # target of CMake: KIND_test_NAME
    caught_in: str  # function whose assertion fails


FAULTS = [
    Fault(
        "a dirty flag is lost",
        "chunk/chunk.c",
        "    atomic_fetch_or(&c->word_, GMI_CHUNK_DIRTY);",
        "    atomic_fetch_and(&c->word_, ~GMI_CHUNK_DIRTY);",
        "integration_test_memory",
        "changed",
    ),
    Fault(
        "a chunk counts as valid nowhere",
        "chunk/residency.c",
        "gmi_chunk_leave_frame(m, c, GMI_VALID_HOST, fence);",
        "gmi_chunk_leave_frame(m, c, 0, fence);",
        "integration_test_memory",
        "changed",
    ),
    Fault(
        "a slot is freed twice",
        "chunk/host.c",
        "  gmi_chunk_slot_set(m, c, GMI_NONE);\n  set_free(m, slot, true);\n",
        "  gmi_chunk_slot_set(m, c, GMI_NONE);\n  set_free(m, slot, true);\n  set_free(m, slot, true);\n",
        "integration_test_memory",
        "set_free",
    ),
    Fault(
        "a frame is given back twice",
        "chunk/residency.c",
        "  gmi_frame_give(m, frame, fence);\n  gmi_map_leave",
        "  gmi_frame_give(m, frame, fence);\n  gmi_frame_give(m, frame, fence);\n  gmi_map_leave",
        "integration_test_memory",
        "gmi_frame_give",
    ),
    Fault(
        "the fence of an eviction is dropped",
        "chunk/residency.c",
        "  gmi_chunk_leave_frame(m, c, GMI_VALID_HOST, fence);",
        "  fence = 0;\n  gmi_chunk_leave_frame(m, c, GMI_VALID_HOST, fence);",
        "integration_test_memory",
        "gmi_chunk_departed",
    ),
    Fault(
        "a release counts down twice",
        "chunk/access.c",
        "    gmi_chunk_unhold_device(c, f.mode);\n    *status_out",
        "    gmi_chunk_unhold_device(c, f.mode);\n    gmi_chunk_unhold_device(c, f.mode);\n    *status_out",
        "integration_test_memory",
        "gmi_chunk_unhold_device",
    ),
    Fault(
        "a frame is counted twice",
        "chunk/residency.c",
        "  m->frames.used++;\n  peak(",
        "  m->frames.used += 2;\n  peak(",
        "integration_test_memory",
        "gmi_chunks_check",
    ),
    Fault(
        "a host acquire for writing is never counted down",
        "chunk/chunk.c",
        "  c->host_users_--;\n  c->host_writers_ -= writes;\n",
        "  c->host_users_--;\n",
        "integration_test_memory",
        "changed",
    ),
    Fault(
        "a record changes without the lock",
        "chunk/data.c",
        "    gmi_lock(m, function);\n    gmi_chunk_unhold_host(m, c, !write_file);\n",
        "    gmi_chunk_unhold_host(m, c, !write_file);\n    gmi_lock(m, function);\n",
        "integration_test_states",
        "changed",
    ),
    Fault(
        "a block in the files is leaked",
        "chunk/files.c",
        "  if (block != GMI_NONE) give_block(m, block);\n",
        "  if (block == GMI_NONE - 1) give_block(m, block);\n",
        "integration_test_memory",
        "gmi_chunks_check",
    ),
    Fault(
        "a piece of an update is counted down twice",
        "chunk/deferred.c",
        "    gmi_chunk_piece_queued(p->chunks[i], rest->left);\n",
        "    for (int twice = 0; twice < 2; twice++) gmi_chunk_piece_queued(p->chunks[i], rest->left);\n",
        "integration_test_update",
        "gmi_chunk_piece_queued",
    ),
    Fault(
        "a frame does not know its chunk",
        "chunk/chunk.c",
        "  m->frames.at[frame].chunk = c;\n",
        "",
        "integration_test_memory",
        "changed",
    ),
]


def run(command: list[str], **more) -> subprocess.CompletedProcess:
    return subprocess.run(command, text=True, capture_output=True, **more)


def caught(build: pathlib.Path, fault: Fault) -> str | None:
    """None, or why the fault was not caught as it should be."""
    made = run(["cmake", "--build", str(build), "--target", fault.test])
    if made.returncode:
        return f"does not build:\n{made.stdout[-2000:]}"
    kind, _, name = fault.test.partition("_")
    output = run([str(build / "tests" / kind / name)], timeout=300).stderr
    said = [line for line in output.splitlines() if "assertion failed" in line]
    if not said:
        return f"no assertion failed; the test ended with: {output.splitlines()[-1:]}"
    return None if f" {fault.caught_in}: " in said[0] else f"expected an assertion in {fault.caught_in}: {said[0]}"


def misplaced(sources: pathlib.Path, fault: Fault) -> str | None:
    """What is wrong with the fault's place in the sources, or None."""
    count = (sources / fault.file).read_text().count(fault.right)
    return None if count == 1 else f"{fault.file} has its place {count} times"


def main() -> int:
    project = pathlib.Path(__file__).resolve().parent.parent
    if sys.argv[1:] == ["--places"]:
        found = [f"{fault.name}: {why}" for fault in FAULTS if (why := misplaced(project / "src", fault))]
        print("\n".join(found))
        return 1 if found else 0
    unknown = set(sys.argv[1:]) - {fault.name for fault in FAULTS}
    if unknown:
        sys.exit(f"planted.py: no fault is called {sorted(unknown)}; there are {[fault.name for fault in FAULTS]}")
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder)
        files = run(["git", "-C", str(project), "ls-files", "-z"], check=True).stdout
        subprocess.run(
            f"tar -C '{project}' --null -T - -cf - | tar -C '{copy}' -xf -",
            shell=True,
            input=files,
            text=True,
            check=True,
        )
        if (project / "build/deps").exists():
            (copy / "build").mkdir()
            (copy / "build/deps").symlink_to(project / "build/deps")
        build = copy / "build/planted"
        options = ["-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DGEMINI_TESTS=ON", "-DGEMINI_CHECK=ON"]
        run(["cmake", "-S", str(copy), "-B", str(build), "-DGEMINI_BENCH=OFF", *options], check=True)
        for fault in FAULTS:
            if sys.argv[1:] and fault.name not in sys.argv[1:]:
                continue
            file = copy / "src" / fault.file
            source = file.read_text()
            why = misplaced(copy / "src", fault)
            if not why:
                file.write_text(source.replace(fault.right, fault.wrong))
                why = caught(build, fault)
                file.write_text(source)
            print(f"{fault.name}: {why or 'caught in ' + fault.caught_in}", flush=True)
            failed += why is not None
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
