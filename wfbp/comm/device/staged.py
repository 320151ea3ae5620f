"""Collectives of device buffers through pinned host memory, if NCCL cannot serve. Messages are cut
into pieces: one is copied to the host while another travels."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from wfbp.comm.arrays import Buffer, split
from wfbp.comm.backend import HostBackend, Work
from wfbp.comm.device.device import Device
from wfbp.comm.device.device_backend import Blocks, DeviceBackend, DeviceWork
from wfbp.comm.memory import Event
from wfbp.core.types import Op, item_bytes
from wfbp.errors import BackendError

PIECE_BYTES = 4 << 20
NUM_PINNED = 2
_CLOSING_S = 60.0

Start = Callable[[Buffer, list[int]], Work[None]]
"""Starts a piece's collective, given the pinned bytes and the byte counts of its parts."""


@dataclass(slots=True)
class Piece:
    """Part of a message: device ``parts``, consecutive in the pinned buffer."""

    # ``out``: the parts that are sent; ``back``: the parts that receive.
    parts: Sequence[Buffer]
    out: Sequence[bool]
    back: Sequence[bool]
    start: Start
    ends: DeviceWork | None  # the work whose last piece this is
    pinned: Buffer | None = None
    copied: Event | None = None
    travel: Work[None] | None = None

    def copies(self, chosen: Sequence[bool]) -> list[tuple[Buffer, Buffer]]:
        """The place in the pinned buffer and the device part, of each chosen non-empty part."""
        assert self.pinned is not None
        pairs, end = [], 0
        for wanted, part in zip(chosen, self.parts, strict=True):
            start, end = end, end + part.nbytes
            if wanted and part.nbytes:
                pairs.append((self.pinned[start:end], part))
        return pairs


class StagedBackend(DeviceBackend):
    """Collectives of ``device`` by the ``host`` backend, which nothing else may use."""

    def __init__(
        self,
        device: Device,
        host: HostBackend,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        super().__init__(device, host)
        # Of its own: pieces start when their copies are done, at another time on every rank.
        self._carrier = host.duplicate()
        self._piece_bytes = piece_bytes
        self._waiting: deque[Piece] = deque()
        self._moving: deque[Piece] = deque()
        self._free: list[Buffer] = []
        self._num_pinned = 0
        self._error: BackendError | None = None

    @property
    def activity(self) -> int:
        return self._carrier.activity

    def _all_reduce(self, work: DeviceWork, dtype: str, op: Op) -> None:
        def start(pinned: Buffer, _: list[int]) -> Work[None]:
            return self._carrier.all_reduce(pinned, dtype, op)

        self._queue(work, [work.data], item_bytes(dtype), [True], [True], start)

    def _reduce_scatter(self, work: DeviceWork, blocks: Blocks, dtype: str, op: Op) -> None:
        def start(pinned: Buffer, counts: list[int]) -> Work[None]:
            return self._carrier.reduce_scatter(pinned, counts, dtype, op)

        own = [rank == self.rank for rank in range(self.size)]
        parts = _cut(work.data, blocks)
        self._queue(work, parts, item_bytes(dtype), [True] * self.size, own, start)

    def _all_gather(self, work: DeviceWork, blocks: Blocks) -> None:
        own = [rank == self.rank for rank in range(self.size)]
        others = [not mine for mine in own]
        self._queue(work, _cut(work.data, blocks), 1, own, others, self._carrier.all_gather)

    def _queue(
        self,
        work: DeviceWork,
        blocks: Sequence[Buffer],
        item: int,
        out: Sequence[bool],
        back: Sequence[bool],
        start: Start,
    ) -> None:
        """Queue a message's pieces, each with a part of every block."""
        # A little less than fits: pieces of blocks are rounded one by one.
        most = max(1, self._piece_bytes // item - self.size)
        num = -(-(work.nbytes // item) // most)
        bounds = [split(block.nbytes // item, num) for block in blocks]
        for k in range(num):
            parts = [
                block[bound[k][0] * item : bound[k][1] * item]
                for block, bound in zip(blocks, bounds, strict=True)
            ]
            ends = work if k == num - 1 else None
            self._waiting.append(Piece(parts, out, back, start, ends))
        self.progress()

    def progress(self) -> None:
        """Advance all messages; ``BackendError`` once anything failed."""
        self.check()
        try:
            self._finish_travels()
            while self._waiting and (pinned := self._take_pinned()) is not None:
                piece = self._waiting.popleft()
                piece.pinned = pinned
                for place, part in piece.copies(piece.out):
                    self.device.copy(place, part, self.stream)
                piece.copied = self.device.record(self.stream)
                self._moving.append(piece)
            self._begin_travels()
        except Exception as error:
            self._error = BackendError(f"rank {self.rank} of {self.size}: staging failed: {error}")
            raise self._error from error

    def _finish_travels(self) -> None:
        while self._moving and (travel := self._moving[0].travel) is not None and travel.test():
            piece = self._moving.popleft()
            assert piece.pinned is not None
            for place, part in piece.copies(piece.back):
                self.device.copy(part, place, self.stream)
            self._free.append(piece.pinned)
            if piece.ends is not None:
                piece.ends.conclude()
        # Later ones only make progress: they end in order, since copies back are enqueued in order.
        for piece in list(self._moving)[1:]:
            if piece.travel is not None:
                piece.travel.test()

    def _begin_travels(self) -> None:
        for piece in self._moving:
            if piece.travel is None:
                assert piece.copied is not None
                # The pinned buffer may still be read by the copies back of the piece before.
                if not self.device.done(piece.copied):
                    return
                assert piece.pinned is not None
                counts = [part.nbytes for part in piece.parts]
                piece.travel = piece.start(piece.pinned[: sum(counts)], counts)

    def _take_pinned(self) -> Buffer | None:
        if self._free:
            return self._free.pop()
        if self._num_pinned == NUM_PINNED:
            return None
        self._num_pinned += 1
        return self.device.pinned(self._piece_bytes)

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def give_up(self) -> None:
        """Does nothing: no work on the device waits for other ranks."""

    def close(self) -> None:
        """Close the host's backends. Collective; every work must have been issued."""
        # Copies from pinned memory, which is given out again from here on.
        self.settles(_CLOSING_S)
        self._carrier.close()
        self.host.close()


def _cut(data: Buffer, blocks: Blocks) -> list[Buffer]:
    return [data[start:stop] for start, stop in blocks.ranges]
