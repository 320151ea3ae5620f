"""Executes named operations of one process set: negotiation, then data through the host."""

from __future__ import annotations

import math
import pickle
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from wfbp.comm.backend import Backend, Buffer, Finished, HostBackend, Mailbox, Work, word_dtype
from wfbp.core.types import Op
from wfbp.errors import DisagreementError, WfbpError
from wfbp.runtime.collectives.arithmetic import ITEM, adasum, equal_rows, reducible, scale
from wfbp.runtime.collectives.coordinator import Coordinator, Kind, Request, Response
from wfbp.runtime.progress.loop import Reply
from wfbp.runtime.progress.stall import ALL_RANKS, Members
from wfbp.runtime.progress.thread import CommunicationThread
from wfbp.runtime.timeline import TraceWriter

_FUSED_BYTES = 1 << 20
"""Reductions that become ready together are fused into messages of up to this size."""

_MAX_TESTED = 8
"""Number of operations under way that one pass tests; the oldest end first."""

JOIN = ""
"""Name of the one join that may be pending; no other operation has it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an operation."""

    data: Buffer  # flat; elements in their storage type, or the bytes of what was gathered
    rows: tuple[int, ...] = ()  # per rank what was gathered or received; of a join the last rank
    differentiable: bool = False  # whether any rank wants to differentiate the result
    name: str = ""


@dataclass(slots=True)
class Submission:
    """An operation that this rank's program has submitted."""

    request: Request
    data: Buffer  # flat and private; a reduction or broadcast leaves its result here
    reply: Reply[Outcome] = field(default_factory=Reply)
    since: float = field(default_factory=time.monotonic)

    def finish(self, data: Buffer, response: Response, rows: tuple[int, ...] = ()) -> None:
        """Store the outcome on the host, and wake the waiter."""
        wanted = response.differentiable
        self.reply.put(Outcome(data, rows, wanted, self.request.name))


