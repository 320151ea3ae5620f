"""The CUDA kernels without a GPU: compiled as C++, they run on host memory, access by access."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.shared import compiled
from wfbp.cuda.pack import ARGUMENTS, TILE

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_name("cuda_host") / "run_kernels.cc"

ROOM = 200


def build() -> ctypes.CDLL:
    """Compile the kernels; skips the test where there is no C++ compiler."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler was found")
    flags = [
        "-std=c++17",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Wno-unknown-pragmas",
        "-fno-strict-aliasing",
    ]
    command = [compiler, *flags, "-shared", "-fPIC", f"-I{ROOT / 'csrc'}", str(SOURCE)]
    loaded = ctypes.CDLL(str(compiled(command)))
    loaded.run_kernel.restype = ctypes.c_int64
    return loaded


@dataclass(frozen=True, slots=True)
class Launch:
    """What was asked of the driver: a kernel, its blocks, a copy of its arguments, a stream."""

    name: str
    num_blocks: int
    arguments: npt.NDArray[Any]
    stream: int

    @property
    def tensors(self) -> list[int]:
        """Addresses, up to the last that is not 0."""
        addresses: list[int] = self.arguments["tensors"].tolist()
        while addresses and addresses[-1] == 0:
            addresses.pop()
        return addresses


@dataclass(slots=True)
class HostKernels:
    """Runs each launch at once, in host memory, and fails where it touches what it must not.

    Args:
        library: from :func:`build`; without one, launches are only recorded.
        backwards: run the last thread first.
    """

    library: ctypes.CDLL | None = None
    backwards: bool = False
    ranges: list[tuple[int, int]] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    uploads: dict[int, npt.NDArray[Any]] = field(default_factory=dict)
    num_accesses: int = 0

    def upload(self, table: npt.NDArray[Any], stream: int) -> tuple[int, Any]:
        held = table.copy()
        self.uploads[held.ctypes.data] = held
        return held.ctypes.data, held

    def launch(self, name: str, num_blocks: int, arguments: int, stream: int) -> None:
        raw = ctypes.string_at(arguments, ARGUMENTS.itemsize)
        self.launches.append(
            Launch(name, num_blocks, np.frombuffer(raw, ARGUMENTS)[0].copy(), stream)
        )
        if self.library is None:
            return
        bounds = np.array(self.ranges, np.uint64).reshape(-1, 2)
        complaint = ctypes.create_string_buffer(ROOM)
        accesses = self.library.run_kernel(
            f"wfbp_{name}".encode(),
            ctypes.c_uint(num_blocks),
            ctypes.c_int(self.backwards),
            ctypes.c_void_p(arguments),
            ctypes.c_void_p(bounds.ctypes.data),
            ctypes.c_int(len(bounds)),
            complaint,
            ctypes.c_int(ROOM),
        )
        assert accesses >= 0, f"{name}: {complaint.value.decode()}"
        self.num_accesses += accesses

    def allow(self, arrays: Iterable[npt.NDArray[Any]]) -> None:
        """From now on, kernels may touch exactly these arrays."""
        self.ranges = [(a.ctypes.data, a.ctypes.data + a.nbytes) for a in arrays]

    def tiles(self, launch: Launch) -> npt.NDArray[Any]:
        """The tiles that a launch reads."""
        start = int(launch.arguments["tiles"])
        for address, table in self.uploads.items():
            first = (start - address) // TILE.itemsize
            if first >= 0 and first + launch.num_blocks <= len(table):
                return table[first : first + launch.num_blocks]
        raise AssertionError("the launch's table of tiles was never uploaded")
