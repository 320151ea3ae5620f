"""What the Makefile gives the commands that it runs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def environment_without_make() -> dict[str, str]:
    """So that make behaves alike whether or not it has started these tests."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}


def commands_of_the_demo(environment: Path) -> str:
    """What ``make demo`` would run."""
    done = subprocess.run(
        ["make", "--dry-run", "demo", f"VENV={environment}"],
        cwd=ROOT,
        env=environment_without_make(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_demo_installs_no_tools_for_development(tmp_path: Path) -> None:
    lines = commands_of_the_demo(tmp_path).splitlines()
    assert any(line.endswith(' -e ".[mpich,torch,report]"') for line in lines)
    assert lines[-1] == f"{tmp_path}/bin/python examples/overlap.py"
    (tmp_path / ".installed").touch()  # all is there
    assert commands_of_the_demo(tmp_path).splitlines() == lines[-1:]


def test_bytecode_is_kept_where_the_environment_says_not_to() -> None:
    """Otherwise every rank of every test compiles all of PyTorch's Python when it starts."""
    done = subprocess.run(
        ["make", "--silent", "--eval", "environment:; @env", "environment"],
        cwd=ROOT,
        env={**environment_without_make(), "PYTHONDONTWRITEBYTECODE": "1", "OTHER": "value"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "OTHER=value" in lines
    assert not any(line.startswith("PYTHONDONTWRITEBYTECODE") for line in lines)


def test_a_python_that_does_not_fit_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        ["make", "demo", "PYTHON=python2.99", f"VENV={tmp_path}"],
        cwd=ROOT,
        env=environment_without_make(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert "Expected Python >= 3.10 with venv; found none as python2.99" in done.stderr
