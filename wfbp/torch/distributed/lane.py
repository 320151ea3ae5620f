"""The communication side of one process group: its operations under way, and how they fail.

Collectives match by their order within the group. On one host ranks compare all of them
(``comm/mpi/exchange``); elsewhere they exchange fingerprints of the first operations and of every
sixteenth, or of all if ``TORCH_DISTRIBUTED_DEBUG`` is ``DETAIL``. A fingerprint covers all earlier
operations too.
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
from wfbp.errors import DisagreementError, PeerError, StallError, WfbpError
from wfbp.runtime.progress.occasional_lane import OccasionalLane
from wfbp.runtime.progress.stall import Members
from wfbp.runtime.runtime import Runtime
from wfbp.torch.distributed.inquiry import Inquiry
from wfbp.torch.distributed.messages import Messages
from wfbp.torch.distributed.operations import GroupOperation

NOTICE = "process group"
"""Kind of the notices of all lanes, which name their group."""

_ALWAYS_CHECKED, _CHECKED_EVERY = 16, 16
_HISTORY = 256
_LOOK_S = 0.02
_LEFT_GRACE_S = 2.0


class GroupLane(OccasionalLane):
    """The collectives and messages of one group, under the progress lock."""

    def __init__(self, runtime: Runtime, exchange: Exchange, name: str, check_all: bool) -> None:
        super().__init__(runtime.thread.loop, Members(-1, tuple(sorted(exchange.ranks))))
        self.backend: Backend = exchange.backend
        self.error: WfbpError | None = None
        self.messages = Messages(exchange.mailbox)
        self.polls = False  # messages are under way, or ranks exchange places
        self._runtime, self._exchange, self._name = runtime, exchange, name
        self._check_all = check_all
        # Collectives: not begun, compared, and under way.
        self._queue: deque[GroupOperation] = deque()
        self._checking: tuple[GroupOperation, Work[list[bytes]]] | None = None
        self._in_flight: list[tuple[GroupOperation, Work[Any]]] = []
        self._exchanged: list[tuple[GroupOperation, Work[Any]]] = []  # messages
        self._left_since: dict[int, float] = {}
        self._texts: dict[int, str] = {}  # of the last collectives
        self._number = self._fingerprint = 0
        self._activity = -1
        self._look_s = 0.0
        self._inquiry: Inquiry | None = None

    def submit(self, operation: GroupOperation) -> None:
        """Begin a collective after those before it."""
        if self.error is not None:
            operation.work.complete(self.error)
            return
        self._number += 1
        # 31 bits: they travel in a signed word.
        self._fingerprint = zlib.crc32(operation.key.encode(), self._fingerprint) & 0x7FFFFFFF
        operation.number, operation.fingerprint = self._number, self._fingerprint
        self._texts[self._number] = operation.text
        self._texts.pop(self._number - _HISTORY, None)
        self._queue.append(operation)
        self._serve(True)

    def submit_message(self, operation: GroupOperation) -> None:
        """Begin a message at once."""
        if self.error is not None:
            operation.work.complete(self.error)
            return
        self._exchanged.append((operation, operation.begin(self._exchange, 0)))
        self.polls = True
        self._serve(True)

    def advance(self) -> bool:
        progressed = self._start_queued()
        progressed |= self._advance_collectives()
        if self.polls:
            progressed |= self._advance_messages()
        now = time.monotonic()
        if now > self._look_s:
            self._look_s = now + _LOOK_S
            self._look(now)
        if not (self.busy or progressed):
            self._serve(False)
        return progressed

    @property
    def busy(self) -> bool:
        return bool(self._in_flight or self._queue or self._checking) or self.polls

    @property
    def position(self) -> int:
        """Equal on ranks that have done the same; -1 unless the group can be used again."""
        is_clean = self.error is None and not self.busy and self.messages.is_empty
        return self._exchange.position if is_clean else -1

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
        return ", ".join(operation.text for operation, _ in self._exchanged[:3])

    def close(self) -> None:
        """End the group on this rank."""
        self.fail(
            WfbpError(
                f"{self._runtime.where}: {self._name}: the process group was destroyed or "
                "aborted; make a new one"
            )
        )
        self._serve(False)

    def fail(self, error: WfbpError) -> None:
        """End every operation, now and later, with this error."""
        if self.error is not None:
            return
        self.error = error
        pending = self._pending() + [operation for operation, _ in self._exchanged]
        self._in_flight, self._checking, self._exchanged, self._inquiry = [], None, [], None
        self._queue.clear()
        self.polls = False
        self._exchange.abandon()
        for operation in pending:
            operation.work.complete(error)

    def _pending(self) -> list[GroupOperation]:
        """Collectives, the oldest first."""
        checking = [self._checking[0]] if self._checking else []
        return [*(operation for operation, _ in self._in_flight), *checking, *self._queue]

    # Collectives.

    def _start_queued(self) -> bool:
        progressed = False
        if self._checking is not None:
            operation, check = self._checking
            if not check.test():
                return False
            if self._differ(operation, check.result):
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
                self._checking = operation, self.backend.all_gather_bytes(numbers.tobytes())
                break  # ranks start later operations in the same order only after this one
            self._begin(operation)
        return progressed

    def _is_checked(self, operation: GroupOperation) -> bool:
        if self._exchange.checks or self._exchange.size == 1:
            return False
        number, always = operation.number, self._check_all or bool(operation.sent)
        return always or number <= _ALWAYS_CHECKED or number % _CHECKED_EVERY == 0

    def _differ(self, operation: GroupOperation, payloads: Sequence[bytes]) -> bool:
        """Whether ranks are in different operations, or send others than this one expects."""
        numbers = [np.frombuffer(payload, np.int64).tolist() for payload in payloads]
        if any(found[0] != operation.fingerprint for found in numbers):
            return True
        sent = [found[1 + self._exchange.rank] for found in numbers] if operation.sent else []
        return sent != list(operation.expected)

    def _begin(self, operation: GroupOperation) -> None:
        self._in_flight.append((operation, operation.begin(self._exchange, operation.fingerprint)))

    def _advance_collectives(self) -> bool:
        progressed, activity = False, self.backend.activity
        for operation, work in list(self._in_flight):
            if work.test():
                self._in_flight.remove((operation, work))
                _finish(operation)
                progressed = True
            elif work.mismatch:
                self._inquire(operation.number, 0.0)
            elif activity == self._activity:
                break  # nothing has moved, so only the first test was needed
        self._activity = activity
        return progressed

    # Messages.

    def _advance_messages(self) -> bool:
        progressed, now = self.messages.read(), time.monotonic()
        for operation, work in list(self._exchanged):
            error: WfbpError | None = None
            try:
                if not work.test() and (error := self._lateness(operation, now)) is None:
                    continue
            except DisagreementError as problem:
                error = DisagreementError(f"{self._where(operation)} {problem}")
            self._exchanged.remove((operation, work))
            if error is None:
                _finish(operation)
            else:
                operation.work.complete(error)
            progressed = True
        self.polls = bool(self._exchanged or self._inquiry) or self.messages.sending
        return progressed

    def _lateness(self, operation: GroupOperation, now: float) -> WfbpError | None:
        """The error of a message that is overdue, or whose other rank has left."""
        if now > operation.work.deadline_s:
            return StallError(
                f"{self._where(operation)} timed out; the other rank must make the matching call "
                "in time: raise the timeout of init_process_group or new_group if it needs longer"
            )
        left = self._loop.watch.left
        peer = -1 if operation.peer is None else self._exchange.ranks[operation.peer]
        if peer in left and now - self._left_since.setdefault(peer, now) > _LEFT_GRACE_S:
            return PeerError(
                f"{self._where(operation)} waits, but rank {peer} {left[peer]}; let both ranks "
                "exchange equally many messages"
            )
        return None

    def _where(self, operation: GroupOperation) -> str:
        return f"{self._runtime.where}: {operation.text} of {self._name}"

    # When collectives differ, or one is overdue.

    def _look(self, now: float) -> None:
        if self._inquiry is not None:
            if self._inquiry.is_due:
                verdict = self._inquiry.verdict(self._name)
                notice = {"verdict": verdict, "differ": not self._inquiry.overdue_s}
                self._tell(notice)
                self.hear(self._exchange.rank, notice)
            return
        for operation in self._pending():
            if now > operation.work.deadline_s:
                self._inquire(operation.number, now - operation.since)
                return

    def _inquire(self, number: int, overdue_s: float) -> None:
        """Exchange places with the ranks of the group; of several operations, for the first."""
        if self._inquiry is not None and self._inquiry.number <= number:
            return
        if number <= self._number:
            place = self._texts.get(number, "long past it")
        else:
            last = f", after {self._texts[self._number]}" if self._number else ""
            place = f"has not called it{last}"
        self._inquiry = Inquiry(self._exchange.rank, self._exchange.size, number, overdue_s)
        self._inquiry.places[self._exchange.rank] = place
        self._tell({"ask": number, "overdue_s": overdue_s, "place": place})
        self.polls = True
        self._serve(True)

    def _tell(self, what: dict[str, Any]) -> None:
        rank = self._exchange.rank
        self._loop.send_notice({"kind": NOTICE, "group": self._name, "from": rank, **what})

    def hear(self, sender: int, notice: dict[str, Any]) -> None:
        """Handle a notice of a rank of this group."""
        if self.error is not None:
            return
        if "verdict" in notice:
            kind = DisagreementError if notice["differ"] else StallError
            self.fail(kind(f"{self._runtime.where}: {notice['verdict']}"))
            return
        self._inquire(notice["ask"], notice["overdue_s"])
        if self._inquiry is not None and self._inquiry.number == notice["ask"]:
            self._inquiry.places[sender] = notice["place"]


def _finish(operation: GroupOperation) -> None:
    """Complete an operation; its caller gets the error of what is left to do, if any."""
    try:
        operation.finish()
    except Exception as error:
        operation.work.complete(error)
    else:
        operation.work.complete()
