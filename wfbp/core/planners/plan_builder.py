"""From runs of gradients to a plan."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from wfbp.core.plan import Group, Plan, split_by_dtype
from wfbp.core.planners.partition import Modes, scattered
from wfbp.core.trace import Trace
from wfbp.core.types import Operation, Phase, TensorSpec


def plan_of_runs(schedule: str, trace: Trace, ends: Sequence[int]) -> Plan:
    """The plan that all-reduces gradients 1..e_1, e_1+1..e_2, ... of backward together.

    ``ends`` are e_1 < e_2 < ... < e_n = L, counted in backward order from 1. There is one group per
    run and element type, in sending order.

    Example:
        >>> from wfbp.core.trace import TraceTensor
        >>> from wfbp.core.types import TensorSpec
        >>> w, b = (TraceTensor(TensorSpec(n, (1,), "float32"), 1.0, 1.0) for n in "wb")
        >>> [g.tensors for g in plan_of_runs("wfbp", Trace("t", (w, b)), [1, 2]).groups]
        [(1,), (0,)]
    """
    specs = trace.specs
    return Plan(schedule, specs, split_by_dtype(specs, _cut(_backward_order(specs), ends)))


def plan_of_phases(
    schedule: str,
    trace: Trace,
    modes: Modes,
    backward_ends: Sequence[int],
    forward_ends: Sequence[int],
) -> Plan:
    """The plan of runs in backward and of runs in forward.

    ``modes`` says how backward is sent, segment by segment; runs do not cross segments.
    ``backward_ends`` are as in :func:`plan_of_runs`. ``forward_ends`` cut the reduce-scattered
    tensors, counted among them alone in backward order; forward sends the last run first.

    Example:
        >>> from wfbp.core.trace import TraceTensor
        >>> from wfbp.core.types import TensorSpec
        >>> w, b = (TraceTensor(TensorSpec(n, (1,), "float32"), 1.0, 1.0) for n in "wb")
        >>> modes = ((2, Operation.REDUCE_SCATTER),)
        >>> made = plan_of_phases("t", Trace("t", (w, b)), modes, [1, 2], [2])
        >>> [(g.operation.value, g.tensors) for g in made.groups]
        [('reduce_scatter', (1,)), ('reduce_scatter', (0,)), ('all_gather', (0, 1))]
    """
    specs = trace.specs
    groups: list[Group] = []
    segments = iter(modes)
    segment_end, operation = next(segments)
    for run, end in zip(_cut(_backward_order(specs), backward_ends), backward_ends, strict=True):
        while end > segment_end:
            segment_end, operation = next(segments)
        groups += split_by_dtype(specs, [run], operation)
    gathered = [len(specs) - 1 - k for k in scattered(modes)]
    gathers = [run[::-1] for run in _cut(gathered, forward_ends)][::-1]
    groups += split_by_dtype(specs, gathers, Operation.ALL_GATHER, Phase.FORWARD)
    return Plan(schedule, specs, tuple(groups))


def _backward_order(specs: Sequence[TensorSpec]) -> range:
    return range(len(specs) - 1, -1, -1)


def _cut(row: Sequence[int], ends: Sequence[int]) -> list[Sequence[int]]:
    return [row[start:end] for start, end in pairwise([0, *ends])]
