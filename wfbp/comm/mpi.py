"""The backend on MPI.

Small all-reduces use the library's own; large ones, half precision and the cases that the
library does not define go by direct exchange (``mpi_exchange``), cut into chunks of which a few
are under way at once (``mpi_channel``). The caller's communicator is duplicated, and duplicated
again for notices, so that nothing here can meet the messages of the user's own MPI calls.

Threads: a backend and its duplicates are used by one thread at a time; MPI itself must allow
several, because the user's thread may be inside MPI too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from wfbp.comm.arithmetic import INTEGER
from wfbp.comm.backend import Backend, Buffer, Finished, Work
from wfbp.comm.buffers import HALF, blocks, typed
from wfbp.comm.chunking import (
    NETWORK,
    Chunking,
    chunks,
    scatters_directly,
    split,
    within_host,
)
from wfbp.comm.mpi_channel import Channel, Family, Job, MpiWork
from wfbp.comm.mpi_exchange import Exchange, Gather, Scratch
from wfbp.comm.mpi_jobs import GatherBytes, Library
from wfbp.comm.mpi_library import load
from wfbp.comm.mpi_notices import NoticeBoard
from wfbp.core.types import Op
from wfbp.errors import BackendError

if TYPE_CHECKING:
    from mpi4py import MPI


class MpiBackend(Backend):
    """Collectives on a duplicate of an MPI communicator. Making one is collective.

    Args:
        comm: an mpi4py communicator; ``MPI.COMM_WORLD`` by default.
        chunking: sizes that decide how messages travel; by default what measured best, within
            one host or between hosts.
        start_timeout_s: how long MPI may take to start, where it has not been started.

    Raises:
        BackendError: mpi4py or MPI is missing or does not allow threads.

    Example:
        >>> from wfbp.comm.waiting import wait
        >>> backend = MpiBackend()
        >>> x = np.ones(3, np.float32)
        >>> wait(backend.all_reduce(x, "float32", Op.AVERAGE))
        >>> x
        array([1., 1., 1.], dtype=float32)
    """

    def __init__(
        self,
        comm: MPI.Comm | None = None,
        chunking: Chunking | None = None,
        start_timeout_s: float | None = None,
        _original: MpiBackend | None = None,
    ) -> None:
        self._mpi = mpi = load(start_timeout_s)
        parent = mpi.COMM_WORLD if comm is None else comm
        try:
            self._comm = self._own(parent)
            if _original is None:
                self._family = Family()
                self._notices = NoticeBoard(mpi, self._own(parent))
                self._settle(chunking)
            else:
                self._follow(_original)
        except mpi.Exception as error:
            raise BackendError(
                f"the communicator could not be duplicated; MPI has a limited number of them: "
                f"{error}"
            ) from error
        self.rank, self.size = self._comm.rank, self._comm.size
        self._is_original = _original is None
        self._who = f"rank {self.rank} of {self.size}"
        self._channel = Channel(self._chunking, self._who, self._family)
        self._scratch = Scratch()
        self._sequence = 0
        self._ops = {
            Op.SUM: mpi.SUM,
            Op.AVERAGE: mpi.SUM,
            Op.MIN: mpi.MIN,
            Op.MAX: mpi.MAX,
            Op.PRODUCT: mpi.PROD,
        }

    @property
    def activity(self) -> int:
        return self._family.moves

    def all_reduce(self, buffer: Buffer, dtype: str, op: Op) -> Work[None]:
        data = typed(buffer, dtype)
        if self.size == 1 or data.size == 0:
            return Finished(None)
        limits = self._chunking
        library = not _needs_exchange(dtype, op) and (
            data.nbytes <= limits.small_bytes or not self._direct
        )
        make = self._library_reduce if library else self._all_exchange
        jobs = [
            make(data[a:b], dtype, op)
            for a, b in chunks(data.size, data.itemsize, limits.chunk_bytes)
        ]
        return self._submit(data.nbytes, jobs, _none)

    def reduce_scatter(
        self, buffer: Buffer, counts: Sequence[int], dtype: str, op: Op
    ) -> Work[None]:
        parts = blocks(self.size, buffer, counts, dtype)
        if self.size == 1 or buffer.nbytes == 0:
            return Finished(None)
        if not self._scatters_directly and not _needs_exchange(dtype, op):
            return self.all_reduce(buffer, dtype, op)
        jobs = [self._exchange(piece, dtype, op, gather=False) for piece in self._pieces(parts)]
        return self._submit(buffer.nbytes, jobs, _none)

    def broadcast(self, buffer: Buffer, root: int) -> Work[None]:
        data = typed(buffer, "uint8")
        if self.size == 1 or data.size == 0:
            return Finished(None)
        jobs: list[Job] = [
            Library(b - a, lambda part=data[a:b]: self._comm.Ibcast(part, root))  # type: ignore[misc]
            for a, b in chunks(data.size, 1, self._chunking.chunk_bytes)
        ]
        return self._submit(data.nbytes, jobs, _none)

    def all_gather(self, buffer: Buffer, counts: Sequence[int]) -> Work[None]:
        parts = blocks(self.size, buffer, counts, "uint8")
        if self.size == 1 or buffer.nbytes == 0:
            return Finished(None)
        jobs: list[Job]
        if self._direct:
            jobs = [Gather(self._comm, self._next(), piece) for piece in self._pieces(parts)]
        else:
            whole = typed(buffer, "uint8")
            jobs = [self._library_gather(whole, piece) for piece in self._pieces(parts)]
        return self._submit(buffer.nbytes, jobs, _none)

    def all_gather_bytes(self, payload: bytes) -> Work[list[bytes]]:
        if self.size == 1:
            return Finished([bytes(payload)])
        job = GatherBytes(self._mpi, self._comm, self._next(), bytes(payload))
        return self._submit(job.nbytes, [job], job.value)

    def duplicate(self) -> Backend:
        return MpiBackend(self._comm, _original=self)

    def send_notice(self, payload: bytes) -> None:
        try:
            self._notices.send(bytes(payload))
        except self._mpi.Exception as error:
            raise BackendError(f"{self._who}: a notice could not be sent: {error}") from error

    def poll_notices(self) -> list[tuple[int, bytes]]:
        try:
            return self._notices.poll()
        except self._mpi.Exception as error:
            raise BackendError(f"{self._who}: notices could not be read: {error}") from error

    def abort(self, code: int) -> None:
        self._comm.Abort(code)

    def close(self) -> None:
        """Give the communicators back. Collective; every work must be complete."""
        self._channel.leave()
        try:
            if self._is_original:
                self._notices.close()
            self._comm.Free()
        except self._mpi.Exception as error:
            raise BackendError(f"{self._who}: closing failed: {error}") from error

    def _settle(self, chunking: Chunking | None) -> None:
        """Find out who shares a host, and how messages travel best there."""
        node = self._comm.Split_type(self._mpi.COMM_TYPE_SHARED)
        self.local_rank, self.local_size = node.rank, node.size
        node.Free()
        fullest = self._comm.allreduce(self.local_size, self._mpi.MAX)
        one_host = self.local_size == self._comm.size
        if chunking is None:
            open_mpi = self._mpi.get_vendor()[0] == "Open MPI"
            chunking = within_host(self._comm.size, open_mpi) if one_host else NETWORK
        self._chunking = chunking
        # Where hosts hold several ranks each, direct exchange would send every byte between hosts
        # once per rank of the host; the library's algorithms send it once.
        direct = self._comm.size <= self._chunking.direct_ranks
        self._direct = direct and (one_host or fullest == 1)
        self._scatters_directly = one_host or scatters_directly(self._comm.size, fullest)

    def _follow(self, original: MpiBackend) -> None:
        """Share with the original what does not need a communicator of its own."""
        self._family, self._notices = original._family, original._notices
        self.local_rank, self.local_size = original.local_rank, original.local_size
        self._chunking, self._direct = original._chunking, original._direct
        self._scatters_directly = original._scatters_directly

    def _own(self, parent: MPI.Comm) -> MPI.Comm:
        comm = parent.Dup()
        comm.Set_errhandler(self._mpi.ERRORS_RETURN)
        return comm

    def _submit(self, nbytes: int, jobs: Sequence[Job], value: Callable[[], Any]) -> MpiWork[Any]:
        return self._channel.submit(MpiWork(self._channel, nbytes, value), jobs)

    def _next(self) -> int:
        """The number of the next job that sends under tags of its own."""
        self._sequence += 1
        return self._sequence

    def _pieces(self, parts: Sequence[Buffer]) -> list[tuple[Buffer, ...]]:
        """Chunks that have a piece of every rank's block, so that all ranks work all the time."""
        num_chunks = -(-sum(part.nbytes for part in parts) // self._chunking.chunk_bytes)
        if num_chunks == 1:
            return [tuple(parts)]
        cut = [[part[a:b] for a, b in split(part.size, num_chunks)] for part in parts]
        return list(zip(*cut, strict=True))

    def _all_exchange(self, data: Buffer, dtype: str, op: Op) -> Job:
        shards = [data[a:b] for a, b in split(data.size, self.size)]
        return self._exchange(shards, dtype, op, gather=True)

    def _exchange(self, shards: Sequence[Buffer], dtype: str, op: Op, gather: bool) -> Job:
        number = self._next()
        return Exchange(self._comm, self._family, self._scratch, number, shards, dtype, op, gather)

    def _library_reduce(self, data: Buffer, dtype: str, op: Op) -> Job:
        after = (lambda: _scale(data, self.size)) if op is Op.AVERAGE else None
        operation = self._ops[op]
        in_place = self._mpi.IN_PLACE
        return Library(data.nbytes, lambda: self._comm.Iallreduce(in_place, data, operation), after)

    def _library_gather(self, whole: Buffer, piece: Sequence[Buffer]) -> Job:
        base = whole.ctypes.data
        counts = [part.size for part in piece]
        spec = [whole, counts, [part.ctypes.data - base for part in piece], self._mpi.BYTE]
        in_place = self._mpi.IN_PLACE
        return Library(sum(counts), lambda: self._comm.Iallgatherv(in_place, spec))


def _needs_exchange(dtype: str, op: Op) -> bool:
    """Whether MPI's own all-reduce cannot be trusted with it (see ``mpi_exchange``)."""
    if dtype in HALF:
        return True
    if dtype in INTEGER:
        return op is Op.AVERAGE
    return op in (Op.MIN, Op.MAX)


def _scale(data: Buffer, size: int) -> None:
    np.divide(data, size, out=data)


def _none() -> None:
    return None
