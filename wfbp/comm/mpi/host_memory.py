"""Memory that the ranks of one host can read of each other.

Each rank has one file without a name, mapped by all: by itself to write, by the others to read.
The file is as large as the machine's memory and almost all hole; what is never touched costs
nothing, and what is freed becomes hole again. Nothing has to be announced when buffers come and go,
and nothing is left behind by a rank that is killed.

A copy out of another rank's memory is done when the copying call returns. Unlike a message, it
never touches memory behind anybody's back. The other way round, a rank that waits no longer for
those who read its memory says so before it does anything else with it
(:meth:`SharedMemory.withdraw`): who has copied, and finds nothing said after that, has right
values, however long it took.
"""

from __future__ import annotations

import os
import secrets
import weakref
from collections import deque
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from wfbp.comm.backend import Buffer
from wfbp.comm.mpi.host_files import (
    HEADER_BYTES,
    PAGE_BYTES,
    Mapping,
    known_reason,
    log_reason,
    make_file,
    open_map,
)

if TYPE_CHECKING:
    from mpi4py import MPI

_TOKEN_BYTES = 16
_WITHDRAWN_WORD = 8
"""Of the header; in a cache line of its own, behind the token's."""


class FreeList:
    """Which ranges of a memory are free: takes the first that is large enough.

    Args:
        start: of the memory.
        end: behind it.

    Example:
        >>> room = Room(0, 100)
        >>> room.take(30), room.take(30)
        (0, 30)
        >>> room.give(0, 30)
        >>> room.take(40), room.take(20)
        (60, 0)
    """

    def __init__(self, start: int, end: int) -> None:
        self._gaps = [(start, end)]

    def take(self, nbytes: int) -> int:
        """Where so many bytes are free, and no longer are.

        Raises:
            MemoryError: nowhere.
        """
        for k, (start, end) in enumerate(self._gaps):
            if end - start >= nbytes:
                self._gaps[k : k + 1] = [(start + nbytes, end)] if end - start > nbytes else []
                return start
        raise MemoryError(f"no room for {nbytes} bytes that other ranks can read")

    def give(self, start: int, nbytes: int) -> None:
        """They are free again."""
        joined: list[tuple[int, int]] = []
        for gap in sorted([*self._gaps, (start, start + nbytes)]):
            if joined and joined[-1][1] == gap[0]:
                joined[-1] = joined[-1][0], gap[1]
            else:
                joined.append(gap)
        self._gaps = joined

    def taken(self, start: int, end: int) -> list[tuple[int, int]]:
        """The ranges between that are not free.

        >>> room = Room(0, 100)
        >>> room.take(30), room.take(30)
        (0, 30)
        >>> room.taken(0, 100)
        [(0, 60)]
        """
        found = []
        for gap_start, gap_end in (*self._gaps, (end, end)):
            if gap_start > start:
                found.append((start, gap_start))
            start = gap_end
        return found


