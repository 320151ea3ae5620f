"""Collectives under Horovod's names and gradients of plain arrays, on one to three ranks."""

from __future__ import annotations

import pytest

from tests.parallel.programs.torch.collectives import check
from tests.parallel.runs import Job

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(300)]

JOBS = [
    Job("torch/program", 1, "overlap"),
    Job("torch/program", 3, "changing"),
    Job("torch/program", 2, "overlap", "openmpi"),
]


@pytest.mark.parametrize("name", check.all)
@pytest.mark.parametrize("job", JOBS, ids=str)
def test_collective(job: Job, name: str) -> None:
    job.passes(name)
