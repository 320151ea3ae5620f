"""Bad arguments, hooks of the user, and models that change after wrapping."""

from __future__ import annotations

import copy
import io

import torch
from torch import nn

import wfbp
import wfbp.torch
from tests.parallel.programs.harness import Checks, raises
from tests.parallel.programs.torch.training import (
    data,
    mlp,
    momentum,
    square,
)

check = Checks()


@check
def converting_a_wrapped_model_is_an_error() -> None:
    model = mlp(5, 7, 3)
    optimizer = wfbp.torch.DistributedOptimizer(
        momentum(model.parameters()), model.named_parameters()
    )
    model.float()

    def act() -> None:
        model(data(0, 0, 4, 5, dtype=torch.float32)).sum().backward()
        optimizer.step()

    raises(RuntimeError, "float64(3,)", "float32(3,)", "before DistributedOptimizer", act=act)


@check
def bad_arguments() -> None:
    model = mlp(5, 7, 3)
    wrap = wfbp.torch.DistributedOptimizer

    def make() -> torch.optim.Optimizer:
        return momentum(model.parameters())

    raises(ValueError, "nonsense", "oasr", act=lambda: wrap(make(), schedule="nonsense"))
    raises(ValueError, "wfbp.Max", act=lambda: wrap(make(), op=wfbp.Max))
    raises(
        ValueError, "backward_passes_per_step", act=lambda: wrap(make(), backward_passes_per_step=0)
    )
    raises(ValueError, "-1", act=lambda: wrap(make(), schedule="threshold", threshold_bytes=-1))
    raises(
        ValueError,
        "lacks 2",
        act=lambda: wrap(make(), named_parameters=model[0].named_parameters()),
    )
    twice = [("w", p) for p in model.parameters()]
    raises(ValueError, "twice", "w", act=lambda: wrap(make(), named_parameters=twice))
    integers = nn.Parameter(torch.zeros(3, dtype=torch.int32), requires_grad=False)
    alone = torch.optim.SGD([integers], lr=0.1)
    raises(ValueError, "int32", act=lambda: wrap(alone, schedule="auto"))
    unsuited = torch.optim.LBFGS(model.parameters())
    raises(ValueError, "whole", act=lambda: wrap(unsuited, optimizer_sharding=True))
    assert wrap(unsuited, schedule="ps").report().get("schedule") != "ps"
    meta = nn.Linear(2, 2, device="meta")
    raises(ValueError, "meta", act=lambda: wrap(momentum(meta.parameters())))


@check
def one_parameter_with_two_names() -> None:
    encoder = nn.Linear(5, 4)
    one, two = nn.Sequential(encoder, nn.Linear(4, 1)), nn.Sequential(encoder, nn.Linear(4, 2))
    model = nn.ModuleList([one, two]).double()
    named = [(f"one.{n}", p) for n, p in one.named_parameters()]
    named += [(f"two.{n}", p) for n, p in two.named_parameters()]
    optimizer = wfbp.torch.DistributedOptimizer(momentum(model.parameters()), named)
    for step in range(4):
        optimizer.zero_grad()
        x = data(step, wfbp.rank(), 3, 5)
        (one(x).square().mean() + two(x).square().mean()).backward()
        optimizer.step()
    assert optimizer.report()["num_tensors"] == 6
    optimizer.synchronize()
    states = wfbp.allgather_object([p.detach().tolist() for p in model.parameters()])
    assert all(state == states[0] for state in states)


@check
def parameters_that_are_integers_are_left_alone() -> None:
    model = mlp(5, 7, 3)
    model.register_parameter("count", nn.Parameter(torch.tensor([3, 4]), requires_grad=False))
    model.register_parameter("flags", nn.Parameter(torch.tensor([True]), requires_grad=False))
    for named in (model.named_parameters(), None):
        optimizer = wfbp.torch.DistributedOptimizer(momentum(model.parameters()), named)
        for step in range(6):
            optimizer.zero_grad()
            square(model, wfbp.rank(), step)
            optimizer.step()
        report = optimizer.report()
        assert (report["num_tensors"], report["steps"]) == (4, 6)


@check
def copies_of_the_optimizer_are_refused() -> None:
    optimizer = wfbp.torch.DistributedOptimizer(momentum(mlp(5, 7, 3).parameters()))
    raises(TypeError, "SGD", "state_dict()", act=lambda: copy.deepcopy(optimizer))
    raises(TypeError, "SGD", "state_dict()", act=lambda: copy.copy(optimizer))
    raises(TypeError, "SGD", "state_dict()", act=lambda: torch.save(optimizer, io.BytesIO()))


@check
def two_optimizers_of_one_parameter() -> None:
    """The second takes it over; the first says so when it is used."""
    shared, first, second = (nn.Parameter(torch.ones(3)) for _ in range(3))
    one = wfbp.torch.DistributedOptimizer(
        torch.optim.SGD([first, shared], lr=0.1), [("first", first), ("encoder", shared)]
    )
    two = wfbp.torch.DistributedOptimizer(
        torch.optim.SGD([shared, second], lr=0.1), [("encoder", shared), ("second", second)]
    )
    (shared * first * second).sum().backward()
    raises(RuntimeError, "encoder", "use that one", act=one.step)
    two.step()
