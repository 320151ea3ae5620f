"""The collectives of a process group: what a rank sends and receives in each of them.

Almost all have one form: a block of bytes for each rank, and one from each, which are copied or
combined. The functions at the end are named as PyTorch's methods, and collected in :data:`FORMS`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import ReduceOp

from wfbp.comm.arrays import Buffer
from wfbp.comm.backend import Work
from wfbp.comm.mpi.exchange import Exchange, Reduction
from wfbp.torch.distributed import tensors
from wfbp.torch.distributed.tensors import Memory, sizes
from wfbp.torch.distributed.work import Operation

Begin = Callable[[Exchange, int], Work[Any]]


@dataclass(eq=False, kw_only=True)
class Collective(Operation):
    """A collective of this rank; ``begin`` starts it with its fingerprint."""

    begin: Begin
    key: str  # equal on all ranks
    sent: Sequence[int] = ()  # elements for each rank, and from each rank, if no other rank
    expected: Sequence[int] = ()  # knows these numbers
    since: float = field(default_factory=time.monotonic)
    number: int = 0
    fingerprint: int = 0


Blocks = list[Buffer | None]
"""A block for each rank, or from each; None for no block."""


class Call:
    """A call of a collective on this rank; makes its operation."""

    def __init__(self, name: str, rank: int, size: int, options: Any) -> None:
        self.rank, self.size = rank, size
        self.root: int | None = getattr(options, "rootRank", None)
        if self.root is not None and not 0 <= self.root < size:
            raise ValueError(f"{name}: rank {self.root} of a group of {size} is the root")
        self.is_root = self.root == rank
        self.op: Any = getattr(options, "reduceOp", None)
        self.nothing: Blocks = [None] * size
        self._name = name
        self.memory = Memory()
        self._tensors: list[Tensor] = []

    def source(self, tensor: Tensor) -> Buffer:
        """The bytes that this rank contributes."""
        self._tensors.append(tensor)
        return self.memory.source(tensors.contribution(tensor, self.op))

    def target(self, tensor: Tensor) -> Buffer:
        """The bytes that this rank receives."""
        self._tensors.append(tensor)
        return self.memory.target(tensor)

    def same(self, tensor: Tensor) -> Blocks:
        """One tensor for every rank."""
        return [self.source(tensor)] * self.size

    def at_root(self, data: Buffer) -> Blocks:
        """A block for the root alone, or from it."""
        return [data if rank == self.root else None for rank in range(self.size)]

    def each(self, view: Callable[[Tensor], Buffer], given: Sequence[Tensor]) -> Blocks:
        """A tensor for each rank, or from each."""
        if len(given) != self.size:
            raise ValueError(
                f"{self._name}: {len(given)} tensors; expected one per rank, {self.size}"
            )
        return [view(tensor) for tensor in given]

    def split(self, data: Buffer, tensor: Tensor, rows: Sequence[int] = ()) -> Blocks:
        """Equal parts of a tensor's bytes, or so many rows for each rank."""
        counts = rows or [1] * self.size
        total = tensor.shape[0] if rows else self.size
        if len(counts) != self.size or sum(counts) != total or tensor.numel() % (total or 1):
            raise ValueError(
                f"{self._name}: a tensor of shape {list(tensor.shape)} cannot be split among "
                f"{self.size} ranks, by split sizes {list(rows) or 'that are equal'}"
            )
        step = data.nbytes // (total or 1)
        return [
            data[(end - count) * step : end * step]
            for end, count in zip(accumulate(counts), counts, strict=True)
        ]

    def move(
        self,
        outgoing: Blocks,
        incoming: Blocks,
        results: Sequence[Tensor],
        is_known: bool = True,
    ) -> Collective:
        """Copy blocks from rank to rank. Of sizes that are not known, each rank knows its own."""
        self._check(outgoing, incoming)
        sent, expected = self._numels(outgoing), self._numels(incoming)
        operation = self.run(
            self._described(expected or sent),
            lambda exchange, mark: exchange.move(outgoing, incoming, mark, in_chunks=is_known),
            results,
        )
        if not is_known:
            operation.sent, operation.expected = sent, expected
            operation.key = f"{self._name}({self._tensors[0].dtype}"
            operation.text = f"{operation.key}, sends {sent}, expects {expected})"
        return operation

    def combine(self, outgoing: Blocks, output: Tensor, is_wanted: bool = True) -> Collective:
        """Combine all ranks' blocks for this rank, if it wants them."""
        incoming = list(self.nothing)
        if is_wanted:
            incoming[self.rank] = self.target(output)
        self._check(outgoing, incoming)
        how, result = self.reduction(output), incoming[self.rank]
        return self.run(
            self._described(self._numels(outgoing)),
            lambda exchange, mark: exchange.reduce_scatter(outgoing, result, how, mark),
            [output],
        )

    def run(self, what: str, begin: Begin, results: Sequence[Tensor]) -> Collective:
        """The operation that ``begin`` starts; ranks compare ``what``, the root and the op."""
        if self.root is not None:
            what += f", root {self.root}"
        if self.op is not None:
            what += f", {tensors.op_name(self.op)}"
        text = f"{self._name}({what})"
        return Collective(
            text=text, key=text, begin=begin, finish=self.memory.deliver, results=results
        )

    def reduction(self, tensor: Tensor) -> Reduction:
        """How elements are combined."""
        return tensors.reduction(tensor.dtype, self.op, self.size)

    def _numels(self, blocks: Blocks) -> list[int]:
        """The numbers of elements of the blocks that there are."""
        item = self._tensors[0].dtype.itemsize
        return [block.nbytes // item for block in blocks if block is not None]

    def _described(self, numels: Sequence[int]) -> str:
        dtype = str(self._tensors[0].dtype).removeprefix("torch.")
        return f"{dtype}{list(numels[:1] if len(set(numels)) == 1 else numels)}"

    def _check(self, outgoing: Blocks, incoming: Blocks) -> None:
        """Raise ``ValueError`` unless tensors have one type, and this rank's equal sizes."""
        blocks = [outgoing[self.rank], incoming[self.rank]]
        if self.root is not None:
            blocks = [*outgoing, *incoming]
        lengths = {block.nbytes for block in blocks if block is not None}
        if len(lengths) > 1 or len({tensor.dtype for tensor in self._tensors}) > 1:
            found = "; ".join(map(sizes, self._tensors))
            raise ValueError(
                f"{self._name}: tensors {found} do not fit; expected one element type, and as "
                f"many elements from each of {self.size} ranks as for it"
            )


class Form(NamedTuple):
    """How PyTorch calls a collective.

    Its ``arguments`` are a tensor ("one"), a list of them ("list"), or anything else, and those of
    several operations may come together. Options follow, as an object or one by one.
    """

    name: str
    options: type[Any]
    arguments: Sequence[str]
    make: Callable[..., Collective]

    def parse(self, given: Sequence[Any], named: dict[str, Any]) -> Any:
        """The options that a program has given."""
        for options in (*given, *named.values()):
            if hasattr(options, "asyncOp"):
                return options
        options = self.options()
        names = [name for name in _OPTIONS if hasattr(options, _OPTIONS[name])]
        for name, value in [*zip(names, given, strict=False), *named.items()]:
            if value is not None:
                setattr(options, _OPTIONS[name], value)
        return options

    def operations(
        self, rank: int, size: int, given: Sequence[Any], options: Any
    ) -> list[Collective]:
        """What this rank does."""
        items = [_items(kind, each) for kind, each in zip(self.arguments, given, strict=True)]
        return [
            self.make(Call(self.name, rank, size, options), *arguments)
            for arguments in (zip(*items, strict=True) if items else [()])
        ]


_OPTIONS = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}

