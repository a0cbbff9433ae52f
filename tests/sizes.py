#!/usr/bin/env python3
"""Fails when a source of the library has grown past what a reader can hold. SPDX-License-Identifier: Apache-2.0

Looks at src and include: no file over 800 lines, no line over 120 columns (comments too), and no record with more than
30 fields at its top level, where a struct or union inside counts as one.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
MOST_LINES, MOST_COLUMNS, MOST_FIELDS = 800, 120, 30
HEADER_LINES = 1200  # of public headers, where comments are most of the text


def without_comments(text: str) -> str:
    """The text with comments and strings blanked, so that braces and commas in them do not count."""
    return re.sub(
        r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', lambda found: re.sub(r"[^\n]", " ", found[0]), text, flags=re.S
    )


def records(code: str):
    """Yields the name and the number of top-level fields of each struct and union that has a body."""
    for found in re.finditer(r"\b(?:struct|union)\b\s*(\w*)[^;{}()=]*\{", code):
        depth, fields, at = 1, 0, found.end()
        brackets = 0
        statement = ""
        while depth and at < len(code):
            c = code[at]
            if c == "{":
                depth += 1
            elif c == "}":
                depth -= 1
            elif depth == 1:
                brackets += c in "(["
                brackets -= c in ")]"
                if c == ";":
                    fields += 1 + statement.count(",")
                    statement = ""
                elif not brackets:
                    statement += c
            at += 1
        after = re.match(r"\s*(\w*)", code[at:])
        yield found[1] or (after[1] if after else "") or "(no name)", code.count("\n", 0, found.start()) + 1, fields


def main() -> int:
    """Prints each finding; returns 1 when there is one."""
    findings = []
    for folder in ("src", "include"):
        for path in sorted(path for path in (ROOT / folder).rglob("*.*") if path.suffix in (".c", ".h", ".hpp")):
            name = path.relative_to(ROOT)
            text = path.read_text()
            lines = text.split("\n")
            most = HEADER_LINES if folder == "include" else MOST_LINES
            if len(lines) - 1 > most:
                findings.append(f"{name}: {len(lines) - 1} lines, more than {most}")
            for number, line in enumerate(lines, 1):
                if len(line) > MOST_COLUMNS:
                    findings.append(f"{name}:{number}: {len(line)} columns, more than {MOST_COLUMNS}")
            for record, number, fields in records(without_comments(text)):
                if fields > MOST_FIELDS:
                    findings.append(f"{name}:{number}: record {record} has {fields} fields, more than {MOST_FIELDS}")
    print("\n".join(findings))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
