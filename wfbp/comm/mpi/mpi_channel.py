"""The order in which one communicator's messages are started, and how far ahead.

Every rank submits the same jobs in the same order; the channel starts them in that order, a
bounded number at once, so that ranks can never start two collectives of one communicator in
different orders, however their progress differs. Jobs of the next work start as soon as the
window has room: the link does not idle between works.

A backend and its duplicates form a family whose channels are all moved on whenever one of them
is tested: a rank that waits on one channel would otherwise hold up the others' next chunks, and
two ranks waiting on different channels would wait for each other. They also fail together: after an
error, MPI promises nothing more.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

from wfbp.comm.backend import T, Work
from wfbp.comm.chunking import Chunking
from wfbp.comm.mpi.transfers import Transfers
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
    is_transfer = False
    """Whether nothing but a transfer of the family moves it on."""

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
    """The channels that move on together, and a count of what moved.

    Args:
        transfers: of all their jobs.
        who: this rank in words, for errors.
    """

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
        """Sleep until a transfer is over; arguments as for :meth:`Transfers.rest`.

        Returns:
            Whether it slept: False where nothing is under way, or what transfers do not move on.
        """
        jobs = [job for channel in self.channels for job in channel.active]
        if self.failure is not None or not jobs or not all(job.is_transfer for job in jobs):
            return False
        try:
            self.moves += self.transfers.rest(nap_s, most_s)
        except Exception as error:
            self.fail(error)
        return True

    def end(self) -> None:
        """Nobody waits any more for what is under way, if anything is."""
        if any(channel.active for channel in self.channels):
            self.fail(RuntimeError("given up with messages under way"))

    def fail(self, error: Exception) -> None:
        """Keep what went wrong first, for those who wait on any channel.

        Nothing more is started or moved on, and the memory of what is under way is kept for good.
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
        family = self._channel.family
        if self.remaining:
            family.advance()
        if self.remaining and family.failure is not None:
            raise family.failure
        return not self.remaining

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
        family: the channels that move on together; this one joins them.
    """

    def __init__(self, window: Chunking, family: ProgressGroup) -> None:
        self._window = window
        self.family = family
        family.channels.append(self)
        self.active: list[Job] = []
        self._queue: deque[Job] = deque()
        self._active_bytes = 0

    def submit(self, work: MpiWork[T], jobs: Sequence[Job]) -> MpiWork[T]:
        """Queue the jobs of a work and start what the window has room for."""
        for job in jobs:
            job.work = work  # type: ignore[assignment]
        work.remaining = len(jobs)
        if self.family.failure is None:
            self._queue.extend(jobs)
            try:
                self._fill()
            except Exception as error:
                self.family.fail(error)
        return work

    def step(self) -> None:
        """Move the jobs on, and start others where some are complete."""
        done = None
        for job in self.active:
            if job.step():
                done = [job] if done is None else [*done, job]
        if done is None:
            return
        self.family.moves += 1
        for job in done:
            self.active.remove(job)
            self._active_bytes -= job.nbytes
            job.work.remaining -= 1
        self._fill()

    def leave(self) -> None:
        """Take the channel out of its family, which ends where something is still under way."""
        if self.active:
            self.family.end()
        self.family.channels.remove(self)

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
