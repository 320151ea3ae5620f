"""What a caller holds of an operation of a process group: its ``Work``, and the future of that."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work as TorchWork

from wfbp.runtime.progress.loop import Reply
from wfbp.runtime.progress.thread import CommunicationThread
from wfbp.torch.compiling import uncompiled_methods

_callbacks = ThreadPoolExecutor(32, thread_name_prefix="wfbp-callbacks")
"""Runs the callbacks of futures."""


class _Completion(Reply[None]):
    """A reply that many threads may get, many times."""

    def get(self, timeout_s: float) -> None:
        if not self.wait(timeout_s):
            raise TimeoutError
        if (error := self.error) is not None:
            raise error

    @property
    def error(self) -> BaseException | None:
        """The error of an operation that has failed."""
        return self._results[0][1] if self._results else None


@uncompiled_methods
class GroupWork(TorchWork):
    """One operation or several, perhaps as part of a whole; any thread may wait for it.

    The thread that drives communication completes each operation once.
    """

    def __init__(
        self, thread: CommunicationThread, timeout_s: float, whole: GroupWork | None = None
    ) -> None:
        super().__init__()
        self.deadline_s = time.monotonic() + timeout_s
        self.source = -1
        self._thread, self._whole = thread, whole
        self._text, self._num_pending = "", 0
        self._tensors: list[torch.Tensor] = []
        self._completion = _Completion()
        self._lock = threading.Lock()
        self._future: _Future | None = None

    def expect(self, text: str, tensors: Sequence[torch.Tensor]) -> None:
        """Have one more operation, with these results."""
        with self._lock:
            self._text = self._text or text
            self._tensors += tensors
            self._num_pending += 1
        if self._whole is not None:
            self._whole.expect(text, tensors)

    def complete(self, error: BaseException | None = None) -> None:
        """Note that an operation has ended; after the last one, or an error, wake all that wait."""
        if self._whole is not None:
            self._whole.complete(error)
        with self._lock:
            self._num_pending -= 1
            if self.is_completed() or (error is None and self._num_pending):
                return
            if error is None:
                self._completion.put(None)
            else:
                self._completion.fail(error)
            future = self._future
        if future is not None:
            future.settle()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is not None and timeout > timedelta(0):
            limit_s = time.monotonic() + timeout.total_seconds()
            self.deadline_s = min(self.deadline_s, limit_s)
        if not self.is_completed():
            self._thread.await_reply(self._completion, self._text)
        self._completion.get(timeout_s=0.0)
        return True

    def synchronize(self) -> None:
        self.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        return self._completion.answered

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        return self._completion.error

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def source_rank(self) -> int:
        return self.source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        with self._lock:
            if self._future is None:
                self._future = _Future(self)
                if self.is_completed():
                    self._future.settle()
                else:
                    future_waits.note(self)
            return self._future


class _Future(torch.futures.Future[Any]):
    """The future of a ``Work``; callbacks, which may wait for operations, run on own threads."""

    def __init__(self, work: GroupWork) -> None:
        super().__init__()
        self._work = work

    def then(self, callback: Any) -> torch.futures.Future[Any]:
        return self._elsewhere().then(lambda _: callback(self))

    def add_done_callback(self, callback: Any) -> None:
        self._elsewhere().add_done_callback(lambda _: callback(self))

    def wait(self) -> Any:
        self._work.wait()
        return super().wait()

    def settle(self) -> None:
        """Set the result of work that is complete."""
        error = self._work.exception()
        if error is None:
            self.set_result(self._work.result())
        else:
            self._set_unwrap_func(_raise)
            self.set_result(_Failure(error))

    def _elsewhere(self) -> torch.futures.Future[None]:
        """A future that is complete after this one, on another thread."""
        future: torch.futures.Future[None] = torch.futures.Future()

        def submit(_: object) -> None:
            _callbacks.submit(future.set_result, None)

        super().add_done_callback(submit)
        return future


class _Failure:
    """The value of the future of work that has failed; PyTorch's C++ side pickles it."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


def _raise(failure: _Failure) -> None:
    raise failure.error


class FutureWaits:
    """Whether the thread that last asked for a future is blocked, as DDP is after backward.

    It waits in C++, where it cannot drive communication: the communication thread must not nap
    then. A thread is blocked if it uses no CPU time.
    """

    _LOOK_S = 2e-4

    def __init__(self) -> None:
        self._works: deque[GroupWork] = deque()
        self._clock = 0
        self._looked_s = self._cpu_s = 0.0
        self._blocked = False

    def note(self, work: GroupWork) -> None:
        """This thread has asked for the future of work under way."""
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
            self._works.append(work)

    def is_blocked(self) -> bool:
        """For the communication thread."""
        while self._works and self._works[0].is_completed():
            self._works.popleft()
        if not self._works:
            return False
        now = time.monotonic()
        if now - self._looked_s > self._LOOK_S:
            try:
                cpu_s = time.clock_gettime(self._clock)
            except OSError:  # the thread has ended
                self._works.clear()
                return False
            self._blocked = cpu_s == self._cpu_s
            self._looked_s, self._cpu_s = now, cpu_s
        return self._blocked


future_waits = FutureWaits()
