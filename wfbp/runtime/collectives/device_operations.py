"""Named operations on tensors of a device, carried out there by NCCL.

    program's stream   ... make x | event                         wait | use x
    packing stream            wait, copy what is fused or gathered | event
    lane's stream                                             wait, all-reduce | event

The host waits for nothing on the device: a submission records an event behind what made the tensor,
the answer of the coordinator has the operation enqueued behind that event on a lane of its own, and
``synchronize()`` returns once it is enqueued and the program's stream waits for it.

Which way an operation goes is part of the answer, and thus the same on every rank. It goes by the
device where every rank said that it could, and where that cannot end in a deadlock: the lane shares
one order of launches with the lanes of optimizers (:mod:`wfbp.comm.device.launch_order`), and a
rank's program may wait for this operation before it brings forth a gradient for a collective that
comes before it in that order. So each rank says with its request how many collectives of every lane
it could launch by then, and where rank 0 has launched more, the operation goes through the host.

The lane is made at the first operation that could go this way, by all ranks at that answer, while
rank 0 holds the lock of collectives that hold up a whole rank. If one rank fails, all go through
the host from then on. If ranks have come to different places of an optimizer's step, which nothing
orders yet, this operation goes through the host and a later one tries again.

Elements on a device whose operation goes through the host are copied to pinned memory first, also
without waiting; operations behind them wait for that in their order, those on the device do not.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import accumulate, zip_longest

import numpy as np

from wfbp.comm.backend import INTEGER, Buffer, HostBackend, word_dtype
from wfbp.comm.device.backend import DeviceBackend, DeviceWork
from wfbp.comm.device.device import Device, Event
from wfbp.comm.device.launch_order import LaunchOrder
from wfbp.comm.device.nccl import DTYPES, defines
from wfbp.core.types import Op
from wfbp.runtime.collectives.arithmetic import equal_rows
from wfbp.runtime.collectives.request import Kind, Reduction, Request, Response, Route
from wfbp.runtime.collectives.submission import Arrival, Outcome, Placed, Submission
from wfbp.runtime.runtime import Runtime

_CHECK_S = 0.05

log = logging.getLogger("wfbp")


def obstacle() -> str:
    """Why this process cannot have tensors on a device that the runtime uses; empty where it
    may."""
    if find_spec("cupy") is not None:
        return ""
    return "CuPy is not installed; pip install 'wfbp[cuda12]' (or cuda13, as PyTorch is built for)"


def tell_detour(where: str, reason: str) -> None:
    """Log why operations on a device go through the host."""
    log.warning(
        "allreduce() and the like on %s travel through the host's memory: %s", where, reason
    )


def carries(kind: Kind, dtype: str, op: Reduction | None, is_scaled: bool) -> bool:
    """Whether NCCL does what an operation means; the same on every rank.

    Args:
        kind: the operation.
        dtype: element type.
        op: how contributions combine, where they do.
        is_scaled: whether they are multiplied, or their result.

    Example:
        >>> carries(Kind.ALLREDUCE, "bfloat16", Op.AVERAGE, True)
        True
        >>> carries(Kind.ALLREDUCE, "int32", Op.AVERAGE, False)
        False
    """
    if kind in (Kind.BROADCAST, Kind.ALLGATHER):
        return True
    if kind not in (Kind.ALLREDUCE, Kind.REDUCESCATTER) or not isinstance(op, Op):
        return False
    return dtype in DTYPES and defines(dtype, op) and not (is_scaled and dtype in INTEGER)


@dataclass(slots=True)
class _Launched:
    """Operations that travel as one, from their launch until the device is done.

    Args:
        work: on its way.
        submissions: what this rank submitted.
        outcomes: of each, without their arrival.
        note: called when it is enqueued.
        since: when it was launched.
    """

    work: DeviceWork
    submissions: Sequence[Submission]
    outcomes: Sequence[Outcome]
    note: Callable[[], None]
    since: float
    event: Event = None


class DeviceOperations:
    """The device's part of a named lane, that of all ranks.

    :meth:`takes` and :meth:`retire` are called by training threads, everything else under the
    progress lock. What they share are two attributes and a dictionary of one entry, each written by
    a single operation.

    Args:
        runtime: of all ranks.
        host: over the same ranks; used by nobody else.
    """

    def __init__(self, runtime: Runtime, host: HostBackend) -> None:
        self._runtime = runtime
        self._host = host
        self._rank, self._size = host.rank, host.size
        self._devices: dict[str, Device] = {}
        self._backend: DeviceBackend | None = None
        self._number = -1
        self._connecting = False
        self._failed = False
        self._launched: deque[_Launched] = deque()
        self._undone: deque[_Launched] = deque()
        self._copying: int | None = None
        self._next_check = 0.0
        self.retired = False
        """Whether all operations go through the host from now on."""

    # On training threads.

    def takes(self, device: Device) -> bool:
        """Whether operations on this device could go by it: on one device per rank, the first."""
        if self._failed or self.retired:
            return False
        return self._devices.setdefault("first", device) is device

    def retire(self) -> None:
        """From now on operations go through the host; those that were submitted may not yet."""
        self.retired = True

    # Under the progress lock.

    def describe(self, request: Request) -> Request:
        """The request as it is sent, with what could be launched here by now."""
        if not request.on_device:
            return request
        order = self._order
        return request if order is None else replace(request, available=order.available)

    def route(self, response: Response) -> Response:
        """The answer with the way that its operation goes; on rank 0, before it is sent."""
        if response.route is Route.HOST:
            return response
        return replace(response, route=self._route(response.available))

    def _route(self, available: Sequence[int]) -> Route:
        if self._failed or not self._covers(available):
            return Route.HOST
        if self._backend is not None or self._connecting:
            return Route.DEVICE
        if not self._runtime.collective_lock.take():
            return Route.HOST
        self._connecting = True
        return Route.CONNECT

    def _covers(self, available: Sequence[int]) -> bool:
        """Whether every rank could launch what is launched here, whatever its program waits for."""
        order = self._order
        launched = list(order.launched) if order is not None else []
        if self._number >= 0:
            launched[self._number] = 0  # of this lane: what all ranks have submitted
        return all(
            here <= there
            for here, there in zip_longest(launched, available[: len(launched)], fillvalue=0)
        )

    @property
    def _order(self) -> LaunchOrder | None:
        device = self._devices.get("first")
        return None if device is None else self._runtime.launch_order(device)

    def opens(self, route: Route) -> bool:
        """Whether the operation at hand can be launched; blocks where ranks are to connect."""
        if route is Route.CONNECT:
            self._connect()
        return route is not Route.HOST and self._backend is not None

    def _connect(self) -> None:
        """Make the lane, on every rank at the same answer."""
        try:
            device = self._devices["first"]
            self._backend, self._number, problem = self._runtime.connect_operations(
                device, self._host
            )
        finally:
            if self._rank == 0:
                self._connecting = False
                self._runtime.collective_lock.release()
        if problem:
            self._failed = True
            if self._host.local_rank == 0:
                tell_detour(device.name, problem)

    def launch(
        self,
        submissions: Sequence[Submission],
        responses: Sequence[Response],
        note: Callable[[], None],
    ) -> None:
        """Enqueue operations that travel as one; several are reductions of one sort.

        Args:
            submissions: of this rank; all of them lie on the device.
            responses: what the coordinator told of each.
            note: called when they are enqueued.
        """
        assert self._backend is not None
        placed = [_placed(each) for each in submissions]
        for each in placed:
            self._backend.device.wait(self._backend.packing, each.ready)
        start = {
            Kind.ALLREDUCE: self._reduce,
            Kind.REDUCESCATTER: self._scatter,
            Kind.ALLGATHER: self._gather,
            Kind.BROADCAST: self._broadcast,
        }[responses[0].request.kind]
        work, outcomes = start(self._backend, placed, responses)
        self._launched.append(_Launched(work, submissions, outcomes, note, time.monotonic()))
        self.advance()

    def _reduce(
        self, backend: DeviceBackend, placed: Sequence[Placed], responses: Sequence[Response]
    ) -> tuple[DeviceWork, list[Outcome]]:
        request, device = responses[0].request, backend.device
        parts = [each.data for each in placed]
        ends = list(accumulate(part.nbytes for part in parts))
        places = [slice(end - part.nbytes, end) for end, part in zip(ends, parts, strict=True)]
        whole = parts[0]
        if len(parts) > 1:
            whole = device.zeros(ends[-1], backend.packing)
            for part, place in zip(parts, places, strict=True):
                device.copy(whole[place], part, backend.packing)
        backend.follow_packing()
        work = backend.all_reduce(whole, request.dtype, Op(request.op))
        if len(parts) > 1:
            for part, place in zip(parts, places, strict=True):
                work.then(part, whole[place])
        outcomes = [
            Outcome(part, differentiable=response.differentiable)
            for part, response in zip(parts, responses, strict=True)
        ]
        return work, outcomes

    def _broadcast(
        self, backend: DeviceBackend, placed: Sequence[Placed], responses: Sequence[Response]
    ) -> tuple[DeviceWork, list[Outcome]]:
        data, response = placed[0].data, responses[0]
        backend.follow_packing()
        work = backend.broadcast(data, response.request.root)
        return work, [Outcome(data, differentiable=response.differentiable)]

    def _gather(
        self, backend: DeviceBackend, placed: Sequence[Placed], responses: Sequence[Response]
    ) -> tuple[DeviceWork, list[Outcome]]:
        response, device, own = responses[0], backend.device, placed[0].data
        rows = tuple(extent[0] for extent in response.extents)
        request = response.request
        row_bytes = _row_numel(request) * _item_bytes(request.dtype)
        counts = [count * row_bytes for count in rows]
        gathered = device.zeros(sum(counts), backend.packing)
        start = sum(counts[: self._rank])
        device.copy(gathered[start : start + own.nbytes], own, backend.packing)
        backend.follow_packing()
        work = backend.all_gather(gathered, counts)
        return work, [Outcome(gathered, rows, response.differentiable)]

    def _scatter(
        self, backend: DeviceBackend, placed: Sequence[Placed], responses: Sequence[Response]
    ) -> tuple[DeviceWork, list[Outcome]]:
        response, data = responses[0], placed[0].data
        request = response.request
        rows = request.splits or equal_rows(request.shape[0], self._size)
        row_bytes = _row_numel(request) * _item_bytes(request.dtype)
        counts = [count * row_bytes for count in rows]
        backend.follow_packing()
        work = backend.reduce_scatter(data, counts, request.dtype, Op(request.op))
        start = sum(counts[: self._rank])
        mine = data[start : start + counts[self._rank]]
        return work, [Outcome(mine, rows, response.differentiable)]

    def advance(self) -> bool:
        """Answer what is enqueued, and let go what the device is done with."""
        progressed = False
        while self._launched and self._launched[0].work.issued():
            self._answer(self._launched[0])
            self._undone.append(self._launched[0])  # first, for who asks without the lock
            self._launched.popleft()
            progressed = True
        undone = self._undone
        while undone and self._device.done(undone[0].event):
            undone.popleft()
        if undone and time.monotonic() >= self._next_check:
            assert self._backend is not None
            self._next_check = time.monotonic() + _CHECK_S
            self._backend.check()
        return progressed

    def _answer(self, launched: _Launched) -> None:
        backend, device = self._backend, self._device
        assert backend is not None
        launched.event = event = device.record(backend.stream)
        launched.note()
        for each, outcome in zip(launched.submissions, launched.outcomes, strict=True):
            _placed(each).done = event
            arrival = Arrival(device, outcome.data, event, backend.packing)
            each.reply.put(replace(outcome, arrival=arrival))

    def stage(self, submissions: Sequence[Submission]) -> bool:
        """Have elements on a device copied to the host; whether that is done."""
        is_done = True
        for each in submissions:
            if each.placed is not None:
                if each.copied is None:
                    self._begin_copy(each, each.placed)
                is_done &= self._device.done(each.copied)
        return is_done

    def _begin_copy(self, submission: Submission, placed: Placed) -> None:
        device = self._device
        if self._copying is None:
            self._copying = device.new_stream()
        nbytes = placed.data.nbytes
        pinned: Buffer = device.pinned(nbytes) if nbytes else np.empty(0, np.uint8)
        device.wait(self._copying, placed.ready)
        device.copy(pinned, placed.data, self._copying)
        submission.copied = device.record(self._copying)
        submission.data = pinned.view(word_dtype(submission.request.dtype))

    @property
    def _device(self) -> Device:
        return self._devices["first"]

    @property
    def busy(self) -> bool:
        """Whether an operation waits for its turn, or for the host."""
        return bool(self._launched)

    @property
    def is_done(self) -> bool:
        """Whether the device is done with everything, as far as was looked."""
        return not (self._launched or self._undone)

    @property
    def oldest(self) -> tuple[float, str] | None:
        """Since when the oldest operation is under way (``time.monotonic``), and what it is."""
        for queue in (list(self._undone), list(self._launched)):
            if queue:
                return queue[0].since, f"in {queue[0].submissions[0].request.label} on the device"
        return None

    def fail(self) -> None:
        """Give everything up, so that the device is free."""
        if self._backend is not None:
            self._backend.give_up()  # first: until then their memory may be written to
        self._launched.clear()
        self._undone.clear()

    def close(self) -> None:
        """Give the host's backend back; collective. The device's is the runtime's to close."""
        self._undone.clear()
        self._host.close()


def _placed(submission: Submission) -> Placed:
    assert submission.placed is not None, "every rank has said that it could"
    return submission.placed


def _row_numel(request: Request) -> int:
    return int(np.prod(request.shape[1:], dtype=np.int64))


def _item_bytes(dtype: str) -> int:
    return word_dtype(dtype).itemsize
