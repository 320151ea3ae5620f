"""Packing and half-precision arithmetic: by the C++ extension, or by NumPy where it is missing.

``PackTable(destination, offsets, nbytes, dtype)`` keeps the slots of a fusion buffer
(``destination``, uint8) and, in ``pointers``, the address that each slot is filled from; 0 means
absent. The caller writes the addresses and keeps what they point at alive. Then

* ``pack(scale=1.0)`` fills every slot with its source times ``scale`` (floating point only), and
  with zeros where it is absent; a source that is its own slot stays where it is;
* ``unpack()`` copies every slot back to its address.

``scale(buffer, dtype, factor)`` multiplies in place. ``reduce_shards(shards, out, dtype, op,
divisor=1.0)`` combines contributions of float16 or bfloat16, given as 2-byte arrays, in float32,
divides, and rounds once to nearest even.

A source may not partly overlap a slot. One thread at a time may use a table; all long calls let
other Python threads run.

Raises:
    ValueError: a slot outside the destination, a size that is no whole number of elements, an
        unknown ``dtype`` or ``op``, a scale other than 1 for integers.

Example:
    >>> import numpy as np
    >>> buffer = np.zeros(32, np.uint8)
    >>> table = PackTable(buffer, [0, 16], [8, 4], "float32")
    >>> weight = np.array([2.0, 4.0], np.float32)
    >>> table.pointers[0] = weight.ctypes.data
    >>> table.pack(scale=0.5)
    >>> buffer.view(np.float32)[:5].tolist()
    [1.0, 2.0, 0.0, 0.0, 0.0]
"""

from __future__ import annotations

__all__ = ["AVAILABLE", "INSTRUCTIONS", "MISSING", "PackTable", "reduce_shards", "scale"]

try:
    from wfbp._pack import INSTRUCTIONS, PackTable, reduce_shards, scale
except ImportError as error:
    from wfbp._pack_numpy import (  # type: ignore[assignment]
        INSTRUCTIONS,
        PackTable,
        reduce_shards,
        scale,
    )

    AVAILABLE = False
    MISSING = (
        f"the C++ packing extension is not installed ({error}): packing goes through NumPy, which "
        "is slower; to build it, install a C++ compiler and reinstall wfbp (with pip's -v, it "
        "says what fails)"
    )
else:
    AVAILABLE = True
    MISSING = ""
"""Whether the C++ extension is in use; and what ``init`` says, once per host, where it is not."""
