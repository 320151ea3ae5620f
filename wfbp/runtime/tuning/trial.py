"""A trial: finds the fastest of several plans in rounds.

Each round runs every remaining plan for a few steps. Rounds alternate in order, so that a slowly
changing machine favours no plan. The quickest of a plan's steps counts, because disturbances and
cold memory only make steps slower. Plans are compared by the median over rounds of

    log(quickest step of the plan) - log(quickest step of the round's median plan)

In the first rounds the prediction counts as one more round, and the slower third leaves. Later a
plan leaves if it loses to the best: in most rounds, and in the median by more than a margin.
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
_EARLY_ROUNDS = 3
_KEPT = 2 / 3  # of the plans after an early round
_LOST = 0.7  # in so many rounds the better of two plans is faster


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
            self._logs[plan.digest][self.num_rounds] = math.log(min(times))
        self.num_rounds += 1
        self._steps_left -= self._visit_steps * len(self.plans)

    @property
    def measured_s(self) -> dict[str, float]:
        """Median over rounds of each plan that was measured."""
        return {key: math.exp(median(x.values())) for key, x in self._logs.items() if x}

    def narrow(self, forecasts_s: Mapping[str, float], newcomers: Iterable[Plan] = ()) -> bool:
        """Drop slow plans after a round and add ``newcomers``; False when the trial is over."""
        order = self._ranking(forecasts_s)
        first, affordable = self.tried[0], self._steps_left // self._visit_steps
        if self.num_rounds < _EARLY_ROUNDS:
            kept = order[: max(3, math.ceil(len(order) * _KEPT))]
            kept += [first] if first in order and first not in kept else []
        else:
            kept = [plan for plan in order if not self._loses(plan, order[0])]
        new = [plan for plan in newcomers if plan.digest not in self._logs][:affordable]
        kept = kept[: max(affordable - len(new), 0)]
        if len(kept) + len(new) < 2:
            return False
        self.tried += new
        self._logs.update({plan.digest: {} for plan in new})
        self.plans = [plan for plan in reversed(self.plans) if plan in kept] + new
        return True

    def winner(self, forecasts_s: Mapping[str, float]) -> Plan:
        """The fastest plan, or the first unless that loses to it."""
        best, first = self._ranking(forecasts_s)[0], self.tried[0]
        return first if first in self.plans and not self._loses(first, best) else best

    def _loses(self, plan: Plan, best: Plan) -> bool:
        ours, theirs = self._logs[plan.digest], self._logs[best.digest]
        slower = [ours[number] - theirs[number] for number in ours.keys() & theirs.keys()]
        num_lost = sum(log > 0 for log in slower)
        return num_lost >= _LOST * len(slower) and median(slower) > MARGIN

    def _ranking(self, forecasts_s: Mapping[str, float]) -> list[Plan]:
        """The plans of the last round, the fastest first."""
        keys = [plan.digest for plan in self.plans]
        rounds = [
            {key: self._logs[key][number] for key in keys if number in self._logs[key]}
            for number in range(self.num_rounds)
        ]
        if self.num_rounds <= _EARLY_ROUNDS:
            rounds.append({key: math.log(forecasts_s[key]) for key in keys})
        middles = [(each, median(each.values())) for each in rounds if each]
        level = {key: median(x[key] - m for x, m in middles if key in x) for key in keys}
        return sorted(self.plans, key=lambda plan: level[plan.digest])
