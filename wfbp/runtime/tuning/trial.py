"""A trial: finds the fastest of several plans in rounds.

Each round runs every remaining plan for a few steps. Rounds alternate in order, so that a slowly
changing machine favours no plan. The quickest of a plan's steps counts, because disturbances and
cold memory only make steps slower. Plans are compared by the median over rounds of

    log(quickest step of the plan) - log(quickest step of the round's median plan)

In the first three rounds the prediction counts as one more round; after the first two the slower
third leaves. Later a plan leaves if it loses to the best: in most rounds, and in the median by more
than a margin. The simplest plan wins unless it loses. Else, of the plans within the margin of the
best, those that send gradients most precisely count, and of these the one of the fewest groups
wins, because each group costs CPU time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from wfbp.core.plan import Plan
from wfbp.core.types import AUTO_WIRES

COLD_STEPS = 1
"""Steps after a change of plans that do not count, because memory is cold."""
MARGIN = 0.015
"""A relative difference that does not matter."""
_EARLY_ROUNDS = 3
_KEPT = 2 / 3  # of the plans after an early round
_MOST_PRECISE_FIRST = AUTO_WIRES["auto:int4"]
_LOST = 0.7  # the better of two plans is faster in at least this part of the rounds


class Trial:
    """The comparison of some plans. Equal times give equal decisions."""

    def __init__(self, plans: Sequence[Plan], num_steps: int, max_steps: int) -> None:
        self.plans = list(plans)
        """The plans of the next round, in running order."""
        self.num_rounds = 0
        self._tried = plans
        self._simplest = min(plans, key=_cost_of_choice)
        self._visit_steps = COLD_STEPS + num_steps
        self._steps_left = max_steps
        self._logs: dict[str, list[float]] = {plan.digest: [] for plan in plans}

    def add_round(self, times_s: Sequence[Sequence[float]]) -> None:
        """Add the seconds per iteration of each of :attr:`plans`."""
        for plan, times in zip(self.plans, times_s, strict=True):
            self._logs[plan.digest].append(math.log(min(times)))
        self.num_rounds += 1
        self._steps_left -= self._visit_steps * len(self.plans)

    @property
    def measured(self) -> list[tuple[Plan, float]]:
        """Every plan and its median seconds over rounds, the fastest first."""
        medians = [(plan, math.exp(median(self._logs[plan.digest]))) for plan in self._tried]
        return sorted(medians, key=lambda each: each[1])

    def narrow(self, forecasts_s: Mapping[str, float]) -> Plan | None:
        """Drop slow plans after a round; returns the winner once the trial is over.

        ``forecasts_s`` are the predictions of :attr:`plans`, by digest.
        """
        order = self._ranking(forecasts_s)
        if self.num_rounds < _EARLY_ROUNDS:
            num_kept = max(3, math.ceil(len(order) * _KEPT))
            kept = order[:num_kept] + [p for p in order[num_kept:] if p is self._simplest]
        else:
            kept = [plan for plan in order if not self._loses(plan, order[0])]
        num_left = max(self._steps_left // self._visit_steps, 0)
        if self._simplest in kept[num_left:]:  # it stays to the end
            kept[max(num_left - 1, 0) :] = [self._simplest]
        kept = kept[:num_left]
        if len(kept) < 2:
            return self._winner(order)
        self.plans = [plan for plan in reversed(self.plans) if plan in kept]
        return None

    def _winner(self, order: Sequence[Plan]) -> Plan:
        best = order[0]
        if self._simplest in order and not self._loses(self._simplest, best):
            return self._simplest
        near = [plan for plan in order if median(self._slower(plan, best)) <= MARGIN]
        return min(near, key=_cost_of_choice)

    def _loses(self, plan: Plan, best: Plan) -> bool:
        slower = self._slower(plan, best)
        num_lost = sum(log > 0 for log in slower)
        return num_lost >= _LOST * len(slower) and median(slower) > MARGIN

    def _slower(self, plan: Plan, best: Plan) -> list[float]:
        """By how much a plan was slower in each round."""
        ours, theirs = self._logs[plan.digest], self._logs[best.digest]
        return [our_log - their_log for our_log, their_log in zip(ours, theirs, strict=True)]

    def _ranking(self, forecasts_s: Mapping[str, float]) -> list[Plan]:
        """The plans of the last round, the fastest first."""
        columns = [list(self._logs[plan.digest]) for plan in self.plans]
        if self.num_rounds <= _EARLY_ROUNDS:
            for plan, column in zip(self.plans, columns, strict=True):
                column.append(math.log(forecasts_s[plan.digest]))
        middles = [median(each) for each in zip(*columns, strict=True)]
        level = {
            plan.digest: median(log - middle for log, middle in zip(column, middles, strict=True))
            for plan, column in zip(self.plans, columns, strict=True)
        }
        return sorted(self.plans, key=lambda plan: level[plan.digest])


def _cost_of_choice(plan: Plan) -> tuple[int, int]:
    """Of plans of equal speed: lost bits count first, then groups (both halves if decoupled)."""
    lost = sum(
        _MOST_PRECISE_FIRST.index(group.wire) * plan.tensors[k].nbytes
        for group in plan.groups[: plan.num_backward]
        for k in group.tensors
    )
    return lost, len(plan.groups)
