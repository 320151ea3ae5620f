"""The best partitions of both phases, given how each gradient is sent."""

from __future__ import annotations

from dataclasses import dataclass

from wfbp.core.cost import Costs
from wfbp.core.plan import Plan
from wfbp.core.planners.optimum import PRECISION, ROUNDING, fewest, finish_s, optimum, solver_of
from wfbp.core.planners.partition import Modes, Partition, Row, Rows, scattered
from wfbp.core.planners.plan_builder import plan_of_phases
from wfbp.core.trace import Trace
from wfbp.core.types import Operation

SHARES = (0.5, 0.0, 1.0, 0.25, 0.75)
"""Parts of the time to spare that backward may use up when groups are saved."""


@dataclass(frozen=True, slots=True)
class PhasePartitions:
    """Modes, and the runs of both phases.

    Args:
        forward: runs of forward; None where nothing is gathered.
        seconds: of the iteration.
    """

    modes: Modes
    backward: Partition
    forward: Partition | None
    seconds: float

    @property
    def num_groups(self) -> int:
        """Messages per iteration, for one element type."""
        return len(self.backward.ends) + (len(self.forward.ends) if self.forward else 0)


class PartitionOptimizer:
    """Finds the best partitions for given modes: the phases are then independent, and each is
    exact."""

    def __init__(self, trace: Trace, costs: Costs) -> None:
        self._rows = Rows(trace, costs)
        self._kappa = costs.kappa
        self._lag = costs.kappa / (1.0 + costs.kappa)
        self._forward_s = trace.forward_s
        self._other_s = trace.other_s
        self._alone_s = trace.forward_s + trace.backward_s + trace.other_s

    def best_partitions(self, modes: Modes, precision: float = PRECISION) -> PhasePartitions:
        """The shortest iteration with these modes, to a relative precision."""
        modes = _joined(modes)
        backward_row, forward_row = self._phases(modes)
        backward = self._optimum(backward_row, precision)
        forward = self._optimum(forward_row, precision) if forward_row else None
        return self._partitions(modes, backward, forward)

    def with_fewer_groups(self, best: PhasePartitions, latest_s: float) -> PhasePartitions:
        """Few groups for an iteration of at most ``latest_s``, with the modes of ``best``.

        The spare time is divided between the phases in a few ways; each phase takes the fewest
        groups for its part.
        """
        rounding_s = ROUNDING * latest_s  # or an optimum of fewer groups might be missed
        spare_s = max(latest_s - best.seconds, 0.0)
        fewest_so_far = best
        backward_row, forward_row = self._phases(best.modes)
        backward_solver = solver_of(backward_row, self._kappa)
        forward_solver = solver_of(forward_row, self._kappa) if forward_row else None
        for share in SHARES if forward_solver else (1.0,):
            backward, forward = best.backward, best.forward
            limit_s = finish_s(backward, self._lag) + share * spare_s + rounding_s
            backward = fewest(backward_solver, self._lag, limit_s, backward)
            if forward and forward_solver:
                limit_s = finish_s(forward, self._lag) + (1.0 - share) * spare_s + rounding_s
                forward = fewest(forward_solver, self._lag, limit_s, forward)
            saved = self._partitions(best.modes, backward, forward)
            if saved.seconds <= latest_s + 2 * rounding_s:
                fewest_so_far = min(fewest_so_far, saved, key=lambda s: (s.num_groups, s.seconds))
        return fewest_so_far

    def _phases(self, modes: Modes) -> tuple[Row, Row | None]:
        positions = scattered(modes)
        return self._rows.backward(modes), self._rows.forward(positions) if positions else None

    def _optimum(self, row: Row, precision: float) -> Partition:
        solver = solver_of(row, self._kappa)
        return optimum(solver, self._lag, self._alone_s - row.floor_s, precision)

    def _partitions(
        self, modes: Modes, backward: Partition, forward: Partition | None
    ) -> PhasePartitions:
        forward_s = finish_s(forward, self._lag) if forward else self._forward_s
        seconds = finish_s(backward, self._lag) + forward_s + self._other_s
        return PhasePartitions(modes, backward, forward, seconds)


def plan_of_partitions(schedule: str, trace: Trace, partitions: PhasePartitions) -> Plan:
    """The plan of these partitions."""
    forward_ends = partitions.forward.ends if partitions.forward else ()
    return plan_of_phases(schedule, trace, partitions.modes, partitions.backward.ends, forward_ends)


def _joined(modes: Modes) -> Modes:
    """Without empty segments, neighbours of one operation as one."""
    joined: list[tuple[int, Operation]] = []
    start = 0
    for end, operation in modes:
        if end == start:
            continue
        if joined and joined[-1][1] is operation:
            joined.pop()
        joined.append((end, operation))
        start = end
    return tuple(joined)
