"""The communication side of one process group: its operations under way, and how they fail.

Collectives match by their order within the group. On one host ranks compare all of them
(``comm/mpi/group_exchange``); elsewhere they exchange fingerprints of the first operations and of
every sixteenth, or of all if ``TORCH_DISTRIBUTED_DEBUG`` is ``DETAIL``. A fingerprint covers all
earlier operations too.

If operations differ, or one is overdue, the ranks of the group tell each other their places. The
first of them that has heard enough composes one text, and the group fails with it on all ranks.
(``runtime/progress/stall`` judges waits of the whole runtime, and ends it; other groups go on.)
"""

from __future__ import annotations

import math
import time
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wfbp.comm.backend import Backend, Work
from wfbp.comm.mpi.group_exchange import GroupExchange
from wfbp.core.ranks import name_values
from wfbp.errors import DisagreementError, StallError, WfbpError
from wfbp.runtime.progress.loop import LaneProtocol, needs_of
from wfbp.runtime.progress.stall import Members, Need
from wfbp.runtime.runtime import Runtime
from wfbp.torch.distributed.group_collectives import GroupCollective
from wfbp.torch.distributed.group_messages import GroupMessage

NOTICE = "process group"
"""Kind of the notices of all lanes, which name their group."""

_ALWAYS_CHECKED, _CHECKED_EVERY = 16, 16
_HISTORY = 256
_TESTED = 32
_LOOK_S, _LOOK_PER_MESSAGE_S = 0.02, 2e-5
_ANSWER_S, _TURN_S = 1.0, 0.5
"""How long ranks wait for each other's places, and then for the ranks before them to judge."""


@dataclass(slots=True)
class _Inquiry:
    """What the ranks of a group ask each other about one collective."""

    number: int  # of the collective
    overdue_s: float | None  # since it began; None if ranks have called different operations
    since: float = field(default_factory=time.monotonic)  # when this rank learned of it
    places: dict[int, str] = field(default_factory=dict)  # by rank, as far as they have told


