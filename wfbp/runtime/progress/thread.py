"""The communication thread, and the lock that decides which thread speaks to the backend.

Training threads post messages; the communication thread acts on them, moves collectives on and
waits for them without taking the core that training needs. A training thread that has to wait for a
result takes the driver lock and moves communication on itself until the result has come: no
hand-over between threads and cores, and caches stay warm.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from wfbp.comm.backend import Backend, Work
from wfbp.comm.waiting import sharp_naps
from wfbp.config import Config
from wfbp.errors import StallError, WfbpError
from wfbp.runtime import signals
from wfbp.runtime.progress.loop import TICK_S, Message, PendingCollective, ProgressLoop, Reply
from wfbp.runtime.progress.stall import ALL_RANKS, Members

T = TypeVar("T")

THREAD_NAME = "wfbp-comm"
_BACKSTOP_S = 10.0
_DRIVER_POLL_S = 5e-4
_REPLY_POLL_S = 0.1
_PR_SET_NAME = 15


class CommunicationThread:
    """Runs collectives and lanes on one backend.

    :meth:`post`, :meth:`call`, :meth:`await_reply` and :meth:`stop` may be called by any thread
    but this one; everything else under the progress lock only.

    ``_progress_lock`` is held whenever the loop is called, ``_driver_lock`` by a training thread
    for as long as it drives: the communication thread takes and releases it before every call of
    the loop. It rests without either. Beside them threads share the messages of
    :class:`~wfbp.runtime.progress.loop.ProgressLoop` and two hints: how many threads wait, which
    may be read late, and ``sleeping``. A thread that appends an event to a lane and then finds
    ``sleeping`` true must post a message; the communication thread sets it before it looks at the
    events for the last time, so none is overlooked.
    """

    def __init__(self, backend: Backend, config: Config, where: str) -> None:
        self._config = config
        self._where = where
        self.loop = ProgressLoop(backend, config, where)
        self._driver_lock = threading.Lock()
        self._progress_lock = threading.Lock()
        self._running = True
        self._here = threading.local()
        self.sleeping = False
        self._standing_by = False
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def error(self) -> WfbpError | None:
        """What has ended the runtime, if anything has."""
        return self.loop.error

    def fail_in_fork(self, error: WfbpError) -> None:
        """In a forked process, make every call raise ``error`` from now on.

        The threads that held the locks do not exist there and will never release them.
        """
        self._driver_lock, self._progress_lock = threading.Lock(), threading.Lock()
        self.loop.error = error

    @property
    def owes_work(self) -> bool:
        """Whether other ranks wait for something that this one has promised."""
        return self.error is None and self.loop.owes_work

    @property
    def is_used_here(self) -> bool:
        """Whether the calling thread has ever waited for communication."""
        return getattr(self._here, "used", False)

    def post(self, message: Message) -> None:
        """Have ``message`` called soon, under the progress lock."""
        self.loop.messages.append(message)
        self.loop.wakeup.set()

    def leave(self, message: Message) -> None:
        """Have ``message`` called before anything else by the caller, which now waits.

        The communication thread is not woken: two threads would contend for the interpreter.
        """
        self.loop.messages.append(message)

    def progress(self) -> None:
        """Move communication on without waiting, unless another thread is doing that."""
        if not self._driver_lock.acquire(blocking=False):
            self.loop.wakeup.set()
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
        """Run one collective and wait for its result.

        ``start`` is called under the progress lock; collectives of different ``queue_key`` run side
        by side. Raises ``WfbpError`` if this one failed, or an earlier error has ended the runtime.
        """
        reply: Reply[T] = Reply()
        collective = PendingCollective(label, start, reply, queue_key, members)
        self.leave(lambda: self.loop.enqueue(collective))
        return self.await_reply(reply, label)

    def await_reply(self, reply: Reply[T], label: str) -> T:
        """Wait for the result of an event or message; drive communication, unless another thread
        does.

        ``label`` is what is waited for, for messages.

        Raises:
            WfbpError: ranks failed, or did not answer in time.
            BaseException: from an overdue signal handler of the program; it ends the runtime.
        """
        loop, self._here.used = self.loop, True
        loop.waiting_threads.add(threading.get_ident())
        loop.awaited = reply
        loop.num_waits += 1
        if reply.answered:
            return reply.get(timeout_s=0.0)
        since = time.monotonic()
        with signals.deferred:
            while not self._await(reply, label, since):
                try:
                    signals.run_pending()  # here, because they may communicate: no lock is held
                except BaseException:
                    self.post(lambda: loop.fail(self._interrupted()))
                    raise
            return reply.get(timeout_s=0.0)

    def stop(self, timeout_s: float) -> bool:
        """End the thread once its messages are worked off; whether it has ended in time."""
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
                with self._progress_lock:
                    while not reply.answered:
                        if loop.error is not None:
                            raise loop.error
                        if signals.overdue(since):
                            return False
                        nap_s = loop.progress(urgent=True)
                        if nap_s > 0 and not reply.answered:
                            with sharp_naps():
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
        waited_s = 0.0  # less the time in which the job may have been suspended
        while not reply.wait(_REPLY_POLL_S):
            waited_s += _REPLY_POLL_S
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
        # Another waiting thread may have called for it in vain, while this one rested.
        called = self.loop.num_waiting > 1
        # If events would not wake it, it has yet to find that they can be acted upon now.
        stood_by = self._standing_by and (self.loop.under_way or not self.sleeping)
        if called or stood_by:
            self.loop.wakeup.set()

    def _interrupted(self) -> WfbpError:
        return WfbpError(f"{self._where}: interrupted while it communicated")

    # On the communication thread.

    def _run(self) -> None:
        if sys.platform == "linux":  # named for top and for benchmarks that read its CPU time
            ctypes.CDLL(None).prctl(_PR_SET_NAME, THREAD_NAME.encode(), 0, 0, 0)
        loop = self.loop
        with sharp_naps():
            while self._running:
                with self._driver_lock:  # wait for a training thread that drives
                    pass
                with self._progress_lock:
                    nap_s = loop.progress(urgent=loop.num_waiting > 0)
                    wakeable = nap_s > 0 and loop.wakeable
                if nap_s > 0:
                    self._rest(nap_s, wakeable)

    def _rest(self, nap_s: float, wakeable: bool) -> None:
        """Sleep until the loop is woken or due; not at all if an event came just before."""
        loop = self.loop
        # In this order: who appends an event looks at ``sleeping`` afterwards.
        self.sleeping = wakeable
        if not (wakeable and loop.has_events):
            while nap_s > 0 and not loop.wakeup.wait(nap_s):
                # A training thread that drives need not be disturbed. If it leaves something
                # under way, it finds this thread standing by, and wakes it.
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
                    self.sleeping = wakeable = loop.wakeable
                finally:
                    self._progress_lock.release()
                if wakeable and loop.has_events:
                    break
        self._standing_by = False
        self.sleeping = False
