"""What an engine tells of itself."""

from __future__ import annotations

from typing import Any

from wfbp.runtime.tuning.tuner import Tuner


def make_report(tuner: Tuner, num_steps: int) -> dict[str, Any]:
    """The plan in use and what it costs; times in seconds, None where not yet known.

    Args:
        tuner: whose plan it is.
        num_steps: steps taken so far.
    """
    predicted = tuner.predicted if tuner.phase == "installed" else None
    measured_s = tuner.measured_s
    bound_s = predicted.lower_bound_s if predicted else None
    return {
        "schedule": tuner.plan.schedule,
        "phase": tuner.phase,
        "steps": num_steps,
        "num_groups": len(tuner.plan.groups),
        "num_tensors": len(tuner.plan.tensors),
        "total_bytes": tuner.plan.total_bytes,
        "overlap": tuner.plan.overlap,
        "kappa": tuner.costs.kappa if tuner.costs else None,
        "predicted_iteration_s": predicted.iteration_s if predicted else None,
        "measured_iteration_s": measured_s,
        "predicted_exposed_s": predicted.exposed_s if predicted else None,
        "exposed_s": tuner.exposed_s,
        "lower_bound_s": bound_s,
        "ratio_to_lower_bound": measured_s / bound_s if measured_s and bound_s else None,
        "plan_digest": tuner.plan.digest,
    }
