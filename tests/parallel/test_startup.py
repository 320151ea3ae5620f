"""What is said when a job starts."""

from __future__ import annotations

import os
import time

import pytest

from tests.support import launcher

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(250)]

ABSENT = """
import os, subprocess, sys, time
rank = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))
if rank == "1":
    sys.exit("gone before init()")
if rank == "2":
    time.sleep(15)
else:
    subprocess.Popen([sys.executable, "-I", "-S", "-c", sys.argv[1], str(os.getpid())])
import wfbp
wfbp.init()
"""

SEGMENTS = """
import contextlib, re, sys, time
told = set()
with contextlib.suppress(OSError):
    while maps := open(f"/proc/{sys.argv[1]}/maps").read():
        for name in set(re.findall("/dev/shm/mpich_.*", maps)) - told:
            print(name, flush=True)
            told.add(name)
        time.sleep(0.05)
"""
"""Prints what MPICH shares among ranks, as long as a rank lives that runs no Python meanwhile."""


def test_a_rank_that_ends_before_init_is_not_waited_for_for_ever() -> None:
    run = launcher.mpirun(3, "-c", ABSENT, SEGMENTS, timeout=100, env={"WFBP_TIMEOUT_S": "2"})
    assert run.rc != 0, run
    assert "gone before init()" in run.stderr
    reason, _, stack = run.stderr.partition("Where this rank waits:")
    assert "rank 0 of 3: MPI has not started within 2 s" in reason, run
    assert "let every rank call wfbp.init()" in reason
    assert "_start_which_waits_for_every_rank" in stack, run
    segments = run.stdout.split()
    assert segments, "MPICH has other files now"
    deadline = time.monotonic() + 60
    while any(map(os.path.exists, segments)):
        assert time.monotonic() < deadline, segments
        time.sleep(0.1)


WRONG = """
import wfbp
wfbp.init({})
"""


@pytest.mark.parametrize(
    ("mpi", "arguments", "variables", "told"),
    [
        (
            "mpich",
            "",
            {"WFBP_TIMEOUT_S": "soon", "WFBP_EXCHANGE_ALONE": "x"},
            "ValueError: WFBP_TIMEOUT_S='soon': expected a number; correct or unset it; "
            "WFBP_EXCHANGE_ALONE='x': expected 1 or 0; correct or unset it",
        ),
        (
            "openmpi",
            "comm='world'",
            {},
            "TypeError: comm is 'world'; expected an mpi4py communicator, or the numbers of the "
            "ranks that take part",
        ),
    ],
)
def test_what_all_ranks_have_wrong_ends_the_job(
    mpi: str, arguments: str, variables: dict[str, str], told: str
) -> None:
    try:
        run = launcher.mpirun(3, "-c", WRONG.format(arguments), mpi=mpi, timeout=100, env=variables)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert run.rc not in (0, None), run
    assert told in run.stderr, run


NO_COMMUNICATOR = """
from mpi4py import MPI
import wfbp
mine = MPI.COMM_WORLD.Dup()
wfbp.init("world" if MPI.COMM_WORLD.rank == 1 else mine)
"""


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_what_one_rank_passes_for_a_communicator_ends_the_others(mpi: str) -> None:
    """They wait for it in theirs, where it can tell them nothing."""
    grace = {"WFBP_ABORT_GRACE_S": "0.5"}
    try:
        run = launcher.mpirun(3, "-c", NO_COMMUNICATOR, mpi=mpi, timeout=100, env=grace)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert run.rc not in (0, None), run
    assert "wfbp: rank 1 of 3: TypeError: comm is 'world'; expected an mpi4py" in run.stderr, run


ALONE = """
import wfbp
wfbp.init()
assert wfbp.size() == 1
print("alone")
"""


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_processes_of_another_launcher_do_not_train_apart(mpi: str) -> None:
    variables = {"TORCHELASTIC_RUN_ID": "7", "WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}
    try:
        run = launcher.mpirun(1, "-c", ALONE, mpi=mpi, timeout=100, env=variables)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert run.rc not in (0, None), run
    assert "BackendError: this process is rank 1 of 2, says torchrun (WORLD_SIZE=2)" in run.stderr
    assert f"{launcher.interpreter(mpi)} -m wfbp run -n 2 PROGRAM.py" in run.stderr


def test_processes_of_another_librarys_mpirun_do_not_train_apart() -> None:
    try:
        python = launcher.interpreter("openmpi")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    switch = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"
    command = (2, "-c", switch, python, "-c", ALONE)
    run = launcher.mpirun(*command, timeout=100)
    assert run.rc not in (0, None), run
    assert "says an mpirun with the PMI of MPICH (PMI_SIZE=2), but MPI (Open MPI" in run.stderr
    assert "alone" not in run.stdout
    # Where that is meant.
    run = launcher.mpirun(*command, timeout=100, env={"WFBP_CHECK_LAUNCHER": "0"})
    assert run.stdout.count("alone") == 2, run
