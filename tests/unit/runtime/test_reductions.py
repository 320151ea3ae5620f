"""Reductions by ranks that are threads: what is reduced, what is lost, what is refused."""

from __future__ import annotations

import time
import weakref
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.random_programs import reduce_at_random
from tests.support.ranks import QUICK, all_well, run_ranks
from tests.support.trainer import Trainer, make_specs
from wfbp.config import Config
from wfbp.errors import PeerError
from wfbp.runtime.runtime import Runtime

STEADY = Config(schedule="layerwise", warmup_steps=10**6, timeout_s=60.0)
"""The same overlapped plan at every step."""


@settings(max_examples=25)
@given(
    size=st.integers(2, 4),
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=7),
    schedule=st.sampled_from(["auto", "oasr", "mgwfbp", "layerwise", "single", "threshold"]),
    to_none=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_random_programs(
    size: int, sizes: list[int], schedule: str, to_none: bool, seed: int
) -> None:
    def body(runtime: Runtime) -> None:
        trainer = Trainer(runtime, make_specs(sizes), schedule=schedule)
        reduce_at_random(trainer, seed, 25, to_none)

    all_well(run_ranks(size, body))


@pytest.mark.parametrize("config", [QUICK, STEADY], ids=["changing", "steady"])
def test_a_tensor_that_joins_is_reduced_at_once(config: Config) -> None:
    """For every step at which it may join: also the steps at which the plan changes."""
    for joins in range(9):

        def body(runtime: Runtime, joins: int = joins) -> None:
            trainer = Trainer(runtime, make_specs([3, 4]), active=[True, False])
            for step in range(12):
                trainer.zero()
                trainer.accumulate(0, float(step + runtime.rank))
                late = step >= joins and (step > joins or runtime.rank == 1)
                if late:
                    trainer.accumulate(1, 10.0 * step, announce=step % 2 == 0)
                found = trainer.synchronize()
                assert found[0] == step + 0.5
                if step == joins:
                    assert found[1] == 5.0 * step
                else:
                    assert found[1] == (10.0 * step if step > joins else None)
            assert trainer.engine.report()["num_tensors"] == 2

        all_well(run_ranks(2, body, config))


@pytest.mark.parametrize("wire", ["", "float16"])
def test_a_gradient_may_grow_where_the_last_average_lay(wire: str) -> None:
    """Also while it is sent, and on some ranks only; compressed, by numbers that float16 holds."""

    def body(runtime: Runtime) -> None:
        specs = make_specs([3, 4, 5])
        trainer = Trainer(runtime, specs, schedule="layerwise", wire=wire)
        for step in range(24):
            trainer.zero(to_none=False)
            for k in (2, 1, 0):
                trainer.accumulate(k, 1.0 + runtime.rank)
            more = step % 12 in (5, 11) and (step < 12 or runtime.rank == 1)
            for k in (2, 0) if more else ():
                trainer.accumulate(k, 4.0)
            grown = 0.0 if step % 12 not in (5, 11) else 4.0 if step < 12 else 2.0
            assert trainer.synchronize() == [1.5 + grown, 1.5, 1.5 + grown]

    all_well(run_ranks(2, body, STEADY))


def test_discarded_gradients_are_let_go() -> None:
    """Though other ranks take part in none of these steps."""

    def body(runtime: Runtime) -> int:
        trainer, most = Trainer(runtime, make_specs([3, 4, 5]), schedule="layerwise"), 0
        for step in range(3):
            alive: list[weakref.ref[Any]] = []
            for turn in range(40 if runtime.rank == 0 else 0):
                for k in (2, 1, 0):
                    trainer.accumulate(k, 1e3)
                    alive.append(weakref.ref(trainer.grads[k]))
                if turn % 10 == 0:
                    time.sleep(0.01)  # what has appeared is sent
                trainer.zero()
                most = max(most, sum(grad() is not None for grad in alive))
            for k in (2, 1, 0):
                trainer.accumulate(k, 1.0 + runtime.rank + step)
            assert trainer.synchronize() == [1.5 + step] * 3
            trainer.zero()
            assert most <= 2 * 3, most
        return most

    assert max(all_well(run_ranks(2, body, STEADY))) > 0


@pytest.mark.parametrize("announce", [True, False])
@pytest.mark.parametrize(("one", "other"), [(0, 2), (2, 0)])
def test_a_gradient_in_the_slot_of_another_tensor_is_refused(
    one: int, other: int, announce: bool
) -> None:
    """Of which the average may have come there by the time that it is sent."""

    def body(runtime: Runtime) -> str:
        trainer = Trainer(runtime, make_specs([4, 0, 4]), schedule="layerwise")
        for _ in range(2):
            for k in (2, 1, 0):
                trainer.accumulate(k, 1.0)
            assert trainer.synchronize() == [1.0, 0.0, 1.0]
            trainer.zero(to_none=False)
        held = trainer.grads[one]
        trainer.grads[one] = trainer.grads[other]
        for k in (2, 1, 0):
            trainer.accumulate(k, 1.0, announce=announce or k != one)
        with pytest.raises(RuntimeError) as caught:
            trainer.synchronize()
        trainer.grads[one] = held
        trainer.zero()
        for k in (2, 1, 0):
            trainer.accumulate(k, 3.0)
        assert trainer.synchronize() == [3.0, 0.0, 3.0]
        return str(caught.value)

    for rank, text in enumerate(all_well(run_ranks(2, body, STEADY))):
        assert f"rank {rank}" in text
        assert f"the gradient of t{one} shares memory with the average of t{other}" in text
        assert "clone()" in text


