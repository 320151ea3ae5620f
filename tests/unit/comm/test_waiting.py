"""The waiting scheme on a clock of its own."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.local import LocalBackend, LocalWorld
from wfbp.comm.backend import Finished, Work
from wfbp.comm.waiting import (
    FIRST_NAP_S,
    MAX_NAP_S,
    NAP_GROWTH,
    PATIENCE,
    SPIN_S,
    Waiter,
    choose_nap_s,
    sharp_naps,
    wait,
)
from wfbp.errors import StallError

TURN_S = 1e-6
durations = st.floats(1e-6, 1.0)


class Clock:
    """Time that passes by naps, and a little by every look at it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.naps: list[float] = []

    def __call__(self) -> float:
        self.now_s += TURN_S
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now_s += seconds


class Steps:
    """What moves on every ``gap_s`` seconds of a clock from ``start_s`` on."""

    def __init__(self, clock: Clock, gap_s: float, start_s: float = 0.0) -> None:
        self.clock, self.gap_s, self.start_s = clock, gap_s, start_s

    def __call__(self) -> int:
        return max(0, math.floor((self.clock.now_s - self.start_s) / self.gap_s))


def idle_until(
    clock: Clock, end_s: float, waiter: Waiter, urgent: bool, expected_s: float | None = None
) -> None:
    while clock.now_s < end_s:
        waiter.pause(urgent, expected_s)


@pytest.mark.parametrize("urgent", [True, False])
def test_a_peer_late_by_three_seconds_costs_few_looks(urgent: bool) -> None:
    clock = Clock()
    waiter = Waiter(clock=clock, sleep=clock.sleep)
    idle_until(clock, 3.0, waiter, urgent)
    # At about 20 us per nap, 10% of a core is 15,000 naps in three seconds.
    assert len(clock.naps) < 4000
    assert clock.naps[-1] == MAX_NAP_S
    assert 3.0 - sum(clock.naps) < 0.02


def test_urgent_waits_spin_first() -> None:
    clock = Clock()
    waiter = Waiter(clock=clock, sleep=clock.sleep)
    idle_until(clock, 0.9e-3, waiter, urgent=True)
    assert clock.naps == []


def test_progress_makes_attentive_again() -> None:
    clock = Clock()
    waiter = Waiter(clock=clock, sleep=clock.sleep)
    idle_until(clock, 0.5, waiter, urgent=True)
    clock.naps.clear()
    waiter.progressed()
    idle_until(clock, clock.now_s + 0.9e-3, waiter, urgent=True)
    assert clock.naps == []


def test_the_training_thread_gets_the_core() -> None:
    clock = Clock()
    waiter = Waiter(clock=clock, sleep=clock.sleep)
    waiter.pause(urgent=False, expected_s=None)
    waiter.pause(urgent=False, expected_s=5e-3)
    assert len(clock.naps) == 2


def test_short_operations_are_spun_for_but_not_for_ever() -> None:
    clock = Clock()
    waiter = Waiter(clock=clock, sleep=clock.sleep)
    idle_until(clock, 30e-6, waiter, urgent=False, expected_s=20e-6)
    assert clock.naps == []
    idle_until(clock, 1e-3, waiter, urgent=False, expected_s=20e-6)
    assert clock.naps


def test_an_operation_that_is_shorter_than_the_usual_step_is_looked_at_when_it_should_end() -> None:
    """A small message between large ones: the next one waits for it."""
    gap_s, expected_s = 4e-3, 0.8e-3
    clock = Clock()
    waiter = Waiter(clock=clock, sleep=clock.sleep, activity=Steps(clock, gap_s))
    idle_until(clock, 20 * gap_s, waiter, urgent=False)
    clock.naps.clear()
    waiter.progressed()
    idle_until(clock, clock.now_s + expected_s, waiter, urgent=False, expected_s=expected_s)
    assert sum(clock.naps) < 2 * expected_s
    clock.naps.clear()
    idle_until(clock, clock.now_s + gap_s, waiter, urgent=False, expected_s=expected_s)
    assert max(clock.naps) > 1.5e-3, "where it is late, it may be one of the usual steps"


@pytest.mark.parametrize("urgent", [True, False])
def test_naps_begin_short_where_a_step_of_a_long_operation_is_overdue(urgent: bool) -> None:
    """In shared memory steps follow one another within microseconds, until a peer is late."""
    waited_s, gap_s = 2e-3, 10e-6
    naps_s = [choose_nap_s(waited_s, k, urgent, expected_s=8e-3, gap_s=gap_s) for k in range(3)]
    assert naps_s == [FIRST_NAP_S * NAP_GROWTH**k for k in range(3)]


