"""The reference for the transfers of the C++ extension: the same messages by mpi4py."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from wfbp.comm.backend import combine
from wfbp.comm.mpi.transfers import Message, Reduction, Transfer

if TYPE_CHECKING:
    from mpi4py import MPI


class PythonTransfers:
    """Transfers by mpi4py."""

    def __init__(self) -> None:
        self._under_way: list[_Transfer] = []

    def begin(
        self,
        comm: MPI.Comm,
        tag: int,
        messages: Sequence[Message],
        reduced: Reduction | None = None,
        then: Sequence[Message] = (),
    ) -> Transfer:
        transfer = _Transfer(comm, tag, reduced, then)
        self._under_way.append(transfer)
        transfer.start(messages, tag)
        self._move(transfer)
        return transfer

    def progress(self) -> int:
        return sum(self._move(transfer) for transfer in [*self._under_way])

    def rest(self, nap_s: float, most_s: float) -> int:
        end_s = time.perf_counter() + most_s
        before = len(self._under_way)
        ended = 0
        while True:
            time.sleep(nap_s)
            ended += self.progress()
            if len(self._under_way) < max(1, before) or time.perf_counter() >= end_s:
                return ended

    def _move(self, transfer: _Transfer) -> int:
        ended = transfer.move()
        if transfer.done:
            self._under_way.remove(transfer)
        return ended


class _Transfer:
    def __init__(
        self, comm: MPI.Comm, tag: int, reduced: Reduction | None, then: Sequence[Message]
    ) -> None:
        self._comm = comm
        self._tag = tag
        self._reduced = reduced
        self._then: Sequence[Message] | None = then
        self._pending: list[MPI.Request] = []
        self.done = False

    def start(self, messages: Sequence[Message], tag: int) -> None:
        for data, peer, incoming in messages:
            begin = self._comm.Irecv if incoming else self._comm.Isend
            self._pending.append(begin(data.view(np.uint8), peer, tag))
        self._pending.reverse()  # looked at from the end

    def move(self) -> int:
        """How many messages have ended."""
        ended = 0
        while self._pending:
            if not self._pending[-1].Test():
                return ended
            self._pending.pop()
            ended += 1
        then, self._then = self._then, None
        if then is not None:
            if self._reduced is not None:
                for contributions, result in self._reduced.pieces:
                    combine(contributions, result, self._reduced.dtype, self._reduced.op)
            self.start(then, self._tag + 1)
        self.done = not self._pending
        return ended
