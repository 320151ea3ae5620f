"""Memory that the ranks of one host can read of each other: one file without a name per rank."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import platform
import secrets
import stat
import sys
import weakref
from collections import deque
from collections.abc import Sequence
from functools import cache
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from wfbp.comm.backend import Buffer

if TYPE_CHECKING:
    from mpi4py import MPI

PAGE_BYTES = mmap.PAGESIZE
HEADER_BYTES = 1 << 20
"""At the start of each rank's memory, for what ranks tell each other (``shm_allreduce``)."""
ORDERED = platform.machine() in ("x86_64", "AMD64")
"""Whether processors see each other's stores in the order in which they were made; only there can
a flag that is written behind data tell that the data are there."""
SWITCH = "WFBP_SHARED_MEMORY"

log = logging.getLogger("wfbp")


def known_reason(wanted: bool) -> str:
    """Why there is none, where nobody need be surprised."""
    if not wanted:
        return f"{SWITCH} switches it off"
    # A Python that was built for old systems lacks the call.
    if sys.platform != "linux" or not ORDERED or not hasattr(os, "memfd_create"):
        return "it needs Linux on x86-64"
    return ""


def log_reason(who: str, first: bool, answers: Sequence[tuple[str, str]]) -> None:
    """Log why there is none, on every rank: a warning on the first, unless a rank has an excuse.

    Args:
        who: this rank, for messages.
        first: whether it is the one that warns.
        answers: excuse and problem of each rank; empty where it has none.
    """
    reasons: dict[str, list[str]] = {}
    for rank, found in enumerate(answers):
        if reason := "".join(found):
            reasons.setdefault(reason, []).append(str(rank))
    told = "; ".join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {reason}"
        for reason, ranks in reasons.items()
    )
    excused = any(excuse for excuse, _ in answers)
    log.log(
        logging.WARNING if first and not excused else logging.INFO,
        "%s: ranks of this host do not read each other's memory, and send messages (%s)%s",
        who,
        told,
        "" if excused else f". Messages are slower; set {SWITCH}=0 where that is as it should be",
    )


def make_file(token: bytes) -> int:
    """A file that is as large as the machine's memory.

    Raises:
        OSError: there are no such files, or not so large ones.
        OverflowError: the same.
    """
    file = os.memfd_create("wfbp")
    try:
        os.ftruncate(file, os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES)
        os.write(file, token)
    except BaseException:
        os.close(file)
        raise
    return file


class Mapping:
    """A file in memory, which keeps no descriptor open (those of the module ``mmap`` do).

    It ends when nothing refers to it and its :attr:`bytes` any more.

    Args:
        descriptor: of the file; may be closed afterwards.
        nbytes: length of the file.
        writeable: whether it can be written.

    Raises:
        OSError: it cannot be mapped.
    """

    def __init__(self, descriptor: int, nbytes: int, writeable: bool) -> None:
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writeable else 0)
        self.address = _map(None, nbytes, access, mmap.MAP_SHARED, descriptor)
        self.nbytes = nbytes
        self._writeable = writeable
        self._end = weakref.finalize(self, _unmap, self.address, nbytes)
        self._end.atexit = False
        self._is_private = False

    def __len__(self) -> int:
        return self.nbytes

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "data": (self.address, not self._writeable),
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }

    @property
    def bytes(self) -> Buffer:
        """All of it; a view that keeps the mapping."""
        return np.asarray(self)

    def advise(self, advice: int, start: int = 0, nbytes: int | None = None) -> None:
        """As ``mmap.madvise``.

        Raises:
            OSError: the system refuses.
        """
        length = self.nbytes if nbytes is None else nbytes
        address = ctypes.c_void_p(self.address + start)
        if _library().madvise(address, ctypes.c_size_t(length), advice):
            raise _error()

    def discard(self, start: int, nbytes: int) -> None:
        """Nobody uses these bytes any more: they become hole, or go."""
        if self._is_private:
            _unmap(self.address + start, nbytes)
        else:
            self.advise(mmap.MADV_REMOVE, start, nbytes)

    def keep_only(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Let the file go; some ranges stay where they are, with what they hold, as private memory.

        Args:
            ranges: start and end of what is still in use, by pages, in ascending order. Nothing
                else may be used any more; each range goes with :meth:`discard`.

        Raises:
            OSError: there is no memory for them.
        """
        access = mmap.PROT_READ | mmap.PROT_WRITE
        library = _library()
        for start, end in ranges:
            length = end - start
            # Moved there in one piece: who reads meanwhile finds the same bytes, old or new.
            copy = _map(None, length, access, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
            ctypes.memmove(copy, self.address + start, length)
            library.mremap.restype = ctypes.c_void_p
            moved = library.mremap(
                ctypes.c_void_p(copy),
                ctypes.c_size_t(length),
                ctypes.c_size_t(length),
                _MREMAP_MAYMOVE | _MREMAP_FIXED,
                ctypes.c_void_p(self.address + start),
            )
            if moved != self.address + start:
                problem = _error()
                _unmap(copy, length)
                raise problem
        self._is_private = True
        self._end.detach()
        done = 0
        for start, end in (*ranges, (self.nbytes, self.nbytes)):
            if start > done:
                _unmap(self.address + done, start - done)
            done = end


_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _map(address: int | None, nbytes: int, access: int, flags: int, descriptor: int) -> int:
    function = _library().mmap
    function.restype = ctypes.c_void_p
    found: int | None = function(
        ctypes.c_void_p(address),
        ctypes.c_size_t(nbytes),
        access,
        flags,
        descriptor,
        ctypes.c_long(0),
    )
    if found is None or found == ctypes.c_void_p(-1).value:
        raise _error()
    return found


def _unmap(address: int, nbytes: int) -> None:
    _library().munmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))


def _error() -> OSError:
    number = ctypes.get_errno() or errno.EINVAL
    return OSError(number, os.strerror(number))


def open_map(process: int, file: int, token: bytes, mine: bool) -> Mapping:
    """Map a rank's memory.

    Raises:
        OSError: it cannot be seen from here.
        ValueError: that is another process's, which has the same number in another container.
    """
    path = f"/proc/{process}/fd/{file}"
    if not stat.S_ISREG(os.stat(path).st_mode):  # to open or read another one's pipe may block
        raise ValueError(f"process {process} is another one here, as in a container of its own")
    descriptor = os.open(path, os.O_RDWR if mine else os.O_RDONLY)
    try:
        if os.read(descriptor, len(token)) != token:
            raise ValueError(f"process {process} is another one here, as in a container of its own")
        mapped = Mapping(descriptor, os.fstat(descriptor).st_size, mine)
        # A core dump would touch, and so allocate, as much memory as the machine has.
        mapped.advise(mmap.MADV_DONTDUMP)
        if mine:
            _try_free(mapped)
        return mapped
    finally:
        os.close(descriptor)


def _try_free(memory: Mapping) -> None:
    """Whether what is freed becomes hole.

    Raises:
        OSError: it does not.
    """
    data = memory.bytes
    data[HEADER_BYTES] = 1
    memory.discard(HEADER_BYTES, PAGE_BYTES)
    if data[HEADER_BYTES]:
        raise OSError("memory cannot be given back")


_TOKEN_BYTES = 16
_WITHDRAWN_WORD = 8
"""Of the header; in a cache line of its own, behind the token's."""


class FreeList:
    """Which ranges of a memory are free: takes the first that is large enough.

    Args:
        start: of the memory.
        end: behind it.

    Example:
        >>> room = FreeList(0, 100)
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

        >>> room = FreeList(0, 100)
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
