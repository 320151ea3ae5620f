"""Optimizer state that one rank asks for alone, and that is broadcast in mid-training."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from mpi4py import MPI

import wfbp
import wfbp.torch
from tests.parallel.programs.harness import Checks, raises
from tests.parallel.programs.torch.training import (
    adamw,
    mlp,
    momentum,
    same,
    square,
    twins,
)
from wfbp.errors import DisagreementError

check = Checks()

SCHEDULES = (None, "ps_layerwise")
"""The mode's own, and one that decouples from the first step on."""


def alike(found: dict[str, Any], plain: torch.optim.Optimizer, where: str) -> None:
    """A whole state is that of one process."""
    wanted = plain.state_dict()["state"]
    assert found["state"].keys() == wanted.keys(), where
    for k, values in wanted.items():
        assert found["state"][k].keys() == values.keys(), where
        for key, value in values.items():
            mine = torch.as_tensor(found["state"][k][key])
            same(mine, torch.as_tensor(value), f"{where}: {key} of {k}", 1e-11)


@check
def one_rank_alone_takes_the_state() -> None:
    """Rank 0 and the last one alternate, early and late, while others go on, also slow ones."""
    rank, size = wfbp.rank(), wfbp.size()
    for schedule in SCHEDULES:
        for make in (adamw, momentum):
            both = twins(make, schedule=schedule)
            optimizer, plain = both.optimizer, both.plain
            for step in range(9):
                both.step(step)
                if step % 4 == 3 and rank == 1:
                    time.sleep(0.1)
                for asks in (0, size - 1):
                    if rank == asks and step % 2 == asks % 2:
                        where = f"{schedule}, step {step}, rank {rank}"
                        alike(optimizer.state_dict(), plain, where)
                if step % 3 == 2:
                    both.compare(f"{schedule}, step {step}", 1e-11)
            alike(optimizer.state_dict(), plain, f"{schedule}: at the end, on all")
            if rank == 0:
                alike(optimizer.state_dict(), plain, f"{schedule}: after the last step")


@check
def state_that_others_have_changed() -> None:
    """One rank asks between clipping and its step, when the others have stepped."""
    rank, size, world = wfbp.rank(), wfbp.size(), MPI.COMM_WORLD
    model, optimizer = twins(adamw, schedule="independent")[:2]
    for step in range(12):
        optimizer.zero_grad()
        square(model, rank, step)
        optimizer.clip_grad_norm_(1.0)
        if step == 9 and rank == 0:
            for peer in range(1, size):
                world.recv(source=peer)
            text = "state_dict() between two steps"
            raises(DisagreementError, text, act=optimizer.state_dict)
        optimizer.step()
        if step == 9 and rank > 0:
            world.send(None, 0)
    states = wfbp.allgather_object(optimizer.state_dict()["state"])
    for other in states:
        for k, values in other.items():
            for key, value in values.items():
                same(torch.as_tensor(value), torch.as_tensor(states[0][k][key]), f"{key} of {k}")


@check
def state_that_was_taken_is_a_copy() -> None:
    """Counts of steps, too: a plain optimizer that has loaded it steps on by itself."""
    rank = wfbp.rank()
    both = twins(adamw, schedule="independent")
    for step in range(4):
        both.step(step)
    if rank == 0:
        taken = both.optimizer.state_dict()
        for values in taken["state"].values():
            for value in values.values():
                value.add_(1.0)
    wfbp.barrier()
    where = "another rank has changed what it had taken"
    alike(both.optimizer.state_dict(), both.plain, where)


@check
def state_is_asked_for_when_others_have_let_it_go() -> None:
    """The other ranks have loaded, emptied or dropped what rank 0 still wants to save."""
    rank = wfbp.rank()
    for lets_go in ("load", "empty", "replace", "drop", "wrap"):
        both = twins(adamw, schedule="independent")
        optimizer, plain = both.optimizer, both.plain
        original = optimizer._wfbp_original
        for step in range(4):
            both.step(step)
        empty = torch.optim.AdamW(mlp(5, 7, 3).parameters(), lr=0.01, weight_decay=0.1)
        if rank == 0:
            time.sleep(0.2)
            alike(optimizer.state_dict(), plain, lets_go)
        if lets_go == "load":
            optimizer.load_state_dict(empty.state_dict())
        elif lets_go == "empty":
            optimizer.state.clear()
        elif lets_go == "replace":
            optimizer.state = copy.copy(empty.state)
        elif lets_go == "drop":
            del both, optimizer, original
            continue
        else:
            optimizer = wfbp.torch.DistributedOptimizer(original, schedule="ipart")
            both = both._replace(optimizer=optimizer)
        if lets_go != "wrap":
            assert optimizer.state_dict()["state"] == {}, lets_go
            plain.state.clear()
        for step in range(4, 8):
            both.step(step)
        both.compare(lets_go, 1e-11)
        if rank == wfbp.size() - 1:
            alike(optimizer.state_dict(), plain, lets_go)
