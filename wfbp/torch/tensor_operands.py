"""PyTorch's tensors in named operations, and derivatives.

If the tensor of any rank requires a gradient, the results of all ranks do: all have to take part in
backward. Gradients are those of the sum of all ranks' losses, as in ``torch.distributed.nn`` and
``wfbp.jax``. Horovod's interface divides some by the number of ranks (``averages_gradients``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch

from wfbp.comm.arrays import Buffer, word_dtype
from wfbp.core.types import Op
from wfbp.runtime.collectives import operands
from wfbp.runtime.collectives.forms import FORMS, Form
from wfbp.runtime.collectives.operands import Operand
from wfbp.runtime.collectives.process_sets import ProcessSet, global_process_set
from wfbp.runtime.named.coordinator import Kind, Request
from wfbp.runtime.named.named_lane import NamedOperation, Outcome
from wfbp.torch.compiling import uncompiled
from wfbp.torch.compression import Compression, Compressor, check_compressor
from wfbp.torch.tensors import NAMES as TENSOR_NAMES
from wfbp.torch.tensors import check, on_host, raw, resolved

NAMES = {**TENSOR_NAMES, torch.int8: "int8", torch.int16: "int16", torch.bool: "bool"}
"""The element types that can travel, and their names below."""


def operand_of(
    tensor: torch.Tensor,
    in_place: bool = False,
    like: torch.Tensor | None = None,  # the program's, if the result can be differentiated
    label: str = "tensor",
) -> Operand:
    """A tensor on its way into an operation."""
    check(label, tensor, NAMES)
    if in_place:
        note_change(tensor)
        private = on_host(tensor)
    else:
        held = resolved(tensor.detach())
        private = held.to("cpu", memory_format=torch.contiguous_format, copy=True)
    dtype, shape = NAMES[tensor.dtype], tuple(tensor.shape)

    def whole() -> torch.Tensor:
        if not in_place:
            return private.to(tensor.device)
        note_change(tensor)  # once more: what was saved for backward meanwhile is wrong, too
        if private.data_ptr() != tensor.data_ptr():
            with torch.no_grad():
                tensor.copy_(private)
        return tensor

    def rows(data: Buffer, count: int) -> torch.Tensor:
        elements = torch.from_numpy(data.view(word_dtype(dtype))).view(tensor.dtype)
        return elements.view(count, *shape[1:]).to(tensor.device)

    differentiable = like is not None and like.requires_grad and torch.is_grad_enabled()
    data = raw(private).view(word_dtype(dtype))
    return Operand(dtype, shape, data, whole, rows, differentiable)


def note_change(tensor: torch.Tensor) -> None:
    """Let backward raise if it needs a tensor's values from before an operation overwrote them."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


@uncompiled
def perform(
    form: Form,
    tensors: Any,
    name: str | None = None,
    *,
    compression: type[Compressor] = Compression.none,
    process_set: ProcessSet = global_process_set,
    averages_gradients: bool = False,
    **options: Any,
) -> Any:
    """Carry out a function of ``wfbp.torch.collectives`` on a tensor, or on several; ``options``
    are the other arguments of :func:`wfbp.runtime.collectives.operands.make_operation`.
    ``averages_gradients``: as Horovod differentiates."""
    check_compressor(compression, "an operation")
    differentiates = form.waits and not form.in_place
    splits = options.get("splits")

    def make(tensor: torch.Tensor, label: str, member: str | None) -> NamedOperation[Any]:
        check(label, tensor, NAMES)
        narrow, context = tensor, None
        if differentiates:
            narrow, context = compression.compress(tensor.detach())
        operand = operand_of(narrow, form.in_place, tensor if differentiates else None, label)
        operation = operands.make_operation(form.kind, operand, member, process_set, **options)
        finish, request = operation.finish, operation.request

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
                    gradient = partial(
                        _gradient, request, outcome, process_set, compression, averages_gradients
                    )
                    result = Connect.apply(tensor, anchor, [result], gradient)  # type: ignore[no-untyped-call]
            if counts is None:
                return result
            device = splits.device if isinstance(splits, torch.Tensor) else None
            return result, torch.from_numpy(counts).to(device)

        operation.finish = connected
        return operation

    return operands.submit_form(form, tensors, name, make)


def _gradient(
    request: Request,
    outcome: Outcome,
    process_set: ProcessSet,
    compression: type[Compressor],
    averages: bool,
    grad: torch.Tensor,
) -> torch.Tensor:
    """The gradient of an operation's argument, from that of its result: again an operation."""
    kind, op = request.kind, Op(request.op) if request.op else None
    if op not in (None, Op.AVERAGE, Op.SUM):
        refuse_gradient(op)
    again: dict[str, Any] = {
        "name": f"{outcome.name}.gradient",
        "process_set": process_set,
        "averages_gradients": averages,
    }
    result: torch.Tensor
    if kind is Kind.ALLTOALL:
        result, _ = perform(FORMS["alltoall"], grad, splits=outcome.rows, **again)
        return result
    if kind is Kind.REDUCESCATTER:
        factor = request.prescale * request.postscale
        if averages:
            factor *= process_set.size() if op is Op.SUM else 1
        elif op is Op.AVERAGE:
            factor /= process_set.size()
        result = perform(FORMS["allgather"], grad * factor if factor != 1 else grad, **again)
        return result
    again["op"] = Op.AVERAGE if averages else Op.SUM
    if kind is Kind.ALLREDUCE:
        again |= {"op": op, "compression": compression}
        again |= {"prescale_factor": request.prescale, "postscale_factor": request.postscale}
    result = perform(FORMS["allreduce"], grad, **again)
    if kind is Kind.BROADCAST:
        return result if process_set.rank() == request.root else torch.zeros_like(result)
    if kind is Kind.ALLGATHER:
        place = process_set.rank()
        start = sum(outcome.rows[:place])
        return result[start : start + outcome.rows[place]]
    return result


def refuse_gradient(op: object, *_: torch.Tensor) -> NoReturn:
    """Raise ``RuntimeError``, because a combination cannot be differentiated."""
    raise RuntimeError(f"an operation that combines by {op} has no gradient; use Average or Sum")


class Connect(torch.autograd.Function):
    """Returns what was computed outside; backward runs the collective of its gradient."""

    # The result comes in a list because it is no input; the anchor makes it require a gradient.

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        anchor: torch.Tensor | None,
        result: list[torch.Tensor],
        gradient: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        ctx.gradient = gradient
        return result[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        result = ctx.gradient(grad)
        return (result if ctx.needs_input_grad[0] else None), None, None, None
