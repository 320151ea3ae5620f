"""WFBP: every gradient leaves alone, as soon as it exists."""

from __future__ import annotations

from wfbp.core.cost import Costs
from wfbp.core.plan import Plan
from wfbp.core.planners.plan_builder import plan_of_runs
from wfbp.core.trace import Trace


def per_tensor(trace: Trace, costs: Costs) -> Plan:
    """One message per tensor: the most overlap, and the most start-ups.

    Args:
        trace: sizes and compute times of one step.
        costs: not looked at.

    Returns:
        A plan of schedule ``wfbp``.

    Source:
        Wait-free backpropagation: Zhang et al., "Poseidon", USENIX ATC 2017.

    Example:
        >>> from wfbp.core.cost import LinearCost
        >>> from wfbp.core.trace import TraceTensor
        >>> from wfbp.core.types import TensorSpec
        >>> w, b = (TraceTensor(TensorSpec(n, (1,), "float32"), 1.0, 1.0) for n in "wb")
        >>> len(per_tensor(Trace("tiny", (w, b)), Costs(LinearCost(1e-3, 1e-9))).groups)
        2
    """
    return plan_of_runs("wfbp", trace, range(1, len(trace.tensors) + 1))
