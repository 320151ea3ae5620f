"""When announcements of a compiled program are passed on: where something may leave, not before."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp

from wfbp.jax import xla_handlers

KEY = 77
LEAVES = 4


@pytest.fixture(scope="module")
def handlers() -> Any:
    """Those of this process, without the thread that forwards them."""
    return xla_handlers.load()


def announced(*indices: int) -> None:
    """Run a program that announces these leaves."""

    @jax.jit
    def program(x: Any) -> list[Any]:
        announce = jax.ffi.ffi_call(
            "wfbp_announce", jax.ShapeDtypeStruct(x.shape, x.dtype), input_output_aliases={0: 0}
        )
        return [announce(x + k, exchange=np.int64(KEY), index=np.int32(k)) for k in indices]

    jax.block_until_ready(program(jnp.ones(3)))


def hears(handlers: Any) -> threading.Event:
    """Is set when somebody who listens has been told."""
    told = threading.Event()

    def listen() -> None:
        if handlers.listen():
            told.set()

    threading.Thread(target=listen, daemon=True).start()
    return told


def test_only_a_complete_group_is_told(handlers: Any) -> None:
    handlers.take()
    handlers.expect(KEY, [0, 0, 1, -1])
    told = hears(handlers)
    announced(3, 1)
    assert not told.wait(0.2)
    announced(0)
    assert told.wait(10)
    begun = time.perf_counter()
    notes = handlers.take()
    assert sorted(note[:2] for note in notes[:2]) == [(KEY, 1), (KEY, 3)]  # XLA chose the order
    assert notes[2][:2] == (KEY, 0)
    assert all(note[3] is None for note in notes)
    ages = [note[4] for note in notes]
    assert ages == sorted(ages, reverse=True)
    assert 0 <= ages[-1] <= ages[0] < begun + 60
    assert ages[0] >= 0.2, "it came before the wait for it"
    told = hears(handlers)
    announced(2)
    assert told.wait(10)
    handlers.take()


def test_what_nobody_expects_is_kept_until_it_is_taken(handlers: Any) -> None:
    handlers.take()
    handlers.expect(KEY, [-1] * LEAVES)
    told = hears(handlers)
    announced(0, 1, 2, 3, 9)
    assert not told.wait(0.2)
    assert len(handlers.take()) == LEAVES + 1
    handlers.expect(KEY, [0])
    announced(0)
    assert told.wait(10)
    handlers.take()


def test_what_is_expected_must_be_integers(handlers: Any) -> None:
    with pytest.raises(TypeError):
        handlers.expect(KEY, 5)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        handlers.expect(KEY, ["x"])  # type: ignore[list-item]
