"""What PyTorch programs do, on two and three ranks, with and without changing plans."""

from __future__ import annotations

import pytest

from tests.parallel.programs import features, programs
from tests.parallel.runs import outcome

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(200)]

RUNS = [(2, "overlap"), (3, "changing")]

ALONE = ("bad_arguments", "scheduler_made_before_wrapping", "clipping", "scaler_naive", "lbfgs")
"""Checks that also run on one rank."""


def check(program: str, ranks: int, mode: str, name: str, *only: str) -> None:
    found = outcome(program, ranks, mode, *only, timeout=180)
    for rank, results in enumerate(found.ranks):
        assert results is not None, found.run
        assert name in results, found.run
        assert not results[name], f"rank {rank}: {results[name]}"
    assert found.run.rc == 0, found.run


@pytest.mark.parametrize("name", features.check.all)
@pytest.mark.parametrize(("ranks", "mode"), RUNS)
def test_feature(ranks: int, mode: str, name: str) -> None:
    check("features", ranks, mode, name)


@pytest.mark.parametrize("name", programs.check.all)
@pytest.mark.parametrize(("ranks", "mode"), RUNS)
def test_program(ranks: int, mode: str, name: str) -> None:
    check("programs", ranks, mode, name)


@pytest.mark.parametrize("name", ALONE)
def test_on_one_rank(name: str) -> None:
    program = "programs" if name in programs.check.all else "features"
    only = [n for n in ALONE if (n in programs.check.all) == (program == "programs")]
    check(program, 1, "overlap", name, *only)
