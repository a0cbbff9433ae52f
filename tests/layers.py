"""Checks that the folders of src use each other only as the table "Modules" of docs/design.md allows.

    tests/layers.py PROJECT NM OBJECT...

OBJECT: all object files of the library, at .../src/FOLDER/FILE.c.o. A folder uses another if one of its objects needs a
symbol that an object of the other defines, or if one of its files includes a header of the other. Fails when an arrow
is not in the table, when the table has an arrow that nothing uses, a folder without a row or a row without a folder, or
when the arrows of the table make a cycle; also where a file other than chunk/chunk.[ch] names a field of a chunk's
record.

SPDX-License-Identifier: Apache-2.0
"""

import collections
import graphlib
import pathlib
import re
import subprocess
import sys


def allowed_arrows(page: pathlib.Path) -> dict[str, set[str]]:
    """By folder, the folders that it may use: the last column of the table below "## Modules"."""
    section = re.search(r"^## Modules.*?(?=^## )", page.read_text(), re.S | re.M)
    if not section:
        sys.exit(f"{page}: no section '## Modules'")
    table = {}
    for row in re.findall(r"^\| `src/(\w+)` \|.*\|([^|]*)\|$", section[0], re.M):
        table[row[0]] = set(re.findall(r"`(\w+)`", row[1]))
    return table


def symbol_arrows(nm: str, objects: list[str]):
    """(folder, folder, why) for each symbol that an object takes from another folder's."""
    defined, needed = {}, collections.defaultdict(set)
    for name in objects:
        file = "/".join(pathlib.Path(name).parts[-2:]).removesuffix(".o")
        lines = subprocess.run([nm, name], check=True, capture_output=True, text=True).stdout.splitlines()
        symbols = [line.split()[-2:] for line in lines]
        if not any(kind.isupper() and kind != "U" for kind, _ in symbols):
            sys.exit(f"{name}: defines nothing that nm shows")
        for kind, symbol in symbols:
            if kind == "U":
                needed[file].add(symbol)
            elif kind.isupper():
                defined[symbol] = file
    for file, symbols in needed.items():
        for symbol in symbols & defined.keys():
            yield file.split("/")[0], defined[symbol].split("/")[0], f"{file} calls {symbol} of {defined[symbol]}"


def include_arrows(src: pathlib.Path):
    """(folder, folder, why) for each header of another folder that a file includes."""
    for file in sorted(src.glob("*/*.[ch]")):
        for header in re.findall(r'^#include "(\w+/[\w.]+)"', file.read_text(), re.M):
            if (src / header).exists():
                yield file.parent.name, header.split("/")[0], f"{file.relative_to(src)} includes {header}"


def private_fields(src: pathlib.Path):
    """Uses of a chunk record's fields outside of what owns it, chunk/chunk.[ch]: fields whose names end in _."""
    for file in sorted(src.glob("*/*.[ch]")):
        if file.parent.name != "chunk" or file.stem != "chunk":
            for number, line in enumerate(file.read_text().splitlines(), 1):
                if re.search(r"(->|\.)[a-z]\w*_\b", line):
                    yield f"{file.relative_to(src)}:{number}: a field of a chunk's record, which chunk/chunk.c owns"


def main() -> int:
    project, nm, objects = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    src, page = project / "src", project / "docs/design.md"
    table = allowed_arrows(page)
    wrong = []
    folders = {path.name for path in src.iterdir() if path.is_dir()}
    wrong += [f"src/{name} has no row in the table of {page.name}" for name in sorted(folders - table.keys())]
    wrong += [f"{page.name} has a row for src/{name}, which is not there" for name in sorted(table.keys() - folders)]
    if {pathlib.Path(name).parts[-2] for name in objects} != folders:
        wrong.append("the objects are not those of all folders of src")
    try:
        list(graphlib.TopologicalSorter(table).static_order())
    except graphlib.CycleError as error:
        wrong.append("the table allows a cycle: " + " -> ".join(reversed(error.args[1])))
    used = collections.defaultdict(set)
    for user, other, why in [*symbol_arrows(nm, objects), *include_arrows(src)]:
        if user == other:
            continue
        used[user].add(other)
        if other not in table.get(user, set()):
            wrong.append(f"{user} may not use {other}: {why}")
    for user, others in sorted(table.items()):
        wrong += [f"the table lets {user} use {other}, which it does not" for other in sorted(others - used[user])]
    wrong += private_fields(src)
    print("\n".join(wrong) or f"{sum(map(len, used.values()))} arrows between {len(folders)} folders, all of the table")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
