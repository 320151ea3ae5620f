"""Error messages of imports without JAX or PyTorch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ((3, 10, 14), "JAX 0.10 needs Python 3.11 or newer. This is Python"),
        ((3, 12, 1), r"pip install 'wfbp[jax]'. This is Python"),
    ],
)
def test_the_error_names_the_reason(version: tuple[int, ...], reason: str) -> None:
    program = (
        f"import sys; sys.version_info = {version}; sys.modules['jax'] = None\nimport wfbp.jax"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    last = run.stderr.strip().splitlines()[-1]
    assert run.returncode == 1
    assert last.startswith("ImportError: wfbp.jax needs JAX")
    assert reason in last


def test_the_error_names_what_to_install_for_pytorch() -> None:
    program = "import sys; sys.modules['torch'] = None\nimport wfbp.torch"
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    last = run.stderr.strip().splitlines()[-1]
    assert run.returncode == 1
    assert last.startswith("ImportError: wfbp.torch needs PyTorch")
    assert "pip install 'wfbp[torch]'" in last


@pytest.mark.parametrize("name", ["lightning", "huggingface"])
def test_the_error_of_an_integration_names_its_extra(name: str) -> None:
    program = f"import sys; sys.modules['torch'] = None\nimport wfbp.integrations.{name}"
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.stderr.strip().endswith(f"pip install 'wfbp[{name}]'")


def test_builds_require_no_framework() -> None:
    """A user of PyTorch downloads no JAX: the handlers are compiled where JAX is, at first use."""
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    required = {Requirement(text).name for text in project["build-system"]["requires"]}
    assert required == {"setuptools", "pybind11"}
