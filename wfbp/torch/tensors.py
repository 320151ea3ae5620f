"""Between tensors and the bytes that travel, and where tensors lie: the host or one device."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from wfbp.comm.arrays import Buffer, MemoryAt
from wfbp.comm.device.device import Device
from wfbp.comm.device.links import OnDevice
from wfbp.comm.locations import Location, in_host_memory
from wfbp.core.types import TensorSpec
from wfbp.cuda.cupy_device import check_local_rank
from wfbp.runtime import process
from wfbp.runtime.step import BufferView

NAMES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.complex64: "complex64",
    torch.complex128: "complex128",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.uint8: "uint8",
}

_SAMPLED_ELEMENTS = 16


def spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    """The runtime's description of a tensor; ``ValueError`` if it cannot be sent."""
    check(name, tensor)
    return TensorSpec(name, tuple(tensor.shape), NAMES[tensor.dtype])


def check(name: str, tensor: torch.Tensor, names: Mapping[torch.dtype, str] = NAMES) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless a tensor's bytes can be sent so."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__qualname__}; expected a torch.Tensor")
    if tensor.dtype not in names:
        known = ", ".join(names.values())
        raise ValueError(f"{name} is {tensor.dtype}; expected one of {known}")
    check_place(name, tensor)


def check_place(name: str, tensor: torch.Tensor) -> None:
    """Raise ``ValueError`` unless a tensor lies dense in memory of the host or a CUDA device."""
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} is on {tensor.device}; expected the CPU or a CUDA device")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} is {tensor.layout}; expected a dense tensor")


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same values that are in its memory, unlike a lazy conjugate's."""
    return tensor.resolve_conj().resolve_neg()


def values(grad: torch.Tensor) -> torch.Tensor:
    """A gradient's elements, or those that a sparse one has; shared, and unknown to autograd."""
    return grad._values() if grad.is_sparse else grad.detach()


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill its memory, in any order; not of a lazy conjugate."""
    is_plain = not (tensor.is_conj() or tensor.is_neg())
    return is_plain and torch.ops.aten.is_non_overlapping_and_dense(tensor)


def is_writeable(tensor: torch.Tensor) -> bool:
    """Whether every element can be written in place, in memory that is the element's alone."""
    is_lazy = tensor.is_conj() or tensor.is_neg() or tensor.is_inference()
    return not is_lazy and torch._debug_has_internal_overlap(tensor) != 1


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in the order of their memory, shared."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,))


def raw(tensor: torch.Tensor) -> Buffer:
    """The bytes of a contiguous tensor on the host, shared, as uint8."""
    if not tensor.numel():
        return np.empty(0, np.uint8)
    if not (address := tensor.data_ptr()):  # it wraps another tensor, which may yet arrive
        return tensor.detach().reshape(-1).view(torch.uint8).numpy()
    # Not by Tensor.numpy(), after which the tensor's memory can no longer be resized; FSDP does.
    return np.asarray(MemoryAt(address, tensor.nbytes, tensor))


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of the same values on the host: itself, where it is one."""
    return resolved(tensor.detach()).cpu().contiguous()


def shared(data: Any) -> torch.Tensor:
    """Bytes of the host (NumPy) or of a device (CuPy) as a tensor of uint8, shared."""
    if hasattr(data, "__array_interface__"):
        return torch.from_numpy(data)
    if not data.nbytes:
        return torch.empty(0, dtype=torch.uint8, device=f"cuda:{data.device.id}")
    exported = MemoryAt(int(data.data.ptr), data.nbytes, data, "cuda_array")
    return torch.as_tensor(exported, device=f"cuda:{data.device.id}")


class Layout(NamedTuple):
    """The order of a tensor's elements in memory while they are sent."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """The tensor's own, or row by row where it has gaps."""
        dense = tensor if is_dense(tensor) else torch.empty(tensor.shape, device="meta")
        return cls(tensor.dtype, tensor.shape, dense.stride())

    def empty(self, device: torch.device) -> torch.Tensor:
        """A tensor like that."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def check(self, param: torch.Tensor, grad: torch.Tensor, name: str) -> None:
        """Raise ``RuntimeError`` unless a parameter and its gradient can travel like that."""
        is_same = param.shape == self.shape and param.dtype is self.dtype
        if is_same and grad.shape == self.shape:
            return
        tensor = grad if is_same else param
        raise RuntimeError(
            f"{name} was {NAMES[self.dtype]}{tuple(self.shape)} when the optimizer was wrapped and "
            f"is {str(tensor.dtype).removeprefix('torch.')}{tuple(tensor.shape)} now; convert a "
            "model before DistributedOptimizer"
        )


def unusual_order(tensor: torch.Tensor) -> str:
    """The order of a tensor's dimensions in memory, outermost first; empty if row by row."""
    if tensor.is_contiguous() or not is_dense(tensor):
        return ""
    dims = [k for k, size in enumerate(tensor.shape) if size > 1]
    return str(tuple(sorted(dims, key=tensor.stride().__getitem__, reverse=True)))


def view(data: Buffer, layout: Layout) -> torch.Tensor:
    """Bytes as a tensor, shared."""
    return shared(data).view(layout.dtype).as_strided(layout.shape, layout.stride)


_storage_uses: Any = torch._C._storage_Use_Count


