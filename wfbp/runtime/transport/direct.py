"""Large tensors travel from where they lie; the others are packed.

A message's start-up is shared by copying small tensors into one buffer. For a large tensor the
copy costs more than a message of its own, so the backend is told where it lies instead. Large
tensors come first in a buffer, so that the small ones and the flags behind them stay one piece.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wfbp.comm.backend import Buffer
from wfbp.core.plan import layout


class BufferLayout:
    """Where a group's tensors lie in a buffer, or in each of its blocks.

    Args:
        places: bytes that each tensor takes there.
        nbytes: bytes of each tensor.
        zero_copy_min_bytes: size from which a tensor is large.

    Example:
        >>> found = Arrangement([8, 1024, 40], [8, 1024, 40], 256)
        >>> found.large, found.small, found.offsets
        ([1], [0, 2], [1024, 0, 1040])
    """

    def __init__(
        self, places: Sequence[int], nbytes: Sequence[int], zero_copy_min_bytes: int
    ) -> None:
        self.large = [k for k, size in enumerate(nbytes) if size >= zero_copy_min_bytes]
        """Positions of the tensors that are not packed."""
        self.small = [k for k, size in enumerate(nbytes) if size < zero_copy_min_bytes]
        """Positions of the others."""
        order = self.large + self.small
        starts, self.end = layout([places[k] for k in order])
        self.offsets = [0] * len(order)
        for position, start in zip(order, starts, strict=True):
            self.offsets[position] = start


class _Memory:
    """Memory at an address, as NumPy wants it described."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def memory_at(address: int, nbytes: int, owner: object) -> Buffer:
    """The bytes at an address, which keep their owner alive; zeros for address 0."""
    if not address:
        return np.zeros(nbytes, np.uint8)
    return np.asarray(_Memory(address, nbytes, owner))
