"""The contestants of ``wfbp.bench comm``: ways to carry out a collective on float32 data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from wfbp.comm.backend import Backend, Buffer
from wfbp.comm.chunking import split
from wfbp.comm.waiting import Waiter, wait
from wfbp.core.types import Op, Operation

if TYPE_CHECKING:
    from mpi4py import MPI

CHUNKS = (1 << 20, 4 << 20)
BACKEND = "wfbp"


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to carry out a collective.

    Args:
        name: for tables.
        operation: what it carries out.
        act: does it on a buffer that every rank has filled with its rank + 1; the equal blocks of
            a reduce-scatter or an all-gather are those of ``split``.
        result: what this rank then has to look at.
    """

    name: str
    operation: Operation
    act: Callable[[Buffer], object]
    result: Callable[[Buffer], Buffer]


def wanted(operation: Operation, numel: int, rank: int, size: int) -> Buffer:
    """What a contestant's result has to be, for ``numel`` elements."""
    ranges = split(numel, size)
    if operation is Operation.ALL_GATHER:
        return np.repeat(np.arange(1.0, size + 1), [b - a for a, b in ranges])
    start, end = ranges[rank]
    length = end - start if operation is Operation.REDUCE_SCATTER else numel
    return np.full(length, float(sum(range(1, size + 1))))


def contestants(comm: MPI.Comm, backend: Backend) -> list[Contestant]:
    """The library's blocking collectives, all-reduce also in chunks, and the backend's."""
    from mpi4py import MPI

    waiter = Waiter.watching(backend)
    rank, size = backend.rank, backend.size
    reduce, scatter, gather = Operation

    def lengths(numel: int) -> list[int]:
        return [b - a for a, b in split(numel, size)]

    def own(data: Buffer) -> Buffer:
        start, end = split(data.size, size)[rank]
        return data[start:end]

    @cache
    def apart(numel: int) -> Buffer:
        """Where the library's reduce-scatter puts its result: its own way in place is to put it
        first, whichever block it is."""
        return np.zeros(lengths(numel)[rank], np.float32)

    def in_chunks(data: Buffer, nbytes: int) -> None:
        for start in range(0, data.size, nbytes // 4):
            comm.Allreduce(MPI.IN_PLACE, data[start : start + nbytes // 4])

    def counts(data: Buffer) -> list[int]:
        return [4 * length for length in lengths(data.size)]

    return [
        Contestant("MPI, whole", reduce, lambda x: comm.Allreduce(MPI.IN_PLACE, x), _all),
        *(
            Contestant(
                f"MPI, {nbytes >> 20} MiB chunks",
                reduce,
                lambda x, nbytes=nbytes: in_chunks(x, nbytes),  # type: ignore[misc]
                _all,
            )
            for nbytes in CHUNKS
        ),
        Contestant(
            BACKEND, reduce, lambda x: wait(backend.all_reduce(x, "float32", Op.SUM), waiter), _all
        ),
        Contestant(
            "MPI, reduce-scatter",
            scatter,
            lambda x: comm.Reduce_scatter(x, apart(x.size), lengths(x.size)),
            lambda x: apart(x.size),
        ),
        Contestant(
            f"{BACKEND}, reduce-scatter",
            scatter,
            lambda x: wait(backend.reduce_scatter(x, counts(x), "float32", Op.SUM), waiter),
            own,
        ),
        Contestant(
            "MPI, all-gather",
            gather,
            lambda x: comm.Allgatherv(MPI.IN_PLACE, [x, lengths(x.size)]),
            _all,
        ),
        Contestant(
            f"{BACKEND}, all-gather",
            gather,
            lambda x: wait(backend.all_gather(x, counts(x)), waiter),
            _all,
        ),
    ]


def _all(data: Buffer) -> Buffer:
    return data
