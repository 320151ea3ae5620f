"""What tests of the runtime share."""

from __future__ import annotations

import pytest

from wfbp.runtime.progress import stall


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for a rank that has left is told after a quarter of the usual time."""
    monkeypatch.setattr(stall, "_LEFT_GRACE_S", stall._LEFT_GRACE_S / 4)
