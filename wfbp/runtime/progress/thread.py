"""The communication thread, and the baton that decides who speaks to the backend.

Training threads post messages; the communication thread acts on them, moves collectives on and
waits for them without taking the core that training needs. A training thread that has to wait
for a result takes the baton and moves communication on itself until it has come: what it waits for
is not handed from thread to thread and core to core, and its caches stay warm.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from wfbp.comm.backend import Work
from wfbp.comm.waiting import Waiter, sharp_naps
from wfbp.config import Config
from wfbp.errors import StallError, WfbpError
from wfbp.runtime.progress.deadlock import RankStatus, StallWatch
from wfbp.runtime.progress.loop import Call, Lane, Message, ProgressLoop, Reply

T = TypeVar("T")

THREAD_NAME = "wfbp-comm"
_BACKSTOP_S = 10.0
_DRIVER_POLL_S = 5e-4
_PR_SET_NAME = 15


class CommunicationThread:
    """Runs calls and lanes on one backend.

    :meth:`post`, :meth:`call`, :meth:`await_reply` and :meth:`stop` may be called by any thread
    but this one; everything else in a turn only.

    ``_turn`` is held for each turn, ``_gate`` by a training thread for as long as it drives: the
    communication thread passes the gate before every turn. It rests without either. Beside them
    threads share the messages of :class:`~wfbp.runtime.progress.loop.ProgressLoop` and two hints:
    how many threads wait, which may be read late, and ``sleeping``. Who appends an event to a lane
    and then finds ``sleeping`` true must post a message; the communication thread sets it before it
    looks at the events for the last time, so none is overlooked.

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
        self._where = where
        self._loop = loop = ProgressLoop(waiter, on_tick, stall, where)
        self._driver_lock = threading.Lock()
        self._progress_lock = threading.Lock()
        self._running = True
        self._num_waiting = 0
        self._num_waits = 0
        self._users: set[int] = set()
        self._awaited: Reply[Any] = Reply()
        self._here = threading.local()
        self.sleeping = False
        self.add_lane: Callable[[Lane], None] = loop.add_lane
        self.remove_lane: Callable[[Lane], None] = loop.remove_lane
        self.fail: Callable[[WfbpError], None] = loop.fail
        self.describe: Callable[[], str] = loop.describe
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)

    def start(self) -> None:
        """Begin; from here on ``on_tick`` may be called."""
        self._thread.start()

    @property
    def error(self) -> WfbpError | None:
        """What has ended the runtime, if anything has."""
        return self._loop.error

    def fail_in_fork(self, error: WfbpError) -> None:
        """In a forked process, where no other thread runs: every call raises this from now on.

        Whoever held the locks there will never release them.
        """
        self._driver_lock, self._progress_lock = threading.Lock(), threading.Lock()
        self._loop.error = error

    @property
    def owes_work(self) -> bool:
        """Whether other ranks wait for something that this one has promised."""
        return self.error is None and self._loop.owes_work

    @property
    def is_used_here(self) -> bool:
        """Whether the thread that asks has ever waited for communication."""
        return getattr(self._here, "used", False)

    @property
    def awaited(self) -> Reply[Any]:
        """What was waited for last; in a turn only."""
        return self._awaited

    def progress(self) -> None:
        """Move communication on without waiting, unless another thread is doing that."""
        if self._driver_lock.acquire(blocking=False):
            try:
                if self._progress_lock.acquire(blocking=False):
                    try:
                        self._loop.progress(urgent=False)
                    finally:
                        self._progress_lock.release()
            finally:
                self._driver_lock.release()
        else:
            self._loop.wakeup.set()

    def status(self, number: Callable[[Lane], int | None]) -> RankStatus:
        """Where this rank is; in a turn only.

        It is said to wait where the only thread that has ever communicated does: of several, one
        might yet begin what another rank waits for.

        Args:
            number: of a lane, the same on every rank; None of one that follows no plan.
        """
        alone = len(self._users) == 1 and self._num_waiting == 1
        waits = alone and not self._awaited.answered  # else it is about to go on
        return self._loop.status(waits, self._num_waits, number)

    def post(self, message: Message) -> None:
        """Have ``message`` called in a turn soon."""
        self._loop.messages.append(message)
        self._loop.wakeup.set()

    def call(self, start: Callable[[], Work[T]], label: str, line: object = None) -> T:
        """Run one collective and wait for its result.

        Args:
            start: starts the collective; called in a turn.
            label: what it is, for messages.
            line: calls of different lines do not wait for each other.

        Raises:
            WfbpError: this collective failed, or an earlier error has ended the runtime.
        """
        reply: Reply[T] = Reply()
        call = Call(label, start, reply, line)
        self._loop.messages.append(lambda: self._loop.enqueue(call))
        return self.await_reply(reply, label)

    def await_reply(self, reply: Reply[T], label: str) -> T:
        """Wait for an answer to what was appended or posted before; drive, unless another does."""
        self._here.used = True
        self._users.add(threading.get_ident())
        self._awaited = reply
        self._num_waits += 1
        if reply.answered:
            return reply.get(timeout_s=0.0)
        self._num_waiting += 1
        try:
            if self._driver_lock.acquire(timeout=_DRIVER_POLL_S):
                try:
                    with self._progress_lock, sharp_naps():
                        return self._drive(reply)
                finally:
                    self._driver_lock.release()
            self._loop.wakeup.set()
            return self._await_others(reply, label)
        finally:
            self._num_waiting -= 1

    def stop(self, timeout_s: float) -> bool:
        """End the thread once its messages are worked off; whether it has ended in time."""
        self.post(self._stop)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _drive(self, reply: Reply[T]) -> T:
        loop = self._loop
        try:
            while not reply.answered:
                if loop.error is not None:
                    raise loop.error
                nap_s = loop.progress(urgent=True)
                if nap_s > 0 and not reply.answered:
                    loop.rest(nap_s)
        except KeyboardInterrupt:
            loop.fail(self._interrupted())
            raise
        return reply.get(timeout_s=0.0)

    def _await_others(self, reply: Reply[T], label: str) -> T:
        """Another training thread drives, and this one's work with it."""
        deadline = time.monotonic() + self._config.timeout_s + _BACKSTOP_S
        while True:
            try:
                return reply.get(timeout_s=1.0)
            except KeyboardInterrupt:
                self.post(lambda: self._loop.fail(self._interrupted()))
                raise
            except TimeoutError:
                if self.error is not None:
                    raise self.error from None
                if not self._thread.is_alive() or time.monotonic() > deadline:
                    raise StallError(
                        f"{self._where}: {label}: the communication thread does not answer"
                    ) from None

    def _interrupted(self) -> WfbpError:
        return WfbpError(f"{self._where}: interrupted while it communicated")

    def _stop(self) -> None:
        self._running = False

    # On the communication thread.

    def _run(self) -> None:
        if sys.platform == "linux":  # named for top and for benchmarks that read its CPU time
            ctypes.CDLL(None).prctl(_PR_SET_NAME, THREAD_NAME.encode(), 0, 0, 0)
        with sharp_naps():
            while self._running:
                with self._driver_lock:
                    pass
                with self._progress_lock:
                    nap_s = self._loop.progress(self._num_waiting > 0)
                    wakeable = nap_s > 0 and self._loop.wakeable
                if nap_s > 0:
                    self._rest(nap_s, wakeable)

    def _rest(self, nap_s: float, wakeable: bool) -> None:
        """Sleep until the bell rings or a turn is due.

        Not at all where an event came before ``sleeping`` said so.
        """
        loop = self._loop
        self.sleeping = wakeable
        if not (wakeable and loop.has_events):
            while nap_s > 0 and not loop.wakeup.wait(nap_s):
                if self._num_waiting > 0 or not self._progress_lock.acquire(blocking=False):
                    break
                try:
                    nap_s = loop.poll()
                finally:
                    self._progress_lock.release()
        self.sleeping = False
