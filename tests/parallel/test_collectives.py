"""Collectives under Horovod's names and gradients of plain arrays, on one to three ranks."""

from __future__ import annotations

import pytest

from tests.parallel.programs.torch import collective_reducer
from tests.parallel.programs.torch.collectives import check
from tests.parallel.runs import Job

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(840)]

JOBS = [
    Job("torch/program", 1, "overlap"),
    Job("torch/program", 2, "overlap", "openmpi"),
]


WHOLE = ("byte_orders", *collective_reducer.check.all)
"""Checks of reducers, which take no plan that decouples, as that of the job on three ranks is."""

LIMIT = "more_reducers_than_mpi_has_communicators"
"""Takes as long as all others: two ranks of MPICH, whose limit it is, are enough."""


@pytest.mark.parametrize("name", [name for name in check.all if name != LIMIT])
@pytest.mark.parametrize("job", JOBS, ids=str)
def test_collective(job: Job, name: str) -> None:
    job.passes(name)


@pytest.mark.parametrize("name", [name for name in check.all if name not in WHOLE])
@pytest.mark.parametrize("job", [Job("torch/program", 3, "mixed")], ids=str)
def test_collective_on_three_ranks(job: Job, name: str) -> None:
    job.passes(name)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in WHOLE if name != LIMIT])
@pytest.mark.parametrize("job", [Job("torch/program", 4, "overlap")], ids=str)
def test_reducer_on_four_ranks(job: Job, name: str) -> None:
    job.passes(name)


@pytest.mark.long
@pytest.mark.parametrize("name", [LIMIT])
@pytest.mark.parametrize("job", [Job("torch/program", 2, "overlap")], ids=str)
def test_the_limit_of_communicators(job: Job, name: str) -> None:
    job.passes(name)
