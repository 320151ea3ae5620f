"""Named operations: the coordinator by itself, and with ranks as threads."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.ranks import QUICK, all_well, run_ranks
from wfbp.comm.backend import HostBackend
from wfbp.errors import DisagreementError
from wfbp.runtime.named.coordinator import Coordinator, Kind, Request
from wfbp.runtime.named.named_lane import JOIN, NamedOperation, Outcome
from wfbp.runtime.named.operations import Collectives
from wfbp.runtime.runtime import Runtime


def reduction(name: str, shape: tuple[int, ...] = (2,), **details: Any) -> Request:
    return Request(Kind.ALLREDUCE, name, "float32", shape, op="sum", **details)


@given(st.integers(1, 5), st.integers(0, 12), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_everything_becomes_ready_once_whatever_the_order(
    size: int, num_names: int, chance: random.Random
) -> None:
    """Every operation is answered with its last request, never before and never twice."""
    waiting = {rank: [f"op {k}" for k in range(num_names)] for rank in range(size)}
    for names in waiting.values():
        chance.shuffle(names)
    coordinator = Coordinator(size)
    come: dict[str, set[int]] = {f"op {k}": set() for k in range(num_names)}
    answered: list[str] = []
    while any(waiting.values()):
        rank = chance.choice([r for r, names in waiting.items() if names])
        name = waiting[rank].pop()
        coordinator.add(rank, reduction(name))
        come[name].add(rank)
        new = [response.request.name for response in coordinator.take()]
        assert new == ([name] if len(come[name]) == size else [])
        answered += new
    assert sorted(answered) == sorted(come)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (reduction("x", (3,)), "shape (rank 0: (2,); rank 1: (3,))"),
        (reduction("x", prescale=2.0), "prescale_factor (rank 0: 1.0; rank 1: 2.0)"),
        (Request(Kind.BARRIER, "x"), "the operation (rank 0: allreduce; rank 1: barrier)"),
    ],
)
def test_what_differs_is_told(other: Request, what: str) -> None:
    coordinator = Coordinator(2)
    coordinator.add(1, other)
    coordinator.add(0, reduction("x"))
    (response,) = coordinator.take()
    assert f"ranks disagree on {what}" in response.error


def test_only_reductions_and_barriers_do_without_those_who_joined() -> None:
    coordinator = Coordinator(3)
    coordinator.add(1, Request(Kind.JOIN, JOIN))
    coordinator.add(0, reduction("x"))
    coordinator.add(0, Request(Kind.ALLGATHER, "rows", "float32", (2,)))
    assert coordinator.take() == []
    coordinator.add(2, reduction("x"))
    coordinator.add(2, Request(Kind.ALLGATHER, "rows", "float32", (2,)))
    coordinator.add(0, reduction("most")._replace(op="max"))
    coordinator.add(2, reduction("most")._replace(op="max"))
    ready, refused, most = coordinator.take()
    assert not ready.error
    assert "rank 1 called join()" in refused.error
    assert "rank 1 called join()" in most.error  # zeros would change the maximum
    # Who submitted and then joins takes part in what was submitted.
    coordinator.add(0, reduction("late"))
    coordinator.add(0, Request(Kind.JOIN, JOIN))
    assert coordinator.take() == []
    coordinator.add(2, Request(Kind.JOIN, JOIN))
    late, last = coordinator.take()
    assert late.request.name == "late"
    assert last.extents == ((2,),)
    coordinator.add(0, reduction("afterwards"))
    assert coordinator.take() == []


def rows_of(outcome: Outcome) -> Any:
    return outcome.data.view(np.float32).reshape(-1, 2)


def test_rows_are_shared_out_as_told() -> None:
    arrays = np.random.default_rng(3).integers(-9, 9, (3, 7, 2)).astype(np.float32)
    ends = [0, 0, 5, 7]

    def body(runtime: Runtime) -> Any:
        operations = Collectives(runtime)
        request = Request(Kind.REDUCESCATTER, "", "float32", (7, 2), op="sum", splits=(0, 5, 2))
        data = arrays[runtime.rank].reshape(-1).copy()
        return operations.run([NamedOperation(request, 0, data, rows_of)])[0].tolist()

    wanted = [arrays.sum(0)[a:b].tolist() for a, b in pairwise(ends)]
    assert all_well(run_ranks(3, body)) == wanted


def test_operations_of_a_sequence_match_whatever_they_are() -> None:
    """And compare their names; the next ones match again."""

    def body(runtime: Runtime) -> float:
        operations = Collectives(runtime)

        def act(kind: Kind, name: str, **details: Any) -> float:
            called = f"{kind.value} {name!r}" if name else ""
            request = Request(kind, "", "float32", (3,), called=called, **details)
            data = np.ones(3, np.float32)
            operation = NamedOperation(
                request, 0, data, lambda outcome: float(outcome.data[0]), sequence="jax"
            )
            return float(operations.run([operation])[0])

        other: dict[str, Any] = {"op": "sum"} if runtime.rank else {"root": 0}
        kind = Kind.ALLREDUCE if runtime.rank else Kind.BROADCAST
        with pytest.raises(DisagreementError, match=r"the operation \(rank 0: broadcast; rank 1"):
            act(kind, "", **other)
        with pytest.raises(
            DisagreementError, match=r"on the call \(rank 0: allreduce 'a'; rank 1: all"
        ):
            act(Kind.ALLREDUCE, "ba"[runtime.rank == 0], op="sum")
        return act(Kind.ALLREDUCE, "same", op="sum")

    assert all_well(run_ranks(2, body)) == [2.0, 2.0]


def test_an_answer_on_its_way_is_moved_on_when_the_operation_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that computes must still send the data that other ranks wait for."""
    is_sending = threading.Event()
    is_sending.set()
    monkeypatch.setattr(HostBackend, "sends_notices", property(lambda _: is_sending.is_set()))

    def body(runtime: Runtime) -> None:
        operations = Collectives(runtime)
        operations.run(
            [NamedOperation(reduction("x", (1,)), 0, np.ones(1, np.float32), lambda _: None)]
        )
        (lane,) = operations.lanes.values()
        assert lane is not None
        assert lane.busy
        assert lane.owes_work
        assert lane in runtime.thread.loop._lanes
        runtime.channel.exchange(b"", "all have seen that")
        is_sending.clear()
        deadline = time.monotonic() + 60
        while lane in runtime.thread.loop._lanes:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    all_well(run_ranks(2, body))


