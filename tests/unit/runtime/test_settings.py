"""Settings by which the ranks of a job go through the same states at the same steps."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.local import LocalBackend
from tests.support.ranks import QUICK, all_well, measure_costs, run_ranks
from wfbp.comm.arrays import Buffer
from wfbp.comm.backend import Backend, Work
from wfbp.core.types import Op
from wfbp.errors import DisagreementError, PeerError, StallError, WfbpError
from wfbp.runtime.process import SHARED, check_settings
from wfbp.runtime.runtime import Runtime


@pytest.mark.parametrize("name", SHARED)
def test_ranks_that_differ_are_told_which_setting(name: str, tmp_path: Path) -> None:
    own = getattr(QUICK, name)
    if name == "record":
        other: object = str(tmp_path / "timelines")
    else:
        other = (7, 12) if name == "record_steps" else own * 2 or 0.5
    results = run_ranks(3, check_settings, configs={1: replace(QUICK, **{name: other})})
    for rank, result in enumerate(results):
        assert isinstance(result, DisagreementError)
        assert f"rank {rank} of 3: init()" in str(result)
        assert f"WFBP_{name.upper()} (ranks 0, 2: {shown(own)}" in str(result)
        assert f"rank 1: {shown(other)})" in str(result)


def shown(value: object) -> str:
    """A setting as it is written in the environment."""
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)


def test_what_concerns_one_rank_may_differ() -> None:
    other = replace(QUICK, stall_warning_s=9.0, log_level="error", timeout_s=30.0)
    all_well(run_ranks(2, check_settings, configs={1: other}))


def test_the_others_hear_of_a_problem_of_some_ranks() -> None:
    problems = {1: ValueError("WFBP_A='x': expected 1 or 0"), 2: TypeError("config is 3")}
    results = run_ranks(4, lambda runtime: check_settings(runtime, problems.get(runtime.rank)))
    assert [type(result) for result in results] == [PeerError, ValueError, TypeError, PeerError]
    assert str(results[0]) == "rank 0 of 4: init(): rank 1: WFBP_A='x': expected 1 or 0"


def test_a_run_that_cannot_be_recorded(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.touch()
    for folder in (taken, taken / "below"):
        other = replace(QUICK, record=str(folder))
        here, there = run_ranks(2, check_settings, configs={0: other})
        assert isinstance(here, ValueError)
        assert f"WFBP_RECORD is {str(folder)!r}, but it cannot be made" in str(here)
        assert isinstance(there, PeerError)
        assert str(there) == f"rank 1 of 2: init(): rank 0: {here}"
    fine = replace(QUICK, record=str(tmp_path / "a" / "b"))
    all_well(run_ranks(2, check_settings, fine))


# While the network is measured.


def test_a_measurement_hears_of_a_rank_that_failed() -> None:
    def body(runtime: Runtime) -> None:
        if runtime.rank == 1:
            runtime.fail_job("ValueError: no data")
            return
        measure_costs(runtime, 1000)

    results = run_ranks(2, body, replace(QUICK, timeout_s=300.0))
    assert isinstance(results[0], PeerError)
    assert str(results[0]) == "rank 0 of 2: rank 1 failed: ValueError: no data"


def test_a_measurement_does_not_wait_for_ever() -> None:
    over = threading.Event()

    def body(runtime: Runtime) -> None:
        if runtime.rank:
            over.wait(60.0)
            return
        try:
            with pytest.raises(StallError, match="measuring the network's"):
                measure_costs(runtime, 1000)
            with pytest.raises(StallError):  # it has ended the runtime
                runtime.channel.exchange(b"", "next")
        finally:
            over.set()

    all_well(run_ranks(2, body, configs={0: replace(QUICK, timeout_s=0.6)}))


def test_what_fails_below_a_measurement_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Backend, buffer: Buffer, dtype: str, op: Op) -> Work[None]:
        raise WfbpError("the cable is gone")

    monkeypatch.setattr(LocalBackend, "all_reduce", broken)

    def body(runtime: Runtime) -> None:
        with pytest.raises(WfbpError, match="the cable is gone"):
            measure_costs(runtime, 1000)
        runtime.channel.exchange(np.zeros(1).tobytes(), "goes on")

    all_well(run_ranks(2, body))


@pytest.mark.parametrize("shared", [True, False])
def test_ranks_yield_to_those_that_share_their_core(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that are bound to different cores can spin."""
    mine = threading.local()
    monkeypatch.setattr("wfbp.runtime.process.own_cores", lambda: [0 if shared else mine.rank])
    monkeypatch.setattr("wfbp.runtime.process.num_cores", lambda: 1)

    def is_crowded(runtime: Runtime) -> bool:
        mine.rank = runtime.rank
        check_settings(runtime)
        return runtime.thread.loop.waiter.crowded

    assert run_ranks(2, is_crowded) == [shared, shared]
