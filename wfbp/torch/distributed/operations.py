"""The collectives of a process group: what a rank sends and receives in each of them.

Almost all have one form: a block of bytes for each rank, and one from each, which are copied or
combined. The functions at the end are named as PyTorch's methods, and collected in :data:`FORMS`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import ReduceOp

from wfbp.comm.arrays import Buffer
from wfbp.comm.backend import Work
from wfbp.comm.mpi.exchange import Exchange
from wfbp.torch.distributed import reductions
from wfbp.torch.distributed.work import Operation

Begin = Callable[[Exchange, int], Work[Any]]
"""Starts a collective with its fingerprint."""
Blocks = list[Buffer | None]
"""A block for each rank, or from each; None for no block."""


def sizes(dtype: torch.dtype, numels: Sequence[int]) -> str:
    """Type and numbers of elements, such as ``float32[3, 5]`` for two blocks; one number if all
    are equal."""
    shown = numels[:1] if len(set(numels)) == 1 else numels
    return f"{str(dtype).removeprefix('torch.')}{list(shown)}"


class Collective(Operation):
    """A collective as this rank calls it; one of the functions below says what it does."""

    key: str
    """Equal on all ranks."""
    begin: Begin

    def __init__(self, name: str, rank: int, size: int, options: Any) -> None:
        super().__init__()
        self.name, self.rank, self.size = name, rank, size
        self.root: int | None = getattr(options, "rootRank", None)
        if self.root is not None and not 0 <= self.root < size:
            raise ValueError(f"{name}: rank {self.root} of a group of {size} is the root")
        self.is_root = self.root == rank
        self.op: Any = getattr(options, "reduceOp", None)
        self.nothing: Blocks = [None] * size
        # Elements for each rank, and from each rank, if no other rank knows these numbers.
        self.sent: Sequence[int] = ()
        self.expected: Sequence[int] = ()
        self.since = time.monotonic()
        self.number = self.fingerprint = 0

    def contribution(self, tensor: Tensor) -> Buffer:
        """The bytes of this rank's tensor for a reduction."""
        return self.source(reductions.contribution(tensor, self.op))

    def at_root(self, data: Buffer) -> Blocks:
        """A block for the root alone, or from it."""
        return [data if rank == self.root else None for rank in range(self.size)]

    def each(self, view: Callable[[Tensor], Buffer], given: Sequence[Tensor]) -> Blocks:
        """A tensor for each rank, or from each."""
        if len(given) != self.size:
            raise ValueError(
                f"{self.name}: {len(given)} tensors; expected one per rank, {self.size}"
            )
        return [view(tensor) for tensor in given]

    def split(self, data: Buffer, tensor: Tensor, rows: Sequence[int] = ()) -> Blocks:
        """Equal parts of a tensor's bytes, or so many rows for each rank."""
        counts = rows or [1] * self.size
        total = tensor.shape[0] if rows else self.size
        if len(counts) != self.size or sum(counts) != total or tensor.numel() % (total or 1):
            raise ValueError(
                f"{self.name}: a tensor of shape {list(tensor.shape)} cannot be split among "
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
    ) -> None:
        """Copy blocks from rank to rank. Of sizes that are not known, each rank knows its own."""
        sent, expected = self._numels(outgoing), self._numels(incoming)
        self._check_blocks(outgoing, incoming)
        self.run(
            sizes(self.tensors[0].dtype, expected or sent),
            lambda exchange, mark: exchange.move(outgoing, incoming, mark, in_chunks=is_known),
            results,
        )
        if not is_known:
            self.sent, self.expected = sent, expected
            self.key = f"{self.name}({self.tensors[0].dtype}"
            self.text = f"{self.key}, sends {sent}, expects {expected})"

    def combine(self, outgoing: Blocks, output: Tensor, is_wanted: bool = True) -> None:
        """Combine all ranks' blocks for this rank, if it wants them."""
        incoming = list(self.nothing)
        if is_wanted:
            incoming[self.rank] = self.target(output)
        self._check_blocks(outgoing, incoming)
        how = reductions.reduction(output.dtype, self.op, self.size)
        self.run(
            sizes(output.dtype, self._numels(outgoing)),
            lambda exchange, mark: exchange.move(outgoing, incoming, mark, how),
            [output],
        )

    def run(self, what: str, begin: Begin, results: Sequence[Tensor]) -> None:
        """Let ``begin`` start it; ranks compare ``what``, the root and the op."""
        if self.root is not None:
            what += f", root {self.root}"
        if self.op is not None:
            what += f", {reductions.op_name(self.op)}"
        self.text = self.key = f"{self.name}({what})"
        self.begin, self.results = begin, results

    def _numels(self, blocks: Blocks) -> list[int]:
        """The numbers of elements of the blocks that there are."""
        item = self.tensors[0].dtype.itemsize
        return [block.nbytes // item for block in blocks if block is not None]

    def _check_blocks(self, outgoing: Blocks, incoming: Blocks) -> None:
        """Raise ``ValueError`` unless tensors have one type, and this rank's equal sizes."""
        blocks = [outgoing[self.rank], incoming[self.rank]]
        if self.root is not None:
            blocks = [*outgoing, *incoming]
        lengths = {block.nbytes for block in blocks if block is not None}
        if len(lengths) > 1 or len({tensor.dtype for tensor in self.tensors}) > 1:
            found = "; ".join(sizes(each.dtype, [each.numel()]) for each in self.tensors)
            raise ValueError(
                f"{self.name}: tensors {found} do not fit; expected one element type, and as "
                f"many elements from each of {self.size} ranks as for it"
            )


class Form(NamedTuple):
    """How PyTorch calls a collective.

    Its ``arguments`` are a tensor ("one"), a list of them ("list"), or anything else, and those of
    several collectives may come together. Options follow, as an object or one by one.
    """

    name: str
    options: type[Any]
    arguments: Sequence[str]
    describe: Callable[..., None]

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

    def collectives(
        self, rank: int, size: int, given: Sequence[Any], options: Any
    ) -> list[Collective]:
        """The collectives of this rank."""
        items = [_items(kind, each) for kind, each in zip(self.arguments, given, strict=True)]
        made = []
        for arguments in zip(*items, strict=True) if items else [()]:
            made.append(Collective(self.name, rank, size, options))
            self.describe(made[-1], *arguments)
        return made


_OPTIONS = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}

