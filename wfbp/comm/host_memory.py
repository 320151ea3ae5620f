"""Memory that the ranks of one host can read of each other.

Each rank has one file without a name, mapped by all: by itself to write, by the others to read.
The file is as large as the machine's memory and almost all hole; what is never touched costs
nothing, and what is freed becomes hole again. Nothing has to be announced when buffers come and go,
and nothing is left behind by a rank that is killed.

A copy out of another rank's memory is done when the copying call returns. Unlike a message, it
never touches memory behind anybody's back.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import stat
import sys
import weakref
from collections import deque
from contextlib import suppress
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from wfbp.comm.backend import Buffer

if TYPE_CHECKING:
    from mpi4py import MPI

PAGE_BYTES = mmap.PAGESIZE
HEADER_BYTES = 1 << 20
"""At the start of each rank's memory, for what ranks tell each other (``host_board``)."""
_TOKEN_BYTES = 16
ORDERED = platform.machine() in ("x86_64", "AMD64")
"""Whether processors see each other's stores in the order in which they were made; only there can
a flag that is written behind data tell that the data are there."""


class Room:
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


class HostMemory:
    """The memory of all ranks of a communicator whose ranks share a host.

    :meth:`zeros` and :meth:`offset` may be called by any thread, and arrays be dropped by any.

    Args:
        rank: this one.
        maps: of all ranks, by rank; this one's can be written.
    """

    def __init__(self, rank: int, maps: list[mmap.mmap]) -> None:
        self._whole = [np.frombuffer(m, np.uint8) for m in maps]
        self._rank = rank
        self._map = maps[rank]
        self._address: int = self._whole[rank].__array_interface__["data"][0]
        self._nbytes = len(maps[rank])
        self._room = Room(HEADER_BYTES, self._nbytes)
        self._lock = Lock()
        self._freed: deque[tuple[int, int]] = deque()
        self._boards = count()

    @classmethod
    def connect(cls, comm: MPI.Comm) -> HostMemory | None:
        """Map the memory of all ranks. Collective.

        Returns:
            The memory; None, on every rank, where it cannot be had on all of them: on other systems
            than Linux, across containers, or where the size of processes is limited.
        """
        token = secrets.token_bytes(_TOKEN_BYTES)
        made = _make(token)
        told = comm.allgather((os.getpid(), made, token))
        maps: list[mmap.mmap] = []
        with suppress(OSError, ValueError, OverflowError):
            for rank, (process, file, sign) in enumerate(told):
                if file is not None:
                    maps.append(_open(process, file, sign, rank == comm.rank))
        everywhere = all(comm.allgather(len(maps) == comm.size))
        if made is not None:
            os.close(made)  # what is mapped stays
        return cls(comm.rank, maps) if everywhere else None

    def zeros(self, nbytes: int) -> Buffer:
        """Bytes that the other ranks can read, all zero.

        Raises:
            MemoryError: more than the machine has.
        """
        length = max(1, -(-nbytes // PAGE_BYTES)) * PAGE_BYTES
        with self._lock:
            while self._freed:
                self._room.give(*self._freed.popleft())
            start = self._room.take(length)
        block = _Block(self._address + start, nbytes, self._map)
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

    def next_board(self) -> int:
        """The number of a new channel; asked for in the same order on every rank."""
        return next(self._boards)

    def view(self, rank: int, offset: int, nbytes: int) -> Buffer:
        """So many bytes of a rank's memory."""
        return self._whole[rank][offset : offset + nbytes]


class _Block:
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
    memory: mmap.mmap, freed: deque[tuple[int, int]], start: int, length: int, process: int
) -> None:
    if os.getpid() != process:
        return
    memory.madvise(mmap.MADV_REMOVE, start, length)
    freed.append((start, length))


def _try_free(memory: mmap.mmap) -> None:
    """Whether what is freed becomes hole.

    Raises:
        OSError: it does not.
    """
    memory[HEADER_BYTES] = 1
    memory.madvise(mmap.MADV_REMOVE, HEADER_BYTES, PAGE_BYTES)
    if memory[HEADER_BYTES]:
        raise OSError("memory cannot be given back")


def _make(token: bytes) -> int | None:
    """A file that is as large as the machine's memory; None where there are no such files."""
    # A Python that was built for old systems lacks the call.
    if sys.platform != "linux" or not ORDERED or not hasattr(os, "memfd_create"):
        return None
    try:
        file = os.memfd_create("wfbp")
    except OSError:
        return None
    try:
        os.ftruncate(file, os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES)
        os.write(file, token)
    except (OSError, OverflowError):
        os.close(file)
        return None
    return file


def _open(process: int, file: int, token: bytes, mine: bool) -> mmap.mmap:
    """Map a rank's memory.

    Raises:
        OSError: it cannot be seen from here.
        ValueError: that is another process's, which has the same number in another container.
    """
    path = f"/proc/{process}/fd/{file}"
    if not stat.S_ISREG(os.stat(path).st_mode):  # to open or read another one's pipe may block
        raise ValueError(f"process {process} is another one")
    descriptor = os.open(path, os.O_RDWR if mine else os.O_RDONLY)
    try:
        if os.read(descriptor, len(token)) != token:
            raise ValueError(f"process {process} is another one")
        access = mmap.PROT_READ | (mmap.PROT_WRITE if mine else 0)
        found = mmap.mmap(descriptor, os.fstat(descriptor).st_size, mmap.MAP_SHARED, access)
        # A core dump would touch, and so allocate, as much memory as the machine has.
        found.madvise(mmap.MADV_DONTDUMP)
        if mine:
            _try_free(found)
        return found
    finally:
        os.close(descriptor)
