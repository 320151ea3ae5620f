"""Ranks that do not do the same all get an error that names who, which tensor and what."""

from __future__ import annotations

import pytest

from tests.parallel.programs.torch import disagreements
from tests.parallel.runs import Job

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(300)]


@pytest.mark.parametrize("name", disagreements.check.all)
@pytest.mark.parametrize(
    "job", [Job("torch/program", ranks, "overlap") for ranks in (2, 3)], ids=str
)
def test_disagreement(job: Job, name: str) -> None:
    job.passes(name)
