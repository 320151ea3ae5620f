"""``python -m tests.benchmarks plan``: how long the planners take.

Every case is a whole call, from trace and costs to a validated plan. Cases take turns round by
round, so that foreign load meets them all. The traces are made up: sizes drawn from those of
convolutional and transformer models, compute times that make communication about as long as
backward, so that the planners have something to decide.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from tests.benchmarks.machine import environment, print_facts
from tests.benchmarks.turns import Timing
from wfbp.cli.tables import print_table
from wfbp.core.cost import CostModel, Costs, LinearCost, PiecewiseCost
from wfbp.core.planners import PLANNERS, plan
from wfbp.core.planners.exact import independent, oasr
from wfbp.core.trace import Trace, TraceTensor
from wfbp.core.types import TensorSpec

NUM_TENSORS = (1_000, 10_000)
MAX_CURVE_TENSORS = 1_000
"""Planning by a measured curve takes quadratic time; larger cases would dominate the run."""
BACKWARD_S = 0.2
LIMIT_MS = {1_000: 10.0, 10_000: 200.0}
"""Targets for linear cost without interference."""


class Case(NamedTuple):
    """One planner on one input."""

    schedule: str
    num_tensors: int
    cost: str
    kappa: float


def make_trace(num_tensors: int, seed: int = 0) -> Trace:
    """A made-up model: the same for the same arguments."""
    rng = random.Random(seed)
    rows = []
    for k in range(num_tensors):
        numel = rng.choice([64, 256, 1024, 65_536, 589_824, rng.randint(1, 1_000_000)])
        spec = TensorSpec(f"layer{k}", (numel,), "float32")
        share = 2.0 * rng.random() / num_tensors
        rows.append(TraceTensor(spec, BACKWARD_S / 2 * share, BACKWARD_S * share))
    return Trace(f"made up, {num_tensors} tensors", tuple(rows))


def make_cost(kind: str, trace: Trace) -> CostModel:
    """A network on which the model's bytes take about as long as backward."""
    linear = LinearCost(3e-4, 0.9 * BACKWARD_S / sum(trace.backward_bytes))
    if kind == "linear":
        return linear
    # A measured curve is no straight line: small messages are cheaper, the middle is dearer.
    sizes = [4.0 * 2**k for k in range(32)]
    return PiecewiseCost(tuple((m, linear(m) * (0.5 + 0.02 * i)) for i, m in enumerate(sizes)))


def cases() -> list[Case]:
    """Every planner at every size with linear cost, and OASR's dearer variants."""
    found = [Case(name, n, "linear", 0.0) for n in NUM_TENSORS for name in PLANNERS]
    found += [Case("oasr", n, "linear", 0.5) for n in NUM_TENSORS]
    found += [Case("oasr", MAX_CURVE_TENSORS, "measured curve", kappa) for kappa in (0.0, 0.5)]
    return found


def measure(chosen: Sequence[Case], rounds: int) -> list[dict[str, Any]]:
    """Time the cases in turns: milliseconds per call."""
    traces = {n: make_trace(n) for n in {case.num_tensors for case in chosen}}
    times: dict[Case, list[float]] = {case: [] for case in chosen}
    groups = {}
    for _ in range(rounds):
        for case in chosen:
            trace = traces[case.num_tensors]
            costs = Costs(make_cost(case.cost, trace), kappa=case.kappa)
            for planner in (oasr, independent):
                planner.cache_clear()
            start = time.perf_counter()
            made = plan(case.schedule, trace, costs)
            times[case].append(1e3 * (time.perf_counter() - start))
            groups[case] = len(made.groups)
    return [
        {**case._asdict(), "groups": groups[case], **Timing.of(ms)._asdict()}
        for case, ms in times.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; ``--json`` writes one object instead of a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks plan", description=__doc__)
    parser.add_argument("--rounds", type=int, default=11, help="calls per case (default 11)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    if arguments.rounds < 2:
        parser.error(f"--rounds: expected at least 2, found {arguments.rounds}")
    results = measure(cases(), arguments.rounds)
    if arguments.json:
        print(json.dumps({"environment": environment(), "results": results}))
        return 0
    columns = ("num_tensors", "cost", "kappa", "groups")
    rows = [
        [r["schedule"], *(str(r[c]) for c in columns), f"{r['median']:.2f}", f"{r['least']:.2f}",
         f"{r['spread']:.2f}", target(r)]
        for r in results
    ]  # fmt: skip
    headings = ("<planner", "tensors", "<cost", "kappa", "groups", "median ms", "least", "spread")
    print_table("Time to plan", (*headings, "target"), rows)
    print_facts(environment())
    return 0


def target(result: dict[str, Any]) -> str:
    """Milliseconds; there is one for linear cost without interference."""
    has_target = result["cost"] == "linear" and not result["kappa"]
    return f"{LIMIT_MS[result['num_tensors']]:.0f}" if has_target else "-"
