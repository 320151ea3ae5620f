"""Executes named operations of one process set: negotiation, then data through the host."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from wfbp.comm.arrays import Buffer, word_dtype
from wfbp.comm.backend import Backend, Finished, HostBackend, Work
from wfbp.core.types import real_dtype
from wfbp.errors import DisagreementError, WfbpError
from wfbp.runtime.named.arithmetic import ITEM, equal_rows, reducible, scale
from wfbp.runtime.named.coordinator import Coordinator, Kind, Request, Response
from wfbp.runtime.progress.loop import LaneProtocol, Reply, needs_of
from wfbp.runtime.progress.stall import Members, Need
from wfbp.runtime.runtime import Runtime

T = TypeVar("T")

_FUSED_BYTES = 1 << 20
"""Reductions that become ready together are fused into messages of up to this size."""

_MAX_TESTED = 8
"""Number of operations under way that one pass tests; the oldest end first."""

_MAX_TOLD = 100
"""Names that ranks tell each other in a stall; more are not judged."""

JOIN = ""
"""Name of the one join that may be pending; no other operation has it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an operation."""

    data: Buffer  # flat; elements in their storage type, or the bytes of what was gathered
    rows: tuple[int, ...] = ()  # per rank what was gathered or received; of a join the last rank
    differentiable: bool = False  # whether any rank wants to differentiate the result
    name: str = ""


@dataclass(slots=True, eq=False)
class NamedOperation(Generic[T]):
    """An operation that this rank's program has submitted."""

    request: Request
    process_set: int
    data: Buffer  # flat and private; a reduction or broadcast leaves its result here
    finish: Callable[[Outcome], T]  # makes of it what Collectives.synchronize returns
    sequence: str = "unnamed"  # without a name it is matched by order among those of this sequence
    reply: Reply[Outcome] = field(default_factory=Reply)
    since: float = field(default_factory=time.monotonic)


Begun = tuple[Work[None], Callable[[], list[Buffer]]]
"""The collective of some operations, and their results once it is over."""


