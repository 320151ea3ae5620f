"""Named operations: the coordinator by itself, and with ranks as threads."""

from __future__ import annotations

import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.local import LocalBackend, LocalWorld
from tests.support.ranks import QUICK, all_well, run_ranks
from wfbp.comm.backend import Buffer, Mailbox, word_dtype
from wfbp.core.types import Op
from wfbp.errors import DisagreementError
from wfbp.runtime.collectives.arithmetic import ITEM, adasum, scale
from wfbp.runtime.collectives.coordinator import Coordinator
from wfbp.runtime.collectives.named_lane import JOIN, NamedLane
from wfbp.runtime.collectives.operations import Call, Collectives, _never_communicates
from wfbp.runtime.collectives.request import (
    Kind,
    Request,
    Response,
    Route,
    decode_requests,
    decode_responses,
    encode_requests,
    encode_responses,
)
from wfbp.runtime.collectives.submission import Outcome, Submission
from wfbp.runtime.consistency import check_consistent
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


def test_a_lane_that_is_closed_is_not_served() -> None:
    """Its communicators are gone, and the thread may have more to do in this turn."""
    served: list[object] = []
    loop = SimpleNamespace(
        add_lane=lambda lane, members: served.append(lane), remove_lane=served.remove
    )
    backend = LocalWorld(1).backend(0)
    thread: Any = SimpleNamespace(loop=loop)
    lane = NamedLane(thread, backend, backend.mailbox(), "", "rank 0 of 1")
    lane.submit(Submission(Request(Kind.BARRIER, "a"), np.zeros(0, np.uint8)))
    assert served == [lane]
    lane.close()
    assert not served


def test_requests_and_responses_survive_the_journey() -> None:
    requests = [
        reduction("a", (), prescale=0.1, data=b"1234"),
        Request(Kind.ALLTOALL, "é", splits=(1, 0, 2), waits=True, called="e"),
    ]
    assert decode_requests(encode_requests(requests)) == requests
    responses = [
        Response(requests[1], "wrong", ((1,), (2, 3)), True, unmatched=True),
        Response(requests[0], result=b"12345678"),
    ]
    sent = [replace(each, request=replace(each.request, data=None)) for each in responses]
    assert decode_responses(encode_responses(responses)) == sent


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (reduction("x", called="y"), "the name: rank 0: ; rank 1: y"),
        (reduction("x", (3,)), "shape: rank 0: (2,); rank 1: (3,)"),
        (reduction("x", prescale=2.0), "prescale_factor: rank 0: 1.0; rank 1: 2.0"),
        (reduction("x", device="gpu"), "the device: rank 0: cpu; rank 1: gpu"),
        (Request(Kind.BARRIER, "x"), "the operation: rank 0: allreduce; rank 1: barrier"),
        (
            Request(Kind.ALLREDUCE, "x", "int32", (2,), op="sum"),
            "the element type: rank 0: float32; rank 1: int32",
        ),
        (
            Request(Kind.ALLREDUCE, "x", "float32", (2,), op="max"),
            "op: rank 0: sum; rank 1: max",
        ),
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
    ready, refused = coordinator.take()
    assert not ready.error
    assert "rank 1 called join()" in refused.error
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


def test_the_coordinator_reduces_what_comes_with_the_requests() -> None:
    coordinator = Coordinator(3)
    for rank in range(3):
        coordinator.add(rank, reduction("x", data=np.float32([rank, 1]).tobytes()))
    (response,) = coordinator.take()
    assert response.result == np.float32([3, 3]).tobytes()
    # Of one rank the data did not come: all send them.
    for rank in range(3):
        coordinator.add(rank, reduction("x", data=bytes(8) if rank else None))
    assert coordinator.take()[0].result is None
    coordinator.add(1, Request(Kind.JOIN, JOIN))
    for rank in (0, 2):
        largest = replace(reduction("x"), op="max", data=np.float32([-rank, rank]).tobytes())
        coordinator.add(rank, largest)
    assert coordinator.take()[0].result == np.float32([0, 2]).tobytes()
    for rank in (0, 2):
        data = bytes(8 + rank)
        coordinator.add(rank, reduction("x", (2 + rank,), data=data))
    (response,) = coordinator.take()
    assert "shape" in response.error
    assert response.result is None


