"""Run under mpirun: every check of the contract on this rank; failures go to one file per rank.

The checks run twice: as the backend is on one host, and as it is where it leaves large messages
to the library (more ranks than exchange directly, many of them on each host). With three ranks they
run a third time, in which one rank moves messages by the extension and two in Python, and ranks
sleep between tests as they do where none shares a host with another. The largest messages travel
the first time only.

Usage: mpirun -n N python tests/contract/mpi_program.py FOLDER
"""

from __future__ import annotations

import sys
import traceback
from dataclasses import replace
from pathlib import Path

from tests.contract.checks import CHECKS, LARGEST
from tests.support.python_transfers import PythonTransfers
from wfbp.comm.mpi.backend import MpiBackend
from wfbp.comm.mpi.transfers import Chunking

WAYS = (None, Chunking(direct_ranks=0))


def main(folder: str) -> None:
    found: list[str] = []
    for way in (*WAYS, "mixed"):
        chunking = None if way == "mixed" else way
        backend = MpiBackend(chunking=chunking, shared_memory=way != "mixed")
        if way == "mixed" and backend.size != 3:
            backend.close()
            break
        if way == "mixed" and backend.rank > 0:
            backend._group.transfers = PythonTransfers()  # type: ignore[assignment]
        found.append(type(backend._group.transfers).__name__)
        # One host is all that there is here; what several would decide is decided for them.
        topology = replace(
            backend._topology, scatters_directly=chunking is None, one_rank_per_host=way == "mixed"
        )
        backend._topology = topology
        report = Path(folder, f"rank{backend.rank}")
        for name, check in CHECKS.items():
            if name in LARGEST and way is not None:
                continue
            try:
                check(backend)
            except BaseException:
                report.write_text(f"{name}, {way}\n{traceback.format_exc()}")
                backend.abort(1)
        backend.close()
    report.write_text(f"passed {len(CHECKS)} by {', '.join(found)}")


if __name__ == "__main__":
    main(sys.argv[1])
