"""Events that the training thread notes and posts, one after another, without other ranks."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock, Mock

import numpy as np

from tests.support.local import LocalWorld
from wfbp.comm.memory import Memory
from wfbp.config import Config
from wfbp.core.plan import Group, Plan
from wfbp.core.types import Operation, TensorSpec
from wfbp.runtime.arguments import ReducerOptions
from wfbp.runtime.buffers import shard_range
from wfbp.runtime.reducer import Reducer
from wfbp.runtime.step import BufferView

SPECS = tuple(TensorSpec(f"t{k}", (4,), "float32") for k in range(3))
ALONE = Plan("layerwise", SPECS, tuple(Group((k,)) for k in (2, 1, 0)))
EARLY, MIDDLE, LAST = 2, 1, 0
"""Tensors whose groups leave during backward, and the one of the last group, which waits."""
GATHERED = Plan(
    "gathered",
    SPECS,
    (
        Group((2,)),
        *(Group((k,), Operation.REDUCE_SCATTER) for k in (1, 0)),
        *(Group((k,), Operation.ALL_GATHER) for k in (0, 1)),
    ),
)


def make_reducer(plan: Plan) -> Any:
    """The reducer of rank 1 of 2, without a lane that reads its events."""
    runtime = MagicMock(rank=1, size=2, where="rank 1", config=Config(), timeline=None)
    runtime.channel.exchange.side_effect = lambda payload, *_: [payload] * 2
    runtime.thread.needs_wakeup = False
    backend = LocalWorld(2).backend(1)
    runtime.lease.return_value = backend, backend
    runtime.memory.return_value = Memory(backend, 1 << 20)
    options = ReducerOptions("layerwise", 64)
    reducer: Any = Reducer(runtime, SPECS, options, fetch=lambda index: None)
    install(reducer, plan)
    return reducer


def install(reducer: Any, plan: Plan) -> None:
    reducer.tuner = Mock(plan=plan)
    reducer._install()
    reducer._begin(0.0)


def test_a_gradient_that_grows_once_more_is_sent_again() -> None:
    reducer = make_reducer(ALONE)
    for index in (EARLY, LAST):
        reducer.mark_ready(index, 100 + index, None)
    reducer.mark_ready(EARLY, 200, None)
    assert reducer._unplanned == {EARLY: (200, None)}
    reducer.mark_ready(LAST, 300, None)
    assert reducer._unplanned == {EARLY: (200, None)}, "the last group has not left"
    assert reducer._sources[LAST] == 300


def test_a_gradient_that_is_gone_is_taken_back() -> None:
    """From the step where it has not left; else the ranks come to it at the step's end."""
    reducer = make_reducer(ALONE)
    for index in (EARLY, LAST):
        reducer.mark_ready(index, 100 + index, None)
        reducer.drop(index)
    assert reducer._unplanned == {EARLY: (0, None)}
    assert reducer._sources[LAST] == 0


def test_groups_that_may_leave_early() -> None:
    reducer = make_reducer(ALONE)
    assert reducer.early_groups == [-1, 1, 0]
    install(reducer, replace(ALONE, overlap=False))
    assert reducer.early_groups == [-1, -1, -1]
    install(reducer, Plan("partial", SPECS[1:], (Group((1,)), Group((0,)))))
    assert reducer.early_groups == [-1, -1, 0], "a tensor outside of the plan"


def test_who_comes_after_another_thread_and_a_change_of_plans_waits_for_nothing() -> None:
    reducer = make_reducer(GATHERED)
    reducer._runtime.thread.await_reply.side_effect = AssertionError("nothing is under way")
    reducer.gathers.send([0] * 3, None)
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            reducer.gathers.await_tensor(1)
        except BaseException as error:
            failed.append(error)

    late = threading.Thread(target=wait, daemon=True)
    with reducer.gathers._lock:  # as another thread that waits
        late.start()
        time.sleep(0.1)
        reducer.gathers.groups, reducer.gathers._num_arrived = [], 0
    late.join(60.0)
    assert not late.is_alive()
    assert not failed


def test_whole_gradients_may_change_while_they_are_gathered() -> None:
    """They are the program's, which may zero them after step()."""
    reducer = make_reducer(GATHERED)
    start, stop = shard_range(SPECS[0], 1, 2)
    gradient = np.full(SPECS[0].nbytes, 7, np.uint8)
    view = reducer.gathers.gather_gradients(
        [BufferView(gradient, gradient.ctypes.data), None, None]
    )[0]
    gradient[:] = 0
    (request,) = reducer._events
    assert request.sources[0] == view.address
    assert view.data[start:stop].tolist() == [7] * (stop - start)


def test_what_a_step_gathers_arrives_before_the_next_gathers() -> None:
    """Its addresses are those of the same parameters."""
    reducer = make_reducer(GATHERED)
    await_reply = reducer._runtime.thread.await_reply
    reducer.gathers.send([0] * 3, None)
    await_reply.assert_not_called()
    reducer.gathers.send([0] * 3, None)
    assert await_reply.call_count == 2
    assert len(reducer._events) == 2
