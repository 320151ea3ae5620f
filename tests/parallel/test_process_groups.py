"""The backend ``wfbp`` of torch.distributed: its operations, and what PyTorch builds on them."""

from __future__ import annotations

import pytest

from tests.parallel.programs.torch.distributed_program import check
from tests.parallel.runs import Job, outcome
from tests.support.launcher import mpirun

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(400)]

JOBS = [
    Job("torch/distributed_program", 3, "overlap"),
    Job("torch/distributed_program", 2, "messages", "openmpi"),
]


@pytest.mark.parametrize("name", check.all)
@pytest.mark.parametrize("job", JOBS, ids=str)
def test_process_group(job: Job, name: str) -> None:
    job.passes(name)


def test_a_rank_that_leaves_ends_the_wait_of_the_others() -> None:
    found = outcome("torch/process_group_left", 2)
    assert found.run.rc == 0, found.run
    assert "rank 0 of 2 waits (all_reduce(float32[1], SUM), operation 2" in found.ranks[0]
    assert "rank 1 has left" in found.ranks[0]


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
    assert "mpirun -n 2" in run.stderr
