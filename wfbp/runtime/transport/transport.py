"""Storage of a lane's groups, how they are sent, and how that is ordered with training.

On the host a call has done its work when it returns; :class:`HostTransport` has nothing to order.
On a device (``device_transport``) threads only enqueue, and events order the work of different
streams.

A *stamp* is a moment in the training thread's work or the lane's: seconds of ``time.perf_counter``
on the host, a timed event on a device, which becomes seconds when it has happened; 0 is "did not".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from wfbp.comm.backend import Backend, Buffer, Work
from wfbp.core.plan import Plan
from wfbp.core.types import Op, Operation, wire_type
from wfbp.runtime.step import (
    BufferView,
    GatherRequest,
    GroupTime,
    MeasuredStep,
    Step,
    StepTimestamps,
    Timestamp,
    to_seconds,
)
from wfbp.runtime.transport.buffers import (
    CastFusionBuffer,
    FusionBuffer,
    GatherBuffer,
    ScatterBuffer,
    aligned_bytes,
)
from wfbp.runtime.transport.flags import GroupFlags
from wfbp.runtime.tuning.profile import TuningPhase


class BackwardBuffer(Protocol):
    """Storage of one group of backward.

    Attributes:
        num_moves: how often :meth:`pack` has moved the slots to other storage.
    """

    num_moves: int

    def slot(self, position: int) -> Buffer:
        """Where the group's tensor at ``position`` lies when it is reduced."""

    def pack(self, step: Step) -> None:
        """Bring the step's gradients together."""

    def send(self, backend: Backend) -> Work[None]:
        """Reduce them; called once after each :meth:`pack`."""

    def arrived(self, step: int) -> GroupFlags:
        """What ranks said of the step, when it is reduced."""

    def unpack(self, addresses: Sequence[int]) -> None:
        """Copy tensors to these addresses, by tensor of the plan; 0 for none.

        On a device that happens behind all groups, when the training thread joins.
        """


class ForwardBuffer(Protocol):
    """Storage of one all-gathered group."""

    def pack(self, gather: GatherRequest) -> None:
        """Bring this rank's shards together."""

    def send(self, backend: Backend) -> Work[None]:
        """Gather them; called once after each :meth:`pack`."""

    def unpack(self, addresses: Sequence[int]) -> None:
        """Bring the other ranks' shards to these addresses."""


class Transport(ABC):
    """The transport of one lane; see the module. ``backend`` sends the groups."""

    copies_in_order = False
    """Whether copies are ordered behind what was started before them, as on a stream: then results
    have to be copied before anything else is started."""

    timing = True
    """Whether the moments of groups and updates are wanted, where they cost anything; the training
    thread may change it at any time."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    # Under the progress lock.

    @abstractmethod
    def backward(self, plan: Plan, op: Op) -> list[BackwardBuffer]:
        """Storage of a plan's groups of backward; also on the training thread, between steps."""

    @abstractmethod
    def forward(self, plan: Plan) -> list[ForwardBuffer]:
        """Storage of a plan's all-gathers."""

    @abstractmethod
    def trim(self) -> None:
        """Give back the memory of plans that are no longer in use."""

    @abstractmethod
    def order_after_gradients(self, step: Step, group: int) -> None:
        """What the lane does from here on finds the gradients of a group that is ready."""

    @abstractmethod
    def order_after_shards(self, gather: GatherRequest) -> None:
        """What the lane does from here on finds the shards that were put to use."""

    @abstractmethod
    def is_enqueued(self, work: Work[None]) -> bool:
        """Move a work on; True once later work of this lane may use its result.

        On the host it is complete then, on a device enqueued on the lane's stream.
        """

    def may_progress(self) -> bool:
        """Whether :meth:`is_enqueued` or :meth:`poll` could find anything new."""
        return True

    def rest(self, nap_s: float, most_s: float) -> bool:
        """Sleep until a work may have moved on; see :meth:`Backend.rest`."""
        return False

    @abstractmethod
    def packing_stamp(self) -> Timestamp:
        """The present moment in what the lane does before messages; 0 where it is not timed."""

    @abstractmethod
    def lane_stamp(self) -> Timestamp:
        """The present moment in the lane's work."""

    @abstractmethod
    def watch(self, time: GroupTime) -> None:
        """A group is enqueued; watch it until it is complete."""

    @abstractmethod
    def poll(self) -> None:
        """Called in every pass of the loop; raises ``BackendError`` if an enqueued operation has
        failed."""

    @property
    @abstractmethod
    def waiting_since(self) -> float | None:
        """Since when the oldest enqueued group is not complete (``time.monotonic``)."""

    @abstractmethod
    def give_up(self) -> None:
        """The lane has failed: let nothing wait for other ranks any more."""

    # On the training thread, or on backward's.

    @abstractmethod
    def view(self, data: Buffer, whole: bool = True) -> BufferView:
        """The slot that these bytes are."""

    @abstractmethod
    def empty(self, nbytes: int) -> Buffer:
        """Memory for a tensor."""

    @abstractmethod
    def copy(self, target: Buffer, source: Buffer) -> None:
        """Copy bytes, in the order of the training thread's work."""

    now: Callable[[], Timestamp]
    """The present moment in the training thread's work."""

    produced: Callable[[], Timestamp]
    """The same; called where a gradient has just appeared."""

    complete: Callable[[int], None] | None
    """Called with a group whose last gradient has just appeared, where it does not wait for the end
    of the step; if at all."""

    @abstractmethod
    def begin(self, step: Step, profiling: bool) -> None:
        """A step is opened; ``profiling`` says whether the moments of gradients are wanted."""

    @abstractmethod
    def close(self, step: Step) -> Timestamp:
        """The step closes: groups that have not left may go when training has come here."""

    @abstractmethod
    def join(self) -> Timestamp:
        """Order the training thread's later work behind the lane's enqueued results."""

    @abstractmethod
    def dependencies(self) -> list[Any]:
        """What all-gathers have to wait for that may go now."""

    @abstractmethod
    def await_arrival(self, time: GroupTime) -> None:
        """What the training thread does from here on finds a gathered group."""

    def publish(self) -> None:  # noqa: B027 - on the host there is nothing to order
        """What :meth:`join` was called for finds what the calling thread has enqueued until now."""

    @abstractmethod
    def take_measured(
        self, kept: deque[StepTimestamps], phase: TuningPhase
    ) -> Iterable[MeasuredStep]:
        """Take those steps whose times the tuner, in its phase, can be given now.

        While plans are measured these are the same ones on every rank.
        """


