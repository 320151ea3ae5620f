"""Named operations on a device: the values of the host's, in one order with training, nobody waits.

Ranks are threads, devices are made of threads, and NCCL is what stands for it.
"""

from __future__ import annotations

import random
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.support.device_trainer import DeviceTrainer
from tests.support.devices import Devices
from tests.support.ranks import all_well, limit_waits, run_ranks
from tests.support.software_device import SoftwareDevice
from tests.support.trainer import make_specs
from wfbp.comm.backend import Buffer, word_dtype
from wfbp.comm.device import operations as device_operations
from wfbp.comm.device.device import Device
from wfbp.comm.device.operations import Placed, carries
from wfbp.config import Config
from wfbp.core.types import ELEMENTWISE_OPS, Op
from wfbp.errors import BackendError, DisagreementError, StallError, WfbpError
from wfbp.runtime.collectives import api, operations
from wfbp.runtime.collectives.coordinator import Kind
from wfbp.runtime.collectives.named_lane import Outcome
from wfbp.runtime.collectives.operands import Operand, make_operation
from wfbp.runtime.collectives.operations import Collectives, Operation
from wfbp.runtime.runtime import Runtime

Array = np.ndarray[Any, Any]

STEADY = Config(schedule="layerwise", warmup_steps=10**6, timeout_s=60.0)

FLOATING = ("float16", "bfloat16", "float32", "float64")
DTYPES = (*FLOATING, "int32", "int64", "uint8", "int8", "int16", "bool")

_here = threading.local()


@pytest.fixture(autouse=True)
def _on_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "why_unsupported", lambda: "")
    monkeypatch.setattr(api, "current", lambda _: _here.operations)


class World:
    """The process set of all ranks, as operations see it."""

    def known_id(self, call: str = "") -> int:
        return 0

    def rank(self) -> int:
        rank: int = _here.operations.rank
        return rank

    def size(self) -> int:
        return len(_here.operations.ranks_of(0))


WORLD: Any = World()


class OnHost(Operand[Array]):
    """An array in the host's memory."""

    def __init__(self, values: Array, dtype: str) -> None:
        self.dtype, self.shape = dtype, values.shape
        self._values = values

    def data(self) -> Buffer:
        return self._values.reshape(-1).copy().view(word_dtype(self.dtype))

    def whole(self, outcome: Outcome, factor: float) -> Array:
        return outcome.data.copy()

    def rows(self, outcome: Outcome, count: int, factor: float) -> Array:
        return outcome.data.copy()

    def counts(self, rows: tuple[int, ...]) -> Array:
        return np.array(rows)


class OnDevice(Operand[Array]):
    """An array on a software device, made on its main stream, which may be late; so is the result
    that programs get: it is right once the stream has come to it."""

    device = "gpu"

    def __init__(self, device: SoftwareDevice, values: Array, dtype: str, main: int) -> None:
        self.dtype, self.shape = dtype, values.shape
        self._device, self._main = device, main
        self._private = np.zeros(values.nbytes, np.uint8)
        raw = values.reshape(-1).view(np.uint8).copy()
        device.write(main, [self._private], lambda: np.copyto(self._private, raw))

    def data(self) -> Buffer:
        """As frameworks do that wait for the device."""
        self._device.drain()
        return self._private.view(word_dtype(self.dtype))

    def place(self) -> Device:
        return self._device

    def enqueue(self, device: Device, factor: float) -> Placed:
        assert device is self._device
        self._multiply(self._private, factor)
        private = self._private
        memory = device.borrow(device.address(private), private.nbytes, private)
        return Placed(device, memory, device.record(device.current_stream()), private)

    def _multiply(self, data: Array, factor: float) -> None:
        def act(copy: Array) -> None:
            copy.view(self.dtype)[:] *= factor

        if factor != 1.0:
            self._device.update(self._main, data, act)

    def whole(self, outcome: Outcome, factor: float) -> Array:
        if outcome.arrival is None:
            return outcome.data.copy()
        outcome.arrival.await_here()
        self._multiply(self._private, factor)
        return self._seen(self._private)

    def rows(self, outcome: Outcome, count: int, factor: float) -> Array:
        if outcome.arrival is None:
            return outcome.data.copy()
        found, private = np.zeros(outcome.arrival.data.nbytes, np.uint8), self._private
        outcome.arrival.copy_to(found)
        self._device.enqueue(self._main, lambda: private.nbytes)  # kept until it is copied
        self._multiply(found, factor)
        return self._seen(found)

    def counts(self, rows: tuple[int, ...]) -> Array:
        return np.array(rows)

    def _seen(self, data: Array) -> Array:
        """The data as the main stream finds them."""
        seen = np.zeros(data.nbytes, np.uint8)
        self._device.copy(seen, data, self._main)
        return seen


