"""The C++ extension: packing of tensors, reductions, and MPI messages under way."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

INSTRUCTIONS: str
"""The best set of kernels that this processor runs, in use unless another is chosen."""

def use_instructions(name: str) -> None:
    """Choose the kernels of later calls and tables by name (for tests and measurements)."""

def use_threads(number: int) -> None:
    """Use so many threads, at least one, for each reduction or copy of several MiB."""

def copy(target: npt.NDArray[Any], source: npt.NDArray[Any]) -> None:
    """Copy contiguous memory of as many bytes, which the target's may not overlap."""

class PackTable:
    """The slots of a fusion buffer (``destination``) and, in ``pointers``, the address that each
    slot is filled from; 0 means absent.

    The caller writes the addresses and keeps their memory alive. A source may not partly overlap a
    slot. One thread at a time may use a table; long calls let other Python threads run.

    Args:
        destination: the buffer, uint8.
        offsets: first byte of each slot.
        nbytes: bytes of each slot.
        dtype: element type of the buffer.
        tensor_dtype: element type of the tensors: float32 or float64, if the buffer is float16 or
            bfloat16. ``pack`` then rounds to nearest even (float64 to float32 first, as PyTorch
            does), and ``unpack`` widens.

    Raises:
        ValueError: a slot outside the destination, a size that is no whole number of elements, or
            an unknown ``dtype``.

    Example:
        >>> import numpy as np
        >>> buffer = np.zeros(32, np.uint8)
        >>> table = PackTable(buffer, [0, 16], [8, 4], "float32")
        >>> weight = np.array([2.0, 4.0], np.float32)
        >>> table.pointers[0] = weight.ctypes.data
        >>> table.pack()
        >>> buffer.view(np.float32)[:5].tolist()
        [2.0, 4.0, 0.0, 0.0, 0.0]
    """

    def __init__(
        self,
        destination: npt.NDArray[np.uint8],
        offsets: Sequence[int] | npt.NDArray[np.int64],
        nbytes: Sequence[int] | npt.NDArray[np.int64],
        dtype: str,
        tensor_dtype: str = "",
    ) -> None: ...
    @property
    def pointers(self) -> npt.NDArray[np.int64]: ...
    def pack(self) -> None:
        """Fill every slot with its source, or with zeros."""

    def unpack(self) -> None:
        """Copy every slot back to its address."""

def scale(buffer: npt.NDArray[Any], dtype: str, factor: float) -> None:
    """Multiply in place."""

def reduce_shards(
    shards: Iterable[npt.NDArray[Any]],
    out: npt.NDArray[Any],
    dtype: str,
    op: str,
    divisor: float = 1.0,
) -> None:
    """Combine contributions in their order (sum, min, max or product) and divide the result.

    float16 and bfloat16, given as 2-byte arrays, are combined and divided in float32, then rounded
    once to nearest even. Integers wrap around, but a sum that is divided is taken in 64 bits and
    rounded towards zero. ``out`` is the memory of one shard, or overlaps none.
    """

def encode(
    source: npt.NDArray[np.float32],
    wire: npt.NDArray[np.uint8],
    codec: str,
    error: npt.NDArray[np.float32] | None = None,
) -> None:
    """Encode elements of one tensor, with the ``error`` that earlier ones left, which is replaced.

    ``int8``: blocks of 256 elements, each a scale in bfloat16 and then one byte per element.
    ``int4``: blocks of 256 elements in 144 bytes (see csrc/kernels.inl). A
    block of zeros keeps its error. One with infinity or NaN is decoded as NaN, and keeps it, too.
    """

def decode(
    wire: npt.NDArray[np.uint8], out: npt.NDArray[np.float32], codec: str, adds: bool = False
) -> None:
    """Decode what :func:`encode` has written, or add it to ``out``."""

def any_reached(watches: Sequence[tuple[Sequence[memoryview], int, bool]]) -> bool:
    """Whether any watch is reached: ``(flags, least, any)``, where the first number of all flags
    (int64), or of any, is at least ``least``."""

class Transfer:
    """Some messages, perhaps a reduction of what has arrived, and perhaps more messages."""

    @property
    def done(self) -> bool: ...
    @property
    def ended(self) -> int:
        """Messages that have ended, so far."""

