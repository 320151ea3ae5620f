"""Optimizers whose changes are combined by Adasum."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import torch

import wfbp.horovod.torch as wfbp
from tests.parallel.programs.harness import Checks, raises
from tests.parallel.programs.torch.training import (
    adamw,
    agree,
    data,
    mlp,
    momentum,
    pair,
    same,
    square,
)
from wfbp.errors import DisagreementError
from wfbp.horovod.torch.adasum import adasum
from wfbp.runtime import process

check = Checks()


class Alone:
    """Every rank's model and optimizer, stepped in one process by the definition."""

    def __init__(self, model: torch.nn.Module, make: Any, ranks: int) -> None:
        self.models = [copy.deepcopy(model) for _ in range(ranks)]
        self.optimizers = [make(m.parameters()) for m in self.models]

    def step(self, step: int, passes: int) -> None:
        before = [p.detach().clone() for p in self.models[0].parameters()]
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            optimizer.zero_grad()
            for k in range(passes):
                square(model, rank, passes * step + k)
            optimizer.step()
        for index, start in enumerate(before):
            mine = [list(m.parameters())[index].detach() for m in self.models]
            found = adasum([p - start for p in mine])
            for p in mine:
                p.copy_(start + found)


@check
def adasum_of_changes() -> None:
    """Of SGD's and AdamW's steps, with gradients of several passes, and beside a scheduler."""
    rank, size = wfbp.rank(), wfbp.size()
    if size & (size - 1):
        optimizer = momentum(mlp(5, 7, 3).parameters())
        raises(
            ValueError,
            "power of two",
            f"there are {size}",
            act=lambda: wfbp.DistributedOptimizer(optimizer, op=wfbp.Adasum),
        )
        return
    for make, passes in ((momentum, 1), (adamw, 2)):
        model, _ = pair()
        alone = Alone(model, make, size)
        inner = make(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(inner, 3)
        optimizer = wfbp.DistributedOptimizer(
            inner, model.named_parameters(), backward_passes_per_step=passes, op=wfbp.Adasum
        )
        others = [torch.optim.lr_scheduler.StepLR(o, 3) for o in alone.optimizers]
        assert isinstance(optimizer, type(inner))
        for step in range(6):
            optimizer.zero_grad()
            for k in range(passes):
                square(model, rank, passes * step + k)
            optimizer.step()
            alone.step(step, passes)
            for each in (scheduler, *others):
                each.step()
        for p, q in zip(model.parameters(), alone.models[0].parameters(), strict=True):
            same(p.detach(), q.detach(), "parameters", 1e-9)
        if size > 1:
            raises(RuntimeError, "made into a distributed optimizer", act=inner.step)


@check
def adasum_in_other_ways() -> None:
    """In a set, where gradients are missing, compressed, by a closure, and in vain."""
    rank, size = wfbp.rank(), wfbp.size()
    first = [0, 1][:size]
    members = wfbp.global_process_set if len(first) == size else wfbp.add_process_set(first)
    if members.included():
        for compression in (wfbp.Compression.none, wfbp.Compression.fp16):
            weights = [torch.nn.Parameter(torch.zeros(len(first))) for _ in range(2)]
            optimizer = wfbp.DistributedOptimizer(
                torch.optim.SGD(weights, lr=1.0),
                compression=compression,
                op=wfbp.Adasum,
                process_set=members,
            )
            place = members.rank()

            def evaluate(
                weights: list[Any] = weights, place: int = place, optimizer: Any = optimizer
            ) -> torch.Tensor:
                optimizer.zero_grad()
                loss = weights[0][place] * 2.0  # orthogonal changes add up
                if place == 0:
                    loss = loss + weights[1].sum()
                loss.backward()
                return loss

            assert optimizer.step(evaluate) is not None
            assert weights[0].tolist() == [-2.0] * len(first)
            assert weights[1].tolist() == [-1.0] * len(first)
            assert (weights[1].grad is None) == (place != 0)
            optimizer.load_state_dict(optimizer.state_dict())
    if members is not wfbp.global_process_set:
        wfbp.remove_process_set(members)

    def make(**wrap: Any) -> Any:
        params = mlp(5, 7, 3).parameters()
        return wfbp.DistributedOptimizer(momentum(params), op=wfbp.Adasum, **wrap)

    raises(ValueError, "schedule is 'layerwise'", act=lambda: make(schedule="layerwise"))
    raises(ValueError, "needs op=Average", act=lambda: make(gradient_predivide_factor=2.0))
    raises(ValueError, "is 'int8'; expected a class", act=lambda: make(compression="int8"))
    for op in (wfbp.Adasum, wfbp.Average):
        raises(
            ValueError,
            "is 'int8'; expected a class",
            act=lambda op=op: wfbp.allreduce(torch.ones(2), op=op, compression="int8"),
        )
    if size & (size - 1) == 0:
        optimizer = make()
        optimizer.synchronize()

        def skip() -> None:
            with optimizer.skip_synchronize():
                optimizer.step()

        raises(RuntimeError, "no gradients to synchronize", act=skip)
        raises(ValueError, "distributed already", act=lambda: wfbp.DistributedOptimizer(optimizer))
    assert rank < size


@check
def arguments_of_adasum() -> None:
    """Ranks compare factors; other kinds of op are refused."""
    for op in (None, "sum", 0, True):
        raises(
            ValueError,
            "expected Average, Sum or Adasum",
            act=lambda op=op: wfbp.DistributedOptimizer(momentum(mlp(5, 7, 3).parameters()), op=op),
        )
    if wfbp.size() & (wfbp.size() - 1) == 0 and wfbp.size() > 1:
        raises(TypeError, act=lambda: wfbp.allreduce(np.ones(3), op=wfbp.Adasum))
        factor = 1.0 + wfbp.rank()
        for name in ("prescale_factor", "postscale_factor"):
            raises(
                DisagreementError,
                name,
                act=lambda name=name: wfbp.allreduce(
                    torch.ones(3), op=wfbp.Adasum, **{name: factor}
                ),
            )
        twice = wfbp.allreduce(torch.ones(3), op=wfbp.Adasum, postscale_factor=2.0)
        assert twice.tolist() == [2.0] * 3
        optimizer = wfbp.DistributedOptimizer(momentum(mlp(5, 7, 3).parameters()), op=wfbp.Adasum)
        assert set(optimizer._parameter_names.values()) >= {"group0.param0"}


@check
def programs_without_a_warning() -> None:
    """What asks for averages once, as under Horovod."""
    model = mlp(5, 7, 3)
    optimizer = wfbp.DistributedOptimizer(momentum(model.parameters()))

    def evaluate() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 5).double()).square().mean()
        loss.backward()
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step(evaluate)
        evaluate()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        evaluate()
        optimizer.synchronize()
        evaluate()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        evaluate()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()


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
    optimizer = wfbp.DistributedOptimizer(momentum(model.parameters()), op=wfbp.Adasum)
    for step in range(1 + (wfbp.rank() > 0)):
        optimizer.zero_grad()
        square(model, wfbp.rank(), step)
        if step == 0:
            optimizer.step()
            agree(model)
        else:
            raises(DisagreementError, "by hvd.Adasum", "rank 0 called join()", act=optimizer.step)
    wfbp.join()


@check
def adasum_and_scaling() -> None:
    """A scaler, which would skip the step of one rank alone, is refused on every rank."""
    if wfbp.size() & (wfbp.size() - 1):
        return
    model, _ = pair()
    optimizer = wfbp.DistributedOptimizer(momentum(model.parameters()), op=wfbp.Adasum)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(data(0, wfbp.rank(), 4, 5)).square().mean()).backward()
    raises(RuntimeError, "train without it", act=lambda: scaler.step(optimizer))
