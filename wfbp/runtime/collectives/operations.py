"""Operations as programs submit them: by name, in any order, and waited for by a handle."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Generic, TypeVar, overload

import numpy as np

from wfbp.comm.backend import Backend, Buffer, Finished, HostBackend, Mailbox
from wfbp.comm.device.device import Device
from wfbp.core.types import Op
from wfbp.errors import DisagreementError, WfbpError
from wfbp.runtime import signals
from wfbp.runtime.collectives import device_operations
from wfbp.runtime.collectives.arithmetic import contribution
from wfbp.runtime.collectives.device_operations import DeviceOperations
from wfbp.runtime.collectives.named_lane import JOIN, NamedLane, UnmatchedError
from wfbp.runtime.collectives.request import Adaptive, Kind, Reduction, Request
from wfbp.runtime.collectives.submission import Outcome, Placed, Submission
from wfbp.runtime.consistency import check_consistent
from wfbp.runtime.progress.loop import Reply
from wfbp.runtime.progress.stall import ALL_RANKS, Members
from wfbp.runtime.runtime import Runtime
from wfbp.runtime.timeline import TraceWriter

Adasum = Adaptive.ADASUM

_FLOATING = frozenset({"float16", "bfloat16", "float32", "float64"})


T = TypeVar("T")

_LEAVING = "add_process_set: behind all operations on devices"

_NAP_S = 100e-6

_SMALL_BYTES = 1 << 10
"""Reductions of up to this size need no messages but those by which ranks agree on them."""

_QUIET_LIBRARIES = frozenset({"jax", "tensorboard", "torch", "tqdm", "wfbp"})
"""Packages whose own threads begin no collective: bars, loaders and writers have such threads."""

_Post = Callable[[Callable[[], None]], None]
"""Hands a message to the communication thread."""

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
        placed: the data, where they lie on a device; see :meth:`Collectives.device_for`.
        waits: whether the thread that submits it then waits for it.
        ordered: whether ranks find each other by the order of all such operations, of whatever
            kind, and only compare the name.
    """

    kind: Kind
    name: str | None
    process_set: int
    data: Buffer
    finish: Callable[[Outcome], T]
    details: dict[str, Any] = field(default_factory=dict)
    placed: Placed | None = None
    waits: bool = False
    ordered: bool = False


@dataclass(slots=True)
class _Submitted:
    """An operation that was submitted and not waited for yet.

    ``number`` is its own, of ``numbers``, where it was given one.
    """

    key: tuple[int, str]
    kind: Kind
    label: str
    reply: Reply[Outcome]
    finish: Callable[[Outcome], Any]
    placed: Placed | None = None
    numbers: _Counter | None = None
    number: int = -1

    @property
    def is_complete(self) -> bool:
        """Whether the result is there, also on its device."""
        return self.reply.answered and (self.placed is None or self.placed.complete)


