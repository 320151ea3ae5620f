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
Arrays = tuple[Sequence[int], Sequence[Array]]


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

    def exchange(
        self,
        window: object,
        comm: int,
        tags: Sequence[int],
        rank: int,
        agents: Sequence[int],
        shares: Sequence[tuple[int, int, int]],
        sources: Arrays | None,
        results: Arrays,
        gathers: bool,
        dtype: str,
        op: str,
        divisor: float,
    ) -> PythonExchange:
        """All chunks at once."""
        at = list(agents).index(rank)
        others = [*agents[at + 1 :], *agents[:at]]
        chunks = []
        for number, tag in enumerate(tags):
            messages: list[Message] = []
            gathered: list[Message] = []
            combined: list[Piece] = []
            bounds = [
                [owner, *(start + (stop - start) * k // len(tags) for k in (number, number + 1))]
                for owner, start, stop in shares
            ]
            for owner, first, last in bounds:
                if sources is None or owner != rank:
                    continue
                result = results[1][0][first - results[0][0] :]
                for piece in between(sources, first, last):
                    contributions = [np.copy(piece) for _ in agents]
                    contributions[at] = piece
                    combined.append((contributions, result[: piece.size]))
                    result = result[piece.size :]
                for agent in others:
                    place = list(agents).index(agent)
                    messages += [(parts[place], agent, True) for parts, _ in combined]
            for owner, first, last in bounds:
                if sources is not None and owner != rank:
                    messages += [(p, owner, False) for p in between(sources, first, last)]
                if not gathers:
                    continue
                pieces = between(results, first, last)
                if owner != rank:
                    gathered += [(p, owner, True) for p in pieces]
                else:
                    gathered += [(p, agent, False) for agent in others for p in pieces]
            if sources is None:
                messages, gathered = gathered, []
            chunks.append(self.begin(comm, tag, messages, dtype, op, divisor, combined, gathered))
        return PythonExchange(chunks)

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


def between(arrays: Arrays, start: int, stop: int) -> list[Array]:
    """The pieces of elements ``start`` to ``stop``."""
    pieces = [
        array[max(start - first, 0) : max(stop - first, 0)]
        for first, array in zip(*arrays, strict=True)
    ]
    return [piece for piece in pieces if piece.size]


class PythonExchange:
    def __init__(self, chunks: Sequence[PythonTransfer]) -> None:
        self._chunks = chunks

    @property
    def done(self) -> bool:
        return all(chunk.done for chunk in self._chunks)

    @property
    def ended(self) -> int:
        return sum(chunk.ended for chunk in self._chunks)


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
        self.ended = 0
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
            self.ended += 1
            ended += 1
        then, self._then = self._then, None
        if then is not None:
            dtype, op, divisor = self._combining
            for contributions, result in self._pieces:
                reduce_shards(contributions, result, dtype, op, divisor)
            self.start(then, self._tag + 1) if then else None
        self.done = not self.pending
        return ended
