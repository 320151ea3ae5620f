"""Keeps freed gradients in the process, and returns memory that a change of plans frees.

Otherwise the C library returns every step's gradients to the system, and the next step pays for
page faults. Memory freed for good must be returned explicitly.
"""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_NEVER_TRIM_BYTES = 2**31 - 1
_MMAP_BYTES = (1 << 30, 32 << 20)
"""Blocks up to this size are kept; C libraries differ in the largest value that they take."""


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory unless ``MALLOC_*`` variables are set; whether it does."""
    library = _library()
    if library is None:
        return False
    kept = any(library.mallopt(_M_MMAP_THRESHOLD, size) for size in _MMAP_BYTES)
    return kept and bool(library.mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM_BYTES))


def give_back_freed_memory() -> bool:
    """Return freed memory to the system if the process keeps it; whether there was any."""
    library = _library()
    return library is not None and bool(library.malloc_trim(0))


def _library() -> ctypes.CDLL | None:
    """The C library, if it is glibc."""
    if any(name.startswith("MALLOC_") for name in os.environ):
        return None
    library = ctypes.CDLL(None)
    named = ("mallopt", "malloc_trim", "gnu_get_libc_version")
    return library if all(hasattr(library, name) for name in named) else None