class Coding:
    """What exchanges send encoded, as ``int8`` or ``int4``, in blocks of 256 elements.

    ``parts`` are consecutive float32 elements of one tensor: the number of the first in the
    exchange, a multiple of 256; their count; and this rank's errors of what it sends, and of the
    sum if it owns it, or None.
    """

    def __init__(
        self,
        codec: str,
        parts: Sequence[tuple[int, int, npt.NDArray[Any] | None, npt.NDArray[Any] | None]],
    ) -> None: ...

class Window:
    """Limits the bytes and the chunks under way at once, of the exchanges of one communicator.
    Chunks start in the order of their exchanges."""

    def __init__(self, most_bytes: int, most_chunks: int) -> None: ...

class Exchange:
    """A collective in which every rank has a share, in chunks."""

    @property
    def done(self) -> bool: ...
    @property
    def ended(self) -> int:
        """Messages that have ended, so far."""

class Transfers:
    """The transfers of a backend and its duplicates; for one thread at a time.

    The caller keeps a transfer's memory until it is done or, after an error, forever. After an
    error of the library nothing may be called any more.
    """

    def __init__(
        self,
        *,
        handle_bytes: int,
        isend: int,
        irecv: int,
        testsome: int,
        byte: int,
        status_bytes: int,
        error_at: int,
        success: int,
        error: type[Exception],
    ) -> None: ...
    def begin(
        self,
        comm: int,
        tag: int,
        messages: Sequence[tuple[npt.NDArray[Any], int, bool]],
        dtype: str = "uint8",
        op: str = "sum",
        divisor: float = 1.0,
        pieces: Sequence[tuple[Sequence[npt.NDArray[Any]], npt.NDArray[Any]]] = (),
        then: Sequence[tuple[npt.NDArray[Any], int, bool]] = (),
    ) -> Transfer:
        """Start ``messages`` with this tag; once all are complete, combine ``pieces`` (for each,
        one contribution per rank and the result) and start ``then``, with the next tag.

        A message is contiguous memory, the rank that it is for or from, and whether it arrives.
        """

    def exchange(
        self,
        window: Window | None,
        comm: int,
        tags: Sequence[int],
        rank: int,
        agents: Sequence[int],
        shares: Sequence[tuple[int, int, int]],
        sources: tuple[Sequence[int], Sequence[npt.NDArray[Any]]] | None,
        results: tuple[Sequence[int], Sequence[npt.NDArray[Any]]],
        gathers: bool,
        dtype: str,
        op: str,
        divisor: float,
        coding: Coding | None = None,
    ) -> Exchange:
        """Start a collective in chunks: one per tag. A chunk uses its tag, which is even, and the
        odd one after it.

        Args:
            window: limits the chunks under way; None: they all start now.
            agents: ranks that contribute to this rank's share, in order of addition; ``rank`` too.
            shares: owner, first and last element of each; messages start in this order.
            sources: this rank's contributions to all shares, as arrays and the number of each one's
                first element in the buffer that they replace; None: nothing is combined.
            results: where combined shares go (one array), or where shares are (without sources).
            gathers: whether every rank gets all results.
            coding: what travels encoded, all of it; results may then be several arrays.

        Raises:
            TypeError: something else than an array.
            ValueError: arrays that are not contiguous or writeable, or lack a start; several arrays
                of results though something is combined; too long a message; no tag; or a rank that
                is no agent.
        """

    def adopt(self, request: int) -> Transfer:
        """Take over a request begun elsewhere."""

    def progress(self) -> int:
        """Move all transfers on, without blocking; how many messages have ended."""

    def rest(
        self,
        nap_s: float,
        most_s: float,
        watches: Sequence[tuple[Sequence[memoryview], int, bool]] = (),
    ) -> int:
        """Sleep, moving all transfers on every ``nap_s`` seconds, until one is over, a watch is
        reached (see :func:`any_reached`) or ``most_s`` have passed; how many messages have ended.
        """

    @property
    def num_over(self) -> int:
        """How many transfers and exchanges are over, so far."""