class SharedMemory:
    """The memory of all ranks of a communicator whose ranks share a host.

    :meth:`zeros` and :meth:`offset` may be called by any thread, and arrays be dropped by any.

    Args:
        rank: this one.
        maps: of all ranks, by rank; this one's can be written.
    """

    def __init__(self, rank: int, maps: list[Mapping]) -> None:
        self._whole = [m.bytes for m in maps]
        self._said = [whole[:HEADER_BYTES].view(np.int64) for whole in self._whole]
        self._rank = rank
        self._map = maps[rank]
        self._address = self._map.address
        self._nbytes = self._map.nbytes
        self._free_list = FreeList(HEADER_BYTES, self._nbytes)
        self._lock = Lock()
        self._freed: deque[tuple[int, int]] = deque()
        self._flag_sets = count()
        self._views: list[list[Buffer]] = []

    @classmethod
    def connect(cls, comm: MPI.Comm, wanted: bool = True) -> SharedMemory | None:
        """Map the memory of all ranks. Collective.

        Args:
            comm: of ranks that share a host.
            wanted: whether this rank wants it.

        Returns:
            The memory; None, on every rank, where it is not wanted or cannot be had on all of them:
            on other systems than Linux, across containers or users, or where the size of processes
            is limited. The log says why, on every rank the same.
        """
        token = secrets.token_bytes(_TOKEN_BYTES)
        made: int | None = None
        maps: list[Mapping] = []
        unwanted, problem = known_reason(wanted), ""
        if not unwanted:
            try:
                made = make_file(token)
            except Exception as error:  # whatever it is, the others are to hear of it
                problem = f"it cannot be made: {error}"
        told = comm.allgather((os.getpid(), made, token))
        try:
            for rank, (process, file, sign) in enumerate(told):
                if file is not None:  # else that rank says why
                    maps.append(open_map(process, file, sign, rank == comm.rank))
        except Exception as error:
            problem = problem or f"that of rank {rank} cannot be mapped: {error}"
        answers = comm.allgather((unwanted, problem))
        if made is not None:
            os.close(made)  # what is mapped stays
        if len(maps) == comm.size and not any(map(any, answers)):
            return cls(comm.rank, maps)
        log_reason(f"rank {comm.rank} of {comm.size}", comm.rank == 0, answers)
        return None

    def withdraw(self) -> None:
        """From now on, what others read here may not be what they were told of."""
        if self._said:
            self._said[self._rank][_WITHDRAWN_WORD] = 1

    def withdrawn(self, rank: int) -> bool:
        """Whether a rank has said so; asked after its memory has been read."""
        return bool(self._said[rank][_WITHDRAWN_WORD])

    def release(self) -> None:
        """Let all ranks' memory go; nothing is reduced any more, and nothing made.

        Buffers that are still in use here, such as gradients that the program holds, stay where
        they are, with what they hold, as memory of this process alone.
        """
        if not self._said:
            return
        for views in (*self._views, self._whole, self._said):
            views.clear()
        with self._lock:
            while self._freed:
                self._free_list.give(*self._freed.popleft())
            self._map.keep_only(self._free_list.taken(HEADER_BYTES, self._nbytes))
            self._free_list = FreeList(0, 0)

    def views(self, start: int, nbytes: int) -> list[Buffer]:
        """These bytes of every rank's memory; :meth:`release` empties the list."""
        found = [whole[start : start + nbytes] for whole in self._whole]
        self._views.append(found)
        return found

    def zeros(self, nbytes: int) -> Buffer:
        """Bytes that the other ranks can read, all zero.

        Raises:
            MemoryError: more than the machine has.
        """
        length = max(1, -(-nbytes // PAGE_BYTES)) * PAGE_BYTES
        with self._lock:
            while self._freed:
                self._free_list.give(*self._freed.popleft())
            start = self._free_list.take(length)
        block = _AddressedMemory(self._address + start, nbytes, self._map)
        # A forked process must not free what its parent uses.
        given_back = weakref.finalize(
            block, _free, self._map, self._freed, start, length, os.getpid()
        )
        given_back.atexit = False
        return np.asarray(block)

    def holds(self, buffer: Buffer) -> bool:
        """Whether a buffer lies in this rank's memory."""
        return 0 <= self.offset(buffer) < self._nbytes

    def offset(self, buffer: Buffer) -> int:
        """Where a buffer lies in this rank's memory."""
        address: int = buffer.__array_interface__["data"][0]
        return address - self._address

    def next_flag_set(self) -> int:
        """The number of a new channel; asked for in the same order on every rank."""
        return next(self._flag_sets)

    def view(self, rank: int, offset: int, nbytes: int) -> Buffer:
        """So many bytes of a rank's memory."""
        return self._whole[rank][offset : offset + nbytes]


class _AddressedMemory:
    """Memory at an address, as NumPy wants it described."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self._owner = owner
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def _free(
    memory: Mapping, freed: deque[tuple[int, int]], start: int, length: int, process: int
) -> None:
    if os.getpid() != process:
        return
    memory.discard(start, length)
    freed.append((start, length))