FORMS: dict[str, Form] = {}
"""All collectives, by the names of PyTorch's methods."""


def _items(kind: str, given: Any) -> list[Any]:
    """One argument of several operations, an item for each."""
    if kind == "one":
        return [given] if isinstance(given, Tensor) else list(given)
    if kind == "list":
        return list(given) if given and not isinstance(given[0], Tensor) else [given]
    return [given]


def _form(
    name: str, options: type[Any], *arguments: str, also: Sequence[str] = ()
) -> Callable[[Callable[..., Collective]], Callable[..., Collective]]:
    """Decorator of a function that makes the operation; ``also`` are other names of its method."""

    def decorate(make: Callable[..., Collective]) -> Callable[..., Collective]:
        for method in (make.__name__, *also):
            FORMS[method] = Form(name, options, arguments, make)
        return make

    return decorate


@_form("all_reduce", c10d.AllreduceOptions, "one", also=["allreduce_coalesced"])
def allreduce(call: Call, tensor: Tensor) -> Collective:
    if tensor.layout is torch.sparse_coo:
        return _all_reduce_sparse(call, tensor)
    how = call.reduction(tensor)
    data = call.memory.target(tensor, tensors.contribution(tensor, call.op))
    return call.run(
        sizes(tensor), lambda exchange, mark: exchange.all_reduce(data, how, mark), [tensor]
    )


