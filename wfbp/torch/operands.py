"""PyTorch's tensors in named operations, and derivatives.

Differentiation follows Horovod. If the tensor of any rank requires a gradient, the results of all
ranks do: all have to take part in backward. The gradient of a sum over ranks is the sum of the
ranks' gradients, that of an average, of gathered rows and of a broadcast their average.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from wfbp.comm.backend import Buffer, word_dtype
from wfbp.core.types import Op
from wfbp.runtime import process
from wfbp.runtime.collectives import api, operands
from wfbp.runtime.collectives.coordinator import Kind
from wfbp.runtime.collectives.forms import FORMS, Form
from wfbp.runtime.collectives.named_lane import NamedOperation, Outcome
from wfbp.runtime.collectives.operands import Operand, chosen_op
from wfbp.runtime.collectives.process_sets import ProcessSet, global_process_set
from wfbp.torch.compression import Compression, Compressor
from wfbp.torch.tensors import NAMES as TENSOR_NAMES
from wfbp.torch.tensors import check, on_host, raw

NAMES = {**TENSOR_NAMES, torch.int8: "int8", torch.int16: "int16", torch.bool: "bool"}
"""The element types that can travel, and their names below."""


class Tensor(Operand[torch.Tensor]):
    """One tensor on its way into an operation.

    If the result can be differentiated, ``like`` is the tensor that the program passed.
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
        self.differentiable = like is not None and like.requires_grad and torch.is_grad_enabled()
        self._tensor = tensor
        self._in_place = in_place
        self._private = tensor  # where the operation works

    def data(self) -> Buffer:
        if self._in_place:
            note_change(self._tensor)
            self._private = on_host(self._tensor)
        else:
            self._private = self._tensor.detach().to(
                "cpu", memory_format=torch.contiguous_format, copy=True
            )
        return raw(self._private).view(word_dtype(self.dtype))

    def whole(self, outcome: Outcome) -> torch.Tensor:
        tensor, private = self._tensor, self._private
        if not self._in_place:
            return private.to(tensor.device)
        note_change(tensor)  # once more: what was saved for backward meanwhile is wrong, too
        if private.data_ptr() != tensor.data_ptr():
            with torch.no_grad():
                tensor.copy_(private)
        return tensor

    def rows(self, outcome: Outcome, count: int) -> torch.Tensor:
        elements = torch.from_numpy(outcome.data.view(word_dtype(self.dtype)))
        rows = elements.view(self._tensor.dtype).view(count, *self.shape[1:])
        return rows.to(self._tensor.device)

    def counts(self, rows: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.int32)


def note_change(tensor: torch.Tensor) -> None:
    """Let backward raise if it needs a tensor's values from before an operation overwrote them."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def perform(
    form: Form,
    tensors: Any,
    name: str | None = None,
    average: bool | None = None,
    op: Op | None = None,
    compression: type[Compressor] = Compression.none,
    root_rank: int | None = None,
    splits: torch.Tensor | Sequence[int] | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Carry out a function of ``wfbp.torch.collectives`` on a tensor, or on several."""
    reduces = form.kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER)
    reduction = chosen_op(average, op) if reduces else None
    counts_device = None
    if isinstance(splits, torch.Tensor):
        if splits.dtype.is_floating_point or splits.dtype is torch.bool or splits.dim() != 1:
            raise operands.wrong_splits(splits.dtype, splits.shape)
        counts_device, splits = splits.device, splits.tolist()

    def gradient(outcome: Outcome, grad: torch.Tensor) -> torch.Tensor:
        return _gradient(
            form,
            outcome,
            grad,
            reduction,
            compression,
            root_rank,
            process_set,
            prescale_factor,
            postscale_factor,
        )

    def make(tensor: torch.Tensor, label: str, member: str | None) -> NamedOperation[Any]:
        differentiates = form.waits and not form.in_place
        check(label, tensor, NAMES)
        narrow, context = (
            compression.compress(tensor.detach()) if differentiates else (tensor, None)
        )
        operation = operands.make_operation(
            form.kind,
            Tensor(narrow, form.in_place, tensor if differentiates else None, label),
            member,
            process_set,
            op=reduction,
            root_rank=root_rank,
            splits=splits,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
        )
        finish = operation.finish

        def connected(outcome: Outcome) -> Any:
            result, counts = finish(outcome), None
            if splits is not None:
                result, counts = result
            if differentiates:
                result = compression.decompress(result, context)
                if outcome.differentiable and torch.is_grad_enabled():
                    # On all ranks, also those whose own tensor needs no gradient: all must take
                    # part in backward, where they find each other by the operation's name.
                    anchor = torch.zeros((), requires_grad=True)
                    result = _Connect.apply(  # type: ignore[no-untyped-call]
                        tensor, anchor, [result], partial(gradient, outcome)
                    )
            return result if counts is None else (result, counts.to(counts_device))

        operation.finish = connected
        return operation

    return operands.perform(form, tensors, name, make)


