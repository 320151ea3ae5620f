"""Where ranks that share a host tell each other how far they have come (``host_memory``)."""

from __future__ import annotations

import numpy as np

from wfbp.comm.mpi.host_files import HEADER_BYTES
from wfbp.comm.mpi.host_memory import SharedMemory

READY, REDUCED, TAKEN = 1, 2, 3
_PHASES = 4
_NUM_ROWS = 64
"""More than the jobs that a channel usually has under way; others wait for a row."""
_ROW_WORDS = 8
"""A cache line."""
_FLAG_SET_BYTES = _NUM_ROWS * _ROW_WORDS * 8
NUM_FLAG_SETS = HEADER_BYTES // _FLAG_SET_BYTES - 1
"""The first bytes of the header are the memory's own."""


class SharedFlags:
    """Where the ranks tell how far each has come with the jobs of one channel.

    A job has a row on each rank's board, written by that rank alone: where its contribution lies,
    then, in a number that only grows, which job it is and its phase. Jobs are numbered alike on all
    ranks, and rows are used again in turn, once no rank needs what stands there: a job that follows
    on a row shows that the one before is over.

    Args:
        memory: of all ranks.
        rank: this one.
        size: number of ranks.
        channel: number of the channel, below :data:`NUM_BOARDS`; the same on every rank.
    """

    def __init__(self, memory: SharedMemory, rank: int, size: int, channel: int) -> None:
        start = (channel + 1) * _FLAG_SET_BYTES
        self._rank = rank
        self._words = memory.views(start, _FLAG_SET_BYTES)
        self._words[:] = [
            view.view(np.int64).reshape(_NUM_ROWS, _ROW_WORDS) for view in self._words
        ]
        self.peers = [(rank + step) % size for step in range(1, size)]
        self._jobs = 0

    def next_job(self) -> int:
        """A number for a job."""
        self._jobs += 1
        return self._jobs

    def begin(self, job: int, offset: int) -> bool:
        """This rank's contribution is ready, and lies there in its memory.

        Returns:
            False where a rank may still need the row for the job that had it before.
        """
        before = job - _NUM_ROWS
        if before > 0 and not all(self.reached(r, before, TAKEN) for r in range(len(self._words))):
            return False
        row = self._words[self._rank][job % _NUM_ROWS]
        row[1] = offset
        row[0] = job * _PHASES + READY
        return True

    def tell(self, job: int, phase: int) -> None:
        """This rank has come to a phase."""
        self._words[self._rank][job % _NUM_ROWS][0] = job * _PHASES + phase

    def reached(self, rank: int, job: int, phase: int) -> bool:
        """Whether a rank has come to a phase."""
        return bool(self._words[rank][job % _NUM_ROWS][0] >= job * _PHASES + phase)

    def offset(self, rank: int, job: int) -> int:
        """Where a rank's contribution lies, once it is ready."""
        return int(self._words[rank][job % _NUM_ROWS][1])
