"""Steps that are left out after gradients were averaged, and ranks that have none."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

import wfbp
import wfbp.torch
from tests.parallel.programs.harness import Checks, raises
from tests.parallel.programs.torch.training import data, mlp, momentum, square, twins

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
        both = twins(op=wfbp.Sum)
        for step in range(9):
            both.optimizer.zero_grad()
            both.backward(step)
            for p in both.reference.parameters():
                p.grad *= wfbp.size()
            if clips:
                both.clip(0.01)
            both.optimizer.synchronize()
            both.optimizer.synchronize()
            both.step_synchronized()
            both.plain.step()
            both.compare(f"step {step}")


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
    both = twins()
    optimizer = both.optimizer

    def backward(net: nn.Module, rank: int, step: int) -> None:
        if (step + rank) % 3:
            square(net, rank, step)

    for step in range(16):
        backward(both.model, wfbp.rank(), step)
        if step % 4 == 3:
            optimizer.synchronize() if step % 8 == 3 else optimizer.clip_grad_norm_(1.0)
        else:
            optimizer.step()
            both.follow(step, backward)
            both.compare(f"step {step}")
        optimizer.zero_grad()


@check
def steps_that_the_scaler_skips() -> None:
    """The program forgets gradients by itself, and some ranks have none in the next step."""
    both = twins(model=mlp(5, 7, 3).float())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    def loss_of(net: nn.Module, rank: int, step: int) -> torch.Tensor:
        loss: torch.Tensor = net(data(step, rank, 4, 5, dtype=torch.float32)).square().mean()
        return loss * float("inf") if step % 3 == 1 and rank == 1 else loss

    def backward(net: nn.Module, rank: int, step: int) -> None:
        if step % 3 != 2 or rank == step % wfbp.size():
            loss_of(net, rank, step).backward()

    for step in range(18):
        present = step % 3 != 2 or wfbp.rank() == step % wfbp.size()
        both.model.zero_grad()
        if present:
            scaler.scale(loss_of(both.model, wfbp.rank(), step)).backward()
        else:
            scaler.scale(torch.zeros(()))
        scaler.step(both.optimizer)
        scaler.update()
        if step % 3 != 1:
            both.follow(step, backward)
        both.equal(f"step {step}", 1e-5)


@check
def an_exception_in_a_step() -> None:
    """An exception that the program catches must not leave ranks apart."""
    model = mlp(5, 7, 3)
    optimizer = wfbp.torch.DistributedOptimizer(momentum(model.parameters()))
    for step in range(12):
        optimizer.zero_grad()
        square(model, wfbp.rank(), step)
        if step % 4 == 1:
            optimizer.zero_grad()
            raises(RuntimeError, act=lambda: model(data(0, 0, 4, 6)).sum().backward())
            optimizer.zero_grad()
            square(model, wfbp.rank(), step)
        optimizer.step()
    optimizer.synchronize()
    states = wfbp.allgather_object([p.detach().tolist() for p in model.parameters()])
    assert all(state == states[0] for state in states)
