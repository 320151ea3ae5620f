"""NCCL's bindings as CuPy has them, on the software device: every call is recorded, checked, and
carried out when its stream gets there.

What ranks really say to each other goes through a host backend per communicator, which only the
communicator's stream speaks to.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np

from tests.support.software_device import GARBAGE, SoftwareDevice, memory
from wfbp.comm.arrays import typed
from wfbp.comm.backend import Backend
from wfbp.comm.waiting import wait
from wfbp.core.types import Op

_LIMIT_S = 40.0


class Call(NamedTuple):
    """One call of the bindings."""

    name: str
    stream: int
    arguments: dict[str, Any]


class FakeNccl:
    """Stands for ``cupy.cuda.nccl`` on one rank.

    Args:
        device: where buffers lie.
        connect: makes the host backend of a new communicator; every rank calls it as often.
    """

    NCCL_UINT8, NCCL_INT32, NCCL_INT64 = 1, 2, 4
    NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_BFLOAT16 = 6, 7, 8, 9
    NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN, NCCL_AVG = 0, 1, 2, 3, 4
    DTYPES: ClassVar[dict[int, str]] = {
        1: "uint8",
        2: "int32",
        4: "int64",
        6: "float16",
        7: "float32",
        8: "float64",
        9: "bfloat16",
    }
    OPS: ClassVar[dict[int, Op]] = {0: Op.SUM, 1: Op.PRODUCT, 2: Op.MAX, 3: Op.MIN, 4: Op.AVERAGE}

    def __init__(self, device: SoftwareDevice, connect: Callable[[], Backend]) -> None:
        self.device = device
        self.connect = connect
        self.calls: list[Call] = []
        self.error: Exception | None = None
        self.grouped = 0
        self.communicators: list[FakeCommunicator] = []

        def communicator(ndev: int, commId: bytes, rank: int) -> FakeCommunicator:  # noqa: N803
            made = FakeCommunicator(self, ndev, commId, rank)
            self.communicators.append(made)
            return made

        self.NcclCommunicator = communicator

    @staticmethod
    def get_version() -> int:
        return 23203

    def get_unique_id(self) -> bytes:
        number = next(_ids)
        return bytes((37 * k + number) % 256 for k in range(128))

    def groupStart(self) -> None:  # noqa: N802
        self.grouped += 1

    def groupEnd(self) -> None:  # noqa: N802
        assert self.grouped > 0
        self.grouped -= 1


_ids = itertools.count()


class FakeCommunicator:
    """One rank's end of a communicator."""

    def __init__(self, nccl: FakeNccl, size: int, uid: Any, rank: int) -> None:
        assert len(uid) == 128
        assert isinstance(uid, bytes)
        self._nccl = nccl
        self._device = nccl.device
        self._size = size
        self._rank = rank
        self._host = nccl.connect()
        assert (self._host.rank, self._host.size) == (rank, size)
        ids = wait(self._host.all_gather_bytes(repr(uid).encode()), timeout_s=_LIMIT_S)
        assert len(set(ids)) == 1, "ranks joined with different ids"
        self._streams: set[int] = set()
        self.aborted = False
        self.destroyed = False

    def allReduce(  # noqa: N802
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int
    ) -> None:
        self._log("allReduce", stream, send=sendbuf, receive=recvbuf, count=count, op=op)
        assert sendbuf == recvbuf, "in place"
        dtype = self._nccl.DTYPES[datatype]
        data = memory(recvbuf, count * np.dtype(_STORAGE.get(dtype, dtype)).itemsize)

        def act(copy: Any) -> None:
            work = self._host.all_reduce(typed(copy, dtype), dtype, self._nccl.OPS[op])
            wait(work, timeout_s=_LIMIT_S)

        self._device.update(stream, data, act)

    def reduceScatter(  # noqa: N802
        self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int
    ) -> None:
        self._log("reduceScatter", stream, send=sendbuf, receive=recvbuf, count=recvcount, op=op)
        dtype = self._nccl.DTYPES[datatype]
        part = recvcount * np.dtype(_STORAGE.get(dtype, dtype)).itemsize
        assert recvbuf == sendbuf + self._rank * part, "in place: the own block receives"
        data = memory(sendbuf, part * self._size)

        def act(copy: Any) -> None:
            work = self._host.reduce_scatter(copy, [part] * self._size, dtype, self._nccl.OPS[op])
            wait(work, timeout_s=_LIMIT_S)
            mine = copy[self._rank * part : (self._rank + 1) * part].copy()
            copy[:] = GARBAGE  # what the other blocks hold is not defined
            copy[self._rank * part : (self._rank + 1) * part] = mine

        self._device.update(stream, data, act)

    def allGather(  # noqa: N802
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int
    ) -> None:
        self._log("allGather", stream, send=sendbuf, receive=recvbuf, count=count)
        assert datatype == self._nccl.NCCL_UINT8
        assert sendbuf == recvbuf + self._rank * count, "in place: the own block is sent"
        data = memory(recvbuf, count * self._size)
        self._device.update(
            stream,
            data,
            lambda copy: wait(
                self._host.all_gather(copy, [count] * self._size), timeout_s=_LIMIT_S
            ),
        )

    def broadcast(
        self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int
    ) -> None:
        self._log("broadcast", stream, send=sendbuff, receive=recvbuff, count=count, root=root)
        assert sendbuff == recvbuff
        assert datatype == self._nccl.NCCL_UINT8
        data = memory(recvbuff, count)
        self._device.update(
            stream, data, lambda copy: wait(self._host.broadcast(copy, root), timeout_s=_LIMIT_S)
        )

    def check_async_error(self) -> None:
        if self._nccl.error is not None:
            raise self._nccl.error

    def abort(self) -> None:
        self.aborted = True

    def destroy(self) -> None:
        assert not self.destroyed
        self.destroyed = True

    def _log(self, name: str, stream: int, **arguments: Any) -> None:
        assert not self.destroyed
        assert not self.aborted
        with _lock:
            self._nccl.calls.append(Call(name, stream, arguments))
            self._streams.add(stream)


_lock = threading.Lock()
_STORAGE = {"bfloat16": "uint16"}