FORMS: dict[str, Form] = {}
"""All collectives, by the names of PyTorch's methods."""


def _items(kind: str, given: Any) -> list[Any]:
    """One argument of several collectives, an item for each."""
    if kind == "one":
        return [given] if isinstance(given, Tensor) else list(given)
    if kind == "list":
        return list(given) if given and not isinstance(given[0], Tensor) else [given]
    return [given]


def _form(
    name: str, options: type[Any], *arguments: str, also: Sequence[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator of a function that describes a collective; ``also`` are other names of its
    method."""

    def decorate(describe: Callable[..., None]) -> Callable[..., None]:
        for method in (describe.__name__, *also):
            FORMS[method] = Form(name, options, arguments, describe)
        return describe

    return decorate


@_form("all_reduce", c10d.AllreduceOptions, "one", also=["allreduce_coalesced"])
def allreduce(call: Collective, tensor: Tensor) -> None:
    if tensor.layout is torch.sparse_coo:
        _all_reduce_sparse(call, tensor)
        return
    how = reductions.reduction(tensor.dtype, call.op, call.size)
    data = call.target(tensor, reductions.contribution(tensor, call.op))
    call.run(
        sizes(tensor.dtype, [tensor.numel()]),
        lambda exchange, mark: exchange.all_reduce(data, how, mark),
        [tensor],
    )


def _all_reduce_sparse(call: Collective, tensor: Tensor) -> None:
    """Every rank adds the values of all ranks."""
    if call.op != ReduceOp.SUM:
        raise ValueError(f"{reductions.op_name(call.op)} of a sparse tensor; expected SUM")
    payload, deliveries = reductions.pack_sparse(tensor), call.deliveries

    def begin(exchange: Exchange, _: int) -> Work[list[bytes]]:
        gathered = exchange.backend.all_gather_bytes(payload)
        deliveries.append(lambda: reductions.add_sparse(gathered.result, tensor))
        return gathered

    call.run(f"sparse {tensor.dtype}{list(tensor.shape)}", begin, [tensor])


@_form("reduce", c10d.ReduceOptions, "one")
def reduce(call: Collective, tensor: Tensor) -> None:
    call.combine(call.at_root(call.contribution(tensor)), tensor, is_wanted=call.is_root)


@_form("reduce_scatter", c10d.ReduceScatterOptions, "one", "list")
def reduce_scatter(call: Collective, output: Tensor, inputs: Sequence[Tensor]) -> None:
    call.combine(call.each(call.contribution, inputs), output)


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
def reduce_scatter_single(call: Collective, output: Tensor, tensor: Tensor) -> None:
    call.combine(call.split(call.contribution(tensor), tensor), output)


@_form("broadcast", c10d.BroadcastOptions, "one")
def broadcast(call: Collective, tensor: Tensor) -> None:
    if call.is_root:
        call.move([call.source(tensor)] * call.size, call.nothing, [tensor])
    else:
        call.move(call.nothing, call.at_root(call.target(tensor)), [tensor])


@_form("all_gather", c10d.AllgatherOptions, "list", "one")
def allgather(call: Collective, outputs: Sequence[Tensor], tensor: Tensor) -> None:
    call.move([call.source(tensor)] * call.size, call.each(call.target, outputs), outputs)


@_form(
    "all_gather",
    c10d.AllgatherOptions,
    "one",
    "one",
    also=("_allgather_base", "all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
)
def all_gather_single(call: Collective, output: Tensor, tensor: Tensor) -> None:
    incoming = call.split(call.target(output), output)
    call.move([call.source(tensor)] * call.size, incoming, [output])


@_form("gather", c10d.GatherOptions, "list", "one")
def gather(call: Collective, outputs: Sequence[Tensor], tensor: Tensor) -> None:
    incoming = call.each(call.target, outputs) if call.is_root else call.nothing
    call.move(call.at_root(call.source(tensor)), incoming, outputs if call.is_root else [])


@_form("scatter", c10d.ScatterOptions, "one", "list")
def scatter(call: Collective, output: Tensor, inputs: Sequence[Tensor]) -> None:
    outgoing = call.each(call.source, inputs) if call.is_root else call.nothing
    call.move(outgoing, call.at_root(call.target(output)), [output])


@_form("all_to_all", c10d.AllToAllOptions, "list", "list")
def alltoall(call: Collective, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    outgoing, incoming = call.each(call.source, inputs), call.each(call.target, outputs)
    call.move(outgoing, incoming, outputs, is_known=False)


@_form("all_to_all", c10d.AllToAllOptions, "one", "one", "rows", "rows", also=["alltoall_base"])
def all_to_all_single(
    call: Collective, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]
) -> None:
    outgoing = call.split(call.source(tensor), tensor, sent)
    incoming = call.split(call.target(output), output, received)
    call.move(outgoing, incoming, [output], is_known=not (received or sent))


@_form("barrier", c10d.BarrierOptions)
def barrier(call: Collective) -> None:
    nothing = call.nothing

    def begin(exchange: Exchange, mark: int) -> Work[Any]:
        if exchange.checks:
            return exchange.move(nothing, nothing, mark)
        return exchange.backend.all_gather_bytes(b"")

    call.run("", begin, [])
