"""The collectives of a process group: what a rank sends and receives in each of them.

Almost all have one form: a block of bytes for each rank, and one from each, which are copied or
combined. Each function below describes one collective; :data:`METHODS` has PyTorch's names.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import ReduceOp

from wfbp.comm.arrays import Buffer
from wfbp.comm.backend import Work
from wfbp.comm.mpi.exchange import Exchange, Reduction
from wfbp.runtime.progress.thread import CommunicationThread
from wfbp.torch.distributed import reductions
from wfbp.torch.distributed.work import GroupWork

Blocks = list[Buffer | None]
"""A block for each rank, or from each; None for no block."""


def sizes(dtype: torch.dtype, numels: Sequence[int]) -> str:
    """Type and numbers of elements, such as ``float32[3, 5]`` for two blocks; one number if all
    are equal."""
    shown = numels[:1] if len(set(numels)) == 1 else numels
    return f"{str(dtype).removeprefix('torch.')}{list(shown)}"


class GroupCollective(GroupWork):
    """A collective as this rank calls it; one of the functions below says what it does."""

    key: str
    """Equal on all ranks."""
    begin: Callable[[int], Work[Any]]
    """Starts it with its fingerprint."""

    def __init__(
        self,
        name: str,
        exchange: Exchange,
        options: Any,
        thread: CommunicationThread,
        timeout_s: float,
    ) -> None:
        super().__init__(thread, timeout_s)
        self.name, self.exchange = name, exchange
        self.rank, self.size = exchange.rank, exchange.size
        self.root: int | None = getattr(options, "rootRank", None)
        if self.root is not None and not 0 <= self.root < self.size:
            raise ValueError(f"{name}: rank {self.root} of a group of {self.size} is the root")
        self.is_root = self.root == self.rank
        self.op = getattr(options, "reduceOp", None)
        self.nothing: Blocks = [None] * self.size
        # Elements for each rank, and from each rank, if no other rank knows these numbers.
        self.sent: Sequence[int] = ()
        self.expected: Sequence[int] = ()
        self.number = self.fingerprint = 0

    def only(self, rank: int | None, data: Buffer) -> Blocks:
        """A block for one rank alone, or from it."""
        return [data if rank == each else None for each in range(self.size)]

    def blocks(
        self,
        view: Callable[[Tensor], Buffer],
        given: Tensor | Sequence[Tensor],
        rows: Sequence[int] = (),
    ) -> Blocks:
        """A tensor of a list for each rank, or from each; or equal parts of one tensor, or so many
        of its rows."""
        if not isinstance(given, Tensor):
            if len(given) != self.size:
                raise ValueError(
                    f"{self.name}: {len(given)} tensors; expected one per rank, {self.size}"
                )
            return [view(tensor) for tensor in given]
        data, counts = view(given), rows or [1] * self.size
        total = given.shape[0] if rows else self.size
        if len(counts) != self.size or sum(counts) != total or given.numel() % (total or 1):
            raise ValueError(
                f"{self.name}: a tensor of shape {list(given.shape)} cannot be split among "
                f"{self.size} ranks, by split sizes {list(rows) or 'that are equal'}"
            )
        step = data.nbytes // (total or 1)
        return [
            data[(end - count) * step : end * step]
            for end, count in zip(accumulate(counts), counts, strict=True)
        ]

    def move(self, outgoing: Blocks, incoming: Blocks, is_known: bool = True) -> None:
        """Copy blocks from rank to rank, or combine all blocks for a rank into its own incoming
        one. Of sizes that are not known, each rank knows its own."""
        exchange, dtype = self.exchange, self.tensors[0].dtype
        blocks = [outgoing[self.rank], incoming[self.rank]]
        if self.root is not None:
            blocks = [*outgoing, *incoming]
        lengths = {block.nbytes for block in blocks if block is not None}
        if len(lengths) > 1 or any(tensor.dtype != dtype for tensor in self.tensors):
            found = "; ".join(sizes(each.dtype, [each.numel()]) for each in self.tensors)
            raise ValueError(
                f"{self.name}: tensors {found} do not fit; expected one element type, and as "
                f"many elements from each of {self.size} ranks as for it"
            )
        how = None if self.op is None else reductions.reduction(dtype, self.op, self.size)
        sent, expected = (
            [block.nbytes // dtype.itemsize for block in each if block is not None]
            for each in (outgoing, incoming)
        )
        self.run(
            sizes(dtype, sent if how is not None or not expected else expected),
            lambda mark: exchange.move(outgoing, incoming, mark, how, in_chunks=is_known),
        )
        if not is_known:
            self.sent, self.expected = sent, expected
            self.key = f"{self.name}({dtype}"
            self.text = f"{self.key}, sends {sent}, expects {expected})"

    def run(self, what: str, begin: Callable[[int], Work[Any]]) -> None:
        """Let ``begin`` start it; ranks compare ``what``, the root and the op."""
        if self.root is not None:
            what += f", root {self.root}"
        if self.op is not None:
            what += f", {reductions.op_name(self.op)}"
        self.text = self.key = f"{self.name}({what})"
        self.begin = begin


def all_reduce(call: GroupCollective, tensor: Tensor) -> None:
    if tensor.layout is torch.sparse_coo:
        _all_reduce_sparse(call, tensor)
        return
    exchange = call.exchange
    how = reductions.reduction(tensor.dtype, call.op, call.size)
    data = call.target(tensor, reductions.contribution(tensor, call.op))
    call.run(
        sizes(tensor.dtype, [tensor.numel()]),
        lambda mark: exchange.all_reduce(data, how, mark),
    )


def _all_reduce_sparse(call: GroupCollective, tensor: Tensor) -> None:
    """Every rank adds the values of all ranks."""
    if call.op != ReduceOp.SUM:
        raise ValueError(f"{reductions.op_name(call.op)} of a sparse tensor; expected SUM")
    backend, deliveries, file = call.exchange.backend, call.deliveries, io.BytesIO()
    torch.save(tensor.detach().coalesce(), file)

    def begin(_: int) -> Work[list[bytes]]:
        gathered = backend.all_gather_bytes(file.getvalue())
        deliveries.append(lambda: reductions.add_sparse(gathered.result, tensor))
        return gathered

    call.run(f"sparse {tensor.dtype}{list(tensor.shape)}", begin)


def reduce(call: GroupCollective, tensor: Tensor) -> None:
    outgoing = call.only(call.root, call.source(tensor))
    call.move(outgoing, call.only(call.root, call.target(tensor)) if call.is_root else call.nothing)


def reduce_scatter(
    call: GroupCollective, output: Tensor, inputs: Tensor | Sequence[Tensor]
) -> None:
    call.move(call.blocks(call.source, inputs), call.only(call.rank, call.target(output)))


def broadcast(call: GroupCollective, tensor: Tensor) -> None:
    if call.is_root:
        call.move([call.source(tensor)] * call.size, call.nothing)
    else:
        call.move(call.nothing, call.only(call.root, call.target(tensor)))


def all_gather(call: GroupCollective, outputs: Tensor | Sequence[Tensor], tensor: Tensor) -> None:
    call.move([call.source(tensor)] * call.size, call.blocks(call.target, outputs))


def gather(call: GroupCollective, outputs: Sequence[Tensor], tensor: Tensor) -> None:
    incoming = call.blocks(call.target, outputs) if call.is_root else call.nothing
    call.move(call.only(call.root, call.source(tensor)), incoming)


def scatter(call: GroupCollective, output: Tensor, inputs: Sequence[Tensor]) -> None:
    outgoing = call.blocks(call.source, inputs) if call.is_root else call.nothing
    call.move(outgoing, call.only(call.root, call.target(output)))


def all_to_all(
    call: GroupCollective,
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    received: Sequence[int] = (),
    sent: Sequence[int] = (),
) -> None:
    outgoing = call.blocks(call.source, inputs, sent)
    incoming = call.blocks(call.target, outputs, received)
    is_known = isinstance(outputs, Tensor) and not (received or sent)
    call.move(outgoing, incoming, is_known)


def barrier(call: GroupCollective) -> None:
    exchange, data = call.exchange, np.zeros(1, np.uint8)
    call.run("", lambda mark: exchange.all_reduce(data, Reduction(1, "uint8"), mark))


_ONE, _LIST = "a tensor", "a list of tensors"

_COLLECTIVES: list[tuple[Callable[..., None], type[Any], list[str], str]] = [
    # What describes a collective, the options, the arguments, and the names of PyTorch's methods.
    (all_reduce, c10d.AllreduceOptions, [_ONE], "allreduce allreduce_coalesced"),
    (reduce, c10d.ReduceOptions, [_ONE], "reduce"),
    (reduce_scatter, c10d.ReduceScatterOptions, [_ONE, _LIST], "reduce_scatter"),
    (
        reduce_scatter,
        c10d.ReduceScatterOptions,
        [_ONE, _ONE],
        "reduce_scatter_single reduce_scatter_single_coalesced _reduce_scatter_base",
    ),
    (broadcast, c10d.BroadcastOptions, [_ONE], "broadcast"),
    (all_gather, c10d.AllgatherOptions, [_LIST, _ONE], "allgather"),
    (
        all_gather,
        c10d.AllgatherOptions,
        [_ONE, _ONE],
        "all_gather_single all_gather_single_coalesced _allgather_base",
    ),
    (gather, c10d.GatherOptions, [_LIST, _ONE], "gather"),
    (scatter, c10d.ScatterOptions, [_ONE, _LIST], "scatter"),
    (all_to_all, c10d.AllToAllOptions, [_LIST, _LIST], "alltoall"),
    (
        all_to_all,
        c10d.AllToAllOptions,
        [_ONE, _ONE, "numbers of rows", "numbers of rows"],
        "all_to_all_single alltoall_base",
    ),
    (barrier, c10d.BarrierOptions, [], "barrier"),
]

METHODS = {name: row[:3] for row in _COLLECTIVES for name in row[3].split()}
"""What describes each collective method of PyTorch, its options, and its arguments."""

_OPTIONS = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}


def parse_options(kind: type[Any], given: Sequence[Any], named: dict[str, Any]) -> Any:
    """The options that a program has given, as an object or one by one."""
    for options in (*given, *named.values()):
        if hasattr(options, "asyncOp"):
            return options
    options = kind()
    names = [name for name in _OPTIONS if hasattr(options, _OPTIONS[name])]
    for name, value in [*zip(names, given, strict=False), *named.items()]:
        if value is not None:
            setattr(options, _OPTIONS[name], value)
    return options


def each_call(kind: str, given: Any) -> list[Any]:
    """This argument of every collective, of which several may come together."""
    if kind == _ONE:
        return [given] if isinstance(given, Tensor) else list(given)
    if kind == _LIST and given and not isinstance(given[0], Tensor):
        return list(given)
    return [given]