class GroupLane(LaneProtocol):
    """The collectives and messages of one group, under the progress lock."""

    def __init__(
        self, runtime: Runtime, exchange: GroupExchange, name: str, check_all: bool
    ) -> None:
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
        self._moved_s = 0.0  # when a collective last ended
        # Messages under way; receives that no header has reached, by tag; headers, by source and
        # tag, that no call expects yet.
        self._messages: list[GroupMessage] = []
        self._receives: dict[int, list[GroupMessage]] = {}
        self._headers: dict[int, list[tuple[int, str]]] = {}
        self._turn = 0
        self._look_s = 0.0
        self._inquiry: _Inquiry | None = None  # once collectives differ, or one is overdue

    def submit(self, operations: Sequence[GroupCollective | GroupMessage]) -> None:
        """Begin messages at once, and collectives after those before them."""
        for operation in operations:
            if self.error is not None:
                operation.complete(self.error)
                continue
            if isinstance(operation, GroupMessage):
                if operation.receives:
                    self._expect(operation)
                else:
                    operation.send()
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
        while self._receives and (found := self._exchange.next_header()) is not None:
            self._match(*found)
            progressed = True
        progressed |= self._advance_messages()
        now = time.monotonic()
        if now > self._look_s:
            self._look(now)
        if not (self.busy or progressed):
            self._loop.remove_lane(self)
        return progressed

    @property
    def polls(self) -> bool:
        return bool(self._messages or self._receives or self._inquiry)

    @property
    def is_idle(self) -> bool:
        return not (self._in_flight or self._queue or self._messages or self._inquiry)

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
        return max(pending[0].since, self._last_move_s(), youngest)

    def _last_move_s(self) -> float:
        return max([self._moved_s, *(work.moved_s for _, work in self._in_flight)])

    def needs(self, members: Members) -> list[Need] | None:
        works: list[Work[Any]] = [work for _, work in self._in_flight]
        if self._check is not None:
            works.append(self._check)
        found = [needs_of(work, members) for work in works]
        # A program may handle the end of a wait that it has limited, and go on.
        limit_s = self._runtime.config.timeout_s
        is_limited = any(
            operation.timeout_s < limit_s or operation.deadline_s < math.inf
            for operation in self._pending()
        )
        if self.polls or is_limited or None in found or (self._queue and self._check is None):
            return None
        return [need for needs in found for need in needs or ()]

    def describe(self) -> str:
        pending = self._pending()
        if pending:
            return f"{pending[0].text}, operation {pending[0].number} of {self._name}"
        return ", ".join(message.text for message in self._all_messages()[:3])

    def fail(self, error: WfbpError) -> None:
        """End every operation, now and later, with this error."""
        if self.error is not None:
            return
        self.error = error
        collectives, messages = self._pending(), self._all_messages()
        self._receives.clear()
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

    def _all_messages(self) -> list[GroupMessage]:
        """Messages, as far as they are under way, and receives."""
        return [*self._messages, *(each for tag in self._receives.values() for each in tag)]

    def _expect(self, receive: GroupMessage) -> None:
        """Take the next message for a call: one that has arrived, or else a later one."""
        headers = self._headers.get(receive.tag, [])
        for index, (source, header) in enumerate(headers):
            if receive.peer in (None, source):
                del headers[index]
                receive.receive(source, header)
                self._messages.append(receive)
                return
        self._receives.setdefault(receive.tag, []).append(receive)

    def _match(self, source: int, tag: int, header: str) -> None:
        """A header has arrived: it is for the first call that may receive it."""
        receives = self._receives.get(tag, [])
        for index, receive in enumerate(receives):
            if receive.peer in (None, source):
                self._drop_receive(tag, index).receive(source, header)
                self._messages.append(receive)
                return
        self._headers.setdefault(tag, []).append((source, header))

    def _drop_receive(self, tag: int, index: int) -> GroupMessage:
        receive = self._receives[tag].pop(index)
        if not self._receives[tag]:
            del self._receives[tag]
        return receive

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
            self._inquire(number, None)
        return agree

    def _advance_messages(self) -> bool:
        # The oldest, which MPI ends first: an end keeps the loop from napping. And some of the
        # others in turn, so that the time of a look does not grow with their number.
        messages, num = self._messages, len(self._messages)
        self._turn = self._turn + _TESTED if self._turn + _TESTED < num else _TESTED
        tested = [*range(min(_TESTED, num)), *range(self._turn, min(self._turn + _TESTED, num))]
        if not self._exchange.test([each for k in tested for each in messages[k].requests]):
            return False
        ended = [k for k in tested if messages[k].advance()]
        for k in reversed(ended):
            del messages[k]
        return True

    def _advance_collectives(self) -> bool:
        progressed, activity = False, self.backend.activity
        for operation, work in list(self._in_flight):
            if work.test():
                self._in_flight.remove((operation, work))
                self._moved_s = time.monotonic()
                operation.complete()
                progressed = True
            elif work.mismatch:
                self._inquire(operation.number, None)
            elif activity == self._activity:
                break  # nothing has moved, so only the first test was needed
        self._activity = activity
        return progressed

    # When collectives differ, or one is overdue.

    def _look(self, now: float) -> None:
        messages = self._all_messages()
        self._look_s = now + _LOOK_S + _LOOK_PER_MESSAGE_S * len(messages)
        for message in messages:
            if (error := message.lateness(now)) is not None:
                self._messages = [other for other in self._messages if other is not message]
                receives = self._receives.get(message.tag, [])
                if message in receives:
                    self._drop_receive(message.tag, receives.index(message))
                message.abandon(error)
        inquiry = self._inquiry
        if inquiry is None:
            moved_s = self._last_move_s()
            for operation in self._pending():
                limit_s = max(operation.since, moved_s) + operation.timeout_s
                if now > min(operation.deadline_s, limit_s):
                    self._inquire(operation.number, now - operation.since)
                    return
            return
        grace_s = 0.0 if len(inquiry.places) == self._exchange.size else _ANSWER_S
        if now - inquiry.since > self._exchange.rank * _TURN_S + grace_s:
            self._tell(inquiry, verdict=self._verdict(inquiry))

    def _inquire(self, number: int, overdue_s: float | None) -> None:
        """Tell the ranks of the group this one's place; of several operations, for the first."""
        if self._inquiry is not None and self._inquiry.number <= number:
            return
        self._inquiry = _Inquiry(number, overdue_s)
        if number <= self._number:
            place = self._texts.get(number, "long past it")
        else:
            last = f", after {self._texts[self._number]}" if self._number else ""
            place = f"has not called it{last}"
        self._loop.add_lane(self, self._members)
        self._tell(self._inquiry, place=place)

    def _tell(self, inquiry: _Inquiry, **news: str) -> None:
        """Tell all ranks of the group, and this one, its place or a verdict."""
        about = {"number": inquiry.number, "overdue_s": inquiry.overdue_s}
        notice = {"group": self._name, "from": self._exchange.rank, **about, **news}
        self._loop.send_notice(NOTICE, notice, self._exchange.ranks)
        self.hear(notice)

    def hear(self, notice: dict[str, Any]) -> None:
        """Handle a notice of a rank of this group."""
        if self.error is not None:
            return
        number, overdue_s = notice["number"], notice["overdue_s"]
        if "verdict" in notice:
            kind = DisagreementError if overdue_s is None else StallError
            self.fail(kind(f"{self._runtime.where}: {notice['verdict']}"))
            return
        self._inquire(number, overdue_s)
        if self._inquiry is not None and self._inquiry.number == number:
            self._inquiry.places[notice["from"]] = notice["place"]

    def _verdict(self, inquiry: _Inquiry) -> str:
        """The error: its cause, the place of every rank, and the remedy."""
        silent = "does not answer: stopped, killed, or busy"
        ranks = range(self._exchange.size)
        places = name_values({rank: inquiry.places.get(rank, silent) for rank in ranks})
        what = f"operation {inquiry.number} of {self._name}"
        if inquiry.overdue_s is not None:
            return (
                f"{what} timed out after {inquiry.overdue_s:.1f} s ({places}). Every rank must "
                "call it in time: look for a call that only some ranks make, or raise the timeout "
                "of the group"
            )
        return (
            f"ranks called different operations as {what} ({places}). Every rank of the group must "
            "call the same operations in the same order with the same element types and sizes"
        )