class HostTransport(Transport):
    """Memory of the host, where nothing has to be ordered.

    ``zero_copy_min_bytes``: tensors of at least this size are not packed. ``wire_dtype`` and
    ``gather_dtype``: see :meth:`~wfbp.runtime.runtime.Runtime.make_transport`.
    """

    def __init__(
        self,
        backend: Backend,
        zero_copy_min_bytes: int,
        wire_dtype: str = "",
        gather_dtype: str = "",
    ) -> None:
        super().__init__(backend)
        self._wire_dtype = wire_dtype
        self._gather_dtype = gather_dtype
        self._zero_copy_min_bytes = zero_copy_min_bytes
        self.now = self.produced = perf_counter
        self.complete = None

    def backward(self, plan: Plan, op: Op) -> list[BackwardBuffer]:
        return [self._backward(plan, group, op) for group in range(plan.num_backward)]

    def _backward(self, plan: Plan, group: int, op: Op) -> BackwardBuffer:
        backend, direct = self.backend, self._zero_copy_min_bytes
        wire = wire_type(plan.dtype(group), self._wire_dtype)
        if plan.groups[group].operation is Operation.REDUCE_SCATTER:
            return ScatterBuffer(plan, group, op, backend.rank, backend.size, direct, wire)
        if wire != plan.dtype(group):
            return CastFusionBuffer(plan, group, op, wire, backend)
        return FusionBuffer(plan, group, op, backend.size, direct, backend)

    def forward(self, plan: Plan) -> list[ForwardBuffer]:
        rank, size, direct = self.backend.rank, self.backend.size, self._zero_copy_min_bytes
        return [
            GatherBuffer(plan, g, rank, size, direct, wire_type(plan.dtype(g), self._gather_dtype))
            for g in range(plan.num_backward, len(plan.groups))
        ]

    def trim(self) -> None:
        """Nothing: the host's memory goes back when it is dropped."""

    def is_enqueued(self, work: Work[None]) -> bool:
        return work.test()

    def may_progress(self) -> bool:
        return self.backend.may_progress()

    def rest(self, nap_s: float, most_s: float) -> bool:
        return self.backend.rest(nap_s, most_s)

    def packing_stamp(self) -> float:
        return perf_counter()

    def lane_stamp(self) -> float:
        return perf_counter()

    def view(self, data: Buffer, whole: bool = True) -> BufferView:
        return BufferView.of(data, whole)

    def empty(self, nbytes: int) -> Buffer:
        return aligned_bytes(nbytes)

    def copy(self, target: Buffer, source: Buffer) -> None:
        np.copyto(target, source)

    def close(self, step: Step) -> float:
        return perf_counter()

    def join(self) -> float:
        return perf_counter()

    def take_measured(
        self, kept: deque[StepTimestamps], phase: TuningPhase
    ) -> Iterable[MeasuredStep]:
        while kept:
            yield to_seconds(kept.popleft(), float)

    def order_after_gradients(self, step: Step, group: int) -> None:
        """Nothing."""

    def order_after_shards(self, gather: GatherRequest) -> None:
        """Nothing."""

    def watch(self, time: GroupTime) -> None:
        """Nothing: it is over."""

    def poll(self) -> None:
        """Nothing."""

    @property
    def waiting_since(self) -> None:
        return None

    def give_up(self) -> None:
        """Nothing to do."""

    def begin(self, step: Step, profiling: bool) -> None:
        """Nothing."""

    def dependencies(self) -> list[Any]:
        return []

    def await_arrival(self, time: GroupTime) -> None:
        """Nothing: it has arrived."""