@pytest.mark.usefixtures("short_grace")
@pytest.mark.parametrize("config", [QUICK, STEADY], ids=["changing", "steady"])
def test_a_rank_that_skips_a_batch_goes_on_with_its_next(config: Config) -> None:
    """And the others miss it at the end."""

    def body(runtime: Runtime) -> list[list[float | None]]:
        trainer = Trainer(runtime, make_specs([3, 4]), schedule="layerwise")
        found = []
        for step in range(6):
            trainer.zero()
            trainer.accumulate(1, float(step))
            trainer.accumulate(0, float(step))
            if runtime.rank == 1 and step == 3:
                continue
            if runtime.rank != 1 and step == 5:
                with pytest.raises(PeerError, match="rank 1 has left"):
                    trainer.synchronize()
                break
            found.append(trainer.synchronize())
        return found

    wanted = [0.0, 1.0, 2.0, (3 + 3 + 4) / 3, (4 + 4 + 5) / 3]
    assert all_well(run_ranks(3, body, config)) == [[[w, w] for w in wanted]] * 3


def test_gradients_that_lie_in_the_buffer_are_sent_again() -> None:
    """Another rank has sent some that it then discards."""

    def body(runtime: Runtime) -> None:
        trainer = Trainer(runtime, make_specs([3, 4]), schedule="layerwise")
        for step in range(4):
            if runtime.rank == 0:
                for k in (1, 0):
                    trainer.accumulate(k, 1e3)
                time.sleep(0.02)
                trainer.zero(to_none=False)
            for k in (1, 0):
                trainer.accumulate(k, 1.0 + runtime.rank + step)
            assert trainer.synchronize() == [1.5 + step] * 2
            trainer.zero(to_none=False)

    all_well(run_ranks(2, body, STEADY))


def test_the_report(caplog: pytest.LogCaptureFixture) -> None:
    """And what rank 0 says at level info."""
    caplog.set_level("INFO", logger="wfbp")

    def body(runtime: Runtime) -> list[dict[str, Any]]:
        trainer = Trainer(runtime, make_specs([3, 4, 5]), schedule="oasr")
        reports = [trainer.engine.report()]
        for _ in range(30):
            trainer.zero()
            for k in (2, 1, 0):
                trainer.accumulate(k, 1.0)
            trainer.synchronize()
        return [*reports, trainer.engine.report()]

    reports = all_well(run_ranks(2, body, replace(QUICK, summary_steps=10)))
    before, after = reports[0]
    assert before["phase"] == "warm-up"
    assert before["steps"] == 0
    assert before["predicted_iteration_s"] is None
    assert before["measured_iteration_s"] is None
    assert after["phase"] == "installed"
    assert after["schedule"] == "oasr"
    assert after["steps"] == 30
    assert after["total_bytes"] == 12 * 8
    assert after["num_tensors"] == 3
    for key in ("predicted_iteration_s", "measured_iteration_s", "lower_bound_s"):
        assert after[key] > 0
    assert after["ratio_to_lower_bound"] == pytest.approx(
        after["measured_iteration_s"] / after["lower_bound_s"]
    )
    assert after["plan_digest"] == reports[1][1]["plan_digest"]
    assert after["plan"].startswith("oasr, ")

    summaries = [r.getMessage() for r in caplog.records if r.name == "wfbp.summary"]
    assert [text.partition(": step ")[2].partition(":")[0] for text in summaries] == [
        "10",
        "20",
        "30",
    ], "on rank 0 only"
    assert "exposed communication" in summaries[-1]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_compressed_gradients_are_rounded_before_and_behind_their_average(dtype: str) -> None:
    """Sums are exact in between; what has 16 bits stays as it is; the report tells of less."""

    def body(runtime: Runtime) -> None:
        trainer = Trainer(runtime, make_specs([3, 4], dtype), schedule="layerwise", wire="bfloat16")
        trainer.accumulate(0, 257.0)  # 256 in bfloat16
        trainer.accumulate(1, 1.0 + 2.0**-7 * runtime.rank)
        kept = dtype == "float16"
        exact = (2 + 2.0**-7) / 2
        assert trainer.synchronize() == ([257.0, exact] if kept else [256.0, 1.0])
        assert trainer.engine.report()["total_bytes"] == 7 * 2

    all_well(run_ranks(2, body, STEADY))
