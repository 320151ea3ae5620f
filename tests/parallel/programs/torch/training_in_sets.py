"""Distributed optimizers of some of the ranks."""

from __future__ import annotations

import contextlib
import copy
import pickle
import time
from collections.abc import Sequence
from typing import Any

import torch

import wfbp.torch as wfbp
from tests.parallel.programs.harness import Checks, raises
from tests.parallel.programs.torch.training import (
    adamw,
    averaged,
    momentum,
    pair,
    same,
    square,
)
from wfbp.errors import WfbpError
from wfbp.runtime import process

check = Checks()

SCHEDULES = ("auto", "hybrid")


class Trained:
    """A model trained by the ranks of a set, and its reference."""

    def __init__(self, members: wfbp.ProcessSet, make: Any = momentum, **wrap: Any) -> None:
        self.members = members
        self.ranks = members.ranks or []
        torch.manual_seed(self.ranks[0])  # ranks make unequally many
        self.model, self.reference = pair()
        if members.rank():
            with torch.no_grad():
                for p in self.model.parameters():
                    p.zero_()
        wfbp.broadcast_parameters(self.model.state_dict(), self.ranks[0], members)
        self.optimizer = wfbp.DistributedOptimizer(
            make(self.model.parameters()),
            self.model.named_parameters(),
            process_set=members,
            **wrap,
        )
        self.plain = make(self.reference.parameters())
        self.steps = 0

    def step(self, clipped: bool = False) -> None:
        self.optimizer.zero_grad()
        square(self.model, wfbp.rank(), self.steps)
        averaged(
            self.reference,
            lambda model, r, s: square(model, self.ranks[r], s),
            self.steps,
            len(self.ranks),
        )
        if clipped:
            norm = self.optimizer.clip_grad_norm_(0.1)
            params = list(self.reference.parameters())
            assert torch.allclose(norm, torch.nn.utils.clip_grad_norm_(params, 0.1))
        self.optimizer.step()
        self.plain.step()
        self.steps += 1

    def check(self) -> None:
        wanted = dict(self.reference.named_parameters())
        for name, p in self.model.named_parameters():
            same(p.detach(), wanted[name].detach(), f"{name} of {self.ranks}", 1e-9)


@contextlib.contextmanager
def sets(*groups: Sequence[int]) -> Any:
    """These process sets, but for those of all ranks, that are known already, and empty ones."""
    everybody = list(range(wfbp.size()))
    made = [
        wfbp.global_process_set if list(g) == everybody else wfbp.add_process_set(g) for g in groups
    ]
    yield made
    for members in made:
        wfbp.remove_process_set(members)


def halves() -> tuple[list[int], list[int]]:
    """The ranks in two sets, the first of which is larger where they are uneven in number."""
    ranks = list(range(wfbp.size()))
    middle = (len(ranks) + 1) // 2
    return ranks[:middle], ranks[middle:]


@check
def an_optimizer_of_a_set() -> None:
    """Ranks outside it do something else meanwhile, or nothing."""
    first, _ = halves()
    with sets(first) as (members,):
        if not members.included():
            raises(
                ValueError,
                f"rank {wfbp.rank()} of {wfbp.size()} is not in the process set",
                "only where process_set.included()",
                act=lambda: wfbp.DistributedOptimizer(
                    momentum(pair()[0].parameters()), process_set=members
                ),
            )
            return
        for schedule in SCHEDULES:
            for make in (momentum, adamw):
                trained = Trained(members, make, schedule=schedule)
                for step in range(6):
                    trained.step(clipped=step % 2 == 1)
                trained.check()


@check
def optimizers_of_disjoint_sets() -> None:
    """They step unequally often, and beside one of all ranks."""
    first, second = halves()
    with sets(first, second) as both:
        mine = both[0] if both[0].included() else both[1]
        for schedule in SCHEDULES:
            alone = Trained(mine, schedule=schedule)
            together = Trained(wfbp.global_process_set, schedule=schedule)
            for _ in range(4):
                for _ in range(1 + 2 * (mine is both[0])):
                    alone.step()
                together.step()
            alone.check()
            together.check()


