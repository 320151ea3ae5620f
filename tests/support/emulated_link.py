"""A link defined by a cost curve, to time the real runtime on any network.

One process plays rank 0 of ``size``. Collectives run one at a time, in order: each starts when the
previous one ends, even if no test has noticed, and takes exactly the seconds that the curve gives.
Threads: one thread at a time uses a link and its duplicates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from wfbp.comm.arrays import Buffer, Segment, blocks, combine, fill, typed
from wfbp.comm.backend import HostBackend, T_co, Work
from wfbp.core.types import Op, Operation
from wfbp.errors import PeerError

ALL_REDUCE = Operation.ALL_REDUCE
Curve = Callable[[int], float]
"""Maps bytes of a message to seconds."""

LAST_NAP_S = 300e-6
"""A test this close to the end sleeps the rest, so that completion is noticed on time."""


class _Channel:
    """State shared by a link's duplicates."""

    def __init__(self, costs: Mapping[Operation, Curve]) -> None:
        self.costs = costs
        self.free_s = 0.0
        self.moves = 0
        self.error: PeerError | None = None

    def occupy(self, operation: Operation, nbytes: int) -> float:
        """The time (``time.perf_counter``) at which a message sent now has arrived."""
        self.free_s = max(self.free_s, time.perf_counter()) + self.costs[operation](nbytes)
        return self.free_s


class _EmulatedWork(Work[T_co]):
    def __init__(
        self, channel: _Channel, operation: Operation, nbytes: int, finish: Callable[[], T_co]
    ) -> None:
        self._channel = channel
        self._end_s = channel.occupy(operation, nbytes)
        self._finish = finish
        self._result: list[T_co] = []
        self.nbytes = nbytes

    def test(self) -> bool:
        if self._result:
            return True
        if self._channel.error is not None:
            raise self._channel.error
        left_s = self._end_s - time.perf_counter()
        if left_s > LAST_NAP_S:
            return False
        if left_s > 0:
            time.sleep(left_s)
        self._result.append(self._finish())
        self._channel.moves += 1
        return True

    @property
    def activity(self) -> int:
        return self._channel.moves

    @property
    def result(self) -> T_co:
        return self._result[0]


class EmulatedLink(HostBackend):
    """Rank 0 of ``size`` equal ranks; all ranks contribute the same values. ``others`` are curves
    of collectives whose cost differs from ``cost``."""

    def __init__(
        self,
        cost: Curve,
        size: int = 2,
        others: Mapping[Operation, Curve] | None = None,
        _channel: _Channel | None = None,
    ) -> None:
        if size < 1:
            raise ValueError(f"a link needs at least 1 rank, not {size}")
        self.rank = self.local_rank = 0
        self.size = size
        self.local_size = 1
        self._channel = _channel or _Channel(dict.fromkeys(Operation, cost) | dict(others or {}))
        self._notices: list[tuple[int, bytes]] = []

    @property
    def activity(self) -> int:
        return self._channel.moves

    def all_reduce(
        self, buffer: Buffer, dtype: str, op: Op, segments: Sequence[Segment] = ()
    ) -> Work[None]:
        data = typed(buffer, dtype)
        fill(buffer, [buffer.nbytes], segments, dtype)

        def finish() -> None:
            if op in (Op.SUM, Op.PRODUCT):
                combine([data.copy() for _ in range(self.size)], data, dtype, op)

        return self._send(data.nbytes, finish)

    def reduce_scatter(
        self,
        buffer: Buffer,
        counts: Sequence[int],
        dtype: str,
        op: Op,
        segments: Sequence[Segment] = (),
    ) -> Work[None]:
        mine = blocks(self.size, buffer, counts, dtype)[self.rank]
        fill(buffer, counts, segments, dtype)

        def finish() -> None:
            if op in (Op.SUM, Op.PRODUCT):
                combine([mine.copy() for _ in range(self.size)], mine, dtype, op)

        return self._send(buffer.nbytes, finish, Operation.REDUCE_SCATTER)

    def broadcast(self, buffer: Buffer, root: int) -> Work[None]:
        return self._send(typed(buffer, "uint8").nbytes, lambda: None)

    def all_gather(
        self, buffer: Buffer, counts: Sequence[int], segments: Sequence[Segment] = ()
    ) -> Work[None]:
        pairs = [(buffer, counts), *((segment.data, segment.counts) for segment in segments)]
        for data, lengths in pairs:
            parts = blocks(self.size, data, lengths, "uint8")
            mine = parts[self.rank]
            for part in parts:  # now, so that it does not come on top of the time on the link
                if part is not mine:
                    np.copyto(part, np.resize(mine, part.size))
        return self._send(buffer.nbytes, lambda: None, Operation.ALL_GATHER)

    def all_gather_bytes(self, payload: bytes) -> Work[list[bytes]]:
        return self._send(len(payload), lambda: [bytes(payload)] * self.size)

    def duplicate(self) -> EmulatedLink:
        return EmulatedLink(self._channel.costs[ALL_REDUCE], self.size, _channel=self._channel)

    def send_notice(self, rank: int, payload: bytes) -> None:
        if payload.startswith(b'["bye"'):  # the ranks that are played leave with this one
            self._notices.append((rank, payload))

    def poll_notices(self) -> list[tuple[int, bytes]]:
        arrived, self._notices = self._notices, []
        return arrived

    def abort(self, code: int) -> None:
        self._channel.error = PeerError(f"the run was aborted with code {code}")

    def close(self) -> None:
        """Has no resources to free."""

    def _send(
        self, nbytes: int, finish: Callable[[], Any], operation: Operation = ALL_REDUCE
    ) -> Work[Any]:
        return _EmulatedWork(self._channel, operation, nbytes, finish)