@pytest.mark.parametrize("gap_s", [0.5e-3, 4e-3, 50e-3])
@pytest.mark.parametrize("urgent", [True, False])
def test_a_link_is_kept_busy_without_a_busy_core(urgent: bool, gap_s: float) -> None:
    clock = Clock()
    steps = Steps(clock, gap_s)
    waiter = Waiter(clock=clock, sleep=clock.sleep, activity=steps)
    idle_until(clock, 20 * gap_s, waiter, urgent)
    clock.naps.clear()
    start_s = clock.now_s
    idle_until(clock, start_s + 100 * gap_s, waiter, urgent)
    if clock.naps:
        most_s = gap_s / 3 if urgent else 1.01 * gap_s
        assert max(clock.naps) <= max(most_s, FIRST_NAP_S)
    if not urgent or gap_s > 2 * SPIN_S:
        assert len(clock.naps) <= 100 * max(12, gap_s / MAX_NAP_S + 8)
        assert sum(clock.naps) > 0.9 * 100 * gap_s


class Network(LocalBackend):
    """Moves on every ``gap_s`` seconds of a clock, whether it is tested or not."""

    progresses_alone = True

    def __init__(self, steps: Steps) -> None:
        super().__init__(LocalWorld(1), 0)
        self.steps = steps

    @property
    def activity(self) -> int:
        return self.steps()


def test_nobody_spins_for_steps_of_a_slow_network() -> None:
    """At 1 Gbit/s there are 128 KB from one to the next; a rank spun all the time."""
    gap_s = 1.2e-3
    clock = Clock()
    network = Network(Steps(clock, gap_s))
    waiter = Waiter.watching(network, clock=clock, sleep=clock.sleep)
    idle_until(clock, 20 * gap_s, waiter, urgent=True)
    clock.naps.clear()
    start_s = clock.now_s
    idle_until(clock, start_s + 100 * gap_s, waiter, urgent=True)
    assert sum(clock.naps) > 0.9 * 100 * gap_s
    assert max(clock.naps) <= gap_s / 3


@pytest.mark.parametrize(("step_s", "naps"), [(0.2e-3, False), (2.2e-3, True), (None, True)])
def test_a_predicted_step_counts_more_than_those_that_naps_have_lengthened(
    step_s: float | None, naps: bool
) -> None:
    """At 10 Gbit/s a megabyte went by in each nap, and the next nap was as long."""
    clock = Clock()
    waiter = Waiter(clock=clock, sleep=clock.sleep, activity=Steps(clock, 3e-3))
    idle_until(clock, 60e-3, waiter, urgent=True)
    waiter.progressed()
    assert (waiter.nap_s(urgent=True, expected_s=8e-3, step_s=step_s) > 0) == naps


def test_the_wait_for_the_first_step_is_not_a_gap() -> None:
    """A peer that starts late every time does not make the link look slow."""
    clock = Clock()
    for _ in range(10):
        start_s = clock.now_s
        steps = Steps(clock, 20e-6, start_s + 0.1)
        waiter = Waiter(clock=clock, sleep=clock.sleep, activity=steps)
        idle_until(clock, start_s + 0.101, waiter, urgent=True)
    clock.naps.clear()
    waiter.progressed()
    idle_until(clock, clock.now_s + 0.5e-3, waiter, urgent=True)
    assert clock.naps == []


def test_a_step_for_which_a_peer_was_late_is_not_a_gap() -> None:
    """It compiled, say, and only small messages follow, from whose steps nothing is learned."""
    clock = Clock()
    moves = [0]
    waiter = Waiter(clock=clock, sleep=clock.sleep, activity=lambda: moves[0])
    for late_s in (0.001, 0.3):
        clock.now_s += late_s
        moves[0] += 1
        waiter.progressed()
    waiter.progressed()
    clock.naps.clear()
    idle_until(clock, clock.now_s + 0.5e-3, waiter, urgent=True)
    assert clock.naps == []


@given(
    durations,
    st.integers(0, 1000),
    st.booleans(),
    st.none() | durations,
    st.none() | durations,
)
def test_naps_are_within_their_limits(
    waited_s: float, naps: int, urgent: bool, expected_s: float | None, gap_s: float | None
) -> None:
    nap_s = choose_nap_s(waited_s, naps, urgent, expected_s, gap_s)
    longest_s = MAX_NAP_S * (1 if urgent else PATIENCE)
    assert nap_s == 0 or FIRST_NAP_S <= nap_s <= longest_s
    if nap_s == 0:
        assert waited_s < SPIN_S


class _After(Work[str]):
    def __init__(self, num_tests: int) -> None:
        self.left = num_tests

    def test(self) -> bool:
        self.left -= 1
        return self.left <= 0

    @property
    def result(self) -> str:
        return "done"


def test_wait_returns_the_result() -> None:
    assert wait(Finished("there")) == "there"
    assert wait(_After(50)) == "done"


def test_wait_gives_up() -> None:
    with pytest.raises(StallError, match=r"collective of 0 bytes .* within 0\.05 s"):
        wait(_After(10**9), timeout_s=0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="timer slack exists on Linux only")
def test_sharper_naps() -> None:
    slack = Path("/proc/self/timerslack_ns")
    before = int(slack.read_text())
    with sharp_naps():
        assert int(slack.read_text()) == 1000
    assert int(slack.read_text()) == before
