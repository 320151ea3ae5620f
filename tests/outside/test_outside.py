"""Scripts as people have them, started as people start them; only the backend's name differs.

Scripts beside this file read torchrun's variables and know nothing of wfbp or MPI.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support import launcher

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(300)]

HERE = Path(__file__).parent
CLEAN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


def start(*words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in CLEAN}
    environment |= {"PYTHONPATH": str(launcher.ROOT), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [str(word) for word in words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        stdin=subprocess.DEVNULL,
    )


def wfbprun(
    *words: object, mpi: str = "mpich", **variables: str
) -> subprocess.CompletedProcess[str]:
    return start(launcher.interpreter(mpi), "-m", "wfbp", "run", "-n", 2, *words, **variables)


def twice(stdout: str, line: str) -> bool:
    """Two ranks have printed a line and nothing else; they may have done so at the same moment."""
    return Counter(stdout) == Counter(f"{line}\n" * 2)


ALSO_OPEN_MPI = pytest.param("openmpi", marks=pytest.mark.long)


@pytest.mark.parametrize("backend", ["wfbp", "gloo"])
def test_a_script_that_reads_rank_trains_as_one_job(backend: str, tmp_path: Path) -> None:
    script = HERE / "environment_script.py"
    done = wfbprun(script, f"--backend={backend}", "--checkpoint", tmp_path / "ckpt")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained on 2 ranks\n"
    assert len(list(tmp_path.iterdir())) == 1
    assert "WARNING" not in done.stderr


def test_under_a_bare_mpirun(mpi: str, tmp_path: Path) -> None:
    """PyTorch's import sets the variables, before the script reads them."""
    script = HERE / "environment_script.py"
    done = launcher.mpirun(2, script, "--backend=wfbp", "--checkpoint", tmp_path / "c", mpi=mpi)
    assert done.rc == 0, done
    assert done.stdout == "trained on 2 ranks\n"


@pytest.mark.parametrize("mpi", ["mpich", ALSO_OPEN_MPI], indirect=True)
def test_the_tutorials_way_of_starting(mpi: str) -> None:
    done = wfbprun(HERE / "tutorial_script.py", "wfbp", mpi=mpi)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained on 2 ranks, 128 samples\n"


@pytest.mark.parametrize("backend", ["wfbp", pytest.param("gloo", marks=pytest.mark.long)])
def test_a_script_with_numbers_of_its_own(backend: str) -> None:
    done = wfbprun(HERE / "local_rank_script.py", "--backend", backend)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained on 2 ranks\n"


@pytest.mark.parametrize("mpi", ["mpich", ALSO_OPEN_MPI], indirect=True)
def test_a_program_that_starts_nothing_is_warned_of_once(mpi: str) -> None:
    done = wfbprun(HERE / "forgotten.py", mpi=mpi)
    assert done.returncode == 0, done.stderr
    assert twice(done.stdout, "trained 2.0")
    assert done.stderr.count("started on 2 ranks, and ended without wfbp.init()") == 1


@pytest.mark.parametrize("mpi", ["mpich", ALSO_OPEN_MPI], indirect=True)
def test_workers_and_children_of_ranks_are_none(mpi: str) -> None:
    """One sentence from each that calls init(), instead of the launcher's raw errors."""
    done = wfbprun(HERE / "unguarded.py", mpi=mpi)
    assert done.returncode == 0, done.stderr
    assert twice(done.stdout, "[1, 1] 2.0")
    assert done.stderr.count("BackendError: this process was started by rank") == 4
    assert "PMI" not in done.stderr
    assert "WARNING" not in done.stderr


def test_variables_that_are_not_wanted(tmp_path: Path) -> None:
    script = HERE / "environment_script.py"
    done = wfbprun("--no-torch-env", script, "--checkpoint", tmp_path / "ckpt")
    assert done.returncode == 0, done.stderr
    assert twice(done.stdout, "trained on 1 ranks")
    assert "ended without wfbp.init()" in done.stderr


def test_variables_that_contradict_mpi_are_refused(tmp_path: Path) -> None:
    done = launcher.mpirun(
        2,
        HERE / "environment_script.py",
        "--backend=wfbp",
        "--checkpoint",
        tmp_path / "c",
        env={"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
    )
    assert done.rc not in (0, None), done
    assert "rank 1: expected RANK=1, as MPI's launcher says, found RANK=0" in done.stderr


def test_under_torchrun_the_error_shows_the_command() -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2")
    done = start(*torchrun, HERE / "tutorial_script.py", "wfbp")
    assert done.returncode != 0
    command = f"-m wfbp run -n 2 {sys.executable} -u {HERE / 'tutorial_script.py'} wfbp"
    assert command in done.stderr, done.stderr
