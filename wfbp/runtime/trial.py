"""Trials: which of several plans is fastest in reality.

A trial goes in rounds. In each, every plan of :attr:`plans` runs for :attr:`num_steps` steps; then
the ranks put their times together, and the trial is over or goes on with other plans.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from wfbp.core.plan import Plan
from wfbp.core.planners.threshold_search import ThresholdSearch

_SURVIVE = (1.10, 1.05, 1.0)
_NOISE = 0.01
_NUM_SEARCHED = 10

Times = Sequence[Sequence[float]]
"""Seconds per iteration: by plan of the round, then by step."""


@dataclass
class Candidate:
    """A plan, and the seconds that its iterations took."""

    plan: Plan
    times_s: list[float] = field(default_factory=list)

    @property
    def measured_s(self) -> float:
        """The median."""
        return statistics.median(self.times_s)

    @property
    def noise_s(self) -> float:
        """About the standard error of the median: the quartiles' distance over the root of n."""
        if len(self.times_s) < 2:
            return 0.0
        lower, _, upper = statistics.quantiles(self.times_s, n=4, method="inclusive")
        return (upper - lower) / math.sqrt(len(self.times_s))


class Trial(Protocol):
    """A comparison of plans. Used by one thread."""

    plans: list[Plan]
    num_steps: int
    candidates: list[Candidate]

    def conclude(self, ranks: Sequence[Times]) -> Plan | None:
        """End a round.

        Args:
            ranks: what each rank measured.

        Returns:
            The fastest plan; None where another round follows.
        """


class Elimination:
    """The slower ones drop out, and the others run longer from round to round.

    Differences within noise decide nothing: see :func:`_fastest`.

    Args:
        plans: at least one.
        num_steps: for each plan in a usual round.
    """

    def __init__(self, plans: Sequence[Plan], num_steps: int) -> None:
        self.candidates = [Candidate(plan) for plan in plans]
        self._alive = list(self.candidates)
        self._round = 0
        self._usual_steps = num_steps
        self._begin()

    def conclude(self, ranks: Sequence[Times]) -> Plan | None:
        _add(self._alive, ranks)
        chosen = _fastest(self._alive, incumbent=self.candidates[0])
        best = min(self._alive, key=lambda c: c.measured_s)
        limit_s = max(best.measured_s * _SURVIVE[self._round], _as_fast(best))
        self._alive = [c for c in self._alive if c.measured_s <= limit_s]
        self._round += 1
        if len(self._alive) > 1 and self._round < len(_SURVIVE):
            self._begin()
            return None
        return chosen

    def _begin(self) -> None:
        self.plans = [c.plan for c in self._alive]
        self.num_steps = max(1, self._usual_steps * 2**self._round // 2)


class Search:
    """DeAR's threshold, sought by Bayesian optimisation over measured iterations.

    Args:
        make: a plan with this threshold.
        first_bytes: the threshold to begin with.
        num_steps: for each plan.

    Raises:
        ImportError: the ``search`` extra is not installed.
    """

    def __init__(self, make: Callable[[int], Plan], first_bytes: int, num_steps: int) -> None:
        self.candidates: list[Candidate] = []
        self.num_steps = num_steps
        self._make = make
        self._search = ThresholdSearch(first_bytes)
        self._begin()

    def conclude(self, ranks: Sequence[Times]) -> Plan | None:
        latest = self.candidates[-1]
        _add([latest], ranks)
        self._search.tell(latest.measured_s)
        if len(self.candidates) < _NUM_SEARCHED:
            self._begin()
            return None
        return _fastest(self.candidates)

    def _begin(self) -> None:
        self.candidates.append(Candidate(self._make(self._search.ask())))
        self.plans = [self.candidates[-1].plan]


def _add(candidates: Sequence[Candidate], ranks: Sequence[Times]) -> None:
    """A step takes as long as on the slowest rank."""
    for position, candidate in enumerate(candidates):
        per_rank = [times[position] for times in ranks]
        candidate.times_s.extend(max(times) for times in zip(*per_rank, strict=True))


def _fastest(candidates: Sequence[Candidate], incumbent: Candidate | None = None) -> Plan:
    """The plan of the least time, unless others took as long within noise.

    Of those the plan in use stays; else the one is taken with the fewest groups that overlap, which
    costs the least of what the trial could not see, and of these the first, which was predicted to
    be the fastest.
    """
    limit_s = _as_fast(min(candidates, key=lambda c: c.measured_s))
    equal = [c for c in candidates if c.measured_s <= limit_s]
    if incumbent in equal:
        return incumbent.plan
    return min(equal, key=lambda c: len(c.plan.groups) if c.plan.overlap else 1).plan


def _as_fast(best: Candidate) -> float:
    """Up to here a time differs from the best one within noise."""
    return best.measured_s * (1 + _NOISE) + best.noise_s
