"""CupyDevice above a stand-in for CuPy that keeps the CUDA runtime's rules about threads."""

from __future__ import annotations

import ctypes
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from wfbp.cuda.cupy_device import CupyDevice, count_devices
from wfbp.errors import BackendError


class Cuda:
    """Threads, devices, contexts, streams and events; every function with CUDA's arguments."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.contexts: set[int] = set()
        self.streams: dict[int, int] = {}
        """The device of each stream, and of each event."""
        self.events: dict[int, int] = {}
        self.recorded: dict[int, int] = {}
        self.waits: list[tuple[int, int]] = []
        self.copies: list[tuple[int, int, int, int, int]] = []
        self.room_bytes = 1 << 40
        """What can be allocated; the pool of ``kept_bytes`` gives back to it."""
        self.kept_bytes = 0
        self.num_unpinned = 0
        """How often unused pinned memory of the host was given back."""
        self.trimmed: list[int] = []
        """The device of each time that unused memory was given back."""
        self.status = 0
        self._here = threading.local()
        self._next = 1 << 20
        self._initialised = False

    def _handle(self) -> int:
        self._next += 16
        return self._next

    def _on(self) -> int:
        """The calling thread's device, which has a context from now on."""
        device: int = getattr(self._here, "device", 0)
        self.contexts.add(device)
        self._here.context = True
        return device

    # The runtime.

    class CUDARuntimeError(RuntimeError):
        def __init__(self, status: int = 100) -> None:
            super().__init__({2: "cudaErrorMemoryAllocation", 100: "cudaErrorNoDevice"}.get(status))
            self.status = status

    last_error = 0
    """As cudaGetLastError would tell it."""

    def check_status(self, status: int) -> None:
        """CuPy's: resets the last error, and raises one."""
        if status:
            self.last_error = 0
            raise Cuda.CUDARuntimeError(status)

    def getDeviceCount(self) -> int:  # noqa: N802
        self._initialised = True
        if not self.count:
            raise Cuda.CUDARuntimeError
        return self.count

    def getDevice(self) -> int:  # noqa: N802
        device: int = getattr(self._here, "device", 0)
        return device

    def setDevice(self, device: int) -> None:  # noqa: N802
        assert 0 <= device < self.count
        self._here.device = device
        self._on()

    def getDeviceProperties(self, device: int) -> dict[str, Any]:  # noqa: N802
        return {"uuid": bytes([17, device])}

    def deviceGetPCIBusId(self, device: int) -> str:  # noqa: N802
        return f"0000:0{device}:00.0"

    def streamCreateWithPriority(self, flags: int, priority: int) -> int:  # noqa: N802
        assert flags == 1
        assert priority < -5  # the greatest that devices have
        handle = self._handle()
        self.streams[handle] = self._on()
        return handle

    def streamIsCapturing(self, stream: int) -> bool:  # noqa: N802
        self._on()
        assert stream > 1, "cudaErrorStreamCaptureImplicit"
        return stream == 2

    def streamDestroy(self, stream: int) -> None:  # noqa: N802
        del self.streams[stream]

    def eventCreateWithFlags(self, flags: int) -> int:  # noqa: N802
        handle = self._handle()
        self.events[handle] = flags
        self.streams[handle] = self._on()
        return handle

    def eventRecord(self, event: int, stream: int) -> None:  # noqa: N802
        found = self.streams[stream] if stream > 2 else self._on()
        assert self.streams[event] == found, "event and stream of two devices"
        self.recorded[event] = stream

    def eventQuery(self, event: int) -> int:  # noqa: N802
        self._on()
        assert event in self.recorded
        self.last_error = self.status
        return self.status

    def eventElapsedTime(self, start: int, end: int) -> float:  # noqa: N802
        assert self.events[start] == self.events[end] == 0, "made without timing"
        return 250.0

    def streamWaitEvent(self, stream: int, event: int, flags: int = 0) -> None:  # noqa: N802
        self._on()
        self.waits.append((stream, event))

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:  # noqa: N802
        self._on()
        assert kind == 4
        self.copies.append((dst, src, size, kind, stream))

    def memGetInfo(self) -> tuple[int, int]:  # noqa: N802
        self._on()
        return self.room_bytes, 1 << 40

    def trim(self) -> None:
        """What CuPy's pool does when it is told to free all blocks."""
        self.trimmed.append(self._on())
        self.room_bytes, self.kept_bytes = self.room_bytes + self.kept_bytes, 0

    def trim_pinned(self) -> None:
        self.num_unpinned += 1

    def take(self, nbytes: int) -> None:
        if nbytes > self.room_bytes:
            raise OutOfMemoryError(f"Out of memory allocating {nbytes:,} bytes")

    # The driver.

    def ctxGetCurrent(self) -> int:  # noqa: N802
        assert self._initialised, "CUDA_ERROR_NOT_INITIALIZED"
        return int(hasattr(self._here, "context"))


class OutOfMemoryError(MemoryError):
    """CuPy's."""


class _Array:
    """Device memory as CuPy has it."""

    def __init__(self, nbytes: int, stream: int) -> None:
        self.nbytes, self.stream = nbytes, stream
        self.data = types.SimpleNamespace(ptr=id(self))


