"""DeAR: groups closed by size, scattered in backward and gathered in the next forward."""

from __future__ import annotations

from wfbp.core.cost import Costs
from wfbp.core.plan import Plan
from wfbp.core.planners.plan_builder import plan_of_phases
from wfbp.core.planners.rows import all_by
from wfbp.core.planners.threshold import DEFAULT_BYTES, ends_by_size
from wfbp.core.planners.threshold_search import ThresholdSearch
from wfbp.core.timeline import iteration_s
from wfbp.core.trace import Trace
from wfbp.core.types import Operation


def dear(trace: Trace, costs: Costs, *, threshold_bytes: int = DEFAULT_BYTES) -> Plan:
    """One byte threshold for both phases: what was scattered together is gathered together.

    Groups fill in backward order as those of ``threshold``. Published DeAR issues each all-gather
    when the one before has arrived and forward has come to its layers; here they are queued
    when forward starts, which is never later.

    Args:
        trace: sizes and compute times of one step; only sizes are looked at.
        costs: not looked at.
        threshold_bytes: at least 1; default 25 MiB.

    Returns:
        A plan of schedule ``dear``.

    Raises:
        ValueError: ``threshold_bytes`` is under 1.

    Source:
        Zhang et al., "DeAR: Accelerating Distributed Deep Learning with Fine-Grained All-Reduce
        Pipelining", ICDCS 2023, section IV.

    Example:
        >>> from wfbp.core.cost import LinearCost
        >>> from wfbp.core.trace import TraceTensor
        >>> from wfbp.core.types import TensorSpec
        >>> trace = Trace("t", tuple(
        ...     TraceTensor(TensorSpec(n, (10,), "float32"), 1.0, 1.0) for n in "abc"))
        >>> made = dear(trace, Costs(LinearCost(1e-3, 1e-9)), threshold_bytes=41)
        >>> [g.tensors for g in made.groups]
        [(2, 1), (0,), (0,), (1, 2)]
    """
    ends = ends_by_size(trace.backward_bytes, threshold_bytes)
    modes = all_by(Operation.REDUCE_SCATTER, len(trace.tensors))
    return plan_of_phases("dear", trace, modes, ends, ends)


def dear_search(trace: Trace, costs: Costs, *, trials: int = 10) -> Plan:
    """DeAR with its threshold found by Bayesian optimisation.

    Thresholds from 1 MiB to 256 MiB are tried, even in their logarithm; a Gaussian process and
    expected improvement choose each next one. The published search measures iterations; this one
    asks the prediction. The same input gives the same plan.

    Args:
        trace: sizes and compute times of one step.
        costs: of reduce-scatter and all-gather, and kappa.
        trials: thresholds to try, at least 1; the first is the default of :func:`dear`.

    Returns:
        The best plan tried, of schedule ``dear``.

    Raises:
        ValueError: ``trials`` is under 1.
        ImportError: the ``search`` extra is not installed.

    Source:
        Zhang et al., ICDCS 2023, section IV-C.
    """
    if not trials >= 1:
        raise ValueError(f"trials: expected at least 1, found {trials!r}")
    search = ThresholdSearch()
    plans: list[tuple[float, Plan]] = []
    for _ in range(trials):
        made = dear(trace, costs, threshold_bytes=search.ask())
        plans.append((iteration_s(made, trace, costs), made))
        search.tell(plans[-1][0])
    return min(plans, key=lambda found: found[0])[1]
