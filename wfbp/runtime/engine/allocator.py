"""Freed gradients stay with the process, and what a change of plans frees goes.

Backward allocates every gradient anew, and a reduced step frees them all at once. The C library
then hands the memory back to the system, and the next step pays for it page by page: measured,
6.5 ms of a 7 ms backward for 16 MB of gradients (docs/benchmarks/training.md). What was freed for
good, as old buffers and whole optimizer state that became shards, must be given back by name.
"""

from __future__ import annotations

import ctypes
import os
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_NEVER_TRIM_BYTES = 2**31 - 1
_MMAP_BYTES = (1 << 30, 32 << 20)
"""Blocks up to this size are kept; C libraries differ in the largest value that they take."""


def keep_freed_memory() -> bool:
    """Tell glibc to keep what is freed, unless ``MALLOC_*`` variables say how it should behave.

    Returns:
        Whether that was done; other C libraries are left alone.
    """
    library = _library()
    if library is None:
        return False
    kept = any(library.mallopt(_M_MMAP_THRESHOLD, size) for size in _MMAP_BYTES)
    return kept and bool(library.mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM_BYTES))


def give_back_freed_memory() -> bool:
    """Hand what is free at present to the system, where :func:`keep_freed_memory` keeps it.

    Returns:
        Whether there was any.
    """
    library = _library()
    return library is not None and bool(library.malloc_trim(0))


def _library() -> ctypes.CDLL | None:
    """The C library, where it is one that is told what to keep."""
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return None
    library = ctypes.CDLL(None)
    named = ("mallopt", "malloc_trim", "gnu_get_libc_version")
    return library if all(hasattr(library, name) for name in named) else None
