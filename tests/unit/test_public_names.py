"""The documentation's check of public names: what it takes for documented, and what it tells."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

sphinx_logging = pytest.importorskip("sphinx.util.logging")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs" / "_ext"))

import public_names  # noqa: E402 - needs the path above

SOURCE = '''
"""A module."""
__all__ = ["Class", "documented", "undocumented", "CONSTANT"]
CONSTANT = 3

class Class:
    """A class."""
    def told(self):
        """Told."""
    @property
    def untold(self): ...
    def _private(self): ...

def documented():
    """Documented."""

def undocumented(): ...
'''


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("wfbp_stand_in")
    made.__dict__["__name__"] = "wfbp.stand_in"
    exec(SOURCE, made.__dict__)
    monkeypatch.setitem(sys.modules, "wfbp.stand_in", made)
    monkeypatch.setattr(public_names, "MODULES", ("wfbp.stand_in",))
    return made


@pytest.mark.usefixtures("module")
def test_undocumented_and_missing_names_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    logger: Any = SimpleNamespace(warning=lambda text, *words: told.append(text % words))
    monkeypatch.setattr(sphinx_logging, "getLogger", lambda _: logger)
    place = "wfbp.stand_in"
    listed = dict.fromkeys([place, *(f"{place}.{n}" for n in ("Class", "Class.told", "CONSTANT"))])
    env: Any = SimpleNamespace(
        domains=SimpleNamespace(python_domain=SimpleNamespace(objects=listed))
    )
    public_names.check(None, env)  # type: ignore[arg-type]
    assert told == [
        f"{place}.Class.untold is public and has no docstring",
        f"{place}.documented is public and missing in the reference (docs/reference/api)",
        f"{place}.undocumented is public and has no docstring",
    ]
