"""Ranks as threads of one process: the backend for tests of everything above it.

A collective completes on a rank once every rank has joined it. The last rank to join checks that
all ranks meant the same collective, computes all results, and marks the works complete.

Threads: the world's condition guards the open collectives, the notices and the world's state. The
last rank to join writes the buffers of all ranks, so a buffer belongs to the collective until
``test()`` returned True.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from wfbp.comm.arrays import Buffer, Segment, blocks, combine, fill, typed
from wfbp.comm.backend import HostBackend, T_co, Work
from wfbp.core.types import Op
from wfbp.errors import BackendError, PeerError, WfbpError

Finish = Callable[[list[Any]], list[Any]]


class _Rendezvous:
    """One collective: what each rank brought, and what each is to get."""

    def __init__(self) -> None:
        self.inputs: dict[int, tuple[object, Any]] = {}
        self.results: list[Any] | None = None
        self.error: WfbpError | None = None


class _WorldState:
    """What became of a world and all its duplicates."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.error: WfbpError | None = None
        self.begun: defaultdict[int, dict[str, int]] = defaultdict(dict)
        self.num_worlds = 0


class LocalWorld:
    """``size`` ranks in one process.

    Example:
        >>> world = LocalWorld(1)
        >>> x = np.ones(3, np.float32)
        >>> world.backend(0).all_reduce(x, "float32", Op.SUM).test()
        True
    """

    def __init__(self, size: int, _fate: _WorldState | None = None) -> None:
        if size < 1:
            raise ValueError(f"a world needs at least 1 rank, not {size}")
        self.size = size
        self.fate = _fate or _WorldState()
        self.fate.num_worlds += 1
        self.name = f"world {self.fate.num_worlds}"
        self.open: dict[int, _Rendezvous] = {}
        self.notices: list[deque[tuple[int, bytes]]] = [deque() for _ in range(size)]
        self._backends = [LocalBackend(self, rank) for rank in range(size)]

    def backend(self, rank: int) -> LocalBackend:
        """The one backend of a rank; call its methods from one thread at a time."""
        return self._backends[rank]

    def join(
        self, sequence: int, rank: int, signature: object, value: Any, finish: Finish
    ) -> _Rendezvous:
        """Bring a rank's input to the collective with this number; the last rank finishes it."""
        with self.fate.condition:
            if self.fate.error is not None:
                raise self.fate.error
            meeting = self.open.setdefault(sequence, _Rendezvous())
            meeting.inputs[rank] = (signature, value)
            if len(meeting.inputs) < self.size:
                return meeting
            del self.open[sequence]
        signatures = [meeting.inputs[r][0] for r in range(self.size)]
        if any(s != signatures[0] for s in signatures):
            differences = "; ".join(f"rank {r}: {s}" for r, s in enumerate(signatures))
            meeting.error = BackendError(f"ranks started different collectives: {differences}")
        else:
            try:
                meeting.results = finish([meeting.inputs[r][1] for r in range(self.size)])
            except Exception as error:
                meeting.error = BackendError(f"{signatures[0]} failed: {error}")
                meeting.error.__cause__ = error
        with self.fate.condition:
            self.fate.condition.notify_all()
        return meeting

    def end(self, error: WfbpError) -> None:
        """Mark the world dead: every pending and every later collective raises ``error``."""
        with self.fate.condition:
            self.fate.error = self.fate.error or error
            self.fate.condition.notify_all()


class _LocalWork(Work[T_co]):
    def __init__(self, world: LocalWorld, meeting: _Rendezvous, rank: int, nbytes: int) -> None:
        self._world = world
        self._meeting = meeting
        self._rank = rank
        self.nbytes = nbytes

    def test(self) -> bool:
        if self._meeting.results is not None:
            return True
        error = self._meeting.error or self._world.fate.error
        if error is not None:
            raise error
        time.sleep(0)  # ranks are threads: a spinning one must let the others have the interpreter
        return False

    @property
    def result(self) -> T_co:
        assert self._meeting.results is not None, "result before test() was True"
        value: T_co = self._meeting.results[self._rank]
        return value


