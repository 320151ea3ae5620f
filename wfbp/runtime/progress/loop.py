"""The progress loop: the state of communication, driven by one thread at a time.

It drives *pending collectives*, which a training thread awaits, and *lanes*, which send groups or
named operations while training computes. All else that ranks tell each other, such as failures,
exits, places and fetches, are *notices*: a kind, a value and bytes, which they poll for.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from wfbp.comm.backend import Backend, HostBackend, Work
from wfbp.comm.waiting import MAX_NAP_S, Waiter
from wfbp.config import Config
from wfbp.core.encoding import decode, encode
from wfbp.errors import PeerError, WfbpError
from wfbp.runtime.progress.stall import (
    ALL_RANKS,
    NOTICES,
    Members,
    Need,
    RankStatus,
    StallWatch,
    Wait,
)

TICK_S = 0.05
_IDLE_S = 0.02
"""Time between looks for messages while no thread waits."""
_TESTS_PER_SPIN = 32
_REST_S = 5e-3
_SPIN_S = 2e-4
"""How long to test without the interpreter while a thread waits."""
_YOUNG_S = 1.0
"""Waits are judged, and described, once they are older."""

OWN_THREADS = "wfbp-"
"""Names of threads that never begin an operation start so."""
_HELPERS = ("tqdm_monitor", "QueueFeederThread", "(_pin_memory_loop)")
"""Endings of other such names: threads of progress bars and of DataLoaders with workers."""
_WRITERS = ("tensorboard",)
"""Packages whose threads only write files."""

Call = Callable[[], None]
NoticeHandler = Callable[[int, Any, bytes], object]


def num_program_threads() -> int:
    """Threads that may begin operations: all that run Python but those known never to do so."""
    never = {
        t.ident
        for t in threading.enumerate()
        if t.name.startswith(OWN_THREADS)
        or t.name.endswith(_HELPERS)
        or type(t).__module__.startswith(_WRITERS)
    }
    return len(sys._current_frames().keys() - never)


class AutoResetEvent:
    """Thread-safe auto-reset event; repeated :meth:`set` calls coalesce."""

    def __init__(self) -> None:
        # Not SimpleQueue.get(): in CPython 3.11 it may wait forever if another thread takes the
        # item just as the timeout passes.
        self._unset = threading.Lock()
        self._unset.acquire()

    def set(self) -> None:
        """Wake the waiting thread, or the next one that waits."""
        if self._unset.locked():
            try:  # noqa: SIM105 - suppress() takes longer, for every group of backward
                self._unset.release()
            except RuntimeError:  # another thread has set it at this moment
                pass

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is set, and reset it; False if it was not set in time."""
        return self._unset.acquire(timeout=max(timeout_s, 0.0))


T = TypeVar("T")


