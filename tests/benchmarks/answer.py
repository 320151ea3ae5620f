"""``python -m tests.benchmarks answer``: how long ``wfbp plan`` takes as a whole process.

Starts Python and asks for the plan of one trace, as a user does, for every schedule and kind of
cost. The cases take turns round by round, so that foreign load meets them all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.benchmarks.machine import environment, print_facts
from tests.benchmarks.scaling import DATA
from wfbp.cli.inputs import EXAMPLE_TRACES
from wfbp.cli.tables import print_table
from wfbp.core.cost import Costs, LinearCost, PiecewiseCost
from wfbp.core.planners import PLANNERS

LIMIT_S = 1.5
SCHEDULES = ("oasr", "independent", "hybrid", "all")


def kinds() -> dict[str, Costs]:
    """10GbE among 16 workers, as a line and as a curve of 28 points, with interference and not."""
    row = next(
        c
        for c in json.loads((DATA / "clusters.json").read_text())["clusters"]
        if c["name"] == "10GbE-16"
    )
    line = LinearCost(row["alpha_s"], row["beta_s_per_byte"])
    # Measured curves are cheaper than their line for small messages, and dearer in the middle.
    sizes = [4.0 * 2**k for k in range(28)]
    curve = PiecewiseCost(tuple((m, line(m) * (0.5 + 0.02 * i)) for i, m in enumerate(sizes)))
    return {
        "line": Costs(line),
        "line, kappa 0.8": Costs(line, kappa=0.8),
        "curve": Costs(curve),
        "curve, kappa 0.8": Costs(curve, kappa=0.8),
    }


def measure(
    trace: Path, schedules: Sequence[str], rounds: int
) -> dict[tuple[str, str], list[float]]:
    """Seconds of each round, by schedule and kind of cost."""
    times: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        files: Mapping[str, Path] = {
            kind: Path(folder) / f"{number}.json" for number, kind in enumerate(kinds())
        }
        for kind, costs in kinds().items():
            files[kind].write_text(json.dumps(costs.to_json()))
        for _ in range(rounds):
            for schedule in schedules:
                for kind, cost in files.items():
                    command = [sys.executable, "-m", "wfbp", "plan", str(trace)]
                    command += ["--cost", str(cost), "--schedule", schedule, "--json"]
                    start = time.perf_counter()
                    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                    times.setdefault((schedule, kind), []).append(time.perf_counter() - start)
    return times


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks answer", description=__doc__)
    parser.add_argument("--trace", type=Path, default=EXAMPLE_TRACES / "densenet-201.json")
    parser.add_argument("--schedule", action="append", choices=(*PLANNERS, "all"))
    parser.add_argument("--rounds", type=int, default=5, help="processes per case (default 5)")
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1:
        parser.error(f"--rounds: expected at least 1, found {arguments.rounds}")
    schedules = arguments.schedule or SCHEDULES
    times = measure(arguments.trace, schedules, arguments.rounds)
    rows = []
    for schedule in schedules:
        found = [times[schedule, kind] for kind in kinds()]
        rows.append([schedule, *(f"{statistics.median(t):.2f} ({max(t):.2f})" for t in found)])
    print_table(
        f"wfbp plan {arguments.trace.name} --json: median seconds (largest) of "
        f"{arguments.rounds}; target {LIMIT_S} s",
        ("<schedule", *kinds()),
        rows,
    )
    print_facts(environment())
    return 0
