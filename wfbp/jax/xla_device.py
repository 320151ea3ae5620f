"""The device that JAX's programs run on, streams given by XLA, and the choice of a GPU."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
import numpy as np

from wfbp.comm.device.device import Device
from wfbp.comm.device.links import OnDevice
from wfbp.comm.locations import Location, in_host_memory
from wfbp.comm.memory import Event
from wfbp.cuda.cupy_device import CupyDevice, check_local_rank, count_devices
from wfbp.errors import WfbpError
from wfbp.runtime import process

Copy = Callable[[Sequence[int], Sequence[int], Sequence[int]], None]
"""Copies memory: addresses of targets and sources, and their bytes."""


class XlaStreams(Device):
    """A device (``index``: CUDA's number) whose streams XLA provides, one at a time per thread."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._place = threading.local()

    @contextmanager
    def at(self, stream: int, event: Event | None = None) -> Iterator[None]:
        """This thread works on a stream, after an event there (None: after all work so far)."""
        before = getattr(self._place, "now", None)
        self._place.now = stream, event
        try:
            yield
        finally:
            self._place.now = before

    def current_stream(self) -> int:
        place = getattr(self._place, "now", None)
        return super().current_stream() if place is None else place[0]  # type: ignore[safe-super]

    def record(self, stream: int, timed: bool = False) -> Event:
        place: tuple[int, Event | None] | None = getattr(self._place, "now", None)
        if place is not None and place[0] == stream and place[1] is not None:
            return place[1]
        return super().record(stream, timed)  # type: ignore[safe-super]


class XlaDevice(XlaStreams, CupyDevice):
    """A CUDA device that JAX runs programs on; ``ImportError`` without CuPy or a driver."""

    def __init__(self, index: int) -> None:
        CupyDevice.__init__(
            self,
            index,
            remedy="leave more than JAX takes at its start: set XLA_PYTHON_CLIENT_MEM_FRACTION "
            "below 0.75",
        )
        XlaStreams.__init__(self, index)
        self._libcuda = ctypes.CDLL("libcuda.so.1")

    @property
    def recorder(self) -> int:
        """Address of a C function ``int record(void* event, void* stream)``; 0 is success."""
        address = ctypes.cast(self._libcuda.cuEventRecord, ctypes.c_void_p).value
        assert address is not None
        return address

    def lend(self, count: int) -> list[int]:
        """Handles of timed events, for C code to record."""
        return [self.take_event(timed=True) for _ in range(count)]

    def recorded(self, handle: int) -> Event:
        """The event of a lent handle, which is no longer lent."""
        return self.own_event(handle, timed=True)

    def move(self, to: Sequence[int], source: Sequence[int], nbytes: Sequence[int]) -> None:
        """Enqueue copies between addresses on the current stream."""
        for copy in zip(to, source, nbytes, strict=True):
            self.copy_bytes(*copy, self.current_stream())


HandlerPlace = tuple[int, int, int] | None
"""The place of a call of XLA's handler: the GPU's number, stream and event; None on the CPU."""


class Programs:
    """Programs that run on the CPU, and the place of their gradients."""

    name = "the CPU"
    location: Location = staticmethod(in_host_memory)

    def __init__(self, handlers: Any) -> None:
        self.copy: Copy = handlers.copy

    def check(self, place: HandlerPlace) -> None:
        """Raise ``WfbpError`` if a step does not run where gradients are exchanged."""
        actual = "the CPU" if place is None else f"GPU {place[0]}"
        if actual != self.name:
            raise WfbpError(
                f"a step runs on {actual}, and wfbp.jax exchanges gradients of {self.name}. Run "
                "steps on the first of JAX's devices: wfbp.jax.set_local_device() makes this "
                "rank's GPU the only one, JAX_PLATFORMS=cpu the CPU"
            )

    def at(self, place: HandlerPlace) -> AbstractContextManager[None]:
        """A context that orders this thread's work at the place of a handler's call."""
        return nullcontext()

    def stock(self, count: int) -> None:
        """Give the handlers what ``count`` more announcements need."""

    def reduce_now(
        self,
        gradients: Sequence[Any],
        key: int,
        reduce: Callable[[int, Sequence[int], Sequence[int]], None],
    ) -> list[Any]:
        """Reduce JAX's arrays outside of a compiled program; ``reduce`` takes an exchange's key,
        and addresses of arguments and results."""
        arrays = [np.asarray(gradient, order="C") for gradient in gradients]
        results = [np.empty_like(array) for array in arrays]
        addresses = [[a.__array_interface__["data"][0] for a in each] for each in (arrays, results)]
        reduce(key, *addresses)
        return [jax.numpy.asarray(result) for result in results]


class GpuPrograms(Programs):
    def __init__(self, handlers: Any, device: XlaDevice) -> None:
        self._handlers, self._device = handlers, device
        self.name, self.copy, self.location = f"GPU {device.index}", device.move, OnDevice(device)

    def at(self, place: HandlerPlace) -> AbstractContextManager[None]:
        assert place is not None
        _, stream, handle = place
        return self._device.at(stream, self._device.recorded(handle) if handle else None)

    def stock(self, count: int) -> None:
        self._handlers.stock(self._device.recorder, self._device.lend(count))

    def reduce_now(self, gradients: Sequence[Any], key: int, reduce: Any) -> list[Any]:
        call = jax.ffi.ffi_call(
            "wfbp_wait",
            [jax.ShapeDtypeStruct(gradient.shape, gradient.dtype) for gradient in gradients],
            input_output_aliases={k: k for k in range(len(gradients))},
        )
        return list(call(*gradients, exchange=np.int64(key)))


def find_programs(handlers: Any) -> Programs:
    """The place of this process's programs; ``WfbpError`` if it is neither CPU nor CUDA."""
    platform = jax.default_backend()
    if platform == "cpu":
        return Programs(handlers)
    first = jax.local_devices()[0]
    if platform not in ("gpu", "cuda") or "rocm" in first.client.platform_version.lower():
        raise WfbpError(
            "wfbp.jax exchanges gradients of programs on CPUs and on NVIDIA's GPUs; JAX runs them "
            f"on {first.device_kind} ({platform}). Set JAX_PLATFORMS=cpu"
        )
    return GpuPrograms(handlers, XlaDevice(first.local_hardware_id))


def set_local_device() -> jax.Device:
    """Let JAX use only this rank's GPU, whose number is the rank's number on its host.

    Call it after ``init()`` and before JAX computes anything or lists its devices: JAX takes memory
    on every GPU that it may use.

    Returns:
        The device.

    Raises:
        NotInitializedError: before ``wfbp.init()``.
        ImportError: CuPy is not installed, or finds no driver.
        RuntimeError: this host has fewer GPUs than ranks; JAX was used before, or is not built for
            CUDA.
    """
    runtime = process.current("set_local_device()")
    mine = runtime.local_rank
    check_local_rank(
        runtime.where, mine, runtime.local_size, count_devices(), "set jax_cuda_visible_devices"
    )
    jax.config.update("jax_cuda_visible_devices", str(mine))
    devices = jax.local_devices()
    if jax.default_backend() == "cpu" or [d.local_hardware_id for d in devices] != [mine]:
        raise RuntimeError(
            f"{runtime.where}: JAX runs on {', '.join(map(str, devices))}, not on GPU {mine} "
            "alone. Call set_local_device() before JAX computes anything; JAX must be one for CUDA "
            "(pip install 'jax[cuda12]'), and JAX_PLATFORMS not forbid it"
        )
    return devices[0]
