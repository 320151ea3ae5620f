"""The reference for the transfers of the C++ extension: the same messages by mpi4py."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from wfbp.native import any_reached, reduce_shards

Array = npt.NDArray[Any]
Message = tuple[Array, int, bool]
Piece = tuple[Sequence[Array], Array]


class PythonTransfers:
    """Has the methods of ``wfbp.native.Transfers``."""

    def __init__(self) -> None:
        self._under_way: list[PythonTransfer] = []
        self.num_over = 0

    def begin(
        self,
        comm: int,
        tag: int,
        messages: Sequence[Message],
        dtype: str = "uint8",
        op: str = "sum",
        divisor: float = 1.0,
        pieces: Sequence[Piece] = (),
        then: Sequence[Message] = (),
    ) -> PythonTransfer:
        transfer = PythonTransfer(comm, tag, (dtype, op, divisor), pieces, then)
        transfer.start(messages, tag)
        return self._add(transfer)

    def adopt(self, request: int) -> PythonTransfer:
        from mpi4py import MPI

        transfer = PythonTransfer(0, 0, ("uint8", "sum", 1.0), (), ())
        transfer.pending.append(MPI.Request.fromhandle(request))
        return self._add(transfer)

    def progress(self) -> int:
        return sum(self._move(transfer) for transfer in [*self._under_way])

    def rest(self, nap_s: float, most_s: float, watches: Sequence[Any] = ()) -> int:
        end_s = time.perf_counter() + most_s
        before = self.num_over
        ended = 0
        while True:
            time.sleep(nap_s)
            ended += self.progress()
            over = self.num_over > before or not (self._under_way or watches)
            if over or any_reached(watches) or time.perf_counter() >= end_s:
                return ended

    def _add(self, transfer: PythonTransfer) -> PythonTransfer:
        self._under_way.append(transfer)
        self._move(transfer)
        return transfer

    def _move(self, transfer: PythonTransfer) -> int:
        ended = transfer.move()
        if transfer.done:
            self._under_way.remove(transfer)
            self.num_over += 1
        return ended


class PythonTransfer:
    def __init__(
        self,
        comm: int,
        tag: int,
        combining: tuple[str, str, float],
        pieces: Sequence[Piece],
        then: Sequence[Message],
    ) -> None:
        self._comm = comm
        self._tag = tag
        self._combining = combining
        self._pieces = pieces
        self._then: Sequence[Message] | None = then
        self.pending: list[Any] = []
        self.done = False

    def start(self, messages: Sequence[Message], tag: int) -> None:
        from mpi4py import MPI

        comm = MPI.Comm.fromhandle(self._comm)
        for data, peer, incoming in messages:
            begin = comm.Irecv if incoming else comm.Isend
            self.pending.append(begin(data.view(np.uint8), peer, tag))
        self.pending.reverse()  # looked at from the end

    def move(self) -> int:
        """How many messages have ended."""
        ended = 0
        while self.pending:
            if not self.pending[-1].Test():
                return ended
            self.pending.pop()
            ended += 1
        then, self._then = self._then, None
        if then is not None:
            dtype, op, divisor = self._combining
            for contributions, result in self._pieces:
                reduce_shards(contributions, result, dtype, op, divisor)
            self.start(then, self._tag + 1) if then else None
        self.done = not self.pending
        return ended
