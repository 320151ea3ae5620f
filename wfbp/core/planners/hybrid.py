"""Hybrid: each gradient all-reduced in backward, or scattered there and gathered in forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from wfbp.core.cost import Costs, LinearCost
from wfbp.core.plan import Plan
from wfbp.core.planners.coarsening import coarsened, even_progress, refined, spread_borders
from wfbp.core.planners.dear import dear
from wfbp.core.planners.hybrid_shared import shared_modes
from wfbp.core.planners.hybrid_split import best_split
from wfbp.core.planners.independent import independent
from wfbp.core.planners.ipart import ipart
from wfbp.core.planners.mgwfbp import mgwfbp
from wfbp.core.planners.oasr import oasr
from wfbp.core.planners.optimum import PRECISION, ROUNDING, TOLERANCE, check_tolerance
from wfbp.core.planners.parameter_server import parameter_server, parameter_server_layerwise
from wfbp.core.planners.partition_optimizer import PartitionOptimizer, plan_of_partitions
from wfbp.core.planners.per_tensor import per_tensor
from wfbp.core.planners.rows import Modes, all_by
from wfbp.core.planners.single import single
from wfbp.core.planners.threshold import threshold
from wfbp.core.timeline import iteration_s
from wfbp.core.trace import Trace
from wfbp.core.types import Operation

Planner = Callable[[Trace, Costs], Plan]

REDUCING: tuple[Planner, ...] = (per_tensor, single, threshold, mgwfbp, oasr)
"""Planners that all-reduce everything."""
DECOUPLING: tuple[Planner, ...] = (
    parameter_server,
    parameter_server_layerwise,
    ipart,
    dear,
    independent,
)
"""Planners that scatter and gather everything."""

SEARCH_PRECISION = 1e-4
"""How exactly iterations are worked out while modes are compared."""
MIXED_PRECISION = 1e-6
"""How exactly, with interference, runs are cut for modes that no other planner has."""
MAX_CURVE_TENSORS = 64
"""Modes for measured curves, which take quadratic time, are sought on at most so many tensors."""


def hybrid(trace: Trace, costs: Costs, *, tolerance: float = TOLERANCE) -> Plan:
    """The best of all-reduce alone, decoupling alone, and both mixed.

    Decoupling moves half of the bytes into forward, which pays where backward cannot hide them
    and forward can. Modes are sought in two ways: a split (``hybrid_split``), and a Pareto
    programme over groups shared by both phases (``hybrid_shared``). Whatever the modes, both
    phases are then cut exactly.

    Among all that is found within the tolerance, and is no slower than the plan of any other
    planner (with its default options), the fewest groups are taken, and of those the fastest.

    Args:
        trace: sizes and compute times of one step.
        costs: of all three collectives, and kappa.
        tolerance: relative, of the iteration time; 0 asks for the shortest found.

    Returns:
        A plan of schedule ``hybrid``.

    Raises:
        ValueError: ``tolerance`` is negative or not a number.

    Source:
        Written for this project; docs/planning.md.

    Example:
        >>> from wfbp.core.cost import LinearCost
        >>> from wfbp.core.trace import TraceTensor
        >>> from wfbp.core.types import TensorSpec
        >>> trace = Trace("t", tuple(
        ...     TraceTensor(TensorSpec(n, (10,), "float32"), 1.0, 1.0) for n in "abc"))
        >>> made = hybrid(trace, Costs(LinearCost(0.0, 0.04)))
        >>> sorted({g.operation.value for g in made.groups})
        ['all_gather', 'all_reduce', 'reduce_scatter']
    """
    check_tolerance(tolerance)
    partition_optimizer = PartitionOptimizer(trace, costs)
    num_tensors = len(trace.tensors)
    reduced, decoupled = (
        partition_optimizer.settle(all_by(operation, num_tensors))
        for operation in (Operation.ALL_REDUCE, Operation.REDUCE_SCATTER)
    )
    mixed = [
        partition_optimizer.settle(modes, MIXED_PRECISION)
        for modes in (split_modes(trace, costs), shared_modes(trace, costs))
    ]
    candidates = [reduced, decoupled, *mixed]
    best_s = min(partitions.seconds for partitions in candidates)
    latest_s = best_s * (1.0 + tolerance)
    # With one element type no planner of a family beats the family's optimum.
    one_type = len({t.spec.dtype for t in trace.tensors}) == 1
    plans: list[Plan] = []
    for optimum, family in ((reduced, REDUCING), (decoupled, DECOUPLING)):
        if not one_type or optimum.seconds * (1.0 - 2 * PRECISION) <= latest_s:
            plans += [planner(trace, costs) for planner in family]
    latest_s = min([latest_s, *(iteration_s(plan, trace, costs) for plan in plans)])
    plans += [plan_of_partitions("hybrid", trace, partitions) for partitions in candidates]
    plans += [
        plan_of_partitions(
            "hybrid", trace, partition_optimizer.with_fewer_groups(partitions, latest_s)
        )
        for partitions in candidates
        if partitions.seconds <= latest_s
    ]
    return _chosen(plans, trace, costs, latest_s)


def split_modes(trace: Trace, costs: Costs) -> Modes:
    """Modes of the best split; on a coarsened trace where exact partitions take long."""
    curves = [costs.of(operation) for operation in Operation]
    dtypes = {t.spec.dtype for t in trace.tensors}
    borders = list(range(len(trace.tensors) + 1))
    if len(dtypes) > 1 or not all(isinstance(curve, LinearCost) for curve in curves):
        borders = spread_borders(even_progress(trace), 0, len(trace.tensors), MAX_CURVE_TENSORS)
        trace = coarsened(trace, borders)
    partition_optimizer = PartitionOptimizer(trace, costs)
    best = best_split(trace, lambda modes: partition_optimizer.settle(modes, SEARCH_PRECISION))
    return refined(best.modes, borders)


def _chosen(plans: list[Plan], trace: Trace, costs: Costs, latest_s: float) -> Plan:
    """The fewest groups that end in time, or the shortest iteration of all."""
    times = [iteration_s(plan, trace, costs) for plan in plans]
    latest_s = max(latest_s, min(times)) * (1.0 + 4 * ROUNDING)
    _, _, index = min(
        (len(plan.groups), seconds, index)
        for index, (plan, seconds) in enumerate(zip(plans, times, strict=True))
        if seconds <= latest_s
    )
    return replace(plans[index], schedule="hybrid")
