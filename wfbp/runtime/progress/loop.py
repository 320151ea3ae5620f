"""The progress loop: the state of communication, moved on by one thread at a time.

It holds two kinds of work: *calls*, one collective each, for which a training thread waits; and
*lanes*, which send the groups of a plan, or named operations, while training goes on. Besides,
ranks send each other short *notices*, which are read some times a second: that a rank fails or
leaves, where it is, and which state it wants to fetch.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from wfbp.comm.backend import Backend, Work
from wfbp.comm.waiting import Waiter
from wfbp.config import Config
from wfbp.errors import PeerError, WfbpError
from wfbp.runtime.progress.deadlock import (
    ALL_RANKS,
    NOTICES,
    DeadlockDetector,
    LaneStatus,
    Members,
    RankStatus,
)


class AutoResetEvent:
    """An event that one waiting thread takes; repeated :meth:`set` calls coalesce. Thread-safe.

    (``queue.SimpleQueue.get`` cannot serve: if another thread takes the item and the timeout has
    passed by then, it waits forever, in CPython 3.11 at least; timeouts of microseconds make that
    likely.)

    Example:
        >>> event = AutoResetEvent()
        >>> event.set()
        >>> event.wait(1.0), event.wait(0.001)
        (True, False)
    """

    def __init__(self) -> None:
        self._unset = threading.Lock()
        self._unset.acquire()

    def set(self) -> None:
        """Let the thread that waits go on, or the next one that will."""
        if self._unset.locked():
            with suppress(RuntimeError):  # another thread may set it at this moment
                self._unset.release()

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is set, and reset it; False where it was not set in time."""
        return self._unset.acquire(timeout=max(timeout_s, 0.0))


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

    def wait(self, timeout_s: float) -> bool:
        """Wait for an answer; whether it came in time."""
        deadline = time.monotonic() + timeout_s
        while not self._answers:  # it may have been set for an answer that was taken
            if not self._answered.wait(deadline - time.monotonic()) and not self._answers:
                return False
        return True

    def get(self, timeout_s: float) -> T:
        """The answer, or the error given to :meth:`fail`; ``TimeoutError`` if neither comes in
        time."""
        if not self.wait(timeout_s):
            raise TimeoutError
        value, error = self._answers.popleft()
        if error is not None:
            raise error
        return value  # type: ignore[return-value]


@dataclass
class Call:
    """One collective to run.

    Args:
        label: for messages.
        start: starts it.
        reply: gets its result.
        line: calls of one line follow one another: those on one backend.
        members: the ranks that take part.
        since: when it was asked for (``time.monotonic``).
        work: once it is started.
    """

    label: str
    start: Callable[[], Work[Any]]
    reply: Reply[Any]
    line: object = None
    members: Members = ALL_RANKS
    since: float = field(default_factory=time.monotonic)
    work: Work[Any] | None = None


class Calls:
    """Runs the calls of one line in order, and lines side by side. Used under the progress lock."""

    def __init__(self) -> None:
        self._lines: dict[object, deque[Call]] = {}  # those in which a call waits
        self.num_begun: Counter[int] = Counter()
        """By the number of a process set."""

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
                self.num_begun[call.members.number] += 1
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


TICK_S = 0.05
_TESTS_PER_SPIN = 32
_REST_S = 5e-3

Message = Callable[[], None]


class Lane(Protocol):
    """What moves communication of one kind on; all methods run under the progress lock."""

    backend: Backend

    def advance(self) -> bool:
        """Move on; True where something was started or completed."""

    def may_progress(self) -> bool:
        """Whether an operation under way could move on now."""

    def rest(self, nap_s: float, most_s: float) -> bool:
        """Sleep until an operation under way may have moved on; see ``Backend.rest``."""

    @property
    def busy(self) -> bool:
        """Whether a collective is under way."""

    @property
    def owes_work(self) -> bool:
        """Whether other ranks wait for something that has been promised to them."""

    @property
    def has_events(self) -> bool:
        """Whether events wait to be read."""

    @property
    def has_room(self) -> bool:
        """Whether a group that became ready now could start."""

    @property
    def counts(self) -> tuple[int, int]:
        """How many collectives were started, and how many of these have completed."""

    @property
    def expected_s(self) -> float | None:
        """Expected duration of the operation under way, None if unknown."""

    @property
    def waiting_since(self) -> float | None:
        """When the oldest collective under way was started (``time.monotonic``)."""

    def describe(self) -> str:
        """Where the lane is, for people."""

    def fail(self, error: WfbpError) -> None:
        """Give up the step and tell the thread that waits for it why."""