class NamedLane:
    """Lane for the named operations of one process set, served only while some are pending.

    All methods run under the progress lock, except :meth:`note_progress`.
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
        self._of_set = f" of the {name}" if name else ""
        self._where = where
        self._members = members
        self._coordinator = Coordinator(backend.size) if backend.rank == 0 else None
        self._pending: dict[str, Submission] = {}
        self._outbox: list[Request] = []
        self._running: deque[tuple[Work[None], Callable[[], None]]] = deque()
        self._served = False
        self._moved_s = 0.0
        self.timeline: TraceWriter | None = None

    def submit(self, submission: Submission) -> None:
        """Begin an operation; its name is not pending."""
        self._pending[submission.request.name] = submission
        self._outbox.append(submission.request)
        if not self._served:
            self._served = True
            self._thread.loop.add_lane(self, members=self._members)

    def advance(self) -> bool:
        progressed = self._negotiate()
        for _ in range(min(_MAX_TESTED, len(self._running))):
            work, finish = self._running[0]
            if not work.test():
                break
            self._running.popleft()
            finish()
            progressed = True
        if progressed:
            self._moved_s = time.monotonic()
        elif self._served and not self.busy:
            # No message is of use now: operations need a request from every rank, or its join.
            self._served = False
            self._thread.loop.remove_lane(self)
        return progressed

    def note_progress(self) -> None:
        """The ranks that pending operations wait for are at work: no stall. Any thread."""
        self._moved_s = time.monotonic()

    def close(self) -> None:
        """Free the communicators; collective over the set, and no operation may be pending."""
        if self._served:  # since its last operation there was no turn that found nothing to do
            self._served = False
            self._thread.loop.remove_lane(self)
        self._mailbox.close()
        self.backend.close()

    def may_progress(self) -> bool:
        return True

    def rest(self, nap_s: float, most_s: float) -> bool:
        return False  # what other ranks send has to be read

    @property
    def busy(self) -> bool:
        return bool(self._pending) or self.owes_work

    @property
    def owes_work(self) -> bool:
        # Includes responses not sent yet: other ranks wait for them while this one computes.
        return bool(self._running or self._outbox) or self._mailbox.sending

    has_events = False
    has_room = False
    expected_s: float | None = None

    @property
    def waiting_since(self) -> float | None:
        if not self._pending:
            return None
        return max(next(iter(self._pending.values())).since, self._moved_s)

    def describe(self) -> str:
        labels = [submission.request.label for submission in self._pending.values()]
        more = f" and {len(labels) - 3} more" if len(labels) > 3 else ""
        return (
            f"in {', '.join(labels[:3])}{more}{self._of_set}"
            if labels
            else ("no named operation pending")
        )

    def fail(self, error: WfbpError) -> None:
        pending, self._pending = self._pending, {}
        self._running.clear()
        self._outbox.clear()
        for submission in pending.values():
            submission.reply.fail(error)

    # Negotiation.

    def _negotiate(self) -> bool:
        """Send what was submitted, read what has arrived, start what is ready."""
        outbox, self._outbox = self._outbox, []
        if outbox:
            if self._coordinator is None or self._mailbox.echoes:
                self._mailbox.send(0, pickle.dumps(outbox))
        elif not (self._pending or self._mailbox.sending):
            return False
        arrived = self._mailbox.receive()
        if self._coordinator is None:
            for _, payload in arrived:
                self._start_all(pickle.loads(payload))
            return bool(outbox or arrived)
        for rank, payload in arrived:
            for request in pickle.loads(payload):
                self._coordinator.add(rank, request)
        for request in outbox:
            self._coordinator.add(0, request)
        responses = self._coordinator.take()
        if responses and self.backend.size > 1:
            payload = pickle.dumps(responses)
            for rank in range(1, self.backend.size):
                self._mailbox.send(rank, payload)
        self._start_all(responses)
        return bool(outbox or arrived)

    # Data.

    def _start_all(self, responses: Sequence[Response]) -> None:
        """Start the operations of one message of the coordinator."""
        if self.timeline is not None and responses:
            self.timeline.cycle()
        # Only within one message, because ranks read messages at different times.
        for together in _fusible(responses):
            self._start(together)

    def _take(self, request: Request) -> Submission:
        """This rank's part of an operation: zeros if it has joined instead."""
        if request.name in self._pending:
            return self._pending.pop(request.name)
        numel = math.prod(request.shape)
        return Submission(request, np.zeros(numel, word_dtype(request.dtype or "uint8")))

    def _start(self, responses: Sequence[Response]) -> None:
        """Start operations; several are reductions fused into one message."""
        first = responses[0]
        request = first.request
        if first.error:
            own = self._pending.pop(request.name, None)
            if own is not None:  # None: it has joined
                own.reply.fail(DisagreementError(f"{self._where}: {first.error}"))
            return
        submissions = [self._take(response.request) for response in responses]
        submission, data, rank = submissions[0], submissions[0].data, self._data.rank
        row_bytes = math.prod(submission.request.shape[1:]) * data.itemsize
        if request.kind is Kind.ALLREDUCE and request.op != Op.ADASUM.value:
            self._reduce(submissions, responses)
        elif request.kind is Kind.ALLREDUCE:
            self._adasum(submission, first)
        elif request.kind is Kind.REDUCESCATTER:
            self._scatter(submission, first)
        elif request.kind is Kind.BROADCAST:
            work = self._data.broadcast(data.view(np.uint8), request.root)
            self._run(work, partial(submission.finish, data, first), submissions)
        elif request.kind is Kind.ALLGATHER:
            rows = tuple(extent[0] for extent in first.extents)
            counts = [count * row_bytes for count in rows]
            gathered = np.empty(sum(counts), np.uint8)
            start = sum(counts[:rank])
            gathered[start : start + data.nbytes] = data.view(np.uint8)
            work = self._data.all_gather(gathered, counts)
            self._run(work, partial(submission.finish, gathered, first, rows), submissions)
        elif request.kind is Kind.ALLTOALL:
            rows = tuple(splits[rank] for splits in first.extents)
            received = [count * row_bytes for count in rows]
            sent = [count * row_bytes for count in submission.request.splits]
            incoming = np.empty(sum(received), np.uint8)
            work = self._data.all_to_all(data.view(np.uint8), sent, incoming, received)
            self._run(work, partial(submission.finish, incoming, first, rows), submissions)
        else:  # a barrier or join, over as soon as all ranks are there
            rows = first.extents[0] if first.extents else ()
            self._run(Finished(None), partial(submission.finish, data, first, rows), submissions)

    def _run(
        self, work: Work[None], finish: Callable[[], None], submissions: Sequence[Submission]
    ) -> None:
        self._running.append((work, self._recorded(finish, submissions)))

    def _recorded(
        self, finish: Callable[[], None], submissions: Sequence[Submission]
    ) -> Callable[[], None]:
        """``finish``, recorded in the timeline, if there is one."""
        timeline, ready_s = self.timeline, time.monotonic()
        if timeline is None:
            return finish

        def record() -> None:
            for each in submissions:
                timeline.operation(each.request.kind.value, each.request.name, each.since, ready_s)
            finish()

        return record

    def _reduce(self, submissions: Sequence[Submission], responses: Sequence[Response]) -> None:
        request = responses[0].request
        for each in submissions:
            scale(each.data, request.dtype, request.prescale)
        parts = [each.data for each in submissions]
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
        buffer, dtype, op = reducible(whole, request.dtype, Op(request.op))
        if self._data.copies_segments(buffer):
            # Backends send fusion buffers differently, and other ranks may pass other memory.
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
                each.finish(each.data, response)

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
            submission.finish(data, response)

        self._run(self._data.all_gather(raw, [data.nbytes] * size), finish, [submission])

    def _scatter(self, submission: Submission, response: Response) -> None:
        request = response.request
        scale(submission.data, request.dtype, request.prescale)
        buffer, dtype, op = reducible(submission.data, request.dtype, Op(request.op))
        rows = request.splits or equal_rows(request.shape[0], self._data.size)
        numels = [count * math.prod(request.shape[1:]) for count in rows]
        start = sum(numels[: self._data.rank])
        mine = slice(start, start + numels[self._data.rank])

        def finish() -> None:
            result = buffer[mine].astype(submission.data.dtype)
            scale(result, request.dtype, request.postscale)
            submission.finish(result, response, rows)

        counts = [numel * buffer.itemsize for numel in numels]
        self._run(self._data.reduce_scatter(buffer, counts, dtype, op), finish, [submission])


def _fusible(responses: Sequence[Response]) -> list[list[Response]]:
    """Runs of responses that can be fused; the same on every rank."""
    runs: list[list[Response]] = []
    sort: object = None
    room = 0
    for response in responses:
        request = response.request
        nbytes = math.prod(request.shape) * ITEM.get(request.dtype, 1)
        mine: object = None
        if request.kind is Kind.ALLREDUCE and request.op != Op.ADASUM.value and not response.error:
            factors = request.prescale, request.postscale
            mine = request.dtype, request.op, factors
        if mine is not None and mine == sort and nbytes <= room:
            runs[-1].append(response)
            room -= nbytes
        else:
            runs.append([response])
            sort, room = mine, _FUSED_BYTES - nbytes
    return runs
