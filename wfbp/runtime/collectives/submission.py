"""What a rank submits to a named operation, and what it gets back; on the host or on a device."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from wfbp.comm.backend import Buffer
from wfbp.comm.device.device import Device, Event
from wfbp.runtime.collectives.request import Request
from wfbp.runtime.progress.loop import Reply


@dataclass(slots=True)
class Placed:
    """Elements on a device, which an operation works on.

    Args:
        device: where they lie.
        data: their bytes; the result of a reduction or broadcast is left in them.
        ready: an event behind what made them.
        owner: of the memory; kept until the device is done with it.
        done: an event behind the operation, once that is enqueued; None where it goes through the
            host. Written by the communication thread, before it answers.
    """

    device: Device
    data: Buffer
    ready: Event
    owner: object
    done: Event = None

    @property
    def complete(self) -> bool:
        """Whether the device is done, of an operation that was answered."""
        return self.done is None or self.device.done(self.done)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A result on a device. It is there for streams that wait for ``event``.

    Args:
        device: where it lies.
        data: its bytes.
        event: behind the operation.
        packing: the stream to which the memory of gathered rows belongs.
    """

    device: Device
    data: Buffer
    event: Event
    packing: int

    def await_here(self) -> None:
        """Let the calling thread's current stream wait for it."""
        self.device.wait(self.device.current_stream(), self.event)

    def copy_to(self, target: Buffer) -> None:
        """Have it copied on the current stream; its own memory may be dropped behind this call."""
        device, stream = self.device, self.device.current_stream()
        self.await_here()
        device.copy(target, self.data, stream)
        device.wait(self.packing, device.record(stream))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an operation gives.

    Args:
        data: flat; elements of the operation's storage type, or bytes of what was gathered. On a
            device: bytes.
        rows: per rank what was gathered or received; of a join the last rank.
        differentiable: whether any rank wants to differentiate the result.
        arrival: the result on a device; None where it lies on the host.
    """

    data: Buffer
    rows: tuple[int, ...] = ()
    differentiable: bool = False
    arrival: Arrival | None = None


@dataclass(slots=True)
class Submission:
    """An operation that this rank's program has submitted.

    Args:
        request: as the coordinator sees it.
        data: this rank's elements, flat, in their storage type; private to the operation, which
            leaves the result of a reduction or broadcast in it. Of elements on a device: those,
            until they are copied to the host.
        placed: elements on a device, multiplied by the request's ``prescale`` already.
        reply: gets the outcome, or an error.
        since: when it was submitted (``time.monotonic``).
        copied: an event behind the copy to the host, where that was begun.
    """

    request: Request
    data: Buffer
    placed: Placed | None = None
    reply: Reply[Outcome] = field(default_factory=Reply)
    since: float = field(default_factory=time.monotonic)
    copied: Event = None
