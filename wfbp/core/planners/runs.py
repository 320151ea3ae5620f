"""From runs of gradients in backward order to a plan."""

from __future__ import annotations

from collections.abc import Sequence

from wfbp.core.plan import Plan, split_by_dtype
from wfbp.core.trace import Trace


def plan_of_runs(schedule: str, trace: Trace, ends: Sequence[int]) -> Plan:
    """The plan that sends gradients 1..e_1, e_1+1..e_2, ... of backward together.

    Args:
        schedule: name of the planner.
        trace: whose tensors are planned.
        ends: e_1 < e_2 < ... < e_n = L, counted in backward order from 1.

    Returns:
        One group per run and element type, in sending order.

    Example:
        >>> from wfbp.core.trace import TraceTensor
        >>> from wfbp.core.types import TensorSpec
        >>> w, b = (TraceTensor(TensorSpec(n, (1,), "float32"), 1.0, 1.0) for n in "wb")
        >>> [g.tensors for g in plan_of_runs("wfbp", Trace("t", (w, b)), [1, 2]).groups]
        [(1,), (0,)]
    """
    specs = trace.specs
    last = len(specs) - 1
    runs = []
    start = 0
    for end in ends:
        runs.append(range(last - start, last - end, -1))
        start = end
    return Plan(schedule, specs, split_by_dtype(specs, runs))
