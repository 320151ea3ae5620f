"""Local steps: as calculated in one process, with the same common parameters on every rank."""

from __future__ import annotations

import re

import pytest

from tests.parallel.runs import outcome

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(300)]


MISUSED = [
    r"synchronize\(\) within LocalSteps.averaged",
    r"load_state_dict\(\) within",
    r"averaged\(\) within",
    "has LocalSteps, which average parameters instead",
    r"differs in delay: found \[0\], expected \[1\]",
    "differs in every, fragments, delay, parameters",
    "have changed since LocalSteps was made",
    "no error",
]
ON_OPEN_MPI = pytest.param(3, 2, "openmpi", marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("ranks", "fragments", "mpi"), [(1, 1, "mpich"), (2, 1, "mpich"), (3, 2, "mpich"), ON_OPEN_MPI]
)
def test_local_steps(ranks: int, fragments: int, mpi: str) -> None:
    found = outcome("torch/local_steps", ranks, fragments, mpi=mpi, timeout=280.0)
    assert found.run.rc == 0, found.run
    for rank, told in enumerate(found.ranks):
        assert max(told["differ"].values()) < 1e-5, (rank, told["differ"])
        assert told["as plain"] < 1e-6, rank
        assert all(each["resumed equal"] for each in told["ends"].values()), (rank, told["ends"])
        if ranks > 1:
            assert "DisagreementError" in told["other values"], (rank, told["other values"])
            assert "broadcast_parameters() makes equal" in told["other values"]
            assert "ranks disagree on outer" in told["other outer"]
            for pattern, text in zip(MISUSED, told["misused"], strict=True):
                assert re.search(pattern, text), (rank, told["misused"])
            assert "must have taken as many steps" in told["fewer steps"], told["fewer steps"]
    for name in found.ranks[0]["ends"]:
        ends = [told["ends"][name] for told in found.ranks]
        assert len({each["own"] for each in ends}) == ranks, "ranks train by themselves"
        for how in ("common", "from rank 0"):
            assert len({digest for each in ends for digest in each[how]}) == 1, (name, how)
