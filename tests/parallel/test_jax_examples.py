"""The JAX examples run and learn."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.launcher import Run

pytest.importorskip("jax")
pytest.importorskip("sklearn")

pytestmark = [pytest.mark.parallel, pytest.mark.slow]

Launch = Callable[..., Run]


def run(mpirun: Launch, ranks: int, example: str, *words: object) -> str:
    done = mpirun(ranks, f"examples/{example}", *words, timeout=110)
    assert done.rc == 0, done.stderr[-3000:]
    return done.stdout


def test_mlp_learns_the_digits(mpirun: Launch) -> None:
    accuracies = re.findall(r"test accuracy ([\d.]+)%", run(mpirun, 2, "jax_mlp.py"))
    assert float(accuracies[-1]) >= 97.0


@pytest.mark.parametrize(
    ("library", "example"),
    [
        ("equinox", "jax_equinox.py"),
        ("flax", "jax_flax_linen.py"),
        ("flax", "jax_flax_nnx.py"),
    ],
)
def test_models_of_other_libraries_learn(mpirun: Launch, library: str, example: str) -> None:
    pytest.importorskip(library)
    losses = re.findall(r"loss ([\d.]+)", run(mpirun, 2, example, "--steps", 100))
    assert float(losses[-1]) < 0.7 * float(losses[0])


def test_transformer_learns_and_reports_its_plan(mpirun: Launch) -> None:
    pytest.importorskip("flax")
    words = ("--steps", 60, "--width", 64, "--depth", 2, "--context", 64, "--max-bytes", 300_000)
    output = run(mpirun, 2, "jax_transformer.py", *words)
    losses = re.search(r"loss\s*│ ([\d.]+) -> ([\d.]+)", output)
    assert losses is not None, output
    assert float(losses[2]) < float(losses[1]) - 1
    assert re.search(r"plan\s*│ \w+: \d+ groups? ", output), output
    assert re.search(r"iteration, measured\s*│ [\d.]+ ms", output), output


def test_transformer_runs_alone(mpirun: Launch) -> None:
    pytest.importorskip("flax")
    words = ("--steps", 2, "--width", 32, "--depth", 1, "--max-bytes", 300_000)
    assert "nothing to exchange" in run(mpirun, 1, "jax_transformer.py", *words)
