"""Carries named operations out: negotiation and data of one process set.

Each set has a communicator of its own for data and another one for messages. Requests go to rank 0
of the set, which is the coordinator, and responses come back, many in one message where many are
due. While nothing is pending on a rank, it sends and reads nothing: an operation becomes ready only
once every rank has submitted it (or joined, which is pending until all have), so nothing that
arrives before is of any use.

Operations on tensors of a device go by that device where all ranks can
(:mod:`~wfbp.runtime.collectives.device_operations`), the others through the host, each sort in the
order of the answers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from wfbp.comm.backend import Backend, Finished, HostBackend, Mailbox, Work, word_dtype
from wfbp.core.types import Op
from wfbp.errors import DisagreementError, WfbpError
from wfbp.runtime.collectives.arithmetic import (
    ITEM,
    adasum,
    carried,
    deliver,
    equal_rows,
    scale,
)
from wfbp.runtime.collectives.coordinator import Coordinator
from wfbp.runtime.collectives.device_operations import DeviceOperations
from wfbp.runtime.collectives.request import (
    Adaptive,
    Kind,
    Request,
    Response,
    Route,
    decode_requests,
    decode_responses,
    encode_requests,
    encode_responses,
)
from wfbp.runtime.collectives.submission import Outcome, Submission
from wfbp.runtime.progress.stall import ALL_RANKS, Members
from wfbp.runtime.progress.thread import CommunicationThread
from wfbp.runtime.timeline import TraceWriter

_FUSED_BYTES = 1 << 20
"""Reductions that become ready together travel as one message of up to this size."""

_MAX_TESTED = 8
"""How many of the operations under way are tested in one turn; the oldest end first."""

_STANDSTILL_S = 0.5
"""So long all programs may wait in different operations: other threads may submit these, too."""

JOIN = ""
"""Name of the one join that may be pending; no other operation has it."""


class UnmatchedError(DisagreementError):
    """Ranks wait in different operations; to all of them it is as if they had submitted none."""


_Finish = Callable[[], None]


class NamedLane:
    """A lane of the communication thread for the named operations of one process set.

    All methods run under the progress lock. It is served only while something is pending.

    Args:
        thread: serves it.
        backend: data; nobody else uses it.
        mailbox: requests and responses.
        name: of the process set, for messages; empty for that of all ranks.
        where: who this is, for messages ("rank 1 of 4").
        members: the ranks of the set.
        devices: carries operations out on a device; None where all go through the host.
    """

    def __init__(
        self,
        thread: CommunicationThread,
        backend: HostBackend,
        mailbox: Mailbox,
        name: str,
        where: str,
        members: Members = ALL_RANKS,
        devices: DeviceOperations | None = None,
    ) -> None:
        self.backend: Backend = backend
        self._data = backend
        self._thread = thread
        self._mailbox = mailbox
        self._name = name
        self._where = where
        self._members = members
        self._coordinator = Coordinator(backend.size) if backend.rank == 0 else None
        self._pending: dict[str, Submission] = {}
        self._outbox: list[Request] = []
        self._devices = devices
        self._due: deque[list[Response]] = deque()
        """Through the host, in order; elements of the first may be on their way from a device."""
        self._running: deque[tuple[Work[None], _Finish]] = deque()
        self._served = False
        self._moved_s = 0.0
        self._still_since_s: float | None = None
        self.timeline: TraceWriter | None = None

    def submit(self, submission: Submission) -> None:
        """Begin an operation; its name is not pending."""
        self._pending[submission.request.name] = submission
        self._outbox.append(submission.request)
        if not self._served:
            self._served = True
            self._thread.loop.add_lane(self, members=self._members)

    def advance(self) -> bool:
        progressed = self._negotiate() | self._start_due()
        if self._devices is not None:
            progressed |= self._devices.advance()
        tested = 0
        while self._running and tested < _MAX_TESTED:
            work, finish = self._running[0]
            if not work.test():
                break
            self._running.popleft()
            finish()
            tested += 1
            progressed = True
        if progressed:
            self._moved_s = time.monotonic()
        elif self._served and not self.busy and (self._devices is None or self._devices.is_done):
            self._served = False
            self._thread.loop.remove_lane(self)
        return progressed

    def note_progress(self) -> None:
        """What is pending is not given up: the ranks that it waits for are at work. Any thread."""
        self._moved_s = time.monotonic()

    def close(self) -> None:
        """Give the communicators back; collective over the set, and nothing may be pending."""
        if self._served:  # since its last operation there was no turn that found nothing to do
            self._served = False
            self._thread.loop.remove_lane(self)
        if self._devices is not None:
            self._devices.close()
        self._mailbox.close()
        self.backend.close()

    def may_progress(self) -> bool:
        return True

    def rest(self, nap_s: float, most_s: float) -> bool:
        return False  # what other ranks have to say has to be read

    @property
    def busy(self) -> bool:
        launching = self._devices is not None and self._devices.busy
        return bool(self._pending or self._running) or launching or self._mailbox.sending

    @property
    def owes_work(self) -> bool:
        launching = self._devices is not None and self._devices.busy
        owed = bool(self._running or self._outbox or self._due)
        return owed or launching or self._mailbox.sending

    has_events = False
    has_room = False
    expected_s: float | None = None

    @property
    def waiting_since(self) -> float | None:
        waits = []
        if self._pending:
            waits.append(max(next(iter(self._pending.values())).since, self._moved_s))
        if self._devices is not None and (on_device := self._devices.oldest) is not None:
            waits.append(on_device[0])
        return min(waits, default=None)

    def describe(self) -> str:
        parts = []
        pending = [submission.request.label for submission in self._pending.values()]
        if pending:
            more = f" and {len(pending) - 3} more" if len(pending) > 3 else ""
            of_set = f" of the {self._name}" if self._name else ""
            parts.append(f"in {', '.join(pending[:3])}{more}{of_set}")
        if self._devices is not None and (on_device := self._devices.oldest) is not None:
            parts.append(on_device[1])
        return "; ".join(parts) or "no named operation pending"

    def fail(self, error: WfbpError) -> None:
        pending, self._pending = self._pending, {}
        self._running.clear()
        self._outbox.clear()
        self._due.clear()
        if self._devices is not None:
            self._devices.fail()
        for submission in pending.values():
            submission.reply.fail(error)

    # Negotiation.

    def _negotiate(self) -> bool:
        """Send what was submitted, read what has arrived, start what is ready."""
        outbox = self._outbox
        if outbox:
            self._outbox = []
            if self._devices is not None:
                outbox = [self._devices.describe(request) for request in outbox]
            if self._coordinator is None or self._mailbox.echoes:
                self._mailbox.send(0, encode_requests(outbox))
        elif not (self._pending or self._mailbox.sending):
            return False
        arrived = self._mailbox.receive()
        if self._coordinator is None:
            for _, payload in arrived:
                self._start_all(decode_responses(payload))
            return bool(outbox or arrived)
        for rank, payload in arrived:
            for request in decode_requests(payload):
                self._coordinator.add(rank, request)
        for request in outbox:
            self._coordinator.add(0, request)
        moved = bool(outbox or arrived)
        moved |= self._coordinator.stands_still and self._refuse_late(self._coordinator)
        if moved:
            self._answer([self._routed(response) for response in self._coordinator.take()])
        return moved

    def _refuse_late(self, coordinator: Coordinator) -> bool:
        """Refuse what programs wait in, where they have stood still for long; whether it did."""
        now = time.monotonic()
        since = self._still_since_s
        if since is None or since < self._moved_s:
            self._still_since_s = now
            return False
        if now - since < _STANDSTILL_S:
            return False
        self._still_since_s = None
        coordinator.refuse_waiting()
        return True

    def _answer(self, responses: Sequence[Response]) -> None:
        """Tell all ranks what they have come to, and start it here."""
        if not responses:
            return
        if self.backend.size > 1:
            payload = encode_responses(responses)
            for rank in range(1, self.backend.size):
                self._mailbox.send(rank, payload)
        self._start_all(responses)

    def _routed(self, response: Response) -> Response:
        """An answer that says which way its operation goes."""
        if response.route is Route.HOST:
            return response
        if self._devices is None:
            return replace(response, route=Route.HOST)
        return self._devices.route(response)

    # Data.

    def _start_all(self, responses: Sequence[Response]) -> None:
        """Start what one message of the coordinator tells: what is fused must not depend on when
        messages are read."""
        if self.timeline is not None:
            self.timeline.cycle()
        for response in responses:
            if response.result is not None:
                self._deliver(response, response.result)
        for together in _fusible([each for each in responses if each.result is None]):
            if self._devices is not None and self._devices.opens(together[0].route):
                self._launch(self._devices, together)
            else:
                self._due.append(together)
        self._start_due()

    def _deliver(self, response: Response, result: bytes) -> None:
        """Complete an operation that the coordinator has carried out."""
        submission = self._pending.pop(response.request.name, None)
        if submission is None:  # it has joined
            return
        if self.timeline is not None:
            _recorded(_nothing, self.timeline, [submission], time.monotonic())()
        request, data = submission.request, submission.data
        deliver(result, data, request.dtype, Op(request.op))
        scale(data, request.dtype, request.postscale)
        submission.reply.put(Outcome(data, differentiable=response.differentiable))

    def _launch(self, devices: DeviceOperations, responses: Sequence[Response]) -> None:
        """Start operations on the device."""
        submissions = [self._take(response.request) for response in responses]
        note: _Finish = _nothing
        if self.timeline is not None:
            note = _recorded(note, self.timeline, submissions, time.monotonic())
        devices.launch(submissions, responses, note)

    def _start_due(self) -> bool:
        """Start operations through the host, up to the first of which elements are not there."""
        progressed = False
        while self._due and self._is_on_host(self._due[0]):
            self._start(self._due.popleft())
            progressed = True
        return progressed

    def _is_on_host(self, responses: Sequence[Response]) -> bool:
        if self._devices is None or responses[0].error:
            return True
        pending = (self._pending.get(response.request.name) for response in responses)
        return self._devices.stage([each for each in pending if each is not None])

    def _start(self, responses: Sequence[Response]) -> None:
        """Start operations that all ranks have come to; several are reductions of one sort."""
        first = responses[0]
        if first.error:
            if first.unmatched and self._data.rank not in first.extents[0]:
                return  # its own request may be on the way, and counts
            own = self._pending.pop(first.request.name, None)
            if own is not None:  # None: it has joined
                kind = UnmatchedError if first.unmatched else DisagreementError
                own.reply.fail(kind(f"{self._where}: {first.error}"))
            return
        submissions = [self._take(response.request) for response in responses]
        if first.request.kind is Kind.ALLREDUCE and first.request.op != Adaptive.ADASUM.value:
            self._reduce(submissions, responses)
            return
        start = {
            Kind.ALLREDUCE: self._adasum,
            Kind.ALLGATHER: self._gather,
            Kind.BROADCAST: self._broadcast,
            Kind.ALLTOALL: self._exchange,
            Kind.REDUCESCATTER: self._scatter,
            Kind.BARRIER: self._meet,
            Kind.JOIN: self._meet,
        }[first.request.kind]
        start(submissions[0], first)

    def _take(self, request: Request) -> Submission:
        """This rank's part of an operation: zeros where it has joined instead."""
        if request.name in self._pending:
            return self._pending.pop(request.name)
        numel = int(np.prod(request.shape, dtype=np.int64))
        return Submission(request, np.zeros(numel, word_dtype(request.dtype or "uint8")))

    def _run(self, work: Work[None], finish: _Finish, submissions: Sequence[Submission]) -> None:
        timeline = self.timeline
        if timeline is not None:
            finish = _recorded(finish, timeline, submissions, time.monotonic())
        self._running.append((work, finish))

    def _meet(self, submission: Submission, response: Response) -> None:
        rows = response.extents[0] if response.extents else ()
        self._run(
            Finished(None),
            partial(submission.reply.put, Outcome(submission.data, rows)),
            [submission],
        )

    def _reduce(self, submissions: Sequence[Submission], responses: Sequence[Response]) -> None:
        request = responses[0].request
        for each in submissions:
            _scale_before(each)
        parts = [each.data for each in submissions]
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
        buffer, dtype, op = carried(whole, request.dtype, Op(request.op))
        if self._data.copies_segments(buffer):
            # A gradient in a fusion buffer, which may lie elsewhere on other ranks: their messages
            # would go another way.
            buffer = buffer.copy()

        def finish() -> None:
            if buffer is not whole:
                np.copyto(whole, buffer, casting="unsafe")
            scale(whole, request.dtype, request.postscale)
            end = 0
            for each, response in zip(submissions, responses, strict=True):
                start, end = end, end + each.data.size
                if each.data is not whole:
                    each.data[:] = whole[start:end]
                each.reply.put(Outcome(each.data, differentiable=response.differentiable))

        self._run(self._data.all_reduce(buffer, dtype, op), finish, submissions)

    def _adasum(self, submission: Submission, response: Response) -> None:
        request, data, size = response.request, submission.data, self._data.size
        scale(data, request.dtype, request.prescale)
        everything = np.empty((size, data.size), data.dtype)
        everything[self._data.rank] = data
        raw = everything.reshape(-1).view(np.uint8)

        def finish() -> None:
            data[:] = adasum(list(everything), request.dtype)
            scale(data, request.dtype, request.postscale)
            submission.reply.put(Outcome(data, differentiable=response.differentiable))

        self._run(self._data.all_gather(raw, [data.nbytes] * size), finish, [submission])

    def _scatter(self, submission: Submission, response: Response) -> None:
        request = response.request
        _scale_before(submission)
        buffer, dtype, op = carried(submission.data, request.dtype, Op(request.op))
        rows = request.splits or equal_rows(request.shape[0], self._data.size)
        numels = [count * _row_numel(request) for count in rows]
        start = sum(numels[: self._data.rank])
        mine = slice(start, start + numels[self._data.rank])

        def finish() -> None:
            result = buffer[mine].astype(submission.data.dtype)
            scale(result, request.dtype, request.postscale)
            submission.reply.put(Outcome(result, rows, response.differentiable))

        counts = [numel * buffer.itemsize for numel in numels]
        self._run(self._data.reduce_scatter(buffer, counts, dtype, op), finish, [submission])

    def _gather(self, submission: Submission, response: Response) -> None:
        rows = tuple(extent[0] for extent in response.extents)
        row_bytes = _row_numel(submission.request) * submission.data.itemsize
        counts = [count * row_bytes for count in rows]
        gathered = np.empty(sum(counts), np.uint8)
        start = sum(counts[: self._data.rank])
        gathered[start : start + submission.data.nbytes] = submission.data.view(np.uint8)
        outcome = Outcome(gathered, rows, response.differentiable)
        self._run(
            self._data.all_gather(gathered, counts),
            partial(submission.reply.put, outcome),
            [submission],
        )

    def _broadcast(self, submission: Submission, response: Response) -> None:
        outcome = Outcome(submission.data, differentiable=response.differentiable)
        work = self._data.broadcast(submission.data.view(np.uint8), response.request.root)
        self._run(work, partial(submission.reply.put, outcome), [submission])

    def _exchange(self, submission: Submission, response: Response) -> None:
        row_bytes = _row_numel(submission.request) * submission.data.itemsize
        rows = tuple(splits[self._data.rank] for splits in response.extents)
        received = [count * row_bytes for count in rows]
        incoming = np.empty(sum(received), np.uint8)
        sent = [count * row_bytes for count in submission.request.splits]
        outcome = Outcome(incoming, rows, response.differentiable)
        work = self._data.all_to_all(submission.data.view(np.uint8), sent, incoming, received)
        self._run(work, partial(submission.reply.put, outcome), [submission])


