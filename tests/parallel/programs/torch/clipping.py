"""What happens between backward and step."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import nn

import wfbp
import wfbp.horovod.torch as hvd
import wfbp.torch
from tests.parallel.programs.harness import Checks, raises
from tests.parallel.programs.torch.training import (
    adamw,
    check_training,
    data,
    mlp,
    momentum,
    square,
    twins,
)

check = Checks()


@check
def clipping_before_averaging_is_an_error() -> None:
    for unused_first in (False, True):
        model = nn.ModuleList([nn.Linear(2, 2).double(), mlp(5, 7, 3)])
        optimizer = wfbp.torch.DistributedOptimizer(momentum(model.parameters()))
        square(model[1], wfbp.rank(), 0)
        if not unused_first:
            model[0](data(0, 0, 2)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        raises(
            RuntimeError,
            "changed in place",
            "optimizer.synchronize()",
            "skip_synchronize",
            act=optimizer.step,
        )


@check
def skip_synchronize_needs_synchronize() -> None:
    both = twins()
    square(both.model, wfbp.rank(), 0)
    raises(RuntimeError, "synchronize()", act=both.step_synchronized)
    both.optimizer.step()


@check
def synchronize_then_step() -> None:
    """Gradients are averaged once; a program for Horovod is told of the difference."""
    for library, told in ((wfbp.torch, []), (hvd, [True])):
        both = twins(adamw, library=library)
        for step in range(6):
            both.optimizer.zero_grad()
            square(both.model, wfbp.rank(), step)
            both.optimizer.synchronize()
            both.optimizer.synchronize()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                both.optimizer.step()
            assert ["skip_synchronize()" in str(w.message) for w in caught] == told
            both.follow(step)
            both.compare(f"step {step}")


@check
def named_operations_between_hooks_and_step() -> None:
    def zero(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        mean = wfbp.allreduce(torch.tensor([float(wfbp.rank())]), name="loss")
        assert mean.item() == (wfbp.size() - 1) / 2

    check_training(mlp(5, 7, 3), square, momentum, zero=zero)
    model = mlp(5, 7, 3)
    optimizer = wfbp.torch.DistributedOptimizer(momentum(model.parameters()))
    for step in range(5):
        optimizer.zero_grad()
        loss = model(data(step, wfbp.rank(), 4, 5)).square().mean()
        loss.backward()
        wfbp.allreduce(loss.detach(), name="loss")
        wfbp.barrier()
        optimizer.step()


CHANGES: dict[str, Callable[[torch.Tensor], None]] = {
    "in place": lambda p: p.grad.mul_(0.5),
    "data": lambda p: p.grad.data.clamp_(-1e-4, 1e-4),
    "replaced": lambda p: setattr(p, "grad", p.grad * 0.5),
    "removed": lambda p: setattr(p, "grad", None),
}


@check
def changing_gradients_after_clipping() -> None:
    """An error under every schedule; what is changed after ``synchronize()`` counts."""
    for what, change in CHANGES.items():
        both = twins(adamw)
        optimizer = both.optimizer
        engine = optimizer._wfbp_sync.reducer
        for step in range(8):
            plan, decoupled = engine.tuner.plan, engine.decoupled
            optimizer.zero_grad()
            square(both.model, wfbp.rank(), step)
            optimizer.clip_grad_norm_(1e-3)
            held = optimizer._wfbp_sync.held is not None
            if engine.tuner.plan is plan:  # else gradients may be made whole for the next one
                assert held == decoupled, f"{what}, step {step}, {plan.summary}"
            for p in both.model.parameters():
                change(p)
            raises(
                RuntimeError,
                "after clip_grad_norm_()",
                "optimizer.synchronize() before",
                act=optimizer.step,
            )
            optimizer.zero_grad()
            both.backward(step)
            optimizer.synchronize()
            both.clip(1e-3)
            for p in (*both.model.parameters(), *both.reference.parameters()):
                change(p)
            both.update()
            both.compare(f"{what}, step {step}", 1e-6)


@check
def clipping_a_norm_that_is_no_number() -> None:
    """All ranks hear of it, so that all can leave the step out."""
    model = mlp(5, 7, 3)
    optimizer = wfbp.torch.DistributedOptimizer(momentum(model.parameters()))
    for step in range(12):
        square(model, wfbp.rank(), step)
        if step % 3 == 2 and wfbp.rank() == 1:
            optimizer.zero_grad()
            (model(data(step, 1, 4, 5)) * float("nan")).sum().backward()
        norm = optimizer.clip_grad_norm_(1.0, float("inf") if step % 2 else 2.0)
        assert torch.isfinite(norm).item() is (step % 3 != 2)
        if step % 3 != 2:
            optimizer.step()
        else:
            raises(
                RuntimeError,
                "norm of the gradients is nan",
                act=lambda: optimizer.clip_grad_norm_(1.0, 2.0, error_if_nonfinite=True),
            )
        optimizer.zero_grad()
    optimizer.synchronize()
    states = wfbp.allgather_object([p.detach().tolist() for p in model.parameters()])
    assert all(state == states[0] for state in states)
    assert all(torch.isfinite(p).all() for p in model.parameters())


@check
def one_rank_alone_synchronizes() -> None:
    """Then all get whole averages, though the others step at once."""
    for schedule in (None, "independent"):
        both = twins(adamw, named=True, schedule=schedule)
        for step in range(9):
            both.optimizer.zero_grad()
            square(both.model, wfbp.rank(), step)
            if wfbp.rank() == step % wfbp.size():
                both.optimizer.synchronize()
                both.step_synchronized()
            else:
                both.optimizer.step()
            both.follow(step)
            both.compare(f"{schedule}, step {step}")
