"""The files behind the memory that ranks of one host read of each other (``host_memory``)."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import platform
import stat
import sys
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from wfbp.comm.backend import Buffer

PAGE_BYTES = mmap.PAGESIZE
HEADER_BYTES = 1 << 20
"""At the start of each rank's memory, for what ranks tell each other (``host_board``)."""
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
        said: excuse and problem of each rank; empty where it has none.
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
