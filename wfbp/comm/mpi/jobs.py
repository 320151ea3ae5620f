"""Jobs of one communicator: the order in which they start, how far ahead, and their kinds.

A job is a chunk of a large message, or all of a small one: a collective of the library, or a direct
exchange of shards among all ranks (reduce-scatter, all-gather, or both).
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from wfbp.comm.backend import Buffer, T, Work
from wfbp.comm.chunking import Chunking
from wfbp.comm.mpi.transfers import Message, Reduction, Transfer, Transfers
from wfbp.core.types import Op
from wfbp.errors import BackendError

if TYPE_CHECKING:
    from types import ModuleType

    from mpi4py import MPI

NUM_TAGS = 1 << 14
"""Jobs that can be told apart by tag; far more than a window holds. MPI grants 32768 tags."""


class Job(ABC):
    """One message of a work: a chunk of a large one, or all of a small one.

    Only :meth:`start` may begin a library collective, because only the order of starts is the same
    on every rank; :meth:`step` sends point to point, under a tag of the job's own.
    """

    __slots__ = ("nbytes", "work")
    nbytes: int
    work: MpiWork[object]
    is_transfer = False
    """Whether nothing but a transfer of the progress group moves it on."""

    @abstractmethod
    def start(self) -> None:
        """Begin it; called once, in the order of submission."""

    @abstractmethod
    def step(self) -> bool:
        """Move it on without blocking; True once complete. Not called again after that."""

    def may_progress(self) -> bool:
        """Whether :meth:`step` would find that something has moved on."""
        return True


class ProgressGroup:
    """The channels of a backend and its duplicates, which move on together, and a count of what
    moved."""

    def __init__(self, transfers: Transfers, who: str) -> None:
        self.channels: list[Channel] = []
        self.transfers = transfers
        self.moves = 0
        self.failure: BackendError | None = None
        self._who = who

    def advance(self) -> None:
        """Move all jobs on, without blocking; what goes wrong is kept in :attr:`failure`."""
        if self.failure is not None:
            return
        try:
            self.moves += self.transfers.progress()
            for channel in self.channels:
                channel.step()
        except Exception as error:
            self.fail(error)

    def may_progress(self) -> bool:
        """Move transfers on; whether :meth:`advance` would find more to do."""
        if self.failure is not None:
            return True
        try:
            self.moves += self.transfers.progress()
            return any(job.may_progress() for channel in self.channels for job in channel.active)
        except Exception as error:
            self.fail(error)
            return True

    def rest(self, nap_s: float, most_s: float) -> bool:
        """Sleep as :meth:`Transfers.rest` does; False where nothing is under way that transfers
        move on."""
        jobs = [job for channel in self.channels for job in channel.active]
        if self.failure is not None or not jobs or not all(job.is_transfer for job in jobs):
            return False
        try:
            self.moves += self.transfers.rest(nap_s, most_s)
        except Exception as error:
            self.fail(error)
        return True

    def end(self) -> None:
        """No rank waits any more for messages under way; keep their memory for good."""
        if any(channel.active for channel in self.channels):
            self.fail(RuntimeError("given up with messages under way"))

    def fail(self, error: Exception) -> None:
        """Keep the first error, which every channel raises from now on.

        Nothing more is started, and the memory of messages under way is kept for good.
        """
        if self.failure is not None:
            return
        self.failure = BackendError(f"{self._who}: communication failed: {error}")
        self.failure.__cause__ = error
        for channel in self.channels:
            channel.abandon()


def _keep_for_good(job: Job) -> None:
    """Keep the memory of a job to the very end: MPI may still write to it in ``MPI_Finalize``."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(job))


class MpiWork(Work[T]):
    """A work made of jobs on a channel."""

    __slots__ = ("_channel", "_value", "nbytes", "remaining")

    def __init__(self, channel: Channel, nbytes: int, value: Callable[[], T]) -> None:
        self._channel = channel
        self._value = value
        self.nbytes = nbytes
        self.remaining = 0

    def test(self) -> bool:
        progress_group = self._channel.progress_group
        if self.remaining:
            progress_group.advance()
        if self.remaining and progress_group.failure is not None:
            raise progress_group.failure
        return not self.remaining

    @property
    def activity(self) -> int:
        return self._channel.progress_group.moves

    @property
    def result(self) -> T:
        return self._value()


