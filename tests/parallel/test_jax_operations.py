"""Collectives on JAX arrays, inside ``jit`` and outside, on one to four ranks."""

from __future__ import annotations

import pytest

pytest.importorskip("jax")

from tests.parallel.programs.jax.operations import check
from tests.parallel.runs import Job

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(300)]

JOBS = [
    Job("jax/operations", 1, "overlap"),
    Job("jax/operations", 2, "overlap", "openmpi"),
    Job("jax/operations", 3, "overlap"),
]

AT_FOUR = (
    "values_inside_jit_and_outside",
    "order_is_that_of_the_program",
    "odd_shapes",
    "broadcast_of_a_tree",
    "means_of_metrics",
)
"""Checks that also run on four ranks; compiling the others four times takes long."""


@pytest.mark.parametrize("name", check.all)
@pytest.mark.parametrize("job", JOBS, ids=str)
def test_operation(job: Job, name: str) -> None:
    job.passes(name)


@pytest.mark.parametrize("name", AT_FOUR)
@pytest.mark.parametrize("job", [Job("jax/operations", 4, "overlap")], ids=str)
def test_operation_on_four_ranks(job: Job, name: str) -> None:
    job.passes(name)
