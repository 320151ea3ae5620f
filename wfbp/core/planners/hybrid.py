"""Hybrid: each gradient all-reduced in backward, or scattered there and gathered in forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import numpy.typing as npt

from wfbp.core.checks import number
from wfbp.core.cost import Costs
from wfbp.core.plan import Plan
from wfbp.core.planners.coarsening import even_progress, spread_boundaries
from wfbp.core.planners.optimum import (
    PRECISION,
    ROUNDING,
    TOLERANCE,
    fewest,
    finish_s,
    optimum,
    solver_of,
)
from wfbp.core.planners.partition import (
    Modes,
    Partition,
    Row,
    Rows,
    all_by,
    plan_of_phases,
    scattered,
)
from wfbp.core.timeline import iteration_s
from wfbp.core.trace import Trace
from wfbp.core.types import Operation

SHARES = (0.5, 0.0, 1.0, 0.25, 0.75)
"""Parts of the spare time that backward may use when groups are saved."""


@dataclass(frozen=True, slots=True)
class PhasePartitions:
    """Modes, the runs of both phases (None if nothing is gathered), and the iteration's seconds."""

    modes: Modes
    backward: Partition
    forward: Partition | None
    seconds: float

    @property
    def num_groups(self) -> int:
        return len(self.backward.ends) + (len(self.forward.ends) if self.forward else 0)


class PartitionOptimizer:
    """Finds the best partitions for given modes: the phases are independent, and each is exact."""

    def __init__(self, trace: Trace, costs: Costs) -> None:
        self._rows = Rows(trace, costs)
        self._kappa = costs.kappa
        self._lag = costs.kappa / (1.0 + costs.kappa)
        self._forward_s = trace.forward_s
        self._other_s = trace.other_s
        self._alone_s = trace.forward_s + trace.backward_s + trace.other_s

    def best_partitions(self, modes: Modes, precision: float = PRECISION) -> PhasePartitions:
        """The shortest iteration with these modes, to a relative precision."""
        # Neighbours of one operation become one segment, whose runs may be longer.
        modes = tuple([*same][-1] for _, same in groupby(modes, key=lambda mode: mode[1]))
        backward_row, forward_row = self._phases(modes)
        backward = self._optimum(backward_row, precision)
        forward = self._optimum(forward_row, precision) if forward_row else None
        return self._partitions(modes, backward, forward)

    def with_fewer_groups(self, best: PhasePartitions, latest_s: float) -> PhasePartitions:
        """Few groups within ``latest_s``; divides the spare time by each of ``SHARES``."""
        rounding_s = ROUNDING * latest_s  # or an optimum of fewer groups might be missed
        spare_s = max(latest_s - best.seconds, 0.0)
        fewest_so_far = best
        backward_row, forward_row = self._phases(best.modes)
        backward_solver = solver_of(backward_row, self._kappa)
        forward_solver = solver_of(forward_row, self._kappa) if forward_row else None
        for share in SHARES if forward_solver else (1.0,):
            backward, forward = best.backward, best.forward
            limit_s = finish_s(backward, self._lag) + share * spare_s + rounding_s
            backward = fewest(backward_solver, self._lag, limit_s, backward)
            if forward and forward_solver:
                limit_s = finish_s(forward, self._lag) + (1.0 - share) * spare_s + rounding_s
                forward = fewest(forward_solver, self._lag, limit_s, forward)
            saved = self._partitions(best.modes, backward, forward)
            if saved.seconds <= latest_s + 2 * rounding_s:
                fewest_so_far = min(fewest_so_far, saved, key=lambda s: (s.num_groups, s.seconds))
        return fewest_so_far

    def _phases(self, modes: Modes) -> tuple[Row, Row | None]:
        positions = scattered(modes)
        return self._rows.backward(modes), self._rows.forward(positions) if positions else None

    def _optimum(self, row: Row, precision: float) -> Partition:
        solver = solver_of(row, self._kappa)
        return optimum(solver, self._lag, self._alone_s - row.floor_s, precision)

    def _partitions(
        self, modes: Modes, backward: Partition, forward: Partition | None
    ) -> PhasePartitions:
        forward_s = finish_s(forward, self._lag) if forward else self._forward_s
        seconds = finish_s(backward, self._lag) + forward_s + self._other_s
        return PhasePartitions(modes, backward, forward, seconds)


Floats = npt.NDArray[np.float64]

MAX_BORDERS = 64  # boundaries between which groups are sought, if there are more tensors
MAX_STATES = 48  # Pareto states kept per boundary


