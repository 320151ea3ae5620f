"""Programs that once trained wrongly without a message, or failed although they are ordinary."""

from __future__ import annotations

import copy
import functools
import gc
import io
import itertools
import math
import os
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import nn

import wfbp.horovod.torch as hvd
import wfbp.torch as wfbp
from tests.parallel.programs.harness import Checks, raises
from tests.parallel.programs.torch.training import (
    Twins,
    averaged,
    check_training,
    data,
    equal,
    mlp,
    momentum,
    pair,
    same,
    square,
    twins,
)
from wfbp.errors import DisagreementError, WfbpError
from wfbp.runtime import process
from wfbp.torch import pending
from wfbp.torch.ending import join

check = Checks()

STEPS = 8
"""Enough for every mode to install its plan and use it."""


def agree(model: nn.Module, where: str = "") -> None:
    """All ranks have the same parameters."""
    for name, param in model.named_parameters():
        for theirs in MPI.COMM_WORLD.allgather(param.detach().clone()):
            same(param.detach(), theirs, f"{where} {name} of two ranks")


def refused(act: Callable[[], object], *parts: str) -> bool:
    """Whether an action raises an error with these parts on every rank; fails if only some do."""
    problem = ""
    try:
        act()
    except (RuntimeError, ValueError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
    problems = MPI.COMM_WORLD.allgather(problem)
    assert all(problems) or not any(problems), f"only some ranks raised: {problems}"
    for part in parts if problem else ():
        assert part in problem, f"{part!r} is not in {problem}"
    return bool(problem)


class Descent(torch.optim.Optimizer):
    """Plain gradient descent, as a user writes it."""

    def __init__(self, params: Any, lr: float = 0.1, **more: Any) -> None:
        super().__init__(params, {"lr": lr, **more})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-self.rate(group))
        return loss

    def rate(self, group: dict[str, Any]) -> float:
        return float(group["lr"])


class SelfBound(Descent):
    """Keeps a bound method of its own as an attribute."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self._update = self._single

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self._update()

    def _single(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])


@check
def bound_method_as_attribute() -> None:
    check_training(pair()[0], square, SelfBound, steps=STEPS)


class SelfPartial(SelfBound):
    """Keeps its own method with arguments filled in."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.partial = functools.partial(self.step)


@check
def bound_method_within_a_partial() -> None:
    """The same, and the program declares that the optimizer may be stepped in parts."""
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


