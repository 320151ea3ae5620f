"""Features that involve more than one step: schedules, checkpoints, several optimizers."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from typing import Any

import torch
from torch import nn

import wfbp
import wfbp.torch
from tests.parallel.programs.harness import Checks, raises
from tests.parallel.programs.training import (
    adamw,
    averaged,
    check_training,
    compare,
    data,
    mlp,
    momentum,
    same,
)

check = Checks()


def square(model: nn.Module, rank: int, step: int) -> None:
    model(data(step, rank, 4, 5)).square().mean().backward()


def pair() -> tuple[nn.Sequential, nn.Sequential]:
    """Two models with the same parameters."""
    model = mlp(5, 7, 3)
    return model, copy.deepcopy(model)


def train(
    model: nn.Module, optimizer: Any, reference: nn.Module, plain: Any, first: int, last: int
) -> None:
    """Steps of both, which must stay equal."""
    for step in range(first, last):
        optimizer.zero_grad()
        square(model, wfbp.rank(), step)
        optimizer.step()
        averaged(reference, square, step, wfbp.size())
        plain.step()
        compare(model, reference, f"step {step}", 1e-12)


# Learning-rate schedules.


def scheduled(before: bool, load: bool) -> None:
    model, reference = pair()
    optimizer: Any = momentum(model.parameters())
    plain = momentum(reference.parameters())
    expected = torch.optim.lr_scheduler.StepLR(plain, 2, 0.5)
    if before:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    optimizer = wfbp.torch.DistributedOptimizer(optimizer)
    if load:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        wfbp.broadcast_optimizer_state(optimizer, root_rank=0)
    if not before:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for epoch in range(6):
        train(model, optimizer, reference, plain, 3 * epoch, 3 * epoch + 3)
        schedule.step()
        expected.step()
        assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"], epoch
    assert plain.param_groups[0]["lr"] < 0.01


@check
def scheduler_made_after_wrapping() -> None:
    scheduled(before=False, load=False)


@check
def scheduler_made_before_wrapping() -> None:
    scheduled(before=True, load=False)


@check
def scheduler_made_before_wrapping_and_state_loaded() -> None:
    scheduled(before=True, load=True)


# Checkpoints.


@check
def state_dict_round_trip() -> None:
    model, reference = pair()
    optimizer = wfbp.torch.DistributedOptimizer(adamw(model.parameters()), model.named_parameters())
    plain = adamw(reference.parameters())
    train(model, optimizer, reference, plain, 0, 7)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = mlp(5, 7, 3)
    resumed.load_state_dict(saved["model"])
    again = wfbp.torch.DistributedOptimizer(adamw(resumed.parameters()), resumed.named_parameters())
    again.load_state_dict(saved["optimizer"])
    train(resumed, again, reference, plain, 7, 14)


@check
def state_loads_into_a_plain_optimizer() -> None:
    model, reference = pair()
    optimizer = wfbp.torch.DistributedOptimizer(adamw(model.parameters()))
    plain = adamw(reference.parameters())
    train(model, optimizer, reference, plain, 0, 7)
    resumed = mlp(5, 7, 3)
    resumed.load_state_dict(model.state_dict())
    single = adamw(resumed.parameters())
    single.load_state_dict(optimizer.state_dict())
    for step in range(7, 12):
        for net, opt in ((resumed, single), (reference, plain)):
            opt.zero_grad()
            square(net, 0, step)
            opt.step()
        compare(resumed, reference, f"step {step}", 1e-12)


@check
def a_wrapped_model_can_be_saved_and_copied() -> None:
    model = mlp(5, 7, 3)
    optimizer = wfbp.torch.DistributedOptimizer(adamw(model.parameters()))
    square(model, wfbp.rank(), 0)
    optimizer.step()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            same(q.detach(), p.detach(), "copy")
        square(other, wfbp.rank(), 0)  # must not disturb what is exchanged
    optimizer.zero_grad()
    square(model, wfbp.rank(), 1)
    optimizer.step()


# Several optimizers.


def gan(zero_by_model: bool) -> None:
    """The generator's loss reaches the discriminator's parameters, too."""

    def make() -> tuple[nn.Sequential, nn.Sequential]:
        torch.manual_seed(2)
        return mlp(3, 6, 5), mlp(5, 6, 1)

    (gen, dis), (gen_ref, dis_ref) = make(), make()
    opt_gen = wfbp.torch.DistributedOptimizer(adamw(gen.parameters()), gen.named_parameters())
    opt_dis = wfbp.torch.DistributedOptimizer(adamw(dis.parameters()), dis.named_parameters())
    plain_gen, plain_dis = adamw(gen_ref.parameters()), adamw(dis_ref.parameters())
    rank, size = wfbp.rank(), wfbp.size()
    for step in range(14):
        for net, opt in ((dis, opt_dis), (gen, opt_gen)):
            # What the other network's loss left here goes; what it will leave is not stepped on.
            (net if zero_by_model else opt).zero_grad()
            if net is dis:
                dis(data(step, rank, 4, 5)).square().mean().backward()
                (-dis(gen(data(step, rank, 4, 3)).detach()).square().mean()).backward()
            else:
                dis(gen(data(step, rank, 4, 3))).square().mean().backward()
            opt.step()

        def dis_loss(model: nn.Module, r: int, s: int) -> None:
            model(data(s, r, 4, 5)).square().mean().backward()
            (-model(gen_ref(data(s, r, 4, 3)).detach()).square().mean()).backward()

        averaged(dis_ref, dis_loss, step, size)
        plain_dis.step()
        averaged(
            gen_ref,
            lambda m, r, s: dis_ref(m(data(s, r, 4, 3))).square().mean().backward(),
            step,
            size,
        )
        plain_gen.step()
        for net, ref in ((dis, dis_ref), (gen, gen_ref)):
            for p, q in zip(net.parameters(), ref.parameters(), strict=True):
                same(p.detach(), q.detach(), f"step {step}", 1e-12)


@check
def two_optimizers() -> None:
    gan(zero_by_model=False)


@check
def two_optimizers_zeroed_by_model() -> None:
    gan(zero_by_model=True)


@check
def two_optimizers_of_one_backward() -> None:
    model, reference = pair()
    optimizers = [
        wfbp.torch.DistributedOptimizer(momentum(model[0].parameters())),
        wfbp.torch.DistributedOptimizer(adamw(model[2].parameters())),
    ]
    plain = [momentum(reference[0].parameters()), adamw(reference[2].parameters())]
    for step in range(8):
        for optimizer in optimizers:
            optimizer.zero_grad()
        square(model, wfbp.rank(), step)
        for optimizer in optimizers:
            optimizer.step()
        averaged(reference, square, step, wfbp.size())
        for each in plain:
            each.step()
        compare(model, reference, f"step {step}", 1e-12)


@check
def a_parameter_of_two_optimizers_is_an_error() -> None:
    model = mlp(5, 7, 3)
    first = wfbp.torch.DistributedOptimizer(momentum(model.parameters()))
    second = wfbp.torch.DistributedOptimizer(momentum(model[2].parameters()))
    square(model, wfbp.rank(), 0)
    second.step()
    raises(RuntimeError, "another DistributedOptimizer", act=first.step)


@check
def wrapping_again() -> None:
    model, reference = pair()
    plain = momentum(reference.parameters())
    inner = momentum(model.parameters())
    for turn in range(4):
        optimizer = wfbp.torch.DistributedOptimizer(inner, model.named_parameters())
        train(model, optimizer, reference, plain, 5 * turn, 5 * turn + 5)
        square(model, wfbp.rank(), 99)  # begun, never taken
        if turn % 2:
            del optimizer
            gc.collect()


@check
def wrapping_a_wrapped_optimizer_is_an_error() -> None:
    optimizer = wfbp.torch.DistributedOptimizer(momentum(mlp(5, 7, 3).parameters()))
    raises(ValueError, "already", act=lambda: wfbp.torch.DistributedOptimizer(optimizer))


@check
def parameter_group_added() -> None:
    for named in (False, True):
        model, reference = pair()
        optimizer = wfbp.torch.DistributedOptimizer(
            momentum(model[0].parameters()), model[0].named_parameters() if named else None
        )
        plain = momentum(reference[0].parameters())
        for step in range(12):
            if step == 5:
                for opt, net in ((optimizer, model), (plain, reference)):
                    opt.add_param_group({"params": list(net[2].parameters()), "lr": 0.01})
            optimizer.zero_grad()
            model[2].zero_grad()
            square(model, wfbp.rank(), step)
            optimizer.step()
            averaged(reference, square, step, wfbp.size())
            plain.step()
            for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                same(p.detach(), q.detach(), f"step {step}", 1e-12)


# Closures.


@check
def closure() -> None:
    model, reference = pair()
    optimizer = wfbp.torch.DistributedOptimizer(momentum(model.parameters()))
    plain = momentum(reference.parameters())
    for step in range(8):

        def evaluate(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(data(step, wfbp.rank(), 4, 5)).square().mean()
            loss.backward()
            return loss

        assert optimizer.step(evaluate) is not None
        averaged(reference, square, step, wfbp.size())
        plain.step()
        compare(model, reference, f"step {step}", 1e-12)


@check
def lbfgs() -> None:
    """Every rank evaluates the mean loss, so that the line search agrees."""
    model, reference = pair()

    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(params, lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

    optimizer = wfbp.torch.DistributedOptimizer(make(model.parameters()))
    plain = make(reference.parameters())
    for _ in range(3):

        def evaluate() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(data(0, wfbp.rank(), 4, 5)).square().mean()
            loss.backward()
            return wfbp.allreduce(loss.detach())

        def evaluate_all() -> torch.Tensor:
            plain.zero_grad()
            losses = [reference(data(0, r, 4, 5)).square().mean() for r in range(wfbp.size())]
            loss = torch.stack(losses).mean()
            loss.backward()
            return loss.detach()

        same(optimizer.step(evaluate), plain.step(evaluate_all), "loss", 1e-9)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            same(p.detach(), q.detach(), "parameters", 1e-8)


# What cannot work.


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
    raises(ValueError, "MAX", act=lambda: wrap(make(), op=wfbp.Max))
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
    raises(ValueError, "int32", act=lambda: wrap(torch.optim.SGD([integers], lr=0.1)))
    meta = nn.Linear(2, 2, device="meta")
    raises(ValueError, "meta", act=lambda: wrap(momentum(meta.parameters())))


@check
def step_hooks_of_the_optimizer_run() -> None:
    model = mlp(5, 7, 3)
    inner = momentum(model.parameters())
    seen: list[str] = []
    inner.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer = wfbp.torch.DistributedOptimizer(inner)
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    square(model, wfbp.rank(), 0)
    optimizer.step()
    assert seen == ["before", "after"], seen
    assert isinstance(optimizer, torch.optim.SGD)


@check
def user_hooks_on_gradients_run() -> None:
    def double(model: nn.Module, step: int) -> None:
        for p in model.parameters() if step == 0 else ():
            p.register_hook(lambda grad: 2 * grad)

    check_training(mlp(5, 7, 3), square, momentum, before=double)


if __name__ == "__main__":
    check.main()
