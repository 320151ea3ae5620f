"""Records the files of the package that one training step executes.

    python -m tools.step_files [SCHEDULE]         # over messages, two ranks
    python -m tools.step_files --shared-memory    # on one host
    python -m tools.step_files --functions        # functions, too
    python -m tools.step_files --package          # the package's size

A small model trains until its plan is installed. Then every Python function of the package that
any thread of rank 0 enters within some steps is recorded. How often threads look for messages
depends on time, so the fewest calls of a step are shown beside the mean. C++ does not appear: add
``csrc/pack_table.h`` and, over messages, ``csrc/transfers.cc``.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1] / "wfbp"
WARM_UP, RECORDED = 160, 12


def package_size() -> dict[str, int]:
    """Lines, classes and functions of all Python files of the package."""
    sizes = Counter[str]()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        sizes["lines"] += len(text.splitlines())
        for node in ast.walk(ast.parse(text)):
            sizes["classes"] += isinstance(node, ast.ClassDef)
            sizes["functions"] += isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return dict(sizes)


def record(schedule: str, result: Path) -> None:
    """On each rank: train, record some steps, and write what rank 0 entered."""
    entered = [Counter[tuple[str, str]]()]  # by step
    recording = False

    def note(frame: FrameType, event: str, _: Any) -> None:
        if recording and event == "call":
            entered[-1][frame.f_code.co_filename, frame.f_code.co_qualname] += 1

    threading.setprofile(note)  # before the communication thread starts
    sys.setprofile(note)
    import torch

    import wfbp.torch as wfbp

    wfbp.init()
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers)
    optimizer = wfbp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        named_parameters=model.named_parameters(),
        schedule=schedule,
    )
    data = torch.randn(16, 256)
    for step in range(WARM_UP + RECORDED):
        if step == WARM_UP:
            assert optimizer.report()["phase"] == "installed"
            recording = True
        if recording:
            entered.append(Counter())
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
    recording = False
    sys.setprofile(None)
    if wfbp.rank() == 0:
        files: dict[str, dict[str, tuple[float, int]]] = defaultdict(dict)
        steps = entered[1:]
        for name, function in sorted(set().union(*steps)):
            path = Path(name)
            if PACKAGE in path.parents:
                calls = [step[name, function] for step in steps]
                relative = str(path.relative_to(PACKAGE.parent))
                files[relative][function] = sum(calls) / RECORDED, min(calls)
        result.write_text(json.dumps(files))


def measure(schedule: str, shared_memory: bool) -> dict[str, dict[str, tuple[float, int]]]:
    """By file and function, the mean and the fewest calls of a step, from a run of two ranks."""
    python = Path(sys.executable)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "files.json")
        command = [
            python.with_name("mpirun"), "-n", "2", python, "-m", "tools.step_files",
            schedule, "--record", result,
        ]  # fmt: skip
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "WFBP_SHARED_MEMORY": str(int(shared_memory)),
        }  # fmt: skip
        subprocess.run(
            [str(part) for part in command], env=environment, cwd=PACKAGE.parent, check=True
        )
        files: dict[str, dict[str, tuple[float, int]]] = json.loads(result.read_text())
        return files


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tools.step_files")
    parser.add_argument("schedule", nargs="?", default="oasr")
    parser.add_argument("--shared-memory", action="store_true")
    parser.add_argument("--functions", action="store_true")
    parser.add_argument("--package", action="store_true")
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.package:
        print(", ".join(f"{count} {what}" for what, count in package_size().items()))
        return
    if options.record:
        record(options.schedule, options.record)
        return
    files = measure(options.schedule, options.shared_memory)
    lines = {name: len((PACKAGE.parent / name).read_text().splitlines()) for name in files}
    totals = {name: [*map(sum, zip(*found.values(), strict=True))] for name, found in files.items()}
    for name, functions in sorted(files.items(), key=lambda item: -totals[item[0]][0]):
        calls, least = totals[name]
        print(
            f"{calls:6.0f} calls (least {least}) {len(functions):4} functions {lines[name]:5} lines"
            f"  {name}"
        )
        if options.functions:
            for function, (count, least) in sorted(functions.items(), key=lambda item: -item[1][0]):
                print(f"{count:13.1f} {least:11}  {function}")
    calls, least = map(sum, zip(*totals.values(), strict=True))
    print(
        f"{options.schedule}: {len(files)} files, {sum(map(len, files.values()))} functions, "
        f"{sum(lines.values())} lines, {calls:.0f} calls (least {least})"
    )


if __name__ == "__main__":
    main()
