"""The two rows of tensors that a step sends: in backward, and mirrored in the next forward."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from wfbp.core.cost import Costs
from wfbp.core.planners.partitions import Row
from wfbp.core.trace import Trace
from wfbp.core.types import Operation

Modes = tuple[tuple[int, Operation], ...]
"""(end, operation) of each segment of backward: gradients up to that end are sent by it."""


def backward_row(trace: Trace, costs: Costs, modes: Modes | None = None) -> Row:
    """Gradients in backward order.

    Args:
        trace: sizes and compute times.
        costs: of the channel.
        modes: all-reduce or reduce-scatter, segment by segment; all of it all-reduced if None.
    """
    ready_s = trace.ready_times_s
    if modes is None:
        modes = ((len(ready_s), Operation.ALL_REDUCE),)
    return Row(
        ready_s,
        trace.backward_bytes,
        [t.spec.dtype for t in reversed(trace.tensors)],
        [(end, costs.of(operation)) for end, operation in modes],
        ready_s[-1],
    )


def forward_row(trace: Trace, costs: Costs, tensors: Sequence[int]) -> Row:
    """All-gathers of the next forward, seen from its end backward in time.

    Let forward end at T. Tensor i has to be there at T - s_i, s_i being the forward compute from
    i to the end. Run time backward from T: now the message that holds i cannot start before s_i,
    messages follow each other from the last tensor to the first, and the last one ends where
    forward begins. So it is backward's problem with s_i as ready times, and its makespan is T.

    Args:
        trace: sizes and compute times.
        costs: of the channel.
        tensors: those that are gathered, in backward order, as indices into ``trace.tensors``.
    """
    left_s = list(accumulate(t.forward_s for t in reversed(trace.tensors)))
    last = len(trace.tensors) - 1
    return Row(
        [left_s[last - k] for k in tensors],
        [trace.tensors[k].spec.nbytes for k in tensors],
        [trace.tensors[k].spec.dtype for k in tensors],
        [(len(tensors), costs.of(Operation.ALL_GATHER))],
        left_s[-1],
    )
