"""Reductions on a device: the right values in every schedule, whatever runs late, and who waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.device_trainer import DeviceTrainer
from tests.support.devices import Devices
from tests.support.random_programs import reduce_at_random, update_at_random
from tests.support.ranks import QUICK, all_well, run_ranks
from tests.support.software_device import SoftwareDevice
from tests.support.trainer import address, make_specs
from wfbp.comm import cost_probe
from wfbp.comm.device.device_memory import DeviceMemory
from wfbp.config import Config
from wfbp.core.planners import DECOUPLED_SCHEDULES as DECOUPLED
from wfbp.core.types import Op
from wfbp.errors import WfbpError
from wfbp.runtime.runtime import Runtime
from wfbp.runtime.tuning.tuner import TuningPhase

STEADY = Config(schedule="layerwise", warmup_steps=10**6, timeout_s=60.0)
ALL_REDUCE = ("auto", "oasr", "mgwfbp", "layerwise", "single", "threshold")


@pytest.fixture(autouse=True)
def _short_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring what thousands of messages cost would take most of the time here."""
    monkeypatch.setattr(cost_probe, "LONGEST_STREAM", 2)


@settings(max_examples=4, suppress_health_check=list(HealthCheck))
@given(
    size=st.integers(2, 3),
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    schedule=st.sampled_from(ALL_REDUCE),
    nccl=st.booleans(),
    streams=st.integers(1, 2),
    to_none=st.booleans(),
    wire=st.sampled_from(["", "bfloat16"]),
    seed=st.integers(0, 2**32),
)
def test_random_programs(
    size: int,
    sizes: list[int],
    schedule: str,
    nccl: bool,
    streams: int,
    to_none: bool,
    wire: str,
    seed: int,
) -> None:
    """Compressed, by values whose averages are exact."""
    devices = Devices(size, nccl, seed)

    def body(runtime: Runtime) -> None:
        rank = runtime.rank
        trainer = DeviceTrainer(
            runtime,
            devices.of[rank],
            make_specs(sizes),
            schedule=schedule,
            wire=wire,
            streams=streams,
            seed=seed + rank,
        )
        # 2 and 3 ranks divide 6, and bfloat16 holds what comes of it.
        exact: dict[str, Any] = {"unit": 6.0, "most": 1, "accumulates": False} if wire else {}
        reduce_at_random(trainer, seed, 10, to_none, **exact)

    all_well(run_ranks(size, body))


@settings(max_examples=4, suppress_health_check=list(HealthCheck))
@given(
    size=st.integers(2, 3),
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    schedule=st.sampled_from(["auto", *DECOUPLED]),
    nccl=st.booleans(),
    op=st.sampled_from([Op.AVERAGE, Op.SUM]),
    wire=st.sampled_from(["", "bfloat16"]),
    seed=st.integers(0, 2**32),
)
def test_random_decoupled_programs(
    size: int, sizes: list[int], schedule: str, nccl: bool, op: Op, wire: str, seed: int
) -> None:
    """Compressed, by values whose averages are exact."""
    devices = Devices(size, nccl, seed)

    def body(runtime: Runtime) -> None:
        rank = runtime.rank
        trainer = DeviceTrainer(
            runtime,
            devices.of[rank],
            make_specs(sizes),
            schedule=schedule,
            op=op,
            wire=wire,
            decouples=True,
            seed=seed + rank,
        )
        update_at_random(trainer, seed, 10, op, unit=6.0 if wire else 1.0)

    all_well(run_ranks(size, body, QUICK))


def test_the_host_waits_for_nothing_in_a_step() -> None:
    """Steps are enqueued while the device has not even begun with the first one."""
    devices = Devices(2, nccl=True, most_s=0.0)
    gates = [threading.Event() for _ in range(2)]

    def body(runtime: Runtime) -> int:
        device = devices.of[runtime.rank]
        trainer = DeviceTrainer(runtime, device, make_specs([10, 20, 30]), schedule="layerwise")
        device.enqueue(trainer.main, lambda: gates[runtime.rank].wait(60.0))
        for number in range(5):
            trainer.zero()
            for k in (2, 1, 0):
                trainer.accumulate(k, float(number + runtime.rank))
            trainer.synchronize([number + 0.5] * 3, f"step {number}")
        ahead = len(device.library.calls)
        gates[runtime.rank].set()
        trainer.finish()
        return ahead

    assert all_well(run_ranks(2, body, STEADY)) == [15, 15]