def _all_reduce_sparse(call: Call, tensor: Tensor) -> Collective:
    """Every rank adds the values of all ranks."""
    if call.op != ReduceOp.SUM:
        raise ValueError(f"{tensors.op_name(call.op)} of a sparse tensor; expected SUM")
    payload = tensors.pack_sparse(tensor)
    gathered: list[Work[list[bytes]]] = []

    def begin(exchange: Exchange, _: int) -> Work[list[bytes]]:
        gathered.append(exchange.backend.all_gather_bytes(payload))
        return gathered[0]

    operation = call.run(f"sparse {tensor.dtype}{list(tensor.shape)}", begin, [tensor])
    operation.finish = lambda: tensors.add_sparse(gathered[0].result, tensor)
    return operation


@_form("reduce", c10d.ReduceOptions, "one")
def reduce(call: Call, tensor: Tensor) -> Collective:
    return call.combine(call.at_root(call.source(tensor)), tensor, is_wanted=call.is_root)


@_form("reduce_scatter", c10d.ReduceScatterOptions, "one", "list")
def reduce_scatter(call: Call, output: Tensor, inputs: Sequence[Tensor]) -> Collective:
    return call.combine(call.each(call.source, inputs), output)


@_form(
    "reduce_scatter",
    c10d.ReduceScatterOptions,
    "one",
    "one",
    also=(
        "_reduce_scatter_base",
        "reduce_scatter_single_coalesced",
        "reduce_scatter_tensor_coalesced",
    ),
)
def reduce_scatter_single(call: Call, output: Tensor, tensor: Tensor) -> Collective:
    return call.combine(call.split(call.source(tensor), tensor), output)


@_form("broadcast", c10d.BroadcastOptions, "one")
def broadcast(call: Call, tensor: Tensor) -> Collective:
    if call.is_root:
        return call.move(call.same(tensor), call.nothing, [tensor])
    return call.move(call.nothing, call.at_root(call.target(tensor)), [tensor])


@_form("all_gather", c10d.AllgatherOptions, "list", "one")
def allgather(call: Call, outputs: Sequence[Tensor], tensor: Tensor) -> Collective:
    return call.move(call.same(tensor), call.each(call.target, outputs), outputs)


@_form(
    "all_gather",
    c10d.AllgatherOptions,
    "one",
    "one",
    also=("_allgather_base", "all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
)
def all_gather_single(call: Call, output: Tensor, tensor: Tensor) -> Collective:
    return call.move(call.same(tensor), call.split(call.target(output), output), [output])


@_form("gather", c10d.GatherOptions, "list", "one")
def gather(call: Call, outputs: Sequence[Tensor], tensor: Tensor) -> Collective:
    outgoing = call.at_root(call.source(tensor))
    if call.is_root:
        return call.move(outgoing, call.each(call.target, outputs), outputs)
    return call.move(outgoing, call.nothing, [])


@_form("scatter", c10d.ScatterOptions, "one", "list")
def scatter(call: Call, output: Tensor, inputs: Sequence[Tensor]) -> Collective:
    outgoing = call.each(call.source, inputs) if call.is_root else call.nothing
    return call.move(outgoing, call.at_root(call.target(output)), [output])


@_form("all_to_all", c10d.AllToAllOptions, "list", "list")
def alltoall(call: Call, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Collective:
    outgoing, incoming = call.each(call.source, inputs), call.each(call.target, outputs)
    return call.move(outgoing, incoming, outputs, is_known=False)


@_form("all_to_all", c10d.AllToAllOptions, "one", "one", "rows", "rows", also=["alltoall_base"])
def all_to_all_single(
    call: Call, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]
) -> Collective:
    outgoing = call.split(call.source(tensor), tensor, sent)
    incoming = call.split(call.target(output), output, received)
    return call.move(outgoing, incoming, [output], is_known=not (received or sent))


@_form("barrier", c10d.BarrierOptions)
def barrier(call: Call) -> Collective:
    def begin(exchange: Exchange, mark: int) -> Work[Any]:
        if exchange.checks:
            return exchange.move(call.nothing, call.nothing, mark)
        return exchange.backend.all_gather_bytes(b"")

    return call.run("", begin, [])
