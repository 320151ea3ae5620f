"""The backends of devices: the contract on a device made of threads, and what NCCL is told."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.contract.checks import CHECKS, FLOATS, HALVES
from tests.support.devices import Devices
from tests.support.fake_nccl import FakeNccl
from tests.support.local import LocalWorld
from tests.support.software_device import SoftwareDevice
from wfbp.comm.arrays import Buffer
from wfbp.comm.device import links, nccl
from wfbp.comm.device.device_backend import DeviceBackend
from wfbp.comm.device.launch_order import LaunchOrder
from wfbp.comm.device.links import connect, why_no_nccl
from wfbp.comm.device.nccl import OPS, NcclBackend
from wfbp.comm.device.staged import StagedBackend
from wfbp.comm.waiting import wait
from wfbp.config import Config
from wfbp.core.types import ITEM_BYTES, Op
from wfbp.errors import BackendError, StallError
from wfbp.runtime import process

KINDS = ("nccl", "staged")
LARGE = ("100_mb", "100_mb_of_halves")
OF_HOSTS = (
    *(
        f"{dtype}-{op.value}"
        for dtype in ITEM_BYTES
        for op in Op
        if dtype not in FLOATS + HALVES or op not in OPS
    ),
    "bad_buffers",
    "broadcast",
    "delivered_segments",
    "integer_average",
    "memory_that_comes_and_goes",
    "reduced_segments",
    "scattered_and_gathered_segments",
    "all_to_all",
    "nan",
    "notices",
    "several_chunks",
    "subset",
    "testing_only_when_it_may_progress_misses_nothing",
    "who_rests_between_tests_misses_nothing",
)
"""What backends of devices do not offer."""
STRUCTURE = ("all_gather", "reduce_scatter", "many_in_flight", "float32-average")
"""What depends on the number of ranks."""


class Ranks(Devices):
    """Ranks as threads, each with a device, and host backends that belong together."""

    def __init__(self, size: int, seed: int = 0, most_s: float = 0.0) -> None:
        super().__init__(size, nccl=True, seed=seed, most_s=most_s)
        self.devices: list[SoftwareDevice] = self.of
        self.libraries: list[FakeNccl] = [device.library for device in self.of]

    def backend(self, kind: str, rank: int) -> DeviceBackend:
        device, host = self.devices[rank], self.connect(rank)
        if kind == "nccl":
            return NcclBackend(device, host, self.libraries[rank], timeout_s=60.0)
        return StagedBackend(device, host, piece_bytes=1 << 16)

    def settling(self, kind: str, rank: int) -> DeviceBackend:
        """A backend for checks, which write to its zeros at once and on no stream."""
        backend, device = self.backend(kind, rank), self.devices[rank]
        enqueued = backend.zeros

        def zeros(nbytes: int) -> Buffer:
            data = enqueued(nbytes)
            device.drain()
            return data

        backend.zeros = zeros  # type: ignore[method-assign]
        return backend

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def main(rank: int) -> None:
            try:
                results[rank] = body(rank)
                self.devices[rank].drain()
            except BaseException as error:
                errors.append(error)
                for world in self.worlds:
                    world.backend(rank).abort(1)

        threads = [threading.Thread(target=main, args=(r,), daemon=True) for r in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
            assert not thread.is_alive()
        if errors:
            raise errors[0]
        return results


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "size"),
    [(name, 2) for name in CHECKS if name not in LARGE + OF_HOSTS + STRUCTURE]
    + [(name, size) for name in STRUCTURE for size in (1, 3)],
)
def test_contract(name: str, kind: str, size: int) -> None:
    ranks = Ranks(size)
    ranks.run(lambda rank: CHECKS[name](ranks.settling(kind, rank)))


@pytest.mark.parametrize("kind", KINDS)
def test_messages_wait_for_what_their_stream_waits_for(kind: str) -> None:
    """Nothing is read before the producer has written, and the consumer reads what was reduced."""
    ranks = Ranks(2, most_s=2e-3)

    def body(rank: int) -> None:
        device = ranks.devices[rank]
        backend = ranks.backend(kind, rank)
        producer, consumer = device.new_stream(), device.new_stream()
        data = [np.zeros(5_000, np.float32) for _ in range(20)]
        found = [np.zeros(5_000, np.float32) for _ in data]
        works = []
        for k, each in enumerate(data):
            device.write(producer, [each], lambda each=each, k=k: each.fill(k + rank))
            device.wait(backend.stream, device.record(producer))
            works.append(backend.all_reduce(each, "float32", Op.SUM))
        for work, each, target in zip(works, data, found, strict=True):
            while not work.issued():
                pass
            device.wait(consumer, device.record(backend.stream))
            device.copy(target, each, consumer)
        device.drain()
        assert [set(f) for f in found] == [{2.0 * k + 1} for k in range(20)]

    ranks.run(body)


@pytest.mark.parametrize("dtype", FLOATS + HALVES)
def test_what_nccl_is_told(dtype: str) -> None:
    """Pointers, counts, types, operations and streams of every collective."""
    ranks = Ranks(2)
    item = ITEM_BYTES[dtype]

    def body(rank: int) -> tuple[int, int, int, list[Any]]:
        backend = ranks.backend("nccl", rank)
        data = np.zeros(16 * item, np.uint8)
        address = int(data.__array_interface__["data"][0])
        equal, unequal = [8 * item] * 2, [6 * item, 10 * item]
        for work in (
            backend.all_reduce(data, dtype, Op.SUM),
            backend.all_reduce(data[4 * item :], dtype, Op.AVERAGE),
            backend.reduce_scatter(data, equal, dtype, Op.SUM),
            backend.reduce_scatter(data, unequal, dtype, Op.SUM),
            backend.all_gather(data, equal),
            backend.all_gather(data, unequal),
        ):
            wait(work, timeout_s=60.0)
        return address, backend.stream, rank, ranks.libraries[rank].calls

    for address, stream, rank, calls in ranks.run(body):
        assert {call.stream for call in calls} == {stream}
        told = [(call.name, *call.arguments.values()) for call in calls]
        part = 8 * item
        assert told == [
            ("allReduce", address, address, 16, FakeNccl.NCCL_SUM),
            ("allReduce", address + 4 * item, address + 4 * item, 12, FakeNccl.NCCL_AVG),
            ("reduceScatter", address, address + rank * part, 8, FakeNccl.NCCL_SUM),
            ("allReduce", address, address, 16, FakeNccl.NCCL_SUM),
            ("allGather", address + rank * part, address, 8 * item),
            ("broadcast", address, address, 6 * item, 0),
            ("broadcast", address + 6 * item, address + 6 * item, 10 * item, 1),
        ]


def test_an_error_of_nccl_aborts_the_communicator() -> None:
    ranks = Ranks(1)
    backend = ranks.backend("nccl", 0)
    library = ranks.libraries[0]
    gate = threading.Event()
    ranks.devices[0].enqueue(backend.stream, lambda: gate.wait(60.0))
    work = backend.all_reduce(np.ones(3, np.float32), "float32", Op.SUM)
    assert not work.test()
    library.error = RuntimeError("NCCL_ERROR_REMOTE_ERROR")
    with pytest.raises(BackendError, match=r"rank 0 of 1: NCCL failed: NCCL_ERROR_REMOTE_ERROR"):
        work.test()
    assert library.communicators[0].aborted
    backend.check()  # said once; the communicator is gone
    backend.close()
    assert not library.communicators[0].destroyed
    gate.set()


def test_results_that_cupy_has_no_name_for() -> None:
    """CuPy looks a result's name up in a table, and finds none of the later ones."""
    ranks = Ranks(1)
    backend = ranks.backend("nccl", 0)
    library = ranks.libraries[0]
    library.error = KeyError(7)
    backend.check()
    assert not library.communicators[0].aborted, "in progress is no error"
    library.error = KeyError(8)
    with pytest.raises(BackendError, match=r"NCCL failed: ncclResult_t 8, which CuPy does not"):
        backend.check()
    assert library.communicators[0].aborted


