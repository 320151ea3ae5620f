"""Carries named operations out: negotiation and data of one process set.

Each set has a communicator of its own for data and another one for messages. Requests go to rank 0
of the set, which is the coordinator, and responses come back, many in one message where many are
due. While nothing is pending on a rank, it sends and reads nothing: an operation becomes ready only
once every rank has submitted it (or joined, which is pending until all have), so nothing that
arrives before is of any use.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from wfbp.comm.backend import Backend, Buffer, Finished, HostBackend, Mailbox, Work
from wfbp.comm.buffers import word_dtype
from wfbp.core.types import Op
from wfbp.errors import DisagreementError, WfbpError
from wfbp.runtime.collectives.arithmetic import ITEM, adasum, carried, scale
from wfbp.runtime.collectives.coordinator import Coordinator
from wfbp.runtime.collectives.request import (
    Adaptive,
    Kind,
    Request,
    Response,
    decode_requests,
    decode_responses,
    encode,
)
from wfbp.runtime.progress.deadlock import ALL_RANKS, Members
from wfbp.runtime.progress.loop import Reply
from wfbp.runtime.progress.thread import CommunicationThread
from wfbp.runtime.row_collectives import equal_rows
from wfbp.runtime.timeline import Timeline

_FUSED_BYTES = 1 << 20
"""Reductions that become ready together travel as one message of up to this size."""

_MAX_TESTED = 8
"""How many of the operations under way are tested in one turn; the oldest end first."""

JOIN = ""
"""Name of the one join that may be pending; no other operation has it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an operation gives.

    Args:
        data: flat; elements of the operation's storage type, or bytes of what was gathered.
        rows: per rank what was gathered or received; of a join the last rank.
        differentiable: whether any rank wants to differentiate the result.
    """

    data: Buffer
    rows: tuple[int, ...] = ()
    differentiable: bool = False


@dataclass(slots=True)
class Submission:
    """An operation that this rank's program has submitted.

    Args:
        request: as the coordinator sees it.
        data: this rank's elements, flat, in their storage type; private to the operation, which
            leaves the result of a reduction or broadcast in it.
        reply: gets the outcome, or an error.
        since: when it was submitted (``time.monotonic``).
    """

    request: Request
    data: Buffer
    reply: Reply[Outcome] = field(default_factory=Reply)
    since: float = field(default_factory=time.monotonic)


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
    """

    def __init__(
        self,
        thread: CommunicationThread,
        backend: HostBackend,
        mailbox: Mailbox,
        name: str,
        where: str,
        members: Members = ALL_RANKS,
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
        self._running: deque[tuple[Work[None], _Finish]] = deque()
        self._served = False
        self._moved_s = 0.0
        self.timeline: Timeline | None = None

    def submit(self, submission: Submission) -> None:
        """Begin an operation; its name is not pending."""
        self._pending[submission.request.name] = submission
        self._outbox.append(submission.request)
        if not self._served:
            self._served = True
            self._thread.loop.add_lane(self, members=self._members)

    def advance(self) -> bool:
        progressed = self._negotiate()
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
        elif self._served and not self.busy:
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
        self._mailbox.close()
        self.backend.close()

    def may_progress(self) -> bool:
        return True

    def rest(self, nap_s: float, most_s: float) -> bool:
        return False  # what other ranks have to say has to be read

    @property
    def busy(self) -> bool:
        return bool(self._pending or self._running)

    @property
    def owes_work(self) -> bool:
        return bool(self._running or self._outbox)

    has_events = False
    has_room = False
    counts = (0, 0)
    expected_s: float | None = None

    @property
    def waiting_since(self) -> float | None:
        if not self._pending:
            return None
        return max(next(iter(self._pending.values())).since, self._moved_s)

    def describe(self) -> str:
        pending = [submission.request.label for submission in self._pending.values()]
        if not pending:
            return "no named operation pending"
        more = f" and {len(pending) - 3} more" if len(pending) > 3 else ""
        text = f"in {', '.join(pending[:3])}{more}"
        return f"{text} of the {self._name}" if self._name else text

    def awaited(self, reply: Reply[Outcome]) -> str:
        """Name of the pending operation that has this reply; empty if there is none."""
        # Another thread may submit at this moment; then the place has changed anyway.
        for name, submission in list(self._pending.items()):
            if submission.reply is reply:
                return name
        return ""

    @property
    def pending(self) -> tuple[str, ...]:
        """Names of all pending operations."""
        return tuple(self._pending)

    def fail(self, error: WfbpError) -> None:
        pending, self._pending = self._pending, {}
        self._running.clear()
        self._outbox.clear()
        for submission in pending.values():
            submission.reply.fail(error)

    # Negotiation.

    def _negotiate(self) -> bool:
        """Send what was submitted, read what has arrived, start what is ready."""
        outbox = self._outbox
        if outbox:
            self._outbox = []
            self._mailbox.send(0, encode(outbox))
        elif not self._pending:
            return False
        arrived = self._mailbox.receive()
        if self._coordinator is None:
            for _, payload in arrived:
                self._start_all(decode_responses(payload))
        elif arrived:
            for rank, payload in arrived:
                for request in decode_requests(payload):
                    self._coordinator.add(rank, request)
            responses = self._coordinator.take()
            if responses:
                payload = encode(responses)
                for rank in range(1, self.backend.size):
                    self._mailbox.send(rank, payload)
                self._start_all(responses)
        return bool(outbox or arrived)

    # Data.

    def _start_all(self, responses: Sequence[Response]) -> None:
        """Start what one message of the coordinator tells: what is fused must not depend on when
        messages are read."""
        if self.timeline is not None:
            self.timeline.cycle()
        for together in _fusible(responses):
            self._start(together)

    def _start(self, responses: Sequence[Response]) -> None:
        """Start operations that all ranks have come to; several are reductions of one sort."""
        first = responses[0]
        if first.error:
            found_here = self._pending.pop(first.request.name, None)  # None: it has joined
            if found_here is not None:
                error = DisagreementError(f"{self._where}: {first.error}")
                found_here.reply.fail(error)
            return
        found = [self._take(response.request) for response in responses]
        if first.request.kind is Kind.ALLREDUCE and first.request.op != Adaptive.ADASUM.value:
            self._reduce(found, responses)
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
        start(found[0], first)

    def _take(self, request: Request) -> Submission:
        """This rank's part of an operation: zeros where it has joined instead."""
        if request.name in self._pending:
            return self._pending.pop(request.name)
        numel = int(np.prod(request.shape, dtype=np.int64))
        return Submission(request, np.zeros(numel, word_dtype(request.dtype or "uint8")))

    def _run(self, work: Work[None], finish: _Finish, found: Sequence[Submission]) -> None:
        timeline = self.timeline
        if timeline is not None:
            finish = _recorded(finish, timeline, found, time.monotonic())
        self._running.append((work, finish))

    def _meet(self, found: Submission, response: Response) -> None:
        rows = response.extents[0] if response.extents else ()
        self._run(Finished(None), partial(found.reply.put, Outcome(found.data, rows)), [found])

    def _reduce(self, found: Sequence[Submission], responses: Sequence[Response]) -> None:
        request = responses[0].request
        for each in found:
            scale(each.data, request.dtype, request.prescale)
        parts = [each.data for each in found]
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
        buffer, dtype, op = carried(whole, request.dtype, Op(request.op))
        if self._data.delivers(buffer):
            # A gradient in a fusion buffer, which may lie elsewhere on other ranks: their messages
            # would go another way.
            buffer = buffer.copy()

        def finish() -> None:
            if buffer is not whole:
                np.copyto(whole, buffer, casting="unsafe")
            scale(whole, request.dtype, request.postscale)
            end = 0
            for each, response in zip(found, responses, strict=True):
                start, end = end, end + each.data.size
                if each.data is not whole:
                    each.data[:] = whole[start:end]
                each.reply.put(Outcome(each.data, differentiable=response.differentiable))

        self._run(self._data.all_reduce(buffer, dtype, op), finish, found)

    def _adasum(self, found: Submission, response: Response) -> None:
        request, data, size = response.request, found.data, self._data.size
        scale(data, request.dtype, request.prescale)
        everything = np.empty((size, data.size), data.dtype)
        everything[self._data.rank] = data
        raw = everything.reshape(-1).view(np.uint8)

        def finish() -> None:
            data[:] = adasum(list(everything), request.dtype)
            scale(data, request.dtype, request.postscale)
            found.reply.put(Outcome(data, differentiable=response.differentiable))

        self._run(self._data.all_gather(raw, [data.nbytes] * size), finish, [found])

    def _scatter(self, found: Submission, response: Response) -> None:
        request = response.request
        scale(found.data, request.dtype, request.prescale)
        buffer, dtype, op = carried(found.data, request.dtype, Op(request.op))
        rows = equal_rows(request.shape[0], self._data.size)
        numels = [count * _row_numel(request) for count in rows]
        start = sum(numels[: self._data.rank])
        mine = slice(start, start + numels[self._data.rank])

        def finish() -> None:
            result = buffer[mine].astype(found.data.dtype)
            scale(result, request.dtype, request.postscale)
            found.reply.put(Outcome(result, rows, response.differentiable))

        counts = [numel * buffer.itemsize for numel in numels]
        self._run(self._data.reduce_scatter(buffer, counts, dtype, op), finish, [found])

    def _gather(self, found: Submission, response: Response) -> None:
        rows = tuple(extent[0] for extent in response.extents)
        row_bytes = _row_numel(found.request) * ITEM[found.request.dtype]
        counts = [count * row_bytes for count in rows]
        gathered = np.empty(sum(counts), np.uint8)
        start = sum(counts[: self._data.rank])
        gathered[start : start + found.data.nbytes] = found.data.view(np.uint8)
        outcome = Outcome(gathered, rows, response.differentiable)
        self._run(
            self._data.all_gather(gathered, counts), partial(found.reply.put, outcome), [found]
        )

    def _broadcast(self, found: Submission, response: Response) -> None:
        outcome = Outcome(found.data, differentiable=response.differentiable)
        work = self._data.broadcast(found.data.view(np.uint8), response.request.root)
        self._run(work, partial(found.reply.put, outcome), [found])

    def _exchange(self, found: Submission, response: Response) -> None:
        row_bytes = _row_numel(found.request) * ITEM[found.request.dtype]
        rows = tuple(splits[self._data.rank] for splits in response.extents)
        received = [count * row_bytes for count in rows]
        incoming = np.empty(sum(received), np.uint8)
        sent = [count * row_bytes for count in found.request.splits]
        outcome = Outcome(incoming, rows, response.differentiable)
        work = self._data.all_to_all(found.data.view(np.uint8), sent, incoming, received)
        self._run(work, partial(found.reply.put, outcome), [found])


def _recorded(
    finish: _Finish, timeline: Timeline, found: Sequence[Submission], ready_s: float
) -> _Finish:
    def record() -> None:
        for each in found:
            request = each.request
            timeline.operation(request.kind.value, request.name, each.since, ready_s)
        finish()

    return record


def _row_numel(request: Request) -> int:
    return int(np.prod(request.shape[1:], dtype=np.int64))


def _fusible(responses: Sequence[Response]) -> list[list[Response]]:
    """Runs of responses that can travel as one message; the same on every rank."""
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
        mine = (request.dtype, request.op, request.prescale, request.postscale)
        if fusible and mine == sort and nbytes <= room:
            runs[-1].append(response)
            room -= nbytes
        else:
            runs.append([response])
            sort, room = (mine if fusible else None), _FUSED_BYTES - nbytes
    return runs
