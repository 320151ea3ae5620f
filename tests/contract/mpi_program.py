"""Run under mpirun: every check of the contract on this rank; failures go to one file per rank.

The checks run as the backend is on one host, with up to three ranks; with more ranks than exchange
small messages directly; and as if the ranks were on two hosts. The largest messages travel on one
host only.

Usage: mpirun -n N python tests/contract/mpi_program.py FOLDER
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from mpi4py import MPI

from tests.contract.checks import CHECKS, LARGEST
from tests.support.cores import leave_cores
from tests.support.hosts import as_on_hosts, in_turn
from wfbp.comm.mpi.mpi_backend import MpiBackend
from wfbp.comm.mpi.transfers import Chunking

WAYS = ("one host", "many ranks", "hosts")


def main(folder: str) -> None:
    leave_cores()
    for way in WAYS:
        if way == "one host" and MPI.COMM_WORLD.size > 3:
            continue
        chunking = Chunking(direct_ranks=0) if way == "many ranks" else None
        num_hosts = 2 if way == "hosts" else 1
        with as_on_hosts(lambda size, number=num_hosts: in_turn(size, number)):  # type: ignore[misc]
            backend = MpiBackend(chunking=chunking)
        report = Path(folder, f"rank{backend.rank}")
        for name, check in CHECKS.items():
            if name in LARGEST and way != "one host":
                continue
            try:
                check(backend)
            except BaseException:
                report.write_text(f"{name}, {way}\n{traceback.format_exc()}")
                backend.abort(1)
        backend.close()
    report.write_text(f"passed {len(CHECKS)}")


if __name__ == "__main__":
    main(sys.argv[1])
