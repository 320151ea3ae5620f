"""The handle of one operation of a process group, as ``torch.distributed`` returns it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work as TorchWork

from wfbp.errors import WfbpError
from wfbp.runtime.progress.loop import Reply
from wfbp.runtime.progress.thread import CommunicationThread

_callbacks = ThreadPoolExecutor(32, thread_name_prefix="wfbp-callbacks")
"""Completes futures: their callbacks are user code, and may wait for further operations."""


class Completion(Reply[None]):
    """A reply that many threads may get, many times."""

    def get(self, timeout_s: float) -> None:
        if not self.wait(timeout_s):
            raise TimeoutError
        error = self.error
        if error is not None:
            raise error

    @property
    def error(self) -> BaseException | None:
        """The error of an operation that has failed."""
        return self._results[0][1] if self._results else None


class GroupWork(TorchWork):
    """Completed once by the thread that drives communication; any thread may wait for it."""

    def __init__(
        self, thread: CommunicationThread, text: str, tensors: Sequence[Any], timeout_s: float
    ) -> None:
        super().__init__()
        self.text = text
        self.deadline_s = time.monotonic() + timeout_s
        self.source = -1
        self.reply = Completion()
        self._thread, self._tensors = thread, list(tensors)
        self._lock = threading.Lock()
        self._future: _Future | None = None

    def complete(self, error: BaseException | None = None) -> None:
        """Wake all that wait; called once."""
        with self._lock:
            if error is None:
                self.reply.put(None)
            else:
                self.reply.fail(error)
            future = self._future
        if future is None:
            return
        future_waits.num_pending -= 1
        if future.watched:
            _callbacks.submit(future.settle)
        else:  # at once: a waiting C++ thread should not need another thread
            future.settle()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is not None and timeout > timedelta(0):
            limit_s = time.monotonic() + timeout.total_seconds()
            self.deadline_s = min(self.deadline_s, limit_s)
        if not self.reply.answered:
            self._thread.await_reply(self.reply, self.text)
        self.reply.get(timeout_s=0.0)
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self.reply.answered

    def is_success(self) -> bool:
        return self.reply.answered and self.reply.error is None

    def exception(self) -> BaseException | None:
        return self.reply.error

    def result(self) -> list[Any]:
        return self._tensors

    def source_rank(self) -> int:
        return self.source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        with self._lock:
            if self._future is None:
                self._future = _Future(self)
                if self.reply.answered:
                    self._future.settle()
                else:
                    future_waits.note()
            return self._future


class FutureWaits:
    """Whether the thread that last asked for a future is blocked, as DDP is after backward.

    It waits in C++, where it cannot drive communication: the communication thread must not nap
    then. A thread is blocked if it uses no CPU time.
    """

    _LOOK_S = 2e-4

    def __init__(self) -> None:
        self.num_pending = 0
        self._clock: int | None = None
        self._looked_s = self._cpu_s = 0.0
        self._blocked = False

    def note(self) -> None:
        """This thread has asked for the future of an operation under way."""
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
            self.num_pending += 1

    def is_blocked(self) -> bool:
        """For the communication thread."""
        if not self.num_pending or self._clock is None:
            return False
        now = time.monotonic()
        if now - self._looked_s > self._LOOK_S:
            try:
                cpu_s = time.clock_gettime(self._clock)
            except OSError:  # it has ended
                self._clock, self._blocked = None, False
                return False
            self._blocked = cpu_s == self._cpu_s
            self._looked_s, self._cpu_s = now, cpu_s
        return self._blocked


future_waits = FutureWaits()


class _Future(torch.futures.Future[Any]):
    """The future of an operation; ``watched`` once Python code has given it a callback."""

    def __init__(self, work: GroupWork) -> None:
        super().__init__()
        self.watched = False
        self._work = work
        self._once = threading.Lock()

    def then(self, callback: Any) -> torch.futures.Future[Any]:
        self.watched = True
        return super().then(callback)

    def add_done_callback(self, callback: Any) -> None:
        self.watched = True
        super().add_done_callback(callback)

    def wait(self) -> Any:
        self._work.wait()
        self.settle()  # here, because this may be a callback that blocks the thread for them
        return super().wait()

    def settle(self) -> None:
        """Set the result of an operation that is complete; again does nothing."""
        if not self._once.acquire(blocking=False):
            return
        error = self._work.exception()
        if error is None:
            self.set_result(self._work.result())
        else:
            self._set_unwrap_func(_raise)
            self.set_result(_Failure(error))


class _Failure:
    """The value of the future of an operation that has failed.

    PyTorch's C++ side, which cannot be told of an error, pickles it to find tensors.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


def _raise(failure: _Failure) -> None:
    raise failure.error


class GroupOfWorks(TorchWork):
    """Several operations as one."""

    def __init__(self, works: Sequence[GroupWork]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> torch.futures.Future[Any]:
        results = [tensor for work in self._works for tensor in work.result()]
        futures = [work.get_future().then(lambda future: future.value()) for work in self._works]
        return torch.futures.collect_all(futures).then(lambda _: results)


def closed(where: str, text: str) -> WfbpError:
    """The error of an operation on a group that has ended."""
    return WfbpError(f"{where}: {text}: the process group was destroyed or aborted; make a new one")
