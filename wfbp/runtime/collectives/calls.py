"""Makes operations of what programs pass, the same for tensors and arrays of every framework.

An :class:`Operand` is what a framework has to say of one of its tensors: its bytes, and what tensor
the bytes of a result are. Here are the operations themselves: what they check, what they tell other
ranks, and which part of the outcome is this rank's result. ``wfbp.torch.collectives`` and
``wfbp.runtime.api.array_collectives`` put names, defaults and types on them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from wfbp.comm.backend import Buffer
from wfbp.comm.device.device import Device
from wfbp.runtime.collectives import api
from wfbp.runtime.collectives.operations import Call, Handle, chosen_reduction
from wfbp.runtime.collectives.process_sets import ProcessSet
from wfbp.runtime.collectives.request import Kind, Reduction
from wfbp.runtime.collectives.submission import Arrival, Outcome, Placed

T = TypeVar("T")
S = TypeVar("S")


class Operand(ABC, Generic[T]):
    """One tensor that a program passes to an operation; results are of type ``T``.

    Attributes:
        dtype: its element type, as ranks compare it.
        shape: its dimensions.
        device: where it lies, ``cpu`` or ``gpu``.
        differentiable: whether this rank wants to differentiate the result.
    """

    dtype: str
    shape: tuple[int, ...]
    device: str = "cpu"
    differentiable: bool = False

    @abstractmethod
    def data(self) -> Buffer:
        """Its elements, flat, in their storage type; private to the operation."""

    @abstractmethod
    def whole(self, data: Buffer) -> T:
        """The result of an operation that keeps the shape; ``data`` is that of :meth:`data`."""

    @abstractmethod
    def rows(self, data: Buffer, count: int) -> T:
        """So many rows like the operand's, as a new tensor; ``data`` may be of any type."""


class DeviceOperand(Operand[T]):
    """One that may lie on a device, where operations can work on it."""

    @abstractmethod
    def place(self) -> Device | None:
        """The device on which it lies; None for the host's memory."""

    @abstractmethod
    def enqueue(self, device: Device, factor: float) -> Placed:
        """Its elements on the device, multiplied and private to the operation, without waiting for
        them; in place of :meth:`data`."""

    @abstractmethod
    def whole_there(self, arrival: Arrival, factor: float) -> T:
        """As :meth:`whole`, of a result on the device, multiplied; also without waiting."""

    @abstractmethod
    def rows_there(self, arrival: Arrival, count: int, factor: float) -> T:
        """As :meth:`rows`, of a result on the device, multiplied; also without waiting."""


def allreduce(
    operand: Operand[T],
    name: str | None,
    process_set: ProcessSet,
    op: Reduction,
    prescale: float,
    postscale: float,
) -> Call[T]:
    """Combine over ranks."""
    scaling = {"prescale": float(prescale), "postscale": float(postscale)}

    def finish(outcome: Outcome) -> T:
        return _whole(operand, outcome, postscale)

    return _call(Kind.ALLREDUCE, operand, name, process_set, finish, op=op, **scaling)


def broadcast(
    operand: Operand[T], name: str | None, process_set: ProcessSet, root_rank: int
) -> Call[T]:
    """Copy the root's to every rank; the root by its number among all ranks."""

    def finish(outcome: Outcome) -> T:
        return _whole(operand, outcome, 1.0)

    return _call(Kind.BROADCAST, operand, name, process_set, finish, root=root_rank)


def allgather(
    operand: Operand[T], name: str | None, process_set: ProcessSet, part_of: str = ""
) -> Call[T]:
    """Concatenate the rows of ranks; ``part_of`` as in ``Request``."""
    _check_rows(Kind.ALLGATHER, operand)

    def finish(outcome: Outcome) -> T:
        return _rows(operand, outcome, sum(outcome.rows), 1.0)

    return _call(Kind.ALLGATHER, operand, name, process_set, finish, part_of=part_of)


def reducescatter(
    operand: Operand[T],
    name: str | None,
    process_set: ProcessSet,
    op: Reduction,
    prescale: float,
    postscale: float,
    splits: Sequence[int] = (),
) -> Call[T]:
    """Combine over ranks, and share the rows out: equally, or as ``splits`` tell of each rank."""
    _check_rows(Kind.REDUCESCATTER, operand)
    scaling = {"prescale": float(prescale), "postscale": float(postscale)}
    op = chosen_reduction(None, op)
    process_set.known_id("reducescatter()")
    place = process_set.rank()

    def finish(outcome: Outcome) -> T:
        return _rows(operand, outcome, outcome.rows[place], postscale)

    details = {"op": op, "splits": tuple(splits), **scaling}
    return _call(Kind.REDUCESCATTER, operand, name, process_set, finish, **details)


def alltoall(
    operand: Operand[T], name: str | None, process_set: ProcessSet, splits: Sequence[int] | None
) -> Call[T]:
    """Send every rank rows of its own: equal parts, or as many as ``splits`` tell."""
    _check_rows(Kind.ALLTOALL, operand)
    process_set.known_id("alltoall()")
    rows = _checked_splits(splits, operand.shape[0], process_set.size())

    def finish(outcome: Outcome) -> T:
        return operand.rows(outcome.data, sum(outcome.rows))

    return _call(Kind.ALLTOALL, operand, name, process_set, finish, splits=rows)


