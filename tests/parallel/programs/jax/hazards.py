"""What programs do that could bring announcements and steps out of order."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import wfbp.jax as wfbp
from tests.parallel.programs.harness import Checks, raises
from tests.parallel.programs.jax.training import (
    alone,
    averages,
    close,
    data,
    layers,
    mean_over_ranks,
    mlp_loss,
)
from wfbp.runtime import process

check = Checks()


def batch(number: int, rank: int | None = None, rows: int = 6) -> jax.Array:
    return data(rows, 8, seed=100 * number + (wfbp.rank() if rank is None else rank))


def mean(params: Any, number: int, rows: int = 6) -> Any:
    """The gradients of ``mlp_loss`` on everybody's batch of that number."""
    return mean_over_ranks(lambda x: alone(mlp_loss)(params, x), lambda r: batch(number, r, rows))


@check
def programs_of_one_rank_are_traced_again() -> None:
    """Else a program that was traced alone would never exchange anything."""
    usual, number = process.current("the check").config, wfbp.rank()
    size = wfbp.size()
    step = jax.jit(wfbp.grad(lambda w: w * (1.0 + number)))
    wfbp.shutdown()
    wfbp.init(comm=[number], config=usual)
    assert float(step(0.0)) == 1.0 + number
    wfbp.shutdown()
    wfbp.init(config=usual)
    assert float(step(0.0)) == (size + 1) / 2


@check
def gradients_leave_while_backward_computes() -> None:
    """By what the runtime records: some message starts before the last gradient exists."""
    usual = process.current("the check").config
    folder = Path(sys.argv[1], "recorded")
    params = layers(*[256] * 9)
    x = data(256, 256, seed=wfbp.rank())
    wfbp.shutdown()
    # Recorded when a plan has been in use for some steps.
    wfbp.init(config=replace(usual, record=str(folder), warmup_steps=1, profile_steps=1))
    step = jax.jit(wfbp.grad(mlp_loss, schedule="layerwise"))
    for _ in range(20):
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, step(params, x))
    jax.block_until_ready(params)
    rank = wfbp.rank()
    wfbp.shutdown()
    wfbp.init(config=usual)
    files = folder.glob(f"*.rank{rank}.json")
    (file,) = (f for f in files if not f.name.startswith("timeline."))
    iterations = json.loads(file.read_text())["iterations"]
    early = [
        group
        for iteration in iterations
        for group in iteration["groups"]
        if group["start_s"] < iteration["closed_s"]
    ]
    assert early, iterations


@check
def recompilation() -> None:
    """Other batch sizes compile anew; the exchange stays."""
    params = layers(8, 5, 3)
    step = jax.jit(wfbp.grad(mlp_loss))
    for number, rows in enumerate((6, 2, 6, 2)):
        found = step(params, batch(number, rows=rows))
        close(found, mean(params, number, rows))


@check
def many_steps_in_flight() -> None:
    """Dispatched one after another, waited for at the end only."""
    params = layers(8, 5, 3)
    step = jax.jit(wfbp.grad(mlp_loss))
    found = [step(params, batch(number)) for number in range(12)]
    for number, grads in enumerate(found):
        wanted = mean(params, number)
        close(grads, wanted)


@check
def collectives_while_a_step_is_under_way() -> None:
    """They do not depend on the step; other ranks may have come to them before it, or after."""
    params = layers(8, 5, 3)

    def slow(p: Any, x: jax.Array, turns: Any) -> jax.Array:
        h = jax.lax.fori_loop(0, turns, lambda _, h: jnp.tanh(h @ h), jnp.ones((64, 64)))
        return mlp_loss(p, x) + 0 * jnp.sum(h)

    ranks = list(range(wfbp.size()))
    for number in range(8):
        step = jax.jit(wfbp.grad(slow, name=f"slow{number % 4}"))
        late = (number + wfbp.rank()) % 2
        grads = step.lower(params, batch(number), 1).compile()(params, batch(number), 500 * late)
        assert wfbp.allgather_object(wfbp.rank()) == ranks
        assert wfbp.average_metrics({"rank": wfbp.rank()})["rank"] == np.mean(ranks)
        wfbp.barrier()
        assert wfbp.broadcast_object(wfbp.rank(), root_rank=0) == 0
        close(grads, mean(params, number))


@check
def two_exchanges_in_one_program() -> None:
    params, others = layers(8, 5, 3), layers(8, 4, seed=1)

    @jax.jit
    def step(params: Any, others: Any, x: jax.Array) -> Any:
        return wfbp.grad(mlp_loss, name="g")(params, x), wfbp.grad(mlp_loss, name="d")(others, x)

    for number in range(5):
        found = step(params, others, batch(number))
        for mine, tree in zip(found, (params, others), strict=True):
            close(mine, mean(tree, number))


