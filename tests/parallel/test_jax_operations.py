"""Collectives on JAX arrays, inside ``jit`` and outside, on one to four ranks."""

from __future__ import annotations

import pytest

pytest.importorskip("jax")

from tests.parallel.programs.jax.operations import check
from tests.parallel.runs import Job

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(300)]

JOBS = [
    pytest.param(Job("jax/operations", 1, "overlap"), marks=pytest.mark.long),
    Job("jax/operations", 2, "overlap", "openmpi"),
]

SENDING = (
    "values_inside_jit_and_outside",
    "order_is_that_of_the_program",
    "odd_shapes",
    "broadcast_of_a_tree",
    "means_of_metrics",
)
"""Checks of what is sent; compiling takes long where others, such as derivatives, are run."""

FURTHER_JOBS = {
    Job("jax/operations", 3, "overlap"): SENDING,
    Job("jax/operations", 4, "overlap"): (
        *SENDING,
        "every_operation_and_element_type",
        "large_arrays_do_not_lock_up",
        "disagreement",
    ),
}


@pytest.mark.parametrize("name", check.all)
@pytest.mark.parametrize("job", JOBS, ids=str)
def test_operation(job: Job, name: str) -> None:
    job.passes(name)


@pytest.mark.parametrize(
    ("job", "name"),
    [
        pytest.param(job, name, marks=[pytest.mark.long] * (job.ranks > 3))
        for job, names in FURTHER_JOBS.items()
        for name in names
    ],
    ids=str,
)
def test_what_is_sent(job: Job, name: str) -> None:
    job.passes(name)
