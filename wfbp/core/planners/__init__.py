"""The planners, by the names under which users know their schedules.

A planner is a pure function: the same trace and costs give the same plan on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from wfbp.core.cost import Costs
from wfbp.core.plan import Plan
from wfbp.core.planners.baselines import (
    ipart,
    mgwfbp,
    parameter_server,
    parameter_server_layerwise,
    per_tensor,
    single,
    threshold,
)
from wfbp.core.planners.dear import dear, dear_search
from wfbp.core.planners.exact import independent, oasr
from wfbp.core.planners.hybrid import hybrid
from wfbp.core.trace import Trace

__all__ = ["KEEPING", "PLANNERS", "Planner", "dear_search", "plan"]

Planner = Callable[..., Plan]
"""A function ``(trace, costs, **options) -> Plan``."""

PLANNERS: Mapping[str, Planner] = MappingProxyType(
    {
        "wfbp": per_tensor,
        "single": single,
        "threshold": threshold,
        "mgwfbp": mgwfbp,
        "oasr": oasr,
        "ps": parameter_server,
        "ps_layerwise": parameter_server_layerwise,
        "ipart": ipart,
        "dear": dear,
        "independent": independent,
        "hybrid": hybrid,
    }
)
"""Every planner by the name of its schedule."""

KEEPING = (oasr, independent)
"""Planners that keep their latest plans (``functools.lru_cache``)."""


def plan(schedule: str, trace: Trace, costs: Costs, **options: Any) -> Plan:
    """Plan with the planner of that name.

    Args:
        schedule: a key of :data:`PLANNERS`.
        trace: sizes and compute times of one step.
        costs: of the channel.
        options: what the planner takes beside, as ``threshold_bytes``.

    Returns:
        The plan.

    Raises:
        ValueError: no planner has that name.

    Example:
        >>> from wfbp.core.cost import LinearCost
        >>> from wfbp.core.trace import TraceTensor
        >>> from wfbp.core.types import TensorSpec
        >>> trace = Trace("t", (TraceTensor(TensorSpec("w", (9,), "float32"), 1.0, 2.0),))
        >>> plan("oasr", trace, Costs(LinearCost(1e-3, 1e-9))).schedule
        'oasr'
    """
    if schedule not in PLANNERS:
        known = ", ".join(PLANNERS)
        raise ValueError(f"schedule {schedule!r} is not known; known are {known}")
    return PLANNERS[schedule](trace, costs, **options)
