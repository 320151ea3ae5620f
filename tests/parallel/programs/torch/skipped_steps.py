"""Steps that are left out after gradients were averaged, and ranks that have none."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

import wfbp
import wfbp.torch
from tests.parallel.programs.harness import Checks, raises
from tests.parallel.programs.torch.training import (
    averaged,
    compare,
    data,
    mlp,
    momentum,
    same,
    square,
)

check = Checks()


@check
def gradients_after_averaging_are_an_error() -> None:
    """Else a rank that has some would communicate and one that has none would not."""
    for ask in ("synchronize", "clip_grad_norm_"):
        model = mlp(5, 7, 3)
        optimizer = wfbp.torch.DistributedOptimizer(momentum(model.parameters()))
        for step in range(8):
            square(model, wfbp.rank(), step)
            optimizer.synchronize() if ask == "synchronize" else optimizer.clip_grad_norm_(1.0)
            model.zero_grad()  # this step is left out
            if wfbp.rank() == 0:
                square(model, 0, 1)
                raises(RuntimeError, "since they were averaged", "zero_grad()", act=optimizer.step)
            optimizer.zero_grad()
            square(model, wfbp.rank(), step)
            optimizer.step()
            optimizer.zero_grad()


@check
def sums_are_added_up_once() -> None:
    for clips in (False, True):
        model, reference = mlp(5, 7, 3), mlp(5, 7, 3)
        reference.load_state_dict(model.state_dict())
        optimizer = wfbp.torch.DistributedOptimizer(momentum(model.parameters()), op=wfbp.Sum)
        plain = momentum(reference.parameters())
        for step in range(9):
            optimizer.zero_grad()
            square(model, wfbp.rank(), step)
            if clips:
                optimizer.clip_grad_norm_(0.01)
            optimizer.synchronize()
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
            averaged(reference, square, step, wfbp.size())
            for p in reference.parameters():
                assert p.grad is not None
                p.grad *= wfbp.size()
            if clips:
                nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
            plain.step()
            compare(model, reference, f"step {step}", 1e-12)


@check
def changes_between_averaging_and_stepping_are_errors() -> None:
    """They would forget that gradients were clipped, or add up sums again."""
    for act in (
        lambda o: o.add_param_group({"params": [nn.Parameter(torch.ones(2).double())]}),
        lambda o: o.set_backward_passes_per_step(2),
    ):
        model = mlp(5, 7, 3)
        optimizer = wfbp.torch.DistributedOptimizer(momentum(model.parameters()), op=wfbp.Sum)
        square(model, wfbp.rank(), 0)
        optimizer.clip_grad_norm_(0.1)
        if wfbp.size() > 1:
            raises(RuntimeError, "call it after step()", act=partial(act, optimizer))
        optimizer.step()
        act(optimizer)


@check
def a_step_left_out_after_averaging() -> None:
    """``zero_grad()`` ends it, on ranks with and without gradients."""
    model, reference = mlp(5, 7, 3), mlp(5, 7, 3)
    reference.load_state_dict(model.state_dict())
    optimizer = wfbp.torch.DistributedOptimizer(momentum(model.parameters()))
    plain = momentum(reference.parameters())

    def backward(net: nn.Module, rank: int, step: int) -> None:
        if (step + rank) % 3:
            square(net, rank, step)

    for step in range(16):
        backward(model, wfbp.rank(), step)
        if step % 4 == 3:
            optimizer.synchronize() if step % 8 == 3 else optimizer.clip_grad_norm_(1.0)
        else:
            optimizer.step()
            averaged(reference, backward, step, wfbp.size())
            plain.step()
            compare(model, reference, f"step {step}", 1e-12)
        optimizer.zero_grad()


@check
def steps_that_the_scaler_skips() -> None:
    """The program forgets gradients by itself, and some ranks have none in the next step."""
    model, reference = mlp(5, 7, 3).float(), mlp(5, 7, 3).float()
    reference.load_state_dict(model.state_dict())
    optimizer = wfbp.torch.DistributedOptimizer(momentum(model.parameters()))
    plain = momentum(reference.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    def loss_of(net: nn.Module, rank: int, step: int) -> torch.Tensor:
        loss: torch.Tensor = net(data(step, rank, 4, 5, dtype=torch.float32)).square().mean()
        return loss * float("inf") if step % 3 == 1 and rank == 1 else loss

    for step in range(18):
        present = step % 3 != 2 or wfbp.rank() == step % wfbp.size()
        model.zero_grad()
        if present:
            scaler.scale(loss_of(model, wfbp.rank(), step)).backward()
        else:
            scaler.scale(torch.zeros(()))
        scaler.step(optimizer)
        scaler.update()
        if step % 3 != 1:

            def backward(net: nn.Module, rank: int, step: int) -> None:
                if step % 3 != 2 or rank == step % wfbp.size():
                    loss_of(net, rank, step).backward()

            averaged(reference, backward, step, wfbp.size())
            plain.step()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            same(p.detach(), q.detach(), f"step {step}", 1e-5)


@check
def a_step_after_a_closure_averages_again() -> None:
    model, reference = mlp(5, 7, 3), mlp(5, 7, 3)
    reference.load_state_dict(model.state_dict())
    optimizer: Any = wfbp.torch.DistributedOptimizer(momentum(model.parameters()))
    plain = momentum(reference.parameters())
    for step in range(12):
        model.zero_grad()
        if step % 3 == 2:

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(data(step, wfbp.rank(), 4, 5)).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
        else:
            square(model, wfbp.rank(), step)
            optimizer.step()
        averaged(reference, square, step, wfbp.size())
        plain.step()
        compare(model, reference, f"step {step}", 1e-12)


@check
def an_exception_in_a_step() -> None:
    """What the program catches itself must not leave ranks apart."""
    model = mlp(5, 7, 3)
    optimizer = wfbp.torch.DistributedOptimizer(momentum(model.parameters()))
    for step in range(12):
        optimizer.zero_grad()
        square(model, wfbp.rank(), step)
        if step % 4 == 1:
            optimizer.zero_grad()
            raises(
                RuntimeError,
                act=lambda: model(data(0, 0, 4, 6)).sum().backward(),
            )
            optimizer.zero_grad()
            square(model, wfbp.rank(), step)
        optimizer.step()
    optimizer.synchronize()
    states = wfbp.allgather_object([p.detach().tolist() for p in model.parameters()])
    assert all(state == states[0] for state in states)
