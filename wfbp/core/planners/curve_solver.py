"""Exact partitions for any monotone cost, vectorised, in time quadratic in the gradients."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from functools import cached_property

import numpy as np
import numpy.typing as npt

from wfbp.core.planners.partition import Partition, Row, measure

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MAX_TABLE_TENSORS = 2048  # up to here the costs of all runs are kept, in 32 MiB
CHUNK_ELEMENTS = 2**17  # costs handled at once, so that they stay in cache
ROUNDING = 1e-12


class CurveSolver:
    """Exact for any monotone cost; a message takes cost / (1 + kappa) on the compute clock."""

    def __init__(self, row: Row, kappa: float) -> None:
        self._gradients = row
        self._kappa = kappa
        self._n = len(row.sizes)
        self._r = np.array([0.0, *row.ready_s])
        self._floor = row.floor_s
        self._speed = 1.0 / (1.0 + kappa)
        self._costs = costs = _costs_of_runs(row)
        self._table: Floats | None = None
        if self._n <= MAX_TABLE_TENSORS:
            self._table = np.array([costs(j) for j in range(self._n + 1)])
            self._costs = self._table.__getitem__
        self._steps: list[tuple[float, float, Partition]] = []  # from, to, the cheapest there
        self._impossible = -np.inf  # no partition is through by then

    @cached_property
    def _best(self) -> tuple[Floats, Ints]:
        """finish(j) = min over i < j of max(finish(i), r_j) + c(P_j - P_i), and that i."""
        finish = np.zeros(self._n + 1)
        previous = np.zeros(self._n + 1, dtype=np.int64)
        for j in range(1, self._n + 1):
            ends = np.maximum(finish[:j], self._r[j]) + self._speed * self._costs(j)[:j]
            previous[j] = ends.argmin()
            finish[j] = ends[previous[j]]
        return finish, previous

    def fastest(self) -> Partition:
        """The dynamic programme over the end of the last run."""
        previous = self._best[1]
        ends = []
        j = self._n
        while j > 0:
            ends.append(j)
            j = int(previous[j])
        return measure(self._gradients, ends[::-1], self._kappa)

    def cheapest(self, makespan: float) -> Partition | None:
        """Least busy time for deadline D, by a programme from the end.

        Each run is sent as late as possible, back to back; w(j) is the busy time after gradient j:

            w(i) = min over j > i of  w(j) + c(P_j - P_i)   if <= (1 + kappa) * (D - r_j)

        Less busy time after j is cheaper and leaves more time before it, so one number per j is
        enough. An answer holds for all deadlines from its makespan to D, so it is kept.
        """
        if makespan < self._floor or makespan <= self._impossible:
            return None
        step = bisect_right(self._steps, makespan, key=lambda known: known[0])
        if step and makespan <= self._steps[step - 1][1]:
            return self._steps[step - 1][2]
        partition = self._cheapest(makespan)
        if partition is None:
            self._impossible = makespan
        else:
            before = self._steps[step - 1][1] if step else 0.0
            low = max(min(partition.makespan, makespan), before)
            self._steps.insert(step, (low, makespan, partition))
        return partition

    def _cheapest(self, makespan: float) -> Partition | None:
        # Busy time that may follow the start of a run that ends with gradient j.
        latest_busy = (makespan - self._r) / self._speed
        busy = np.full(self._n + 1, np.inf)
        busy[-1] = 0.0
        following = np.zeros(self._n + 1, dtype=np.int64)
        for j in range(self._n, 0, -1):
            if busy[j] > latest_busy[j]:
                continue
            through = self._costs(j)[:j] + busy[j]
            better = through < busy[:j]
            better &= through <= latest_busy[j]
            np.copyto(busy[:j], through, where=better)  # much faster than busy[:j][better] = ...
            np.copyto(following[:j], j, where=better)
        if not np.isfinite(busy[0]):
            return None
        ends = [int(following[0])]
        while ends[-1] < self._n:
            ends.append(int(following[ends[-1]]))
        return measure(self._gradients, ends, self._kappa)

    def fewest(
        self, makespan: float, accept: Callable[[Partition], bool], at_most: int
    ) -> Partition | None:
        """As :meth:`cheapest`, a table per number of runs; drops dominated and late states."""
        if makespan < self._floor:
            return None
        latest_busy = (makespan - self._r) / self._speed
        earliest = self._best[0]
        busy = np.full(self._n + 1, np.inf)
        busy[-1] = 0.0
        least = busy.copy()
        followings: list[Ints] = []
        for _ in range(at_most):
            alive = np.flatnonzero(np.isfinite(busy))
            if not len(alive):
                return None
            busy, following = self._one_run_more(busy, latest_busy, alive)
            busy[busy >= least] = np.inf
            late = makespan - self._speed * busy < earliest - ROUNDING * makespan
            busy[late] = np.inf
            least = np.minimum(least, busy)
            followings.append(following)
            if np.isfinite(busy[0]):
                ends = [0]
                for table in reversed(followings):
                    ends.append(int(table[ends[-1]]))
                partition = measure(self._gradients, ends[1:], self._kappa)
                if accept(partition):
                    return partition
                busy[0] = np.inf
        return None

    def _one_run_more(self, busy: Floats, latest_busy: Floats, alive: Ints) -> tuple[Floats, Ints]:
        least = np.full(self._n + 1, np.inf)
        following = np.zeros(self._n + 1, dtype=np.int64)
        columns = np.arange(self._n + 1)
        step = max(CHUNK_ELEMENTS // (self._n + 1), 1)
        for js in (alive[at : at + step] for at in range(0, len(alive), step)):
            table = self._table
            rows = np.stack([self._costs(j) for j in js]) if table is None else table[js]
            through = rows + busy[js, None]
            through[through > latest_busy[js, None]] = np.inf
            first = through.argmin(axis=0)
            through_first = through[first, columns]
            better = through_first < least
            least[better] = through_first[better]
            following[better] = js[first[better]]
        return least, following


def _costs_of_runs(row: Row) -> Callable[[int], Floats]:
    """A function of j: wall seconds of the run (i, j] for every i; infinite across segments."""
    kinds = sorted(set(row.dtypes))
    members = np.array([[kind == dtype for dtype in row.dtypes] for kind in kinds])
    counts = np.cumsum(members, axis=1)
    sent = np.cumsum(members * np.array(row.sizes, dtype=np.float64), axis=1)
    counts, sent = (np.pad(sums, ((0, 0), (1, 0))) for sums in (counts, sent))
    pieces = list(row.pieces())
    ends = [end for _, end, _ in pieces]

    def costs(j: int) -> Floats:
        seconds = np.full(len(row.sizes) + 1, np.inf)
        first, _, cost = pieces[bisect_left(ends, j)]
        if first < j:
            seconds[first:j] = sum(
                cost.many(nbytes[j] - nbytes[first:j]) * (count[j] > count[first:j])
                for count, nbytes in zip(counts, sent, strict=True)
            )
        return seconds

    return costs
