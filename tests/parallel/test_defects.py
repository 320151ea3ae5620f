"""Programs that once trained wrongly, or failed; see ``programs.torch.defects``."""

from __future__ import annotations

import pytest

from tests.parallel.programs.torch import defects
from tests.parallel.runs import Job

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(400)]

MODES = ("changing", "independent", "mixed")
"""By schedule ``auto``, by one that decouples all, and by hybrids that decouple every other
tensor."""
SAMPLE = [
    Job("torch/program", n, mode) for n, mode in ((2, "changing"), (2, "independent"), (3, "mixed"))
]
REPEATS = SAMPLE[:2]
"""Jobs that leave out what sets schedules itself: three ranks have that."""
CASES = [
    pytest.param(
        job,
        name,
        marks=pytest.mark.long
        if job not in SAMPLE or (job in REPEATS and name in defects.own_schedules)
        else (),
        id=f"{job}-{name}",
    )
    for job in (Job("torch/program", ranks, mode) for mode in MODES for ranks in (2, 3))
    for name in defects.check.all
]


@pytest.mark.parametrize(("job", "name"), CASES)
def test_defect(job: Job, name: str) -> None:
    job.passes(name)
