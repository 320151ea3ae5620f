"""``wfbp bench`` and the project's own benchmark of collectives, on two ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import launcher

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


def test_training(mpirun: Mpirun, tmp_path: Path) -> None:
    """A model of the user's own, by all contestants."""
    (tmp_path / "tiny.py").write_text(TINY)
    path = f"{launcher.ROOT}:{tmp_path}"
    words = ("training", "--model", "tiny:make", "--rounds", 2, "--json")
    run = mpirun(2, "-m", "wfbp", "bench", *words, env={**SOON, "PYTHONPATH": path})
    assert run.rc == 0, run
    document = json.loads(run.stdout)
    assert document["ranks"] == 2
    assert document["command"] == ["bench", *map(str, words)]
    best = [name for name in document["seconds"] if name.startswith("ddp-")]
    assert len(best) == 1, best
    assert {name: len(times) for name, times in document["seconds"].items()} == dict.fromkeys(
        ("none", "mpi-flat", "ddp", "wfbp-auto", *best), 2
    )
    assert all(seconds > 0 for times in document["seconds"].values() for seconds in times)


def test_a_contestant_that_trains_something_else_is_told(mpirun: Mpirun, tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(
        TINY.replace("self.layers(x)", "self.layers(x + torch.randn_like(x))")
    )
    path = f"{launcher.ROOT}:{tmp_path}"
    words = ("--model", "noisy:make", "--contestants", "wfbp-layerwise")
    run = mpirun(2, "-m", "wfbp", "bench", "training", *words, env={**SOON, "PYTHONPATH": path})
    assert run.rc not in (0, None), run
    assert "wfbp-layerwise trains something else than mpi-flat" in run.stderr, run


def test_comm(mpirun: Mpirun) -> None:
    run = mpirun(2, "-m", "wfbp", "bench", "comm", "--max-bytes", 65536, "--rounds", 2)
    assert run.rc == 0, run
    assert run.stdout.count("KiB") == 3, run.stdout
    assert "2 ranks" in run.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--model", "vgg"), "expected mlp, transformer or MODULE:FUNCTION"),
        (
            ("--contestants", "horovod"),
            "ddp-best, wfbp-auto, wfbp-SCHEDULE or ddp-MIB",
        ),
        ((), "one rank has nobody to talk to; start it as: mpirun -np N wfbp bench"),
    ],
)
def test_what_is_unknown_is_told(mpirun: Mpirun, words: tuple[str, ...], told: str) -> None:
    run = mpirun(1, "-m", "wfbp", "bench", "training", *words)
    assert run.rc == 2, run
    assert told in run.stderr


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
