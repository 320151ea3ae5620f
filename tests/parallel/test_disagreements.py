"""Ranks that do not do the same all get an error that names who, which tensor and what."""

from __future__ import annotations

import pytest

from tests.parallel.programs.torch import disagreements
from tests.parallel.runs import Job

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(840)]


TWO, THREE = Job("torch/program", 2, "overlap"), Job("torch/program", 3, "mixed")

ON_THREE = (
    "parameters_that_were_not_broadcast",
    "tensors",
    "settings",
    "allreduce",
    "different_operations",
)
"""Checks of messages that name several ranks; the others would only repeat those on two ranks."""


@pytest.mark.parametrize(
    ("job", "name"),
    [*((TWO, name) for name in disagreements.check.all), *((THREE, name) for name in ON_THREE)],
    ids=str,
)
def test_disagreement(job: Job, name: str) -> None:
    job.passes(name)
