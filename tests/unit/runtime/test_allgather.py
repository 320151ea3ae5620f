"""Waits for all-gathers by several threads."""

from __future__ import annotations

import threading
import time
from unittest.mock import Mock

from wfbp.core.plan import Group, Plan
from wfbp.core.types import Operation, Phase, TensorSpec
from wfbp.runtime.engine.allgather import AllGatherState

SPECS = tuple(TensorSpec(f"t{k}", (4,), "float32") for k in range(2))
WHOLE = Plan("whole", SPECS, (Group((1, 0)),))
GATHERED = Plan(
    "gathered",
    SPECS,
    (
        *(Group((k,), Operation.REDUCE_SCATTER) for k in (1, 0)),
        *(Group((k,), Operation.ALL_GATHER, Phase.FORWARD) for k in (0, 1)),
    ),
)


def test_who_comes_after_another_thread_and_a_change_of_plans_waits_for_nothing() -> None:
    runtime = Mock()
    runtime.await_reply.side_effect = AssertionError("nothing is under way")
    gathers = AllGatherState(runtime, Mock(), Mock(), "optimizer")
    gathers.install(GATHERED, [0, 1], 2)
    gathers.begin([0, 0], None)
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            gathers.wait(1)
        except BaseException as error:
            failed.append(error)

    late = threading.Thread(target=wait, daemon=True)
    with gathers._lock:  # as another thread that waits
        late.start()
        time.sleep(0.1)
        gathers.pending = False
        gathers.install(WHOLE, [0, 1], 2)
    late.join(5.0)
    assert not late.is_alive()
    assert not failed


def test_what_a_step_gathers_arrives_before_the_next_gathers() -> None:
    """Its addresses are those of the same parameters."""
    runtime, lane = Mock(), Mock(events=[])
    gathers = AllGatherState(runtime, lane, Mock(), "optimizer")
    gathers.install(GATHERED, [0, 1], 2)
    gathers.begin([0, 0], None)
    runtime.await_reply.assert_not_called()
    gathers.begin([0, 0], None)
    assert runtime.await_reply.call_count == 2
    assert len(lane.events) == 2
