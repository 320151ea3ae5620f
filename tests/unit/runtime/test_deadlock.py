"""Which ranks can never go on: against programs that are carried out to their end."""

from __future__ import annotations

import json
import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from wfbp.runtime.progress.deadlock import LaneStatus, RankStatus, describe_statuses, find_deadlock

Program = list[tuple[str, int]]
"""Waits one after another: for the next call under a label, or for a lane's next collective."""


class Job:
    """Ranks that each carry out a program, in small moves of a random order.

    A rank may notice late that what it waits for is complete.
    """

    def __init__(self, programs: list[Program]) -> None:
        self.programs = programs
        self.done = [0] * len(programs)

    def begun(self, rank: int) -> Program:
        """What a rank has begun: what is done, and the next."""
        return self.programs[rank][: self.done[rank] + 1]

    def number(self, rank: int) -> int:
        """Of the wait that a rank is in, among those of its calls or of its lane."""
        kind = self.programs[rank][self.done[rank]]
        return sum(_stream(op) == _stream(kind) for op in self.begun(rank)) - 1

    def waits(self, rank: int) -> bool:
        return self.done[rank] < len(self.programs[rank])

    def complete(self, rank: int) -> bool:
        """Whether all ranks have begun what this one waits for, and the same."""
        op, number = self.programs[rank][self.done[rank]], self.number(rank)
        others = [
            [o for o in self.begun(r) if _stream(o) == _stream(op)]
            for r in range(len(self.programs))
        ]
        return all(len(ops) > number and ops[number] == op for ops in others)

    def move(self, draw: random.Random) -> bool:
        """Let one rank go on that can; False where none can."""
        able = [r for r in range(len(self.done)) if self.waits(r) and self.complete(r)]
        if able:
            self.done[draw.choice(able)] += 1
        return bool(able)

    def place(self, rank: int) -> RankStatus:
        calls = [op for op in self.begun(rank) if op[0] != "lane"]
        current = self.programs[rank][self.done[rank]] if self.waits(rank) else ("", 0)
        call = current[0] if current[0] != "lane" else ""
        lanes = []
        for lane in range(2):
            started = self.begun(rank).count(("lane", lane))
            under_way = current == ("lane", lane)
            lanes.append(LaneStatus(lane, started, started - under_way, not under_way))
        return RankStatus("", self.waits(rank), self.done[rank], len(calls), call, tuple(lanes))

    def places(self) -> list[RankStatus]:
        return [self.place(rank) for rank in range(len(self.programs))]


def _stream(op: tuple[str, int]) -> object:
    """Calls follow one another on one backend, whatever they are; a lane has one of its own."""
    return op if op[0] == "lane" else "calls"


_OPS = st.sampled_from([("barrier", 0), ("norm", 0), ("lane", 0), ("lane", 1)])


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Programs that differ in few places or in all."""
    ranks = draw(st.integers(2, 4))
    if draw(st.booleans()):
        return Job([draw(st.lists(_OPS, max_size=4)) for _ in range(ranks)])
    common = draw(st.lists(_OPS, min_size=2, max_size=6))
    programs = [list(common) for _ in range(ranks)]
    odd = programs[draw(st.integers(0, ranks - 1))]
    odd.insert(draw(st.integers(0, len(odd) - 1)), draw(_OPS))
    return Job(programs)


@given(jobs(), st.integers(0, 10**6))
def test_ranks_in_a_deadlock_never_go_on_and_ranks_that_stand_still_are_in_one(
    job: Job, seed: int
) -> None:
    draw = random.Random(seed)
    found = []
    while True:
        found.append((find_deadlock(job.places()), list(job.done)))
        if not job.move(draw):
            break
    for ranks, done in found:
        assert all(job.done[r] == done[r] for r in ranks), "it went on"
    everybody_waits = all(job.waits(r) for r in range(len(job.done)))
    assert bool(find_deadlock(job.places())) == everybody_waits


BARRIER = RankStatus("in barrier", True, 3, 2, "barrier")
STEP = RankStatus("SGD", True, 3, 1, "", (LaneStatus(0, 5, 4, False),))
IN_A_SET = RankStatus("in set", True, 3, 7, "clip", call_set=1, set_calls=((1, 4),))
BEFORE_IT = replace(BARRIER, lanes=(LaneStatus(0, 4, 4, True),))


def test_two_ranks() -> None:
    assert find_deadlock([STEP, BEFORE_IT]) == [0, 1]
    assert find_deadlock([BEFORE_IT, BEFORE_IT, STEP]) == [0, 1, 2]
    assert find_deadlock([replace(STEP, waits=False), BEFORE_IT]) == []


def test_who_has_begun_already_is_not_needed() -> None:
    """Its part is on the way, and so may be what it has ready."""
    for lane in (LaneStatus(0, 5, 5, True), LaneStatus(0, 4, 4, False), LaneStatus(1, 0, 0, True)):
        assert find_deadlock([STEP, replace(BARRIER, lanes=(lane,))]) == []


def test_different_calls_in_the_same_turn() -> None:
    norm = replace(BARRIER, call="norm")
    assert find_deadlock([BARRIER, norm]) == [0, 1]
    assert find_deadlock([BARRIER, replace(norm, calls=3)]) == []
    assert find_deadlock([BARRIER, BARRIER]) == []


def test_a_journey() -> None:
    assert RankStatus.decode(json.loads(json.dumps(STEP.encode()))) == STEP


def test_told() -> None:
    assert (
        describe_statuses({0: STEP, 1: BARRIER, 2: STEP}) == "ranks 0, 2: SGD; rank 1: in barrier"
    )
    many = [replace(STEP, text=str(k)) for k in range(9)]
    assert describe_statuses(dict(enumerate(many))).endswith("rank 3: 3; and 5 more places")


def test_calls_are_counted_by_process_set() -> None:
    """Ranks outside a set have begun fewer calls than its members, and are behind in none."""
    assert not BARRIER.needs(replace(IN_A_SET, calls=2))
    assert BARRIER.needs(replace(IN_A_SET, calls=1))
    assert not IN_A_SET.needs(replace(IN_A_SET, call="another", call_set=2))
    assert IN_A_SET.needs(replace(IN_A_SET, call="another"))
    assert IN_A_SET.needs(BARRIER)
    assert not IN_A_SET.needs(replace(BARRIER, outside=(1,)))
    assert RankStatus.decode(json.loads(json.dumps(IN_A_SET.encode()))) == IN_A_SET
