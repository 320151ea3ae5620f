"""Successive elimination: which alternative takes the least time, by noisy measurements.

All alternatives that are alive are measured in every *round*, one after the other, some iterations
each. What slows the machine down for a while slows a whole round, or one alternative in one round;
so alternatives are compared round by round, and what counts is the median over rounds:

    x[i, r] = log(median time of alternative i in round r)
    d[i]    = median over r of x[i, r] - x[best, r]
    se[i]   = 1.25 * spread of these differences / sqrt(number of rounds)

(1.25 is the ratio of the standard errors of a median and of a mean. The spread is 1.48 times the
median absolute deviation. Of few rounds it is often too small by chance: so it counts as no less
than is usual among the alternatives.) An alternative is dropped where ``d`` is larger than
``2 se`` and than ``margin``.
The comparison is over when one is left, when no other can be better by more than ``margin``, or
after ``most_rounds``. Where measurements are scarce, :meth:`SuccessiveElimination.narrow` drops
alternatives by what is known, however uncertain.

After Even-Dar, Mannor and Mansour, "Action elimination and stopping conditions for the multi-armed
bandit", JMLR 7 (2006), with medians in place of means, because iteration times have heavy tails and
are disturbed for seconds at a time.
"""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_NORMAL_MAD = 1.4826
_MEDIAN_ERROR = 1.2533


@dataclass(frozen=True, slots=True)
class Rule:
    """When alternatives are dropped, and when a comparison is over.

    Args:
        margin: a relative difference that does not matter.
        num_errors: standard errors by which an alternative must be slower to be dropped.
        least_rounds: before anything is dropped that is not hopeless.
        most_rounds: the comparison is over after so many.
        hopeless: an alternative slower by this factor is dropped after its first round.
    """

    margin: float = 0.015
    num_errors: float = 2.0
    least_rounds: int = 3
    most_rounds: int = 14
    hopeless: float = 1.5


class SuccessiveElimination:
    """A comparison under way. Deterministic: equal measurements lead to equal decisions.

    Example:
        >>> comparison = SuccessiveElimination(2)
        >>> for _ in range(3):
        ...     over = comparison.add([[1.0, 1.1], [1.2, 1.3]])
        >>> over, comparison.alive
        (True, [0])
    """

    def __init__(self, num_alternatives: int, rule: Rule | None = None) -> None:
        self._rule = rule or Rule()
        self._logs: list[list[float]] = [[] for _ in range(num_alternatives)]
        self._num_rounds = 0
        self.alive = list(range(num_alternatives))
        """The alternatives still compared, in their order."""

    def add(self, times_s: Sequence[Sequence[float]]) -> bool:
        """Add a round: seconds of some iterations for each alternative in :attr:`alive`, in its
        order.

        Returns whether the comparison is over.
        """
        for alternative, times in zip(self.alive, times_s, strict=True):
            self._logs[alternative].append(math.log(statistics.median(times)))
        self._num_rounds += 1
        differences = self._differences()
        limit = math.log(self._rule.hopeless)
        if self._num_rounds >= self._rule.least_rounds:
            margin = self._rule.margin
            kept = [i for i in self.alive if differences[i][0] <= max(margin, differences[i][1])]
        else:
            kept = [i for i in self.alive if differences[i][0] <= limit]
        self.alive = kept
        if len(kept) == 1 or self._num_rounds >= self._rule.most_rounds:
            return True
        if self._num_rounds < self._rule.least_rounds:
            return False
        best = self.best
        # How much faster another may be than the best one: by no more than this.
        return all(
            error - difference <= self._rule.margin
            for i, (difference, error) in differences.items()
            if i in kept and i != best
        )

    def narrow(
        self, limit: float, most: int, least: int = 1, forecasts_s: Sequence[float] = ()
    ) -> list[int]:
        """Drop alternatives by their differences alone, and return them, the fastest first.

        Args:
            limit: an alternative slower than the best by a larger share is dropped.
            most: at most so many stay, the fastest ones.
            least: at least so many stay, up to ``most``.
            forecasts_s: positive seconds expected of each alternative, of those dropped before,
                too; or empty. They count as one more round, so that a single round that was
                disturbed does not decide.
        """
        rounds = self._logs
        if forecasts_s:
            expected = map(math.log, forecasts_s)
            rounds = [[*logs, log] for logs, log in zip(rounds, expected, strict=True)]
        best = self._best(rounds)
        differences = {i: _difference(rounds[i], rounds[best])[0] for i in self.alive}
        order = sorted(self.alive, key=lambda i: (differences[i], i != best, i))
        near = sum(difference <= math.log1p(limit) for difference in differences.values())
        kept = set(order[: min(most, max(near, least))])
        self.alive = [i for i in self.alive if i in kept]
        return [i for i in order if i not in kept]

    @property
    def num_rounds(self) -> int:
        """Rounds taken in."""
        return self._num_rounds

    @property
    def best(self) -> int:
        """The alternative with the least time so far."""
        return self._best(self._logs)

    @property
    def equal(self) -> list[int]:
        """The alternatives alive that are slower than the best one by no more than ``margin``."""
        best = self._logs[self.best]
        differences = {i: _difference(self._logs[i], best)[0] for i in self.alive}
        return [i for i, difference in differences.items() if difference <= self._rule.margin]

    def _best(self, rounds: Sequence[Sequence[float]]) -> int:
        """By the median over rounds of the times, each divided by the round's median."""
        times = [rounds[i] for i in self.alive]
        middles = [statistics.median(in_round) for in_round in zip(*times, strict=True)]

        def relative(i: int) -> float:
            return float(statistics.median(map(operator.sub, rounds[i], middles)))

        return min(self.alive, key=lambda i: (relative(i), i))

    def _differences(self) -> dict[int, tuple[float, float]]:
        """Per alternative alive, its difference from the best one and the error of that."""
        best = self.best
        logs = self._logs
        differences = {i: _difference(logs[i], logs[best]) for i in self.alive}
        others = [spread for i, (_, spread) in differences.items() if i != best]
        usual = statistics.median(others) if others else 0.0
        scale = self._rule.num_errors * _MEDIAN_ERROR / math.sqrt(self._num_rounds)
        return {i: (d, scale * max(spread, usual)) for i, (d, spread) in differences.items()}


def _difference(times: Sequence[float], best: Sequence[float]) -> tuple[float, float]:
    """Median and spread over rounds of the logarithm of one's time over the best one's."""
    differences = [here - there for here, there in zip(times, best, strict=True)]
    middle = statistics.median(differences)
    deviation = statistics.median(abs(d - middle) for d in differences)
    return middle, _NORMAL_MAD * deviation
