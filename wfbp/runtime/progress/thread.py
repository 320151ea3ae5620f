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
from wfbp.runtime.progress.deadlock import ALL_RANKS, Members
from wfbp.runtime.progress.loop import TICK_S, Call, Message, ProgressLoop, Reply

T = TypeVar("T")

THREAD_NAME = "wfbp-comm"
_BACKSTOP_S = 10.0
_DRIVER_POLL_S = 5e-4
_REPLY_POLL_S = 0.1
_PR_SET_NAME = 15


class CommunicationThread:
    """Runs calls and lanes on one backend.

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
        """Begin."""
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
        """Whether the thread that asks has ever waited for communication."""
        return getattr(self._here, "used", False)

    def progress(self) -> None:
        """Move communication on without waiting, unless another thread is doing that."""
        if self._driver_lock.acquire(blocking=False):
            try:
                if self._progress_lock.acquire(blocking=False):
                    try:
                        self.loop.progress(urgent=False)
                    except KeyboardInterrupt:  # as in ``_drive``
                        self.loop.fail(self._interrupted())
                        raise
                    finally:
                        self._progress_lock.release()
            finally:
                self._leave_driving()
        else:
            self.loop.wakeup.set()

    def post(self, message: Message) -> None:
        """Have ``message`` called soon, under the progress lock."""
        self.loop.messages.append(message)
        self.loop.wakeup.set()

    def leave(self, message: Message) -> None:
        """Have ``message`` called before anything else by the caller, which now waits.

        The communication thread is not woken: two threads would contend for the interpreter.
        """
        self.loop.messages.append(message)

    def call(
        self,
        start: Callable[[], Work[T]],
        label: str,
        line: object = None,
        members: Members = ALL_RANKS,
    ) -> T:
        """Run one collective and wait for its result.

        ``start`` is called under the progress lock; calls of different ``line`` run side by side.
        Raises ``WfbpError`` if this collective failed, or an earlier error has ended the runtime.
        """
        reply: Reply[T] = Reply()
        call = Call(label, start, reply, line, members)
        self.leave(lambda: self.loop.enqueue(call))
        return self.await_reply(reply, label)

    def await_reply(self, reply: Reply[T], label: str) -> T:
        """Wait for the answer to an event or message; drive communication, unless another thread
        does.

        Args:
            reply: where the answer comes.
            label: what is waited for, for messages.

        Raises:
            WfbpError: ranks failed, or did not answer in time.
            BaseException: from an overdue signal handler of the program; it ends the runtime.
        """
        self._here.used = True
        self.loop.waits.begin(reply)
        if reply.answered:
            return reply.get(timeout_s=0.0)
        since = time.monotonic()
        with signals.deferred:
            while not self._await(reply, label, since):
                try:
                    signals.run_pending()  # here, because they may communicate: no lock is held
                except BaseException:
                    self.post(lambda: self.loop.fail(self._interrupted()))
                    raise
            return reply.get(timeout_s=0.0)

    def _await(self, reply: Reply[Any], label: str, since: float) -> bool:
        """Wait for the reply; False if signal handlers are overdue."""
        self.loop.waits.num_waiting += 1
        try:
            if self._driver_lock.acquire(timeout=_DRIVER_POLL_S):
                try:
                    with self._progress_lock:
                        return self._drive(reply, since)
                finally:
                    self._leave_driving()
            self.loop.wakeup.set()
            return self._await_others(reply, label, since)
        except KeyboardInterrupt:  # a second one, which acts at once
            self.post(lambda: self.loop.fail(self._interrupted()))
            raise
        finally:
            self.loop.waits.num_waiting -= 1

    def _leave_driving(self) -> None:
        self._driver_lock.release()
        # Another waiting thread may have called for it in vain, while this one rested.
        called = self.loop.waits.num_waiting > 1
        # Where events would not wake it, it has yet to find that they can be acted upon now.
        stood_by = self._standing_by and (self.loop.under_way or not self.sleeping)
        if called or stood_by:
            self.loop.wakeup.set()

    def stop(self, timeout_s: float) -> bool:
        """End the thread once its messages are worked off; whether it has ended in time."""
        self.post(self._stop)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _drive(self, reply: Reply[Any], since: float) -> bool:
        loop = self.loop
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

    def _await_others(self, reply: Reply[Any], label: str, since: float) -> bool:
        """Another training thread drives, and this one's work with it."""
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
                    nap_s = self.loop.progress(self.loop.waits.num_waiting > 0)
                    wakeable = nap_s > 0 and self.loop.wakeable
                if nap_s > 0:
                    self._rest(nap_s, wakeable)

    def _rest(self, nap_s: float, wakeable: bool) -> None:
        """Sleep until the loop is woken or due; not at all if an event came just before."""
        loop = self.loop
        self.sleeping = wakeable
        if not (wakeable and loop.has_events):
            while nap_s > 0 and not loop.wakeup.wait(nap_s):
                # A training thread that drives need not be disturbed. Where it leaves something
                # under way, it finds this thread standing by, and wakes it.
                self._standing_by = True
                if self._driver_lock.locked():
                    nap_s = TICK_S
                    continue
                self._standing_by = False
                waited_for = loop.waits.num_waiting > 0
                if waited_for or not self._progress_lock.acquire(blocking=False):
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
