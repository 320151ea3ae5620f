"""JAX's programs on a device: averages in time, in place, and nobody waits who need not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")


from tests.support.ranks import all_well, run_ranks
from tests.support.software_xla import INDEX, SoftwareXla
from tests.unit.runtime.test_device_reductions import STEADY, Devices
from wfbp.comm import cost_probe
from wfbp.comm.device.links import OnDevice
from wfbp.comm.memory import Memory
from wfbp.core.plan import Plan
from wfbp.core.types import TensorSpec
from wfbp.jax.gradient_exchange import ExchangeDescription, ExchangeRegistry, GradientExchange
from wfbp.jax.xla_device import GpuPrograms
from wfbp.runtime import process
from wfbp.runtime.arguments import ReducerOptions
from wfbp.runtime.buffers import GroupBuffer
from wfbp.runtime.lane import Lane
from wfbp.runtime.reducer import Reducer
from wfbp.runtime.runtime import Runtime

SPECS = tuple(TensorSpec(f"leaf{k}", (10 * k + 1,), "float32") for k in range(4))
REQUEST = ExchangeDescription(SPECS, ReducerOptions("layerwise", 100, name="test"))


class Notes:
    """Stands for the handlers: what announces, and the stock of events, in Python."""

    def __init__(self, device: SoftwareXla) -> None:
        self._device = device
        self._stock: list[int] = []
        self._notes: list[Any] = []
        self._open = threading.Event()

    def stock(self, record: int, handles: list[int]) -> None:
        assert record == self._device.recorder
        self._stock += handles

    def announce(self, index: int, address: int, stream: int) -> None:
        """A handler is called."""
        handle = self._stock.pop() if self._stock else 0
        if handle and self._device._note(handle, stream):
            handle = 0
        self._notes.append((REQUEST.key, index, address, (INDEX, stream, handle), 0.0))

    def take(self) -> list[Any]:
        notes, self._notes = self._notes, []
        return notes

    def serve(self, callback: Any) -> None:
        self.wait = callback

    def listen(self) -> bool:
        self._open.wait(60.0)
        return False

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is not for devices")


class Program:
    """What XLA does with one step, again and again: enqueues, and is never told of the device."""

    def __init__(self, runtime: Runtime, device: SoftwareXla, monkeypatch: Any) -> None:
        self.runtime = runtime
        self.device = device
        self.notes = Notes(device)
        self.exchanges = ExchangeRegistry(self.notes, GpuPrograms(self.notes, device))
        self.stream = device.new_stream()
        self.exchanges._runtime = runtime
        self.exchange = GradientExchange(
            REQUEST, runtime.where, self.exchanges._lock, self._make, device.move, lambda _: None
        )
        self.exchanges._exchanges[REQUEST.key] = self.exchange
        self.exchanges.add(REQUEST)
        self.memory = [np.zeros(spec.nbytes, np.uint8) for spec in SPECS]
        self.seen: list[tuple[np.ndarray[Any, Any], float]] = []

    def _make(self) -> Reducer:
        return Reducer(
            self.runtime,
            SPECS,
            ReducerOptions(self.exchange_schedule, 100, name="test"),
            location=OnDevice(self.device),
            fetch=self.exchange.source,
        )

    exchange_schedule = "layerwise"

    def gradient(self, index: int, value: float, into: np.ndarray[Any, Any] | None = None) -> None:
        """Computed on the stream, then announced; all of it is only enqueued."""
        data = self.memory[index] if into is None else into
        self.device.write(self.stream, [data], lambda: data.view(np.float32).fill(value))
        self.notes.announce(index, address(data), self.stream)

    def wait(self) -> None:
        places = [address(data) for data in self.memory]
        self.notes.wait(REQUEST.key, places, places, (INDEX, self.stream, 0))

    def read(self, wanted: list[float]) -> None:
        """What follows in the program reads the averages, and then uses the memory again."""
        for data, want in zip(self.memory, wanted, strict=True):
            seen = np.zeros(data.nbytes, np.uint8)
            self.device.copy(seen, data, self.stream)
            self.seen.append((seen.view(np.float32), want))
            self.device.write(self.stream, [data], lambda data=data: data.fill(0x11))

    def finish(self) -> None:
        self.device.drain()
        for number, (seen, want) in enumerate(self.seen):
            assert (seen == want).all(), f"number {number}: {seen} instead of {want}"


def address(data: np.ndarray[Any, Any]) -> int:
    return int(data.__array_interface__["data"][0])


def devices(size: int, nccl: bool, most_s: float) -> Devices:
    return Devices(size, nccl, most_s=most_s, kind=SoftwareXla)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Program]:
    """Makes the program of a rank."""
    monkeypatch.setattr(cost_probe, "LONGEST_STREAM", 2)
    here = threading.local()
    monkeypatch.setattr(process, "current", lambda what: here.runtime)

    def make(runtime: Runtime, device: SoftwareXla) -> Program:
        here.runtime = runtime
        return Program(runtime, device, monkeypatch)

    return make


def test_the_host_does_not_wait_for_the_device(programs: Callable[..., Program]) -> None:
    """Steps are enqueued while XLA's stream has not even begun with the first one."""
    found = devices(2, nccl=True, most_s=0.0)
    gates = [threading.Event() for _ in range(2)]

    def body(runtime: Runtime) -> int:
        device = found.of[runtime.rank]
        program = programs(runtime, device)
        device.enqueue(program.stream, lambda: gates[runtime.rank].wait(60.0))
        for number in range(5):
            for index in (3, 2, 1, 0):
                program.gradient(index, float(number + 2 * runtime.rank))
            program.wait()
            program.read([number + 1.0] * 4)
        ahead = len(device.library.calls)
        gates[runtime.rank].set()
        program.finish()
        return ahead

    assert all_well(run_ranks(2, body, STEADY)) == [20, 20]


