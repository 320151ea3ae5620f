"""Messages on their way through the host's pinned memory, and the pieces they are cut into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from wfbp.comm.backend import Buffer, Work
from wfbp.comm.device.backend import DeviceWork
from wfbp.comm.device.device import Device, Event

Start = Callable[[Buffer], Work[None]]


@dataclass(slots=True)
class Piece:
    """A part of a message.

    Args:
        parts: its bytes on the device, one after the other in the pinned buffer.
        out: which of the parts are sent.
        back: which of them receive.
        start: starts the collective on the pinned bytes.
        work: what it belongs to.
    """

    parts: Sequence[Buffer]
    out: Sequence[bool]
    back: Sequence[bool]
    start: Start
    work: StagedWork
    pinned: Buffer | None = None
    copied: Event = None
    travel: Work[None] | None = None
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = sum(part.nbytes for part in self.parts)

    def places(self, pinned: Buffer) -> list[Buffer]:
        """Where its parts lie in a pinned buffer."""
        places = []
        end = 0
        for part in self.parts:
            start, end = end, end + part.nbytes
            places.append(pinned[start:end])
        return places


class Stage(Protocol):
    """The backend that a message goes through."""

    device: Device
    stream: int

    @property
    def activity(self) -> int:
        """Changes whenever anything moved on."""

    def progress(self) -> None:
        """Move everything on, without blocking."""


class StagedWork(DeviceWork):
    """A message of several pieces."""

    def __init__(self, backend: Stage, nbytes: int) -> None:
        self._backend = backend
        self.nbytes = nbytes
        self.pieces: list[Piece] = []
        self._missing = 0
        self._copies: list[tuple[Buffer, Buffer]] = []
        self._event: Event | None = None

    @property
    def activity(self) -> int:
        return self._backend.activity

    def add(self, piece: Piece) -> None:
        """One more piece, before it is submitted."""
        self.pieces.append(piece)
        self._missing += 1

    def arrived(self) -> None:
        """A piece's copies back are enqueued."""
        self._missing -= 1
        if not self._missing:
            self.pieces.clear()
            self._conclude()

    def _conclude(self) -> None:
        device, stream = self._backend.device, self._backend.stream
        for target, source in self._copies:
            device.copy(target, source, stream)
        self._copies.clear()
        self._event = device.record(stream)

    def issued(self) -> bool:
        if self._event is None:
            if not self._missing:
                self._conclude()
            else:
                self._backend.progress()
        return self._event is not None

    def test(self) -> bool:
        return self.issued() and self._backend.device.done(self._event)

    def then(self, target: Buffer, source: Buffer) -> None:
        self._copies.append((target, source))
        if self._event is not None:
            self._conclude()
