"""``mpirun -n N python -m tests.benchmarks comm``: collectives of the MPI backend, and its CPU use.

Contestants take turns, round by round, so that foreign load meets them all. They are the library's
blocking all-reduce of the whole message, the same in chunks of 1 and 4 MiB, and the backend's.
Reduce-scatters and all-gathers follow, by bytes of the whole buffer. The ranks start each together;
a time is the slowest rank's. Then the CPU time of the runtime's communication thread: with nothing
to do, and waiting for a rank that is late. With ``--gbit``, streams of messages on a link of that
rate, too (``tools/link.py`` makes one). With ``--sweep``, only all-reduces of ``--max-bytes``, by
size of the backend's chunks and of what is under way.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from tests.benchmarks.machine import environment, print_facts, thread_seconds
from tests.benchmarks.turns import Timing
from wfbp.cli.tables import print_table
from wfbp.comm.arrays import Buffer, split
from wfbp.comm.backend import Backend, Work
from wfbp.comm.mpi.mpi_backend import MpiBackend
from wfbp.comm.mpi.transfers import Chunking
from wfbp.comm.waiting import Waiter, sharp_naps, wait
from wfbp.config import Config
from wfbp.core.types import Op, Operation
from wfbp.runtime.progress.thread import THREAD_NAME
from wfbp.runtime.runtime import JobRuntime

CHUNKS = (1 << 20, 4 << 20)
BACKEND = "wfbp"


class Contestant(NamedTuple):
    """One way to carry out a collective: ``act`` on a buffer that every rank has filled with its
    rank + 1 (the blocks of a reduce-scatter or an all-gather are those of ``split``), after which
    this rank looks at ``result``."""

    name: str
    operation: Operation
    act: Callable[[Buffer], object]
    result: Callable[[Buffer], Buffer] = lambda data: data


def wanted(operation: Operation, numel: int, rank: int, size: int) -> Buffer:
    """What a contestant's result has to be, for ``numel`` elements."""
    ranges = split(numel, size)
    if operation is Operation.ALL_GATHER:
        return np.repeat(np.arange(1.0, size + 1), [b - a for a, b in ranges])
    start, end = ranges[rank]
    length = end - start if operation is Operation.REDUCE_SCATTER else numel
    return np.full(length, float(sum(range(1, size + 1))))


