"""Optimizers with further methods, in all forms that Python offers."""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import pytest
import torch

import wfbp.torch as wfbp
from tests.parallel.programs.harness import Checks
from tests.parallel.programs.torch.training import (
    SCHEDULES,
    Descent,
    Twins,
    agree,
    assign,
    averaged,
    check_training,
    data,
    pair,
    refused,
    square,
    twins,
)

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

    @contextmanager
    def guarded(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.move(0.0)

    def twice(self) -> Iterator[int]:
        for number in range(2):
            yield number
            self.move(0.5)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        yield
        self.step()

    def function(self) -> Callable[[], object]:
        return lambda: self.move(1.0)

    @property
    def kept_property(self) -> Callable[[], object]:
        return lambda: self.move(1.0)

    async def coroutine(self) -> None:
        self.move(1.0)

    def scope(self) -> Scope:
        return Scope(self)


class Scope:
    """An object that holds the optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None:
        self.optimizer.move(1.0)


class Delegating(torch.optim.Optimizer):
    """Has all methods of another one."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.param_groups = inner, inner.param_groups
        self.state, self.defaults = inner.state, inner.defaults

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def run_coroutine(coroutine: Any) -> None:
    with suppress(StopIteration):
        coroutine.send(None)


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
    "by the original": lambda opt: getattr(opt, "_wfbp_original", opt).move(1.0),
    "function that is returned": lambda opt: opt.function()(),
    "property": lambda opt: opt.kept_property(),
    "coroutine": lambda opt: run_coroutine(opt.coroutine()),
    "the optimizer itself": lambda opt: opt.move(0.5).move(0.5),
}
AROUND: dict[str, Callable[[Any, Callable[[], None]], None]] = {
    "with block": lambda opt, run: within(run, opt),
    "context manager": lambda opt, run: within(run, opt.updating()),
    "context manager that steps": lambda opt, run: within(run, opt.stepping()),
    "object that holds it": lambda opt, run: within(run, opt.scope()),
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
        both = twins(Moves)
        for step in range(STEPS):
            mine, every = itertools.count(10 * step), itertools.count(10 * step)

            def of_this_rank(both: Any = both, numbers: Iterator[int] = mine) -> None:
                both.model.zero_grad()
                square(both.model, wfbp.rank(), next(numbers))

            def of_all(both: Any = both, numbers: Iterator[int] = every) -> None:
                averaged(both.reference, square, next(numbers), wfbp.size())

            for each, run in ((both.optimizer, of_this_rank), (both.plain, of_all)):
                if step % 2:
                    each.zero_grad()
                if step == STEPS - 1:
                    run()
                    each.step()
                else:
                    update(how, each, run)
            both.equal(f"{how}, step {step}")
        agree(both.model, how)


@check
def methods_of_an_optimizer_inside() -> None:
    both = twins(lambda params: Delegating(Moves(params)))
    for step in range(STEPS):
        both.optimizer.zero_grad()
        both.backward(step)
        for each in (both.optimizer, both.plain):
            each.move(1.0)
        both.equal(f"step {step}")


@check
def functions_that_a_program_puts_into_sgd() -> None:
    """They may hold the optimizer or its parameters in any way."""

    @torch.no_grad()
    def move(params: Any, lr: float) -> None:
        for p in params:
            p.sub_(lr * p.grad)

    def make(parameters: Any) -> Any:
        params = list(parameters)
        sgd: Any = torch.optim.SGD(params, 0.1)
        sgd.move = functools.partial(move, params, 0.1)
        return sgd

    for schedule in SCHEDULES:
        both = twins(make, schedule=schedule)
        for each, net in ((both.optimizer, both.model), (both.plain, both.reference)):
            each.late = lambda net=net: move(net.parameters(), 0.05)
        for step in range(2 * STEPS):
            both.backward(step)
            for each in (both.optimizer, both.plain):
                (each.step, each.move, each.late)[step % 3]()
                each.zero_grad()
            both.equal(f"{schedule}, step {step}")


class Differentiates(Moves):
    """Computes gradients without ``backward()``."""

    def compute(self, loss: torch.Tensor) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        for p, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
            p.grad = grad

    def update(self, loss: torch.Tensor) -> None:
        self.compute(loss)
        self.move(1.0)

    def update_head(self, loss: torch.Tensor) -> None:
        """The last layer alone."""
        params = [p for group in self.param_groups for p in group["params"]][-2:]
        for p, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
            p.data.sub_(grad, alpha=0.1)

    @torch.no_grad()
    def sharpness(self, loss_of: Any) -> float:
        """Changes parameters, differentiates, and changes them back."""
        params = [p for group in self.param_groups for p in group["params"]]
        kept = [p.clone() for p in params]
        for p in params:
            p.add_(1e-3)
        with torch.enable_grad():
            grads = torch.autograd.grad(loss_of(), params)
        for p, value in zip(params, kept, strict=True):
            p.copy_(value)
        return float(sum(grad.norm() for grad in grads))

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
    both = twins(Differentiates)
    model, optimizer = both[:2]
    for step in range(3 * STEPS):
        both.follow(step, assign)
        if step % 3 == 0:
            optimizer.compute(loss_of(model, step))
            optimizer.step()
        elif step % 3 == 1:
            optimizer.compute(loss_of(model, step))
            optimizer.move(1.0)
        else:
            with optimizer.skip_synchronize():
                optimizer.average_and_update(loss_of(model, step))
        both.equal(f"step {step}")
    update = functools.partial(optimizer.update, loss_of(model, 0))
    assert refused(update, "update() has updated parameters", "torch.autograd.grad", "backward()")
    optimizer.zero_grad()
    deep = torch.nn.Sequential(*(torch.nn.Linear(5, 5) for _ in range(6))).double()
    optimizer = wfbp.DistributedOptimizer(Differentiates(deep.parameters()))
    optimizer.sharpness(functools.partial(loss_of, deep, 0))
    update = functools.partial(optimizer.update_head, loss_of(deep, 0))
    assert refused(update, "update_head() has updated parameters", "torch.autograd.grad")
    optimizer.zero_grad()


@check
def losses_that_an_optimizer_differentiates() -> None:
    """``backward()`` on the loss of a closure is averaged; ``torch.autograd.grad`` is an error."""
    both = twins(Differentiates)
    model, optimizer = both[:2]
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = optimizer.step(lambda step=step: loss_of(model, step))
        both.follow(step)
        both.equal(f"step {step}")
        assert len(set(map(float, wfbp.allgather(loss.detach().reshape(1))))) == 1
    optimizer = wfbp.DistributedOptimizer(DifferentiatesItself(model.parameters()))
    assert refused(lambda: optimizer.step(lambda: loss_of(model, 0)), "closure's loss", "averaged")
    optimizer.zero_grad()


class UsesItsOwn(Descent):
    """Updates by something that differs between ranks, in different ways."""

    @property
    def norm(self) -> float:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        return float(torch.stack([grad.norm() for grad in grads if grad is not None]).sum())

    @torch.no_grad()
    def move(self, loss: torch.Tensor) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(3.0 * loss.item() * p.grad)

    @torch.no_grad()
    def step(self, closure: Any = None, noise: bool = False) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if noise:
                    p.add_(0.1 * (1 + wfbp.rank()) * torch.ones_like(p))
        return super().step(closure)


def by_a_property(optimizer: Any, loss: torch.Tensor) -> None:
    loss.backward()
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + optimizer.norm)
    optimizer.step()


