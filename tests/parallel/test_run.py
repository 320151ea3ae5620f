"""``wfbprun`` with real ranks: where they run, what they see, how they end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import launcher

pytestmark = pytest.mark.parallel

RUN = ("-m", "wfbp", "run")
TELL = """
import json, os, sys
from mpi4py import MPI
world = MPI.COMM_WORLD
names = ("MINE", "CUDA_VISIBLE_DEVICES")
told = {n: os.environ.get(n) for n in names}
told |= {"rank": world.rank, "size": world.size, "cores": sorted(os.sched_getaffinity(0))}
sys.stdout.write(json.dumps(told) + "\\n")
sys.stdout.flush()
print("an error line", file=sys.stderr, flush=True)
world.Barrier()
sys.exit(int(sys.argv[1]) if world.rank == 0 else 0)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "tell.py"
    path.write_text(TELL)
    return path


def start(mpi: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    words = [launcher.interpreter(mpi), *RUN, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(launcher.ROOT)}
    return subprocess.run(
        [str(word) for word in words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        stdin=subprocess.DEVNULL,
    )


def test_ranks_have_their_cores_variables_and_files(mpi: str, program: Path) -> None:
    """And the exit status is the job's."""
    output = program.parent / "output"
    seen = ("-x", "CUDA_VISIBLE_DEVICES=0,1")  # or this machine without GPUs is refused
    options = ("-n", 2, "-x", "MINE=yes", *seen, "--no-check", "--gpu", "--output", output)
    done = start(mpi, *options, program, 3)
    assert done.returncode == 3, done.stderr
    assert "an error line" not in done.stderr
    told = [json.loads((output / f"rank-{rank}.out").read_text()) for rank in range(2)]
    assert [t["rank"] for t in told] == [0, 1]
    assert [t["CUDA_VISIBLE_DEVICES"] for t in told] == ["0", "1"]
    assert all(t["size"] == 2 and t["MINE"] == "yes" for t in told)
    if len(os.sched_getaffinity(0)) > 1:
        assert not set(told[0]["cores"]) & set(told[1]["cores"])
    assert (output / "rank-1.err").read_text() == "an error line\n"


def test_lines_begin_with_their_rank(mpi: str, program: Path) -> None:
    done = start(mpi, "-n", 2, "--prefix", program, 0)
    assert done.returncode == 0, done.stderr
    marks = ("[0]", "[1]") if mpi == "mpich" else ("[1,0]", "[1,1]")
    assert all(mark in done.stdout for mark in marks)


def test_a_signal_ends_the_job(mpi: str, tmp_path: Path) -> None:
    program = tmp_path / "wait.py"
    program.write_text(
        "import os, sys, time; from mpi4py import MPI\n"
        f"open({str(tmp_path)!r} + f'/{{os.getpid()}}.pid', 'w').close(); time.sleep(600)"
    )
    words = [str(launcher.interpreter(mpi)), *RUN, "-n", "2", str(program)]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL, start_new_session=True) as job:
        try:
            deadline = time.monotonic() + 60
            while len(pids := list(tmp_path.glob("*.pid"))) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            job.send_signal(signal.SIGTERM)
            assert job.wait(60) != 0
        finally:
            launcher.end(job, 5.0)
    while any(Path("/proc", pid.stem).exists() for pid in pids):
        assert time.monotonic() < deadline + 60, "a rank outlives its job"
        time.sleep(0.05)


def test_two_hosts(program: Path) -> None:
    """Network namespaces as hosts, reached by a shell of the test's own."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    sys.path.insert(0, str(launcher.ROOT / "tools"))
    try:
        from link import Link, inside
    finally:
        sys.path.pop(0)
    link = Link(f"wfbprun{os.getpid()}")
    shell = program.parent / "shell"
    shell.write_text(link.launcher_script())
    shell.chmod(0o755)
    hosts = ",".join(f"{address}:1" for address in link.addresses)
    link.up("1gbit")
    try:
        words = [*inside(link.namespaces[0]), sys.executable, *RUN, "-H", hosts, "--ssh", shell]
        words += ["--interface", "wl0", program, "0"]
        done = subprocess.run(
            [str(word) for word in words],
            env={**os.environ, "MINE": "here", **link.environment()},
            capture_output=True,
            text=True,
            timeout=110,
        )
        sent = link.sent_bytes()
    finally:
        link.down()
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted(t["rank"] for t in told) == [0, 1]
    assert min(sent) > 0


FUNCTION = """
import pickle, sys
import wfbp

def task(text, fails=False):
    wfbp.init()
    print("from a rank")
    if fails and wfbp.rank() == 1:
        raise ValueError("a bad sample")
    wfbp.barrier()
    return text, wfbp.rank(), wfbp.size()

def for_horovod(first):
    import horovod.torch as hvd
    hvd.init()
    return first + hvd.rank()

assert wfbp.run(task, ("a",), np=2) == [("a", 0, 2), ("a", 1, 2)]
try:
    wfbp.run(task, kwargs={"text": "a", "fails": True}, np=2)
except wfbp.launcher.function.WfbpError as error:
    assert str(error).startswith("rank 1 failed:"), error
    assert "in task" in str(error) and isinstance(error.__cause__, ValueError), error
from wfbp.horovod import run
assert run(for_horovod, (5,), np=2, verbose=1) == [5, 6]
try:
    run(for_horovod, (5,), np=2, hosts="a:2")
except TypeError as error:
    assert "wfbprun -H" in str(error)
print("ran")
"""


def test_a_function_on_ranks(mpi: str, tmp_path: Path) -> None:
    """From a program that is no rank, whose functions are in no module."""
    program = tmp_path / "notebook.py"
    program.write_text(FUNCTION)
    done = subprocess.run(
        [str(launcher.interpreter(mpi)), str(program)],
        env={**os.environ, "PYTHONPATH": str(launcher.ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "ran"
    assert done.stdout.count("from a rank") == 4
