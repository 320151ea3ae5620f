"""Programs that once trained wrongly, or failed; see ``programs.torch.defects``."""

from __future__ import annotations

import pytest

from tests.parallel.programs.torch import defects
from tests.parallel.runs import Job

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(300)]

AUTO = Job("torch/defects", 2, "changing")
INDEPENDENT = Job("torch/defects", 3, "independent")

OPEN = {
}
"""Not fixed yet."""

ENDS_THE_JOB = ("adasum_and_scaling",)
"""Row 10, not fixed yet: ranks wait for each other."""

PASSES = {
    AUTO: (),
    INDEPENDENT: (),
}
"""Checks that pass in a job although they are open."""


def marked(job: Job, name: str) -> object:
    """A test, expected to fail while its defect is open."""
    is_open = name in OPEN and name not in PASSES[job]
    marks = [pytest.mark.xfail(strict=True, reason=OPEN[name])] if is_open else []
    return pytest.param(job, name, marks=marks)


@pytest.mark.parametrize(
    ("job", "name"),
    [marked(j, n) for j in PASSES for n in defects.check.all if n not in ENDS_THE_JOB],
    ids=str,
)
def test_defect(job: Job, name: str) -> None:
    job.passes(name)
