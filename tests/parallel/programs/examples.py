"""Examples one after another on the ranks of one job, each as if it had been started alone.

Usage: mpirun -n N python examples.py OUT RUN [RUN ...], where a run is an example with its
arguments, in words, or a document (*.md) whose first program is meant. OUT/rank<r>.json has what
each run printed on that rank.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import shlex
import sys
from pathlib import Path

from mpi4py import MPI

import wfbp
from tests.support.cores import leave_cores

EXAMPLES = Path(__file__).parents[3] / "examples"
DOCUMENTS = EXAMPLES.parent / "docs"


def first_program(document: Path) -> str:
    """The first block of Python in a document."""
    return document.read_text().partition("```python\n")[2].partition("```\n")[0]


def main() -> None:
    leave_cores()
    out, *runs = sys.argv[1:]
    told = {}
    for run in runs:
        example, *words = shlex.split(run)
        sys.argv = [str(EXAMPLES / example), *words]
        with contextlib.redirect_stdout(io.StringIO()) as output:
            if example.endswith(".md"):
                exec(first_program(DOCUMENTS / example), {"__name__": "__main__"})
            else:
                runpy.run_path(sys.argv[0], run_name="__main__")
        told[run] = output.getvalue()
        wfbp.shutdown()
    Path(out, f"rank{MPI.COMM_WORLD.rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
