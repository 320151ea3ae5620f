"""Makes operations from a program's tensors or arrays; those on arrays of NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from wfbp.comm.arrays import HALF, Buffer, word_dtype
from wfbp.core.types import Op
from wfbp.runtime import process
from wfbp.runtime.collectives.forms import Form
from wfbp.runtime.collectives.process_sets import ProcessSet
from wfbp.runtime.consistency import (
    check_bytes,
    check_writable,
    dtype_key,
    flattened,
    in_native_order,
)
from wfbp.runtime.named.arithmetic import ITEM
from wfbp.runtime.named.coordinator import Kind, Request
from wfbp.runtime.named.named_lane import NamedOperation, Outcome
from wfbp.runtime.progress.stall import Members


class Operand(NamedTuple):
    """One tensor that a program passes to an operation."""

    dtype: str  # as ranks compare it
    shape: tuple[int, ...]
    data: Buffer  # its elements on the host, flat, in their storage type; private to the operation
    whole: Callable[[], Any]  # the result of the operand's shape, which is then in ``data``
    rows: Callable[[Buffer, int], Any]  # so many rows like the operand's, of these elements
    differentiable: bool = False  # whether this rank wants to differentiate the result


def make_operation(
    kind: Kind,
    operand: Operand,
    name: str | None,
    process_set: ProcessSet,
    *,
    op: Op = Op.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    root_rank: int | None = None,
    splits: Any = None,
    called: str = "",
    sequence: str = "unnamed",
) -> NamedOperation[Any]:
    """An operation on one tensor; ``splits``, but of an all-to-all, are the rows of each rank."""
    number = process_set.known_id(f"{kind.value}()")
    operations = process.operations(f"{kind.value}()")
    ranks = operations.sets[number]
    if not operand.shape and kind in (Kind.ALLGATHER, Kind.ALLTOALL, Kind.REDUCESCATTER):
        raise ValueError(f"{kind.value} needs at least one dimension; found a scalar")
    reduces = kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER)
    if reduces:
        _check_op(op, operand.dtype, (prescale_factor, postscale_factor))
    if kind is Kind.ALLTOALL:
        rows = _splits(splits, operand.shape[0], len(ranks))
    else:
        rows = tuple(splits or ())
    request = Request(
        kind,
        "" if name is None else name,
        operand.dtype,
        operand.shape,
        op.value if reduces else "",
        Members(number, ranks).root(root_rank) if root_rank is not None else -1,
        float(prescale_factor),
        float(postscale_factor),
        rows,
        operand.differentiable,
        called,
    )

    def finish(outcome: Outcome) -> Any:
        if kind in (Kind.ALLREDUCE, Kind.BROADCAST):
            return operand.whole()
        if kind is Kind.REDUCESCATTER:
            return operand.rows(outcome.data, outcome.rows[ranks.index(operations.rank)])
        received = operand.rows(outcome.data, sum(outcome.rows))
        if kind is Kind.ALLTOALL and splits is not None:
            return received, np.array(outcome.rows, np.int32)
        return received

    return NamedOperation(request, number, operand.data, finish, sequence)


def submit_form(
    form: Form,
    tensors: Any,
    name: str | None,
    make: Callable[[Any, str, str | None], NamedOperation[Any]],
) -> Any:
    """Submit the operations of one call, which ``make`` makes of a tensor, its label and its name;
    wait for the result, or return a handle."""
    if form.grouped:  # names contain the group's size, so that ranks compare it
        many = len(tensors)
        operations = [
            make(tensor, f"tensors[{k}]", f"{name}.{k + 1}of{many}" if name else None)
            for k, tensor in enumerate(tensors)
        ]
    else:
        operations = [make(tensors, "tensor", name)]
    collectives = process.operations(f"{form.name}()")
    act = collectives.run if form.waits else collectives.submit
    return act(operations, form.grouped)


def array_operand(value: Any, in_place: bool = False, label: str = "array") -> Operand:
    """An array of NumPy, or a value that NumPy converts."""
    if in_place:
        check_writable(label, value)
    source = np.asarray(value)
    check_bytes(label, source)
    private = in_native_order(source)
    if not (in_place and private.flags.c_contiguous):
        private = np.array(private, order="C", copy=True)
    dtype, shape = dtype_key(private.dtype), source.shape
    flat = flattened(private)

    def whole() -> Any:
        if not in_place:
            return private
        if private is not value:
            np.copyto(value, private)
        return value

    def rows(data: Buffer, count: int) -> Any:
        return data.view(np.uint8).view(private.dtype).reshape(count, *shape[1:])

    data = flat.view(word_dtype(dtype)) if dtype in HALF else flat
    return Operand(dtype, shape, data, whole, rows)


def _check_op(op: object, dtype: str, factors: tuple[float, float]) -> None:
    if not isinstance(op, Op):
        raise ValueError(f"op is {op!r}; expected one of {', '.join(map(str, Op))}")
    if dtype not in ITEM:
        raise ValueError(
            f"elements of type {dtype!r} cannot be combined; expected one of {', '.join(ITEM)}"
        )
    op.check_dtype(dtype)
    if dtype == "bool" and (op is Op.AVERAGE or factors != (1.0, 1.0)):
        raise ValueError("bool has no average and no multiples; pass op=Sum, Min, Max or Product")


def _splits(splits: Any, num_rows: int, size: int) -> tuple[int, ...]:
    """An all-to-all's rows for each rank; ``splits`` may be a tensor or array of any kind."""
    if splits is None:
        if num_rows % size:
            raise ValueError(
                f"alltoall: {num_rows} rows are no equal parts for {size} ranks; pass splits"
            )
        return (num_rows // size,) * size
    counts = splits if hasattr(splits, "tolist") else np.asarray(splits)
    if len(counts.shape) != 1 or (counts.shape[0] and "int" not in str(counts.dtype)):
        raise ValueError(
            f"alltoall: splits are {counts.dtype} of shape {tuple(counts.shape)}; expected one "
            "whole number per rank"
        )
    rows = tuple(counts.tolist())
    if len(rows) != size or min(rows) < 0 or sum(rows) != num_rows:
        raise ValueError(
            f"alltoall: splits are {list(rows)}; expected {size} numbers of rows that add up to "
            f"{num_rows}"
        )
    return rows
