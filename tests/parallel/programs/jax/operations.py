"""Every check of JAX's collectives: ``jax_operations.py OUT MODE [NAME ...]`` under mpirun.

What a collective and its gradient must be is computed by one process from all ranks' values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import wfbp.jax
from tests.parallel.programs.harness import MODES, Checks, raises
from tests.parallel.programs.torch.collective_values import combined, values
from wfbp.core.types import Op
from wfbp.errors import DisagreementError
from wfbp.jax import collective_primitive as collectives
from wfbp.jax import trees
from wfbp.runtime import process

check = Checks()

DTYPES = ("float16", "bfloat16", "float32", "int32", "uint8")
Function = Callable[[jax.Array], jax.Array]


def mine(count: int = 12, columns: int = 2) -> jax.Array:
    """This rank's input; every rank has another."""
    return ranks_inputs(count, columns)[wfbp.rank()]


def ranks_inputs(count: int = 12, columns: int = 2) -> list[jax.Array]:
    draw = np.random.default_rng(5)
    return [jnp.asarray(draw.normal(size=(count, columns)), jnp.float32) for _ in range(16)][
        : wfbp.size()
    ]


def weights(size: int, shape: tuple[int, ...]) -> list[jax.Array]:
    """What each rank's loss multiplies each element of its result by."""
    draw = np.random.default_rng(9)
    return [jnp.asarray(draw.normal(size=shape), jnp.float32) for _ in range(size)]


def close(found: Any, wanted: Any, what: str = "") -> None:
    np.testing.assert_allclose(
        np.asarray(found, np.float64), np.asarray(wanted, np.float64), 1e-5, 1e-6, err_msg=what
    )


def rows_of(whole: jax.Array, rank: int) -> jax.Array:
    """As reducescatter shares them out."""
    parts = np.array_split(np.arange(len(whole)), wfbp.size())
    return whole[parts[rank]]


def block(x: jax.Array, number: int) -> jax.Array:
    length = len(x) // wfbp.size()
    return x[number * length : (number + 1) * length]


Reference = Callable[[list[jax.Array], int], jax.Array]

KINDS: dict[str, tuple[Function, Reference]] = {
    "average": (collectives.allreduce, lambda xs, r: sum(xs) / len(xs)),
    "sum": (lambda x: collectives.allreduce(x, op=Op.SUM), lambda xs, r: sum(xs)),
    "broadcast": (
        lambda x: collectives.broadcast(x, wfbp.size() - 1),
        lambda xs, r: xs[-1],
    ),
    "allgather": (collectives.allgather, lambda xs, r: jnp.concatenate(xs)),
    "reducescatter": (collectives.reducescatter, lambda xs, r: rows_of(sum(xs) / len(xs), r)),
    "reducescatter_sum": (
        lambda x: collectives.reducescatter(x, op=Op.SUM),
        lambda xs, r: rows_of(sum(xs), r),
    ),
    "alltoall": (
        collectives.alltoall,
        lambda xs, r: jnp.concatenate([block(x, r) for x in xs]),
    ),
}
"""Each operation, and what it gives rank r of all ranks' arguments."""


@check
def values_inside_jit_and_outside() -> None:
    for kind, (act, reference) in KINDS.items():
        wanted = jax.jit(reference, static_argnums=1)(ranks_inputs(), wfbp.rank())
        for how, run in {"now": act, "jit": jax.jit(act)}.items():
            found = run(mine())
            assert isinstance(found, jax.Array)
            close(found, wanted, f"{kind} {how}")


@check
def gradients_are_those_of_the_sum_of_all_losses() -> None:
    for kind, (act, reference) in KINDS.items():
        inputs = ranks_inputs()
        shapes = [
            jax.eval_shape(lambda xs, r=r, f=reference: f(xs, r), inputs).shape
            for r in range(wfbp.size())
        ]
        scales = [weights(wfbp.size(), shape)[r] for r, shape in enumerate(shapes)]
        own_scale = scales[wfbp.rank()]

        def everybody(
            xs: list[jax.Array], reference: Reference = reference, scales: Any = scales
        ) -> jax.Array:
            return sum((w * reference(xs, r) ** 2).sum() for r, w in enumerate(scales))

        def loss(x: jax.Array, act: Function = act, scale: Any = own_scale) -> jax.Array:
            return (scale * act(x) ** 2).sum()

        wanted = jax.jit(jax.grad(everybody))(inputs)[wfbp.rank()]
        ways = {"jit of grad": jax.jit(jax.grad(loss)), "grad of jit": jax.grad(jax.jit(loss))}
        if kind in ("average", "reducescatter"):
            ways["now"] = jax.grad(loss)
        for how, run in ways.items():
            close(run(mine()), wanted, f"{kind} {how}")


