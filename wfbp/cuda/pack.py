"""Packs and unpacks fusion buffers on CUDA devices with the kernels of ``csrc/pack.cu``."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wfbp.core.types import item_bytes

THREADS = 256
CAPACITY = 504
"""Tensors per launch: as many addresses as fit the 4 KB of arguments of every device."""

TILE = np.dtype(
    [("in_buffer", "u8"), ("in_tensor", "u8"), ("slot", "u4"), ("count", "u4")], align=True
)
ARGUMENTS = np.dtype(
    [
        ("tiles", "u8"),
        ("buffer", "u8"),
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
"""Pairs of element types that kernels convert."""

LARGEST_TILE_BYTES = 16384
SMALLEST_TILE_BYTES = 4096
ENOUGH_TILES = 512
"""Tiles shrink from four 16-byte words per thread until at least this many exist."""

Integers = Sequence[int] | npt.NDArray[np.integer[Any]]

_SOURCES = (
    Path(__file__).with_name("pack.cu"),  # as it is installed
    Path(__file__).parents[2] / "csrc" / "pack.cu",  # in a checkout
)


def kernel_name(source: str, target: str) -> str:
    """The kernel that moves or converts elements; ``ValueError`` if there is none."""
    if source == target:
        return "copy"
    if (source, target) not in CASTS:
        raise ValueError(
            f"no kernel turns {source} into {target}: only float32 from or to float16 or bfloat16"
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


class _ForeignStream:
    """A raw handle in the protocol with which libraries pass streams."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def stream_context(cupy: Any, stream: int) -> AbstractContextManager[object]:
    """Make CuPy's work and memory within it belong to this stream."""
    external: AbstractContextManager[object]
    external = cupy.cuda.Stream.from_external(_ForeignStream(stream))
    return external


