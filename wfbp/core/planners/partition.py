"""Partitions: how a row of gradients is cut into runs, in backward and in forward.

The solvers work on one :class:`Row`; :class:`Rows` makes those of a trace, and
:func:`plan_of_phases` makes a plan of the runs. Times count on the
compute clock (see ``wfbp.core.timeline``), on which interference does not move ready times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

from wfbp.core.cost import CostModel, Costs
from wfbp.core.plan import Group, Plan, split_by_dtype
from wfbp.core.trace import Trace
from wfbp.core.types import Operation, Phase, TensorSpec

Ends = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """Gradients that are sent in this order, in runs.

    Args:
        ready_s: r_1 <= ... <= r_L, seconds from the start of the phase.
        sizes: bytes m_1..m_L.
        dtypes: element type of each.
        segments: (end, cost of a message) in order, the last end being L. A run lies within one
            segment, because a message has one collective.
        floor_s: the phase takes at least this long, whatever is sent.
    """

    ready_s: Sequence[float]
    sizes: Sequence[int]
    dtypes: Sequence[str]
    segments: Sequence[tuple[int, CostModel]]
    floor_s: float = 0.0

    def pieces(self) -> Iterator[tuple[int, int, CostModel]]:
        """(start, end, cost) of each segment."""
        start = 0
        for end, cost in self.segments:
            yield start, end, cost
            start = end


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition and its two figures, seconds."""

    ends: Ends
    makespan: float
    busy: float


def measure(row: Row, ends: Sequence[int], kappa: float) -> Partition:
    """A given partition with its makespan and busy time. For one element type."""
    speed = 1.0 / (1.0 + kappa)
    at = busy = 0.0
    start = 0
    segments = iter(row.segments)
    segment_end, cost = next(segments)
    for end in ends:
        while end > segment_end:
            segment_end, cost = next(segments)
        seconds = cost(sum(row.sizes[start:end]))
        at = max(at, row.ready_s[end - 1]) + speed * seconds
        busy += seconds
        start = end
    return Partition(tuple(ends), max(at, row.floor_s), busy)


class Solver(Protocol):
    """Exact answers for one row: partitions of least makespan, least busy time, fewest runs."""

    def fastest(self) -> Partition:
        """Of least makespan."""

    def cheapest(self, makespan: float) -> Partition | None:
        """Of least busy time among those of at most this makespan; None where there is none."""

    def fewest(
        self, makespan: float, accept: Callable[[Partition], bool], at_most: int
    ) -> Partition | None:
        """The fewest runs, at most ``at_most``, within this makespan that ``accept`` allows.

        For each number of runs only the cheapest partition is considered.
        """


Modes = tuple[tuple[int, Operation], ...]
"""(end, operation) of each segment of backward: gradients up to that end are sent by it."""


class Rows:
    """The rows of one trace, for given modes."""

    def __init__(self, trace: Trace, costs: Costs) -> None:
        self._ready_s = trace.ready_times_s
        self._left_s = list(accumulate(t.forward_s for t in reversed(trace.tensors)))
        self._sizes = trace.backward_bytes
        self._dtypes = [t.spec.dtype for t in reversed(trace.tensors)]
        self._cost = {operation: costs.of(operation) for operation in Operation}

    def backward(self, modes: Modes) -> Row:
        """Gradients in backward order; all-reduced or reduce-scattered, segment by segment."""
        segments = [(end, self._cost[operation]) for end, operation in modes]
        return Row(self._ready_s, self._sizes, self._dtypes, segments, self._ready_s[-1])

    def forward(self, scattered: Sequence[int]) -> Row:
        """The row of all-gathers of the next forward, seen from its end backward in time.

        Let forward end at T. Tensor i must have arrived at T - s_i, s_i being the forward compute
        from i to the end. Run time backward from T: now the message that holds i cannot start
        before s_i, messages follow each other from the last tensor to the first, and the last one
        ends where forward begins. So it is backward's problem with s_i as ready times, and its
        makespan is T.

        ``scattered`` are increasing positions in backward order, from 0.
        """
        return Row(
            [self._left_s[k] for k in scattered],
            [self._sizes[k] for k in scattered],
            [self._dtypes[k] for k in scattered],
            [(len(scattered), self._cost[Operation.ALL_GATHER])],
            self._left_s[-1],
        )

    @property
    def num_tensors(self) -> int:
        return len(self._sizes)


def all_by(operation: Operation, num_tensors: int) -> Modes:
    return ((num_tensors, operation),)


def scattered(modes: Modes) -> list[int]:
    """Positions in backward order (from 0) of what the modes reduce-scatter.

    Example:
        >>> scattered(((2, Operation.ALL_REDUCE), (4, Operation.REDUCE_SCATTER)))
        [2, 3]
    """
    positions: list[int] = []
    start = 0
    for end, operation in modes:
        if operation is Operation.REDUCE_SCATTER:
            positions += range(start, end)
        start = end
    return positions


def plan_of_runs(schedule: str, trace: Trace, ends: Sequence[int]) -> Plan:
    """The plan that all-reduces gradients 1..e_1, e_1+1..e_2, ... of backward together.

    ``ends`` are e_1 < e_2 < ... < e_n = L, counted in backward order from 1. There is one group per
    run and element type, in sending order.

    Example:
        >>> trace = Trace.uniform("wb", 1, 1.0, 1.0)
        >>> [g.tensors for g in plan_of_runs("wfbp", trace, [1, 2]).groups]
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
        >>> trace = Trace.uniform("wb", 1, 1.0, 1.0)
        >>> modes = ((2, Operation.REDUCE_SCATTER),)
        >>> made = plan_of_phases("t", trace, modes, [1, 2], [2])
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
