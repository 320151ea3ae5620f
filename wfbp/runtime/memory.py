"""Freed gradients stay with the process.

Backward allocates every gradient anew, and a reduced step frees them all at once. The C library
then hands the memory back to the system, and the next step pays for it page by page: measured,
6.5 ms of a 7 ms backward for 16 MB of gradients (docs/benchmarks/training.md).
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
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt") or not hasattr(library, "gnu_get_libc_version"):
        return False
    kept = any(library.mallopt(_M_MMAP_THRESHOLD, size) for size in _MMAP_BYTES)
    return kept and bool(library.mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM_BYTES))