@check
def gradient_taken_by_an_earlier_hook() -> None:
    """As programs do that keep gradients elsewhere; the parameter then has none, on any rank."""
    model = pair()[0]
    taken: list[torch.Tensor | None] = []

    def take(p: torch.Tensor) -> None:
        taken.append(p.grad)
        p.grad = None

    name, first = next(iter(model.named_parameters()))
    first.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
    before = first.detach().clone()
    optimizer = wfbp.DistributedOptimizer(Descent(model.parameters()), model.named_parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        model(data(step, wfbp.rank(), 4, 5)).square().mean().backward()
        optimizer.step()
    assert len(taken) == STEPS
    same(first.detach(), before, name)
    agree(model)


class Averaging(torch.optim.Optimizer):
    """Keeps an average of the parameters beside them: ``eval()`` and ``train()`` exchange both."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "average" not in state:
                    state["average"] = p.clone()
                    state["curvature"] = torch.zeros_like(p)
                p.sub_(group["lr"] * p.grad / (1 + state["curvature"]))
                state["average"].lerp_(p, 0.5)

    @torch.no_grad()
    def exchange(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if "average" in self.state[p]:
                    kept = p.clone()
                    p.copy_(self.state[p]["average"])
                    self.state[p]["average"].copy_(kept)

    @torch.no_grad()
    def update_curvature(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and "curvature" in self.state[p]:
                    self.state[p]["curvature"].lerp_(p.grad.square(), 0.5)


@check
def methods_that_use_state() -> None:
    """Methods of schedule-free optimizers, and of those that estimate curvature."""
    for options in ({}, {"optimizer_sharding": True}):
        _use_state(options)


def _use_state(options: Any) -> None:
    both = twins(Averaging, **options)
    optimizers = (both.optimizer, both.plain)
    for step in range(STEPS):
        both.optimizer.zero_grad()
        both.backward(step)
        both.optimizer.synchronize()
        for each in optimizers if step % 2 else ():
            each.update_curvature()
        both.step_synchronized()
        both.plain.step()
        for each in optimizers:
            each.exchange()
        both.equal(f"step {step}, {options}: averages")
        for each in optimizers:
            each.exchange()
    both.equal(f"{options}: parameters")


class Words(nn.Module):
    """A table of words, with sparse gradients unless ``dense``."""

    def __init__(self, dense: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table = nn.Embedding(20, 3, sparse=not dense)
        self.double()

    def forward(self, step: int, rank: int) -> torch.Tensor:
        words = self.table(torch.tensor([rank, 5 + step % 3, 5]))
        return torch.as_tensor(words).square().sum()


def words() -> tuple[Words, Any]:
    model = Words()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, wfbp.DistributedOptimizer(inner, schedule="layerwise")


@check
def sparse_gradients_in_a_list() -> None:
    """Zeroed in place by a list that was made after the first step."""
    model, optimizer = words()
    reference = Words(dense=True)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    lists: list[torch.Tensor] = []
    for step in range(4):
        for grad in lists:
            grad.zero_()
        model(step, wfbp.rank()).backward()
        for rank in range(wfbp.size()):
            (reference(step, rank) / wfbp.size()).backward()
        optimizer.step()
        plain.step()
        equal(model.parameters(), reference.parameters(), f"step {step}")
        if step == 0:
            lists = [net.table.weight.grad for net in (model, reference)]  # type: ignore[misc]


@check
def scaler_and_sparse_gradients() -> None:
    """Unscaled before they are averaged, with an infinity on one rank."""
    model, optimizer = words()
    for step in range(3):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer.zero_grad()
        loss = model(step, wfbp.rank())
        if step == 1 and wfbp.rank() == 0:
            loss = loss + model.table(torch.tensor([7])).sum() * math.inf
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        refused(functools.partial(scaler.step, optimizer), "optimizer.synchronize()")
        scaler.update()
        agree(model, f"step {step}")


@check
def changed_sparse_gradient() -> None:
    """Clamped in place, replaced, or scaled, before it is averaged."""

    def clamp(grad: torch.Tensor) -> torch.Tensor:
        grad._values().clamp_(-1e-3, 1e-3)
        return grad

    def scale(grad: torch.Tensor) -> torch.Tensor:
        grad.mul_(0.5)
        return grad

    def clamp_data(grad: torch.Tensor) -> torch.Tensor:
        grad.data._values().clamp_(-1e-3, 1e-3)
        return grad

    def replace(grad: torch.Tensor) -> torch.Tensor:
        return grad.coalesce() * 0.5

    for change in (clamp, scale, clamp_data, replace):
        model, optimizer = words()
        for step in range(3):
            optimizer.zero_grad()
            model(step, wfbp.rank()).backward()
            weight = model.table.weight
            if step < 2:
                optimizer.step()
                continue
            assert weight.grad is not None
            weight.grad = change(weight.grad)
            raises(RuntimeError, "optimizer.synchronize()", act=optimizer.step)
            optimizer.zero_grad()
        agree(model, change.__name__)


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


def train_sam(sam: Any, backward: Callable[[int], None], how: str) -> None:
    """Some steps, by ``first_step()`` and ``second_step()``, also after ``synchronize()``, or by
    ``step(closure)``."""

    def average() -> None:
        if how == "synchronized" and hasattr(sam, "synchronize"):
            sam.synchronize()

    for step in range(STEPS):
        sam.zero_grad()
        backward(step)
        if how == "closure":

            def again(step: int = step) -> None:
                sam.zero_grad()
                backward(step)

            sam.step(again)
            continue
        average()
        sam.first_step(zero_grad=True)
        backward(step)
        average()
        sam.second_step(zero_grad=True)


def check_sam(how: str) -> bool:
    """Trains as one process would, or is refused on every rank; whether it trained."""
    both = twins(SAM)
    train_sam(both.plain, lambda step: averaged(both.reference, square, step, wfbp.size()), how)
    act = functools.partial(
        train_sam, both.optimizer, lambda step: square(both.model, wfbp.rank(), step), how
    )
    if refused(act, "optimizer.synchronize()"):
        return False
    both.equal(how)
    return True


@check
def steps_by_other_methods() -> None:
    """Steps that are not named ``step``; after ``synchronize()`` they train."""
    check_sam("as alone")
    assert check_sam("synchronized"), "refused although gradients were averaged"


@check
def gradients_before_a_closure() -> None:
    """``loss.backward(); optimizer.step(closure)`` where the step uses both gradients."""
    assert check_sam("closure")


@check
def sums_before_a_closure() -> None:
    """With ``op=Sum``: a closure that does not zero adds to what is a sum already."""
    both = twins(op=wfbp.Sum)
    model, optimizer, reference, plain = both
    for step in range(4):
        for net, ranks in ((model, [wfbp.rank()]), (reference, range(wfbp.size()))):
            net.zero_grad()
            for rank in ranks:
                square(net, rank, 2 * step)

        def add(step: int = step) -> torch.Tensor:
            square(model, wfbp.rank(), 2 * step + 1)
            return torch.zeros(())

        optimizer.step(add)
        for rank in range(wfbp.size()):
            square(reference, rank, 2 * step + 1)
        plain.step()
        both.equal(f"step {step}")


SCHEDULES = ("oasr", "hybrid", "independent", "auto")

own_schedules: set[str] = set()
"""Checks that set schedules themselves: one mode for each number of ranks is enough."""


def with_schedules(function: Callable[[], None]) -> Callable[[], None]:
    """:data:`check`, of those."""
    own_schedules.add(function.__name__)
    return check(function)


def assign(model: nn.Module, rank: int, step: int, how: str = "replaced") -> None:
    """Set gradients as ``torch.autograd.grad`` returns them, without a hook."""
    params = list(model.parameters())
    loss = model(data(step, rank, 4, 5)).square().mean()
    for p, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
        if how == "replaced" or p.grad is None:
            p.grad = grad
        else:
            p.grad.copy_(grad)


@check
def own_methods_after_assigned_gradients() -> None:
    """They are averaged, also where they are written in place and for ``step(closure)``."""
    for how, ends in itertools.product(("replaced", "written"), ("second_step", "closure")):
        both = twins(SAM)
        for step in range(STEPS):

            def mine(again: int, both: Any = both, step: int = step, how: str = how) -> None:
                assign(both.model, wfbp.rank(), 2 * step + again, how)

            def all_of_them(again: int, both: Any = both, step: int = step) -> None:
                averaged(both.reference, assign, 2 * step + again, wfbp.size())

            for each, set_gradients in ((both.optimizer, mine), (both.plain, all_of_them)):
                set_gradients(0)
                if ends == "closure":
                    each.step(functools.partial(set_gradients, 1))
                else:
                    each.first_step()
                    set_gradients(1)
                    each.second_step()
            both.equal(f"{how}, {ends}, step {step}")


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


@with_schedules
def own_methods_after_synchronize_and_clipping() -> None:
    """They see whole averages, clipped, and are not averaged again; those that follow are new."""
    for schedule, declared in itertools.product(SCHEDULES, (True, None)):
        both = twins(Fisher, schedule=schedule, optimizer_sharding=declared)
        for step in range(STEPS):
            both.optimizer.zero_grad()
            both.backward(step)
            if step % 2:
                both.clip(0.1)
            else:
                both.optimizer.synchronize()
            both.optimizer.add()
            both.plain.add()
            if step % 3 == 0:
                both.backward(100 + step, assign)
            both.update()
            both.equal(f"{schedule}, {declared}, step {step}")


class Fisher(Descent):
    """Adds up squares of gradients by a method of its own, and divides by them."""

    @torch.no_grad()
    def add(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    total = self.state[p].setdefault("squares", torch.ones_like(p))
                    total += p.grad.square()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad / self.state[p]["squares"])


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

    def backward(self, *losses: torch.Tensor) -> None:
        for loss in losses:
            loss.backward()

    def whole(self, *losses: torch.Tensor) -> None:
        self.backward(*losses)
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
    for step in range(3 * STEPS):
        every = [losses(reference, rank, step) for rank in range(wfbp.size())]
        means = [torch.stack(each).mean() for each in zip(*every, strict=True)]
        for each, mine in ((optimizer, losses(model, wfbp.rank(), step)), (plain, means)):
            if step % 3 == 0:
                each.fused_backward(sum(mine))
                continue
            if step % 3 == 1:
                each.backward(*mine)
                each.step()
            else:
                each.whole(*mine)
            each.zero_grad()
        both.equal(f"step {step}")
    optimizer.zero_grad()
    loss = losses(model, wfbp.rank(), 0)[0]
    assert refused(lambda: optimizer.step(None, lambda: loss), "function", "argument 2")
    optimizer = wfbp.DistributedOptimizer(RunsBackward(model.parameters()), op=wfbp.Sum)
    assert refused(functools.partial(optimizer.backward, loss), "backward() runs backward")
    optimizer.zero_grad()


@with_schedules
def gradients_changed_after_clipping() -> None:
    """An error under every schedule, also without a step between; not after ``synchronize()``."""

    def scale(model: nn.Module) -> None:
        for p in model.parameters():
            p.grad *= 0.5  # type: ignore[operator]

    def remove(model: nn.Module) -> None:
        model[0].weight.grad = None  # type: ignore[index,union-attr]

    changes: list[Callable[[nn.Module], None]] = [
        lambda model: assign(model, wfbp.rank(), 7),
        scale,
        remove,
    ]
    for schedule, change in itertools.product(SCHEDULES, changes):
        model, optimizer = twins(schedule=schedule)[:2]
        for step in range(4):
            square(model, wfbp.rank(), step)
            optimizer.clip_grad_norm_(0.1)
            change(model)
            assert refused(optimizer.step, "after clip_grad_norm_()"), schedule
            optimizer.zero_grad()
            square(model, wfbp.rank(), step)
            optimizer.synchronize()
            optimizer.clip_grad_norm_(0.1)
            scale(model)
            optimizer.step()
            optimizer.zero_grad()
        agree(model, schedule)


@check
def a_plain_step_after_a_skipped_one() -> None:
    """Also if one rank has no gradients, and if the program assigns them."""
    both = twins()
    model, optimizer = both[:2]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def some(net: nn.Module, rank: int, step: int) -> None:
        if step % 4 != 2 or rank == 0:
            (assign if step % 4 == 3 else square)(net, rank, step)

    for step in range(3 * STEPS):
        model.zero_grad()
        if step % 4 < 2:
            loss = model(data(step, wfbp.rank(), 4, 5)).square().mean()
            scaler.scale(loss * math.inf if step % 4 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if step % 4:
                continue
            both.follow(step)
        else:
            some(model, wfbp.rank(), step)
            optimizer.step()
            both.follow(step, some)
        both.equal(f"step {step}")


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


@with_schedules
def further_arguments_of_step() -> None:
    """They reach the optimizer, by position or name, also after clipping and with a closure."""
    for schedule, declared in itertools.product(SCHEDULES, (True, None)):
        both = twins(
            functools.partial(Further, lr=0.1), schedule=schedule, optimizer_sharding=declared
        )
        model, optimizer, reference, plain = both
        for step in range(STEPS):
            optimizer.zero_grad()
            both.backward(step)
            if step == 3:
                both.clip(0.1)
            rates = [torch.tensor(0.5 + step)]
            if step % 4 == 1:
                again = functools.partial(square, model, wfbp.rank(), step)
                optimizer.step(again, 2.0, rates=rates)
                before = [p.grad for p in reference.parameters()]
                averaged(reference, square, step, wfbp.size())
                for p, grad in zip(reference.parameters(), before, strict=True):
                    p.grad += grad  # type: ignore[operator]
                plain.step(None, 2.0, rates=rates)
            elif step % 4 == 2:
                both.update()
            else:
                for each in (optimizer, plain):
                    each.step(None, 0.5, rates=rates)
            both.equal(f"{schedule}, {declared}, step {step}")


class Differs(Descent):
    """Keeps the last gradient (as the original diffGrad does), and perhaps a part of it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                before = state.get("before", torch.zeros_like(p))
                p.sub_(group["lr"] * p.grad * torch.sigmoid((before - p.grad).abs() * 100))
                state["before"] = p.grad if group.get("whole", True) else p.grad.detach()


@with_schedules
def gradients_that_an_optimizer_keeps() -> None:
    """They are never overwritten: as an object, or as a view of it."""
    sharding = (True, None)
    for whole, declared, schedule in itertools.product((True, False), sharding, SCHEDULES):
        both = twins(
            functools.partial(Differs, whole=whole), schedule=schedule, optimizer_sharding=declared
        )
        for step in range(2 * STEPS):
            both.optimizer.zero_grad()
            both.backward(step)
            if step % 5 == 4:
                both.optimizer.synchronize()
            both.update()
            both.equal(f"{schedule}, {declared}, step {step}")


@with_schedules
def gradients_that_a_program_keeps() -> None:
    """Averages of all steps, as objects, views and NumPy arrays."""
    for schedule in SCHEDULES:
        model, optimizer, reference, _ = twins(schedule=schedule)
        kept: list[tuple[Any, torch.Tensor]] = []
        for step in range(2 * STEPS):
            optimizer.zero_grad()
            square(model, wfbp.rank(), step)
            optimizer.synchronize()
            averaged(reference, square, step, wfbp.size())
            ways: list[Callable[[Any], Any]] = [
                lambda g: g,
                lambda g: g.view(-1),
                lambda g: g.numpy(),
            ]
            for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                assert q.grad is not None
                kept.append((ways[step % 3](p.grad), q.grad))
            optimizer.step()
            reference.load_state_dict(model.state_dict())
        for found, wanted in kept:
            same(torch.as_tensor(found).view(wanted.shape), wanted, schedule, 1e-9)


@check
def averages_that_nobody_keeps_are_not_copied() -> None:
    """Then ``p.grad`` is memory of the message; nothing here may refer to the gradient before."""
    model, optimizer = twins(schedule="oasr")[:2]
    sync, are_there = optimizer._wfbp_sync, []
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        square(model, wfbp.rank(), step)
        optimizer.step()
        pairs = [(p.grad, lent()) for p, lent in zip(sync._params, sync._lent, strict=True)]
        if all(lent for _, lent in pairs):  # else this was the last step of a plan
            are_there += [lent.has(grad) for grad, lent in pairs]
    assert are_there
    assert all(are_there), are_there


def wrapped(nets: tuple[nn.Module, nn.Module], schedule: str) -> Twins:
    """Two equal models whose gradients a program has prepared."""
    model, reference = nets
    optimizer = wfbp.DistributedOptimizer(momentum(model.parameters()), schedule=schedule)
    return Twins(model, optimizer, reference, momentum(reference.parameters()))


def in_one_memory(net: nn.Module) -> torch.Tensor:
    """Let all gradients be views of one tensor."""
    params = list(net.parameters())
    memory = torch.zeros(sum(p.numel() for p in params), dtype=params[0].dtype)
    parts = memory.split([p.numel() for p in params])
    for p, part in zip(params, parts, strict=True):
        p.grad = part.view(p.shape)
    return memory


@with_schedules
def gradients_in_a_list() -> None:
    """A program zeroes them in place. It made its list before wrapping, or before or after the
    first step. The list holds the gradients, views of them, or the memory of all."""

    def listed(net: nn.Module, is_flat: bool) -> list[torch.Tensor]:
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        return [grad.view(-1) for grad in grads] if is_flat else grads

    cases = [("wrapping", True), ("first step", False), ("a step", True), ("later", False)]
    for (when, is_flat), schedule in itertools.product([*cases, ("memory", True)], SCHEDULES):
        nets = pair()
        lists: list[list[torch.Tensor]] = []
        if when == "wrapping":
            for net in nets:
                for p in net.parameters():
                    p.grad = torch.zeros_like(p)
            lists = [listed(net, is_flat) for net in nets]
        elif when == "memory":
            lists = [[in_one_memory(net)] for net in nets]
        both = wrapped(nets, schedule)
        model, optimizer = both[:2]
        for step in range(2 * STEPS):
            for grads, each in zip(lists or ([], []), (optimizer, both.plain), strict=True):
                for grad in grads:
                    grad.zero_()
                if not lists:
                    each.zero_grad()
            both.add(step)
            if when == "first step" and step == 0:
                lists = [listed(net, is_flat) for net in nets]
            both.update()
            if (when, step) in (("a step", 0), ("later", STEPS)):
                lists = [listed(net, is_flat) for net in nets]
            both.equal(f"{when}, {is_flat}, {schedule}, step {step}")
        optimizer.synchronize()
        for p, found in zip(model.parameters(), listed(model, is_flat), strict=True):
            same(found.view(p.shape), p.grad, "in the list")  # type: ignore[arg-type]


@with_schedules
def gradients_clipped_in_their_memory() -> None:
    """By a program that has given all of them one tensor, between ``synchronize()`` and step."""
    for schedule in SCHEDULES:
        nets = pair()
        memories = [in_one_memory(net) for net in nets]
        both = wrapped(nets, schedule)
        for step in range(2 * STEPS):
            for memory in memories:
                memory.zero_()
            both.add(step)
            both.optimizer.synchronize()
            for memory in memories:
                memory.mul_(torch.clamp(0.05 / memory.norm(), max=1.0))
            both.step_synchronized()
            both.plain.step()
            both.equal(f"{schedule}, step {step}")


@with_schedules
def clipping_without_a_removed_parameter() -> None:
    """The program has taken it out of the optimizer's groups: it counts no more."""
    for schedule in SCHEDULES:
        both = twins(schedule=schedule)
        for step in range(2 * STEPS):
            if step == STEPS:
                for each in (both.optimizer, both.plain):
                    del each.param_groups[0]["params"][1]
            for each in (both.optimizer, *both.nets):
                each.zero_grad()
            both.add(step)
            both.optimizer.clip_grad_norm_(0.05)
            nn.utils.clip_grad_norm_(both.plain.param_groups[0]["params"], 0.05)
            both.update()
            both.equal(f"{schedule}, step {step}")


@with_schedules
def clipped_gradients_that_are_carried_over() -> None:
    """Decayed instead of zeroed, or stepped twice: the same under every schedule."""

    for how, schedule in itertools.product(("decayed", "twice", "added"), SCHEDULES):
        both = twins(functools.partial(torch.optim.Adam, lr=0.01), schedule=schedule)
        for step in range(2 * STEPS):
            for p in (*both.model.parameters(), *both.reference.parameters()):
                if how == "decayed" and p.grad is not None:
                    p.grad.mul_(0.9)
                elif how == "twice":
                    p.grad = None
            both.add(step)
            if step % 3:
                both.clip(0.05)
            both.update()
            if how == "twice":
                both.update()
            both.equal(f"{how}, {schedule}, step {step}")


class OneMemory(nn.Module):
    """Two parameters to whose gradients autograd gives one memory, on rank 0 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3))
        self.b = nn.Parameter(torch.linspace(1, 2, 6, dtype=torch.float64).view(3, 2))

    def backward(self, rank: int, step: int) -> None:
        scale, a, b = data(step, rank, 6), self.a.view(-1), self.b.view(-1)
        total = torch.tanh(a + b) * scale if rank == 0 else a * scale + 3 * b * scale.flip(0)
        total.sum().backward()


@with_schedules
def gradients_that_share_memory() -> None:
    """Each gets its own average, and is clipped once."""
    for schedule, clips in itertools.product(SCHEDULES, (False, True)):
        both = twins(model=OneMemory(), schedule=schedule)
        for step in range(2 * STEPS):
            both.optimizer.zero_grad()
            both.backward(step, OneMemory.backward)  # type: ignore[arg-type]
            if clips:
                both.clip(0.3)
            both.update()
            both.equal(f"{schedule}, {clips}, step {step}")


@with_schedules
def gradients_moved_to_shared_memory() -> None:
    """As queues of ``torch.multiprocessing`` do: later averages are new ones."""
    for schedule in SCHEDULES:
        both = twins(schedule=schedule)
        for step in range(2 * STEPS):
            both.optimizer.zero_grad()
            both.backward(step)
            both.optimizer.synchronize()
            if step % 5 == 2:
                for p in both.model.parameters():
                    assert p.grad is not None
                    p.grad.share_memory_()  # type: ignore[no-untyped-call]
            both.update()
            both.equal(f"{schedule}, step {step}")


@with_schedules
def kept_gradients_that_are_clipped() -> None:
    """Also where every rank updates all, and gradients grow after they were sent."""
    for schedule in ("oasr", "independent", "dear"):
        both = twins(
            functools.partial(torch.optim.SGD, lr=1.0), schedule=schedule, optimizer_sharding=False
        )
        kept: list[Any] = []
        for step in range(2 * STEPS):
            for p in (*both.model.parameters(), *both.reference.parameters()):
                if p.grad is not None:
                    p.grad.mul_(0.5)
            for again in range(1 + (step > STEPS and step % 3 == 0)):
                both.add(2 * step + again)
            kept = kept or [p.grad for p in both.model.parameters()]
            same(*both.clip(0.02), f"{schedule}, norm of step {step}", 1e-9)
            both.update()
            both.equal(f"{schedule}, step {step}")


@check
def methods_that_a_program_adds() -> None:
    """A method bound to an optimizer of PyTorch's averages assigned gradients first."""

    @torch.no_grad()
    def first_step(self: Any) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad)

    def make(params: Any) -> torch.optim.Optimizer:
        sgd: Any = torch.optim.SGD(params, 0.1)
        sgd.first_step = types.MethodType(first_step, sgd)
        return sgd

    both = twins(make)
    for step in range(3):
        both.backward(step, assign)
        for each in (both.optimizer, both.plain):
            each.first_step()
        both.equal(f"step {step}")


