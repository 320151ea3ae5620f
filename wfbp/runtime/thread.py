"""The communication thread: the only thread that speaks to the backend.

Training threads post messages; the thread acts on them, moves collectives on and waits for them
without taking the core that training needs. Two kinds of work live here: *calls*, one collective
each, one after another, for which a training thread waits; and *lanes*, which send the groups of
a plan while training goes on.
"""

from __future__ import annotations

import ctypes
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from wfbp.comm.backend import Work
from wfbp.comm.waiting import Waiter, sharpen_naps
from wfbp.config import Config
from wfbp.errors import StallError, WfbpError
from wfbp.runtime.calls import Call, Calls, Reply
from wfbp.runtime.stall import StallWatch

T = TypeVar("T")

THREAD_NAME = "wfbp-comm"
TICK_S = 0.05
_BACKSTOP_S = 10.0
_TESTS_PER_SPIN = 32
_PR_SET_NAME = 15


class Lane(Protocol):
    """What sends a plan's groups; all methods run on the communication thread."""

    def advance(self) -> bool:
        """Move on; True where something was started or completed."""

    @property
    def busy(self) -> bool:
        """Whether a collective is under way."""

    @property
    def has_events(self) -> bool:
        """Whether events wait to be read."""

    @property
    def has_room(self) -> bool:
        """Whether a group that became ready now could start."""

    @property
    def expected_s(self) -> float | None:
        """How long what is under way should take, where that is known."""

    @property
    def waiting_since(self) -> float | None:
        """When the oldest collective under way was started (``time.monotonic``)."""

    def describe(self) -> str:
        """Where the lane is, for people."""

    def fail(self, error: WfbpError) -> None:
        """Give up the step and tell whoever waits for it why."""


