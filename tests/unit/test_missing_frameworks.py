"""Error messages of imports without JAX or PyTorch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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


def test_isolated_builds_have_the_headers_of_jax() -> None:
    """Of the versions of JAX that the extra asks for."""
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (extra,) = [r for r in project["project"]["optional-dependencies"]["jax"] if r[:4] == "jax>"]
    bound, _, marker = extra.removeprefix("jax").partition(";")
    required = [r for r in project["build-system"]["requires"] if r.startswith("jaxlib")]
    assert len(required) == 1
    assert required[0].startswith(f"jaxlib{bound};")
    assert marker.strip() in required[0]
