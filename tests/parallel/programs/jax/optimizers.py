"""DistributedOptimizer and value_and_grad in plain optax code."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import wfbp.jax as wfbp
from tests.parallel.programs.harness import Checks, raises
from tests.parallel.programs.jax.training import (
    alone,
    close,
    data,
    layers,
    mean_over_ranks,
    mlp_loss,
)

check = Checks()

STEPS = 4


def batch(number: int, rank: int) -> jax.Array:
    return data(6, 8, seed=100 * number + rank)


Batches = Callable[[int, int], jax.Array]


def everybody(params: Any, number: int, batches: Batches = batch) -> Any:
    """The gradients on all ranks' batches."""
    return mean_over_ranks(lambda x: alone(mlp_loss)(params, x), lambda r: batches(number, r))


def train(optimizer: Any, grads: Callable[[Any, int], Any]) -> Any:
    """Parameters after some steps of an optimizer that is compiled apart from the gradients."""
    params = layers(8, 5, 3)
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for number in range(STEPS):
        updates, state = update(grads(params, number), state, params)
        params = optax.apply_updates(params, updates)
    return params


def trains(optimizer: Any, single: Any, batches: Batches = batch) -> Any:
    """As one process does on everybody's batch; the state of the optimizer."""

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, x: jax.Array) -> Any:
        updates, state = optimizer.update(jax.grad(mlp_loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    params = layers(8, 5, 3)
    state = jax.jit(optimizer.init)(params)
    for number in range(STEPS):
        params, state = step(params, state, batches(number, wfbp.rank()))
    close(params, train(single, partial(everybody, batches=batches)), 1e-5)
    return state


@check
def optimizer_in_a_program() -> None:
    trains(wfbp.DistributedOptimizer(optax.adam(0.05)), optax.adam(0.05))
    reports = wfbp.report()
    assert len(reports) >= (wfbp.size() > 1)
    for name, report in reports.items():
        assert report["total_bytes"] > 0, name


@check
def chains() -> None:
    def chain(last: Any) -> Any:
        return optax.chain(optax.clip_by_global_norm(0.05), optax.add_decayed_weights(0.1), last)

    trains(wfbp.DistributedOptimizer(chain(optax.sgd(0.3, 0.9))), chain(optax.sgd(0.3, 0.9)))
    trains(optax.chain(wfbp.DistributedOptimizer(optax.identity()), optax.adamw(0.05)),
           optax.adamw(0.05))  # fmt: skip


@check
def multi_steps() -> None:
    """Accumulated around the exchange, which every microstep runs; and behind it."""
    inside = optax.MultiSteps(wfbp.DistributedOptimizer(optax.adam(0.05)), 2)
    outside = wfbp.DistributedOptimizer(
        optax.MultiSteps(optax.adam(0.05), 2).gradient_transformation()
    )
    single = optax.MultiSteps(optax.adam(0.05), 2)
    trains(inside, single)
    trains(outside, single)


@check
def injected_hyperparameters() -> None:
    schedule = optax.linear_schedule(0.1, 0.01, STEPS)
    trains(
        wfbp.DistributedOptimizer(optax.inject_hyperparams(optax.adam)(learning_rate=schedule)),
        optax.inject_hyperparams(optax.adam)(learning_rate=schedule),
    )
    trains(
        optax.inject_hyperparams(
            lambda learning_rate: wfbp.DistributedOptimizer(optax.sgd(learning_rate))
        )(learning_rate=schedule),
        optax.sgd(schedule),
    )


@check
def masks_and_labels() -> None:
    """What an optimizer is not given is not exchanged."""
    label = {name: {"w": "w", "b": "b"} for name in layers(8, 5, 3)}
    parts = {"w": optax.adam(0.05), "b": optax.sgd(0.1)}
    trains(wfbp.DistributedOptimizer(optax.partition(parts, label)), optax.partition(parts, label))
    wrapped = {"w": wfbp.DistributedOptimizer(parts["w"], name="w"),
               "b": wfbp.DistributedOptimizer(parts["b"], name="b")}  # fmt: skip
    trains(optax.partition(wrapped, label), optax.partition(parts, label))


@check
def masks() -> None:
    """Behind the averaging, and around it: what is masked is not exchanged then."""

    def mask(params: Any) -> Any:
        return {name: {"w": True, "b": name == "layer0"} for name in params}

    single = optax.masked(optax.adam(0.05), mask)
    trains(wfbp.DistributedOptimizer(single), single)

    def rest(params: Any) -> Any:
        return jax.tree.map(operator.not_, mask(params))

    trains(
        optax.chain(
            optax.masked(wfbp.DistributedOptimizer(optax.adam(0.05)), mask),
            optax.masked(optax.set_to_zero(), rest),
        ),
        optax.chain(single, optax.masked(optax.set_to_zero(), rest)),
    )


@check
def conditions_behind_the_averaging() -> None:
    """A gradient that is no number on one rank has the step left out on every rank."""

    def spoilt(number: int, rank: int) -> jax.Array:
        return batch(number, rank) * (jnp.nan if (number, rank) == (1, 0) else 1.0)

    finite = optax.apply_if_finite(optax.adam(0.05), max_consecutive_errors=3)
    state = trains(wfbp.DistributedOptimizer(finite), finite, spoilt)
    assert int(state.total_notfinite) == 1
    skipping = optax.MultiSteps(
        optax.adam(0.05), 1, should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation()
    state = trains(wfbp.DistributedOptimizer(skipping), skipping, spoilt)
    assert int(state.gradient_step) == STEPS - 1


@check
def a_value_that_decides_is_averaged_first() -> None:
    """The learning rate is halved on every rank at once, though ranks' own losses differ."""

    def make() -> Any:
        plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, cooldown=1)
        return optax.chain(optax.adam(0.05), plateau)

    def losses(params: Any, number: int) -> list[float]:
        return [float(compiled_loss(params, batch(number, r))) for r in range(wfbp.size())]

    optimizer, single = wfbp.DistributedOptimizer(make()), make()
    compiled_loss, update = jax.jit(mlp_loss), jax.jit(single.update)

    @jax.jit
    def step(params: Any, state: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(mlp_loss)(params, x)
        value = wfbp.average_metrics(loss)
        updates, state = optimizer.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    params = wanted = layers(8, 5, 3)
    state, single_state = optimizer.init(params), single.init(wanted)
    for number in range(2 * STEPS):
        params, state = step(params, state, batch(number, wfbp.rank()))
        value = jnp.float32(np.mean(losses(wanted, number)))
        updates, single_state = update(everybody(wanted, number), single_state, wanted, value=value)
        wanted = optax.apply_updates(wanted, updates)
    close(params, wanted, 1e-5)
    assert float(state[-1].scale) == float(single_state[-1].scale) < 1.0


@check
def extra_arguments() -> None:
    """They reach a transformation that takes them, and no other."""

    def update(updates: Any, state: Any, params: Any = None, *, factor: float, **_: Any) -> Any:
        return jax.tree.map(lambda u: factor * u, updates), state

    scaled = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    grads = {"a": jnp.full(3, wfbp.rank() + 1.0)}
    mean = (wfbp.size() + 1) / 2
    for optimizer, wanted in ((scaled, 5 * mean), (optax.sgd(1.0), -mean)):
        wrapped = wfbp.DistributedOptimizer(optimizer)
        found, _ = wrapped.update(grads, wrapped.init(grads), grads, factor=5.0)
        assert np.allclose(found["a"], wanted)


@check
def optimizer_without_jit() -> None:
    wanted = train(optax.adam(0.05), everybody)
    optimizer = wfbp.DistributedOptimizer(optax.adam(0.05))
    params = layers(8, 5, 3)
    state = optimizer.init(params)
    for number in range(STEPS):
        grads = alone(mlp_loss)(params, batch(number, wfbp.rank()))
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    close(params, wanted, 1e-5)


@check
def gradients_of_numpy() -> None:
    """Narrowed as JAX does it; once averaged, their memory is the caller's own again."""
    rank, mean = wfbp.rank(), (wfbp.size() - 1) / 2
    optimizer = wfbp.DistributedOptimizer(optax.identity(), name="numpy")
    double = np.full((4, 3), rank, np.float64)
    grads = {"number": float(rank), "double": double, "columns": double.T, "half": np.float16(rank)}
    for _ in range(2):
        found, _ = optimizer.update(grads, optax.EmptyState())
        double[:] = -99
        for name, gradient in found.items():
            assert np.allclose(gradient, mean), (name, gradient)
        double[:] = rank
    assert {name: g.dtype.name for name, g in found.items()} == {
        "number": "float32", "double": "float32", "columns": "float32", "half": "float16"
    }  # fmt: skip


@check
def sums() -> None:
    params = {"a": jnp.ones(3)}

    def loss(p: Any) -> jax.Array:
        return jnp.sum(p["a"]) * (wfbp.rank() + 1)

    total = wfbp.size() * (wfbp.size() + 1) / 2
    assert np.allclose(jax.jit(wfbp.grad(loss, op=wfbp.Sum))(params)["a"], total)
    optimizer = wfbp.DistributedOptimizer(optax.sgd(1.0), op=wfbp.Sum)
    found, _ = jax.jit(lambda p: optimizer.update(jax.grad(loss)(p), optimizer.init(p)))(params)
    assert np.allclose(found["a"], -total)


@check
def schedules() -> None:
    """Each by its own engine; the programs are compiled once, whatever plans come and go."""
    params = layers(8, 5, 3)
    for schedule in ("auto", "oasr", "mgwfbp", "layerwise", "single", "threshold"):
        step = jax.jit(wfbp.grad(mlp_loss, schedule=schedule, threshold_bytes=100))
        for number in range(6):
            close(step(params, batch(number, wfbp.rank())), everybody(params, number))
        assert step._cache_size() == 1


@check
def signature_of_value_and_grad() -> None:
    rank, mean = wfbp.rank(), (wfbp.size() - 1) / 2

    def loss(a: Any, b: Any, *, c: float = 1.0) -> Any:
        return jnp.sum(a) * b * c, {"rank": rank}

    a, b = jnp.ones(3), jnp.float32(rank)
    both = wfbp.value_and_grad(loss, argnums=(1, 0), has_aux=True)
    for step in (both, jax.jit(both)):
        (value, aux), (by_b, by_a) = step(a, b, c=2.0)
        assert float(value) == 6 * rank
        assert int(aux["rank"]) == rank
        assert float(by_b) == 6
        assert np.allclose(by_a, 2 * mean)
    for last in (-1, np.int64(1)):
        grads, aux = wfbp.grad(loss, argnums=last, has_aux=True)(a, b)
        assert float(grads) == 3
    assert aux == {"rank": rank}
    assert both.__name__ == "loss"


@check
def integers_pass() -> None:
    def loss(p: Any) -> jax.Array:
        return jnp.sum(p["a"]) * wfbp.rank() + jnp.sum(p["n"])

    params = {"a": jnp.ones(3), "n": jnp.arange(4)}
    found = wfbp.grad(loss, allow_int=True)(params)
    assert found["n"].dtype == jax.dtypes.float0
    assert np.allclose(found["a"], (wfbp.size() - 1) / 2)
    raises(TypeError, "int32", act=lambda: wfbp.grad(loss)(params))


@check
def complex_gradients() -> None:
    """Of a real loss, beside real ones, and of a holomorphic function; then optax's steps."""

    def loss(p: Any, x: jax.Array) -> jax.Array:
        wave = (x @ p["z"]) * jnp.conj(p["phase"])
        return jnp.mean(jnp.abs(wave) ** 2) + jnp.mean((x @ p["w"]) ** 2)

    real = data(8, 5, seed=3)
    params = {"z": jax.lax.complex(real, real[::-1]), "phase": jnp.complex64(2 - 1j), "w": real}
    single, optimizer = optax.adam(0.05), wfbp.DistributedOptimizer(optax.adam(0.05))
    state, own = single.init(params), optimizer.init(params)
    step = jax.jit(wfbp.grad(loss))
    for number in range(STEPS):
        wanted = mean_over_ranks(partial(alone(loss), params), partial(batch, number))
        mine = jax.tree.map(np.asarray, alone(loss)(params, batch(number, wfbp.rank())))
        updates, state = single.update(wanted, state, params)
        exchanged, own = optimizer.update(mine, own, params)
        found = step(params, batch(number, wfbp.rank()))
        for name in params:
            assert found[name].dtype == params[name].dtype
            np.testing.assert_allclose(found[name], wanted[name], 1e-5, 1e-5)
            np.testing.assert_allclose(exchanged[name], updates[name], 1e-4, 1e-5)
        params = optax.apply_updates(params, updates)
    cube = wfbp.grad(lambda z: z**3, holomorphic=True)
    for run in (cube, jax.jit(cube)):
        assert np.allclose(run(jnp.complex64(wfbp.rank() * 1j)), -3 * mean_square())


def mean_square() -> float:
    return sum(rank**2 for rank in range(wfbp.size())) / wfbp.size()


@check
def bad_arguments() -> None:
    params = layers(8, 5, 3)
    x = batch(0, 0)

    def cube(z: jax.Array) -> jax.Array:
        return z**3

    raises(ValueError, "holo", act=lambda: wfbp.grad(mlp_loss, schedule="holo")(params, x))
    raises(ValueError, "dear", "whole", act=lambda: wfbp.grad(mlp_loss, schedule="dear")(params, x))
    raises(ValueError, "0", act=lambda: wfbp.grad(mlp_loss, threshold_bytes=0)(params, x))
    raises(ValueError, "Max", act=lambda: wfbp.grad(mlp_loss, op=wfbp.Max)(params, x))
    raises(TypeError, "holomorphic", act=lambda: jax.grad(cube)(jnp.complex64(1j)))
    raises(TypeError, act=lambda: wfbp.grad(mlp_loss, argnums=5)(params, x))
    raises(TypeError, "scalar", act=lambda: wfbp.grad(cube)(jnp.ones(2)))
    raises(TypeError, "function", act=lambda: wfbp.DistributedOptimizer(cube))
    optimizer = wfbp.DistributedOptimizer(optax.identity())
    grads = {"a": jnp.zeros(2, jnp.float8_e5m2)}
    raises(ValueError, "gradients['a'] is float8_e5m2", act=lambda: optimizer.update(grads, None))
    assert optimizer.update({"n": jnp.arange(3)}, optax.EmptyState())[0]["n"].tolist() == [0, 1, 2]
