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
