"""Programs that once trained wrongly, or failed; see ``programs.torch.defects``."""

from __future__ import annotations

import pytest

from tests.parallel.programs.torch import defects
from tests.parallel.runs import Job

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(300)]

AUTO = Job("torch/defects", 2, "changing")
INDEPENDENT = Job("torch/defects", 3, "independent")

OPEN = {
    "bound_method_as_attribute": "row 1",
    "methods_that_use_state": "row 2",
    "scaler_and_sparse_gradients": "row 3",
    "changed_sparse_gradient": "row 4",
    "steps_by_other_methods": "row 5",
    "gradients_before_a_closure": "row 6",
    "changed_right_after_a_step": "row 7",
    "groups_by_place": "row 8",
    "adasum_and_joining": "row 9",
    "threads_that_clip": "row 11",
    "threads_that_gather_state": "row 11",
    "decorated_step": "row 12",
    "step_of_an_instance": "row 13",
    "gradients_that_are_read": "row 15",
    "groups_and_state_as_properties": "row 17",
    "zero_grad_without_arguments": "row 18",
    "state_of_shape_one": "row 19",
    "gradients_of_another_type": "row 20",
    "nan_as_a_setting": "row 21",
    "refused_second_wrapping": "row 22",
    "sparse_as_dense_alone": "row 23",
}
"""Not fixed yet."""

ENDS_THE_JOB = ("adasum_and_scaling", "sparse_and_dense_gradients")
"""Rows 10 and 16, not fixed yet: ranks wait for each other."""

PASSES = {
    AUTO: (
        "bound_method_as_attribute",
        "methods_that_use_state",
        "groups_by_place",
        "threads_that_gather_state",
    ),
    INDEPENDENT: ("adasum_and_joining",),
}
"""Checks that pass in a job although they are open."""


BY_TIME = ("changed_right_after_a_step",)
"""Open checks that may pass, depending on when messages arrive."""


def marked(job: Job, name: str) -> object:
    """A test, expected to fail while its defect is open."""
    is_open = name in OPEN and name not in PASSES[job]
    strict = name not in BY_TIME
    marks = [pytest.mark.xfail(strict=strict, reason=OPEN[name])] if is_open else []
    return pytest.param(job, name, marks=marks)


@pytest.mark.parametrize(
    ("job", "name"),
    [marked(j, n) for j in PASSES for n in defects.check.all if n not in ENDS_THE_JOB],
    ids=str,
)
def test_defect(job: Job, name: str) -> None:
    job.passes(name)
