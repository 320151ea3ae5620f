"""DeAR: groups closed by size, scattered in backward and gathered in the next forward."""

from __future__ import annotations

from wfbp.core.cost import Costs
from wfbp.core.plan import Plan
from wfbp.core.planners.baselines import DEFAULT_BYTES, ends_by_size
from wfbp.core.planners.partition import all_by, plan_of_phases
from wfbp.core.trace import Trace
from wfbp.core.types import Operation


def dear(trace: Trace, costs: Costs, *, threshold_bytes: int = DEFAULT_BYTES) -> Plan:
    """One byte threshold for both phases: what is scattered together is gathered together.

    Published DeAR (Zhang et al., ICDCS 2023, section IV) issues an all-gather after the previous
    one, when forward reaches its layers. Here all are queued when forward starts, which is never
    later.
    """
    ends = ends_by_size(trace.backward_bytes, threshold_bytes)
    modes = all_by(Operation.REDUCE_SCATTER, len(trace.tensors))
    return plan_of_phases("dear", trace, modes, ends, ends)
