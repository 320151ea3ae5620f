"""How to wait for communication: low latency if it matters, else leave the core to training.

Communication progresses only when tested, and testing occupies a core. ``urgent`` means that the
training thread is blocked, so the core is free; ``gap`` is the time between two steps of a message,
as predicted from the measured cost, or else as usual so far; ``expected`` is the duration of the
whole operation, which also replaces an unknown gap.

    urgent,     waited < spin_s, gap unknown or short      spin (a busy wait's latency)
    not urgent, waited < 2 * expected_s <= 2 * short_s     spin (shorter than a nap)
    otherwise                                              nap

:func:`choose_nap_s` has these rules; :class:`Waiter` applies them to the real clock.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from wfbp.comm.backend import Backend, Work
from wfbp.core.encoding import decode, encode
from wfbp.errors import StallError

T = TypeVar("T")

PR_SET_TIMERSLACK = 29
PR_GET_TIMERSLACK = 30
SPIN_S = 1e-3
"""How long an urgent wait spins after the last progress."""
SPIN_GAP_S = 5e-4
"""An urgent wait spins only if the next step is due within this: 256 KiB at 5 Gbit/s and more."""
SHORT_S = 100e-6
"""Operations expected to end within this are spun for even when not urgent."""
FIRST_NAP_S = 50e-6
MAX_NAP_S = 1e-3
NAP_GROWTH = 1.5
PATIENCE = 4
"""Factor on naps while training computes: each nap costs it about 50 us of cold caches."""
GAP_WEIGHT = 0.25
LATE_S = 0.1
"""A longer step waited for a peer, not for the network, and would distort the gap for good."""
TESTS_PER_LOOK = 4

Check = Callable[[float], None]
"""Called with the seconds waited so far; raises if waiting longer is hopeless."""


def choose_nap_s(
    waited_s: float,
    naps: int,
    urgent: bool,
    expected_s: float | None = None,
    gap_s: float | None = None,
) -> float:
    """Seconds to nap, 0 to spin; ``waited_s`` and ``naps`` count from the last progress."""
    if urgent:
        if waited_s < SPIN_S and (gap_s is None or gap_s < SPIN_GAP_S):
            return 0.0
    elif expected_s is not None and waited_s < 2 * expected_s <= 2 * SHORT_S:
        return 0.0
    nap, longest = FIRST_NAP_S * NAP_GROWTH ** min(naps, 32), MAX_NAP_S
    step = gap_s if gap_s is not None else expected_s
    if step is not None and expected_s is not None and waited_s < 2 * expected_s:
        step = min(step, expected_s)
    # Until the step is overdue, naps take 1/8 to 1/4 of it (urgent), or 1/2 to all of it.
    if step is not None and waited_s < 2 * step:
        share = step / 4
        if not urgent:
            share, longest = PATIENCE * share, PATIENCE * longest
        nap = max(min(nap, share), share / 2, FIRST_NAP_S)
    return min(nap, longest)


class Waiter:
    """Waits between tests of an operation. Used by one thread. ``activity`` changes with every step
    of a message. If ranks share cores (``crowded``), spinning yields the core to peers, which
    could not run otherwise; on a free core a yield would lose it for milliseconds."""

    def __init__(
        self,
        activity: Callable[[], int] = lambda: 0,
        crowded: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._progress_s = clock()
        self._naps = 0
        self._activity = activity
        self.crowded = crowded
        self._seen = activity()
        self._in_motion = False
        self._gap_s: float | None = None

    @classmethod
    def watching(
        cls,
        backend: Backend,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> Waiter:
        """A waiter for a backend's works and its duplicates', on this machine. It assumes
        that all ranks of the host share this rank's cores, until ``crowded`` is set."""
        crowded = backend.local_size > num_cores()
        return cls(partial(getattr, backend, "activity"), crowded, clock, sleep)

    def progressed(self) -> None:
        """Record progress, completion or a start: wait attentively again."""
        now_s = self._clock()
        activity = self._activity()
        moved = activity != self._seen
        gap_s = now_s - self._progress_s
        # Only from one step to the next: before the first, peers may still be computing.
        if moved and self._in_motion and gap_s < LATE_S:
            last_s = gap_s if self._gap_s is None else self._gap_s
            self._gap_s = last_s + GAP_WEIGHT * (gap_s - last_s)
        self._in_motion = moved
        self._seen = activity
        self._progress_s = now_s
        self._naps = 0

    def nap_s(self, urgent: bool, expected_s: float | None, step_s: float | None = None) -> float:
        """Seconds to nap now, 0 to spin; for callers that wait on an event. ``step_s`` is the
        predicted gap: naps lengthen those that are observed, which would call for longer naps."""
        if self._activity() != self._seen:
            self.progressed()
        waited_s = self._clock() - self._progress_s
        gap_s = self._gap_s if step_s is None else step_s
        nap = choose_nap_s(waited_s, self._naps, urgent, expected_s, gap_s)
        self._naps += nap > 0
        return nap

    def pause(self, urgent: bool, expected_s: float | None) -> None:
        """Wait a little before the next test."""
        nap = self.nap_s(urgent, expected_s)
        if nap > 0:
            self._sleep(nap)
        else:
            self.offer_core()

    def offer_core(self) -> None:
        """While spinning: yield to a peer that shares the core, if any."""
        if self.crowded:
            os.sched_yield()


def wait(
    work: Work[T],
    waiter: Waiter | None = None,
    timeout_s: float | None = None,
    check: Check | None = None,
    urgent: bool = True,
    expected_s: float | None = None,
) -> T:
    """Block until a collective is complete, and return its result; ``StallError`` after
    ``timeout_s``. ``check`` is called repeatedly; its error ends the wait."""
    waiter = waiter or Waiter(lambda: work.activity)
    waiter.progressed()
    begun_s = time.perf_counter()
    activity = work.activity
    # One test often does a part of the work, and the next the rest.
    while not any(work.test() for _ in range(TESTS_PER_LOOK)):
        if work.activity != activity:
            activity = work.activity
            waiter.progressed()
        waited_s = time.perf_counter() - begun_s
        if check is not None:
            check(waited_s)
        if timeout_s is not None and waited_s > timeout_s:
            raise StallError(
                f"a collective of {work.nbytes} bytes did not complete within {timeout_s:g} s: "
                "another rank is late, or did not start it"
            )
        waiter.pause(urgent, expected_s)
    waiter.progressed()  # what follows until the next wait is no part of this one
    return work.result


def exchange_values(
    backend: Backend,
    value: Any,
    waiter: Waiter | None = None,
    timeout_s: float | None = None,
    check: Check | None = None,
) -> list[Any]:
    """Every rank's value, of JSON's types, in rank order. Blocks as :func:`wait`."""
    payloads = wait(backend.all_gather_bytes(encode(value)), waiter, timeout_s, check)
    return list(map(decode, payloads))


@contextmanager
def sharp_naps() -> Iterator[None]:
    """Within it, this thread's naps end on time: Linux adds 50 us to each by default."""
    slack_ns = _prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0)
    _prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0)
    try:
        yield
    finally:
        _prctl(PR_SET_TIMERSLACK, slack_ns, 0, 0, 0)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


_prctl: Callable[..., int] = ctypes.CDLL(None).prctl