class Channel:
    """Jobs of one communicator, started in order, a window of bytes and jobs at once; for one
    thread."""

    def __init__(self, window: Chunking, progress_group: ProgressGroup) -> None:
        self._window = window
        self.progress_group = progress_group
        progress_group.channels.append(self)
        self.active: list[Job] = []
        self._queue: deque[Job] = deque()
        self._active_bytes = 0

    def submit(self, work: MpiWork[T], jobs: Sequence[Job]) -> MpiWork[T]:
        """Queue the jobs of a work and start what the window has room for."""
        for job in jobs:
            job.work = work  # type: ignore[assignment]
        work.remaining = len(jobs)
        if self.progress_group.failure is None:
            self._queue.extend(jobs)
            try:
                self._fill()
            except Exception as error:
                self.progress_group.fail(error)
        return work

    def step(self) -> None:
        """Move the jobs on, and start others where some are complete."""
        done = None
        for job in self.active:
            if job.step():
                done = [job] if done is None else [*done, job]
        if done is None:
            return
        self.progress_group.moves += 1
        for job in done:
            self.active.remove(job)
            self._active_bytes -= job.nbytes
            job.work.remaining -= 1
        self._fill()

    def leave(self) -> None:
        """Leave the progress group, which ends where something is still under way."""
        if self.active:
            self.progress_group.end()
        self.progress_group.channels.remove(self)

    def abandon(self) -> None:
        """Forget what was not started, and keep for good what was."""
        self._queue.clear()
        for job in self.active:
            _keep_for_good(job)

    def _fill(self) -> None:
        window = self._window
        while self._queue and (
            not self.active
            or (
                self._active_bytes + self._queue[0].nbytes <= window.window_bytes
                and len(self.active) < window.window_jobs
            )
        ):
            job = self._queue.popleft()
            self.active.append(job)
            self._active_bytes += job.nbytes
            job.start()


class LibraryCollective(Job):
    """One non-blocking collective of the MPI library, and what this rank does after it."""

    __slots__ = ("_after", "_begin", "_request")

    def __init__(
        self, nbytes: int, begin: Callable[[], MPI.Request], after: Callable[[], None] | None = None
    ) -> None:
        self.nbytes = nbytes
        self._begin = begin
        self._after = after

    def start(self) -> None:
        self._request = self._begin()

    def step(self) -> bool:
        if not self._request.Test():
            return False
        if self._after is not None:
            self._after()
        return True

    def may_progress(self) -> bool:
        return self._request.Get_status()


class BytesGather(Job):
    """Every rank's payload, of any length: each rank sends its own to every other."""

    __slots__ = ("_comm", "_missing", "_mpi", "_parts", "_pending", "_tag")

    def __init__(self, mpi: ModuleType, comm: MPI.Comm, sequence: int, payload: bytes) -> None:
        self.nbytes = len(payload)
        self._mpi = mpi
        self._comm = comm
        self._tag = 2 * (sequence % NUM_TAGS)
        self._parts: list[bytes | bytearray] = [b""] * comm.size
        self._parts[comm.rank] = payload
        self._missing: list[int] = []
        self._pending: list[MPI.Request] = []

    def start(self) -> None:
        rank, size = self._comm.rank, self._comm.size
        payload = [self._parts[rank], self._mpi.BYTE]
        self._missing = [(rank + step) % size for step in range(1, size)]
        self._pending = [self._comm.Isend(payload, peer, self._tag) for peer in self._missing]

    def step(self) -> bool:
        still_missing = []
        for peer in self._missing:
            status = self._mpi.Status()
            message = self._comm.Improbe(peer, self._tag, status)
            if message is None:
                still_missing.append(peer)
                continue
            part = self._parts[peer] = bytearray(status.Get_count(self._mpi.BYTE))
            self._pending.append(message.Irecv([part, self._mpi.BYTE]))
        self._missing = still_missing
        self._pending = [request for request in self._pending if not request.Test()]
        return not self._missing and not self._pending

    def value(self) -> list[bytes]:
        """The payloads in rank order."""
        return [bytes(part) for part in self._parts]


class Scratch:
    """Memory for the shards that arrive, kept from one exchange to the next."""

    def __init__(self) -> None:
        self._free: list[Buffer] = []

    def take(self, nbytes: int) -> Buffer:
        """At least ``nbytes`` bytes."""
        for index, block in enumerate(self._free):
            if block.nbytes >= nbytes:
                return self._free.pop(index)
        # A block that proved too small is not kept: chunks soon all have the same size.
        self._free = self._free[1:]
        return np.empty(nbytes, np.uint8)

    def give(self, block: Buffer) -> None:
        """Take a block back."""
        self._free.append(block)


