"""Trains a model on this rank and, beside it, what one process would make of all ranks' work."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from mpi4py import MPI

import wfbp
import wfbp.torch
from wfbp.core.planners import ALL_REDUCE_SCHEDULES as ALL_REDUCE
from wfbp.runtime import process

Backward = Callable[[torch.nn.Module, int, int], None]
"""``(model, rank, step)``: what one rank computes in one step, up to the gradients."""


def nothing(model: torch.nn.Module, step: int) -> None: ...


def averaged(model: torch.nn.Module, backward: Backward, step: int, ranks: int) -> None:
    """Set ``p.grad`` to the mean over the ranks' gradients, None where no rank has one."""
    params = list(model.parameters())
    sums: list[torch.Tensor | None] = [None] * len(params)
    flags = [p.requires_grad for p in params]
    for rank in range(ranks):
        for p in params:
            p.grad = None
        backward(model, rank, step)
        for k, p in enumerate(params):
            if p.grad is not None:
                grad = p.grad.to_dense() if p.grad.is_sparse else p.grad
                wide = widened(grad)
                sums[k] = wide if sums[k] is None else sums[k] + wide
            p.requires_grad_(flags[k])
    for p, total in zip(params, sums, strict=True):
        p.grad = None if total is None else (total / ranks).to(p.dtype)


class Twins(NamedTuple):
    """A model that the ranks train, and its copy that one process trains on all their data."""

    model: Any
    optimizer: Any
    reference: Any
    plain: Any

    @property
    def nets(self) -> tuple[Any, Any]:
        """Both models."""
        return self.model, self.reference

    def backward(self, step: int, backward: Backward | None = None) -> None:
        """Gradients of both: this rank's, and the average; ``square`` is the usual pass."""
        backward = backward or square
        backward(self.model, wfbp.rank(), step)
        averaged(self.reference, backward, step, wfbp.size())

    def add(self, step: int) -> None:
        """Add the gradients of a pass to those of passes before."""
        square(self.model, wfbp.rank(), step)
        for rank in range(wfbp.size()):
            loss = self.reference(data(step, rank, 4, 5)).square().mean() / wfbp.size()
            loss.backward()

    def step(self, step: int, backward: Backward | None = None) -> None:
        """A whole step of both, without looking at parameters."""
        backward = backward or square
        self.optimizer.zero_grad()
        backward(self.model, wfbp.rank(), step)
        self.optimizer.step()
        self.follow(step, backward)

    def steps(self, count: int, where: str = "", backward: Backward | None = None) -> Iterator[int]:
        """Steps of both; the caller's part comes between gradients and updates."""
        for step in range(count):
            self.optimizer.zero_grad()
            self.backward(step, backward)
            yield step
            self.update()
            self.equal(f"{where}, step {step}")

    def follow(self, step: int, backward: Backward | None = None) -> None:
        """The copy's part of a step."""
        averaged(self.reference, backward or square, step, wfbp.size())
        self.plain.step()

    def update(self) -> None:
        """Step both optimizers."""
        self.optimizer.step()
        self.plain.step()

    def step_synchronized(self) -> None:
        """Update without averaging again."""
        with self.optimizer.skip_synchronize():
            self.optimizer.step()

    def clip(self, limit: float, *norm_type: float) -> tuple[torch.Tensor, torch.Tensor]:
        """The norms of both, whose gradients are clipped."""
        found = self.optimizer.clip_grad_norm_(limit, *norm_type)
        return found, torch.nn.utils.clip_grad_norm_(self.reference.parameters(), limit, *norm_type)

    def train(self, steps: range) -> None:
        """Whole steps; parameters are compared when :func:`due`."""
        for step in steps:
            self.step(step)
            if due(step, steps.stop):
                self.compare(f"step {step}")

    def compare(self, where: str, tolerance: float = 1e-12) -> None:
        """See :func:`compare`."""
        compare(self.model, self.reference, where, tolerance)

    def equal(self, where: str = "", tolerance: float = 1e-9) -> None:
        """Both have the same parameters, but for rounding."""
        equal(self.model.parameters(), self.reference.parameters(), where, tolerance)


def twins(
    make: Callable[[Any], torch.optim.Optimizer] | None = None,
    model: torch.nn.Module | None = None,
    *,
    named: bool = False,
    library: Any = wfbp.torch,
    **wrap: Any,
) -> Twins:
    """A model as it is on this rank, with its copy; ``momentum`` is the usual optimizer."""
    make, model = make or momentum, mlp(5, 7, 3) if model is None else model
    reference = copy.deepcopy(model)
    optimizer = library.DistributedOptimizer(
        make(model.parameters()), model.named_parameters() if named else None, **wrap
    )
    return Twins(model, optimizer, reference, make(reference.parameters()))


def equal(
    found: Iterable[torch.Tensor],
    wanted: Iterable[torch.Tensor],
    where: str = "",
    tolerance: float = 1e-9,
) -> None:
    """Two lists of parameters are the same, but for rounding."""
    for k, (p, q) in enumerate(zip(found, wanted, strict=True)):
        same(p.detach(), q.detach(), f"{where}: parameter {k}", tolerance)


