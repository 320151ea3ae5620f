"""Waits for all-gathers by several threads."""

from __future__ import annotations

import threading
import time
from unittest.mock import Mock

import numpy as np
import pytest

from wfbp.core.plan import Group, Plan
from wfbp.core.types import Operation, Phase, TensorSpec
from wfbp.runtime.engine.allgather import AllGatherState, GradientAssembler
from wfbp.runtime.step import BufferView
from wfbp.runtime.transport.buffers import shard_range
from wfbp.runtime.transport.transport import HostTransport

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
    late.join(60.0)
    assert not late.is_alive()
    assert not failed


def test_all_gathers_leave_from_the_thread_that_begins_them() -> None:
    """The communication thread would wait for the interpreter while that one goes on."""
    runtime, lane = Mock(), Mock(events=[])
    found: list[int] = []
    runtime.thread.progress.side_effect = lambda: found.append(len(lane.events))
    gathers = AllGatherState(runtime, lane, Mock(), "optimizer")
    gathers.install(GATHERED, [0, 1], 2)
    gathers.begin([0, 0], None)
    assert found == [1]
    runtime.post.assert_called_once_with(lane.wake)  # that goes on with them


@pytest.mark.parametrize("gather_dtype", ["", "float16"])
def test_shards_that_are_cast_are_gathered_from_where_they_were_reduced(gather_dtype: str) -> None:
    """All shards of a tensor are written then, this rank's among them."""
    lane, transport = Mock(events=[]), HostTransport(Mock(), 1 << 20)
    gathers = AllGatherState(Mock(), lane, transport, "optimizer")
    gathers.install(GATHERED, [0, 1], 2)
    assembler = GradientAssembler(
        SPECS, gathers, transport, rank=1, size=2, gather_dtype=gather_dtype
    )
    start, stop = shard_range(SPECS[0], 1, 2)
    shard = np.full(stop - start, 7, np.uint8)
    reduced = [BufferView.of(shard, whole=False), None]
    whole = assembler.begin(reduced)
    (request,) = lane.events
    slot = whole[0]
    assert slot is not None
    assert slot.whole
    assert request.addresses[0] == slot.address
    if gather_dtype:
        assert request.sources[0] + start == reduced[0].address
        assert not slot.data.any(), "nothing was copied"
    else:
        assert request.sources[0] == slot.address
        assert slot.data[start:stop].tolist() == shard.tolist()


@pytest.mark.parametrize("gather_dtype", ["", "float16"])
def test_whole_gradients_may_change_while_they_are_gathered(gather_dtype: str) -> None:
    """They are the program's, which may zero them behind step()."""
    lane, transport = Mock(events=[]), HostTransport(Mock(), 1 << 20)
    gathers = AllGatherState(Mock(), lane, transport, "optimizer")
    gathers.install(GATHERED, [0, 1], 2)
    assembler = GradientAssembler(SPECS, gathers, transport, 1, 2, gather_dtype)
    start, stop = shard_range(SPECS[0], 1, 2)
    gradient = np.full(SPECS[0].nbytes, 7, np.uint8)
    slot = assembler.begin([BufferView.of(gradient), None])[0]
    gradient[:] = 0
    (request,) = lane.events
    assert slot is not None
    assert request.sources[0] == slot.address
    assert slot.data[start:stop].tolist() == [7] * (stop - start)


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
