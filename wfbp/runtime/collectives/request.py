"""What a rank asks for, and what the coordinator answers."""

from __future__ import annotations

import enum
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wfbp.core.types import Op


class Kind(str, enum.Enum):
    """The operations that are matched by name."""

    ALLREDUCE = "allreduce"
    ALLGATHER = "allgather"
    BROADCAST = "broadcast"
    ALLTOALL = "alltoall"
    REDUCESCATTER = "reducescatter"
    BARRIER = "barrier"
    JOIN = "join"


class Adaptive(enum.Enum):
    """Ways to combine that are no reduction element by element."""

    ADASUM = "adasum"

    def __str__(self) -> str:
        """As programs write it."""
        return "wfbp.Adasum"


Reduction = Op | Adaptive
"""How the contributions to an allreduce combine."""


@dataclass(frozen=True, slots=True)
class Request:
    """One operation as one rank submits it.

    Args:
        kind: what is to be done.
        name: by which ranks find each other's requests, unique among those that are pending.
        dtype: element type.
        shape: of this rank's tensor.
        device: where it lies, ``cpu`` or ``gpu``.
        op: value of the :data:`Reduction`, where something is reduced.
        root: whose values everybody gets, in a broadcast.
        prescale: factor before the reduction.
        postscale: factor behind it.
        splits: rows for each rank, in an all-to-all; in a reduce-scatter too, where they are not
            shared out equally.
        differentiable: whether this rank wants to differentiate the result.
        part_of: what this rank has of which this is a part, in words; empty where it is all.
        on_device: whether this rank could carry it out on the device where the tensor lies.
        available: if so, of each lane on that device the collectives that this rank has launched or
            could launch now.
        waits: whether the rank's program does nothing else before this is complete.
        called: what it is in messages, if not its kind and name; compared too.
        data: what this rank contributes, where the operation is so small that the coordinator
            carries it out, as :mod:`~wfbp.runtime.collectives.arithmetic` makes it.
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
    part_of: str = ""
    on_device: bool = False
    available: tuple[int, ...] = ()
    waits: bool = False
    called: str = ""
    data: bytes | None = None

    @property
    def label(self) -> str:
        """For messages; a join needs no name."""
        if self.called:
            return self.called
        return f"{self.kind.value} {self.name!r}" if self.name else f"{self.kind.value}()"

    def row(self) -> tuple[Any, ...]:
        """All fields but the data, in the order of the constructor."""
        return (
            self.kind.value,
            self.name,
            self.dtype,
            self.shape,
            self.device,
            self.op,
            self.root,
            self.prescale,
            self.postscale,
            self.splits,
            self.differentiable,
            self.part_of,
            self.on_device,
            self.available,
            self.waits,
            self.called,
        )

    @classmethod
    def decode(cls, fields: Sequence[Any]) -> Request:
        """The request of these fields, with the data behind them or without."""
        kind, *others = fields
        return cls(Kind(kind), *others)


class Route(str, enum.Enum):
    """How an operation travels, the same on every rank."""

    HOST = "host"
    DEVICE = "device"
    CONNECT = "connect"
    """By the device, once the ranks have connected theirs for that."""


@dataclass(frozen=True, slots=True)
class Response:
    """An operation that all ranks have come to.

    Args:
        request: of the lowest rank that submitted it; all agree with it where there is no error.
        error: what is wrong, on every rank; empty if nothing is.
        extents: of an all-gather the rows of each rank, of an all-to-all the splits of each rank,
            of a join the last rank, of an unmatched operation the ranks that have submitted it.
        differentiable: whether any rank wants to differentiate the result.
        route: how it travels. The coordinator names the device where every rank could; its lane
            decides.
        available: of each lane on the device, how many collectives every rank could have launched
            when it submitted this; not sent.
        unmatched: whether the error is that not all ranks have submitted it, nor ever will.
        result: of all contributions, where the coordinator has carried the operation out.
    """

    request: Request
    error: str = ""
    extents: tuple[tuple[int, ...], ...] = ()
    differentiable: bool = False
    route: Route = Route.HOST
    available: tuple[int, ...] = ()
    unmatched: bool = False
    result: bytes | None = None

    def row(self) -> tuple[Any, ...]:
        """The fields that are sent, in the order of :meth:`decode`."""
        route = self.route.value
        sent = self.extents, self.differentiable, route, self.unmatched, self.result
        return self.request.row(), self.error, *sent

    @classmethod
    def decode(cls, fields: Sequence[Any]) -> Response:
        """The response of these fields."""
        request, error, extents, differentiable, route, unmatched, result = fields
        return cls(
            Request.decode(request),
            error,
            extents,
            differentiable,
            Route(route),
            unmatched=unmatched,
            result=result,
        )


def encode_requests(requests: Sequence[Request]) -> bytes:
    """As they travel, many in one message."""
    # Of plain values pickle takes a tenth of JSON's time, and ranks of a job trust one another.
    return pickle.dumps([(*request.row(), request.data) for request in requests])


def encode_responses(responses: Sequence[Response]) -> bytes:
    """As they travel, many in one message."""
    return pickle.dumps([response.row() for response in responses])


def decode_requests(payload: bytes) -> list[Request]:
    """The inverse of :func:`encode_requests`."""
    return [Request.decode(fields) for fields in pickle.loads(payload)]


def decode_responses(payload: bytes) -> list[Response]:
    """The inverse of :func:`encode_responses`."""
    return [Response.decode(fields) for fields in pickle.loads(payload)]