def contestants(comm: MPI.Comm, backend: Backend) -> list[Contestant]:
    """The library's blocking collectives, all-reduce also in chunks, and the backend's."""
    waiter = Waiter.watching(backend)
    rank, size = backend.rank, backend.size
    reduce, scatter, gather = Operation

    def lengths(numel: int) -> list[int]:
        return [b - a for a, b in split(numel, size)]

    def own(data: Buffer) -> Buffer:
        start, end = split(data.size, size)[rank]
        return data[start:end]

    @cache
    def apart(numel: int) -> Buffer:
        """Where the library's reduce-scatter puts its result: its own way in place is to put it
        first, whichever block it is."""
        return np.zeros(lengths(numel)[rank], np.float32)

    def in_chunks(data: Buffer, nbytes: int) -> None:
        for start in range(0, data.size, nbytes // 4):
            comm.Allreduce(MPI.IN_PLACE, data[start : start + nbytes // 4])

    def counts(data: Buffer) -> list[int]:
        return [4 * length for length in lengths(data.size)]

    def reduced(data: Buffer) -> None:
        wait(backend.all_reduce(data, "float32", Op.SUM), waiter)

    def scattered(data: Buffer) -> None:
        wait(backend.reduce_scatter(data, counts(data), "float32", Op.SUM), waiter)

    return [
        Contestant("MPI, whole", reduce, lambda x: comm.Allreduce(MPI.IN_PLACE, x)),
        *(
            Contestant(f"MPI, {nbytes >> 20} MiB chunks", reduce, partial(in_chunks, nbytes=nbytes))
            for nbytes in CHUNKS
        ),
        Contestant(BACKEND, reduce, reduced),
        Contestant(
            "MPI, reduce-scatter",
            scatter,
            lambda x: comm.Reduce_scatter(x, apart(x.size), lengths(x.size)),
            lambda x: apart(x.size),
        ),
        Contestant(f"{BACKEND}, reduce-scatter", scatter, scattered, own),
        Contestant(
            "MPI, all-gather",
            gather,
            lambda x: comm.Allgatherv(MPI.IN_PLACE, [x, lengths(x.size)]),
        ),
        Contestant(
            f"{BACKEND}, all-gather",
            gather,
            lambda x: wait(backend.all_gather(x, counts(x)), waiter),
        ),
    ]


SWEEP_KIB = [
    (64, 256), (128, 512), (256, 512), (256, 1024), (256, 2048), (512, 1024), (512, 3072),
    (1024, 1024), (1024, 4096), (4096, 4096),
]  # fmt: skip
"""Sizes of chunks, and of what is under way at once."""


def sweep(comm: MPI.Comm) -> list[Contestant]:
    """All-reduces of the library, and of backends with chunks of several sizes, by messages."""

    def of(chunk_kib: int, window_kib: int) -> Contestant:
        chunking = Chunking(chunk_kib << 10, window_kib << 10, window_tasks=64)
        backend = MpiBackend(chunking=chunking, shared_memory=False)
        waiter = Waiter.watching(backend)
        return Contestant(
            f"{chunk_kib} KiB, {window_kib} KiB",
            Operation.ALL_REDUCE,
            lambda x: wait(backend.all_reduce(x, "float32", Op.SUM), waiter),
        )

    def whole(data: Buffer) -> None:
        comm.Allreduce(MPI.IN_PLACE, data)

    library = Contestant("MPI, whole", Operation.ALL_REDUCE, whole)
    return [library, *(of(chunk, window) for chunk, window in SWEEP_KIB)]


TOTAL_BYTES = 32 << 20
MESSAGE_BYTES = (256 << 10, 1 << 20, 4 << 20, TOTAL_BYTES)
POSTED_AHEAD = 3


def measure_streams(
    backend: Backend, bits_per_s: float, num_rounds: int
) -> Iterator[dict[str, Any]]:
    """Time streams of messages alternately; between two hosts each byte crosses once each way.

    ``urgent`` is whether the training thread would be blocked. Rates are payload bits per second
    over ``bits_per_s``, which the link can carry each way: the median and the slowest round's.
    """
    data = np.ones(TOTAL_BYTES // 4, np.float32)
    waiter = Waiter.watching(backend)
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
        yield {
            "nbytes": nbytes,
            "urgent": urgent,
            "rate": statistics.median(rates),
            "least_rate": min(rates),
            "cpu_share": statistics.median(cpu_s / elapsed_s for elapsed_s, cpu_s in rows),
        }


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


SIZES = tuple(4 << 10 << (2 * k) for k in range(8))
LATE_S = 3.0


def measure(
    comm: MPI.Comm, ways: Sequence[Contestant], nbytes: int, num_rounds: int
) -> list[dict[str, Any]]:
    """Check what each contestant gives, then time them in turns: microseconds per collective."""
    data = np.empty(nbytes // 4, np.float32)
    times = np.zeros((len(ways), num_rounds))
    for turn in range(-1, num_rounds):  # the first, untimed, finds cold memory
        for row, way in enumerate(ways):
            data.fill(comm.rank + 1)
            comm.Barrier()
            start_s = time.perf_counter()
            way.act(data)
            if turn >= 0:
                times[row, turn] = time.perf_counter() - start_s
                continue
            want = wanted(way.operation, data.size, comm.rank, comm.size)
            if not np.array_equal(way.result(data), want):
                raise RuntimeError(f"{way.name} gave a wrong result at {nbytes} bytes")
    slowest = np.max(comm.allgather(times), axis=0) * 1e6
    found = []
    for way, values_us in zip(ways, slowest.tolist(), strict=True):
        of_rounds = {f"{key}_us": us for key, us in Timing.of(values_us)._asdict().items()}
        about = {"contestant": way.name, "operation": way.operation.value, "nbytes": nbytes}
        found.append(about | of_rounds)
    return found


def cpu_shares(comm: MPI.Comm, backend: MpiBackend) -> dict[str, float]:
    """Share of a core that the communication thread takes, on the rank where it takes most."""
    runtime = JobRuntime(backend, Config())
    try:
        runtime.channel.exchange(b"", "start")
        idle = _share(lambda: time.sleep(LATE_S))
        runtime.channel.exchange(b"", "start")
        if comm.rank == 0:
            time.sleep(LATE_S)
        late = _share(lambda: runtime.channel.exchange(b"", "late"))
    finally:
        runtime.shutdown()
    shares = comm.allgather((idle, late if comm.rank else 0.0))
    return {"idle": max(s[0] for s in shares), "waiting for a late rank": max(s[1] for s in shares)}


def _share(action: Callable[[], object]) -> float:
    start_s, cpu_s = time.perf_counter(), thread_seconds(THREAD_NAME)
    action()
    return (thread_seconds(THREAD_NAME) - cpu_s) / (time.perf_counter() - start_s)


def machine(comm: MPI.Comm) -> dict[str, str]:
    """Ranks, MPI library, hardware, and versions."""
    library = MPI.Get_library_version().splitlines()[0].split(",")[0].replace("\t", " ").strip()
    return {"ranks": str(comm.size), "mpi": library, **environment("mpi4py")}


def main(argv: Sequence[str]) -> int:
    """Measure, and print tables or JSON on rank 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks comm", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="at 64 MiB; more below")
    parser.add_argument("--max-bytes", type=int, default=SIZES[-1])
    parser.add_argument("--gbit", type=float, help="Gbit/s of the link between the ranks")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--sweep", action="store_true", help="all-reduces by size of chunks alone")
    arguments = parser.parse_args(argv)
    if arguments.rounds < 2:
        parser.error(f"--rounds is {arguments.rounds}: expected at least 2")
    backend = MpiBackend()
    comm = MPI.COMM_WORLD.Dup()
    if arguments.sweep:
        timings = measure(comm, sweep(comm), arguments.max_bytes, arguments.rounds)
        if comm.rank == 0 and arguments.json:
            print(json.dumps({"benchmark": "comm sweep", "timings": timings}))
        elif comm.rank == 0:
            columns = ("median_us", "spread_us", "least_us")
            print_table(
                f"All-reduces of {arguments.max_bytes:,} bytes, milliseconds",
                ("<chunk, under way", "median", "spread", "least"),
                [(t["contestant"], *(f"{1e-3 * t[c]:.2f}" for c in columns)) for t in timings],
            )
            print_facts(machine(comm))
        return 0
    ways = contestants(comm, backend)
    timings = []
    for nbytes in SIZES:
        if nbytes <= arguments.max_bytes:
            num_rounds = arguments.rounds * min(20, max(1, (16 << 20) // nbytes))
            timings += measure(comm, ways, nbytes, num_rounds)
    streams: list[dict[str, Any]] = []
    if arguments.gbit:
        streams += measure_streams(backend, 1e9 * arguments.gbit, arguments.rounds)
    shares = cpu_shares(comm, backend)
    if comm.rank == 0:
        _show(machine(comm), timings, streams, shares, arguments.json)
    comm.Free()
    return 0


def _show(
    facts: dict[str, str],
    timings: list[dict[str, Any]],
    streams: list[dict[str, Any]],
    shares: dict[str, float],
    as_json: bool,
) -> None:
    if as_json:
        document = {"benchmark": "comm", "machine": facts, "cpu_shares": shares}
        print(json.dumps({**document, "timings": timings, "streams": streams}))
        return
    print_facts(facts)
    whole = [t for t in timings if t["operation"] == Operation.ALL_REDUCE.value]
    _print_timings("All-reduce", whole)
    _print_timings("Its halves", [t for t in timings if t not in whole])
    if streams:
        print_table(
            "Streams of 32 MiB: payload over what the link can carry",
            ("<message", "<training", "median", "slowest", "share of a core"),
            [
                (_size(s["nbytes"]), "blocked" if s["urgent"] else "computes", f"{s['rate']:.3f}",
                 f"{s['least_rate']:.3f}", f"{s['cpu_share']:.0%}")
                for s in streams
            ],
        )  # fmt: skip
    print_table(
        f"Communication thread, share of a core over {LATE_S:g} s",
        ("<state", "share"),
        [(state, f"{share:.1%}") for state, share in shares.items()],
    )


def _print_timings(what: str, timings: Sequence[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(t["contestant"] for t in timings))
    by_size: dict[int, list[dict[str, Any]]] = {}
    for timing in timings:
        by_size.setdefault(timing["nbytes"], []).append(timing)
    for title, cell in (
        ("microseconds, median (spread)", "{median_us:,.0f} ({spread_us:,.0f})"),
        ("microseconds, least", "{least_us:,.0f}"),
    ):
        rows = [[_size(n), *(cell.format(**t) for t in row)] for n, row in by_size.items()]
        print_table(f"{what}: {title}", ("size", *names), rows)


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"
