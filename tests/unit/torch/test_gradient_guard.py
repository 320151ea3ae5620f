"""Gradients that programs change after backward are noticed; those that they read are not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from wfbp.torch import gradient_sync
from wfbp.torch.gradient_sync import GradientGuard

Act = Callable[[torch.Tensor, torch.nn.Parameter], object]


def unscale(grad: torch.Tensor, param: torch.nn.Parameter) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD([param], lr=0.1))


def replace(grad: torch.Tensor, param: torch.nn.Parameter) -> None:
    param.grad = grad * 2


def move(grad: torch.Tensor, param: torch.nn.Parameter) -> None:
    grad.data = torch.ones(40, 150)


CHANGES: dict[str, Act] = {
    "mul_": lambda g, p: g.mul_(2),
    "last element": lambda g, p: g[-1, -1].add_(1.0),
    "foreach": lambda g, p: torch._foreach_mul_([g], 2.0),
    "out": lambda g, p: torch.mul(torch.ones(40, 150), 2, out=g),
    "clip_grad_norm_": lambda g, p: torch.nn.utils.clip_grad_norm_([p], 1e-3),
    "data": lambda g, p: g.data.mul_(2),
    "numpy": lambda g, p: np.multiply(g.numpy(), 2, out=g.numpy()),
    "unscale": unscale,
    "replace": replace,
    "move": move,
}


def begun() -> tuple[GradientGuard, torch.Tensor, torch.nn.Parameter]:
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(40, 150))
    param.square().sum().backward()
    assert param.grad is not None
    guard = GradientGuard("SGD", ["weight"])
    guard.watch(0, param.grad)
    return guard, param.grad, param


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_an_error(name: str) -> None:
    guard, grad, param = begun()
    CHANGES[name](grad, param)
    with pytest.raises(RuntimeError, match=r"SGD: the gradient of weight was (changed|repl|moved)"):
        guard.check([param])


def test_parts_of_one_tensor_may_be_accumulated() -> None:
    """PyTorch takes over the parts as they are, and they count changes in place together."""
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    guard = GradientGuard("SGD", ["a", "b"])
    for index, param in enumerate(params):
        param.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda param, index=index: guard.watch(index, param.grad)
        )
    for _ in range(3):
        (torch.cat(params) * torch.arange(6.0)).sum().backward()
    assert guard.check(params) == []
    params[1].grad.add_(1.0)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match=r"the gradient of [ab] was changed in place"):
        guard.check(params)


def test_every_gradient_is_sampled_in_some_step() -> None:
    guard = GradientGuard("SGD", [f"p{k}" for k in range(12)])
    seen: set[int] = set()
    for _ in range(3):
        seen |= guard.samples.keys()
        guard.clear()
    assert seen == set(range(12))


def test_samples_are_taken_of_gradients_that_appear_for_the_first_time() -> None:
    """In the first step, or when parameters are unfrozen."""
    for frozen_until in (0, 1, 5):
        params = [torch.nn.Parameter(torch.randn(40)) for _ in range(80)]
        guard = GradientGuard("SGD", [f"p{k}" for k in range(80)])
        for _ in range(frozen_until):
            for index in range(40):
                guard.watch(index, torch.ones(3))
            guard.clear()
        params[65].square().sum().backward()
        grad = params[65].grad
        assert grad is not None
        guard.watch(65, grad)
        grad.data.add_(1.0)
        with pytest.raises(RuntimeError, match="p65 was changed in place"):
            guard.check(params)


def test_gradients_on_a_device_are_sampled_seldom() -> None:
    """Each costs several kernels: so the first steps have some, and few later ones."""
    guard = GradientGuard("SGD", [f"p{k}" for k in range(12)], on_host=False)
    sampled = []
    seen: set[int] = set()
    for step in range(130):
        if guard.samples:
            sampled.append(step)
            seen |= guard.samples.keys()
        guard.clear()
    assert sampled == [*range(8), 64, 128]
    assert seen == set(range(12))


def test_the_host_does_not_wait_for_samples_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change is told in the first step that finds the comparison on the host."""
    monkeypatch.setattr(torch, "equal", lambda *_: pytest.fail("the host has waited"))
    arrived: list[None] = []
    monkeypatch.setattr(gradient_sync, "_fetch", lambda values: (values, lambda: bool(arrived)))
    param = torch.nn.Parameter(torch.randn(40, 150))
    guard = GradientGuard("SGD", ["weight"], on_host=False)
    for change in (1.0, 2.0, 1.0):
        param.grad = None
        param.square().sum().backward()
        assert param.grad is not None
        guard.watch(0, param.grad)
        param.grad.data.mul_(change)
        assert guard.check([param]) == []
        guard.clear()
    arrived.append(None)
    with pytest.raises(RuntimeError, match="weight was changed in place in this step or an earl"):
        guard.check([param])


def test_a_change_on_a_device_is_noticed_where_it_is_sampled() -> None:
    """By its values; PyTorch counts no changes of ``.data``."""
    for steps, noticed in ((0, True), (20, False), (64, True)):
        param = torch.nn.Parameter(torch.randn(40, 150))
        param.square().sum().backward()
        assert param.grad is not None
        guard = GradientGuard("SGD", ["weight"], on_host=False)
        for _ in range(steps):
            guard.clear()
        guard.watch(0, param.grad)
        param.grad.data.mul_(2)
        if noticed:
            with pytest.raises(RuntimeError, match="weight was changed in place"):
                guard.check([param])
        else:
            assert guard.check([param]) == []


@pytest.mark.parametrize("value", [0.0, -0.0, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_unscaling_is_noticed_by_the_only_gradient_that_it_changes(
    value: float, dtype: torch.dtype
) -> None:
    """Such as where most parameters have gradients of zeros."""
    params = [torch.nn.Parameter(torch.ones(30, dtype=dtype)) for _ in range(80)]
    guard = GradientGuard("SGD", [f"p{k}" for k in range(80)])
    for step in range(20):
        for index, param in enumerate(params):
            param.grad = torch.full_like(param, 3.0 if index == 70 else value)
            guard.watch(index, param.grad)
        if step < 19:
            guard.check(params)
            guard.clear()
    grad = params[70].grad
    assert grad is not None
    grad.data.mul_(0.5)
    with pytest.raises(RuntimeError, match="the gradient of p70 was changed in place"):
        guard.check(params)
