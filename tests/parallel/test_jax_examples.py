"""The JAX examples run, learn, and end with the same parameters on every number of ranks."""

from __future__ import annotations

import re

import pytest

from tests.parallel.runs import outcome

pytest.importorskip("jax")
pytest.importorskip("sklearn")

pytestmark = [pytest.mark.parallel, pytest.mark.slow, pytest.mark.timeout(520)]

MLP = "jax_mlp.py"
DOCUMENT = "how-to/jax.md"
LIBRARIES = (
    "jax_flax_nnx.py --steps 100",
    "jax_equinox.py --steps 100",
    "jax_flax_linen.py --steps 100",
)
"""In ``make test-long``, as the transformer is."""
MODELS = [pytest.param(run, marks=pytest.mark.long) for run in LIBRARIES]
GPT = "jax_transformer.py --steps 50 --width 64 --depth 2 --context 32 --max-bytes 300000"
SOON = (
    ("WFBP_TRIAL_STEPS", "1"),
    ("XLA_FLAGS", "--xla_backend_optimization_level=0"),
)
"""Plans are chosen within the steps that there are, however slow the machine is; and what LLVM
does to a program, which takes a third of the time, is not tested here."""

TOLERANCE = 1e-6
"""Relative, of a checksum: rounding over hundreds of steps."""


def told(ranks: int, run: str) -> str:
    """The output of an example's first rank."""
    if run not in (MLP, DOCUMENT):
        pytest.importorskip("equinox" if "equinox" in run else "flax")
    runs = (MLP, DOCUMENT) if run in (MLP, DOCUMENT) else (run,)
    found = outcome("examples", ranks, *runs, timeout=250, env=SOON, preloaded="jax")
    assert found.run.rc == 0, found.run
    printed: str = found.ranks[0][run]
    return printed


def checksums(output: str) -> list[float]:
    (line,) = re.findall(r"checksum on each rank: (.*)", output)
    return [float(word) for word in line.split()]


@pytest.mark.parametrize("run", [MLP, *MODELS])
def test_trains_as_one_process_does(run: str) -> None:
    """Each rank alone would go its own way."""
    first, second = checksums(told(2, run))
    (alone,) = checksums(told(1, run))
    assert first == second
    assert first == pytest.approx(alone, rel=TOLERANCE)


def test_the_program_in_the_documentation_runs() -> None:
    loss = re.fullmatch(r"loss on rank 0: ([\d.]+)\n", told(2, DOCUMENT))
    assert loss is not None
    assert float(loss[1]) < 0.1, "it begins at 0.73"


def test_mlp_learns_the_digits() -> None:
    accuracies = re.findall(r"test accuracy ([\d.]+)%", told(2, MLP))
    assert float(accuracies[-1]) >= 97.0


@pytest.mark.parametrize("run", MODELS)
def test_models_of_other_libraries_learn(run: str) -> None:
    losses = re.findall(r"loss ([\d.]+)", told(2, run))
    assert float(losses[-1]) < 0.7 * float(losses[0])


@pytest.mark.long
def test_transformer_learns_and_reports_its_plan() -> None:
    output = told(2, GPT)
    losses = re.search(r"loss\s*│ ([\d.]+) -> ([\d.]+)", output)
    assert losses is not None, output
    assert float(losses[2]) < float(losses[1]) - 1
    assert re.search(r"plan\s*│ \w+: \d+ groups? ", output), output
    assert re.search(r"iteration, measured\s*│ [\d.]+ ms", output), output
    assert len(set(checksums(output))) == 1


@pytest.mark.long
def test_transformer_runs_alone() -> None:
    short = "jax_transformer.py --steps 2 --width 32 --depth 1 --max-bytes 300000"
    assert "nothing to exchange" in told(1, short)
