"""Nothing is left of a job that has ended, nor of a runtime that was shut down."""

from __future__ import annotations

import os

import pytest

from tests.parallel.runs import outcome

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(240)]


@pytest.mark.parametrize(("mpi", "ranks"), [("mpich", 2), ("openmpi", 2)])
def test_maps_and_descriptors_do_not_outlive_the_runtime(mpi: str, ranks: int) -> None:
    found = outcome("lifetime", ranks, "cycles", mpi=mpi, timeout=220, preloaded="torch")
    assert found.run.rc == 0, found.run
    for counts in found.ranks:
        # The first cycles load what is loaded once.
        assert counts[2][0] == counts[-1][0], counts
        # A thread's stack may come or go, or memory of the C library.
        assert counts[-1][1] - counts[2][1] < 4, counts


@pytest.mark.parametrize("how", ["raise", "thread", "after", "kill"])
def test_a_job_that_fails_leaves_no_shared_memory(how: str) -> None:
    found = outcome("lifetime", 2, how, timeout=100, env=(("WFBP_ABORT_GRACE_S", "1"),))
    assert found.run.rc not in (0, None), found.run
    for segments in found.ranks:
        assert segments, "MPICH has other files now"
        assert not any(map(os.path.exists, segments))
