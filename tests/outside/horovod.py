"""Horovod's own tests and examples, with ``python -m wfbp.horovod`` in place of Horovod."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

RANKS = 2
STAND_INS = Path(__file__).with_name("stand_ins")
TEST_S, SUITE_S, EXAMPLE_S = 120, 1500, 300
KNOWN = {"Muon only supports 2D parameters": "PyTorch's Muon refuses the model of the test"}
"""Why tests may fail: part of the message, and what it means."""

SMALL_ELASTIC = "--batches-per-commit 2 --batches-per-host-check 2"
EXAMPLES = (
    "pytorch/pytorch_mnist.py --no-cuda --epochs 2",
    "pytorch/pytorch_mnist.py --no-cuda --epochs 1 --use-adasum",
    "pytorch/pytorch_mnist.py --no-cuda --epochs 1 --fp16-allreduce",
    "pytorch/pytorch_synthetic_benchmark.py --no-cuda --batch-size 2 --num-iters 2",
    "pytorch/pytorch_imagenet_resnet50.py --no-cuda --epochs 1 --batch-size 4",
    "adasum/adasum_small_model.py --op Adasum",
    "elastic/pytorch/pytorch_mnist_elastic.py --no-cuda --epochs 2",
    "elastic/pytorch/pytorch_synthetic_benchmark_elastic.py --no-cuda --batch-size 2 --num-iters 2",
    f"elastic/pytorch/pytorch_imagenet_resnet50_elastic.py --no-cuda --epochs 1 {SMALL_ELASTIC}",
)
"""Those that use PyTorch and none of Lightning, Ray and Spark, with what makes them short."""


class Outcome(NamedTuple):
    """Of one test or program."""

    name: str
    result: str  # passed, skipped or failed
    reason: str = ""

    @property
    def is_known(self) -> bool:
        """Whether it failed for a reason that is not wfbp's."""
        return any(part in self.reason for part in KNOWN)


def check_folder(horovod: Path) -> None:
    """Exit unless the folder holds Horovod's repository."""
    if not (horovod / "test" / "parallel" / "test_torch.py").exists():
        sys.exit(f"{horovod} has no test/parallel/test_torch.py; expected a clone of Horovod")


def tests(horovod: Path) -> Iterator[Outcome]:
    """Run ``test_torch.py``; the outcome of a test is the worst that any rank has."""
    with tempfile.TemporaryDirectory() as folder:
        pytest = "-m pytest -q -p no:cacheprovider -p outcomes -o addopts= -c /dev/null --rootdir ."
        command = [*pytest.split(), f"--timeout={TEST_S}", "test_torch.py"]
        _run(command, horovod / "test" / "parallel", SUITE_S, OUTCOMES=folder)
        worst: dict[str, Outcome] = {}
        for rank in range(RANKS):
            path = Path(folder, f"rank{rank}")
            for line in path.read_text().splitlines() if path.exists() else ():
                found = Outcome(*json.loads(line))
                if found.name not in worst or found.result == "failed":
                    worst[found.name] = found
    yield from worst.values()


def examples(horovod: Path) -> Iterator[Outcome]:
    """Run the examples, each in an empty folder."""
    for line in EXAMPLES:
        script, *arguments = line.split()
        with tempfile.TemporaryDirectory() as folder:
            done = _run([str(horovod / "examples" / script), *arguments], Path(folder), EXAMPLE_S)
        last = (done.stderr.strip().splitlines() or [""])[-1]
        result = "failed" if done.returncode else "passed"
        yield Outcome(line, result, f"{done.returncode}: {last}" if done.returncode else "")


def _run(
    command: list[str], folder: Path, limit_s: float, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program for Horovod on two ranks."""
    mpirun = str(Path(sys.executable).with_name("mpirun"))
    environment = {**os.environ, "PYTHONPATH": str(STAND_INS), "OMP_NUM_THREADS": "1", **variables}
    whole = [mpirun, "-np", str(RANKS), sys.executable, "-m", "wfbp.horovod", *command]
    try:
        return subprocess.run(
            whole, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(whole, 124, "", f"no end after {limit_s:.0f} s")
