"""Measures what an all-reduce costs on the backend at hand, by size.

Fits are wrong by up to 9 times at small sizes, so plans are made from measured points: from 4
bytes to the largest message that will be sent, each measured as the runtime sends it.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from itertools import islice

import numpy as np

from wfbp.comm.backend import Backend, Buffer
from wfbp.comm.waiting import Waiter, wait
from wfbp.core.types import Op

SMALLEST_BYTES = 4
FINE_BYTES = 1 << 20
MOST_REPETITIONS = 15
COLD_BYTES = 16 << 20
"""Repetitions walk through at least this much memory."""


def probe_sizes(max_bytes: int) -> list[int]:
    """Sizes in bytes: by factors of 4 to 16 KiB, of 2 to 1 MiB, of 4 beyond, and the largest.

    There are at least two.

    >>> probe_sizes(100)
    [4, 16, 64, 100]
    """
    largest = max(4 * SMALLEST_BYTES, max_bytes // 4 * 4)
    sizes = []
    size = SMALLEST_BYTES
    while size < largest:
        sizes.append(size)
        size *= 2 if 16 << 10 <= size < FINE_BYTES else 4
    return [*sizes, largest]


def measure_cost(
    backend: Backend, max_bytes: int, *, budget_s: float = 2.0, waiter: Waiter | None = None
) -> list[tuple[int, float]]:
    """Time all-reduces of float32 on the backend; collective and blocking.

    Ranks start each repetition together. A repetition takes as long as on the slowest rank; a
    size, as its median repetition. The number of repetitions follows from the first one and the
    budget, equally on all ranks.

    Args:
        backend: spoken to by this thread only.
        max_bytes: the largest message that will be sent.
        budget_s: seconds to spend, about; every size is measured at least once, the small ones
            at least three times.
        waiter: how to wait; a new one by default.

    Returns:
        (bytes, seconds) by increasing size; the same on every rank.

    Example:
        >>> from wfbp.comm.local import LocalWorld
        >>> [size for size, _ in measure_cost(LocalWorld(1).backend(0), 64)]
        [4, 16, 64]
    """
    waiter = waiter or Waiter.watching(backend)
    sizes = probe_sizes(max_bytes)
    data = np.zeros(max(sizes[-1], COLD_BYTES) // 4, np.float32)
    points = []
    for size in sizes:
        parts = _apart(data, size // 4)
        first_s = _together(backend, _repeat(backend, parts, 1, waiter))[0]
        share_s = budget_s / len(sizes)
        count = int(min(MOST_REPETITIONS, share_s / max(first_s, 1e-9)))
        if size <= FINE_BYTES:
            count = max(3, count)
        # The first repetition finds cold memory; it counts only where there is no other.
        times = _together(backend, _repeat(backend, parts, count, waiter)) if count else [first_s]
        points.append((size, statistics.median(times)))
    return points


def _apart(data: Buffer, numel: int) -> Iterator[Buffer]:
    """Parts of the data, one after another and round again.

    A gradient is seldom in cache when it is sent; a buffer reduced again and again is.
    """
    start = 0
    while True:
        yield data[start : start + numel]
        start += numel
        if start + numel > data.size:
            start = 0


def _repeat(backend: Backend, parts: Iterator[Buffer], count: int, waiter: Waiter) -> list[float]:
    """Seconds of each of ``count`` all-reduces that the ranks start together."""
    times = []
    for part in islice(parts, count):
        wait(backend.all_gather_bytes(b""), waiter)
        start_s = time.perf_counter()
        wait(backend.all_reduce(part, "float32", Op.AVERAGE), waiter)
        times.append(time.perf_counter() - start_s)
    return times


def _together(backend: Backend, times: list[float]) -> list[float]:
    """Per repetition, the slowest rank's time."""
    said = wait(backend.all_gather_bytes(json.dumps(times).encode()))
    return [max(column) for column in zip(*(json.loads(s) for s in said), strict=True)]