def test_a_group_is_packed_while_another_travels() -> None:
    """The network holds up no packing, and what is packed is not sent before its turn."""
    devices = Devices(2, nccl=True, most_s=0.0)

    def body(runtime: Runtime) -> None:
        device = devices.of[runtime.rank]
        trainer = DeviceTrainer(runtime, device, make_specs([10, 20, 30]), schedule="layerwise")
        memory = trainer.engine.memory
        assert isinstance(memory, DeviceMemory)
        for number in range(3):
            network = threading.Event()
            trainer.zero()
            for k in (2, 1, 0):
                trainer.accumulate(k, float(number))
                if k == 2:  # behind what this step waits for
                    while not device.library.calls or len(device.library.calls) % 3 != 1:
                        time.sleep(1e-4)
                    device.enqueue(
                        memory.backend.stream,  # type: ignore[attr-defined]
                        lambda network=network: network.wait(60.0),
                    )
            trainer.synchronize([float(number)] * 3, f"step {number}")
            device.record(memory._packing).await_it()
            assert not network.is_set()
            network.set()
        trainer.finish()

    all_well(run_ranks(2, body, STEADY))


@pytest.mark.parametrize("who", [(0, 1), (0,)], ids=["both", "one"])
def test_a_discarded_step_is_sent_before_its_buffers_are_packed_again(who: tuple[int, ...]) -> None:
    """Nobody consumes it, so nothing else tells when the network is done with them. A rank that has
    not discarded its own sends the same step once more."""
    devices = Devices(2, nccl=True, most_s=0.0)
    networks = [threading.Event() for _ in range(2)]

    def body(runtime: Runtime) -> None:
        device = devices.of[runtime.rank]
        specs = make_specs([10, 20, 30])
        trainer = DeviceTrainer(runtime, device, specs, schedule="layerwise", op=Op.SUM)
        backend: Any = trainer.engine.memory.backend
        device.enqueue(backend.stream, lambda: networks[runtime.rank].wait(60.0))
        for value in (100.0, 1.0) if runtime.rank in who else (1.0,):
            trainer.zero()
            for k in (2, 1, 0):
                trainer.accumulate(k, value)
            while len(device.library.calls) < 2:  # else it could be taken back
                time.sleep(1e-4)
        trainer.synchronize([2.0] * 3, "the step after the discarded one")
        time.sleep(0.05)  # what does not wait for the network is done by now
        networks[runtime.rank].set()
        trainer.finish()

    all_well(run_ranks(2, body, STEADY))


def test_what_is_made_when_a_step_closes_is_waited_for() -> None:
    """A gradient that nobody announced may be brought into order by a copy, which comes late."""
    devices = Devices(2, nccl=True, most_s=0.0)

    def body(runtime: Runtime) -> None:
        device = devices.of[runtime.rank]
        trainer = DeviceTrainer(runtime, device, make_specs([10, 20]), schedule="layerwise")
        copies = []

        def fetch(index: int) -> Any:
            copy = np.zeros(trainer.specs[index].nbytes, np.uint8)
            copies.append(copy)
            device.enqueue(trainer.main, lambda: time.sleep(5e-3))
            device.write(trainer.main, [copy], lambda: copy.view(np.float64).fill(3.0))
            return address(copy), copy

        trainer.engine._fetch = fetch
        trainer.zero()
        trainer.accumulate(1, 1.0)
        trainer.synchronize([3.0, 1.0], "a step with a copy")
        trainer.finish()
        assert len(copies) == 1

    all_well(run_ranks(2, body, STEADY))


def test_what_another_stream_updates_is_found_by_the_one_of_the_step() -> None:
    """A parameter is updated by the thread that reads it first, on that thread's stream."""
    devices = Devices(2, nccl=True, most_s=0.0)

    def body(runtime: Runtime) -> None:
        device = devices.of[runtime.rank]
        options: dict[str, Any] = {"schedule": "independent", "decouples": True}
        trainer = DeviceTrainer(runtime, device, make_specs([10]), **options)
        trainer.zero()
        trainer.accumulate(0, 1.0)
        trainer.update(trainer.synchronize([1.0], "a step", whole=False))
        reader, data = device.new_stream(), trainer.params[0]
        with device.on(reader):
            trainer.engine.gathers.await_tensor(0)
            device.enqueue(reader, lambda: time.sleep(5e-3))
            device.write(reader, [data], lambda: data.view(np.float64).fill(7.0))
            trainer.engine.memory.publish()
        trainer.note(data, 7.0, "the parameter", 0)
        trainer.finish()

    all_well(run_ranks(2, body, STEADY))


def launched(device: SoftwareDevice) -> list[int]:
    """The lanes of all collectives, in the order in which the host launched them."""
    streams = [call.stream for call in device.library.calls]
    return [sorted(set(streams)).index(stream) for stream in streams]


