"""Trials: the fastest plan wins, and noise decides nothing."""

from __future__ import annotations

import random
from dataclasses import replace

from wfbp.core.plan import Group, Plan
from wfbp.core.types import TensorSpec
from wfbp.runtime.trial import Elimination

SPECS = tuple(TensorSpec(f"t{k}", (4,), "float32") for k in range(4))


def cut(*sizes: int) -> Plan:
    """A plan whose groups have so many tensors."""
    left = iter(reversed(range(4)))
    return Plan("cut", SPECS, tuple(Group(tuple(next(left) for _ in range(n))) for n in sizes))


COARSE, MIDDLE, FINE = cut(4), cut(2, 2), cut(1, 1, 1, 1)


def winner(seconds: dict[Plan, float], noise: float, seed: int = 1) -> Plan:
    """What a trial chooses where iterations vary by up to this factor, on two ranks."""
    chance = random.Random(seed)
    trial = Elimination(list(seconds), num_steps=6)
    chosen = None
    while chosen is None:
        times = [
            [seconds[plan] * (1 + noise * chance.random()) for _ in range(trial.num_steps)]
            for plan in trial.plans
        ]
        chosen = trial.conclude([times, times])
    return chosen


def test_the_fastest_wins() -> None:
    assert winner({MIDDLE: 1.0, FINE: 0.8, COARSE: 0.9}, noise=0.02) is FINE


def test_within_noise_the_plan_in_use_stays() -> None:
    for seed in range(10):
        assert winner({FINE: 1.0, MIDDLE: 0.995, COARSE: 0.995}, noise=0.0, seed=seed) is FINE


def test_within_noise_the_fewest_groups_win() -> None:
    found = [winner({MIDDLE: 2.0, FINE: 1.0, COARSE: 1.0}, 0.05, seed) for seed in range(20)]
    assert found.count(COARSE) > 15


def test_within_noise_groups_that_do_not_overlap_count_as_one() -> None:
    """And the first of equals wins."""
    late = replace(FINE, overlap=False)
    found = [winner({MIDDLE: 2.0, late: 1.0, COARSE: 1.0}, 0.05, seed) for seed in range(20)]
    assert found.count(late) > 15
    found = [winner({MIDDLE: 2.0, COARSE: 1.0, late: 1.0}, 0.05, seed) for seed in range(20)]
    assert found.count(COARSE) > 15


def test_what_is_slower_than_noise_loses() -> None:
    for seed in range(10):
        assert winner({COARSE: 1.3, FINE: 1.0}, noise=0.2, seed=seed) is FINE
