"""Codecs, and reductions of what they send, in NumPy; ``wfbp/_native.pyi`` describes the format."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

BLOCK = 256
_TINY = np.float32(2.0**-100)


def encoded(source: Floats, error: Floats | None) -> tuple[npt.NDArray[np.uint8], Floats]:
    """The bytes of an int8 message, and the elements as they are decoded; replaces the error."""
    wire, decoded = [], np.zeros_like(source)
    for start in range(0, source.size, BLOCK):
        at = slice(start, start + BLOCK)
        values = source[at].copy()
        has_gradient = values.any()  # also NaN
        with np.errstate(over="ignore", invalid="ignore"):
            if has_gradient and error is not None:
                values += error[at]
        most = np.abs(values).max() if has_gradient else np.float32(0)
        scale, elements = np.float32(0), np.zeros(values.size, np.float32)
        if not np.isfinite(values).all():
            scale = np.float32(np.nan)
        elif most >= _TINY:
            bits = (most / np.float32(127)).view(np.uint32)
            scale = ((bits + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32)
            elements = np.rint(values * (np.float32(1) / scale))
        decoded[at] = elements * scale
        if has_gradient and error is not None and not np.isnan(scale):
            error[at] = values - decoded[at]
        wire += [(scale.view(np.uint32) >> 16).astype(np.uint16).tobytes()]
        wire += [elements.astype(np.int8).tobytes()]
    return np.frombuffer(b"".join(wire), np.uint8), decoded


class Reduction:
    """The average of one tensor over ranks, whose hosts add what they send without loss."""

    def __init__(self, numel: int, hosts: Sequence[Sequence[int]], is_encoded: bool) -> None:
        self._is_encoded = is_encoded
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
                    _, part = encoded(part, self._errors[number][shard])
                total = part if total is None else total + part
            assert total is not None
            result[shard] = total / np.float32(self._size)
            if self._is_encoded:
                _, result[shard] = encoded(result[shard], self._sum_error[shard])
        return result
