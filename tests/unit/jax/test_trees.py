"""Which leaves of a tree travel, and what they are called."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
import numpy as np

from wfbp.core.types import TensorSpec
from wfbp.jax import gradients
from wfbp.jax.gradients import ExchangedLeaves


def test_names_say_where_a_leaf_is() -> None:
    trees = [{"a": jnp.ones(2), "b": [jnp.ones((3, 1), jnp.bfloat16), None]}, np.float64(1)]
    leaves = ExchangedLeaves.of(trees, ["params", "scale"], "test")
    wide = jax.dtypes.result_type(np.float64(1)).name
    assert leaves.specs == (
        TensorSpec("params['a']", (2,), "float32"),
        TensorSpec("params['b'][0]", (3, 1), "bfloat16"),
        TensorSpec("scale", (), wide),
    )


def test_what_is_not_exchanged_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    integers, empty = jnp.arange(3), jnp.zeros((0, 2))
    nothing = np.zeros((), jax.dtypes.float0)
    tree = {"a": jnp.ones(2), "e": empty, "f": nothing, "i": integers, "z": 2.0}
    leaves = ExchangedLeaves.of([tree], ["g"], "test")
    assert [spec.name for spec in leaves.specs] == ["g['a']", "g['z']"]
    monkeypatch.setattr(gradients, "exchange", lambda _, found: [str(leaf) for leaf in found])
    (found,) = leaves.average([tree], Mock(size=2), Mock())
    assert (found["a"], found["z"]) == ("[1. 1.]", "2.0")
    assert all(found[k] is tree[k] for k in "efi")


@pytest.mark.parametrize("dtype", [jnp.float8_e5m2, jnp.float8_e4m3fn])
def test_what_cannot_be_sent_is_refused(dtype: object) -> None:
    with pytest.raises(ValueError, match=r"test: g\['a'\] is \w+; expected one of float16"):
        ExchangedLeaves.of([{"a": jnp.zeros(2, dtype)}], ["g"], "test")


@pytest.mark.parametrize("leaf", [jax.nn.relu, "float32", object(), np.float32, slice(2)])
def test_a_leaf_that_is_no_array_is_named(leaf: object) -> None:
    with pytest.raises(TypeError, match=r"test: g\['a'\]\[1\] is a \w+, not an array") as caught:
        ExchangedLeaves.of([{"a": [jnp.ones(2), leaf]}], ["g"], "test")
    assert "equinox.partition(model, equinox.is_inexact_array)" in str(caught.value)
    assert "nnx.split" in str(caught.value)


def test_what_turns_itself_into_an_array_is_one() -> None:
    class Variable:
        shape, dtype = (2,), np.dtype(np.float32)

        def __jax_array__(self) -> jax.Array:
            return jnp.ones(2)

    assert ExchangedLeaves.of([Variable()], ["v"], "test").specs == (
        TensorSpec("v", (2,), "float32"),
    )
