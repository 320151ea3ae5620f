"""Exact partitions for linear costs, in time linear in the number of gradients."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from itertools import accumulate

from wfbp.core.cost import LinearCost
from wfbp.core.planners.partition import Partition, Row, measure


class LinearSolver:
    """Exact for costs alpha + beta * m and one element type; messages take cost / (1 + kappa)."""

    def __init__(self, row: Row, kappa: float) -> None:
        self._gradients = row
        self._kappa = kappa
        speed = 1.0 / (1.0 + kappa)
        self._r = row.ready_s
        self._floor = row.floor_s
        prefix = list(accumulate(row.sizes, initial=0))
        # Of each segment, on the compute clock: start, end, alpha, and seconds of beta for all
        # bytes of the row up to each boundary.
        self._pieces: list[tuple[int, int, float, list[float]]] = []
        for start, end, cost in row.pieces():
            assert isinstance(cost, LinearCost)
            sent = [speed * (cost.beta_s_per_byte * p) for p in prefix[start : end + 1]]
            self._pieces.append((start, end, speed * cost.alpha_s, sent))

    def fastest(self) -> Partition:
        """finish(j) = min over i < j of max(finish(i), r_j) + alpha + beta * (P_j - P_i), in O(L).

        finish never falls in j, so all i with finish(i) <= r_j are a prefix, and its last i is
        best. For the others a monotone queue gives the minimum of finish(i) - beta * P_i over a
        sliding window.
        """
        num_tensors = len(self._r)
        finish = [0.0] * (num_tensors + 1)
        previous = [0] * (num_tensors + 1)
        key = [0.0] * (num_tensors + 1)
        for first, end, alpha, sent in self._pieces:
            window: deque[int] = deque()
            i0 = first - 1
            key[first] = finish[first] - sent[0]
            for j in range(first + 1, end + 1):
                ready = self._r[j - 1]
                while window and key[window[-1]] >= key[j - 1]:
                    window.pop()
                window.append(j - 1)
                while i0 + 1 < j and finish[i0 + 1] <= ready:
                    i0 += 1
                while window and window[0] <= i0:
                    window.popleft()
                best, who = float("inf"), i0
                if i0 >= first:
                    best = ready - sent[i0 - first]
                if window and key[window[0]] < best:
                    who = window[0]
                    best = key[who]
                finish[j] = best + alpha + sent[j - first]
                previous[j] = who
                key[j] = finish[j] - sent[j - first]
        ends = []
        j = num_tensors
        while j > 0:
            ends.append(j)
            j = previous[j]
        return measure(self._gradients, ends[::-1], self._kappa)

    def cheapest(self, makespan: float, at_most: int | None = None) -> Partition | None:
        """The partition of least busy time with makespan at most D: greedy from the end.

        Runs are sent as late as possible, back to back. So the t-th run from the end, (i, j], needs

            beta * P_i >= r_j + t * alpha - (D - beta * P_L)

        Busy time is alpha * t + beta * P_L, so fewest runs are cheapest, and each takes the
        smallest i. Proof: the right side grows with j and t, so of two states (j, t) the one
        smaller in both reaches 0 with no more runs. The deadline of each segment is the start of
        the segments after it.
        """
        if makespan < self._floor:
            return None
        ready = self._r
        ends: list[int] = []
        deadline = makespan
        for first, end, alpha, sent in reversed(self._pieces):
            short = sent[-1] - deadline
            t, j = 0, end
            while j > first:
                ends.append(j)
                t += 1
                at = bisect_left(sent, ready[j - 1] + t * alpha + short, 0, j - first)
                i = first + at
                if i == j or (len(ends) == at_most and i > 0):
                    return None
                j = i
            deadline -= t * alpha + sent[-1] - sent[0]
        return measure(self._gradients, ends[::-1], self._kappa)

    def fewest(
        self, makespan: float, accept: Callable[[Partition], bool], at_most: int
    ) -> Partition | None:
        """The cheapest: within a segment it has the fewest runs too."""
        partition = self.cheapest(makespan, at_most)
        return partition if partition is not None and accept(partition) else None
