"""What programs do to gradients behind backward, in Python and beside it: noticed, or harmless."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable

import numpy as np
import pytest
import torch
from wfbp.torch.grad_guard import GradientGuard

Act = Callable[[torch.nn.Parameter], object]


def unscale(param: torch.nn.Parameter) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD([param], lr=0.1))


def unscale_by_one(param: torch.nn.Parameter) -> None:
    """Leaves values as they are, but a rank that finds an infinity skips its step alone."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD([param], lr=0.1))


def one_element(param: torch.nn.Parameter) -> None:
    grad(param).data.view(-1)[1234] += 1e-3


def reversed_rows(param: torch.nn.Parameter) -> None:
    grad(param).data.copy_(grad(param).data.flip(0).clone())


def reversed_columns(param: torch.nn.Parameter) -> None:
    grad(param).data.copy_(grad(param).data.flip(1).clone())


def beside_python(param: torch.nn.Parameter) -> None:
    """As C++ does: only PyTorch's own count tells, far from where samples are taken."""
    with torch._C.DisableTorchFunctionSubclass():
        grad(param)[-1].add_(1.0)


def other_data(param: torch.nn.Parameter) -> None:
    grad(param).data = torch.ones(40, 150)


def doubled(param: torch.nn.Parameter) -> None:
    param.grad = grad(param) * 2


def grad(param: torch.nn.Parameter) -> torch.Tensor:
    assert param.grad is not None
    return param.grad


CHANGES: dict[str, Act] = {
    "data.mul_": lambda p: grad(p).data.mul_(2),
    "data.clamp_": lambda p: grad(p).data.clamp_(-0.01, 0.01),
    "mul_": lambda p: grad(p).mul_(2),
    "foreach": lambda p: torch._foreach_mul_([grad(p)], 2.0),
    "foreach of data": lambda p: torch._foreach_mul_([grad(p).data], 2.0),
    "numpy": lambda p: np.multiply(grad(p).numpy(), 2, out=grad(p).numpy()),
    "out": lambda p: torch.mul(torch.ones(40, 150), 2, out=grad(p)),
    "view": lambda p: grad(p).view(-1).data.mul_(2),
    "rows": lambda p: [row.data.mul_(2) for row in grad(p)],
    "dlpack": lambda p: torch.from_dlpack(grad(p)).mul_(2),  # type: ignore[attr-defined]
    "storage": lambda p: grad(p).untyped_storage().fill_(1),
    "address": lambda p: ctypes.memset(grad(p).data_ptr() + 6400, 1, 4),
    "operator": lambda p: torch.ops.aten.mul_.Scalar(grad(p), 2),
    "clip_grad_value_": lambda p: torch.nn.utils.clip_grad_value_([p], 1e-3),
    "clip_grad_norm_": lambda p: torch.nn.utils.clip_grad_norm_([p], 1e-3),
    "compiled": lambda p: torch.compile(lambda q: q.grad.data.mul_(2), backend="eager")(p),
    **{
        act.__name__: act
        for act in (
            unscale,
            unscale_by_one,
            one_element,
            reversed_rows,
            reversed_columns,
            beside_python,
            other_data,
            doubled,
        )
    },
}

READS: dict[str, Act] = {
    "nothing": lambda p: None,
    "norm": lambda p: grad(p).norm(),
    "data": lambda p: grad(p).data.norm(),
    "numpy": lambda p: float(np.asarray(grad(p)).sum()),
    "shown": lambda p: repr(grad(p)),
    "copied": lambda p: copy.deepcopy(grad(p)),
    "named": lambda p: torch.add(input=grad(p), other=1),
    "shape": lambda p: (grad(p).shape, len(grad(p)), grad(p).nbytes),
    "total": lambda p: torch.nn.utils.get_total_norm([grad(p)]),
    "compiled": lambda p: torch.compile(lambda q: q.grad.norm(), backend="eager")(p),
}