def submit(operations: Collectives, name: str, value: float) -> int:
    data = np.full(3, value, np.float32)
    operation = NamedOperation(reduction(name, (3,)), 0, data, lambda outcome: outcome.data[0])
    return operations.submit([operation], is_group=False)


@pytest.mark.parametrize("late_s", [0.0, 1.5])
def test_ranks_that_wait_for_different_names_are_told(late_s: float) -> None:
    """Also one that computes for longer than the others wait before they ask what holds them up."""

    def body(runtime: Runtime) -> None:
        operations = Collectives(runtime)
        handle = submit(operations, f"of rank {runtime.rank}", 1.0)
        time.sleep(late_s * (runtime.rank == 0))
        operations.synchronize(handle)

    patient = replace(QUICK, stall_warning_s=0.3, timeout_s=60.0)
    for error in run_ranks(2, body, patient):
        assert isinstance(error, DisagreementError)
        assert "rank 0: in allreduce 'of rank 0'" in str(error)
        assert late_s or "rank 1: in allreduce 'of rank 1'" in str(error)


def test_a_rank_that_has_joined_while_another_waits_elsewhere_is_told() -> None:
    def body(runtime: Runtime) -> None:
        operations = Collectives(runtime)
        if runtime.rank:
            runtime.channel.exchange(b"", "broadcast_parameters()")
        else:
            operations.join()

    for error in run_ranks(2, body, replace(QUICK, stall_warning_s=0.3, timeout_s=60.0)):
        assert isinstance(error, DisagreementError), error
        assert "rank 0: in join" in str(error)
        assert "rank 1: in broadcast_parameters()" in str(error)
