"""Codecs, and reductions of what they send, in NumPy; formats are in ``csrc/kernels.inl``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

BLOCK = 256
_TINY = np.float32(2.0**-100)


_FORMATS: dict[str, tuple[int, Callable[[Floats], np.ndarray]]] = {
    "int8": (127, lambda values: np.rint(values).astype(np.int8)),
    "fp8": (448, lambda values: values.astype(ml_dtypes.float8_e4m3fn)),
}
"""The largest element, and how elements are rounded."""


def encoded(
    source: Floats, error: Floats | None, codec: str = "int8"
) -> tuple[npt.NDArray[np.uint8], Floats]:
    """The bytes of a message, and the elements as they are decoded; replaces the error."""
    if codec == "int4":
        return _encoded_int4(source, error)
    return _encoded_by_block(source, error, *_FORMATS[codec])


def _scale_of(values: Floats, steps: int) -> np.float32:
    """Of elements of which the largest is sent as ``steps``; a bfloat16, rounded up."""
    most = np.abs(values).max()
    if not np.isfinite(values).all():
        return np.float32(np.nan)
    if most < _TINY:
        return np.float32(0)
    bits = (most / np.float32(steps)).view(np.uint32)
    return ((bits + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32)


def _transformed(columns: Floats) -> Floats:
    """Walsh and Hadamard's transform of each column, with sums in the order of the kernels."""
    columns = columns.copy()
    half = 1
    while half < len(columns):
        pairs = columns.reshape(-1, 2, half, columns.shape[1])
        first, second = pairs[:, 0].copy(), pairs[:, 1].copy()
        pairs[:, 0], pairs[:, 1] = first + second, first - second
        half *= 2
    return columns


def _encoded_int4(source: Floats, error: Floats | None) -> tuple[npt.NDArray[np.uint8], Floats]:
    wire, decoded = [], np.zeros_like(source)
    for start in range(0, source.size, BLOCK):
        length = min(BLOCK, source.size - start)
        block, old = np.zeros((2, BLOCK), np.float32)
        block[:length] = source[start : start + length]
        if error is not None:
            old[:length] = error[start : start + length]
        block, old = block.reshape(32, 8), old.reshape(32, 8)
        scales, elements = np.zeros(8, np.float32), np.zeros((32, 8), np.int32)
        with np.errstate(over="ignore", invalid="ignore"):
            values = block + old
            sent = _transformed(values)
            for group in range(8):
                if block[:, group].any():
                    scales[group] = scale = _scale_of(sent[:, group], 7)
                    if scale > 0:
                        by = np.float32(1) / scale
                        elements[:, group] = np.rint(sent[:, group] * by)
            result = _transformed(elements.astype(np.float32)) * (scales * np.float32(1 / 32))
        decoded[start : start + length] = result.reshape(-1)[:length]
        if error is not None:
            changes = block.any(axis=0) & ~np.isnan(scales)
            new = np.where(changes, values - result, old)
            error[start : start + length] = new.reshape(-1)[:length]
        wire.append((scales.view(np.uint32) >> 16).astype(np.uint16).tobytes())
        both = (elements[:16] & 15) | ((elements[16:] & 15) << 4)
        wire.append(both.astype(np.uint8).tobytes())
    return np.frombuffer(b"".join(wire), np.uint8), decoded


def _encoded_by_block(
    source: Floats, error: Floats | None, most: int, rounded: Callable[[Floats], np.ndarray]
) -> tuple[npt.NDArray[np.uint8], Floats]:
    wire, decoded = [], np.zeros_like(source)
    for start in range(0, source.size, BLOCK):
        at = slice(start, start + BLOCK)
        values = source[at].copy()
        has_gradient = values.any()  # also NaN
        with np.errstate(over="ignore", invalid="ignore"):
            if has_gradient and error is not None:
                values += error[at]
        scale = _scale_of(values, most) if has_gradient else np.float32(0)
        elements = rounded(np.zeros(values.size, np.float32))
        if scale > 0:
            elements = rounded(values * (np.float32(1) / scale))
        decoded[at] = elements.astype(np.float32) * scale
        if has_gradient and error is not None and not np.isnan(scale):
            error[at] = values - decoded[at]
        wire += [(scale.view(np.uint32) >> 16).astype(np.uint16).tobytes()]
        wire += [elements.tobytes()]
    return np.frombuffer(b"".join(wire), np.uint8), decoded


class Reduction:
    """The average of one tensor over ranks, whose hosts add what they send without loss."""

    def __init__(
        self, numel: int, hosts: Sequence[Sequence[int]], is_encoded: bool, codec: str = "int8"
    ) -> None:
        self._is_encoded, self._codec = is_encoded, codec
        self._hosts = hosts
        self._size = size = sum(map(len, hosts))
        length = math.ceil(math.ceil(numel / size) / BLOCK) * BLOCK
        self._shards = [slice(min(r * length, numel), (r + 1) * length) for r in range(size)]
        self._errors = np.zeros((len(hosts), numel), np.float32)
        self._sum_error = np.zeros(numel, np.float32)

    def average(self, contributions: Sequence[Floats]) -> Floats:
        """The result of one step on all ranks, for their contributions in rank order."""
        result = np.empty_like(contributions[0])
        for owner, shard in enumerate(self._shards):
            total = None
            for number, host in enumerate(self._hosts):
                part = contributions[host[0]][shard].copy()
                for rank in host[1:]:
                    part += contributions[rank][shard]
                if self._is_encoded and owner not in host:
                    _, part = encoded(part, self._errors[number][shard], self._codec)
                total = part if total is None else total + part
            assert total is not None
            result[shard] = total / np.float32(self._size)
            if self._is_encoded:
                error = self._sum_error[shard]
                _, result[shard] = encoded(result[shard], error, self._codec)
        return result
