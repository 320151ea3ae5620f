"""``wfbp bench`` and the project's own benchmark of collectives, on two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support import launcher
from tests.support.cli_runs import assert_refused, wfbp

pytest.importorskip("torch")
pytest.importorskip("rich")

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(200)]

Mpirun = Callable[..., launcher.Run]
QUICK = {"WFBP_WARMUP_STEPS": "1", "WFBP_PROFILE_STEPS": "1", "WFBP_PROBE_BUDGET_S": "0.02"}
SOON = {**QUICK, "WFBP_TRIAL_STEPS": "1"}

TINY = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1))
    def forward(self, x, y):
        return (self.layers(x) - y).square().mean()

def make():
    def batch(seed):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
        return x, x.sum(1, keepdim=True)
    return Net(), batch
"""

HOROVOD = """
import torch
from mpi4py import MPI

is_up = False

def init():
    global is_up
    is_up = True

def shutdown():
    global is_up
    is_up = False

def is_initialized():
    return is_up

def DistributedOptimizer(optimizer, named_parameters):
    class Averaging(type(optimizer)):
        def __init__(self):
            super().__init__(optimizer.param_groups)  # the state begins anew, as in Horovod

        def step(self, closure=None):
            assert is_up, "Horovod was stopped"
            for group in self.param_groups:
                for p in group["params"]:
                    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, p.grad.numpy())
                    p.grad /= MPI.COMM_WORLD.size
            super().step(closure)

    return Averaging()
"""


def test_training(mpirun: Mpirun, tmp_path: Path) -> None:
    """A model of the user's own, by all contestants."""
    (tmp_path / "tiny.py").write_text(TINY)
    path = f"{launcher.ROOT}:{tmp_path}"
    words = ("training", "--model", "tiny:make", "--rounds", 2, "--json")
    variables = {**SOON, "PYTHONPATH": path}
    run = mpirun(2, "-m", "wfbp", "bench", *words, env=variables, preloaded="torch")
    assert run.rc == 0, run
    document = json.loads(run.stdout)
    assert document["ranks"] == 2
    assert document["command"] == ["bench", *map(str, words)]
    best = [name for name in document["seconds"] if name.startswith("ddp-")]
    assert len(best) == 1, best
    assert {name: len(times) for name, times in document["seconds"].items()} == dict.fromkeys(
        ("none", "mpi-per-tensor", "ddp", "wfbp-auto", *best), 2
    )
    assert document["cpu_seconds"].keys() == document["seconds"].keys()
    for key in ("seconds", "cpu_seconds"):
        assert all(seconds > 0 for times in document[key].values() for seconds in times)


def test_horovod_runs_only_in_its_own_blocks(mpirun: Mpirun, tmp_path: Path) -> None:
    """By a package with Horovod's interface, since Horovod itself takes minutes to build."""
    (tmp_path / "tiny.py").write_text(TINY)
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").touch()
    (tmp_path / "horovod" / "torch.py").write_text(HOROVOD)
    words = ("--model", "tiny:make", "--contestants", "horovod", "--rounds", 2, "--json")
    variables = {**SOON, "PYTHONPATH": f"{launcher.ROOT}:{tmp_path}"}
    run = mpirun(2, "-m", "wfbp", "bench", "training", *words, env=variables, preloaded="torch")
    assert run.rc == 0, run
    assert len(json.loads(run.stdout)["seconds"]["horovod"]) == 2


def test_a_contestant_that_trains_something_else_is_told(mpirun: Mpirun, tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(
        TINY.replace("self.layers(x)", "self.layers(x + torch.randn_like(x))")
    )
    path = f"{launcher.ROOT}:{tmp_path}"
    words = ("--model", "noisy:make", "--contestants", "wfbp-layerwise")
    variables = {**SOON, "PYTHONPATH": path}
    command = ("-m", "wfbp", "bench", "training", *words)
    run = mpirun(2, *command, env=variables, preloaded="torch")
    assert run.rc not in (0, None), run
    assert "wfbp-layerwise trains something else than mpi-per-tensor" in run.stderr, run


@pytest.mark.long
def test_peers_are_compared(tmp_path: Path) -> None:
    """The command of the front page's table, on the smallest model and in shared memory alone."""
    files = [tmp_path / name for name in ("samples.json", "table.md", "picture.svg")]
    outputs = zip(("--json", "--table", "--picture"), map(str, files), strict=True)
    words = ["--models", "mlp", "--links", "none", "--rounds", "1", *chain(*outputs)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks", "peers", *words],
        cwd=launcher.ROOT,
        env={**os.environ, **QUICK},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    samples, table, picture = (file.read_text() for file in files)
    assert list(json.loads(samples)["results"]["none"]) == ["mlp"]
    assert table.splitlines()[2].startswith("| shared memory: MLP")
    assert table == done.stdout
    ElementTree.fromstring(picture)


def test_one_rank_is_refused(mpirun: Mpirun) -> None:
    run = mpirun(1, "-m", "wfbp", "bench", "training", preloaded="torch")
    assert run.rc == 2, run
    assert (
        "a benchmark needs at least two ranks; start it as: mpirun -np N wfbp bench" in run.stderr
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--model", "vgg"), "expected mlp, transformer or MODULE:FUNCTION"),
        (
            ("--contestants", "gloo"),
            "ddp-best, horovod, wfbp-auto, wfbp-SCHEDULE, wfbp-SCHEDULE/COMPRESSION or ddp-MIB",
        ),
    ],
)
def test_what_is_unknown_is_told(words: tuple[str, ...], told: str) -> None:
    assert_refused(wfbp("bench", "training", *words), told)


@pytest.mark.slow
def test_collectives_of_the_backend(mpirun: Mpirun) -> None:
    arguments = ("tests.benchmarks", "comm", "--json", "--rounds", 2, "--max-bytes", 65536)
    run = mpirun(2, "-m", *arguments, "--gbit", 10)
    assert run.rc == 0, run.stderr
    document = json.loads(run.stdout)
    assert [t["nbytes"] for t in document["timings"][::8]] == [4096, 16384, 65536]
    assert len({t["contestant"] for t in document["timings"]}) == 8
    assert set(document["cpu_shares"]) == {"idle", "waiting for a late rank"}
    assert len(document["streams"]) == 8
    assert document["machine"]["ranks"] == "2"


@pytest.mark.slow
@pytest.mark.long
def test_all_reduces_by_size_of_chunks(mpirun: Mpirun) -> None:
    arguments = ("tests.benchmarks", "comm", "--sweep", "--rounds", 2, "--max-bytes", 1 << 20)
    run = mpirun(2, "-m", *arguments, "--json")
    assert run.rc == 0, run.stderr
    timings = json.loads(run.stdout)["timings"]
    assert len({t["contestant"] for t in timings}) == len(timings) == 11
    assert all(t["median_us"] > 0.0 for t in timings)


@pytest.mark.slow
@pytest.mark.long
def test_round_trips_of_named_operations(mpirun: Mpirun) -> None:
    arguments = ("operations", "--json", "--rounds", 2, "--calls", 3, "--bytes", 4, 4000)
    run = mpirun(2, "-m", "tests.benchmarks", *arguments)
    assert run.rc == 0, run.stderr
    document = json.loads(run.stdout)
    assert {row["nbytes"] for row in document["rows"]} == {4, 4000}
    named = [row for row in document["rows"] if row["operation"] == "allreduce(array, name='x')"]
    assert len(named) == 2
    assert all(row["median_us"] > 0.0 for row in document["rows"])
    assert document["idle_share"] >= 0.0