class Rank:
    """One rank's named operations, and its device."""

    def __init__(self, runtime: Runtime, devices: Devices, rate: int = 0) -> None:
        self.rank, self.size = runtime.rank, runtime.size
        self.runtime = runtime
        self.device: SoftwareDevice = devices.of[runtime.rank]
        self.main = self.device.new_stream()
        self.operations = runtime.collectives = _here.operations = Collectives(runtime)

    @contextmanager
    def program(self) -> Any:
        """Within it this thread enqueues on the main stream."""
        with self.device.on(self.main):
            yield

    def operand(self, values: Any, dtype: str = "float32", kind: str = "device") -> Any:
        values = np.atleast_1d(np.asarray(values))
        if values.dtype != dtype:
            values = values.astype(np.float32).astype(
                ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
            )
        return (
            OnDevice(self.device, values, dtype, self.main)
            if kind == "device"
            else OnHost(values, dtype)
        )

    def sum(self, name: str | None, value: float) -> int:
        """Submit a sum of three equal elements."""
        with self.program():
            operand = self.operand([value] * 3)
            return submit(call(Kind.ALLREDUCE, operand, Op.SUM, name=name))

    def wait(self, handle: int) -> Any:
        with self.program():
            return self.operations.synchronize(handle)

    def number(self, found: Array) -> float:
        """What a sum came out as, once the device is done."""
        self.device.drain()
        values = set(found.view(np.float32).tolist())
        assert len(values) == 1, values
        return float(values.pop())

    @property
    def num_calls(self) -> int:
        """Of NCCL, so far."""
        return len(self.device.library.calls)


def launched(device: SoftwareDevice) -> list[int]:
    """The lanes of all collectives, in the order in which the host launched them."""
    streams = [call.stream for call in device.library.calls]
    return [sorted(set(streams)).index(stream) for stream in streams]


def cases() -> list[tuple[Kind, str, Any]]:
    found: list[tuple[Kind, str, Any]] = []
    for dtype in DTYPES:
        for kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER):
            found += [
                (kind, dtype, op)
                for op in ELEMENTWISE_OPS
                if not (dtype == "bool" and op is Op.AVERAGE)
            ]
        found += [(Kind.BROADCAST, dtype, None), (Kind.ALLGATHER, dtype, None)]
    return found


def call(
    kind: Kind, operand: Any, op: Any, before: float = 1.0, after: float = 1.0, name: Any = None
) -> Operation[Array]:
    scaling = {"op": op, "prescale_factor": before, "postscale_factor": after}
    reduces = kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER)
    root = 1 if kind is Kind.BROADCAST else None
    return make_operation(
        kind, operand, name, WORLD, root_rank=root, **(scaling if reduces else {})
    )


def submit(operation: Operation[Array]) -> int:
    return _here.operations.submit([operation], is_group=False)