@check
def tensors_in_a_setting() -> None:
    """A tensor within a tuple is changed right after a step."""

    def make(params: Any) -> torch.optim.Optimizer:
        betas = torch.tensor(0.9), torch.tensor(0.999)
        return torch.optim.Adam(params, lr=0.01, betas=betas, foreach=False)

    both = twins(make, optimizer_sharding=False)
    for step in range(STEPS):
        for each in (both.optimizer, both.plain):
            each.zero_grad()
        both.backward(step)
        for each in (both.optimizer, both.plain):
            each.step()
            each.param_groups[0]["betas"][0].fill_(0.1 + 0.8 * (step % 2))
        both.equal(f"step {step}")


class Scaled(Descent):
    """Steps by an attribute, an attribute of a helper, and a global."""

    scale = 1.0

    def rate(self, group: dict[str, Any]) -> float:
        return float(group["lr"]) * self.scale * RATES["all"]


RATES = {"all": 1.0}


@check
def changed_right_after_a_step() -> None:
    """An attribute or a global that ``step`` reads."""
    both = twins(Scaled, optimizer_sharding=False)
    for step in range(STEPS):
        RATES["all"] = 1.0 + step
        both.step(step)
        for each in (both.optimizer, both.plain):
            each.scale *= 0.5
        RATES["all"] = 100.0
    both.equal()
    # A rate computed from another tensor, which cannot be copied as it is.
    base = torch.tensor(0.01, requires_grad=True)
    both = twins(lambda params: torch.optim.Adam(params, lr=base * 1.0), optimizer_sharding=False)
    for step in range(STEPS):
        both.step(step)
    both.equal()


