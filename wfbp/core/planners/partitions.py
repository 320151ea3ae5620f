"""The question behind the exact planners: into which runs is a row of gradients cut?

A partition of gradients 1..L is told by the ends of its runs, e_1 < ... < e_n = L. Solvers work on
the compute clock (see ``wfbp.core.phases``): there interference is gone, since ready times are
constants and a message of c seconds takes c / (1 + kappa). Two figures of a partition matter, and
the wall clock is a sum of both:

    makespan   when its last run has arrived, on the compute clock
    busy       how long the channel was in use, on the wall clock
    finish   = makespan + kappa / (1 + kappa) * busy
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from wfbp.core.cost import CostModel

Ends = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """Gradients that cross the channel in this order, in runs.

    Args:
        ready_s: r_1 <= ... <= r_L, seconds from the start of the phase.
        sizes: bytes m_1..m_L.
        dtypes: element type of each.
        segments: (end, cost of a message) in order, the last end being L. A run lies within one
            segment: what is sent by different collectives cannot share a message.
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
    """A partition that somebody else made, with its figures. For one element type."""
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
    """Exact answers for one row."""

    def fastest(self) -> Partition:
        """Of least makespan."""

    def cheapest(self, makespan: float) -> Partition | None:
        """Of least busy time among those of at most this makespan; None where there is none."""

    def fewest(
        self, makespan: float, accept: Callable[[Partition], bool], at_most: int
    ) -> Partition | None:
        """Of the fewest runs (at most ``at_most``) of at most this makespan, and accepted.

        Of each number of runs only the cheapest is asked about.
        """
