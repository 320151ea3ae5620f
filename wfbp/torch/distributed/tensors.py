"""Between the tensors of an operation and the bytes that ranks exchange, and how they combine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch.distributed import ReduceOp

from wfbp.comm.arrays import Buffer
from wfbp.comm.mpi.exchange import Reduction
from wfbp.core.types import Op
from wfbp.torch.tensors import NAMES, raw

_NATIVE = {
    ReduceOp.SUM: Op.SUM,
    ReduceOp.PREMUL_SUM: Op.SUM,
    ReduceOp.AVG: Op.AVERAGE,
    ReduceOp.PRODUCT: Op.PRODUCT,
    ReduceOp.MIN: Op.MIN,
    ReduceOp.MAX: Op.MAX,
}
_Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_FUNCTIONS: dict[Any, _Combine] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.PREMUL_SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
_LOGICAL: dict[Any, _Combine] = {
    ReduceOp.SUM: torch.logical_or,
    ReduceOp.PRODUCT: torch.logical_and,
    ReduceOp.MIN: torch.logical_and,
    ReduceOp.MAX: torch.logical_or,
    ReduceOp.BAND: torch.logical_and,
    ReduceOp.BOR: torch.logical_or,
    ReduceOp.BXOR: torch.logical_xor,
}
_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)


def check(*tensors: torch.Tensor) -> None:
    """Raise ``ValueError`` unless these are dense tensors of the CPU."""
    for tensor in tensors:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            raise ValueError(
                f"a tensor is {tensor.layout} on {tensor.device}; expected a dense one on the CPU"
            )


def sizes(*tensors: torch.Tensor) -> str:
    """Type and numbers of elements, such as ``float32[3, 5]`` for two tensors."""
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    return f"{dtype}[{', '.join(str(tensor.numel()) for tensor in tensors)}]"


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a contiguous copy if it is not contiguous."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def source(tensor: torch.Tensor) -> Buffer:
    """The bytes of a tensor that is only read."""
    return raw(dense(tensor))


class Targets:
    """Bytes for tensors that receive: their own where they are contiguous."""

    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def of(self, tensor: torch.Tensor, values: torch.Tensor | None = None) -> Buffer:
        """Bytes that become the tensor's at :meth:`deliver`; filled with ``values``, if any."""
        own = tensor.detach()
        if own.is_contiguous() and not own.is_conj() and (values is None or values is tensor):
            return raw(own)
        copy = torch.empty(own.shape, dtype=own.dtype) if values is None else dense(values).clone()
        self._copies.append((own, copy))
        return raw(copy)

    def deliver(self) -> None:
        """Fill the tensors that are not contiguous."""
        for tensor, copy in self._copies:
            tensor.copy_(copy)


def op_name(op: ReduceOp) -> str:
    """The name of a reduction, for messages."""
    return str(getattr(op, "op", op)).rpartition(".")[2]


def reduction(dtype: torch.dtype, op: ReduceOp, size: int) -> Reduction:
    """How elements are combined; ``ValueError`` if they cannot be."""
    kind: Any = next((known for known in _FUNCTIONS if op == known), None)
    where = f"{op_name(op)} of {dtype}"
    if kind is None:
        raise ValueError(f"{where}: expected one of {', '.join(map(op_name, _FUNCTIONS))}")
    if dtype.is_complex and kind in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM):
        dtype = dtype.to_real()
    if kind in _NATIVE and dtype in NAMES:
        return Reduction(dtype.itemsize, NAMES[dtype], _NATIVE[kind])
    number = dtype.is_floating_point or dtype.is_complex
    functions = _LOGICAL if dtype is torch.bool else _FUNCTIONS
    if (
        kind not in functions
        or (kind in _BITWISE and number)
        or (dtype.is_complex and kind in (ReduceOp.MIN, ReduceOp.MAX))
        or (dtype.is_floating_point and dtype.itemsize == 1)
    ):
        raise ValueError(f"{where} is not defined; convert the tensor to another type first")
    function, divisor = functions[kind], size if kind is ReduceOp.AVG else 1

    def combine(shards: Sequence[Buffer], out: Buffer) -> None:
        # Copies: those of other ranks are read-only, which PyTorch does not support.
        values = [torch.from_numpy(np.array(shard)).view(dtype) for shard in shards]
        result = reduce(function, values)
        if divisor > 1:
            result = torch.div(result, divisor, rounding_mode="trunc")
        out[:] = raw(result)

    return Reduction(dtype.itemsize, function=combine)


def premultiplied(tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """This rank's contribution: a multiple, if the reduction has a factor."""
    kind: Any = op
    return tensor * op.factor if kind == ReduceOp.PREMUL_SUM else tensor


def pack_sparse(tensor: torch.Tensor) -> bytes:
    """Number of values, indices and values of a sparse tensor."""
    own = tensor.detach().coalesce()
    indices, values = own.indices(), own.values()
    return b"".join(
        (len(values).to_bytes(8, "little"), source(indices).tobytes(), source(values).tobytes())
    )


def add_sparse(payloads: Sequence[bytes], out: torch.Tensor) -> None:
    """Replace a sparse tensor by the sum of packed ones of the same type and shape."""
    like = out.detach().coalesce()
    total = torch.sparse_coo_tensor(
        like.indices()[:, :0], like.values()[:0], like.shape, check_invariants=True
    )
    for payload in payloads:
        count, body = int.from_bytes(payload[:8], "little"), np.frombuffer(payload[8:], np.uint8)
        end = 8 * like.sparse_dim() * count
        indices = torch.from_numpy(body[:end].copy()).view(torch.int64)
        values = torch.from_numpy(body[end:].copy()).view(like.dtype)
        total = total + torch.sparse_coo_tensor(
            indices.view(like.sparse_dim(), count),
            values.view(count, *like.values().shape[1:]),
            like.shape,
            check_invariants=True,
        )
    with torch.no_grad():
        out.copy_(total.coalesce())
