"""The communication thread, and the locks that decide which thread calls the backend.

A training thread that waits for a result takes the driver lock and moves communication on itself:
this avoids hand-overs between threads and cores, and keeps caches warm.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from wfbp.comm.backend import HostBackend, Work
from wfbp.comm.waiting import sharp_naps
from wfbp.config import Config
from wfbp.errors import StallError, WfbpError
from wfbp.runtime import signals
from wfbp.runtime.progress.loop import TICK_S, Call, PendingCollective, ProgressLoop, Reply
from wfbp.runtime.progress.stall import ALL_RANKS, Members

T = TypeVar("T")

THREAD_NAME = "wfbp-comm"
_BACKSTOP_S = 10.0
_DRIVER_POLL_S = 5e-4
_REPLY_POLL_S = 0.1
_PR_SET_NAME = 15


class TakenError(WfbpError):
    """A signal handler has taken the result that the interrupted wait was for."""


class CommunicationThread:
    """Runs collectives and lanes on one backend.

    Other threads may call all public methods; those of the loop need the progress lock.

    Every call of the loop holds ``_progress_lock``. A training thread that waits *drives*: it takes
    ``_driver_lock`` first, and keeps both until its result has arrived. The communication thread
    takes and releases ``_driver_lock`` before each pass. With one lock, it could take that again
    and again while a training thread waits for it. A second training thread that waits only sleeps:
    the first one, or the communication thread, moves its work on.

    Between passes the communication thread naps. Its naps are short while anything is under way,
    and else long. These rules keep work from waiting until a long nap ends; ``test_handover.py``
    tries them in all orders of the threads.

    * If it could act upon an event at once, it sets ``needs_wakeup``, before its last look at the
      events: a thread that appends an event must then wake it.
    * It does not nap if another thread has moved communication on since its own last pass.
    * If a nap ends while a training thread drives, it is ``_standing_by``. The training thread
      wakes it if it leaves work behind, or has made room for events that it would not be told.
    * A thread that waits while another one drives wakes it: that one may leave at once.
    * A training thread that stops driving wakes it if another thread waits.

    Signal handlers run while no lock is held, because they may communicate. One may even wait for
    the reply that the interrupted wait is for; that wait then raises :class:`TakenError`.
    """

    def __init__(self, backend: HostBackend, config: Config, where: str) -> None:
        self._config = config
        self._where = where
        self.loop = ProgressLoop(backend, config, where)
        self._driver_lock = threading.Lock()
        self._progress_lock = threading.Lock()
        self._running = True
        self._here = threading.local()
        self.needs_wakeup = False
        self._standing_by = False
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def error(self) -> WfbpError | None:
        """The error that has ended the runtime, if any."""
        return self.loop.error

    def fail_in_fork(self, error: WfbpError) -> None:
        """Make every call raise ``error`` from now on, in a forked process."""
        # The threads that held the locks do not exist here and will never release them.
        self._driver_lock, self._progress_lock = threading.Lock(), threading.Lock()
        self.loop.error = error

    @property
    def is_used_here(self) -> bool:
        """Whether the calling thread has ever waited for communication."""
        return getattr(self._here, "used", False)

    def post(self, call: Call, wakes: bool = True) -> None:
        """Have ``call`` made under the progress lock: soon, or by the caller's next wait."""
        self.loop.calls.append(call)
        if wakes:
            self.loop.wakeup.set()

    def progress(self) -> None:
        """Move communication on without waiting, unless another thread is doing that."""
        if not self._driver_lock.acquire(blocking=False):
            return
        try:
            if self._progress_lock.acquire(blocking=False):
                try:
                    self.loop.progress(urgent=False)
                except KeyboardInterrupt:  # what was cut off may never complete
                    self.loop.fail(self._interrupted())
                    raise
                finally:
                    self._progress_lock.release()
        finally:
            self._leave_driving()

    def call(
        self,
        start: Callable[[], Work[T]],
        label: str,
        queue_key: object = None,
        members: Members = ALL_RANKS,
    ) -> T:
        """Run one collective and wait; those of different ``queue_key`` run side by side."""
        reply: Reply[T] = Reply()
        # ``start`` is called under the progress lock.
        collective = PendingCollective(label, start, reply, queue_key, members)
        self.post(lambda: self.loop.enqueue(collective), wakes=False)
        return self.await_reply(reply, label)

    def await_reply(self, reply: Reply[T], label: str) -> T:
        """Wait for a result and drive communication; overdue signal handlers may raise here.

        Raises ``TakenError`` if a handler waited for the same result, and has it.
        """
        loop, self._here.used = self.loop, True
        loop.awaited = reply
        loop.num_waits += 1
        if reply.answered:
            return reply.get()
        since, num_taken = time.monotonic(), reply.num_taken
        with signals.deferred:
            while not self._await(reply, label, since):
                try:
                    # Without the locks of this class, because handlers may communicate.
                    signals.run_pending()
                except BaseException:
                    self.post(lambda: loop.fail(self._interrupted()))
                    raise
                if reply.num_taken != num_taken:
                    raise TakenError(f"{self._where}: {label}: a signal handler took the result")
            return reply.get()

    def stop(self, timeout_s: float) -> bool:
        """End the thread once its calls are made; whether it has ended in time."""
        self.post(self._stop)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _stop(self) -> None:
        self._running = False

    def _await(self, reply: Reply[Any], label: str, since: float) -> bool:
        """Wait for the reply; False if signal handlers are overdue."""
        loop = self.loop
        loop.num_waiting += 1
        try:
            if not self._driver_lock.acquire(timeout=_DRIVER_POLL_S):
                loop.wakeup.set()
                return self._await_driver(reply, label, since)
            try:
                with self._progress_lock, sharp_naps():
                    while not reply.answered:
                        if loop.error is not None:
                            raise loop.error
                        if signals.pending and signals.overdue(since):
                            return False
                        nap_s = loop.progress(urgent=True)
                        if nap_s > 0:
                            loop.rest(nap_s)
                    return True
            finally:
                self._leave_driving()
        except KeyboardInterrupt:  # a second one, which acts at once
            self.post(lambda: loop.fail(self._interrupted()))
            raise
        finally:
            loop.num_waiting -= 1

    def _await_driver(self, reply: Reply[Any], label: str, since: float) -> bool:
        """Wait while another training thread drives, and moves this one's work on, too."""
        # Seconds since the last pass of the loop. Time while the job is suspended does not count.
        waited_s, passes = 0.0, self.loop.num_passes
        while not reply.wait(_REPLY_POLL_S):
            waited_s += _REPLY_POLL_S
            if passes != self.loop.num_passes:  # what is overdue, the loop finds
                waited_s, passes = 0.0, self.loop.num_passes
            if self.error is not None:
                raise self.error
            if signals.overdue(since):
                return False
            if not self._thread.is_alive() or waited_s > self._config.timeout_s + _BACKSTOP_S:
                raise StallError(
                    f"{self._where}: {label}: the communication thread does not answer"
                )
        return True

    def _leave_driving(self) -> None:
        self._driver_lock.release()
        # Another waiting thread may have tried to take the lock while this one rested.
        called = self.loop.num_waiting > 1
        # Without ``needs_wakeup``, its nap began when it could act upon no event. It may now.
        stood_by = self._standing_by and (self.loop.under_way or not self.needs_wakeup)
        if called or stood_by:
            self.loop.wakeup.set()

    def _interrupted(self) -> WfbpError:
        return WfbpError(f"{self._where}: interrupted while it communicated")

    # On the communication thread.

    def _run(self) -> None:
        # Named for top, and for benchmarks that read its CPU time.
        ctypes.CDLL(None).prctl(_PR_SET_NAME, THREAD_NAME.encode(), 0, 0, 0)
        loop = self.loop
        with sharp_naps():
            while self._running:
                with self._driver_lock:  # wait for a training thread that drives
                    pass
                with self._progress_lock:
                    nap_s = loop.progress(urgent=loop.num_waiting > 0 or loop.is_awaited())
                    wakeable, passes = nap_s > 0 and loop.wakeable, loop.num_passes
                if nap_s > 0:
                    self._rest(nap_s, wakeable, passes)

    def _rest(self, nap_s: float, wakeable: bool, passes: int) -> None:
        """Sleep until the loop is woken or due; not at all if an event came just before, or if
        another thread has moved communication on since ``passes`` of the loop."""
        loop = self.loop
        # In this order: other threads append an event before they read ``needs_wakeup``.
        self.needs_wakeup = wakeable
        if not (wakeable and loop.has_events) and loop.num_passes == passes:
            while nap_s > 0 and not loop.wakeup.wait(nap_s):
                # A training thread drives. If it leaves work under way, it finds this thread
                # standing by, and wakes it.
                self._standing_by = True
                if self._driver_lock.locked():
                    nap_s = TICK_S
                    continue
                self._standing_by = False
                if loop.num_waiting > 0 or not self._progress_lock.acquire(blocking=False):
                    break
                try:
                    nap_s = loop.poll()
                    # A training thread may have driven, and made room, within this nap.
                    self.needs_wakeup = wakeable = loop.wakeable
                finally:
                    self._progress_lock.release()
                if wakeable and loop.has_events:
                    break
        self._standing_by = False
        self.needs_wakeup = False