@check
def exchanges_in_any_order() -> None:
    """Each rank comes first to another of them; the matrices are such that XLA computes beside."""
    params = [{"w": data(256, 256, seed=k) / 256} for k in range(2)]
    x = data(256, 256, seed=9) * (1 + wfbp.rank())

    def late(p: Any, x: jax.Array, turns: Any) -> jax.Array:
        stopped = jax.lax.stop_gradient((x, p["w"]))
        h = jax.lax.fori_loop(0, turns, lambda _, h: jnp.tanh(h @ stopped[1]), stopped[0])
        return jnp.sum(jnp.tanh(jax.lax.stop_gradient(h) @ p["w"]) ** 2)

    averaged = [wfbp.grad(late, name=f"apart{k}") for k in range(2)]

    @jax.jit
    def step(params: Any, x: jax.Array, turns: Any) -> Any:
        return [averaged[k](params[k], x, turns[k]) for k in range(2)]

    for number in range(30):
        jax.block_until_ready(
            step(params, x, [30 if (number + wfbp.rank() + k) % 2 else 1 for k in range(2)])
        )
    for k, found in enumerate(step(params, x, [2, 2])):
        wanted = mean_over_ranks(
            lambda x, p=params[k]: alone(late)(p, x, 2), lambda r: data(256, 256, seed=9) * (1 + r)
        )
        close(found, wanted)


@check
def one_exchange_twice_in_one_program() -> None:
    """Independent of each other: nothing says which comes first."""
    params = layers(8, 5, 3)

    @jax.jit
    def step(params: Any, x: jax.Array, y: jax.Array) -> Any:
        return wfbp.grad(mlp_loss)(params, x), wfbp.grad(mlp_loss)(params, y)

    for number in range(4):
        pair = step(params, batch(2 * number), batch(2 * number + 1))
        for k, found in enumerate(pair):
            close(found, mean(params, 2 * number + k))


@check
def equal_exchanges_wherever_they_are() -> None:
    """In a loop, beside it, and in two compiled functions that ranks trace in different orders.

    A collective comes between them.
    """
    params = layers(8, 5, 3)

    def scaled(factor: float) -> Any:
        return jax.jit(wfbp.grad(lambda p, x, turns: factor * late(p, x, turns)))

    def late(p: Any, x: jax.Array, turns: Any) -> jax.Array:
        h = jax.lax.fori_loop(0, turns, lambda _, h: jnp.tanh(h @ h), x[0, 0] * jnp.ones((64, 64)))
        return mlp_loss(p, x) * (1 + 0 * jnp.sum(h))

    parts = [scaled(1.0), scaled(10.0)]
    for part in parts if wfbp.rank() % 2 else parts[::-1]:
        part.lower(params, batch(0), 1)

    @jax.jit
    def step(params: Any, x: jax.Array, turns: Any) -> Any:
        def body(total: Any, _: None) -> tuple[Any, None]:
            grads = wfbp.grad(late)(params, x, turns[2])
            return jax.tree.map(jnp.add, total, grads), None

        looped, _ = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), None, length=2)
        alone = wfbp.grad(late)(params, x, turns[3])
        pair = [part(params, x, n) for part, n in zip(parts, turns, strict=False)]
        return pair, looped, alone, wfbp.allreduce(alone["layer0"]["b"])

    for number in range(6):
        turns = [400 if (number + wfbp.rank() + k) % 2 else 1 for k in range(4)]
        (first, second), looped, single, again = step(params, batch(number), turns)
        close(again, single["layer0"]["b"])
        wanted = mean(params, number)
        for factor, found in ((1, first), (10, second), (2, looped), (1, single)):
            close(jax.tree.map(lambda g, factor=factor: g / factor, found), wanted)


@check
def one_exchange_twice_in_a_row() -> None:
    """The second depends on the first, as where a gradient is taken at a shifted place."""
    params = layers(8, 5, 3)
    averaged = wfbp.grad(mlp_loss)

    def shifted(params: Any, grads: Any) -> Any:
        return jax.tree.map(lambda p, g: p + 0.1 * g, params, grads)

    step = jax.jit(lambda p, x: averaged(shifted(p, averaged(p, x)), x))
    for number in range(4):
        moved = shifted(params, mean(params, number))
        close(step(params, batch(number)), mean(moved, number))


