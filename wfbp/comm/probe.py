"""Measures what a collective costs on the backend at hand, by size.

Fits are wrong by up to 9 times at small sizes, so plans are made from measured points: from 4 bytes
to the largest message that will be sent, each measured as the runtime sends it: small ones in a
stream, two at a time. A single message would include a latency that the next message hides, and on
some links a burst that the next one must pay back.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from wfbp.comm.backend import Backend, Buffer, Work, split
from wfbp.comm.waiting import Check, Waiter, wait
from wfbp.core.types import Op, Operation

SMALLEST_BYTES = 4
FINE_BYTES = 1 << 20
MOST_REPETITIONS = 15
FEWEST_REPETITIONS = 3
"""Of streams of full length, where the budget allows; else streams are shorter."""

STREAM_BYTES = 4 << 20
LONGEST_STREAM = 64
WINDOW = 2
"""Messages under way at once; the runtime's lanes send as many."""

COLD_BYTES = 16 << 20
"""Repetitions walk through at least this much memory."""

AwaitWork = Callable[[Work[Any]], Any]
"""Waits for a work; returns its result."""


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
    backend: Backend,
    max_bytes: int,
    *,
    operation: Operation = Operation.ALL_REDUCE,
    budget_s: float = 2.0,
    waiter: Waiter | None = None,
    check: Check | None = None,
    on_size: Callable[[], object] = lambda: None,
) -> list[tuple[int, float]]:
    """Time collectives of float32 on the backend; collective and blocking.

    Ranks start each repetition together. One repetition is a stream of messages of one size, up to
    4 MiB in all, or one larger message; a message takes its share of the stream on the slowest
    rank, a size the median of its repetitions. Each size begins with two messages, which decide how
    long and how many streams are; all ranks use the same numbers. When the budget is spent, sizes
    in between are left out.

    Args:
        max_bytes: the largest message that will be sent.
        operation: sizes are those of the whole buffer, of which each rank keeps or brings an equal
            share in a reduce-scatter or an all-gather.
        budget_s: seconds to spend, about; at least the smallest and the largest size are measured.
        waiter: how to wait; a new one by default.
        check: called while waiting; an error that it raises ends the measurement.
        on_size: called when a size is done.

    Returns:
        (bytes, seconds) by increasing size; the same on every rank.

    Example:
        >>> from wfbp.comm.emulated import EmulatedLink
        >>> [size for size, _ in measure_cost(EmulatedLink(lambda nbytes: 0.0, size=1), 64)]
        [4, 16, 64]
    """
    await_work = partial(wait, waiter=waiter or Waiter.watching(backend), check=check)
    sizes = probe_sizes(max_bytes)
    data = backend.zeros(max(sizes[-1], COLD_BYTES) // 4 * 4).view(np.float32)
    points = []
    start = partial(_start, backend, operation)
    begin_s = time.perf_counter()

    def measured(size: int, length: int, count: int) -> tuple[list[float], float]:
        """Seconds per message of each stream, and those spent so far, on the slowest rank."""
        parts = _uncached_parts(data, size // 4)
        times = _repeat(backend, start, parts, length, count, await_work)
        *slowest, spent_s = _together(backend, [*times, time.perf_counter() - begin_s], await_work)
        return slowest, spent_s

    # What the first messages set up, and find cold, is not what later ones cost.
    _, spent_s = measured(sizes[0], WINDOW, 1)
    for number, index in enumerate(_from_afar(len(sizes))):
        size = sizes[index]
        share_s = (budget_s - spent_s) / (len(sizes) - number)
        if share_s > 0 or number < 2:
            longest = max(1, min(LONGEST_STREAM, STREAM_BYTES // size))
            times, spent_s = measured(size, min(WINDOW, longest), 1)
            # Several streams tell more than a long one: the machine may be disturbed.
            messages = share_s / max(times[0], 1e-9)
            length = int(max(1, min(longest, messages / FEWEST_REPETITIONS)))
            if (count := int(min(MOST_REPETITIONS, messages / length))) > 0:
                # (The first stream counts only where there is no other.)
                times, spent_s = measured(size, length, count)
            points.append((size, statistics.median(times)))
        on_size()
    return sorted(points)


def _from_afar(num_sizes: int) -> Iterator[int]:
    """Indices of both ends, then the middle of each part, so that sizes left out are spread evenly.

    >>> list(_from_afar(7))
    [0, 6, 3, 1, 4, 2, 5]
    """
    yield 0
    yield num_sizes - 1
    parts = deque([(0, num_sizes - 1)])
    while parts:
        low, high = parts.popleft()
        if high - low > 1:
            middle = (low + high) // 2
            yield middle
            parts += [(low, middle), (middle, high)]


def _start(backend: Backend, operation: Operation, part: Buffer) -> Work[None]:
    if operation is Operation.ALL_REDUCE:
        return backend.all_reduce(part, "float32", Op.AVERAGE)
    shares = [4 * (b - a) for a, b in split(part.size, backend.size)]
    if operation is Operation.REDUCE_SCATTER:
        return backend.reduce_scatter(part, shares, "float32", Op.AVERAGE)
    return backend.all_gather(part, shares)


def _uncached_parts(data: Buffer, numel: int) -> Iterator[Buffer]:
    """Parts of the data in turn, so that messages are not in cache, as gradients seldom are."""
    start = 0
    while True:
        yield data[start : start + numel]
        start += numel
        if start + numel > data.size:
            start = 0


def _repeat(
    backend: Backend,
    start: Callable[[Buffer], Work[None]],
    parts: Iterator[Buffer],
    length: int,
    count: int,
    await_work: AwaitWork,
) -> list[float]:
    """Seconds per message of each of ``count`` streams that the ranks start together."""
    times = []
    for _ in range(count):
        await_work(backend.all_gather_bytes(b""))
        stop = backend.stopwatch()
        under_way: deque[Work[None]] = deque()
        for part in islice(parts, length):
            if len(under_way) == WINDOW:
                await_work(under_way.popleft())
            under_way.append(start(part))
        for work in under_way:
            await_work(work)
        times.append(stop() / length)
    return times


def _together(backend: Backend, times: list[float], await_work: AwaitWork) -> list[float]:
    """Per repetition, the slowest rank's time."""
    payloads = await_work(backend.all_gather_bytes(json.dumps(times).encode()))
    return [max(column) for column in zip(*(json.loads(s) for s in payloads), strict=True)]
