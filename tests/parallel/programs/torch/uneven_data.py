"""Ranks with unequally many batches: those that have no more of them join."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import torch

import wfbp.torch as wfbp
from tests.parallel.programs.harness import Checks, raises
from tests.parallel.programs.torch.layouts import Waves, waves
from tests.parallel.programs.torch.training import (
    adamw,
    averaged,
    data,
    momentum,
    pair,
    same,
    square,
    twins,
)
from wfbp.errors import WfbpError
from wfbp.runtime import process

check = Checks()

SCHEDULES = ("layerwise", "auto", "hybrid")


def num_batches(rank: int, epoch: int) -> int:
    """The last rank in the first epoch has most; in another epoch one rank has none."""
    return 2 + 2 * rank if epoch == 0 else 3 * ((rank + epoch) % wfbp.size())


def last_rank(epoch: int) -> int:
    return max(range(wfbp.size()), key=lambda rank: num_batches(rank, epoch))


class Epochs:
    """A model and its reference; ranks without a batch contribute zeros."""

    def __init__(self, make: Any, **wrap: Any) -> None:
        self.both = twins(make, named=True, **wrap)
        self.model, self.optimizer, self.reference, self.plain = self.both

    def step(self, step: int, epoch: int, how: str = "") -> None:
        """One batch of this rank."""
        self.optimizer.zero_grad()
        square(self.model, wfbp.rank(), 100 * epoch + step)
        if how == "clip":
            self.optimizer.clip_grad_norm_(0.1)
        if how == "synchronize":
            self.optimizer.synchronize()
            for p in self.model.parameters():
                p.grad.mul_(2.0)
            self.both.step_synchronized()
        else:
            self.optimizer.step()

    def step_reference(self, step: int, epoch: int, how: str = "") -> None:
        def backward(model: torch.nn.Module, rank: int, number: int) -> None:
            if step < num_batches(rank, epoch):
                square(model, rank, number)

        averaged(self.reference, backward, 100 * epoch + step, wfbp.size())
        params = list(self.reference.parameters())
        if how == "clip":
            torch.nn.utils.clip_grad_norm_(params, 0.1)
        if how == "synchronize":
            for p in params:
                p.grad.mul_(2.0)
        self.plain.step()


@check
def state_and_ends_of_complex_parameters() -> None:
    """Their state is fetched and loaded between steps; then the last rank steps alone."""
    last = wfbp.size() - 1
    for schedule in ("ps_layerwise", "layerwise"):
        both = twins(adamw, Waves(), schedule=schedule)
        model, optimizer, _, plain = both
        for step in range(5):
            both.step(step, waves)
            if step == 2:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        state = plain.state_dict()["state"]
        for index, entry in optimizer.state_dict()["state"].items():
            for key, value in entry.items():
                same(value, state[index][key], f"{key} of parameter {index}", 1e-9)
        if wfbp.rank() == last:
            optimizer.zero_grad()
            waves(model, last, 9)
            optimizer.step()
        wfbp.join()
        both.follow(9, lambda m, r, s: waves(m, r, s) if r == last else None)
        both.step(10, waves)
        both.equal(schedule)


WAYS = ("", "clip", "", "synchronize")


@check
def unequally_many_batches() -> None:
    """Every rank ends with the parameters of a program that averages zeros; nobody warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for k, schedule in enumerate(SCHEDULES):
            epochs = Epochs((momentum, adamw)[k % 2], schedule=schedule)
            for epoch in range(3):
                for step in range(num_batches(wfbp.rank(), epoch)):
                    epochs.step(step, epoch, WAYS[step % 4])
                last = wfbp.join()
                assert num_batches(last, epoch) == num_batches(last_rank(epoch), epoch)
                for step in range(num_batches(last, epoch)):
                    epochs.step_reference(step, epoch, WAYS[step % 4])
                epochs.both.equal(f"{schedule}, epoch {epoch}")
            state = epochs.optimizer.state_dict()["state"]
            assert len(state) == 4


@check
def optimizers_of_an_earlier_runtime() -> None:
    """They may still be held, and take no part."""
    config = process.current("a check").config
    held = wfbp.DistributedOptimizer(momentum(pair()[0].parameters()))
    wfbp.shutdown()
    wfbp.init(config=config)
    model, _ = pair()
    optimizer = wfbp.DistributedOptimizer(momentum(model.parameters()))
    for step in range(1 + wfbp.rank()):
        optimizer.zero_grad()
        square(model, wfbp.rank(), step)
        optimizer.step()
    assert wfbp.join() == wfbp.size() - 1
    for p in model.parameters():
        same(p.detach(), wfbp.broadcast(p.detach(), 0), "parameters of rank 0")
    del held


