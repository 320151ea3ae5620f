"""Ranks of tests that share cores with other jobs of the session."""

from __future__ import annotations

from wfbp.comm import waiting


def leave_cores() -> None:
    """Wait for other ranks without keeping a core for long: two jobs share the cores."""
    waiting.SPIN_S = 5e-5