class NamedLane(LaneProtocol):
    """Lane for the named operations of one process set, served only while some are pending.

    All methods run under the progress lock, except :meth:`note_progress`.
    """

    def __init__(self, runtime: Runtime, backend: HostBackend) -> None:
        self.backend: Backend = backend
        self._data = backend
        self.runtime = runtime  # of the set
        self._loop = runtime.thread.loop
        self._ranks = runtime.members.ranks or range(backend.size)
        self._coordinator = Coordinator(backend.size) if backend.rank == 0 else None
        self._pending: dict[str, NamedOperation[Any]] = {}
        self._outbox: list[Request] = []
        self._inbox: list[tuple[int, list[Any]]] = []
        self._running: deque[tuple[Work[None], Callable[[], None]]] = deque()
        self._moved_s = 0.0
        self._name = f"names {runtime.members.number}"
        self._loop.numbers[self._name] = 0  # of operations that were decided
        self._loop.handle_notices(self._name, lambda *notice: self._inbox.append(notice[:2]))

    def submit(self, operation: NamedOperation[Any]) -> None:
        """Begin an operation; its name is not pending."""
        self._pending[operation.request.name] = operation
        self._outbox.append(operation.request)
        self._loop.add_lane(self, self.runtime.members)

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
        elif not self.busy:
            # No message is of use now: operations need a request from every rank, or its join.
            self._loop.remove_lane(self)
        return progressed

    def note_progress(self) -> None:
        """The ranks that pending operations wait for are at work: no stall. Any thread."""
        self._moved_s = time.monotonic()

    def close(self) -> None:
        """Free the communicator; collective over the set, and no operation may be pending."""
        # Since its last operation there may have been no turn that found nothing to do.
        self._loop.remove_lane(self)
        self.backend.close()

    @property
    def busy(self) -> bool:
        return bool(self._pending) or self.owes_work

    @property
    def owes_work(self) -> bool:
        # Includes responses not sent yet: other ranks wait for them while this one computes.
        return bool(self._running or self._outbox) or self._loop.sends_notices

    polls = True

    @property
    def waiting_since(self) -> float | None:
        moved_s = max(self._moved_s, self._running[0][0].moved_s if self._running else 0.0)
        return max(next(iter(self._pending.values())).since, moved_s) if self._pending else None

    def begun(self) -> dict[str, int]:
        return {f"{self._name}: {name}": 1 for name in self._pending}

    def needs(self, members: Members) -> list[Need] | None:
        found = [needs_of(work, members) for work, _ in self._running]
        if None in found or len(self._pending) > _MAX_TOLD:
            return None
        # What is pending is not decided. A rank that has joined has begun everything.
        heard = {self._name: self._loop.numbers[self._name]}
        joined = f"{self._name}: {JOIN}"
        return [need for needs in found for need in needs or ()] + [
            Need(members.ranks, {f"{self._name}: {name}": 1, joined: 1}, heard)
            for name in self._pending
        ]

    def describe(self) -> str:
        labels = [operation.request.label for operation in self._pending.values()]
        if not labels:
            return "no named operation pending"
        more = f" and {len(labels) - 3} more" if len(labels) > 3 else ""
        ranks = self.runtime.members.ranks
        of_set = f" of the process set {list(ranks)}" if ranks is not None else ""
        return f"in {', '.join(labels[:3])}{more}{of_set}"

    def fail(self, error: WfbpError) -> None:
        pending, self._pending = self._pending, {}
        self._running.clear()
        self._outbox.clear()
        for operation in pending.values():
            operation.reply.fail(error)

    # Negotiation.

    def _negotiate(self) -> bool:
        """Send what was submitted, read what has arrived, start what is ready."""
        outbox, self._outbox = self._outbox, []
        inbox, self._inbox = self._inbox, []
        if self._coordinator is None:
            if outbox:
                self._loop.send_notice(self._name, outbox, self._ranks[:1])
            decided = [[Response.read(told) for told in notice] for _, notice in inbox]
        else:
            for sender, notice in inbox:
                for told in notice:
                    self._coordinator.add(self._ranks.index(sender), Request.read(told))
            for request in outbox:
                self._coordinator.add(0, request)
            decided = [self._coordinator.take()]
            if decided[0]:
                self._loop.send_notice(self._name, decided[0], self._ranks)
        for responses in decided:
            self._loop.numbers[self._name] += len(responses)
            # Fused only within one message, because ranks read messages at different times.
            for together in _fusible(responses):
                self._start(together)
        return bool(outbox or inbox)

    # Data.

    def _start(self, responses: Sequence[Response]) -> None:
        """Start operations; several are reductions fused into one message."""
        first = responses[0]
        if first.error:
            own = self._pending.pop(first.request.name, None)
            if own is not None:  # None: it has joined
                own.reply.fail(DisagreementError(f"{self.runtime.where}: {first.error}"))
            return
        operations = [self._take(response.request) for response in responses]
        rows, ready_s = self._rows(first), time.monotonic()
        work, results = self._begin(operations, first.request, rows)

        def finish() -> None:
            for each, response, data in zip(operations, responses, results(), strict=True):
                kind, name = each.request.kind.value, each.request.name
                if (timeline := self.runtime.timeline) is not None:
                    timeline.operation(kind, name, each.since, ready_s)
                each.reply.put(Outcome(data, rows, response.differentiable, name))

        self._running.append((work, finish))

    def _take(self, request: Request) -> NamedOperation[Any]:
        """This rank's part of an operation: zeros if it has joined instead."""
        if request.name in self._pending:
            return self._pending.pop(request.name)
        zeros = np.zeros(math.prod(request.shape), word_dtype(request.dtype or "uint8"))
        return NamedOperation(request, 0, zeros, lambda _: None)

    def _rows(self, response: Response) -> tuple[int, ...]:
        """Of an outcome; from the response alone, because a rank that has joined has no operand."""
        request, extents = response.request, response.extents
        if request.kind is Kind.ALLGATHER:
            return tuple(extent[0] for extent in extents)
        if request.kind is Kind.ALLTOALL:
            return tuple(splits[self._data.rank] for splits in extents)
        if request.kind is Kind.REDUCESCATTER:
            return request.splits or equal_rows(request.shape[0], self._data.size)
        return extents[0] if extents else ()

    def _begin(
        self, operations: Sequence[NamedOperation[Any]], request: Request, rows: tuple[int, ...]
    ) -> Begun:
        own, data = operations[0].request, operations[0].data
        row_bytes = math.prod(own.shape[1:]) * data.itemsize
        counts = [count * row_bytes for count in rows]
        if request.op:
            return self._combine([each.data for each in operations], request, counts)
        if request.kind is Kind.BROADCAST:
            return self._data.broadcast(data.view(np.uint8), request.root), lambda: [data]
        if request.kind is Kind.ALLGATHER:
            gathered = np.empty(sum(counts), np.uint8)
            start = sum(counts[: self._data.rank])
            gathered[start : start + data.nbytes] = data.view(np.uint8)
            return self._data.all_gather(gathered, counts), lambda: [gathered]
        if request.kind is Kind.ALLTOALL:
            incoming, sent = np.empty(sum(counts), np.uint8), [n * row_bytes for n in own.splits]
            work = self._data.all_to_all(data.view(np.uint8), sent, incoming, counts)
            return work, lambda: [incoming]
        return Finished(None), lambda: [data]  # a barrier or join: all ranks are there

    def _combine(self, parts: Sequence[Buffer], request: Request, counts: Sequence[int]) -> Begun:
        """Start a reduction; ``counts`` are each rank's bytes of a reduce-scatter."""
        request = request._replace(dtype=real_dtype(request.dtype))
        parts = [part.view(word_dtype(request.dtype)) for part in parts]
        if request.kind is Kind.ALLREDUCE:
            return self._reduce(parts, request)
        return self._scatter(parts[0], request, counts)

    def _reduce(self, parts: Sequence[Buffer], request: Request) -> Begun:
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
        buffer, dtype, op = reducible(whole, request)
        scale(buffer, dtype, request.prescale)
        if self._data.copies_segments(buffer):
            # Backends send fusion buffers differently, and other ranks may pass other memory.
            buffer = buffer.copy()

        def results() -> list[Buffer]:
            scale(buffer, dtype, request.postscale)
            if buffer is not whole:
                np.copyto(whole, buffer, casting="unsafe")
            end = 0
            for part in parts:
                start, end = end, end + part.size
                if part is not whole:
                    part[:] = whole[start:end]
            return list(parts)

        return self._data.all_reduce(buffer, dtype, op), results

    def _scatter(self, data: Buffer, request: Request, counts: Sequence[int]) -> Begun:
        buffer, dtype, op = reducible(data, request)
        scale(buffer, dtype, request.prescale)
        numels = [count // data.itemsize for count in counts]
        start = sum(numels[: self._data.rank])
        mine = slice(start, start + numels[self._data.rank])

        def results() -> list[Buffer]:
            result = buffer[mine]
            scale(result, dtype, request.postscale)
            return [result.astype(data.dtype)]

        sent = [numel * buffer.itemsize for numel in numels]
        return self._data.reduce_scatter(buffer, sent, dtype, op), results


def _fusible(responses: Sequence[Response]) -> list[list[Response]]:
    """Runs of responses that can be fused; the same on every rank."""
    runs: list[list[Response]] = []
    sort: object = None
    room = 0
    for response in responses:
        request = response.request
        nbytes = math.prod(request.shape) * ITEM.get(request.dtype, 1)
        mine: object = None
        if request.kind is Kind.ALLREDUCE and not response.error:
            mine = request.dtype, request.op, request.prescale, request.postscale
        if mine is not None and mine == sort and nbytes <= room:
            runs[-1].append(response)
            room -= nbytes
        else:
            runs.append([response])
            sort, room = mine, _FUSED_BYTES - nbytes
    return runs
