"""What a user installs: sdist, wheel, editable; with a compiler and without."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.parser import Parser
from importlib.metadata import distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

NOT_SOURCE = shutil.ignore_patterns(
    ".git", ".venv*", "build", "dist", "runs", "*.egg-info", "*.so", "__pycache__", ".*_cache"
)

NO_COMPILER = {"CC": "/bin/false", "CXX": "/bin/false"}

SAYS_SO = "the C++ extension wfbp._native could not be built"

SMOKE = """
import importlib.metadata
import numpy as np
import wfbp
from wfbp import native
buffer = np.zeros(32, np.uint8)
source = np.array([2.0, 4.0], np.float32)
table = native.PackTable(buffer, [16], [8], "float32")
table.pointers[0] = source.ctypes.data
table.pack()
assert buffer[16:24].view(np.float32).tolist() == [2.0, 4.0]
half = np.array([1.0, 2.0], np.float16).view(np.uint16)
native.reduce_shards([half, half], half, "float16", "sum")
assert half.view(np.float16).tolist() == [2.0, 4.0]
print(f"version={importlib.metadata.version('wfbp')}")
print(f"from={wfbp.__file__}")
"""

TOOL = (sys.executable, "-m")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def run(*command: str | Path, cwd: Path, fails: bool = False, **environment: str) -> str:
    """Output of a command that has to succeed, or to fail, both streams together."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert (done.returncode != 0) == fails, done.stdout
    return done.stdout


def pip(python: Path, *arguments: str | Path, cwd: Path, **environment: str) -> str:
    """Run pip for another environment."""
    command = (sys.executable, "-m", "pip", "--python", python, *arguments)
    return run(*command, cwd=cwd, PIP_DISABLE_PIP_VERSION_CHECK="1", **environment)


def lend(python: Path, *names: str) -> None:
    """Give another environment packages of this one, as links."""
    (target,) = (python.parents[1] / "lib").glob("python*/site-packages")
    for name in names:
        found = distribution(name)
        for part in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            (target / part).symlink_to(Path(str(found.locate_file(part))))


