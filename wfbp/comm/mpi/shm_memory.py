"""Memory that the ranks of one host can read of each other: one file without a name per rank."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
import secrets
import stat
import weakref
from collections import deque
from collections.abc import Sequence
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from wfbp.comm.arrays import Buffer, MemoryAt
from wfbp.core.ranks import name_values
from wfbp.errors import BackendError

if TYPE_CHECKING:
    from mpi4py import MPI

PAGE_BYTES = mmap.PAGESIZE
HEADER_BYTES = 8 << 20
"""Start of each rank's memory, reserved for flags (``two_level``)."""
NUM_FLAG_SETS = 2047
"""Sets of flags in the header: those of channels from the first, those of groups from the last."""
ORDERED = platform.machine() in ("x86_64", "AMD64")
"""Whether stores become visible in order, so that a flag written after data implies the data."""
SWITCH = "WFBP_SHARED_MEMORY"

log = logging.getLogger("wfbp")


def known_reason(wanted: bool) -> str:
    """The expected reason why shared memory is unavailable, or an empty text."""
    if not wanted:
        return f"{SWITCH} switches it off"
    # A Python that was built for old systems lacks the call.
    if not ORDERED or not hasattr(os, "memfd_create"):
        return "it needs Linux on x86-64"
    return ""


def make_file(token: bytes) -> int:
    """A nameless file as large as the machine's memory; ``OSError`` or ``OverflowError``."""
    file = os.memfd_create("wfbp")
    try:
        os.ftruncate(file, os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES)
        os.write(file, token)
    except BaseException:
        os.close(file)
        raise
    return file


def open_map(process: int, file: int, token: bytes, mine: bool) -> mmap.mmap:
    """Map a rank's memory. ``OSError`` if it cannot be opened; ``ValueError`` if the process number
    belongs to another process here (containers)."""
    path = f"/proc/{process}/fd/{file}"
    other = ValueError(f"process {process} is another one here, as between containers")
    if not stat.S_ISREG(os.stat(path).st_mode):  # to open or read another one's pipe may block
        raise other
    descriptor = os.open(path, os.O_RDWR if mine else os.O_RDONLY)
    try:
        if os.read(descriptor, len(token)) != token:
            raise other
        access = mmap.PROT_READ | (mmap.PROT_WRITE if mine else 0)
        mapped = mmap.mmap(descriptor, os.fstat(descriptor).st_size, prot=access)
        if mine:
            file = os.dup(descriptor)
            weakref.finalize(mapped, os.close, file).atexit = False
            _shared_with_forks.append((weakref.ref(mapped), file))
    finally:
        os.close(descriptor)
    # A core dump would touch, and so allocate, as much memory as the machine has.
    mapped.madvise(mmap.MADV_DONTDUMP)
    if mine:  # freed pages have to become a hole in the file
        mapped[HEADER_BYTES] = 1
        discard(mapped, HEADER_BYTES, PAGE_BYTES)
        if mapped[HEADER_BYTES]:
            raise OSError("memory cannot be given back")
    return mapped