class CudaKernels:
    """The kernels on the device that is current when this is made. Any thread may launch:
    ``active`` makes that device current there."""

    def __init__(self, active: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        import cupy
        from cupy_backends.cuda.api import driver

        self._cupy = cupy
        self._active = active
        self._launch: Callable[..., None] = driver.launchKernel
        self._module = cupy.RawModule(code=source(), options=("-std=c++17",))
        self._module.compile()  # here, and not within the first step
        self._functions: dict[str, Any] = {}

    def upload(self, table: npt.NDArray[Any], stream: int) -> tuple[int, Any]:
        """Enqueue a table's copy to the device; returns its address and the owner of its memory,
        which the stream reuses only after the launches that read it."""
        with stream_context(self._cupy, stream):
            held = self._cupy.asarray(np.ascontiguousarray(table).view(np.uint8))
        return int(held.data.ptr), held

    def launch(self, name: str, num_blocks: int, arguments: int, stream: int) -> None:
        """Enqueue a kernel of ``num_blocks`` blocks; ``name`` is the source's, without ``wfbp_``.
        Reads ``arguments``, the address of one element of :data:`ARGUMENTS`, before it returns."""
        function = self._functions.get(name)
        if function is None:
            function = self._module.get_function(f"wfbp_{name}").kernel
            self._functions[name] = function
        # The driver takes a list of addresses, one per argument; ours is one structure.
        listed = ctypes.c_void_p(arguments)
        grid, block = (num_blocks, 1, 1), (THREADS, 1, 1)
        with self._active():
            self._launch(function.ptr, *grid, *block, 0, stream, ctypes.addressof(listed), 0)


_Launch = tuple[slice, int, npt.NDArray[Any]]
"""At most :data:`CAPACITY` slots, the blocks that move them, and the kernel's arguments."""


class DevicePackTable:
    """Slots of a fusion buffer on the device, and the addresses of their tensors.

    Write addresses (0: absent) into ``pointers``, an array on the host. :meth:`pack` and
    :meth:`unpack` only enqueue, and copy ``pointers``, which may change once they return. The
    caller keeps the tensors alive until the stream has passed the launch. A tensor may not partly
    overlap a slot. Threads: used by one at a time.

    ``offsets`` and ``nbytes`` are in bytes, within the ``capacity`` of the buffer at address
    ``buffer``. Streams are raw handles; 0 is the default stream. Bad slots raise ``ValueError``.
    """

    def __init__(
        self,
        kernels: CudaKernels,
        buffer: int,
        capacity: int,
        offsets: Integers,
        nbytes: Integers,
        dtype: str,
        stream: int,
        tensor_dtype: str | None = None,
        unpack_stream: int | None = None,
    ) -> None:
        self._kernels = kernels
        self._stream = stream
        self._unpack_stream = stream if unpack_stream is None else unpack_stream
        tensor_dtype = tensor_dtype or dtype
        item, tensor_item = item_bytes(dtype), item_bytes(tensor_dtype)
        self._pack = kernel_name(tensor_dtype, dtype)
        self._unpack = kernel_name(dtype, tensor_dtype)
        starts, sizes = np.asarray(offsets, np.int64), np.asarray(nbytes, np.int64)
        _check_slots(starts, sizes, capacity, item, dtype)
        self.pointers: npt.NDArray[np.int64] = np.zeros(len(sizes), np.int64)
        elements = _tile_elements(int(sizes.sum()) // item, max(item, tensor_item))
        tiles, blocks = _tiles(starts, sizes // item, item, tensor_item, elements)
        # The table stays on the device as long as this object.
        address, self._held = kernels.upload(tiles, stream)
        self._launches = _launches(blocks, address, buffer, item)

    def pack(self) -> None:
        """Enqueue copies into the slots."""
        self._run(self._pack, True, self._stream)

    def unpack(self) -> None:
        """Enqueue copies from the slots to the addresses."""
        self._run(self._unpack, False, self._unpack_stream)

    def _run(self, name: str, packs: bool, stream: int) -> None:
        for slots, num_blocks, arguments in self._launches:
            arguments["packs"] = packs
            arguments["tensors"][: slots.stop - slots.start] = self.pointers[slots]
            address = arguments.__array_interface__["data"][0]
            self._kernels.launch(name, num_blocks, address, stream)


def _check_slots(
    starts: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    capacity: int,
    item: int,
    dtype: str,
) -> None:
    if len(starts) != len(sizes):
        raise ValueError(f"{len(starts)} offsets but {len(sizes)} sizes")
    for i, (start, size) in enumerate(zip(starts.tolist(), sizes.tolist(), strict=True)):
        if start < 0 or size < 0 or start + size > capacity:
            raise ValueError(
                f"slot {i} (offset {start}, {size} bytes) is not inside the buffer of "
                f"{capacity} bytes"
            )
        if size % item:
            raise ValueError(f"slot {i} has {size} bytes: not a whole number of {dtype} elements")


def _tile_elements(total: int, item: int) -> int:
    """Elements per tile: a power of two, so that a tile after an aligned one is aligned."""
    tile_bytes = LARGEST_TILE_BYTES
    while tile_bytes > SMALLEST_TILE_BYTES and total * item < ENOUGH_TILES * tile_bytes:
        tile_bytes //= 2
    return tile_bytes // item


def _tiles(
    starts: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    item: int,
    tensor_item: int,
    elements: int,
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """The tiles of all slots in order, and the number of each slot's tiles."""
    blocks = -(-counts // elements)
    slots = np.repeat(np.arange(len(counts)), blocks)
    first = np.arange(len(slots)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    begin = first * elements
    tiles = np.zeros(len(slots), TILE)
    tiles["in_buffer"] = starts[slots] + begin * item
    tiles["in_tensor"] = begin * tensor_item
    tiles["slot"] = slots % CAPACITY
    tiles["count"] = np.minimum(counts[slots] - begin, elements)
    return tiles, blocks


def _launches(blocks: npt.NDArray[np.int64], tiles: int, buffer: int, item: int) -> list[_Launch]:
    """One launch per :data:`CAPACITY` slots that have any tiles."""
    launches = []
    done = 0
    for first in range(0, len(blocks), CAPACITY):
        slots = slice(first, min(first + CAPACITY, len(blocks)))
        num_blocks = int(blocks[slots].sum())
        if num_blocks:
            arguments = np.zeros((), ARGUMENTS)
            arguments["tiles"] = tiles + done * TILE.itemsize
            arguments["buffer"] = buffer
            arguments["item"] = item
            launches.append((slots, num_blocks, arguments))
        done += num_blocks
    return launches
