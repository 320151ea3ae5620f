"""What a parameter server does by default: push and pull whole, or layer by layer."""

from __future__ import annotations

from wfbp.core.cost import Costs
from wfbp.core.plan import Plan
from wfbp.core.planners.plan_builder import plan_of_phases
from wfbp.core.planners.rows import all_by
from wfbp.core.trace import Trace
from wfbp.core.types import Operation


def parameter_server(trace: Trace, costs: Costs) -> Plan:
    """Push the whole model after backward, pull the whole model before forward: no overlap.

    Every node serves 1/P of each tensor, so that a push is a reduce-scatter and a pull is an
    all-gather. It is the baseline of iPart and no more.

    Args:
        trace: sizes and compute times of one step.
        costs: not looked at.

    Returns:
        A plan of schedule ``ps``.

    Source:
        Baseline of iPart (Wang et al., IEEE TPDS 2021).

    Example:
        >>> from wfbp.core.cost import LinearCost
        >>> from wfbp.core.trace import TraceTensor
        >>> from wfbp.core.types import TensorSpec
        >>> w, b = (TraceTensor(TensorSpec(n, (1,), "float32"), 1.0, 1.0) for n in "wb")
        >>> made = parameter_server(Trace("tiny", (w, b)), Costs(LinearCost(1e-3, 1e-9)))
        >>> [g.tensors for g in made.groups]
        [(1, 0), (0, 1)]
    """
    num_tensors = len(trace.tensors)
    modes = all_by(Operation.REDUCE_SCATTER, num_tensors)
    return plan_of_phases("ps", trace, modes, [num_tensors], [num_tensors])


def parameter_server_layerwise(trace: Trace, costs: Costs) -> Plan:
    """Push and pull every tensor alone, under the compute of the others.

    Args:
        trace: sizes and compute times of one step.
        costs: not looked at.

    Returns:
        A plan of schedule ``ps_layerwise``.

    Source:
        Baseline of iPart (Wang et al., IEEE TPDS 2021); the push is Poseidon's.

    Example:
        >>> from wfbp.core.cost import LinearCost
        >>> from wfbp.core.trace import TraceTensor
        >>> from wfbp.core.types import TensorSpec
        >>> w, b = (TraceTensor(TensorSpec(n, (1,), "float32"), 1.0, 1.0) for n in "wb")
        >>> made = parameter_server_layerwise(Trace("t", (w, b)), Costs(LinearCost(1e-3, 1e-9)))
        >>> [g.tensors for g in made.groups]
        [(1,), (0,), (0,), (1,)]
    """
    num_tensors = len(trace.tensors)
    modes = all_by(Operation.REDUCE_SCATTER, num_tensors)
    ends = range(1, num_tensors + 1)
    return plan_of_phases("ps_layerwise", trace, modes, ends, ends)
