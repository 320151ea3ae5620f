"""Types that every layer uses: element types, operations, tensors."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

ITEM_BYTES: dict[str, int] = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
}
"""Bytes per element of every element type that ranks can send, by name."""

_PARTS = {"complex64": "float32", "complex128": "float64"}


def real_dtype(dtype: str) -> str:
    """The element type that elements of ``dtype`` are sent as: n complex numbers are 2n reals."""
    return _PARTS.get(dtype, dtype)


class Op(enum.Enum):
    """How the ranks' contributions are combined, element by element.

    AVERAGE divides the sum by the number of ranks; for integers it truncates toward zero.
    """

    SUM = "sum"
    AVERAGE = "average"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"

    def __str__(self) -> str:
        """As programs write it."""
        return f"wfbp.{self.name.capitalize()}"

    def check_dtype(self, dtype: str) -> None:
        """Raise ``ValueError`` for complex numbers that cannot be combined as pairs of reals."""
        if dtype in _PARTS and self not in (Op.AVERAGE, Op.SUM):
            raise ValueError(f"op is {self}; {dtype} is combined by {Op.AVERAGE} or {Op.SUM}")


class Phase(enum.Enum):
    """The half of the iteration that sends a group."""

    BACKWARD = "backward"
    FORWARD = "forward"


class Operation(enum.Enum):
    """The collective that carries a group."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"


def item_bytes(dtype: str) -> int:
    """Bytes per element of ``dtype``; ``ValueError`` if ranks cannot send it."""
    try:
        return ITEM_BYTES[dtype]
    except KeyError:
        known = ", ".join(ITEM_BYTES)
        raise ValueError(f"dtype {dtype!r} cannot be sent; expected one of {known}") from None


WIRE_DTYPES = ("float16", "bfloat16")
"""Types that wider gradients can be narrowed to for sending."""


CODEC_BLOCK = 256
"""Elements that are encoded together."""

CODECS = {"int8": (1, 2), "fp8": (1, 2), "int4": (0, 144)}
"""Encodings of float32 gradients for sending, with their bytes per element and per block."""

AUTO_WIRES = {
    "auto:bfloat16": ("", "bfloat16"),
    "auto:int8": ("", "bfloat16", "int8"),
    "auto:int4": ("", "bfloat16", "int8", "int4"),
}
"""Choices that the plan makes, the most precise first."""

COMPRESSIONS = {
    "none": "",
    "fp16": "float16",
    "bf16": "bfloat16",
    "int8": "int8",
    "fp8": "fp8",
    "int4": "int4",
    "auto:bf16": "auto:bfloat16",
    "auto:int8": "auto:int8",
    "auto:int4": "auto:int4",
}
"""Types in which gradients are sent, by the names that programs use; empty for their own type."""

ENCODED_FROM_BYTES = 4 << 10
"""Tensors of at least so many bytes per rank can be encoded."""


def may_encode(wire: str) -> bool:
    """Whether gradients that are sent so may be sent by one of ``CODECS``."""
    return not CODECS.keys().isdisjoint(AUTO_WIRES.get(wire, (wire,)))


def wire_type(dtype: str, wire_dtype: str) -> str:
    """The type that elements of ``dtype`` are sent as: ``wire_dtype`` if it is smaller."""
    narrows = wire_dtype in WIRE_DTYPES and item_bytes(dtype) > item_bytes(wire_dtype)
    return wire_dtype if narrows else dtype


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Description of a tensor.

    Args:
        name: unique within its plan.
        shape: sizes along each dimension; ``()`` is one element.
        dtype: name of the element type, a key of :data:`~wfbp.core.types.ITEM_BYTES`, or
            ``complex64`` or ``complex128``.

    Example:
        >>> TensorSpec("fc.weight", (10, 20), "float32").nbytes
        800
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        item_bytes(self.real_dtype)
        if any(size < 0 for size in self.shape):
            raise ValueError(f"tensor {self.name!r}: negative size in shape {self.shape}")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def real_dtype(self) -> str:
        """The element type that is sent; see :func:`~wfbp.core.types.real_dtype`."""
        return real_dtype(self.dtype)

    @property
    def item_bytes(self) -> int:
        """Bytes per element."""
        return item_bytes(self.real_dtype) * (2 if self.dtype in _PARTS else 1)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.numel * self.item_bytes

    def encodable(self, num_ranks: int) -> bool:
        """Whether gradients of the tensor can be sent by one of ``CODECS``: float32 of several
        dimensions, and large enough for so many ranks."""
        is_large = self.nbytes >= ENCODED_FROM_BYTES * num_ranks
        return self.dtype == "float32" and len(self.shape) > 1 and is_large and num_ranks > 1

    def wire_bytes(self, wire: str) -> int:
        """Number of bytes sent, as one of ``CODECS`` or ``WIRE_DTYPES`` if narrower."""
        if wire in CODECS:
            element_bytes, block_bytes = CODECS[wire]
            return self.numel * element_bytes + -(-self.numel // CODEC_BLOCK) * block_bytes
        sent = wire_type(self.real_dtype, wire)
        return self.nbytes // item_bytes(self.real_dtype) * item_bytes(sent)
