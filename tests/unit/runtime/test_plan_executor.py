"""The groups of one engine on the communication thread, message by message."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import Mock

import pytest

from wfbp.core.plan import Group, Plan
from wfbp.core.types import Op, Operation, Phase, TensorSpec
from wfbp.runtime.progress.plan_executor import PlanExecutor
from wfbp.runtime.step import CLOSE, GatherRequest, Step
from wfbp.runtime.transport.flags import GroupFlags

SPECS = tuple(TensorSpec(f"t{k}", (4,), "float32") for k in range(2))
GATHERED = Plan(
    "gathered",
    SPECS,
    (
        *(Group((k,), Operation.REDUCE_SCATTER) for k in (1, 0)),
        *(Group((k,), Operation.ALL_GATHER, Phase.FORWARD) for k in (0, 1)),
    ),
)


def buffer(tensor: int, send: Callable[..., object]) -> Mock:
    made = Mock()
    made.send.side_effect = send
    made.arrived.return_value = GroupFlags([True], tensors=(tensor,))
    return made


def test_a_step_begins_while_all_gathers_of_the_one_before_travel() -> None:
    sent: list[Mock] = []
    arrived = 0

    def send(*_: object) -> Mock:
        sent.append(Mock(nbytes=16, number=len(sent)))
        return sent[-1]

    transport = Mock()
    transport.is_enqueued.side_effect = lambda work: work.number < arrived
    reducing = [buffer(1, send), buffer(0, send)]
    gathering = [buffer(0, send), buffer(1, send)]
    transport.backward.return_value, transport.forward.return_value = reducing, gathering
    lane = PlanExecutor(Mock(rank=0), transport, Op.AVERAGE, "optimizer")
    lane.install(GATHERED)

    lane.events.extend([Step(0, [1, 1], [None] * 2), 1, 0, CLOSE])
    arrived = 2
    lane.advance()
    assert len(sent) == 2
    lane.events.append(GatherRequest([1, 1], None, [1, 1]))
    lane.advance()
    assert len(sent) > 2, "all-gathers are on their way"
    lane.events.extend([Step(1, [1, 1], [None] * 2), 1])
    lane.advance()
    assert reducing[0].send.call_count == 1, "they go first"
    arrived = 10
    lane.advance()
    assert gathering[1].send.call_count == 1
    assert reducing[0].send.call_count == 2


FOUR = tuple(TensorSpec(f"t{k}", (4,), "float32") for k in range(4))


@pytest.mark.parametrize("in_order", [False, True])
def test_the_next_group_leaves_before_results_are_copied_where_copies_have_no_order(
    in_order: bool,
) -> None:
    """On a stream the copy would come behind the message."""
    done: list[str] = []
    transport = Mock(copies_in_order=in_order)
    arrived: set[str] = set()
    transport.is_enqueued.side_effect = lambda work: work.group in arrived
    buffers = []
    for k in range(4):
        name = f"t{k}"

        def send(*_: object, name: str = name) -> Mock:
            done.append(f"send {name}")
            return Mock(nbytes=16, group=name)

        def read(*_: object, name: str = name, k: int = k) -> GroupFlags:
            done.append(f"copy {name}")
            return GroupFlags([True], tensors=(k,))

        made = buffer(k, send)
        made.arrived.side_effect = read
        buffers.append(made)
    plan = Plan("wfbp", FOUR, tuple(Group((k,)) for k in (3, 2, 1, 0)))
    transport.backward.return_value, transport.forward.return_value = buffers[::-1], []
    lane = PlanExecutor(Mock(rank=0), transport, Op.AVERAGE, "optimizer")
    lane.install(plan)
    lane.events.extend([Step(0, [1] * 4, [None] * 4), 3, 2, 1, 0])
    lane.advance()
    assert done == ["send t3", "send t2"]
    arrived.add("t3")
    lane.advance()
    last = ["copy t3", "send t1"] if in_order else ["send t1", "copy t3"]
    assert done == ["send t3", "send t2", *last]
