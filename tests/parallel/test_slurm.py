"""Jobs under a real Slurm of one node: the recipe, and ranks that Slurm starts itself."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import launcher, slurm

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(300)]

PROGRAM = """
import sys

import numpy as np
import wfbp

wfbp.init()
total = wfbp.allreduce(np.ones(2), op=wfbp.Sum).tolist()
sys.stdout.write(f"{wfbp.rank()} {wfbp.size()} {total}\\n")  # in one piece
sys.stdout.flush()
"""
BACKEND = """
import sys

import torch
import torch.distributed as dist
import wfbp.torch.distributed

dist.init_process_group("wfbp")
total = torch.ones(2)
dist.all_reduce(total)
sys.stdout.write(f"{dist.get_rank()} {dist.get_world_size()} {total.tolist()}\\n")
sys.stdout.flush()
dist.destroy_process_group()
"""
TOLD = ["0 2 [2.0, 2.0]", "1 2 [2.0, 2.0]"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[slurm.Cluster]:
    if reason := slurm.missing():
        pytest.skip(reason)
    # Not where others may write: the daemons refuse such folders for their keys.
    with (
        tempfile.TemporaryDirectory(prefix="wfbp-slurm-", dir=Path.home()) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("PYTHONPATH", str(launcher.ROOT))
        with slurm.cluster(Path(folder)) as running:
            yield running


def test_the_recipe(cluster: slurm.Cluster, mpi: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts and ranks are those of the allocation."""
    program = cluster.folder / "program.py"
    program.write_text(PROGRAM)
    environment = cluster.folder / f"environment-{mpi}"
    (environment / "bin").mkdir(parents=True)
    command = environment / "bin" / "wfbprun"
    command.write_text(f'#!/bin/sh\nexec {launcher.interpreter(mpi)} -m wfbp run "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("VENV", str(environment))
    log = cluster.folder / f"{mpi}.log"
    told = cluster.batch(log, launcher.ROOT / "launch" / "slurm.sbatch", program)
    assert sorted(told.splitlines()) == TOLD


@pytest.mark.parametrize("text", [PROGRAM, BACKEND], ids=["wfbp", "torch.distributed"])
def test_slurm_starts_the_ranks(cluster: slurm.Cluster, text: str) -> None:
    """By MPICH's protocol, which Slurm speaks without further packages."""
    program = cluster.folder / "program.py"
    program.write_text(text)
    log = cluster.folder / "srun.log"
    words = [launcher.interpreter("mpich"), "-m", "wfbp", "run", "--launcher", "srun", program]
    told = cluster.batch(log, "-n", "2", "--wrap", " ".join(map(str, words)))
    assert set(TOLD) <= set(told.splitlines())


def test_ranks_that_do_not_find_each_other_say_so(cluster: slurm.Cluster) -> None:
    """Slurm starts two processes, and without MPI's plugin each would train alone."""
    program = cluster.folder / "program.py"
    program.write_text(PROGRAM)
    words = ("srun", "-n", "2", "--mpi=none", launcher.interpreter("mpich"), program)
    done = cluster.run(*words)
    assert done.returncode != 0
    assert "SLURM_STEP_NUM_TASKS=2" in done.stderr
    assert f"{launcher.interpreter('mpich')} -m wfbp run -n 2 " in done.stderr
