"""Operations as programs submit them: by name, in any order, and waited for by a handle."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, Generic, TypeVar, overload

import numpy as np

from wfbp.comm.backend import Backend, Buffer, Finished, HostBackend, Mailbox
from wfbp.core.types import Op
from wfbp.errors import DisagreementError, WfbpError
from wfbp.runtime import signals
from wfbp.runtime.collectives.named_lane import JOIN, NamedLane, Outcome, Submission
from wfbp.runtime.collectives.request import Adaptive, Kind, Reduction, Request
from wfbp.runtime.consistency import check_consistent
from wfbp.runtime.progress.deadlock import ALL_RANKS, Members, RankStatus
from wfbp.runtime.progress.loop import Reply
from wfbp.runtime.runtime import Runtime
from wfbp.runtime.timeline import Timeline

Adasum = Adaptive.ADASUM

_FLOATING = frozenset({"float16", "bfloat16", "float32", "float64"})


T = TypeVar("T")

_numbers = count(1)
"""Of handles: none is used again in this process, also behind another ``init()``."""


class Handle(int, Generic[T]):
    """Number of an operation that was submitted; type checkers know by it what comes back."""

    __slots__ = ()


@dataclass(slots=True)
class Call(Generic[T]):
    """An operation as a program asks for it.

    Args:
        kind: what is to be done.
        name: by which ranks find each other; if None or empty, the operation is numbered in the
            order of submission, and gets its name then.
        process_set: number of the one whose ranks take part.
        data: flat; private to the operation until its outcome is there.
        finish: makes of the outcome what :meth:`Collectives.synchronize` returns.
        details: further fields of :class:`Request`; ``op`` is a :data:`Reduction`, ``root`` a rank
            of all.
    """

    kind: Kind
    name: str | None
    process_set: int
    data: Buffer
    finish: Callable[[Outcome], T]
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Submitted:
    """An operation that was submitted and not waited for yet.

    ``left`` says that what a signal's handler raised has ended the wait.
    """

    key: tuple[int, str]
    kind: Kind
    label: str
    reply: Reply[Outcome]
    finish: Callable[[Outcome], Any]
    left: bool = False


@dataclass(frozen=True, slots=True)
class _Set:
    """A process set; on a rank outside it there is no lane and no runtime."""

    ranks: tuple[int, ...]
    lane: NamedLane | None
    runtime: Runtime | None


class Collectives:
    """The named operations of one runtime.

    Any training thread may submit, poll and synchronize; what threads share are dictionaries, each
    changed by single operations. Adding and removing process sets is collective. The communication
    thread calls :meth:`extend_status` and :meth:`close`.

    Args:
        runtime: of this rank. Making one is collective.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._handles: dict[int, _Submitted] = {}
        self._groups: dict[int, tuple[int, ...]] = {}
        self._results: dict[int, list[Any]] = {}  # of groups that were left in mid-wait
        self._unread: dict[int, Any] = {}  # of handles, that a handler's exception came before
        self._reserved: dict[tuple[int, str], int] = {}
        self._unnamed: defaultdict[tuple[int, Kind], count[int]] = defaultdict(count)
        self._num_joins = 0
        self._set_numbers = count()
        self._sets: dict[int, _Set] = {}
        self._split: dict[int, tuple[int, ...]] = {}  # of each, all that were made by one split
        self.rank = runtime.rank
        mine = json.dumps([runtime.local_rank, runtime.local_size]).encode()
        self.hosts: list[tuple[int, int]] = [
            tuple(json.loads(said)) for said in runtime.exchange(mine, "init(): comparing hosts")
        ]
        """Of every rank, its number on its host and how many there are."""
        runtime.thread.loop.extend_status(self.extend_status)
        self._make_set(tuple(range(runtime.size)))

    # Process sets.

    @signals.postponing
    def add_set(self, ranks: Iterable[int]) -> int:
        """Make a process set; collective over all ranks.

        Returns:
            Its number, the same on every rank.

        Raises:
            ValueError: no ranks, not all of them ranks of this job, or a set that exists.
            DisagreementError: ranks are about to do something else.
        """
        chosen = _check_ranks(ranks, self._runtime.size)
        self._check_new(chosen)
        check_consistent(self._runtime, "add_process_set", str(list(chosen)))
        return self._make_set(chosen)

    @signals.postponing
    def add_split(self, mine: Sequence[int]) -> int:
        """Make a process set of each communicator that some rank tells; collective over all ranks.

        Args:
            mine: the ranks of the communicator that this rank has, ascending; none without one.

        Returns:
            Number of this rank's set; where it has none, of the first, which it is not in.

        Raises:
            ValueError: no rank has a communicator, or one of a set that exists.
            DisagreementError: ranks are about to do something else, or in another order.
        """
        runtime, call = self._runtime, "add_process_set"
        check_consistent(runtime, call, "sets of communicators")
        told = [json.loads(said) for said in runtime.exchange(json.dumps([*mine]).encode(), call)]
        chosen = {_check_ranks(ranks, runtime.size) for ranks in told if ranks}
        for ranks in chosen:
            self._check_new(ranks)
            for rank in ranks:
                if tuple(told[rank]) != ranks:
                    raise DisagreementError(
                        f"{runtime.where}: add_process_set: a communicator of ranks {list(ranks)} "
                        f"is not that of rank {rank}, which passed one of {told[rank]}. Every rank "
                        "must pass its communicators in the same order"
                    )
        if not chosen:
            raise ValueError("a process set was made of a null communicator on every rank")
        numbers = {ranks: self._make_set(ranks) for ranks in sorted(chosen)}
        for number in numbers.values():
            self._split[number] = tuple(numbers.values())
        return numbers.get(tuple(mine), min(numbers.values()))

    def _check_new(self, ranks: tuple[int, ...]) -> None:
        for number, known in self._sets.items():
            if known.ranks == ranks:
                raise ValueError(
                    f"a process set of ranks {list(ranks)} exists already, with number {number}"
                )

    @signals.postponing
    def remove_set(self, number: int) -> None:
        """Give a process set back, and those made together with it; collective over all ranks.

        Raises:
            ValueError: it is that of all ranks, or operations of it are pending.
            DisagreementError: ranks are about to do something else.
        """
        if number == 0:
            raise ValueError("the process set of all ranks cannot be removed")
        self.check_idle(number)
        together = self._split.get(number, (number,))
        removed = [self._sets[each] for each in together]
        shown = ", ".join(str(list(found.ranks)) for found in removed)
        check_consistent(self._runtime, "remove_process_set", shown)
        for each, found in zip(together, removed, strict=True):
            del self._sets[each]
            self._split.pop(each, None)
            lane = found.lane
            if lane is not None:  # a lane that is idle is not served, nor is anything under way
                assert found.runtime is not None
                found.runtime.channel.call(partial(_close, lane), "removing a process set")
                found.runtime.close()

    def check_idle(self, number: int) -> None:
        """Raise ``ValueError`` where operations of a process set are pending."""
        pending = [name for owner, name in list(self._reserved) if owner == number]
        if pending:
            raise ValueError(
                f"operations of process set {number} are pending: {', '.join(pending[:5])}. "
                "synchronize() them before remove_process_set()"
            )

    def ranks_of(self, number: int) -> tuple[int, ...]:
        """The ranks of a process set, ascending."""
        return self._sets[number].ranks

    def runtime_of(self, number: int) -> Runtime | None:
        """The runtime of a process set; None on a rank outside it."""
        return self._sets[number].runtime

    def _make_set(self, ranks: tuple[int, ...]) -> int:
        number = next(self._set_numbers)
        runtime = self._runtime
        label = "making a process set"
        with runtime.collective_lock.hold(runtime.channel, label):
            made = runtime.channel.call(lambda backend: Finished(_connect(backend, ranks)), label)
        if made is None:
            self._sets[number] = _Set(ranks, None, None)
            return number
        data, mailbox, own = made
        members = ALL_RANKS if own is None else Members(number, ranks)
        if own is not None:
            runtime = Runtime(own, runtime.config, within=runtime, members=members)
            runtime.timeline = self._runtime.timeline
        name = "" if own is None else f"process set {list(ranks)}"
        lane = NamedLane(runtime.thread, data, mailbox, name, self._runtime.where, members)
        lane.timeline = runtime.timeline
        self._sets[number] = _Set(ranks, lane, runtime)
        return number

    # Operations.

    def submit(self, call: Call[T]) -> Handle[T]:
        """Begin an operation; raises as :meth:`submit_all` does.

        Returns:
            A handle.
        """
        return self._begin([call])[0]

    def submit_all(self, calls: Sequence[Call[T]]) -> Handle[list[T]]:
        """Begin several operations, or none where one of them is refused.

        Returns:
            One handle for all, whose results come in a list.

        Raises:
            TypeError: a name is no string.
            ValueError: a name is pending, or an argument that cannot be served.
            WfbpError: the runtime has ended; or Adasum of anything but an allreduce, for which
                Horovod raises a RuntimeError.
        """
        handles = self._begin(calls)
        group: Handle[list[T]] = Handle(next(_numbers))
        self._groups[group] = tuple(handles)
        return group

    @signals.postponing
    def _begin(self, calls: Sequence[Call[T]]) -> list[Handle[T]]:
        self._runtime.check()
        checked = [self._check(call) for call in calls]
        begun: list[tuple[NamedLane, Submission]] = []
        handles: list[Handle[T]] = []
        try:
            for call, (lane, request) in zip(calls, checked, strict=True):
                handle, submission = self._reserve(call, request)
                handles.append(handle)
                begun.append((lane, submission))
        except ValueError:
            for handle in handles:
                self._release(handle, self._handles[handle])
            raise
        for lane, submission in begun:
            self._runtime.post(partial(lane.submit, submission))
        return handles

    def _check(self, call: Call[Any]) -> tuple[NamedLane, Request]:
        """Who is to carry an operation out, and what is asked for."""
        name = call.name
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name is {name!r}; expected a string")
        members = self._sets[call.process_set]
        if members.lane is None:
            raise ValueError(
                f"{self._runtime.where} is not in the process set of ranks {list(members.ranks)}"
            )
        details = _checked(call.kind, call.details, members.ranks)
        return members.lane, Request(call.kind, name or "", **details)

    def _reserve(self, call: Call[T], request: Request) -> tuple[Handle[T], Submission]:
        """Take the operation's name, or a number instead of one.

        Raises:
            ValueError: the name is pending.
        """
        kind, process_set = call.kind, call.process_set
        if not call.name and kind is not Kind.JOIN:
            unnamed = next(self._unnamed[process_set, kind])
            epoch = f"{self._num_joins}." if self._num_joins else ""
            request = replace(request, name=f"{kind.value}.unnamed.{epoch}{unnamed}")
        key = process_set, request.name
        handle: Handle[T] = Handle(next(_numbers))
        holder = self._reserved.setdefault(key, handle)
        if holder != handle and not self._gives_way(holder, kind):
            raise ValueError(
                f"{kind.value}: an operation of the name {request.name!r} is pending on this rank; "
                "synchronize() its handle first, or choose another name"
            )
        self._reserved[key] = handle
        submission = Submission(request, call.data)
        call.name = request.name
        self._handles[handle] = _Submitted(key, kind, request.label, submission.reply, call.finish)
        return handle, submission

    def poll(self, handle: int) -> bool:
        """Whether an operation is complete; communication is moved on if it is not.

        Raises:
            ValueError: no such operation, or it was synchronized already.
        """
        if handle in self._unread:
            return True
        if handle in self._groups:
            return all(self.poll(member) for member in self._groups[handle])
        reply = self._find(handle).reply
        if not reply.answered:
            self._runtime.thread.progress()
        return reply.answered

    @overload
    def synchronize(self, handle: Handle[T]) -> T: ...
    @overload
    def synchronize(self, handle: int) -> Any: ...
    def synchronize(self, handle: int) -> Any:
        """Wait until an operation is complete, and return its result; the handle is used up.

        Raises:
            ValueError: no such operation, or it was synchronized already.
            DisagreementError: ranks submitted operations of this name that do not match.
            WfbpError: communication failed.
        """
        with signals.postponed:
            if handle not in self._unread:
                result = self._await(handle)
                self._unread[handle] = result  # until no signal's handler can come between
        return self._unread.pop(handle)

    def _await(self, handle: int) -> Any:
        if handle in self._groups:
            return self._await_all(handle)
        entry = self._find(handle)
        while True:
            try:
                outcome = self._runtime.await_reply(entry.reply, entry.label, resumable=True)
            except signals.HandlersDue:
                entry.left = True
                signals.run_handlers()  # what one raises leaves the handle as it is
                continue
            except BaseException:
                self._release(handle, entry)
                raise
            self._release(handle, entry)
            return entry.finish(outcome)

    def _release(self, handle: int, entry: _Submitted) -> None:
        self._handles.pop(handle, None)
        if self._reserved.get(entry.key) == handle:
            del self._reserved[entry.key]

    def _await_all(self, group: int) -> list[Any]:
        """Wait for all, so that every name is free again, and raise the first error."""
        results = self._results.setdefault(group, [])
        handles = self._groups[group]
        while len(results) < len(handles):
            try:
                results.append(self._await(handles[len(results)]))
            except WfbpError as error:
                results.append(error)
        del self._groups[group], self._results[group]
        for result in results:
            if isinstance(result, WfbpError):
                raise result
        return results

    def begin_join(self) -> Handle[int]:
        """Contribute zeros from now on until all ranks have called this; returns a handle."""
        nothing = np.empty(0, np.uint8)
        return self.submit(Call(Kind.JOIN, JOIN, 0, nothing, lambda outcome: outcome.rows[0]))

    def note_progress(self) -> None:
        """This rank has joined, and the others go on."""
        lane = self._sets[0].lane
        assert lane is not None
        lane.note_progress()

    def end_join(self, handle: Handle[int]) -> int:
        """Wait for the other ranks; returns the last one to come."""
        last = self.synchronize(handle)
        # Ranks that were stood in for have numbered fewer operations than the others.
        self._num_joins += 1
        for key in [key for key in self._unnamed if key[0] == 0]:
            del self._unnamed[key]
        return last

    def record(self, timeline: Timeline | None) -> None:
        """Record steps and operations in another timeline from now on, or in none; the one before
        is closed."""
        before, self._runtime.timeline = self._runtime.timeline, timeline
        for found in self._sets.values():
            if found.lane is not None and found.runtime is not None:
                found.lane.timeline = found.runtime.timeline = timeline
        if before is not None:
            before.close()

    def _gives_way(self, holder: int, kind: Kind) -> bool:
        """Whether an operation lets one of another kind have its name, or any if its wait was left:
        once it is complete."""
        entry = self._handles.get(holder)
        if entry is None or not entry.reply.answered:
            return False
        return entry.kind is not kind or entry.left

    def _find(self, handle: int) -> _Submitted:
        entry = self._handles.get(handle)
        if entry is None:
            raise ValueError(
                f"handle {handle!r} is of no pending operation; each may be synchronized once"
            )
        return entry

    # On the communication thread.

    def extend_status(self, status: RankStatus, awaited: Reply[Any]) -> RankStatus:
        """This rank's status, with its named operations."""
        awaits = ""
        submitted: list[str] = []
        outside: list[int] = []
        for number, found in list(self._sets.items()):
            if found.lane is None:
                outside.append(number)
                continue
            submitted += [f"{number}:{name}" for name in found.lane.pending]
            if name := found.lane.awaited(awaited):
                awaits = f"{number}:{name}"
        return replace(
            status, awaits=awaits, submitted=tuple(sorted(submitted)), outside=tuple(outside)
        )

    def close(self) -> None:
        """Give all communicators back; collective, and nothing may be under way."""
        for found in self._sets.values():
            if found.lane is not None:
                found.lane.close()


