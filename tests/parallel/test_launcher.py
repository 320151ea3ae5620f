"""The launcher of the parallel tests: it says how a run ended and leaves nothing behind."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

import psutil
import pytest

from tests.support.launcher import Run

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(300)]

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
    run = mpirun(3, "-c", HELLO, "spam", 7, mpi=mpi, timeout=100)
    assert run.rc == 0, run
    name, *rest = run.stdout.split()
    assert name == {"mpich": "MPICH", "openmpi": "Open"}[mpi]
    assert rest == ["3", "3", "spam", "7"]
    assert "aside" in run.stderr


@pytest.mark.parametrize("mpi", ["mpich", pytest.param("openmpi", marks=pytest.mark.long)])
def test_a_timeout_leaves_no_process_behind(mpirun: Callable[..., Run], mpi: str) -> None:
    mark = f"mark-{uuid.uuid4()}"
    for timeout in (3, 20, 60):  # until ranks have come so far within it
        run = mpirun(2, "-c", SLEEP, mark, mpi=mpi, timeout=timeout, grace_s=0.5)
        assert run.rc is None
        deadline = time.monotonic() + 60
        while left := marked(mark):
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
        if "asleep" in run.stdout:
            return
    pytest.fail(f"no rank slept within {timeout} s: {run}")


def marked(mark: str) -> list[int]:
    """Processes that were started with this argument."""
    return [p.pid for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or [])]
