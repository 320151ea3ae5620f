"""The planners, by the names of their schedules.

A planner is a pure function. Each rank makes the first plan, later ones rank 0 alone. To add one,
write the function and a row of ``_ALL_BUT_HYBRID``, where those that only all-reduce come first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from wfbp.core.checks import one_of
from wfbp.core.cost import Costs
from wfbp.core.plan import Plan
from wfbp.core.planners.baselines import (
    dear,
    ipart,
    mgwfbp,
    parameter_server,
    parameter_server_layerwise,
    per_tensor,
    single,
    threshold,
)
from wfbp.core.planners.exact import independent, oasr
from wfbp.core.planners.hybrid import hybrid
from wfbp.core.trace import Trace

__all__ = ["AUTO", "PLANNERS", "SCHEDULES", "PlannerEntry", "check_schedule", "plan"]


@dataclass(frozen=True, slots=True)
class PlannerEntry:
    """A planner and its properties.

    Args:
        planner: a function ``(trace, costs, **options) -> Plan``.
        decouples: it reduce-scatters in backward and all-gathers in the next forward.
        measures: it uses times and costs; otherwise it can plan the first step from sizes alone.
        takes_threshold: it has the option ``threshold_bytes``.
        slow: its time is quadratic in the tensors, so the runtime merges tensors of large models.
        baseline: it exists for comparison, and ``auto`` does not try it.
        searches: the runtime tries several thresholds around ``threshold_bytes``.
    """

    planner: Callable[..., Plan]
    decouples: bool = False
    measures: bool = True
    takes_threshold: bool = False
    slow: bool = False
    baseline: bool = False
    searches: bool = False


_ALL_BUT_HYBRID = {
    "layerwise": PlannerEntry(per_tensor, measures=False),
    "single": PlannerEntry(single, measures=False),
    "threshold": PlannerEntry(threshold, measures=False, takes_threshold=True),
    "mgwfbp": PlannerEntry(mgwfbp),
    "oasr": PlannerEntry(oasr, slow=True),
    "ps": PlannerEntry(parameter_server, decouples=True, measures=False, baseline=True),
    "ps_layerwise": PlannerEntry(
        parameter_server_layerwise, decouples=True, measures=False, baseline=True
    ),
    "ipart": PlannerEntry(ipart, decouples=True, slow=True),
    "dear": PlannerEntry(dear, decouples=True, measures=False, takes_threshold=True, searches=True),
    "independent": PlannerEntry(independent, decouples=True, slow=True),
}
_RIVALS = [entry.planner for entry in _ALL_BUT_HYBRID.values()]
_HYBRID = PlannerEntry(partial(hybrid, rivals=_RIVALS), decouples=True, slow=True)

PLANNERS: Mapping[str, PlannerEntry] = MappingProxyType({**_ALL_BUT_HYBRID, "hybrid": _HYBRID})
"""Every planner by the name of its schedule."""

AUTO = "auto"
"""The schedule that measures which of the others is fastest."""

RECOMMENDED = (AUTO, "oasr", "hybrid", "single")
"""Schedules for training; the others exist for comparison and special cases."""

ALL_REDUCE_SCHEDULES = tuple(name for name, entry in PLANNERS.items() if not entry.decouples)
"""Schedules whose plans only all-reduce."""

DECOUPLED_SCHEDULES = tuple(name for name, entry in PLANNERS.items() if entry.decouples)
"""Schedules that may reduce-scatter in backward and all-gather in the next forward."""

SCHEDULES = (AUTO, *PLANNERS)
"""Every schedule."""


def check_schedule(schedule: str, decouples: bool, user: str = "") -> None:
    """Raise ``ValueError`` for an unknown schedule, or one that decouples gradients although
    ``user`` needs whole ones."""
    known = SCHEDULES if decouples else (AUTO, *ALL_REDUCE_SCHEDULES)
    needs_whole = (
        f": {user or 'the caller'} needs whole gradients on every rank, and this schedule leaves "
        "shards. The argument or WFBP_SCHEDULE sets it"
    )
    one_of("schedule", schedule, known, needs_whole if schedule in DECOUPLED_SCHEDULES else "")


def plan(schedule: str, trace: Trace, costs: Costs, **options: Any) -> Plan:
    """Plan with the planner of that name, and its options, such as ``threshold_bytes``.

    Raises:
        ValueError: no planner has that name.

    Example:
        >>> from wfbp.core.cost import LinearCost
        >>> plan("oasr", Trace.uniform("w", 9, 1.0, 2.0), Costs(LinearCost(1e-3, 1e-9))).schedule
        'oasr'
    """
    return PLANNERS[one_of("schedule", schedule, tuple(PLANNERS))].planner(trace, costs, **options)
