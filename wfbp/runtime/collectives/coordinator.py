"""Decides which operations all ranks have come to, and in which order they are carried out.

Rank 0 of a process set is its coordinator. Every rank sends it what its program submits, in the
order of submission; as soon as all ranks have submitted an operation of one name, the coordinator
answers all of them, in one order, which is that of the answers. A reduction so small that its data
came with the requests is carried out here, and the answer has its result. Where every rank's
program waits in an operation and none of these is the same on all, no rank can go on. Pure: no
messages, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from wfbp.core.types import Op
from wfbp.runtime.collectives.arithmetic import reduced
from wfbp.runtime.collectives.request import Kind, Request, Response, Route

_MAX_SHOWN = 4

_EQUAL: dict[Kind, tuple[tuple[str, Callable[[Request], Any]], ...]] = {
    Kind.ALLREDUCE: (
        ("shape", lambda r: r.shape),
        ("op", lambda r: r.op),
        ("prescale_factor", lambda r: r.prescale),
        ("postscale_factor", lambda r: r.postscale),
    ),
    Kind.REDUCESCATTER: (
        ("shape", lambda r: r.shape),
        ("rows of each rank", lambda r: r.splits),
        ("op", lambda r: r.op),
        ("prescale_factor", lambda r: r.prescale),
        ("postscale_factor", lambda r: r.postscale),
    ),
    Kind.BROADCAST: (("shape", lambda r: r.shape), ("root_rank", lambda r: r.root)),
    Kind.ALLGATHER: (
        ("all dimensions but the first", lambda r: r.shape[1:]),
        ("root_rank", lambda r: r.root),  # of an object that one rank sends to all
    ),
    Kind.ALLTOALL: (("all dimensions but the first", lambda r: r.shape[1:]),),
}
"""What must be equal on all ranks, besides the operation, the element type and the device."""

_COMPARED = attrgetter(
    "kind", "called", "part_of", "dtype", "device", "shape", "op", "root", "prescale", "postscale",
    "splits",
)  # fmt: skip
"""All that is compared for any kind: requests that agree in this agree."""

_WITH_JOINED = frozenset({Kind.ALLREDUCE, Kind.BARRIER})
"""Operations in which the ranks that have joined can be stood in for."""


class Coordinator:
    """Collects the requests of all ranks of a process set.

    Args:
        size: number of ranks.

    Example:
        >>> coordinator = Coordinator(2)
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
        self._joined: dict[int, Request] = {}
        self._waiting: dict[int, Request] = {}  # what programs wait in, at most one per rank
        self._ready: list[Response] = []

    def add(self, rank: int, request: Request) -> None:
        """A rank's program has submitted this."""
        if request.kind is Kind.JOIN:
            self._join(rank, request)
            return
        self._pending.setdefault(request.name, {})[rank] = request
        if request.waits:
            self._waiting[rank] = request
        self._check(request.name)

    def take(self) -> list[Response]:
        """What all ranks have come to since the last call, in the order to do it in."""
        ready, self._ready = self._ready, []
        return ready

    @property
    def stands_still(self) -> bool:
        """Whether every rank's program waits in some operation, or has joined.

        Then none of them goes on but by what another thread submits.
        """
        if not self._joined:
            return len(self._waiting) == self._size
        return bool(self._waiting) and len(self._waiting | self._joined) == self._size

    def refuse_waiting(self) -> None:
        """Answer what programs wait in by an error: :attr:`stands_still` has lasted."""
        holders: dict[str, list[int]] = {}
        for rank, request in sorted(self._waiting.items()):
            holders.setdefault(request.label, []).append(rank)
        shown = "; ".join(f"{_ranks(ranks)}: {label}" for label, ranks in holders.items())
        if self._joined:
            shown += f"; {_ranks(sorted(self._joined))}: join()"
        error = (
            f"ranks wait in different operations: {shown}. Every rank must call the same "
            "operations, by the same names or, without names, in the same order"
        )
        for name in {request.name: None for request in self._waiting.values()}:
            requests = self._pending.pop(name)
            first = next(iter(requests.values()))
            self._ready.append(Response(first, error, (tuple(requests),), unmatched=True))
        self._waiting.clear()

    def missing(self, name: str) -> list[int]:
        """The ranks that have not submitted a pending operation."""
        come = self._pending.get(name, {}).keys() | self._joined.keys()
        return [rank for rank in range(self._size) if rank not in come]

    def _join(self, rank: int, request: Request) -> None:
        self._joined[rank] = request
        for name in list(self._pending):
            self._check(name)
        if len(self._joined) == self._size:
            self._joined.clear()
            self._ready.append(Response(request, extents=((rank,),)))

    def _check(self, name: str) -> None:
        requests = self._pending[name]
        absent = [rank for rank in self._joined if rank not in requests]
        if len(requests) + len(absent) == self._size:
            del self._pending[name]
            for rank, request in requests.items():
                if request.waits:
                    self._waiting.pop(rank, None)
            self._ready.append(_answer(dict(sorted(requests.items())), sorted(absent)))


def _answer(requests: Mapping[int, Request], joined: list[int]) -> Response:
    """What ranks are told, who has submitted what."""
    first = next(iter(requests.values()))
    error = _difference(requests)
    if not error and joined and first.kind not in _WITH_JOINED:
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
    if all(request.data is not None for request in requests.values()):
        parts = [request.data for request in requests.values() if request.data is not None]
        result = reduced(parts, len(joined), first.dtype, Op(first.op))
        return Response(first, "", extents, wanted, result=result)
    if joined or not all(request.on_device for request in requests.values()):
        return Response(first, "", extents, wanted)
    # A lane that some rank does not know of yet counts as one that has launched nothing there.
    counts = zip(*(request.available for request in requests.values()), strict=False)
    return Response(first, "", extents, wanted, Route.DEVICE, tuple(map(min, counts)))


def _difference(requests: Mapping[int, Request]) -> str:
    """In what requests of one name differ that must not; empty where they agree."""
    first = next(iter(requests.values()))
    if len(set(map(_COMPARED, requests.values()))) == 1:
        return ""
    general: tuple[tuple[str, Callable[[Request], Any]], ...] = (
        ("the operation", lambda r: r.kind.value),
        ("the name", lambda r: r.called),
        ("the tensor of which this is a part", lambda r: r.part_of),
        ("the element type", lambda r: r.dtype),
        ("the device", lambda r: r.device),
    )
    for what, of in (*general, *_EQUAL.get(first.kind, ())):
        holders: dict[Any, list[int]] = {}
        for rank, request in requests.items():
            holders.setdefault(of(request), []).append(rank)
        if len(holders) > 1:
            values = [f"{_ranks(ranks)}: {value}" for value, ranks in holders.items()]
            more = f"; and {len(values) - _MAX_SHOWN} more" if len(values) > _MAX_SHOWN else ""
            return (
                f"{first.label}: ranks disagree on {what}: "
                f"{'; '.join(values[:_MAX_SHOWN])}{more}. Operations of one name must be equal on "
                "every rank"
            )
    return ""


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MAX_SHOWN]))
    more = f" and {len(ranks) - _MAX_SHOWN} more" if len(ranks) > _MAX_SHOWN else ""
    return f"rank{'s' * (len(ranks) > 1)} {shown}{more}"