class LocalBackend(HostBackend):
    """One rank of a :class:`LocalWorld`."""

    def __init__(self, world: LocalWorld, rank: int) -> None:
        self.rank = self.local_rank = rank
        self.size = self.local_size = world.size
        self._world = world
        self._started = 0

    def all_reduce(
        self, buffer: Buffer, dtype: str, op: Op, segments: Sequence[Segment] = ()
    ) -> Work[None]:
        def finish(buffers: list[Any]) -> list[Any]:
            total = np.empty_like(buffers[0])
            combine(buffers, total, dtype, op)
            for each in buffers:
                np.copyto(each, total)
            return [None] * self.size

        fill(buffer, [buffer.nbytes], segments, dtype)
        signature = (f"all_reduce {op.value}", dtype, buffer.nbytes)
        return self._join(signature, typed(buffer, dtype), buffer.nbytes, finish)

    def reduce_scatter(
        self,
        buffer: Buffer,
        counts: Sequence[int],
        dtype: str,
        op: Op,
        segments: Sequence[Segment] = (),
    ) -> Work[None]:
        def finish(buffers: list[Any]) -> list[Any]:
            for rank in range(self.size):
                total = np.empty_like(buffers[rank][rank])
                combine([each[rank] for each in buffers], total, dtype, op)
                np.copyto(buffers[rank][rank], total)
            return [None] * self.size

        signature = (f"reduce_scatter {op.value}", dtype, *counts)
        parts = blocks(self.size, buffer, counts, dtype)
        fill(buffer, counts, segments, dtype)
        return self._join(signature, parts, buffer.nbytes, finish)

    def broadcast(self, buffer: Buffer, root: int) -> Work[None]:
        def finish(buffers: list[Any]) -> list[Any]:
            for rank, each in enumerate(buffers):
                if rank != root:
                    np.copyto(each, buffers[root])
            return [None] * self.size

        signature = (f"broadcast from {root}", buffer.nbytes)
        return self._join(signature, typed(buffer, "uint8"), buffer.nbytes, finish)

    def all_gather(
        self, buffer: Buffer, counts: Sequence[int], segments: Sequence[Segment] = ()
    ) -> Work[None]:
        def finish(ranks: list[Any]) -> list[Any]:
            for rank, here in enumerate(ranks):
                for owner, there in enumerate(ranks):
                    for mine, theirs in zip(here, there, strict=True):
                        if owner != rank:
                            np.copyto(mine[owner], theirs[owner])
            return [None] * self.size

        pairs = [(buffer, counts), *((segment.data, segment.counts) for segment in segments)]
        parts = [blocks(self.size, data, lengths, "uint8") for data, lengths in pairs]
        return self._join(("all_gather", *counts), parts, buffer.nbytes, finish)

    def all_gather_bytes(self, payload: bytes) -> Work[list[bytes]]:
        def finish(payloads: list[Any]) -> list[Any]:
            return [list(payloads) for _ in payloads]

        return self._join(("all_gather_bytes",), bytes(payload), len(payload), finish)

    def all_to_all(
        self, outgoing: Buffer, sent: Sequence[int], incoming: Buffer, received: Sequence[int]
    ) -> Work[None]:
        def finish(ranks: list[Any]) -> list[Any]:
            for rank, (_, mine) in enumerate(ranks):
                for sender, (theirs, _) in enumerate(ranks):
                    np.copyto(mine[sender], theirs[rank])
            return [None] * self.size

        pair = (
            blocks(self.size, outgoing, sent, "uint8", writeable=False),
            blocks(self.size, incoming, received, "uint8"),
        )
        return self._join(("all_to_all",), pair, outgoing.nbytes, finish)

    def duplicate(self) -> LocalBackend:
        def finish(_: list[Any]) -> list[Any]:
            world = LocalWorld(self.size, self._world.fate)
            return [world.backend(rank) for rank in range(self.size)]

        made: LocalBackend = self._meet(("duplicate",), finish)
        return made

    def subset(self, ranks: Sequence[int]) -> LocalBackend | None:
        def finish(_: list[Any]) -> list[Any]:
            world = LocalWorld(len(ranks), self._world.fate)
            backends: list[LocalBackend | None] = [None] * self.size
            for index, rank in enumerate(ranks):
                backends[rank] = world.backend(index)
            return backends

        made: LocalBackend | None = self._meet(("subset", *ranks), finish)
        return made

    def send_notice(self, rank: int, payload: bytes) -> None:
        with self._world.fate.condition:
            self._world.notices[rank].append((self.rank, bytes(payload)))

    def poll_notices(self) -> list[tuple[int, bytes]]:
        box = self._world.notices[self.rank]
        if not box:
            return []
        with self._world.fate.condition:
            arrived = list(box)
            box.clear()
        return arrived

    def abort(self, code: int) -> None:
        self._world.end(PeerError(f"rank {self.rank} aborted the run with code {code}"))

    def close(self) -> None:
        """Nothing to give back."""

    def _join(
        self, signature: tuple[object, ...], value: Any, nbytes: int, finish: Finish
    ) -> _LocalWork[Any]:
        meeting = self._world.join(self._started, self.rank, signature, value, finish)
        self._started += 1
        begun = self._world.fate.begun[self.rank]
        begun[self._world.name] = self._started
        work: _LocalWork[Any] = _LocalWork(self._world, meeting, self.rank, nbytes)
        work.place = self._world.name, self._started
        return work

    def begun(self) -> dict[str, int]:
        return self._world.fate.begun[self.rank]

    def _meet(self, signature: tuple[object, ...], finish: Finish) -> Any:
        """Wait for all ranks; what ``finish`` makes for this one."""
        work = self._join(signature, None, 0, finish)
        with self._world.fate.condition:
            self._world.fate.condition.wait_for(lambda: self._over(work))
        return work.result

    @staticmethod
    def _over(work: Work[Any]) -> bool:
        return work.test()
