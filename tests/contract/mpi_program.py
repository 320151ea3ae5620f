"""Run under mpirun: every check of the contract on this rank; failures go to one file per rank.

Usage: mpirun -n N python tests/contract/mpi_program.py FOLDER
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from tests.contract.checks import CHECKS
from wfbp.comm.mpi import MpiBackend


def main(folder: str) -> None:
    backend = MpiBackend()
    report = Path(folder, f"rank{backend.rank}")
    for name, check in CHECKS.items():
        try:
            check(backend)
        except BaseException:
            report.write_text(f"{name}\n{traceback.format_exc()}")
            backend.abort(1)
    backend.close()
    report.write_text(f"passed {len(CHECKS)}")


if __name__ == "__main__":
    main(sys.argv[1])
