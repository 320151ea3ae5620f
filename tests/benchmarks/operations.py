"""Round trips of named operations, from the call to its result, and what idle ranks cost.

    mpirun -np 2 python -m tests.benchmarks operations [--json]

Blocks of calls of every operation take turns, so that foreign load meets them all; the time of a
call is the slowest rank's. MPI's own blocking all-reduce of the same array is the floor. Then what
the ranks cost while none of their programs calls anything: CPU time of each rank's process, the
ranks of a job that has just been busy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from mpi4py import MPI

import wfbp
from tests.benchmarks.comm import machine
from tests.benchmarks.machine import print_facts
from wfbp.cli.tables import print_table

IDLE_S = 3.0
LARGE_BYTES = 64_000_000


def main(argv: Sequence[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks operations", description=__doc__
    )
    parser.add_argument("--rounds", type=int, default=10, help="blocks of each operation")
    parser.add_argument("--calls", type=int, default=200, help="calls of a block; 3 of large ones")
    parser.add_argument("--bytes", type=int, nargs="+", default=[4, LARGE_BYTES], help="of arrays")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    wfbp.init()
    comm = MPI.COMM_WORLD.Dup()
    rows = [
        row
        for nbytes in arguments.bytes
        for row in _measure(comm, nbytes, arguments.rounds, arguments.calls)
    ]
    facts = machine(comm)
    idle = _idle_share(comm)
    if comm.rank == 0:
        if arguments.json:
            print(json.dumps({"machine": facts, "rows": rows, "idle_share": idle}))
        else:
            _show(facts, rows, idle)
    comm.Free()
    wfbp.shutdown()


def _operations(comm: MPI.Intracomm, nbytes: int) -> dict[str, Callable[[], object]]:
    """What is called, by its name in the tables."""
    array = np.ones(nbytes // 4, np.float32)
    alone = np.ones_like(array)
    calls: dict[str, Callable[[], object]] = {
        "MPI_Allreduce": lambda: comm.Allreduce(MPI.IN_PLACE, alone, MPI.MAX),
        "allreduce(array, name='x')": lambda: wfbp.allreduce(array, name="x"),
    }
    if find_spec("torch"):
        import torch

        import wfbp.horovod.torch as hvd

        tensor = torch.ones(nbytes // 4)
        calls["allreduce_(tensor, name='x')"] = lambda: hvd.allreduce_(tensor, name="x")
        calls["allreduce_async_, synchronize"] = lambda: hvd.synchronize(
            hvd.allreduce_async_(tensor, name="x")
        )
    if nbytes < LARGE_BYTES:
        calls["allreduce(array)"] = lambda: wfbp.allreduce(array)
        calls["broadcast(array, 0)"] = lambda: wfbp.broadcast(array, 0)
        calls["allgather(array)"] = lambda: wfbp.allgather(array)
        calls["barrier()"] = wfbp.barrier
    return calls


def _measure(comm: MPI.Intracomm, nbytes: int, rounds: int, calls: int) -> list[dict[str, Any]]:
    operations = _operations(comm, nbytes)
    if nbytes >= LARGE_BYTES:
        calls = 3
    times: dict[str, list[float]] = {name: [] for name in operations}
    for turn in range(-1, rounds):  # the first, untimed, finds cold memory
        for name, call in operations.items():
            comm.Barrier()
            block = np.empty(calls)
            for number in range(calls):
                start_s = time.perf_counter()
                call()
                block[number] = time.perf_counter() - start_s
            slowest = np.max(comm.allgather(block), axis=0) * 1e6
            if turn >= 0:
                times[name] += slowest.tolist()
    rows = []
    for name, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        quartiles = {"first_quartile_us": low, "median_us": middle, "third_quartile_us": high}
        rows.append({"operation": name, "nbytes": nbytes, **quartiles})
    return rows


def _idle_share(comm: MPI.Intracomm) -> float:
    """Share of a core that the process of the busiest rank takes while its program sleeps."""
    wfbp.barrier()
    cpu_s, start_s = time.process_time(), time.perf_counter()
    time.sleep(IDLE_S)
    share = (time.process_time() - cpu_s) / (time.perf_counter() - start_s)
    return max(comm.allgather(share))


def _show(facts: dict[str, str], rows: Sequence[dict[str, Any]], idle: float) -> None:
    print_facts(facts)
    print_table(
        "Microseconds from the call to its result",
        ("<operation", "bytes", "median", "quartiles"),
        [
            (
                row["operation"],
                f"{row['nbytes']:,}",
                f"{row['median_us']:,.0f}",
                f"{row['first_quartile_us']:,.0f} to {row['third_quartile_us']:,.0f}",
            )
            for row in rows
        ],
    )
    print(f"A rank with nothing to do takes {idle:.1%} of a core.")