def step(program: Program, average: float, meanwhile: Callable[[], object] | None = None) -> None:
    """All gradients; ``meanwhile`` happens on the device behind the first one."""
    for index in (3, 2, 1, 0):
        if meanwhile is not None and index == 2:
            program.device.enqueue(program.stream, meanwhile)  # type: ignore[arg-type]
        program.gradient(index, average - 1.0 + 2 * program.runtime.rank)
    program.wait()
    program.read([average] * 4)


def test_gradients_leave_at_the_place_of_their_announcement(
    programs: Callable[..., Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the host has closed the step before the device computes what comes later in it."""
    found = devices(2, nccl=True, most_s=0.0)
    gates = [threading.Event() for _ in range(2)]
    made: dict[int, tuple[Memory, GroupBuffer]] = {}
    install = Lane.install

    def noting(self: Lane, plan: Plan, members: list[int], costs: Any) -> list[GroupBuffer]:
        buffers = install(self, plan, members, costs)
        made[self.backend.rank] = self._memory, buffers[0]
        return buffers

    monkeypatch.setattr(Lane, "install", noting)

    def body(runtime: Runtime) -> None:
        device = found.of[runtime.rank]
        program = programs(runtime, device)
        step(program, 1.0)
        device.drain()
        memory, buffer = made[runtime.rank]
        closed = threading.Event()
        close = memory.close

        def close_and_tell() -> Any:
            stamp = close()
            closed.set()
            return stamp

        memory.close = close_and_tell  # type: ignore[method-assign]
        runtime.thread.post(lambda: (closed.wait(60.0), None)[1])  # the lane comes late
        step(program, 5.0, lambda: gates[runtime.rank].wait(60.0))
        reduced = buffer.result(0).view(np.float32)
        nap = threading.Event()
        for _ in range(5000):
            if (reduced == 5.0).all():
                break
            nap.wait(5e-3)
        assert (reduced == 5.0).all(), "waits for the end of backward"
        gates[runtime.rank].set()
        program.finish()

    all_well(run_ranks(2, body, STEADY))


def test_a_gradient_that_moved_and_one_without_event(programs: Callable[..., Program]) -> None:
    """XLA copies one behind its announcement; and recording events begins to fail."""
    found = devices(2, nccl=True, most_s=3e-4)

    def body(runtime: Runtime) -> None:
        device = found.of[runtime.rank]
        program = programs(runtime, device)
        elsewhere = np.zeros_like(program.memory[2])
        for number in range(12):
            device.fails = number > 5
            moved = number % 3 == 0
            for index in (3, 2, 1, 0):
                value = float(number + 2 * runtime.rank)
                program.gradient(index, value, elsewhere if moved and index == 2 else None)
            if moved:
                device.copy(program.memory[2], elsewhere, program.stream)
                device.write(program.stream, [elsewhere], lambda: elsewhere.fill(0x22))
            program.wait()
            program.read([number + 1.0] * 4)
        program.finish()

    all_well(run_ranks(2, body, STEADY))
