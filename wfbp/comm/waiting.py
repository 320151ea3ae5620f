"""How to wait for communication: low latency where it matters, the core for training elsewhere.

Nothing below progresses without being tested, and testing costs a core. Three facts decide how.

* Is the training thread blocked (*urgent*)? Then nobody needs the core for a moment, and
  spinning gives the latency of a busy wait. A peer may be late by seconds, though: after a
  millisecond without progress naps begin.
* How often does a message move on (*gap*: the usual seconds from one of its moves to the next, as
  seen so far)? Shared memory steps every few microseconds, a 1 Gbit/s link every few
  milliseconds; spinning for the latter buys nothing, and a nap of a quarter of it costs nothing.
  While training computes, each nap costs it some 50 us of cold caches, and what is noticed late
  travels beside other chunks anyway: naps are four times as long.
* How long should the whole operation take (*expected*)? One that is shorter than a nap is spun
  for even while training runs.

    urgent,     waited < spin_s, gap unknown or short      spin
    not urgent, waited < 2 * expected_s <= 2 * short_s     spin
    otherwise                                              nap

Naps grow by half each time from 50 us to a millisecond. Until the next step is overdue they stay
between an eighth and a quarter of the gap where that is urgent, else between half of it and all of
it, and at most four milliseconds long. What the whole operation should take stands for the gap
where no gap is known yet, and where it is less, until the operation is overdue.

:class:`Policy` is these rules; :class:`Waiter` applies them to the real clock.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from wfbp.comm.backend import Backend, T, Work
from wfbp.errors import StallError

PR_SET_TIMERSLACK = 29
PR_GET_TIMERSLACK = 30
GAP_WEIGHT = 0.25
LATE_S = 0.1
"""A step that took longer than this waited for a peer, not for the network: where only small
messages follow, which have no steps, the gap would be believed for ever."""
CARRIED_SPIN_GAP_S = 2e-4
"""Where a network carries data by itself, spinning for longer steps gains nothing."""
TESTS_PER_LOOK = 4
PATIENCE = 4
"""How much longer naps are while training computes."""

Check = Callable[[float], None]
"""Given the seconds waited so far; raises where waiting on is hopeless."""


@dataclass(frozen=True, slots=True)
class Policy:
    """When to spin and how long to nap.

    Args:
        spin_s: how long an urgent wait spins after the last progress.
        short_s: operations expected to end within this are spun for even when not urgent.
        first_nap_s: length of the first nap.
        max_nap_s: length of the longest; of ``PATIENCE`` times that where nothing is urgent and a
            step is not expected sooner.
        growth: factor from one nap to the next.
        spin_gap_s: an urgent wait spins only where steps usually follow one another within this.
    """

    spin_s: float = 1e-3
    short_s: float = 100e-6
    first_nap_s: float = 50e-6
    max_nap_s: float = 1e-3
    growth: float = 1.5
    spin_gap_s: float = 2e-3

    def nap_s(
        self,
        waited_s: float,
        naps: int,
        urgent: bool,
        expected_s: float | None = None,
        gap_s: float | None = None,
    ) -> float:
        """Seconds to nap now; 0 is to spin.

        Args:
            waited_s: since the last progress.
            naps: taken since then.
            urgent: whether the training thread is blocked.
            expected_s: duration of the operation, None if unknown.
            gap_s: usual time from one step of a message to the next, None if unknown.
        """
        if urgent:
            if waited_s < self.spin_s and (gap_s is None or gap_s < self.spin_gap_s):
                return 0.0
        elif expected_s is not None and waited_s < 2 * expected_s <= 2 * self.short_s:
            return 0.0
        nap = self.first_nap_s * self.growth ** min(naps, 32)
        longest = self.max_nap_s
        step = gap_s if gap_s is not None else expected_s
        if step is not None and expected_s is not None and waited_s < 2 * expected_s:
            step = min(step, expected_s)
        if step is not None and waited_s < 2 * step:
            share = step / 4
            if not urgent:
                share, longest = PATIENCE * share, PATIENCE * longest
            nap = max(min(nap, share), share / 2, self.first_nap_s)
        return min(nap, longest)


class Waiter:
    """Waits a little at a time between tests of an operation. Used by one thread.

    Args:
        activity: a number that changes with every step of a message (``Backend.activity``).
        crowded: whether ranks of this job share cores. Spinning then yields the core to peers,
            which could not move otherwise; elsewhere a yield would lose it for milliseconds.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        activity: Callable[[], int] = lambda: 0,
        crowded: bool = False,
    ) -> None:
        self.policy = policy or Policy()
        self._clock = clock
        self._sleep = sleep
        self._progress_s = clock()
        self._naps = 0
        self._activity = activity
        self._crowded = crowded
        self._seen = activity()
        self._in_motion = False
        self._gap_s: float | None = None

    @classmethod
    def watching(cls, backend: Backend, policy: Policy | None = None) -> Waiter:
        """A waiter for works of a backend and its duplicates, on this machine."""
        crowded = backend.local_size > num_cores()
        if policy is None and backend.progresses_alone:
            policy = Policy(spin_gap_s=CARRIED_SPIN_GAP_S)
        return cls(policy, activity=lambda: backend.activity, crowded=crowded)

    def progressed(self) -> None:
        """Something moved on, completed or was started: be attentive again."""
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

    def nap_s(self, urgent: bool, expected_s: float | None) -> float:
        """Seconds to nap now, 0 to spin; for callers that nap on an event.

        Arguments as of :class:`Policy`.
        """
        if self._activity() != self._seen:
            self.progressed()
        waited_s = self._clock() - self._progress_s
        nap = self.policy.nap_s(waited_s, self._naps, urgent, expected_s, self._gap_s)
        self._naps += nap > 0
        return nap

    def pause(self, urgent: bool, expected_s: float | None) -> None:
        """Wait a little before the next test; arguments as for :meth:`nap_s`."""
        nap = self.nap_s(urgent, expected_s)
        if nap > 0:
            self._sleep(nap)
        else:
            self.offer_core()

    def offer_core(self) -> None:
        """While spinning: let a peer that shares the core go first, if there is one."""
        if self._crowded:
            _yield()


def wait(
    work: Work[T],
    waiter: Waiter | None = None,
    timeout_s: float | None = None,
    check: Check | None = None,
) -> T:
    """Block until a collective is complete, and return its result.

    ``check`` is called again and again; an error that it raises ends the wait.

    Raises:
        StallError: not complete after ``timeout_s`` seconds.
        BackendError: the library below failed.

    Example:
        >>> from wfbp.comm.emulated import EmulatedLink
        >>> wait(EmulatedLink(lambda nbytes: 0.0, size=1).all_gather_bytes(b"me"))
        [b'me']
    """
    waiter = waiter or Waiter(activity=lambda: work.activity)
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
        waiter.pause(urgent=True, expected_s=None)
    waiter.progressed()  # what follows until the next wait is no part of this one
    return work.result


@contextmanager
def sharp_naps() -> Iterator[None]:
    """Within it, this thread's naps end when they should: Linux adds 50 us to each by default."""
    if _prctl is None:
        yield
        return
    slack_ns = _prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0)
    _prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0)
    try:
        yield
    finally:
        _prctl(PR_SET_TIMERSLACK, slack_ns, 0, 0, 0)


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_yield: Callable[[], None] = getattr(os, "sched_yield", lambda: None)
_prctl: Any = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
