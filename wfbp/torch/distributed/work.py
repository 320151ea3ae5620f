"""An operation of a process group, and what its caller holds of it: a ``Work`` and its future."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work as TorchWork

from wfbp.comm.arrays import Buffer
from wfbp.runtime.progress.loop import Reply
from wfbp.runtime.progress.thread import CommunicationThread
from wfbp.torch.compiling import uncompiled_methods
from wfbp.torch.tensors import raw, resolved

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


class Operation:
    """A collective of this rank, or a message: its tensors, as bytes, and what a caller waits for.

    The bytes are the tensors' own if these are contiguous.
    """

    text = ""
    work: GroupWork

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.results: Sequence[Tensor] = ()
        self.deliveries: list[Callable[[], object]] = []
        """Functions to call once it has ended."""

    def source(self, tensor: Tensor) -> Buffer:
        """The bytes of a tensor that is only read."""
        self._check(tensor)
        return raw(resolved(tensor.detach()).contiguous())

    def target(self, tensor: Tensor, values: Tensor | None = None) -> Buffer:
        """Bytes that become the tensor's in the end; filled with ``values``, if any."""
        self._check(tensor)
        own = tensor.detach()
        is_plain = own.is_contiguous() and not (own.is_conj() or own.is_neg())
        if is_plain and (values is None or values is tensor):
            return raw(own)
        copy = torch.empty(own.shape, dtype=own.dtype)
        if values is not None:
            copy.copy_(values.detach())
        self.deliveries.append(lambda: own.copy_(copy))
        return raw(copy)

    def complete(self, error: BaseException | None = None) -> None:
        """Note that it has ended; its caller gets the error, or that of what is left to do."""
        if error is None:
            try:
                for deliver in self.deliveries:
                    deliver()
            except Exception as problem:
                error = problem
        self.work.complete(error)

    def _check(self, tensor: Tensor) -> None:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            raise ValueError(
                f"a tensor is {tensor.layout} on {tensor.device}; expected a dense one on the CPU"
            )
        self.tensors.append(tensor)


@uncompiled_methods
class GroupWork(TorchWork):
    """Operations of one call, or a whole of such works; any thread may wait for it.

    The thread that drives communication completes each operation once. A whole ends with its last
    part, once :meth:`complete` was called for itself.
    """

    def __init__(
        self, thread: CommunicationThread, timeout_s: float, operations: Sequence[Operation] = ()
    ) -> None:
        super().__init__()
        self.deadline_s = time.monotonic() + timeout_s
        self.source = -1
        self._thread = thread
        self._whole: GroupWork | None = None
        self._text = operations[0].text if operations else "coalesced operations"
        self._tensors = [tensor for operation in operations for tensor in operation.results]
        self._num_pending = max(1, len(operations))
        self._completion = _Completion()
        self._lock = threading.Lock()
        self._future: _Future | None = None
        for operation in operations:
            operation.work = self

    def include(self, part: GroupWork) -> None:
        """Make ``part`` a part of this whole, before it begins."""
        part._whole = self
        with self._lock:
            self._tensors += part._tensors
            self._num_pending += 1

    def complete(self, error: BaseException | None = None) -> None:
        """Note that an operation or part has ended; after the last one, or an error, wake all that
        wait."""
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
        if self._whole is not None:
            self._whole.complete(error)

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
