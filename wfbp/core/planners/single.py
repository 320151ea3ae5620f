"""One message for the whole model."""

from __future__ import annotations

from wfbp.core.cost import Costs
from wfbp.core.plan import Plan
from wfbp.core.planners.plan_builder import plan_of_runs
from wfbp.core.trace import Trace


def single(trace: Trace, costs: Costs) -> Plan:
    """All tensors in one message (per element type): one start-up, no overlap.

    Args:
        trace: sizes and compute times of one step.
        costs: not looked at.

    Returns:
        A plan of schedule ``single``.

    Example:
        >>> from wfbp.core.cost import LinearCost
        >>> from wfbp.core.trace import TraceTensor
        >>> from wfbp.core.types import TensorSpec
        >>> w, b = (TraceTensor(TensorSpec(n, (1,), "float32"), 1.0, 1.0) for n in "wb")
        >>> [g.tensors for g in single(Trace("t", (w, b)), Costs(LinearCost(1e-3, 1e-9))).groups]
        [(1, 0)]
    """
    return plan_of_runs("single", trace, [len(trace.tensors)])