class LentTensor:
    """A tensor in memory of a reducer, of which the program gets aliases. Any thread may ask
    whether it still has one, or a view of one."""

    def __init__(self, data: Buffer, layout: Layout) -> None:
        self._tensor = view(data, layout)
        self._storage = self._tensor.untyped_storage()
        self.storage: int = self._storage._cdata
        self._num_uses: int = _storage_uses(self.storage)

    def alias(self) -> torch.Tensor:
        """Another tensor in this memory."""
        return self._tensor.detach()

    def is_used(self) -> bool:
        return bool(_storage_uses(self.storage) != self._num_uses)

    def is_at(self, address: int) -> bool:
        """Whether it is still there: ``share_memory_()`` of an alias moves all of them."""
        return self._tensor.data_ptr() == address

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in this memory."""
        return storage_of(tensor) == self.storage


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of a tensor: all values of a sparse one, else elements from all over it."""
    tensor = tensor.detach()
    if tensor.is_sparse:
        parts = [tensor._values(), tensor._indices()]
        return torch.cat([p.contiguous().view(-1).view(torch.uint8) for p in parts])
    number = tensor.numel() if tensor.is_contiguous() or is_dense(tensor) else 1
    stride = max(1, number // _SAMPLED_ELEMENTS)
    chosen = torch.as_strided(tensor, (min(number, _SAMPLED_ELEMENTS),), (stride,))
    return chosen.clone().view(torch.uint8)


def storage_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's storage, which tensors in one memory share."""
    address: int = tensor.untyped_storage()._cdata
    return address


def lent(slot: BufferView, layout: Layout) -> LentTensor:
    """The tensor of a reduced gradient, or of a shard of one."""
    made: list[Any] = [] if slot.lent is None else slot.lent
    if not (made and made[0].is_at(slot.address)):
        made[:] = [LentTensor(slot.data, layout)]
    return made[0]  # type: ignore[no-any-return]


def num_sharing(tensor: torch.Tensor, own: LentTensor | None) -> int:
    """How many other tensors are in a tensor's memory, beside the one that may have been lent."""
    storage = tensor.untyped_storage()
    uses: int = _storage_uses(storage._cdata)
    if own is not None and storage._cdata == own.storage:
        return uses - own._num_uses - 1
    return uses - _USES_OF_ONE


_USES_OF_ONE = 0
_USES_OF_ONE = num_sharing(torch.empty(1), None)
"""Of the memory of a single tensor while it is looked at."""


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """A strided tensor's first address, and the first one after it."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size() * (tensor.numel() > 0)


def location_of(name: str, named: Sequence[tuple[str, torch.Tensor]]) -> Location:
    """The place of all these tensors; ``ValueError`` for several, ``ImportError`` without CuPy."""
    places = {tensor.device for _, tensor in named}
    if len(places) > 1:
        examples = {str(t.device): n for n, t in named}
        shown = ", ".join(f"{n} on {place}" for place, n in sorted(examples.items()))
        raise ValueError(
            f"{name}: all parameters of an optimizer must be on one device; found {shown}"
        )
    place = next(iter(places), torch.device("cpu"))
    if place.type == "cpu":
        return in_host_memory
    _warn_of_other_communicators()
    return OnDevice(cuda_device(place.index or 0))


@functools.cache
def _warn_of_other_communicators() -> None:
    """Warn once if torch.distributed uses NCCL, because only wfbp's own collectives are ordered."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    if "nccl" in distributed.get_backend_config() and not os.environ.get(
        "NCCL_LAUNCH_ORDER_IMPLICIT"
    ):
        logging.getLogger("wfbp").warning(
            "torch.distributed uses NCCL, as wfbp does. If its collectives (of DDP, FSDP or "
            "torch.nn.SyncBatchNorm) run while gradients are averaged, ranks may run both in "
            "different orders, and wait for each other for ever. Use wfbp.torch.SyncBatchNorm, "
            "call optimizer.synchronize() before other collectives, or use schedule='single'; or "
            "set NCCL_LAUNCH_ORDER_IMPLICIT=1 and NCCL_LAUNCH_RACE_FATAL=0 (NCCL 2.26, CUDA 12.3). "
            "Call wfbp.init() before init_process_group()"
        )


@functools.cache
def cuda_device(index: int) -> Device:
    """A CUDA device whose current stream is PyTorch's; ``ImportError`` where CuPy cannot use it."""
    from wfbp.cuda.cupy_device import CupyDevice

    current: Any = torch._C._cuda_getCurrentRawStream
    try:
        return CupyDevice(
            index,
            functools.partial(current, index),
            torch.cuda.empty_cache,
            "make the model or the batch smaller, or let ranks share the optimizer's state "
            "(optimizer_sharding=True)",
        )
    except ImportError as error:
        version = torch.version.cuda or ""
        raise ImportError(
            f"{error}. This PyTorch is built for CUDA {version}: take cuda{version.split('.')[0]}"
        ) from error


def set_local_device() -> torch.device:
    """Make this rank's GPU the current one: that of its number on the host.

    To be called before anything is put on a GPU, so that no rank allocates memory on another's.

    Raises:
        NotInitializedError: before ``wfbp.init()``.
        RuntimeError: there are fewer GPUs than ranks on this host.
    """
    runtime = process.current("set_local_device()")
    check_local_rank(
        runtime.where,
        runtime.local_rank,
        runtime.local_size,
        torch.cuda.device_count(),
        "call torch.cuda.set_device()",
    )
    torch.cuda.set_device(runtime.local_rank)
    return torch.device("cuda", runtime.local_rank)
