"""Operations as programs submit them: by name, in any order, and waited for by a handle."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any, Generic, TypeVar

import numpy as np

from wfbp.comm.backend import HostBackend
from wfbp.errors import WfbpError
from wfbp.runtime import signals
from wfbp.runtime.named.coordinator import Kind, Request
from wfbp.runtime.named.named_lane import JOIN, NamedLane, NamedOperation
from wfbp.runtime.progress.stall import Members
from wfbp.runtime.runtime import JobRuntime, Runtime, SetRuntime

T = TypeVar("T")

_numbers = count(1)
"""Of handles: none is used again in this process, even after another ``init()``."""


class Handle(int, Generic[T]):
    """Number of a submitted operation; its type parameter is the result of ``synchronize``."""

    __slots__ = ()


class Collectives:
    """Named operations of one runtime; any training thread may submit, poll and synchronize."""

    def __init__(self, runtime: JobRuntime) -> None:
        self._runtime = runtime
        self._lock = threading.RLock()  # protects the names
        self._names: dict[tuple[int, str], NamedOperation[Any]] = {}
        """The last operation of each process set and name that no handle has ended."""
        self._handles: dict[int, tuple[Sequence[NamedOperation[Any]], bool]] = {}  # is it a group?
        self._unnamed: dict[tuple[int, str], Iterator[int]] = {}
        self._num_joins = 0
        self._set_numbers = count()
        self.sets: dict[int, tuple[int, ...]] = {}  # ranks, by number; 0 for all ranks
        self.lanes: dict[int, NamedLane] = {}  # of the sets that this rank is in
        self.rank = runtime.rank
        self._make_set(tuple(range(runtime.size)))
        runtime.at_end.append(self._close)

    # Process sets.

    @signals.deferred
    def add_set(self, ranks: Iterable[int]) -> int:
        """Make a process set; collective over all ranks."""
        chosen, size = tuple(sorted(ranks)), self._runtime.size
        if not chosen or len(set(chosen)) < len(chosen) or chosen[0] < 0 or chosen[-1] >= size:
            raise ValueError(
                f"the ranks of a process set are {list(chosen)}; expected different ones of 0 to "
                f"{size - 1}"
            )
        for number, known in self.sets.items():
            if known == chosen:
                hint = f", with number {number}" if number else ": use global_process_set"
                raise ValueError(f"a process set of ranks {list(chosen)} exists already{hint}")
        self._check_same("add_process_set", chosen)
        return self._make_set(chosen)

    @signals.deferred
    def remove_set(self, number: int, let_go: Callable[[Runtime], None]) -> None:
        """Remove a process set, which ``let_go`` stops using; collective over all ranks."""
        self._check_idle(number)
        lane = self.lanes.get(number)
        if lane is not None:
            let_go(lane.runtime)
            self._check_idle(number)
        self._check_same("remove_process_set", self.sets[number])
        del self.sets[number]
        if lane is not None:  # an idle lane is not served
            del self.lanes[number]
            assert isinstance(lane.runtime, SetRuntime)
            lane.runtime.close(lane.close)

    def _is_pending(self, key: tuple[int, str]) -> bool:
        """Whether a name is taken: until its operation is complete on this rank. Under the lock."""
        operation = self._names.get(key)
        return operation is not None and not operation.reply.answered

    def _check_idle(self, number: int) -> None:
        with self._lock:
            pending = sorted(k[1] for k in self._names if k[0] == number and self._is_pending(k))
        if pending:
            raise ValueError(
                f"operations of process set {number} are pending: {', '.join(pending[:5])}. "
                "synchronize() them before remove_process_set()"
            )

    def _check_same(self, call: str, ranks: tuple[int, ...]) -> None:
        """Raise ``DisagreementError`` unless all ranks make this call with these ranks."""
        remedy = "Every rank must pass the same ranks, in the same order of calls"
        self._runtime.channel.exchange(b"", call, same=[{"the ranks": ranks}], remedy=remedy)

    def _make_set(self, ranks: tuple[int, ...]) -> int:
        number = next(self._set_numbers)
        runtime = self._runtime
        label = "making a process set"
        # To make a communicator blocks this rank until all ranks make it: one at a time.
        with runtime.in_turn(runtime.channel, label):
            runtime.channel.run(lambda backend: self._connect(backend, number, ranks), label)
        self.sets[number] = ranks
        return number

    # Operations.

    @signals.deferred
    def submit(
        self, operations: Sequence[NamedOperation[Any]], is_group: bool = True, waits: bool = False
    ) -> Handle[Any]:
        """Begin all operations or none; if the caller ``waits`` at once, no thread is woken."""
        self._runtime.check()
        lanes = [self._lane_of(operation) for operation in operations]
        with self._lock:
            for operation in operations:
                operation.request = self._named(operation)
            keys = [(each.process_set, each.request.name) for each in operations]
            for operation, key in zip(operations, keys, strict=True):
                if self._is_pending(key):
                    raise ValueError(
                        f"{operation.request.kind.value}: an operation of the name {key[1]!r} is "
                        "pending on this rank; synchronize() its handle first, or choose another "
                        "name"
                    )
            self._names.update(zip(keys, operations, strict=True))
            handle: Handle[Any] = Handle(next(_numbers))
            self._handles[handle] = operations, is_group

        # Only the communication side may touch lanes.
        def begin() -> None:  # in one message, so that they reach the coordinator together
            for lane, operation in zip(lanes, operations, strict=True):
                lane.submit(operation)

        self._runtime.thread.post(begin, wakes=not waits)
        return handle

    def _lane_of(self, operation: NamedOperation[Any]) -> NamedLane:
        name: object = operation.request.name
        if not isinstance(name, str):
            raise TypeError(f"name is {name!r}; expected a string")
        if operation.process_set not in self.lanes:
            ranks = list(self.sets[operation.process_set])
            raise ValueError(f"{self._runtime.where} is not in the process set of ranks {ranks}")
        return self.lanes[operation.process_set]

    def _named(self, operation: NamedOperation[Any]) -> Request:
        """The request with the name that ranks match. Called under the lock."""
        request = operation.request
        if request.name or request.kind is Kind.JOIN:
            return request
        sequence = operation.sequence
        number = next(self._unnamed.setdefault((operation.process_set, sequence), count()))
        # Ranks that joined have numbered fewer operations than the others.
        epoch = f"{self._num_joins}." if self._num_joins else ""
        return request._replace(name=f"{sequence}.{epoch}{number}")

    def run(self, operations: Sequence[NamedOperation[Any]], is_group: bool = True) -> Any:
        """Begin operations and wait for their results; handlers of signals run after it."""
        with signals.deferred:
            return self.synchronize(self.submit(operations, is_group, waits=True))

    def poll(self, handle: int) -> bool:
        """Whether operations are complete; communication is moved on if they are not."""
        operations, _ = self._find(handle)
        if not all(operation.reply.answered for operation in operations):
            self._runtime.thread.progress()
        return all(operation.reply.answered for operation in operations)

    @signals.deferred
    def synchronize(self, handle: int) -> Any:
        """Wait until operations are complete, and return the result; the handle is used up."""
        operations, is_group = self._find(handle)
        self._handles.pop(handle, None)  # before the wait: another thread must not wait for it too
        outcomes = []
        first_error: WfbpError | None = None
        for operation in operations:  # wait for all, so that every name is free again
            request = operation.request
            key = operation.process_set, request.name
            try:
                reply = operation.reply
                outcomes.append(self._runtime.thread.await_reply(reply, request.label))
            except WfbpError as error:
                first_error = first_error or error
            finally:
                with self._lock:
                    if self._names.get(key) is operation:  # else a later one has the name
                        del self._names[key]
        if first_error is not None:
            raise first_error
        finished = [each.finish(o) for each, o in zip(operations, outcomes, strict=True)]
        return finished if is_group else finished[0]

    def _find(self, handle: int) -> tuple[Sequence[NamedOperation[Any]], bool]:
        found = self._handles.get(handle)
        if found is None:
            raise ValueError(
                f"handle {handle!r} is of no pending operation; each may be synchronized once"
            )
        return found

    def join(self, meanwhile: Callable[[], None] = lambda: None) -> int:
        """Contribute zeros, to this rank's process sets too, until all ranks have called this, and
        do something ``meanwhile``; returns the last rank that called it."""
        request, nothing = Request(Kind.JOIN, JOIN), np.empty(0, np.uint8)
        joins = [
            NamedOperation(request, number, nothing, lambda outcome: outcome.rows[0])
            for number in self.lanes
        ]
        handle = self.submit(joins)
        meanwhile()
        joined: list[int] = self.synchronize(handle)  # of all ranks, and of each set
        self._num_joins += 1
        self._unnamed.clear()
        return joined[0]

    def note_progress(self) -> None:
        """This rank has joined, and the others go on."""
        for lane in self.lanes.values():
            lane.note_progress()

    # On the communication thread.

    def _connect(self, backend: HostBackend, number: int, ranks: tuple[int, ...]) -> None:
        """Make the lane of a set, if this rank is in it, and its runtime."""
        whole, job = len(ranks) == backend.size, self._runtime
        data = backend.duplicate() if whole else backend.subset(ranks)
        if data is None:
            return
        runtime = job if whole else SetRuntime(data.duplicate(), job, Members(number, ranks))
        self.lanes[number] = NamedLane(runtime, data)

    def _close(self) -> None:
        """Free all communicators; collective, and nothing may be under way."""
        for lane in self.lanes.values():
            lane.close()
