"""A CUDA device through CuPy, and training on one."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.launcher import Run
from tests.support.local import LocalWorld
from wfbp.comm.device.nccl import NcclBackend
from wfbp.comm.waiting import wait
from wfbp.core.types import Op
from wfbp.cuda.cupy_device import CupyDevice
from wfbp.errors import BackendError

pytestmark = pytest.mark.gpu

PROGRAM = Path(__file__).with_name("training_program.py")
JAX_PROGRAM = Path(__file__).with_name("jax_program.py")


def test_streams_events_and_copies(cupy: Any) -> None:
    device = CupyDevice(0)
    one, other = device.new_stream(), device.new_stream()
    data, target = device.zeros(1 << 20, one), device.zeros(1 << 20, other)
    assert device.address(data) % 256 == 0
    pinned = device.pinned(1 << 20)
    pinned[:] = 7
    start = device.record(one, timed=True)
    device.copy(data, pinned, one)
    end = device.record(one, timed=True)
    device.wait(other, end)
    device.copy(target, data, other)
    back = device.pinned(1 << 20)
    device.copy(back, target, other)
    last = device.record(other)
    while not device.done(last):
        pass
    assert set(back) == {7}
    assert 0 < device.seconds(start, end) < 1
    assert device.seconds(end, start) < 0


def test_memory_belongs_to_its_stream(cupy: Any) -> None:
    """What is let go is given out again on that stream at once, and on no other."""
    device = CupyDevice(0)
    one, other = device.new_stream(), device.new_stream()
    data = device.zeros(1 << 22, one)
    address = device.address(data)
    del data
    elsewhere = device.zeros(1 << 22, other)
    assert device.address(elsewhere) != address
    assert device.address(device.zeros(1 << 22, one)) == address


def test_events_that_are_lent(cupy: Any) -> None:
    """The runtime waits for events that XLA's threads record by the driver's own function."""
    pytest.importorskip("jax")
    from wfbp.jax.xla_device import XlaDevice

    device = XlaDevice(0)
    stream = device.new_stream()
    record = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(device.recorder)
    handles = device.lend(2)
    data, back = device.zeros(1 << 26, stream), device.pinned(1 << 26)
    assert record(handles[0], stream) == 0
    device.copy(back, data, stream)
    assert record(handles[1], stream) == 0
    start, end = (device.recorded(handle) for handle in handles)
    with device.at(stream, start):
        assert device.current_stream() == stream
        assert device.record(stream) is start
    while not device.done(end):
        pass
    assert 0 < device.seconds(start, end) < 1


def test_packing_through_the_seam(cupy: Any) -> None:
    device = CupyDevice(0)
    stream = device.new_stream()
    source, buffer = device.zeros(400, stream), device.zeros(512, stream)
    table = device.pack_table(buffer, [0, 416], [400, 16], "float32", stream)
    pinned = device.pinned(512)
    pinned[:] = 9
    device.copy(source, pinned[:400], stream)
    device.copy(buffer, pinned, stream)
    table.pointers[:] = [device.address(source), 0]
    table.pack()
    device.copy(pinned, buffer, stream)
    last = device.record(stream)
    while not device.done(last):
        pass
    assert set(pinned[:416]) == {9}  # the gap between the slots is left as it was
    assert set(pinned[416:432]) == {0}


def test_unpacking_on_another_stream(cupy: Any) -> None:
    """What is packed on one stream is copied back on another, which waits for it."""
    device = CupyDevice(0)
    packing, lane = device.new_stream(), device.new_stream()
    source, buffer = device.zeros(400, packing), device.zeros(512, packing)
    target = device.zeros(400, lane)
    table = device.pack_table(buffer, [0], [400], "float32", packing, "", lane)
    pinned = device.pinned(400)
    pinned[:] = 5
    device.copy(source, pinned, packing)
    table.pointers[:] = [device.address(source)]
    table.pack()
    device.wait(lane, device.record(packing))
    table.pointers[:] = [device.address(target)]
    table.unpack()
    back = device.pinned(400)
    device.copy(back, target, lane)
    last = device.record(lane)
    while not device.done(last):
        pass
    assert set(back) == {5}


def test_memory_that_runs_out(cupy: Any) -> None:
    device = CupyDevice(0)
    device.where = "rank 0 of 1"
    free = device.free_bytes()
    assert 0 < free < 1 << 45
    with pytest.raises(BackendError, match=r"rank 0 of 1: cuda:0 has no room for .* are free"):
        device.zeros(1 << 45, device.new_stream())
    assert device.zeros(1 << 20, device.new_stream()).nbytes == 1 << 20


def test_one_rank_over_nccl(cupy: Any) -> None:
    device = CupyDevice(0)
    backend = NcclBackend(device, LocalWorld(1).backend(0), device.nccl(), timeout_s=60.0)
    data = device.zeros(400, backend.stream)
    wait(backend.all_reduce(data, "float32", Op.AVERAGE), timeout_s=60.0)
    backend.check()
    assert not np.any(cupy.asnumpy(data))
    backend.close()


@pytest.mark.parallel
@pytest.mark.timeout(300)
@pytest.mark.parametrize("library", ["NCCL", "STAGED"])
def test_two_ranks_train_as_one(
    cupy: Any, mpirun: Callable[..., Run], library: str, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch is built without CUDA")
    trains(mpirun(2, PROGRAM, tmp_path, library, timeout=280.0), library)


@pytest.mark.parallel
@pytest.mark.timeout(300)
@pytest.mark.parametrize("library", ["NCCL", "STAGED"])
def test_two_ranks_train_with_jax_as_one(
    cupy: Any, mpirun: Callable[..., Run], library: str, tmp_path: Path
) -> None:
    pytest.importorskip("optax")
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        pytest.importorskip("jax_cuda13_plugin")
    trains(mpirun(2, JAX_PROGRAM, tmp_path, library, timeout=280.0), library)


def trains(run: Run, library: str) -> None:
    """All that was trained came out as on one process."""
    assert run.rc == 0, run
    assert ("travel through the host" in run.stderr) is (library == "STAGED"), run