class ThreadWaits:
    """The waits of training threads, which they write and the loop tells other ranks about."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self.num_begun = 0
        self.awaited: Reply[Any] = Reply()
        """What was waited for last."""
        self._threads: set[int] = set()

    def begin(self, reply: Reply[Any]) -> None:
        """The calling thread is about to wait for this reply."""
        self._threads.add(threading.get_ident())
        self.awaited = reply
        self.num_begun += 1

    @property
    def stands_still(self) -> bool:
        """Whether the only thread that has ever communicated is waiting.

        With several threads, another one might still begin what other ranks wait for.
        """
        alone = len(self._threads) == 1 and self.num_waiting == 1
        return alone and not self.awaited.answered


NoticeHandler = Callable[[int, dict[str, Any]], None]
StatusPart = Callable[[RankStatus, Reply[Any]], RankStatus]


class ProgressLoop:
    """Reads messages and notices, moves calls and lanes on, and says how long nothing need be done.

    For one thread at a time. Other threads may only append to ``messages``, then set ``wakeup``
    where a thread may be resting, write ``waits``, and read ``error``.

    Attributes:
        detector: judges long waits.
        ended: ranks that have announced that they leave or have failed.
    """

    def __init__(self, backend: Backend, config: Config, where: str) -> None:
        self.wakeup = AutoResetEvent()
        self.messages: deque[Message] = deque()
        self.waits = ThreadWaits()
        self.error: WfbpError | None = None
        self.ended: set[int] = set()
        self._given_back = False
        self._backend = backend
        self._where = where
        self._waiter = Waiter.watching(backend)
        self.detector = DeadlockDetector(
            backend.rank, backend.size, config, where, self.send_notice, lambda: backend.activity
        )
        self._handlers: dict[str, NoticeHandler] = {}
        self._status_parts: list[StatusPart] = []
        self._calls = Calls()
        self._lanes: list[Lane] = []
        self._numbers: dict[Lane, int] = {}
        self._members: dict[Lane, Members] = {}
        self._retiring: list[tuple[Lane, Message]] = []
        self._next_tick = 0.0

    def progress(self, urgent: bool) -> float:
        """Move everything on once; an error ends the runtime.

        ``urgent``: a training thread is blocked.

        Returns seconds that may pass before the next call unless ``wakeup`` is set; 0 for none.
        """
        return self._or_end_runtime(self._progress, urgent)

    def poll(self) -> float:
        """A cheap look between two naps while training computes; seconds until the next look, 0 if
        :meth:`progress` is due.

        It spares training the cache misses of a full pass.
        """
        return self._or_end_runtime(self._poll)

    def rest(self, nap_s: float) -> None:
        """Sleep between two calls, for the thread that waits for an operation.

        Where the backend can sleep by itself, it looks every ``nap_s`` seconds (as :meth:`progress`
        returned it) without the interpreter, until something has arrived. ``wakeup`` is not noticed
        meanwhile, so this takes some milliseconds at most.
        """
        busy = [lane for lane in self._lanes if lane.busy]
        alone = len(busy) == 1 and not self._calls and not self.messages
        if not (alone and self._or_end_runtime(busy[0].rest, nap_s, _REST_S)):
            self.wakeup.wait(min(nap_s, _REST_S))

    def check_measurement(self, label: str, waited_s: float, members: Members = ALL_RANKS) -> None:
        """Check for failures and deadlock within a long measurement, as :meth:`progress` does.

        ``waited_s`` is how long it has waited for other ranks. Raises the ``WfbpError`` that ends
        the runtime.
        """
        now = time.monotonic()
        if now < self._next_tick:
            return
        self._next_tick = now + TICK_S
        self._read_notices()
        error = self.error or self.detector.check([(now - waited_s, label, members)], now)
        if error is not None:
            self.fail(error)
            raise error

    @property
    def wakeable(self) -> bool:
        """Whether an event that came now could be acted upon at once."""
        return self.error is None and (
            not self._lanes or any(lane.has_room for lane in self._lanes)
        )

    @property
    def under_way(self) -> bool:
        """Whether anything has to be moved on."""
        lanes = any(lane.busy or lane.has_events or lane.owes_work for lane in self._lanes)
        return lanes or bool(self.messages or self._calls)

    @property
    def has_events(self) -> bool:
        """Whether events wait in a lane."""
        return any(lane.has_events for lane in self._lanes)

    @property
    def owes_work(self) -> bool:
        """Whether a lane owes other ranks anything."""
        return any(lane.owes_work for lane in self._lanes)

    def enqueue(self, call: Call) -> None:
        """Run a call after those before it in its line."""
        if self.error is not None:
            call.reply.fail(self.error)
        else:
            self._calls.add(call)

    def add_lane(self, lane: Lane, number: int | None = None, members: Members = ALL_RANKS) -> None:
        """Serve a lane from now on; no other thread uses it any more.

        ``number`` of a lane that follows a plan is the same on every rank; ``members`` communicate
        by it.
        """
        if self.error is not None:
            lane.fail(self.error)
        self._lanes.append(lane)
        self._members[lane] = members
        if number is not None:
            self._numbers[lane] = number

    def remove_lane(self, lane: Lane) -> None:
        """No longer serve a lane."""
        self._lanes = [other for other in self._lanes if other is not lane]
        self._numbers.pop(lane, None)
        self._members.pop(lane, None)

    def retire_lane(self, lane: Lane, idle: Message) -> None:
        """Stop serving a lane, which gets no events any more, once it has done what other ranks
        wait for.

        ``idle`` is called then, unless messages of the lane are still under way, which would meet
        those of the next user of its backend.
        """
        if lane.owes_work and self.error is None:
            self._retiring.append((lane, idle))
            return
        self.remove_lane(lane)
        if not lane.busy:
            idle()

    def send_notice(self, notice: dict[str, Any]) -> None:
        """Tell all other ranks something; they read it within :data:`TICK_S`."""
        self._backend.send_notice(json.dumps(notice).encode())

    def handle_notices(self, kind: str, handler: NoticeHandler) -> None:
        """Have notices of a kind given to this handler: the sender's rank, and the notice."""
        self._handlers[kind] = handler

    def extend_status(self, part: StatusPart) -> None:
        """Have this rank's status, when other ranks ask for it, completed by ``part``."""
        self._status_parts.append(part)

    def advance_lanes(self) -> None:
        """Move lanes on, for a call that waits within :meth:`progress` for what they owe."""
        for lane in self._lanes:
            lane.advance()

    def fail(self, error: WfbpError) -> None:
        """Keep the first error and end with it everything that waits, now and later."""
        if self.error is not None:
            return
        # First: a thread that hears of it may reuse buffers that other ranks still read.
        for lane in self._lanes:
            lane.backend.give_up()
        self.error = error
        self._calls.fail(error)
        for lane in self._lanes:
            lane.fail(error)

    def describe(self) -> str:
        """What is under way, for people."""
        calls = [f"in {call.label}" for call in self._calls.under_way]
        return (
            "; ".join(
                calls + [description for lane in self._lanes if (description := lane.describe())]
            )
            or "idle"
        )

    def _status(self) -> RankStatus:
        """Where this rank is."""
        lanes = []
        for lane, number in self._numbers.items():
            started, completed = lane.counts
            dry = not (lane.busy or lane.has_events or lane.owes_work)
            lanes.append(LaneStatus(number, started, completed, dry))
        call = next(iter(self._calls.under_way), None)
        waits, begun = self.waits, self._calls.num_begun
        status = RankStatus(
            self.describe(),
            waits.stands_still,
            waits.num_begun,
            begun[0],
            call.label if call else "",
            tuple(lanes),
            call_set=call.members.number if call else 0,
            set_calls=tuple(sorted((number, calls) for number, calls in begun.items() if number)),
        )
        for part in self._status_parts:
            status = part(status, waits.awaited)
        return status

    def give_back(self) -> None:
        """The backend is about to be closed; nothing is read from it in the rest of this pass."""
        self._given_back = True

    def _tick(self, now: float) -> None:
        """What is due some times a second."""
        if self._given_back:
            return
        retiring, self._retiring = self._retiring, []
        for lane, idle in retiring:
            self.retire_lane(lane, idle)
        self._read_notices()
        self._check_waits(now)

    def _read_notices(self) -> None:
        for sender, payload in self._backend.poll_notices():
            notice = json.loads(payload)
            kind = notice["kind"]
            if kind == "failed":
                self.ended.add(sender)
                if not notice["secondary"]:
                    reason = notice["reason"]
                    self.fail(PeerError(f"{self._where}: rank {sender} failed: {reason}"))
            elif kind == "bye":
                self.ended.add(sender)
                how = "has left (its program ended or called shutdown)"
                self.detector.note_gone(sender, how)
            elif kind in NOTICES:
                error = self.detector.handle_notice(sender, notice, self._status())
                if error is not None:
                    self.fail(error)
            else:
                self._handlers[kind](sender, notice)

    def _or_end_runtime(self, act: Callable[..., float], *arguments: Any) -> float:
        try:
            return act(*arguments)
        except WfbpError as error:
            self.fail(error)
        except Exception as error:
            failure = WfbpError(f"{self._where}: the communication thread failed: {error!r}")
            failure.__cause__ = error
            self.fail(failure)
        return 0.0

    def _poll(self) -> float:
        due = self.messages or self._calls or time.monotonic() >= self._next_tick
        if (
            due
            or self.error is not None
            or any(lane.busy and lane.may_progress() for lane in self._lanes)
        ):
            return 0.0
        return self._nap_s(urgent=False)

    def _progress(self, urgent: bool) -> float:
        progressed = self._read() | self._advance()
        now = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + TICK_S
            self._tick(now)
        if progressed:
            self._waiter.progressed()
            return 0.0
        if self.error is not None or not (self._calls or any(lane.busy for lane in self._lanes)):
            return TICK_S
        nap_s = self._nap_s(urgent)
        if nap_s <= 0:
            self._spin()
        return nap_s

    def _nap_s(self, urgent: bool) -> float:
        expected = [e for lane in self._lanes if (e := lane.expected_s) is not None]
        return self._waiter.nap_s(urgent, max(expected, default=None))

    def _read(self) -> bool:
        messages = self.messages
        if not messages:
            return False
        while messages:
            messages.popleft()()
        return True

    def _advance(self) -> bool:
        if self.error is not None:
            return False
        progressed = self._calls.advance()
        for lane in self._lanes:
            progressed |= lane.advance()
        return progressed

    def _spin(self) -> None:
        """Test many times in a row: large messages in shared memory move a little per test."""
        for _ in range(_TESTS_PER_SPIN):
            if self._advance():
                self._waiter.progressed()
                return
        self._waiter.offer_core()

    def _check_waits(self, now: float) -> None:
        waits = [(call.since, call.label, call.members) for call in self._calls.under_way]
        for lane in self._lanes:
            if (since := lane.waiting_since) is not None:
                waits.append((since, lane.describe(), self._members[lane]))
        error = self.detector.check(waits, now)
        if error is not None:
            self.fail(error)
