"""Optimizers that evaluate the loss themselves."""

from __future__ import annotations

from typing import Any

import torch

import wfbp
import wfbp.torch
from tests.parallel.programs.harness import Checks
from tests.parallel.programs.training import (
    averaged,
    compare,
    data,
    momentum,
    pair,
    same,
    square,
)

check = Checks()


@check
def closure() -> None:
    model, reference = pair()
    optimizer = wfbp.torch.DistributedOptimizer(momentum(model.parameters()))
    plain = momentum(reference.parameters())
    for step in range(8):

        def evaluate(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(data(step, wfbp.rank(), 4, 5)).square().mean()
            loss.backward()
            return loss

        assert optimizer.step(evaluate) is not None
        averaged(reference, square, step, wfbp.size())
        plain.step()
        compare(model, reference, f"step {step}", 1e-12)


@check
def lbfgs() -> None:
    """Every rank evaluates the mean loss, so that the line search agrees."""
    model, reference = pair()

    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(params, lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

    optimizer = wfbp.torch.DistributedOptimizer(make(model.parameters()), schedule="auto")
    plain = make(reference.parameters())
    for _ in range(3):

        def evaluate() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(data(0, wfbp.rank(), 4, 5)).square().mean()
            loss.backward()
            return wfbp.allreduce(loss.detach())

        def evaluate_all() -> torch.Tensor:
            plain.zero_grad()
            losses = [reference(data(0, r, 4, 5)).square().mean() for r in range(wfbp.size())]
            loss = torch.stack(losses).mean()
            loss.backward()
            return loss.detach()

        same(optimizer.step(evaluate), plain.step(evaluate_all), "loss", 1e-9)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            same(p.detach(), q.detach(), "parameters", 1e-8)
