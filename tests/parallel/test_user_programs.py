"""What users' programs do beside ordinary training, by plans that change and by decoupled ones."""

from __future__ import annotations

import pytest

from tests.parallel.programs.harness import Checks
from tests.parallel.programs.torch import gradient_memory, scripts_and_forks, user_optimizers
from tests.parallel.runs import Job

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(840)]

CHECKS = Checks(user_optimizers.check, gradient_memory.check, scripts_and_forks.check)
MODES = ("changing", "independent", "mixed")
"""By schedule ``auto``, by one that decouples all, and by hybrids that decouple every other
tensor."""
SAMPLE = [Job("torch/program", 2, "changing"), Job("torch/program", 3, "mixed")]
CASES = [
    pytest.param(
        job,
        name,
        marks=pytest.mark.long
        if job not in SAMPLE or (job.ranks == 3 and name in CHECKS.with_own_schedules)
        else (),
        id=f"{job}-{name}",
    )
    for job in (Job("torch/program", ranks, mode) for mode in MODES for ranks in (2, 3))
    for name in CHECKS.all
]


@pytest.mark.parametrize(("job", "name"), CASES)
def test_program(job: Job, name: str) -> None:
    job.passes(name)
