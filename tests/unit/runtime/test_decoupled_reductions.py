"""Reductions by plans that decouple: shards, gathers that cross the border, and changing plans."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.emulated_link import EmulatedLink
from tests.support.random_programs import update_at_random
from tests.support.ranks import QUICK, all_well, run_ranks
from tests.support.trainer import Trainer, address, make_specs
from wfbp.config import Config
from wfbp.core.cost import Costs, PiecewiseCost
from wfbp.core.plan import Plan
from wfbp.core.planners import DECOUPLED_SCHEDULES as DECOUPLED
from wfbp.core.planners import plan as make_plan
from wfbp.core.trace import Trace
from wfbp.core.types import Op, Operation
from wfbp.runtime.arguments import ReducerOptions
from wfbp.runtime.buffers import shard_range
from wfbp.runtime.reducer import Reducer
from wfbp.runtime.runtime import JobRuntime, Runtime
from wfbp.runtime.tuning.network import NetworkCosts
from wfbp.runtime.tuning.trial import Trial


class Updater(Trainer):
    """A trainer with parameters: each rank subtracts what it has of the gradients."""

    close: dict[str, float] = {"rel": 1e-6}  # noqa: RUF012

    def __init__(self, runtime: Runtime, sizes: list[int], **options: Any) -> None:
        super().__init__(runtime, make_specs(sizes), decouples=True, **options)
        self.params = [np.zeros(n) for n in sizes]

    def step(self, wanted: object = None, where: str = "", whole: bool = False) -> None:
        """Update whole tensors wholly and shards shard by shard, and let them be gathered."""
        engine = self.engine
        for index, slot in enumerate(engine.synchronize(whole)):
            start, stop = shard_range(engine.specs[index], self.rank, self.size)
            if index not in engine.gathers:
                start, stop = 0, self.specs[index].nbytes
            if slot is None:
                continue
            values = slot.data.view(np.float64)
            part = self.params[index][start // 8 : stop // 8]
            part -= values[start // 8 : stop // 8] if slot.whole else values
        engine.gathers.send([address(p) for p in self.params], self.params)

    def read(self, index: int, wanted: float, where: str) -> None:
        """A parameter, as forward reads it."""
        self.engine.gathers.await_tensor(index)
        assert self.params[index] == pytest.approx(wanted, **self.close), where

    def finish(self) -> None:
        self.engine.gathers.flush()


@settings(max_examples=15)
@given(
    size=st.integers(2, 4),
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=7),
    schedule=st.sampled_from(["auto", *DECOUPLED]),
    op=st.sampled_from([Op.AVERAGE, Op.SUM]),
    wire=st.sampled_from(["", "float16", "bfloat16"]),
    seed=st.integers(0, 2**32),
)
def test_random_programs(
    size: int, sizes: list[int], schedule: str, op: Op, wire: str, seed: int
) -> None:
    """Compressed, the averages of whole numbers are rounded once."""

    def body(runtime: Runtime) -> None:
        updater = Updater(runtime, sizes, schedule=schedule, op=op, wire=wire)
        if wire:
            updater.close = {"abs": 30 * 9 * 2.0 ** (-11 if wire == "float16" else -8)}
        update_at_random(updater, seed, 30, op)

    all_well(run_ranks(size, body, QUICK))


def test_what_is_gathered_at_the_end_arrives() -> None:
    """A rank that leaves at once still serves the others its shards."""

    def body(runtime: Runtime) -> list[float]:
        updater = Updater(runtime, [5, 40], schedule="ps_layerwise")
        for _ in range(8):
            updater.zero()
            for k in range(2):
                updater.accumulate(k, 1.0)
            updater.step()
        if runtime.rank == 0:
            return []
        runtime.shutdown()
        updater.engine.gathers.flush()
        return [float(v) for p in updater.params for v in p]

    assert all_well(run_ranks(3, body)) == [[], [-8.0] * 45, [-8.0] * 45]


def test_an_engine_that_is_closed_serves_its_gathers_first() -> None:
    def body(runtime: Runtime) -> float:
        updater = Updater(runtime, [40], schedule="ps")
        for _ in range(8):
            updater.zero()
            updater.accumulate(0, 1.0)
            updater.step()
        if runtime.rank == 0:
            updater.engine.close()
            runtime.channel.exchange(b"", "after it")
            return 0.0
        runtime.channel.exchange(b"", "after it")
        updater.read(0, -8.0, "behind it")
        updater.engine.close()
        return -8.0

    assert all_well(run_ranks(2, body)) == [0.0, -8.0]


def test_gradients_forgotten_behind_a_gather_tell_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step begins anew where they are forgotten; what was gathered before is no part of it.

    It would be taken from times that do not contain it: all gradients came before the step began.
    """
    slow = PiecewiseCost(((1.0, 0.02), (100.0, 0.02)))
    quick = PiecewiseCost(((1.0, 1e-4), (100.0, 1e-4)))
    monkeypatch.setattr(NetworkCosts, "measure", lambda *_: Costs(quick, quick, slow))
    others = {Operation.REDUCE_SCATTER: quick, Operation.ALL_GATHER: slow}
    config = replace(Config(), warmup_steps=1, profile_steps=2, replan_threshold=0.0)
    runtime = JobRuntime(EmulatedLink(quick, size=2, others=others), config)
    specs = make_specs([5, 6, 7])
    arrays = [np.zeros(spec.numel) for spec in specs]
    phases = []
    try:
        engine = Reducer(runtime, specs, ReducerOptions("independent", 1, decouples=True))
        for _ in range(8):
            for forgotten in (True, False):
                for index in (2, 1, 0):
                    engine.mark_ready(index, address(arrays[index]), None)
                if forgotten:
                    engine.discard()
            engine.synchronize(whole=False)
            engine.gathers.send([address(array) for array in arrays], arrays)
            if engine.profiling:
                engine.gathers.flush()
            phases.append(engine.report()["phase"])
        assert len(engine.tuner.plan.tensors) == len(specs)
        engine.gathers.flush()
    finally:
        runtime.shutdown()
    assert phases == ["profile"] * 3 + ["installed"] * 5


