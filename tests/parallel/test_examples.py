"""The examples run, learn, and learn the same by every schedule."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.launcher import Run

pytest.importorskip("torch")
pytest.importorskip("sklearn")

pytestmark = [pytest.mark.parallel, pytest.mark.slow]

SCHEDULES = ("auto", "oasr", "mgwfbp", "wfbp", "single", "threshold")
TOLERANCE = 0.006
"""Two of the 360 test images: what torch_digits.py states."""

Launch = Callable[..., Run]


def run(mpirun: Launch, ranks: int, example: str, *words: object) -> str:
    done = mpirun(ranks, f"examples/{example}", *words, timeout=110)
    assert done.rc == 0, done.stderr[-3000:]
    return done.stdout


def accuracies(output: str) -> list[float]:
    return [float(a) / 100 for a in re.findall(r"test accuracy ([\d.]+)%", output)]


@pytest.fixture(scope="module")
def digits_at_two() -> dict[str, float]:
    """Final accuracies so far, by schedule."""
    return {}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_digits_at_two_ranks(
    mpirun: Launch, digits_at_two: dict[str, float], schedule: str
) -> None:
    output = run(mpirun, 2, "torch_digits.py", "--schedule", schedule)
    final = digits_at_two[schedule] = accuracies(output)[-1]
    assert final >= 0.97
    assert max(digits_at_two.values()) - min(digits_at_two.values()) <= TOLERANCE


@pytest.mark.parametrize("schedule", ["auto", "wfbp", "single", "hybrid"])
def test_digits_at_four_ranks(
    mpirun: Launch, digits_at_two: dict[str, float], schedule: str
) -> None:
    """As at two ranks, where the same global batches are split otherwise."""
    if not digits_at_two:
        digits_at_two["auto"] = accuracies(run(mpirun, 2, "torch_digits.py"))[-1]
    final = accuracies(run(mpirun, 4, "torch_digits.py", "--schedule", schedule))[-1]
    assert final >= 0.97
    assert all(abs(final - other) <= TOLERANCE for other in digits_at_two.values())


@pytest.mark.parametrize("ranks", [1, 2])
def test_numpy_mlp(mpirun: Launch, ranks: int) -> None:
    assert accuracies(run(mpirun, ranks, "numpy_mlp.py"))[-1] >= 0.95


def test_gpt_learns_and_reports_its_plan(mpirun: Launch) -> None:
    words = ("--steps", 60, "--width", 64, "--depth", 2, "--max-bytes", 300_000)
    output = run(mpirun, 2, "torch_gpt.py", *words)
    losses = re.search(r"loss\s*│ ([\d.]+) -> ([\d.]+)", output)
    assert losses is not None, output
    assert float(losses[2]) < float(losses[1]) - 1
    assert re.search(r"plan\s*│ \w+: \d+ groups? ", output), output
    assert re.search(r"iteration, measured\s*│ [\d.]+ ms", output), output


def test_gpt_runs_alone(mpirun: Launch) -> None:
    words = ("--steps", 2, "--width", 32, "--depth", 1, "--max-bytes", 300_000)
    assert "nothing to exchange" in run(mpirun, 1, "torch_gpt.py", *words)
