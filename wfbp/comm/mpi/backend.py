"""The backend on MPI, and short notices from one rank to all others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from wfbp.comm.backend import (
    Buffer,
    Finished,
    HostBackend,
    Mailbox,
    Pieces,
    Segment,
    Work,
    blocks,
    fill,
    fill_blocks,
    typed,
)
from wfbp.comm.chunking import Chunking, chunks
from wfbp.comm.mpi.jobs import BytesGather, Channel, Job, LibraryCollective, MpiWork, ProgressGroup
from wfbp.comm.mpi.launch_check import check_launch
from wfbp.comm.mpi.routing import Routing, Topology
from wfbp.comm.mpi.shm_allreduce import SharedAllReduce
from wfbp.comm.mpi.shm_memory import SharedMemory
from wfbp.comm.mpi.start import load, unlink_segments
from wfbp.comm.mpi.transfers import find_transfers
from wfbp.core.types import Op
from wfbp.errors import BackendError

if TYPE_CHECKING:
    from types import ModuleType

    from mpi4py import MPI


TAG = 1
_FIRST_TAG = 2

_unsent: list[tuple[MPI.Request, bytes | Buffer]] = []
"""Messages under way when their channel was closed: their memory must outlive them."""


class NoticeChannel:
    """Sends and collects notices on a communicator of its own; for one thread at a time."""

    def __init__(self, mpi: ModuleType, comm: MPI.Comm) -> None:
        self._mpi = mpi
        self._comm = comm
        self._status = mpi.Status()
        self._sending: list[tuple[MPI.Request, bytes | Buffer]] = []

    def send(self, payload: bytes) -> None:
        """Send to every other rank."""
        for step in range(1, self._comm.size):
            self.send_to((self._comm.rank + step) % self._comm.size, payload)

    def send_to(self, peer: int, payload: bytes) -> None:
        """Send to one rank."""
        request = self._comm.Isend([payload, self._mpi.BYTE], peer, TAG)
        if not request.Test():
            self._sending.append((request, payload))

    def start_send(self, buffer: Buffer, peer: int, tag: int) -> MPI.Request:
        """Send to one rank; tags are apart from those of notices."""
        request = self._comm.Isend([buffer, self._mpi.BYTE], peer, _FIRST_TAG + tag)
        self._sending.append((request, buffer))
        return request

    def start_receive(self, buffer: Buffer, peer: int, tag: int) -> MPI.Request:
        """Receive what :meth:`start_send` sends."""
        request = self._comm.Irecv([buffer, self._mpi.BYTE], peer, _FIRST_TAG + tag)
        self._sending.append((request, buffer))
        return request

    @property
    def sending(self) -> bool:
        """Whether messages were under way when it was last polled, or have been sent since."""
        return bool(self._sending)

    def poll(self) -> list[tuple[int, bytes]]:
        """What has arrived since the last call, with the sender's rank."""
        if self._sending:
            self._sending = [item for item in self._sending if not item[0].Test()]
        arrived = []
        status = self._status
        while (message := self._comm.Improbe(self._mpi.ANY_SOURCE, TAG, status)) is not None:
            content = bytearray(status.Get_count(self._mpi.BYTE))
            message.Recv([content, self._mpi.BYTE])
            arrived.append((status.Get_source(), bytes(content)))
        return arrived

    def close(self) -> None:
        """Free the communicator; messages under way go on."""
        _unsent.extend(item for item in self._sending if not item[0].Test())
        self._comm.Free()


class _Translated:
    """Makes MPI's errors this project's. (A generator would take longer than MPI's own call.)"""

    __slots__ = ("_kind", "_what")

    def __init__(self, kind: type[Exception], what: str) -> None:
        self._kind = kind
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, self._kind):
            raise BackendError(f"{self._what}: {error}") from error


class _Message(Work[None]):
    """One between two ranks; its memory is kept by the channel."""

    def __init__(self, backend: MpiBackend, request: MPI.Request) -> None:
        self._backend = backend
        self._request = request

    def test(self) -> bool:
        with self._backend.translated("a message between two ranks failed"):
            return bool(self._request.Test())

    @property
    def result(self) -> None:
        return None


