"""Groups closed by size."""

from __future__ import annotations

from collections.abc import Sequence

from wfbp.core.cost import Costs
from wfbp.core.plan import Plan
from wfbp.core.planners.plan_builder import plan_of_runs
from wfbp.core.trace import Trace

DEFAULT_BYTES = 25 * 2**20


def threshold(trace: Trace, costs: Costs, *, threshold_bytes: int = DEFAULT_BYTES) -> Plan:
    """Fill a group in backward order and close it once it holds ``threshold_bytes`` or more.

    The tensor that reaches the threshold stays in its group, so a group may exceed the threshold
    by less than its last tensor; the last group may be smaller.

    Args:
        trace: sizes and compute times of one step; only sizes are looked at.
        costs: not looked at.
        threshold_bytes: at least 1; default 25 MiB, which is PyTorch DDP's bucket size.

    Returns:
        A plan of schedule ``threshold``.

    Raises:
        ValueError: ``threshold_bytes`` is under 1.

    Example:
        >>> from wfbp.core.cost import LinearCost
        >>> from wfbp.core.trace import TraceTensor
        >>> from wfbp.core.types import TensorSpec
        >>> trace = Trace("t", tuple(
        ...     TraceTensor(TensorSpec(n, (10,), "float32"), 1.0, 1.0) for n in "abc"))
        >>> costs = Costs(LinearCost(1e-3, 1e-9))
        >>> [g.tensors for g in threshold(trace, costs, threshold_bytes=41).groups]
        [(2, 1), (0,)]
    """
    return plan_of_runs("threshold", trace, ends_by_size(trace.backward_bytes, threshold_bytes))


def ends_by_size(sizes: Sequence[int], threshold_bytes: int) -> list[int]:
    """Ends of the runs that are closed once they hold ``threshold_bytes`` or more.

    Raises:
        ValueError: ``threshold_bytes`` is under 1.
    """
    if not threshold_bytes >= 1:
        raise ValueError(f"threshold_bytes: expected at least 1, found {threshold_bytes!r}")
    ends = []
    held = 0
    for k, nbytes in enumerate(sizes, start=1):
        held += nbytes
        if held >= threshold_bytes or k == len(sizes):
            ends.append(k)
            held = 0
    return ends