@pytest.mark.parametrize("size", [2, 3])
def test_results_equal_those_of_the_host(size: int) -> None:
    """Every operation, element type and reduction; equal and unequal parts, also empty ones. What
    NCCL does not define goes through the host, by the same call."""
    devices = Devices(size, nccl=True)

    def body(runtime: Runtime) -> int:
        me = Rank(runtime, devices)
        pairs = []
        num_by_device = 0
        for number, (kind, dtype, op) in enumerate(cases()):
            count = (6, 5, 0)[number % 3]
            if kind is Kind.ALLGATHER:
                count = (me.rank + number) % 3
            values = 1 + (np.arange(2 * count).reshape(count, 2) + me.rank) % 3
            before = me.num_calls
            with me.program():
                seen = me.operations.synchronize(submit(call(kind, me.operand(values, dtype), op)))
            sent = count if kind is not Kind.ALLGATHER else size
            goes = carries(kind.value, dtype, op, is_scaled=False)
            assert (me.num_calls > before) == (goes and bool(sent)), (kind, dtype, op)
            num_by_device += goes
            host = me.operand(values, dtype, "host")
            host.device = "gpu"
            wanted = me.operations.synchronize(submit(call(kind, host, op)))
            pairs.append(((kind, dtype, op), seen, wanted))
        me.device.drain()
        for what, seen, wanted in pairs:
            assert seen.tobytes() == wanted.tobytes(), (what, seen, wanted)
        return num_by_device

    found = all_well(run_ranks(size, body, STEADY))
    assert found == [found[0]] * size
    assert found[0] > 60


def test_factors() -> None:
    """Floating point is multiplied on the device, integers on the host, which truncates."""
    devices = Devices(2, nccl=True)

    def body(runtime: Runtime) -> None:
        me = Rank(runtime, devices)
        pairs = []
        for dtype in ("float16", "float32", "float64", "int32"):
            for kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER):
                values = np.arange(1, 9) * (3 + me.rank)
                before = me.num_calls
                with me.program():
                    handle = submit(call(kind, me.operand(values, dtype), Op.SUM, 0.5, 0.75))
                    seen = me.operations.synchronize(handle)
                assert (me.num_calls > before) == (dtype != "int32")
                host = me.operand(values, dtype, "host")
                host.device = "gpu"
                handle = submit(call(kind, host, Op.SUM, 0.5, 0.75))
                pairs.append((dtype, seen, me.operations.synchronize(handle)))
        me.device.drain()
        for dtype, seen, wanted in pairs:
            assert seen.tobytes() == wanted.tobytes(), (dtype, seen, wanted)

    all_well(run_ranks(2, body, STEADY))


def test_small_reductions_travel_as_one() -> None:
    devices = Devices(2, nccl=True)

    def body(runtime: Runtime) -> None:
        me = Rank(runtime, devices)
        me.wait(me.sum("first", 1.0))
        before = me.num_calls
        with me.program():
            handle = me.operations.submit(
                [
                    call(Kind.ALLREDUCE, me.operand([k + me.rank] * (k + 1)), op, name=f"g{k}")
                    for k, op in enumerate([Op.SUM] * 5 + [Op.PRODUCT])
                ]
            )
            found = me.operations.synchronize(handle)
        me.device.drain()
        wanted = [2.0 * k + 1 for k in range(5)] + [30.0]
        assert [set(each.view(np.float32)) for each in found] == [{w} for w in wanted]
        assert [len(each) for each in found] == [4 * (k + 1) for k in range(6)]
        counts = [c.arguments["count"] for c in me.device.library.calls[before:]]
        assert counts == [15, 6]

    all_well(run_ranks(2, body, STEADY))


def test_the_host_waits_for_nothing() -> None:
    """An operation is submitted and waited for before its tensor exists; nothing says before the
    device is done that it were complete."""
    devices = Devices(2, nccl=True, most_s=0.0)

    def body(runtime: Runtime) -> None:
        me = Rank(runtime, devices)
        me.wait(me.sum("first", 1.0))
        gate, before = threading.Event(), me.num_calls
        me.device.enqueue(me.main, lambda: gate.wait(60.0))
        with me.program():
            handles = [
                submit(call(kind, me.operand([me.rank + 1.0] * 4), Op.SUM))
                for kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER, Kind.BROADCAST, Kind.ALLGATHER)
            ]
            while me.num_calls < before + 4:
                assert not any(me.operations.poll(handle) for handle in handles)
            assert not any(me.operations.poll(handle) for handle in handles)
            found = [me.operations.synchronize(handle) for handle in handles[1:]]
        gate.set()
        while not me.operations.poll(handles[0]):
            pass
        found.append(me.wait(handles[0]))
        me.device.drain()
        values = [each.view(np.float32).tolist() for each in found]
        assert values == [[3.0] * 2, [2.0] * 4, [1.0] * 4 + [2.0] * 4, [3.0] * 4]

    all_well(run_ranks(2, body, STEADY))


