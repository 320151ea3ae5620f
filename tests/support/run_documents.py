"""Recorded runs, made up from predictions: what ranks would have written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from wfbp.core.cost import Costs, LinearCost, PiecewiseCost
from wfbp.core.planners import plan
from wfbp.core.timeline import timeline
from wfbp.core.trace import Trace, TraceTensor
from wfbp.core.types import TensorSpec


def trace(num_tensors: int = 12) -> Trace:
    """A model of layers that grow."""
    rows = tuple(
        TraceTensor(TensorSpec(f"layer{k}", (20_000 * (k + 1),), "float32"), 1e-3, 2e-3)
        for k in range(num_tensors)
    )
    return Trace("measured", rows, other_s=1e-3)


def costs() -> Costs:
    """A measured curve: a start-up, then a slope."""
    sizes = (4, 1024, 65_536, 1_048_576, 16_777_216)
    line = LinearCost(3e-4, 1.5e-9)
    return Costs(PiecewiseCost(tuple((float(m), line(m)) for m in sizes)), kappa=0.1)


def document(rank: int, size: int, name: str = "SGD", schedule: str = "mgwfbp") -> dict[str, Any]:
    """What one rank records of a run that went as predicted, each rank a little slower."""
    model, network = trace(), costs()
    made = plan(schedule, model, network)
    times = timeline(made, model, network)
    slow = 1.0 + 0.01 * rank
    begin_s = model.other_s + model.forward_s
    ready = [slow * (begin_s + at) for at in reversed(model.ready_times_s)]
    done_s = slow * times.iteration_s

    def iteration(number: int) -> dict[str, Any]:
        scale = 1.0 + 0.002 * number
        return {
            "ready_s": [scale * at for at in ready],
            "forward_s": [None] * len(ready),
            "forward_end_s": None,
            "closed_s": scale * max(ready),
            "done_s": scale * done_s,
            "groups": [
                {
                    "group": index,
                    "start_s": scale * slow * (begin_s + at.start_s),
                    "packed_s": scale * slow * (begin_s + at.start_s + 1e-5),
                    "end_s": scale * slow * (begin_s + at.end_s),
                }
                for index, at in enumerate(times.groups)
            ],
        }

    report = {
        "schedule": schedule,
        "phase": "installed",
        "steps": 64,
        "kappa": network.kappa,
        "predicted_iteration_s": times.iteration_s,
        "measured_iteration_s": done_s,
        "predicted_exposed_s": times.exposed_s,
        "exposed_s": slow * times.exposed_s,
        "lower_bound_s": times.lower_bound_s,
        "ratio_to_lower_bound": done_s / times.lower_bound_s,
        "plan_digest": made.digest,
    }
    return {
        "format": "wfbp-run/1",
        "name": name,
        "rank": rank,
        "size": size,
        "report": report,
        "plan": made.to_json(),
        "trace": model.to_json(),
        "costs": network.to_json(),
        "iterations": [iteration(number) for number in range(5)],
    }


def record(folder: Path, size: int = 2, name: str = "SGD", **changes: Any) -> Path:
    """A directory as a run of ``size`` ranks leaves it, with keys of every document replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(size):
        data = document(rank, size, name) | changes
        (folder / f"{re.sub('[^a-zA-Z]', '', name)}.rank{rank}.json").write_text(json.dumps(data))
    return folder
