"""Makes operations from a program's tensors or arrays, the same for every framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from wfbp.comm.backend import Buffer
from wfbp.core.types import Op
from wfbp.errors import WfbpError
from wfbp.runtime.collectives import api
from wfbp.runtime.collectives.coordinator import Kind, Request
from wfbp.runtime.collectives.forms import Form
from wfbp.runtime.collectives.named_lane import NamedOperation, Outcome
from wfbp.runtime.collectives.process_sets import ProcessSet
from wfbp.runtime.progress.stall import Members

T = TypeVar("T")

_FLOATING = frozenset({"float16", "bfloat16", "float32", "float64"})


class Operand(ABC, Generic[T]):
    """One tensor that a program passes to an operation; results are of type ``T``."""

    dtype: str  # as ranks compare it
    shape: tuple[int, ...]
    differentiable: bool = False  # whether this rank wants to differentiate the result

    @abstractmethod
    def data(self) -> Buffer:
        """Its elements on the host, flat, in their storage type; private to the operation."""

    @abstractmethod
    def whole(self, outcome: Outcome) -> T:
        """The result with the operand's shape."""

    @abstractmethod
    def rows(self, outcome: Outcome, count: int) -> T:
        """So many rows like the operand's, as a new tensor."""

    @abstractmethod
    def counts(self, rows: tuple[int, ...]) -> T:
        """Numbers of rows as a tensor of int32."""


def make_operation(
    kind: Kind,
    operand: Operand[T],
    name: str | None,
    process_set: ProcessSet,
    *,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    root_rank: int | None = None,
    splits: Sequence[int] | None = None,
    called: str = "",
    ordered: bool = False,
) -> NamedOperation[Any]:
    """An operation on one tensor; ``splits`` of a reduce-scatter are the rows of each rank."""
    number = process_set.known_id(f"{kind.value}()")
    operations = api.current(f"{kind.value}()")
    ranks = operations.ranks_of(number)
    if not operand.shape and kind in (Kind.ALLGATHER, Kind.ALLTOALL, Kind.REDUCESCATTER):
        raise ValueError(f"{kind.value} needs at least one dimension; found a scalar")
    if op is not None:
        _check_op(kind, op, operand.dtype, (prescale_factor, postscale_factor), len(ranks))
    rows = tuple(splits or ())
    if kind is Kind.ALLTOALL:
        rows = _checked_splits(splits, operand.shape[0], len(ranks))
    request = Request(
        kind,
        "" if name is None else name,
        operand.dtype,
        operand.shape,
        op.value if op is not None else "",
        Members(number, ranks).root(root_rank) if root_rank is not None else -1,
        float(prescale_factor),
        float(postscale_factor),
        rows,
        operand.differentiable,
        called,
    )

    def finish(outcome: Outcome) -> Any:
        if kind in (Kind.ALLREDUCE, Kind.BROADCAST):
            return operand.whole(outcome)
        if kind is Kind.REDUCESCATTER:
            return operand.rows(outcome, outcome.rows[ranks.index(operations.rank)])
        received = operand.rows(outcome, sum(outcome.rows))
        if kind is Kind.ALLTOALL and splits is not None:
            return received, operand.counts(outcome.rows)
        return received

    return NamedOperation(request, number, operand.data(), finish, ordered)


def perform(
    form: Form,
    tensors: Any,
    name: str | None,
    make: Callable[[Any, str, str | None], NamedOperation[Any]],
) -> Any:
    """Submit the operations of one call; wait for the result, or return a handle."""
    if form.grouped:  # names contain the group's size, so that ranks compare it
        many = len(tensors)
        operations = [
            make(tensor, f"tensors[{k}]", f"{name}.{k + 1}of{many}" if name else None)
            for k, tensor in enumerate(tensors)
        ]
    else:
        operations = [make(tensors, "tensor", name)]
    collectives = api.current(f"{form.name}()")
    act = collectives.run if form.waits else collectives.submit
    return act(operations, form.grouped)


def chosen_op(average: bool | None, op: object) -> Op:
    """The ``Op`` from Horovod's two arguments for it."""
    if average is not None:
        if op is not None:
            raise ValueError("average and op both say how ranks are combined; pass one of them")
        return Op.AVERAGE if average else Op.SUM
    if op is None:
        return Op.AVERAGE
    if not isinstance(op, Op):
        raise ValueError(f"op is {op!r}; expected one of {', '.join(map(str, Op))}")
    return op


def wrong_splits(dtype: object, shape: Sequence[int]) -> ValueError:
    """The error for splits that are a tensor of something else than whole numbers."""
    return ValueError(
        f"alltoall: splits are {dtype} of shape {tuple(shape)}; expected one whole number per rank"
    )


def _check_op(kind: Kind, op: Op, dtype: str, factors: tuple[float, float], size: int) -> None:
    if op is Op.ADASUM:
        if kind is not Kind.ALLREDUCE:
            raise WfbpError(f"{kind.value} cannot combine by {op}; only allreduce can")
        if size & (size - 1):
            raise ValueError(f"{op} combines a power of two of ranks; there are {size}")
        if dtype not in _FLOATING:
            raise ValueError(f"{op} combines floating point; found {dtype}")
    if dtype == "bool" and (op is Op.AVERAGE or factors != (1.0, 1.0)):
        raise ValueError("bool has no average and no multiples; pass op=Sum, Min, Max or Product")


def _checked_splits(splits: Sequence[int] | None, num_rows: int, size: int) -> tuple[int, ...]:
    if splits is None:
        if num_rows % size:
            raise ValueError(
                f"alltoall: {num_rows} rows are no equal parts for {size} ranks; pass splits"
            )
        return (num_rows // size,) * size
    rows = tuple(int(count) for count in splits)
    if len(rows) != size or min(rows) < 0 or sum(rows) != num_rows:
        raise ValueError(
            f"alltoall: splits are {list(rows)}; expected {size} numbers of rows that add up to "
            f"{num_rows}"
        )
    return rows
