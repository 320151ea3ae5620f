"""The sequencer against its rules, over random plans, orders of events and windows."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wfbp.core.plan import Group, Plan
from wfbp.core.sequencer import Sequencer
from wfbp.core.types import TensorSpec


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any partition of up to 12 tensors, in any order of groups."""
    count = draw(st.integers(1, 12))
    specs = tuple(TensorSpec(f"t{k}", (k,), "float32") for k in range(count))
    order = draw(st.permutations(range(count)))
    cuts = sorted(draw(st.sets(st.integers(1, count - 1)) if count > 1 else st.just(set())))
    ends = [*cuts, count]
    groups = tuple(Group(tuple(order[a:b])) for a, b in zip([0, *cuts], ends, strict=True))
    return Plan("any", specs, groups, overlap=draw(st.booleans()))


class Driver:
    """Feeds events in a random order and checks every rule at every event."""

    def __init__(self, plan: Plan, window: int, chance: random.Random) -> None:
        self.plan = plan
        self.window = window
        self.chance = chance
        self.sequencer = Sequencer(plan, window)
        self.begin()

    def begin(self) -> None:
        self.ready: set[int] = set()
        self.closed = False
        self.started: list[int] = []
        self.under_way: list[int] = []
        self.num_completed = 0
        self.num_announced = 0

    def may_start(self, group: int) -> bool:
        """The rule, said anew: order, window, tensors, border."""
        if len(self.under_way) >= self.window or self.started != list(range(group)):
            return False
        if self.closed:
            return True
        last = len(self.plan.groups) - 1
        complete = set(self.plan.groups[group].tensors) <= self.ready
        return self.plan.overlap and group < last and complete

    def drain(self) -> None:
        """Start all that may start, no more and no less."""
        while (group := self.sequencer.start_next()) is not None:
            assert self.may_start(group)
            self.started.append(group)
            self.under_way.append(group)
        if len(self.started) < len(self.plan.groups):
            assert not self.may_start(len(self.started))
        assert self.sequencer.num_started == len(self.started)

    def step(self) -> None:
        """One step, to its end."""
        arrivals = list(range(len(self.plan.tensors)))
        self.chance.shuffle(arrivals)
        del arrivals[self.chance.randint(0, len(arrivals)) :]  # the others have no gradient
        while not self.sequencer.reduced:
            choices: list[Callable[[], None]] = []
            if arrivals:
                choices.append(lambda: self.arrive(arrivals.pop()))
            elif not self.closed:
                choices.append(self.close)
            if self.under_way:
                choices.append(self.complete)
            self.chance.choice(choices)()
            self.drain()
        assert self.started == list(range(len(self.plan.groups)))
        assert self.closed
        assert not self.under_way

    def arrive(self, tensor: int) -> None:
        self.ready.add(tensor)
        groups = self.plan.groups
        while self.num_announced < len(groups) and (
            set(groups[self.num_announced].tensors) <= self.ready
        ):
            self.sequencer.ready(self.num_announced)
            self.num_announced += 1

    def close(self) -> None:
        self.closed = True
        self.sequencer.close()
        self.sequencer.close()  # twice is once

    def complete(self) -> None:
        group = self.under_way.pop(self.chance.randrange(len(self.under_way)))
        self.num_completed += 1
        self.sequencer.completed(group)
        whole = self.closed and self.num_completed == len(self.plan.groups)
        assert self.sequencer.reduced is whole


@given(plans(), st.integers(1, 4), st.integers(0, 2**32))
def test_every_rule_at_every_event(plan: Plan, window: int, seed: int) -> None:
    driver = Driver(plan, window, random.Random(seed))
    for _ in range(3):
        driver.step()
        driver.sequencer.next_step()
        driver.begin()


def test_a_window_needs_room() -> None:
    plan = Plan("one", (TensorSpec("a", (), "float32"),), (Group((0,)),))
    with pytest.raises(ValueError, match="window is 0"):
        Sequencer(plan, 0)