@check
def optimizers_of_overlapping_sets() -> None:
    size = wfbp.size()
    chain = [[r, r + 1] for r in range(size - 1)]
    with sets(*chain) as members:
        for schedule in SCHEDULES:
            mine = [Trained(each, adamw, schedule=schedule) for each in members if each.included()]
            for _ in range(6):
                for trained in mine:
                    trained.step()
            for trained in mine:
                trained.check()


@check
def state_in_a_set() -> None:
    """One rank alone asks for shards of it; it is broadcast within the set."""
    first, _ = halves()
    with sets(first) as (members,):
        if not members.included():
            return
        trained = Trained(members, adamw, schedule="ps_layerwise")
        for _ in range(4):
            trained.step()
        if wfbp.rank() == first[-1]:
            state = trained.optimizer.state_dict()["state"]
            for key, param in enumerate(trained.reference.parameters()):
                wanted = trained.plain.state[param]["exp_avg"]
                assert torch.allclose(state[key]["exp_avg"], wanted, atol=1e-9)
        for group in trained.optimizer.param_groups:
            group["lr"] *= 1.0 + members.rank()
        wfbp.broadcast_optimizer_state(trained.optimizer, first[0], process_set=members)
        for _ in range(3):
            trained.step()
        trained.check()
        root = wfbp.size()
        raises(
            ValueError,
            f"root_rank is {root}",
            act=lambda: wfbp.broadcast_optimizer_state(
                trained.optimizer, root, process_set=members
            ),
        )


@check
def batch_norm_in_a_set() -> None:
    first, _ = halves()
    with sets(first) as (members,):
        if not members.included():
            return
        layer = wfbp.SyncBatchNorm(2, process_set=members)
        inputs = [torch.randn(3, 2, generator=torch.Generator().manual_seed(r)) for r in first]
        found = layer(inputs[members.rank()])
        wanted = torch.nn.BatchNorm1d(2)(torch.cat(inputs))
        start = 3 * members.rank()
        assert torch.allclose(found, wanted[start : start + 3], atol=1e-5)
        again = wfbp.SyncBatchNorm.convert_sync_batchnorm(torch.nn.BatchNorm1d(2), members)
        for other in (copy.deepcopy(layer), again):
            assert other.process_set is layer.process_set
        plain = pickle.loads(pickle.dumps(wfbp.SyncBatchNorm(2)))
        assert plain.process_set is wfbp.global_process_set


@check
def a_set_that_was_removed() -> None:
    """Its optimizers keep all they have, and can be made anew."""
    first, _ = halves()
    members = None
    trained: Trained | None = None
    inner: Any = None
    for turn, schedule in enumerate(("ps_layerwise", "layerwise", "ps_layerwise")):
        everybody = len(first) == wfbp.size()
        members = wfbp.global_process_set if everybody else wfbp.add_process_set(first)
        if members.included():
            if trained is None:
                trained = Trained(members, lambda params: adamw(params), schedule=schedule)
                inner = trained.optimizer._wfbp_original
            else:
                trained.members = members
                trained.optimizer = wfbp.DistributedOptimizer(
                    inner,
                    trained.model.named_parameters(),
                    schedule=schedule,
                    process_set=members,
                )
            for _ in range(3):
                trained.step()
        removed = wfbp.remove_process_set(members)
        if trained is not None:
            trained.check()
            assert len(trained.optimizer.state_dict()["state"]) == 4, turn
            if removed and len(first) > 1:
                square(trained.model, wfbp.rank(), 99)
                raises(WfbpError, "the process set was removed", act=trained.optimizer.step)
                trained.optimizer.zero_grad()


@check
def a_rank_outside_that_leaves_early() -> None:
    """Nobody in the set waits for it, or takes its end for a failure."""
    first, second = halves()
    if not second:
        return
    with sets(first) as (members,):
        if members.included() and len(first) > 1:
            runtime = process.current("a check")
            detector = runtime.thread.loop.watch
            trained = Trained(members, schedule="layerwise")
            trained.step()
            # As if they had told that they leave.
            gone = dict.fromkeys(second, "has left")
            detector.left.update(gone)
            detector._quiet_since = 0.0
            if members.rank():
                time.sleep(2.5)
            trained.step()
            for rank in gone:
                del detector.left[rank]
            trained.check()
