"""What tests of the runtime share."""

from __future__ import annotations

import pytest

from wfbp.runtime.progress import deadlock


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for a rank that has left is told after a quarter of the usual time."""
    monkeypatch.setattr(deadlock, "_LEFT_GRACE_S", deadlock._LEFT_GRACE_S / 4)
