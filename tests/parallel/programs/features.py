"""What PyTorch programs do with their gradients, each as one check."""

from __future__ import annotations

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


# Forgetting gradients.


@check
def zero_grad_to_none() -> None:
    check_training(mlp(5, 7, 3), square, momentum)


@check
def zero_grad_to_zeros() -> None:
    check_training(
        mlp(5, 7, 3), square, momentum, zero=lambda m, opt: opt.zero_grad(set_to_none=False)
    )


@check
def zero_grad_of_the_model() -> None:
    check_training(mlp(5, 7, 3), square, adamw, zero=lambda m, opt: m.zero_grad())


@check
def zero_grad_of_the_model_to_zeros() -> None:
    check_training(mlp(5, 7, 3), square, adamw, zero=lambda m, opt: m.zero_grad(set_to_none=False))


@check
def zero_grad_discards_what_was_computed() -> None:
    def zero(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        (1e3 * model(data(0, wfbp.rank(), 4, 5))).sum().backward()
        optimizer.zero_grad()

    check_training(mlp(5, 7, 3), square, momentum, zero=zero)


@check
def zero_grad_discards_a_part() -> None:
    def zero(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        (1e3 * model[-1](data(0, wfbp.rank(), 4, 7))).sum().backward()  # type: ignore[index]
        optimizer.zero_grad()

    check_training(mlp(5, 7, 3), square, momentum, zero=zero)


@check
def zero_grad_discards_what_some_ranks_computed() -> None:
    for who in (0, 1):

        def zero(model: nn.Module, optimizer: torch.optim.Optimizer, who: int = who) -> None:
            if wfbp.rank() == who:
                (1e3 * model(data(0, who, 4, 5))).sum().backward()
            optimizer.zero_grad()

        check_training(mlp(5, 7, 3), square, momentum, zero=zero)


@check
def gradients_kept_from_step_to_step() -> None:
    model = mlp(5, 7, 3)
    reference = mlp(5, 7, 3)
    reference.load_state_dict(model.state_dict())
    optimizer = wfbp.torch.DistributedOptimizer(momentum(model.parameters()))
    plain = momentum(reference.parameters())
    for step in range(6):
        square(model, wfbp.rank(), step)
        optimizer.step()
        for rank in range(wfbp.size()):
            (reference(data(step, rank, 4, 5)).square().mean() / wfbp.size()).backward()
        plain.step()
        compare(model, reference, f"step {step}", 1e-12)


# Several backward passes.


class Branches(nn.Module):
    """A trunk and three branches, of which a step uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 7)
        self.branches = nn.ModuleList(nn.Linear(7, 3) for _ in range(3))
        self.double()

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        hidden = torch.tanh(self.trunk(x))
        out = hidden.sum()
        for k in chosen:
            out = out + self.branches[k](hidden).square().sum()
        return out


def passes(model: nn.Module, rank: int, step: int, count: int) -> None:
    for k in range(count):
        (model(data(10 * step + k, rank, 4, 5)).square().mean() / count).backward()


@check
def accumulation_declared() -> None:
    check_training(
        mlp(5, 7, 3), lambda m, r, s: passes(m, r, s, 3), adamw, backward_passes_per_step=3
    )


@check
def accumulation_declared_into_views() -> None:
    check_training(
        mlp(5, 7, 3),
        lambda m, r, s: passes(m, r, s, 3),
        adamw,
        backward_passes_per_step=3,
        zero=lambda m, opt: opt.zero_grad(set_to_none=False),
    )


@check
def accumulation_learned() -> None:
    check_training(mlp(5, 7, 3), lambda m, r, s: passes(m, r, s, 2), adamw)


@check
def accumulation_learned_into_views() -> None:
    check_training(
        mlp(5, 7, 3),
        lambda m, r, s: passes(m, r, s, 2),
        adamw,
        zero=lambda m, opt: opt.zero_grad(set_to_none=False),
    )


@check
def accumulation_of_changing_length() -> None:
    check_training(
        mlp(5, 7, 3), lambda m, r, s: passes(m, r, s, (1, 3, 2, 4)[s % 4]), adamw, steps=16
    )


@check
def accumulation_that_differs_between_ranks() -> None:
    """A pass in which only one rank uses a parameter must not cost the others theirs."""

    def backward(model: nn.Module, rank: int, step: int) -> None:
        for k in range(1 + (step % 2 == rank % 2)):
            model(data(10 * step + k, rank, 4, 5), [0, 1] if k else [0]).backward()

    check_training(Branches(), backward, adamw, steps=12)


@check
def accumulation_shorter_at_the_end_of_an_epoch() -> None:
    check_training(
        mlp(5, 7, 3),
        lambda m, r, s: passes(m, r, s, 1 if s % 5 == 4 else 3),
        adamw,
        steps=30,
        backward_passes_per_step=3,
    )


# Parameters without gradient.


@check
def missing_on_some_ranks() -> None:
    def backward(model: nn.Module, rank: int, step: int) -> None:
        model(data(step, rank, 4, 5), [(rank + step) % 3]).backward()

    check_training(Branches(), backward, adamw, steps=20)


@check
def missing_on_all_ranks_in_some_steps() -> None:
    def backward(model: nn.Module, rank: int, step: int) -> None:
        model(data(step, rank, 4, 5), [0, 1] if step % 3 else [0]).backward()

    model, _ = check_training(Branches(), backward, adamw, steps=20)
    assert model.branches[2].weight.grad is None


@check
def seldom_used() -> None:
    def backward(model: nn.Module, rank: int, step: int) -> None:
        model(data(step, rank, 4, 5), [1] if step in (9, 30) and rank == 1 else [0]).backward()

    check_training(Branches(), backward, adamw, steps=40)


@check
def no_gradient_at_all_in_some_steps() -> None:
    def backward(model: nn.Module, rank: int, step: int) -> None:
        if (step + rank) % 3 and step % 5:
            square(model, rank, step)

    check_training(mlp(5, 7, 3), backward, adamw, steps=20)


@check
def zeros_left_behind_do_not_start_anew() -> None:
    """A gradient that stays zero is no news: planning must come to an end."""

    def backward(model: nn.Module, rank: int, step: int) -> None:
        model(data(step, rank, 4, 5), [0, 1] if step == 0 else [0]).backward()

    model = Branches()
    optimizer = wfbp.torch.DistributedOptimizer(momentum(model.parameters()))
    for step in range(80):
        optimizer.zero_grad(set_to_none=False)
        backward(model, wfbp.rank(), step)
        optimizer.step()
    wanted = "warm-up" if optimizer.report()["schedule"] == "wfbp" else "installed"
    assert optimizer.report()["phase"] in (wanted, "installed"), optimizer.report()


# Frozen, shared, odd.


def thaw(start: int, end: int = 10**9) -> object:
    def before(model: nn.Module, step: int) -> None:
        model[0].requires_grad_(start <= step < end)  # type: ignore[index]

    return before


@check
def frozen_then_unfrozen() -> None:
    for start in range(1, 8):
        model = mlp(5, 7, 3)
        model[0].requires_grad_(False)
        check_training(model, square, adamw, before=thaw(start), steps=14)  # type: ignore[arg-type]


@check
def unfrozen_for_a_while() -> None:
    model = mlp(5, 7, 3)
    model[0].requires_grad_(False)
    check_training(model, square, adamw, before=thaw(3, 8), steps=24)  # type: ignore[arg-type]


@check
def unfrozen_on_one_rank_only() -> None:
    def backward(model: nn.Module, rank: int, step: int) -> None:
        model[0].requires_grad_(rank == 0 and step >= 4)  # type: ignore[index]
        square(model, rank, step)

    model = mlp(5, 7, 3)
    model[0].requires_grad_(False)
    check_training(model, backward, adamw, steps=14)


@check
def unfrozen_with_accumulation() -> None:
    model = mlp(5, 7, 3)
    model[0].requires_grad_(False)
    check_training(
        model,
        lambda m, r, s: passes(m, r, s, 2),
        adamw,
        before=thaw(4),  # type: ignore[arg-type]
        backward_passes_per_step=2,
    )


@check
def frozen_from_the_start_to_the_end() -> None:
    model = mlp(5, 7, 3)
    model.requires_grad_(False)
    model[2].requires_grad_(True)
    check_training(model, square, adamw)


@check
def tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 5)
            self.head = nn.Linear(5, 9, bias=False)
            self.head.weight = self.embed.weight
            self.double()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(torch.tanh(self.embed(tokens)))
            return out

    def backward(model: nn.Module, rank: int, step: int) -> None:
        tokens = torch.arange(4) + rank + step
        nn.functional.cross_entropy(model(tokens % 9), (tokens + 1) % 9).backward()

    check_training(Tied(), backward, adamw)


@check
def mixed_element_types() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kinds = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
            self.weights = nn.ParameterList(
                nn.Parameter(torch.randn(3 + k % 4, 3).to(kinds[k % 4])) for k in range(8)
            )

        def forward(self, rank: int, step: int) -> torch.Tensor:
            terms = [
                (w * data(step, rank, *w.shape).to(w.dtype)).double().square().sum()
                for w in self.weights
            ]
            return torch.stack(terms).sum()

    def backward(model: nn.Module, rank: int, step: int) -> None:
        model(rank, step).backward()

    def plain(params: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.01)  # type: ignore[arg-type]

    # Averages are rounded once to 8 bits: a step of one unit in the last place is allowed.
    check_training(Mixed(), backward, plain, tolerance=2.0**-7, steps=6)


@check
def channels_last() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 5, 3),
        nn.Tanh(),
        nn.Conv2d(5, 4, (2, 3)),
        nn.Flatten(),
        nn.Linear(4 * 5 * 4, 2),
    ).double()
    model = model.to(memory_format=torch.channels_last)
    assert not model[0].weight.is_contiguous()

    def backward(model: nn.Module, rank: int, step: int) -> None:
        x = data(step, rank, 2, 3, 8, 8).to(memory_format=torch.channels_last)
        model(x).square().mean().backward()

    check_training(model, backward, momentum)
    check_training(model, backward, momentum, zero=lambda m, opt: opt.zero_grad(set_to_none=False))


@check
def transposed_parameter() -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 5, dtype=torch.float64).t())
            self.gaps = nn.Parameter(torch.randn(4, 6, dtype=torch.float64)[:, ::2])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.weight).square().mean() + self.gaps.square().sum() * x.sum()

    def backward(model: nn.Module, rank: int, step: int) -> None:
        model(data(step, rank, 4, 5)).backward()

    check_training(Transposed(), backward, momentum)


@check
def empty_and_scalar_parameters() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))
            self.scalar = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
            self.one = nn.Parameter(torch.ones(1, 1, dtype=torch.float64))
            self.nothing = nn.Parameter(torch.zeros(0, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            used = self.empty.sum() + self.nothing.sum()
            return (x * self.scalar + self.one).square().mean() + used

    def backward(model: nn.Module, rank: int, step: int) -> None:
        model(data(step, rank, 4)).backward()

    check_training(Odd(), backward, momentum)


@check
def sparse_gradients() -> None:
    def make() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Embedding(9, 5, sparse=True), nn.Linear(5, 2)).double()

    def backward(model: nn.Module, rank: int, step: int) -> None:
        model(torch.tensor([rank, step % 9])).square().sum().backward()

    def plain(params: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)  # type: ignore[arg-type]

    check_training(make(), backward, plain, sparse_as_dense=True)
    model = make()
    optimizer = wfbp.torch.DistributedOptimizer(plain(model.parameters()), model.named_parameters())
    raises(
        ValueError,
        "0.weight is sparse",
        "sparse_as_dense=True",
        act=lambda: (backward(model, wfbp.rank(), 0), optimizer.step()),
    )


@check
def sum_instead_of_average() -> None:
    model = mlp(5, 7, 3)
    optimizer = wfbp.torch.DistributedOptimizer(momentum(model.parameters()), op=wfbp.Sum)
    for step in range(8):
        optimizer.zero_grad()
        square(model, wfbp.rank(), step)
        optimizer.synchronize()
        other = mlp(5, 7, 3)
        other.load_state_dict(model.state_dict())
        averaged(other, square, step, wfbp.size())
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            same(p.grad, q.grad * wfbp.size(), "sum", 1e-12)
        with optimizer.skip_synchronize():
            optimizer.step()


# Between backward and step.


@check
def clipping() -> None:
    model, reference = mlp(5, 7, 3), mlp(5, 7, 3)
    reference.load_state_dict(model.state_dict())
    optimizer = wfbp.torch.DistributedOptimizer(adamw(model.parameters()))
    plain = adamw(reference.parameters())
    for step in range(12):
        optimizer.zero_grad()
        square(model, wfbp.rank(), step)
        optimizer.synchronize()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        with optimizer.skip_synchronize():
            optimizer.step()
        averaged(reference, square, step, wfbp.size())
        wanted = nn.utils.clip_grad_norm_(reference.parameters(), 1e-3)
        plain.step()
        same(norm, wanted, "norm", 1e-12)
        compare(model, reference, f"step {step}", 1e-12)


@check
def clipping_before_averaging_is_an_error() -> None:
    for unused_first in (False, True):
        model = nn.ModuleList([nn.Linear(2, 2).double(), mlp(5, 7, 3)])
        optimizer = wfbp.torch.DistributedOptimizer(momentum(model.parameters()))
        square(model[1], wfbp.rank(), 0)
        if not unused_first:
            model[0](data(0, 0, 2)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        raises(
            RuntimeError,
            "changed in place",
            "optimizer.synchronize()",
            "skip_synchronize",
            act=optimizer.step,
        )


@check
def skip_synchronize_needs_synchronize() -> None:
    model = mlp(5, 7, 3)
    optimizer = wfbp.torch.DistributedOptimizer(momentum(model.parameters()))
    square(model, wfbp.rank(), 0)

    def act() -> None:
        with optimizer.skip_synchronize():
            optimizer.step()

    raises(RuntimeError, "synchronize()", act=act)
    optimizer.step()


@check
def synchronize_then_step() -> None:
    model, reference = mlp(5, 7, 3), mlp(5, 7, 3)
    reference.load_state_dict(model.state_dict())
    optimizer = wfbp.torch.DistributedOptimizer(adamw(model.parameters()))
    plain = adamw(reference.parameters())
    for step in range(6):
        optimizer.zero_grad()
        square(model, wfbp.rank(), step)
        optimizer.synchronize()
        optimizer.step()
        averaged(reference, square, step, wfbp.size())
        plain.step()
        compare(model, reference, f"step {step}", 1e-12)


@check
def named_operations_between_hooks_and_step() -> None:
    def backward(model: nn.Module, rank: int, step: int) -> None:
        square(model, rank, step)

    def zero(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        mean = wfbp.allreduce(torch.tensor([float(wfbp.rank())]), name="loss")
        assert mean.item() == (wfbp.size() - 1) / 2

    check_training(mlp(5, 7, 3), backward, momentum, zero=zero)
    model = mlp(5, 7, 3)
    optimizer = wfbp.torch.DistributedOptimizer(momentum(model.parameters()))
    for step in range(5):
        optimizer.zero_grad()
        loss = model(data(step, wfbp.rank(), 4, 5)).square().mean()
        loss.backward()
        wfbp.allreduce(loss.detach(), name="loss")
        wfbp.barrier()
        optimizer.step()


# Mixed precision.


def scaled(
    explicit: bool, infinite: tuple[int, ...] = (), fused: bool = False
) -> tuple[nn.Module, list[float]]:
    """Train with a gradient scaler; in some steps rank 0's loss is infinite."""
    torch.manual_seed(5)
    model, reference = mlp(5, 7, 3).float(), mlp(5, 7, 3).float()
    reference.load_state_dict(model.state_dict())
    make = (lambda p: torch.optim.Adam(p, lr=0.01, fused=True)) if fused else momentum
    optimizer = wfbp.torch.DistributedOptimizer(make(model.parameters()))
    plain = make(reference.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    scales = []
    for step in range(12):

        def loss_of(net: nn.Module, rank: int, step: int = step) -> torch.Tensor:
            loss = net(data(step, rank, 4, 5, dtype=torch.float32)).square().mean()
            return loss * float("inf") if step in infinite and rank == 0 else loss

        optimizer.zero_grad()
        scaler.scale(loss_of(model, wfbp.rank())).backward()
        if explicit:
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e3)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if step not in infinite:
            averaged(reference, lambda m, r, s: loss_of(m, r).backward(), step, wfbp.size())
            plain.step()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            same(p.detach(), q.detach(), f"step {step}", 1e-5)
    return model, scales


@check
def scaler_naive() -> None:
    scaled(explicit=False)


@check
def scaler_naive_with_fused_adam() -> None:
    scaled(explicit=False, fused=True)
    scaled(explicit=False, fused=True, infinite=(2, 3))


@check
def scaler_explicit() -> None:
    scaled(explicit=True)


@check
def scaler_with_an_infinity_on_one_rank() -> None:
    for explicit in (False, True):
        model, scales = scaled(explicit, infinite=(1, 5, 6))
        everybody = wfbp.allgather_object(scales)
        assert everybody == [scales] * wfbp.size(), everybody
        assert min(scales) < 1024.0, scales
        assert all(torch.isfinite(p).all() for p in model.parameters())


@check
def unscaling_before_averaging_is_an_error() -> None:
    model = mlp(5, 7, 3).float()
    optimizer = wfbp.torch.DistributedOptimizer(momentum(model.parameters()))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(data(0, 0, 4, 5, dtype=torch.float32)).sum()).backward()
    scaler.unscale_(optimizer)
    raises(RuntimeError, "changed in place", act=lambda: scaler.step(optimizer))


@check
def autocast() -> None:
    def backward(model: nn.Module, rank: int, step: int) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(data(step, rank, 4, 5, dtype=torch.float32)).square().mean()
        loss.backward()

    check_training(mlp(5, 7, 3).float(), backward, momentum, tolerance=1e-5)


@check
def nan_passes_through() -> None:
    model = mlp(5, 7, 3)
    optimizer = wfbp.torch.DistributedOptimizer(momentum(model.parameters()))
    for step in range(6):
        optimizer.zero_grad()
        factor = float("nan") if wfbp.rank() == 1 and step == 3 else 1.0
        (model[2](data(step, wfbp.rank(), 4, 7)) * factor).sum().backward()
        optimizer.synchronize()
        assert torch.isnan(model[2].weight.grad).all().item() is (step == 3)
        assert model[0].weight.grad is None
        if step != 3:
            with optimizer.skip_synchronize():
                optimizer.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())


if __name__ == "__main__":
    check.main()