def test_small_reductions_give_what_large_ones_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no message of their own."""
    messages: list[int] = []
    reduce = LocalBackend.all_reduce

    def counted(self: LocalBackend, buffer: Buffer, *arguments: Any) -> Any:
        messages.append(buffer.nbytes)
        return reduce(self, buffer, *arguments)

    monkeypatch.setattr(LocalBackend, "all_reduce", counted)
    times = 2000

    def body(runtime: Runtime) -> None:
        operations = Collectives(runtime)

        def combined(data: Buffer, dtype: str, op: Op) -> Buffer:
            half = {} if dtype == "bool" else {"prescale": 1.5, "postscale": 2.0}
            details = {"dtype": dtype, "shape": data.shape, "op": op, **half}
            call = Call(Kind.ALLREDUCE, None, 0, data, lambda outcome: outcome.data, details)
            return operations.run(call)

        values = [runtime.rank - 1.0, 3.0, 5.0 * runtime.rank, -2.0]
        for dtype in ITEM:
            for op in Op:
                if dtype == "bool" and op is Op.AVERAGE:
                    continue
                kind = np.float16 if dtype == "bfloat16" else dtype
                kept = np.abs(values).astype(kind).view(word_dtype(dtype))
                small = kept.copy()
                large = combined(np.repeat(kept, times), dtype, op)
                found = combined(small, dtype, op)
                assert found.tobytes() == large[::times].tobytes(), (dtype, op)
                assert found is small

    all_well(run_ranks(3, body))
    assert messages
    assert min(messages) >= 4 * times


def test_operations_go_by_the_device_where_all_ranks_could() -> None:
    coordinator = Coordinator(2)

    def answer(name: str, *requests: Request) -> Response:
        for rank, request in enumerate(requests):
            coordinator.add(rank, request)
        (response,) = coordinator.take()
        assert response.request.name == name
        return response

    could = {"device": "gpu", "on_device": True}
    response = answer(
        "x", reduction("x", **could, available=(3, 1, 5)), reduction("x", **could, available=(2, 4))
    )
    assert (response.route, response.available) == (Route.DEVICE, (2, 1))
    assert decode_responses(encode_responses([response]))[0].route is Route.DEVICE
    assert answer("y", reduction("y", **could), reduction("y", device="gpu")).route is Route.HOST
    coordinator.add(1, Request(Kind.JOIN, JOIN))
    assert answer("z", reduction("z", **could)).route is Route.HOST


def test_programs_that_wait_in_different_operations_are_told() -> None:
    coordinator = Coordinator(3)
    coordinator.add(0, reduction("x", waits=True))
    coordinator.add(1, reduction("y", waits=True))
    coordinator.add(2, reduction("x"))  # goes on
    assert not coordinator.stands_still
    coordinator.add(2, Request(Kind.BARRIER, "z", waits=True))
    assert coordinator.stands_still
    coordinator.refuse_waiting()
    assert not coordinator.stands_still
    refused = coordinator.take()
    assert [response.request.name for response in refused] == ["x", "y", "z"]
    assert [response.extents for response in refused] == [((0, 2),), ((1,),), ((2,),)]
    for response in refused:
        assert response.unmatched
        told = "rank 0: allreduce 'x'; rank 1: allreduce 'y'; rank 2: barrier 'z'. Every rank"
        assert told in response.error
    for rank in range(3):
        coordinator.add(rank, reduction("x", waits=True))
    (response,) = coordinator.take()
    assert not response.error
    assert not coordinator.stands_still


def test_who_has_joined_waits_too() -> None:
    coordinator = Coordinator(3)
    coordinator.add(1, Request(Kind.JOIN, JOIN))
    assert not coordinator.stands_still
    coordinator.add(0, reduction("x", waits=True))
    coordinator.add(2, reduction("y", waits=True))
    assert coordinator.stands_still
    coordinator.refuse_waiting()
    assert "rank 2: allreduce 'y'; rank 1: join()" in coordinator.take()[0].error


def rows_of(outcome: Outcome) -> Any:
    return outcome.data.view(np.float32).reshape(-1, 2)


def test_rows_are_shared_out_as_told() -> None:
    arrays = np.random.default_rng(3).integers(-9, 9, (3, 7, 2)).astype(np.float32)
    ends = [0, 0, 5, 7]

    def body(runtime: Runtime) -> Any:
        operations = Collectives(runtime)
        details = {"dtype": "float32", "shape": (7, 2), "op": Op.SUM, "splits": (0, 5, 2)}
        data = arrays[runtime.rank].reshape(-1).copy()
        call = Call(Kind.REDUCESCATTER, None, 0, data, rows_of, details)
        return operations.run(call).tolist()

    wanted = [arrays.sum(0)[a:b].tolist() for a, b in pairwise(ends)]
    assert all_well(run_ranks(3, body)) == wanted


def test_rows_are_exchanged() -> None:
    arrays = np.arange(36, dtype=np.float32).reshape(3, 6, 2)

    def body(runtime: Runtime) -> Any:
        operations = Collectives(runtime)
        details = {"dtype": "float32", "shape": (6, 2), "splits": (2, 2, 2)}
        data = arrays[runtime.rank].reshape(-1).copy()
        return operations.run(Call(Kind.ALLTOALL, None, 0, data, rows_of, details)).tolist()

    for rank, found in enumerate(all_well(run_ranks(3, body))):
        assert found == arrays[:, 2 * rank : 2 * rank + 2].reshape(6, 2).tolist()


def test_ordered_operations_match_whatever_they_are() -> None:
    """And compare their names; the next ones match again."""

    def body(runtime: Runtime) -> float:
        operations = Collectives(runtime)

        def act(kind: Kind, name: str | None, **details: Any) -> float:
            details.update(dtype="float32", shape=(3,))
            data = np.ones(3, np.float32)
            call = Call(kind, name, 0, data, lambda outcome: float(outcome.data[0]), details)
            call.ordered = True
            return operations.run(call)

        other: dict[str, Any] = {"op": Op.SUM} if runtime.rank else {"root": 0}
        kind = Kind.ALLREDUCE if runtime.rank else Kind.BROADCAST
        with pytest.raises(DisagreementError, match="on the operation: rank 0: broadcast; rank 1"):
            act(kind, None, **other)
        with pytest.raises(
            DisagreementError, match="on the name: rank 0: allreduce 'a'; rank 1: all"
        ):
            act(Kind.ALLREDUCE, "ba"[runtime.rank == 0], op=Op.SUM)
        return act(Kind.ALLREDUCE, "same", op=Op.SUM)

    assert all_well(run_ranks(2, body)) == [2.0, 2.0]


def test_a_number_that_was_used_in_vain_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else operations without a name would never match again."""
    monkeypatch.setattr(Collectives, "_may_go_on_elsewhere", lambda _: False)

    def body(runtime: Runtime) -> float:
        operations = Collectives(runtime)

        def barrier() -> None:
            operations.run(Call(Kind.BARRIER, None, 0, np.empty(0, np.uint8), lambda _: None))

        def total() -> float:
            details = {"dtype": "float32", "shape": (1,), "op": Op.SUM}
            data = np.ones(1, np.float32)
            return operations.run(
                Call(Kind.ALLREDUCE, None, 0, data, lambda outcome: outcome.data[0], details)
            )

        for _ in range(2):
            with pytest.raises(DisagreementError, match="ranks wait in different operations: "):
                (total if runtime.rank else barrier)()
            barrier()
        return float(total())

    assert all_well(run_ranks(2, body)) == [2.0, 2.0]