def by_a_loss(optimizer: Any, loss: torch.Tensor) -> None:
    loss.backward()
    optimizer.move(loss)


def by_noise(optimizer: Any, loss: torch.Tensor) -> None:
    loss.backward()
    optimizer.step(noise=True)


@check
def updates_by_what_ranks_have_for_themselves() -> None:
    """One error on all ranks, unless the program says that ranks may differ."""
    for update in (by_a_property, by_a_loss, by_noise):
        for checks in (True, False):
            model, optimizer = twins(UsesItsOwn, check_parameters=checks)[:2]
            for step in range(2 * STEPS):
                optimizer.zero_grad()
                # Settings are compared before the first step.
                how = by_noise if update is by_a_property and not step else update
                act = functools.partial(how, optimizer, loss_of(model, step))
                if refused(act, "parameters have drifted apart", "wfbp.allreduce()"):
                    break
                if wfbp.rank() == 0:
                    optimizer.rate(optimizer.param_groups[0])  # a method that updates nothing
            assert (step < 2 * STEPS - 1) == checks, update.__name__
            optimizer.zero_grad()


@contextmanager
def logged() -> Iterator[list[str]]:
    """Messages that wfbp logs within the block."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("wfbp").addHandler(handler)
    yield texts
    logging.getLogger("wfbp").removeHandler(handler)


@check
def rounding_is_no_drift() -> None:
    """Unlike processors may round otherwise; what is more than that is told, or an error."""
    for change, told, fails in ((4e-16, 0, False), (1e-8, 1, False), (1e-1, 0, True)):
        model, optimizer = twins(Moves)[:2]
        failed = False
        with logged() as warned:
            for step in range(2 * STEPS):
                optimizer.zero_grad()
                square(model, wfbp.rank(), step)
                failed |= refused(optimizer.step, "parameters have drifted apart")
                if step == 1:
                    with torch.no_grad():
                        for p in model.parameters():
                            p.mul_(1 + change * (wfbp.rank() == 1))
        drifted = [text for text in warned if "drifted apart" in text]
        assert len(drifted) == (told if wfbp.rank() == 0 else 0), (change, warned)
        assert failed == fails, change
        optimizer.zero_grad()


class Reports(Descent):
    """Has a method whose name is taken."""

    def report(self) -> str:
        return "mine"


@check
def parameters_that_change_without_a_step() -> None:
    """Gradients that are cleared each time are told; so are methods that cannot be called."""
    with logged() as warned:
        model, optimizer = twins(Reports)[:2]
        for step in range(STEPS):
            optimizer.zero_grad()
            square(model, wfbp.rank(), step)
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(0.1 * p.grad)
        optimizer.zero_grad()
        optimizer.zero_grad()
    for text in ("cleared without being averaged", "Reports has report, as distributed"):
        assert sum(text in each for each in warned) == (wfbp.rank() == 0), (text, warned)


class Registered(Descent):
    """Knows its subclasses by name."""

    classes: ClassVar[list[str]] = []

    def __init_subclass__(cls, /, kind: str, **more: Any) -> None:
        super().__init_subclass__(**more)
        assert kind not in cls.classes
        cls.classes.append(kind)


class Once(Registered, kind="once"): ...


@check
def classes_that_register_themselves() -> None:
    model, _ = pair()
    check_training(model, square, Once, steps=STEPS)
    assert Registered.classes == ["once"]


class Searches(Descent):
    """Calls its closure with arguments."""

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        first, kind = torch.enable_grad()(closure)(backward=True)
        assert kind == "loss"
        super().step()
        return first, closure(backward=False)[0]


@check
def closures_with_arguments() -> None:
    model, reference = pair()
    optimizer: Any = wfbp.DistributedOptimizer(Searches(model.parameters()))
    both = Twins(model, optimizer, reference, Descent(reference.parameters()))
    for step in range(STEPS):

        def closure(backward: bool, step: int = step) -> tuple[torch.Tensor, str]:
            loss = loss_of(model, step)
            if backward:
                optimizer.zero_grad()
                loss.backward()
            return loss, "loss"

        losses = optimizer.step(closure)
        both.follow(step)
        both.equal(f"step {step}")
        for loss in losses:
            assert len(set(map(float, wfbp.allgather(loss.detach().reshape(1))))) == 1


class Given(Descent):
    """Steps by gradients that it is given."""

    @torch.no_grad()
    def step(self, grads: Any) -> None:  # type: ignore[override]
        for p, grad in zip(self.param_groups[0]["params"], grads["grads"], strict=True):
            p.sub_(0.1 * grad)


@check
def arguments_of_step_with_tensors() -> None:
    model, optimizer = twins(Given)[:2]
    params = list(model.parameters())
    own = torch.autograd.grad(loss_of(model, 0), params)
    optimizer.step({"grads": [wfbp.allreduce(grad) for grad in own]})
    agree(model)
    assert refused(lambda: optimizer.step({"grads": own}), "disagree on argument 1 (")
    assert refused(lambda: optimizer.step({"grads": own, "f": float}), "function")
    optimizer.zero_grad()


@check
def state_of_sharded_parameters() -> None:
    """To look for it is an error; ``state_dict()`` has it."""
    model, optimizer = twins(torch.optim.Adam, schedule="independent")[:2]
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        square(model, wfbp.rank(), step)
        optimizer.step()
    param = model[0].weight
    assert optimizer.report()["schedule"] == "independent"
    for act in (
        lambda: optimizer.state[param],
        lambda: param in optimizer.state,
        lambda: optimizer.state.get(param),
        lambda: optimizer.state.update({param: {}}),
    ):
        assert refused(act, "in shards", "optimizer.state_dict()")
    assert len(list(optimizer.state.items())) == len(optimizer.state)
    optimizer.state = optimizer.state
    assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))


class Lazy:
    """A cached property, as programs write them."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __get__(self, optimizer: Any, kind: Any) -> Any:
        return len(optimizer.param_groups) and self.function(optimizer)


