"""Collectives of hosts with several ranks each: on two levels, and by every rank alone.

    python tools/link.py run --hosts 2 --rate 1gbit -np 4 -- python -m tests.benchmarks hosts

``alone`` is ``WFBP_REPRODUCIBLE=1``: every rank sends its own data to every other. Both take turns;
a time is that of the slowest rank, and the median of all rounds. With ``--between`` and
``--within``, files of ``wfbp probe`` among hosts with one rank each and among the ranks of one
host, also what ``wfbp simulate`` predicts for two levels.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from wfbp.cli.tables import print_table
from wfbp.comm.arrays import split
from wfbp.comm.backend import Backend
from wfbp.comm.mpi.mpi_backend import MpiBackend
from wfbp.comm.waiting import Waiter, wait
from wfbp.core.cost import Costs
from wfbp.core.types import Op, Operation
from wfbp.sim.scaling import Node, scale

MIB = 1 << 20
SIZES = (64 << 10, MIB, 4 * MIB, 16 * MIB, 64 * MIB)


def main(argv: Sequence[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks hosts", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--between", help="costs of hosts with one rank each")
    parser.add_argument("--within", help="costs of the ranks of one host")
    arguments = parser.parse_args(argv)
    levels, alone = MpiBackend(), MpiBackend(reproducible=True)
    hosts = levels._topology.hosts
    costs = None
    if arguments.between and arguments.within:
        node = Node(levels.local_size, Costs.load(arguments.within), levels.local_size)
        between = Costs.load(arguments.between)
        costs = scale(between, levels.size, "hierarchical", measured_on=len(hosts), node=node)
    rows = []
    for operation in Operation:
        for nbytes in SIZES:
            times = _compare(operation, nbytes, (levels, alone), arguments.rounds)
            predicted_s = costs.of(operation)(nbytes) if costs else float("nan")
            rows.append((operation.value, nbytes, *times, predicted_s))
    if levels.rank == 0:
        print_table(
            f"{levels.size} ranks on {len(hosts)} hosts",
            ("<collective", "MiB", "two levels ms", "alone ms", "ratio", "predicted ms"),
            [
                (
                    name,
                    f"{nbytes / MIB:g}",
                    f"{levels_s * 1e3:.1f}",
                    f"{alone_s * 1e3:.1f}",
                    f"{levels_s / alone_s:.2f}",
                    f"{predicted_s * 1e3:.1f}",
                )
                for name, nbytes, levels_s, alone_s, predicted_s in rows
            ],
        )
    alone.close()
    levels.close()
    return 0


def _compare(
    operation: Operation, nbytes: int, backends: Sequence[Backend], rounds: int
) -> list[float]:
    """The median seconds of each backend."""
    times: list[list[float]] = [[] for _ in backends]
    data = [backend.zeros(nbytes).view(np.float32) for backend in backends]
    shares = [4 * (b - a) for a, b in split(nbytes // 4, backends[0].size)]
    for _ in range(rounds + 1):
        for backend, buffer, seconds in zip(backends, data, times, strict=True):
            waiter = Waiter.watching(backend)
            MPI.COMM_WORLD.Barrier()
            begin_s = time.perf_counter()
            if operation is Operation.ALL_REDUCE:
                work = backend.all_reduce(buffer, "float32", Op.AVERAGE)
            elif operation is Operation.REDUCE_SCATTER:
                work = backend.reduce_scatter(buffer, shares, "float32", Op.AVERAGE)
            else:
                work = backend.all_gather(buffer, shares)
            wait(work, waiter=waiter)
            seconds.append(MPI.COMM_WORLD.allreduce(time.perf_counter() - begin_s, op=MPI.MAX))
    return [statistics.median(seconds[1:]) for seconds in times]
