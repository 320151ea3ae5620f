"""What callers get wrong is told when they pass it, and not when gradients are computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp

import wfbp.jax as wfbp
from tests.support.local import LocalWorld
from wfbp.config import Config
from wfbp.errors import NotInitializedError


@pytest.fixture(params=[False, True], ids=["before init", "after init"])
def moment(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param:
        wfbp.init(backend=LocalWorld(1).backend(0), config=Config())
    yield
    wfbp.shutdown()


def loss(params: Any, x: Any, *, factor: float = 1.0) -> Any:
    return factor * jnp.sum(params["w"] * x)


@pytest.mark.parametrize("make", [wfbp.value_and_grad, wfbp.grad])
@pytest.mark.parametrize(
    ("fun", "options", "kind", "said"),
    [
        (loss, {"schedule": "holo"}, ValueError, "schedule is 'holo'; expected one of auto, "),
        (loss, {"schedule": "dear"}, ValueError, "value_and_grad needs whole gradients"),
        (loss, {"threshold_bytes": 0}, ValueError, "threshold_bytes is 0"),
        (loss, {"op": wfbp.Max}, ValueError, "op is .*Max; gradients can be "),
        (
            loss,
            {"argnums": "params"},
            TypeError,
            "'str' object cannot be interpreted",
        ),
        (loss, {"argnums": None}, TypeError, "'NoneType' object"),
        ({"w": 1.0}, {}, TypeError, "Expected a callable value"),
    ],
)
@pytest.mark.usefixtures("moment")
def test_bad_arguments_are_told_at_once(
    make: Any, fun: Any, options: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        make(fun, **options)


def test_gradients_need_a_runtime() -> None:
    made = wfbp.grad(loss)
    with pytest.raises(NotInitializedError):
        made({"w": jnp.ones(2)}, 1.0)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("compiled", [False, True])
def test_leaves_that_are_no_arrays_are_named(compiled: bool) -> None:
    params = {"w": jnp.ones(2), "activation": jax.nn.relu}

    def step(x: Any) -> Any:
        return wfbp.value_and_grad(loss)(params, x)

    with pytest.raises(TypeError, match=r"params\['activation'\] is a .*, not an array"):
        (jax.jit(step) if compiled else step)(jnp.ones(2))


@pytest.mark.usefixtures("alone")
def test_models_of_other_libraries_name_the_remedy() -> None:
    equinox = pytest.importorskip("equinox")
    model = equinox.nn.MLP(2, 1, 4, depth=1, key=jax.random.key(0))

    def loss_of(model: Any, x: Any) -> Any:
        return jnp.sum(model(x))

    with pytest.raises(TypeError, match=r"model\.activation is a .*equinox\.partition"):
        wfbp.value_and_grad(loss_of)(model, jnp.ones(2))
    arrays, rest = equinox.partition(model, equinox.is_inexact_array)

    def loss_of_arrays(arrays: Any, x: Any) -> Any:
        return loss_of(equinox.combine(arrays, rest), x)

    _, grads = wfbp.value_and_grad(loss_of_arrays)(arrays, jnp.ones(2))
    assert jax.tree.structure(grads) == jax.tree.structure(arrays)


@pytest.mark.usefixtures("alone")
def test_too_few_arguments_are_left_to_jax() -> None:
    with pytest.raises(TypeError, match="positional arguments"):
        wfbp.grad(loss, argnums=1)({"w": jnp.ones(2)})
    with pytest.raises(TypeError, match="positional arguments"):
        wfbp.grad(loss, argnums=(0, 7))({"w": jnp.ones(2)}, 1.0)
