"""The communication side of one process group: its collectives, and what happens if they fail.

Operations match by their order within the group. On one host ranks compare all of them
(``comm/mpi/exchange``); elsewhere they exchange fingerprints of the first operations and of every
sixteenth, or of all if ``TORCH_DISTRIBUTED_DEBUG`` is ``DETAIL``. A fingerprint covers all earlier
operations too.

If operations differ or one is overdue, the ranks of the group tell each other where they are. The
first rank that hears enough composes one text, and the group fails with it on all ranks.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wfbp.comm.backend import Backend, Work
from wfbp.comm.mpi.exchange import Exchange
from wfbp.errors import DisagreementError, StallError, WfbpError
from wfbp.runtime.progress.lane_protocol import LaneProtocol
from wfbp.runtime.progress.stall import Members
from wfbp.runtime.runtime import Runtime
from wfbp.torch.distributed.work import GroupWork, closed

NOTICE = "process group"
"""Kind of the notices of all lanes, which name their group."""

_ALWAYS_CHECKED, _CHECKED_EVERY = 16, 16
_HISTORY = 256
_LOOK_S = 0.02
_ANSWER_S, _TURN_S = 1.0, 0.5
"""How long ranks wait for each other's places, and then for the ranks before them to judge."""


@dataclass(eq=False, slots=True)
class Operation:
    """One collective of this rank.

    ``key`` must be equal on all ranks. ``begin`` starts it with a fingerprint; ``finish`` runs
    once it is complete.
    """

    key: str
    begin: Callable[[Exchange, int], Work[Any]]
    finish: Callable[[], None]
    work: GroupWork
    sent: Sequence[int] = ()  # elements for each rank, and from each rank, if no other rank
    expected: Sequence[int] = ()  # knows these numbers
    number: int = 0
    fingerprint: int = 0
    since: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class _Inquiry:
    """The places of the group's ranks, collected for one operation."""

    number: int
    overdue_s: float  # 0: the operations differ
    since: float
    places: dict[int, str]


class Lane(LaneProtocol):
    """Common part of the lanes of groups; under the progress lock."""

    polls = False
    has_events = False
    has_room = False
    owes_work = False
    expected_s: float | None = None

    def __init__(self, runtime: Runtime, exchange: Exchange, name: str) -> None:
        self.backend: Backend = exchange.backend
        self.error: WfbpError | None = None
        self._runtime, self._exchange, self._name = runtime, exchange, name
        self._loop = runtime.thread.loop
        self._members = Members(-1, tuple(sorted(exchange.ranks)))
        self._served = False

    def _serve(self, wanted: bool) -> None:
        if wanted and not self._served:
            self._loop.add_lane(self, self._members)
        elif self._served and not wanted:
            self._loop.remove_lane(self)
        self._served = wanted