class MpiBackend(HostBackend):
    """Collectives on a duplicate of an MPI communicator. Making one is collective.

    Args:
        comm: an mpi4py communicator, or the numbers in ``MPI.COMM_WORLD`` of the ranks that take
            part; all by default.
        chunking: by default what measured best, within one host or between hosts.
        start_timeout_s: how long MPI may take to start.
        shared_memory: whether ranks of one host read each other's memory, if all of them allow it.
        check_launcher: whether to fail if a launcher promised more ranks than MPI has.

    Raises:
        BackendError: mpi4py or MPI is missing or does not allow threads; a launcher promised more
            ranks than MPI has.

    Example:
        >>> import numpy as np
        >>> from wfbp.comm.waiting import wait
        >>> backend = MpiBackend()
        >>> x = np.ones(3, np.float32)
        >>> wait(backend.all_reduce(x, "float32", Op.AVERAGE))
        >>> x
        array([1., 1., 1.], dtype=float32)
    """

    def __init__(
        self,
        comm: MPI.Comm | Sequence[int] | None = None,
        chunking: Chunking | None = None,
        start_timeout_s: float | None = None,
        shared_memory: bool = True,
        check_launcher: bool = True,
        _original: MpiBackend | None = None,
        _same_ranks: bool = True,
    ) -> None:
        self._mpi = mpi = load(start_timeout_s)
        chosen = _communicator(mpi, comm) if isinstance(comm, Sequence) else comm
        if check_launcher and _original is None:
            check_launch(mpi, chosen)
        parent = mpi.COMM_WORLD if chosen is None else chosen
        try:
            self._comm = self._own(parent)
            if _original is None:
                self._notices = NoticeChannel(mpi, self._own(parent))
                self._topology = Topology.find(mpi, self._comm, chunking)
                self._memory = (
                    SharedMemory.connect(self._comm, shared_memory)
                    if self._topology.shared
                    else None
                )
            else:
                self._notices = _original._notices
                if _same_ranks:
                    self._topology, self._memory = _original._topology, _original._memory
                else:  # ranks of a subset do not find their way in the memory of all
                    self._topology, self._memory = Topology.find(mpi, self._comm, None), None
        except mpi.Exception as error:
            raise BackendError(
                f"the communicator could not be duplicated; MPI has a limited number of them: "
                f"{error}"
            ) from error
        self.rank, self.size = self._comm.rank, self._comm.size
        if self.size == mpi.COMM_WORLD.size:  # all have come here, and so have all segments
            unlink_segments(mpi)
        self._who = f"rank {self.rank} of {self.size}"
        self.local_rank = self._topology.local_rank
        self.local_size = self._topology.local_size
        self.library = mpi.Get_library_version().strip("\0").splitlines()[0].strip()
        self._is_original = _original is None
        self._progress_group: ProgressGroup = (
            ProgressGroup(find_transfers(mpi), self._who)
            if _original is None
            else _original._progress_group
        )
        self._channel = Channel(self._topology.chunking, self._progress_group)
        self._routes = Routing(mpi, self._comm, self._progress_group, self._topology)
        self._host = SharedAllReduce.of(
            self._memory, self._progress_group, self.rank, self.size, self._topology.chunking
        )

    @property
    def activity(self) -> int:
        return self._progress_group.moves

    def zeros(self, nbytes: int) -> Buffer:
        return super().zeros(nbytes) if self._memory is None else self._memory.zeros(nbytes)

    def copies_segments(self, buffer: Buffer) -> bool:
        return self._host is not None and self._host.handles(buffer)

    @property
    def progresses_alone(self) -> bool:
        return self._topology.one_rank_per_host

    def may_progress(self) -> bool:
        return self._progress_group.may_progress()

    def rest(self, nap_s: float, most_s: float) -> bool:
        return self._topology.one_rank_per_host and self._progress_group.rest(nap_s, most_s)

    def all_reduce(
        self, buffer: Buffer, dtype: str, op: Op, segments: Sequence[Segment] = ()
    ) -> Work[None]:
        data = typed(buffer, dtype)
        if self.size == 1:
            fill(buffer, segments)
            return Finished(None)
        if data.size == 0:
            return Finished(None)
        if self._host is not None and self._host.handles(data):
            jobs = self._host.all_reduce(data, segments, dtype, op)
        elif self._routes.exchanges(data.nbytes, dtype, op):
            parts = [
                (segment.start // data.itemsize, typed(segment.data, dtype, writeable=False))
                for segment in segments
            ]
            jobs = self._routes.all_reduce(Pieces.of(data, parts), data, dtype, op)
        else:
            fill(buffer, segments)
            jobs = self._routes.library_reduce(data, op)
        return self._submit(data.nbytes, jobs, _none)

    def reduce_scatter(
        self,
        buffer: Buffer,
        counts: Sequence[int],
        dtype: str,
        op: Op,
        segments: Sequence[Segment] = (),
    ) -> Work[None]:
        parts = blocks(self.size, buffer, counts, dtype)
        whole = not self._routes.scatters(dtype, op)
        if self.size == 1 or whole:
            fill_blocks(buffer, counts, segments, dtype)
        if self.size == 1 or buffer.nbytes == 0:
            return Finished(None)
        if whole:
            return self.all_reduce(buffer, dtype, op)
        sources = _per_block(parts, segments, dtype, writeable=False)
        jobs = self._routes.reduce_scatter(sources, parts[self.rank], dtype, op)
        return self._submit(buffer.nbytes, jobs, _none)

    def broadcast(self, buffer: Buffer, root: int) -> Work[None]:
        data = typed(buffer, "uint8")
        if self.size == 1 or data.size == 0:
            return Finished(None)
        jobs: list[Job] = [
            LibraryCollective(b - a, lambda part=data[a:b]: self._comm.Ibcast(part, root))  # type: ignore[misc]
            for a, b in chunks(data.size, 1, self._topology.chunking.chunk_bytes)
        ]
        return self._submit(data.nbytes, jobs, _none)

    def all_gather(
        self, buffer: Buffer, counts: Sequence[int], segments: Sequence[Segment] = ()
    ) -> Work[None]:
        parts = blocks(self.size, buffer, counts, "uint8")
        if self.size == 1 or buffer.nbytes == 0:
            return Finished(None)
        if self._routes.gathers:
            jobs = self._routes.all_gather(_per_block(parts, segments, "uint8"))
            return self._submit(buffer.nbytes, jobs, _none)
        jobs = []
        begins = _starts(counts)
        end = 0
        for segment in (*segments, None):
            # What lies in the buffer up to the segment, and the segment where it lies.
            until = segment.start if segment else max(counts)
            here = [max(0, min(count, until) - end) for count in counts]
            jobs += self._routes.library_gather(
                typed(buffer, "uint8"), [begin + end for begin in begins], here
            )
            if segment:
                data = typed(segment.data, "uint8")
                jobs += self._routes.library_gather(data, _starts(segment.counts), segment.counts)
                end = segment.start + max(segment.counts)
        return self._submit(sum(job.nbytes for job in jobs), jobs, _none)

    def all_gather_bytes(self, payload: bytes) -> Work[list[bytes]]:
        if self.size == 1:
            return Finished([bytes(payload)])
        job = BytesGather(self._mpi, self._comm, self._routes.next_number(), bytes(payload))
        return self._submit(job.nbytes, [job], job.value)

    def all_to_all(
        self, outgoing: Buffer, sent: Sequence[int], incoming: Buffer, received: Sequence[int]
    ) -> Work[None]:
        out = blocks(self.size, outgoing, sent, "uint8", writeable=False)
        back = blocks(self.size, incoming, received, "uint8")
        if self.size == 1:
            back[0][:] = out[0]
            return Finished(None)
        byte = self._mpi.BYTE
        # Sizes are not known to other ranks: every rank takes part, also with nothing to send.
        job = LibraryCollective(
            outgoing.nbytes,
            lambda: self._comm.Ialltoallv(
                [outgoing, list(sent), _starts(sent), byte],
                [incoming, list(received), _starts(received), byte],
            ),
        )
        return self._submit(outgoing.nbytes, [job], _none)

    def duplicate(self) -> MpiBackend:
        return MpiBackend(self._comm, _original=self)

    def subset(self, ranks: Sequence[int]) -> MpiBackend | None:
        mpi = self._mpi
        try:
            comm = self._comm.Split(0 if self.rank in ranks else mpi.UNDEFINED, self.rank)
        except mpi.Exception as error:
            raise BackendError(
                f"{self._who}: no communicator could be made of ranks {list(ranks)}: {error}"
            ) from error
        if comm == mpi.COMM_NULL:
            return None
        made = MpiBackend(comm, _original=self, _same_ranks=False)
        comm.Free()
        return made

    def mailbox(self) -> Mailbox:
        try:
            return _MpiMailbox(NoticeChannel(self._mpi, self._own(self._comm)), self)
        except self._mpi.Exception as error:
            raise BackendError(f"{self._who}: no mailbox could be made: {error}") from error

    def send_notice(self, payload: bytes) -> None:
        with self.translated("a notice could not be sent"):
            self._notices.send(bytes(payload))

    def poll_notices(self) -> list[tuple[int, bytes]]:
        with self.translated("notices could not be read"):
            return self._notices.poll()

    def translated(self, what: str) -> _Translated:
        """Within it MPI's errors become this project's."""
        return _Translated(self._mpi.Exception, f"{self._who}: {what}")

    def send(self, buffer: Buffer, peer: int, tag: int) -> Work[None]:
        with self.translated("a message could not be sent"):
            return _Message(self, self._notices.start_send(buffer, peer, tag))

    def receive(self, buffer: Buffer, peer: int, tag: int) -> Work[None]:
        with self.translated("a message could not be received"):
            return _Message(self, self._notices.start_receive(buffer, peer, tag))

    def give_up(self) -> None:
        self._progress_group.end()
        if self._memory is not None:
            self._memory.withdraw()

    def release(self) -> None:
        if self._memory is not None:
            self._memory.release()

    def abort(self, code: int) -> None:
        unlink_segments(self._mpi)
        self._comm.Abort(code)

    def close(self) -> None:
        """Give the communicators back. Collective; every work must be complete."""
        if self._is_original:
            self.give_up()
        self._channel.leave()
        try:
            if self._is_original:
                self._notices.close()
            self._comm.Free()
        except self._mpi.Exception as error:
            raise BackendError(f"{self._who}: closing failed: {error}") from error

    def _own(self, parent: MPI.Comm) -> MPI.Comm:
        comm = parent.Dup()
        comm.Set_errhandler(self._mpi.ERRORS_RETURN)
        return comm

    def _submit(self, nbytes: int, jobs: Sequence[Job], value: Callable[[], Any]) -> MpiWork[Any]:
        return self._channel.submit(MpiWork(self._channel, nbytes, value), jobs)


def _communicator(mpi: ModuleType, ranks: Sequence[int]) -> MPI.Comm:
    """One of these ranks of all; the others need not call this."""
    everybody = mpi.COMM_WORLD
    if everybody.rank not in ranks:
        raise ValueError(f"rank {everybody.rank} is none of the ranks {list(ranks)} that take part")
    made: MPI.Comm = everybody.Create_group(everybody.group.Incl(list(ranks)))
    return made


class _MpiMailbox(Mailbox):
    """Point to point on a communicator of its own; what a rank sends to itself does not travel."""

    def __init__(self, channel: NoticeChannel, backend: MpiBackend) -> None:
        self._channel = channel
        self._backend = backend
        self._own: list[tuple[int, bytes]] = []

    def send(self, rank: int, payload: bytes) -> None:
        if rank == self._backend.rank:
            self._own.append((rank, bytes(payload)))
            return
        with self._backend.translated("a message could not be sent"):
            self._channel.send_to(rank, bytes(payload))

    @property
    def sending(self) -> bool:
        return self._channel.sending

    def receive(self) -> list[tuple[int, bytes]]:
        own, self._own = self._own, []
        with self._backend.translated("messages could not be read"):
            return self._channel.poll() + own  # what had arrived before this rank's came first

    def close(self) -> None:
        with self._backend.translated("a mailbox could not be closed"):
            self._channel.close()


def _per_block(
    parts: Sequence[Buffer], segments: Sequence[Segment], dtype: str, writeable: bool = True
) -> list[Pieces]:
    """Each block of a buffer, in which the segments' parts lie elsewhere."""
    elsewhere: list[list[tuple[int, Buffer]]] = [[] for _ in parts]
    for segment in segments:
        parts_of_block = blocks(len(parts), segment.data, segment.counts, dtype, writeable)
        for own, data in zip(elsewhere, parts_of_block, strict=True):
            own.append((segment.start // data.itemsize, data))
    return [Pieces.of(part, own) for part, own in zip(parts, elsewhere, strict=True)]


def _starts(counts: Sequence[int]) -> list[int]:
    """Where blocks of these sizes begin, one after the other."""
    return [end - count for end, count in zip(accumulate(counts), counts, strict=True)]


def _none() -> None:
    return None
