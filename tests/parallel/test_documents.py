"""Whole programs of the documentation, as a reader would copy them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import launcher

pytestmark = pytest.mark.parallel

DOCS = launcher.ROOT / "docs"


def program(page: str, heading: str) -> str:
    """The first block of Python behind some words of a page."""
    text = (DOCS / page).read_text().partition(heading)[2]
    block = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert block is not None, f"{page}: no program behind {heading!r}"
    return block[1]


def test_coming_from_ddp(mpirun: Callable[..., launcher.Run], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(program("coming-from-ddp.md", "A whole program"))
    run = mpirun(2, script)
    assert run.rc == 0, run.stderr
    losses = [float(line.split()[-1]) for line in run.stdout.splitlines()]
    assert len(losses) == 4, run.stdout
    assert losses[-1] < losses[0]
