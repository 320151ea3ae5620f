"""The runtime of one rank: its backend, its communication thread, and its ties to other ranks.

A process set has a runtime, too, on its ranks: with channels, lanes and costs of its own, on the
communication thread that serves all ranks.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

from wfbp.comm.backend import Backend, Buffer, Finished, HostBackend
from wfbp.comm.device.device import Device
from wfbp.comm.device.links import CONNECTING, DeviceLinks
from wfbp.comm.device.memory import DeviceMemory
from wfbp.comm.memory import Memory
from wfbp.config import Config
from wfbp.core.cost import Costs
from wfbp.core.types import Op, Operation
from wfbp.errors import NotInitializedError, PeerError, WfbpError
from wfbp.runtime.progress.channel import CollectiveLock, ControlChannel
from wfbp.runtime.progress.fetching import Fetched, Fetches, Store
from wfbp.runtime.progress.loop import TICK_S, LaneProtocol, Reply
from wfbp.runtime.progress.stall import ALL_RANKS, Members
from wfbp.runtime.progress.thread import CommunicationThread
from wfbp.runtime.timeline import TraceWriter
from wfbp.runtime.tuning.network import NetworkCosts

if TYPE_CHECKING:
    from wfbp.runtime.collectives.operations import Collectives


log = logging.getLogger("wfbp")

_WARNING = "warning"
"""Kind of the notices that tell rank 0 what to warn of."""

_FORWARDING_S = 0.2
"""For the launcher to pass on what ranks have written: at an abort it may drop the rest."""


class Releasable(Protocol):
    """What has buffers that are of no use without other ranks."""

    def release(self) -> None:
        """Let them go; nothing is sent any more."""


class Runtime:
    """Everything a rank needs to work with the others.

    Any training thread may call its public methods.

    Args:
        backend: over all ranks of this runtime; from here on only the communication thread uses it.
        config: settings of this rank.
        within: the runtime of all ranks, if this one is of a process set. It owns the communication
            thread, and ends with it.
        members: the ranks of the process set; all by default.

    Attributes:
        rank: number of this process among the ranks of this runtime, as all numbers in messages.
        size: number of ranks.
        members: the ranks, by their numbers among all ranks.
        where: this rank in messages ("rank 1 of 4").

    Example:
        >>> from wfbp.comm.emulated import EmulatedLink
        >>> runtime = Runtime(EmulatedLink(lambda nbytes: 0.0, size=1), Config())
        >>> runtime.exchange(b"me", "greeting")
        [b'me']
        >>> runtime.shutdown()
    """

    def __init__(
        self,
        backend: Backend,
        config: Config,
        *,
        within: Runtime | None = None,
        members: Members = ALL_RANKS,
    ) -> None:
        assert isinstance(backend, HostBackend), "the runtime's own backend is one of the host"
        self.config = config
        self.members = members
        self._within = within
        self.rank = backend.rank
        self.size = backend.size
        self.local_rank = backend.local_rank
        self.local_size = backend.local_size
        self.library = backend.library
        self._backend = backend
        self._network = NetworkCosts(
            config.probe_budget_s, self._check_measurement, backend.rank == 0
        )
        self._inner: list[Runtime] = []  # of process sets, in the order of making
        self._closed = False
        # Backends made for lanes, in the order of making, the same on every rank; and which of
        # them no lane uses. The communication thread adds to those, a training thread takes.
        self._leased: list[Backend] = []
        self._idle: set[int] = set()
        self._users: WeakSet[Releasable] = WeakSet()
        self.optimizer_numbers = count()
        self._names: Counter[str] = Counter()
        self.timeline: TraceWriter | None = None
        """Where steps are recorded, while anybody wants that."""
        # Named operations; init() makes them, on every rank.
        self.collectives: Collectives | None = None
        self._num_stores = count()
        self._warned: dict[str, object] = {}
        self.where = f"rank {self.rank} of {self.size}"
        if within is None:
            self.thread = CommunicationThread(backend, config, self.where)
            self._loop = self.thread.loop
            self._fetches = Fetches(backend, self._loop, self.where)
            self._loop.handle_notices(_WARNING, self._hear_warning)
        else:
            self.where += f" of process set {list(members.ranks or ())}"
            self.thread, self._loop, self._fetches = within.thread, within._loop, within._fetches
            within._inner.append(self)
        self.post = self.thread.post
        self.await_reply = self.thread.await_reply
        self.collective_lock = CollectiveLock(self.rank)
        self.devices = DeviceLinks(
            config, self.where, self._check_measurement, self._loop.advance_lanes
        )
        self.channel = self.channel_on(backend)
        self.call = self.channel.call
        self.exchange = self.channel.exchange
        # Of lanes that are made in the midst of a program, in which ranks need not come alike.
        self.planning_channel = self.channel
        if within is None:
            self.thread.start()

    def check(self) -> None:
        """Raise the ``WfbpError`` that has ended the runtime, if any: the first error, the
        shutdown, or the removal of its process set."""
        if self.thread.error is not None:
            raise self.thread.error
        if self._within is not None:
            self._within.check()
            if self._closed:
                raise WfbpError(
                    f"{self.where}: the process set was removed; add it again and make new "
                    "optimizers for it"
                )
        elif self._closed:
            raise NotInitializedError("an operation after shutdown()")

    def warn_once(self, topic: str, text: str) -> None:
        """Log a warning that other ranks may have as well, such as of a full disk; any thread.

        Rank 0 logs the first one of each topic, for the whole job, or this rank where rank 0 can no
        longer be told.
        """
        if self._within is not None:
            self._within.warn_once(topic, text)
        elif self._is_new(topic):
            rank_0_listens = not (self._closed or self.thread.error or 0 in self._loop.ended)
            if self.rank and rank_0_listens:
                self._tell({"kind": _WARNING, "topic": topic, "text": text})
            else:
                self._log_for_all(text)

    def _hear_warning(self, _: int, notice: dict[str, Any]) -> None:
        """Of another rank, which has told all others."""
        if self._is_new(notice["topic"]) and self.rank == 0:
            self._log_for_all(notice["text"])

    def _log_for_all(self, text: str) -> None:
        others = " (told once, also for other ranks that have this problem)"
        log.warning("%s%s", text, others if self.size > 1 else "")

    def _is_new(self, topic: str) -> bool:
        """Whether this rank has not warned or heard of it yet; any thread."""
        mine = object()
        return self._warned.setdefault(topic, mine) is mine

    def distinct_name(self, name: str) -> str:
        """A name for what is recorded of a reducer: those made later under the same name get a
        number."""
        if self._within is not None:
            return self._within.distinct_name(f"{name} of process set {self.members.number}")
        self._names[name] += 1
        return name if self._names[name] == 1 else f"{name}-{self._names[name]}"

    def channel_on(self, backend: Backend) -> ControlChannel:
        """A control channel that does not wait for those on other backends."""
        return ControlChannel(self.thread, backend, self.check, self.where, self.members)

    def separate_planning(self) -> None:
        """From now on :attr:`planning_channel` is a channel of its own; collective."""
        self.planning_channel = self.channel_on(self._duplicate(self.channel))

    def all_reduce(self, buffer: Buffer, dtype: str, op: Op, label: str) -> None:
        """Combine a buffer over all ranks, in place; it may lie anywhere.

        (A gradient in a fusion buffer here may lie elsewhere on other ranks, whose messages would
        go another way.)
        """
        foreign = buffer.copy() if self._backend.copies_segments(buffer) else buffer
        self.call(lambda backend: backend.all_reduce(foreign, dtype, op), label)
        if foreign is not buffer:
            buffer[:] = foreign

    def open_store(self) -> Store:
        """A store that others may fetch from; made on every rank, in the same order."""
        store = Store(f"{self.members.number}:{next(self._num_stores)}", self.members)
        if self.size > 1:
            self.post(lambda: self._fetches.add(store))
        return store

    def drop_store(self, store: Store) -> None:
        """This rank fetches nothing of a store any more, nor adds to it; in any thread."""
        if self.size > 1:
            self.post(lambda: self._fetches.drop(store))

    def fetch(self, store: Store, version: int, items: object, label: str) -> Fetched:
        """What all other ranks published in their stores; not a collective.

        ``items``, in JSON's types, are passed to the owners' ``collect``. Owners that have not come
        to ``version`` are waited for.

        Raises:
            DisagreementError: an owner is past that version, or has other tensors.
            WfbpError: ranks failed, or did not answer in time.
        """
        self.check()
        reply: Reply[Fetched] = Reply()
        self.post(lambda: self._fetches.ask(store, version, items, label, reply))
        fetched: Fetched = self.await_reply(reply, label)
        ranks = self.members.ranks
        return fetched if ranks is None else {ranks.index(r): fetched[r] for r in fetched}

    def lease(self, channel: ControlChannel) -> Backend:
        """A backend for a new lane; collective among the ranks on ``channel``.

        Reuses one that a removed lane left idle on every rank, because MPI has a limited number of
        communicators.
        """
        idle = json.dumps(sorted(self._idle)).encode()
        payloads = channel.exchange(idle, "choosing a lane")
        common = set.intersection(*(set(json.loads(payload)) for payload in payloads))
        if common:
            chosen: int = min(common)
            self._idle.remove(chosen)
            return self._leased[chosen]
        self._leased.append(self._duplicate(channel))
        return self._leased[-1]

    def _duplicate(self, channel: ControlChannel) -> Backend:
        made: Backend = channel.call(lambda backend: Finished(backend.duplicate()), "making a lane")
        return made

    def memory(self, backend: Backend, device: Device | None, channel: ControlChannel) -> Memory:
        """The memory of a lane whose backend comes from :meth:`lease`; collective.

        ``device`` is where the tensors lie, None for the host.
        """
        if device is None:
            return Memory(backend, self.config.zero_copy_min_bytes)
        number = self._leased.index(backend)
        connected = self.devices.backends.get((number, id(device)))
        if connected is None:
            assert isinstance(backend, HostBackend)
            host = backend
            connected = channel.call(
                lambda _: Finished(self.devices.connect_lane(number, device, host)), CONNECTING
            )
        return DeviceMemory(connected, backend, self.check)

    def measure_costs(
        self,
        max_bytes: int,
        operations: Sequence[Operation] = (Operation.ALL_REDUCE,),
        anew: bool = False,
        lane_backend: Backend | None = None,
        channel: ControlChannel | None = None,
    ) -> Costs:
        """The measured cost curves up to a message size, each measured once; collective.

        Args:
            max_bytes: the largest message that will be sent.
            operations: the curves needed; all-reduce always is. Missing ones are measured within
                ``config.probe_budget_s`` in all, about.
            anew: whether to measure again, because the network may have changed.
            lane_backend: of a lane that sends nothing now; measured if it is a device's.
            channel: on which ranks meet for this; the runtime's own by default.

        Returns:
            All curves known so far, the same on every rank.
        """
        return self._network.measure(
            max_bytes, operations, anew, lane_backend, (channel or self.channel).call
        )

    def expect_other_threads(self) -> None:
        """From now on any thread may begin a collective, so this rank is never judged."""
        self._loop.watch.other_threads = True

    def add_user(self, user: Releasable) -> None:
        """Have ``user`` let its buffers go at :meth:`shutdown`; it is not kept for that."""
        (self._within or self)._users.add(user)

    def add_lane(self, lane: LaneProtocol) -> None:
        """Serve a lane from now on."""
        self.post(lambda: self._loop.add_lane(lane, self.members))

    def remove_lane(self, lane: LaneProtocol) -> None:
        """No longer serve a lane, and take its backend back."""
        number = self._leased.index(lane.backend)
        self.post(lambda: self._loop.retire_lane(lane, lambda: self._idle.add(number)))

    def close(self) -> None:
        """End the runtime of a process set, behind its last step; collective among its ranks."""
        assert self._within is not None
        self.check()
        label = "closing a process set"
        self.call(lambda _: Finished(None), label)  # lanes that were removed before are idle now
        idle = json.dumps(sorted(self._idle)).encode()  # in others steps are under way for ever
        payloads = self.channel.exchange(idle, label)
        common = set.intersection(*(set(json.loads(payload)) for payload in payloads))
        self.call(partial(_finished, partial(self.devices.close, common)), label)
        for number in sorted(common):
            self.call(partial(_finished, self._leased[number].close), label)
        self.thread.call(lambda: _finished(self._backend.close), label, members=self.members)
        self._within._inner.remove(self)
        self._closed = True

    def shutdown(self) -> None:
        """Leave: tell the others, wait until they leave too, and release everything. Idempotent.

        A rank that still needs this one gets a ``PeerError`` instead of a hang.
        """
        if self._closed:
            return
        self._closed = True
        self._wait_until(lambda: not self.thread.owes_work, self.config.timeout_s)
        self._tell({"kind": "bye"})
        if self.thread.error is None:
            gone, num_others = self._loop.watch.gone, self.size - 1
            self._wait_until(
                lambda: len(gone) >= num_others or self.thread.error is not None,
                self.config.timeout_s,
            )
        self.post(self._give_back if self.thread.error is None else self._give_up)
        if self.thread.stop(timeout_s=self.config.abort_grace_s):
            for user in self._users:
                user.release()
            self._backend.release()

    def fail_job(self, reason: str) -> None:
        """End the job because this rank failed: tell the others why, let them report, abort."""
        secondary = isinstance(self.thread.error, PeerError)
        self._tell({"kind": "failed", "reason": reason, "secondary": secondary})
        patience_s = self.config.abort_grace_s * (2 if secondary else 1)
        self._wait_until(lambda: len(self._loop.ended) >= self.size - 1, patience_s)
        time.sleep(_FORWARDING_S)
        self.post(lambda: self._backend.abort(1))
        time.sleep(1.0)
        self._backend.abort(1)  # the communication thread is stuck; nothing is left to protect

    def _tell(self, notice: dict[str, Any]) -> None:
        self.post(lambda: self._loop.send_notice(notice))

    def _wait_until(self, done: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        pause = threading.Event()
        while not done() and time.monotonic() < deadline:
            pause.wait(TICK_S / 2)

    # On the communication thread.

    def _give_back(self) -> None:
        self._loop.closing = True
        for runtime in (self, *self._inner):
            runtime.devices.close()
        for inner in self._inner:
            inner._backend.close()
        if self.planning_channel is not self.channel:
            self.planning_channel.close()
        if self.collectives is not None:
            self.collectives.close()
        self._backend.close()

    def _give_up(self) -> None:
        """Of lanes that were not failing too: nothing may wait for other ranks at exit."""
        for runtime in (self, *self._inner):
            runtime.devices.give_up()
        self._backend.give_up()

    def _check_measurement(self, label: str, waited_s: float) -> None:
        self._loop.check_measurement(label, waited_s, self.members)


def _finished(act: Callable[[], None], _: Backend | None = None) -> Finished[None]:
    act()
    return Finished(None)