@check
def forward_mode_and_second_derivatives() -> None:
    x, size = mine(), wfbp.size()
    mean = sum(ranks_inputs()) / size
    value, tangent = jax.jvp(lambda x: collectives.allreduce(x) ** 2, (x,), (jnp.ones_like(x),))
    close(value, mean**2)
    close(tangent, 2 * mean)
    if wfbp.size() == 1:
        return
    for wrap in (lambda f: f, jax.jit):
        twice = wrap(jax.grad(lambda x: jax.grad(_cubic)(x).sum()))
        close(twice(x), 6 * mean)


def _cubic(x: jax.Array) -> jax.Array:
    return (collectives.allreduce(x) ** 3).sum()


@check
def vmap_maps_over_rows_of_any_axis() -> None:
    stack = jnp.stack([mine(), 2 * mine(), 3 * mine()], axis=1)
    inputs = [jnp.stack([x, 2 * x, 3 * x], axis=1) for x in ranks_inputs()]
    for kind, (act, reference) in KINDS.items():
        expected = jax.vmap(lambda xs, f=reference: f(xs, wfbp.rank()), 1, 1)
        wanted = jax.jit(expected)(inputs)
        close(jax.jit(jax.vmap(act, 1, 1))(stack), wanted, kind)
        if kind == "allgather":
            close(jax.vmap(act, 1, 1)(stack), wanted, kind)


@check
def every_operation_and_element_type() -> None:
    for dtype in DTYPES:
        array = jnp.array(values(wfbp.rank()), dtype)
        for op in Op:
            wanted = combined(op, wfbp.size(), not jnp.issubdtype(dtype, jnp.floating))
            ways = [collectives.allreduce]
            if dtype == "bfloat16" or op is Op.AVERAGE:
                ways.append(jax.jit(collectives.allreduce, static_argnames="op"))
            for run in ways:
                found = run(array, op=op)
                assert found.dtype == array.dtype
                close(found, np.asarray(wanted).astype(array.dtype), f"{op} of {dtype}")
        everybody = [v for r in range(wfbp.size()) for v in values(r)]
        close(collectives.allgather(array), everybody, dtype)


@check
def complex_numbers() -> None:
    """Values and gradients, by JAX's convention, beside those of one process."""
    inputs = [jax.lax.complex(x, x[::-1]) for x in ranks_inputs()]
    for kind in ("average", "sum", "broadcast", "allgather", "reducescatter_sum", "alltoall"):
        act, reference = KINDS[kind]

        def everybody(xs: Any, reference: Reference = reference) -> Any:
            results = [reference(xs, r) for r in range(wfbp.size())]
            return sum((jnp.abs(y) ** 2).sum() for y in results), results[wfbp.rank()]

        def loss(x: Any, act: Function = act) -> Any:
            return (jnp.abs(result := act(x)) ** 2).sum(), result

        (_, wanted), grads = jax.jit(jax.value_and_grad(everybody, has_aux=True))(inputs)
        (_, found), grad = jax.jit(jax.value_and_grad(loss, has_aux=True))(inputs[wfbp.rank()])
        now = act(inputs[wfbp.rank()])
        assert found.dtype == now.dtype == grad.dtype == jnp.complex64
        np.testing.assert_allclose(found, wanted, 1e-5, 1e-5, err_msg=kind)
        np.testing.assert_allclose(now, wanted, 1e-5, 1e-5, err_msg=kind)
        np.testing.assert_allclose(grad, grads[wfbp.rank()], 1e-5, 1e-5, err_msg=kind)


@check
def odd_shapes() -> None:
    size, rank = wfbp.size(), wfbp.rank()
    for run in (collectives.allreduce, jax.jit(collectives.allreduce)):
        for shape in ((), (0, 3), (3, 1, 5)):
            close(run(np.full(shape, rank, np.float32)), np.full(shape, (size - 1) / 2))
    uneven = collectives.allgather(np.full((2 * rank, 3), rank, np.float32))
    wanted = np.concatenate([np.full((2 * r, 3), float(r)) for r in range(size)])
    close(uneven, wanted)
    found = jax.grad(lambda x: (collectives.allgather(x) ** 2).sum())(np.full(rank, 3, np.float32))
    close(found, np.full(rank, 6.0 * size))
    seven = np.arange(7, dtype=np.float32) * (rank + 1)
    total = np.arange(7.0) * sum(range(1, size + 1))
    close(collectives.reducescatter(seven, op=Op.SUM), np.array_split(total, size)[rank])
    close(collectives.allreduce(3.5), 3.5)
    close(collectives.broadcast([1, 2], 0), [1, 2])


