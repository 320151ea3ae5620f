"""Starting a Python program under the mpirun beside an interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}


def mpirun(
    num_ranks: int, arguments: list[str], python: str = sys.executable, timeout_s: float = 100
) -> subprocess.CompletedProcess[str]:
    """Run ``python arguments`` on ``num_ranks`` ranks from the project's root, one thread each."""
    environment = os.environ | OPEN_MPI | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [str(Path(python).with_name("mpirun")), "-n", str(num_ranks), python, *arguments]
    return subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s
    )
