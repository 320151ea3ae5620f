"""PyTorch's tensors in named operations with Horovod's arguments: ``average`` and Adasum."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import partial
from typing import Any

import torch

from wfbp.core.types import Op
from wfbp.errors import InternalError
from wfbp.runtime.collectives import operands
from wfbp.runtime.collectives.forms import Form
from wfbp.runtime.collectives.process_sets import ProcessSet, global_process_set
from wfbp.runtime.named.coordinator import Kind
from wfbp.runtime.named.named_lane import NamedOperation, Outcome
from wfbp.torch import tensor_operands
from wfbp.torch.compression import Compression, Compressor, check_compressor
from wfbp.torch.tensors import check

_HALF = (torch.float16, torch.bfloat16)


class HorovodOp(Enum):
    """Combinations of contributions that :class:`wfbp.core.types.Op` lacks."""

    ADASUM = "adasum"

    def __str__(self) -> str:
        return "hvd.Adasum"


def perform(
    form: Form,
    tensors: Any,
    name: str | None = None,
    *,
    average: bool | None = None,
    op: Op | HorovodOp | None = None,
    **options: Any,
) -> Any:
    """Carry out a function of ``wfbp.horovod.torch.collectives``."""
    if average is not None:
        if op is not None:
            raise ValueError("average and op both say how ranks are combined; pass one of them")
        op = Op.AVERAGE if average else Op.SUM
    if op is HorovodOp.ADASUM:
        if form.kind is not Kind.ALLREDUCE:
            raise InternalError(f"{form.kind.value} cannot combine by {op}; only allreduce can")
        return _perform_adasum(form, tensors, name, **options)
    if op is not None or form.kind is Kind.ALLREDUCE:
        options["op"] = Op.AVERAGE if op is None else op
    return tensor_operands.perform(form, tensors, name, averages_gradients=True, **options)


def _perform_adasum(
    form: Form,
    tensors: Any,
    name: str | None,
    *,
    compression: type[Compressor] = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """All-reduce by Adasum: every rank gathers the contributions of all, and combines them."""
    check_compressor(compression, f"an operation by {HorovodOp.ADASUM}")
    size = process_set.size()
    if size & (size - 1):
        raise ValueError(f"{HorovodOp.ADASUM} combines a power of two of ranks; there are {size}")

    def make(tensor: torch.Tensor, label: str, member: str | None) -> NamedOperation[Any]:
        check(label, tensor, tensor_operands.NAMES)
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(f"{HorovodOp.ADASUM} combines floating point; found {tensor.dtype}")
        mine, context = compression.compress(tensor.detach())
        # Ranks compare this text: it has all that must be equal.
        called = (
            f"allreduce by {HorovodOp.ADASUM} of {mine.dtype} of shape {tuple(mine.shape)}, "
            f"prescale_factor={prescale_factor}, postscale_factor={postscale_factor}"
        )
        operation = operands.make_operation(
            Kind.ALLGATHER,
            tensor_operands.operand_of((mine * prescale_factor)[None]),
            member,
            process_set,
            called=f"{called}, {member!r}" if member else called,
        )
        gather = operation.finish

        def finish(outcome: Outcome) -> torch.Tensor:
            combined = adasum(list(gather(outcome))) * postscale_factor
            result: torch.Tensor = compression.decompress(combined, context)
            if form.in_place:
                with torch.no_grad():
                    return tensor.copy_(result)
            if tensor.requires_grad and torch.is_grad_enabled():
                refuse = partial(tensor_operands.refuse_gradient, HorovodOp.ADASUM)
                result = tensor_operands.Connect.apply(tensor, None, [result], refuse)  # type: ignore[no-untyped-call]
            return result

        operation.finish = finish
        return operation

    return operands.submit_form(form, tensors, name, make)


def adasum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Combine a power of two of contributions pairwise, first ranks that differ in the lowest bit.

    Maleki et al., "Scaling Distributed Training with Adaptive Summation" (2020), equation 3: the
    result is the sum of orthogonal gradients, and the average of parallel ones.

    >>> adasum([torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])])
    tensor([1., 1.])
    """
    dtype = parts[0].dtype
    level = [torch.view_as_real(part) if part.is_complex() else part for part in parts]
    level = [part.float() if part.dtype in _HALF else part for part in level]
    while len(level) > 1:
        level = [_pair(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
    return torch.view_as_complex(level[0]) if dtype.is_complex else level[0].to(dtype)


def _pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    wide_a, wide_b = a.double(), b.double()
    pairs = (wide_a, wide_b), (wide_a, wide_a), (wide_b, wide_b)
    dot, norm_a, norm_b = (float((x * y).sum()) for x, y in pairs)
    of_a = 1.0 if norm_a == 0.0 else 1.0 - dot / (2.0 * norm_a)
    of_b = 1.0 if norm_b == 0.0 else 1.0 - dot / (2.0 * norm_b)
    return (of_a * wide_a + of_b * wide_b).to(a.dtype)
