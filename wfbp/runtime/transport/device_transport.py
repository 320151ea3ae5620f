"""A lane on a device: what is enqueued where, and which stream waits for what.

    producer's stream    backward ... gradient | event ... gradient | event
    packing stream                 wait, pack | event          wait, pack | event
    lane's stream                              wait, reduce                wait, reduce | event
    consumer's stream                                                                wait, update

The host waits for nothing here. One event follows the last gradient of a group (one per stream that
made any of them); the packing stream waits for it, and the lane's stream for the packing: a group
is packed while the one before it travels. The consumer's stream waits for the lane's before it
reads results. Before the packing stream writes to a buffer again, it waits for an event of the
consumer's, recorded when the next step's first gradient appears, because all reads of the results
have been enqueued by then; and for everything enqueued on the lane until then, because nobody
consumes a step that was discarded.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from wfbp.comm.backend import Backend, Buffer, Work
from wfbp.comm.device.backend import DeviceBackend, DeviceWork
from wfbp.comm.device.device import Event, SlotTable
from wfbp.core.plan import Plan
from wfbp.core.types import Op, Operation, wire_type
from wfbp.runtime.step import (
    NOT_MEASURED,
    BufferView,
    GatherRequest,
    GroupTime,
    MeasuredStep,
    Step,
    StepTimestamps,
    Timestamp,
    to_seconds,
)
from wfbp.runtime.transport.device_buffers import (
    DeviceFusionBuffer,
    DeviceGatherBuffer,
    DeviceScatterBuffer,
)
from wfbp.runtime.transport.flags import HostFlags
from wfbp.runtime.transport.transport import BackwardBuffer, ForwardBuffer, Transport
from wfbp.runtime.tuning.profile import TuningPhase

BEGUN = -1
CLOSED = -2
"""Keys of a step's dependencies beside its groups."""

LAG_STEPS = 2
"""While plans are measured, a step's times are taken this many steps later, on every rank alike:
its device has then run ahead of nobody, and the next steps' work is enqueued already."""

_CHECK_S = 0.05
_NAP_S = 100e-6


def _timed(moments: StepTimestamps) -> StepTimestamps:
    """A step's times without those of groups that were not timed."""
    if all(time_.start_s for time_ in (*moments.times, *moments.gathers)):
        return moments
    times = [time_ for time_ in moments.times if time_.start_s]
    return replace(moments, times=times, gathers=[t for t in moments.gathers if t.start_s])