class Reply(Generic[T]):
    """A place for one result at a time: one thread puts, one training thread gets."""

    def __init__(self) -> None:
        self._results: deque[tuple[T | None, BaseException | None]] = deque()
        self._event = AutoResetEvent()
        self.num_taken = 0

    def put(self, value: T) -> None:
        self._results.append((value, None))
        self._event.set()

    def fail(self, error: BaseException) -> None:
        """Store an error, which :meth:`get` raises, and wake the waiter."""
        self._results.append((None, error))
        self._event.set()

    @property
    def answered(self) -> bool:
        """Whether :meth:`get` would return at once."""
        return bool(self._results)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the result, without taking it; whether it came in time."""
        deadline = time.monotonic() + timeout_s
        while not self._results:  # the event may be of a result that was taken
            if not self._event.wait(deadline - time.monotonic()) and not self._results:
                return False
        return True

    def get(self) -> T:
        """Take the result that has arrived, or raise the error given to :meth:`fail`."""
        value, error = self._results.popleft()
        self.num_taken += 1
        if error is not None:
            raise error
        return value  # type: ignore[return-value]


@dataclass(slots=True)
class PendingCollective:
    """One collective for which a training thread waits."""

    label: str
    start: Callable[[], Work[Any]]
    reply: Reply[Any]
    queue_key: object = None  # those of one key run one after another, as on one backend
    members: Members = ALL_RANKS
    since: float = field(default_factory=time.monotonic)
    work: Work[Any] | None = None  # once it is started

    @property
    def waiting_since(self) -> float:
        return self.since if self.work is None else max(self.since, self.work.moved_s)


class Expected(NamedTuple):
    """How long an operation is expected to take; None if unknown."""

    whole_s: float | None = None
    step_s: float | None = None  # between two steps of its messages


class LaneProtocol(Protocol):
    """Moves communication of one kind on; everything is used under the progress lock.

    The defaults are those of a lane that the loop serves only while it has work.
    """

    backend: Backend

    @property
    def polls(self) -> bool:
        """Whether it looks for more than the backend's works, such as notices of other ranks or
        events of a device: the loop then reads these always, and never sleeps in the backend."""

    def advance(self) -> bool:
        """Move on; True if something was started or completed."""

    @property
    def busy(self) -> bool:
        """Whether a collective is under way."""

    @property
    def is_idle(self) -> bool:
        """Whether it is busy only with messages that other ranks may send much later."""
        return False

    @property
    def owes_work(self) -> bool:
        """Whether other ranks wait for something that has been promised to them."""
        return False

    @property
    def has_events(self) -> bool:
        """Whether events wait to be read."""
        return False

    @property
    def has_room(self) -> bool:
        """Whether a group that became ready now could start."""
        return False

    @property
    def expected(self) -> Expected:
        """Of the oldest operation under way; read while the lane is busy."""
        return Expected()

    @property
    def waiting_since(self) -> float | None:
        """When the oldest collective under way was started, or last moved (``time.monotonic``)."""

    def begun(self) -> dict[str, int]:
        """Numbers for :attr:`RankStatus.begun`, beside those of the backend."""
        return {}

    def needs(self, members: Members) -> list[Need] | None:
        """Of everything that this rank has under way here; None if unknown."""
        return None

    def describe(self) -> str:
        """The current place, for messages."""

    def fail(self, error: WfbpError) -> None:
        """Abandon the step, and raise the error in the thread that waits for it."""


class ProgressLoop:
    """Drives calls, notices, collectives and lanes; for one thread at a time.

    Other threads may only append to ``calls`` (then set ``wakeup`` if a thread may be resting),
    count their waits, and read ``error``.
    """

    def __init__(self, backend: HostBackend, config: Config, where: str) -> None:
        self.wakeup = AutoResetEvent()
        self.calls: deque[Call] = deque()
        self.error: WfbpError | None = None
        self.ended: set[int] = set()  # ranks that announced an exit or a failure
        self.exit_status = 0  # of a rank that has left by sys.exit()
        # Lanes on which a rank that has left has a step under way, so that they cannot be freed:
        # the numbers of their process sets and backends.
        self.unfinished: set[tuple[int, int]] = set()
        # Called if another rank has failed and this rank's program has not noticed for a while.
        self.on_unnoticed: Callable[[], None] = lambda: None
        self._unnoticed_s: float | None = None  # when to call it; inf: it has been called
        self._patience_s = config.abort_grace_s / 2
        self.num_waiting = 0  # training threads that wait now
        self.num_waits = 0  # begun so far
        self.num_passes = 0  # of progress()
        self.awaited: Reply[Any] = Reply()
        # Whether a thread waits for communication elsewhere, such as in a framework's own code.
        self.is_awaited: Callable[[], bool] = bool  # which returns False
        self.num_fetches = 0  # of this rank: it is not blocked then; communication threads answer
        self.numbers: dict[str, int] = {}  # for RankStatus.begun, of lanes that may not be served
        self.closing = False  # nothing is read from the backend in the rest of this pass
        self._backend = backend
        self._where = where
        self.waiter = Waiter.watching(backend)
        size = backend.size
        self._others = [(backend.rank + k) % size for k in range(1, size)]
        self.watch = StallWatch(
            backend.rank, size, config, where, self.send_notice, lambda: backend.activity
        )
        self._young_s = min(_YOUNG_S, config.stall_warning_s, config.timeout_s)
        self._handlers: dict[str, NoticeHandler] = {}
        # Notices whose handlers this rank has yet to name, by kind.
        self._early: dict[str, list[tuple[int, Any, bytes]]] = {}
        self._queues: dict[object, deque[PendingCollective]] = {}  # those that are not empty
        self._lanes: list[LaneProtocol] = []
        self._members: dict[LaneProtocol, Members] = {}
        self._retiring: list[tuple[LaneProtocol, Call]] = []
        self._next_tick = time.monotonic()

    def progress(self, urgent: bool) -> float:
        """Move everything on once, for a blocked thread if ``urgent``; returns a nap in seconds."""
        self.num_passes += 1
        try:
            progressed = bool(self.calls)
            while self.calls:
                self.calls.popleft()()
            progressed |= self._advance()
            now = time.monotonic()
            if now >= self._next_tick:
                self._tick(now)
            if progressed:
                self.waiter.progressed()
                return 0.0
            if self.error is not None:
                return TICK_S
            nap_s = self._nap_s(urgent)
            if nap_s > 0:
                return nap_s
            # Without the interpreter, which other threads may need.
            rests = urgent and self._backend.rests and not self.waiter.crowded
            if rests and self._rest_in_backend(0.0, _SPIN_S):
                return 0.0
            # Large messages in shared memory move a little per test.
            for _ in range(_TESTS_PER_SPIN):
                if self._advance():
                    self.waiter.progressed()
                    return 0.0
            self.waiter.offer_core()
            return 0.0
        except Exception as error:
            return self._end_runtime(error)

    def poll(self) -> float:
        """A cheap look between two naps; seconds to the next one, 0 if progress() is due."""
        try:
            if self.calls or self._queues or time.monotonic() >= self._next_tick:
                return 0.0
            if self.error is not None:
                return 0.0
            for lane in self._lanes:
                if lane.busy and (lane.polls or self._backend.may_progress()):
                    return 0.0
            return self._nap_s(urgent=self.is_awaited())
        except Exception as error:
            return self._end_runtime(error)

    def rest(self, nap_s: float) -> None:
        """Sleep between two calls in the thread that waits, some milliseconds at most."""
        try:
            if self._backend.rests and self._rest_in_backend(nap_s, _REST_S):
                return
        except Exception as error:
            self._end_runtime(error)
        self.wakeup.wait(min(nap_s, _REST_S))

    def _rest_in_backend(self, nap_s: float, most_s: float) -> bool:
        """Let the backend test, with naps in between; False if more than its works is due.

        It releases the interpreter and tests without it, but does not notice ``wakeup``.
        """
        if self._queues or self.calls:
            return False
        for lane in self._lanes:
            if lane.polls and lane.busy:
                return False
        return self._backend.rest(nap_s, most_s)

    def check_measurement(self, label: str, waited_s: float, members: Members = ALL_RANKS) -> None:
        """Raise the error that ends the runtime, if ranks failed or ``waited_s`` is too long."""
        now = time.monotonic()
        if now >= self._next_tick:
            self._tick(now, [(now - waited_s, label, members)])
        if self.error is not None:
            raise self.error

    @property
    def wakeable(self) -> bool:
        """Whether an event that came now could be acted upon at once."""
        for lane in self._lanes:
            if lane.has_room:
                return self.error is None
        return self.error is None and not self._lanes

    @property
    def under_way(self) -> bool:
        busy = bool(self.calls or self._queues)
        for lane in self._lanes:
            busy = busy or lane.busy or lane.has_events or lane.owes_work
        return busy

    @property
    def has_events(self) -> bool:
        for lane in self._lanes:  # noqa: SIM110 - a comprehension costs a call
            if lane.has_events:
                return True
        return False

    @property
    def owes_work(self) -> bool:
        return any(lane.owes_work for lane in self._lanes)

    def enqueue(self, collective: PendingCollective) -> None:
        """Run a collective after those before it in its queue."""
        if self.error is not None:
            collective.reply.fail(self.error)
        else:
            self._queues.setdefault(collective.queue_key, deque()).append(collective)

    def add_lane(self, lane: LaneProtocol, members: Members = ALL_RANKS) -> None:
        """Serve a lane, if it is not, for communication among ``members``; no other thread may use
        it any more."""
        if lane in self._members:
            return
        if self.error is not None:
            lane.fail(self.error)
        self._lanes.append(lane)
        self._members[lane] = members

    def remove_lane(self, lane: LaneProtocol) -> None:
        """No longer serve a lane, if it is served; may be called while lanes advance."""
        self._lanes = [other for other in self._lanes if other is not lane]
        self._members.pop(lane, None)

    def retire_lane(self, lane: LaneProtocol, idle: Call) -> None:
        """Stop serving a lane after its promised work; calls ``idle`` if nothing is under way."""
        if lane.owes_work and self.error is None:
            self._retiring.append((lane, idle))
            return
        self.remove_lane(lane)
        # Else its messages could meet those of the next user of its backend.
        if not lane.busy:
            idle()

    def send_notice(
        self, kind: str, value: Any, to: Sequence[int] | None = None, data: bytes = b""
    ) -> None:
        """Tell all other ranks, or those of ``to``, something of JSON's types, and bytes. They read
        it within :data:`TICK_S`, or at once if one of their lanes polls."""
        if kind in ("failed", "bye"):  # this rank's program ends, too
            self._unnoticed_s = None
        if receivers := [rank for rank in self._others if to is None or rank in to]:
            payload = encode([kind, value]) + b"\n" + data
            for rank in receivers:
                self._backend.send_notice(rank, payload)

    @property
    def sends_notices(self) -> bool:
        """Whether a notice is still being sent; a lane must then be busy."""
        return self._backend.sends_notices

    def handle_notices(self, kind: str, handler: NoticeHandler) -> None:
        """Have notices of a kind given to this handler: the sender's rank, the value, the bytes."""
        self._handlers[kind] = handler
        for notice in self._early.pop(kind, ()):
            handler(*notice)

    def advance_lanes(self) -> None:
        """Move lanes on, for a collective that waits within :meth:`progress` for what they owe."""
        self.read_notices()
        if self.error is None:  # which a notice may have brought
            for lane in self._lanes:
                lane.advance()

    def fail(self, error: WfbpError) -> None:
        """Keep the first error and end with it everything that waits, now and later."""
        if self.error is not None:
            return
        # First: threads that get the error may reuse buffers that other ranks still read.
        for lane in self._lanes:
            lane.backend.give_up()
        self.error = error
        queues, self._queues = self._queues, {}
        for queue in queues.values():
            for collective in queue:
                collective.reply.fail(error)
        for lane in self._lanes:
            lane.fail(error)

    def describe(self) -> str:
        parts = [f"in {queue[0].label}" for queue in self._queues.values()]
        parts += [text for lane in self._lanes if (text := lane.describe())]
        return "; ".join(parts) or "idle"

    def _advance(self) -> bool:
        """Move everything on; True if anything was started or completed."""
        for lane in self._lanes if self.error is None else ():
            if lane.polls:
                self.read_notices()
                break
        if self.error is not None:
            return False
        progressed = False
        for queue in list(self._queues.values()) if self._queues else ():
            progressed |= self._advance_first(queue)
        for lane in self._lanes if self.error is None else ():  # which a collective may have read
            progressed |= lane.advance()
        return progressed

    def _advance_first(self, queue: deque[PendingCollective]) -> bool:
        """Move the first collective of a queue on; True if it ended."""
        first = queue[0]
        result = error = None
        try:
            if first.work is None:
                first.work = first.start()
            if not first.work.test():
                return False
            result = first.work.result
        except Exception as caught:
            error = caught
        if first.queue_key in self._queues:  # else the runtime ended meanwhile, and all replies did
            queue.popleft()
            if not queue:
                del self._queues[first.queue_key]
            else:  # which waited for its turn until now
                queue[0].since = time.monotonic()
            if error is None:
                first.reply.put(result)
            else:
                first.reply.fail(error)
        return True

    def _nap_s(self, urgent: bool) -> float:
        """Seconds until the next look: 0 to spin, a tick if nothing is under way."""
        busy = bool(self._queues)
        idle, longest_s, step_s = not busy and not urgent, None, None
        for lane in self._lanes:
            if lane.busy:
                busy, idle = True, idle and lane.is_idle
                expected = lane.expected
                if (expected.whole_s or 0.0) > (longest_s or 0.0):
                    longest_s, step_s = expected
        if not busy:
            return TICK_S
        # A probe on a busy machine predicts steps that are too long; long naps would then prove it
        # right. So the fastest step that was seen counts, if that is less.
        seen_s = self._backend.step_s
        if step_s is None or (seen_s is not None and seen_s < step_s):
            step_s = seen_s
        nap_s = self.waiter.nap_s(urgent, longest_s, step_s)
        return _IDLE_S if idle and nap_s >= MAX_NAP_S else nap_s

    def _end_runtime(self, error: Exception) -> float:
        if not isinstance(error, WfbpError):
            failure = WfbpError(f"{self._where}: the communication thread failed: {error!r}")
            failure.__cause__ = error
            error = failure
        self.fail(error)
        return 0.0

    def _tick(self, now: float, waits: list[Wait] | None = None) -> None:
        """Do what is due some times a second; judges ``waits``, or else all that is under way."""
        passed_s, self._next_tick = now - self._next_tick + TICK_S, now + TICK_S
        if self.closing:
            return
        if self._unnoticed_s is not None:
            # Nothing is read any more. MPI would notice the other rank's end, and run the exit
            # handlers of this process here, while its program still computes.
            if now > self._unnoticed_s:
                self._unnoticed_s = math.inf
                self.on_unnoticed()
            return
        retiring, self._retiring = self._retiring, []
        for lane, idle in retiring:
            self.retire_lane(lane, idle)
        self.read_notices()
        if waits is None:
            oldest = now
            for queue in self._queues.values():
                oldest = min(oldest, queue[0].waiting_since)
            for lane in self._lanes:
                oldest = min(oldest, lane.waiting_since or now)
            if oldest > now - self._young_s and not self.watch.left:
                self.watch.reported = ""
                return
            waits, watch = [], self.watch
            for first in [queue[0] for queue in self._queues.values()]:
                needed = watch.without_done(first.members, needs_of(first.work, first.members))
                waits.append((first.waiting_since, first.label, needed))
            for lane in self._lanes:
                if (since := lane.waiting_since) is not None:
                    members = self._members[lane]
                    needed = watch.without_done(members, lane.needs(members))
                    waits.append((since, lane.describe(), needed))
        if (error := self.watch.check(waits, now, passed_s)) is not None:
            self.fail(error)

    def read_notices(self) -> None:
        """Handle the notices that have arrived; done some times a second, or more often."""
        if self.closing:
            return
        for sender, payload in self._backend.poll_notices():
            head, _, data = payload.partition(b"\n")
            kind, notice = decode(head)
            if kind == "failed":
                self.ended.add(sender)
                if not notice["secondary"]:
                    reason = notice["reason"]
                    if self.error is None:
                        self._unnoticed_s = time.monotonic() + self._patience_s
                    self.fail(PeerError(f"{self._where}: rank {sender} failed: {reason}"))
            elif kind == "bye":
                self.ended.add(sender)
                self.exit_status = self.exit_status or notice["exit_status"]
                self.unfinished.update(map(tuple, notice["unfinished"]))
                how = "has left (its program ended or called shutdown)"
                self.watch.note_left(sender, how, RankStatus.read(notice["status"]))
            elif kind in NOTICES:
                error = self.watch.handle_notice(kind, sender, notice, self.status())
                if error is not None:
                    self.fail(error)
            elif handler := self._handlers.get(kind):
                handler(sender, notice, data)
            else:
                self._early.setdefault(kind, []).append((sender, notice, data))

    def status(self) -> RankStatus:
        """This rank's place, and what it has begun and not ended."""
        # Another thread might still begin what other ranks wait for, even its first operation.
        alone = num_program_threads() == 1 and self.num_waiting == 1
        blocked = alone and not self.awaited.answered and not self.num_fetches
        begun, needs = self._backend.begun() | self.numbers, self._needs()
        for lane in self._lanes:
            begun |= lane.begun()
        return RankStatus(self.describe(), blocked, self.num_waits, begun, needs)

    def _needs(self) -> list[Need] | None:
        found = [needs_of(q[0].work, q[0].members) for q in self._queues.values()]
        found += [lane.needs(self._members[lane]) for lane in self._lanes]
        known = [needs for needs in found if needs is not None]
        return [*chain.from_iterable(known)] if len(known) == len(found) else None


def needs_of(work: Work[Any] | None, members: Members) -> list[Need] | None:
    """What a work under way needs; None if that is unknown."""
    if work is None or work.place is None:
        return None
    name, number = work.place
    return [Need(members.ranks, {name: number})]
