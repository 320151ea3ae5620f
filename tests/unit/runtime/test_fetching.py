"""Fetching from ranks whose training threads do something else."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.support.ranks import all_well, run_ranks
from wfbp.errors import DisagreementError
from wfbp.runtime.progress import fetching
from wfbp.runtime.runtime import Runtime


def content(rank: int, items: Any) -> bytes:
    """Of different sizes, also none."""
    return b"".join(bytes([rank]) * (k * rank) for k in items)


def test_one_rank_alone_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also versions that others publish later; in several pieces."""
    monkeypatch.setattr(fetching, "_PIECE_BYTES", 1000)
    asked = threading.Event()

    def body(runtime: Runtime) -> None:
        store, rank = runtime.open_store(), runtime.rank
        other = runtime.open_store()
        if rank == 2:
            asked.wait(60.0)  # as in an update that takes long
        store.published = 1, lambda items: content(rank, items)
        other.published = 5, lambda items: b"other"
        if rank == 0:
            asked.set()
            for items in ([1, 0, 3000], []):
                found = runtime.fetch(store, 1, items, "fetching")
                assert found == {peer: content(peer, items) for peer in (1, 2)}
            assert runtime.fetch(other, 5, None, "fetching") == {1: b"other", 2: b"other"}
        runtime.channel.exchange(b"", "the end")
        runtime.drop_store(store)

    all_well(run_ranks(3, body))


def test_what_changes_while_it_is_copied_is_not_sent() -> None:
    def body(runtime: Runtime) -> None:
        store, rank = runtime.open_store(), runtime.rank
        copied = threading.Event()

        def copy_slowly(items: Any) -> bytes:
            store.published = None  # as the training thread does before an update
            copied.set()
            return b""

        store.published = 3, copy_slowly
        runtime.channel.exchange(b"", "published")
        if rank == 0:
            with pytest.raises(DisagreementError, match="version 4 of it, not 3: it has stepped"):
                runtime.fetch(store, 3, None, "mine")
        else:
            assert copied.wait(60.0)
            store.published = 4, copy_slowly
        runtime.channel.exchange(b"", "the end")

    all_well(run_ranks(2, body))


def test_a_store_is_served_until_all_have_dropped_it() -> None:
    def body(runtime: Runtime) -> None:
        store = runtime.open_store()
        store.published = 1, lambda items: b"kept"
        if runtime.rank:
            runtime.drop_store(store)
        runtime.channel.exchange(b"", "dropped")
        if runtime.rank == 0:
            assert runtime.fetch(store, 1, None, "mine") == {1: b"kept"}
            runtime.drop_store(store)
        runtime.channel.exchange(b"", "the end")
        released = threading.Event()
        for _ in range(1000):
            runtime.channel.exchange(b"", "waiting for notices")
            if store.key not in runtime._fetches.stores:
                released.set()
            if all(
                runtime.channel.exchange(bytes([released.is_set()]), "released")[r] == b"\1"
                for r in (0, 1)
            ):
                return
            threading.Event().wait(0.02)
        raise AssertionError("a store that all have dropped is still served")

    all_well(run_ranks(2, body))
