"""Memory of a device for one lane: streams, and the events that order them.

    producer's stream    backward ... gradient | event ... gradient | event
    packing stream                 wait, pack | event          wait, pack | event
    lane's stream                              wait, reduce                wait, reduce | event
    consumer's stream                                                                wait, update

The host never waits here. A group is packed while the previous one travels. Before the packing
stream reuses a buffer, it waits for an event of the consumer's stream, recorded at the next step's
first gradient, when all reads are enqueued. It also waits for the lane's stream: a discarded step
has no consumer. The packing stream owns all memory.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from wfbp.comm.arrays import Buffer
from wfbp.comm.backend import Backend, Work
from wfbp.comm.device.device_backend import DeviceBackend, DeviceWork
from wfbp.comm.memory import Dependencies, Event, Memory, SlotTable, Stamp
from wfbp.core.types import Op

_CHECK_S = 0.05
_NAP_S = 100e-6


class DeviceMemory(Memory):
    """Memory and streams of one device; ``backend`` sends messages, ``host`` sends flags, ``check``
    raises the error that has ended the runtime."""

    backend: DeviceBackend
    copies_in_order = True
    polls = True
    sends_flags_separately = True
    lag_steps = 2

    def __init__(self, backend: DeviceBackend, host: Backend, check: Callable[[], None]) -> None:
        super().__init__(backend)
        self._device = device = backend.device
        self._stream = backend.stream
        self._packing = backend.packing
        self._host = host
        self._check = check
        # The stream on which the training thread last consumed results.
        self._home = device.current_stream()
        self._producers: set[int] = set()
        self._begun = False
        self._consumed: list[Event] = []
        self._profiling = False
        # Copied after all groups: a copy waits for the end of backward; so would later messages.
        self._deliveries: list[SlotTable] = []
        self._undone: deque[tuple[Event, float]] = deque()
        self._next_check = 0.0

    def zeros(self, nbytes: int, travels: bool = False) -> Buffer:
        return self._device.zeros(nbytes, self._packing)

    def empty(self, nbytes: int) -> Buffer:
        return self._device.zeros(nbytes, self._device.current_stream())

    def address(self, data: Buffer) -> int:
        return self._device.address(data)

    def slot_table(
        self,
        buffer: Buffer,
        offsets: Sequence[int],
        nbytes: Sequence[int],
        dtype: str,
        tensor_dtype: str,
    ) -> SlotTable:
        return self._device.pack_table(
            buffer, offsets, nbytes, dtype, self._packing, tensor_dtype, self._stream
        )

    def copy(self, target: Buffer, source: Buffer) -> None:
        self._device.copy(target, source, self._device.current_stream())

    # Under the progress lock.

    def settle(self) -> None:
        device = self._device
        for stream in (self._home, self._stream):
            device.wait(self._packing, device.record(stream))

    def begin_packing(self, dependencies: Dependencies, behind_messages: bool = False) -> Stamp:
        if behind_messages:
            self._device.wait(self._packing, self._device.record(self._stream))
        for event in dependencies:
            self._device.wait(self._packing, event)
        return self._packing_stamp()

    def _packing_stamp(self) -> Stamp:
        return self._device.record(self._packing, timed=True) if self.timing else 0.0

    def end_packing(self) -> Stamp:
        stamp = self._packing_stamp()
        self.backend.follow_packing()
        return stamp

    def end_group(self) -> Stamp:
        end = self._device.record(self._stream, timed=self.timing)
        self._undone.append((end, time.monotonic()))
        return end

    def with_flags(self, work: Work[None], flags: Buffer) -> Work[None]:
        assert isinstance(work, DeviceWork)
        work.beside = self._host.all_reduce(flags, "uint8", Op.MAX)
        return work

    def deliver(self, table: SlotTable) -> None:
        self._deliveries.append(table)

    def is_enqueued(self, work: Work[None]) -> bool:
        assert isinstance(work, DeviceWork)
        return work.issued()

    def poll(self) -> None:
        undone = self._undone
        while undone and self._device.done(undone[0][0]):
            undone.popleft()
        if undone and time.monotonic() >= self._next_check:
            self._next_check = time.monotonic() + _CHECK_S
            self.backend.check()

    @property
    def waiting_since(self) -> float | None:
        undone = list(self._undone)
        return undone[0][1] if undone else None

    def give_up(self) -> None:
        self._undone.clear()
        self.backend.give_up()

    # On the training thread, or on backward's.

    def begin(self, profiling: bool) -> None:
        self._begun = False
        self._profiling = profiling

    def gradient_dependencies(self) -> Dependencies:
        consumed, self._consumed = self._consumed, []
        return [*consumed, *(self._device.record(stream) for stream in self._producers)]

    def close(self) -> tuple[Stamp, Dependencies]:
        stream = self._device.current_stream()
        self._refuse_capture(stream)
        event = self._device.record(stream, timed=True)
        consumed, self._consumed = self._consumed, []
        if stream != self._home:
            consumed.append(self._device.record(self._home))
        return event, [event, *consumed]

    def update_dependencies(self) -> Dependencies:
        return [self._device.record(self._device.current_stream())]

    def join(self) -> Stamp:
        device = self._device
        self._home = device.current_stream()
        # The lane is done with the step, and leaves its stream to this thread.
        for table in self._deliveries:
            table.unpack()
        self._deliveries.clear()
        event = device.record(self._stream)
        # Streams that made gradients wait too: the memory of these may be given out again there.
        for stream in {self._home, *self._producers}:
            device.wait(stream, event)
        self._producers.clear()
        return self.now()

    def await_arrival(self, end: Stamp) -> None:
        assert isinstance(end, Event)
        for stream in {self._home, self._device.current_stream()}:
            self._device.wait(stream, end)

    def publish(self) -> None:
        stream = self._device.current_stream()
        if stream != self._home:
            self._device.wait(self._home, self._device.record(stream))

    def done(self, stamp: Stamp) -> bool:
        assert isinstance(stamp, Event)
        return self._device.done(stamp)

    def clock(self, begun: Stamp, done: Stamp) -> Callable[[Stamp], float]:
        assert isinstance(begun, Event)
        assert isinstance(done, Event)
        while not self._device.done(done):
            self._check()
            time.sleep(_NAP_S)
        return partial(self._seconds, begun)

    def _seconds(self, begun: Event, stamp: Stamp) -> float:
        """Seconds from the start of its step, plus one; 0 stays 0."""
        return 1.0 + self._device.seconds(begun, stamp) if isinstance(stamp, Event) else 0.0

    def now(self) -> Stamp:
        return self._device.record(self._device.current_stream(), timed=True)

    def stamp_gradient(self) -> Stamp:
        stream = self._device.current_stream()
        if not self._begun:
            self._refuse_capture(stream)
            self._begun = True
            self._consumed = [self._device.record(self._home)]
        self._producers.add(stream)
        return self._device.record(stream, timed=True) if self._profiling else 0.0

    def _refuse_capture(self, stream: int) -> None:
        if self._device.is_capturing(stream):
            raise RuntimeError(
                f"rank {self.backend.rank}: a step's gradients were about to be captured in a CUDA "
                "graph, which other ranks cannot take part in; capture the model alone "
                "(torch.cuda.make_graphed_callables), and call backward() and step() outside"
            )
