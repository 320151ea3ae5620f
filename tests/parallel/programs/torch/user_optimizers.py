"""Optimizers that users write or wrap: their steps, methods, settings and state."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import nn

import wfbp.torch as wfbp
from tests.parallel.programs.harness import Checks, raises
from tests.parallel.programs.torch.training import (
    SCHEDULES,
    Backward,
    Descent,
    agree,
    assign,
    averaged,
    check_training,
    data,
    mlp,
    pair,
    refused,
    square,
    twins,
)
from wfbp.errors import DisagreementError
from wfbp.runtime import process

check = Checks()

STEPS = 8
"""Enough for every mode to install its plan and use it."""


class SelfPartial(Descent):
    """Keeps its own method with arguments filled in."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.partial = functools.partial(self.step)


@check
def bound_method_within_a_partial() -> None:
    """The program declares that the optimizer may be stepped in parts."""
    params = pair()[0].parameters()
    wrap = functools.partial(
        wfbp.DistributedOptimizer, SelfPartial(params), optimizer_sharding=True
    )
    raises(ValueError, "keeps its own method", act=wrap)


class Counting(Descent):
    """Counts its steps outside of the state, and makes them smaller."""

    def __init__(self, params: Any, place: str) -> None:
        super().__init__(params, step=0, steps=[0])
        self.place = place
        self.count, self.counts, self.array = 0, {"all": 0}, np.zeros(1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["step"] += self.place == "group['step']"
        self.param_groups[0]["steps"][0] += self.place == "group['steps']"
        self.count += self.place == "self.count"
        self.counts["all"] += self.place == "self.counts"
        self.array += self.place == "self.array"
        return super().step(closure)


@check
def steps_counted_outside_of_the_state() -> None:
    """Copies of the optimizer, which step its parts, would lose the count, or count twice. The
    first step tells, whatever its plan."""
    for place in ("group['step']", "group['steps']", "self.count", "self.counts", "self.array"):
        model = pair()[0]
        optimizer = wfbp.DistributedOptimizer(
            Counting(model.parameters(), place), optimizer_sharding=True
        )
        square(model, wfbp.rank(), 0)
        assert refused(optimizer.step, f"changed {place}", "optimizer_sharding=None"), place
        optimizer.zero_grad()


class Rewriting(Descent):
    """Changes in each step what loses nothing: equal settings, flags, and what parameters hold."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, range=(0.5, 1.5))
        self.all = tuple(p for group in self.param_groups for p in group["params"])
        self.last, self.is_first, self.text = self.all[-1], True, ""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"], group["range"] = float(str(group["lr"])), tuple(map(float, (0.5, 1.5)))
        self.is_first, self.text = False, self.text + "."
        return super().step(closure)


@check
def settings_written_anew() -> None:
    check_training(pair()[0], square, Rewriting, steps=STEPS, optimizer_sharding=True)


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization in the form that most programs copy."""

    def __init__(self, params: Any, kind: Any = torch.optim.SGD, rho: float = 0.05) -> None:
        super().__init__(params, {"rho": rho})
        self.base_optimizer = kind(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            self.state[p]["old_p"] = p.data.clone()
            p.add_(p.grad, alpha=float(0.05 / (norm + 1e-12)))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is not None
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()


@check
def sharpness_aware_minimization() -> None:
    """Gradients of backward passes, or assigned or written ones, for steps by other methods or by
    ``step(closure)``; also after ``synchronize()``."""
    ways: dict[str, Backward] = {
        "backward": square,
        "replaced": assign,
        "written": functools.partial(assign, how="written"),
        "data": functools.partial(assign, how="data"),
    }
    for how, ends in itertools.product(ways, ("second_step", "closure")):
        both = twins(SAM)
        for step in range(STEPS):

            def mine(again: int, both: Any = both, step: int = step, how: str = how) -> None:
                if how == "backward":
                    both.optimizer.zero_grad()
                ways[how](both.model, wfbp.rank(), 2 * step + again)

            def all_of_them(again: int, both: Any = both, step: int = step, how: str = how) -> None:
                averaged(both.reference, ways[how], 2 * step + again, wfbp.size())

            for each, set_gradients in ((both.optimizer, mine), (both.plain, all_of_them)):
                set_gradients(0)
                if ends == "closure":
                    each.step(functools.partial(set_gradients, 1))
                    continue
                if step % 2 and how == "backward" and each is both.optimizer:
                    each.synchronize()
                each.first_step()
                set_gradients(1)
                each.second_step()
            both.equal(f"{how}, {ends}, step {step}")


class Fisher(Descent):
    """Looks at gradients by a method of its own."""

    def add(self) -> None: ...


@check
def own_methods_where_a_rank_has_no_gradients() -> None:
    """One error on every rank, as soon as the others take part in a step."""
    usual = process.current("the check").config
    model, optimizer = twins(Fisher)[:2]
    problem = ""
    try:
        if wfbp.rank() == 0:
            assign(model, 0, 0)
        optimizer.add()
        assign(model, wfbp.rank(), 1)
        optimizer.step()
    except DisagreementError as error:
        problem = str(error)
    for told in MPI.COMM_WORLD.allgather(problem):
        assert "by different methods of the optimizer" in told, told
    wfbp.shutdown()
    wfbp.init(config=usual)


class RunsBackward(Descent):
    """Its own methods run backward, and perhaps update at once."""

    @torch.no_grad()
    def fused_backward(self, loss: torch.Tensor) -> None:
        torch.enable_grad()(loss.backward)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad)
                    p.grad = None

    def whole(self, *losses: torch.Tensor) -> None:
        for loss in losses:
            loss.backward()
        self.step()

    @torch.no_grad()
    def step(self, closure: Any = None, loss: Any = None) -> Any:
        if loss is not None:
            torch.enable_grad()(loss().backward)()
        return super().step()


@check
def own_methods_that_run_backward() -> None:
    """Their gradients are averaged as soon as a pass is over."""

    def losses(model: nn.Module, rank: int, step: int) -> list[torch.Tensor]:
        return [model(data(step, rank, k + 1, 5)).square().mean() for k in range(2)]

    both = twins(RunsBackward)
    model, optimizer, reference, plain = both
    for step in range(2 * STEPS):
        every = [losses(reference, rank, step) for rank in range(wfbp.size())]
        means = [torch.stack(each).mean() for each in zip(*every, strict=True)]
        for each, mine in ((optimizer, losses(model, wfbp.rank(), step)), (plain, means)):
            if step % 2:
                each.fused_backward(sum(mine))
            else:
                each.whole(*mine)
                each.zero_grad()
        both.equal(f"step {step}")
    optimizer.zero_grad()
    loss = losses(model, wfbp.rank(), 0)[0]
    assert refused(lambda: optimizer.step(None, lambda: loss), "function", "argument 2")
    optimizer = wfbp.DistributedOptimizer(RunsBackward(model.parameters()), op=wfbp.Sum)
    assert refused(functools.partial(optimizer.fused_backward, loss), "fused_backward() runs back")
    optimizer.zero_grad()


class Further(torch.optim.SGD):
    """Its step takes more than a closure."""

    def step(self, closure: Any = None, scale: float = 1.0, *, rates: Any = (1.0,)) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad *= scale * float(rates[0])
        super().step()
        return loss


@check.by_own_schedules
def further_arguments_of_step() -> None:
    """They reach the optimizer, by position or name, also after clipping and with a closure."""
    for schedule, declared in itertools.product(SCHEDULES, (True, None)):
        both = twins(
            functools.partial(Further, lr=0.1), schedule=schedule, optimizer_sharding=declared
        )
        for step in range(STEPS):
            both.optimizer.zero_grad()
            both.backward(step)
            if step == 3:
                both.clip(0.1)
            rates = [torch.tensor(0.5 + step)]
            if step % 4 == 1:
                again = functools.partial(square, both.model, wfbp.rank(), step)
                both.optimizer.step(again, 2.0, rates=rates)
                for p in both.reference.parameters():
                    p.grad *= 2.0  # those of the closure are the same
                both.plain.step(None, 2.0, rates=rates)
            elif step % 4 == 2:
                both.update()
            else:
                for each in (both.optimizer, both.plain):
                    each.step(None, 0.5, rates=rates)
            both.equal(f"{schedule}, {declared}, step {step}")


@check
def tensors_in_a_setting() -> None:
    """A tensor within a tuple is changed right after a step."""

    def make(params: Any) -> torch.optim.Optimizer:
        betas = torch.tensor(0.9), torch.tensor(0.999)
        return torch.optim.Adam(params, lr=0.01, betas=betas, foreach=False)

    both = twins(make, optimizer_sharding=False)
    for step in range(STEPS):
        both.step(step)
        for each in (both.optimizer, both.plain):
            each.param_groups[0]["betas"][0].fill_(0.1 + 0.8 * (step % 2))
    both.equal()


class ByGlobal(Descent):
    def rate(self, group: dict[str, Any]) -> float:
        return float(group["lr"]) * RATES["all"]


RATES = {"all": 1.0}


@check
def changed_right_after_a_step() -> None:
    """A global that ``step`` reads, and a tensor from which the rate was computed."""
    base = torch.tensor(0.01, requires_grad=True)
    for make in (ByGlobal, lambda params: torch.optim.Adam(params, lr=base * 1.0)):
        both = twins(make, optimizer_sharding=False)
        for step in range(STEPS):
            RATES["all"] = 1.0 + step
            both.step(step)
            RATES["all"] = 100.0
        both.equal()


class BareZero(Descent):
    def zero_grad(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None


@check
def zero_grad_without_arguments() -> None:
    check_training(pair()[0], square, BareZero, steps=STEPS)


class Wrapper:
    """Has a class derived from the optimizer's, as in Lightning, and none of its state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.wrapped = optimizer
        kind = type(optimizer)
        self.__class__ = type(f"Wrapped{kind.__name__}", (type(self), kind), {})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)

    def step(self) -> None:
        self.wrapped.step()


@check
def wrapped_by_an_object_of_a_derived_class() -> None:
    both = twins(functools.partial(torch.optim.SGD, lr=0.1))
    wrapper = Wrapper(both.optimizer)
    assert isinstance(wrapper, torch.optim.SGD)
    for step in range(3):
        square(both.model, wfbp.rank(), step)
        wrapper.step()
        both.optimizer.zero_grad()
        both.follow(step)
        both.equal(f"step {step}")


@check
def state_of_other_ranks_in_hooks() -> None:
    """A rank without state can ask for the others' in a post-hook, not within the step."""

    def few(step: int) -> torch.Tensor:
        return (model.weight * data(step, wfbp.rank(), 2)).sum()

    model = nn.Linear(2, 1, bias=False).double()
    wfbp.broadcast_parameters(model.state_dict())
    wide = nn.Parameter(torch.ones(17 * wfbp.size(), dtype=torch.float64))
    inner = torch.optim.Adam([model.weight, wide])
    optimizer = wfbp.DistributedOptimizer(inner, threshold_bytes=1)
    calls = itertools.count(1)

    def look(*_: Any) -> None:
        call = next(calls)
        if wfbp.rank() == call % wfbp.size():  # one rank alone
            steps = [float(e["step"]) for e in optimizer.state_dict()["state"].values()]
            assert steps == [call], (call, steps)

    optimizer.register_step_post_hook(look)
    for step in range(STEPS):
        optimizer.zero_grad()
        few(step).backward()
        optimizer.step()
    optimizer.register_step_pre_hook(lambda *_: optimizer.state_dict() and None)
    few(0).backward()
    refused(optimizer.step, "within step()")  # unless the state is whole
    for key in list(optimizer.state):
        if not optimizer.state[key]:
            del optimizer.state[key]
    assert len(optimizer.state_dict()["state"]) == 1


@check
def no_state_is_left_when_another_optimizer_takes_over() -> None:
    model = mlp(5, 7, 7, 3)
    wfbp.broadcast_parameters(model.state_dict())
    inner, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    for wrapped, sharding in ((inner, None), (other, None), (inner, False)):
        optimizer = wfbp.DistributedOptimizer(wrapped, optimizer_sharding=sharding)
        for step in range(STEPS):
            optimizer.zero_grad()
            square(model, wfbp.rank(), step)
            optimizer.step()
        assert optimizer.state_dict()["state"] == {}
        assert inner.state_dict()["state"] == {}


def side_by_side(*acts: Callable[[], object]) -> None:
    """Threads whose first calls come in another order on every other rank."""
    problems: list[BaseException] = []

    def run(place: int, act: Callable[[], object]) -> None:
        try:
            time.sleep(0.3 * ((place + wfbp.rank()) % len(acts)))
            act()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(acts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for problem in problems:
        raise problem


@check
def threads_that_gather_state() -> None:
    """Each thread has another rank's optimizer state brought to its optimizer."""
    models, optimizers = zip(*(twins()[:2] for _ in range(2)), strict=True)
    for step in range(STEPS):
        for which, model in enumerate(models):
            optimizers[which].zero_grad()
            (model(data(step, wfbp.rank(), 4, 5)) * 10.0**which).square().mean().backward()
            optimizers[which].step()

    def closure_step(which: int) -> None:
        def evaluate() -> torch.Tensor:
            optimizers[which].zero_grad()
            loss = models[which](data(99, wfbp.rank(), 4, 5)).square().mean() * 10.0**which
            loss.backward()
            return torch.as_tensor(loss)

        optimizers[which].step(evaluate)

    side_by_side(*(functools.partial(closure_step, which) for which in range(2)))
    for which, model in enumerate(models):
        agree(model, f"model {which}:")