def test_an_answer_on_its_way_is_moved_on_when_the_operation_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that goes on to compute has to send what the others wait for."""
    is_sending = threading.Event()
    is_sending.set()
    monkeypatch.setattr(Mailbox, "sending", property(lambda _: is_sending.is_set()))

    def body(runtime: Runtime) -> None:
        operations = Collectives(runtime)
        details = {"dtype": "float32", "shape": (1,), "op": Op.SUM}
        data = np.ones(1, np.float32)
        operations.run(Call(Kind.ALLREDUCE, "x", 0, data, lambda _: None, details))
        (lane,) = (members.lane for members in operations._sets.values())
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


def test_threads_of_libraries_are_known_to_begin_nothing() -> None:
    """A progress bar's thread must not make ranks that wait in different operations wait long."""
    queue_of_torch = pytest.importorskip("torch.utils.data._utils.pin_memory")
    monitor = pytest.importorskip("tqdm").TMonitor
    over = threading.Event()
    bar = monitor.__new__(monitor)
    threading.Thread.__init__(bar)
    own = threading.Thread(target=over.wait)
    pool = ThreadPoolExecutor(1)
    pool.submit(over.wait)
    loader = threading.Thread(target=queue_of_torch._pin_memory_loop)
    try:
        assert [_never_communicates(each) for each in (bar, loader)] == [True, True]
        (of_pool,) = pool._threads
        assert [_never_communicates(each) for each in (own, of_pool)] == [False, False]
    finally:
        over.set()
        pool.shutdown()


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_adasum_adds_what_is_orthogonal_and_averages_what_is_parallel(kind: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = np.dtype(kind) if kind == "float16" else np.dtype(ml_dtypes.bfloat16)
    rows = np.array([[1, 0, 3], [0, 2, 0], [1, 2, 3], [1, 2, 3]]).astype(dtype)
    found = adasum([row.view(np.uint16) for row in rows], kind).view(dtype)
    assert found.astype(float).tolist() == [1.0, 2.0, 3.0]
    assert adasum([np.zeros(2), np.ones(2)], "float64").tolist() == [1.0, 1.0]


def test_integers_scale_in_float64_and_truncate() -> None:
    for dtype in ("int8", "int16", "int32", "int64"):
        values = np.array([-3, 3, 7], dtype)
        scale(values, dtype, 0.5)
        assert values.tolist() == [-1, 1, 3]


def submit(operations: Collectives, name: str | None, value: float) -> int:
    return operations.submit(
        Call(
            Kind.ALLREDUCE,
            name,
            0,
            np.full(3, value, np.float32),
            lambda outcome: outcome.data[0],
            {"dtype": "float32", "shape": (3,), "op": Op.SUM},
        )
    )


def test_operations_match_by_name_in_any_order() -> None:
    def body(runtime: Runtime) -> float:
        operations = runtime.collectives = Collectives(runtime)
        names = [f"n{k}" for k in range(100)]
        random.Random(runtime.rank).shuffle(names)
        handles = {name: submit(operations, name, float(name[1:])) for name in names}
        random.Random(7 + runtime.rank).shuffle(names)
        for name in names:
            assert operations.synchronize(handles[name]) == 3 * float(name[1:])
        return float(operations.synchronize(submit(operations, None, runtime.rank)))

    assert run_ranks(3, body) == [3.0] * 3


def test_a_result_is_not_lost_to_a_handler_that_raises_before_it_is_returned() -> None:
    """Python runs handlers behind any call, also the last one before the return."""
    runtime = Runtime(LocalWorld(1).backend(0), QUICK)
    operations = runtime.collectives = Collectives(runtime)
    handle = submit(operations, "x", 3.0)
    raised: list[int] = []

    def handler(frame: FrameType, event: str, _: object) -> None:
        if event == "c_return" and frame.f_code is Collectives.synchronize.__code__:
            raised.append(frame.f_lineno)
            raise InterruptedError

    sys.setprofile(handler)
    try:
        found = operations.synchronize(handle)
    except InterruptedError:
        sys.setprofile(None)
        found = operations.synchronize(handle)
    finally:
        sys.setprofile(None)
        runtime.shutdown()
    assert found == 3.0, raised


def test_an_error_is_one_of_all_ranks_and_of_one_operation() -> None:
    def body(runtime: Runtime) -> float:
        operations = runtime.collectives = Collectives(runtime)
        good = submit(operations, "good", 1.0)
        bad = operations.submit(
            Call(
                Kind.BROADCAST,
                "bad",
                0,
                np.zeros(2, np.float32),
                lambda outcome: None,
                {"dtype": "float32", "shape": (2,), "root": runtime.rank},
            )
        )
        with pytest.raises(DisagreementError, match=r"root_rank: rank 0: 0; rank 1: 1"):
            operations.synchronize(bad)
        with pytest.raises(ValueError, match="is of no pending operation"):
            operations.synchronize(bad)
        with pytest.raises(ValueError, match="'good' is pending"):
            submit(operations, "good", 1.0)
        while not operations.poll(good):
            pass
        return float(operations.synchronize(good))

    assert run_ranks(2, body) == [2.0] * 2


def test_ranks_that_wait_for_different_names_are_told() -> None:
    def body(runtime: Runtime) -> None:
        operations = runtime.collectives = Collectives(runtime)
        handle = submit(operations, f"of rank {runtime.rank}", 1.0)
        operations.synchronize(handle)

    patient = replace(QUICK, stall_warning_s=0.3, timeout_s=60.0)
    for error in run_ranks(2, body, patient):
        assert isinstance(error, DisagreementError)
        assert "rank 0: in allreduce 'of rank 0'" in str(error)
        assert "rank 1: in allreduce 'of rank 1'" in str(error)


def test_a_rank_that_has_joined_while_another_waits_elsewhere_is_told() -> None:
    def body(runtime: Runtime) -> None:
        operations = runtime.collectives = Collectives(runtime)
        if runtime.rank:
            check_consistent(runtime, "broadcast_parameters()")
        else:
            operations.synchronize(operations.begin_join())

    for error in run_ranks(2, body, replace(QUICK, stall_warning_s=0.3, timeout_s=60.0)):
        assert isinstance(error, DisagreementError), error
        assert "rank 0: in join" in str(error)
        assert "rank 1: in broadcast_parameters()" in str(error)
