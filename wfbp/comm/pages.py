"""Zeroed memory of the host that costs nothing until it is touched, and is gone when freed."""

from __future__ import annotations

import mmap
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

_MAPPED_BYTES = 64 << 10
"""From here on memory comes from the system, in pages of its own."""


def zeroed(nbytes: int) -> npt.NDArray[Any]:
    """``nbytes`` zeroed bytes, as uint8; ``MemoryError`` where there are not so many.

    Untouched pages cost nothing: where large tensors are sent from where they are, their part of a
    fusion buffer stays untouched. The C library would clear memory that it has used before.

    >>> zeroed(3)
    array([0, 0, 0], dtype=uint8)
    """
    if nbytes < _MAPPED_BYTES or sys.platform == "win32":
        return np.zeros(nbytes, np.uint8)
    # Private: what a forked process writes, its parent does not see.
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no {nbytes} bytes for a buffer: {error}") from error
    return np.frombuffer(pages, np.uint8)
