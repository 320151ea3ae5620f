"""The backend ``wfbp`` of torch.distributed: its operations, and what PyTorch builds on them."""

from __future__ import annotations

import pytest

from tests.parallel.programs.torch.distributed_program import check
from tests.parallel.runs import Job

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(400)]

JOBS = [
    Job("torch/distributed_program", 3, "overlap"),
    Job("torch/distributed_program", 2, "messages", "openmpi"),
]


@pytest.mark.parametrize("name", check.all)
@pytest.mark.parametrize("job", JOBS, ids=str)
def test_process_group(job: Job, name: str) -> None:
    job.passes(name)
