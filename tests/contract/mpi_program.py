"""Run under mpirun: every check of the contract on this rank; failures go to one file per rank.

The checks run twice: as the backend is on one host, and as it is where it leaves large messages
to the library (more ranks than exchange directly, many of them on each host).

Usage: mpirun -n N python tests/contract/mpi_program.py FOLDER
"""

from __future__ import annotations

import sys
import traceback
from dataclasses import replace
from pathlib import Path

from tests.contract.checks import CHECKS
from wfbp.comm.chunking import Chunking
from wfbp.comm.mpi import MpiBackend

WAYS = (None, Chunking(direct_ranks=0))


def main(folder: str) -> None:
    for chunking in WAYS:
        backend = MpiBackend(chunking=chunking)
        # One host is all that there is here; what several would decide is decided for them.
        situation = replace(backend._situation, scatters_directly=chunking is None)
        backend._situation = backend._routes._situation = situation
        report = Path(folder, f"rank{backend.rank}")
        for name, check in CHECKS.items():
            try:
                check(backend)
            except BaseException:
                report.write_text(f"{name}, {chunking}\n{traceback.format_exc()}")
                backend.abort(1)
        backend.close()
    report.write_text(f"passed {len(CHECKS)}")


if __name__ == "__main__":
    main(sys.argv[1])