@check
def control_flow() -> None:
    x = mine()
    mean = sum(ranks_inputs()) / wfbp.size()

    def layers(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (2 * collectives.allreduce(c), None), x, None, length=3)[0]

    close(jax.jit(layers)(x), 8 * mean)
    close(jax.jit(jax.grad(lambda x: layers(x).sum()))(x), np.full(x.shape, 8.0))
    chosen = jax.jit(lambda x, yes: jax.lax.cond(yes, collectives.allreduce, lambda x: x, x))
    close(chosen(x, True), mean)
    close(chosen(x, False), x)


@check
def order_is_that_of_the_program() -> None:
    """Results nobody waits for, several functions, and what is done at once between them."""
    size, rank = wfbp.size(), wfbp.rank()
    first = jax.jit(lambda x: collectives.allreduce(x, "first", Op.SUM))
    second = jax.jit(lambda x: collectives.allgather(x, "second"))
    seen = []
    for step in range(20):
        seen.append(first(jnp.full(3, float(rank + step))))
        seen.append(second(jnp.full(2, float(rank))))
        now = collectives.allreduce(jnp.full(4, float(step)), "third")
        close(now, np.full(4, float(step)))
    for step in range(20):
        close(seen[2 * step], np.full(3, sum(range(size)) + step * size))
        close(seen[2 * step + 1], np.repeat(np.arange(size), 2))


@check
def tracing_is_no_collective() -> None:
    """Ranks trace and compile what they like, when they like."""
    if wfbp.rank() == 0:
        for act, _ in KINDS.values():
            jax.make_jaxpr(act)(mine())
            jax.eval_shape(jax.grad(lambda x, act=act: act(x).sum()), mine())
            jax.jit(act).lower(mine()).compile()
        jax.jit(lambda: collectives.allgather(jnp.ones(3))).lower()
    close(collectives.allreduce(jnp.float32(wfbp.rank()), "after"), (wfbp.size() - 1) / 2)