class ByPlace(Descent):
    """Treats groups by their place."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for place, group in enumerate(self.param_groups):
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / (1 + place))


class ByFirst(Descent):
    """Decays all parameters by the rate of the first group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        rate = self.param_groups[0]["lr"]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - 0.3 * rate).add_(p.grad, alpha=-group["lr"])


@check
def groups_by_place() -> None:
    """The groups differ in their rates alone."""
    for kind in (ByPlace, ByFirst):

        def make(params: Any, kind: Any = kind) -> Any:
            rates = [{"params": [p], "lr": 0.1 / (1 + k)} for k, p in enumerate(params)]
            return kind(rates)

        check_training(mlp(5, 7, 7, 3), square, make, steps=STEPS, optimizer_sharding=False)


@check
def adasum_and_joining() -> None:
    """A change that lacks that of a rank without data is refused."""
    if wfbp.size() & (wfbp.size() - 1):
        return
    # A fresh runtime: tracebacks of errors that earlier checks expect may keep optimizers alive on
    # some ranks, and join() would wait for the others to step them.
    usual = process.current("the check").config
    wfbp.shutdown()
    wfbp.init(config=usual)
    model, _ = pair()
    optimizer = hvd.DistributedOptimizer(momentum(model.parameters()), op=hvd.Adasum)
    for step in range(1 + (wfbp.rank() > 0)):
        optimizer.zero_grad()
        square(model, wfbp.rank(), step)
        if step == 0:
            optimizer.step()
            agree(model)
        else:
            raises(DisagreementError, "by hvd.Adasum", "rank 0 called join()", act=optimizer.step)
    join()


