"""JAX's device: which one it is, which one a rank takes, and places in its streams."""

from __future__ import annotations

import importlib.util
import threading
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp

import wfbp.jax as wfbp
from tests.support.software_xla import INDEX, SoftwareXla
from wfbp.core.types import TensorSpec
from wfbp.errors import NotInitializedError, WfbpError
from wfbp.jax import gradients, xla_device
from wfbp.jax.gradient_exchange import ExchangeDescription, exchange_registry
from wfbp.jax.xla_device import GpuPrograms, Programs, find_programs
from wfbp.runtime import process
from wfbp.runtime.arguments import ReducerOptions

SPECS = (TensorSpec("a", (1,), "float32"), TensorSpec("b", (11,), "float32"))


def test_a_place_is_one_threads() -> None:
    device = SoftwareXla()
    stream = device.new_stream()
    event = device.record(stream)
    with device.at(stream, event):
        assert device.current_stream() == stream
        assert device.record(stream) is event
        assert device.record(device.new_stream()) is not event
        with device.at(stream):
            assert device.record(stream) is not event
        other: list[int] = []
        thread = threading.Thread(target=lambda: other.append(device.current_stream()))
        thread.start()
        thread.join(10.0)
        assert other == [0]
    assert device.current_stream() == 0


def test_a_step_on_another_device_is_refused() -> None:
    device = SoftwareXla()
    gpu = GpuPrograms(Mock(), device)
    gpu.check((INDEX, 1, 0))
    Programs(Mock()).check(None)
    with pytest.raises(
        WfbpError, match=r"runs on GPU 1, .* gradients of GPU 3\. .*set_local_device"
    ):
        gpu.check((1, 1, 0))
    with pytest.raises(WfbpError, match=r"runs on the CPU, .* gradients of GPU 3"):
        gpu.check(None)


@pytest.mark.parametrize("platform", ["tpu", "METAL"])
def test_other_platforms_are_refused(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    with pytest.raises(WfbpError, match=rf"\({platform}\)\. Set JAX_PLATFORMS=cpu"):
        exchange_registry.__wrapped__()


class _Gpu:
    """A GPU as JAX shows it."""

    platform, device_kind = "gpu", "a GPU"

    def __init__(self, version: str, number: int = 0) -> None:
        self.client = self
        self.platform_version = version
        self.local_hardware_id = number


def runs_on(monkeypatch: pytest.MonkeyPatch, *gpus: _Gpu) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: list(gpus))


def test_rocm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    runs_on(monkeypatch, _Gpu("PJRT C API\nrocm 60300"))
    with pytest.raises(WfbpError, match="on NVIDIA's GPUs; JAX runs them on a GPU"):
        find_programs(Mock())


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")
def test_cuda_needs_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    runs_on(monkeypatch, _Gpu("PJRT C API\ncuda 12090"))
    with pytest.raises(ImportError, match=r"pip install 'wfbp\[cuda12\]'"):
        find_programs(Mock())


class _Placed:
    """A runtime's place on its host."""

    local_rank, local_size, where = 2, 3, "rank 2 of 3"


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The settings given to JAX for four GPUs, on the third rank of its host."""
    placed: Any = _Placed()
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(process, "_runtime", placed)
    monkeypatch.setattr(xla_device, "count_devices", lambda: 4)
    monkeypatch.setattr(jax.config, "update", lambda *setting: told.append(setting))
    return told


def test_a_rank_takes_the_gpu_of_its_number(
    config: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = _Gpu("cuda", 2)
    runs_on(monkeypatch, mine)
    assert wfbp.set_local_device() is mine
    assert config == [("jax_cuda_visible_devices", "2")]


def test_jax_was_asked_too_late(
    config: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match=r"JAX runs on .*, not on GPU 2 alone\. Call"):
        wfbp.set_local_device()  # JAX runs on the CPU
    runs_on(monkeypatch, *(_Gpu("cuda", k) for k in range(4)))
    with pytest.raises(RuntimeError, match="not on GPU 2 alone"):
        wfbp.set_local_device()


def test_more_ranks_than_gpus(
    config: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xla_device, "count_devices", lambda: 2)
    with pytest.raises(RuntimeError, match=r"but 2 GPUs.*set jax_cuda_visible_devices with"):
        wfbp.set_local_device()
    assert config == []


def test_choosing_comes_after_init() -> None:
    with pytest.raises(NotInitializedError):
        wfbp.set_local_device()


def test_programs_for_cuda_call_the_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is lowered for CUDA: one announcement per leaf, one wait, in place."""
    monkeypatch.setattr(gradients, "exchange_registry", lambda: _Known())
    description = ExchangeDescription(SPECS, ReducerOptions("auto", 100, name="test"))

    def step(leaves: list[Any]) -> Any:
        return gradients.exchange(description, [2 * leaf for leaf in leaves])

    leaves = [jnp.ones(spec.shape) for spec in SPECS]
    text = jax.jit(step).trace(leaves).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@wfbp_announce") == 2
    assert text.count("@wfbp_wait") == 1
    assert text.count("output_operand_alias") >= 4


class _Known:
    """Exchanges of which only the key matters."""

    device = None

    def add(self, description: ExchangeDescription) -> int:
        return description.key
