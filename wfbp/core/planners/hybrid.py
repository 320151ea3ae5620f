"""Hybrid: each gradient all-reduced in backward, or scattered there and gathered in forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from wfbp.core.cost import Costs
from wfbp.core.plan import Plan
from wfbp.core.planners.coarsening import even_progress, spread_boundaries
from wfbp.core.planners.exact import exact_plan
from wfbp.core.planners.optimum import ROUNDING, TOLERANCE
from wfbp.core.planners.partition import Modes, all_by
from wfbp.core.timeline import iteration_s
from wfbp.core.trace import Trace
from wfbp.core.types import Operation

Floats = npt.NDArray[np.float64]

EITHER = (Operation.ALL_REDUCE, Operation.REDUCE_SCATTER)
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
        modes.append((boundaries[j], EITHER[decoupled]))
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
    plans = [planner(trace, costs) for planner in rivals]
    latest_s = min((iteration_s(plan, trace, costs) for plan in plans), default=float("inf"))
    alike = [all_by(each, len(trace.tensors)) for each in EITHER]
    made = [
        exact_plan("hybrid", trace, costs, modes, tolerance, latest_s)
        for modes in (*alike, shared_modes(trace, costs))
    ]
    plans += [plan for plan, _ in made]
    latest_s = min(latest_s, *(shortest_s * (1.0 + tolerance) for _, shortest_s in made))
    # The fewest groups that end in time, or the shortest iteration of all.
    times = [iteration_s(plan, trace, costs) for plan in plans]
    latest_s = max(latest_s, min(times)) * (1.0 + 4 * ROUNDING)
    _, _, index = min(
        (len(plan.groups), seconds, index)
        for index, (plan, seconds) in enumerate(zip(plans, times, strict=True))
        if seconds <= latest_s
    )
    return replace(plans[index], schedule="hybrid")