@check
def adasum_and_scaling() -> None:
    """A scaler, which would skip the step of one rank alone, is refused on every rank."""
    if wfbp.size() & (wfbp.size() - 1):
        return
    model, _ = pair()
    optimizer = hvd.DistributedOptimizer(momentum(model.parameters()), op=hvd.Adasum)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(data(0, wfbp.rank(), 4, 5)).square().mean()).backward()
    raises(RuntimeError, "train without it", act=lambda: scaler.step(optimizer))


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
def threads_that_clip() -> None:
    """Each thread clips, and steps, another optimizer."""
    pairs = [twins() for _ in range(2)]

    def backward(which: int) -> Any:
        def act(model: nn.Module, rank: int, step: int) -> None:
            (model(data(step, rank, 4, 5)) * 10.0**which).square().mean().backward()

        return act

    def train(both: Twins) -> None:
        both.clip(0.1)
        both.update()

    for step in range(STEPS):
        for which, both in enumerate(pairs):
            both.optimizer.zero_grad()
            both.backward(step, backward(which))
            both.clip(1e9)  # which averages, and leaves all as it is
        acts = [functools.partial(train, both) for both in pairs]
        if step >= STEPS - 2:
            side_by_side(*acts)
        else:
            for act in acts:
                act()
    for which, both in enumerate(pairs):
        agree(both.model, f"model {which}:")
        both.equal(f"model {which}:")


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


