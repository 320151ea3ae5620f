"""``wfbp probe``: its parts in one process, and the whole under a real mpirun."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cli_runs import TRACES, answer, assert_refused, wfbp
from tests.support.emulated_link import EmulatedLink
from tests.support.launcher import Run
from tests.support.local import LocalWorld
from wfbp.cli.probe import Curves, measure
from wfbp.comm.cost_probe import measure_cost, probe_sizes
from wfbp.comm.waiting import Waiter
from wfbp.core.cost import Costs, LinearCost, PiecewiseCost, monotone_points
from wfbp.core.fit import fit_linear
from wfbp.core.types import Operation


class Clock:
    """A clock that only its readers, a microsecond each, and sleepers move on."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        self.now_s += 1e-6
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_an_emulated_link_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without other load."""
    clock = Clock()
    modules = ["wfbp.comm.backend", "wfbp.comm.cost_probe", "wfbp.comm.waiting"]
    for module in (*modules, "tests.support.emulated_link"):
        monkeypatch.setattr(f"{module}.time", clock)
    cost = LinearCost(5e-4, 1e-9)
    link = EmulatedLink(cost)
    waiter = Waiter(clock=clock.perf_counter, sleep=clock.sleep, activity=lambda: link.activity)
    measured = measure_cost(link, 4 << 20, budget_s=0.3, waiter=waiter)
    fitted = fit_linear(monotone_points(measured))
    assert fitted.alpha_s == pytest.approx(cost.alpha_s, rel=0.2)
    for size, seconds in monotone_points(measured):
        assert seconds >= cost(size) * 0.999


@pytest.mark.parametrize("size", [1, 2])
def test_every_rank_gets_the_same_curves(size: int) -> None:
    world = LocalWorld(size)
    found: dict[int, tuple[Curves, float]] = {}

    def run(rank: int) -> None:
        found[rank] = measure(world.backend(rank), 1000, 3.0)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert set(found) == set(range(size))
    assert all(told == found[0] for told in found.values())
    curves, _ = found[0]
    assert list(curves) == list(Operation)
    assert [size for size, _ in curves[Operation.ALL_REDUCE].points] == probe_sizes(1000)


def test_one_rank_is_too_few(tmp_path: Path) -> None:
    told = wfbp("probe", "--output", tmp_path / "cost.json")
    assert_refused(told, "mpirun -np N wfbp probe")
    assert not (tmp_path / "cost.json").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--max-bytes", "0"), ("--max-bytes", "'0'")),
        (("--max-bytes", "5T"), ("--max-bytes", "'5T'")),
        (("--seconds", "-1"), ("--seconds",)),
    ],
)
def test_bad_options(options: tuple[str, ...], words: tuple[str, ...]) -> None:
    assert_refused(wfbp("probe", *options), *words)


@pytest.mark.parallel
@pytest.mark.parametrize(
    ("num_ranks", "mpi", "as_json"), [(3, "mpich", False), (2, "openmpi", True)]
)
def test_a_cost_file_from_real_ranks(
    num_ranks: int, mpirun: Callable[..., Run], mpi: str, as_json: bool, tmp_path: Path
) -> None:
    """The file is one that wfbp plan reads."""
    output, plot = tmp_path / "cost.json", tmp_path / "plot.html"
    options = ["--max-bytes", "256K", "--seconds", "0.3", "--output", output, "--plot", plot]
    run = mpirun(num_ranks, "-m", "wfbp", "probe", *options, *["--json"] * as_json, mpi=mpi)
    assert run.rc == 0, run.stderr
    if as_json:
        told = json.loads(run.stdout)
        assert told["ranks"] == num_ranks
        assert set(told["fit"]) == {operation.value for operation in Operation}
        for fitted in told["fit"].values():
            assert fitted["alpha_s"] >= 0
            assert fitted["r_squared"] <= 1
    else:
        for name in ("all-reduce", "reduce-scatter", "all-gather", "R2", str(output)):
            assert name in run.stdout
        assert run.stdout.count("written:") == 1
    assert json.loads(output.read_text())["num_ranks"] == num_ranks
    costs = Costs.load(output)
    for curve in (costs.all_reduce, costs.reduce_scatter, costs.all_gather):
        assert isinstance(curve, PiecewiseCost)
        assert curve.points[0][0] == 4
        assert curve.points[-1][0] == 256 << 10
    assert plot.read_text().startswith("<!DOCTYPE html>")
    data = answer("plan", TRACES / "resnet-50.json", "--cost", output, "--schedule", "oasr")
    assert data["predicted"]["ratio_to_lower_bound"] >= 1


@pytest.mark.parallel
def test_what_is_wrong_is_said_once(mpirun: Callable[..., Run], tmp_path: Path) -> None:
    """Before anything is measured, by rank 0 alone."""
    run = mpirun(2, "-m", "wfbp", "probe", "--output", tmp_path / "no" / "cost.json")
    assert run.rc == 2, run.stderr
    assert run.stdout == ""
    lines = [line for line in run.stderr.splitlines() if "error:" in line]
    assert len(lines) == 1, run.stderr
    assert "no such directory" in lines[0]
