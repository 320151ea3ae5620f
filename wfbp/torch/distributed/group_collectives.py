"""The collectives of a process group: what a rank sends and receives in each of them.

Almost all have one form: a block of bytes for each rank, and one from each, which are copied or
combined, natively or by PyTorch. A function describes each collective; :data:`METHODS` has
PyTorch's names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from wfbp.comm.arrays import Buffer
from wfbp.comm.backend import Work
from wfbp.comm.mpi.group_exchange import GroupExchange, Reduction
from wfbp.core.types import ITEM_BYTES, Op
from wfbp.errors import DisagreementError
from wfbp.runtime.progress.thread import CommunicationThread
from wfbp.torch.distributed.work import GroupWork
from wfbp.torch.tensors import NAMES, raw

Blocks = list[Buffer | None]
"""A block for each rank, or from each; None for no block."""

_REDUCTIONS: dict[str, tuple[Op | None, Callable[[Tensor, Tensor], Tensor]]] = {
    # By the C++ extension, and by PyTorch for other element types.
    "SUM": (Op.SUM, torch.add),
    "PREMUL_SUM": (Op.SUM, torch.add),
    "AVG": (Op.AVERAGE, torch.add),
    "PRODUCT": (Op.PRODUCT, torch.mul),
    "MIN": (Op.MIN, torch.minimum),
    "MAX": (Op.MAX, torch.maximum),
    "BAND": (None, torch.bitwise_and),
    "BOR": (None, torch.bitwise_or),
    "BXOR": (None, torch.bitwise_xor),
}


def reduction(dtype: torch.dtype, op: str, size: int) -> Reduction:
    """How elements of ``size`` ranks are combined; ``ValueError`` if they cannot be."""
    if op not in _REDUCTIONS:
        raise ValueError(f"{op} of {dtype}: expected one of {', '.join(_REDUCTIONS)}")
    refused = f"{op} of {dtype} is not defined; convert the tensor to another type first"
    if dtype is torch.bool and op in ("AVG", "PREMUL_SUM"):
        raise ValueError(refused)  # the result has another type
    native, combine = _REDUCTIONS[op]
    is_mean_of_integers = native is Op.AVERAGE and not (dtype.is_floating_point or dtype.is_complex)
    if dtype.is_complex and native in (Op.SUM, Op.AVERAGE):
        dtype = dtype.to_real()
    if native is not None and NAMES.get(dtype) in ITEM_BYTES:
        return Reduction(dtype.itemsize, NAMES[dtype], native)

    def function(shards: Sequence[Buffer], out: Buffer) -> None:
        # Copies: those of other ranks are read-only, which PyTorch does not support.
        values = [torch.from_numpy(np.array(shard)).view(dtype) for shard in shards]
        if is_mean_of_integers:  # their own type may not hold the sum
            values = [value.to(torch.int64) for value in values]
        result = functools.reduce(combine, values)
        if native is Op.AVERAGE:
            result = torch.div(result, size, rounding_mode="trunc").to(dtype)
        out[:] = raw(result)

    try:  # PyTorch decides
        example = raw(torch.ones(1, dtype=dtype))
        function([example, example], example)
    except (RuntimeError, TypeError) as error:
        raise ValueError(refused) from error
    return Reduction(dtype.itemsize, function=function)


def sizes(dtype: torch.dtype, *numels: int) -> str:
    """Type and numbers of elements, such as ``float32[3, 5]``; one number if all are equal."""
    shown = numels[:1] if len(set(numels)) == 1 else numels
    return f"{str(dtype).removeprefix('torch.')}{list(shown)}"


class GroupCollective(GroupWork):
    """A collective as this rank calls it; one of the functions below says what it does."""

    key: str
    """Equal on all ranks."""
    begin: Callable[[int], Work[Any]]
    """Starts it with its fingerprint."""
    number = fingerprint = 0
    # Elements for each rank, and from each rank, if no other rank knows these numbers.
    sent: Sequence[int] = ()
    expected: Sequence[int] = ()

    def __init__(
        self,
        name: str,
        exchange: GroupExchange,
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
        op: Any = getattr(options, "reduceOp", None)
        self.op = str(getattr(op, "op", op)).rpartition(".")[2] if op is not None else ""
        """Name of a reduction."""
        self._factor: Any = op.factor if self.op == "PREMUL_SUM" else None
        self.nothing: Blocks = [None] * self.size

    def addend(self, tensor: Tensor) -> Tensor:
        """This rank's part of a reduction."""
        return tensor if self._factor is None else (tensor * self._factor).to(tensor.dtype)

    def only(self, rank: int | None, data: Buffer) -> Blocks:
        """A block for one rank alone, or from it."""
        return [data if rank == each else None for each in range(self.size)]

    def blocks(
        self,
        view: Callable[[Tensor], Buffer],
        given: Tensor | Sequence[Tensor],
        rows: Sequence[int] = (),
    ) -> Blocks:
        """For each rank: a tensor of a list, or a part of one tensor: equal, or so many rows."""
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
        """Copy blocks from rank to rank, or reduce all blocks for a rank into its own incoming one.
        Of sizes that are not known, each rank knows its own."""
        exchange, dtype = self.exchange, self.tensors[0].dtype
        blocks = [outgoing[self.rank], incoming[self.rank]]
        if self.root is not None:
            blocks = [*outgoing, *incoming]
        lengths = {block.nbytes for block in blocks if block is not None}
        if len(lengths) > 1 or any(tensor.dtype != dtype for tensor in self.tensors):
            found = "; ".join(sizes(each.dtype, each.numel()) for each in self.tensors)
            raise ValueError(
                f"{self.name}: tensors {found} do not fit; expected one element type, and as "
                f"many elements from each of {self.size} ranks as for it"
            )
        how = reduction(dtype, self.op, self.size) if self.op else None
        sent, expected = (
            [block.nbytes // dtype.itemsize for block in each if block is not None]
            for each in (outgoing, incoming)
        )
        self.run(
            sizes(dtype, *(sent if self.op or not expected else expected)),
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
        if self.op:
            what += f", {self.op}"
        self.text = self.key = f"{self.name}({what})"
        self.begin = begin


def all_reduce(call: GroupCollective, tensor: Tensor) -> None:
    if tensor.layout is torch.sparse_coo:
        _all_reduce_sparse(call, tensor)
        return
    exchange = call.exchange
    how = reduction(tensor.dtype, call.op, call.size)
    data = call.target(tensor, call.addend(tensor))
    what = sizes(tensor.dtype, tensor.numel())
    call.run(what, lambda mark: exchange.all_reduce(data, how, mark))


def _all_reduce_sparse(call: GroupCollective, tensor: Tensor) -> None:
    """Every rank adds the values of all ranks; halves in float32."""
    if call.op != "SUM":
        raise ValueError(f"{call.op} of a sparse tensor; expected SUM")
    backend, own = call.exchange.backend, tensor.detach().coalesce()
    places, values = own.indices(), own.values()
    dtype, row = values.dtype, values.shape[1:]

    def begin(mark: int) -> Work[list[bytes]]:
        head, data = np.array([mark, own._nnz()]), (places.contiguous(), values.contiguous())
        letter = b"".join(part.tobytes() for part in (head, *map(raw, data)))
        gathered = backend.all_gather_bytes(letter)

        def read(letter: bytes) -> tuple[Tensor, Tensor]:
            found, count = np.frombuffer(letter, np.int64, 2).tolist()
            if found != mark:  # what follows would be misread
                raise DisagreementError(
                    f"rank {call.rank} of the group: ranks called different operations, here "
                    f"{call.text}; every rank must pass a sparse tensor of the same element type, "
                    "shape and number of sparse dimensions"
                )
            place = torch.empty(len(places), count, dtype=torch.int64)
            value = torch.empty(count, *row, dtype=dtype)
            start, end = 16, 16 + place.nbytes
            raw(place)[:] = np.frombuffer(letter[start:end], np.uint8)
            raw(value)[:] = np.frombuffer(letter[end:], np.uint8)
            return place, value

        def add() -> None:
            where, what = zip(*map(read, gathered.result), strict=True)
            wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
            summed = torch.sparse_coo_tensor(
                torch.cat(where, 1), torch.cat(what).to(wide), tensor.shape, check_invariants=True
            )
            with torch.no_grad():
                tensor.copy_(summed.coalesce().to(dtype))

        call.deliveries.append(add)
        return gathered

    call.run(f"sparse {dtype}{list(tensor.shape)}, {len(places)} sparse dimensions", begin)


def reduce(call: GroupCollective, tensor: Tensor) -> None:
    outgoing = call.only(call.root, call.source(call.addend(tensor)))
    call.move(outgoing, call.only(call.root, call.target(tensor)) if call.is_root else call.nothing)


def reduce_scatter(
    call: GroupCollective, output: Tensor, inputs: Tensor | Sequence[Tensor]
) -> None:
    outgoing = call.blocks(lambda tensor: call.source(call.addend(tensor)), inputs)
    call.move(outgoing, call.only(call.rank, call.target(output)))


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


_ONE, _LIST, _ROWS = "a tensor", "a list of tensors", "numbers of rows"

METHODS: dict[str, tuple[Callable[..., None], type[Any], Sequence[str]]] = {
    # PyTorch's method: the function that describes it, its options, the arguments before them.
    "allreduce": (all_reduce, c10d.AllreduceOptions, [_ONE]),
    "allreduce_coalesced": (all_reduce, c10d.AllreduceOptions, [_ONE]),
    "reduce": (reduce, c10d.ReduceOptions, [_ONE]),
    "reduce_scatter": (reduce_scatter, c10d.ReduceScatterOptions, [_ONE, _LIST]),
    "reduce_scatter_single": (reduce_scatter, c10d.ReduceScatterOptions, [_ONE, _ONE]),
    "reduce_scatter_single_coalesced": (reduce_scatter, c10d.ReduceScatterOptions, [_ONE, _ONE]),
    "_reduce_scatter_base": (reduce_scatter, c10d.ReduceScatterOptions, [_ONE, _ONE]),
    "broadcast": (broadcast, c10d.BroadcastOptions, [_ONE]),
    "allgather": (all_gather, c10d.AllgatherOptions, [_LIST, _ONE]),
    "all_gather_single": (all_gather, c10d.AllgatherOptions, [_ONE, _ONE]),
    "all_gather_single_coalesced": (all_gather, c10d.AllgatherOptions, [_ONE, _ONE]),
    "_allgather_base": (all_gather, c10d.AllgatherOptions, [_ONE, _ONE]),
    "gather": (gather, c10d.GatherOptions, [_LIST, _ONE]),
    "scatter": (scatter, c10d.ScatterOptions, [_ONE, _LIST]),
    "alltoall": (all_to_all, c10d.AllToAllOptions, [_LIST, _LIST]),
    "all_to_all_single": (all_to_all, c10d.AllToAllOptions, [_ONE, _ONE, _ROWS, _ROWS]),
    "alltoall_base": (all_to_all, c10d.AllToAllOptions, [_ONE, _ONE, _ROWS, _ROWS]),
    "barrier": (barrier, c10d.BarrierOptions, []),
}

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
    """This argument of each collective of a call; coalesced calls have several."""
    if kind == _ONE:
        return [given] if isinstance(given, Tensor) else list(given)
    if kind == _LIST and given and not isinstance(given[0], Tensor):
        return list(given)
    return [given]
