"""Traces of fewer, larger tensors, for quicker searches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from wfbp.core.plan import Group, Plan, split_by_dtype
from wfbp.core.trace import Trace, TraceTensor
from wfbp.core.types import Phase, TensorSpec


def even_progress(trace: Trace) -> list[float]:
    """Progress of the step before each tensor in backward order: bytes, compute and count alike."""
    sizes = trace.backward_bytes
    compute = [t.forward_s + t.backward_s for t in reversed(trace.tensors)]
    all_bytes, all_s, count = sum(sizes) or 1, sum(compute) or 1.0, len(sizes)
    shares = (m / all_bytes + c / all_s + 1.0 / count for m, c in zip(sizes, compute, strict=True))
    return list(accumulate(shares, initial=0.0))


def spread_boundaries(progress: Sequence[float], low: int, high: int, count: int) -> list[int]:
    """At most ``count`` + 1 boundaries from ``low`` to ``high`` (included), even in progress."""
    if high - low <= count:
        return list(range(low, high + 1))
    step = (progress[high] - progress[low]) / count
    chosen = [low]
    for at in range(low + 1, high):
        if progress[at] - progress[low] >= len(chosen) * step and len(chosen) < count:
            chosen.append(at)
    return [*chosen, high]


def coarsened(trace: Trace, boundaries: Sequence[int]) -> Trace:
    """The trace with the tensors between two boundaries, in backward order, merged into one."""
    rows = trace.tensors[::-1]
    merged = []
    for start, end in pairwise(boundaries):
        run = rows[start:end]
        merged.append(
            TraceTensor(
                TensorSpec(run[-1].spec.name, (sum(t.spec.nbytes for t in run),), "uint8"),
                sum(t.forward_s for t in run),
                sum(t.backward_s for t in run),
            )
        )
    return Trace(trace.model, tuple(reversed(merged)), trace.other_s)


def expanded(plan: Plan, trace: Trace, boundaries: Sequence[int]) -> Plan:
    """The plan of ``coarsened(trace, boundaries)`` as a plan of ``trace``."""
    last = len(trace.tensors) - 1
    blocks = [range(last - start, last - end, -1) for start, end in pairwise(boundaries)][::-1]
    groups: list[Group] = []
    for group in plan.groups:
        order = 1 if group.phase is Phase.BACKWARD else -1
        run = [k for block in group.tensors for k in blocks[block][::order]]
        groups += split_by_dtype(trace.specs, [run], group.operation)
    return Plan(plan.schedule, trace.specs, tuple(groups), plan.overlap)
