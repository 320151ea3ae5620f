"""Several optimizers, wrapping again, and parameters that are added."""

from __future__ import annotations

import gc

import torch
from torch import nn

import wfbp
import wfbp.torch
from tests.parallel.programs.harness import Checks, raises
from tests.parallel.programs.torch.training import (
    Twins,
    adamw,
    averaged,
    compare,
    data,
    due,
    equal,
    mlp,
    momentum,
    pair,
    square,
)

check = Checks()


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
            equal(net.parameters(), ref.parameters(), f"step {step}", 1e-12)


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
        if due(step, 8):
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
        Twins(model, optimizer, reference, plain).train(range(5 * turn, 5 * turn + 5))
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
            equal(model.parameters(), reference.parameters(), f"step {step}", 1e-12)


@check
def parameters_put_into_groups_by_hand() -> None:
    """They would be stepped with this rank's gradients alone; the remedy that is named works."""
    model, reference = pair()
    first, second = (list(model[k].parameters()) for k in (0, 2))
    optimizer = wfbp.torch.DistributedOptimizer(momentum(first), model[0].named_parameters())
    plain = momentum(reference[0].parameters())
    params, groups = optimizer.param_groups[0]["params"], optimizer.param_groups
    for step in range(12):
        optimizer.zero_grad()
        square(model, wfbp.rank(), step)
        if step in (3, 6):
            params.append(second[0])
            raises(RuntimeError, "['params'][2]", "(3, 7)", "add_param_group", act=optimizer.step)
            params.pop()
            groups.append({**groups[0], "params": second})
            raises(RuntimeError, "param_groups[1]['params'][0]", act=optimizer.step)
            groups.pop()
            params[1] = second[1]
            raises(RuntimeError, "['params'][1], of shape (3,)", act=optimizer.step)
            params[1] = first[1]
        optimizer.step()
        averaged(reference, square, step, wfbp.size())
        plain.step()
        if step == 6:
            optimizer.add_param_group({"params": second})
            plain.add_param_group({"params": list(reference[2].parameters())})
    compare(model, reference, "at the end", 1e-12)
