"""All-gathers of decoupled tensors during the next forward, and waits for their arrival."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import replace

from wfbp.comm.memory import Memory
from wfbp.core.types import TensorSpec
from wfbp.runtime.buffers import shard_range
from wfbp.runtime.lane import Lane
from wfbp.runtime.measuring import StepClock
from wfbp.runtime.progress.thread import CommunicationThread, TakenError
from wfbp.runtime.step import BufferView, Gather, GroupStamps


class Gathers:
    """The all-gathers of one reducer's plan. Tensors are known by the reducer's numbers.

    Several threads at once may call :meth:`await_tensor` and :meth:`flush`. All other methods are
    for the training thread.
    """

    def __init__(
        self,
        lane: Lane,
        memory: Memory,
        thread: CommunicationThread,
        clock: StepClock,
        specs: Sequence[TensorSpec],
        name: str,
    ) -> None:
        self._lane, self._memory, self._thread, self._clock = lane, memory, thread, clock
        self._specs = specs
        self._label = f"{name}: all-gather"
        rank, size = memory.backend.rank, memory.backend.size
        self._shards = [slice(*shard_range(spec, rank, size)) for spec in specs]
        self._whole: list[BufferView | None] = [None] * len(specs)  # gathered gradients
        self.groups: Sequence[Sequence[int]] = ()  # tensors, in the order of sending
        self._group_of = [-1] * len(specs)
        self._num_arrived = 0
        self._held_back: Gather | None = None
        self._lock = threading.RLock()  # a signal handler may wait within a wait

    def install(self, groups: Sequence[Sequence[int]], final: bool) -> None:
        """Use these groups from now on; ``final``: memory of other tensors is not needed again."""
        with self._lock:  # another thread may ask meanwhile
            self.groups = groups
            self._group_of = group_of_each(groups, len(self._specs))
            self._num_arrived = len(groups)
        self._held_back = None
        if final:
            for index in range(len(self._specs)):
                if index not in self:
                    self._whole[index] = None

    def __contains__(self, index: int) -> bool:
        """Whether a tensor is gathered."""
        return self._group_of[index] >= 0

    def send(self, addresses: Sequence[int], owners: object, count: int | None = None) -> None:
        """All-gather updated tensors as :class:`Gather` says; ``count`` holds groups back."""
        if not self.groups:
            return
        self.flush()
        self._clock.waits, self._clock.gathers = [], []
        self._num_arrived = 0
        kept = [owners] * len(self._specs)
        self._held_back = Gather(addresses, kept, count, self._memory.update_dependencies())
        self._post(self._held_back)

    def send_rest(self) -> None:
        """Send the groups that :meth:`send` held back."""
        if (held := self._held_back) is not None:
            self._post(replace(held, count=None, dependencies=self._memory.update_dependencies()))

    def _post(self, event: Gather) -> None:
        self._lane.events.append(event)
        # This thread sends it, because the communication thread would first have to wait for the
        # interpreter. The communication thread then continues it.
        self._thread.progress()
        self._thread.loop.wakeup.set()

    def gather_gradients(self, reduced: Sequence[BufferView | None]) -> list[BufferView | None]:
        """Gather gradients; the views are whole once all have arrived, and not in memory that the
        program uses."""
        memory = self._memory
        whole = list(reduced)
        addresses = [0] * len(whole)
        for index, view in enumerate(reduced):
            if index not in self:
                continue
            shard, storage = self._shards[index], self._whole[index]
            if storage is None or any(lent.is_used() for lent in storage.lent or ()):
                data = memory.empty(self._specs[index].nbytes)
                storage = BufferView(data, memory.address(data), True, [])
                self._whole[index] = storage
            addresses[index] = storage.address
            if view is None:
                continue
            whole[index] = storage
            memory.copy(storage.data[shard], view.data[shard] if view.whole else view.data)
        self.send(addresses, (list(self._whole), reduced))
        return whole

    def await_tensor(self, index: int) -> None:
        """Wait until a gathered tensor is whole; ``WfbpError`` if ranks failed or are late."""
        self.flush(self._group_of[index])

    def flush(self, group: int = sys.maxsize) -> None:
        """Wait until the gathers up to this one, or all, have arrived."""
        while self._num_arrived <= min(group, len(self.groups) - 1):
            # One arrival at a time: a thread that waits for an early group waits for no later one.
            with self._lock:
                # Another thread may have waited meanwhile, and then the plan may have changed.
                if self._num_arrived > min(group, len(self.groups) - 1):
                    return
                start = self._memory.now()
                try:
                    arrival: GroupStamps = self._thread.await_reply(
                        self._lane.arrivals, self._label
                    )
                except TakenError:
                    continue
                self._memory.await_arrival(arrival.end)
                self._clock.gathers.append(arrival)
                self._clock.waits.append((start, self._memory.now()))
                self._num_arrived += 1

    def release(self) -> None:
        """Release the memory of gathered gradients."""
        self._whole = [None] * len(self._specs)


def group_of_each(groups: Sequence[Sequence[int]], count: int) -> list[int]:
    """By tensor, the group that it is in; -1 for none."""
    group_of = [-1] * count
    for group, members in enumerate(groups):
        for index in members:
            group_of[index] = group
    return group_of