@check
def several_optimizers_and_a_metric() -> None:
    """Stepped in another order in every step, beside operations by name."""
    for schedule in ("layerwise", "ps_layerwise"):
        both = [Epochs(make, schedule=schedule) for make in (momentum, adamw)]
        rank, size = wfbp.rank(), wfbp.size()
        for step in range(num_batches(rank, 0)):
            for each in both if step % 2 else reversed(both):
                each.step(step, 0)
            active = sum(step < num_batches(r, 0) for r in range(size))
            assert (
                wfbp.allreduce(torch.ones(2), op=wfbp.Sum, name="metric").tolist() == [active] * 2
            )
        assert wfbp.join() == size - 1
        for step in range(num_batches(size - 1, 0)):
            for each in both:
                each.step_reference(step, 0)
        for each in both:
            each.both.equal(schedule)


@check
def closures_of_unequal_number() -> None:
    rank, size = wfbp.rank(), wfbp.size()
    model, _ = pair()
    optimizer = wfbp.DistributedOptimizer(
        torch.optim.LBFGS(model.parameters(), max_iter=3), schedule="layerwise"
    )
    for step in range(1 + 2 * rank):

        def evaluate(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(data(step, rank, 4, 5)).square().mean()
            loss.backward()
            return loss

        optimizer.step(evaluate)
    assert wfbp.join() == size - 1
    for p in model.parameters():
        everywhere = wfbp.allgather(p.detach()[None])
        assert torch.equal(everywhere, p.detach().expand_as(everywhere))


@check
def losses_beside_ranks_that_have_joined() -> None:
    """Averaged as the gradients are, over all ranks."""
    rank, size = wfbp.rank(), wfbp.size()
    model, _ = pair()
    optimizer = wfbp.DistributedOptimizer(momentum(model.parameters()), schedule="layerwise")

    def loss(step: int, rank: int) -> torch.Tensor:
        return model(data(step, rank, 4, 5)).square().mean()

    for step in range(1 + rank):
        with torch.no_grad():
            wanted = sum(loss(step, other) for other in range(step, size)) / size

        def evaluate(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            mine = loss(step, rank)
            mine.backward()
            return mine

        same(optimizer.step(evaluate), torch.as_tensor(wanted), f"step {step}", 1e-12)
    assert wfbp.join() == size - 1


@check
def sparse_gradients_of_unequal_number() -> None:
    rank, size = wfbp.rank(), wfbp.size()
    layer = torch.nn.Embedding(4, 2, sparse=True)
    start = layer.weight.detach().clone()
    optimizer = wfbp.DistributedOptimizer(
        torch.optim.SGD(layer.parameters(), lr=1.0), schedule="layerwise"
    )
    for _ in range(1 + rank):
        optimizer.zero_grad()
        layer(torch.tensor([1])).sum().backward()
        optimizer.step()
    assert wfbp.join() == size - 1
    start[1] -= sum(range(1, size + 1)) / size
    same(layer.weight.detach(), start, "embedding", 1e-6)


@check
def process_sets_of_ranks_that_have_joined() -> None:
    """They are stood in for there, too; others do not notice."""
    rank, size = wfbp.rank(), wfbp.size()
    if size < 3:
        return
    some = wfbp.add_process_set([0, size - 1])
    other = wfbp.add_process_set(range(1, size))
    for step in range(rank):
        for members in (some, other, wfbp.global_process_set):
            if members.included():
                found = wfbp.allreduce(torch.ones(2), op=wfbp.Sum, process_set=members)
                assert members.ranks is not None
                assert found.tolist() == [sum(r > step for r in members.ranks)] * 2
        if some.included() and step:
            refused = partial(wfbp.allgather, torch.ones(1), process_set=some)
            raises(WfbpError, "called join()", act=refused)
    assert wfbp.join() == size - 1
    if some.included():
        model, _ = pair()
        optimizer = wfbp.DistributedOptimizer(
            momentum(model.parameters()), model.named_parameters(), process_set=some
        )
        for step in range(1 + 2 * rank):
            optimizer.zero_grad()
            square(model, rank, step)
            optimizer.step()
    wfbp.join()
    if some.included():
        for p in model.parameters():
            everywhere = wfbp.allgather(p.detach()[None], process_set=some)
            assert torch.equal(everywhere, p.detach().expand_as(everywhere))
    for members in (some, other):
        if members.included():
            assert wfbp.allreduce(torch.ones(1), process_set=members).item() == 1.0
        wfbp.remove_process_set(members)


@check
def what_cannot_be_done_for_ranks_that_have_joined() -> None:
    if wfbp.size() == 1:
        return
    epochs = Epochs(momentum, schedule="layerwise")
    epochs.step(0, 0)
    if wfbp.rank() == 0:
        wfbp.join()
    else:
        raises(WfbpError, "rank 0 called join()", act=lambda: wfbp.allgather(torch.ones(1)))
        wfbp.join()
