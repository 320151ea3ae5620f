"""JAX's programs with gradients on a device made of threads, through the handlers for CUDA."""

from __future__ import annotations

import pytest

pytest.importorskip("jax")

from tests.parallel.runs import Job

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(300)]

CHECKS = (
    "recompilation",
    "many_steps_in_flight",
    "one_exchange_twice_in_a_row",
    "scan_whose_gradient_does_not_change",
    "gradients_that_nobody_wants",
    "element_types",
    "without_jit",
    "sums",
    "optimizer_in_a_program",
)


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("job", [Job("jax/device", 2, "overlap", last=("NCCL",))], ids=str)
def test_program(job: Job, name: str) -> None:
    job.passes(name)


@pytest.mark.parametrize("name", CHECKS[:2] + CHECKS[-1:])
@pytest.mark.parametrize("job", [Job("jax/device", 2, "changing", last=("STAGED",))], ids=str)
def test_program_while_plans_change(job: Job, name: str) -> None:
    """Where messages go through memory of the host."""
    job.passes(name)
