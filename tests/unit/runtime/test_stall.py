"""When a wait is hopeless."""

from __future__ import annotations

import time

import pytest

from wfbp.config import Config
from wfbp.errors import PeerError, StallError, WfbpError
from wfbp.runtime.progress.stall import ALL_RANKS, StallWatch, Wait


class Motion:
    """An activity that the test sets."""

    value = 0

    def __call__(self) -> int:
        return self.value


def unheard(*notice: object) -> None:
    """Another rank does not answer."""


class Looks:
    """Looks of a progress loop at its waits."""

    def __init__(self, watch: StallWatch) -> None:
        self.watch = watch
        self.last: float | None = None

    def check(self, waits: list[Wait], now: float) -> WfbpError | None:
        passed_s = 0.0 if self.last is None else now - self.last
        self.last = now
        return self.watch.check(waits, now, passed_s)


@pytest.mark.parametrize("moving_s", [0.0, 3.0, 30.0])
def test_who_left_is_no_trouble_while_something_moves(moving_s: float) -> None:
    """It may have done its part of a long collective; the grace begins when motion ends."""
    motion = Motion()
    watch = StallWatch(2, 3, Config(), "rank 2 of 3", unheard, motion)
    looks = Looks(watch)
    watch.note_left(0, "has left")
    start = time.monotonic()
    waits = [(start, "allreduce of x", ALL_RANKS)]
    now = start
    assert looks.check(waits, now) is None
    while now < start + moving_s:
        now += 0.5
        motion.value += 1
        assert looks.check(waits, now) is None
    assert looks.check(waits, now + 1.5) is None
    error = looks.check(waits, now + 2.5)
    assert isinstance(error, PeerError)
    assert str(error).startswith("rank 2 of 3 waits (allreduce of x), but rank 0 has left. Every")
    assert "none may end earlier" in str(error)


def test_motion_between_waits_counts_for_none() -> None:
    motion = Motion()
    watch = StallWatch(2, 3, Config(), "rank 2 of 3", unheard, motion)
    looks = Looks(watch)
    watch.note_left(0, "has left")
    now = time.monotonic()
    motion.value += 1
    for later in (10, 14, 18):
        assert looks.check([], now + later) is None
    assert looks.check([(now + 20, "barrier", ALL_RANKS)], now + 21.5) is None
    assert isinstance(looks.check([(now + 20, "barrier", ALL_RANKS)], now + 22.5), PeerError)


def test_a_time_in_which_this_process_stood_still_is_none_of_waiting() -> None:
    """As where a job is suspended: its ranks go on one after another."""
    watch = StallWatch(0, 2, Config(timeout_s=60.0), "rank 0 of 2", unheard, Motion())
    looks = Looks(watch)
    waits = [(1000.0, "barrier", ALL_RANKS)]
    for now in (1000.1, 1000.2, 2000.0, *range(2001, 2055)):
        assert looks.check(waits, now) is None
    error = looks.check(waits, 2055.0)
    assert isinstance(error, StallError)
    assert "rank 0 of 2 waited 60 s (barrier)" in str(error)
    watch.note_left(1, "has left")
    for now in (3000.0, 3000.3):
        assert looks.check([(2065.0, "barrier", ALL_RANKS)], now) is None
    assert isinstance(looks.check([(2065.0, "barrier", ALL_RANKS)], 3002.5), PeerError)


def test_motion_does_not_lift_the_time_limit() -> None:
    motion = Motion()
    config = Config(timeout_s=5.0, stall_warning_s=60.0)
    watch = StallWatch(0, 2, config, "rank 0 of 2", unheard, motion)
    looks = Looks(watch)
    motion.value += 1
    assert isinstance(looks.check([(0.0, "barrier", ALL_RANKS)], 5.5), StallError)


def test_a_process_that_always_looks_seldom_gives_up_all_the_same() -> None:
    """It was not suspended; something else, such as a long call of a library, keeps it busy."""
    watch = StallWatch(0, 2, Config(timeout_s=60.0), "rank 0 of 2", unheard, Motion())
    looks = Looks(watch)
    waits = [(1000.0, "barrier", ALL_RANKS)]
    errors = [looks.check(waits, now) for now in range(1000, 1100, 6)]
    assert errors[9] is None
    assert isinstance(errors[-1], StallError)
