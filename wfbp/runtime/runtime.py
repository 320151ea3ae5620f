"""The runtime of one rank: its backend, its communication thread, and its ties to other ranks.

A process set has its own runtime (channels, lanes, costs) on the job's communication thread.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakSet

from wfbp.comm.backend import Backend, HostBackend
from wfbp.config import Config
from wfbp.errors import NotInitializedError, PeerError, WfbpError
from wfbp.runtime.progress.channel import ControlChannel
from wfbp.runtime.progress.fetching import Fetched, Fetches, Store
from wfbp.runtime.progress.loop import TICK_S, LaneProtocol, Reply
from wfbp.runtime.progress.stall import ALL_RANKS, Members
from wfbp.runtime.progress.thread import CommunicationThread
from wfbp.runtime.timeline_files import TraceWriter
from wfbp.runtime.tuning.network import NetworkCosts

if TYPE_CHECKING:
    from wfbp.comm.device.links import DeviceLinks
    from wfbp.runtime.reducer import Reducer

log = logging.getLogger("wfbp")

_WARNING = "warning"
"""Kind of the notices that bring warnings to rank 0."""

FORWARDING_S = 0.2
"""Time for the launcher to forward output: at an abort it may drop the rest."""


class Runtime(ABC):
    """Connects a rank to the other ranks of the job or of a process set; any training thread may
    call its public methods.

    From here on only the communication thread uses ``backend``. ``rank`` counts among this
    runtime's ranks, ``members`` among all ranks.
    """

    def __init__(
        self,
        backend: HostBackend,
        config: Config,
        thread: CommunicationThread,
        fetches: Fetches,
        where: str,
        members: Members,
    ) -> None:
        self.config = config
        self.members = members
        self.where = where
        self.rank = backend.rank
        self.size = backend.size
        self.local_rank = backend.local_rank
        self.local_size = backend.local_size
        self.library = backend.library
        self.backend, self.thread, self._loop, self._fetches = backend, thread, thread.loop, fetches
        self.network = NetworkCosts(
            config.probe_budget_s, self.check_measurement, backend.rank == 0
        )
        self.channel = self.channel_on(backend)
        self._closed = False
        # Held by rank 0 from before any rank begins an operation until every rank has ended it.
        self._turn: AbstractContextManager[object] = (
            nullcontext() if self.rank else threading.RLock()
        )
        # Reducers, which release their buffers when the job ends.
        self.users: WeakSet[Reducer] = WeakSet()
        self.timeline: TraceWriter | None = None
        self.optimizer_numbers = count()
        self._num_stores = count()

        # Lanes, by the number of their pair of backends. Pairs are made in the same order on every
        # rank. The communication thread adds to the numbers of idle ones, a training thread takes.
        self._leased: list[tuple[HostBackend, HostBackend]] = []
        self._idle: set[int] = set()
        self._lanes: dict[int, LaneProtocol] = {}
        # Attachments of the lanes' memory (``comm/locations``), closed with the runtime.
        self.attached: list[DeviceLinks] = []

    def check(self) -> None:
        """Raise the ``WfbpError`` that ended the runtime or its process set, if any."""
        if self.thread.error is not None:
            raise self.thread.error

    @abstractmethod
    def warn_once(self, topic: str, text: str) -> None:
        """Log a warning once per topic and job, on rank 0 if it still listens; any thread."""

    @abstractmethod
    def distinct_name(self, name: str) -> str:
        """A name for a reducer's records: later ones of the same name get a number."""

    def channel_on(self, backend: HostBackend, name: str = "") -> ControlChannel:
        """A control channel that does not wait for those on other backends."""
        return ControlChannel(self.thread, backend, self.check, self.where, self.members, name)

    def open_store(self) -> Store:
        """A store that others may fetch from; made on every rank, in the same order."""
        store = Store(f"{self.members.number}:{next(self._num_stores)}", self.members)
        if self.size > 1:
            self._fetches.stores[store.key] = store
        return store

    def drop_store(self, store: Store) -> None:
        """Stop using a store on this rank; any thread."""
        if self.size > 1:
            self.thread.post(lambda: self._fetches.drop(store))

    def fetch(self, store: Store, version: int, items: object, label: str) -> Fetched:
        """All other ranks' content of ``version``, waiting for late owners; not a collective."""
        self.check()
        reply: Reply[Fetched] = Reply()
        self.thread.post(lambda: self._fetches.ask(store, version, items, label, reply))
        fetched: Fetched = self.thread.await_reply(reply, label)
        ranks = self.members.ranks
        return fetched if ranks is None else {ranks.index(r): fetched[r] for r in fetched}

    def lease(self, channel: ControlChannel) -> tuple[HostBackend, HostBackend]:
        """Backends for a new lane and for its exchanges, reused if all ranks have idle ones;
        collective."""
        # Two, because a step that some ranks discard may be under way while all exchange.
        # Reused, because MPI has a limited number of communicators.
        if common := self._idle_everywhere(channel, "choosing a lane"):
            chosen: int = min(common)
            self._idle.remove(chosen)
            return self._leased[chosen]
        self._leased.append(
            channel.run(lambda own: (own.duplicate(), own.duplicate()), "making a lane")
        )
        return self._leased[-1]

    @contextmanager
    def in_turn(self, channel: ControlChannel, label: str) -> Iterator[None]:
        """Context for an operation that blocks a rank until all ranks have begun it, such as making
        communicators: ranks in different ones would deadlock; collective on ``channel``."""
        # Rank 0 decides the order; the others learn it on each operation's own channel.
        with self._turn:
            channel.exchange(b"", f"{label}: its turn")
            yield
            channel.exchange(b"", f"{label}: its end")

    def _idle_everywhere(self, channel: ControlChannel, label: str) -> set[int]:
        """Numbers of the leased backends that are idle on all ranks; collective."""
        return set.intersection(*map(set, channel.exchange_values(sorted(self._idle), label)))

    def add_lane(self, lane: LaneProtocol) -> None:
        self._lanes[self.number_of(lane.backend)] = lane
        self.thread.post(lambda: self._loop.add_lane(lane, self.members))

    def remove_lane(self, lane: LaneProtocol) -> None:
        """Stop serving a lane, and reuse its backend."""
        number = self.number_of(lane.backend)
        del self._lanes[number]
        self.thread.post(lambda: self._loop.retire_lane(lane, lambda: self._idle.add(number)))

    def number_of(self, lane_backend: Backend) -> int:
        """The number of a lane's backend, the same on every rank."""
        return next(k for k, leased in enumerate(self._leased) if leased[0] is lane_backend)

    def check_measurement(self, label: str, waited_s: float) -> None:
        self._loop.check_measurement(label, waited_s, self.members)


