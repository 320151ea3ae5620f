"""What the Makefile gives the commands that it runs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_bytecode_is_kept_where_the_environment_says_not_to() -> None:
    """Otherwise every rank of every test compiles all of PyTorch's Python when it starts."""
    usual = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["make", "--silent", "--eval", "environment:; @env", "environment"],
        cwd=ROOT,
        env={**usual, "PYTHONDONTWRITEBYTECODE": "1", "OTHER": "value"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "OTHER=value" in lines
    assert not any(line.startswith("PYTHONDONTWRITEBYTECODE") for line in lines)
