"""The backend ``wfbp`` of torch.distributed: its operations, and what PyTorch builds on them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parallel.programs.torch import process_group_frameworks
from tests.parallel.programs.torch.distributed_program import check
from tests.parallel.runs import PROGRAMS, Job, outcome
from tests.support.launcher import ROOT, mpirun

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(840)]

JOBS = [
    Job("torch/distributed_program", 3, "overlap"),
    Job("torch/distributed_program", 2, "messages", "openmpi"),
]


FRAMEWORKS = process_group_frameworks.check.all
"""Parts of PyTorch above the operations; they do not depend on the MPI library."""


@pytest.mark.parametrize(
    ("job", "name"),
    [
        pytest.param(
            job, name, marks=[pytest.mark.long] * (job.mpi != "mpich" and name in FRAMEWORKS)
        )
        for job in JOBS
        for name in check.all
    ],
    ids=str,
)
def test_process_group(job: Job, name: str) -> None:
    job.passes(name)


def test_a_rank_that_leaves_ends_the_wait_of_the_others() -> None:
    found = outcome("torch/process_group_left", 2)
    assert found.run.rc == 0, found.run
    assert "rank 0 of 2 waits (all_reduce(float32[1], SUM), operation 2" in found.ranks[0]
    assert "rank 1 has left" in found.ranks[0]


def test_detail_compares_all_operations_without_shared_memory(tmp_path: Path) -> None:
    """A difference that samples miss is the same error on all ranks."""
    program = PROGRAMS / "torch" / "process_group_detail.py"
    env = {"WFBP_SHARED_MEMORY": "0", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    run = mpirun(3, program, tmp_path, env=env)  # PyTorch reads the level when it is imported
    assert run.rc == 0, run
    texts = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(3)]
    assert texts[0] == (
        "ranks called different operations as operation 21 of process group 1.1 of all ranks "
        "(ranks 0, 1: all_reduce(float32[2], SUM); rank 2: all_reduce(float32[2], MAX)). Every "
        "rank of the group must call the same operations in the same order with the same element "
        "types and sizes"
    )
    assert texts == texts[:1] * 3


RENDEZVOUS = """
import os, sys
import torch, torch.distributed as dist
import wfbp
def average(backend):
    dist.init_process_group(backend)
    total = torch.ones(2)
    dist.all_reduce(total)
    assert total.tolist() == [dist.get_world_size()] * 2
    dist.destroy_process_group()
    wfbp.barrier()  # a rank must not meet the last group's store at this port
average("wfbp")
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1], RANK=str(wfbp.rank()))
os.environ["WORLD_SIZE"] = str(wfbp.size())
average("wfbp")
average("gloo")
"""


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_ranks_meet_by_mpi_or_by_variables(ranks: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    run = mpirun(ranks, "-c", RENDEZVOUS, port, preloaded="torch")
    assert run.rc == 0, run


LAUNCHED = """
import os, sys
SIMULATION
import torch
import torch.distributed as dist
import wfbp.torch.distributed
for backend in ("wfbp", "cpu:wfbp,cuda:nccl"):
    dist.init_process_group(backend)
    total = torch.ones(2)
    dist.all_reduce(total)
    assert total.tolist() == [2, 2]
    try:
        dist.all_reduce(torch.ones(2, device="meta"))
    except ValueError as error:
        assert 'init_process_group("cpu:wfbp,cuda:nccl")' in str(error)
    sys.stdout.write(f"rank {dist.get_rank()} of {dist.get_world_size()}\\n")
    sys.stdout.flush()
    dist.destroy_process_group()
"""
SLURM = """
from mpi4py import MPI  # the ranks find each other by MPICH's variables
for name in [name for name in os.environ if name.startswith(("PMI", "MPI", "HYDRA"))]:
    del os.environ[name]
os.environ.update(SLURM_PROCID=str(MPI.COMM_WORLD.rank), SLURM_NTASKS="2")
"""


def test_wfbprun_starts_a_process_group(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(LAUNCHED.replace("SIMULATION", ""))
    command = [sys.executable, "-m", "wfbp", "run", "-n", "2", os.fspath(program)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert run.returncode == 0, run
    assert sorted(run.stdout.splitlines()) == ["rank 0 of 2"] * 2 + ["rank 1 of 2"] * 2


def test_the_variables_of_slurm_are_enough() -> None:
    """(``test_slurm`` runs the same under Slurm itself.)"""
    run = mpirun(2, "-c", LAUNCHED.replace("SIMULATION", SLURM))
    assert run.rc == 0, run
    assert sorted(run.stdout.splitlines()) == ["rank 0 of 2"] * 2 + ["rank 1 of 2"] * 2


UNDER_TORCHRUN = """
import torch.distributed as dist
import wfbp.torch.distributed
dist.init_process_group("wfbp", store=dist.HashStore(), rank=0, world_size=2)
"""


def test_under_torchrun_an_error_names_the_right_command() -> None:
    told = {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "WORLD_SIZE": "2"}
    run = mpirun(1, "-c", UNDER_TORCHRUN, env=told)
    assert run.rc != 0
    assert "says torchrun (WORLD_SIZE=2)" in run.stderr, run
    assert "-m wfbp run -n 2" in run.stderr