def modules(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put the stand-in where CuPy would be."""
    cupy: Any = types.ModuleType("cupy")
    current = threading.local()

    @contextmanager
    def device(index: int) -> Iterator[None]:
        before = cuda.getDevice()
        if index != before:
            cuda.setDevice(index)
        yield
        cuda.setDevice(before)

    class Stream:
        @classmethod
        @contextmanager
        def from_external(cls, external: Any) -> Iterator[None]:
            version, handle = external.__cuda_stream__()
            assert version == 0
            before = getattr(current, "stream", 0)
            current.stream = handle
            yield
            current.stream = before

    cupy.uint8 = np.uint8
    pool = types.SimpleNamespace(free_all_blocks=cuda.trim, free_bytes=lambda: cuda.kept_bytes)
    cupy.get_default_memory_pool = lambda: pool
    pinned = types.SimpleNamespace(free_all_blocks=cuda.trim_pinned)
    cupy.get_default_pinned_memory_pool = lambda: pinned

    def zeros(nbytes: int, dtype: Any) -> _Array:
        cuda.take(nbytes)
        return _Array(nbytes, current.stream)

    cupy.zeros = zeros
    cupy.empty = lambda size, dtype: _Array(size, -1)

    def unowned(address: int, nbytes: int, owner: object, device_id: int) -> Any:
        return types.SimpleNamespace(ptr=address, nbytes=nbytes, owner=owner, device=device_id)

    def ndarray(shape: tuple[int], dtype: Any, memptr: Any) -> _Array:
        memory, offset = memptr
        assert (dtype, offset) == (np.uint8, 0)
        found = _Array(*shape, -1)
        found.data = memory
        return found

    cupy.ndarray = ndarray
    cuda.compiled = []  # type: ignore[attr-defined]
    module = types.SimpleNamespace(compile=lambda: cuda.compiled.append(cuda.getDevice()))  # type: ignore[attr-defined]
    cupy.RawModule = lambda code, options: module
    cupy.cuda = types.SimpleNamespace(
        Device=device,
        Stream=Stream,
        memory=types.SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
        UnownedMemory=unowned,
        MemoryPointer=lambda memory, offset: (memory, offset),
        alloc_pinned_memory=lambda n: bytearray(n + 100),
        get_current_stream=lambda: types.SimpleNamespace(ptr=getattr(current, "stream", 0)),
    )
    api: Any = types.ModuleType("cupy_backends.cuda.api")
    api.runtime = cuda
    api.driver = cuda
    cuda.launchKernel = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy_backends", types.ModuleType("cupy_backends"))
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda", types.ModuleType("cupy_backends.cuda"))
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.api", api)
    return cupy


def everything(device: CupyDevice) -> None:
    """What the runtime does on any thread."""
    stream = device.new_stream()
    plain, timed = device.record(stream), device.record(stream, timed=True)
    device.wait(stream, plain)
    assert device.done(plain)
    assert device.seconds(timed, timed) == 0.25
    source, target = device.zeros(64, stream), device.zeros(64, stream)
    assert source.stream == stream  # type: ignore[attr-defined]
    assert device.pinned(32).nbytes == 32
    device.copy(target, source, stream)
    with device.active():
        pass
    device.trim()
    assert [device.is_capturing(handle) for handle in (1, 2)] == [False, True]
    device.use()


def in_a_thread(act: Any) -> None:
    problems: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20.0)
    if problems:
        raise problems[0]


def test_no_thread_makes_a_context_on_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(4)
    modules(cuda, monkeypatch)
    made: list[CupyDevice] = []
    in_a_thread(lambda: made.append(CupyDevice(2)))
    in_a_thread(lambda: everything(made[0]))
    for method in ("new_stream", "current_stream"):
        in_a_thread(getattr(made[0], method))
    in_a_thread(lambda: made[0].record(next(iter(cuda.streams))))
    assert cuda.contexts == {2}
    assert cuda.trimmed == [2]
    assert cuda.num_unpinned == 1


def test_kernels_are_compiled_when_a_device_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """On that device, so that no step waits for the compiler; where it fails, with the remedy."""
    cuda = Cuda(4)
    cupy = modules(cuda, monkeypatch)
    CupyDevice(2)
    assert cuda.compiled == [2]  # type: ignore[attr-defined]

    def fails() -> None:
        raise RuntimeError("CuPy failed to load libnvrtc.so.12: OSError\n\nmore")

    cupy.RawModule = lambda code, options: types.SimpleNamespace(compile=fails)
    message = r"kernels for cuda:1: CuPy failed to load libnvrtc.so.12: OSError. It needs .*cuda12"
    with pytest.raises(ImportError, match=message):
        CupyDevice(1)


def test_devices_are_told_apart_behind_a_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy reads a uuid up to its first zero; the driver tells all of it."""
    modules(Cuda(2), monkeypatch)
    monkeypatch.setattr(Cuda, "deviceGetPCIBusId", lambda self, device: "0000:01:00.0")
    monkeypatch.setattr(Cuda, "getDeviceProperties", lambda self, device: {"uuid": b"\x11"})

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.c_int)
    def get(device: Any, index: int) -> int:
        device[0] = index
        return 0

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_ubyte), ctypes.c_int)
    def get_uuid(uuid: Any, device: int) -> int:
        uuid[0], uuid[1], uuid[15] = 0x11, 0, device
        return 0

    driver = types.SimpleNamespace(cuDeviceGet=get, cuDeviceGetUuid_v2=get_uuid)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    first, second, again = CupyDevice(0), CupyDevice(1), CupyDevice(1)
    assert first.identity != second.identity == again.identity


