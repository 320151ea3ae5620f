"""The order in which one communicator's messages are started, and how far ahead.

Every rank submits the same jobs in the same order; the channel starts them in that order, a
bounded number at once, so that ranks can never start two collectives of one communicator in
different orders, however their progress differs. Jobs of the next work start as soon as the
window has room: the link does not idle between works.

A backend and its duplicates form a family whose channels are all moved on whenever one of them
is tested: a rank that waits on one channel would otherwise hold up the others' next chunks, and
two ranks waiting on different channels would wait for each other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

from wfbp.comm.backend import T, Work
from wfbp.comm.chunking import Chunking
from wfbp.errors import BackendError

NUM_TAGS = 1 << 14
"""Jobs that can be told apart by tag; far more than a window holds. MPI grants 32768 tags."""


class Job(ABC):
    """One message of a work: a chunk of a large one, or all of a small one.

    A library collective may be begun in :meth:`start` alone, because only the order of starts is
    the same on every rank; what follows in :meth:`step` travels point to point, under a tag of
    the job's own.
    """

    __slots__ = ("nbytes", "work")
    nbytes: int
    work: MpiWork[object]

    @abstractmethod
    def start(self) -> None:
        """Begin it; called once, in the order of submission."""

    @abstractmethod
    def step(self) -> bool:
        """Move it on without blocking; True once complete. Not called again after that."""

    def stirs(self) -> bool:
        """Whether :meth:`step` would find that something has moved on."""
        return True


class Family:
    """The channels that move on together, and a count of what moved."""

    def __init__(self) -> None:
        self.channels: list[Channel] = []
        self.moves = 0

    def stirs(self) -> bool:
        """Whether any job's next step would find that something has moved on."""
        return any(job.stirs() for channel in self.channels for job in channel.active)


class MpiWork(Work[T]):
    """A work made of jobs on a channel."""

    __slots__ = ("_channel", "_value", "nbytes", "remaining")

    def __init__(self, channel: Channel, nbytes: int, value: Callable[[], T]) -> None:
        self._channel = channel
        self._value = value
        self.nbytes = nbytes
        self.remaining = 0

    def test(self) -> bool:
        return not self.remaining or self._channel.progress(self)

    @property
    def activity(self) -> int:
        return self._channel.family.moves

    @property
    def result(self) -> T:
        return self._value()


class Channel:
    """Jobs of one communicator, started in order, a window of them at once. For one thread.

    Args:
        window: how many bytes and jobs may be under way.
        who: this rank in words, for errors.
        family: the channels that move on together; this one joins them.
    """

    def __init__(self, window: Chunking, who: str, family: Family) -> None:
        self._window = window
        self._who = who
        self.family = family
        family.channels.append(self)
        self._queue: deque[Job] = deque()
        self._active: list[Job] = []
        self._active_bytes = 0
        self._failure: BackendError | None = None

    def submit(self, work: MpiWork[T], jobs: Sequence[Job]) -> MpiWork[T]:
        """Queue the jobs of a work and start what the window has room for."""
        for job in jobs:
            job.work = work  # type: ignore[assignment]
        work.remaining = len(jobs)
        if self._failure is None:
            self._queue.extend(jobs)
            try:
                self._fill()
            except Exception as error:
                self._fail(error)
        return work

    def progress(self, work: MpiWork[T]) -> bool:
        """Move the whole family on; True once this channel's ``work`` is complete.

        Raises:
            BackendError: the library failed here, now or earlier; the channel's works are over.
        """
        for channel in self.family.channels:
            if channel._active and channel._failure is None:
                try:
                    channel._step()
                except Exception as error:
                    channel._fail(error)
        if work.remaining and self._failure is not None:
            raise self._failure
        return not work.remaining

    @property
    def active(self) -> list[Job]:
        """The jobs under way; none where the library has failed."""
        return self._active if self._failure is None else []

    def leave(self) -> None:
        """Take the channel out of its family."""
        self.family.channels.remove(self)

    def _step(self) -> None:
        done = None
        for job in self._active:
            if job.step():
                done = [job] if done is None else [*done, job]
        if done is None:
            return
        self.family.moves += 1
        for job in done:
            self._active.remove(job)
            self._active_bytes -= job.nbytes
            job.work.remaining -= 1
        self._fill()

    def _fill(self) -> None:
        window = self._window
        while self._queue and (
            not self._active
            or (
                self._active_bytes + self._queue[0].nbytes <= window.window_bytes
                and len(self._active) < window.window_jobs
            )
        ):
            job = self._queue.popleft()
            self._active.append(job)
            self._active_bytes += job.nbytes
            job.start()

    def _fail(self, error: Exception) -> None:
        """Keep what went wrong for those who wait on this channel."""
        self._failure = BackendError(f"{self._who}: communication failed: {error}")
        self._failure.__cause__ = error
        # What is under way stays listed: MPI may still write to its memory.
        self._queue.clear()