def shared_modes(trace: Trace, costs: Costs) -> Modes:
    """Modes of the best plan whose all-gathers have the same groups as its reduce-scatters.

    The state (f, g) after gradient j: when backward's channel is free, and when the all-gathers end
    in mirrored forward (``Rows.forward``). Dominated states are dropped (planning.md). Exact
    without interference, up to ``MAX_BORDERS`` and ``MAX_STATES``.
    """
    boundaries = spread_boundaries(even_progress(trace), 0, len(trace.tensors), MAX_BORDERS)
    at = np.array(boundaries)
    ready_s = np.array([0.0, *trace.ready_times_s])[at]
    left_s = np.cumsum([0.0, *(t.forward_s for t in reversed(trace.tensors))])[at]
    sent = np.cumsum([0.0, *trace.backward_bytes])[at]
    lag = costs.kappa / (1.0 + costs.kappa)
    # Columns of a state: f, g, busy time of backward, of forward; then where it came from.
    fronts = [np.zeros((1, 4))]
    origins = [np.zeros((1, 3), dtype=np.int64)]
    for j in range(1, len(boundaries)):
        lengths = [len(front) for front in fronts]
        i = np.repeat(np.arange(j), lengths)
        number = np.concatenate([np.arange(n) for n in lengths])
        f, g, busy_f, busy_g = np.concatenate(fronts).T
        reduce_s, scatter_s, gather_s = (
            costs.of(operation).many(sent[j] - sent[:j])[i] for operation in Operation
        )
        start = np.maximum(f, ready_s[j] + lag * busy_f)
        reduced = np.stack([start + reduce_s, g, busy_f + reduce_s, busy_g], axis=1)
        after = np.maximum(g, left_s[j] + lag * busy_g) + gather_s
        split = np.stack([start + scatter_s, after, busy_f + scatter_s, busy_g + gather_s], axis=1)
        states = np.concatenate([reduced, split])
        ways = [np.column_stack([i, number, np.full(len(i), way)]) for way in (0, 1)]
        kept = _pareto(states[:, 0], states[:, 1])
        fronts.append(states[kept])
        origins.append(np.concatenate(ways)[kept])
    f, g, _, busy_g = fronts[-1].T
    state = int(np.argmin(f + np.maximum(g, left_s[-1] + lag * busy_g)))
    modes: list[tuple[int, Operation]] = []
    j = len(boundaries) - 1
    while j > 0:  # back along the choices
        i, before, decoupled = origins[j][state]
        operation = Operation.REDUCE_SCATTER if decoupled else Operation.ALL_REDUCE
        modes.append((boundaries[j], operation))
        j, state = int(i), int(before)
    return tuple(reversed(modes))


def _pareto(f: Floats, g: Floats) -> npt.NDArray[np.int64]:
    """Indices of states that no other beats in both numbers, at most ``MAX_STATES``."""
    order = np.lexsort((g, f))
    least = np.minimum.accumulate(g[order])
    first = np.concatenate([[True], least[1:] < least[:-1]])
    front: npt.NDArray[np.int64] = order[first]
    if len(front) > MAX_STATES:
        front = front[np.linspace(0, len(front) - 1, MAX_STATES).round().astype(np.int64)]
    return front


MIXED_PRECISION = 1e-6  # of runs, with interference, for modes that no other planner has


def hybrid(
    trace: Trace,
    costs: Costs,
    *,
    tolerance: float = TOLERANCE,
    rivals: Sequence[Callable[..., Plan]] = (),
) -> Plan:
    """The best of all-reduce alone, decoupling alone, and a mixture (planning.md).

    Decoupling moves half of the bytes into forward, which pays if forward hides them and backward
    cannot. :func:`shared_modes` chooses modes; then both phases are cut exactly.
    Returns the fewest groups within the relative ``tolerance`` that are no slower than the plan of
    any of ``rivals``, the other planners.
    """
    number("tolerance", tolerance)
    partition_optimizer = PartitionOptimizer(trace, costs)
    num_tensors = len(trace.tensors)
    candidates = [
        partition_optimizer.best_partitions(all_by(operation, num_tensors))
        for operation in (Operation.ALL_REDUCE, Operation.REDUCE_SCATTER)
    ]
    modes = shared_modes(trace, costs)
    candidates.append(partition_optimizer.best_partitions(modes, MIXED_PRECISION))
    best_s = min(partitions.seconds for partitions in candidates)
    plans = [planner(trace, costs) for planner in rivals]
    rivals_s = (iteration_s(plan, trace, costs) for plan in plans)
    latest_s = min([best_s * (1.0 + tolerance), *rivals_s])
    in_time = [found for found in candidates if found.seconds <= latest_s]
    candidates += [partition_optimizer.with_fewer_groups(found, latest_s) for found in in_time]
    for found in candidates:
        ends = found.backward.ends, found.forward.ends if found.forward else ()
        plans.append(plan_of_phases("hybrid", trace, found.modes, *ends))
    # The fewest groups that end in time, or the shortest iteration of all.
    times = [iteration_s(plan, trace, costs) for plan in plans]
    latest_s = max(latest_s, min(times)) * (1.0 + 4 * ROUNDING)
    _, _, index = min(
        (len(plan.groups), seconds, index)
        for index, (plan, seconds) in enumerate(zip(plans, times, strict=True))
        if seconds <= latest_s
    )
    return replace(plans[index], schedule="hybrid")
