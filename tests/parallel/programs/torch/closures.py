"""Optimizers that evaluate the loss themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import wfbp
import wfbp.torch
from tests.parallel.programs.harness import Checks
from tests.parallel.programs.torch.training import (
    data,
    momentum,
    pair,
    same,
)

check = Checks()


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
