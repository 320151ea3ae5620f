"""Between tensors and the bytes that travel."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from wfbp.comm.backend import Buffer
from wfbp.core.types import TensorSpec
from wfbp.runtime.fusion import storage_dtype

NAMES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.uint8: "uint8",
}


def spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    """What a tensor looks like to the runtime.

    Raises:
        ValueError: an element type or device that cannot be sent.
    """
    check(name, tensor)
    return TensorSpec(name, tuple(tensor.shape), NAMES[tensor.dtype])


def check(name: str, tensor: torch.Tensor) -> None:
    """Raise ``ValueError`` unless a tensor's bytes can be sent."""
    if tensor.dtype not in NAMES:
        known = ", ".join(NAMES.values())
        raise ValueError(f"{name} is {tensor.dtype}; expected one of {known}")
    check_place(name, tensor)


def check_place(name: str, tensor: torch.Tensor) -> None:
    """Raise ``ValueError`` unless a tensor lies dense in the host's memory."""
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}; expected a tensor on the CPU")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} is {tensor.layout}; expected a dense tensor")


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill its memory without gap or overlap, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def storage(dtype: torch.dtype) -> np.dtype[Any]:
    """The NumPy type in which elements of a tensor travel (uint16 for bfloat16)."""
    return storage_dtype(NAMES[dtype])


def raw(tensor: torch.Tensor) -> Buffer:
    """The bytes of a contiguous tensor, shared, as uint8."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def view(data: Buffer, like: torch.Tensor) -> torch.Tensor:
    """Bytes as a tensor with the element type, shape and memory order of another, shared."""
    values = torch.from_numpy(data).view(like.dtype)
    if is_dense(like):
        return values.as_strided(like.shape, like.stride())
    return values.view(like.shape)