class TransferJob(Job):
    """A job that is one transfer."""

    __slots__ = ("_transfer",)
    is_transfer = True
    _transfer: Transfer

    def step(self) -> bool:
        return self._transfer.done

    def may_progress(self) -> bool:
        return self._transfer.done


class DirectReduce(TransferJob):
    """All-reduce or reduce-scatter of one chunk.

    Args:
        sequence: number of the job on its channel, the same on every rank.
        shards: this rank's contribution to each rank's shard, in pieces as ``backend.typed``
            gives them; cut in the same places on every rank.
        results: where the combined shards go, one per rank; may be the contributions. Without
            ``gather`` only this rank's is used.
        gather: whether every rank gets every shard's result, or only its own.
    """

    __slots__ = (
        "_block",
        "_comm",
        "_dtype",
        "_gathers",
        "_op",
        "_progress_group",
        "_results",
        "_scratch",
        "_shards",
        "_tag",
    )  # fmt: skip

    def __init__(
        self,
        comm: MPI.Comm,
        progress_group: ProgressGroup,
        scratch: Scratch,
        sequence: int,
        shards: Sequence[Sequence[Buffer]],
        results: Sequence[Buffer],
        dtype: str,
        op: Op,
        gather: bool,
    ) -> None:
        self._shards = shards
        self._results = results
        self.nbytes = sum(piece.nbytes for shard in shards for piece in shard)
        self._comm = comm
        self._progress_group = progress_group
        self._scratch = scratch
        self._tag = 2 * (sequence % NUM_TAGS)
        self._dtype = dtype
        self._op = op
        self._gathers = gather

    def start(self) -> None:
        comm, result = self._comm, self._results[self._comm.rank]
        own = self._shards[comm.rank]
        self._block = block = self._scratch.take(
            sum(piece.nbytes for piece in own) * (comm.size - 1)
        )
        # Per piece of this rank's shard, what each rank contributes, and where the result goes.
        pieces = []
        end = 0
        for piece in own:
            start, end = end, end + piece.size
            pieces.append(([piece] * comm.size, result[start:end]))
        messages: list[Message] = []
        end = 0
        for peer in _peers(comm):
            for piece, (contributions, _) in zip(own, pieces, strict=True):
                start, end = end, end + piece.nbytes
                contributions[peer] = arriving = block[start:end].view(piece.dtype)
                messages.append((arriving, peer, True))
            messages += [(piece, peer, False) for piece in self._shards[peer]]
        then = _own_part(comm, [[part] for part in self._results]) if self._gathers else ()
        reduced = Reduction(self._dtype, self._op, pieces)
        self._transfer = self._progress_group.transfers.begin(
            comm, self._tag, messages, reduced, then
        )

    def step(self) -> bool:
        if not self._transfer.done:
            return False
        self._scratch.give(self._block)
        return True


class DirectGather(TransferJob):
    """All-gather of one chunk, in place.

    ``parts`` are the chunk's uint8 pieces by rank, cut in the same places on every rank; this
    rank's are sent, the others are received. ``sequence`` is as in :class:`DirectReduce`.
    """

    __slots__ = ("_comm", "_parts", "_progress_group", "_tag")

    def __init__(
        self,
        comm: MPI.Comm,
        progress_group: ProgressGroup,
        sequence: int,
        parts: Sequence[Sequence[Buffer]],
    ) -> None:
        self.nbytes = sum(piece.size for part in parts for piece in part)
        self._comm = comm
        self._progress_group = progress_group
        self._parts = parts
        self._tag = 2 * (sequence % NUM_TAGS)

    def start(self) -> None:
        messages = _own_part(self._comm, self._parts)
        self._transfer = self._progress_group.transfers.begin(self._comm, self._tag, messages)


def _own_part(comm: MPI.Comm, parts: Sequence[Sequence[Buffer]]) -> list[Message]:
    """This rank's part for all others, and each of theirs."""
    messages: list[Message] = []
    for peer in _peers(comm):
        messages += [(piece, peer, True) for piece in parts[peer] if piece.size]
        messages += [(piece, peer, False) for piece in parts[comm.rank] if piece.size]
    return messages


def _peers(comm: MPI.Comm) -> list[int]:
    """The other ranks, the next one first: ranks start with different peers."""
    rank, size = comm.rank, comm.size
    return [(rank + step) % size for step in range(1, size)]