def chosen_reduction(average: bool | None, op: object) -> Reduction:
    """Horovod's two ways to say how contributions combine, as one.

    Raises:
        ValueError: both, or an ``op`` that is none.
    """
    if average is not None:
        if op is not None:
            raise ValueError("average and op both say how ranks are combined; pass one of them")
        return Op.AVERAGE if average else Op.SUM
    if op is None:
        return Op.AVERAGE
    if not isinstance(op, Op | Adaptive):
        known = ", ".join(map(str, (*Op, *Adaptive)))
        raise ValueError(f"op is {op!r}; expected one of {known}")
    return op


def _checked(kind: Kind, details: dict[str, Any], ranks: Sequence[int]) -> dict[str, Any]:
    """The details of a request, as it carries them.

    Raises:
        ValueError: what this process set or element type cannot do.
    """
    details = dict(details)
    size, dtype = len(ranks), details.get("dtype", "")
    if "root" in details:
        root = details["root"]
        if root not in ranks:
            raise ValueError(f"root_rank is {root}; expected one of the ranks {_shown(ranks)}")
        details["root"] = ranks.index(root)
    op = details.get("op")
    if op is None:
        return details
    details["op"] = op.value
    if op is Adasum:
        if kind is not Kind.ALLREDUCE:
            raise WfbpError(f"{kind.value} cannot combine by {op}; only allreduce can")
        if size & (size - 1):
            raise ValueError(f"{op} combines a power of two of ranks; there are {size}")
        if dtype not in _FLOATING:
            raise ValueError(f"{op} combines floating point; found {dtype}")
    factors = details.get("prescale", 1.0), details.get("postscale", 1.0)
    if dtype == "bool" and (op is Op.AVERAGE or factors != (1.0, 1.0)):
        raise ValueError("bool has no average and no multiples; pass op=Sum, Min, Max or Product")
    return details


