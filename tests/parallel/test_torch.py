"""What PyTorch programs do, on two and three ranks, with and without changing plans."""

from __future__ import annotations

import pytest

from tests.parallel.programs.torch import adasum, rebuilding, training_in_sets, uneven_data
from tests.parallel.programs.torch.adapter import check
from tests.parallel.runs import Job

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(300)]

JOBS = [
    pytest.param(Job("torch/program", 2, "overlap"), marks=pytest.mark.quick),
    Job("torch/program", 3, "changing"),
    Job("torch/program", 2, "mixed"),
    Job("torch/program", 3, "ps_layerwise"),
]

ALONE = ("bad_arguments", "scheduler_made_before_wrapping", "clipping", "scaler_naive", "lbfgs")
"""Checks that also run on one rank."""


@pytest.mark.parametrize("name", check.all)
@pytest.mark.parametrize("job", JOBS, ids=str)
def test_program(job: Job, name: str) -> None:
    job.passes(name)


@pytest.mark.parametrize("name", rebuilding.check.all)
@pytest.mark.parametrize("job", [Job("torch/program", 3, "ps_layerwise")], ids=str)
def test_rebuilding(job: Job, name: str) -> None:
    job.passes(name)


SETS = [
    Job("torch/program", 2, "overlap", "openmpi"),
    Job("torch/program", 3, "changing"),
    Job("torch/program", 4, "overlap"),
]


@pytest.mark.parametrize("name", [*training_in_sets.check.all, *adasum.check.all])
@pytest.mark.parametrize("job", SETS, ids=str)
def test_sets_and_adasum(job: Job, name: str) -> None:
    job.passes(name)


@pytest.mark.parametrize("name", uneven_data.check.all)
@pytest.mark.parametrize("job", SETS[:2], ids=str)
def test_uneven_data(job: Job, name: str) -> None:
    job.passes(name)


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("job", [Job("torch/program", 1, "overlap")], ids=str)
def test_on_one_rank(job: Job, name: str) -> None:
    job.passes(name)
