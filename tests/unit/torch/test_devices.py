"""Which device an optimizer's tensors lie on, and which one a rank is to use."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from wfbp.comm.locations import in_host_memory
from wfbp.errors import NotInitializedError
from wfbp.runtime import process
from wfbp.torch import tensors
from wfbp.torch.tensors import check, location_of, set_local_device


def named(*devices: str) -> list[tuple[str, torch.Tensor]]:
    return [(f"p{k}", torch.empty(2, device=device)) for k, device in enumerate(devices)]


def test_the_host_is_no_device() -> None:
    assert location_of("SGD", named("cpu", "cpu")) is in_host_memory
    assert location_of("SGD", []) is in_host_memory


def test_parameters_on_two_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="must be on one device; found p0 on cpu, p1 on meta"):
        location_of("SGD", named("cpu", "meta"))


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="on meta; expected the CPU or a CUDA device"):
        check(*named("meta")[0])


class _Placed:
    """A backend's place on its host."""

    def __init__(self, rank: int, size: int) -> None:
        self.local_rank, self.local_size = rank, size
        self.where = f"rank {rank} of {size}"


@pytest.mark.parametrize(("count", "advice"), [(2, "Start 2 ranks"), (0, "Start no ranks")])
def test_more_ranks_than_gpus(count: int, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    placed: Any = _Placed(2, 3)
    monkeypatch.setattr(process, "_runtime", placed)
    with pytest.raises(RuntimeError, match=rf"3 ranks on this host, but {count} GPUs. {advice}"):
        set_local_device()
    assert chosen == []


def test_a_rank_takes_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    with pytest.raises(NotInitializedError):
        set_local_device()
    placed: Any = _Placed(2, 3)
    monkeypatch.setattr(process, "_runtime", placed)
    assert set_local_device() == torch.device("cuda", 2)
    assert chosen == [2]


@pytest.mark.parametrize(
    ("backend", "order", "warns"),
    [
        ("nccl", "", True),
        ("cpu:gloo,cuda:nccl", "", True),
        ("nccl", "1", False),
        ("gloo", "", False),
        (None, "", False),
    ],
)
def test_other_communicators_on_the_gpu_are_warned_of(
    backend: str | None,
    order: str,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once; DDP beside wfbp may deadlock."""
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", order)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: backend is not None)
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: backend)
    monkeypatch.setattr(tensors, "cuda_device", lambda index: None)
    tensors._warn_of_other_communicators.cache_clear()
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda", 0))
    for _ in range(2):
        location_of("SGD", [("weight", on_gpu)])
    tensors._warn_of_other_communicators.cache_clear()
    assert len(caplog.messages) == warns
    assert ("NCCL_LAUNCH_ORDER_IMPLICIT=1" in caplog.text) is warns


def test_without_cupy_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the CUDA that PyTorch is built for."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ImportError, match=r"'wfbp\[cuda12\]'.* for CUDA 13.0: take cuda13"):
        tensors.cuda_device(0)
