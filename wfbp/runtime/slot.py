"""Where gradients lie, before and after reduction."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from wfbp.comm.backend import Buffer

GradientRef = tuple[int, object]
"""Where a gradient lies (an address) and what keeps it alive."""


class BufferView(NamedTuple):
    """Where a tensor lies after reduction: the bytes, and their address.

    ``whole`` tells whether they are all of the tensor or this rank's shard of it.
    """

    data: Buffer
    address: int
    whole: bool = True

    @classmethod
    def of(cls, data: Buffer, whole: bool = True) -> BufferView:
        """The slot that these bytes are."""
        return cls(data, data.__array_interface__["data"][0], whole)


EMPTY_VIEW = BufferView(np.empty(0, np.uint8), 0)