@check
def leaves_that_share() -> None:
    """One leaf used twice, one array in two leaves, and equal gradients."""
    w = data(8, 8, seed=1)

    def loss(p: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(jnp.tanh(x @ p["a"]) @ p["a"] + x @ (p["b"] + p["c"])) ** 2)

    averages(loss, {"a": w, "b": w, "c": w}, 6, 8)


@check
def odd_leaves() -> None:
    """No elements, no dimensions, Python's own floats, None, tuples; without gradient, and with
    constant gradients, which XLA knows before the program runs."""

    def loss(p: Any, x: jax.Array) -> jax.Array:
        known = (
            jnp.sum(p["one"]) + 2 * jnp.sum(p["two"]) + jnp.sum(jax.lax.stop_gradient(p["stopped"]))
        )
        rows = x * p["scalar"] + p["float"] + jnp.sum(p["empty"]) + p["list"][1]
        return jnp.mean(rows**2) + known

    params = {
        "unused": jnp.ones(4),
        "stopped": jnp.ones((2, 2)),
        "one": jnp.ones(5),
        "two": jnp.ones(5),
        "scalar": jnp.float32(2),
        "float": 0.5,
        "empty": jnp.zeros((0, 3)),
        "none": None,
        "list": [jnp.zeros(()), (jnp.ones(1))],
    }
    averages(loss, params, 6)


@check
def transformations_inside() -> None:
    """A loss of compiled, checkpointed and mapped layers, stacked for a loop."""
    stacked = {"w": data(4, 8, 8, seed=1) / 3, "b": jnp.zeros((4, 8)), "last": layers(8, 5, 3)}

    def loss(p: Any, x: jax.Array) -> jax.Array:
        @partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
        def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ p["w"] + p["b"]), None

        x = jax.lax.scan(layer, x, {"w": p["w"], "b": p["b"]})[0]
        inner = jax.vmap(jax.checkpoint(jax.jit(mlp_loss)), in_axes=(None, 0))
        return jnp.mean(inner(p["last"], x[:, None]))

    averages(loss, stacked, 6, 8)


@check
def scan_over_microbatches() -> None:
    """Within the loss: one exchange; around the gradient: one for each microbatch."""
    params = layers(8, 5, 3)

    def loss(p: Any, x: jax.Array) -> jax.Array:
        def one(total: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return total + mlp_loss(p, x), None

        return jax.lax.scan(one, jnp.float32(0), x)[0]

    averages(loss, params, 3, 6, 8)

    @jax.jit
    def accumulated(p: Any, x: jax.Array) -> Any:
        def one(total: Any, x: jax.Array) -> tuple[Any, None]:
            grads = wfbp.grad(mlp_loss)(p, x)
            return jax.tree.map(jnp.add, total, grads), None

        return jax.lax.scan(one, jax.tree.map(jnp.zeros_like, p), x)[0]

    wanted = mean_over_ranks(lambda x: alone(loss)(params, x), lambda r: data(3, 6, 8, seed=r))
    close(accumulated(params, data(3, 6, 8, seed=wfbp.rank())), wanted)


@check
def scan_whose_gradient_does_not_change() -> None:
    """XLA may compute it once, before the loop."""
    params = layers(8, 5, 3)

    @jax.jit
    def repeated(p: Any, x: jax.Array) -> Any:
        def one(total: Any, _: None) -> tuple[Any, None]:
            grads = wfbp.grad(mlp_loss)(p, x)
            return jax.tree.map(jnp.add, total, grads), None

        return jax.lax.scan(one, jax.tree.map(jnp.zeros_like, p), None, length=4)[0]

    wanted = mean(params, 0)
    close(jax.tree.map(lambda g: g / 4, repeated(params, batch(0))), wanted)


@check
def branches() -> None:
    """Each rank takes its own branch of the loss; the exchange is the same."""
    params = layers(8, 5, 3)

    def loss(p: Any, x: jax.Array) -> jax.Array:
        return jax.lax.cond(x[0, 0] > 0, lambda: mlp_loss(p, x), lambda: -2 * mlp_loss(p, x))

    averages(loss, params, 6, 8, steps=5)


@check
def element_types() -> None:
    """Halves, and types side by side; reduced in single precision, rounded once."""

    def loss(p: Any, x: jax.Array) -> jax.Array:
        h = x.astype(jnp.bfloat16) @ p["bf16"]
        h = h.astype(jnp.float16) * p["f16"]
        return jnp.mean((h.astype(jnp.float32) + p["f32"]) ** 2)

    params = {
        "bf16": data(8, 3, seed=1).astype(jnp.bfloat16),
        "f16": data(3, seed=2).astype(jnp.float16),
        "f32": data(3, seed=3),
    }
    averages(loss, params, 6, 8, tolerance=0.05)


@check
def double_precision() -> None:
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: x.astype(jnp.float64), layers(8, 5, 3))

        def loss(p: Any, x: jax.Array) -> jax.Array:
            return mlp_loss(p, x.astype(jnp.float64))

        averages(loss, params, 6, 8, tolerance=1e-14)


