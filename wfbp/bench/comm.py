"""``mpirun -n N python -m wfbp.bench comm``: collectives of the MPI backend, and its CPU use.

Contestants take turns, round by round, so that foreign load meets them all: the library's
blocking all-reduce of the whole message, the same in chunks of 1 and 4 MiB, the backend's; and
reduce-scatters and all-gathers of the library and the backend, by bytes of the whole buffer. The
ranks start each together; a time is the slowest rank's. Then the CPU time of the runtime's
communication thread: with nothing to do, and waiting for a rank that is late. With ``--gbit``,
streams of messages on a link of that rate, too (``launch/link.py`` makes one).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wfbp.bench.comm_stream import Stream, measure_streams
from wfbp.bench.comm_ways import Contestant, contestants, wanted
from wfbp.bench.load import thread_seconds, usage
from wfbp.bench.tables import print_table
from wfbp.comm.chunking import Chunking
from wfbp.comm.mpi.backend import MpiBackend
from wfbp.comm.waiting import Policy
from wfbp.config import Config
from wfbp.core.types import Operation
from wfbp.runtime.progress.thread import THREAD_NAME
from wfbp.runtime.runtime import Runtime

if TYPE_CHECKING:
    from mpi4py import MPI

SIZES = tuple(4 << 10 << (2 * k) for k in range(8))
LATE_S = 3.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds per collective of one contestant at one size.

    Args:
        spread_us: between the first and the third quartile.
    """

    contestant: str
    operation: str
    nbytes: int
    median_us: float
    least_us: float
    spread_us: float


def measure(
    comm: MPI.Comm, ways: Sequence[Contestant], nbytes: int, num_rounds: int
) -> list[Timing]:
    """Check what each contestant gives, then time them in turns."""
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
    return [_timing(way, nbytes, row.tolist()) for way, row in zip(ways, slowest, strict=True)]


def _timing(way: Contestant, nbytes: int, values_us: list[float]) -> Timing:
    first, median, third = statistics.quantiles(values_us, n=4)
    return Timing(way.name, way.operation.value, nbytes, median, min(values_us), third - first)


def cpu_shares(comm: MPI.Comm, backend: MpiBackend) -> dict[str, float]:
    """Share of a core that the communication thread takes, on the rank where it takes most."""
    runtime = Runtime(backend, Config())
    try:
        runtime.exchange(b"", "start")
        idle = _share(lambda: time.sleep(LATE_S))
        runtime.exchange(b"", "start")
        if comm.rank == 0:
            time.sleep(LATE_S)
        late = _share(lambda: runtime.exchange(b"", "late"))
    finally:
        runtime.shutdown()
    shares = comm.allgather((idle, late if comm.rank else 0.0))
    return {"idle": max(s[0] for s in shares), "waiting for a late rank": max(s[1] for s in shares)}


def _share(action: Callable[[], object]) -> float:
    start_s, cpu_s = time.perf_counter(), thread_seconds(THREAD_NAME)
    action()
    return (thread_seconds(THREAD_NAME) - cpu_s) / (time.perf_counter() - start_s)


def machine(comm: MPI.Comm) -> dict[str, str]:
    """What it was measured on."""
    from mpi4py import MPI

    models = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "ranks": str(comm.size),
        "mpi": MPI.Get_library_version().splitlines()[0].split(",")[0].replace("\t", " ").strip(),
        "cpu": models[0] if models else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "python": platform.python_version(),
        "mpi4py": metadata.version("mpi4py"),
        "numpy": metadata.version("numpy"),
    }


def main(argv: Sequence[str]) -> int:
    """Measure, and print tables or JSON on rank 0."""
    parser = argparse.ArgumentParser(prog="python -m wfbp.bench comm", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="at 64 MiB; more below")
    parser.add_argument("--max-bytes", type=int, default=SIZES[-1])
    parser.add_argument("--gbit", type=float, help="Gbit/s of the link between the ranks")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--chunk-kib", type=int, help="another size of chunks for the backend")
    parser.add_argument("--window", type=int, default=1, help="chunks under way at once, with it")
    parser.add_argument("--nap-us", type=int, help="naps of one length in the streams")
    arguments = parser.parse_args(argv)
    if arguments.rounds < 2:
        parser.error(f"--rounds is {arguments.rounds}: expected at least 2")
    chunking, policy = None, None
    if arguments.chunk_kib:
        nbytes = arguments.chunk_kib << 10
        chunking = Chunking(chunk_bytes=nbytes, window_bytes=arguments.window * nbytes)
    if arguments.nap_us:
        nap_s = 1e-6 * arguments.nap_us
        policy = Policy(spin_s=0.0, short_s=0.0, first_nap_s=nap_s, max_nap_s=nap_s)
    backend = MpiBackend(chunking=chunking)
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    processes = comm.allgather(os.getpid())
    ways = contestants(comm, backend)
    before = usage(processes)
    timings: list[Timing] = []
    for nbytes in SIZES:
        if nbytes <= arguments.max_bytes:
            num_rounds = arguments.rounds * min(20, max(1, (16 << 20) // nbytes))
            timings += measure(comm, ways, nbytes, num_rounds)
    streams: list[Stream] = []
    if arguments.gbit:
        streams += measure_streams(backend, 1e9 * arguments.gbit, arguments.rounds, policy)
    foreign = before.foreign_cores(usage(processes))
    shares = cpu_shares(comm, backend)
    if comm.rank == 0:
        facts = machine(comm) | {"cores used by others": f"{foreign:.1f}"}
        _show(facts, timings, streams, shares, arguments.json)
    comm.Free()
    return 0


def _show(
    facts: dict[str, str],
    timings: list[Timing],
    streams: list[Stream],
    shares: dict[str, float],
    as_json: bool,
) -> None:
    if as_json:
        document: dict[str, Any] = {"benchmark": "comm", "machine": facts, "cpu_shares": shares}
        document["timings"] = [asdict(t) for t in timings]
        document["streams"] = [asdict(s) for s in streams]
        print(json.dumps(document, indent=2))
        return
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    whole = [t for t in timings if t.operation == Operation.ALL_REDUCE.value]
    _print_timings("All-reduce", whole)
    _print_timings("Its halves", [t for t in timings if t not in whole])
    if streams:
        print_table(
            "Streams of 32 MiB: payload over what the link can carry",
            ("message", "training", "median", "slowest", "share of a core"),
            [
                (_size(s.nbytes), "blocked" if s.urgent else "computes", f"{s.rate:.3f}",
                 f"{s.least_rate:.3f}", f"{s.cpu_share:.0%}")
                for s in streams
            ],
        )  # fmt: skip
    print_table(
        f"Communication thread, share of a core over {LATE_S:g} s",
        ("state", "share"),
        [(state, f"{share:.1%}") for state, share in shares.items()],
    )


def _print_timings(what: str, timings: Sequence[Timing]) -> None:
    names = list(dict.fromkeys(t.contestant for t in timings))
    by_size: dict[int, list[Timing]] = {}
    for timing in timings:
        by_size.setdefault(timing.nbytes, []).append(timing)
    tables: dict[str, Callable[[Timing], str]] = {
        "microseconds, median (spread)": lambda t: f"{t.median_us:,.0f} ({t.spread_us:,.0f})",
        "microseconds, least": lambda t: f"{t.least_us:,.0f}",
    }
    for title, pick in tables.items():
        rows = [[_size(n), *(pick(t) for t in row)] for n, row in by_size.items()]
        print_table(f"{what}: {title}", ("size", *names), rows)


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"