def discard(mapped: mmap.mmap, start: int, nbytes: int) -> None:
    """Free bytes that are no longer used: punch a hole in the file."""
    # ``mmap.madvise`` would hold up all threads meanwhile, for a fraction of a second per GiB.
    place, size = ctypes.c_void_p(_address(mapped) + start), ctypes.c_size_t(nbytes)
    if ctypes.CDLL(None, use_errno=True).madvise(place, size, mmap.MADV_REMOVE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _address(mapped: mmap.mmap) -> int:
    return int(np.frombuffer(mapped, np.uint8).__array_interface__["data"][0])


_shared_with_forks: list[tuple[weakref.ref[mmap.mmap], int]] = []
"""This rank's memories, each with its file; empty in a forked process."""


def _copy_on_write() -> None:
    """In a forked process, map this rank's memory anew: what it writes stays its own."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    access = mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
    while _shared_with_forks:  # a process that this one forks must not lose what it has written
        held, file = _shared_with_forks.pop()
        mapped = held()
        if mapped is not None:
            place = _address(mapped)
            if library.mmap(place, len(mapped), access, flags, file, 0) != place:
                number = ctypes.get_errno()
                raise OSError(
                    number, f"memory of a rank in a forked process: {os.strerror(number)}"
                )


os.register_at_fork(after_in_child=_copy_on_write)

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_TOKEN_BYTES = 16
_WITHDRAWN_WORD = 8
"""Word of the header, in a cache line separate from the token."""


class FreeList:
    """The free ranges of a memory; takes the first that is large enough."""

    def __init__(self, start: int, end: int) -> None:
        self._gaps = [(start, end)]

    def take(self, nbytes: int) -> int:
        for k, (start, end) in enumerate(self._gaps):
            if end - start >= nbytes:
                self._gaps[k : k + 1] = [(start + nbytes, end)] if end - start > nbytes else []
                return start
        raise MemoryError(f"no room for {nbytes} bytes that other ranks can read")

    def give(self, start: int, nbytes: int) -> None:
        joined: list[tuple[int, int]] = []
        for gap in sorted([*self._gaps, (start, start + nbytes)]):
            if joined and joined[-1][1] == gap[0]:
                joined[-1] = joined[-1][0], gap[1]
            else:
                joined.append(gap)
        self._gaps = joined


class SharedMemory:
    """The memory of all ranks on one host, by their place there; only this rank's is writeable.
    ``numbers`` are these ranks among all. Any thread may call :meth:`zeros` and :meth:`offset`, and
    drop arrays."""

    def __init__(self, rank: int, maps: list[mmap.mmap], numbers: Sequence[int]) -> None:
        self._numbers = numbers
        # Unmapped once nothing refers to it, nor to an array in it.
        self._whole = [np.frombuffer(mapped, np.uint8) for mapped in maps]
        self._headers = [whole[:HEADER_BYTES].view(np.int64) for whole in self._whole]
        self._rank = rank
        self._map: mmap.mmap | None = maps[rank]
        self._address = _address(maps[rank])
        self._nbytes = len(maps[rank])
        self._free_list = FreeList(HEADER_BYTES, self._nbytes)
        self._lock = Lock()
        self._freed: deque[tuple[int, int]] = deque()
        self._flag_sets, self._group_flag_sets = count(), count()
        self._words: list[list[memoryview]] = []
        self._staging: dict[int, list[Buffer]] = {}

    @classmethod
    def connect(
        cls, comm: MPI.Comm, wanted: bool = True, numbers: Sequence[int] = ()
    ) -> SharedMemory | None:
        """Map all ranks' memory; every rank logs why not. Collective; None on every rank if any
        cannot."""
        token = secrets.token_bytes(_TOKEN_BYTES)
        made: int | None = None
        maps: list[mmap.mmap] = []
        unwanted, problem = known_reason(wanted), ""
        if not unwanted:
            try:
                made = make_file(token)
            except Exception as error:  # whatever it is, the others are to hear of it
                problem = f"it cannot be made: {error}"
        files = comm.allgather((os.getpid(), made, token))
        try:
            for rank, (process, file, sign) in enumerate(files):
                if file is not None:  # else that rank says why
                    maps.append(open_map(process, file, sign, rank == comm.rank))
        except Exception as error:
            problem = problem or f"that of rank {rank} cannot be mapped: {error}"
        answers = comm.allgather((unwanted, problem))
        if made is not None:
            os.close(made)  # what is mapped stays
        if len(maps) == comm.size and not any(map(any, answers)):
            return cls(comm.rank, maps, numbers or range(comm.size))
        reasons = {rank: "".join(answer) for rank, answer in enumerate(answers) if any(answer)}
        by_reason = name_values(reasons)
        excused = any(unwanted for unwanted, _ in answers)
        log.log(
            logging.WARNING if comm.rank == 0 and not excused else logging.INFO,
            "rank %d of %d: ranks of this host do not read each other's memory, and send messages "
            "(%s)%s",
            comm.rank,
            comm.size,
            by_reason,
            "" if excused else f". Messages are slower; set {SWITCH}=0 if that is intended",
        )
        return None

    def withdraw(self) -> None:
        """Mark this rank's memory as invalid: buffers may change from now on."""
        if self._headers:
            self._headers[self._rank][_WITHDRAWN_WORD] = 1

    def release(self) -> None:
        """Last call: unmap all memory, this rank's once no buffer in it is used any more."""
        for words in self._words:
            words.clear()
        self._whole.clear()
        self._headers.clear()
        self._staging.clear()
        with self._lock:
            self._map = None

    def check_read(self, ranks: Sequence[int]) -> None:
        """Raise ``BackendError`` if one of these ranks gave up; call it after reading from them."""
        # A rank marks its memory as invalid before it changes it.
        gone = [
            rank for rank in ranks if rank != self._rank and self._headers[rank][_WITHDRAWN_WORD]
        ]
        if gone:
            names = " and ".join(f"rank {self._numbers[rank]}" for rank in sorted(gone))
            raise BackendError(
                f"{names} gave up before this rank had read what it needed from there, and says "
                "why. If that was for having waited too long: this rank was held up, or "
                "WFBP_TIMEOUT_S is too short"
            )

    def words(self, starts: Sequence[tuple[int, int]], nbytes: int) -> list[memoryview]:
        """For each rank and start, these bytes of its memory as integers of 64 bits;
        :meth:`release` empties the list."""
        # Items of memoryviews are read in half the time of those of arrays.
        words = [self.view(*each, nbytes).view(np.int64).data for each in starts]
        self._words.append(words)
        return words

    def zeros(self, nbytes: int) -> Buffer:
        """Zeroed bytes that the other ranks can read; ``MemoryError`` if exhausted."""
        length = max(1, -(-nbytes // PAGE_BYTES)) * PAGE_BYTES
        with self._lock:
            if (mapped := self._map) is None:
                raise MemoryError("the memory that other ranks can read was released")
            # Finalizers only append: the garbage collector may run one while this lock is held.
            while self._freed:
                self._free_list.give(*self._freed.popleft())
            start = self._free_list.take(length)
        block = MemoryAt(self._address + start, nbytes, mapped)
        # A forked process must not free what its parent uses.
        given_back = weakref.finalize(block, _free, mapped, self._freed, start, length, os.getpid())
        given_back.atexit = False
        return np.asarray(block)

    def take(self, nbytes: int) -> Buffer:
        """A reusable buffer of at least this size; under the progress lock, as :meth:`give`."""
        size = max(PAGE_BYTES, 1 << (nbytes - 1).bit_length())
        free = self._staging.get(size)
        return free.pop() if free else self.zeros(size)

    def give(self, buffer: Buffer) -> None:
        """Reuse a buffer that no rank reads any more."""
        self._staging.setdefault(buffer.nbytes, []).append(buffer)

    def holds(self, buffer: Buffer) -> bool:
        """Whether a buffer is part of this rank's memory."""
        return 0 <= self.offset(buffer) < self._nbytes

    def offset(self, buffer: Buffer) -> int:
        """The offset of a buffer in this rank's memory."""
        address: int = buffer.__array_interface__["data"][0]
        return address - self._address

    def next_flag_set(self, of_group: bool = False) -> int:
        """A set of flags, -1 if none is left: for a channel the same on every rank, for a group of
        ranks this rank's own."""
        number = next(self._group_flag_sets if of_group else self._flag_sets)
        if number >= NUM_FLAG_SETS // 2:
            return -1
        return NUM_FLAG_SETS - 1 - number if of_group else number

    def view(self, rank: int, offset: int, nbytes: int) -> Buffer:
        """Bytes of a rank's memory."""
        return self._whole[rank][offset : offset + nbytes]


def _free(
    memory: mmap.mmap, freed: deque[tuple[int, int]], start: int, length: int, process: int
) -> None:
    if os.getpid() != process:
        return
    discard(memory, start, length)
    freed.append((start, length))
