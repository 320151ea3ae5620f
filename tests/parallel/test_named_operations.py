"""Named operations of wfbp.torch on one to four ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.programs.torch.named_operations import check
from tests.parallel.runs import PROGRAMS, Job
from tests.support.launcher import mpirun

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(840)]

JOBS = [
    Job("torch/program", 1, "overlap"),
    pytest.param(Job("torch/program", 4, "overlap"), marks=pytest.mark.long),
    Job("torch/program", 3, "mixed"),
    Job("torch/program", 2, "overlap", "openmpi"),
]


@pytest.mark.parametrize("name", check.all)
@pytest.mark.parametrize("job", JOBS, ids=str)
def test_named_operation(job: Job, name: str) -> None:
    job.passes(name)


@pytest.mark.parametrize(
    ("ranks", "mpi"),
    [pytest.param(1, "mpich", marks=pytest.mark.long), (2, "mpich"), (2, "openmpi")],
)
def test_a_program_written_for_horovod(ranks: int, mpi: str, tmp_path: Path) -> None:
    script = PROGRAMS / "torch" / "horovod_script.py"
    kind = None if mpi == "mpich" else "torch"
    try:
        run = mpirun(ranks, "-m", "wfbp.horovod", script, tmp_path, mpi=mpi, preloaded=kind)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert run.rc == 0, run
    assert len(list(tmp_path.glob("rank*.json"))) == ranks, run


def test_the_stand_in_says_how_it_is_called() -> None:
    run = mpirun(1, "-m", "wfbp.horovod")
    assert run.rc == 2, run
    assert "usage: mpirun" in run.stdout
