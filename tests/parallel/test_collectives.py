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


LIMIT = "more_reducers_than_mpi_has_communicators"
"""Takes as long as all others: two ranks of MPICH, whose limit it is, are enough."""


@pytest.mark.parametrize("name", [name for name in check.all if name != LIMIT])
@pytest.mark.parametrize("job", JOBS, ids=str)
def test_collective(job: Job, name: str) -> None:
    job.passes(name)


@pytest.mark.parametrize("name", [LIMIT])
@pytest.mark.parametrize("job", [Job("torch/program", 2, "overlap")], ids=str)
def test_the_limit_of_communicators(job: Job, name: str) -> None:
    job.passes(name)
