"""How to wait for communication: low latency where it matters, the core for training elsewhere.

Nothing below progresses without being tested, and testing costs a core. Two facts decide. Is the
training thread blocked (*urgent*)? Then nobody needs the core for a moment, and spinning gives
the latency of a busy wait; but a peer may be late by seconds, so after a millisecond without
progress naps begin. And how long will the operation take (*expected*)? A nap that is a small
part of it costs nothing; napping through an operation shorter than a nap delays it, so such an
operation is spun for even when the training thread runs.

    urgent,     waited <  SPIN_S                 spin
    not urgent, waited <  2 * expected <= SHORT   spin
    otherwise                                     nap: FIRST_NAP_S, then growing by half each
                                                  time up to MAX_NAP_S, at most expected/8

:class:`Policy` is that table; :class:`Waiter` applies it to the real clock.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from wfbp.comm.backend import T, Work
from wfbp.errors import StallError

PR_SET_TIMERSLACK = 29


@dataclass(frozen=True, slots=True)
class Policy:
    """When to spin and how long to nap.

    Args:
        spin_s: how long an urgent wait spins after the last progress.
        short_s: operations expected to end within this are spun for even when not urgent.
        first_nap_s: length of the first nap.
        max_nap_s: length of the longest.
        growth: factor from one nap to the next.
        fraction: part of the expected duration that one nap may take.

    Example:
        >>> policy = Policy()
        >>> policy.nap_s(waited_s=0.0, naps=0, urgent=True, expected_s=None)
        0.0
        >>> policy.nap_s(waited_s=1.0, naps=100, urgent=True, expected_s=None)
        0.001
    """

    spin_s: float = 1e-3
    short_s: float = 100e-6
    first_nap_s: float = 50e-6
    max_nap_s: float = 1e-3
    growth: float = 1.5
    fraction: float = 0.125

    def nap_s(self, waited_s: float, naps: int, urgent: bool, expected_s: float | None) -> float:
        """Seconds to nap now; 0 is to spin.

        Args:
            waited_s: seconds since the last progress.
            naps: naps taken since then.
            urgent: whether the training thread is blocked.
            expected_s: expected duration of what is waited for, None if unknown.
        """
        if urgent:
            if waited_s < self.spin_s:
                return 0.0
        elif expected_s is not None and waited_s < 2 * expected_s <= 2 * self.short_s:
            return 0.0
        nap = min(self.first_nap_s * self.growth ** min(naps, 32), self.max_nap_s)
        if expected_s is not None and waited_s < 2 * expected_s:
            # Past twice what was expected, the estimate was wrong or a peer is late.
            nap = min(nap, max(self.fraction * expected_s, self.first_nap_s))
        return nap


class Waiter:
    """Waits a little at a time between tests of what is under way. Used by one thread.

    Args:
        policy: when to spin and how long to nap.
        clock: seconds, monotone.
        sleep: sleeps for that many seconds.
        activity: a number that changes whenever something moved on (``Backend.activity``): the
            steps of a large message on its way count as progress.

    Example:
        >>> waiter = Waiter()
        >>> waiter.progressed()
        >>> waiter.pause(urgent=True, expected_s=None)
    """

    def __init__(
        self,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        activity: Callable[[], int] = lambda: 0,
    ) -> None:
        self._policy = policy or Policy()
        self._clock = clock
        self._sleep = sleep
        self._progress_s = clock()
        self._naps = 0
        self._activity = activity
        self._seen = activity()

    def progressed(self) -> None:
        """Something completed or was started: be attentive again."""
        self._progress_s = self._clock()
        self._naps = 0

    def nap_s(self, urgent: bool, expected_s: float | None) -> float:
        """Seconds to nap now, 0 to spin: for callers that nap on something that can wake them.

        Args:
            urgent: whether the training thread is blocked on the result.
            expected_s: expected duration of the operation under way, None if unknown.
        """
        activity = self._activity()
        if activity != self._seen:
            self._seen = activity
            self.progressed()
        nap = self._policy.nap_s(self._clock() - self._progress_s, self._naps, urgent, expected_s)
        self._naps += nap > 0
        return nap

    def pause(self, urgent: bool, expected_s: float | None) -> None:
        """Wait a little before the next test; arguments as for :meth:`nap_s`."""
        nap = self.nap_s(urgent, expected_s)
        if nap > 0:
            self._sleep(nap)
        else:
            _yield()


def wait(work: Work[T], waiter: Waiter | None = None, timeout_s: float | None = None) -> T:
    """Block until a collective is complete.

    Args:
        work: what was started.
        waiter: how to wait; by default a new one that watches the work.
        timeout_s: give up after this; never by default.

    Returns:
        The collective's result.

    Raises:
        StallError: not complete after ``timeout_s`` seconds.
        BackendError: the library below failed.

    Example:
        >>> from wfbp.comm.local import LocalWorld
        >>> wait(LocalWorld(1).backend(0).all_gather_bytes(b"me"))
        [b'me']
    """
    if work.test():
        return work.result
    waiter = waiter or Waiter(activity=lambda: work.activity)
    waiter.progressed()
    deadline = None if timeout_s is None else time.perf_counter() + timeout_s
    while not work.test():
        if deadline is not None and time.perf_counter() > deadline:
            raise StallError(
                f"a collective of {work.nbytes} bytes did not complete within {timeout_s:g} s: "
                "another rank is late, or did not start it"
            )
        waiter.pause(urgent=True, expected_s=None)
    return work.result


def sharpen_naps() -> None:
    """Let this thread's naps end when they should: Linux adds 50 us to each by default."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0)


def _nothing() -> None: ...


_yield: Callable[[], None] = getattr(os, "sched_yield", _nothing)
"""While spinning, let a thread or rank that shares the core go first."""