def _shown(ranks: Sequence[int]) -> str:
    whole = list(ranks) == list(range(len(ranks)))
    return f"0 to {len(ranks) - 1}" if whole and len(ranks) > 1 else ", ".join(map(str, ranks))


def _close(lane: NamedLane, _: Backend) -> Finished[None]:
    lane.close()
    return Finished(None)


def _connect(
    backend: Backend, ranks: tuple[int, ...]
) -> tuple[HostBackend, Mailbox, HostBackend | None] | None:
    """Communicators for a process set; None on a rank outside it.

    Returns:
        For the data of named operations and for their messages, and for a runtime of the set's
        own, which that of all ranks does not need.
    """
    assert isinstance(backend, HostBackend), "the runtime's own backend is one of the host"
    whole = len(ranks) == backend.size
    data = backend.duplicate() if whole else backend.subset(ranks)
    if data is None:
        return None
    assert isinstance(data, HostBackend)
    own = None if whole else data.duplicate()
    assert own is None or isinstance(own, HostBackend)
    return data, data.mailbox(), own


def _check_ranks(ranks: Iterable[int], size: int) -> tuple[int, ...]:
    """The ranks of a process set, ascending.

    Raises:
        ValueError: none, one of them twice, or one that is none of this job.
    """
    chosen = sorted(ranks)
    if not chosen or len(set(chosen)) < len(chosen) or chosen[0] < 0 or chosen[-1] >= size:
        raise ValueError(
            f"the ranks of a process set are {chosen}; expected different ones of 0 to {size - 1}"
        )
    return tuple(chosen)