def _recorded(
    finish: _Finish, timeline: TraceWriter, submissions: Sequence[Submission], ready_s: float
) -> _Finish:
    def record() -> None:
        for each in submissions:
            request = each.request
            timeline.operation(request.kind.value, request.name, each.since, ready_s)
        finish()

    return record


def _nothing() -> None: ...


def _scale_before(submission: Submission) -> None:
    """Multiply what this rank contributes, unless that was done on a device."""
    if submission.placed is None:
        scale(submission.data, submission.request.dtype, submission.request.prescale)


def _row_numel(request: Request) -> int:
    return int(np.prod(request.shape[1:], dtype=np.int64))


def _fusible(responses: Sequence[Response]) -> list[list[Response]]:
    """Runs of responses that can travel as one message; the same on every rank."""
    if len(responses) < 2:
        return [[response] for response in responses]
    runs: list[list[Response]] = []
    sort: object = None
    room = 0
    for response in responses:
        request = response.request
        numel = int(np.prod(request.shape, dtype=np.int64))
        nbytes = numel * ITEM.get(request.dtype, 1)
        fusible = (
            request.kind is Kind.ALLREDUCE
            and request.op != Adaptive.ADASUM.value
            and not response.error
        )
        mine = (request.dtype, request.op, request.prescale, request.postscale, response.route)
        if fusible and mine == sort and nbytes <= room:
            runs[-1].append(response)
            room -= nbytes
        else:
            runs.append([response])
            sort, room = (mine if fusible else None), _FUSED_BYTES - nbytes
    return runs
