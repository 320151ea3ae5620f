"""``python -m tests.benchmarks scaling``: schedules from 4 to 2048 workers, and the time for it.

Every model, number of workers and schedule is planned and predicted. The cluster is one of
``tests/data/clusters.json``, taken apart to its links and put together again at every size.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.machine import environment, print_facts
from wfbp.cli.inputs import EXAMPLE_TRACES
from wfbp.cli.tables import print_table
from wfbp.core.cost import Costs, LinearCost
from wfbp.core.planners import PLANNERS
from wfbp.core.trace import Trace
from wfbp.sim.scaling import ALGORITHMS, Link, Node, scale
from wfbp.sim.sweep import SweepRow, sweep

DATA = Path(__file__).resolve().parents[2] / "tests" / "data"
WORKERS = tuple(2**k for k in range(2, 12))
SCHEDULES = ("layerwise", "single", "threshold", "mgwfbp", "oasr", "dear", "independent", "hybrid")
LIMIT_S = 10.0
FAST = 10.0
"""Links within a host are so much faster than those between hosts, unless told otherwise."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sweep."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks scaling", description=__doc__)
    parser.add_argument("--trace", type=Path, action="append", help="default: all examples")
    parser.add_argument("--clusters", type=Path, default=DATA / "clusters.json")
    parser.add_argument("--cluster", default="10GbE-16", help="a name in it (default 10GbE-16)")
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="ring")
    parser.add_argument("--ranks-per-host", type=int, default=8, help="for hierarchical")
    parser.add_argument("--kappa", type=float, default=0.0, help="interference (default 0)")
    parser.add_argument("--schedule", action="append", choices=PLANNERS)
    arguments = parser.parse_args(argv)
    clusters = {c["name"]: c for c in json.loads(arguments.clusters.read_text())["clusters"]}
    if arguments.cluster not in clusters:
        parser.error(f"no cluster {arguments.cluster!r}; known are {', '.join(clusters)}")
    row = clusters[arguments.cluster]
    costs = Costs(LinearCost(row["alpha_s"], row["beta_s_per_byte"]), kappa=arguments.kappa)
    node = None
    if arguments.algorithm == "hierarchical":
        two = scale(costs, 2, measured_on=row["workers"]).all_reduce
        assert isinstance(two, LinearCost)
        fast = Link(two.alpha_s / 2 / FAST, two.beta_s_per_byte / FAST)
        node = Node(arguments.ranks_per_host, fast)
    paths = arguments.trace or sorted(EXAMPLE_TRACES.glob("*.json"))
    if not paths:
        parser.error(f"no traces in {EXAMPLE_TRACES}; name some with --trace")
    traces = [Trace.load(path) for path in paths]
    schedules = arguments.schedule or SCHEDULES
    start, began = time.process_time(), time.perf_counter()
    rows = sweep(
        traces, costs, WORKERS, schedules, arguments.algorithm,
        measured_on=row["workers"], node=node,
    )  # fmt: skip
    cpu_s, wall_s = time.process_time() - start, time.perf_counter() - began
    for trace in traces:
        _print_model(trace.model, arguments.cluster, schedules, rows)
    print(
        f"{len(rows)} predictions in {wall_s:.2f} s, {cpu_s:.2f} s of one core (target "
        f"{LIMIT_S:.0f} s)"
    )
    print_facts(environment())
    return 0


def _print_model(
    model: str, cluster: str, schedules: Sequence[str], rows: Sequence[SweepRow]
) -> None:
    table = {(r.workers, r.schedule): r for r in rows if r.model == model}
    print_table(
        f"{model}: iteration in ms by workers; links of {cluster}",
        ("workers", *schedules, "LB", "T/LB of the last"),
        [
            (
                str(count),
                *(f"{table[count, name].iteration_s * 1e3:.1f}" for name in schedules),
                f"{table[count, schedules[-1]].lower_bound_s * 1e3:.1f}",
                f"{_ratio(table[count, schedules[-1]]):.3f}",
            )
            for count in WORKERS
        ],
    )


def _ratio(row: SweepRow) -> float:
    return row.iteration_s / row.lower_bound_s