class Versatile(Descent):
    """Has further methods that other programs have."""

    count = Lazy(lambda optimizer: len(optimizer.param_groups[0]["params"]))

    def __init__(self, params: Any, transform: Any = None) -> None:
        super().__init__(params)
        self.transform = transform or torch.clone
        self.shift = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(0.1 * self.transform(p.grad))
        return loss

    def minimize(self, closure: Any) -> Any:
        return self.step(closure)

    def train(self) -> None: ...

    def log(self) -> int:
        return 1

    @torch.no_grad()
    def swap(self, sign: float) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(2.0**sign)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        self.swap(1.0)
        try:
            yield
        finally:
            self.swap(-1.0)


def train_both(both: Twins, steps: Any, where: str) -> None:
    for step in steps:
        both.step(step)
        both.equal(f"{where}, step {step}")


@check
def methods_that_one_rank_calls_alone() -> None:
    """Also before the first step, after a step that is left out, and as a context manager."""
    both = twins(Versatile)
    model, optimizer = both[:2]
    assert optimizer.count == len(list(model.parameters()))
    if wfbp.rank() == 0:
        with torch.no_grad():
            model[0].weight.mul_(2.0)
    optimizer.train()
    wfbp.broadcast_parameters(model.state_dict(), root_rank=wfbp.size() - 1)
    train_both(both, range(3), "first")
    square(model, wfbp.rank(), 99)
    optimizer.synchronize()
    if wfbp.rank() == 0:
        optimizer.log()
        with optimizer.swapped():
            pass
        optimizer.swap(1.0)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
    optimizer.zero_grad()
    train_both(both, range(3, 9), "then")