@check
def large_arrays_do_not_lock_up() -> None:
    """64 MB in and out of callbacks, while the same threads should compute."""
    rank, size = wfbp.rank(), wfbp.size()

    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        return collectives.allreduce(jnp.sin(x) * 0 + x) + collectives.allreduce(x * x)

    x = jnp.full(16_000_000 if size < 3 else 4_000_000, float(rank))
    mean, square = (size - 1) / 2, sum(r * r for r in range(size)) / size
    for _ in range(2):
        result = step(x)
    close(result[::25_000], np.full(x.size // 25_000, mean + square))


@check
def disagreement() -> None:
    if wfbp.size() == 1:
        return
    size = 3 + (wfbp.rank() == 1)
    name = "the tensor at fault"
    raises(
        DisagreementError, name, "rank 1", act=lambda: collectives.allreduce(jnp.ones(size), name)
    )
    # XLA knows one kind of error; ours is its text.
    raises(
        jax.errors.JaxRuntimeError,
        "DisagreementError",
        name,
        "rank 1",
        act=lambda: jax.block_until_ready(
            jax.jit(lambda x: collectives.allreduce(x, name))(jnp.ones(size))
        ),
    )
    raises(
        jax.errors.JaxRuntimeError,
        "DisagreementError",
        act=lambda: jax.block_until_ready(jax.jit(collectives.allgather)(jnp.ones(size))),
    )
    close(collectives.allreduce(jnp.ones(2)), np.ones(2))


@check
def mistakes() -> None:
    size = wfbp.size()
    raises(ValueError, "op is 'sum'", act=lambda: collectives.allreduce(jnp.ones(2), op="sum"))
    for op in (Op.MIN, Op.MAX, Op.PRODUCT):
        raises(
            ValueError,
            f"op is {op}; complex64 is combined by",
            act=lambda o=op: collectives.allreduce(jnp.ones(2) * 1j, op=o),
        )
    raises(ValueError, "root_rank is", act=lambda: collectives.broadcast(jnp.ones(2), size))
    raises(ValueError, "scalar", act=lambda: collectives.allgather(1.0))
    raises(ValueError, "scalar", act=lambda: collectives.reducescatter(1.0))
    raises(ValueError, f"into {size} blocks", act=lambda: collectives.alltoall(1.0))
    if size > 1:
        biggest = jax.grad(lambda x: collectives.allreduce(x, op=Op.MAX).sum())
        raises(ValueError, "Max over ranks has no gradient", act=lambda: biggest(jnp.ones(2)))
        tree = {"w": jnp.ones(3)}
        raises(
            ValueError,
            "['w']",
            "compiled function",
            act=lambda: jax.make_jaxpr(lambda x: trees._own_copy("['w']", x))(tree["w"]),
        )


@check
def broadcast_of_a_tree() -> None:
    rank, root = wfbp.rank(), wfbp.size() - 1

    def tree(r: int) -> dict[str, Any]:
        return {
            "w": jnp.full((3, 2), float(r)),
            "half": [jnp.full(2, float(r), jnp.bfloat16), np.arange(3) + r],
            "step": 4 + r,
            "rate": 0.5 * r,
            "flag": jnp.array([True, r == 0]),
            "key": jax.random.key(r),
            "placed": jax.device_put(jnp.full(2, float(r)), jax.devices()[0]),
            "relu": jax.nn.relu,
            "none": None,
        }

    own, wanted = tree(rank), tree(root)
    found = trees.broadcast_parameters(own, root_rank=root)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for (path, leaf), theirs in zip(
        jax.tree_util.tree_flatten_with_path(found)[0], jax.tree.leaves(wanted), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert type(leaf) is type(theirs), name
        if leaf is jax.nn.relu:
            continue
        if name == "['key']":
            leaf, theirs = jax.random.key_data(leaf), jax.random.key_data(theirs)
        if isinstance(leaf, jax.Array):
            assert (leaf.dtype, leaf.sharding) == (theirs.dtype, theirs.sharding), name
        close(leaf, theirs, name)
    assert found["placed"].committed
    assert not found["w"].committed
    close(own["w"], np.full((3, 2), float(rank)))
    if wfbp.size() > 1:
        wrong = {"w": jnp.ones(2 + rank)}
        raises(DisagreementError, "['w']", act=lambda: trees.broadcast_parameters(wrong))


@check
def means_of_metrics() -> None:
    rank, mean = wfbp.rank(), (wfbp.size() - 1) / 2
    metric = {
        "loss": jnp.float32(rank),
        "right": rank,
        "rows": np.arange(3) + rank,
        "half": jnp.bfloat16(1 + rank),
        "counts": jnp.arange(2) + rank,
        "note": "text",
    }
    found = trees.average_metrics(metric)
    assert found["note"] == "text"
    assert isinstance(found["right"], float)
    assert found["counts"].dtype == jnp.float32
    del metric["note"], found["note"]
    inside = jax.jit(trees.average_metrics)(metric)
    for run in (found, inside):
        assert run["half"].dtype == jnp.bfloat16
        close(run["loss"], mean)
        close(run["right"], mean)
        close(run["rows"], np.arange(3) + mean)
        close(run["half"], np.asarray(1 + mean).astype(jnp.bfloat16))
        close(run["counts"], np.arange(2) + mean)
    for average in (trees.average_metrics, jax.jit(trees.average_metrics)):
        assert average({}) == {}
        assert float(average(jnp.int32(2**24 + 1))) == 2**24, "JAX's widest type is float32"
        for value in (1j, np.complex64(1j), jnp.complex64(1j)):
            raises(TypeError, "['z'] is complex", act=lambda z=value, f=average: f({"z": z}))
    assert trees.average_metrics(2**24 + 1) == 2**24 + 1
    exact = trees.average_metrics(1.0 + 1e-12 * rank)
    assert abs(exact - (1 + 1e-12 * mean)) < 1e-15
    if wfbp.size() > 1:
        other = {"loss" if rank else "error": 1.0}
        raises(DisagreementError, "loss", "error", act=lambda: trees.average_metrics(other))


@check
def only_programs_that_communicate_may_go_on_by_themselves() -> None:
    """Whether a rank can be judged to wait for ever: not where XLA's threads might yet come."""

    def judged() -> bool:
        return not process.current("judged()").thread.loop.watch.other_threads

    x = mine()
    sum_of = wfbp.jax.value_and_grad(jnp.sum)
    for act in (jax.jit(collectives.allreduce), jax.jit(sum_of)):
        wfbp.shutdown()
        wfbp.init(config=MODES["overlap"])
        assert judged()
        collectives.allreduce(x)
        assert judged()
        jax.block_until_ready(act(x))
        assert judged() is (wfbp.size() == 1)
    wfbp.shutdown()
    wfbp.init(config=MODES["overlap"])
    assert judged()
    jax.block_until_ready(act(x))  # compiled before
    assert judged() is (wfbp.size() == 1)


if __name__ == "__main__":
    check.main()
