"""Ranks that do not do the same all get an error that names who, which tensor and what."""

from __future__ import annotations

import pytest

from tests.parallel.programs.torch import disagreements
from tests.parallel.runs import Job

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(400)]


TWO, THREE = Job("torch/program", 2, "overlap"), Job("torch/program", 3, "mixed")

ONLY_TWO = (
    "a_reducer_disagrees",
    "a_deadlock_beside_jax_is_told",
    "one_rank_steps_less_often",
    "one_rank_steps_more_often",
    "one_rank_is_in_another_collective",
    "one_rank_synchronizes_what_is_clipped",
    "one_rank_is_in_a_barrier_while_others_wrap",
)
"""A reducer takes no plan that decouples, JAX is slow to load, and the others set their schedule
themselves: three ranks would only repeat them."""


@pytest.mark.parametrize(
    ("job", "name"),
    [(job, n) for job in (TWO, THREE) for n in disagreements.check.all if n not in ONLY_TWO]
    + [(TWO, name) for name in ONLY_TWO],
    ids=str,
)
def test_disagreement(job: Job, name: str) -> None:
    job.passes(name)
