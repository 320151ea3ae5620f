"""Trials: the fastest plan wins, and noise decides nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from tests.support.machine import Machine
from wfbp.core.plan import Group, Plan
from wfbp.core.types import Operation, TensorSpec
from wfbp.runtime.tuning.trial import Trial

SPECS = tuple(TensorSpec(f"t{k}", (4,), "float32") for k in range(4))
MAX_STEPS = 120


def cut(*sizes: int) -> Plan:
    """A plan whose groups have so many tensors."""
    left = iter(reversed(range(4)))
    return Plan("cut", SPECS, tuple(Group(tuple(next(left) for _ in range(n))) for n in sizes))


COARSE, MIDDLE, THREE, FINE = cut(4), cut(2, 2), cut(1, 1, 2), cut(1, 1, 1, 1)
PLANS = [COARSE, FINE, MIDDLE, cut(1, 3), cut(3, 1), THREE, cut(1, 2, 1), cut(2, 1, 1)]
PLANS += [replace(FINE, overlap=False), replace(COARSE, overlap=False)]


def run(
    plans: Sequence[Plan],
    measure: Callable[[Plan, int], float],
    forecast: Callable[[Plan], float],
) -> tuple[Plan, list[list[Plan]]]:
    """The plan that a trial chooses, and the plans of its rounds.

    ``measure`` gives the seconds of a step by a plan in a round.
    """
    trial = Trial(plans, 2, MAX_STEPS)
    rounds = []
    while True:
        rounds.append(list(trial.plans))
        trial.add_round([[measure(p, len(rounds)) for _ in range(2)] for p in trial.plans])
        forecasts_s = {plan.digest: forecast(plan) for plan in trial.plans}
        if winner := trial.narrow(forecasts_s):
            return winner, rounds


def chosen(seconds: dict[Plan, float]) -> tuple[Plan, list[list[Plan]]]:
    return run(list(seconds), lambda plan, _: seconds[plan], lambda plan: seconds[plan])


def test_the_fastest_wins_and_a_quiet_machine_needs_few_rounds() -> None:
    winner, rounds = chosen({COARSE: 0.9, MIDDLE: 1.0, FINE: 0.8})
    assert winner is FINE
    assert len(rounds) == 3


def test_the_simplest_plan_wins_unless_another_is_faster_by_more_than_the_margin() -> None:
    assert chosen({COARSE: 1.0, MIDDLE: 0.99, FINE: 0.995})[0] is COARSE
    assert chosen({COARSE: 1.0, MIDDLE: 0.97, FINE: 0.995})[0] is MIDDLE


def test_of_plans_within_the_margin_the_one_with_the_fewest_groups_wins() -> None:
    """Whichever comes first; both halves of decoupled groups count."""
    seconds = {FINE: 0.9, THREE: 0.905, MIDDLE: 0.92, COARSE: 1.0}
    assert chosen(seconds)[0] is THREE
    assert chosen(dict(reversed(seconds.items())))[0] is THREE
    halves = (
        Group((3, 2, 1, 0), Operation.REDUCE_SCATTER),
        Group((0, 1, 2, 3), Operation.ALL_GATHER),
    )
    decoupled = Plan("cut", SPECS, halves)
    assert chosen({FINE: 0.9, THREE: 0.905, decoupled: 0.905, COARSE: 1.0})[0] is decoupled


def test_the_simplest_plan_wins_unless_another_is_faster_by_more_than_the_noise() -> None:
    """The second plan is faster in the median, by less than it varies from round to round."""

    def measure(plan: Plan, number: int) -> float:
        return 1.0 if plan is COARSE else 0.98 + 0.2 * ((number * 7) % 5 - 2)

    assert run([COARSE, FINE], measure, lambda plan: 1.0)[0] is COARSE


def test_a_plan_within_the_margin_stays_though_it_is_slower_in_every_round() -> None:
    """Two others, each faster than the other in every second round, keep the trial going."""

    def measure(plan: Plan, number: int) -> float:
        return {COARSE: 1.01, FINE: 1.0}.get(plan, 0.999 + 0.002 * (number % 2))

    winner, rounds = run([COARSE, MIDDLE, FINE], measure, lambda plan: 1.0)
    assert all(COARSE in plans for plans in rounds)
    assert len(rounds) > 4
    assert winner is COARSE


def test_rounds_alternate_in_their_order() -> None:
    _, rounds = chosen({COARSE: 1.0, MIDDLE: 1.0, FINE: 1.0})
    assert rounds[:2] == [[COARSE, MIDDLE, FINE], [FINE, MIDDLE, COARSE]]


def test_a_slow_plan_leaves_early_and_a_trial_keeps_to_its_steps() -> None:
    seconds = {plan: 1.0 + 0.05 * k for k, plan in enumerate(reversed(PLANS))}
    winner, rounds = chosen(seconds)
    assert winner is next(iter(seconds))
    assert list(seconds)[-1] not in rounds[1]
    assert sum(3 * len(plans) for plans in rounds) <= MAX_STEPS


def test_one_plan_needs_one_round() -> None:
    assert chosen({FINE: 1.0}) == (FINE, [[FINE]])


def regret(seed: int, error: float) -> float:
    """The time of the plan chosen from 4 to 10 on a simulated machine, over the least.

    ``error`` is the standard deviation of the forecasts.
    """
    machine = Machine(seed)
    chance = machine.chance
    plans = PLANS[: chance.randint(4, 10)]
    seconds = {plan.digest: math.exp(abs(chance.gauss(0, 0.12))) for plan in plans}
    forecasts = {key: s * math.exp(chance.gauss(0, error)) for key, s in seconds.items()}

    def measure(plan: Plan, _: int) -> float:
        return machine.step(seconds[plan.digest])

    winner, _ = run(plans, measure, lambda plan: forecasts[plan.digest])
    return seconds[winner.digest] / min(seconds.values())


def test_noise_that_machines_have_seldom_decides() -> None:
    """Heavy tails, disturbed stretches and drift; forecasts that are wrong do little harm."""
    for error, share in ((0.05, 0.96), (0.2, 0.95)):
        regrets = [regret(seed, error) for seed in range(200)]
        assert sum(r <= 1.03 for r in regrets) >= share * len(regrets)
        assert max(regrets) < 1.12