def test_own_threads_leave_the_programs_captures_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    modules(Cuda(1), monkeypatch)
    modes: list[tuple[str, int]] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))
    def exchange(mode: Any) -> int:
        modes.append((threading.current_thread().name, mode[0]))
        return 0

    driver = types.SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange)
    device = CupyDevice(0)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    for name in ("wfbp-comm", "a loader of data"):
        thread = threading.Thread(target=everything, args=(device,), name=name)
        thread.start()
        thread.join(20.0)
    assert modes == [("wfbp-comm", 2)]


def test_xlas_device_is_at_home_in_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax")
    from wfbp.jax import xla_device as xla

    cuda = Cuda(4)
    modules(cuda, monkeypatch)
    library = types.SimpleNamespace(cuEventRecord=ctypes.CDLL(None).abs)
    monkeypatch.setattr(xla.ctypes, "CDLL", lambda name: library)
    made: list[xla.XlaDevice] = []
    in_a_thread(lambda: made.append(xla.XlaDevice(2)))
    in_a_thread(lambda: everything(made[0]))
    in_a_thread(lambda: made[0].lend(2))
    assert made[0].recorder
    assert cuda.contexts == {2}


def test_a_thread_with_a_device_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(4)
    modules(cuda, monkeypatch)

    def body() -> None:
        cuda.setDevice(3)
        device = CupyDevice(1)
        stream = device.new_stream()
        device.wait(stream, device.record(stream))
        device.zeros(8, stream)
        default = 0  # of the current device
        device.wait(default, device.record(default))
        assert cuda.getDevice() == 3

    in_a_thread(body)
    assert cuda.contexts == {1, 3}


def test_events_are_used_again_when_nobody_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(1)
    modules(cuda, monkeypatch)
    device = CupyDevice(0)
    stream = device.new_stream()
    for _ in range(5):
        device.record(stream)
    held = [device.record(stream, timed=True) for _ in range(3)]
    assert sorted(cuda.events.values()) == [0, 0, 0, 2]
    (lent,) = {device.take_event(timed=True)}
    assert lent not in {event.handle for event in held}
    del held
    event = device.own_event(lent, timed=True)
    assert device.take_event(timed=True) != event.handle
    assert len(cuda.events) == 5


def test_a_failure_on_the_device_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(1)
    modules(cuda, monkeypatch)
    device = CupyDevice(0)
    event = device.record(device.new_stream())
    cuda.status = 600
    assert not device.done(event)
    assert cuda.last_error == 0, "the next check of another library would find this"
    cuda.status = 700
    with pytest.raises(BackendError, match=r"cuda:0: .* CUDA error 700"):
        device.done(event)


def test_pinned_memory_that_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy has freed its cache by then, and raises the runtime's error."""
    cuda = Cuda(1)
    cupy = modules(cuda, monkeypatch)
    device = CupyDevice(0)
    device.where = "rank 1 of 2"
    status = 2

    def fails(nbytes: int) -> None:
        raise Cuda.CUDARuntimeError(status)

    cupy.cuda.alloc_pinned_memory = fails
    message = r"^rank 1 of 2: the host has no room for 4,096 bytes of pinned memory, .*Allocation"
    with pytest.raises(BackendError, match=message):
        device.pinned(4096)
    status = 700
    with pytest.raises(Cuda.CUDARuntimeError):
        device.pinned(4096)


def test_where_memory_runs_out_caches_are_emptied_and_it_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = Cuda(1)
    modules(cuda, monkeypatch)
    emptied: list[int] = []

    def empty_cache() -> None:
        emptied.append(len(cuda.trimmed))
        cuda.room_bytes += 50

    device = CupyDevice(0, None, empty_cache, "use fewer")
    stream = device.new_stream()
    cuda.room_bytes, cuda.kept_bytes = 100, 30
    device.zeros(100, stream)
    assert not cuda.trimmed
    device.zeros(180, stream)
    assert emptied == [1], "the framework's cache, behind CuPy's"
    device.where = "rank 1 of 2"
    with pytest.raises(
        BackendError,
        match=r"^rank 1 of 2: cuda:0 has no room for 1,000 bytes .* 230 bytes are free.*use fewer$",
    ):
        device.zeros(1000, stream)
    assert len(emptied) == 2


def test_a_machine_without_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    modules(Cuda(0), monkeypatch)
    with pytest.raises(ImportError, match="CUDA finds no device: cudaErrorNoDevice"):
        count_devices()
    with pytest.raises(ImportError, match="CUDA finds no device"):
        CupyDevice(0)
