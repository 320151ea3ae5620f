"""All-gathers in the sequencer: when they go, and how they cross the border between steps."""

from __future__ import annotations

import random

import pytest

from wfbp.core.plan import Group, Plan
from wfbp.core.sequencer import Sequencer
from wfbp.core.types import Operation, TensorSpec

SPECS = tuple(TensorSpec(name, (4,), "float32") for name in "abc")
SCATTER, GATHER = Operation.REDUCE_SCATTER, Operation.ALL_GATHER
PLAN = Plan(
    "hand",
    SPECS,
    (
        Group((2,)),
        Group((1, 0), SCATTER),
        Group((0,), GATHER),
        Group((1,), GATHER),
    ),
)


def reduce_all(sequencer: Sequencer) -> None:
    """One backward, all its groups completed."""
    for group in (0, 1):
        sequencer.ready(group)
    sequencer.close()
    for group in (0, 1):
        assert sequencer.start_next() == group
        assert not sequencer.reduced
        sequencer.completed(group)


def test_gathers_follow_once_everything_is_reduced() -> None:
    sequencer = Sequencer(PLAN)
    reduce_all(sequencer)
    assert sequencer.reduced
    assert sequencer.start_next() is None
    assert not sequencer.gathering
    sequencer.gather()
    assert sequencer.gathering
    assert sequencer.start_next() == 2
    assert sequencer.start_next() is None
    sequencer.completed(2)
    assert sequencer.start_next() == 3
    sequencer.completed(3)
    assert not sequencer.gathering
    assert sequencer.num_started == 2


def test_what_is_held_back_is_not_gathered() -> None:
    sequencer = Sequencer(PLAN)
    reduce_all(sequencer)
    sequencer.gather(1)
    assert sequencer.start_next() == 2
    sequencer.completed(2)
    assert sequencer.start_next() is None
    sequencer.gather()
    assert sequencer.start_next() == 3


def test_gathers_cross_the_border_before_the_next_step() -> None:
    sequencer = Sequencer(PLAN)
    reduce_all(sequencer)
    sequencer.gather()
    assert sequencer.start_next() == 2
    sequencer.next_step()
    assert not sequencer.reduced
    sequencer.ready(0)  # whose tensors forward did not need may be there before the gathers
    sequencer.close()
    assert sequencer.start_next() is None
    sequencer.completed(2)
    assert sequencer.start_next() == 3
    sequencer.completed(3)
    assert sequencer.start_next() == 0
    sequencer.completed(0)
    assert sequencer.start_next() == 1
    sequencer.completed(1)
    assert sequencer.reduced
    sequencer.gather()
    with pytest.raises(ValueError, match="of an earlier step have not completed"):
        sequencer.gather()


def test_a_step_is_not_reduced_while_older_gathers_are_under_way() -> None:
    sequencer = Sequencer(PLAN, window=4)
    reduce_all(sequencer)
    sequencer.gather()
    sequencer.next_step()
    assert [sequencer.start_next() for _ in range(2)] == [2, 3]
    for group in (0, 1):
        sequencer.ready(group)
    sequencer.close()
    assert [sequencer.start_next() for _ in range(3)] == [0, 1, None]
    for group in (0, 1, 2):
        sequencer.completed(group)
        assert not sequencer.reduced
    sequencer.completed(3)
    assert sequencer.reduced


def test_next_step_is_refused_before_all_is_reduced() -> None:
    sequencer = Sequencer(PLAN)
    with pytest.raises(ValueError, match="before all groups of backward completed"):
        sequencer.next_step()
    sequencer.close()
    sequencer.start_next()
    with pytest.raises(ValueError, match="before all groups of backward completed"):
        sequencer.next_step()


@pytest.mark.parametrize("window", [1, 2, 5])
def test_one_order_on_every_rank_over_many_steps(window: int) -> None:
    """Whenever events come, groups start in the same order, all gathers at the border."""
    orders = set()
    for seed in range(30):
        rng = random.Random(seed)
        sequencer = Sequencer(PLAN, window)
        started: list[int] = []
        under_way: list[int] = []
        for _ in range(3):
            arrivals = [1, 0]
            closed = False
            while not sequencer.reduced:
                if arrivals and rng.random() < 0.5:
                    sequencer.ready(arrivals.pop())
                elif not arrivals and not closed:
                    sequencer.close()
                    closed = True
                if under_way and rng.random() < 0.6:
                    sequencer.completed(under_way.pop(rng.randrange(len(under_way))))
                while (group := sequencer.start_next()) is not None:
                    started.append(group)
                    under_way.append(group)
                assert len(under_way) <= window
            sequencer.gather()
            if rng.random() < 0.5:
                while (group := sequencer.start_next()) is not None:
                    started.append(group)
                    under_way.append(group)
            sequencer.next_step()
        while (group := sequencer.start_next()) is not None:
            started.append(group)
            sequencer.completed(group)
        orders.add(tuple(started[:8]))
    assert orders == {(0, 1, 2, 3) * 2}
