"""The question behind OASR: into which runs is a row of gradients cut?

A partition of gradients 1..L (backward order) is told by the ends of its runs, e_1 < ... < e_n = L.
Solvers work on the compute clock (see ``wfbp.core.timeline``): there interference is gone, since
ready times are constants and a message of c seconds takes c / (1 + kappa). Two figures of a
partition matter, and the wall clock is a sum of both:

    makespan   when its last run has arrived, on the compute clock
    busy       how long the channel was in use, on the wall clock
    finish   = makespan + kappa / (1 + kappa) * busy
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

Ends = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition and its two figures, seconds."""

    ends: Ends
    makespan: float
    busy: float


class Solver(Protocol):
    """Exact answers for one row of gradients and one cost."""

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