@pytest.mark.parametrize("size", [2, 3])
def test_operations_among_the_steps_of_two_optimizers(size: int) -> None:
    """In another order on every rank, among gradients in another order on every rank; and one that
    is waited for in mid-step, before gradients on one rank that come before it on another."""
    devices = Devices(size, nccl=True)

    def body(runtime: Runtime) -> list[int]:
        me = Rank(runtime, devices)
        chance = random.Random(7 * me.rank)
        trainers = [
            DeviceTrainer(runtime, me.device, make_specs([10, 20, 30]), schedule="layerwise"),
            DeviceTrainer(runtime, me.device, make_specs([40, 50]), schedule="single"),
        ]
        wanted, found = [], []
        for step in range(6):
            first = me.wait(me.sum("first", step))  # at the same place of the program everywhere
            found.append(first)
            wanted.append(step * size)
            for trainer in trainers:
                trainer.zero()
            events: list[Any] = [(t, k) for t in (0, 1) for k in range(3 - t)]
            events += [f"op {k}" for k in range(5)]
            chance.shuffle(events)
            handles = {}
            for place, event in enumerate(events):
                if place == 5:
                    found.append(me.wait(me.sum("in the middle", step + me.rank)))
                    wanted.append(sum(step + r for r in range(size)))
                if isinstance(event, str):
                    handles[event] = me.sum(event, float(event[3:]) + me.rank)
                    continue
                trainers[event[0]].accumulate(event[1], 1.0 + me.rank)
                if chance.random() < 0.5:
                    time.sleep(2e-3)  # so that what may go has gone
            mean = 1 + (size - 1) / 2
            for number, trainer in enumerate(trainers):
                trainer.synchronize([mean] * (3 - number), f"step {step}")
            for name in chance.sample(sorted(handles), len(handles)):
                found.append(me.wait(handles[name]))
                wanted.append(sum(float(name[3:]) + r for r in range(size)))
        for trainer in trainers:
            trainer.finish()
        assert [me.number(each) for each in found] == wanted
        return launched(me.device)

    orders = all_well(run_ranks(size, body, STEADY))
    assert orders == [orders[0]] * size
    assert set(orders[0]) == {0, 1, 2}


@pytest.mark.parametrize("ahead", [0, 1])
def test_no_operation_waits_for_gradients_that_wait_for_it(ahead: int) -> None:
    """One rank has gradients before the operation that come behind it on the other, whose program
    waits for it meanwhile. Where the order of launches has them first, it goes through the host."""
    devices = Devices(2, nccl=True, most_s=0.0)

    def body(runtime: Runtime) -> tuple[int, list[int]]:
        me = Rank(runtime, devices)
        trainer = DeviceTrainer(runtime, me.device, make_specs([10, 20, 30]), schedule="layerwise")
        me.wait(me.sum("connects", 0.0))
        trainer.zero()
        before = me.num_calls

        def waits() -> None:
            assert me.number(me.wait(me.sum("x", 1.0))) == 2.0

        if me.rank == ahead:
            trainer.accumulate(2, 1.0)
            lane = trainer.engine._lane
            while not lane.counts[0]:
                time.sleep(1e-4)
            waits()
        else:
            waits()
            trainer.accumulate(2, 1.0)
        for k in (1, 0):
            trainer.accumulate(k, 1.0)
        trainer.synchronize([1.0] * 3, "the step")
        trainer.finish()
        return me.num_calls - before, launched(me.device)

    (calls_here, first), (_, second) = all_well(run_ranks(2, body, STEADY))
    assert first == second
    assert calls_here == (3 if ahead == 0 else 4), "rank 0's groups come first in the order"


def test_ranks_in_the_midst_of_a_step_connect_later() -> None:
    """One lane is in no order, and one rank has launched what another has not."""
    devices = Devices(2, nccl=True, most_s=0.0)

    def body(runtime: Runtime) -> None:
        me = Rank(runtime, devices)
        trainer = DeviceTrainer(runtime, me.device, make_specs([10, 20]), schedule="layerwise")
        trainer.zero()
        if me.rank == 1:
            trainer.accumulate(1, 1.0)
            while not me.num_calls:
                time.sleep(1e-4)
        found = [me.wait(me.sum("early", 1.0))]
        assert me.num_calls == me.rank
        if me.rank == 0:
            trainer.accumulate(1, 1.0)
        trainer.accumulate(0, 1.0)
        trainer.synchronize([1.0, 1.0], "the step")
        found.append(me.wait(me.sum("late", 2.0)))
        assert me.num_calls == 3
        trainer.finish()
        assert [me.number(each) for each in found] == [2.0, 4.0]

    all_well(run_ranks(2, body, STEADY))


