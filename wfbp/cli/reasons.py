"""Why each message of a predicted iteration leaves when it does."""

from __future__ import annotations

from wfbp.core.timeline import IterationForecast
from wfbp.core.types import Phase

_SAME = 1e-9  # relative; rounding may differ by as much


def reasons(predicted: IterationForecast) -> list[str]:
    """The reason for the start of each group, and what waits for it, a line for people."""
    plan = predicted.plan
    same_s = _SAME * predicted.iteration_s
    told = []
    for group, at in zip(plan.groups, predicted.groups, strict=True):
        waited_s = at.start_s - at.ready_s
        if waited_s > same_s:
            why = f"waits {waited_s * 1e3:,.3f} ms for the channel"
        elif group.phase is Phase.BACKWARD:
            why = f"leaves when {plan.tensors[min(group.tensors)].name} is ready"
        else:
            why = "leaves when forward starts"
        exposed = at.exposed_s > same_s
        told.append(f"{why}; {f'{at.exposed_s * 1e3:,.3f} ms exposed' if exposed else 'hidden'}")
    return told
