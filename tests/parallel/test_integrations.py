"""Lightning, Hugging Face and Ray, on real ranks; ``make install-integrations`` has them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.parallel.runs import PROGRAMS
from tests.support.launcher import ROOT, interpreter, mpirun

pytestmark = [pytest.mark.parallel, pytest.mark.slow]


def test_accelerate_and_the_trainer_train_as_a_single_process_does(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    program = PROGRAMS / "huggingface_training.py"
    run = mpirun(2, program, tmp_path, env={"PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"})
    assert run.rc == 0, run.stderr
    same = [line for line in run.stdout.splitlines() if line.startswith("same: ")]
    assert same == ["same: accelerate", "same: trainer"]


def test_lightning_trains_as_a_single_process_does(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    run = mpirun(2, PROGRAMS / "lightning_training.py", tmp_path, env={"PYTHONWARNINGS": "ignore"})
    assert run.rc == 0, run.stderr
    same = [line for line in run.stdout.splitlines() if line.startswith("same: ")]
    assert same == [
        "same: clipped",
        "same: clipped by value",
        "same: accumulated",
        "same: changing",
    ]


@pytest.mark.parametrize("library", ["accelerate", "lightning"])
def test_ddp_trains_by_the_backend(library: str, tmp_path: Path) -> None:
    """Programs that use the backend ``wfbp`` of torch.distributed, and no strategy of this one."""
    pytest.importorskip(library)
    program = PROGRAMS / "torch" / "process_group_trainers.py"
    run = mpirun(2, program, tmp_path, library, env={"PYTHONWARNINGS": "ignore"})
    assert run.rc == 0, run.stderr
    for rank in range(2):
        assert json.loads((tmp_path / f"rank{rank}.json").read_text()) < 1e-6


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("mpi", "num_nodes"), [("mpich", 2), ("openmpi", 1)])
def test_ray_places_ranks(mpi: str, num_nodes: int, tmp_path: Path) -> None:
    """A real cluster of Ray on this machine; MPICH takes addresses of it for several hosts."""
    pytest.importorskip("ray")
    words = [interpreter(mpi), PROGRAMS / "ray_job.py", num_nodes, tmp_path]
    run = subprocess.run(
        [str(word) for word in words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stderr[-5000:]
    told = [line for line in run.stdout.splitlines() if not line.startswith("\x1b")]
    further = ["failed", "left", "refused", "submitted"]
    assert told == ["trained", *(further if num_nodes > 1 else [])]