def test_where_nccl_fails_all_go_through_the_host(caplog: pytest.LogCaptureFixture) -> None:
    """As many operations at once as there are, and those behind them; the log says it once."""
    devices = Devices(3, nccl=True)

    def fails(*_: Any) -> None:
        raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR")

    devices.of[1].library.NcclCommunicator = fails

    def body(runtime: Runtime) -> None:
        me = Rank(runtime, devices)
        limit_waits(runtime, timeout_s=60.0)  # NCCL alone gives ranks up soon
        for _ in range(2):
            names = [f"n{k}" for k in range(10)]
            random.Random(me.rank).shuffle(names)
            handles = {name: me.sum(name, float(name[1:])) for name in names}
            random.Random(5 + me.rank).shuffle(names)
            for name in names:
                assert me.number(me.wait(handles[name])) == 3 * float(name[1:])
        assert not me.device.library.calls

    all_well(run_ranks(3, body, replace(STEADY, timeout_s=3.0)))
    told = [
        record.message for record in caplog.records if "allreduce() and the like" in record.message
    ]
    assert len(told) == 1
    assert "rank 1 of 3: NCCL could not connect the ranks: NCCL_ERROR_SYSTEM" in told[0]


def test_without_nccl_or_by_the_setting_all_go_through_the_host() -> None:
    devices = Devices(2, nccl=False)

    def body(runtime: Runtime) -> None:
        me = Rank(runtime, devices)
        assert me.number(me.wait(me.sum("x", 1.0))) == 2.0

    all_well(run_ranks(2, body, STEADY))
    devices = Devices(2, nccl=True)
    all_well(run_ranks(2, body, replace(STEADY, device_operations=False)))
    assert not any(device.library.calls for device in devices.of)