def _gradient(
    form: Form,
    outcome: Outcome,
    grad: torch.Tensor,
    op: Op | None,
    compression: type[Compressor],
    root_rank: int | None,
    process_set: ProcessSet,
    prescale_factor: float,
    postscale_factor: float,
) -> torch.Tensor:
    """The gradient of an operation's argument, from that of its result: again an operation."""
    if op not in (None, Op.AVERAGE, Op.SUM):
        raise RuntimeError(
            f"an operation that combines by {op} has no gradient; use Average or Sum"
        )
    kind, factor = form.kind, prescale_factor * postscale_factor
    again: dict[str, Any] = {"name": f"{outcome.name}.gradient", "process_set": process_set}
    if kind is Kind.ALLTOALL:
        return perform(FORMS["alltoall"], grad, splits=outcome.rows, **again)[0]  # type: ignore[no-any-return]
    if kind is Kind.REDUCESCATTER:
        factor *= process_set.size() if op is Op.SUM else 1
        return perform(FORMS["allgather"], grad * factor if factor != 1 else grad, **again)  # type: ignore[no-any-return]
    if kind is Kind.ALLREDUCE:
        again |= {"op": op, "compression": compression}
        again |= {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    result: torch.Tensor = perform(FORMS["allreduce"], grad, **again)
    if kind is Kind.BROADCAST:
        return result if process.rank() == root_rank else torch.zeros_like(result)
    if kind is Kind.ALLGATHER:
        place = process_set.rank()
        start = sum(outcome.rows[:place])
        return result[start : start + outcome.rows[place]]
    return result


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
        gradient: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        ctx.gradient = gradient
        return result[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        result = ctx.gradient(grad)
        return (result if ctx.needs_input_grad[0] else None), None, None, None


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op = Op.AVERAGE,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Begin to combine a sparse tensor by gathering its indices and values.

    Args:
        tensor: sparse (COO), of the same shape on every rank.
        name: matches the operations of ranks.
        op: ``Average`` or ``Sum``.
        process_set: the ranks that take part.

    Returns:
        A function that waits and returns the sparse result, not coalesced.

    Raises:
        ValueError: another ``op``, or a tensor that is not sparse.
        DisagreementError: from that function, on every rank, if ranks' tensors differ in shape,
            sparse dimensions or element type.
    """
    if op not in (Op.AVERAGE, Op.SUM):
        raise ValueError(f"op is {op}; sparse tensors are combined by {Op.AVERAGE} or {Op.SUM}")
    if tensor.layout is not torch.sparse_coo:
        raise ValueError(f"expected a sparse tensor (COO), found {tensor.layout}")
    called = (
        f"sparse_allreduce of {tensor.dtype} of shape {tuple(tensor.shape)} with "
        f"{tensor.sparse_dim()} sparse dimensions, op={op}"
    )
    parts = {"indices": tensor._indices().t().contiguous(), "values": tensor._values()}
    both = api.current("sparse_allreduce_async()").submit(
        [
            operands.make_operation(
                Kind.ALLGATHER,
                Tensor(part),
                f"{name}.{kind}" if name else None,
                process_set,
                called=called,
            )
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
