"""Streams of all-reduces on a link of known rate: does it ever idle, and at what CPU cost?

A stream is 32 MiB in messages of one size, three posted ahead as the runtime does, averaged in
float32. *Background* waits as while training computes, *blocked* as while training waits.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from wfbp.comm.backend import Backend, Buffer, Work
from wfbp.comm.waiting import Policy, Waiter, sharp_naps, wait
from wfbp.core.types import Op

TOTAL_BYTES = 32 << 20
MESSAGE_BYTES = (256 << 10, 1 << 20, 4 << 20, TOTAL_BYTES)
POSTED_AHEAD = 3


@dataclass(frozen=True, slots=True)
class Stream:
    """Messages of one size, one after the other.

    Args:
        urgent: whether the training thread would be blocked.
        rate: payload bits per second over the link's, medians.
        least_rate: the same of the slowest round.
        cpu_share: of a core, of the thread that communicates.
    """

    nbytes: int
    urgent: bool
    rate: float
    least_rate: float
    cpu_share: float


def measure_streams(
    backend: Backend, bits_per_s: float, num_rounds: int, policy: Policy | None = None
) -> Iterator[Stream]:
    """Time streams in turns; between two hosts each byte crosses once each way.

    Args:
        backend: spoken to by this thread only.
        bits_per_s: what the link can carry, each way.
        num_rounds: of every kind of stream.
        policy: how to wait, if not as the runtime does.
    """
    data = np.ones(TOTAL_BYTES // 4, np.float32)
    waiter = Waiter.watching(backend, policy)
    # Bytes that each host must send per byte of message, at the least.
    num_hosts = max(2, backend.size // backend.local_size)
    ideal_s = 2 * (num_hosts - 1) / num_hosts * TOTAL_BYTES * 8 / bits_per_s
    kinds = [(nbytes, urgent) for nbytes in MESSAGE_BYTES for urgent in (False, True)]
    times: dict[tuple[int, bool], list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for _ in range(num_rounds):
        for nbytes, urgent in kinds:
            wait(backend.all_gather_bytes(b""))
            cpu_s, start_s = time.thread_time(), time.perf_counter()
            with sharp_naps():
                _send(backend, np.split(data, TOTAL_BYTES // nbytes), waiter, urgent, bits_per_s)
            elapsed_s = time.perf_counter() - start_s
            times[nbytes, urgent].append((elapsed_s, time.thread_time() - cpu_s))
    for (nbytes, urgent), rows in times.items():
        rates = [ideal_s / elapsed_s for elapsed_s, _ in rows]
        share = statistics.median(cpu_s / elapsed_s for elapsed_s, cpu_s in rows)
        yield Stream(nbytes, urgent, statistics.median(rates), min(rates), share)


def _send(
    backend: Backend, messages: list[Buffer], waiter: Waiter, urgent: bool, bits_per_s: float
) -> None:
    left = deque(messages)
    under_way: deque[Work[None]] = deque()
    expected_s = messages[0].nbytes * 8 / bits_per_s
    waiter.progressed()
    while left or under_way:
        while left and len(under_way) < POSTED_AHEAD:
            under_way.append(backend.all_reduce(left.popleft(), "float32", Op.AVERAGE))
        if under_way[0].test():
            under_way.popleft()
            waiter.progressed()
        else:
            waiter.pause(urgent, expected_s)
