"""Which versions of torch there are tests for, and what is said of others.

SPDX-License-Identifier: Apache-2.0
"""

import ast
import pathlib
import re
import subprocess
import sys

import torch

from libgemini.torch import internals, patches

PACKAGE = pathlib.Path(internals.__file__).parent
ROOT = pathlib.Path(__file__).resolve().parents[3]
OLDEST, NEWEST = (".".join(map(str, version)) for version in internals.TESTED)


def run(program):
    """Runs it in a Python of its own; returns its exit status, and what it says and warns."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def pretend(version, *more):
    """A program that imports libgemini.torch with a torch of another version."""
    return "\n".join(
        ("import torch, sys", f"torch.__version__ = {version!r}", *more[:-1], "import libgemini.torch as gm", more[-1])
    )


TRAIN = """
gm.init(device="cpu", device_memory="4MiB", host_memory="64MiB")
model = torch.nn.Linear(64, 64)
model, optimizer = gm.prepare(model, torch.optim.AdamW(model.parameters()))
model(torch.ones(2, 64)).sum().backward()
optimizer.step()
gm.close()
print("trained")
"""


def test_this_torch_is_one_of_those():
    major, minor = map(int, torch.__version__.split(".")[:2])
    assert internals.TESTED[0] <= (major, minor) <= internals.TESTED[1]
    assert run("import libgemini.torch") == (0, "", "")


def test_the_range_is_the_same_everywhere():
    """What pip installs, what the pages say, and what tests/run.sh tests are what the code says."""
    after = f"{internals.TESTED[1][0]}.{internals.TESTED[1][1] + 1}"
    assert f'torch = ["torch>={OLDEST},<{after}"]' in (ROOT / "pyproject.toml").read_text()
    assert f"Tested with PyTorch {OLDEST} to {NEWEST}" in (ROOT / "docs/pytorch.md").read_text()
    assert f"pip install 'torch<{after}' --index-url" in (ROOT / "docs/pytorch.md").read_text()
    assert f"({OLDEST} to {NEWEST})" in (ROOT / "README.md").read_text()
    for lane, version in ("oldest", OLDEST), ("newest", NEWEST):
        pinned = (ROOT / f"tests/torch/{lane}.txt").read_text()
        assert re.search(rf"^torch=={re.escape(version)}\.\d+$", pinned, re.MULTILINE), lane


def test_p1_a_newer_torch_is_a_warning():
    status, said, warned = run(pretend("2.99.0+cu999", "", TRAIN))
    assert (status, said) == (0, "trained\n"), warned
    assert warned.count("Warning") == 1
    assert f"this is torch 2.99.0+cu999; libgemini is tested with torch {OLDEST} to {NEWEST}" in warned
    assert "<string>:4: UserWarning" in warned  # where libgemini.torch is imported


def test_p1_a_torch_that_lacks_something_is_an_error_of_init():
    gone = (
        "torch._C._nn._parse_to",
        "torch._foreach_mul_",
        "torch.multiprocessing.reductions.StorageWeakRef",
        "torch._C._current_graph_task_id",
        "torch._functorch.vmap._add_batch_dim",
    )
    status, said, warned = run(
        pretend(
            "2.99.0",
            "import torch._functorch.vmap",
            f"del {', '.join(gone)}",
            """
print("imported")
try:
  gm.init(device="cpu", device_memory="4MiB", host_memory="64MiB")
except gm.GeminiError as error:
  print(error)
""",
        )
    )
    assert status == 0, warned
    assert said == (
        f"imported\ntorch 2.99.0 has no {', '.join(gone)}, which libgemini needs: it is tested with torch {OLDEST} "
        f"to {NEWEST}\n"
    )


def test_p1_a_torch_that_is_too_old_is_refused():
    status, said, warned = run(pretend("2.5.1", "", ""))
    assert status == 1 and warned.endswith(
        f"ImportError: libgemini.torch needs torch {OLDEST} or later: this is torch 2.5.1\n"
    )


def test_what_torch_does_not_promise_is_in_one_file():
    """And what is replaced in another one."""
    for path in PACKAGE.glob("*.py"):
        used = re.findall(r"torch\._[A-Za-z]\w*", path.read_text())
        assert not used or path.name in ("internals.py", "patches.py"), (path.name, used)


def root(node):
    """The name that an expression such as torch.nn.Module.forward begins with."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def changes(tree):
    """(line, text) of what a module does to attributes of modules and classes that are not libgemini's."""
    foreign = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            foreign.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            foreign.update(alias.asname or alias.name for alias in node.names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load) and root(node) in foreign:
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and root(node.func) in ("setattr", "delattr") and root(node.args[0]) in foreign:
            yield node.lineno, ast.unparse(node)


def test_what_is_replaced_in_torch_is_in_one_file():
    for code in (
        "import torch\ntorch.add = 1",
        "from torch import nn\ndel nn.Module.x",
        "import torch as t\nsetattr(t, 'x', 1)",
    ):
        assert list(changes(ast.parse(code)))
    for path in PACKAGE.glob("*.py"):
        found = list(changes(ast.parse(path.read_text())))
        assert not found or path.name == "patches.py", (path.name, found)
    first, last = internals.TESTED
    assert patches.__doc__ and f"{first[0]}.{first[1]} to {last[0]}.{last[1]}." in patches.__doc__
