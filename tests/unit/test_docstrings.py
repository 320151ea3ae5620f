"""The examples in docstrings."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest

from wfbp.runtime import process

PACKAGE = Path(__file__).resolve().parents[2] / "wfbp"
ELSEWHERE = (
    "cuda",
    "bench",
    "integrations",
    "comm/mpi/start_notice.py",
)
"""Their examples need several ranks, another framework or a device."""


def modules_with_examples() -> list[str]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if ">>>" in path.read_text() and not name.startswith(ELSEWHERE):
            found.append(".".join(("wfbp", *Path(name).with_suffix("").parts)))
    return [name.removesuffix(".__init__") for name in found]


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_run(name: str) -> None:
    for framework in ("jax", "torch"):
        if name.startswith(f"wfbp.{framework}"):
            pytest.importorskip(framework)
    try:
        results = doctest.testmod(import_module(name))
    finally:
        process.shutdown()  # some begin with wfbp.init(), as programs do
    assert results.attempted > 0
    assert results.failed == 0
