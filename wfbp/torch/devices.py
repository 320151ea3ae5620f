"""Where an optimizer's tensors lie: on the host, or on one CUDA device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from wfbp.comm.device.device import Device
from wfbp.cuda.local_device import check_local_rank
from wfbp.runtime import world


def device_of(name: str, named: Sequence[tuple[str, torch.Tensor]]) -> Device | None:
    """The device on which all these tensors lie; None for the host.

    Raises:
        ValueError: they lie on several devices, or on neither the host nor CUDA.
        ImportError: CuPy is not installed.
    """
    places = {tensor.device for _, tensor in named}
    if len(places) > 1:
        examples = {str(t.device): n for n, t in named}
        shown = ", ".join(f"{n} on {place}" for place, n in sorted(examples.items()))
        raise ValueError(
            f"{name}: all parameters of an optimizer must lie on one device; found {shown}"
        )
    place = next(iter(places), torch.device("cpu"))
    if place.type == "cpu":
        return None
    if place.type != "cuda":
        raise ValueError(f"{name}: parameters are on {place}; expected the CPU or a CUDA device")
    return cuda_device(place.index or 0)


@functools.cache
def cuda_device(index: int) -> Device:
    """A CUDA device whose current stream is PyTorch's."""
    from wfbp.cuda.cupy_device import CupyDevice

    current: Any = torch._C._cuda_getCurrentRawStream
    return CupyDevice(index, functools.partial(current, index))


def set_local_device() -> torch.device:
    """Make this rank's GPU the current one: that of its number on the host.

    To be called before anything is put on a GPU, so that no rank allocates memory on another's.

    Raises:
        NotInitializedError: before ``wfbp.init()``.
        RuntimeError: there are fewer GPUs than ranks on this host.
    """
    runtime = world.current("set_local_device()")
    check_local_rank(
        runtime.where,
        runtime.local_rank,
        runtime.local_size,
        torch.cuda.device_count(),
        "call torch.cuda.set_device()",
    )
    torch.cuda.set_device(runtime.local_rank)
    return torch.device("cuda", runtime.local_rank)