@check
def methods_that_call_step_with_a_closure() -> None:
    both = twins(Versatile)
    model, optimizer = both[:2]
    optimizer.outer = lambda closure: (optimizer.log(), optimizer.minimize(closure))
    for step in range(STEPS):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        (optimizer.outer if step % 2 else optimizer.minimize)(closure)
        both.follow(step)
        both.equal(f"step {step}")


@check
def functions_that_are_replaced() -> None:
    """Also where ranks update shards by a copy of the optimizer."""
    for schedule in SCHEDULES:
        both = twins(Versatile, schedule=schedule, optimizer_sharding=True)
        model, optimizer = both[:2]
        train_both(both, range(2 * STEPS), schedule)
        optimizer.transform = torch.zeros_like
        before = [p.detach().clone() for p in model.parameters()]
        square(model, wfbp.rank(), 0)
        optimizer.step()
        assert all(map(torch.equal, before, [p.detach() for p in model.parameters()])), schedule
        optimizer.zero_grad()


@check
def an_exception_within_a_context_manager() -> None:
    """On one rank: it propagates at once, and this rank does not wait for the others."""
    model, optimizer = twins(Moves)[:2]
    optimizer.zero_grad()

    def fail() -> None:
        square(model, wfbp.rank(), 0)
        raise ZeroDivisionError

    if wfbp.rank() == wfbp.size() - 1:
        for block in (optimizer, optimizer.updating(), optimizer.guarded()):
            with pytest.raises(ZeroDivisionError):
                within(fail, block)
            optimizer.zero_grad()


@check
def parameters_that_no_gradient_reaches() -> None:
    """They may hold what a rank has for itself."""
    model, _ = pair()
    own = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    optimizer = wfbp.DistributedOptimizer(Versatile([own, *model.parameters()]))
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        square(model, wfbp.rank(), step)
        own.add_(wfbp.rank() * min(step, 1))
        optimizer.step()
    agree(model)


@check
def losses_that_a_program_keeps() -> None:
    """They keep no optimizer; predictions and counts beside losses stay this rank's."""
    model, optimizer = twins(Versatile)[:2]
    rank = wfbp.rank()

    def closure() -> tuple[torch.Tensor, torch.Tensor, int]:
        model.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss, torch.full((1, 1 + rank % 2), float(rank)), rank

    loss, predictions, count = optimizer.step(closure)
    assert predictions.flatten()[0] == count == rank
    optimizer.zero_grad()
    sync = weakref.ref(optimizer._wfbp_sync)
    del optimizer
    gc.collect()
    assert sync() is None
    assert loss.requires_grad
