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
JOBS = [
    pytest.param(job, marks=() if job in SAMPLE else pytest.mark.long)
    for job in (Job("torch/program", ranks, mode) for mode in MODES for ranks in (2, 3))
]


@pytest.mark.parametrize("name", defects.check.all)
@pytest.mark.parametrize("job", JOBS, ids=str)
def test_defect(job: Job, name: str) -> None:
    job.passes(name)
