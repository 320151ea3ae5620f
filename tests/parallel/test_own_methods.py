"""Optimizers with further methods; see ``programs.torch.own_methods``."""

from __future__ import annotations

import pytest

from tests.parallel.programs.torch import own_methods
from tests.parallel.runs import Job

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(840)]

JOBS = [
    Job("torch/program", 3, "mixed"),
    pytest.param(Job("torch/program", 2, "changing"), marks=pytest.mark.long),
    pytest.param(Job("torch/program", 2, "independent"), marks=pytest.mark.long),
]


@pytest.mark.parametrize("name", own_methods.check.all)
@pytest.mark.parametrize("job", JOBS, ids=str)
def test_own_method(job: Job, name: str) -> None:
    job.passes(name)
