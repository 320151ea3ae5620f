"""Optimizers with further methods, in all forms that Python offers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import wfbp.torch as wfbp
from tests.parallel.programs.harness import Checks
from tests.parallel.programs.torch.defects import SCHEDULES, Descent, agree, assign, equal, refused
from tests.parallel.programs.torch.training import averaged, data, pair, square

check = Checks()

STEPS = 4


class Moves(Descent):
    """Updates by methods that are not plain functions of its class, or not called as such."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.kept = functools.partial(self.move, 1.0)
        self.short = lambda: self.move(1.0)

    @torch.no_grad()
    def move(self, scale: float) -> Moves:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(scale * group["lr"] * p.grad)
        return self

    partial = functools.partialmethod(move, 1.0)

    @functools.singledispatchmethod
    def dispatched(self, scale: float) -> None:
        self.move(scale)

    @dispatched.register
    def _(self, scale: str) -> None:
        self.move(float(scale))

    @functools.wraps(move)
    def decorated(self, *args: Any) -> None:
        self.move(*args)

    def _hidden(self) -> None:
        self.move(1.0)

    def __call__(self) -> None:
        self.move(1.0)

    def __enter__(self) -> Moves:
        return self

    def __exit__(self, *error: object) -> None:
        self.move(1.0)

    @contextmanager
    def updating(self) -> Iterator[None]:
        yield
        self.move(1.0)

    def twice(self) -> Iterator[int]:
        for number in range(2):
            yield number
            self.move(0.5)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        yield
        self.step()


def within(run: Callable[[], None], block: Any) -> None:
    with block:
        run()


def by_turns(run: Callable[[], None], turns: Iterator[int]) -> None:
    for _ in turns:
        run()


AFTER: dict[str, Callable[[Any], object]] = {
    "method": lambda opt: opt.move(1.0),
    "partialmethod": lambda opt: opt.partial(),
    "stored partial": lambda opt: opt.kept(),
    "stored lambda": lambda opt: opt.short(),
    "singledispatchmethod": lambda opt: opt.dispatched(1.0),
    "singledispatchmethod of text": lambda opt: opt.dispatched("1.0"),
    "decorated": lambda opt: opt.decorated(1.0),
    "underscore": lambda opt: opt._hidden(),
    "call": lambda opt: opt(),
    "by the class": lambda opt: type(opt).move(opt, 1.0),
    "bound before": lambda opt: functools.partial(getattr(opt, "move"), 1.0)(),  # noqa: B009
    "the optimizer itself": lambda opt: opt.move(0.5).move(0.5),
}
AROUND: dict[str, Callable[[Any, Callable[[], None]], None]] = {
    "with block": lambda opt, run: within(run, opt),
    "context manager": lambda opt, run: within(run, opt.updating()),
    "context manager that steps": lambda opt, run: within(run, opt.stepping()),
    "generator": lambda opt, run: by_turns(run, opt.twice()),
}


def update(how: str, optimizer: Any, run: Callable[[], None]) -> None:
    """Have gradients computed, and used by one of the methods."""
    if how in AROUND:
        AROUND[how](optimizer, run)
    else:
        run()
        AFTER[how](optimizer)


@check
def own_methods_of_every_form() -> None:
    """With and without ``zero_grad()``; the next ``step()`` is right, too."""
    for how in (*AFTER, *AROUND):
        model, reference = pair()
        optimizer = wfbp.DistributedOptimizer(Moves(model.parameters()))
        plain = Moves(reference.parameters())
        for step in range(STEPS):
            number = [10 * step]

            def mine(model: Any = model, number: list[int] = number) -> None:
                number[0] += 1
                model.zero_grad()
                square(model, wfbp.rank(), number[0])

            def every(reference: Any = reference, number: list[int] = number) -> None:
                number[0] += 1
                averaged(reference, square, number[0], wfbp.size())

            for each, run in ((optimizer, mine), (plain, every)):
                number[0] = 10 * step
                if step % 2:
                    each.zero_grad()
                if step == STEPS - 1:
                    run()
                    each.step()
                else:
                    update(how, each, run)
            equal(model, reference, f"{how}, step {step}")
        agree(model, how)


