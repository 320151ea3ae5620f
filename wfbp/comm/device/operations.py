"""Named operations on tensors of a device, run there by NCCL.

    program's stream   ... make x | event                         wait | use x
    packing stream            wait, copy what is fused or gathered | event
    lane's stream                                             wait, all-reduce | event

The host never waits for the device. The coordinator's response contains the route, the same on
every rank: the device if every rank can and if that cannot deadlock. The lane shares a launch order
with the optimizers' lanes, and a rank's program may wait for this operation before it produces an
earlier collective's gradient. So each request tells how many collectives of every lane its rank
could launch; if rank 0 has launched more, the operation goes through the host.

All ranks make the lane at the first response that needs it, while rank 0 holds the lock of
collectives that block a rank. If a rank fails, all later operations use the host. If ranks are at
different places of a step, this operation uses the host and a later one tries again.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate, zip_longest
from typing import Any

import numpy as np

from wfbp.comm.backend import INTEGER, Buffer, HostBackend
from wfbp.comm.device.backend import DeviceBackend, DeviceWork
from wfbp.comm.device.device import Device, Event
from wfbp.comm.device.launch_order import LaunchOrder
from wfbp.comm.device.links import DeviceLinks
from wfbp.comm.device.nccl import DTYPES, defines
from wfbp.core.types import Op

_CHECK_S = 0.05

log = logging.getLogger("wfbp")


def why_unsupported() -> str:
    """The reason why this process cannot use tensors on a device; empty if it can."""
    if find_spec("cupy") is not None:
        return ""
    return "CuPy is not installed; pip install 'wfbp[cuda12]' (or cuda13, as PyTorch is built for)"


def log_detour(where: str, reason: str) -> None:
    """Log why operations on a device use the host."""
    log.warning(
        "allreduce() and the like on %s travel through the host's memory: %s", where, reason
    )


def carries(kind: str, dtype: str, op: Op | None, is_scaled: bool) -> bool:
    """Whether NCCL computes the operation as defined; the same on every rank."""
    if kind in ("broadcast", "allgather"):
        return True
    if kind not in ("allreduce", "reducescatter") or op is None or op is Op.ADASUM:
        return False
    return dtype in DTYPES and defines(dtype, op) and not (is_scaled and dtype in INTEGER)


@dataclass(slots=True)
class Placed:
    """Elements on a device that an operation works on."""

    device: Device
    data: Buffer  # their bytes; the result of a reduction or broadcast is left there
    ready: Event  # after what made them
    owner: object  # of the memory; kept until the device is done with it
    done: Event = None
    """Event after the operation; the communication thread sets it before it stores the outcome."""
    pinned: Buffer | None = None  # the copy on the host, if one was begun
    copied: Event = None  # after that copy

    @property
    def is_done(self) -> bool:
        """Whether the device has finished an operation whose outcome is stored."""
        return self.done is None or self.device.done(self.done)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A result on a device, for streams that wait for ``event``."""

    device: Device
    data: Buffer  # its bytes
    event: Event  # after the operation
    packing: int  # the stream to which the memory of gathered rows belongs

    def await_here(self) -> None:
        """Make the calling thread's current stream wait for it."""
        self.device.wait(self.device.current_stream(), self.event)

    def copy_to(self, target: Buffer) -> None:
        """Enqueue a copy on the current stream; the source may be freed after this call."""
        device, stream = self.device, self.device.current_stream()
        self.await_here()
        device.copy(target, self.data, stream)
        device.wait(self.packing, device.record(stream))


@dataclass(slots=True)
class _Launched:
    """Operations sent as one message, from launch until the device is done."""

    work: DeviceWork
    placed: Sequence[Placed]
    results: Sequence[Buffer]
    label: str
    arrivals: list[Arrival]
    finish: Callable[[], None]
    since: float
    event: Event = None


