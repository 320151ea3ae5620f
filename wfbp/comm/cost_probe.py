"""Measures what collectives cost on the current backend: seconds by size, and processor time.

Plans use measured points, because fits are wrong by up to 9 times at small sizes. Small messages
are measured as the runtime sends them, in a stream, two at a time. A single message would include
latency that the next one hides, and on some links a burst that the next one pays for.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Protocol, TypeVar

import numpy as np

from wfbp import native
from wfbp.comm.arrays import Buffer, split
from wfbp.comm.backend import Backend, Work
from wfbp.comm.waiting import Check, Waiter, exchange_values, wait
from wfbp.core.fit import MAX_KAPPA
from wfbp.core.types import Op, Operation, TensorSpec

SMALLEST_BYTES = 4
FINE_BYTES = 1 << 20
MOST_REPETITIONS = 15
FEWEST_REPETITIONS = 3
"""Repetitions of full-length streams if the budget allows; else streams are shorter."""

STREAM_BYTES = 4 << 20
LONGEST_STREAM = 64
WINDOW = 2
"""Messages under way at once; the runtime's lanes send as many."""

BUSY_STREAM = 4
"""Messages of a stream whose processor time is measured."""

COLD_BYTES = 16 << 20
"""Repetitions cycle through at least this much memory."""

T = TypeVar("T")


class AwaitWork(Protocol):
    """Waits for a work; returns its result."""

    def __call__(self, work: Work[T], /) -> T: ...


def probe_sizes(max_bytes: int) -> list[int]:
    """Sizes by factors of 4 to 16 KiB, of 2 to 1 MiB, then 4, and the largest; at least two."""
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
) -> list[tuple[int, float]]:
    """Time float32 collectives: (bytes, seconds) by increasing size, the same on every rank.

    Collective and blocking. Ranks start each repetition together: a stream of messages of one size,
    up to 4 MiB, or one larger message. A message takes its share of the stream on the slowest rank;
    a size takes the median of its repetitions. After about ``budget_s`` sizes between the smallest
    and the largest are skipped. An error of ``check`` ends the measurement.
    """
    waiter = waiter or Waiter.watching(backend)
    await_work = partial(wait, waiter=waiter, check=check)
    sizes = probe_sizes(max_bytes)
    data = _touched(backend, max(sizes[-1], COLD_BYTES))
    points = []
    start = partial(_start, backend, operation)
    begin_s = time.perf_counter()

    def measured(size: int, length: int, count: int) -> tuple[list[float], float]:
        """Seconds per message of each stream, and those spent so far, on the slowest rank."""
        parts = _uncached_parts(data, size // 4)
        times = _repeat(backend, start, parts, length, count, await_work)
        mine = [*times, time.perf_counter() - begin_s]
        by_rank = exchange_values(backend, mine, waiter, check=check)
        *slowest, spent_s = map(max, zip(*by_rank, strict=True))
        return slowest, spent_s

    # The first messages pay for set-up and cold caches, later ones do not.
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
    return sorted(points)


def measure_kappa(
    backend: Backend,
    max_bytes: int,
    curve: Callable[[float], float],
    part_of_cores: float = 1.0,
    *,
    budget_s: float = 0.2,
    waiter: Waiter | None = None,
    check: Check | None = None,
) -> float:
    """By how much all-reduces slow compute down because they take a core that it needs.

    If a thread is busy with messages for a share s of the time, compute has 1 - s of that core. It
    takes 1 + kappa times as long, with kappa = s / (1 - s), up to ``MAX_KAPPA``. If a rank has
    several cores, one is ``part_of_cores``; 0 if it is to spare. Collective and blocking; the
    largest value among ranks. The thread naps as it does while training computes.

    Args:
        max_bytes: bytes of the largest message; 1 MiB is measured if this is more.
        curve: bytes of an all-reduce to seconds, the same on every rank.
        budget_s: seconds. A smaller message is measured if they do not suffice.
    """
    waiter = waiter or Waiter.watching(backend)
    count = BUSY_STREAM * FEWEST_REPETITIONS
    nbytes = min(max_bytes, FINE_BYTES) // 4 * 4
    while nbytes > SMALLEST_BYTES and count * curve(nbytes) > budget_s:
        nbytes = nbytes // 16 * 4
    expected_s = max(curve(nbytes), 1e-9)
    parts = _uncached_parts(_touched(backend, COLD_BYTES), nbytes // 4)
    start = partial(_start, backend, Operation.ALL_REDUCE)
    await_work = partial(wait, waiter=waiter, check=check, urgent=False, expected_s=expected_s)
    shares = []
    for _ in range(FEWEST_REPETITIONS):
        wait(backend.all_gather_bytes(b""), waiter, check=check)
        begun_s = time.thread_time()
        _stream(start, islice(parts, BUSY_STREAM), await_work)
        shares.append((time.thread_time() - begun_s) / (BUSY_STREAM * expected_s))
    mine = part_of_cores * min(1.0, statistics.median(shares))
    share: float = max(exchange_values(backend, mine, waiter, check=check))
    return min(share / max(1.0 - share, 1e-9), MAX_KAPPA)


def _from_afar(num_sizes: int) -> Iterator[int]:
    """Indices of both ends, then of middles, so that skipped sizes are spread evenly.

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


def _touched(backend: Backend, nbytes: int) -> Buffer:
    """Memory for float32. Training does not pay for the first touch of its memory, which takes
    longer than sending it on a fast network."""
    data: Buffer = backend.zeros(nbytes // 4 * 4).view(np.float32)
    data[:] = 0.0
    return data


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
        _stream(start, islice(parts, length), await_work)
        times.append(stop() / length)
    return times


def _stream(
    start: Callable[[Buffer], Work[None]], parts: Iterable[Buffer], await_work: AwaitWork
) -> None:
    """One message per part, as many at a time as the runtime has."""
    under_way: deque[Work[None]] = deque()
    for part in parts:
        if len(under_way) == WINDOW:
            await_work(under_way.popleft())
        under_way.append(start(part))
    for work in under_way:
        await_work(work)


def codec_s(codec: str, nbytes: int) -> float:
    """Seconds that a rank computes for gradients of so many bytes that are encoded: to encode them,
    with errors, to add another rank's, and to decode the sum. Takes some milliseconds."""
    spec = TensorSpec("sample", (min(nbytes, FINE_BYTES * 4) // 4,), "float32")
    source, error, out = np.ones((3, spec.numel), np.float32)
    wire = np.empty(spec.wire_bytes(codec), np.uint8)
    seconds = []
    for _ in range(FEWEST_REPETITIONS):
        begin_s = time.perf_counter()
        native.encode(source, wire, codec, error)
        native.decode(wire, out, codec, adds=True)
        native.decode(wire, out, codec)
        seconds.append(time.perf_counter() - begin_s)
    return min(seconds) / spec.nbytes * nbytes
