"""An MPI library in Python, as far as transfers by the extension need one.

Messages between the ranks of one process; tests say which end when, in which order they are
reported, and what goes wrong.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

BYTE = 77
TRUNCATED = 15
SUCCESS = 0
UNDEFINED = -32766
IN_STATUS = 18
STATUS_BYTES = 20


class FakeError(Exception):
    """A code that the library returned."""


class FakeMpi:
    """A library whose handles have so many bytes, and its functions' addresses.

    Args:
        handle_bytes: 4 or 8.
        error_at: where in a status the error lies.
    """

    def __init__(self, handle_bytes: int, error_at: int) -> None:
        self.handle_bytes = handle_bytes
        self.error_at = error_at
        self.begun: list[tuple[str, int, int, int, int, int]] = []
        """Of each message: its kind, address, bytes, peer, tag and communicator, by request."""
        self.ended: list[int] = []
        """Requests that the next test reports, in this order; messages that arrive are filled."""
        self.errors: dict[int, int] = {}
        """What a request's status says."""
        self.refuses: set[int] = set()
        """Messages, by their number, that do not begin."""
        self.code: int | None = None
        """What a test returns, whatever it finds."""
        self.found: int | None = None
        """How many it says that it found."""
        self.reports: list[int] | None = None
        """Which, by position."""
        self.num_tests = 0
        handle = ctypes.c_uint32 if handle_bytes == 4 else ctypes.c_uint64
        integer, pointer = ctypes.c_int, ctypes.c_void_p
        point = ctypes.CFUNCTYPE(
            integer, pointer, integer, handle, integer, integer, handle, pointer
        )
        self._handle = handle
        self._functions = {
            "isend": point(lambda *told: self._begin("send", *told)),
            "irecv": point(lambda *told: self._begin("receive", *told)),
            "testsome": ctypes.CFUNCTYPE(integer, integer, pointer, pointer, pointer, pointer)(
                self._test
            ),
        }

    @property
    def told(self) -> dict[str, Any]:
        """What the extension is told."""
        addresses: dict[str, Any] = {
            name: ctypes.cast(function, ctypes.c_void_p).value
            for name, function in self._functions.items()
        }
        return {
            **addresses,
            "handle_bytes": self.handle_bytes,
            "byte": self._wide(BYTE),
            "status_bytes": STATUS_BYTES,
            "error_at": self.error_at,
            "success": SUCCESS,
            "error": FakeError,
        }

    @property
    def comm(self) -> int:
        """A communicator's handle that needs all its bytes."""
        return self._wide(5)

    def end(self, *requests: int) -> None:
        """Let these be reported by the next test; -1 in each byte of what arrives."""
        for request in requests:
            kind, address, nbytes, *_ = self.begun[request]
            if kind == "receive" and nbytes:
                ctypes.memset(address, 0xFF, nbytes)
        self.ended += requests

    def _wide(self, value: int) -> int:
        """A handle whose upper half is not empty either."""
        return value | (0xABCD << (8 * self.handle_bytes - 16))

    def _begin(
        self, kind: str, data: int, nbytes: int, dtype: int, peer: int, tag: int, comm: int, at: int
    ) -> int:
        number = len(self.begun)
        if number in self.refuses:
            return TRUNCATED
        assert dtype == self._wide(BYTE)
        self.begun.append((kind, data or 0, nbytes, peer, tag, comm))
        self._handle.from_address(at).value = self._wide(number)
        return SUCCESS

    def _test(self, count: int, requests: int, found: int, indices: int, statuses: int) -> int:
        self.num_tests += 1
        handles = (self._handle * count).from_address(requests)
        held = [handle & 0xFFFF for handle in handles]
        assert len(set(held)) == count
        reported, self.ended = [r for r in self.ended if r in held], []
        places = (ctypes.c_int * count).from_address(indices)
        failed = False
        for k, request in enumerate(reported):
            places[k] = held.index(request)
            handles[places[k]] = 0
            error = self.errors.get(request, SUCCESS)
            failed |= error != SUCCESS
            at = statuses + k * STATUS_BYTES + self.error_at
            ctypes.memmove(at, struct.pack("=i", error), 4)
        for k, place in enumerate(self.reports or ()):
            places[k] = place
        told = len(reported) if self.found is None else self.found
        ctypes.c_int.from_address(found).value = told
        if self.code is not None:
            return self.code
        return IN_STATUS if failed else SUCCESS
