"""Calls: single collectives for which a training thread waits, one after another."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from wfbp.comm.backend import Work
from wfbp.errors import WfbpError
from wfbp.runtime.bell import Bell

T = TypeVar("T")


class Reply(Generic[T]):
    """A place for one answer at a time: one thread puts, one training thread gets."""

    def __init__(self) -> None:
        self._answers: deque[tuple[T | None, BaseException | None]] = deque()
        self._bell = Bell()

    def put(self, value: T) -> None:
        """Answer."""
        self._answers.append((value, None))
        self._bell.ring()

    def fail(self, error: BaseException) -> None:
        """Answer with an error."""
        self._answers.append((None, error))
        self._bell.ring()

    @property
    def answered(self) -> bool:
        """Whether :meth:`get` would return at once."""
        return bool(self._answers)

    def get(self, timeout_s: float) -> T:
        """The answer.

        Raises:
            TimeoutError: none came in time.
            BaseException: what :meth:`fail` was given.
        """
        deadline = time.monotonic() + timeout_s
        while not self._answers:  # the bell may have been rung for an answer that was taken
            if not self._bell.wait(deadline - time.monotonic()) and not self._answers:
                raise TimeoutError
        value, error = self._answers.popleft()
        if error is not None:
            raise error
        return value  # type: ignore[return-value]


@dataclass
class Call:
    """One collective to run.

    Args:
        label: what it is, for messages.
        start: starts it.
        reply: where its result goes.
        since: when it was asked for (``time.monotonic``).
    """

    label: str
    start: Callable[[], Work[Any]]
    reply: Reply[Any]
    since: float = field(default_factory=time.monotonic)


class Calls:
    """Runs calls in the order in which they were asked for. For the communication thread."""

    def __init__(self) -> None:
        self._waiting: deque[Call] = deque()
        self._work: Work[Any] | None = None
        self.num_begun = 0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def first(self) -> Call:
        """The call under way."""
        return self._waiting[0]

    def add(self, call: Call) -> None:
        """Run a call after those before it."""
        self._waiting.append(call)

    def advance(self) -> bool:
        """Move the first call on; True where it ended."""
        if not self._waiting:
            return False
        call = self._waiting[0]
        try:
            if self._work is None:
                self.num_begun += 1
                self._work = call.start()
            if not self._work.test():
                return False
            result = self._work.result
        except Exception as error:
            answer = partial(call.reply.fail, error)
        else:
            answer = partial(call.reply.put, result)
        self._work = None
        if self._waiting:  # else the runtime ended meanwhile, and all calls were answered
            self._waiting.popleft()
            answer()
        return True

    def fail(self, error: WfbpError) -> None:
        """Answer all calls with an error."""
        while self._waiting:
            self._waiting.popleft().reply.fail(error)
