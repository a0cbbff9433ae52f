"""Runs the Python blocks of pages of docs in order, as a reader would.

SPDX-License-Identifier: Apache-2.0
"""

import inspect
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch

import architectures
import libgemini
import libgemini.torch as gm
import page
import test_trainers
from libgemini.torch.optim import Optimizer

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "pytorch.md"
README = PAGE.parents[1] / "README.md"
SEVERAL = PAGE.parent / "several_gpus.md"


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
    assert 17 <= names["generated"] <= 36  # a text of random weights may end before its 20 tokens
    said = capsys.readouterr().out
    assert "stays" in said and "binds" in said and "moved a step" in said
    with pytest.raises(gm.GeminiError):
        gm.session()  # the page closes what it opened


LOSSES = re.compile(r"^losses of steps (\d+) to \d+: (.*)$", re.MULTILINE)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no torch.distributed")
def test_page_of_several_gpus_is_a_script_that_one_process_and_two_run(monkeypatch, tmp_path):
    """Both print the same losses, which fall. What two have saved, one goes on with as with what one has saved."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # two processes need two GPUs
    code = "\n".join(page.BLOCK.findall(SEVERAL.read_text()))
    (tmp_path / "train.py").write_text(code)
    said = {}

    def run(*command):
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, *command, tmp_path / "train.py"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        assert done.returncode == 0, done.stderr
        ((first, losses),) = LOSSES.findall(done.stdout)  # of one process
        return int(first), [float(loss) for loss in losses.split()]

    def run_here():
        names = page.run(SEVERAL)
        gm.close()
        return names["first"], names["losses"].tolist()

    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for name, begin in ("one", run_here), ("two", lambda: run(*torchrun)):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        said[name] = [begin(), run_here()]
    for (first, losses), (first_of_two, losses_of_two), wanted in zip(said["one"], said["two"], (0, 6)):
        assert first == first_of_two == wanted
        assert losses_of_two == pytest.approx(losses, abs=2e-4) and losses == sorted(losses, reverse=True)
    assert said["one"][1][1][0] < said["one"][0][1][-1]  # it went on, and did not begin again


def test_page_of_several_gpus_names_what_there_is():
    text = SEVERAL.read_text()
    names = set(re.findall(r"\bgm\.(\w+)", text))
    assert {"init", "prepare", "join"} <= names and not [name for name in names if not hasattr(gm, name)]
    table = text[text.index("| | with several processes |") : text.index("**When")]
    options = {
        name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)[`=]", row)
    }
    assert {"zero", "device_memory", "bucket_size"} <= options <= set(inspect.signature(gm.init).parameters)


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
    gm.init(device="cpu", device_memory="1MiB", host_memory="1MiB", chunk_size="64KiB")
    assert keys and keys <= set(gm.stats())


def test_table_of_architectures_is_what_tests_do():
    assert architectures.table() in (PAGE.parent / "architectures.md").read_text()
    assert f"lists {len(architectures.ARCHITECTURES)} architectures" in PAGE.read_text()


def test_table_of_what_runs_names_tests_that_there_are():
    """Each row names an example that test_trainers.py runs, or tests; each such example has a row."""
    text = PAGE.read_text()
    rows = text[text.index("| way | what to write | shown by |") :].split("\n\n")[0].splitlines()[2:]
    examples = {f"with_{name}.py" for name in test_trainers.NAMES} | {"several_processes.py"}
    named = set()
    for row in rows:
        shown = row.rsplit("|", 2)[1]
        found = set(re.findall(r"\((?:\.\./bindings/python/examples/)(\w+\.py)\)", shown))
        assert found <= examples, row
        named |= found
        tests = re.findall(r"`(test_\w+\.py)::(test_\w+)`", shown)
        assert found or tests, f"nothing shows it: {row}"
        for file, test in tests:
            source = (pathlib.Path(__file__).parent / file).read_text()
            assert re.search(rf"^def {test}\(", source, re.MULTILINE), f"{file} has no {test}"
        cases = re.findall(r"`(\w+)`", shown)
        assert set(cases) <= architectures.ARCHITECTURES.keys(), row
        assert not cases or tests[0][0] == "test_architectures.py"
    assert named == examples and len(rows) > 10


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


def public_functions():
    """(name, function) of all that users call."""
    for module in libgemini, gm:
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isfunction(value):
                yield f"{module.__name__}.{name}", value
    for kind, names in (
        (libgemini.Manager, [*vars(libgemini.Manager)]),
        (libgemini.Range, ["buffer"]),
        (libgemini.Span, ["buffers"]),
        (Optimizer, ["__init__", "add_param_group", "load_state_dict", "state_dict", "step", "zero_grad"]),
    ):
        for name in names:
            value = getattr(kind, name)
            if inspect.isfunction(value) and (not name.startswith("_") or name == "__init__"):
                yield f"{kind.__name__}.{name}", value


def test_docstrings_tell_arguments_and_results():
    """Each argument has its line below "Args:", each result "Returns:", unless it is a context manager."""
    missing, count = [], 0
    for name, function in public_functions():
        text, signature = inspect.getdoc(function) or "", inspect.signature(function)
        told = set(re.findall(r"^    \*{0,2}(\w+): ", text.partition("Args:\n")[2].partition("\n\n")[0], re.MULTILINE))
        if told != set(signature.parameters) - {"self"}:
            missing.append(f"{name}: {told ^ (set(signature.parameters) - {'self'})}")
        gives = signature.return_annotation not in ("None", "typing.NoReturn", inspect.Signature.empty)
        if gives and not re.search(r"^Returns:\n    \S|[Cc]ontext manager", text, re.MULTILINE):
            missing.append(f"{name}: what it returns")
        count += 1
    assert not missing and count > 80