class DeviceTransport(Transport):
    """Memory and streams of one device.

    ``_home`` is the stream on which the training thread last consumed results. ``_deliveries`` copy
    results to their targets behind all groups, because the copy waits for the end of backward, and
    so would everything behind it on the lane's stream. ``check`` raises the error that has ended
    the runtime.
    """

    backend: DeviceBackend
    copies_in_order = True

    def __init__(
        self,
        backend: DeviceBackend,
        host: Backend,
        check: Callable[[], None],
        wire_dtype: str = "",
        gather_dtype: str = "",
    ) -> None:
        super().__init__(backend)
        self._wire_dtype = wire_dtype
        self._gather_dtype = gather_dtype
        self._device = device = backend.device
        self._stream = backend.stream
        self._packing = backend.packing
        self._gathered: object = None
        self._host = host
        self._check = check
        self._home = device.current_stream()
        self._step: Step | None = None
        self._producers: set[int] = set()
        self._begun = False
        self._profiling = False
        self._deliveries: list[SlotTable] = []
        self._ordered: Step | None = None
        self._ordered_number = 0
        self._closed_for: Step | None = None
        self._undone: deque[tuple[Event, float]] = deque()
        self._next_check = 0.0
        self.now = self._now
        self.produced = self._produced
        self.complete = self._complete

    # Under the progress lock.

    def backward(self, plan: Plan, op: Op) -> list[BackwardBuffer]:
        self._await_home()
        flags = HostFlags(plan, self._host)
        last = plan.num_backward - 1
        buffers: list[BackwardBuffer] = []
        for group in range(plan.num_backward):
            scatters = plan.groups[group].operation is Operation.REDUCE_SCATTER
            kind = DeviceScatterBuffer if scatters else DeviceFusionBuffer
            beside = flags if group == last else None
            wire = wire_type(plan.dtype(group), self._wire_dtype)
            buffers.append(kind(plan, group, op, self.backend, beside, self._deliveries, wire))
        return buffers

    def forward(self, plan: Plan) -> list[ForwardBuffer]:
        return [
            DeviceGatherBuffer(
                plan, group, self.backend, wire_type(plan.dtype(group), self._gather_dtype)
            )
            for group in range(plan.num_backward, len(plan.groups))
        ]

    def trim(self) -> None:
        self._device.trim()

    def _await_home(self) -> None:
        """Memory may be given out again that training's work or the lane's still uses."""
        self._device.wait(self._packing, self._device.record(self._home))
        self._await_lane()

    def _await_lane(self) -> None:
        """Buffers may still be under way, or be copied from."""
        self._device.wait(self._packing, self._device.record(self._stream))

    def order_after_gradients(self, step: Step, group: int) -> None:
        events: list[Event] = []
        if step is not self._ordered or step.number != self._ordered_number:
            # Also the same step once more, under its next number, where a rank discarded its own.
            self._ordered, self._ordered_number = step, step.number
            self._await_lane()
            events += step.dependencies.get(BEGUN, ())
        if group in step.dependencies:
            # Though the host may have closed the step by now: it runs ahead of backward.
            events += step.dependencies[group]
        elif self._closed_for is not step:
            self._closed_for = step
            events += step.dependencies[CLOSED]
        for event in events:
            self._device.wait(self._packing, event)

    def order_after_shards(self, gather: GatherRequest) -> None:
        if gather.addresses is not self._gathered:  # else a part of it is under way
            self._gathered = gather.addresses
            self._await_lane()
        for event in gather.dependencies:
            self._device.wait(self._packing, event)

    def is_enqueued(self, work: Work[None]) -> bool:
        assert isinstance(work, DeviceWork)
        return work.issued()

    def packing_stamp(self) -> Timestamp:
        return self._device.record(self._packing, timed=True) if self.timing else 0.0

    def lane_stamp(self) -> Timestamp:
        return self._device.record(self._stream, timed=self.timing)

    def watch(self, time_: GroupTime) -> None:
        self._undone.append((time_.end_s, time.monotonic()))

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

    def view(self, data: Buffer, whole: bool = True) -> BufferView:
        return BufferView(data, self._device.address(data), whole)

    def empty(self, nbytes: int) -> Buffer:
        return self._device.zeros(nbytes, self._device.current_stream())

    def copy(self, target: Buffer, source: Buffer) -> None:
        self._device.copy(target, source, self._device.current_stream())

    def begin(self, step: Step, profiling: bool) -> None:
        self._step = step
        self._begun = False
        self._profiling = profiling

    def close(self, step: Step) -> Timestamp:
        stream = self._device.current_stream()
        self._refuse_capture(stream)
        event = self._device.record(stream, timed=True)
        step.dependencies[CLOSED] = [event]
        if stream != self._home:
            step.dependencies[CLOSED].append(self._device.record(self._home))
        return event

    def join(self) -> Timestamp:
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
        return self._now()

    def dependencies(self) -> list[Any]:
        return [self._device.record(self._device.current_stream())]

    def await_arrival(self, time_: GroupTime) -> None:
        for stream in {self._home, self._device.current_stream()}:
            self._device.wait(stream, time_.end_s)

    def publish(self) -> None:
        stream = self._device.current_stream()
        if stream != self._home:
            self._device.wait(self._home, self._device.record(stream))

    def take_measured(
        self, kept: deque[StepTimestamps], phase: TuningPhase
    ) -> Iterable[MeasuredStep]:
        if phase is TuningPhase.WARM_UP:  # only counted
            kept.clear()
            yield NOT_MEASURED
            return
        measuring = phase is not TuningPhase.INSTALLED
        while kept and (len(kept) > LAG_STEPS if measuring else self._device.done(kept[0].done)):
            moments = kept.popleft()
            while not self._device.done(moments.done):
                self._check()
                time.sleep(_NAP_S)
            yield to_seconds(_timed(moments), partial(self._at, moments.begun))

    def _at(self, begun: Event, stamp: Timestamp) -> float:
        """A moment in seconds; the beginning of its step is at one second."""
        return 1.0 + self._device.seconds(begun, stamp) if stamp else 0.0

    def _now(self) -> Timestamp:
        return self._device.record(self._device.current_stream(), timed=True)

    def _produced(self) -> Timestamp:
        stream = self._device.current_stream()
        if not self._begun:
            self._refuse_capture(stream)
            self._begun = True
            assert self._step is not None
            self._step.dependencies[BEGUN] = [self._device.record(self._home)]
        self._producers.add(stream)
        return self._device.record(stream, timed=True) if self._profiling else 0.0

    def _refuse_capture(self, stream: int) -> None:
        if self._device.is_capturing(stream):
            raise RuntimeError(
                f"rank {self.backend.rank}: a step's gradients were about to be captured in a CUDA "
                "graph, in which other ranks cannot take part; capture the model alone "
                "(torch.cuda.make_graphed_callables), and call backward() and step() outside"
            )

    def _complete(self, group: int) -> None:
        assert self._step is not None
        self._step.dependencies[group] = [self._device.record(s) for s in self._producers]