def counted(step: Any) -> Any:
    """A decorator of the kind that users put on their optimizers."""

    @functools.wraps(step)
    def outer(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.param_groups[0]["calls"] = self.param_groups[0].get("calls", 0) + 1
        return step(self, *args, **kwargs)

    return outer


@check
def decorated_step() -> None:
    """The decorator runs once per step, and so do hooks."""

    class Counted(torch.optim.SGD):
        step = counted(torch.optim.SGD.step)

    for wrapped in (False, True):
        torch.optim.SGD(mlp(2, 2).parameters(), lr=0.1)  # PyTorch has decorated SGD.step by now
        model, reference = pair()
        optimizer: Any = Counted(model.parameters(), lr=0.1)
        if wrapped:
            optimizer = wfbp.DistributedOptimizer(optimizer)
        both = Twins(model, optimizer, reference, torch.optim.SGD(reference.parameters(), lr=0.1))
        hooks = []
        optimizer.register_step_pre_hook(lambda *_, hooks=hooks: hooks.append(1))
        for step in range(4):
            if wrapped:
                both.step(step)
            else:
                averaged(model, square, step, wfbp.size())
                optimizer.step()
                both.follow(step)
        both.equal(f"wrapped {wrapped}")
        calls = optimizer.param_groups[0].get("calls", 0)
        assert (calls, len(hooks)) == (4, 4), f"{calls} calls, {len(hooks)} of hooks in 4 steps"


@check
def step_of_an_instance() -> None:
    """An optimizer whose ``step`` was replaced on the instance, to keep an average."""
    model, reference = pair()
    inner: Any = momentum(model.parameters())
    plain = momentum(reference.parameters())
    average = copy.deepcopy(reference)
    original = inner.step

    def follow(mean: nn.Module, of: nn.Module) -> None:
        with torch.no_grad():
            for p, q in zip(mean.parameters(), of.parameters(), strict=True):
                p.lerp_(q, 0.5)

    kept = copy.deepcopy(model)

    def step_and_follow(closure: Any = None) -> Any:
        result = original(closure)
        follow(kept, model)
        return result

    inner.step = step_and_follow

    def train() -> None:
        both = Twins(model, wfbp.DistributedOptimizer(inner), reference, plain)
        for step in range(STEPS):
            both.step(step)
            follow(average, reference)

    if not refused(train, "step"):
        equal(model.parameters(), reference.parameters())
        equal(kept.parameters(), average.parameters(), "average of")


@check
def operations_in_place_and_autograd() -> None:
    """Backward must not use a saved tensor that a collective has overwritten."""
    operations: list[Callable[[torch.Tensor], object]] = [
        lambda t: wfbp.allreduce_(t, op=wfbp.Sum),
        lambda t: wfbp.broadcast_(t, 0),
        lambda t: wfbp.synchronize(hvd.allreduce_async_(t, op=wfbp.Sum)),
        lambda t: wfbp.synchronize(hvd.broadcast_async_(t, 0)),
        lambda t: hvd.grouped_allreduce_([t], op=wfbp.Sum),
        lambda t: wfbp.broadcast_parameters([("t", t)], root_rank=0),
    ]
    for number, operation in enumerate(operations):
        for detached in (False, True):
            weight = torch.full((3,), 1.0 + wfbp.rank(), requires_grad=True)
            saved = weight * 2.0
            result = saved.square().sum()
            with torch.no_grad():
                operation(saved.detach() if detached else saved)
            raises(RuntimeError, "modified by an inplace operation", act=result.backward)
            assert weight.grad is None, f"operation {number}"


def readings(params: list[torch.Tensor], sums: list[torch.Tensor]) -> list[Callable[[], None]]:
    """Ways to add gradients to sums without changing them; each adds every gradient once."""

    def each(act: Callable[[torch.Tensor, torch.Tensor], object]) -> Callable[[], None]:
        def run() -> None:
            for p, total in zip(params, sums, strict=True):
                assert p.grad is not None
                act(total, p.grad)

        return run

    def plus(total: torch.Tensor, grad: torch.Tensor) -> None:
        total += grad

    def put(total: torch.Tensor, grad: torch.Tensor) -> None:
        other = torch.empty_like(grad)
        other[...] = grad
        total.add_(other)

    def copied(total: torch.Tensor, grad: torch.Tensor) -> None:
        total.add_(torch.empty_like(grad).copy_(grad))

    def out(total: torch.Tensor, grad: torch.Tensor) -> None:
        torch.add(total, grad, out=total)

    def flat(total: torch.Tensor, grad: torch.Tensor) -> None:
        total.view(-1).add_(grad.view(-1))

    def rows(total: torch.Tensor, grad: torch.Tensor) -> None:
        for a, b in zip(total, grad, strict=True):
            a.add_(b)

    return [
        each(plus),
        each(lambda total, grad: total.add_(grad)),
        each(lambda total, grad: total.add_(grad.data)),
        each(lambda total, grad: total.addcmul_(grad, torch.ones_like(grad))),
        each(copied),
        each(put),
        each(out),
        each(flat),
        each(rows),
        each(lambda total, grad: total.add_(torch.from_numpy(grad.numpy()))),
        lambda: torch._foreach_add_(sums, [p.grad for p in params]),
    ]


@check
def gradients_that_are_read() -> None:
    """Between backward and the step, in every way."""
    both = twins()
    model, optimizer, reference, _ = both
    params = list(model.parameters())
    found = [torch.zeros_like(p) for p in params]
    wanted = [torch.zeros_like(p) for p in params]
    reads = readings(params, found)
    for step in range(2 * len(reads)):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        square(model, wfbp.rank(), step)
        reads[step % len(reads)]()
        optimizer.step()
        reference.zero_grad()
        square(reference, wfbp.rank(), step)
        for total, q in zip(wanted, reference.parameters(), strict=True):
            assert q.grad is not None
            total.add_(q.grad)
        both.follow(step)
        both.equal(f"step {step}")
        for a, b in zip(found, wanted, strict=True):
            same(a, b, f"sum of gradients in step {step}", 1e-9)


def sparse_or_dense(model: nn.Module, rank: int, step: int) -> None:
    """In turns every rank but one has a sparse gradient."""
    (loss := model(step, rank) + 0.0).backward()
    if step % wfbp.size() == rank:
        (model.table.weight.sum() * loss.detach()).backward()  # type: ignore[union-attr]


@check
def sparse_and_dense_gradients() -> None:
    """Of one parameter, on different ranks."""
    both = twins(functools.partial(torch.optim.SGD, lr=0.1), Words(), schedule="layerwise")
    for step in range(5):
        both.step(step, sparse_or_dense)
        both.equal(f"step {step}")


class Around(torch.optim.Optimizer):
    """Wraps another optimizer without being one: its groups and its state are properties."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base

    @property
    def param_groups(self) -> Any:
        return self.base.param_groups

    @property
    def state(self) -> Any:
        return self.base.state

    @property
    def defaults(self) -> Any:
        return self.base.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def state_dict(self) -> Any:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.base.load_state_dict(state_dict)

    def add_param_group(self, param_group: Any) -> None:
        self.base.add_param_group(param_group)

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


@check
def groups_and_state_as_properties() -> None:
    _, optimizer = check_training(
        pair()[0], square, lambda params: Around(momentum(params)), steps=STEPS
    )
    optimizer.load_state_dict(optimizer.state_dict())


class BareZero(Descent):
    def zero_grad(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None


@check
def zero_grad_without_arguments() -> None:
    check_training(pair()[0], square, BareZero, steps=STEPS)


class CountsInAVector(Descent):
    """Adam-like state: a count of shape ``(1,)`` beside one of the parameter's shape."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["count"] = torch.zeros(1)
                        state["sum"] = torch.zeros_like(p)
                    state["count"] += 1
                    state["sum"] += p.grad
                    p.sub_(group["lr"] * state["sum"] / float(state["count"]))


@check
def state_of_shape_one() -> None:
    """Also if a rank's shard of the parameter has one element."""

    class Few(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(wfbp.size(), dtype=torch.float64))
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
            self.many = nn.Parameter(torch.ones(17 * wfbp.size(), dtype=torch.float64))

    def backward(model: nn.Module, rank: int, step: int) -> None:
        seen = (model.weight * data(step, rank, wfbp.size())).sum()
        (seen * model.scale + model.many.sum()).backward()

    for sharding in (None, True):
        _, optimizer = check_training(
            Few(), backward, CountsInAVector, steps=STEPS, optimizer_sharding=sharding
        )
        for steps in (STEPS, STEPS + 1):
            states = optimizer.state_dict()["state"]
            for index, shape in enumerate(((wfbp.size(),), (), (17 * wfbp.size(),))):
                state = states[index]
                assert state["count"].tolist() == [steps], state
                assert state["sum"].shape == shape, state
                for theirs in MPI.COMM_WORLD.allgather(state["sum"]):
                    same(theirs, state["sum"], "state of two ranks")
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.step()


@check
def state_emptied_where_a_rank_has_none() -> None:
    """A rank without state of any shard, too, sees that the program has emptied its state."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.few = nn.Parameter(torch.ones(2, dtype=torch.float64))
            self.many = nn.Parameter(torch.ones(17 * wfbp.size(), dtype=torch.float64))

    def backward(model: nn.Module, rank: int, step: int) -> None:
        (model.few * data(step, rank, 2)).sum().backward()

    class Visiting(CountsInAVector):
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            assert all("sum" in entry for entry in self.state.values()), self.state
            return result

    for sharding, kind in ((None, torch.optim.Adam), (True, Visiting)):
        _, optimizer = check_training(
            Two(), backward, kind, steps=STEPS, optimizer_sharding=sharding, threshold_bytes=1
        )
        saved = optimizer.state_dict()
        assert list(saved["state"]) == [0], saved
        optimizer.state = copy.copy(optimizer.state)
        assert list(optimizer.state_dict()["state"]) == [0]
        optimizer.state.clear()
        assert optimizer.state_dict()["state"] == {}
        optimizer.load_state_dict(saved)
        assert list(optimizer.state_dict()["state"]) == [0]
        for key, value in optimizer.state_dict()["state"][0].items():
            same(value, saved["state"][0][key].to(value.dtype), key)


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


@check
def a_dropped_model_is_freed() -> None:
    """When the next optimizer is made, though its parameters were still under way."""

    def train() -> weakref.ref[torch.Tensor]:
        model = mlp(5, 7, 7, 3)
        wfbp.broadcast_parameters(model.state_dict())
        optimizer = wfbp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
        for step in range(STEPS):
            optimizer.zero_grad()
            square(model, wfbp.rank(), step)
            optimizer.step()
        return weakref.ref(model[-1].weight)

    first = train()
    for _ in range(2):
        train()
    deadline_s = time.monotonic() + 10.0
    while first() is not None:  # the communication thread has to drop it, too
        assert time.monotonic() < deadline_s, "the model is still in memory"
        time.sleep(0.01)
        gc.collect()


@check
def gradients_of_another_type() -> None:
    """``grad_dtype`` of PyTorch 2.10 and later is honored, or refused at wrapping."""
    if not hasattr(torch.Tensor, "grad_dtype"):
        return
    weight = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    inner = Descent([weight], lr=1.0)
    made: list[Any] = []
    if refused(lambda: made.append(wfbp.DistributedOptimizer(inner)), "grad_dtype"):
        return
    (optimizer,) = made
    for _ in range(STEPS):
        optimizer.zero_grad()
        # Not a number of bfloat16.
        weight.register_hook(lambda grad: grad.float() + 1.0 + 2.0**-12)
        (weight.float() * 0.0).sum().backward()
        optimizer.synchronize()
        assert weight.grad is not None
        assert weight.grad.dtype is torch.float32
        assert weight.grad.tolist() == [1.0 + 2.0**-12] * 4
        with optimizer.skip_synchronize():
            optimizer.step()


@check
def nan_as_a_setting() -> None:
    """Equal on all ranks, as any other number."""

    def make(params: Any) -> torch.optim.Optimizer:
        return Descent(params, clip=math.nan, bounds=(0.0, math.nan), rates=torch.tensor(math.nan))

    check_training(pair()[0], square, make, steps=STEPS)
    assert wfbp.allreduce(torch.ones(2), prescale_factor=math.nan).isnan().all()


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
def refused_second_wrapping() -> None:
    """The first one remains usable, and the original still refuses to step."""
    model, reference = pair()
    inner = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    plain = torch.optim.LBFGS(reference.parameters(), lr=0.1, max_iter=2)
    optimizer = wfbp.DistributedOptimizer(inner, model.named_parameters(), schedule="oasr")
    for step in range(4):
        for bad in (
            {"optimizer_sharding": True},
            {"schedule": "nonsense"},
            {"compression": "half"},
            {"backward_passes_per_step": 0},
        ):
            raises(ValueError, act=lambda bad=bad: wfbp.DistributedOptimizer(inner, **bad))
        raises(RuntimeError, "made into a distributed optimizer", act=lambda: inner.step(None))

        def evaluate(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(data(step, wfbp.rank(), 4, 5)).square().mean()
            loss.backward()
            return torch.as_tensor(loss)

        def evaluate_all(step: int = step) -> torch.Tensor:
            plain.zero_grad()
            ranks = range(wfbp.size())
            losses = [reference(data(step, r, 4, 5)).square().mean() for r in ranks]
            loss = torch.stack(losses).mean()
            loss.backward()
            return loss.detach()

        optimizer.step(evaluate)
        plain.step(evaluate_all)
        agree(model, f"step {step}")
        equal(model.parameters(), reference.parameters(), f"step {step}")


@check
def sparse_as_dense_alone() -> None:
    """With one rank as with several."""
    sets = [wfbp.add_process_set([rank]) for rank in range(wfbp.size())]
    model, reference = Words(), Words(dense=True)
    optimizer = wfbp.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.1),
        sparse_as_dense=True,
        process_set=sets[wfbp.rank()],
    )
    plain = torch.optim.Adam(reference.parameters(), lr=0.1)
    for step in range(4):
        for net, each in ((model, optimizer), (reference, plain)):
            each.zero_grad()
            net(step, wfbp.rank()).backward()
        optimizer.clip_grad_norm_(0.1)
        nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        for each in (optimizer, plain):
            each.step()
        equal(model.parameters(), reference.parameters(), f"step {step}")
    for each in sets:
        wfbp.remove_process_set(each)


@check
def discarded_on_one_rank() -> None:
    """A step that only rank 0 discards is under way while all ranks exchange optimizer state."""
    model = mlp(5, 16, 16, 3)
    plain = torch.optim.Adam(model.parameters(), 1e-2)
    optimizer = wfbp.DistributedOptimizer(plain, model.named_parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        square(model, wfbp.rank(), step)
        optimizer.step()
    for step in range(3):
        if wfbp.rank() == 0:
            square(model, wfbp.rank(), step)
            time.sleep(0.2)  # its messages leave
            optimizer.zero_grad()
        optimizer.state_dict()
        optimizer = wfbp.DistributedOptimizer(plain, model.named_parameters())
        for again in range(3):
            optimizer.zero_grad()
            square(model, wfbp.rank(), again)
            optimizer.step()
    agree(model)


@check
def shown_process_set() -> None:
    """``repr()`` of a set that was not added sends nothing."""
    known = wfbp.ProcessSet(range(wfbp.size()))
    shown: list[str] = []
    thread = threading.Thread(target=lambda: shown.append(repr(known)), daemon=True)
    if wfbp.rank() == 0:
        thread.start()
        thread.join(2.0)
    hangs = MPI.COMM_WORLD.bcast(thread.is_alive())
    if hangs and wfbp.rank() > 0:
        repr(known)  # so that rank 0 goes on
    if wfbp.rank() == 0:
        thread.join(20.0)
    assert not hangs, "repr() on rank 0 alone waits for the other ranks"
    assert known.ranks == list(range(wfbp.size()))


class Encoder(nn.Module):
    """Two layers, of which the first is also of use by itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner, self.outer = nn.Linear(5, 64), nn.Linear(64, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.outer(torch.tanh(self.inner(x))))

    @torch.jit.export
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


def reloaded(script: Any, x: torch.Tensor) -> Any:
    file = io.BytesIO()
    torch.jit.save(script, file)
    file.seek(0)
    return torch.jit.load(file)(x)  # type: ignore[no-untyped-call]


SCRIPT_READS: list[tuple[Callable[[Any, torch.Tensor], Any], Any]] = [
    (lambda script, x: script(x), Encoder.forward),
    (lambda script, x: script.encode(x), Encoder.encode),
    (lambda script, x: script.forward(x), Encoder.forward),
    (lambda script, x: copy.deepcopy(script)(x), Encoder.forward),
    (reloaded, Encoder.forward),
]
"""Ways to read a script module, and the method of the model whose result each must have."""


@check
def script_modules() -> None:
    """Made before or after wrapping, or of a part; read right after a step, and trained."""
    x = torch.ones(4, 5, dtype=torch.float64)
    for sharding, made in itertools.product((None, False), ("before", "after", "part", "late")):
        model, reference = Encoder(), Encoder()
        trained: Any = model
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`torch.jit")
            script: Any = torch.jit.script(model)
            if made in ("before", "late"):
                trained = script if made == "before" else model
            elif made == "part":
                model.inner = torch.jit.script(model.inner)
            optimizer = wfbp.DistributedOptimizer(
                momentum(trained.parameters()), optimizer_sharding=sharding
            )
            plain = momentum(reference.parameters())
            if made == "after":
                trained = script = torch.jit.script(model)
            both = Twins(trained, optimizer, reference, plain)
            for step in range(STEPS + 2):
                if made == "late":
                    script = None  # nothing but the model holds the parameters during the step
                both.step(step)
                if made == "late":
                    script = torch.jit.script(model)
                read, wanted = SCRIPT_READS[step % len(SCRIPT_READS)]
                with torch.no_grad():
                    same(read(script, x), wanted(reference, x), f"{made}, step {step}", 1e-9)


class Jagged(nn.Module):
    """Multiplies jagged tensors, which hide their operands from other classes."""

    def __init__(self, params: list[nn.Parameter], owned: bool) -> None:
        super().__init__()
        self.weights: Any = nn.ParameterList(params) if owned else tuple(params)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return torch.as_tensor(x.values())


@check
def jagged_tensors() -> None:
    """Their weights are in a list, or belong to no module."""

    def backward(model: nn.Module, rank: int, step: int) -> None:
        rows = [data(step, rank, 2, 5), data(step + 50, rank, 3, 5)]
        model(torch.nested.nested_tensor(rows, layout=torch.jagged)).square().mean().backward()

    for sharding, owned in itertools.product((None, False), (True, False)):
        torch.manual_seed(2)
        params = [nn.Parameter(torch.randn(5, 5).double()) for _ in range(4)]
        copies = [nn.Parameter(p.detach().clone()) for p in params]
        models = Jagged(params, owned), Jagged(copies, owned)
        plain = momentum(copies)
        optimizer = wfbp.DistributedOptimizer(momentum(params), optimizer_sharding=sharding)
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(models[0], wfbp.rank(), step)
            optimizer.step()
            plain.zero_grad()
            for rank in range(wfbp.size()):
                backward(models[1], rank, step)
            for q in copies:
                assert q.grad is not None
                q.grad.div_(wfbp.size())
            plain.step()
            if step % 3 == 2:
                for p, q in zip(params, copies, strict=True):
                    same(p.detach(), q.detach(), f"owned: {owned}, step {step}", 1e-9)


def forked(act: Callable[[], None]) -> None:
    """Run in a forked process, which must succeed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX and newer Pythons warn of forks beside threads
        child = os.fork()
    if not child:
        code = 1
        try:
            act()
            code = 0
        except BaseException as error:
            print(f"forked process: {type(error).__name__}: {error}", flush=True)
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0, "the forked process failed"


@check
def forked_processes() -> None:
    """They train a copy: neither this rank nor a process between both sees what they write."""
    both = twins()
    model, optimizer = both[:2]
    results = [wfbp.allreduce(torch.ones(5000)), wfbp.allgather(torch.ones(5000))]

    def seen() -> list[torch.Tensor]:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        return [t.detach().clone() for t in (*grads, *model.parameters(), *results)]

    def unchanged(before: list[torch.Tensor], where: str) -> None:
        for k, (now, then) in enumerate(zip(seen(), before, strict=True)):
            same(now, then, f"{where}: tensor {k}")

    def child() -> None:
        for step in range(2):
            square(model, wfbp.rank(), step)
        mine = momentum(copy.deepcopy(model).parameters())
        mine.step()
        with torch.no_grad():
            for tensor in (*model.parameters(), *results):
                tensor.add_(1.0)
        before = seen()
        forked(grandchild)
        unchanged(before, "forked process")
        raises(WfbpError, "only its parent can communicate", act=optimizer.step)
        raises(WfbpError, "only its parent can communicate", act=lambda: wfbp.allreduce(results[0]))

    def grandchild() -> None:
        optimizer.zero_grad()
        for p in model.parameters():
            p.grad = None
        square(model, wfbp.rank(), 7)
        results[0].zero_()

    for step in range(STEPS):
        both.step(step)
        if step % 3 == 1:
            before = seen()
            forked(child)
            unchanged(before, "rank")
    both.equal()


@check
def operations_in_compiled_code() -> None:
    """They are left out of graphs: other shapes and later calls compile nothing anew."""
    graphs: list[object] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=count, dynamic=True)
    def total(x: torch.Tensor) -> torch.Tensor:
        handle = wfbp.allreduce_async(x * 2, op=wfbp.Sum)
        return torch.as_tensor(wfbp.synchronize(handle) + wfbp.broadcast(torch.ones_like(x), 0))

    torch._dynamo.reset()
    ranks = range(wfbp.size())
    for step in range(6):
        wanted = sum(2 * data(step, r, 3 + step, 5) for r in ranks) + 1
        same(total(data(step, wfbp.rank(), 3 + step, 5)), torch.as_tensor(wanted), "sum", 1e-12)
    assert len(graphs) <= 6, f"{len(graphs)} graphs of one function"

    torch.manual_seed(4)
    layers = [nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6), nn.BatchNorm1d(6)]
    model = nn.Sequential(*layers, nn.Linear(6, 1)).double()
    reference = copy.deepcopy(model)
    model = wfbp.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[assignment]
    optimizer = wfbp.DistributedOptimizer(momentum(model.parameters()))
    plain = momentum(reference.parameters())
    compiled: Any = torch.compile(model, backend=count, dynamic=True)
    for step in range(STEPS):
        rows = 4 + step % 3
        optimizer.zero_grad()
        plain.zero_grad()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*global hooks")  # of earlier optimizers
            compiled(data(step, wfbp.rank(), rows, 5)).square().mean().backward()
        reference(torch.cat([data(step, r, rows, 5) for r in ranks])).square().mean().backward()
        optimizer.step()
        plain.step()
        if step == 3:
            graphs.clear()
    equal(model.parameters(), reference.parameters())
    assert not graphs, f"{len(graphs)} graphs after the fourth step"
    torch._dynamo.reset()


@check
def hooks_are_not_compiled() -> None:
    """A model that is compiled when its parameters are, or have been, pending."""
    cached: Any = torch._C._dynamo.eval_frame._debug_get_cache_entry_list
    for compiled_from in (0, 3):
        torch._dynamo.reset()
        both = twins(schedule="ps_layerwise")
        model = both.model
        for step in range(STEPS):
            both.optimizer.zero_grad()
            net: Any = model if step < compiled_from else torch.compile(model, backend="eager")
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*global hooks")
                square(net, wfbp.rank(), step)
            both.optimizer.step()
            both.follow(step)
            both.equal(f"compiled from step {compiled_from} on, step {step}")
        assert not cached(pending._before_forward.__code__)
    torch._dynamo.reset()


@with_schedules
def one_tensor_as_two_gradients() -> None:
    """The program gives it to both, and keeps it."""
    for schedule in SCHEDULES:
        params = [nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(2)]
        optimizer = wfbp.DistributedOptimizer(torch.optim.SGD(params, 1.0), schedule=schedule)
        wanted = torch.zeros(3, dtype=torch.float64)
        for step in range(2 * STEPS):
            shared = data(step, wfbp.rank(), 3, 1).view(3)
            params[0].grad = shared
            params[1].grad = shared
            optimizer.step()
            wanted -= sum(data(step, r, 3, 1).view(3) for r in range(wfbp.size())) / wfbp.size()
            for k, p in enumerate(params):
                same(p.detach(), wanted, f"{schedule}, step {step}: parameter {k}", 1e-12)
