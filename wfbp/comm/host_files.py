"""The files behind the memory that ranks of one host read of each other (``host_memory``)."""

from __future__ import annotations

import logging
import mmap
import os
import platform
import stat
import sys
from collections.abc import Sequence

PAGE_BYTES = mmap.PAGESIZE
HEADER_BYTES = 1 << 20
"""At the start of each rank's memory, for what ranks tell each other (``host_board``)."""
ORDERED = platform.machine() in ("x86_64", "AMD64")
"""Whether processors see each other's stores in the order in which they were made; only there can
a flag that is written behind data tell that the data are there."""
SWITCH = "WFBP_SHARED_MEMORY"

log = logging.getLogger("wfbp")


def excuse(wanted: bool) -> str:
    """Why there is none, where nobody need be surprised."""
    if not wanted:
        return f"{SWITCH} switches it off"
    # A Python that was built for old systems lacks the call.
    if sys.platform != "linux" or not ORDERED or not hasattr(os, "memfd_create"):
        return "it needs Linux on x86-64"
    return ""


def explain(who: str, first: bool, said: Sequence[tuple[str, str]]) -> None:
    """Log why there is none, on every rank: a warning on the first, unless a rank has an excuse.

    Args:
        who: this rank, for messages.
        first: whether it is the one that warns.
        said: excuse and problem of each rank; empty where it has none.
    """
    reasons: dict[str, list[str]] = {}
    for rank, found in enumerate(said):
        if reason := "".join(found):
            reasons.setdefault(reason, []).append(str(rank))
    told = "; ".join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {reason}"
        for reason, ranks in reasons.items()
    )
    excused = any(excuse for excuse, _ in said)
    log.log(
        logging.WARNING if first and not excused else logging.INFO,
        "%s: ranks of this host do not read each other's memory, and send messages (%s)%s",
        who,
        told,
        "" if excused else f". Messages are slower; set {SWITCH}=0 where that is as it should be",
    )


def make(token: bytes) -> int:
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


def open_map(process: int, file: int, token: bytes, mine: bool) -> mmap.mmap:
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
        access = mmap.PROT_READ | (mmap.PROT_WRITE if mine else 0)
        found = mmap.mmap(descriptor, os.fstat(descriptor).st_size, mmap.MAP_SHARED, access)
        # A core dump would touch, and so allocate, as much memory as the machine has.
        found.madvise(mmap.MADV_DONTDUMP)
        if mine:
            _try_free(found)
        return found
    finally:
        os.close(descriptor)


def _try_free(memory: mmap.mmap) -> None:
    """Whether what is freed becomes hole.

    Raises:
        OSError: it does not.
    """
    memory[HEADER_BYTES] = 1
    memory.madvise(mmap.MADV_REMOVE, HEADER_BYTES, PAGE_BYTES)
    if memory[HEADER_BYTES]:
        raise OSError("memory cannot be given back")