class DeviceOperations:
    """The device part of all ranks' named lane; ``host`` is a backend for this object alone.

    Threads: training threads call :meth:`takes` and set :attr:`retired`; everything else runs under
    the progress lock. Shared attributes are written by single assignments.
    """

    def __init__(self, links: DeviceLinks, collective_lock: Any, host: HostBackend) -> None:
        self._links = links
        self._collective_lock = collective_lock
        self._host = host
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
        """Whether all operations use the host from now on."""

    def takes(self, device: Device) -> bool:
        """Whether operations on this device could run there: one device per rank, the first."""
        if self._failed or self.retired:
            return False
        return self._devices.setdefault("first", device) is device

    @property
    def _order(self) -> LaunchOrder | None:
        device = self._devices.get("first")
        return None if device is None else self._links.launch_order(device)

    @property
    def available(self) -> tuple[int, ...]:
        """Per lane, the collectives that this rank has launched or could launch now."""
        order = self._order
        return () if order is None else order.available

    def route(self, available: Sequence[int]) -> str:
        """The route of an operation that every rank could run on its device; rank 0 only."""
        order = self._order
        launched = list(order.launched) if order is not None else []
        if self._number >= 0:
            launched[self._number] = 0  # of this lane: what all ranks have submitted
        pairs = zip_longest(launched, available[: len(launched)], fillvalue=0)
        if self._failed or any(here > there for here, there in pairs):
            return "host"
        if self._backend is not None or self._connecting:
            return "device"
        if not self._collective_lock.take():
            return "host"
        self._connecting = True
        return "connect"

    def opens(self, route: str) -> bool:
        """Whether the operation can be launched; blocks if ranks must connect first."""
        if route == "connect":
            try:
                device = self._devices["first"]
                self._backend, self._number, problem = self._links.connect_operations(
                    device, self._host
                )
            finally:
                if self._host.rank == 0:
                    self._connecting = False
                    self._collective_lock.release()
            if problem:
                self._failed = True
                if self._host.local_rank == 0:
                    log_detour(device.name, problem)
        return route != "host" and self._backend is not None

    def launch(
        self,
        kind: str,
        placed: Sequence[Placed],
        dtype: str,
        op: Op | None,
        counts: Sequence[int],
        root: int,
        label: str,
        arrivals: list[Arrival],
        finish: Callable[[], None],
    ) -> None:
        """Enqueue operations that form one message; several are reductions of one kind. Once all is
        enqueued, ``arrivals`` receives each result, and ``finish`` is called."""
        assert self._backend is not None
        backend, device, packing = self._backend, self._backend.device, self._backend.packing
        for each in placed:
            device.wait(packing, each.ready)
        parts = results = [each.data for each in placed]
        whole = parts[0]
        start = sum(counts[: self._host.rank])
        copies: list[tuple[Buffer, Buffer]] = []
        if len(parts) > 1:
            ends = list(accumulate(part.nbytes for part in parts))
            whole = device.zeros(ends[-1], packing)
            for part, end in zip(parts, ends, strict=True):
                place = whole[end - part.nbytes : end]
                device.copy(place, part, packing)
                copies.append((part, place))
        elif kind == "allgather":
            whole = device.zeros(sum(counts), packing)
            device.copy(whole[start : start + parts[0].nbytes], parts[0], packing)
            results = [whole]
        backend.follow_packing()
        if kind == "broadcast":
            work = backend.broadcast(whole, root)
        elif kind == "allgather":
            work = backend.all_gather(whole, counts)
        elif kind == "reducescatter":
            assert op is not None
            work = backend.reduce_scatter(whole, counts, dtype, op)
            results = [whole[start : start + counts[self._host.rank]]]
        else:
            assert op is not None
            work = backend.all_reduce(whole, dtype, op)
        for part, place in copies:
            work.then(part, place)
        now = time.monotonic()
        self._launched.append(_Launched(work, placed, results, label, arrivals, finish, now))
        self.advance()

    def advance(self) -> bool:
        """Store outcomes of enqueued operations, and forget those that the device has finished."""
        progressed = False
        while self._launched and self._launched[0].work.issued():
            first, backend = self._launched[0], self._backend
            assert backend is not None
            first.event = backend.device.record(backend.stream)
            for each, result in zip(first.placed, first.results, strict=True):
                each.done = first.event
                first.arrivals.append(Arrival(backend.device, result, first.event, backend.packing))
            first.finish()
            self._undone.append(first)  # before it leaves the other queue: `oldest` takes no lock
            self._launched.popleft()
            progressed = True
        while self._undone and self._devices["first"].done(self._undone[0].event):
            self._undone.popleft()
        if self._undone and time.monotonic() >= self._next_check:
            assert self._backend is not None
            self._next_check = time.monotonic() + _CHECK_S
            self._backend.check()
        return progressed

    def copy_to_host(self, placed: Placed) -> Buffer | None:
        """The elements in pinned host memory; None while the copy is under way."""
        device = placed.device
        if placed.pinned is None:
            if self._copying is None:
                self._copying = device.new_stream()
            nbytes = placed.data.nbytes
            placed.pinned = device.pinned(nbytes) if nbytes else np.empty(0, np.uint8)
            device.wait(self._copying, placed.ready)
            device.copy(placed.pinned, placed.data, self._copying)
            placed.copied = device.record(self._copying)
        return placed.pinned if device.done(placed.copied) else None

    @property
    def busy(self) -> bool:
        """Whether an operation waits for its turn, or for the host."""
        return bool(self._launched)

    @property
    def is_done(self) -> bool:
        """Whether the device had finished everything at the last :meth:`advance`."""
        return not (self._launched or self._undone)

    @property
    def oldest(self) -> tuple[float, str] | None:
        """Start of the oldest operation under way (``time.monotonic``), and its description."""
        for queue in (list(self._undone), list(self._launched)):
            if queue:
                return queue[0].since, f"in {queue[0].label} on the device"
        return None

    def fail(self) -> None:
        """Abandon everything, so that the device is free."""
        if self._backend is not None:
            self._backend.give_up()  # first: until then their memory may be written to
        self._launched.clear()
        self._undone.clear()

    def close(self) -> None:
        """Close the host's backend; collective. The links own the device's backend."""
        self._undone.clear()
        self._host.close()