class CommunicationThread:
    """Runs calls and lanes on one backend.

    :meth:`post`, :meth:`call`, :meth:`await_reply` and :meth:`stop` may be called by any other
    thread; everything else by the communication thread only. Threads share nothing but the
    inbox, a queue, and two hints: how many threads wait, which may be read late, and ``sleeping``.
    Who appends an event to a lane and then finds ``sleeping`` true must post a message; the thread
    sets it before it looks at the events for the last time, so none is overlooked.

    Args:
        config: timeouts.
        waiter: how to wait.
        on_tick: called some times a second, for notices from other ranks.
        stall: judges waits that last.
        where: who this is, for messages ("rank 1 of 4").
    """

    def __init__(
        self,
        config: Config,
        waiter: Waiter,
        on_tick: Callable[[], None],
        stall: StallWatch,
        where: str,
    ) -> None:
        self._config = config
        self._waiter = waiter
        self._on_tick = on_tick
        self._stall = stall
        self._where = where
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._calls = Calls()
        self._lanes: list[Lane] = []
        self._running = True
        self._next_tick = 0.0
        self._num_waiting = 0
        self.sleeping = False
        self.error: WfbpError | None = None
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)

    # From any thread.

    def start(self) -> None:
        """Begin; from here on ``on_tick`` may be called."""
        self._thread.start()

    def post(self, message: Callable[[], None]) -> None:
        """Have the communication thread call ``message`` soon."""
        self._inbox.put(message)

    def call(self, start: Callable[[], Work[T]], label: str) -> T:
        """Run one collective and wait for its result.

        Args:
            start: starts the collective; called on the communication thread.
            label: what it is, for messages.

        Raises:
            WfbpError: this collective failed, or an earlier error has ended the runtime.
        """
        reply: Reply[T] = Reply()
        self.post(lambda: self._enqueue(Call(label, start, reply)))
        return self.await_reply(reply, label)

    def await_reply(self, reply: Reply[T], label: str) -> T:
        """Wait for an answer, letting the communication thread know that somebody waits."""
        deadline = time.monotonic() + self._config.timeout_s + _BACKSTOP_S
        self._num_waiting += 1
        try:
            while True:
                try:
                    return reply.get(timeout_s=1.0)
                except queue.Empty:
                    if self.error is not None:
                        raise self.error from None
                    if not self._thread.is_alive() or time.monotonic() > deadline:
                        raise StallError(
                            f"{self._where}: {label}: the communication thread does not answer"
                        ) from None
        finally:
            self._num_waiting -= 1

    def stop(self, timeout_s: float) -> None:
        """End the thread once its inbox is worked off."""
        self.post(self._stop)
        self._thread.join(timeout_s)

    # On the communication thread.

    def add_lane(self, lane: Lane) -> None:
        """Serve a lane from now on."""
        if self.error is not None:
            lane.fail(self.error)
        self._lanes.append(lane)

    def remove_lane(self, lane: Lane) -> None:
        """No longer serve a lane."""
        self._lanes = [other for other in self._lanes if other is not lane]

    def fail(self, error: WfbpError) -> None:
        """Keep the first error and end with it everything that waits, now and later."""
        if self.error is not None:
            return
        self.error = error
        self._calls.fail(error)
        for lane in self._lanes:
            lane.fail(error)

    def describe(self) -> str:
        """What is under way, for people."""
        calls = [f"in {self._calls.first.label}"] if self._calls else []
        return "; ".join(calls + [lane.describe() for lane in self._lanes]) or "idle"

    def _stop(self) -> None:
        self._running = False

    def _enqueue(self, call: Call) -> None:
        if self.error is not None:
            call.reply.fail(self.error)
        else:
            self._calls.add(call)

    def _run(self) -> None:
        if sys.platform == "linux":  # named for top and for benchmarks that read its CPU time
            ctypes.CDLL(None).prctl(_PR_SET_NAME, THREAD_NAME.encode(), 0, 0, 0)
        sharpen_naps()
        while self._running:
            try:
                self._turn()
            except WfbpError as error:
                self.fail(error)
            except Exception as error:
                failure = WfbpError(f"{self._where}: the communication thread failed: {error!r}")
                failure.__cause__ = error
                self.fail(failure)

    def _turn(self) -> None:
        progressed = self._read_inbox() | self._advance()
        now = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + TICK_S
            self._on_tick()
            self._check_stall(now)
        if progressed:
            self._waiter.progressed()
            return
        if self.error is None and (self._calls or any(lane.busy for lane in self._lanes)):
            expected = [e for lane in self._lanes if (e := lane.expected_s) is not None]
            nap_s = self._waiter.nap_s(self._num_waiting > 0, max(expected, default=None))
            if nap_s > 0:
                # Napping on the inbox: a group that can start goes out at once.
                self._rest(nap_s, any(lane.has_room for lane in self._lanes))
            else:
                self._spin()
        else:
            self._rest(TICK_S, self.error is None)  # after an error nobody reads events

    def _rest(self, timeout_s: float, wakeable: bool) -> None:
        """Sleep on the inbox, unless an event came before ``sleeping`` said so."""
        self.sleeping = wakeable
        if not (wakeable and any(lane.has_events for lane in self._lanes)):
            self._read_inbox(timeout_s)
        self.sleeping = False

    def _advance(self) -> bool:
        if self.error is not None:
            return False
        progressed = self._calls.advance()
        for lane in self._lanes:
            progressed |= lane.advance()
        return progressed

    def _spin(self) -> None:
        """Test many times in a row: large messages in shared memory move a little per test."""
        for _ in range(_TESTS_PER_SPIN):
            if self._advance():
                self._waiter.progressed()
                return
        self._waiter.offer_core()

    def _read_inbox(self, timeout_s: float = 0.0) -> bool:
        progressed = False
        while True:
            try:
                if timeout_s and not progressed:
                    message = self._inbox.get(timeout=timeout_s)
                else:
                    message = self._inbox.get_nowait()
            except queue.Empty:
                return progressed
            progressed = True
            message()

    def _check_stall(self, now: float) -> None:
        waits = [(self._calls.first.since, self._calls.first.label)] if self._calls else []
        for lane in self._lanes:
            if (since := lane.waiting_since) is not None:
                waits.append((since, lane.describe()))
        error = self._stall.check(waits, now)
        if error is not None:
            self.fail(error)
