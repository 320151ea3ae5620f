"""Collectives under way: tasks, their order of starts, and their progress.

A :class:`Channel` starts the tasks of one communicator in order of submission, a window of bytes at
a time. Only the order of starts is the same on every rank, so only a start may begin a collective
of the MPI library; everything later is point-to-point, with the task's tag.

Most tasks are *exchanges* of the C++ extension (``csrc/exchange.h``): collectives in chunks, of
messages, an optional reduction, and more messages. One call advances all of them without the
interpreter, so a training thread that holds it neither waits nor is delayed. A separate window
limits their chunks. Other tasks advance in Python.

Threads: the channels of a backend and its duplicates share one :class:`ProgressGroup`, which one
thread at a time may use.
"""

from __future__ import annotations

import ctypes
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from wfbp import native
from wfbp.comm.arrays import Buffer, split
from wfbp.comm.backend import T_co, Work
from wfbp.errors import BackendError

if TYPE_CHECKING:
    from types import ModuleType

    from mpi4py import MPI

T = TypeVar("T")

_LARGE_BYTES = 4 << 20
"""Start-up times, and bursts that a link lets pass, hardly count in what so many bytes take."""

NUM_TAGS = 1 << 14
"""Pairs of tags: half for chunks of exchanges, half for other tasks. MPI grants 32768 tags."""

PIECE_BYTES = 64 << 20
"""Longer messages travel in pieces: MPI's functions count bytes by an int."""

Blocks = Sequence[Buffer | None]
"""One block of bytes per rank, or nothing."""

Watch = tuple[Sequence[memoryview], int, bool]
"""Flags (int64), and what they, or any of them, must reach; see ``native.any_reached``."""


@dataclass(frozen=True, slots=True)
class Chunking:
    """Sizes of chunks and windows; measured in docs/benchmarks/communication.md."""

    # Large enough to hide start-up; small enough that chunks overlap on a link and are still in
    # cache when they are reduced. Several are under way, so that the link never idles.
    chunk_bytes: int = 1 << 20
    window_bytes: int = 3 << 20
    window_tasks: int = 8
    # A rank sends its whole contribution to all others, if that is no more: one exchange, not two.
    small_bytes: int = 64 << 10
    # Up to this many ranks of a host all-reduce small messages directly.
    direct_ranks: int = 16


