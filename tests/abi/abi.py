#!/usr/bin/env python3
"""Checks that the public header, the linker's map and the built library agree with what is written down here.

symbols  functions of gemini.h, of src/gemini.map, of symbols.txt and of the built library are the same
header   gemini.h alone compiles as C99 and C++11 without a warning or a padded struct, every function is explained
layout   sizes, offsets and values of test_layout.c hold, and it knows every struct, field and constant
update   writes symbols.txt, test_layout.c and the map anew: only for a release that nobody has yet

SPDX-License-Identifier: Apache-2.0
"""
import argparse
import pathlib
import re
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
SYMBOLS = HERE / "symbols.txt"
LAYOUT = HERE / "test_layout.c"
STRICT = ["-Wall", "-Wextra", "-pedantic", "-Wpadded", "-Wundef", "-Werror"]


class Header:
    """What gemini.h declares. Its C is plain: no nested structs, no function pointers but typedefs."""

    def __init__(self, path):
        self.text = pathlib.Path(path).read_text()
        plain = re.sub(r"/\*.*?\*/", " ", self.text, flags=re.S).replace("\\\n", " ")
        self.macros = re.findall(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", plain, flags=re.M)
        plain = re.sub(r"^[ \t]*#.*$", "", plain, flags=re.M)
        self.exported = sorted(re.findall(r"\bGEMINI_API\b[^;]*?\b(\w+)\s*\(", plain))
        # A name before a parenthesis is a function, unless it is the type of a pointer to one: those are in "(*name)".
        self.functions = sorted(set(re.findall(r"\b(gemini_\w+)\s*\(", plain)))
        self.structs = {}
        for tag, body, name in re.findall(r"typedef struct (\w+)\s*\{(.*?)\}\s*(\w+);", plain, flags=re.S):
            # A tag may end in _s where a function has the plain name.
            if name != tag.removesuffix("_s") + "_t":
                raise SystemExit(f"abi.py: struct {tag} is called {name}, not {tag.removesuffix('_s')}_t")
            fields = []
            for declaration in filter(None, (part.strip() for part in body.split(";"))):
                fields += [re.search(r"(\w+)\s*(\[[^]]*\]\s*)*$", part.strip()).group(1) for part in declaration.split(",")]
            self.structs[name] = fields
        self.constants = []
        for body in re.findall(r"\benum(?:\s+\w+)?\s*\{(.*?)\}", plain, flags=re.S):
            self.constants += [part.split("=")[0].strip() for part in body.split(",") if part.strip()]
        if not self.functions or not self.structs or not self.constants:
            raise SystemExit(f"abi.py: {path}: found no functions, structs or constants")

    def undocumented(self):
        """Functions whose declaration does not come right after a comment that begins with /** and says Since."""
        names = []
        for match in re.finditer(r"^GEMINI_API\b[^;]*?\b(\w+)\s*\(", self.text, flags=re.M):
            before = self.text[: match.start()].rstrip()
            comment = before[before.rfind("/*") :]
            if not (before.endswith("*/") and comment.startswith("/**") and "Since:" in comment):
                names.append(match.group(1))
        return names


def differences(what, have, want):
    """Prints how two lists differ; True when they do."""
    lines = [f"  missing: {name}" for name in sorted(set(want) - set(have))]
    lines += [f"  unexpected: {name}" for name in sorted(set(have) - set(want))]
    lines += [f"  twice: {name}" for name in sorted(set(name for name in have if have.count(name) > 1))]
    if lines:
        print(what + ":", *lines, sep="\n")
    return bool(lines)


def map_symbols(path):
    """'function node' for each function that the map exports."""
    text = re.sub(r"/\*.*?\*/", " ", pathlib.Path(path).read_text(), flags=re.S)
    symbols = []
    for node, body in re.findall(r"(\w[\w.]*)\s*\{(.*?)\}", text, flags=re.S):
        exported = body.split("local:")[0].replace("global:", "")
        symbols += [f"{name.strip()} {node}" for name in exported.split(";") if name.strip()]
    return symbols


def library_symbols(nm, library):
    """'function node' for each dynamic symbol that the library defines."""
    output = subprocess.run([nm, "-D", "--defined-only", library], check=True, text=True, stdout=subprocess.PIPE).stdout
    symbols = []
    for line in output.splitlines():
        _, kind, name = line.split()
        name, _, node = name.replace("@@", "@").partition("@")
        if kind == "A" and name.startswith("GEMINI_"):
            continue  # the node itself
        symbols.append(f"{name} {node}" if kind == "T" else f"{name} {node} of kind {kind}")
    return symbols


def check_symbols(header, options):
    golden = SYMBOLS.read_text().split("\n")
    golden = [line for line in golden if line and not line.startswith("#")]
    names = [line.split()[0] for line in golden]
    bad = differences("functions declared with GEMINI_API, against symbols.txt", header.exported, names)
    bad |= differences("functions declared at all, against symbols.txt", header.functions, names)
    bad |= differences("exports of the map, against symbols.txt", map_symbols(options.map), golden)
    bad |= differences("exports of the library, against symbols.txt", library_symbols(options.nm, options.library), golden)
    wild = [line for line in map_symbols(options.map) if "*" in line or "?" in line]
    if wild:
        print("the map exports by pattern:", *wild)
    return bad or bool(wild)


def compiles(command, source, include):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "source.c"
        path.write_text(source)
        command = [*command, "-I", str(include), "-O1", "-c", str(path), "-o", folder + "/object.o"]
        run = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if run.returncode:
            print(" ".join(command), run.stdout, sep="\n")
        return run.returncode == 0


def check_header(header, options):
    # Every struct, with the macro that initialises it, and every function are used once; twice included.
    lines = ['#include "gemini.h"', '#include "gemini.h"', "int use(const void *bytes);", "int use_all(void);"]
    lines += ["int use_all(void) {", "  int sum = 0;"]
    for struct in header.structs:
        macro = struct[:-2].upper() + "_INIT"
        variable = struct[:-2] + "_value"
        if macro in header.macros:
            lines += [f"  {struct} {variable} = {macro};"]
        else:
            lines += [f"  {struct} {variable};"]
        lines += [f"  sum += use(&{variable});"]
    lines += [f"  sum += {name} == 0;" for name in header.functions]
    lines += ["  return sum;", "}", ""]
    source = "\n".join(lines)
    include = pathlib.Path(options.header).parent
    # The comparison with 0 is what uses a function.
    good = compiles([options.cc, "-std=c99", *STRICT, "-Wno-address"], source, include)
    good &= compiles([options.cxx, "-x", "c++", "-std=c++11", *STRICT, "-Wno-address"], source, include)
    vendors = re.findall(r"#\s*include\s*[<\"]([^>\"]*)", header.text)
    if set(vendors) - {"stddef.h", "stdint.h"}:
        print("gemini.h includes more than stddef.h and stdint.h:", *vendors)
        good = False
    for name in header.undocumented():
        print(f"{name}: no /** comment with 'Since:' right before it")
        good = False
    return not good


def layout_entries(header):
    for struct, fields in header.structs.items():
        yield "SIZE", struct, None
        for field in fields:
            yield "OFFSET", struct, field
    for constant in header.constants:
        yield "VALUE", constant, None


def check_layout(header, options):
    text = LAYOUT.read_text()
    have = [", ".join(part.strip() for part in entry) for entry in re.findall(r"^(SIZE|VALUE)\((\w+),", text, flags=re.M)]
    have += [", ".join(entry) for entry in re.findall(r"^(OFFSET)\((\w+), (\w+),", text, flags=re.M)]
    want = [", ".join(filter(None, entry)) for entry in layout_entries(header)]
    bad = differences("entries of test_layout.c, against gemini.h", have, want)
    include = pathlib.Path(options.header).parent
    bad |= not compiles([options.cc, "-std=c11", "-Wall", "-Wextra", "-Werror"], text, include)
    bad |= not compiles([options.cxx, "-x", "c++", "-std=c++11", "-Wall", "-Wextra", "-Werror"], text, include)
    return bad


def update(header, options):
    node = "GEMINI_0.1"
    SYMBOLS.write_text(
        "# Functions that the shared library exports, and since which version. Entries are added, never changed.\n"
        + "".join(f"{name} {node}\n" for name in header.functions)
    )
    pathlib.Path(options.map).write_text(
        "/* Symbols that the shared library exports; a new release gets a new node. SPDX-License-Identifier: Apache-2.0 */\n"
        + node + " {\n  global:\n" + "".join(f"    {name};\n" for name in header.functions) + "  local:\n    *;\n};\n"
    )
    expressions = []
    for kind, name, field in layout_entries(header):
        expressions.append({"SIZE": f"sizeof({name})", "OFFSET": f"offsetof({name}, {field})", "VALUE": name}[kind])
    include = str(pathlib.Path(options.header).parent)
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "probe.c"
        prints = "".join(f'  printf("%lld\\n", (long long)({expression}));\n' for expression in expressions)
        source.write_text(f'#include <stdio.h>\n#include "gemini.h"\nint main(void) {{\n{prints}  return 0;\n}}\n')
        subprocess.run([options.cc, "-I", include, str(source), "-o", folder + "/probe"], check=True)
        values = subprocess.run([folder + "/probe"], check=True, text=True, stdout=subprocess.PIPE).stdout.split()
    lines = []
    for (kind, name, field), value in zip(layout_entries(header), values):
        if kind == "SIZE" or (kind == "VALUE" and name == header.constants[0]):
            lines.append("")
        lines.append(f"{kind}({name}, {field}, {value});" if field else f"{kind}({name}, {value});")
    text = LAYOUT.read_text() if LAYOUT.exists() else ""
    head, found, _ = text.partition("/* --- entries --- */\n")
    if not found:
        raise SystemExit(f"abi.py: {LAYOUT}: no line /* --- entries --- */")
    LAYOUT.write_text(head + found + "\n".join(lines) + "\n")
    return False


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = {"symbols": check_symbols, "header": check_header, "layout": check_layout, "update": update}
    parser.add_argument("command", choices=commands)
    parser.add_argument("--header", required=True, help="gemini.h of the build tree")
    parser.add_argument("--map", default=str(HERE.parent.parent / "src" / "gemini.map"))
    parser.add_argument("--library", help="libgemini.so, for symbols")
    parser.add_argument("--cc", default="cc")
    parser.add_argument("--cxx", default="c++")
    parser.add_argument("--nm", default="nm")
    options = parser.parse_args()
    return int(commands[options.command](Header(options.header), options))


if __name__ == "__main__":
    sys.exit(main())
