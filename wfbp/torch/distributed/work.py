"""Works: handles that PyTorch returns for operations of a process group, with their futures."""

from __future__ import annotations

import math
import threading
import time
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

_callbacks = ThreadPoolExecutor(32, thread_name_prefix="callbacks")
"""Runs the callbacks of futures. (They are the program's and may begin operations, so their name is
not one of ``OWN_THREADS``.)"""


@uncompiled_methods
class GroupWork(TorchWork):
    """An operation of a process group, or several as a whole; any thread may wait for it.

    An operation holds its tensors as bytes, which are the tensors' own if these are contiguous. The
    thread that drives communication completes it once. A whole ends with its last part, once
    :meth:`complete` was called for itself.
    """

    def __init__(self, thread: CommunicationThread, timeout_s: float) -> None:
        super().__init__()
        self.text = "coalesced operations"
        self.results: Sequence[Tensor] = ()
        self.since = time.monotonic()
        self.timeout_s = timeout_s
        self.awaited_since: float | None = None
        self.deadline_s = math.inf
        """As :meth:`wait` was told; ``timeout_s`` counts from the last progress."""
        self.source_number = -1
        self.tensors: list[Tensor] = []
        self.deliveries: list[Callable[[], object]] = []
        """Functions to call once it has ended."""
        self._thread = thread
        self._whole: GroupWork | None = None
        self._parts: list[GroupWork] = []
        self._num_pending = 1
        self._is_completed = False
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._replies: list[Reply[None]] = []  # for the threads that wait
        self._future: _Future | None = None

    # For the one who describes an operation.

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

    def _check(self, tensor: Tensor) -> None:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            raise ValueError(
                f"a tensor is {tensor.layout} on {tensor.device}; expected a dense one on the CPU"
            )
        self.tensors.append(tensor)

    def include(self, part: GroupWork) -> None:
        """Make ``part`` a part of this whole, before it begins."""
        part._whole = self
        self._parts.append(part)
        with self._lock:
            self._num_pending += 1

    # For the one who carries it out.

    def complete(self, error: BaseException | None = None) -> None:
        """Note that the operation or a part has ended; the last one, or an error, ends the wait."""
        if error is None:
            try:
                for deliver in self.deliveries:
                    deliver()
            except Exception as problem:
                error = problem
        with self._lock:
            self._num_pending -= 1
            if self._is_completed or (error is None and self._num_pending):
                return
            self._error = error
            self._is_completed = True
            # Without these references no cycle keeps the tensors' memory.
            future, self._future = self._future, None
            whole, self._whole = self._whole, None
            self.tensors, self.deliveries = [], []
        for reply in self._replies:
            reply.put(None)
        if future is not None:
            future.settle()
        if whole is not None:
            whole.complete(error)

    # For programs, and PyTorch.

    def wait(self, timeout: timedelta | None = None) -> bool:
        limit_s = timeout.total_seconds() if timeout else 0.0
        self._note_wait(time.monotonic(), limit_s if limit_s > 0 else math.inf)
        reply: Reply[None] = Reply()
        with self._lock:
            must_wait = not self._is_completed
            if must_wait:
                self._replies.append(reply)
        if must_wait:
            self._thread.await_reply(reply, self.text)
        if self._error is not None:
            raise self._error
        return True

    def _note_wait(self, now: float, limit_s: float) -> None:
        self.awaited_since = self.awaited_since or now
        self.deadline_s = min(self.deadline_s, now + limit_s)
        for part in self._parts:
            part._note_wait(now, limit_s)

    def synchronize(self) -> None:
        self.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        return self._is_completed

    def is_success(self) -> bool:
        return self._is_completed and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Tensor]:
        return [*self.results, *(tensor for part in self._parts for tensor in part.result())]

    def source_rank(self) -> int:
        return self.source_number

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        with self._lock:
            future = self._future or _Future(self)
            if self._is_completed:
                future.settle()
            else:
                self._future = future
                future_waits.note(self)
            return future

    def raise_error(self) -> Any:
        assert self._error is not None
        raise self._error

    # DDP extracts tensors from a future's value in C++, by pickling it; so it gets the error.
    __reduce__ = raise_error


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
        if self._work.exception() is None:
            self.set_result(self._work.result())
        else:
            self._set_unwrap_func(GroupWork.raise_error)
            self.set_result(self._work)

    def _elsewhere(self) -> torch.futures.Future[None]:
        """A future that is complete after this one, on another thread."""
        future: torch.futures.Future[None] = torch.futures.Future()

        def submit(_: object) -> None:
            _callbacks.submit(future.set_result, None)

        super().add_done_callback(submit)
        return future


class FutureWaits:
    """Whether the thread that last asked for a future is blocked, as DDP is after backward.

    It waits in C++, where it cannot drive communication: the communication thread must not nap
    then. Its state tells, not its processor time, which also stands still without a core.
    """

    _LOOK_S = 2e-4

    def __init__(self) -> None:
        self._work: GroupWork | None = None
        self._thread = 0
        self._looked_s = 0.0
        self._blocked = False

    def note(self, work: GroupWork) -> None:
        """This thread has asked for the future of work under way."""
        self._thread, self._work = threading.get_native_id(), work

    def is_blocked(self) -> bool:
        """For the communication thread."""
        if self._work is None or self._work.is_completed():
            self._work = None
            return False
        now = time.monotonic()
        if now - self._looked_s > self._LOOK_S:
            self._looked_s, self._blocked = now, sleeps(self._thread)
        return self._blocked


def sleeps(thread: int) -> bool:
    """Whether a thread of this process sleeps; False where the system does not say."""
    try:
        with open(f"/proc/self/task/{thread}/stat", "rb", buffering=0) as file:
            return file.read(512).rpartition(b")")[2].split()[0] == b"S"
    except OSError:
        return False


future_waits = FutureWaits()
