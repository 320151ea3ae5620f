"""How the tensors of several ranks are combined: natively, or by PyTorch."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed import ReduceOp

from wfbp.comm.arrays import Buffer
from wfbp.comm.mpi.exchange import Reduction
from wfbp.core.types import ITEM_BYTES, Op
from wfbp.torch.tensors import NAMES, raw

Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_REDUCTIONS: dict[Any, tuple[Op | None, Combine]] = {
    # By the C++ extension, and by PyTorch for other element types.
    ReduceOp.SUM: (Op.SUM, torch.add),
    ReduceOp.PREMUL_SUM: (Op.SUM, torch.add),
    ReduceOp.AVG: (Op.AVERAGE, torch.add),
    ReduceOp.PRODUCT: (Op.PRODUCT, torch.mul),
    ReduceOp.MIN: (Op.MIN, torch.minimum),
    ReduceOp.MAX: (Op.MAX, torch.maximum),
    ReduceOp.BAND: (None, torch.bitwise_and),
    ReduceOp.BOR: (None, torch.bitwise_or),
    ReduceOp.BXOR: (None, torch.bitwise_xor),
}


def op_name(op: ReduceOp) -> str:
    """The name of a reduction, for messages."""
    return str(getattr(op, "op", op)).rpartition(".")[2]


def contribution(tensor: torch.Tensor, op: Any) -> torch.Tensor:
    """This rank's addend: a multiple of the tensor, if the reduction has a factor."""
    if op is None or op != ReduceOp.PREMUL_SUM:
        return tensor
    multiple: torch.Tensor = tensor * op.factor
    return multiple.to(tensor.dtype)


def reduction(dtype: torch.dtype, op: ReduceOp, size: int) -> Reduction:
    """How elements of ``size`` ranks are combined; ``ValueError`` if they cannot be."""
    kind: Any = next((known for known in _REDUCTIONS if op == known), None)
    where = f"{op_name(op)} of {dtype}"
    if kind is None:
        raise ValueError(f"{where}: expected one of {', '.join(map(op_name, _REDUCTIONS))}")
    refused = f"{where} is not defined; convert the tensor to another type first"
    if dtype is torch.bool and kind in (ReduceOp.AVG, ReduceOp.PREMUL_SUM):
        raise ValueError(refused)  # the result has another type
    native, combine = _REDUCTIONS[kind]
    if dtype.is_complex and native in (Op.SUM, Op.AVERAGE):
        dtype = dtype.to_real()
    if native is not None and NAMES.get(dtype) in ITEM_BYTES:
        return Reduction(dtype.itemsize, NAMES[dtype], native)
    divisor = size if native is Op.AVERAGE else 1
    function = functools.partial(_combine, combine, dtype, divisor)
    try:  # PyTorch decides
        example = raw(torch.ones(1, dtype=dtype))
        function([example, example], example)
    except RuntimeError as error:
        raise ValueError(refused) from error
    return Reduction(dtype.itemsize, function=function)


def _combine(
    combine: Combine, dtype: torch.dtype, divisor: int, shards: Sequence[Buffer], out: Buffer
) -> None:
    # Copies: those of other ranks are read-only, which PyTorch does not support.
    values = [torch.from_numpy(np.array(shard)).view(dtype) for shard in shards]
    result = functools.reduce(combine, values)
    if divisor > 1:
        result = torch.div(result, divisor, rounding_mode="trunc")
    out[:] = raw(result)


def add_sparse(payloads: Sequence[bytes], out: torch.Tensor) -> None:
    """Replace a sparse tensor by the sum of saved ones."""
    addends = (torch.load(io.BytesIO(payload)) for payload in payloads)
    with torch.no_grad():
        out.copy_(functools.reduce(torch.add, addends).coalesce())
