"""Programs that once trained wrongly, or failed; see ``programs.torch.defects``."""

from __future__ import annotations

import pytest

from tests.parallel.programs.torch import defects
from tests.parallel.runs import Job

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(840)]

MODES = ("changing", "independent", "mixed")
"""By schedule ``auto``, by one that decouples all, and by hybrids that decouple every other
tensor."""
SAMPLE = [Job("torch/program", 2, "changing"), Job("torch/program", 3, "mixed")]
CASES = [
    pytest.param(
        job,
        name,
        # Only one job has what sets schedules itself.
        marks=pytest.mark.long
        if job not in SAMPLE or (job.ranks == 3 and name in defects.own_schedules)
        else (),
        id=f"{job}-{name}",
    )
    for job in (Job("torch/program", ranks, mode) for mode in MODES for ranks in (2, 3))
    for name in defects.check.all
]


@pytest.mark.parametrize(("job", "name"), CASES)
def test_defect(job: Job, name: str) -> None:
    job.passes(name)
