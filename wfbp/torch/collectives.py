"""Collectives on tensors, under Horovod's names.

Every function comes in up to four forms: ``allreduce`` waits and can be differentiated,
``allreduce_async`` returns a handle for ``synchronize``, and those that end in ``_`` write into
their argument. Ranks find each other's operations by ``name``, in whatever order each submits them;
those without a name by their order among those of the same function without a name.

Differentiation follows Horovod. If the tensor of any rank requires a gradient, the results of all
ranks do: all have to take part in backward. The gradient of a sum over ranks is the sum of the
ranks' gradients, that of an average, of gathered rows and of a broadcast their average.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import torch

from wfbp.comm.backend import Buffer, word_dtype
from wfbp.comm.device.device import Device
from wfbp.core.types import Op
from wfbp.runtime import process
from wfbp.runtime.collectives import api, calls
from wfbp.runtime.collectives.calls import DeviceOperand, Done, run, run_all, submit, submit_all
from wfbp.runtime.collectives.operations import Call, Collectives, Handle, chosen_reduction
from wfbp.runtime.collectives.process_sets import ProcessSet, global_process_set
from wfbp.runtime.collectives.request import Kind, Reduction
from wfbp.runtime.collectives.submission import Arrival, Placed
from wfbp.torch.compression import Compression, Compressor
from wfbp.torch.tensors import NAMES as TENSOR_NAMES
from wfbp.torch.tensors import check, note_use, on_host, raw, usable_device

NAMES = {**TENSOR_NAMES, torch.int8: "int8", torch.int16: "int16", torch.bool: "bool"}
"""What can travel, and its name below."""


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Begin to combine a tensor over ranks; see :func:`allreduce`.

    Returns:
        A handle for ``synchronize``, which returns a new tensor.
    """
    reduction = chosen_reduction(average, op)
    scaling = prescale_factor, postscale_factor
    return submit(calls.allreduce(Tensor(tensor), name, process_set, reduction, *scaling))


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Begin to combine a tensor over ranks, in place; see :func:`allreduce`.

    Returns:
        A handle for ``synchronize``, which returns the tensor; leave that alone until then.
    """
    reduction = chosen_reduction(average, op)
    scaling = prescale_factor, postscale_factor
    operand = Tensor(tensor, in_place=True)
    return submit(calls.allreduce(operand, name, process_set, reduction, *scaling))


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Combine a tensor over ranks, in place; see :func:`allreduce`."""
    reduction = chosen_reduction(average, op)
    scaling = prescale_factor, postscale_factor
    operand = Tensor(tensor, in_place=True)
    return run(calls.allreduce(operand, name, process_set, reduction, *scaling))


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Combine a tensor over ranks; differentiable.

    Args:
        tensor: same shape and element type on every rank.
        average: Horovod's older way to say ``op``: True for ``Average``, False for ``Sum``.
        name: by which ranks find each other's operations; those without one follow one another.
        compression: in which type floating point travels.
        op: ``Average`` (by default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``. The
            average of integers is truncated to an integer.
        prescale_factor: multiplies before the reduction, integers in float64 and truncated.
        postscale_factor: multiplies behind it.
        process_set: the ranks that take part.

    Returns:
        A new tensor.

    Raises:
        TypeError: no tensor.
        ValueError: a tensor that cannot be sent, a name that is pending, both ``average`` and
            ``op``, or a rank outside the process set.
        DisagreementError: on every rank, where they do not match.

    Example:
        >>> import torch, wfbp.torch as wfbp
        >>> wfbp.init()
        >>> wfbp.allreduce(torch.tensor([1.0, 2.0]))
        tensor([1., 2.])
    """
    reduction = chosen_reduction(average, op)
    scaling = prescale_factor, postscale_factor
    narrow, ctx = _compressed(tensor, compression)
    operand = Tensor(narrow, like=tensor)
    done = _done(calls.allreduce(operand, name, process_set, reduction, *scaling))

    def backward(grad: torch.Tensor, name: str) -> torch.Tensor:
        _check_linear(reduction)
        return allreduce(grad, None, name, compression, reduction, *scaling, process_set)

    return _connect(done, tensor, compression.decompress(done.result, ctx), backward)


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[torch.Tensor]]:
    """Begin to combine several tensors; ``synchronize`` returns a list of new ones."""
    reduction = chosen_reduction(average, op)
    scaling = prescale_factor, postscale_factor
    return submit_all(
        [
            calls.allreduce(operand, label, process_set, reduction, *scaling)
            for operand, label in _group(tensors, name)
        ]
    )


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[torch.Tensor]]:
    """Begin to combine several tensors in place; ``synchronize`` returns a list of them."""
    reduction = chosen_reduction(average, op)
    scaling = prescale_factor, postscale_factor
    return submit_all(
        [
            calls.allreduce(operand, label, process_set, reduction, *scaling)
            for operand, label in _group(tensors, name, in_place=True)
        ]
    )


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Combine several tensors in place; see :func:`allreduce`."""
    reduction = chosen_reduction(average, op)
    scaling = prescale_factor, postscale_factor
    return run_all(
        [
            calls.allreduce(operand, label, process_set, reduction, *scaling)
            for operand, label in _group(tensors, name, in_place=True)
        ]
    )


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Combine several tensors, which travel together; see :func:`allreduce`; differentiable."""
    reduction = chosen_reduction(average, op)
    scaling = prescale_factor, postscale_factor
    packed = _all_compressed(tensors, compression)
    group = _group([narrow for narrow, _ in packed], name, like=tensors)
    results = _all_done(
        [
            calls.allreduce(operand, label, process_set, reduction, *scaling)
            for operand, label in group
        ]
    )

    def backward(grad: torch.Tensor, name: str) -> torch.Tensor:
        _check_linear(reduction)
        return allreduce(grad, None, name, compression, reduction, *scaling, process_set)

    return [
        _connect(done, tensor, compression.decompress(done.result, ctx), backward)
        for tensor, (_, ctx), done in zip(tensors, packed, results, strict=True)
    ]


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Reduction = Op.AVERAGE,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Begin to combine a sparse tensor by gathering its indices and values.

    Args:
        tensor: sparse (COO), of the same shape on every rank.
        name: as of :func:`allreduce`.
        op: ``Average`` or ``Sum``.
        process_set: the ranks that take part.

    Returns:
        A function that waits and returns the sparse result, not coalesced.

    Raises:
        ValueError: another ``op``, or a tensor that is not sparse.
        DisagreementError: from that function, on every rank, where ranks' tensors differ in shape,
            sparse dimensions or element type.
    """
    if op not in (Op.AVERAGE, Op.SUM):
        raise ValueError(f"op is {op}; sparse tensors are combined by {Op.AVERAGE} or {Op.SUM}")
    if tensor.layout is not torch.sparse_coo:
        raise ValueError(f"expected a sparse tensor (COO), found {tensor.layout}")
    whole = (
        f"a sparse {tensor.dtype} of shape {tuple(tensor.shape)} with {tensor.sparse_dim()} sparse "
        f"dimensions, op={op}"
    )
    parts = {"indices": tensor._indices().t().contiguous(), "values": tensor._values()}
    both = submit_all(
        [
            calls.allgather(Tensor(part), f"{name}.{kind}" if name else None, process_set, whole)
            for kind, part in parts.items()
        ]
    )
    shape = tensor.shape

    def wait() -> torch.Tensor:
        where, what = api.synchronize(both)
        if op is Op.AVERAGE:
            what = what / process_set.size()
        return torch.sparse_coo_tensor(where.t(), what, shape, check_invariants=False)

    return wait


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[torch.Tensor]:
    """Begin to concatenate the tensors of ranks; see :func:`allgather`.

    Returns:
        A handle for ``synchronize``, which returns a new tensor.
    """
    return submit(calls.allgather(Tensor(tensor), name, process_set))


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The tensors of all ranks, concatenated along the first dimension in rank order.

    Differentiable: the gradient of this rank's rows is the average of all ranks' gradients of them.

    Args:
        tensor: at least one dimension; sizes may differ between ranks in the first one only.
        name: by which ranks find each other's operations; those without one follow one another.
        process_set: the ranks that take part.

    Returns:
        A new tensor.

    Raises:
        TypeError: no tensor.
        ValueError: a scalar, a tensor that cannot be sent, or a name that is pending.
        DisagreementError: on every rank, where they do not match.
    """
    done = _done(calls.allgather(Tensor(tensor, like=tensor), name, process_set))
    return _gathered(tensor, done, process_set)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[torch.Tensor]]:
    """Begin several all-gathers; ``synchronize`` returns a list."""
    group = _group(tensors, name)
    return submit_all([calls.allgather(operand, label, process_set) for operand, label in group])


def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Several all-gathers; see :func:`allgather`; differentiable."""
    group = _group(tensors, name, like=tensors)
    results = _all_done([calls.allgather(operand, label, process_set) for operand, label in group])
    return [
        _gathered(tensor, done, process_set) for tensor, done in zip(tensors, results, strict=True)
    ]


def _gathered(
    tensor: torch.Tensor, done: Done[torch.Tensor], process_set: ProcessSet
) -> torch.Tensor:
    place = process_set.rank()
    start = sum(done.rows[:place])

    def backward(grad: torch.Tensor, name: str) -> torch.Tensor:
        mean = allreduce(grad, name=name, process_set=process_set)
        return mean[start : start + done.rows[place]]

    return _connect(done, tensor, done.result, backward)


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Begin to copy the root's tensor to every rank; see :func:`broadcast`.

    Returns:
        A handle for ``synchronize``, which returns a new tensor.
    """
    return submit(calls.broadcast(Tensor(tensor), name, process_set, root_rank))


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Begin to copy the root's tensor to every rank, in place; see :func:`broadcast`.

    Returns:
        A handle for ``synchronize``, which returns the tensor; leave that alone until then.
    """
    return submit(calls.broadcast(Tensor(tensor, in_place=True), name, process_set, root_rank))


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Copy the root's tensor to every rank, in place; see :func:`broadcast`."""
    return run(calls.broadcast(Tensor(tensor, in_place=True), name, process_set, root_rank))


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The root's tensor, on every rank.

    Differentiable: the root's gradient is the average of all ranks', the others' are zero.

    Args:
        tensor: same shape and element type on every rank.
        root_rank: whose values everybody gets; its number among all ranks.
        name: by which ranks find each other's operations; those without one follow one another.
        process_set: the ranks that take part.

    Returns:
        A new tensor.

    Raises:
        TypeError: no tensor.
        ValueError: a tensor that cannot be sent, a name that is pending, or a root outside the set.
        DisagreementError: on every rank, where they do not match.
    """
    done = _done(calls.broadcast(Tensor(tensor, like=tensor), name, process_set, root_rank))

    def backward(grad: torch.Tensor, name: str) -> torch.Tensor:
        mean = allreduce(grad, name=name, process_set=process_set)
        return mean if process.rank() == root_rank else torch.zeros_like(mean)

    return _connect(done, tensor, done.result, backward)


@overload
def alltoall_async(
    tensor: torch.Tensor,
    splits: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]: ...
@overload
def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[tuple[torch.Tensor, torch.Tensor]]: ...
def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Any]:
    """Begin to send every rank rows of its own; see :func:`alltoall`.

    Returns:
        A handle for ``synchronize``, which returns what :func:`alltoall` does.
    """
    operand = Tensor(tensor)
    if splits is None:
        return submit(calls.alltoall(operand, name, process_set, None))
    rows, counts = _splits(splits)
    return submit(calls.alltoall_counted(operand, name, process_set, rows, counts))


@overload
def alltoall(
    tensor: torch.Tensor,
    splits: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor: ...
@overload
def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, torch.Tensor]: ...
def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send every rank rows of its own, and receive what the others send; differentiable.

    Args:
        tensor: at least one dimension; sizes may differ between ranks in the first one only.
        splits: how many rows each rank gets, whole numbers that add up to all rows; equal parts
            by default.
        name: by which ranks find each other's operations; those without one follow one another.
        process_set: the ranks that take part.

    Returns:
        What arrived, in rank order; with ``splits`` also how many rows came from each rank.

    Raises:
        TypeError: no tensor.
        ValueError: a tensor that cannot be sent or split so, or a name that is pending.
        DisagreementError: on every rank, where they do not match.

    Example:
        >>> import torch, wfbp.torch as wfbp
        >>> wfbp.init()
        >>> wfbp.alltoall(torch.arange(2 * wfbp.size())).shape[0] // wfbp.size()
        2
    """
    operand = Tensor(tensor, like=tensor)
    rows, counts = (None, None) if splits is None else _splits(splits)
    done = _done(calls.alltoall(operand, name, process_set, rows))

    def backward(grad: torch.Tensor, name: str) -> torch.Tensor:
        return alltoall(grad, done.rows, name, process_set)[0]

    connected = _connect(done, tensor, done.result, backward)
    return connected if counts is None else (connected, counts(done.rows))


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Reduction = Op.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[torch.Tensor]:
    """Begin to combine a tensor and share the rows out; see :func:`reducescatter`.

    Returns:
        A handle for ``synchronize``, which returns a new tensor.
    """
    settings = op, prescale_factor, postscale_factor
    return submit(calls.reducescatter(Tensor(tensor), name, process_set, *settings))


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Reduction = Op.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """This rank's rows of what all ranks' tensors combine to.

    Differentiable as in Horovod: gradients are gathered, and those of a ``Sum`` multiplied by the
    number of ranks.

    Args:
        tensor: at least one dimension; same shape and element type on every rank.
        name: by which ranks find each other's operations; those without one follow one another.
        compression: in which type floating point travels.
        op: ``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``.
        process_set: the ranks that take part.
        prescale_factor: multiplies before the reduction, integers in float64 and truncated.
        postscale_factor: multiplies behind it.

    Returns:
        A new tensor: rows are shared out as equally as possible, the first ranks get one more.

    Raises:
        TypeError: no tensor.
        ValueError: a scalar, a tensor that cannot be sent, or a name that is pending.
        DisagreementError: on every rank, where they do not match.
    """
    settings = op, prescale_factor, postscale_factor
    narrow, ctx = _compressed(tensor, compression)
    operand = Tensor(narrow, like=tensor)
    done = _done(calls.reducescatter(operand, name, process_set, *settings))
    return _scattered(tensor, done, ctx, compression, process_set, *settings)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: Reduction = Op.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[torch.Tensor]]:
    """Begin several reduce-scatters; ``synchronize`` returns a list."""
    settings = op, prescale_factor, postscale_factor
    return submit_all(
        [
            calls.reducescatter(operand, label, process_set, *settings)
            for operand, label in _group(tensors, name)
        ]
    )


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Reduction = Op.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Several reduce-scatters; see :func:`reducescatter`; differentiable."""
    settings = op, prescale_factor, postscale_factor
    packed = _all_compressed(tensors, compression)
    group = _group([narrow for narrow, _ in packed], name, like=tensors)
    results = _all_done(
        [calls.reducescatter(operand, label, process_set, *settings) for operand, label in group]
    )
    return [
        _scattered(tensor, done, ctx, compression, process_set, *settings)
        for tensor, (_, ctx), done in zip(tensors, packed, results, strict=True)
    ]


def _scattered(
    tensor: torch.Tensor,
    done: Done[torch.Tensor],
    ctx: Any,
    compression: type[Compressor],
    process_set: ProcessSet,
    op: Reduction,
    prescale_factor: float,
    postscale_factor: float,
) -> torch.Tensor:
    def backward(grad: torch.Tensor, name: str) -> torch.Tensor:
        _check_linear(op)
        factor = prescale_factor * postscale_factor
        factor *= process_set.size() if op is Op.SUM else 1
        return allgather(grad * factor if factor != 1 else grad, name, process_set)

    return _connect(done, tensor, compression.decompress(done.result, ctx), backward)


# What they have in common.


class Tensor(DeviceOperand[torch.Tensor]):
    """One tensor on its way into an operation.

    Args:
        tensor: what this rank contributes.
        in_place: whether the result goes into the tensor.
        like: for the forms that can be differentiated: the tensor that the program passed.
        label: of the tensor, for messages.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        in_place: bool = False,
        like: torch.Tensor | None = None,
        label: str = "tensor",
    ) -> None:
        check(label, tensor, NAMES)
        self.dtype = NAMES[tensor.dtype]
        self.shape = tuple(tensor.shape)
        self.device = _device_kind(tensor)
        self.differentiable = like is not None and like.requires_grad and torch.is_grad_enabled()
        self._tensor = tensor
        self._in_place = in_place
        self._private: torch.Tensor | None = None
        self._placed = False

    def data(self) -> Buffer:
        self._private = private = self._contiguous()
        return raw(private).view(word_dtype(self.dtype))

    def _contiguous(self) -> torch.Tensor:
        """On the host, where the operation may write to it."""
        if self._in_place:
            return on_host(self._tensor)
        detached = self._tensor.detach()
        if detached.device.type == "cpu":
            return detached.clone(memory_format=torch.contiguous_format)
        return detached.cpu().contiguous()

    def place(self) -> Device | None:
        return usable_device(self._tensor)

    def enqueue(self, device: Device, factor: float) -> Placed:
        tensor = self._tensor.detach()
        if self._in_place and tensor.is_contiguous() and factor == 1.0:
            private = tensor
        else:
            private = tensor.clone(memory_format=torch.contiguous_format)
        if factor != 1.0:
            private.mul_(factor)
        self._private, self._placed = private, True
        memory = device.borrow(private.data_ptr(), private.nbytes, private)
        return Placed(device, memory, device.record(device.current_stream()), private)

    def whole(self, data: Buffer) -> torch.Tensor:
        private = self._private
        assert private is not None, "an operation begins with its data"
        if self._placed:
            with torch.no_grad():
                private.copy_(self._from_host(data, self.shape))
        return self._result(private)

    def whole_there(self, arrival: Arrival, factor: float) -> torch.Tensor:
        private = self._private
        assert private is not None, "an operation begins with its data"
        arrival.await_here()
        note_use(private)
        if factor != 1.0:
            private.mul_(factor)
        return self._result(private)

    def _result(self, private: torch.Tensor) -> torch.Tensor:
        tensor = self._tensor
        if not self._in_place:
            return private.to(tensor.device)
        if private.data_ptr() != tensor.data_ptr():
            with torch.no_grad():
                tensor.copy_(private)
        return tensor

    def rows(self, data: Buffer, count: int) -> torch.Tensor:
        return self._from_host(data, (count, *self.shape[1:])).to(self._tensor.device)

    def _from_host(self, data: Buffer, shape: Sequence[int]) -> torch.Tensor:
        elements = torch.from_numpy(data.view(word_dtype(self.dtype)))
        return elements.view(self._tensor.dtype).view(*shape)

    def rows_there(self, arrival: Arrival, count: int, factor: float) -> torch.Tensor:
        tensor, private = self._tensor, self._private
        assert private is not None, "an operation begins with its data"
        result = torch.empty((count, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
        arrival.copy_to(arrival.device.borrow(result.data_ptr(), result.nbytes, result))
        note_use(private)
        return result.mul_(factor) if factor != 1.0 else result


def _device_kind(tensor: torch.Tensor) -> str:
    return "cpu" if tensor.device.type == "cpu" else "gpu"


def goes_by_device(operations: Collectives, tensor: torch.Tensor) -> bool:
    """Whether a broadcast of a tensor among all ranks could go by its device, as far as this rank
    knows.

    Args:
        operations: of all ranks.
        tensor: of any element type.
    """
    if tensor.dtype not in NAMES:
        return False
    details = {"dtype": NAMES[tensor.dtype], "device": _device_kind(tensor)}
    device = operations.device_for(0, Kind.BROADCAST, details, lambda: usable_device(tensor))
    return device is not None


def _group(
    group: Sequence[torch.Tensor],
    name: str | None,
    in_place: bool = False,
    like: Sequence[torch.Tensor] | None = None,
) -> list[tuple[Tensor, str | None]]:
    """Tensors of one group, and the names of their operations."""
    operands = [
        Tensor(tensor, in_place, like[index] if like is not None else None, f"tensors[{index}]")
        for index, tensor in enumerate(group)
    ]
    return list(zip(operands, calls.member_names(name, len(group)), strict=True))


def _splits(
    splits: torch.Tensor | Sequence[int],
) -> tuple[Sequence[int], Callable[[tuple[int, ...]], torch.Tensor]]:
    """Rows for each rank, and what makes a tensor of those that came from each."""
    if not isinstance(splits, torch.Tensor):
        return splits, lambda rows: torch.tensor(rows, dtype=torch.int32)
    if splits.dtype.is_floating_point or splits.dtype is torch.bool or splits.dim() != 1:
        raise calls.wrong_splits(splits.dtype, splits.shape)
    device = splits.device
    return splits.tolist(), lambda rows: torch.tensor(rows, dtype=torch.int32, device=device)


def _compressed(
    tensor: torch.Tensor, compression: type[Compressor], label: str = "tensor"
) -> tuple[torch.Tensor, Any]:
    check(label, tensor, NAMES)
    return compression.compress(tensor.detach())


def _all_compressed(
    group: Sequence[torch.Tensor], compression: type[Compressor]
) -> list[tuple[torch.Tensor, Any]]:
    return [
        _compressed(tensor, compression, f"tensors[{index}]") for index, tensor in enumerate(group)
    ]


def _done(call: Call[torch.Tensor]) -> Done[torch.Tensor]:
    return run(calls.detailed(call))


def _all_done(group: Sequence[Call[torch.Tensor]]) -> list[Done[torch.Tensor]]:
    return run_all([calls.detailed(call) for call in group])


def _connect(
    done: Done[torch.Tensor],
    tensor: torch.Tensor,
    result: torch.Tensor,
    backward: Callable[[torch.Tensor, str], torch.Tensor],
) -> torch.Tensor:
    """The result as a function of the tensor, if any rank differentiates.

    All ranks must take part in backward then, also those whose own tensor needs no gradient; they
    find each other by the name of the operation.
    """
    if not (done.differentiable and torch.is_grad_enabled()):
        return result
    name = f"{done.name}.gradient"
    anchor = torch.zeros((), requires_grad=True)
    connected: torch.Tensor = _Connect.apply(  # type: ignore[no-untyped-call]
        tensor, anchor, [result], lambda grad: backward(grad, name)
    )
    return connected


class _Connect(torch.autograd.Function):
    """Returns what was computed outside; backward runs the collective of its gradient.

    The result comes in a list because it is no input, and the anchor makes it require a gradient
    whatever the input does.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        anchor: torch.Tensor,
        result: list[torch.Tensor],
        backward: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        ctx.backward_of = backward
        return result[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        result = ctx.backward_of(grad)
        return (result if ctx.needs_input_grad[0] else None), None, None, None


def _check_linear(op: Reduction) -> None:
    if op not in (Op.AVERAGE, Op.SUM):
        raise RuntimeError(
            f"an operation that combines by {op} has no gradient; use Average or Sum"
        )