def announce(guard: GradientGuard, index: int, param: torch.nn.Parameter) -> None:
    """As the hook does."""
    found = grad(param)
    found.__class__ = torch.Tensor
    guard.grads[index], guard.versions[index] = found, found._version
    if index in guard.wanted:
        guard.sample(index, found)
    guard.uses.pop(index, None)
    found.__class__ = guard.watched


def begun(like: str = "dense") -> tuple[GradientGuard, torch.nn.Parameter]:
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(40, 150))
    param.square().sum().backward()
    if like == "transposed":
        param.grad = grad(param).clone().t().contiguous().t()
    elif like == "shifted":
        param.grad = torch.cat([torch.zeros(1), grad(param).detach().view(-1)])[1:].view(40, 150)
    guard = GradientGuard("SGD", ["weight"])
    announce(guard, 0, param)
    return guard, param


@pytest.mark.parametrize(
    ("name", "like"),
    [(name, "dense") for name in CHANGES]
    + [(n, k) for k in ("transposed", "shifted") for n in ("data.mul_", "foreach of data")],
)
def test_a_change_is_an_error(name: str, like: str) -> None:
    guard, param = begun(like)
    CHANGES[name](param)
    with pytest.raises(RuntimeError, match=r"SGD: the gradient of weight was (changed|replaced)"):
        guard.check([param])
    guard.clear()
    assert type(param.grad) is torch.Tensor


@pytest.mark.parametrize("name", READS)
def test_a_look_is_none(name: str) -> None:
    guard, param = begun()
    before = grad(param).clone()
    READS[name](param)
    assert guard.check([param]) == []
    guard.clear()
    assert type(param.grad) is torch.Tensor
    assert torch.equal(grad(param), before)


def test_what_was_changed_before_the_last_pass_is_what_it_saw() -> None:
    guard, param = begun()
    grad(param).data.mul_(2)
    grad(param).clamp_(-1, 1)
    param.sum().backward()
    announce(guard, 0, param)
    assert guard.check([param]) == []


def test_gradients_that_are_parts_of_one_tensor_may_be_accumulated() -> None:
    """PyTorch takes over the parts as they are, and they count changes in place together."""
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
    guard = GradientGuard("SGD", ["a", "b", "c"])
    for index, param in enumerate(params):
        param.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda param, index=index: announce(guard, index, param)
        )
    for _ in range(3):
        (torch.cat(params[:2]) * torch.arange(6.0)).sum().backward()
        params[2].sum().backward()
    assert grad(params[0]).untyped_storage().data_ptr() == (
        grad(params[1]).untyped_storage().data_ptr()
    )
    assert guard.check(params) == []
    for changed in (0, 1):
        with torch._C.DisableTorchFunctionSubclass():
            grad(params[changed]).add_(1.0)
        with pytest.raises(RuntimeError, match=r"the gradient of [ab] was changed in place"):
            guard.check(params)


def test_sparse_gradients() -> None:
    for change in (True, False):
        param = torch.nn.Parameter(torch.ones(50, 3))
        torch.nn.functional.embedding(torch.tensor([2, 7, 7]), param, sparse=True).sum().backward()
        guard = GradientGuard("SGD", ["weight"])
        announce(guard, 0, param)
        if change:
            grad(param)._values().mul_(2)
            with pytest.raises(RuntimeError, match="changed in place"):
                guard.check([param])
        else:
            grad(param).to_dense().mul_(2)
            assert guard.check([param]) == []


def test_changes_beside_python_where_most_is_zero() -> None:
    """Of several gradients one or more are sampled in every step, never where they are zero."""
    params = [torch.nn.Parameter(torch.zeros(400, 16)) for _ in range(12)]
    guard = GradientGuard("SGD", [f"p{k}" for k in range(12)])
    for step in range(8):
        memory = []
        for index in reversed(range(12)):
            values = torch.zeros(400, 16)
            if index in (3, 9):
                values[:] = 1 + step
            memory.append(values.numpy())
            params[index].grad = values
            announce(guard, index, params[index])
        assert guard.check(params) == []
        for values in memory:
            values *= 0.5
        with pytest.raises(RuntimeError, match=r"the gradient of p(3|9) was changed in place"):
            guard.check(params)
        guard.clear()
