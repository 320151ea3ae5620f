"""XLA on a software device: JAX computes on the host, and calls the handlers that are for CUDA."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from tests.support.shared import compiled
from tests.support.software_device import HOST, SoftwareDevice, SoftwareEvent, memory
from wfbp.jax import xla_handlers
from wfbp.jax.xla_device import XlaStreams

SOURCE = Path(__file__).with_name("xla_streams") / "streams.cc"
INDEX = 3
"""CUDA's number of the device, as far as the handlers can tell."""


class SoftwareXla(XlaStreams, SoftwareDevice):
    """A software device whose streams are told by XLA; arguments as for a software device."""

    def __init__(self, seed: int = 0, most_s: float = 0.0, consumer: int = HOST) -> None:
        SoftwareDevice.__init__(self, seed, most_s, consumer)
        XlaStreams.__init__(self, INDEX)
        self._lent: dict[int, SoftwareEvent | None] = {}
        self._record = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(self._note)
        self.fails = False
        """Whether recording an event fails from now on."""

    def _note(self, handle: int, stream: int | None) -> int:
        assert self._lent[handle] is None, "recorded twice"
        if self.fails:
            return 400
        self._lent[handle] = SoftwareDevice.record(self, stream or HOST, timed=True)
        return 0

    @property
    def recorder(self) -> int:
        address = ctypes.cast(self._record, ctypes.c_void_p).value
        assert address is not None
        return address

    def lend(self, count: int) -> list[int]:
        handles = [len(self._lent) + 1000 + k for k in range(count)]
        self._lent.update(dict.fromkeys(handles))
        return handles

    def recorded(self, handle: int) -> SoftwareEvent:
        event = self._lent[handle]
        assert event is not None
        return event

    def move(self, to: Sequence[int], source: Sequence[int], nbytes: Sequence[int]) -> None:
        for target, origin, size in zip(to, source, nbytes, strict=True):
            self.copy(memory(target, size), memory(origin, size), self.current_stream())


def stand_in(stream: int = HOST) -> Any:
    """The module of handlers; the CPU calls those for CUDA.

    Args:
        stream: that they are told.
    """
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler is not None, "needs a C++ compiler"
    include = f"-I{jax.ffi.include_dir()}"
    command = [compiler, "-std=c++17", "-shared", "-fPIC", include, str(SOURCE)]
    streams = ctypes.CDLL(str(compiled(command)))
    real: Any = xla_handlers._built() or xla_handlers._compiled()
    for_cuda = real.handlers()["CUDA"]
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.argtypes, pointer.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
    addresses = [pointer(for_cuda[name], None) for name in ("wfbp_announce", "wfbp_wait")]
    streams.use(*map(ctypes.c_void_p, addresses), ctypes.c_void_p(stream), INDEX)
    capsules = {
        "wfbp_announce": jax.ffi.pycapsule(streams.announce),
        "wfbp_wait": jax.ffi.pycapsule(streams.wait),
    }
    return _Module(real, {"cpu": capsules}, streams)


class _Module:
    """The real module, with other handlers."""

    def __init__(self, real: Any, handlers: dict[str, Any], library: ctypes.CDLL) -> None:
        self._real = real
        self._handlers = handlers
        self._library = library  # kept loaded

    def handlers(self) -> dict[str, Any]:
        return self._handlers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)
