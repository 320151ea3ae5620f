"""What the training thread notes of gradients, one event after another."""

from __future__ import annotations

from collections import deque
from unittest.mock import Mock

import numpy as np
import pytest

from wfbp.core.plan import Group, Plan
from wfbp.core.types import TensorSpec
from wfbp.runtime.engine.tracker import GradientTracker
from wfbp.runtime.step import BufferView

SPECS = tuple(TensorSpec(f"t{k}", (4,), "float32") for k in range(3))
ALONE = Plan("wfbp", SPECS, tuple(Group((k,)) for k in (2, 1, 0)))
EARLY, LAST = 2, 0
"""A tensor whose group leaves during backward, and the one of the last group, which waits."""


@pytest.fixture
def tracker() -> GradientTracker:
    """In an open step, whose gradients appear once each."""
    transport = Mock(complete=None)
    transport.view.side_effect = lambda data, whole=True: BufferView.of(data, whole)
    made = GradientTracker(
        SPECS, Mock(events=deque()), transport, Mock(sleeping=False), 1, Mock(), "rank 0"
    )
    buffers = [Mock(num_moves=0) for _ in ALONE.groups]
    for buffer in buffers:
        buffer.slot.return_value = np.zeros(16, np.uint8)
    made.install(ALONE, buffers)
    made.begin(0, 0.0)
    for index in (EARLY, LAST):
        made.mark_ready(index, 100 + index, None)
    return made


def test_a_gradient_that_grows_once_more_is_sent_again(tracker: GradientTracker) -> None:
    tracker.mark_ready(EARLY, 200, None)
    assert tracker.unplanned == {EARLY: (200, None)}
    tracker.mark_ready(LAST, 300, None)
    assert tracker.unplanned == {EARLY: (200, None)}, "the last group has not left"
    assert tracker.step.addresses[LAST] == 300


def test_a_gradient_that_is_gone_is_taken_back(tracker: GradientTracker) -> None:
    """From the step where it has not left; else the ranks come to it at the step's end."""
    for index in (EARLY, LAST):
        tracker.drop(index)
    assert tracker.unplanned == {EARLY: (0, None)}
    assert tracker.step.addresses[LAST] == 0
