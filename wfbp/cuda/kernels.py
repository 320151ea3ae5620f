"""The CUDA kernels of ``csrc/pack.cu``: source, arguments, and CuPy's way to run them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class _ForeignStream:
    """A raw handle, by the protocol that libraries pass streams by."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def stream_context(cupy: Any, stream: int) -> AbstractContextManager[object]:
    """A context in which CuPy's work and memory belong to the stream with this raw handle."""
    external: AbstractContextManager[object]
    if hasattr(cupy.cuda.Stream, "from_external"):  # CuPy 14 and later
        external = cupy.cuda.Stream.from_external(_ForeignStream(stream))
    else:
        external = cupy.cuda.ExternalStream(stream)
    return external


THREADS = 256
CAPACITY = 504
"""Tensors per launch: as many addresses as fit the 4 KB that every device takes as arguments."""

TILE = np.dtype(
    [("in_buffer", "u8"), ("in_tensor", "u8"), ("slot", "u4"), ("count", "u4")], align=True
)
ARGUMENTS = np.dtype(
    [
        ("tiles", "u8"),
        ("buffer", "u8"),
        ("scale", "f8"),
        ("packs", "i4"),
        ("item", "u4"),
        ("tensors", "i8", (CAPACITY,)),
    ],
    align=True,
)
"""``Tile`` and ``Arguments`` of the source."""

CASTS = frozenset(
    {
        ("float32", "float16"),
        ("float16", "float32"),
        ("float32", "bfloat16"),
        ("bfloat16", "float32"),
    }
)
"""Changes of element type that there are kernels for."""

SCALED = frozenset({"float16", "bfloat16", "float32", "float64"})
"""Element types that can be multiplied."""

_SOURCES = (
    Path(__file__).with_name("pack.cu"),  # as it is installed
    Path(__file__).parents[2] / "csrc" / "pack.cu",  # in a checkout
)


class Kernels(Protocol):
    """A device as the pack tables see it."""

    def upload(self, table: npt.NDArray[Any], stream: int) -> tuple[int, Any]:
        """Copy a table to the device; returns its address and the object that keeps it there.

        The memory is the stream's: once freed, it is reused there behind every launch that may read
        it.
        """

    def launch(self, name: str, num_blocks: int, arguments: int, stream: int) -> None:
        """Enqueue a kernel.

        Args:
            name: as in the source, without ``wfbp_``.
            num_blocks: of :data:`THREADS` threads each.
            arguments: address of one element of :data:`ARGUMENTS`, read before this returns.
            stream: raw handle; 0 is the default stream.
        """


def kernel_name(source: str, target: str) -> str:
    """The kernel that reads one element type and writes another, times a scale.

    Raises ``ValueError``, listing the kernels, if there is none.

    Example:
        >>> kernel_name("float32", "bfloat16")
        'float32_bfloat16'
    """
    if (source, target) not in CASTS and not (source == target and source in SCALED):
        raise ValueError(
            f"no kernel turns {source} into {target}: expected one of "
            f"{', '.join(sorted(SCALED))} into itself, or float32 from or to float16 or bfloat16"
        )
    return f"{source}_{target}"


def source() -> str:
    """The text of ``csrc/pack.cu``; ``FileNotFoundError`` if it is missing."""
    for path in _SOURCES:
        if path.exists():
            return path.read_text()
    raise FileNotFoundError(
        f"the CUDA source is missing: expected one of {', '.join(map(str, _SOURCES))}; "
        "reinstall wfbp"
    )


class CudaKernels:
    """The kernels on the device that is current when this is made.

    Any thread may launch for which that device is current; CuPy makes it so per thread.

    Raises:
        ImportError: CuPy is not installed.
        FileNotFoundError: the source is missing.
        cupy.cuda.compiler.CompileException: it does not compile for this device.
    """

    def __init__(self) -> None:
        import cupy
        from cupy_backends.cuda.api import driver

        self._cupy = cupy
        self._launch: Callable[..., None] = driver.launchKernel
        self._module = cupy.RawModule(code=source(), options=("-std=c++17",))
        self._module.compile()  # here, and not within the first step
        self._functions: dict[str, Any] = {}

    def upload(self, table: npt.NDArray[Any], stream: int) -> tuple[int, Any]:
        """Enqueue the copy of a table to the device; see :class:`Kernels`."""
        with stream_context(self._cupy, stream):
            held = self._cupy.asarray(np.ascontiguousarray(table).view(np.uint8))
        return int(held.data.ptr), held

    def launch(self, name: str, num_blocks: int, arguments: int, stream: int) -> None:
        """Enqueue a kernel; see :class:`Kernels`."""
        function = self._functions.get(name)
        if function is None:
            function = self._module.get_function(f"wfbp_{name}").kernel
            self._functions[name] = function
        # The driver takes a list of addresses, one per argument; ours is one structure.
        listed = ctypes.c_void_p(arguments)
        grid, block = (num_blocks, 1, 1), (THREADS, 1, 1)
        self._launch(function.ptr, *grid, *block, 0, stream, ctypes.addressof(listed), 0)
