"""Engines whose plans decouple: shards, gathers that cross the border, and changing plans."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.ranks import QUICK, all_well, run_ranks
from tests.unit.trainer import Trainer, address, make_specs, mean
from wfbp.core.types import Op
from wfbp.runtime.candidates import DECOUPLED
from wfbp.runtime.runtime import Runtime


class Updater(Trainer):
    """A trainer with parameters: each rank subtracts what it has of the gradients."""

    def __init__(self, runtime: Runtime, sizes: list[int], **options: Any) -> None:
        super().__init__(runtime, make_specs(sizes), decouples=True, **options)
        self.params = [np.zeros(n) for n in sizes]

    def step(self, whole: bool = False) -> None:
        """Update whole tensors wholly and shards shard by shard, and let them be gathered."""
        engine = self.engine
        for index, slot in enumerate(engine.synchronize(whole)):
            start, stop = engine.shard_ranges[index]
            if not engine.decouples_tensor(index):
                start, stop = 0, self.specs[index].nbytes
            if slot is None:
                continue
            values = slot.data.view(np.float64)
            part = self.params[index][start // 8 : stop // 8]
            part -= values[start // 8 : stop // 8] if slot.whole else values
        engine.gather([address(p) for p in self.params], self.params)

    def read(self, index: int) -> np.ndarray[Any, Any]:
        """A parameter, as forward reads it."""
        self.engine.await_tensor(index)
        return self.params[index]


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(
    size=st.integers(2, 4),
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=7),
    schedule=st.sampled_from(["auto", *DECOUPLED]),
    op=st.sampled_from([Op.AVERAGE, Op.SUM]),
    seed=st.integers(0, 2**32),
)
def test_random_programs(size: int, sizes: list[int], schedule: str, op: Op, seed: int) -> None:
    """Any tensors in any order, read in any order, discarded, missing; whole or by shards."""
    chance = random.Random(seed)
    steps = [
        {
            "discard": chance.random() < 0.15,
            "whole": chance.random() < 0.2,
            "read": chance.sample(range(len(sizes)), chance.randint(0, len(sizes))),
            "grads": [[chance.random() < 0.8 for _ in sizes] for _ in range(size)],
            "values": [[float(chance.randint(-9, 9)) for _ in sizes] for _ in range(size)],
        }
        for _ in range(30)
    ]

    def body(runtime: Runtime) -> None:
        updater = Updater(runtime, sizes, schedule=schedule, op=op)
        order = random.Random(seed + runtime.rank)
        expected = [0.0] * len(sizes)
        for step in steps:
            for k in step["read"]:
                assert updater.read(k) == pytest.approx(expected[k])
            if step["discard"]:
                for k in order.sample(range(len(sizes)), len(sizes)):
                    updater.accumulate(k, 1e6)
            updater.zero()
            for k in order.sample(range(len(sizes)), len(sizes)):
                if step["grads"][runtime.rank][k]:
                    updater.accumulate(k, step["values"][runtime.rank][k])
            updater.step(step["whole"])
            for k in range(len(sizes)):
                rows = [step["values"][r][k] if step["grads"][r][k] else None for r in range(size)]
                expected[k] -= (mean(rows) or 0.0) * (size if op is Op.SUM else 1)
        updater.engine.flush()
        for k, value in enumerate(expected):
            assert updater.params[k] == pytest.approx(value)

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
        updater.engine.flush()
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
            runtime.exchange(b"", "after it")
            return 0.0
        runtime.exchange(b"", "after it")
        value = updater.read(0)
        assert (value == -8.0).all()
        updater.engine.close()
        return float(value[0])

    assert all_well(run_ranks(2, body)) == [0.0, -8.0]
