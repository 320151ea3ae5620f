"""Packing and reductions: by the C++ extension, or by NumPy where it is missing.

``PackTable(destination, offsets, nbytes, dtype, tensor_dtype="")`` keeps the slots of a fusion
buffer (``destination``, uint8) and, in ``pointers``, the address that each slot is filled from; 0
means absent. The caller writes the addresses and keeps what they point at alive. Then

* ``pack(scale=1.0)`` fills every slot with its source times ``scale`` (floating point only), and
  with zeros where it is absent; a source that is its own slot stays where it is;
* ``unpack()`` copies every slot back to its address.

Where ``tensor_dtype`` says so, what lies at the addresses is of another type than the buffer, which
then is float16 or bfloat16: float32 and float64 are rounded to nearest even as they are packed
(float64 to float32 first, as PyTorch does), and widened as they are unpacked. Such a table does not
scale.

``scale(buffer, dtype, factor)`` multiplies in place. ``reduce_shards(shards, out, dtype, op,
divisor=1.0)`` combines contributions in their order and divides the result: a sum, min, max or
product. float16 and bfloat16, given as 2-byte arrays, are combined and divided in float32, then
rounded once to nearest even; integers wrap around, but a sum that is divided is taken in 64 bits
and rounded towards zero. ``out`` is the very memory of a shard, or overlaps none.

``Transfers`` is for ``wfbp.comm.mpi.transfers`` alone; None where the extension is missing.

A source may not partly overlap a slot. One thread at a time may use a table; all long calls let
other Python threads run.

Raises:
    ValueError: a slot outside the destination, a size that is no whole number of elements, an
        unknown ``dtype`` or ``op``, a scale other than 1 for integers, a divisor for integers
        that is no whole number or not of a sum.

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

from pathlib import Path

__all__ = [
    "AVAILABLE",
    "INSTRUCTIONS",
    "MISSING",
    "PackTable",
    "Transfers",
    "reduce_shards",
    "scale",
]

try:
    from wfbp._native import INSTRUCTIONS, PackTable, Transfers, reduce_shards, scale
except ImportError as error:
    from wfbp._pack_numpy import (  # type: ignore[assignment]
        INSTRUCTIONS,
        PackTable,
        reduce_shards,
        scale,
    )

    Transfers = None  # type: ignore[assignment,misc]
    AVAILABLE = False
    _SOURCES = Path(__file__).resolve().parents[1]
    _REMEDY = (
        f"these are the sources in {_SOURCES}, where it was not built: run the program elsewhere, "
        "or `pip install -e .` there (with -v, it says what fails)"
        if (_SOURCES / "setup.py").exists()
        else "to build it, install a C++ compiler and reinstall wfbp (with pip's -v, it says what "
        "fails)"
    )
    MISSING = (
        f"the C++ extension is not installed ({error}): packing goes through NumPy and messages "
        f"through Python, which is slower; {_REMEDY}"
    )
else:
    AVAILABLE = True
    MISSING = ""
"""Whether the C++ extension is in use; and what ``init`` says, once per host, where it is not."""
