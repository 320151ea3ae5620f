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
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import torch

from wfbp.comm.buffers import word_dtype
from wfbp.core.types import Op
from wfbp.runtime import process
from wfbp.runtime.collectives import api
from wfbp.runtime.collectives.named_lane import Outcome
from wfbp.runtime.collectives.operations import Call, Handle, chosen_reduction
from wfbp.runtime.collectives.process_sets import ProcessSet, global_process_set
from wfbp.runtime.collectives.request import Kind, Reduction
from wfbp.torch.compression import Compression, Compressor
from wfbp.torch.tensors import NAMES as TENSOR_NAMES
from wfbp.torch.tensors import check, on_host, raw

T = TypeVar("T")

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
    call = _Submission(tensor, name, process_set).reduce(reduction, *scaling)
    return _submitted(call)


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
    call = _Submission(tensor, name, process_set, in_place=True).reduce(reduction, *scaling)
    return _submitted(call)


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
    handle = allreduce_async_(
        tensor, average, name, op, prescale_factor, postscale_factor, process_set
    )
    return api.synchronize(handle)


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
    submission = _Submission(narrow, name, process_set, like=tensor)
    done = _done(submission.reduce(reduction, *scaling))

    def backward(grad: torch.Tensor, name: str) -> torch.Tensor:
        _check_linear(reduction)
        return allreduce(grad, None, name, compression, reduction, *scaling, process_set)

    return done.connect(tensor, compression.decompress(done.result, ctx), backward)


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
    group = _group(tensors, name, process_set)
    return _all_submitted([each.reduce(reduction, *scaling) for each in group])


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
    group = _group(tensors, name, process_set, in_place=True)
    return _all_submitted([each.reduce(reduction, *scaling) for each in group])


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
    handle = grouped_allreduce_async_(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set
    )
    return api.synchronize(handle)


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
    group = _group([narrow for narrow, _ in packed], name, process_set, like=tensors)
    found = _all_done([each.reduce(reduction, *scaling) for each in group])

    def backward(grad: torch.Tensor, name: str) -> torch.Tensor:
        _check_linear(reduction)
        return allreduce(grad, None, name, compression, reduction, *scaling, process_set)

    return [
        done.connect(tensor, compression.decompress(done.result, ctx), backward)
        for tensor, (_, ctx), done in zip(tensors, packed, found, strict=True)
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
    calls = [
        _Submission(part, f"{name}.{kind}" if name else None, process_set).gather(whole)
        for kind, part in parts.items()
    ]
    both = _all_submitted(calls)
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
    return _submitted(_Submission(tensor, name, process_set).gather())


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
    submission = _Submission(tensor, name, process_set, like=tensor)
    return _gathered(tensor, _done(submission.gather()), process_set)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[torch.Tensor]]:
    """Begin several all-gathers; ``synchronize`` returns a list."""
    group = _group(tensors, name, process_set)
    return _all_submitted([each.gather() for each in group])


def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Several all-gathers; see :func:`allgather`; differentiable."""
    group = _group(tensors, name, process_set, like=tensors)
    found = _all_done([each.gather() for each in group])
    return [
        _gathered(tensor, done, process_set) for tensor, done in zip(tensors, found, strict=True)
    ]


def _gathered(tensor: torch.Tensor, done: _Done, process_set: ProcessSet) -> torch.Tensor:
    place = process_set.rank()
    start = sum(done.rows[:place])

    def backward(grad: torch.Tensor, name: str) -> torch.Tensor:
        mean = allreduce(grad, name=name, process_set=process_set)
        return mean[start : start + done.rows[place]]

    return done.connect(tensor, done.result, backward)


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
    return _submitted(_Submission(tensor, name, process_set).broadcast(root_rank))


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
    return _submitted(_Submission(tensor, name, process_set, in_place=True).broadcast(root_rank))


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Copy the root's tensor to every rank, in place; see :func:`broadcast`."""
    return api.synchronize(broadcast_async_(tensor, root_rank, name, process_set))


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
    done = _done(_Submission(tensor, name, process_set, like=tensor).broadcast(root_rank))

    def backward(grad: torch.Tensor, name: str) -> torch.Tensor:
        mean = allreduce(grad, name=name, process_set=process_set)
        return mean if process.rank() == root_rank else torch.zeros_like(mean)

    return done.connect(tensor, done.result, backward)


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
    return _submitted(_Submission(tensor, name, process_set).exchange(splits))


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
    submission = _Submission(tensor, name, process_set, like=tensor)
    done = _done(submission.exchange(splits))
    result, received = done.result if splits is not None else (done.result, None)
    rows = done.rows

    def backward(grad: torch.Tensor, name: str) -> torch.Tensor:
        return alltoall(grad, rows, name, process_set)[0]

    found = done.connect(tensor, result, backward)
    return found if received is None else (found, received)


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
    return _submitted(
        _Submission(tensor, name, process_set).scatter(op, prescale_factor, postscale_factor)
    )


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
    submission = _Submission(narrow, name, process_set, like=tensor)
    return _scattered(
        tensor, _done(submission.scatter(*settings)), ctx, compression, process_set, *settings
    )


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
    group = _group(tensors, name, process_set)
    return _all_submitted([each.scatter(*settings) for each in group])


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
    group = _group([narrow for narrow, _ in packed], name, process_set, like=tensors)
    found = _all_done([each.scatter(*settings) for each in group])
    return [
        _scattered(tensor, done, ctx, compression, process_set, *settings)
        for tensor, (_, ctx), done in zip(tensors, packed, found, strict=True)
    ]


