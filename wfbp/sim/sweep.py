"""Predictions for every combination of schedule, model and cluster size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wfbp.core.cost import Costs
from wfbp.core.planners import plan
from wfbp.core.timeline import timeline
from wfbp.core.trace import Trace
from wfbp.sim.scaling import Link, Node, scale


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One schedule on one model and one number of workers.

    Args:
        model: the trace's name.
        workers: P.
        algorithm: of the collectives.
        schedule: the planner.
        num_groups: messages per iteration.
        compute_s: an iteration without communication.
        iteration_s: predicted.
        lower_bound_s: the limit that no schedule can beat.
    """

    model: str
    workers: int
    algorithm: str
    schedule: str
    num_groups: int
    compute_s: float
    iteration_s: float
    lower_bound_s: float

    @property
    def speedup(self) -> float:
        """Samples per second relative to one worker with the same batch per worker."""
        return self.workers * self.efficiency

    @property
    def efficiency(self) -> float:
        """Share of the iteration that computes; 1.0 if communication is hidden."""
        return self.compute_s / self.iteration_s if self.iteration_s else 1.0


def sweep(
    traces: Sequence[Trace],
    source: Link | Costs,
    workers: Sequence[int],
    schedules: Sequence[str],
    algorithm: str = "ring",
    *,
    measured_on: int = 2,
    node: Node | None = None,
) -> list[SweepRow]:
    """Predict every schedule on every model and number of workers, in rows in this order.

    ``source``, ``algorithm``, ``measured_on`` and ``node`` are as for
    :func:`wfbp.sim.scaling.scale`.

    Raises:
        ValueError: as ``scale``, or a schedule is not known.

    Example:
        >>> trace = Trace.uniform("w", 9, 1.0, 2.0)
        >>> [round(r.efficiency, 3) for r in sweep([trace], Link(0.1, 0.0), [1, 4], ["oasr"])]
        [1.0, 0.833]
    """
    rows = []
    for trace in traces:
        for count in workers:
            costs = scale(source, count, algorithm, measured_on=measured_on, node=node)
            for schedule in schedules:
                made = plan(schedule, trace, costs)
                predicted = timeline(made, trace, costs)
                rows.append(
                    SweepRow(
                        trace.model,
                        count,
                        algorithm,
                        schedule,
                        len(made.groups),
                        trace.forward_s + trace.backward_s + trace.other_s,
                        predicted.iteration_s,
                        predicted.lower_bound_s,
                    )
                )
    return rows
