"""Runs the Python blocks of docs/pytorch.md in order, as a reader would.

SPDX-License-Identifier: Apache-2.0
"""

import inspect
import pathlib
import re

import pytest

import libgemini.torch as gm
import page

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "pytorch.md"
README = PAGE.parents[1] / "README.md"


@pytest.fixture(autouse=True)
def closed(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    yield
    gm.close()


def test_page_trains_a_model_as_it_stands(capsys):
    pytest.importorskip("transformers")
    names = page.run(PAGE)
    assert len(names["losses"]) == 4 and names["losses"][3] < names["losses"][0]
    assert names["stats"]["planned_iterations"] > 0
    assert names["position"] == 4
    said = capsys.readouterr().out
    assert "stays" in said and "binds" in said and "moved a step" in said
    with pytest.raises(gm.GeminiError):
        gm.session()  # the page closes what it opened


def test_page_names_what_there_is():
    """Functions and options that the page names exist, and no option is missing."""
    text = PAGE.read_text()
    names = set(re.findall(r"\bgm\.(\w+)", text))
    assert {"init", "prepare", "stats", "unit"} <= names
    assert not [name for name in names if not hasattr(gm, name)]
    options = set(inspect.signature(gm.init).parameters)
    table = text[text.index("## Options of gm.init()") : text.index("## Limits")]
    assert options == {
        name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    stats = text[text.index("| in `gm.stats()`") : text.index("`gm.explain()` says")]
    keys = {name for row in re.findall(r"^\| (`.*?) \|", stats, re.MULTILINE) for name in re.findall(r"`(\w+)", row)}
    gm.init(device="cpu", device_memory="1MiB", host_memory="1MiB", window="64KiB")
    assert keys and keys <= set(gm.stats())


def test_p12_there_is_one_beginning():
    """The README and the page tell the same two commands, word for word, but for what the page's example needs
    beside."""
    readme, page_text = README.read_text(), PAGE.read_text()
    begins = []
    for text in readme, page_text:
        (block,) = [
            block
            for block in re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
            if "pip install '." in block
        ]
        begins.append([line.split("#")[0].strip().removesuffix(" transformers") for line in block.splitlines()])
    assert begins[0] == begins[1] == ["tests/setup.sh --bench", "pip install '.[torch]'"]


def test_the_readmes_example_without_torch_runs(capsys):
    (block,) = [block for block in page.BLOCK.findall(README.read_text()) if "Manager(" in block]
    exec(compile(block, str(README), "exec"), {})
    assert "fetched a step" in capsys.readouterr().out
