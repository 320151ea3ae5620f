"""Calls: single collectives for which a training thread waits."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from wfbp.comm.backend import Work
from wfbp.errors import WfbpError
from wfbp.runtime.progress.bell import AutoResetEvent

T = TypeVar("T")


class Reply(Generic[T]):
    """A place for one answer at a time: one thread puts, one training thread gets."""

    def __init__(self) -> None:
        self._answers: deque[tuple[T | None, BaseException | None]] = deque()
        self._answered = AutoResetEvent()

    def put(self, value: T) -> None:
        """Answer."""
        self._answers.append((value, None))
        self._answered.set()

    def fail(self, error: BaseException) -> None:
        """Answer with an error."""
        self._answers.append((None, error))
        self._answered.set()

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
            if not self._answered.wait(deadline - time.monotonic()) and not self._answers:
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
        line: calls of one line follow one another: those on one backend.
        since: when it was asked for (``time.monotonic``).
        work: once it is started.
    """

    label: str
    start: Callable[[], Work[Any]]
    reply: Reply[Any]
    line: object = None
    since: float = field(default_factory=time.monotonic)
    work: Work[Any] | None = None


class Calls:
    """Runs the calls of a line in the order in which they were asked for, and lines side by side.

    For the communication thread.
    """

    def __init__(self) -> None:
        self._lines: dict[object, deque[Call]] = {}  # those in which a call waits
        self.num_begun = 0

    def __bool__(self) -> bool:
        return bool(self._lines)

    @property
    def under_way(self) -> list[Call]:
        """The first call of each line, the line that has been busy longest first."""
        return [waiting[0] for waiting in self._lines.values()]

    def add(self, call: Call) -> None:
        """Run a call after those before it in its line."""
        self._lines.setdefault(call.line, deque()).append(call)

    def advance(self) -> bool:
        """Move the first call of each line on; True where any ended."""
        ended = False
        for call in self.under_way if self._lines else ():
            ended |= self._move(call)
        return ended

    def _move(self, call: Call) -> bool:
        try:
            if call.work is None:
                self.num_begun += 1
                call.work = call.start()
            if not call.work.test():
                return False
            result = call.work.result
        except Exception as error:
            answer = partial(call.reply.fail, error)
        else:
            answer = partial(call.reply.put, result)
        waiting = self._lines.get(call.line)
        if waiting:  # else the runtime ended meanwhile, and all calls were answered
            waiting.popleft()
            if not waiting:
                del self._lines[call.line]
            answer()
        return True

    def fail(self, error: WfbpError) -> None:
        """Answer all calls with an error."""
        lines, self._lines = self._lines, {}
        for waiting in lines.values():
            for call in waiting:
                call.reply.fail(error)
