"""Trials: which of several plans is fastest in reality.

A trial goes in rounds. In each, every plan of :attr:`plans` runs for :attr:`num_steps` steps; then
the ranks exchange their times, and :meth:`Trial.conclude` ends the trial with the fastest plan, or
begins another round, perhaps of fewer plans.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from wfbp.core.elimination import Rule, SuccessiveElimination
from wfbp.core.plan import Plan
from wfbp.core.planners.dear import ThresholdSearch

_NOISE = 0.01
_NUM_SEARCHED = 10
_MOST_COLD = 3
_LIMITS = (0.15, 0.1, 0.08, 0.06)
"""By round: who is slower than the fastest by more is dropped where steps are limited. By
simulation, docs/benchmarks/regret.md."""
_LEAST_NARROWED = 3
"""But one round alone does not decide."""

Times = Sequence[Sequence[float]]
"""Seconds per iteration: by plan of the round, then by step."""


class Candidate:
    """A plan, and the seconds that its iterations took."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._rounds: list[list[float]] = []

    def add(self, times_s: Sequence[float]) -> None:
        """Take in a round, of at least one iteration."""
        self._rounds.append(list(times_s))

    @property
    def num_rounds(self) -> int:
        """Rounds taken in."""
        return len(self._rounds)

    @property
    def measured_s(self) -> float:
        """The median over rounds of their medians: one that was disturbed changes little."""
        return statistics.median(map(statistics.median, self._rounds))


Forecast = Callable[[Sequence[Candidate]], Sequence[float]]


class Trial(Protocol):
    """A comparison of plans. Used by one thread."""

    plans: list[Plan]
    num_steps: int
    candidates: list[Candidate]
    spent_s: float
    """Seconds that its rounds took, steps that do not count included, about."""
    undecided: list[Plan]
    """Of a trial that is over, plans that might be as fast as the chosen one."""

    def conclude(self, ranks: Sequence[Times]) -> Plan | None:
        """End a round, given each rank's times: the fastest plan, or None for another round."""


