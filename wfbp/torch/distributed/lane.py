"""The communication side of one process group: its operations under way, and how they fail.

Collectives match by their order within the group. On one host ranks compare all of them
(``comm/mpi/exchange``); elsewhere they exchange fingerprints of the first operations and of every
sixteenth, or of all if ``TORCH_DISTRIBUTED_DEBUG`` is ``DETAIL``. A fingerprint covers all earlier
operations too.

If operations differ, or one is overdue, the ranks of the group tell each other their places. The
first of them that has heard enough composes one text, and the group fails with it on all ranks.
(``runtime/progress/stall`` judges waits of the whole runtime, and ends it; other groups go on.)
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from wfbp.comm.backend import Backend, Work
from wfbp.comm.mpi.exchange import Exchange
from wfbp.core.ranks import name_values
from wfbp.errors import DisagreementError, StallError, WfbpError
from wfbp.runtime.progress.loop import LaneProtocol
from wfbp.runtime.progress.stall import Members
from wfbp.runtime.runtime import Runtime
from wfbp.torch.distributed.messages import GroupMessage
from wfbp.torch.distributed.operations import GroupCollective

NOTICE = "process group"
"""Kind of the notices of all lanes, which name their group."""

_ALWAYS_CHECKED, _CHECKED_EVERY = 16, 16
_HISTORY = 256
_LOOK_S = 0.02
_ANSWER_S, _TURN_S = 1.0, 0.5
"""How long ranks wait for each other's places, and then for the ranks before them to judge."""