def chunks(numel: int, item_bytes: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """Start and end of the chunks of a message, in elements; one empty chunk for none."""
    return split(numel, max(1, -(-numel * item_bytes // chunk_bytes)))


class Task(ABC):
    """A collective, or a chunk of it; complete when its ``transfer`` or :meth:`step` is done."""

    nbytes: int
    """Bytes that count towards the channel's window; 0 for an exchange."""
    work: MpiWork[object]
    transfer: native.Transfer | native.Exchange | None = None
    request: MPI.Request | None = None
    """Of the MPI library, which keeps the memory of its collective."""

    @abstractmethod
    def start(self) -> None:
        """Begin it; called once, in the order of submission."""

    def step(self) -> bool:
        """Make progress without blocking; True once complete, and then not called again."""
        raise NotImplementedError

    def awaited(self) -> Watch | None:
        """The flags that :meth:`step` waits for; None if it may find progress without them."""
        return None


@dataclass(eq=False)
class TransferTask(Task):
    """A task of messages alone; ``begin`` refers to their memory."""

    nbytes: int
    begin: Callable[[Task], native.Transfer | native.Exchange]

    def start(self) -> None:
        self.transfer = self.begin(self)


class Pace:
    """How long a byte takes at least, in large works among the same ranks."""

    least_s_per_byte: float | None = None
    """From submission to the end."""

    def note_end(self, work: MpiWork[object]) -> None:
        """Learn from a work that has ended."""
        if work.nbytes >= _LARGE_BYTES:
            s_per_byte = (time.monotonic() - work.begun_s) / work.nbytes
            self.least_s_per_byte = min(self.least_s_per_byte or s_per_byte, s_per_byte)


class ProgressGroup:
    """Advances the tasks of a backend and its duplicates; all works raise the first ``failure``."""

    def __init__(self, transfers: native.Transfers, who: str) -> None:
        self.transfers = transfers
        self.channels: list[Channel] = []
        self.begun: dict[str, int] = {}  # collectives, by channel, also of those that were left
        self.moves = 0
        self.num_polled = 0
        self.failure: BackendError | None = None
        self._num_over = 0
        self._who = who

    def advance(self) -> None:
        """Advance all tasks without blocking; stores an error in ``failure``."""
        # Stored: every incomplete work raises it, whichever is tested first.
        if self.failure is not None:
            return
        transfers = self.transfers
        try:
            self.moves += transfers.progress()
            # Usually nothing is over, and this is all that a test costs.
            if self.num_polled or transfers.num_over != self._num_over:
                self._num_over = transfers.num_over
                for channel in self.channels:
                    if channel.active:
                        channel.step()
        except Exception as error:
            self.fail(error)

    def may_progress(self) -> bool:
        """Advance transfers; whether :meth:`advance` would find more to do."""
        if self.failure is not None:
            return True
        try:
            self.moves += self.transfers.progress()
            watches = self._watches() if self.num_polled else []
            over = self.transfers.num_over != self._num_over
            return over or watches is None or native.any_reached(watches)
        except Exception as error:
            self.fail(error)
            return True

    def rest(self, nap_s: float, most_s: float) -> bool:
        """Sleep until a task may go on, at most ``most_s``; False, without sleeping, if none waits
        or one need not."""
        if self.failure is not None or not any(map(attrgetter("active"), self.channels)):
            return False
        try:
            watches = self._watches() if self.num_polled else []
            if watches is None:
                return False
            self.moves += self.transfers.rest(nap_s, most_s, watches)
        except Exception as error:
            self.fail(error)
        return True

    def _watches(self) -> list[Watch] | None:
        """The events that tasks which advance in Python wait for; None if a task may go on."""
        polled = [t for channel in self.channels for t in channel.active if t.transfer is None]
        watches = [watch for task in polled if (watch := task.awaited()) is not None]
        return watches if len(watches) == len(polled) else None

    def give_up(self) -> None:
        """Stop waiting for messages under way; their memory is never freed."""
        if any(channel.active for channel in self.channels):
            self.fail(RuntimeError("abandoned with messages under way"))

    def fail(self, error: Exception) -> None:
        """Keep the first error, and start no further task."""
        if self.failure is not None:
            return
        self.failure = BackendError(f"{self._who}: communication failed: {error}")
        self.failure.__cause__ = error
        for channel in self.channels:
            channel.abandon()


@dataclass(eq=False)
class MpiWork(Work[T_co]):
    """A collective made of tasks."""

    channel: Channel
    remaining: int
    finish: Callable[[], T_co] | None
    """Makes the result, once the last task is complete."""
    nbytes: int
    place: tuple[str, int] | None = None
    begun_s: float = field(default_factory=time.monotonic)
    value: T_co | None = None
    _left: tuple[int, int] = (0, 0)  # tasks, and messages of these that had ended, at the last look
    _moved_s: float = 0.0

    def test(self) -> bool:
        if self.remaining:
            group = self.channel.group
            group.advance()
            if self.remaining and group.failure is not None:
                raise group.failure
        return not self.remaining

    @property
    def activity(self) -> int:
        return self.channel.group.moves

    @property
    def moved_s(self) -> float:
        transfers = [task.transfer for task in self.channel.active if task.work is self]
        left = self.remaining, sum(transfer.ended for transfer in transfers if transfer)
        if left != self._left:
            self._left, self._moved_s = left, time.monotonic()
        return self._moved_s

    @property
    def result(self) -> T_co:
        return self.value  # type: ignore[return-value]


class Channel:
    """The tasks of one communicator, started in order, a window of bytes and tasks at once. Its
    ``name`` is the same on all ranks, and no other channel's."""

    def __init__(
        self,
        group: ProgressGroup,
        window: Chunking,
        mpi: ModuleType,
        comm: MPI.Comm,
        name: str,
        pace: Pace,
    ) -> None:
        self.group, self.name, self.pace = group, name, pace
        self.num_made = 0  # of communicators from this one
        group.begun[name] = 0
        self.mpi, self.comm = mpi, comm
        self.handle: int = mpi._handleof(comm)
        self.rank, self.size = comm.rank, comm.size
        # The next rank first: ranks start with different peers.
        self.peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        self.active: list[Task] = []
        self.queue: deque[Task] = deque()
        self.window = window
        self.chunk_window = native.Window(window.window_bytes, window.window_tasks)
        self._active_bytes = 0
        self.num_tags = self.num_chunks = 0
        group.channels.append(self)

    def next_tag(self) -> int:
        """An unused tag (the one after it is unused too); the same on every rank."""
        # Wrapping around is safe: a task this old is over on every rank before this one starts.
        self.num_tags += 1
        return 2 * (NUM_TAGS // 2 + self.num_tags % (NUM_TAGS // 2))

    def chunk_tags(self, count: int) -> list[int]:
        """Tags of the next exchange's chunks; the same on every rank."""
        # Other tasks have other tags: they may start while these chunks still wait. Wrapping around
        # is safe: chunks start in order, and far fewer are under way at once.
        first, self.num_chunks = self.num_chunks, self.num_chunks + count
        return [2 * (number % (NUM_TAGS // 2)) for number in range(first, first + count)]

    def submit(
        self, nbytes: int, tasks: Sequence[Task], finish: Callable[[], T] | None = None
    ) -> MpiWork[T]:
        """Queue the tasks of a collective and start those that fit into the window."""
        begun = self.group.begun
        begun[self.name] += 1
        place = self.name, begun[self.name]
        work = MpiWork(self, len(tasks), finish, nbytes, place)
        if self.group.failure is None:
            for task in tasks:
                task.work = work
            self.queue.extend(tasks)
            try:
                self._fill()
            except Exception as error:
                self.group.fail(error)
        return work

    def step(self) -> None:
        """Remove complete tasks and start others."""
        done = [
            task
            for task in self.active
            if (task.step() if task.transfer is None else task.transfer.done)
        ]
        if not done:
            return
        self.group.moves += 1
        for task in done:  # after all were tested: a new task may reuse what these release
            self.active.remove(task)
            self.group.num_polled -= task.transfer is None
            self._active_bytes -= task.nbytes
            work = task.work
            if work.remaining == 1 and work.finish is not None:
                work.value = work.finish()
            work.remaining -= 1
            if not work.remaining:
                self.pace.note_end(work)
        self._fill()

    def abandon(self) -> None:
        """Forget everything under way; its memory is never reused."""
        self.queue.clear()
        for task in self.active:
            # MPI may still write to its memory, even in MPI_Finalize, and other ranks may read it.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))
            self.group.num_polled -= task.transfer is None
        self.active.clear()
        self._active_bytes = 0

    def leave(self) -> None:
        """Leave the group; abandon whatever is still under way."""
        if self.active:
            self.group.give_up()
        self.group.channels.remove(self)

    def _fill(self) -> None:
        window = self.window
        while self.queue and (
            not self.active
            or (
                self._active_bytes + self.queue[0].nbytes <= window.window_bytes
                and len(self.active) < window.window_tasks
            )
        ):
            # Strictly in order, even if a later task would fit: MPI matches collectives by order.
            task = self.queue.popleft()
            self.active.append(task)
            self._active_bytes += task.nbytes
            task.start()
            self.group.num_polled += task.transfer is None


def begin_messages(
    _: Task, channel: Channel, outgoing: Blocks, incoming: Blocks
) -> native.Transfer:
    """Send blocks from every rank to every rank."""
    messages = []
    own, place = outgoing[channel.rank], incoming[channel.rank]
    if own is not None and place is not None:
        place[:] = own
    for arrives, blocks in ((True, incoming), (False, outgoing)):
        for peer in channel.peers:
            block = blocks[peer]
            if block is not None and block.nbytes:
                messages += [(piece, peer, arrives) for piece in split_message(block)]
    return channel.group.transfers.begin(channel.handle, channel.next_tag(), messages)


def split_message(data: Buffer) -> list[Buffer]:
    """The pieces in which a message travels, at least one."""
    data = data.view(np.uint8)
    return [
        data[start : start + PIECE_BYTES] for start in range(0, max(data.nbytes, 1), PIECE_BYTES)
    ]


def load_transfers(mpi: ModuleType) -> native.Transfers:
    """Transfers that call the MPI library that mpi4py has loaded; or ``BackendError``."""
    try:
        # MPICH calls COMM_SELF's error handler for a test of several messages: it must not end
        # the job.
        if mpi.COMM_SELF.Get_errhandler() != mpi.ERRORS_RETURN:
            raise ValueError(
                "the error handler of COMM_SELF is not ERRORS_RETURN, mpi4py's default"
            )
        library = ctypes.CDLL(mpi.__file__)  # which finds the library that it is linked to
        sizes = {mpi._sizeof(kind) for kind in (mpi.Comm, mpi.Datatype, mpi.Request)}
        if len(sizes) > 1:
            raise ValueError(f"handles of {sorted(sizes)} bytes")
        # A status keeps its error at an offset that differs between libraries: look for a marker.
        status, marker = mpi.Status(), 0x5A17C0DE
        status.Set_error(marker)
        raw = ctypes.string_at(mpi._addressof(status), mpi._sizeof(mpi.Status))
        error_at = raw.find(marker.to_bytes(4, sys.byteorder))
        if error_at < 0:
            raise ValueError("a status keeps no error")

        def address(function: Any) -> int:
            return ctypes.cast(function, ctypes.c_void_p).value or 0

        return native.Transfers(
            isend=address(library.MPI_Isend),
            irecv=address(library.MPI_Irecv),
            testsome=address(library.MPI_Testsome),
            handle_bytes=sizes.pop(),
            byte=mpi._handleof(mpi.BYTE),
            status_bytes=mpi._sizeof(mpi.Status),
            error_at=error_at,
            success=mpi.SUCCESS,
            error=mpi.Exception,
        )
    except (OSError, AttributeError, ValueError) as error:
        raise BackendError(
            f"the functions of the MPI library cannot be called directly, which wfbp needs: {error}"
        ) from error
