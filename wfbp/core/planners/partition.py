"""Partitions: how gradients are cut into runs, in backward and in forward.

Times count on the compute clock (``wfbp.core.timeline``), on which interference does not move
ready times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from wfbp.core.cost import CostModel, Costs
from wfbp.core.plan import Group, Plan, split_by_dtype
from wfbp.core.trace import Trace
from wfbp.core.types import Operation

Ends = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """Gradients in sending order, to be cut into runs; no run crosses a segment."""

    ready_s: Sequence[float]  # r_1 <= ... <= r_L, from the start of the phase
    sizes: Sequence[int]  # bytes
    dtypes: Sequence[str]
    segments: Sequence[tuple[int, CostModel]]  # (end, cost of a message); the last end is L
    floor_s: float = 0.0  # least duration of the phase

    def pieces(self) -> Iterator[tuple[int, int, CostModel]]:
        """(start, end, cost) of each segment."""
        start = 0
        for end, cost in self.segments:
            yield start, end, cost
            start = end


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition with its makespan and busy time, seconds."""

    ends: Ends
    makespan: float
    busy: float


def measure(row: Row, ends: Sequence[int], kappa: float) -> Partition:
    """A given partition with its makespan and busy time.

    A run of several element types costs one message per type, sent when its last gradient exists.
    """
    speed = 1.0 / (1.0 + kappa)
    at = busy = 0.0
    start = 0
    segments = iter(row.segments)
    segment_end, cost = next(segments)
    for end in ends:
        while end > segment_end:
            segment_end, cost = next(segments)
        sent: Counter[str] = Counter()
        for k in range(start, end):
            sent[row.dtypes[k]] += row.sizes[k]
        seconds = sum(map(cost, sent.values()))
        at = max(at, row.ready_s[end - 1]) + speed * seconds
        busy += seconds
        start = end
    return Partition(tuple(ends), max(at, row.floor_s), busy)


Modes = tuple[tuple[int, Operation], ...]
"""(end, operation) of each segment of backward: how gradients up to that end are sent."""


def rows_of(trace: Trace, costs: Costs, modes: Modes) -> list[Row]:
    """The row of backward, and that of the next forward if any gradient is gathered there.

    Forward's row is in reversed time (docs/explanation/planning.md).
    """
    sizes = trace.backward_bytes
    dtypes = [t.spec.real_dtype for t in reversed(trace.tensors)]
    ready_s = trace.ready_times_s
    segments = [(end, costs.of(operation)) for end, operation in modes]
    backward = Row(ready_s, sizes, dtypes, segments, ready_s[-1])
    gathered = scattered(modes)
    if not gathered:
        return [backward]
    left_s = list(accumulate(t.forward_s for t in reversed(trace.tensors)))
    forward = Row(
        [left_s[k] for k in gathered],
        [sizes[k] for k in gathered],
        [dtypes[k] for k in gathered],
        [(len(gathered), costs.of(Operation.ALL_GATHER))],
        left_s[-1],
    )
    return [backward, forward]


def all_by(operation: Operation, num_tensors: int) -> Modes:
    return ((num_tensors, operation),)


def scattered(modes: Modes) -> list[int]:
    """Positions in backward order (from 0) that the modes reduce-scatter."""
    positions: list[int] = []
    start = 0
    for end, operation in modes:
        if operation is Operation.REDUCE_SCATTER:
            positions += range(start, end)
        start = end
    return positions


def plan_of_runs(schedule: str, trace: Trace, ends: Sequence[int]) -> Plan:
    """The plan that all-reduces runs of backward with these ends, counted from 1."""
    modes = all_by(Operation.ALL_REDUCE, len(trace.tensors))
    return plan_of_phases(schedule, trace, modes, ends)


def plan_of_halves(schedule: str, trace: Trace, ends: Sequence[int]) -> Plan:
    """The plan that reduce-scatters runs with these ends in backward and gathers the same runs."""
    modes = all_by(Operation.REDUCE_SCATTER, len(trace.tensors))
    return plan_of_phases(schedule, trace, modes, ends, ends)


def plan_of_phases(
    schedule: str,
    trace: Trace,
    modes: Modes,
    backward_ends: Sequence[int],
    forward_ends: Sequence[int] = (),
) -> Plan:
    """The plan of runs in backward (as :func:`plan_of_runs`, by ``modes``) and of runs in forward.

    ``forward_ends`` count reduce-scattered tensors in backward order; the last run is sent first.
    """
    specs = trace.specs
    groups: list[Group] = []
    segments = iter(modes)
    segment_end, operation = next(segments)
    runs = _cut(range(len(specs))[::-1], backward_ends)
    for run, end in zip(runs, backward_ends, strict=True):
        while end > segment_end:
            segment_end, operation = next(segments)
        groups += split_by_dtype(specs, [run], operation)
    gathered = [len(specs) - 1 - k for k in scattered(modes)]
    gathers = [run[::-1] for run in _cut(gathered, forward_ends)][::-1]
    groups += split_by_dtype(specs, gathers, Operation.ALL_GATHER)
    return Plan(schedule, specs, tuple(groups))


def _cut(row: Sequence[int], ends: Sequence[int]) -> list[Sequence[int]]:
    return [row[start:end] for start, end in pairwise([0, *ends])]
