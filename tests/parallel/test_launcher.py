"""The launcher of the parallel tests: it says how a run ended and leaves nothing behind."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

import psutil
import pytest

from tests.support.launcher import Run

pytestmark = pytest.mark.parallel

HELLO = """
import sys
from mpi4py import MPI
world = MPI.COMM_WORLD
total = world.allreduce(world.rank)
if world.rank == 0:
    print(MPI.Get_library_version().split()[0], world.size, total, *sys.argv[1:])
    print("aside", file=sys.stderr)
"""

SLEEP = """
import signal, time
from mpi4py import MPI
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("asleep", flush=True)
time.sleep(600)
"""


def test_runs_under_the_library_asked_for(mpirun: Callable[..., Run], mpi: str) -> None:
    run = mpirun(3, "-c", HELLO, "spam", 7, mpi=mpi, timeout=60)
    assert run.rc == 0, run
    name, *rest = run.stdout.split()
    assert name == {"mpich": "MPICH", "openmpi": "Open"}[mpi]
    assert rest == ["3", "3", "spam", "7"]
    assert "aside" in run.stderr


def test_reports_a_failing_rank(mpirun: Callable[..., Run], mpi: str) -> None:
    run = mpirun(2, "-c", "from mpi4py import MPI; MPI.COMM_WORLD.Abort(3)", mpi=mpi, timeout=60)
    assert run.rc not in (0, None), run


def test_a_timeout_leaves_no_process_behind(mpirun: Callable[..., Run], mpi: str) -> None:
    mark = f"mark-{uuid.uuid4()}"
    run = mpirun(2, "-c", SLEEP, mark, mpi=mpi, timeout=5, grace_s=0.5)
    assert run.rc is None
    assert "asleep" in run.stdout
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and (left := marked(mark)):
        time.sleep(0.1)
    assert not left


def marked(mark: str) -> list[int]:
    """Processes that were started with this argument."""
    return [p.pid for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or [])]
