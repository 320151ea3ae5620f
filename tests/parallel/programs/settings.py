"""Ranks whose environments differ: the last one has a variable that the others have not.

Usage: mpirun -n N python settings.py OUT VARIABLE=VALUE [VARIABLE=VALUE ...]; one after another.
OUT/rank<r>.json has what a rank was told of each (null: nothing).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from mpi4py import MPI

import wfbp
from wfbp.errors import DisagreementError


def told(variable: str, value: str) -> str | None:
    """Begin with this setting on the last rank; then all ranks are alike, and begin."""
    usual = os.environ.get(variable)
    if MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
        os.environ[variable] = value
    text = None
    try:
        wfbp.init()
    except DisagreementError as error:
        text = str(error)
        assert not wfbp.is_initialized()
    os.environ.pop(variable, None)
    if usual is not None:
        os.environ[variable] = usual
    wfbp.init()
    assert wfbp.allgather_object(wfbp.rank()) == list(range(wfbp.size()))
    wfbp.shutdown()
    return text


def main() -> None:
    out, *settings = sys.argv[1:]
    found = {}
    for setting in settings:
        variable, value = setting.split("=")
        found[variable] = told(variable, value)
    Path(out, f"rank{MPI.COMM_WORLD.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
