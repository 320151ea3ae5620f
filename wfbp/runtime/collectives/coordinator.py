"""Decides which operations all ranks have submitted, and in which order they are carried out.

Rank 0 of a process set is its coordinator. Every rank sends it a request for each operation that
its program submits. As soon as all ranks have submitted an operation of one name, the coordinator
sends all of them a response; the order of the responses is the order of execution. Ranks that
joined are stood in for by zeros. Pure: no messages, no clock.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, NamedTuple

_MAX_SHOWN = 4


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
    """One operation as one rank submits it. A tuple, because pickle is fastest for these.

    Args:
        kind: the operation.
        name: by which ranks find each other's requests, unique among those that are pending.
        dtype: element type.
        shape: of this rank's tensor.
        device: where the tensor lies, ``cpu`` or ``gpu``.
        op: value of the :class:`~wfbp.core.types.Op`, if something is reduced.
        root: whose values everybody gets, by its number in the process set.
        prescale: factor before the reduction.
        postscale: factor after it.
        splits: rows for each rank; in a reduce-scatter only if they are not shared out equally.
        differentiable: whether this rank wants to differentiate the result.
        called: what the program calls it, if not by kind and name; compared too.
        on_device: whether this rank could carry it out on the device where the tensor lies.
        available: if so, the collectives of each lane on that device that this rank has launched
            or could launch now; see ``wfbp.comm.device.operations``.
    """

    kind: Kind
    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    device: str = "cpu"
    op: str = ""
    root: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    splits: tuple[int, ...] = ()
    differentiable: bool = False
    called: str = ""
    on_device: bool = False
    available: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        """For messages; a join needs no name."""
        if self.called:
            return self.called
        return f"{self.kind.value} {self.name!r}" if self.name else f"{self.kind.value}()"


class Response(NamedTuple):
    """An operation that all ranks have submitted.

    Args:
        request: of the lowest rank that submitted it; all agree with it if there is no error.
        error: what is wrong, on every rank; empty if nothing is.
        extents: of an all-gather the rows of each rank, of an all-to-all the splits of each rank,
            of a join the last rank.
        differentiable: whether any rank wants to differentiate the result.
        route: ``host``, ``device`` or ``connect`` (by the device, after the ranks have connected
            theirs for that). The coordinator answers ``device`` if every rank could; its lane
            decides.
        available: of each lane on the device, how many collectives every rank could have launched
            when it submitted this.
    """

    request: Request
    error: str = ""
    extents: tuple[tuple[int, ...], ...] = ()
    differentiable: bool = False
    route: str = "host"
    available: tuple[int, ...] = ()


class Coordinator:
    """Collects the requests of all ranks of a process set.

    Example:
        >>> coordinator = Coordinator(size=2)
        >>> coordinator.add(0, Request(Kind.BARRIER, "here"))
        >>> coordinator.take()
        []
        >>> coordinator.add(1, Request(Kind.BARRIER, "here"))
        >>> [response.request.name for response in coordinator.take()]
        ['here']
    """

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
        """What all ranks have submitted since the last call, in the order to do it in."""
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
    if not error and joined and first.kind not in (Kind.ALLREDUCE, Kind.BARRIER):
        error = (
            f"{first.label}: {_ranks(joined)} called join() and can only be "
            "stood in for in an allreduce or barrier. Call join() on every rank before this"
        )
    if error:
        return Response(first, error)
    extents: tuple[tuple[int, ...], ...] = ()
    if first.kind is Kind.ALLGATHER:
        extents = tuple(request.shape[:1] for request in requests.values())
    elif first.kind is Kind.ALLTOALL:
        extents = tuple(request.splits for request in requests.values())
    wanted = any(request.differentiable for request in requests.values())
    everywhere = not joined and all(request.on_device for request in requests.values())
    route = "device" if everywhere else "host"
    # A lane that some rank does not know yet counts as one that has launched nothing there.
    counts = zip(*(request.available for request in requests.values()), strict=False)
    return Response(first, "", extents, wanted, route, tuple(map(min, counts)))


def _compared(request: Request) -> dict[str, Any]:
    """What must be equal on all ranks, the most general first."""
    by_rows = request.kind in (Kind.ALLGATHER, Kind.ALLTOALL)
    return {
        "the operation": request.kind.value,
        "the call": request.called,
        "the element type": request.dtype,
        "the device": request.device,
        **({"all dimensions but the first": request.shape[1:]} if by_rows else {}),
        **({} if by_rows else {"shape": request.shape}),
        "op": request.op,
        "prescale_factor": request.prescale,
        "postscale_factor": request.postscale,
        "root_rank": request.root,
        "rows of each rank": () if request.kind is Kind.ALLTOALL else request.splits,
    }


def _difference(requests: Mapping[int, Request]) -> str:
    """What must be equal in requests of one name, and is not; empty if they agree."""
    compared = {rank: _compared(request) for rank, request in requests.items()}
    first = next(iter(compared.values()))
    if all(values == first for values in compared.values()):
        return ""
    for what in first:
        holders: dict[Any, list[int]] = {}
        for rank, values in compared.items():
            holders.setdefault(values.get(what), []).append(rank)
        if len(holders) > 1:
            break
    shown = [f"{_ranks(ranks)}: {value}" for value, ranks in holders.items()]
    more = f"; and {len(shown) - _MAX_SHOWN} more" if len(shown) > _MAX_SHOWN else ""
    label = next(iter(requests.values())).label
    return (
        f"{label}: ranks disagree on {what}: {'; '.join(shown[:_MAX_SHOWN])}{more}. Operations of "
        "one name must be equal on every rank; those without a name match by their order"
    )


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MAX_SHOWN]))
    more = f" and {len(ranks) - _MAX_SHOWN} more" if len(ranks) > _MAX_SHOWN else ""
    return f"rank{'s' * (len(ranks) > 1)} {shown}{more}"
