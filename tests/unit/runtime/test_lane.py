"""The groups of one engine on the communication thread, message by message."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from wfbp.core.cost import Costs, LinearCost
from wfbp.core.plan import Group, Plan
from wfbp.core.types import Operation, TensorSpec
from wfbp.runtime import lane as lane_module
from wfbp.runtime.arguments import ReducerOptions
from wfbp.runtime.lane import Lane
from wfbp.runtime.step import Close, Gather, GroupReady, Step, StepResult

SPECS = tuple(TensorSpec(f"t{k}", (4,), "float32") for k in range(2))
GATHERED = Plan(
    "gathered",
    SPECS,
    (
        *(Group((k,), Operation.REDUCE_SCATTER) for k in (1, 0)),
        *(Group((k,), Operation.ALL_GATHER) for k in (0, 1)),
    ),
)

COSTS = Costs(LinearCost(0.0, 0.5e-6))


def step_of(number: int, count: int) -> Step:
    return Step(number, [1] * count, [None] * count, [])


def make_lane(
    plan: Plan,
    memory: Mock,
    buffers: list[Mock],
    monkeypatch: pytest.MonkeyPatch,
    step_bytes: int | None = None,
    costs: Costs | None = None,
) -> Lane:
    left = iter(buffers)
    monkeypatch.setattr(lane_module, "make_buffer", lambda *_: next(left))
    lane = Lane(
        Mock(rank=0, size=2, step_bytes=step_bytes), memory, ReducerOptions("single", 1), ()
    )
    lane.install(plan, range(len(plan.tensors)), costs)
    return lane


def test_a_step_begins_while_all_gathers_of_the_one_before_travel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[Mock] = []
    arrived = 0

    def send() -> Mock:
        sent.append(Mock(nbytes=16, number=len(sent)))
        return sent[-1]

    memory = Mock()
    memory.is_enqueued.side_effect = lambda work: work.number < arrived
    buffers = [Mock(**{"send.side_effect": send}) for _ in range(4)]
    buffers[1].read_flags.return_value = StepResult([True] * 2, False, False)
    lane = make_lane(GATHERED, memory, buffers, monkeypatch)

    step = step_of(0, 2)
    lane.events.extend([GroupReady(step, 0, ()), Close(step, ())])
    arrived = 2
    lane.advance()
    assert len(sent) == 2
    assert lane.reply.get().present == [True] * 2
    lane.events.append(Gather([1, 1], [None] * 2, None, ()))
    lane.advance()
    assert len(sent) > 2, "all-gathers are on their way"
    lane.events.append(GroupReady(step_of(1, 2), 0, ()))
    lane.advance()
    assert buffers[0].send.call_count == 1, "they go first"
    arrived = 10
    lane.advance()
    assert buffers[3].send.call_count == 1
    assert buffers[0].send.call_count == 2


FOUR = tuple(TensorSpec(f"t{k}", (4,), "float32") for k in range(4))


@pytest.mark.parametrize("in_order", [False, True])
def test_the_next_group_leaves_before_results_are_copied_where_copies_have_no_order(
    in_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a stream the copy would come behind the message."""
    done: list[str] = []
    memory = Mock(copies_in_order=in_order)
    arrived: set[int] = set()
    memory.is_enqueued.side_effect = lambda work: work.group in arrived
    buffers = []
    for group in range(4):

        def send(group: int = group) -> Mock:
            done.append(f"send {group}")
            return Mock(nbytes=16, group=group)

        def take(group: int = group) -> None:
            done.append(f"copy {group}")

        buffers.append(Mock(**{"send.side_effect": send, "arrived.side_effect": take}))
    plan = Plan("layerwise", FOUR, tuple(Group((k,)) for k in (3, 2, 1, 0)))
    lane = make_lane(plan, memory, buffers, monkeypatch)
    step = step_of(0, 4)
    lane.events.extend(GroupReady(step, group, ()) for group in range(3))
    lane.advance()
    assert done == ["send 0", "send 1"]
    arrived.add(0)
    lane.advance()
    last = ["copy 0", "send 2"] if in_order else ["send 2", "copy 0"]
    assert done == ["send 0", "send 1", *last]


def test_a_group_waits_for_what_its_event_brought_and_not_for_the_end_of_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = Mock()
    memory.is_enqueued.return_value = False
    plan = Plan("layerwise", FOUR, tuple(Group((k,)) for k in (3, 2, 1, 0)))
    lane = make_lane(
        plan, memory, [Mock(**{"send.return_value.nbytes": 1}) for _ in range(4)], monkeypatch
    )
    step = step_of(0, 4)
    lane.events.extend([GroupReady(step, 0, ["gradient"]), Close(step, ["end"])])
    lane.advance()
    calls = [call.args[0] for call in memory.begin_packing.call_args_list]
    assert calls == [["gradient"], ["end"]]


@pytest.mark.parametrize(
    ("step_bytes", "costs", "expected"),
    [
        (1000, COSTS, (2e-3, 0.5e-3)),
        (8000, COSTS, (2e-3, 4e-3)),  # the network is as slow where the message is small
        (None, COSTS, (2e-3, None)),  # in shared memory
        (1000, None, (None, None)),  # before costs are measured
    ],
)
def test_steps_of_a_message_are_predicted(
    monkeypatch: pytest.MonkeyPatch,
    step_bytes: int | None,
    costs: Costs | None,
    expected: tuple[float | None, float | None],
) -> None:
    memory = Mock()
    memory.is_enqueued.return_value = False
    plan = Plan("single", FOUR, (Group((3, 2, 1, 0)),))
    work = Mock(nbytes=4000, **{"test.return_value": False})
    buffers = [Mock(nbytes=4000, **{"send.return_value": work})]
    lane = make_lane(plan, memory, buffers, monkeypatch, step_bytes, costs)
    step = step_of(0, 4)
    lane.events.extend([GroupReady(step, 0, ()), Close(step, ())])
    lane.advance()
    assert lane.expected == expected