@pytest.mark.parametrize("chosen", [0, -1])
def test_what_plans_leave_behind_is_given_back_once_the_last_is_in_use(
    monkeypatch: pytest.MonkeyPatch, chosen: int
) -> None:
    """Also where the trial ends with the plan that it tried last, so that nothing is installed."""
    at: list[str] = []
    monkeypatch.setattr(Trial, "narrow", lambda trial, _: trial.plans[chosen])

    def body(runtime: Runtime) -> list[str]:
        if runtime.rank == 0:
            monkeypatch.setattr(
                "wfbp.runtime.reducer.give_back_freed_memory", lambda: at.append(phases[-1])
            )
        updater = Updater(runtime, [5, 6, 7], schedule="auto")
        phases = []
        while phases[-3:] != ["installed"] * 3:
            phases.append(updater.engine.report()["phase"])
            updater.zero()
            for k in (2, 1, 0):
                updater.accumulate(k, 1.0)
            updater.step()
        updater.engine.gathers.flush()
        assert "trial" in phases
        return phases

    all_well(run_ranks(2, body, replace(QUICK, replan_threshold=0.0)))
    assert set(at) == {"installed"}
    assert len(at) == 2, "by each rank"


@pytest.mark.parametrize("winner", ["layerwise", "independent"])
def test_a_trial_leaves_no_memory_of_gradients_that_its_winner_does_not_gather(
    monkeypatch: pytest.MonkeyPatch, winner: str
) -> None:
    """Also where it ends with the plan that it tried last, so that nothing is installed."""

    def candidates(trace: Trace, costs: Costs, *_: object) -> list[Plan]:
        return [make_plan(schedule, trace, costs) for schedule in ("independent", "layerwise")]

    def chosen(trial: Trial, _: object) -> Plan | None:
        return next(plan for plan in trial.plans if plan.schedule == winner)

    monkeypatch.setattr("wfbp.runtime.tuning.tuner.auto_candidates", candidates)
    monkeypatch.setattr(Trial, "narrow", chosen)

    def body(runtime: Runtime) -> int:
        trainer = Trainer(runtime, make_specs([5, 6, 7]), schedule="auto", decouples=True)
        engine, phases = trainer.engine, []
        storages: dict[int, weakref.ref[Any]] = {}
        while phases[-3:] != ["installed"] * 3:
            phases.append(engine.report()["phase"])
            trainer.zero()
            for k in (2, 1, 0):
                trainer.accumulate(k, 1.0)
            reduced = engine.synchronize(whole=False)
            if not engine.decoupled:
                continue
            for slot in engine.gathers.gather_gradients(reduced):
                assert slot is not None
                storages[slot.address] = weakref.ref(slot.data)
            engine.gathers.flush()
            del reduced, slot
        assert "trial" in phases
        assert engine.tuner.plan.schedule == winner
        assert storages
        gc.collect()
        return sum(storage() is not None for storage in storages.values())

    kept = all_well(run_ranks(2, body, replace(QUICK, replan_threshold=0.0)))
    assert kept == [0 if winner == "layerwise" else 3] * 2
