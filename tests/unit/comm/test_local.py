"""Ranks as threads: what the contract does not say."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.local import LocalWorld
from wfbp.comm.backend import Backend, Work
from wfbp.comm.waiting import wait
from wfbp.core.types import Op
from wfbp.errors import BackendError, PeerError

Start = Callable[[Backend], Work[Any]]


def reduce(numel: int, dtype: str = "float32", op: Op = Op.SUM) -> Start:
    return lambda backend: backend.all_reduce(np.ones(numel, dtype), dtype, op)


def test_complete_only_once_all_have_joined() -> None:
    world = LocalWorld(3)
    buffers = [np.full(2, rank, np.float32) for rank in range(3)]
    works = []
    for rank, buffer in enumerate(buffers):
        assert not any(work.test() for work in works)
        works.append(world.backend(rank).all_reduce(buffer, "float32", Op.SUM))
    assert all(work.test() for work in works)
    assert [buffer.tolist() for buffer in buffers] == [[3.0, 3.0]] * 3


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        (reduce(3), reduce(4), r"12\).*16\)"),
        (reduce(3), reduce(3, "int32"), "float32.*int32"),
        (reduce(3), reduce(3, op=Op.MAX), "sum.*max"),
        (reduce(3), lambda b: b.all_gather_bytes(b""), "all_reduce.*all_gather_bytes"),
        (
            lambda b: b.broadcast(np.zeros(4, np.uint8), 0),
            lambda b: b.broadcast(np.zeros(4, np.uint8), 1),
            "from 0.*from 1",
        ),
    ],
)
def test_a_mismatch_is_an_error_on_all_ranks(one: Start, other: Start, told: str) -> None:
    world = LocalWorld(2)
    works = [one(world.backend(0)), other(world.backend(1))]
    for work in works:
        with pytest.raises(BackendError, match=f"different collectives.*{told}"):
            work.test()


def test_an_abort_ends_what_is_pending_and_what_comes() -> None:
    world = LocalWorld(2)
    pending = reduce(1)(world.backend(0))
    world.backend(1).abort(7)
    with pytest.raises(PeerError, match="rank 1 aborted the run with code 7"):
        pending.test()
    for rank in range(2):
        with pytest.raises(PeerError, match="rank 1"):
            reduce(1)(world.backend(rank))


def test_an_abort_wakes_a_rank_that_duplicates() -> None:
    world = LocalWorld(2)
    raised: list[BaseException] = []

    def duplicate() -> None:
        try:
            world.backend(0).duplicate()
        except PeerError as error:
            raised.append(error)

    thread = threading.Thread(target=duplicate)
    thread.start()
    world.backend(1).abort(1)
    thread.join(10)
    assert not thread.is_alive()
    assert len(raised) == 1


def test_an_abort_reaches_duplicates() -> None:
    world = LocalWorld(1)
    copy = world.backend(0).duplicate()
    world.backend(0).abort(1)
    with pytest.raises(PeerError):
        reduce(1)(copy)


def test_what_is_complete_stays_complete_after_an_abort() -> None:
    world = LocalWorld(1)
    work = world.backend(0).all_gather_bytes(b"kept")
    world.backend(0).abort(1)
    assert wait(work) == [b"kept"]


def test_no_ranks() -> None:
    with pytest.raises(ValueError, match="at least 1 rank"):
        LocalWorld(0)