class GroupLane(LaneProtocol):
    """The collectives and messages of one group, under the progress lock."""

    def __init__(self, runtime: Runtime, exchange: Exchange, name: str, check_all: bool) -> None:
        self._loop = runtime.thread.loop
        self._members = Members(-1, tuple(sorted(exchange.ranks)))
        self.backend: Backend = exchange.backend
        self.error: WfbpError | None = None
        self._runtime, self._exchange, self._name = runtime, exchange, name
        self._check_all = check_all
        # Collectives: not begun, or still being compared, and under way.
        self._queue: deque[GroupCollective] = deque()
        self._check: Work[list[bytes]] | None = None  # of the first in the queue
        self._in_flight: list[tuple[GroupCollective, Work[Any]]] = []
        self._texts: dict[int, str] = {}  # of the last collectives
        self._number = self._fingerprint = 0
        self._activity = -1
        self._messages: list[GroupMessage] = []
        self._look_s = 0.0
        # When collectives differ, or one is overdue: its number, and for how long ("overdue_s", 0
        # if they differ), when ranks began to ask each other about it, and their places.
        self._inquiry: dict[str, Any] | None = None
        self._inquiry_s = 0.0
        self._places: dict[int, str] = {}

    def submit(self, operations: Sequence[GroupCollective | GroupMessage]) -> None:
        """Begin messages at once, and collectives after those before them."""
        for operation in operations:
            if self.error is not None:
                operation.complete(self.error)
                continue
            if isinstance(operation, GroupMessage):
                operation.begin()
                self._messages.append(operation)
            else:
                self._number += 1
                # 31 bits: they travel in a signed word.
                key = operation.key.encode()
                self._fingerprint = zlib.crc32(key, self._fingerprint) & 0x7FFFFFFF
                operation.number, operation.fingerprint = self._number, self._fingerprint
                self._texts[self._number] = operation.text
                self._texts.pop(self._number - _HISTORY, None)
                self._queue.append(operation)
            self._loop.add_lane(self, self._members)

    def advance(self) -> bool:
        progressed = self._start_queued()
        progressed |= self._advance_collectives()
        unmatched: list[GroupMessage] = []
        for message in list(self._messages):
            if message.advance(unmatched):
                self._messages.remove(message)
                progressed = True
            elif not message.is_matched:
                unmatched.append(message)
        now = time.monotonic()
        if now > self._look_s:
            self._look_s = now + _LOOK_S
            self._look(now)
        if not (self.busy or progressed):
            self._loop.remove_lane(self)
        return progressed

    @property
    def polls(self) -> bool:
        return bool(self._messages or self._inquiry)

    @property
    def busy(self) -> bool:
        return bool(self._in_flight or self._queue) or self.polls

    @property
    def waiting_since(self) -> float | None:
        # Of collectives: ranks that a message does not concern may leave.
        pending = self._pending()
        if not pending:
            return None
        # The group has its own limit: the runtime's must not end the job before.
        youngest = time.monotonic() - 0.9 * self._runtime.config.timeout_s
        return max(pending[0].since, youngest)

    def describe(self) -> str:
        pending = self._pending()
        if pending:
            return f"{pending[0].text}, operation {pending[0].number} of {self._name}"
        return ", ".join(message.text for message in self._messages[:3])

    def fail(self, error: WfbpError) -> None:
        """End every operation, now and later, with this error."""
        if self.error is not None:
            return
        self.error = error
        collectives, messages = self._pending(), self._messages
        self._in_flight, self._messages, self._check, self._inquiry = [], [], None, None
        self._queue.clear()
        self._exchange.channel.abandon()
        for collective in collectives:
            collective.complete(error)
        for message in messages:
            message.abandon(error)

    def _pending(self) -> list[GroupCollective]:
        """Collectives, the oldest first."""
        return [*(operation for operation, _ in self._in_flight), *self._queue]

    def _start_queued(self) -> bool:
        progressed = False
        while self._queue and self._inquiry is None:
            operation = self._queue[0]
            if not self._agrees(operation):
                break  # ranks start later operations in the same order only after this one
            self._queue.popleft()
            self._in_flight.append((operation, operation.begin(operation.fingerprint)))
            del operation.begin  # and with it the memory of what is sent
            progressed = True
        return progressed

    def _agrees(self, operation: GroupCollective) -> bool:
        """Whether ranks need not compare this operation, or have compared it without difference."""
        number, exchange = operation.number, self._exchange
        is_sampled = number <= _ALWAYS_CHECKED or number % _CHECKED_EVERY == 0
        is_due = is_sampled or self._check_all or operation.sent
        if not is_due or exchange.checks or exchange.size == 1:
            return True
        if self._check is None:
            numbers = np.array([operation.fingerprint, *operation.sent], np.int64)
            self._check = self.backend.all_gather_bytes(numbers.tobytes())
        if not self._check.test():
            return False
        found = [np.frombuffer(payload, np.int64).tolist() for payload in self._check.result]
        self._check = None
        agree = all(each[0] == operation.fingerprint for each in found)
        if agree and operation.sent:
            agree = [each[1 + exchange.rank] for each in found] == list(operation.expected)
        if not agree:
            self._inquire(number, 0.0)
        return agree

    def _advance_collectives(self) -> bool:
        progressed, activity = False, self.backend.activity
        for operation, work in list(self._in_flight):
            if work.test():
                self._in_flight.remove((operation, work))
                operation.complete()
                progressed = True
            elif work.mismatch:
                self._inquire(operation.number, 0.0)
            elif activity == self._activity:
                break  # nothing has moved, so only the first test was needed
        self._activity = activity
        return progressed

    # When collectives differ, or one is overdue.

    def _look(self, now: float) -> None:
        if self._inquiry is None:
            for operation in self._pending():
                if now > operation.deadline_s:
                    self._inquire(operation.number, now - operation.since)
                    return
            return
        grace_s = 0.0 if len(self._places) == self._exchange.size else _ANSWER_S
        if now - self._inquiry_s > self._exchange.rank * _TURN_S + grace_s:
            self._tell(verdict=self._verdict(**self._inquiry))

    def _inquire(self, number: int, overdue_s: float) -> None:
        """Tell the ranks of the group this one's place; of several operations, for the first."""
        if self._inquiry is not None and self._inquiry["number"] <= number:
            return
        self._inquiry = {"number": number, "overdue_s": overdue_s}
        self._inquiry_s, self._places = time.monotonic(), {}
        if number <= self._number:
            place = self._texts.get(number, "long past it")
        else:
            last = f", after {self._texts[self._number]}" if self._number else ""
            place = f"has not called it{last}"
        self._loop.add_lane(self, self._members)
        self._tell(place=place)

    def _tell(self, **news: str) -> None:
        """Tell all ranks of the group, this one first, its place or a verdict."""
        assert self._inquiry is not None
        notice = {"kind": NOTICE, "group": self._name, "from": self._exchange.rank}
        notice |= {**self._inquiry, **news}
        self._loop.send_notice(notice)
        self.hear(notice)

    def hear(self, notice: dict[str, Any]) -> None:
        """Handle a notice of a rank of this group."""
        if self.error is not None:
            return
        number, overdue_s = notice["number"], notice["overdue_s"]
        if "verdict" in notice:
            kind = StallError if overdue_s else DisagreementError
            self.fail(kind(f"{self._runtime.where}: {notice['verdict']}"))
            return
        self._inquire(number, overdue_s)
        if self._inquiry is not None and self._inquiry["number"] == number:
            self._places[notice["from"]] = notice["place"]

    def _verdict(self, number: int, overdue_s: float) -> str:
        """The error: its cause, the place of every rank, and the remedy."""
        silent = "does not answer: stopped, killed, or busy"
        ranks = range(self._exchange.size)
        places = name_values({rank: self._places.get(rank, silent) for rank in ranks})
        what = f"operation {number} of {self._name}"
        if overdue_s:
            return (
                f"{what} timed out after {overdue_s:.1f} s ({places}). Every rank must call it in "
                "time: look for a call that only some ranks make, or raise the group's timeout"
            )
        return (
            f"ranks called different operations as {what} ({places}). Every rank of the group must "
            "call the same operations in the same order with the same element types and sizes"
        )
