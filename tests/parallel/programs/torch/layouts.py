"""Parameters that are frozen, shared, sparse, empty, or oddly laid out."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

import wfbp
import wfbp.torch
from tests.parallel.programs.harness import Checks, raises
from tests.parallel.programs.torch.training import (
    adamw,
    check_training,
    data,
    mlp,
    momentum,
    same,
    square,
    twins,
)

check = Checks()


@check
def unfrozen_on_one_rank_only() -> None:
    def backward(model: nn.Module, rank: int, step: int) -> None:
        model[0].requires_grad_(rank == 0 and step >= 4)  # type: ignore[index]
        square(model, rank, step)

    model = mlp(5, 7, 3)
    model[0].requires_grad_(False)
    check_training(model, backward, adamw, steps=14)


class Waves(nn.Module):
    """Complex parameters of several kinds between real ones."""

    def __init__(self, kind: torch.dtype = torch.complex128) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Linear(5, 7).double()
        self.transposed = nn.Parameter(torch.randn(3, 7, dtype=kind).t())
        self.phase = nn.Parameter(torch.randn((), dtype=kind))
        self.empty = nn.Parameter(torch.zeros(0, 2, dtype=kind))
        self.unused = nn.Parameter(torch.randn(2, dtype=kind))
        self.angle = nn.Parameter(torch.randn(1, dtype=torch.float64))
        self.large = nn.Parameter(torch.randn(3, 6001, dtype=kind) / 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x)).to(self.phase.dtype)
        wave = (hidden @ self.transposed.conj()) * self.phase
        # Its gradient is the imaginary part of a lazy conjugate.
        turned = torch.complex(torch.ones_like(self.angle), self.angle).conj()
        out = wave.abs().square().mean() + (turned * wave.mean()).real.square().sum()
        return out + (wave @ self.large.conj() + self.empty.sum()).imag.square().mean()


def waves(model: nn.Module, rank: int, step: int) -> None:
    model(data(step, rank, 4, 5)).backward()


@check
def complex_parameters() -> None:
    model, _ = check_training(Waves(), waves, adamw)
    assert model.phase.grad.dtype is torch.complex128
    check_training(
        Waves(),
        waves,
        momentum,
        steps=6,
        zero=lambda m, optimizer: optimizer.zero_grad(set_to_none=False),
        optimizer_sharding=False,
    )
    narrow = wfbp.torch.Compression.bf16
    model = Waves(torch.complex64)
    check_training(model, waves, momentum, steps=6, tolerance=0.1, compression=narrow)


@check
def complex_parameters_that_are_lazy_conjugates() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wave = nn.Parameter(torch.randn(7, dtype=torch.complex128).conj())
            self.linear = nn.Linear(7, 7).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.linear(x) * self.wave).sum().abs().square()

    model = Lazy()
    assert model.wave.is_conj()
    wfbp.torch.broadcast_parameters(model.state_dict(), root_rank=wfbp.size() - 1)
    check_training(model, lambda m, r, s: m(data(s, r, 7)).backward(), momentum)


@check
def complex_and_sparse() -> None:
    """As a program may set gradients; PyTorch's embeddings are real."""

    def backward(model: nn.Module, rank: int, step: int) -> None:
        rows = torch.tensor([[rank, step % 9, step % 9]])
        values = model.weight.detach()[rows[0]] * data(step, rank, 3, 1)
        model.weight.grad = torch.sparse_coo_tensor(
            rows, values.conj(), (9, 5), check_invariants=True
        )

    def make() -> nn.Module:
        torch.manual_seed(3)
        model = nn.Module()
        model.weight = nn.Parameter(torch.randn(9, 5, dtype=torch.complex128))
        return model

    check_training(make(), backward, sgd, schedule="layerwise")
    check_training(make(), backward, sgd, sparse_as_dense=True)


sgd = partial(torch.optim.SGD, lr=0.1)


def sparse_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(9, 5, sparse=True), nn.Linear(5, 2)).double()


@check
def sparse_gradients() -> None:
    def backward(model: nn.Module, rank: int, step: int) -> None:
        model(torch.tensor([rank, step % 9])).square().sum().backward()

    check_training(sparse_model(), backward, sgd, sparse_as_dense=True)
    model = sparse_model()
    optimizer = wfbp.torch.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), schedule="ps"
    )
    raises(
        ValueError,
        "0.weight is sparse",
        "sparse_as_dense=True",
        "schedule='oasr'",
        act=lambda: (backward(model, wfbp.rank(), 0), optimizer.step()),
    )


@check
def sparse_gradients_that_stay_sparse() -> None:
    """Some ranks, some steps, beside dense ones; clipped; for an optimizer that wants no other."""

    def backward(model: nn.Module, rank: int, step: int) -> None:
        if step % 4 == 1 and rank == 0:
            return  # no gradient at all here
        rows = torch.tensor([rank, step % 9, step % 9])
        found = model[0](rows) if step % 4 != 3 else model[0].weight.sum(0)
        model[1](found).square().sum().backward()

    model, _ = check_training(sparse_model(), backward, sgd, schedule="layerwise")
    assert model[0].weight.grad is None or not model[0].weight.grad.is_sparse  # step 11 was dense
    check_training(sparse_model(), backward, sgd, schedule="oasr")
    for as_dense in (False, True):
        both = twins(
            lambda params: torch.optim.SparseAdam(list(params), lr=0.1),
            nn.Embedding(9, 5, sparse=True).double(),
            sparse_as_dense=as_dense,
            schedule="oasr",
        )
        model, optimizer, reference, whole = both
        for step in range(8):
            optimizer.zero_grad()
            whole.zero_grad()
            for rank in range(wfbp.size()):
                rows = torch.tensor([rank, step % 9, step % 9])
                (reference(rows).square().sum() / wfbp.size()).backward()
                if rank == wfbp.rank():
                    model(rows).square().sum().backward()
            norm = optimizer.clip_grad_norm_(0.5)
            grad = reference.weight.grad.coalesce()
            wanted = grad.values().norm()
            grad.values().mul_(min(1.0, 0.5 / (float(wanted) + 1e-6)))
            reference.weight.grad = grad
            same(norm, wanted, f"norm of step {step}", 1e-9)
            optimizer.step()
            whole.step()
            same(model.weight.detach(), reference.weight.detach(), f"step {step}", 1e-9)
        assert model.weight.grad.is_sparse


@check
def gradients_replaced_in_another_order() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2)).double()
    both = twins(model=model.to(memory_format=torch.channels_last))

    def backward(net: nn.Module, rank: int, step: int) -> None:
        net(data(step, rank, 2, 3, 4, 4)).square().mean().backward()

    for step in range(10):
        both.optimizer.zero_grad()
        both.backward(step, backward)
        both.optimizer.synchronize()
        for p in (*both.model.parameters(), *both.reference.parameters()):
            p.grad = p.grad.mean().expand_as(p) if step % 2 else p.grad.contiguous() * 2
        both.step_synchronized()
        both.plain.step()
    both.equal("at the end", 1e-11)
