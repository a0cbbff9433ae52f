"""Runs the Python blocks of a page of docs in order, as a reader would, in a folder that is gone afterwards.

  python3 page.py docs/pytorch.md

SPDX-License-Identifier: Apache-2.0
"""

import os
import pathlib
import re
import sys
import tempfile

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run(path):
    """Returns the names that the blocks have defined."""
    text, names = path.read_text(), {}
    for block in BLOCK.finditer(text):
        line = text[: block.start(1)].count("\n")
        exec(compile("\n" * line + block.group(1), str(path), "exec"), names)  # errors name the page's line
    return names


if __name__ == "__main__":
    page = pathlib.Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        assert run(page), f"there is no block of Python in {page}"
