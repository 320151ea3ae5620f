"""OASR's subproblems for a linear cost, in time linear in the number of gradients."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate

from wfbp.core.cost import LinearCost
from wfbp.core.planners.partitions import Partition


class LinearSolver:
    """Exact answers where a message of m bytes takes alpha + beta * m seconds.

    Args:
        ready_s: r_1 <= ... <= r_L in backward order, seconds from the start of backward.
        sizes: bytes m_1..m_L.
        cost: alpha and beta on the wall clock.
        kappa: interference; on the compute clock a message takes 1 / (1 + kappa) of its cost.
    """

    def __init__(
        self, ready_s: Sequence[float], sizes: Sequence[int], cost: LinearCost, kappa: float
    ) -> None:
        speed = 1.0 / (1.0 + kappa)
        self._r = ready_s
        self._alpha_s = cost.alpha_s
        self._alpha = cost.alpha_s * speed
        self._sent_s = [cost.beta_s_per_byte * p for p in accumulate(sizes, initial=0)]
        self._sent = [speed * sent for sent in self._sent_s]

    def fastest(self) -> Partition:
        """finish(j) = min over i < j of max(finish(i), r_j) + alpha + beta * (P_j - P_i).

        finish never falls in j: leaving the last gradient out of a partition of 1..j makes one
        of 1..j-1 that ends no later. So i with finish(i) <= r_j are a prefix 0..i0, of which i0
        is best (it leaves the fewest bytes). For the others the term is
        (finish(i) - beta * P_i) + alpha + beta * P_j: a minimum over the window i0 < i < j, both
        of whose borders only move right, so a monotone queue yields it in O(L) altogether.
        """
        sent, alpha = self._sent, self._alpha
        num_tensors = len(self._r)
        finish = [0.0] * (num_tensors + 1)
        previous = [0] * (num_tensors + 1)
        key = [0.0] * (num_tensors + 1)
        window: deque[int] = deque()
        i0 = 0
        for j, ready in enumerate(self._r, start=1):
            while window and key[window[-1]] >= key[j - 1]:
                window.pop()
            window.append(j - 1)
            while i0 + 1 < j and finish[i0 + 1] <= ready:
                i0 += 1
            while window and window[0] <= i0:
                window.popleft()
            best, who = ready - sent[i0], i0
            if window and key[window[0]] < best:
                who = window[0]
                best = key[who]
            finish[j] = best + alpha + sent[j]
            previous[j] = who
            key[j] = finish[j] - sent[j]
        ends = []
        j = num_tensors
        while j > 0:
            ends.append(j)
            j = previous[j]
        return self._partition(ends[::-1])

    def cheapest(self, makespan: float, at_most: int | None = None) -> Partition | None:
        """Backward from the deadline D, each run as long as it may be.

        Let runs leave as late as they can: back to back, the last arriving at D. The t-th run
        from the end, (i, j], then starts at D - beta * (P_L - P_i) - t * alpha whatever the runs
        behind it are, and it may if that is r_j or later:

            beta * P_i >= r_j + t * alpha - (D - beta * P_L)

        Busy time is alpha * t + beta * P_L, so cheapest means fewest runs, and taking the
        smallest such i each time yields them. Proof: write (j, t) for "t runs cover j+1..L". If
        j' <= j and t' <= t, any step from (j, t) to i < j' is allowed from (j', t') too, since
        the right side grows with j (through r_j) and with t; and if i >= j', then (j', t') already
        covers more with fewer runs. So a state with both figures smaller reaches 0 with no more
        runs, and the greedy choice always has the smallest j for its t. If from its j no i is
        allowed, no state reached by t runs goes below j either, hence nothing reaches 0.
        """
        sent, ready, alpha = self._sent, self._r, self._alpha
        short = sent[-1] - makespan
        ends = []
        j = len(ready)
        while j > 0:
            ends.append(j)
            i = bisect_left(sent, ready[j - 1] + len(ends) * alpha + short, 0, j)
            if i == j or (len(ends) == at_most and i > 0):
                return None
            j = i
        return self._partition(ends[::-1])

    def fewest(
        self, makespan: float, accept: Callable[[Partition], bool], at_most: int
    ) -> Partition | None:
        """The cheapest, since fewest runs and least busy time are the same here."""
        found = self.cheapest(makespan, at_most)
        return found if found is not None and accept(found) else None

    def _partition(self, ends: Sequence[int]) -> Partition:
        at = 0.0
        start = 0
        for end in ends:
            at = max(at, self._r[end - 1]) + self._alpha + (self._sent[end] - self._sent[start])
            start = end
        return Partition(tuple(ends), at, len(ends) * self._alpha_s + self._sent_s[-1])