@pytest.mark.parametrize("name", ["NcclCommunicator", "get_unique_id"])
def test_where_nccl_fails_on_one_rank_all_are_staged(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Without an id, as where NCCL_SOCKET_IFNAME names no interface, the others do not wait."""
    ranks, hosts = Ranks(2), LocalWorld(2)
    fails = 1 if name == "NcclCommunicator" else 0

    def fail(*_: Any) -> None:
        raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR")

    setattr(ranks.libraries[fails], name, fail)

    def body(rank: int) -> None:
        timeout_s = 2.0 if fails else 60.0
        backend = connect(ranks.devices[rank], hosts.backend(rank), timeout_s=timeout_s)
        assert isinstance(backend, StagedBackend)
        data = np.full(3, rank, np.float32)
        wait(backend.all_reduce(data, "float32", Op.SUM), timeout_s=60.0)
        while set(data) != {1.0}:
            time.sleep(1e-3)

    ranks.run(body)
    reason = f"rank {fails} of 2: NCCL could not connect the ranks: NCCL_ERROR_SYSTEM_ERROR"
    assert f"{reason} (NCCL_DEBUG=WARN tells more)" in caplog.text


@pytest.mark.parametrize("act", ["abort", "destroy"])
def test_a_communicator_that_does_not_end_at_exit_is_not_waited_for(
    act: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as because a rank was killed. Python 3.12 starts no thread at exit."""
    monkeypatch.setattr(nccl, "_END_S", 0.05)
    ranks = Ranks(1)
    backend = ranks.backend("nccl", 0)
    gate = threading.Event()
    monkeypatch.setattr(
        ranks.libraries[0].communicators[0], act, lambda: gate.wait(20.0) or pytest.fail("waited")
    )

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    if act == "abort":
        backend.give_up()
    backend.close()
    assert not gate.is_set()
    gate.set()
    done = "aborted" if act == "abort" else "destroyed its communicator"
    assert caplog.messages == [f"rank 0 of 1: NCCL has not {done} within 0.05 s"]


def test_lanes_run_in_the_order_of_their_launch() -> None:
    """On the device, too: there a launched collective may wait for its gradients."""
    ranks = Ranks(2)
    made = threading.Barrier(2)
    orders: dict[int, LaunchOrder] = {}

    def body(rank: int) -> list[int]:
        device = ranks.devices[rank]
        orders[rank] = order = LaunchOrder(
            rank, lambda turns: orders[1 - rank].hear(turns), lambda: None
        )
        lanes = [ranks.backend("nccl", rank) for _ in range(2)]
        for lane in lanes:
            lane.lane = order.admit(lane.host, timeout_s=60.0)
            lane.order = order
        run: list[int] = []
        update = device.update

        def note(stream: int, target: Buffer, act: Callable[[Buffer], None]) -> None:
            number = [lane.stream for lane in lanes].index(stream)
            update(stream, target, lambda copy: (run.append(number), act(copy))[1])

        device.update = note  # type: ignore[method-assign]
        gate = threading.Event()
        if rank == 0:  # the first lane's gradients are late
            device.enqueue(lanes[0].stream, lambda: gate.wait(60.0))
        made.wait(60.0)
        works = [lane.all_reduce(np.ones(3, np.float32), "float32", Op.SUM) for lane in lanes]
        while not all(work.issued() for work in works):
            pass
        for _ in range(20):  # the second lane's have the time to run first
            if device.done(works[1].end):
                break
            time.sleep(0.01)
        gate.set()
        device.drain()
        return run

    assert ranks.run(body) == [[0, 1], [0, 1]]


def test_init_sets_nccls_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch may make a communicator before the first optimizer; NCCL reads them then."""
    monkeypatch.setenv("NCCL_RUNTIME_CONNECT", "")
    monkeypatch.delenv("NCCL_RUNTIME_CONNECT")
    process.start(backend=LocalWorld(1).backend(0), config=Config())
    try:
        assert os.environ["NCCL_RUNTIME_CONNECT"] == "0"
    finally:
        process.shutdown()


@pytest.mark.parametrize(("value", "version", "shares"), [("1", 23003, True), ("1", 22809, False)])
def test_ranks_share_a_gpu_if_nccl_lets_them(
    value: str | None,
    version: int,
    shares: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv(links.SHARING, raising=False)
    if value is not None:
        monkeypatch.setenv(links.SHARING, value)
    ranks, hosts = Ranks(2), LocalWorld(2)
    for device, library in zip(ranks.devices, ranks.libraries, strict=True):
        device.identity = "the same"
        library.get_version = lambda: version  # type: ignore[method-assign]

    def body(rank: int) -> bool:
        backend = connect(ranks.devices[rank], hosts.backend(rank), timeout_s=60.0)
        return isinstance(backend, NcclBackend)

    assert ranks.run(body) == [shares] * 2
    assert ("ranks 0 and 1 share a GPU" in caplog.text) is not shares


def test_the_probe_reads_the_devices_clock() -> None:
    """What the host takes to hear of the end is no part of what a message costs."""
    ranks = Ranks(1)
    backend, device = ranks.backend("nccl", 0), ranks.devices[0]
    stop = backend.stopwatch()
    events = []
    record = device.record
    device.record = lambda *a, **k: events.append(record(*a, **k)) or events[-1]  # type: ignore
    begun = threading.Event()
    device.enqueue(backend.stream, begun.set)
    assert begun.wait(60.0)
    device.seconds = lambda start, end: 0.25 if end is events[0] and start.timed else 0.0  # type: ignore
    assert stop() == 0.25


@pytest.mark.parametrize("kind", KINDS)
def test_closing_waits_for_the_device(kind: str) -> None:
    """Hosts run ahead of it: what was enqueued may not have begun when a program ends."""
    ranks = Ranks(2)
    gates = [threading.Event() for _ in range(2)]

    def body(rank: int) -> None:
        backend, device = ranks.backend(kind, rank), ranks.devices[rank]
        work = backend.all_reduce(np.ones(4, np.float32), "float32", Op.SUM)
        while not work.issued():
            pass
        device.enqueue(backend.stream, lambda: gates[rank].wait(60.0))
        closing = threading.Thread(target=backend.close)
        closing.start()
        closing.join(0.05)
        assert closing.is_alive()
        assert not any(each.destroyed for each in ranks.libraries[rank].communicators)
        gates[rank].set()
        closing.join(60.0)
        assert not closing.is_alive()

    ranks.run(body)


def test_a_device_that_hangs_is_aborted_when_it_is_closed() -> None:
    ranks = Ranks(1)
    gate = threading.Event()
    backend = NcclBackend(ranks.devices[0], ranks.connect(0), ranks.libraries[0], timeout_s=0.05)
    ranks.devices[0].enqueue(backend.stream, lambda: gate.wait(60.0))
    backend.close()
    gate.set()
    (communicator,) = ranks.libraries[0].communicators
    assert communicator.aborted
    assert not communicator.destroyed


def test_ranks_that_do_not_join_are_not_waited_for_for_ever() -> None:
    ranks = Ranks(1)
    library = ranks.libraries[0]
    gate = threading.Event()

    def never(*_: Any) -> None:
        gate.wait(60.0)

    library.NcclCommunicator = never
    with pytest.raises(StallError, match=r"did not complete within 0\.05 s"):
        NcclBackend(ranks.devices[0], ranks.connect(0), library, timeout_s=0.1)
    gate.set()


def test_staging_uses_two_pinned_buffers() -> None:
    """However large the message; pieces start in the same order on every rank."""
    ranks = Ranks(2, most_s=1e-3)
    made: list[list[int]] = [[], []]

    def body(rank: int) -> None:
        device = ranks.devices[rank]
        pinned = device.pinned
        device.pinned = lambda n: (made[rank].append(n), pinned(n))[1]  # type: ignore[method-assign]
        backend = ranks.backend("staged", rank)
        data = [np.full(100_003, rank + k, np.float32) for k in range(4)]
        works: Sequence[Any] = [backend.all_reduce(d, "float32", Op.AVERAGE) for d in data]
        for work in works:
            wait(work, timeout_s=60.0)
        assert [set(d) for d in data] == [{k + 0.5} for k in range(4)]

    ranks.run(body)
    assert made == [[1 << 16] * 2] * 2


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ([("a", None, False, ""), ("b", None, False, "")], ""),
        ([("a", None, False, ""), ("a", None, False, "")], "ranks 0 and 1 share a GPU"),
        ([("a", None, True, ""), ("a", None, True, "")], ""),
        ([("a", None, False, ""), ("a", None, True, "")], "ranks 0 and 1 share a GPU"),
        ([("a", None, False, ""), ("b", None, False, "no NCCL")], "rank 1: no NCCL"),
        ([("a", "x", False, ""), ("a", "y", False, "")], ""),
        ([("a", "x", False, ""), ("a", "x", False, "")], "ranks 0 and 1 share a GPU"),
    ],
)
def test_nccl_serves_where_every_rank_can(told: list[tuple[object, ...]], reason: str) -> None:
    keys = ("device", "host", "shares", "problem")
    found = why_no_nccl([dict(zip(keys, each, strict=True)) for each in told])
    assert found.startswith(reason)
    assert bool(found) == bool(reason)
