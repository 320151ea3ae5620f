"""Which exchange a place in a program belongs to, and what tracing leaves alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp

from wfbp.core.types import TensorSpec
from wfbp.jax import gradients
from wfbp.jax.gradient_exchange import ExchangeDescription
from wfbp.runtime.arguments import ReducerOptions

REQUEST = ExchangeDescription(
    (TensorSpec("a", (3,), "float32"),), ReducerOptions("auto", 100, name="test")
)
OTHER = ExchangeDescription(REQUEST.specs, ReducerOptions("auto", 100, name="other"))
X = jnp.ones(3)


def exchanged(x: Any, description: ExchangeDescription = REQUEST) -> Any:
    """As a gradient of that description is, by a call of its own."""
    return gradients.exchange(replace(description), [x])[0]


class Numbers:
    """Stands for the registry."""

    def add(self, description: ExchangeDescription) -> int:
        return 10 * (description.options.name == "other") + description.occurrence


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "exchange_registry", Numbers)


def keys(function: Callable[[Any], Any]) -> list[int]:
    """The exchange of each announcement and of each wait, in the order of the program's text."""
    text = jax.jit(function).lower(X).as_text()
    return [int(key) for key in re.findall(r"exchange = (\d+) : i64", text)]


def test_what_is_equal_is_counted_in_the_order_of_the_text() -> None:
    def step(x: Any) -> Any:
        x = exchanged(exchanged(x))
        return exchanged(exchanged(x, OTHER)), exchanged(x)

    assert keys(step) == [0, 0, 1, 1, 10, 10, 2, 2, 3, 3]
    assert keys(lambda x: step(x)) == keys(step)


@pytest.mark.parametrize("traced_first", [0, 1])
def test_functions_within_a_program_may_have_been_traced_in_any_order(traced_first: int) -> None:
    parts = [jax.jit(lambda x, k=k: k * exchanged(x)) for k in range(2)]
    parts[traced_first].lower(X)
    assert sorted(keys(lambda x: [part(x) for part in parts])) == [0, 0, 1, 1]
    text = jax.jit(lambda x: [part(x) for part in parts]).lower(X).as_text()
    zero = text.index("exchange = 0")
    assert zero < text.index("exchange = 1")


def test_types_and_shapes_stay() -> None:
    for x in (X.astype(jnp.bfloat16), jnp.zeros((2, 0)), jnp.float32(1)):
        found = jax.eval_shape(exchanged, x)
        assert (found.shape, found.dtype, found.weak_type) == (x.shape, x.dtype, False)


def test_nans_are_looked_for_as_before() -> None:
    """A program that JAX has compiled is still checked when it runs again."""
    with jax.debug_nans(True):
        function = jax.jit(jnp.log)
        function(jnp.float32(1))
        jax.make_jaxpr(exchanged)(X)
        with pytest.raises(FloatingPointError):
            function(jnp.float32(-1))