class _Counter:
    """Numbers from 0, of which the last can be given back; any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0

    def take(self) -> int:
        with self._lock:
            self._next += 1
            return self._next - 1

    def give_back(self, number: int) -> None:
        """The number was used in vain; it is lost where later ones were taken meanwhile."""
        with self._lock:
            if number == self._next - 1:
                self._next = number


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
        self._reserved: dict[tuple[int, str], int] = {}
        self._unnamed: dict[tuple[int, Kind | None], _Counter] = {}
        self._num_joins = 0
        self._set_numbers = count()
        self._sets: dict[int, _Set] = {}
        self._split: dict[int, tuple[int, ...]] = {}  # of each, all that were made by one split
        self.rank = runtime.rank
        obstacle = device_operations.obstacle() if runtime.config.device_operations else None
        mine = json.dumps([runtime.local_rank, runtime.local_size, obstacle]).encode()
        ranks = [
            json.loads(payload) for payload in runtime.exchange(mine, "init(): comparing hosts")
        ]
        self.hosts: list[tuple[int, int]] = [(place, size) for place, size, _ in ranks]
        """Of every rank, its number on its host and how many there are."""
        obstacles = [each for *_, each in ranks]
        self._may_have_devices = runtime.size > 1 and not any(each != "" for each in obstacles)
        self._detour_reason = ""  # why tensors on devices go through the host, until that was said
        if runtime.local_rank == 0 and runtime.size > 1 and None not in obstacles:
            lacking = ((rank, each) for rank, each in enumerate(obstacles) if each)
            self._detour_reason = next((f"rank {rank}: {each}" for rank, each in lacking), "")
        self._devices: DeviceOperations | None = None
        self._make_set(tuple(range(runtime.size)))

    # Process sets.

    @signals.deferring
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
        self._leave_devices()
        return self._make_set(chosen)

    @signals.deferring
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
        ranks_by_rank = [
            json.loads(payload) for payload in runtime.exchange(json.dumps([*mine]).encode(), call)
        ]
        chosen = {_check_ranks(ranks, runtime.size) for ranks in ranks_by_rank if ranks}
        for ranks in chosen:
            self._check_new(ranks)
            for rank in ranks:
                if tuple(ranks_by_rank[rank]) != ranks:
                    raise DisagreementError(
                        f"{runtime.where}: add_process_set: a communicator of ranks {list(ranks)} "
                        f"is not that of rank {rank}, which passed one of {ranks_by_rank[rank]}. "
                        "Every rank must pass its communicators in the same order"
                    )
        if not chosen:
            raise ValueError("a process set was made of a null communicator on every rank")
        self._leave_devices()
        numbers = {ranks: self._make_set(ranks) for ranks in sorted(chosen)}
        for number in numbers.values():
            self._split[number] = tuple(numbers.values())
        return numbers.get(tuple(mine), min(numbers.values()))

    def _leave_devices(self) -> None:
        """From now on named operations go through the host; collective over all ranks.

        The optimizers of a process set launch collectives on the same devices, in no order with
        those of other sets, so none of the named operations may be left. Behind the barrier all of
        them were answered: each rank has submitted it behind those that could go by its device.
        """
        if self._devices is not None and not self._devices.retired:
            self._devices.retire()
            nothing = np.empty(0, np.uint8)
            self.synchronize(self.submit(Call(Kind.BARRIER, _LEAVING, 0, nothing, lambda _: None)))
            while not self._devices.is_done:
                self._runtime.check()
                self._runtime.thread.progress()
                time.sleep(_NAP_S)

    def _check_new(self, ranks: tuple[int, ...]) -> None:
        for number, known in self._sets.items():
            if known.ranks == ranks and number == 0:
                raise ValueError(
                    f"the process set of all ranks {list(ranks)} exists already: use "
                    "global_process_set"
                )
            if known.ranks == ranks:
                raise ValueError(
                    f"a process set of ranks {list(ranks)} exists already, with number {number}"
                )

    @signals.deferring
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
        shown = ", ".join(str(list(process_set.ranks)) for process_set in removed)
        check_consistent(self._runtime, "remove_process_set", shown)
        for each, process_set in zip(together, removed, strict=True):
            del self._sets[each]
            self._split.pop(each, None)
            lane = process_set.lane
            if lane is not None:  # a lane that is idle is not served, nor is anything under way
                assert process_set.runtime is not None
                process_set.runtime.channel.call(partial(_close, lane), "removing a process set")
                process_set.runtime.close()

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
        with_devices = number == 0 and self._may_have_devices
        with runtime.collective_lock.hold(runtime.channel, label):
            made = runtime.channel.call(
                lambda backend: Finished(_connect(backend, ranks, with_devices)), label
            )
        if made is None:
            self._sets[number] = _Set(ranks, None, None)
            return number
        data, mailbox, own, beside = made
        if beside is not None:
            self._devices = DeviceOperations(runtime, beside)
        members = ALL_RANKS if own is None else Members(number, ranks)
        if own is not None:
            runtime = Runtime(own, runtime.config, within=runtime, members=members)
            runtime.timeline = self._runtime.timeline
        name = "" if own is None else f"process set {list(ranks)}"
        devices = self._devices if number == 0 else None
        lane = NamedLane(runtime.thread, data, mailbox, name, self._runtime.where, members, devices)
        lane.timeline = runtime.timeline
        self._sets[number] = _Set(ranks, lane, runtime)
        return number

    # Operations.

    def device_for(
        self,
        process_set: int,
        kind: Kind,
        details: dict[str, Any],
        place: Callable[[], Device | None],
    ) -> Device | None:
        """Where an operation may be carried out, if not through the host's memory.

        A call whose data are ``placed`` there may go either way, as all ranks agree.

        Args:
            process_set: number of the one whose ranks take part.
            kind: what is to be done.
            details: as of :class:`Call`.
            place: tells the device on which the tensor lies, if it does.
        """
        if self._devices is None and self._detour_reason and details["device"] != "cpu":
            reason, self._detour_reason = self._detour_reason, ""
            device_operations.tell_detour("a GPU", reason)
        if self._devices is None or process_set:
            return None
        is_scaled = (details.get("prescale", 1.0), details.get("postscale", 1.0)) != (1.0, 1.0)
        if not device_operations.carries(kind, details["dtype"], details.get("op"), is_scaled):
            return None
        device = place()
        return device if device is not None and self._devices.takes(device) else None

    @signals.deferring
    def run(self, call: Call[T]) -> T:
        """Begin an operation and wait for its result.

        Signal handlers run after it. Raises as :meth:`submit_all` and :meth:`synchronize` do.
        """
        call.waits = True
        return self.synchronize(self._begin([call], self._runtime.thread.leave)[0])

    @signals.deferring
    def run_all(self, calls: Sequence[Call[T]]) -> list[T]:
        """The same for several operations, of which none is begun where one is refused."""
        return self.synchronize(self._begin_group(calls, self._runtime.thread.leave))

    def submit(self, call: Call[T]) -> Handle[T]:
        """Begin an operation; raises as :meth:`submit_all` does.

        Returns:
            A handle.
        """
        return self._begin([call], self._runtime.post)[0]

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
        return self._begin_group(calls, self._runtime.post)

    def _begin_group(self, calls: Sequence[Call[T]], post: _Post) -> Handle[list[T]]:
        handles = self._begin(calls, post)
        group: Handle[list[T]] = Handle(next(_numbers))
        self._groups[group] = tuple(handles)
        return group

    @signals.deferring
    def _begin(self, calls: Sequence[Call[T]], post: _Post) -> list[Handle[T]]:
        self._runtime.check()
        checked = [self._check(call) for call in calls]
        begun: list[tuple[NamedLane, Submission]] = []
        handles: list[Handle[T]] = []
        try:
            for call, (lane, details) in zip(calls, checked, strict=True):
                handle, submission = self._reserve(call, details)
                handles.append(handle)
                begun.append((lane, submission))
        except ValueError:
            for handle in handles:
                self._release(handle, self._handles[handle])
            raise
        for lane, submission in begun:
            post(partial(lane.submit, submission))
        return handles

    def _check(self, call: Call[Any]) -> tuple[NamedLane, dict[str, Any]]:
        """Who is to carry an operation out, and the fields of its request but for the name."""
        name = call.name
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name is {name!r}; expected a string")
        members = self._sets[call.process_set]
        if members.lane is None:
            raise ValueError(
                f"{self._runtime.where} is not in the process set of ranks {list(members.ranks)}"
            )
        details = _checked(call.kind, call.details, members.ranks)
        details["waits"] = call.waits and not self._may_go_on_elsewhere()
        if _is_small(call):
            factor = details.get("prescale", 1.0)
            details["data"] = contribution(call.data, details["dtype"], call.details["op"], factor)
        return members.lane, details

    def _may_go_on_elsewhere(self) -> bool:
        """Whether another thread of this program may submit what other ranks wait in."""
        return (
            self._runtime.expects_other_threads
            or threading.current_thread() is not threading.main_thread()
            or any(
                thread is not threading.main_thread() and not _never_communicates(thread)
                for thread in threading.enumerate()
            )
        )

    def _reserve(self, call: Call[T], details: dict[str, Any]) -> tuple[Handle[T], Submission]:
        """Take the operation's name, or a number instead of one.

        Raises:
            ValueError: the name is pending.
        """
        kind, process_set, name = call.kind, call.process_set, call.name or ""
        numbers, number = None, -1
        if call.ordered or (not call.name and kind is not Kind.JOIN):
            sort = process_set, None if call.ordered else kind
            numbers = self._unnamed.setdefault(sort, _Counter())
            number = numbers.take()
            epoch = f"{self._num_joins}." if self._num_joins else ""
            group = "ordered" if call.ordered else f"{kind.value}.unnamed"
            if name:
                details["called"] = f"{kind.value} {name!r}"
            name = f"{group}.{epoch}{number}"
        request = Request(kind, name, **details)
        key = process_set, name
        handle: Handle[T] = Handle(next(_numbers))
        holder = self._reserved.setdefault(key, handle)
        if holder != handle and not self._gives_way(holder, kind):
            raise ValueError(
                f"{kind.value}: an operation of the name {name!r} is pending on this rank; "
                "synchronize() its handle first, or choose another name"
            )
        self._reserved[key] = handle
        submission = Submission(request, call.data, call.placed)
        call.name = name
        self._handles[handle] = _Submitted(
            key, kind, request.label, submission.reply, call.finish, call.placed, numbers, number
        )
        return handle, submission

    def poll(self, handle: int) -> bool:
        """Whether an operation is complete; communication is moved on if it is not.

        Raises:
            ValueError: no such operation, or it was synchronized already.
        """
        if handle in self._groups:
            return all(self.poll(member) for member in self._groups[handle])
        entry = self._find(handle)
        if not entry.reply.answered:
            self._runtime.thread.progress()
        return entry.is_complete

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
        with signals.deferred:
            return self._await(handle)

    def _await(self, handle: int) -> Any:
        if handle in self._groups:
            return self._await_all(handle)
        entry = self._find(handle)
        try:
            outcome = self._runtime.await_reply(entry.reply, entry.label)
        except UnmatchedError:
            if entry.numbers is not None:  # other ranks have numbered something else
                entry.numbers.give_back(entry.number)
            raise
        finally:
            self._release(handle, entry)
        return entry.finish(outcome)

    def _release(self, handle: int, entry: _Submitted) -> None:
        self._handles.pop(handle, None)
        if self._reserved.get(entry.key) == handle:
            del self._reserved[entry.key]

    def _await_all(self, group: int) -> list[Any]:
        """Wait for all, so that every name is free again, and raise the first error."""
        results: list[Any] = []
        handles = self._groups[group]
        while len(results) < len(handles):
            try:
                results.append(self._await(handles[len(results)]))
            except WfbpError as error:
                results.append(error)
        del self._groups[group]
        for result in results:
            if isinstance(result, WfbpError):
                raise result
        return results

    def begin_join(self) -> Handle[list[int]]:
        """Contribute zeros from now on until all ranks have called this; returns a handle.

        Also to the process sets that this rank is in: the others go on there, too.
        """
        nothing = np.empty(0, np.uint8)
        mine = [
            number for number, process_set in self._sets.items() if process_set.lane is not None
        ]
        return self.submit_all(
            [
                Call(Kind.JOIN, JOIN, number, nothing, lambda outcome: outcome.rows[0])
                for number in mine
            ]
        )

    def note_progress(self) -> None:
        """This rank has joined, and the others go on."""
        for process_set in self._sets.values():
            if process_set.lane is not None:
                process_set.lane.note_progress()

    def end_join(self, handle: Handle[list[int]]) -> int:
        """Wait for the other ranks; returns the last one to come."""
        last, *_ = self.synchronize(handle)  # of all ranks, and of each set
        # Ranks that were stood in for have numbered fewer operations than the others.
        self._num_joins += 1
        self._unnamed.clear()
        return last

    def record(self, timeline: TraceWriter | None) -> None:
        """Record steps and operations in another timeline from now on, or in none; the one before
        is closed."""
        before, self._runtime.timeline = self._runtime.timeline, timeline
        for process_set in self._sets.values():
            if process_set.lane is not None and process_set.runtime is not None:
                process_set.lane.timeline = process_set.runtime.timeline = timeline
        if before is not None:
            before.close()

    def _gives_way(self, holder: int, kind: Kind) -> bool:
        """Whether an operation lets one of another kind have its name: once it is complete."""
        entry = self._handles.get(holder)
        return entry is not None and entry.reply.answered and entry.kind is not kind

    def _find(self, handle: int) -> _Submitted:
        entry = self._handles.get(handle)
        if entry is None:
            raise ValueError(
                f"handle {handle!r} is of no pending operation; each may be synchronized once"
            )
        return entry

    # On the communication thread.

    def close(self) -> None:
        """Give all communicators back; collective, and nothing may be under way."""
        for process_set in self._sets.values():
            if process_set.lane is not None:
                process_set.lane.close()


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


def _never_communicates(thread: threading.Thread) -> bool:
    """Whether a thread runs nothing but code of a library that does not communicate by it."""
    code = getattr(thread, "_target", None) or type(thread)  # the target is gone where it ended
    return str(getattr(code, "__module__", "")).partition(".")[0] in _QUIET_LIBRARIES


def _is_small(call: Call[Any]) -> bool:
    """Whether the coordinator carries an operation out, from data that come with the requests."""
    return (
        call.kind is Kind.ALLREDUCE
        and call.details["op"] is not Adasum
        and call.placed is None
        and call.data.nbytes <= _SMALL_BYTES
    )


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
    backend: Backend, ranks: tuple[int, ...], with_devices: bool
) -> tuple[HostBackend, Mailbox, HostBackend | None, HostBackend | None] | None:
    """Communicators for a process set; None on a rank outside it.

    Returns:
        For the data of named operations and for their messages, for a runtime of the set's own,
        which that of all ranks does not need, and for named operations on devices, if wanted.
    """
    assert isinstance(backend, HostBackend), "the runtime's own backend is one of the host"
    whole = len(ranks) == backend.size
    data = backend.duplicate() if whole else backend.subset(ranks)
    if data is None:
        return None
    assert isinstance(data, HostBackend)
    own = None if whole else data.duplicate()
    assert own is None or isinstance(own, HostBackend)
    beside = data.duplicate() if with_devices else None
    assert beside is None or isinstance(beside, HostBackend)
    return data, data.mailbox(), own, beside


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
