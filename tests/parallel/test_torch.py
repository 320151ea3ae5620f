"""PyTorch programs under a fixed plan, under changing plans, and under decoupled ones.

On two ranks gradients are reduced whole, by messages that leave during backward; or plans change at
every step or two; or one decouples every tensor. On three, every other tensor is decoupled.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.programs.torch import (
    adapter,
    adasum,
    clipping,
    passes,
    rebuilding,
    steps,
    training_in_sets,
    uneven_data,
)
from tests.parallel.runs import Job

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(840)]

OVERLAP = Job("torch/program", 2, "overlap")
CHANGING = Job("torch/program", 2, "changing")
PS_LAYERWISE = Job("torch/program", 2, "ps_layerwise")
MIXED = Job("torch/program", 3, "mixed")

OF_PLANS = (adapter.mixing, steps.check)
"""Checks whose result could depend on changes of plans."""

ALONE = ("bad_arguments", "lbfgs")
"""Checks that also run on one rank."""


QUICK = steps.check.all | passes.check.all | clipping.check.all


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.quick] * (n in QUICK)) for n in adapter.check.all],
)
@pytest.mark.parametrize("job", [OVERLAP], ids=str)
def test_program(job: Job, name: str) -> None:
    job.passes(name)


@pytest.mark.parametrize("name", [name for checks in OF_PLANS for name in checks.all])
@pytest.mark.parametrize("job", [CHANGING], ids=str)
def test_program_while_plans_change(job: Job, name: str) -> None:
    job.passes(name)


@pytest.mark.parametrize("name", [*adapter.waiting.all, *rebuilding.check.all])
@pytest.mark.parametrize("job", [PS_LAYERWISE], ids=str)
def test_program_whose_parameters_are_waited_for(job: Job, name: str) -> None:
    job.passes(name)


@pytest.mark.parametrize("name", adapter.mixing.all)
@pytest.mark.parametrize("job", [MIXED], ids=str)
def test_program_of_shards_and_whole_gradients(job: Job, name: str) -> None:
    job.passes(name)


SETS: list[Any] = [
    Job("torch/program", 2, "overlap", "openmpi"),
    MIXED,
    pytest.param(Job("torch/program", 4, "overlap"), marks=pytest.mark.long),
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