class CollectiveLane(Lane):
    """The collectives of one group, under the progress lock."""

    def __init__(
        self,
        runtime: Runtime,
        exchange: Exchange,
        name: str,
        check_all: bool,
        failed: Callable[[WfbpError], None],
    ) -> None:
        super().__init__(runtime, exchange, name)
        self._check_all, self._failed = check_all, failed
        self._queue: deque[Operation] = deque()
        self._in_flight: list[tuple[Operation, Work[Any]]] = []
        self._checking: tuple[Operation, Work[list[bytes]]] | None = None
        self._texts: dict[int, str] = {}
        self._number = self._fingerprint = 0
        self._seen = -1
        self._look_s = 0.0
        self._inquiry: _Inquiry | None = None

    def submit(self, operation: Operation) -> None:
        """Begin an operation after those before it."""
        if self.error is not None:
            operation.work.complete(self.error)
            return
        self._number += 1
        # 31 bits: they travel in a signed word.
        self._fingerprint = zlib.crc32(operation.key.encode(), self._fingerprint) & 0x7FFFFFFF
        operation.number, operation.fingerprint = self._number, self._fingerprint
        self._texts[self._number] = operation.work.text
        self._texts.pop(self._number - _HISTORY, None)
        self._queue.append(operation)
        self._serve(True)

    def advance(self) -> bool:
        progressed = self._start_queued()
        activity = self.backend.activity
        for operation, work in list(self._in_flight):
            if work.test():
                self._in_flight.remove((operation, work))
                self._finish(operation)
                progressed = True
            elif work.mismatch and self._inquiry is None:
                self._inquire(operation.number, 0.0)
            elif activity == self._seen:
                break  # nothing has moved, so only the first test was needed
        self._seen = activity
        now = time.monotonic()
        if now > self._look_s:
            self._look_s = now + _LOOK_S
            self._look(now)
        if not (self.busy or progressed):
            self._serve(False)
        return progressed

    def _start_queued(self) -> bool:
        progressed = False
        if self._checking is not None:
            operation, check = self._checking
            if not check.test():
                return False
            if self._differ(operation, check.result):
                if self._inquiry is None:
                    self._inquire(operation.number, 0.0)
                return False
            self._checking = None
            self._begin(operation)
            progressed = True
        while self._queue and self._inquiry is None:
            operation = self._queue.popleft()
            progressed = True
            if self._is_checked(operation):
                numbers = np.array([operation.fingerprint, *operation.sent], np.int64)
                payload = numbers.tobytes()
                self._checking = operation, self.backend.all_gather_bytes(payload)
                break  # ranks start later operations in the same order only after this one
            self._begin(operation)
        return progressed

    def _is_checked(self, operation: Operation) -> bool:
        if self._exchange.checks or self._exchange.size == 1:
            return False
        number, always = operation.number, self._check_all or bool(operation.sent)
        return always or number <= _ALWAYS_CHECKED or number % _CHECKED_EVERY == 0

    def _differ(self, operation: Operation, payloads: Sequence[bytes]) -> bool:
        """Whether ranks are in different operations, or send others than this one expects."""
        numbers = [np.frombuffer(payload, np.int64).tolist() for payload in payloads]
        if any(found[0] != operation.fingerprint for found in numbers):
            return True
        sent = [found[1 + self._exchange.rank] for found in numbers] if operation.sent else []
        return sent != list(operation.expected)

    def _begin(self, operation: Operation) -> None:
        self._in_flight.append((operation, operation.begin(self._exchange, operation.fingerprint)))

    def _finish(self, operation: Operation) -> None:
        try:
            operation.finish()
        except Exception as error:
            operation.work.complete(error)
        else:
            operation.work.complete()

    def _pending(self) -> list[Operation]:
        checking = [self._checking[0]] if self._checking else []
        return [*(operation for operation, _ in self._in_flight), *checking, *self._queue]

    @property
    def busy(self) -> bool:
        return bool(self._in_flight or self._queue or self._checking or self._inquiry)

    @property
    def position(self) -> int:
        """Equal on ranks that have done the same; -1 unless the group can be used again."""
        return -1 if self.busy or self.error is not None else self._exchange.position

    @property
    def waiting_since(self) -> float | None:
        pending = self._pending()
        if not pending:
            return None
        # The group has its own limit: the runtime's must not end the job before.
        youngest = time.monotonic() - 0.9 * self._runtime.config.timeout_s
        return max(pending[0].since, youngest)

    def describe(self) -> str:
        pending = self._pending()
        if not pending:
            return ""
        return f"{pending[0].work.text}, operation {pending[0].number} of {self._name}"

    def fail(self, error: WfbpError) -> None:
        """End every operation, now and later, with this error."""
        if self.error is not None:
            return
        self.error = error
        pending = self._pending()
        self._in_flight, self._checking, self._inquiry = [], None, None
        self._queue.clear()
        self._exchange.abandon()
        for operation in pending:
            operation.work.complete(error)
        self._failed(error)

    # When operations differ, or one is overdue.

    def _look(self, now: float) -> None:
        if self._inquiry is not None:
            self._judge(self._inquiry, now)
            return
        for operation in self._pending():
            if now > operation.work.deadline_s:
                self._inquire(operation.number, now - operation.since)
                return

    def _inquire(self, number: int, overdue_s: float) -> None:
        self._tell({"ask": number, "overdue_s": overdue_s})
        self.hear(self._exchange.rank, {"ask": number, "overdue_s": overdue_s})

    def _tell(self, what: dict[str, Any]) -> None:
        rank = self._exchange.rank
        self._loop.send_notice({"kind": NOTICE, "group": self._name, "from": rank, **what})

    def hear(self, sender: int, notice: dict[str, Any]) -> None:
        """Handle a notice of a rank of this group (or what this rank has told the others)."""
        if self.error is not None:
            return
        if "verdict" in notice:
            kind = DisagreementError if notice["differ"] else StallError
            self.fail(kind(f"{self._runtime.where}: {notice['verdict']}"))
            return
        number, overdue_s = notice["ask"], notice["overdue_s"]
        if self._inquiry is None or self._inquiry.number > number:
            place = self._place(number)
            self._inquiry = _Inquiry(
                number, overdue_s, time.monotonic(), {self._exchange.rank: place}
            )
            self._tell({"ask": number, "overdue_s": overdue_s, "place": place})
            self.polls = True
            self._serve(True)
        if "place" in notice and self._inquiry.number == number:
            self._inquiry.places[sender] = notice["place"]

    def _place(self, number: int) -> str:
        if number <= self._number:
            return self._texts.get(number, "long past it")
        last = f", after {self._texts[self._number]}" if self._number else ""
        return f"has not called it{last}"

    def _judge(self, inquiry: _Inquiry, now: float) -> None:
        """Compose the text if it is this rank's turn."""
        size, rank = self._exchange.size, self._exchange.rank
        complete = len(inquiry.places) == size
        if now - inquiry.since < rank * _TURN_S + (0.0 if complete else _ANSWER_S):
            return
        ranks: dict[str, list[str]] = {}
        for peer in range(size):
            place = inquiry.places.get(peer, "does not answer: stopped, killed, or busy")
            ranks.setdefault(place, []).append(str(peer))
        places = "; ".join(
            f"rank{'s' * (len(who) > 1)} {', '.join(who)}: {place}" for place, who in ranks.items()
        )
        what = f"operation {inquiry.number} of {self._name}"
        if inquiry.overdue_s:
            verdict = (
                f"{what} timed out after {inquiry.overdue_s:.1f} s ({places}). Every rank of the "
                "group must call it, in time: look for a call that only some ranks make, or raise "
                "the timeout of init_process_group or new_group"
            )
        else:
            verdict = (
                f"ranks called different operations as {what} ({places}). Every rank of the group "
                "must call the same operations in the same order with the same element types and "
                "sizes"
            )
        told = {"verdict": verdict, "differ": not inquiry.overdue_s}
        self._tell(told)
        self.hear(rank, told)

    def close(self) -> None:
        """End the group on this rank."""
        self.fail(closed(self._runtime.where, self._name))
        self._serve(False)
