"""A trial: finds the fastest of several plans in rounds.

Each round runs every remaining plan for a few steps; rounds alternate in order, so that a slowly
changing machine favours no plan. A disturbance affects one round, so medians over rounds count:

    d[i, r] = log(median time of plan i in round r) - log(the same of the best plan)
    d[i]    = median over rounds of d[i, r]
    se[i]   = 1.25 * spread of d[i, r] / sqrt(rounds), spread = 1.48 * median absolute deviation

Plans slower than the best by more than two se are dropped (after Even-Dar, Mannor and Mansour, JMLR
7, 2006). In the first rounds a favourable prediction counts as one more round, so that one
disturbed round does not drop a plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from wfbp.core.plan import Plan

COLD_STEPS = 1
"""Steps after a change of plans that do not count, because memory is cold."""
MARGIN = 0.015
"""A relative difference that does not matter."""
FIRST_LIMIT = 0.12
"""Two standard errors after one round, while the noise is unknown."""
NUM_FINALISTS = 5
"""At least so many plans stay until the noise is known."""
_NOISE_ROUNDS = 3  # so many tell the noise
_MORE_ROUNDS = 3  # at least so many more are wanted of the plans that stay
_NUM_ERRORS = 2.0
_MEDIAN_ERROR = 1.2533
_NORMAL_MAD = 1.4826


class Trial:
    """The comparison of some plans, by digest. Equal times give equal decisions."""

    def __init__(self, plans: Iterable[Plan], num_steps: int, max_steps: int) -> None:
        self.plans = list(plans)
        """The plans of the next round, in running order."""
        self.tried = list(self.plans)
        """Every plan that ever took part, the newest last."""
        self.num_rounds = 0
        self._visit_steps = COLD_STEPS + num_steps
        self._steps_left = max_steps
        self._logs: dict[str, dict[int, float]] = {plan.digest: {} for plan in self.plans}

    def add_round(self, times_s: Sequence[Sequence[float]]) -> None:
        """Add the seconds per iteration of each of :attr:`plans`."""
        for plan, times in zip(self.plans, times_s, strict=True):
            self._logs[plan.digest][self.num_rounds] = math.log(median(times))
        self.num_rounds += 1
        self._steps_left -= self._visit_steps * len(self.plans)

    @property
    def measured_s(self) -> dict[str, float]:
        """Median over rounds of each plan that was measured."""
        return {key: math.exp(median(x.values())) for key, x in self._logs.items() if x}

    def narrow(self, forecasts_s: Mapping[str, float], newcomers: Iterable[Plan] = ()) -> bool:
        """Drop slow plans after a round and add ``newcomers``; False when the trial is over."""
        slower = self._slower(forecasts_s)
        errors = self._errors(slower)
        order = sorted(self.plans, key=lambda plan: slower[plan.digest])
        near = [plan for plan in order if slower[plan.digest] <= max(MARGIN, errors[plan.digest])]
        early = self.num_rounds < _NOISE_ROUNDS
        affordable = self._steps_left // self._visit_steps
        num_kept = max(len(near), NUM_FINALISTS) if early else len(near)
        num_kept = min(num_kept, max(2, affordable // _MORE_ROUNDS))
        first = self.tried[0]
        if first in order[num_kept:] and (early or first in near):
            order.remove(first)  # the others have to beat it
            order.insert(num_kept - 1, first)
        new = [plan for plan in newcomers if plan.digest not in self._logs]
        if affordable < 2 or len(order[:num_kept]) + len(new) < 2:
            return False
        new, kept = new[:affordable], order[:num_kept][: max(affordable - len(new), 0)]
        self.tried += new
        self._logs.update({plan.digest: {} for plan in new})
        self.plans = [plan for plan in reversed(self.plans) if plan in kept] + new
        return True

    def winner(self, forecasts_s: Mapping[str, float]) -> Plan:
        """The fastest plan, or the first if it is as fast within the noise."""
        slower = self._slower(forecasts_s)
        first = self.tried[0]
        if first in self.plans:
            noise = self._errors(slower)[first.digest] / _NUM_ERRORS
            if slower[first.digest] <= max(MARGIN, noise):
                return first
        return min(self.plans, key=lambda plan: slower[plan.digest])

    def _slower(self, forecasts_s: Mapping[str, float]) -> dict[str, float]:
        """d[i] of the plans of the last round."""
        keys = [plan.digest for plan in self.plans]
        rounds = [
            {key: self._logs[key][number] for key in keys if number in self._logs[key]}
            for number in range(self.num_rounds)
        ]
        slower = _differences(keys, rounds)
        if self.num_rounds <= _NOISE_ROUNDS:
            expected = {key: math.log(forecasts_s[key]) for key in keys}
            hoped = _differences(keys, [*rounds, expected])
            slower = {key: min(slower[key], hoped[key]) for key in keys}
        return slower

    def _errors(self, slower: Mapping[str, float]) -> dict[str, float]:
        """Two standard errors of each plan's d[i]; a guess while there are too few rounds."""
        if self.num_rounds < _NOISE_ROUNDS:
            return dict.fromkeys(slower, FIRST_LIMIT / math.sqrt(self.num_rounds))
        best = min(slower, key=lambda key: slower[key])
        spreads = {}
        for key in slower:
            both = self._logs[key].keys() & self._logs[best].keys()
            d = [self._logs[key][r] - self._logs[best][r] for r in both]
            spreads[key] = _NORMAL_MAD * median(abs(x - median(d)) for x in d)
        others = [spread for key, spread in spreads.items() if key != best]
        usual = median(others) if others else 0.0  # of few rounds a spread may be small by chance
        scale = _NUM_ERRORS * _MEDIAN_ERROR / math.sqrt(self.num_rounds)
        return {key: scale * max(spread, usual) for key, spread in spreads.items()}


def _differences(keys: Sequence[str], rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Difference of each plan from the best: medians of its times over each round's median."""
    middles = [median(x.values()) if x else 0.0 for x in rounds]
    level = {
        key: median(x[key] - m for x, m in zip(rounds, middles, strict=True) if key in x)
        for key in keys
    }
    least = min(level.values())
    return {key: log - least for key, log in level.items()}
