"""The wheel and the source archive: what is in them, and that the wheel works where the sources are not.

SPDX-License-Identifier: Apache-2.0
"""

import email
import os
import pathlib
import platform
import re
import subprocess
import sys
import tarfile
import venv
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
JEMALLOC = ROOT / "build/deps/jemalloc"
VERSION = re.search(r'#define GEMINI_VERSION_STRING "(.*)"', (ROOT / "include/gemini.h").read_text())[1]


def run(*command, env=None, **more):
    """Runs it without a network, and returns what it says."""
    env = {**os.environ, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **(env or {})}
    for name in "LIBGEMINI_DIR", "PYTHONPATH":
        env.pop(name, None)
    done = subprocess.run(
        [str(word) for word in command],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        **more,
    )
    return done.returncode, done.stdout


def build_wheel(source, folder, jemalloc=None, **env):
    if jemalloc:
        env["SKBUILD_CMAKE_DEFINE"] = f"GEMINI_JEMALLOC_ROOT={jemalloc}"
    return run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-cache-dir",
        "--no-build-isolation",
        "--no-deps",
        "-w",
        folder,
        source,
        env=env,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    status, said = build_wheel(ROOT, folder)
    assert status == 0, said
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    folder = tmp_path_factory.mktemp("archive")
    program = "import sys; from scikit_build_core import build; build.build_sdist(sys.argv[1])"
    status, said = run(sys.executable, "-c", program, folder, cwd=ROOT)
    assert status == 0, said
    (path,) = folder.iterdir()
    return path


def test_wheel_holds_the_package_and_nothing_else(wheel):
    assert wheel.name == f"libgemini-{VERSION}-py3-none-linux_{platform.machine()}.whl"
    package = ROOT / "bindings/python"
    expected = {
        str(path.relative_to(package))
        for path in package.glob("libgemini/**/*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    expected |= {f"libgemini/lib/{name}.so" for name in ("libgemini", "libgemini_update")}
    expected |= {
        f"libgemini-{VERSION}.dist-info/{name}"
        for name in ("METADATA", "WHEEL", "RECORD", "licenses/LICENSE", "licenses/COPYING.jemalloc")
    }
    with zipfile.ZipFile(wheel) as file:
        assert set(file.namelist()) == expected
        copying = file.read(f"libgemini-{VERSION}.dist-info/licenses/COPYING.jemalloc")
        assert copying == (JEMALLOC / "COPYING").read_bytes()


def test_metadata(wheel):
    with zipfile.ZipFile(wheel) as file:
        text = file.read(f"libgemini-{VERSION}.dist-info/METADATA").decode()
    said = email.message_from_string(text)
    assert said["Name"] == "libgemini" and said["Version"] == VERSION
    assert said["License-Expression"] == "Apache-2.0" and said["Requires-Python"] == ">=3.9"
    assert sorted(said.get_all("Requires-Dist")) == [
        'cupy-cuda12x; extra == "cupy"',
        'jax>=0.4.38; extra == "jax"',
        'numpy; extra == "cupy"',
        'numpy; extra == "jax"',
        'torch<2.16,>=2.6; extra == "torch"',
    ]
    assert said.get_payload() == (ROOT / "README.md").read_text()


def test_installed_wheel_works_elsewhere(wheel, tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    status, said = run(python, "-m", "pip", "install", "--no-deps", wheel)
    assert status == 0, said
    program = """
import libgemini
from libgemini import abi
with libgemini.Manager(device_memory="1MiB", host_memory="1MiB", chunk_size="64KiB") as manager:
  assert manager.take(manager.arena(abi.KIND_PARAM), 100) == 0
  print(libgemini.version(), libgemini.__file__, abi.library().path, abi.update_library().path, sep="\\n")
"""
    status, said = run(python, "-c", program, cwd=tmp_path)
    assert status == 0, said
    version, *paths = said.split("\n")[:-1]
    assert version == VERSION
    (package,) = (tmp_path / "venv").glob("lib/python3*/site-packages/libgemini")
    assert paths == [str(package / path) for path in ("__init__.py", "lib/libgemini.so", "lib/libgemini_update.so")]


def test_wheel_with_its_libraries_needs_no_compiler(wheel, tmp_path):
    pytest.importorskip("auditwheel")
    path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
    command = [ROOT / "bindings/python/wheel.sh", "--from", wheel, "--torch", sys.executable, tmp_path / "out"]
    status, said = run(*command, env={"PYTHON": sys.executable, "PATH": path})
    assert status == 0, said
    assert "a manager works" in said and "a training step works" in said
    (made,) = (tmp_path / "out").iterdir()
    assert re.fullmatch(rf"libgemini-{VERSION}-py3-none-manylinux_2_\d+_{platform.machine()}\.whl", made.name)
    with zipfile.ZipFile(wheel) as plain, zipfile.ZipFile(made) as file:
        names = file.namelist()
        assert {name for name in plain.namelist() if not name.endswith("/")} <= set(names)
        inside = {name.split("/")[1].split("-")[0] for name in names if re.match(r"libgemini\.libs/lib", name)}
        assert {"libhwloc", "liburing"} <= inside
        for library in inside:
            assert file.read(f"libgemini-{VERSION}.dist-info/licenses/COPYING.{library}")


def test_wheel_of_the_source_archive_is_the_same(wheel, archive, tmp_path):
    with tarfile.open(archive) as file:
        top = {name.split("/")[1] for name in file.getnames() if "/" in name}
    assert archive.name == f"libgemini-{VERSION}.tar.gz"
    assert "tests" in top and "build" not in top and ".git" not in top
    # Unlike the other one not optimised, which takes a third of the time: names are compared.
    status, said = build_wheel(archive, tmp_path, JEMALLOC, SKBUILD_CMAKE_BUILD_TYPE="Debug")
    assert status == 0, said
    (other,) = tmp_path.iterdir()
    assert other.name == wheel.name
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(other) as two:
        assert set(one.namelist()) == set(two.namelist())


def test_what_is_missing_is_said(tmp_path):
    status, said = build_wheel(ROOT, tmp_path / "out", tmp_path)
    want = f"the private jemalloc is missing ({tmp_path}/lib/gmi_jemalloc.o): run {ROOT}/tests/jemalloc.sh"
    assert status and want in " ".join(said.split())  # CMake breaks lines


def test_p12_git_sees_nothing_of_what_pip_makes():
    names = [
        "build/x",
        "bindings/python/build/x",
        "dist/x",
        "libgemini.egg-info/x",
        f"libgemini-{VERSION}-py3-none-any.whl",
    ]
    if subprocess.run(["git", "rev-parse"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip("this is no checkout")
    done = subprocess.run(["git", "check-ignore", "--no-index", *names], cwd=ROOT, capture_output=True, text=True)
    assert len(done.stdout.splitlines()) == len(names), done
