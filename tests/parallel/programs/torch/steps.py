"""Steps: left out, by closures, of several optimizers, and with gradients that are forgotten."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import wfbp
import wfbp.torch
from tests.parallel.programs.harness import Checks, raises
from tests.parallel.programs.torch.training import (
    Twins,
    averaged,
    check_training,
    compare,
    data,
    mlp,
    momentum,
    pair,
    same,
    square,
    twins,
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
def lbfgs() -> None:
    """Each rank returns the loss of its own data, as a tensor or a number, or the mean itself."""

    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(params, lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

    returns: list[Callable[[torch.Tensor], Any]] = [
        lambda loss: loss,
        lambda loss: loss.item(),
        lambda loss: loss.detach().reshape(1),
        lambda loss: wfbp.allreduce(loss.detach()),
    ]
    for returned in returns:
        model, reference = pair()
        wfbp.broadcast_parameters(model.state_dict())
        reference.load_state_dict(model.state_dict())
        optimizer = wfbp.torch.DistributedOptimizer(make(model.parameters()), schedule="auto")
        plain = make(reference.parameters())
        for _ in range(3):

            def evaluate(
                model: Any = model, mine: Any = optimizer, returned: Any = returned
            ) -> Any:
                mine.zero_grad()
                loss = model(data(0, wfbp.rank(), 4, 5)).square().mean()
                loss.backward()
                return returned(loss)

            def evaluate_all(reference: Any = reference, plain: Any = plain) -> torch.Tensor:
                plain.zero_grad()
                losses = [reference(data(0, r, 4, 5)).square().mean() for r in range(wfbp.size())]
                loss = torch.stack(losses).mean()
                loss.backward()
                return loss.detach()

            found, wanted = optimizer.step(evaluate), plain.step(evaluate_all)
            same(torch.as_tensor(found).double().detach().reshape(()), wanted, "loss", 1e-7)
            for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                same(p.detach(), q.detach(), "parameters", 1e-8)
                for theirs in wfbp.allgather(p.detach()[None]):
                    same(theirs, p.detach(), "parameters of another rank")


@check
def losses_of_a_sum() -> None:
    """The optimizer is given what belongs to its gradients; what is no number it gets as it is."""
    size = wfbp.size()
    for op, wanted in ((wfbp.Average, (size - 1) / 2), (wfbp.Sum, size * (size - 1) / 2)):
        model, _ = pair()
        optimizer = wfbp.torch.DistributedOptimizer(momentum(model.parameters()), op=op)
        for value in (float(wfbp.rank()), wfbp.rank(), torch.tensor(wfbp.rank())):
            assert float(optimizer.step(lambda value=value: value)) == wanted
        half = optimizer.step(lambda: torch.tensor(float(wfbp.rank()), dtype=torch.bfloat16))
        assert half.dtype is torch.bfloat16
        for other in (None, "loss", torch.ones(2)):
            assert optimizer.step(lambda other=other: other) is other
        several = {"losses": (float(wfbp.rank()), torch.tensor(wfbp.rank() + 0.0)), "kind": "mean"}
        found = optimizer.step(lambda several=several: several)
        assert [*map(float, found["losses"]), found["kind"]] == [wanted, wanted, "mean"]
        first = optimizer.step(lambda: 3.0 if wfbp.rank() == 0 else None)
        assert first == (3.0 if wfbp.rank() == 0 else None)


@check
def zero_grad_discards_a_part() -> None:
    def zero(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        (1e3 * model[-1](data(0, wfbp.rank(), 4, 7))).sum().backward()  # type: ignore[index]
        optimizer.zero_grad()

    check_training(mlp(5, 7, 3), square, momentum, zero=zero)


@check
def gradients_stay_the_same_tensors() -> None:
    """A program may keep a list of them if they are zeroed in place."""
    both = twins(schedule="layerwise")
    model, optimizer = both[:2]
    held: list[torch.Tensor] = []
    for step in range(12):
        if held:
            torch._foreach_zero_(held)
        square(model, wfbp.rank(), step)
        optimizer.synchronize()
        if step == 8:
            held = [p.grad for p in model.parameters() if p.grad is not None]
        both.step_synchronized()
        both.follow(step)
        if not held:
            optimizer.zero_grad()
        assert all(p.grad is g for p, g in zip(model.parameters(), held, strict=False))
    both.compare("at the end")


@check
def wrapping_again() -> None:
    model, reference = pair()
    plain = momentum(reference.parameters())
    inner = momentum(model.parameters())
    for turn in range(4):
        optimizer = wfbp.torch.DistributedOptimizer(inner, model.named_parameters())
        Twins(model, optimizer, reference, plain).train(range(5 * turn, 5 * turn + 5))
        square(model, wfbp.rank(), 99)  # begun, never taken
        if turn % 2:
            del optimizer
            gc.collect()


@check
def parameters_put_into_groups_by_hand() -> None:
    """They would be stepped with this rank's gradients alone; the remedy that is named works."""
    model, reference = pair()
    first, second = (list(model[k].parameters()) for k in (0, 2))
    optimizer = wfbp.torch.DistributedOptimizer(momentum(first), model[0].named_parameters())
    plain = momentum(reference[0].parameters())
    params, groups = optimizer.param_groups[0]["params"], optimizer.param_groups
    for step in range(12):
        optimizer.zero_grad()
        square(model, wfbp.rank(), step)
        if step in (3, 6):
            params.append(second[0])
            raises(RuntimeError, "['params'][2]", "(3, 7)", "add_param_group", act=optimizer.step)
            params.pop()
            groups.append({**groups[0], "params": second})
            raises(RuntimeError, "param_groups[1]['params'][0]", act=optimizer.step)
            groups.pop()
            params[1] = second[1]
            raises(RuntimeError, "['params'][1], of shape (3,)", act=optimizer.step)
            params[1] = first[1]
        optimizer.step()
        averaged(reference, square, step, wfbp.size())
        plain.step()
        if step == 6:
            optimizer.add_param_group({"params": second})
            plain.add_param_group({"params": list(reference[2].parameters())})
    compare(model, reference, "at the end", 1e-12)
