"""One CUDA device through CuPy. Events and waits call the CUDA runtime on raw handles, so that any
framework's streams can be used."""

from __future__ import annotations

import ctypes
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from wfbp.comm.arrays import Buffer
from wfbp.comm.device.device import Device
from wfbp.comm.memory import Event
from wfbp.cuda.pack import TILE, CudaKernels, DevicePackTable, stream_context
from wfbp.errors import BackendError

T = TypeVar("T")

_NO_MEMORY = 2
_NOT_READY = 600
_DISABLE_TIMING = 2
_NON_BLOCKING = 1
_GREATEST_PRIORITY = -64
"""CUDA clamps it to the device's greatest priority: smaller numbers run first."""
_COPY_ANY_WAY = 4
_UUID_BYTES = 16
_LEGACY = 1
_RELAXED = 2
"""``CU_STREAM_CAPTURE_MODE_RELAXED``."""
OWN_THREADS = "wfbp"
"""Prefix of the names of the runtime's threads."""
_LAST_OF_CURRENT = 2
"""Handles up to this one are default streams of the current device."""


class _CudaEvent(Event):
    """A CUDA event; its handle returns to the pool when the object is deleted."""

    __slots__ = ("_pool", "handle")

    def __init__(self, handle: int, pool: list[int]) -> None:
        self.handle = handle
        self._pool = pool

    def __del__(self) -> None:
        self._pool.append(self.handle)


