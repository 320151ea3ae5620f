"""Gradients that programs keep, share, assign or discard, and those that are sparse."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import wfbp.horovod.torch as hvd
import wfbp.torch as wfbp
from tests.parallel.programs.harness import Checks, raises
from tests.parallel.programs.torch.training import (
    SCHEDULES,
    Descent,
    Twins,
    agree,
    assign,
    averaged,
    data,
    equal,
    mlp,
    momentum,
    pair,
    refused,
    same,
    square,
    twins,
)

check = Checks()

STEPS = 8
"""Enough for every mode to install its plan and use it."""


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


@check.by_own_schedules
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


@check.by_own_schedules
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


@check.by_own_schedules
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


@check.by_own_schedules
def gradients_that_share_memory() -> None:
    """Each gets its own average, and is clipped once."""
    for schedule, clips in itertools.product(SCHEDULES, (False, True)):
        both = twins(model=OneMemory(), schedule=schedule)
        for _ in both.steps(2 * STEPS, f"{schedule}, {clips}", OneMemory.backward):  # type: ignore[arg-type]
            if clips:
                both.clip(0.3)


@check.by_own_schedules
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
