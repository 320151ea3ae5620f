"""The real runtime on a trace and an emulated link, against the prediction.

    python -m tests.benchmarks replay --trace TRACE.json --cost COST.json --schedule oasr

One process plays a rank: its training thread sleeps the trace's compute times and announces
gradients, and its communication thread sends them over an emulated link that takes exactly the
cost curve's time. What is decoupled is packed, gathered, and waited for tensor by tensor in the
next forward. Reducer, sequencer, tuner and waiting are the ones of real training: the engine
measures ready times and the link's costs itself, plans, and runs the plan. Printed beside the
measured iteration: what the plan was predicted to take by the engine, from what it measured, and by
the planner, from the trace and costs given.

Tensors hold a part of their bytes (``--shrink``), for which the link takes as long as for all of
them: copying the 440 MB of a BERT here would measure this machine's memory.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.progress import track

from tests.benchmarks.turns import Timing
from tests.support.emulated_link import Curve, EmulatedLink
from wfbp.cli.tables import print_table
from wfbp.comm.arrays import Buffer, zeroed
from wfbp.comm.waiting import sharp_naps
from wfbp.config import Config
from wfbp.core import planners
from wfbp.core.cost import CostModel, Costs, LinearCost
from wfbp.core.planners import ALL_REDUCE_SCHEDULES, SCHEDULES
from wfbp.core.timeline import timeline
from wfbp.core.trace import Trace
from wfbp.core.types import Operation, TensorSpec
from wfbp.runtime.arguments import ReducerOptions
from wfbp.runtime.reducer import Reducer
from wfbp.runtime.runtime import JobRuntime
from wfbp.runtime.tuning.candidates import reordered

THRESHOLD_BYTES = 25 * 2**20
SHRINK = 32
WAITED_S = 100e-6
"""A shorter wait found its tensor whole."""


def main(argv: Sequence[str]) -> None:
    """Replay and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks replay", description=__doc__)
    parser.add_argument("--trace", type=Path, action="append", required=True)
    parser.add_argument("--cost", type=Path, help="a wfbp-cost/1 file")
    parser.add_argument("--clusters", type=Path, help="a wfbp-clusters/1 file, with --cluster")
    parser.add_argument("--cluster", action="append", default=[], help="a name in it")
    parser.add_argument("--schedule", action="append", choices=SCHEDULES)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument(
        "--shrink",
        type=int,
        default=SHRINK,
        help="hold this fraction of the bytes",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    links = _links(arguments.cost, arguments.clusters, arguments.cluster)
    if not links:
        parser.error("name a link: --cost FILE, or --clusters FILE --cluster NAME")
    cases = [
        (trace, link, costs, schedule)
        for trace in arguments.trace
        for link, costs in links
        for schedule in arguments.schedule or ["oasr"]
    ]
    rows = [
        replay(Trace.load(path), link, costs, schedule, arguments.iterations, arguments.shrink)
        for path, link, costs, schedule in track(cases, "replaying", disable=arguments.json)
    ]
    if arguments.json:
        print(json.dumps(rows))
        return
    print_table(
        "Measured iteration against prediction",
        ("<trace", "<link", "<schedule", "groups", "measured ms", "spread", "predicted ms", "error",
         "from trace ms", "T/LB"),
        [
            (r["model"], r["link"], r["schedule"], str(r["num_groups"]),
             *(f"{r[key] * 1e3:.1f}" for key in ("measured_s", "spread_s", "installed_s")),
             f"{r['error']:+.1%}", f"{r['planned_s'] * 1e3:.1f}",
             f"{r['measured_s'] / r['lower_bound_s']:.3f}")
            for r in rows
        ],
    )  # fmt: skip


def replay(
    trace: Trace,
    link: str,
    costs: Costs,
    schedule: str,
    iterations: int,
    shrink: int = SHRINK,
) -> dict[str, Any]:
    """Run one schedule on one trace until its plan is installed, then measure.

    ``installed_s`` is what the runtime predicted for the plan that it installed, ``planned_s`` what
    the planner predicts from the trace and costs given.
    """
    held = _shrunk(trace, shrink)
    config = replace(Config(), warmup_steps=1, profile_steps=3, replan_threshold=0.0)
    curves = {operation: _stretched(costs.of(operation), shrink) for operation in Operation}
    backend = EmulatedLink(curves[Operation.ALL_REDUCE], size=2, others=curves)
    runtime = JobRuntime(backend, config)
    try:
        engine = Reducer(
            runtime,
            held.specs,
            ReducerOptions(
                schedule,
                THRESHOLD_BYTES // shrink,
                decouples=schedule not in ALL_REDUCE_SCHEDULES,
                name=trace.model,
            ),
        )
        tensors = [zeroed(spec.nbytes) for spec in held.specs]
        with sharp_naps():
            while engine.report()["phase"] != "installed":
                _iterate(engine, trace, tensors)
            _iterate(engine, trace, tensors)
            times = [_iterate(engine, trace, tensors) for _ in range(iterations)]
        report = engine.report()
        plan = engine.tuner.plan
    finally:
        runtime.shutdown()
    name = report["schedule"]
    if name in ("dear", "threshold"):  # by the threshold in use
        made = replace(reordered(plan, held), tensors=trace.specs)
    else:
        made = planners.plan(name, trace, costs)
    planned = timeline(made, trace, costs)
    timing = Timing.of(times)
    installed_s = report["predicted_iteration_s"]
    return {
        "model": trace.model,
        "link": link,
        "schedule": schedule,
        "num_groups": report["num_groups"],
        "measured_s": timing.median,
        "spread_s": timing.spread,
        "installed_s": installed_s,
        "planned_s": planned.iteration_s,
        "lower_bound_s": planned.lower_bound_s,
        "error": timing.median / installed_s - 1,
    }


def _shrunk(trace: Trace, shrink: int) -> Trace:
    """The same compute on tensors of fewer elements."""
    tensors = tuple(
        replace(t, spec=TensorSpec(t.spec.name, (-(-t.spec.numel // shrink),), t.spec.dtype))
        for t in trace.tensors
    )
    return replace(trace, tensors=tensors)


def _stretched(cost: CostModel, shrink: int) -> Curve:
    """The time of a whole message for the part of it that is held."""
    return lambda nbytes: cost(nbytes * shrink)


def _iterate(engine: Reducer, trace: Trace, tensors: Sequence[Buffer]) -> float:
    """One iteration whose compute is sleep; its seconds."""
    start_s = time.perf_counter()
    due_s = start_s
    for index, tensor in enumerate(trace.tensors):
        if engine.decoupled:
            begin_s = time.perf_counter()
            engine.gathers.await_tensor(index)
            now_s = time.perf_counter()
            if now_s - begin_s > WAITED_S:
                due_s = max(due_s, now_s)
        engine.clock.mark_forward(index)
        due_s = _sleep_until(due_s + tensor.forward_s)
    engine.clock.mark_forward_end()
    for index in reversed(range(len(trace.tensors))):
        due_s = _sleep_until(due_s + trace.tensors[index].backward_s)
        engine.mark_ready(index, tensors[index].ctypes.data, tensors[index])
    engine.synchronize(whole=False)
    if engine.decoupled:
        engine.gathers.send([t.ctypes.data for t in tensors], tensors)
        if engine.profiling:
            engine.gathers.flush()
    return time.perf_counter() - start_s


def _sleep_until(due_s: float) -> float:
    """Sleep to a time of ``perf_counter``, and return it: lateness does not add up."""
    left_s = due_s - time.perf_counter()
    if left_s > 0:
        time.sleep(left_s)
    return due_s


def _links(
    cost: Path | None, clusters: Path | None, names: Sequence[str]
) -> list[tuple[str, Costs]]:
    links = [(cost.stem, Costs.load(cost))] if cost else []
    if clusters:
        known = {c["name"]: c for c in json.loads(clusters.read_text())["clusters"]}
        for name in names or known:
            if name not in known:
                raise SystemExit(f"{clusters}: no cluster {name!r}; it has {', '.join(known)}")
            row = known[name]
            links.append((name, Costs(LinearCost(row["alpha_s"], row["beta_s_per_byte"]))))
    return links
