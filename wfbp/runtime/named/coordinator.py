"""Decides which operations all ranks have submitted, and the order of their execution.

Every rank sends rank 0 of the process set a request per operation. Once all ranks have submitted an
operation, rank 0 sends all of them a response; the order of responses is the order of execution.
Ranks that joined contribute zeros. Pure: no messages, no clock.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, NamedTuple

from wfbp.core.ranks import Sections, differences, name_ranks
from wfbp.core.types import Op

_CHANGED_BY_ZEROS = {Op.MIN.value, Op.MAX.value, Op.PRODUCT.value}
"""Reductions that zeros of absent ranks would change."""


class Kind(str, enum.Enum):
    """The operations that are matched by name."""

    ALLREDUCE = "allreduce"
    ALLGATHER = "allgather"
    BROADCAST = "broadcast"
    ALLTOALL = "alltoall"
    REDUCESCATTER = "reducescatter"
    BARRIER = "barrier"
    JOIN = "join"


class Request(NamedTuple):
    """One operation as one rank submits it. A tuple, because these are encoded fast."""

    kind: Kind
    name: str  # unique among those that are pending
    dtype: str = ""
    shape: tuple[int, ...] = ()  # of this rank's tensor
    op: str = ""  # value of the Op, if something is reduced
    root: int = -1  # the root's number in the process set
    prescale: float = 1.0
    postscale: float = 1.0
    splits: tuple[int, ...] = ()  # rows for each rank; of a reduce-scatter only if unequal
    differentiable: bool = False  # whether this rank wants to differentiate the result
    called: str = ""  # what the program calls it, if not by kind and name; compared too

    @classmethod
    def read(cls, told: list[Any]) -> Request:
        """A request that has travelled as JSON."""
        kind, name, dtype, shape, op, root, pre, post, splits, *rest = told
        shape, splits = tuple(shape), tuple(splits)
        return cls(Kind(kind), name, dtype, shape, op, root, pre, post, splits, *rest)

    @property
    def label(self) -> str:
        """For messages; a join needs no name."""
        if self.called:
            return self.called
        return f"{self.kind.value} {self.name!r}" if self.name else f"{self.kind.value}()"


class Response(NamedTuple):
    """An operation that all ranks have submitted; its request is that of the lowest rank."""

    request: Request
    error: str = ""  # on every rank
    extents: tuple[tuple[int, ...], ...] = ()
    """Each rank's rows (all-gather) or splits (all-to-all); the last rank (join)."""
    differentiable: bool = False  # whether any rank wants to differentiate the result

    @classmethod
    def read(cls, told: list[Any]) -> Response:
        """A response that has travelled as JSON."""
        request, error, extents, differentiable = told
        return cls(Request.read(request), error, tuple(map(tuple, extents)), differentiable)


class Coordinator:
    """Collects the requests of all ranks of a process set."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._pending: dict[str, dict[int, Request]] = {}
        self._joined: set[int] = set()
        self._ready: list[Response] = []

    def add(self, rank: int, request: Request) -> None:
        """A rank's program has submitted this."""
        if request.kind is not Kind.JOIN:
            self._pending.setdefault(request.name, {})[rank] = request
            self._check(request.name)
            return
        self._joined.add(rank)
        for name in list(self._pending):
            self._check(name)
        if len(self._joined) == self._size:
            self._joined.clear()
            self._ready.append(Response(request, extents=((rank,),)))

    def take(self) -> list[Response]:
        """Operations that all ranks have submitted since the last call, in order of execution."""
        ready, self._ready = self._ready, []
        return ready

    def _check(self, name: str) -> None:
        requests = self._pending[name]
        absent = sorted(self._joined - requests.keys())
        if len(requests) + len(absent) == self._size:
            del self._pending[name]
            self._ready.append(_respond(dict(sorted(requests.items())), absent))


def _respond(requests: Mapping[int, Request], joined: list[int]) -> Response:
    first = next(iter(requests.values()))
    error = _difference(requests)
    # Ranks that joined contribute zeros.
    replaceable = first.kind is Kind.BARRIER or (
        first.kind is Kind.ALLREDUCE and first.op not in _CHANGED_BY_ZEROS
    )
    if not error and joined and not replaceable:
        error = (
            f"{first.label}: {name_ranks(joined)} called join(), which replaces a rank only in "
            "sums, averages and barriers. Call join() on every rank before this"
        )
    if error:
        return Response(first, error)
    extents: tuple[tuple[int, ...], ...] = ()
    if first.kind is Kind.ALLGATHER:
        extents = tuple(request.shape[:1] for request in requests.values())
    elif first.kind is Kind.ALLTOALL:
        extents = tuple(request.splits for request in requests.values())
    wanted = any(request.differentiable for request in requests.values())
    return Response(first, "", extents, wanted)


def _compared(request: Request) -> Sections:
    """The values that must be equal on all ranks, the most general first."""
    by_rows = request.kind in (Kind.ALLGATHER, Kind.ALLTOALL)
    values: dict[str, object] = {
        "the call": request.called,
        "the operation": request.kind.value,
        "the element type": request.dtype,
        **({"all dimensions but the first": request.shape[1:]} if by_rows else {}),
        **({} if by_rows else {"shape": request.shape}),
        "op": request.op,
        "prescale_factor": request.prescale,
        "postscale_factor": request.postscale,
        "root_rank": request.root,
        "rows of each rank": () if request.kind is Kind.ALLTOALL else request.splits,
    }
    return [{name: value} for name, value in values.items()]


def _difference(requests: Mapping[int, Request]) -> str:
    """How requests of one name disagree, for messages; empty if they agree."""
    first = next(iter(requests.values()))
    if all(request == first for request in requests.values()):  # the usual case, in little time
        return ""
    what = differences({rank: _compared(request) for rank, request in requests.items()})
    return what and (
        f"{first.label}: ranks disagree on {what}. Operations of one name must be equal on every "
        "rank; those without a name match by their order"
    )
