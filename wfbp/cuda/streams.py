"""Streams by their raw handles, as CuPy takes them over."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any


class _ForeignStream:
    """A raw handle, by the protocol that libraries pass streams by."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def stream_context(cupy: Any, stream: int) -> AbstractContextManager[object]:
    """Within it, what CuPy does happens on a stream; memory that it takes is that stream's.

    Args:
        cupy: the package.
        stream: raw handle of a stream of the current device.
    """
    external: AbstractContextManager[object]
    if hasattr(cupy.cuda.Stream, "from_external"):  # CuPy 14 and later
        external = cupy.cuda.Stream.from_external(_ForeignStream(stream))
    else:
        external = cupy.cuda.ExternalStream(stream)
    return external