@check
def large_leaves() -> None:
    """Of megabytes, in several groups."""
    params = {"a": data(512, 1024, seed=1) / 30, "b": data(1024, 512, seed=2) / 30}

    def loss(p: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) ** 2)

    averages(loss, params, 4, 512, schedule="layerwise")


@check
def without_jit() -> None:
    """The same exchange, compiled and not, in turn."""
    params = layers(8, 5, 3)
    compiled = jax.jit(wfbp.grad(mlp_loss))
    for number in range(6):
        found = (compiled if number % 3 == 2 else wfbp.grad(mlp_loss))(params, batch(number))
        close(found, mean(params, number))


@check
def tracing_in_any_order() -> None:
    """Nothing is exchanged while a program is traced, or by one rank alone."""
    params = layers(8, 5, 3)
    f = jax.jit(wfbp.grad(mlp_loss, name="f"))
    g = jax.jit(wfbp.grad(lambda p, x: 2 * mlp_loss(p, x), name="g"))
    traced = [f, g] if wfbp.rank() % 2 else [g, f]
    for step in traced:
        step.lower(params, batch(0)).compile()
    if wfbp.rank() == 0:
        jax.eval_shape(wfbp.grad(mlp_loss, name="never"), params, batch(0))
        jax.make_jaxpr(wfbp.grad(mlp_loss, name="nowhere"))(params, batch(0))
    wanted = mean(params, 0)
    close(f(params, batch(0)), wanted)
    close(jax.tree.map(lambda x: x / 2, g(params, batch(0))), wanted)


@check
def gradients_that_nobody_wants() -> None:
    """They are left out of the program on every rank, and nothing waits for them."""
    params = layers(8, 5, 3)
    value = jax.jit(lambda p, x: wfbp.value_and_grad(mlp_loss)(p, x)[0])
    one = jax.jit(lambda p, x: wfbp.grad(mlp_loss)(p, x)["layer0"]["w"])
    for number in range(3):
        assert np.isfinite(float(value(params, batch(number))))
        wanted = mean(params, number)
        close(one(params, batch(number)), wanted["layer0"]["w"])


@check
def a_step_that_fails_halfway() -> None:
    """By a callback in backward, on every rank: the error tells how to go on, and so it goes on."""
    params, broken = {name: data(64, 64, seed=1) / 8 for name in "abc"}, [True]
    x = data(64, 64, seed=wfbp.rank())

    def look(g: Any) -> Any:
        if broken[0]:
            time.sleep(0.1)  # the gradient of c is announced before, or beside it
            raise ValueError("this step is broken")
        return g

    @jax.custom_vjp
    def looked_at(x: jax.Array) -> jax.Array:
        return x

    looked_at.defvjp(
        lambda x: (x, None),
        lambda _, g: (jax.pure_callback(look, jax.ShapeDtypeStruct(g.shape, g.dtype), g),),
    )

    def loss(p: Any, x: jax.Array) -> jax.Array:
        h = jnp.tanh(looked_at(jnp.tanh(x @ p["a"])) @ p["b"])
        return jnp.mean(jnp.tanh(h @ p["c"]) ** 2)

    step = jax.jit(wfbp.grad(loss, name="broken"))

    def act() -> Any:
        return jax.block_until_ready(step(params, x))

    raises(Exception, "this step is broken", act=act)
    broken[0] = False
    raises(Exception, "an earlier step failed before its end", "shutdown()", act=act)
    usual = process.current("the check").config
    wfbp.shutdown()
    wfbp.init(config=usual)
    wanted = mean_over_ranks(lambda x: alone(loss)(params, x), lambda r: data(64, 64, seed=r))
    for _ in range(3):
        close(act(), wanted)


@check
def what_cannot_be() -> None:
    params = layers(8, 5, 3)
    averaged = wfbp.grad(mlp_loss)
    raises(
        ValueError,
        "vmap",
        "inside the loss",
        act=lambda: jax.vmap(averaged, in_axes=(None, 0))(params, batch(0)[:, None]),
    )
    raises(
        ValueError,
        "differentiate",
        act=lambda: jax.grad(lambda p: averaged(p, batch(0))["layer0"]["b"].sum())(params),
    )
