"""Collectives on tensors with Horovod's arguments: those of :mod:`wfbp.torch`, ``average`` and
Adasum.

They are made of the table in ``wfbp.runtime.collectives.forms``; ``collectives.pyi`` declares them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from wfbp.core.types import Op
from wfbp.horovod.torch.adasum import perform
from wfbp.runtime import process
from wfbp.runtime.collectives import api, operands
from wfbp.runtime.collectives.forms import FORMS, Form, make_functions
from wfbp.runtime.collectives.process_sets import ProcessSet, global_process_set
from wfbp.runtime.named.coordinator import Kind
from wfbp.torch import collectives
from wfbp.torch.tensor_operands import operand_of


def _parameters(form: Form) -> tuple[tuple[str, Any, str], ...]:
    """Those of :mod:`wfbp.torch`, with ``average`` where Horovod has it."""
    parameters = collectives.parameters(form)
    if form.kind is not Kind.ALLREDUCE:
        return parameters
    op = ("op", None, "Op | HorovodOp | None")
    return (
        ("average", None, "bool | None"),
        *(op if parameter[0] == "op" else parameter for parameter in parameters),
    )


_MEANING = {
    "average": "Horovod's older form of ``op``: True for ``Average``, False for ``Sum``.",
    "op": "``Average`` (the default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``.",
}

_EXAMPLES = {
    "allreduce": """\
>>> import torch, wfbp.horovod.torch as hvd
>>> hvd.init()
>>> hvd.allreduce(torch.tensor([1.0, 2.0]), op=hvd.Adasum)  # alike on every rank
tensor([1., 2.])""",
}


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
    both = process.operations("sparse_allreduce_async()").submit(
        [
            operands.make_operation(
                Kind.ALLGATHER,
                operand_of(part),
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


__all__ = [*FORMS, "sparse_allreduce_async"]
globals().update(make_functions(__name__, _parameters, perform, "", _EXAMPLES, _MEANING))
