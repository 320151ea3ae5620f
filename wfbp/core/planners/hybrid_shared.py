"""Hybrid's shared groups: each all-reduced, or scattered and gathered as it is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from wfbp.core.cost import Costs
from wfbp.core.planners.coarsening import even_progress, spread_borders
from wfbp.core.planners.rows import Modes
from wfbp.core.trace import Trace
from wfbp.core.types import Operation

Floats = npt.NDArray[np.float64]

MAX_BORDERS = 48
"""Borders between which groups are sought; with no more tensors than that, all of them."""
MAX_STATES = 48
"""Pareto states kept per border; with more, some that lie close to others are dropped."""


def shared_modes(trace: Trace, costs: Costs) -> Modes:
    """Modes of the best plan whose all-gathers are of the same groups as its reduce-scatters.

    A state of gradient j is (f, g): when backward's channel is free after the groups of 1..j,
    and when their all-gathers end in forward's mirror (``Rows.forward``). A group (i, j] leads
    from (f, g) of i to one of

        all-reduced   max(f, r_j) + c_AR(P_j - P_i),   g
        decoupled     max(f, r_j) + c_RS(P_j - P_i),   max(g, r'_j) + c_AG(P_j - P_i)

    Both programmes run through the gradients in the same order, so states that another one beats
    in both figures are dropped, and of those at j = L the one of least f + max(g, T_f) wins. With
    interference ready times move with the busy time so far, and states are compared as without.

    Exact without interference for as many tensors and states as are kept (the constants above).
    """
    solver = _SharedSearch(trace, costs)
    return solver.modes()


class _SharedSearch:
    def __init__(self, trace: Trace, costs: Costs) -> None:
        num_tensors = len(trace.tensors)
        self._borders = spread_borders(even_progress(trace), 0, num_tensors, MAX_BORDERS)
        at = np.array(self._borders)
        backward_s = np.concatenate([[0.0], trace.ready_times_s])
        forward_s = np.cumsum([0.0, *(t.forward_s for t in reversed(trace.tensors))])
        self._r: Floats = backward_s[at]
        self._left: Floats = forward_s[at]
        self._sent: Floats = np.cumsum([0.0, *trace.backward_bytes])[at]
        self._costs = costs
        self._lag = costs.kappa / (1.0 + costs.kappa)

    def modes(self) -> Modes:
        """Forward over the borders, then back along the choices."""
        # Columns of a state: f, g, busy time of backward, of forward; then where it came from.
        fronts = [np.zeros((1, 4))]
        origins: list[npt.NDArray[np.int64]] = [np.zeros((1, 3), dtype=np.int64)]
        for j in range(1, len(self._borders)):
            states, origin = self._arrivals(fronts, j)
            kept = _pareto(states[:, 0], states[:, 1])
            fronts.append(states[kept])
            origins.append(origin[kept])
        last = fronts[-1]
        floor = self._left[-1] + self._lag * last[:, 3]
        state = int(np.argmin(last[:, 0] + np.maximum(last[:, 1], floor)))
        modes: list[tuple[int, Operation]] = []
        j = len(self._borders) - 1
        while j > 0:
            i, before, decoupled = origins[j][state]
            operation = Operation.REDUCE_SCATTER if decoupled else Operation.ALL_REDUCE
            modes.append((self._borders[j], operation))
            j, state = int(i), int(before)
        return tuple(reversed(modes))

    def _arrivals(self, fronts: Sequence[Floats], j: int) -> tuple[Floats, npt.NDArray[np.int64]]:
        lengths = [len(front) for front in fronts]
        i = np.repeat(np.arange(j), lengths)
        number = np.concatenate([np.arange(n) for n in lengths])
        f, g, busy_f, busy_g = np.concatenate(fronts).T
        nbytes = self._sent[j] - self._sent[:j]
        reduce_s, scatter_s, gather_s = (
            self._costs.of(operation).many(nbytes)[i] for operation in Operation
        )
        start = np.maximum(f, self._r[j] + self._lag * busy_f)
        reduced = np.stack([start + reduce_s, g, busy_f + reduce_s, busy_g], axis=1)
        after = np.maximum(g, self._left[j] + self._lag * busy_g) + gather_s
        apart = np.stack([start + scatter_s, after, busy_f + scatter_s, busy_g + gather_s], axis=1)
        origin = np.stack([i, number], axis=1)
        ways = [np.column_stack([origin, np.full(len(i), way)]) for way in (0, 1)]
        return np.concatenate([reduced, apart]), np.concatenate(ways)


def _pareto(f: Floats, g: Floats) -> npt.NDArray[np.int64]:
    """Indices of states that no other beats in both figures, at most ``MAX_STATES`` of them."""
    order = np.lexsort((g, f))
    least = np.minimum.accumulate(g[order])
    first = np.concatenate([[True], least[1:] < least[:-1]])
    front: npt.NDArray[np.int64] = order[first]
    if len(front) > MAX_STATES:
        front = front[np.linspace(0, len(front) - 1, MAX_STATES).round().astype(np.int64)]
    return front
