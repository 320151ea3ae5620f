"""Hybrid's split: all-reduce what backward has room for, scatter and gather the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from wfbp.core.planners.coarsening import even_progress, spread_borders
from wfbp.core.planners.partition_optimizer import PhasePartitions
from wfbp.core.planners.rows import Modes
from wfbp.core.trace import Trace
from wfbp.core.types import Operation

POSITIONS = 24
"""Borders looked at in one round; with no more tensors than that, all of them."""


def best_split(trace: Trace, settle: Callable[[Modes], PhasePartitions]) -> PhasePartitions:
    """The best borders s <= t: gradients s+1..t are decoupled, the others all-reduced.

    Backward has room early, when the channel still waits for gradients: what is all-reduced then
    need not be gathered. And where all-reduce is cheaper than both halves of it, the last
    gradients, which nothing can hide, are all-reduced too. First s is sought with t = L, then
    t with that s: among evenly spread positions, and again around the best of them.

    Args:
        trace: sizes and compute times.
        settle: the shortest iteration with given modes.
    """
    last = len(trace.tensors)
    marks = even_progress(trace)

    def split(s: int, t: int) -> PhasePartitions:
        return settle(
            (
                (s, Operation.ALL_REDUCE),
                (t, Operation.REDUCE_SCATTER),
                (last, Operation.ALL_REDUCE),
            )
        )

    first = _least(lambda s: split(s, last), marks, 0, last)
    return _least(lambda t: split(first[0], t), marks, first[0], last)[1]


def _least(
    score: Callable[[int], PhasePartitions], marks: Sequence[float], low: int, high: int
) -> tuple[int, PhasePartitions]:
    """The border of least iteration among those looked at: narrowing around the best."""
    found: dict[int, PhasePartitions] = {}
    while True:
        for position in spread_borders(marks, low, high, POSITIONS):
            if position not in found:
                found[position] = score(position)
        best = min(found, key=lambda at: (found[at].seconds, at))
        known = sorted(found)
        at = known.index(best)
        low, high = known[max(at - 1, 0)], known[min(at + 1, len(known) - 1)]
        if high - best <= 1 and best - low <= 1:
            return best, found[best]
