"""What PyTorch programs do, on two and three ranks, with and without changing plans."""

from __future__ import annotations

import pytest

from tests.parallel.programs import torch_rebuilding
from tests.parallel.programs.torch_program import check
from tests.parallel.runs import outcome

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(200)]

MODES = [
    (2, "overlap"),
    (3, "changing"),
    (2, "mixed"),
    (3, "ps_layerwise"),
]

ALONE = ("bad_arguments", "scheduler_made_before_wrapping", "clipping", "scaler_naive", "lbfgs")
"""Checks that also run on one rank."""


def passes(ranks: int, mode: str, name: str, *only: str, program: str = "torch_program") -> None:
    found = outcome(program, ranks, mode, *only, timeout=180)
    for rank, results in enumerate(found.ranks):
        assert results is not None, found.run
        assert name in results, found.run
        assert not results[name], f"rank {rank}: {results[name]}"
    assert found.run.rc == 0, found.run


@pytest.mark.parametrize("name", check.all)
@pytest.mark.parametrize(("ranks", "mode"), MODES)
def test_program(ranks: int, mode: str, name: str) -> None:
    passes(ranks, mode, name)


@pytest.mark.parametrize("name", torch_rebuilding.check.all)
def test_rebuilding(name: str) -> None:
    passes(3, "ps_layerwise", name, program="torch_rebuilding")


@pytest.mark.parametrize("name", ALONE)
def test_on_one_rank(name: str) -> None:
    passes(1, "overlap", name, *ALONE)