def check_training(
    model: torch.nn.Module,
    backward: Backward,
    make: Callable[[Any], torch.optim.Optimizer],
    *,
    steps: int = 12,
    before: Callable[[torch.nn.Module, int], None] = nothing,
    tolerance: float = 1e-12,
    zero: Callable[[torch.nn.Module, Any], None] = lambda model, optimizer: optimizer.zero_grad(),
    named: bool = True,
    **wrap: Any,
) -> tuple[torch.nn.Module, Any]:
    """Both must have the same parameters and the same gradients missing, whenever compared."""
    both = twins(make, model, named=named, **wrap)
    for step in range(steps):
        before(model, step)
        before(both.reference, step)
        both.follow(step, backward)
        zero(model, both.optimizer)
        backward(model, wfbp.rank(), step)
        both.optimizer.step()
        if due(step, steps):
            both.compare(f"step {step}", tolerance)
    return model, both.optimizer


def due(step: int, steps: int) -> bool:
    """Whether to compare parameters after this step: after some, and after the last one.

    To compare is to wait for them; after the other steps they still travel when the next begins.
    """
    return step % 3 == 2 or step == steps - 1


def pair() -> tuple[torch.nn.Sequential, torch.nn.Sequential]:
    """Two models with the same parameters."""
    model = mlp(5, 7, 3)
    return model, copy.deepcopy(model)


def compare(
    model: torch.nn.Module, reference: torch.nn.Module, where: str, tolerance: float
) -> None:
    """Parameters equal, and gradients: equal, or None in both.

    Where the schedule decouples, or may (``auto``), a rank keeps its own gradients.
    """
    whole = process.current("compare()").config.schedule in ALL_REDUCE
    expected = dict(reference.named_parameters())
    for name, p in model.named_parameters():
        q = expected[name]
        same(p.detach(), q.detach(), f"{where}: {name}", tolerance)
        if not whole:
            continue
        assert (p.grad is None) == (q.grad is None), (
            f"{where}: gradient of {name} is {'None' if p.grad is None else 'there'}"
        )
        if p.grad is not None and q.grad is not None:
            same(p.grad, q.grad, f"{where}: gradient of {name}", tolerance)


def same(found: torch.Tensor, wanted: torch.Tensor, where: str, tolerance: float = 0.0) -> None:
    """Two tensors are equal up to a tolerance relative to the largest entry."""
    assert found.shape == wanted.shape, f"{where}: shape {found.shape}, not {wanted.shape}"
    assert found.dtype == wanted.dtype, f"{where}: {found.dtype}, not {wanted.dtype}"
    if found.numel() == 0:
        return
    if found.is_sparse:
        found = found.to_dense()
    worst = (widened(found) - widened(wanted)).abs().max().item()
    limit = tolerance * max(1e-3, widened(wanted).abs().max().item())
    assert worst <= limit, f"{where}: differs by {worst:g}, more than {limit:g}"


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """In float64 or complex128."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float64))


def data(step: int, rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """This rank's numbers in this step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def mlp(*widths: int) -> torch.nn.Sequential:
    """Linear layers with tanh between them, in float64."""
    layers: list[torch.nn.Module] = []
    for a, b in pairwise(widths):
        layers += [torch.nn.Linear(a, b), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers[:-1]).double()


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.1)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def square(model: torch.nn.Module, rank: int, step: int) -> None:
    """The backward pass of a network with five inputs."""
    model(data(step, rank, 4, 5)).square().mean().backward()


class Branches(torch.nn.Module):
    """A trunk and three branches, of which a step uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = torch.nn.Linear(5, 7)
        self.branches = torch.nn.ModuleList(torch.nn.Linear(7, 3) for _ in range(3))
        self.double()

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        hidden = torch.tanh(self.trunk(x))
        out = hidden.sum()
        for k in chosen:
            out = out + self.branches[k](hidden).square().sum()
        return out


def passes(model: torch.nn.Module, rank: int, step: int, count: int) -> None:
    for k in range(count):
        (model(data(10 * step + k, rank, 4, 5)).square().mean() / count).backward()


SCHEDULES = ("independent", "auto")
"""For checks that set schedules themselves: one that decouples every tensor, and the usual one."""


class Descent(torch.optim.Optimizer):
    """Plain gradient descent, as a user writes it."""

    def __init__(self, params: Any, lr: float = 0.1, **more: Any) -> None:
        super().__init__(params, {"lr": lr, **more})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-self.rate(group))
        return loss

    def rate(self, group: dict[str, Any]) -> float:
        return float(group["lr"])


def agree(model: torch.nn.Module, where: str = "") -> None:
    """All ranks have the same parameters."""
    for name, param in model.named_parameters():
        for theirs in MPI.COMM_WORLD.allgather(param.detach().clone()):
            same(param.detach(), theirs, f"{where} {name} of two ranks")


def refused(act: Callable[[], object], *parts: str) -> bool:
    """Whether an action raises an error with these parts on every rank; fails if only some do."""
    problem = ""
    try:
        act()
    except (RuntimeError, ValueError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
    problems = MPI.COMM_WORLD.allgather(problem)
    assert all(problems) or not any(problems), f"only some ranks raised: {problems}"
    for part in parts if problem else ():
        assert part in problem, f"{part!r} is not in {problem}"
    return bool(problem)


def assign(model: torch.nn.Module, rank: int, step: int, how: str = "replaced") -> None:
    """Set gradients as ``torch.autograd.grad`` returns them, without a hook."""
    params = list(model.parameters())
    loss = model(data(step, rank, 4, 5)).square().mean()
    for p, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
        if how == "replaced" or p.grad is None:
            p.grad = grad
        else:  # PyTorch counts no changes of ``data``
            (p.grad.data if how == "data" else p.grad).copy_(grad)