class CupyDevice(Device):
    """One CUDA device; ``ImportError`` without CuPy, a driver, or a compiler for the device.
    ``current_stream`` returns the calling thread's raw stream; ``empty_cache`` makes the
    framework free cached memory when none is left; ``remedy`` is advice for the user if that
    does not help."""

    def __init__(
        self,
        index: int,
        current_stream: Callable[[], int] | None = None,
        empty_cache: Callable[[], None] = lambda: None,
        remedy: str = "make the model or the batch smaller",
    ) -> None:
        self._empty_cache = empty_cache
        self._remedy = remedy
        self._cupy, self._runtime, self._driver = _, runtime, _ = _modules()
        self.index = index
        self._here = threading.local()
        count_devices()  # also lets the driver know of contexts
        with self.active():
            self._kernels = self._compiled()
            properties = runtime.getDeviceProperties(index)
        self.name = f"cuda:{index}"
        # The bus alone does not tell parts of a GPU apart.
        uuid = _uuid(index) or properties.get("uuid", b"")[:_UUID_BYTES]
        self.identity = " ".join(
            [socket.gethostname(), runtime.deviceGetPCIBusId(index), uuid.hex()]
        )
        self._current_stream = current_stream or self._cupy_stream
        self._plain: list[int] = []
        self._timed: list[int] = []
        self._streams: list[Any] = []

    def _compiled(self) -> CudaKernels:
        """The packing kernels; ``ImportError`` if CuPy cannot compile them."""
        try:
            return CudaKernels(self.active)
        except Exception as error:  # from its compiler, or because there is none
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise ImportError(
                f"CuPy cannot compile the packing kernels for cuda:{self.index}: {lines[0]}. It "
                "needs NVRTC of the CUDA that it is built for: pip install 'wfbp[cuda12]' for "
                "cupy-cuda12x, 'wfbp[cuda13]' for cupy-cuda13x; keep the one that PyTorch is built "
                "for (torch.version.cuda)"
            ) from error

    def nccl(self) -> Any:
        try:
            from cupy.cuda import nccl

            nccl.get_version()
        except (ImportError, AttributeError) as error:  # without the library: an empty module
            raise ImportError(
                f"NCCL is not installed ({error}); pip install nvidia-nccl-cu12 (or -cu13)"
            ) from error
        return nccl

    def _ensure_context(self) -> None:
        """Give the calling thread this device, if it has none."""
        # Every method calls this first: a thread without a device gets the first one, and with
        # CUDA 12 even switching back to it creates a context there, half a gigabyte large.
        if not hasattr(self._here, "has_context"):
            if not self._driver.ctxGetCurrent():
                self._runtime.setDevice(self.index)
            if threading.current_thread().name.startswith(OWN_THREADS):
                _tolerate_captures()
            self._here.has_context = True

    def use(self) -> None:
        self._ensure_context()
        self._runtime.setDevice(self.index)

    def current_stream(self) -> int:
        return self._current_stream()

    def _cupy_stream(self) -> int:
        self._ensure_context()
        return int(self._cupy.cuda.get_current_stream().ptr)

    def new_stream(self) -> int:
        with self.active():
            handle = int(self._runtime.streamCreateWithPriority(_NON_BLOCKING, _GREATEST_PRIORITY))
        self._streams.append(weakref.finalize(self, _destroy_stream, self._runtime, handle))
        return handle

    def record(self, stream: int, timed: bool = False) -> Event:
        event = self.own_event(self.take_event(timed), timed)
        with self._where(stream):
            self._runtime.eventRecord(event.handle, stream)
        return event

    def take_event(self, timed: bool) -> int:
        """The handle of an event that the caller owns until :meth:`own_event`."""
        self._ensure_context()
        try:
            return (self._timed if timed else self._plain).pop()
        except IndexError:
            with self.active():
                return int(self._runtime.eventCreateWithFlags(0 if timed else _DISABLE_TIMING))

    def own_event(self, handle: int, timed: bool) -> _CudaEvent:
        """The event of a handle that was taken."""
        return _CudaEvent(handle, self._timed if timed else self._plain)

    def wait(self, stream: int, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        with self._where(stream):
            self._runtime.streamWaitEvent(stream, event.handle)

    def done(self, event: Event) -> bool:
        assert isinstance(event, _CudaEvent)
        self._ensure_context()
        status = self._runtime.eventQuery(event.handle)
        if status:
            # Resets the thread's last error, which another library would take for its own.
            with suppress(self._runtime.CUDARuntimeError):
                self._runtime.check_status(status)
        if status not in (0, _NOT_READY):
            raise BackendError(
                f"{self.name}: something that ran on the device failed: CUDA error {status}"
            )
        return bool(status == 0)

    def seconds(self, start: Event, end: Event) -> float:
        assert isinstance(start, _CudaEvent)
        assert isinstance(end, _CudaEvent)
        self._ensure_context()
        return float(self._runtime.eventElapsedTime(start.handle, end.handle)) * 1e-3

    def zeros(self, nbytes: int, stream: int) -> Buffer:
        cupy = self._cupy

        # CuPy's pool gives memory out again on the stream on which it was taken.
        def take() -> Buffer:
            with self.active(), stream_context(cupy, stream):
                data: Buffer = cupy.zeros(nbytes, cupy.uint8)
            return data

        return self._allocated(take, nbytes)

    def _allocated(self, take: Callable[[], T], nbytes: int) -> T:
        """Call ``take``, again with emptied caches if memory runs out, then ``BackendError``."""
        exhausted = self._cupy.cuda.memory.OutOfMemoryError
        try:
            return take()
        except exhausted:
            self.trim()
            self._empty_cache()
        try:
            return take()
        except exhausted as error:
            raise BackendError(
                f"{self.where or 'wfbp'}: {self.name} has no room for {nbytes:,} bytes of "
                f"communication buffers, which take as much as all gradients: "
                f"{self.free_bytes():,} bytes are free, and none are kept for later; {self._remedy}"
            ) from error

    def free_bytes(self) -> int:
        with self.active():
            free, _ = self._runtime.memGetInfo()
            return int(free + self._cupy.get_default_memory_pool().free_bytes())

    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        try:
            with self.active():
                memory = self._cupy.cuda.alloc_pinned_memory(nbytes)
        except self._runtime.CUDARuntimeError as error:
            if error.status != _NO_MEMORY:
                raise
            raise BackendError(
                f"{self.where or 'wfbp'}: the host has no room for {nbytes:,} bytes of pinned "
                f"memory, through which gradients on {self.name} travel ({error}); give the job "
                "more memory, or let data loaders and other processes pin less"
            ) from error
        return np.frombuffer(memory, np.uint8, nbytes)

    def address(self, buffer: Buffer) -> int:
        if isinstance(buffer, np.ndarray):
            return int(buffer.__array_interface__["data"][0])
        return int(buffer.data.ptr)  # type: ignore[unreachable]

    def copy(self, target: Buffer, source: Buffer, stream: int) -> None:
        if target.nbytes != source.nbytes:
            raise ValueError(f"{source.nbytes} bytes do not fill {target.nbytes}")
        if target.nbytes:
            self.copy_bytes(self.address(target), self.address(source), target.nbytes, stream)

    def copy_bytes(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy between two addresses."""
        with self._where(stream):
            self._runtime.memcpyAsync(to, source, nbytes, _COPY_ANY_WAY, stream)

    def pack_table(
        self,
        buffer: Buffer,
        offsets: Sequence[int],
        nbytes: Sequence[int],
        dtype: str,
        stream: int,
        tensor_dtype: str = "",
        unpack_stream: int | None = None,
    ) -> DevicePackTable:
        def take() -> DevicePackTable:
            with self.active():
                return DevicePackTable(
                    self._kernels,
                    self.address(buffer),
                    buffer.nbytes,
                    offsets,
                    nbytes,
                    dtype,
                    stream,
                    tensor_dtype or None,
                    unpack_stream,
                )

        return self._allocated(take, len(offsets) * TILE.itemsize)

    def is_capturing(self, stream: int) -> bool:
        if stream <= _LEGACY:  # cannot be captured, nor asked while another one is
            return False
        with self._where(stream):
            return bool(self._runtime.streamIsCapturing(stream))

    def trim(self) -> None:
        with self.active():
            self._cupy.get_default_memory_pool().free_all_blocks()
            self._cupy.get_default_pinned_memory_pool().free_all_blocks()

    def _where(self, stream: int) -> AbstractContextManager[None]:
        """Within it, the stream's handle refers to this device."""
        self._ensure_context()
        return self.active() if stream <= _LAST_OF_CURRENT else nullcontext()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within it, this is the calling thread's device."""
        self._ensure_context()
        before = self._runtime.getDevice()
        if before == self.index:
            yield
            return
        self._runtime.setDevice(self.index)
        try:
            yield
        finally:
            self._runtime.setDevice(before)


def _destroy_stream(runtime: Any, handle: int) -> None:
    """Destroy a stream, perhaps at exit; an error that has ended the device was reported before."""
    with suppress(runtime.CUDARuntimeError):
        runtime.streamDestroy(handle)


def count_devices() -> int:
    """Count CUDA devices without making a context; ``ImportError`` without CuPy or a driver."""
    _, runtime, _ = _modules()
    try:
        return int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        raise ImportError(f"CUDA finds no device: {error}") from error


def _tolerate_captures() -> None:
    """Let this thread query events while another captures a graph; by default both would fail."""
    mode = ctypes.c_int(_RELAXED)
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def _uuid(index: int) -> bytes:
    """A device's uuid by the driver, since CuPy's ends at its first zero; empty without it."""
    device, uuid = ctypes.c_int(), (ctypes.c_ubyte * _UUID_BYTES)()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        failed = driver.cuDeviceGet(ctypes.byref(device), index)
        failed = failed or driver.cuDeviceGetUuid_v2(uuid, device)  # of parts of a GPU, too
    except (OSError, AttributeError):
        return b""
    return b"" if failed else bytes(uuid)


def _modules() -> tuple[Any, Any, Any]:
    """CuPy, and its bindings of the CUDA runtime and of the driver."""
    try:
        import cupy
        from cupy_backends.cuda.api import driver, runtime
    except ImportError as error:
        raise ImportError(
            f"tensors on CUDA devices need CuPy ({error}); install it with wfbp: "
            "pip install 'wfbp[cuda12]' (or cuda13)"
        ) from error
    return cupy, runtime, driver


def check_local_rank(
    where: str, local_rank: int, local_size: int, count: int, otherwise: str
) -> None:
    """Raise ``RuntimeError`` if this host has fewer GPUs (``count``) than ranks; ``otherwise``
    tells how a program can choose a GPU by number."""
    if local_rank < count:
        return
    raise RuntimeError(
        f"{where}: {local_size} ranks on this host, but {count} GPUs. Start {count or 'no'} ranks "
        f"per host on GPUs; or, if the launcher shows each rank its own GPU or some ranks are to "
        f"share one, {otherwise} with a number below (for sharing also set "
        "NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30), or accept that gradients travel through the "
        "host); or train on the CPU"
    )
