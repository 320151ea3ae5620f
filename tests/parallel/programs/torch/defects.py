"""Programs that once trained wrongly without a message, or failed although they are ordinary."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import math
import os
import threading
import time
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
    Backward,
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


SCHEDULES = ("independent", "auto")

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
        else:  # PyTorch counts no changes of ``data``
            (p.grad.data if how == "data" else p.grad).copy_(grad)


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


class Fisher(Descent):
    """Looks at gradients by a method of its own."""

    def add(self) -> None: ...


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
def clipped_gradients_that_are_stepped_twice() -> None:
    for schedule in SCHEDULES:
        both = twins(functools.partial(torch.optim.Adam, lr=0.01), schedule=schedule)
        for step in range(2 * STEPS):
            for p in (*both.model.parameters(), *both.reference.parameters()):
                p.grad = None
            both.add(step)
            if step % 3:
                both.clip(0.05)
            both.update()
            both.update()
            both.equal(f"{schedule}, step {step}")


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
        for _ in both.steps(2 * STEPS, f"{schedule}, {clips}", OneMemory.backward):  # type: ignore[arg-type]
            if clips:
                both.clip(0.3)


@with_schedules
def gradients_moved_to_shared_memory() -> None:
    """As queues of ``torch.multiprocessing`` do: later averages are new ones."""
    for schedule in SCHEDULES:
        both = twins(schedule=schedule)
        for step in both.steps(2 * STEPS, schedule):
            both.optimizer.synchronize()
            if step % 5 == 2:
                for p in both.model.parameters():
                    p.grad.share_memory_()


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


class BareZero(Descent):
    def zero_grad(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None


@check
def zero_grad_without_arguments() -> None:
    check_training(pair()[0], square, BareZero, steps=STEPS)


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


@with_schedules
def script_modules() -> None:
    """The whole model, scripted before or after wrapping, or a part; it is read right after a
    step."""
    x = torch.ones(4, 5, dtype=torch.float64)
    for sharding, made in itertools.product((None, False), ("before", "after", "part")):
        model, reference = pair()
        trained: Any = model
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`torch.jit")
            if made == "part":
                model[0] = torch.jit.script(model[0])
            elif made == "before":
                trained = torch.jit.script(model)
            optimizer = wfbp.DistributedOptimizer(
                momentum(trained.parameters()),
                schedule="independent",
                optimizer_sharding=sharding,
            )
            if made == "after":
                trained = torch.jit.script(model)
            both = Twins(trained, optimizer, reference, momentum(reference.parameters()))
            for step in range(STEPS + 2):
                both.step(step)
                with torch.no_grad():
                    same(trained(x), reference(x), f"{made}, step {step}", 1e-9)


class Jagged(nn.Module):
    """Multiplies jagged tensors, which hide their operands from other classes."""

    def __init__(self, params: list[nn.Parameter], owned: bool) -> None:
        super().__init__()
        self.weights: Any = nn.ParameterList(params) if owned else tuple(params)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return torch.as_tensor(x.values())


@with_schedules
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
        optimizer = wfbp.DistributedOptimizer(
            momentum(params), schedule="independent", optimizer_sharding=sharding
        )
        for step in range(STEPS):
            for each in (optimizer, plain):
                each.zero_grad()
            backward(models[0], wfbp.rank(), step)
            for rank in range(wfbp.size()):
                backward(models[1], rank, step)
            for q in copies:
                assert q.grad is not None
                q.grad.div_(wfbp.size())
            for each in (optimizer, plain):
                each.step()
            if step % 3 == 2:
                equal(params, copies, f"owned: {owned}, step {step}")


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


@with_schedules
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
    optimizer = wfbp.DistributedOptimizer(momentum(model.parameters()), schedule="independent")
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