def test_where_a_rank_lacks_cupy_the_log_says_so_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where tensors lie on a GPU; with the remedy."""
    monkeypatch.undo()
    monkeypatch.setattr(api, "current", lambda _: _here.operations)
    monkeypatch.setattr(device_operations, "find_spec", lambda name: None)
    devices = Devices(2, nccl=True)

    def body(runtime: Runtime) -> None:
        me = Rank(runtime, devices)
        me.operations.run([call(Kind.ALLREDUCE, me.operand(1, kind="host"), Op.SUM)])
        runtime.exchange(b"", "behind it")
        assert not caplog.records
        runtime.exchange(b"", "looking")
        for name in "yz":
            assert me.number(me.wait(me.sum(name, 1.0))) == 2.0

    all_well(run_ranks(2, body, STEADY))
    assert [record.message for record in caplog.records] == [
        "allreduce() and the like on a GPU travel through the host's memory: rank 0: CuPy is not "
        "installed; pip install 'wfbp[cuda12]' (or cuda13, as PyTorch is built for)"
    ]


def test_who_has_joined_contributes_zeros() -> None:
    devices = Devices(2, nccl=True)

    def body(runtime: Runtime) -> int:
        me = Rank(runtime, devices)
        assert me.number(me.wait(me.sum("both", 1.0))) == 2.0
        before = me.num_calls
        if me.rank == 0:
            for k in range(3):
                assert me.number(me.wait(me.sum(f"alone {k}", 5.0))) == 5.0
        assert me.num_calls == before
        me.operations.end_join(me.operations.begin_join())
        assert me.number(me.wait(me.sum("both again", 1.0))) == 2.0
        return me.num_calls - before

    assert all_well(run_ranks(2, body, STEADY)) == [1, 1]


def test_with_process_sets_all_go_through_the_host() -> None:
    """Lanes of several sets have no common order; what was under way is over before there are."""
    devices = Devices(2, nccl=True, most_s=2e-3)

    def body(runtime: Runtime) -> None:
        me = Rank(runtime, devices)
        me.wait(me.sum("connects", 1.0))
        before = me.num_calls
        handles = [me.sum(f"under way {k}", float(k)) for k in range(4)]
        me.operations.add_set([0])
        seen = me.num_calls
        assert seen > before
        assert all(me.operations.poll(handle) for handle in handles)
        assert [me.number(me.wait(handle)) for handle in handles] == [0.0, 2.0, 4.0, 6.0]
        assert me.number(me.wait(me.sum("behind", 1.0))) == 2.0
        me.operations.add_set([1])
        assert me.num_calls == seen

    all_well(run_ranks(2, body, STEADY))


def test_a_device_on_some_ranks_only_is_an_error_on_all() -> None:
    devices = Devices(2, nccl=True)

    def body(runtime: Runtime) -> None:
        me = Rank(runtime, devices)
        kind = "device" if me.rank else "host"
        with me.program():
            operand = me.operand([1.0], "float32", kind)
            handle = submit(call(Kind.ALLREDUCE, operand, Op.SUM, name="x"))
        with pytest.raises(DisagreementError, match="the device: rank 0: cpu; rank 1: gpu"):
            me.wait(handle)
        assert me.number(me.wait(me.sum("y", 1.0))) == 2.0

    all_well(run_ranks(2, body, STEADY))


def test_operations_are_not_captured() -> None:
    devices = Devices(2, nccl=True)

    def body(runtime: Runtime) -> None:
        me = Rank(runtime, devices)
        me.device.capturing.add(me.main)
        with pytest.raises(RuntimeError, match=r"allreduce\(\) was about to be captured"):
            me.sum("x", 1.0)
        me.device.capturing.clear()
        assert me.number(me.wait(me.sum("x", 1.0))) == 2.0

    all_well(run_ranks(2, body, STEADY))


def under_way(me: Rank, gate: threading.Event) -> None:
    """An operation that is enqueued, and does not end."""
    me.wait(me.sum("connects", 1.0))
    me.device.enqueue(me.main, lambda: gate.wait(60.0))
    me.wait(me.sum("x", 1.0))


def until_it_ends(runtime: Runtime) -> None:
    while True:
        runtime.check()
        time.sleep(1e-3)


def until_aborted(me: Rank) -> None:
    """The error is known a little before."""
    deadline = time.monotonic() + 60
    while not me.device.library.communicators[0].aborted:
        assert time.monotonic() < deadline
        time.sleep(1e-3)


def test_errors_of_nccl_end_the_runtime() -> None:
    devices = Devices(2, nccl=True)
    gates = [threading.Event() for _ in range(2)]

    def body(runtime: Runtime) -> None:
        me = Rank(runtime, devices)
        under_way(me, gates[me.rank])
        me.device.library.error = RuntimeError("NCCL_ERROR_REMOTE_ERROR")
        try:
            with pytest.raises(BackendError, match="NCCL failed: NCCL_ERROR_REMOTE_ERROR"):
                until_it_ends(runtime)
            until_aborted(me)
        finally:
            gates[me.rank].set()

    all_well(run_ranks(2, body, STEADY))


def test_a_device_that_hangs_is_noticed() -> None:
    devices = Devices(2, nccl=True)
    gates = [threading.Event() for _ in range(2)]

    def body(runtime: Runtime) -> str:
        me = Rank(runtime, devices)
        try:
            under_way(me, gates[me.rank])
            limit_waits(runtime, stall_warning_s=0.3, timeout_s=0.8)
            with pytest.raises(WfbpError) as found:
                until_it_ends(runtime)
            until_aborted(me)
            return f"{type(found.value).__name__}: {found.value}"
        finally:
            gates[me.rank].set()

    told = all_well(run_ranks(2, body, STEADY))
    assert any(
        each.startswith(StallError.__name__) and "in allreduce 'x' on the device" in each
        for each in told
    ), told


@pytest.mark.parametrize("act", [Kind.BARRIER, Kind.ALLTOALL])
def test_what_nccl_is_not_asked_for(act: Kind) -> None:
    assert not carries(act.value, "float32", None, is_scaled=False)
