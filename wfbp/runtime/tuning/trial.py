"""A trial: which of several plans is fastest in reality, decided in rounds.

In each round every plan still in the trial runs for a few steps, in every other round in reverse
order, so that a machine whose speed changes slowly favors no plan. A disturbance slows down a whole
round, or one plan in one round. So plans are compared round by round, and medians count:

    d[i, r] = log(median time of plan i in round r) - log(the same of the best plan)
    d[i]    = median over rounds of d[i, r]
    se[i]   = 1.25 * spread of d[i, r] / sqrt(rounds)

(1.25 is the ratio of the standard errors of a median and a mean; the spread is 1.48 times the
median absolute deviation.) After each round, the plans that are slower than the best one by more
than two standard errors leave. If the remaining steps are too few for all, the fastest stay.
In the first rounds, the prediction counts as one more round of a plan if that is in its favor. So a
plan that should be fast is not lost by a single disturbed round.

After Even-Dar, Mannor and Mansour, "Action elimination and stopping conditions for the multi-armed
bandit", JMLR 7 (2006), with medians, because iteration times have heavy tails.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from wfbp.core.plan import Plan

COLD_STEPS = 1
"""Steps after a change of plans that do not count, because they find cold memory."""
MARGIN = 0.015
"""A relative difference that does not matter."""
FIRST_LIMIT = 0.12
"""Two standard errors after one round, while the noise is not yet known."""
NUM_FINALISTS = 5
"""So many plans stay in any case, until the noise is known."""
_NOISE_ROUNDS = 3  # so many tell the noise
_MORE_ROUNDS = 3  # at least so many more are wanted of the plans that stay
_NUM_ERRORS = 2.0
_MEDIAN_ERROR = 1.2533
_NORMAL_MAD = 1.4826


class Trial:
    """The comparison of some plans, known by their digests. Equal times lead to equal decisions.

    Args:
        plans: at least one; the first stays unless another one wins by more than the noise.
        num_steps: steps per plan and round that count.
        max_steps: of the whole trial; at least the first round is run.
    """

    def __init__(self, plans: Iterable[Plan], num_steps: int, max_steps: int) -> None:
        self.plans = list(plans)
        """The plans of the next round, in the order in which they run."""
        self.tried = list(self.plans)
        """Every plan that ever took part, the newest last."""
        self.num_rounds = 0
        self._visit_steps = COLD_STEPS + num_steps
        self._steps_left = max_steps
        self._logs: dict[str, dict[int, float]] = {plan.digest: {} for plan in self.plans}

    def add_round(self, times_s: Sequence[Sequence[float]]) -> None:
        """Take in the seconds per iteration of each of :attr:`plans`."""
        for plan, times in zip(self.plans, times_s, strict=True):
            self._logs[plan.digest][self.num_rounds] = math.log(median(times))
        self.num_rounds += 1
        self._steps_left -= self._visit_steps * len(self.plans)

    @property
    def measured_s(self) -> dict[str, float]:
        """Median over rounds of each plan that was measured."""
        return {key: math.exp(median(x.values())) for key, x in self._logs.items() if x}

    def narrow(self, forecasts_s: Mapping[str, float], newcomers: Iterable[Plan] = ()) -> bool:
        """Drop slow plans after a round, and let new ones join; False when the trial is over.

        Args:
            forecasts_s: predicted seconds per iteration of :attr:`plans`.
            newcomers: plans to compare from here on.
        """
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
        """The fastest plan; the first one if that is as fast, within the noise."""
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
    """Of each plan from the best one: the medians of its times over each round's median."""
    middles = [median(x.values()) if x else 0.0 for x in rounds]
    level = {
        key: median(x[key] - m for x, m in zip(rounds, middles, strict=True) if key in x)
        for key in keys
    }
    least = min(level.values())
    return {key: log - least for key, log in level.items()}
