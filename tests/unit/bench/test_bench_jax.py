"""The JAX benchmark's table, models and timeline."""

from __future__ import annotations

import pytest

pytest.importorskip("jax")
pytest.importorskip("torch")
pytest.importorskip("mpi4py")

import jax
import jax.numpy as jnp
import numpy as np

from tests.benchmarks import jax as benchmark
from tests.benchmarks.jax_contestants import CONTESTANTS, FLAT, MODELS, Contestant, mlp, update
from tests.benchmarks.jax_overlap import timeline
from tests.benchmarks.training import table


def test_contestants_are_compared_with_the_best_peer() -> None:
    seconds = {"none": [1.0], "mpi-flat": [3.0], "gloo-psum": [2.0], "wfbp-auto": [1.5]}
    rows = table({"seconds": seconds, "cpu_seconds": seconds, "reports": {}}, benchmark.OTHERS)
    assert [row[3] for row in rows] == ["0.500", "1.500", "1.000", "0.750"]


def test_reference_always_competes() -> None:
    options = benchmark.arguments(["--contestants", "wfbp-auto,none", "--models", "gpt"])
    assert options.contestants == [FLAT, "wfbp-auto", "none"]
    assert set(benchmark.arguments([]).contestants) == set(CONTESTANTS)
    with pytest.raises(SystemExit):
        benchmark.arguments(["--models", "alexnet"])


def test_the_models_are_of_the_training_benchmarks_sizes() -> None:
    leaves = {
        name: [leaf.size for leaf in jax.tree.leaves(model.build(0))]
        for name, model in MODELS.items()
    }
    assert (len(leaves["mlp"]), sum(leaves["mlp"])) == (120, 60 * (256 * 256 + 256))
    assert len(leaves["gpt"]) == 149
    assert 27_000_000 < sum(leaves["gpt"]) < 28_000_000
    for model in MODELS.values():
        assert jax.eval_shape(model.loss, model.build(0), model.batch(0)).shape == ()


def test_a_contestant_takes_steps_of_momentum() -> None:
    model = MODELS["mlp"]
    small = mlp(0, depth=2, width=256)
    batch = model.batch(1)
    contestant = Contestant("none", model)
    contestant.reset(small, 0.1)
    params, velocity = small, jax.tree.map(jnp.zeros_like, small)
    gradients = jax.jit(jax.grad(model.loss))
    for _ in range(2):
        contestant.step(batch)
        params, velocity = update(params, velocity, gradients(params, batch), 0.1)
    wanted = np.concatenate([np.asarray(p).reshape(-1) for p in jax.tree.leaves(params)])
    np.testing.assert_allclose(contestant.vector(), wanted, rtol=1e-4, atol=1e-5)


def test_the_timeline_shows_gradients_and_messages_in_time() -> None:
    iteration = {
        "ready_s": [0.5, 0.25, None],
        "closed_s": 0.5,
        "done_s": 1.0,
        "groups": [
            {"group": 0, "start_s": 0.25, "end_s": 0.5},
            {"group": 1, "start_s": 0.5, "end_s": 1.0},
        ],
    }
    title, ready, first, second, compute = timeline({"iterations": [iteration]}, 8).splitlines()
    assert "1000.0 ms" in title
    assert ready.endswith("  | |   ")
    assert first == "   message 0   ==="
    assert second == "   message 1     ===="
    assert compute.endswith(" #####")