@pytest.mark.parametrize("schedule", ["layerwise", "independent"])
def test_ranks_launch_the_collectives_of_two_lanes_in_one_order(schedule: str) -> None:
    """Though gradients of one optimizer come first on one rank, and those of the other on another;
    and though ranks are in the midst of a step when the second optimizer is made."""
    devices = Devices(2, nccl=True, most_s=0.0)

    def body(runtime: Runtime) -> tuple[list[int], int]:
        rank, device = runtime.rank, devices.of[runtime.rank]
        options: dict[str, Any] = {"schedule": schedule, "decouples": True}
        trainers = [DeviceTrainer(runtime, device, make_specs([10, 20, 30]), **options)]

        def backward(trainer: DeviceTrainer, tensors: tuple[int, ...]) -> None:
            for k in tensors:
                trainer.accumulate(k, 1.0 + rank)
            time.sleep(5e-3)  # so that what may go has gone

        trainers[0].zero()
        backward(trainers[0], (2, 1) if rank else ())
        trainers.append(DeviceTrainer(runtime, device, make_specs([40, 50]), **options))
        before = len(device.library.calls)
        for step in range(4):
            if step:
                trainers[0].zero()
            trainers[1].zero()
            left = (2, 1, 0) if step or not rank else (0,)
            order = [(trainers[0], left), (trainers[1], (1, 0))]
            for trainer, tensors in order if rank == 0 else reversed(order):
                backward(trainer, tensors)
            for trainer in trainers:
                count = len(trainer.specs)
                slots = trainer.synchronize([1.5] * count, f"step {step}", whole=False)
                trainer.update(slots)
        for trainer in trainers:
            trainer.finish()
        return launched(device), before

    (first, before), (second, begun) = all_well(run_ranks(2, body, STEADY))
    assert before == 0 < begun, "the first lane was in the midst of a step on one rank"
    assert first == second
    assert set(first) == {0, 1}


def test_groups_and_updates_of_an_installed_plan_are_timed_now_and_then() -> None:
    """In every sixteenth step; steps themselves are timed always."""
    devices = Devices(2, nccl=True, most_s=0.0)

    def body(runtime: Runtime) -> tuple[list[int], list[bool]]:
        device = devices.of[runtime.rank]
        trainer = DeviceTrainer(runtime, device, make_specs([10] * 8), schedule="layerwise")
        engine = trainer.engine
        counts, seen = [], []
        take = engine.clock.take

        def told(*wanted: bool) -> Any:
            for measured in take(*wanted):
                seen.append(measured.done_s > measured.begun_s > 0)
                yield measured

        while engine.tuner.phase is not TuningPhase.INSTALLED or len(counts) < 33:
            if len(counts) == 32:
                device.drain()  # then all of them can be read
            trainer.zero()
            installed = engine.tuner.phase is TuningPhase.INSTALLED
            before = device.calls["timed record"]
            engine.clock.mark_update(engine.clock.start_update())
            for k in reversed(range(8)):
                trainer.accumulate(k, 1.0)
            trainer.synchronize([1.0] * 8, "any step")
            if installed:
                engine.clock.take = told  # type: ignore[method-assign]
                counts.append(device.calls["timed record"] - before)
        trainer.finish()
        return counts, seen

    for counts, seen in all_well(run_ranks(2, body, QUICK)):
        few, many = min(counts), max(counts)
        assert many - few == 3 * 8 + 2, "start, packed and end of each group, and an update's two"
        assert [count - few for count in counts[:32]].count(many - few) == 2
        assert len(seen) >= 31
        assert all(seen)


def test_a_step_is_not_captured_in_a_graph() -> None:
    """It is refused where the first gradient appears and where the step closes."""
    devices = Devices(2, nccl=True, most_s=0.0)

    def body(runtime: Runtime) -> None:
        device = devices.of[runtime.rank]
        trainer = DeviceTrainer(runtime, device, make_specs([10, 20]), schedule="layerwise")
        trainer.zero()
        device.capturing = {trainer.main}
        message = rf"rank {runtime.rank}: a step's gradients .*make_graphed_callables"
        with pytest.raises(RuntimeError, match=message):
            trainer.accumulate(0, 1.0)
        with pytest.raises(RuntimeError, match=message), device.on(trainer.main):
            trainer.engine.synchronize()
        device.capturing = set()
        trainer.zero()
        for k in (1, 0):
            trainer.accumulate(k, 1.0)
        trainer.synchronize([1.0, 1.0], "the step after it")
        trainer.finish()

    all_well(run_ranks(2, body, STEADY))


