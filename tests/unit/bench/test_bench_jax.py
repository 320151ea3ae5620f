"""The JAX benchmark's table, models and timeline."""

from __future__ import annotations

import pytest

pytest.importorskip("jax")
pytest.importorskip("torch")
pytest.importorskip("mpi4py")


from tests.benchmarks import jax as benchmark
from tests.benchmarks.jax_contestants import CONTESTANTS, FLAT
from tests.benchmarks.training import table


def test_contestants_are_compared_with_the_best_peer() -> None:
    seconds = {"none": [1.0], "mpi-flat": [3.0], "gloo-psum": [2.0], "wfbp-auto": [1.5]}
    rows = table({"seconds": seconds, "cpu_seconds": seconds, "reports": {}}, benchmark.OTHERS)
    assert [row[3] for row in rows] == ["0.500", "1.500", "1.000", "0.750"]


def test_reference_always_competes() -> None:
    options = benchmark.arguments(["--contestants", "wfbp-auto,none", "--models", "gpt"])
    assert options.contestants == [FLAT, "wfbp-auto", "none"]
    assert set(benchmark.arguments([]).contestants) == set(CONTESTANTS)
    with pytest.raises(SystemExit):
        benchmark.arguments(["--models", "alexnet"])