def alltoall_counted(
    operand: Operand[T],
    name: str | None,
    process_set: ProcessSet,
    splits: Sequence[int],
    counts: Callable[[tuple[int, ...]], T],
) -> Call[tuple[T, T]]:
    """The same, with how many rows came from each rank; ``counts`` makes a tensor of these."""
    call = alltoall(operand, name, process_set, splits)

    def finish(outcome: Outcome) -> tuple[T, T]:
        return call.finish(outcome), counts(outcome.rows)

    return _finished_by(call, finish)


@dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    """A complete operation, with what it takes to differentiate it.

    Args:
        result: of the operation.
        rows: as of ``Outcome``.
        differentiable: whether any rank wants to differentiate it.
        name: of the operation, also where the program gave none.
    """

    result: T
    rows: tuple[int, ...]
    differentiable: bool
    name: str


def detailed(call: Call[T]) -> Call[Done[T]]:
    """The same operation, of which :class:`Done` comes back."""

    def finish(outcome: Outcome) -> Done[T]:
        result = call.finish(outcome)
        return Done(result, outcome.rows, outcome.differentiable, renewed.name or "")

    renewed = _finished_by(call, finish)
    return renewed


def member_names(name: str | None, count: int) -> list[str | None]:
    """Names of the operations of a group, which tell how many there are; none without a name."""
    return [f"{name}.{number}of{count}" if name else None for number in range(1, count + 1)]


def submit(call: Call[T]) -> Handle[T]:
    """Begin an operation; raises as ``Collectives.submit_all`` does."""
    return api.current(f"{call.kind.value}()").submit(call)


def submit_all(calls: Sequence[Call[T]]) -> Handle[list[T]]:
    """Begin several operations, or none where one is refused; their results come in a list."""
    return api.current("a grouped operation").submit_all(calls)


def run(call: Call[T]) -> T:
    """Begin an operation and wait for its result; handlers of signals run behind it."""
    return api.current(f"{call.kind.value}()").run(call)


def run_in_order(call: Call[T]) -> T:
    """The same, where every rank calls this for the same operations in the same order.

    Ranks that call it for different ones find out at once, also in threads; names are compared.
    """
    call.ordered = True
    return run(call)


def run_all(calls: Sequence[Call[T]]) -> list[T]:
    """The same for several, of which none is begun where one is refused."""
    return api.current("a grouped operation").run_all(calls)


def wrong_splits(dtype: object, shape: Sequence[int]) -> ValueError:
    """What is raised where splits come as a tensor of something else than whole numbers."""
    return ValueError(
        f"alltoall: splits are {dtype} of shape {tuple(shape)}; expected one whole number per rank"
    )


def _call(
    kind: Kind,
    operand: Operand[Any],
    name: str | None,
    process_set: ProcessSet,
    finish: Callable[[Outcome], T],
    **details: Any,
) -> Call[T]:
    number = process_set.known_id(f"{kind.value}()")
    details.update(
        dtype=operand.dtype,
        shape=operand.shape,
        device=operand.device,
        differentiable=operand.differentiable,
    )
    operations = api.current(f"{kind.value}()")
    device = None
    if isinstance(operand, DeviceOperand):
        device = operations.device_for(number, kind, details, operand.place)
    if device is None:
        return Call(kind, name, number, operand.data(), finish, details)
    _refuse_capture(kind, device)
    assert isinstance(operand, DeviceOperand)
    placed = operand.enqueue(device, details.get("prescale", 1.0))
    details["on_device"] = True
    return Call(kind, name, number, placed.data, finish, details, placed=placed)


def _refuse_capture(kind: Kind, device: Device) -> None:
    if device.is_capturing(device.current_stream()):
        raise RuntimeError(
            f"{kind.value}() was about to be captured in a CUDA graph, in which other ranks cannot "
            "take part; call it outside of the capture"
        )


def _whole(operand: Operand[T], outcome: Outcome, factor: float) -> T:
    """A result of the operand's shape, wherever it lies; on the host it is multiplied already."""
    if outcome.arrival is None:
        return operand.whole(outcome.data)
    assert isinstance(operand, DeviceOperand)
    result: T = operand.whole_there(outcome.arrival, factor)
    return result


def _rows(operand: Operand[T], outcome: Outcome, count: int, factor: float) -> T:
    """So many rows of a result, likewise."""
    if outcome.arrival is None:
        return operand.rows(outcome.data, count)
    assert isinstance(operand, DeviceOperand)
    result: T = operand.rows_there(outcome.arrival, count, factor)
    return result


def _finished_by(call: Call[Any], finish: Callable[[Outcome], S]) -> Call[S]:
    """The same operation with another result; its name is known once it was submitted."""
    return Call(
        call.kind, call.name, call.process_set, call.data, finish, call.details, placed=call.placed
    )


def _check_rows(kind: Kind, operand: Operand[Any]) -> None:
    if not operand.shape:
        raise ValueError(f"{kind.value} needs at least one dimension; found a scalar")


def _checked_splits(splits: Sequence[int] | None, num_rows: int, size: int) -> tuple[int, ...]:
    """Rows for each rank.

    Raises:
        ValueError: they are none, or do not fit.
    """
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