@check
def functions_that_a_program_puts_into_sgd() -> None:
    """They may hold the optimizer or its parameters in any way."""

    @torch.no_grad()
    def move(params: Any, lr: float) -> None:
        for p in params:
            p.sub_(lr * p.grad)

    for schedule in SCHEDULES:
        model, reference = pair()
        both: list[Any] = [torch.optim.SGD(net.parameters(), 0.1) for net in (model, reference)]
        for sgd, net in zip(both, (model, reference), strict=True):
            params = list(net.parameters())
            sgd.move = functools.partial(move, params, 0.1)
        optimizer, plain = wfbp.DistributedOptimizer(both[0], schedule=schedule), both[1]
        for each, net in ((optimizer, model), (plain, reference)):
            each.late = lambda net=net: move(net.parameters(), 0.05)
        for step in range(2 * STEPS):
            square(model, wfbp.rank(), step)
            averaged(reference, square, step, wfbp.size())
            for each in (optimizer, plain):
                (each.step, each.move, each.late)[step % 3]()
                each.zero_grad()
            equal(model, reference, f"{schedule}, step {step}")


class Differentiates(Moves):
    """Computes gradients without ``backward()``."""

    def compute(self, loss: torch.Tensor) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        for p, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
            p.grad = grad

    def update(self, loss: torch.Tensor) -> None:
        self.compute(loss)
        self.move(1.0)

    def average_and_update(self, loss: torch.Tensor) -> None:
        self.compute(loss)
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = wfbp.allreduce(p.grad)
        self.move(1.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        if loss is not None and loss.requires_grad:
            self.differentiate(loss)
        super().step()
        return loss

    def differentiate(self, loss: torch.Tensor) -> None:
        loss.backward()


class DifferentiatesItself(Differentiates):
    differentiate = Differentiates.compute


def loss_of(model: Any, step: int) -> torch.Tensor:
    loss: torch.Tensor = model(data(step, wfbp.rank(), 4, 5)).square().mean()
    return loss


@check
def methods_that_differentiate() -> None:
    """``step()`` averages gradients that they set. To use them at once is an error, unless the
    program is within ``skip_synchronize()``."""
    model, reference = pair()
    optimizer: Any = wfbp.DistributedOptimizer(Differentiates(model.parameters()))
    plain = Differentiates(reference.parameters())
    for step in range(3 * STEPS):
        averaged(reference, assign, step, wfbp.size())
        plain.step()
        if step % 3 == 0:
            optimizer.compute(loss_of(model, step))
            optimizer.step()
        elif step % 3 == 1:
            optimizer.compute(loss_of(model, step))
            optimizer.move(1.0)
        else:
            with optimizer.skip_synchronize():
                optimizer.average_and_update(loss_of(model, step))
        equal(model, reference, f"step {step}")
    update = functools.partial(optimizer.update, loss_of(model, 0))
    assert refused(update, "update() has updated parameters", "torch.autograd.grad", "backward()")
    optimizer.zero_grad()


@check
def losses_that_an_optimizer_differentiates() -> None:
    """``backward()`` on the loss of a closure is averaged; ``torch.autograd.grad`` is an error."""
    model, reference = pair()
    optimizer: Any = wfbp.DistributedOptimizer(Differentiates(model.parameters()))
    plain = Differentiates(reference.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = optimizer.step(lambda step=step: loss_of(model, step))
        averaged(reference, square, step, wfbp.size())
        plain.step()
        equal(model, reference, f"step {step}")
        assert len(set(map(float, wfbp.allgather(loss.detach().reshape(1))))) == 1
    optimizer = wfbp.DistributedOptimizer(DifferentiatesItself(model.parameters()))
    assert refused(lambda: optimizer.step(lambda: loss_of(model, 0)), "closure's loss", "averaged")
    optimizer.zero_grad()