def _scattered(
    tensor: torch.Tensor,
    done: _Done,
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

    return done.connect(tensor, compression.decompress(done.result, ctx), backward)


# What they have in common.


@dataclass(frozen=True, slots=True)
class _Done:
    """A complete operation that may be differentiated.

    Args:
        result: what its asynchronous form returns.
        rows: as of ``Outcome``.
        wanted: whether any rank wants to differentiate it.
        name: of the operation.
    """

    result: Any
    rows: tuple[int, ...]
    wanted: bool
    name: str

    def connect(
        self,
        tensor: torch.Tensor,
        result: torch.Tensor,
        backward: Callable[[torch.Tensor, str], torch.Tensor],
    ) -> torch.Tensor:
        """The result as a function of the tensor, if any rank differentiates.

        All ranks must take part in backward then, also those whose own tensor needs no gradient;
        they find each other by the name of the operation.
        """
        if not (self.wanted and torch.is_grad_enabled()):
            return result
        name = f"{self.name}.gradient"
        anchor = torch.zeros((), requires_grad=True)
        found: torch.Tensor = _Connect.apply(  # type: ignore[no-untyped-call]
            tensor, anchor, [result], lambda grad: backward(grad, name)
        )
        return found


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
        found = ctx.backward_of(grad)
        return (found if ctx.needs_input_grad[0] else None), None, None, None


class _Submission:
    """One tensor on its way into an operation.

    Args:
        tensor: what this rank contributes.
        name: of the operation.
        process_set: the ranks that take part.
        in_place: whether the result goes into the tensor.
        like: for the forms that can be differentiated: the tensor that the program passed; their
            handles give a :class:`_Done`.
        label: of the tensor, for messages.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        name: str | None,
        process_set: ProcessSet,
        in_place: bool = False,
        like: torch.Tensor | None = None,
        label: str = "tensor",
    ) -> None:
        check(label, tensor, NAMES)
        self._tensor = tensor
        self._name = name
        self._set = process_set
        self._in_place = in_place
        self._like = like

    def reduce(self, op: Reduction, prescale: float, postscale: float) -> Call[Any]:
        """All-reduce."""
        whole = self._private()
        scaling = {"prescale": float(prescale), "postscale": float(postscale)}
        finish = self._finisher(whole)
        return self._call(Kind.ALLREDUCE, whole, finish, op=op, **scaling)

    def broadcast(self, root_rank: int) -> Call[Any]:
        """Broadcast."""
        whole = self._private()
        return self._call(Kind.BROADCAST, whole, self._finisher(whole), root=root_rank)

    def gather(self, part_of: str = "") -> Call[Any]:
        """All-gather."""
        _check_rows("allgather", self._tensor)
        return self._call(Kind.ALLGATHER, self._private(), self._all_rows, part_of=part_of)

    def scatter(self, op: Reduction, prescale: float, postscale: float) -> Call[Any]:
        """Reduce-scatter."""
        _check_rows("reducescatter", self._tensor)
        scaling = {"prescale": float(prescale), "postscale": float(postscale)}
        op = chosen_reduction(None, op)
        self._number(Kind.REDUCESCATTER)
        place = self._set.rank()

        def finish(outcome: Outcome) -> torch.Tensor:
            return self._rows_of(outcome.rows[place], outcome)

        return self._call(Kind.REDUCESCATTER, self._private(), finish, op=op, **scaling)

    def exchange(self, splits: torch.Tensor | Sequence[int] | None) -> Call[Any]:
        """All-to-all."""
        _check_rows("alltoall", self._tensor)
        self._number(Kind.ALLTOALL)
        rows = _checked_splits(splits, self._tensor.shape[0], self._set.size())

        def finish(outcome: Outcome) -> Any:
            found = self._all_rows(outcome)
            if splits is None:
                return found
            device = splits.device if isinstance(splits, torch.Tensor) else None
            return found, torch.tensor(outcome.rows, dtype=torch.int32, device=device)

        return self._call(Kind.ALLTOALL, self._private(), finish, splits=rows)

    def _number(self, kind: Kind) -> int:
        """Of the process set, which must be known."""
        return self._set.known_id(f"{kind.value}()")

    def _private(self) -> torch.Tensor:
        """A contiguous tensor on the host that the operation may write to."""
        if self._in_place:
            return on_host(self._tensor)
        detached = self._tensor.detach()
        if detached.device.type == "cpu":
            return detached.clone(memory_format=torch.contiguous_format)
        return detached.cpu().contiguous()

    def _finisher(self, whole: torch.Tensor) -> Callable[[Outcome], torch.Tensor]:
        tensor = self._tensor

        def finish(_: Outcome) -> torch.Tensor:
            if not self._in_place:
                return whole.to(tensor.device)
            if whole.data_ptr() != tensor.data_ptr():
                with torch.no_grad():
                    tensor.copy_(whole)
            return tensor

        return finish

    def _rows_of(self, count: int, outcome: Outcome) -> torch.Tensor:
        """So many rows of what was gathered or received, as a new tensor."""
        tensor = self._tensor
        elements = torch.from_numpy(outcome.data.view(word_dtype(NAMES[tensor.dtype])))
        return elements.view(tensor.dtype).view(count, *tensor.shape[1:]).to(tensor.device)

    def _all_rows(self, outcome: Outcome) -> torch.Tensor:
        return self._rows_of(sum(outcome.rows), outcome)

    def _call(
        self, kind: Kind, whole: torch.Tensor, finish: Callable[[Outcome], Any], **details: Any
    ) -> Call[Any]:
        like = self._like

        def finish_all(outcome: Outcome) -> Any:
            result = finish(outcome)
            if like is None:
                return result
            return _Done(result, outcome.rows, outcome.differentiable, call.name or "")

        dtype = NAMES[whole.dtype]
        details.update(
            dtype=dtype,
            shape=tuple(whole.shape),
            device="cpu" if self._tensor.device.type == "cpu" else "gpu",
            differentiable=like is not None and like.requires_grad and torch.is_grad_enabled(),
        )
        data = raw(whole).view(word_dtype(dtype))
        call = Call(kind, self._name, self._number(kind), data, finish_all, details)
        return call


def _submitted(call: Call[T]) -> Handle[T]:
    return api.current(f"{call.kind.value}()").submit(call)


def _all_submitted(calls: Sequence[Call[T]]) -> Handle[list[T]]:
    return api.current("a grouped operation").submit_all(calls)


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


def _checked_splits(
    splits: torch.Tensor | Sequence[int] | None, num_rows: int, size: int
) -> tuple[int, ...]:
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
    if isinstance(splits, torch.Tensor) and (
        splits.dtype.is_floating_point or splits.dtype is torch.bool or splits.dim() != 1
    ):
        raise ValueError(
            f"alltoall: splits are {splits.dtype} of shape {tuple(splits.shape)}; expected one "
            "whole number per rank"
        )
    rows = tuple(int(count) for count in splits)
    if len(rows) != size or min(rows) < 0 or sum(rows) != num_rows:
        raise ValueError(
            f"alltoall: splits are {list(rows)}; expected {size} numbers of rows that add up to "
            f"{num_rows}"
        )
    return rows


def _check_linear(op: Reduction) -> None:
    if op not in (Op.AVERAGE, Op.SUM):
        raise RuntimeError(
            f"an operation that combines by {op} has no gradient; use Average or Sum"
        )


def _done(call: Call[_Done]) -> _Done:
    return api.synchronize(_submitted(call))


def _all_done(calls: Sequence[Call[_Done]]) -> list[_Done]:
    return api.synchronize(_all_submitted(calls))


def _check_rows(call: str, tensor: torch.Tensor) -> None:
    if tensor.dim() == 0:
        raise ValueError(f"{call} needs at least one dimension; found a scalar")


def _group(
    group: Sequence[torch.Tensor],
    name: str | None,
    process_set: ProcessSet,
    in_place: bool = False,
    like: Sequence[torch.Tensor] | None = None,
) -> list[_Submission]:
    """Tensors of one group; their names tell how many there are."""
    return [
        _Submission(
            tensor,
            f"{name}.{index + 1}of{len(group)}" if name else None,
            process_set,
            in_place,
            like[index] if like is not None else None,
            f"tensors[{index}]",
        )
        for index, tensor in enumerate(group)
    ]
