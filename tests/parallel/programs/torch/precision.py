"""Mixed precision, and values that are no numbers."""

from __future__ import annotations

import torch
from torch import nn

import wfbp
import wfbp.torch
from tests.parallel.programs.harness import Checks, raises
from tests.parallel.programs.torch.training import (
    averaged,
    check_training,
    data,
    mlp,
    momentum,
    same,
)

check = Checks()


def scaled(
    explicit: bool, infinite: tuple[int, ...] = (), fused: bool = False
) -> tuple[nn.Module, list[float]]:
    """Train with a gradient scaler; in some steps rank 0's loss is infinite."""
    torch.manual_seed(5)
    model, reference = mlp(5, 7, 3).float(), mlp(5, 7, 3).float()
    reference.load_state_dict(model.state_dict())
    make = (lambda p: torch.optim.Adam(p, lr=0.01, fused=True)) if fused else momentum
    optimizer = wfbp.torch.DistributedOptimizer(make(model.parameters()))
    plain = make(reference.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    scales = []
    for step in range(12):

        def loss_of(net: nn.Module, rank: int, step: int = step) -> torch.Tensor:
            loss = net(data(step, rank, 4, 5, dtype=torch.float32)).square().mean()
            return loss * float("inf") if step in infinite and rank == 0 else loss

        optimizer.zero_grad()
        scaler.scale(loss_of(model, wfbp.rank())).backward()
        if explicit:
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e3)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if step not in infinite:
            averaged(reference, lambda m, r, s: loss_of(m, r).backward(), step, wfbp.size())
            plain.step()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            same(p.detach(), q.detach(), f"step {step}", 1e-5)
    return model, scales


@check
def scaler_naive() -> None:
    scaled(explicit=False)


@check
def scaler_naive_with_fused_adam() -> None:
    scaled(explicit=False, fused=True)
    scaled(explicit=False, fused=True, infinite=(2, 3))


@check
def scaler_explicit() -> None:
    scaled(explicit=True)


@check
def scaler_with_an_infinity_on_one_rank() -> None:
    for explicit in (False, True):
        model, scales = scaled(explicit, infinite=(1, 5, 6))
        everybody = wfbp.allgather_object(scales)
        assert everybody == [scales] * wfbp.size(), everybody
        assert min(scales) < 1024.0, scales
        assert all(torch.isfinite(p).all() for p in model.parameters())


@check
def unscaling_before_averaging_is_an_error() -> None:
    model = mlp(5, 7, 3).float()
    optimizer = wfbp.torch.DistributedOptimizer(momentum(model.parameters()))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(data(0, 0, 4, 5, dtype=torch.float32)).sum()).backward()
    scaler.unscale_(optimizer)
    raises(RuntimeError, "changed in place", act=lambda: scaler.step(optimizer))


@check
def autocast() -> None:
    def backward(model: nn.Module, rank: int, step: int) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(data(step, rank, 4, 5, dtype=torch.float32)).square().mean()
        loss.backward()

    check_training(mlp(5, 7, 3).float(), backward, momentum, tolerance=1e-5)


@check
def nan_passes_through() -> None:
    model = mlp(5, 7, 3)
    optimizer = wfbp.torch.DistributedOptimizer(momentum(model.parameters()))
    for step in range(6):
        optimizer.zero_grad()
        factor = float("nan") if wfbp.rank() == 1 and step == 3 else 1.0
        (model[2](data(step, wfbp.rank(), 4, 7)) * factor).sum().backward()
        optimizer.synchronize()
        assert torch.isnan(model[2].weight.grad).all().item() is (step == 3)
        assert model[0].weight.grad is None
        if step != 3:
            with optimizer.skip_synchronize():
                optimizer.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())
