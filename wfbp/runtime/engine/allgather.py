"""The training thread's side of all-gathers: which tensors have arrived, and waiting for them."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import replace

from wfbp.core.plan import Plan
from wfbp.core.types import Phase, TensorSpec, wire_type
from wfbp.runtime.progress.plan_executor import PlanExecutor
from wfbp.runtime.runtime import Runtime
from wfbp.runtime.step import NO_GATHER, BufferView, GatherRequest, GroupTime, Span
from wfbp.runtime.transport.buffers import shard_range
from wfbp.runtime.transport.transport import Transport


class AllGatherState:
    """The all-gathers of the installed plan; tensors are known by their index into the engine's
    specs.

    The training thread begins them; any thread may wait. ``_lock`` is held for one arrival.
    """

    def __init__(
        self, runtime: Runtime, lane: PlanExecutor, transport: Transport, name: str
    ) -> None:
        self._runtime = runtime
        self._lane = lane
        self._transport = transport
        self._label = f"{name}: all-gather"
        self._lock = threading.Lock()
        self._num_groups = 0
        self._num_arrived = 0
        self._waits: list[Span] = []
        self._times: list[GroupTime] = []
        self.pending = False
        """Whether anything has not arrived yet."""

    def install(self, plan: Plan, members: Sequence[int], num_tensors: int) -> None:
        """Follow another plan while nothing is pending; ``members`` are its tensors' indices."""
        self._members = members
        self._group_of = [-1] * num_tensors
        groups = [group for group in plan.groups if group.phase is Phase.FORWARD]
        for number, group in enumerate(groups):
            for place in group.tensors:
                self._group_of[members[place]] = number
        self._num_groups = self._num_arrived = len(groups)
        self._times = []  # of the groups of the plan before
        self._begun = NO_GATHER
        self.groups = [[members[place] for place in group.tensors] for group in groups]
        """The tensors of each group, by index, in the order of sending."""

    @property
    def gatherable(self) -> bool:
        """Whether the plan gathers anything."""
        return self._num_groups > 0

    def gathered(self, index: int) -> bool:
        """Whether the plan gathers a tensor at all."""
        return self._group_of[index] >= 0

    def begin(
        self,
        addresses: Sequence[int],
        owners: object,
        count: int | None = None,
        sources: Sequence[int] | None = None,
    ) -> None:
        """Send this rank's shards, and receive the others'.

        Args:
            addresses: of whole tensors, by index; only those of gathered tensors are used.
            owners: kept alive until all has arrived.
            count: how many groups may go now, by default all; :meth:`release_rest` lets the others
                go.
            sources: where whole tensors would begin of which this rank's shards are part, if not at
                these addresses; see :class:`GatherRequest`.
        """
        if not self._num_groups:
            return
        self.wait_all()
        self._waits, self._times = [], []  # of an earlier step, that nobody has asked for
        self._num_arrived = 0
        self.pending = True
        sources = addresses if sources is None else sources
        self._begun = GatherRequest(
            [addresses[k] for k in self._members],
            owners,
            [sources[k] for k in self._members],
            count,
            self._transport.dependencies(),
        )
        self._post(self._begun)

    def release_rest(self) -> None:
        """Let the groups go that :meth:`begin` held back."""
        self._post(replace(self._begun, count=None, dependencies=self._transport.dependencies()))

    def _post(self, event: GatherRequest) -> None:
        self._lane.events.append(event)
        # It leaves from this thread: the communication thread, which is woken to move it on, would
        # have to wait for the interpreter while this one goes on.
        self._runtime.thread.progress()
        self._runtime.post(self._lane.wake)

    def wait(self, index: int) -> None:
        """Wait until a tensor is whole; raises ``WfbpError`` if ranks failed or did not answer in
        time."""
        self._wait(self._group_of[index])

    def take_times(self) -> tuple[list[Span], list[GroupTime]]:
        """The waits of threads, and the times of gathers, since the last call."""
        taken = self._waits, self._times
        self._waits, self._times = [], []
        return taken

    def wait_all(self) -> None:
        """Wait until everything is whole."""
        self._wait(self._num_groups - 1)

    def _wait(self, group: int) -> None:
        # One arrival at a time: a thread that waits for an early group waits for no later one.
        while self.pending and self._num_arrived <= group:
            self._await_next(group)

    def _await_next(self, group: int) -> None:
        with self._lock:
            # Another thread may have waited meanwhile, and then the plan may have changed.
            group = min(group, self._num_groups - 1)
            if not self.pending or self._num_arrived > group:
                return
            start = self._transport.now()
            time = self._runtime.await_reply(self._lane.arrivals, self._label)
            self._transport.await_arrival(time)
            self._times.append(time)
            self._waits.append((start, self._transport.now()))
            self._num_arrived += 1
            self.pending = self._num_arrived < self._num_groups


class GradientAssembler:
    """Storage of gathered gradients, one buffer per tensor, made when it is first needed."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        allgather: AllGatherState,
        transport: Transport,
        rank: int,
        size: int,
        gather_dtype: str,
    ) -> None:
        self._transport = transport
        self._specs = specs
        self._allgather = allgather
        self._ranges = [shard_range(spec, rank, size) for spec in specs]
        self._casts = [wire_type(spec.dtype, gather_dtype) != spec.dtype for spec in specs]
        self._storage: list[BufferView | None] = [None] * len(specs)

    def forget(self) -> None:
        """Drop the storage; the program keeps what it still uses."""
        self._storage = [None] * len(self._specs)

    def trim(self) -> None:
        """Drop the storage of tensors that the plan does not gather."""
        for index in range(len(self._specs)):
            if not self._allgather.gathered(index):
                self._storage[index] = None

    def begin(
        self, reduced: Sequence[BufferView | None], kept: Collection[int] = ()
    ) -> list[BufferView | None]:
        """Gather shards of gradients; returns views that hold whole gradients once all have
        arrived.

        Args:
            reduced: per tensor its whole gradient or this rank's shard; None where no rank had one.
            kept: addresses of the program's gradients: storage that lies there is left to the
                program.
        """
        whole = list(reduced)
        addresses, sources = [0] * len(whole), [0] * len(whole)
        for index, slot in enumerate(reduced):
            if not self._allgather.gathered(index):
                continue
            storage = self._storage[index]
            if storage is None or storage.address in kept:
                memory = self._transport.empty(self._specs[index].nbytes)
                storage = self._storage[index] = self._transport.view(memory)
            addresses[index] = sources[index] = storage.address
            if slot is None:
                continue
            whole[index] = storage
            start, stop = self._ranges[index]
            if self._casts[index] and not slot.whole:
                # All shards are written, this rank's among them. (The program has whole gradients,
                # and may change them while this is on its way.)
                sources[index] = slot.address - start
            else:
                data = slot.data[start:stop] if slot.whole else slot.data
                self._transport.copy(storage.data[start:stop], data)
        self._allgather.begin(addresses, (list(self._storage), reduced), sources=sources)
        return whole
