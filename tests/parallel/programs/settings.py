"""Ranks whose environments differ: the last one has a variable that the others have not.

Usage: mpirun -n N python settings.py OUT VARIABLE VALUE.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from mpi4py import MPI

import wfbp
from wfbp.errors import DisagreementError


def main() -> None:
    out, variable, value = sys.argv[1:]
    world = MPI.COMM_WORLD
    if world.rank == world.size - 1:
        os.environ[variable] = value
    try:
        wfbp.init()
    except DisagreementError as error:
        Path(out, f"rank{world.rank}.json").write_text(json.dumps(str(error)))
        assert not wfbp.is_initialized()
        os.environ.pop(variable, None)
        wfbp.init()  # alike now
    assert wfbp.allgather_object(wfbp.rank()) == list(range(world.size))


if __name__ == "__main__":
    main()