def num_cold(num_steps: int) -> int:
    """Steps behind a change of plans that do not count, as they find cold memory; more where steps
    are short, and so many are measured."""
    return max(1, min(_MOST_COLD, num_steps // 2))


class EliminationTrial:
    """Drops the slower plans from round to round: see :mod:`wfbp.core.elimination`.

    The trial ends when :class:`~wfbp.core.elimination.SuccessiveElimination` says so (one plan is
    left, none can be faster by more than its margin, or it has had its rounds), or when the steps
    and seconds are used up. Rounds are short, and every other one runs in the reverse order, so
    that a machine that slowly changes favours no plan. Differences within noise decide nothing: see
    :func:`_preferred`.

    Args:
        plans: at least one; the first is in use.
        num_steps: for each plan in two rounds.
        forecast: predicts the seconds per iteration of each candidate, given what was measured so
            far. Where plans have to leave early, that counts as one more round.
        most_steps: of the whole trial, about; at least the first round is run. Where that is too
            few for all plans, those that seem slow by the first rounds leave early, and become
            :attr:`undecided`.
        most_s: seconds of the whole trial, about, if those are more steps.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        num_steps: int,
        most_steps: int | None = None,
        most_s: float = 0.0,
        forecast: Forecast = lambda _: (),
    ) -> None:
        self.candidates = [Candidate(plan) for plan in plans]
        self._forecast = forecast
        self.num_steps = (num_steps + 1) // 2
        self.undecided: list[Plan] = []
        self._steps_left = most_steps
        self._seconds_left = most_s
        self.spent_s = 0.0
        # Where few steps are wanted, or affordable because they are long, rounds are few, too.
        rule = Rule()
        most = min(rule.most_rounds, 2 * num_steps)
        least = min(rule.least_rounds, most)
        rule = replace(rule, least_rounds=least, most_rounds=most)
        self._rule = rule
        self._comparison = SuccessiveElimination(len(plans), rule)
        self._forward = False
        self._begin()

    def conclude(self, ranks: Sequence[Times]) -> Plan | None:
        times = _slowest(ranks)
        if not self._forward:
            times.reverse()
        running = [self.candidates[k] for k in self._comparison.alive]
        for candidate, seconds in zip(running, times, strict=True):
            candidate.add(seconds)
        decided = self._comparison.add(times)
        each_s = [statistics.median(seconds) * self._num_run for seconds in times]
        self.spent_s += sum(each_s)
        self._seconds_left -= sum(each_s)
        if not decided and self._affordable(each_s):
            self._begin()
            return None
        equal = [self.candidates[k] for k in self._comparison.equal]
        chosen = _preferred(equal, self.candidates[0])
        if not decided:
            alive = [self.candidates[k].plan for k in self._comparison.alive]
            self.undecided[:0] = [plan for plan in alive if plan is not chosen]
        return chosen

    @property
    def _num_run(self) -> int:
        """Steps of a plan in a round."""
        return self.num_steps + num_cold(self.num_steps)

    def _affordable(self, each_s: Sequence[float]) -> bool:
        """Whether the steps and seconds left suffice for another round, if need be with fewer
        plans.

        ``each_s`` is how long each plan of the round took.
        """
        if self._steps_left is None:
            return True
        self._steps_left -= self._num_run * len(each_s)
        num_affordable = max(
            self._steps_left // self._num_run,
            int(self._seconds_left / max(statistics.fmean(each_s), 1e-9)),
        )
        num_rounds = self._comparison.num_rounds
        num_wanted = len(self._comparison.alive) * max(1, self._rule.least_rounds - num_rounds)
        if num_affordable >= num_wanted:
            return True
        if num_affordable < 2:
            return False
        limit = _LIMITS[min(num_rounds, len(_LIMITS)) - 1]
        dropped = self._comparison.narrow(
            limit, num_affordable, _LEAST_NARROWED, self._forecast(self.candidates)
        )
        self.undecided += [self.candidates[k].plan for k in dropped]
        return len(self._comparison.alive) > 1

    def _begin(self) -> None:
        self._forward = not self._forward
        self.plans = [self.candidates[k].plan for k in self._comparison.alive]
        if not self._forward:
            self.plans.reverse()


class SearchTrial:
    """Finds DeAR's threshold by Bayesian optimisation over measured iterations.

    ``make`` makes a plan with a threshold; ``first_bytes`` is tried first. Needs the ``search``
    extra.
    """

    def __init__(self, make: Callable[[int], Plan], first_bytes: int, num_steps: int) -> None:
        self.candidates: list[Candidate] = []
        self.undecided: list[Plan] = []
        self.spent_s = 0.0
        self.num_steps = num_steps
        self._make = make
        self._search = ThresholdSearch(first_bytes)
        self._begin()

    def conclude(self, ranks: Sequence[Times]) -> Plan | None:
        latest = self.candidates[-1]
        (times,) = _slowest(ranks)
        latest.add(times)
        self._search.tell(latest.measured_s)
        if len(self.candidates) < _NUM_SEARCHED:
            self._begin()
            return None
        limit_s = (1 + _NOISE) * min(c.measured_s for c in self.candidates)
        return _preferred([c for c in self.candidates if c.measured_s <= limit_s])

    def _begin(self) -> None:
        self.candidates.append(Candidate(self._make(self._search.ask())))
        self.plans = [self.candidates[-1].plan]


def _slowest(ranks: Sequence[Times]) -> list[list[float]]:
    """A step takes as long as on the slowest rank."""
    return [
        [max(times) for times in zip(*per_rank, strict=True)]
        for per_rank in zip(*ranks, strict=True)
    ]


def _preferred(equal: Sequence[Candidate], incumbent: Candidate | None = None) -> Plan:
    """The plan to run, of those that are equally fast within noise.

    The plan in use stays; else the one with the fewest overlapping groups is taken, whose costs
    outside of the trial are least, and of these the first, which was predicted to be the fastest.
    """
    if incumbent is not None and incumbent in equal:
        return incumbent.plan
    return min(equal, key=lambda c: len(c.plan.groups) if c.plan.overlap else 1).plan