def test_times_come_from_the_device() -> None:
    """A profile tells when gradients existed on the device, not when the host enqueued them."""
    devices = Devices(2, nccl=True, most_s=0.0)

    def body(runtime: Runtime) -> Any:
        device = devices.of[runtime.rank]
        trainer = DeviceTrainer(runtime, device, make_specs([10, 20]), schedule="oasr")
        for _ in range(12):
            trainer.zero()
            for k in (1, 0):
                device.enqueue(trainer.main, lambda: time.sleep(5e-3))
                trainer.accumulate(k, 1.0)
            trainer.synchronize([1.0, 1.0], "any step")
            if trainer.engine.tuner.trace is not None:
                break
        trainer.finish()
        trace = trainer.engine.tuner.trace
        assert trace is not None
        # With each plan, the memory of the one before, and once that of the network's measurement.
        assert device.calls["trim"] == trainer.engine.num_installed + 1 > 2
        return [tensor.backward_s for tensor in trace.tensors], trainer.engine.report()

    for backward, _ in all_well(run_ranks(2, body, QUICK)):
        assert all(seconds > 4e-3 for seconds in backward[:1])


def test_staging_is_said_once_per_host(caplog: pytest.LogCaptureFixture) -> None:
    devices = Devices(2, nccl=False, most_s=0.0)

    def body(runtime: Runtime) -> str:
        for _ in range(2):
            DeviceTrainer(runtime, devices.of[runtime.rank], make_specs([3]))
        return type(runtime.attached[0].backends[0, id(devices.of[runtime.rank])]).__name__

    with caplog.at_level("WARNING", logger="wfbp"):
        assert all_well(run_ranks(2, body)) == ["StagedBackend"] * 2
    said = [r.message for r in caplog.records if "travel through the host" in r.message]
    assert said == [
        "gradients on the software device travel through the host's memory, which is slower than "
        "NCCL: rank 0: there is no NCCL in software"
    ]


@pytest.mark.parametrize("name", ["check", "collective"])
def test_a_failure_on_the_device_ends_the_run(name: str) -> None:
    """It reaches the training thread though the host has gone on, and NCCL is aborted."""
    devices = Devices(2, nccl=True, most_s=0.0)
    stuck = threading.Event()

    def breaks(device: SoftwareDevice) -> Callable[[], None]:
        if name == "check":
            device.library.error = RuntimeError("NCCL_ERROR_REMOTE_ERROR")
            return lambda: (stuck.wait(60.0), None)[1]

        def fail() -> None:
            raise RuntimeError("illegal memory access")

        return fail

    def body(runtime: Runtime) -> str:
        device = devices.of[runtime.rank]
        DeviceTrainer(runtime, device, make_specs([5]), schedule="layerwise").engine.close()
        other = DeviceTrainer(runtime, device, make_specs([5]), schedule="layerwise")
        trainer = DeviceTrainer(runtime, device, make_specs([10]), schedule="layerwise")
        other.engine.close()
        device.enqueue(trainer.engine.memory.backend.stream, breaks(device))
        for _ in range(2000):
            trainer.zero()
            trainer.accumulate(0, 1.0)
            try:
                with device.on(trainer.main):
                    trainer.engine.synchronize()
            except WfbpError as error:
                stuck.set()
                return f"{type(error).__name__}: {error}"
            time.sleep(1e-3)
        raise AssertionError("nothing failed")

    messages = all_well(run_ranks(2, body, STEADY))
    assert not any(c.destroyed for device in devices.of for c in device.library.communicators)
    wanted = "REMOTE_ERROR" if name == "check" else "illegal memory access"
    assert any(m.startswith("BackendError") and wanted in m for m in messages)
    # Also those of lanes that had nothing to do.
    assert all(c.aborted for device in devices.of for c in device.library.communicators)


def test_shutdown_destroys_all_communicators() -> None:
    devices = Devices(2, nccl=True, most_s=0.0)

    def body(runtime: Runtime) -> int:
        device = devices.of[runtime.rank]
        for number in range(2):
            trainer = DeviceTrainer(
                runtime, device, make_specs([10 + number]), schedule="layerwise"
            )
            trainer.zero()
            trainer.accumulate(0, float(runtime.rank))
            trainer.synchronize([0.5], f"engine {number}")
            trainer.finish()
        return len(device.library.communicators)

    assert all_well(run_ranks(2, body, STEADY)) == [2, 2]
    communicators = [c for device in devices.of for c in device.library.communicators]
    assert all(c.destroyed and not c.aborted for c in communicators)
