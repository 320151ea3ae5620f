"""Programs that once trained wrongly, or failed; see ``programs.torch.defects``."""

from __future__ import annotations

import pytest

from tests.parallel.programs.torch import defects
from tests.parallel.runs import Job

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(300)]

JOBS = [Job("torch/defects", 2, "changing"), Job("torch/defects", 3, "independent")]


@pytest.mark.parametrize("name", defects.check.all)
@pytest.mark.parametrize("job", JOBS, ids=str)
def test_defect(job: Job, name: str) -> None:
    job.passes(name)
