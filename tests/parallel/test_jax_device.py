"""JAX's programs with gradients on a device made of threads, through the handlers for CUDA."""

from __future__ import annotations

import pytest

pytest.importorskip("jax")

from tests.parallel.runs import outcome

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(100)]

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


@pytest.mark.parametrize(("mode", "library"), [("overlap", "NCCL"), ("changing", "STAGED")])
@pytest.mark.parametrize("name", CHECKS)
def test_program(name: str, mode: str, library: str) -> None:
    found = outcome("jax_device", 2, mode, *CHECKS, library, timeout=90)
    for rank, results in enumerate(found.ranks):
        assert results is not None, found.run
        assert not results[name], f"rank {rank}: {results[name]}"
    assert found.run.rc == 0, found.run