@pytest.fixture
def quick(tmp_path: Path) -> dict[str, str]:
    """Variables of a compiler that optimizes nothing, because what it builds is not timed here.

    It fails for the handlers for JAX, which are optional; ``make install`` builds them.
    """
    wrapper = tmp_path / "compiler"
    refuse = 'case "$*" in *jax_ffi.cc*) exit 1;; esac'
    wrapper.write_text(f'#!/bin/sh\n{refuse}\nexec {shutil.which("c++")} "$@" -O0\n')
    wrapper.chmod(0o755)
    return {"CC": str(wrapper), "CXX": str(wrapper)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the sources, so that nothing is built inside the checkout."""
    return Path(shutil.copytree(ROOT, tmp_path / "source", ignore=NOT_SOURCE))


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """The interpreter of an environment in which nothing is installed, not even pip."""
    venv.create(tmp_path / "env", symlinks=True)
    return tmp_path / "env" / "bin" / "python"


URLS = """
[project.urls]
Repository = "https://host.example/wfbp"
Changelog = "https://host.example/wfbp/blob/main/CHANGELOG.md"
"""
"""As they will be given before the first release (docs/contributing/releasing.md)."""


def check_without_a_compiler(python: Path, source: Path) -> None:
    """Installing fails with one clear message."""
    lend(python, "setuptools", "pybind11", "numpy")
    command = (sys.executable, "-m", "pip", "--python", python, "install")
    options = ("--no-build-isolation", "--no-deps", "-e", source)
    told = run(*command, *options, cwd=source.parent, fails=True, **NO_COMPILER)
    assert told.count(f"error: {SAYS_SO}") == 1, told
    assert "Install a C++17 compiler" in told
    assert "Traceback" not in told


@pytest.mark.long  # `make demo` installs from the sources each time, before `make test`
def test_sdist_and_wheel(source: Path, empty: Path, tmp_path: Path, quick: dict[str, str]) -> None:
    """Also behind an attempt that has failed. (``make install`` is the editable installation.)"""
    venv.create(tmp_path / "another", symlinks=True)
    check_without_a_compiler(tmp_path / "another" / "bin" / "python", source)
    dist = tmp_path / "dist"
    with open(source / "pyproject.toml", "a") as file:
        file.write(URLS)
    # Without a choice, the wheel is built from the sdist: so the sdist is complete.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, cwd=source, **quick)
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    with tarfile.open(sdist) as archive:
        shipped = {name.partition("/")[2] for name in archive.getnames()}
    tests = {"Makefile", "constraints.txt", "tests/conftest.py", "tests/data/clusters.json"}
    assert {"LICENSE", "csrc/kernels.inl", "wfbp/_native.pyi", *tests} <= shipped
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert any(name.startswith("wfbp/_native.") and name.endswith(".so") for name in names)
    # Compiled at first use: the kernels, and the handlers if JAX was installed later.
    compiled = {"wfbp/jax/xla_handlers.py", "wfbp/jax/jax_ffi.cc", "wfbp/cuda/pack.cu"}
    compiled |= {f"wfbp/jax/jax_{part}.h" for part in ("events", "mailbox", "values")}
    examples = {"wfbp/cli/examples/traces/resnet-50.json", "wfbp/cli/examples/costs/10gbe-16.json"}
    assert {"wfbp/py.typed", "wfbp/_native.pyi", "wfbp/core/plan.py", *compiled} <= set(names)
    assert examples <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    foreign = [n for n in names if not n.startswith(("wfbp/", "wfbp-"))]
    assert not foreign, "the wheel brings more than the package"
    check_as_an_index_does(sdist, wheel)
    options = ("--no-compile", "-c", ROOT / "constraints.txt")
    pip(empty, "install", *options, f"{wheel}[mpich]", cwd=tmp_path)
    told = run(empty, "-I", "-W", "error", "-c", SMOKE, cwd=tmp_path)
    assert f"from={empty.parents[1]}" in told
    planned = run(empty, "-I", "-m", "wfbp", "plan", "vgg-16", "--cost", "10gbe-16", cwd=tmp_path)
    assert "no schedule can be under" in planned
    two_ranks = (empty.with_name("mpirun"), "-n", "2", empty, "-I", "-W", "error")
    told = run(*two_ranks, ROOT / "tests/integration/wheel_program.py", cwd=tmp_path)
    assert told.count("is done") == 2


def check_as_an_index_does(sdist: Path, wheel: Path) -> None:
    """The description renders, its links lead to files of the sources, the wheel fits manylinux."""
    run(*TOOL, "twine", "check", "--strict", sdist, wheel, cwd=wheel.parent)
    if sys.platform == "linux":
        assert '"manylinux_2_' in run(*TOOL, "auditwheel", "show", wheel, cwd=wheel.parent)
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL"))
    repository = urls["Repository"]
    assert urls["Changelog"] == f"{repository}/blob/main/CHANGELOG.md"
    links = re.findall(r"\]\(([^)\s]+)\)", metadata.get_payload())
    own = [link.partition("#")[0] for link in links if link.startswith(repository)]
    assert len(own) > 20
    for link in own:
        kind, branch, path = link.removeprefix(f"{repository}/").split("/", 2)
        assert branch == "main"
        assert (ROOT / path).is_dir() if kind == "tree" else (ROOT / path).is_file(), link
    relative = [link for link in links if "://" not in link and not link.startswith("#")]
    assert not relative


def test_a_description_without_an_address_has_no_dead_links() -> None:
    """As long as the repository has none; what links say stays."""
    assert "[project.urls]\n" not in (ROOT / "pyproject.toml").read_text()
    told = run(sys.executable, "setup.py", "-q", "--long-description", cwd=ROOT)
    assert "lists the silent differences" in told
    assert not re.findall(r"\]\([^)\s]+\)", told)


def test_wheels_are_built_for_all_supported_versions() -> None:
    pytest.importorskip("cibuildwheel")
    command = (*TOOL, "cibuildwheel", "--platform", "linux", "--archs", "x86_64")
    told = run(*command, "--print-build-identifiers", cwd=ROOT)
    assert told.split() == [f"cp3{minor}-manylinux_x86_64" for minor in range(10, 15)]
