"""Samples of encoded gradients, and what follows from them."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest

from wfbp.runtime.compression_guard import Samples, sums_of

EXACT = np.array([2.0, 0.0], np.float32)


def sums(angle: float, error: float = 0.0) -> list[float]:
    """Of an exact average and one at an angle to it, in radians."""
    sent = np.array([2 * math.cos(angle), 2 * math.sin(angle)], np.float32)
    return sums_of(sent, EXACT, np.array([error, 0.0], np.float32), 1.0)


def test_a_sample_combines_the_parts_of_all_ranks() -> None:
    guard = Samples("Adam", falls_back=False, is_logger=True)
    sender = sums_of(None, EXACT, np.array([0.0, 3.0], np.float32), 1 / 3)
    assert not guard.add("w", "int8", 64, [sender, sums(0.1, 1.0), sender])
    assert guard.latest is not None
    assert guard.latest["cosine"] == pytest.approx(math.cos(0.1), rel=1e-5)
    assert guard.latest["relative_error"] == pytest.approx(2 * math.sin(0.05), rel=1e-4)
    assert guard.latest["kept_error"] == pytest.approx(math.sqrt(1 + 1 + 1) / 2, rel=1e-5)
    assert (guard.latest["tensor"], guard.latest["step"]) == ("w", 64)


@pytest.mark.parametrize("falls_back", [False, True])
def test_five_bad_samples_in_a_row(falls_back: bool, caplog: pytest.LogCaptureFixture) -> None:
    guard = Samples("Adam", falls_back, is_logger=True)
    with caplog.at_level(logging.WARNING, "wfbp"):
        answers = [guard.add("w", "int8", k, [sums(0.5)]) for k in range(4)]
        answers += [guard.add("w", "int8", 4, [sums(0.0)])]
        assert not any(answers)
        assert not caplog.records
        answers = [guard.add("w", "int8", k, [sums(0.5)]) for k in range(5, 20)]
    assert [k for k, answer in enumerate(answers) if answer] == ([4, 9, 14] if falls_back else [])
    assert len(caplog.records) == 1
    assert ("sent in 16 bits" in caplog.text) == falls_back


def test_steps_that_show_nothing() -> None:
    guard = Samples("Adam", falls_back=True, is_logger=True)
    for bad in ([0.0] * 5, [math.nan] * 5, [math.inf] * 5):
        assert not guard.add("w", "int8", 64, [bad])
    assert guard.latest is None


def test_every_tensor_has_its_turn() -> None:
    guard = Samples("Adam", falls_back=True, is_logger=True)
    assert [guard.choose([3, 5, 8], 2) for _ in range(4)] == [(3, 0), (5, 1), (8, 0), (3, 1)]
    guard.add("w", "int8", 64, [sums(0.5)])
    assert guard.choose([3, 5, 8], 2) == (3, 1), "again, while it is bad"
    guard.add("w", "int8", 128, [sums(0.0)])
    assert guard.choose([3, 5, 8], 2) == (5, 0)