class JobRuntime(Runtime):
    """The runtime of all ranks, which owns the communication thread."""

    def __init__(self, backend: HostBackend, config: Config) -> None:
        where = f"rank {backend.rank} of {backend.size}"
        thread = CommunicationThread(backend, config, where)
        fetches = Fetches(backend, thread.loop, where)
        super().__init__(backend, config, thread, fetches, where, ALL_RANKS)
        # init() learns these: of every rank, its number on its host and how many there are; and
        # how many ranks may use exactly this rank's cores.
        self.places: Sequence[tuple[int, int]] = ()
        self.core_sharers = 1
        # For lanes made later in a program, when ranks' exchanges may differ in order.
        self.planning_channel = self.channel
        self._sets: list[SetRuntime] = []  # in the order of making
        # Called under the progress lock when all ranks end, before the backend is closed.
        self.at_end: list[Callable[[], None]] = []
        self._names: Counter[str] = Counter()
        self._warned: dict[str, object] = {}
        # All ranks get another rank's warning; one of them logs it.
        self._loop.handle_notices(
            _WARNING, lambda _, n, __: self._warn(n["topic"], n["text"], logs=self.rank == 0)
        )
        thread.start()

    def warn_once(self, topic: str, text: str) -> None:
        if self.rank == 0 or self._closed or self.thread.error or 0 in self._loop.ended:
            self._warn(topic, text, logs=True)
        elif self._warn(topic, text, logs=False):
            self.thread.post(
                lambda: self._loop.send_notice(_WARNING, {"topic": topic, "text": text})
            )

    def _warn(self, topic: str, text: str, logs: bool) -> bool:
        """Note, and perhaps log, a warning; whether it is new on this rank. Any thread."""
        mine = object()
        is_new = self._warned.setdefault(topic, mine) is mine
        if is_new and logs:
            others = " (shown once; other ranks may have this problem too)"
            log.warning("%s%s", text, others if self.size > 1 else "")
        return is_new

    def distinct_name(self, name: str) -> str:
        self._names[name] += 1
        return name if self._names[name] == 1 else f"{name}-{self._names[name]}"

    def separate_planning(self) -> None:
        """Give :attr:`planning_channel` its own backend; collective."""
        backend = self.channel.run(lambda own: own.duplicate(), "making a channel")
        self.planning_channel = self.channel_on(backend)

    def record(self, timeline: TraceWriter | None) -> None:
        """Close the current timeline, and record in another one, or in none."""
        before = self.timeline
        for runtime in (self, *self._sets):
            runtime.timeline = timeline
        if before is not None:
            before.close()

    def expect_other_threads(self) -> None:
        """From now on any thread may begin a collective, so this rank is never judged."""
        self._loop.watch.other_threads = True

    def shutdown(self, exit_status: int = 0) -> None:
        """Leave with the others and release everything; a rank that needs this one then fails, and
        ends the job with this rank's ``exit_status``."""
        if self._closed:
            return
        self._closed = True
        self._wait_until(
            lambda: bool(self.thread.error) or not self._loop.owes_work, self.config.timeout_s
        )
        self.thread.post(lambda: self._say_bye(exit_status))
        if self.thread.error is None:
            left, num_others = self._loop.watch.left, self.size - 1
            self._wait_until(
                lambda: len(left) >= num_others or self.thread.error is not None,
                self.config.timeout_s,
            )
        self.thread.post(self._give_back if self.thread.error is None else self._give_up)
        if self.thread.stop(timeout_s=self.config.abort_grace_s):
            for user in self.users:
                user.release()
            self.backend.release()
        self._loop.error = self._loop.error or NotInitializedError("an operation after shutdown()")

    def fail_job(self, reason: str) -> None:
        """Send the others the reason of this rank's failure, let them report it, and abort."""
        secondary = isinstance(self.thread.error, PeerError)
        notice = {"reason": reason, "secondary": secondary}
        self.thread.post(lambda: self._loop.send_notice("failed", notice))
        patience_s = self.config.abort_grace_s * (2 if secondary else 1)
        self._wait_until(lambda: len(self._loop.ended) >= self.size - 1, patience_s)
        time.sleep(FORWARDING_S)
        status = self._loop.exit_status or 1
        self.thread.post(lambda: self.backend.abort(status))
        time.sleep(1.0)
        self.backend.abort(status)  # the communication thread is stuck; nothing is left to protect

    def _wait_until(self, done: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        pause = threading.Event()
        while not done() and time.monotonic() < deadline:
            pause.wait(TICK_S / 2)

    # On the communication thread.

    def _say_bye(self, exit_status: int) -> None:
        lanes = [
            (runtime.members.number, number)
            for runtime in (self, *self._sets)
            for number in range(len(runtime._leased))
            if number not in runtime._idle
            and (number not in runtime._lanes or runtime._lanes[number].busy)
        ]
        self._loop.unfinished.update(lanes)
        status = asdict(self._loop.status())
        notice = {"exit_status": exit_status, "status": status, "unfinished": lanes}
        self._loop.send_notice("bye", notice)

    def _give_back(self) -> None:
        self._loop.closing = True
        for runtime in (self, *self._sets):
            for attachment in runtime.attached:
                attachment.close()
            # To free a communicator is a collective: all ranks leave out the same ones.
            for number, backends in enumerate(runtime._leased):
                if (runtime.members.number, number) not in self._loop.unfinished:
                    for backend in backends:
                        backend.close()
        for inner in self._sets:
            inner.backend.close()
        if self.planning_channel is not self.channel:
            self.planning_channel.close()
        for end in self.at_end:
            end()
        self.backend.close()

    def _give_up(self) -> None:
        """Of lanes that were not failing too: nothing may wait for other ranks at exit."""
        for runtime in (self, *self._sets):
            for attachment in runtime.attached:
                attachment.give_up()
        self.backend.give_up()


class SetRuntime(Runtime):
    """The runtime of a process set, on the communication thread of the job's."""

    def __init__(self, backend: HostBackend, job: JobRuntime, members: Members) -> None:
        where = f"rank {backend.rank} of {backend.size} of process set {list(members.ranks or ())}"
        super().__init__(backend, job.config, job.thread, job._fetches, where, members)
        self.users, self.timeline = job.users, job.timeline
        self.network.part_of_cores = job.network.part_of_cores
        self._job = job
        job._sets.append(self)

    def check(self) -> None:
        super().check()
        if self._closed:
            raise WfbpError(
                f"{self.where}: the process set was removed; add it again and make new "
                "optimizers for it"
            )

    def warn_once(self, topic: str, text: str) -> None:
        self._job.warn_once(topic, text)

    def distinct_name(self, name: str) -> str:
        return self._job.distinct_name(f"{name} of process set {self.members.number}")

    def close(self, close_named_operations: Callable[[], None]) -> None:
        """End the runtime after its last step; collective among its ranks."""
        self.check()
        label = "closing a process set"
        self.channel.run(lambda _: None, label)  # lanes that were removed before are idle now
        common = self._idle_everywhere(self.channel, label)  # the others have steps that never end

        def free(own: Backend) -> None:
            close_named_operations()
            for attachment in self.attached:
                attachment.close(common)
            for number in sorted(common):
                for backend in self._leased[number]:
                    backend.close()
            own.close()

        self.channel.run(free, label)
        self._job._sets.remove(self)
        self._closed = True
