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


class Rows:
    """The rows of one trace under whatever modes.

    Args:
        trace: sizes and compute times.
        costs: of the channel.
    """

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
        """All-gathers of the next forward, seen from its end backward in time.

        Let forward end at T. Tensor i has to be there at T - s_i, s_i being the forward compute
        from i to the end. Run time backward from T: now the message that holds i cannot start
        before s_i, messages follow each other from the last tensor to the first, and the last
        one ends where forward begins. So it is backward's problem with s_i as ready times, and
        its makespan is T.

        Args:
            scattered: positions in backward order (from 0) of what is gathered, increasing.
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
        """Length of backward's row."""
        return len(self._sizes)


def all_by(operation: Operation, num_tensors: int) -> Modes:
    """The modes that send everything in the same way."""
    return ((num_tensors, operation),)


def scattered(modes: Modes) -> list[int]:
    """Positions in backward order (from 0) of what the modes reduce-scatter.

    Example:
        >>> scattered(((2, Operation.ALL_REDUCE), (4, Operation.REDUCE_SCATTER)))
        [2, 3]
    """
    found: list[int] = []
    start = 0
    for end, operation in modes:
        if operation is Operation.REDUCE_SCATTER:
            found += range(start, end)
        start = end
    return found
