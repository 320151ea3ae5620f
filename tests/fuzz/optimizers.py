"""The optimizers of random programs: PyTorch's, and some that users write."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import optim


class _Simple(optim.Optimizer):
    """Gradient descent with momentum; what its subclasses do to the gradient is ``direction``."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.before()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(self.direction(p), alpha=-group["lr"])
        return loss

    def before(self) -> None:
        """Called once a step."""

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        assert p.grad is not None
        return p.grad


class _ByParameter(_Simple):
    """A rate for each parameter, kept in a dictionary by the parameter itself."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        every = [p for group in self.param_groups for p in group["params"]]
        self.rates = {p: 0.5 + k % 3 for k, p in enumerate(every)}

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        return p.grad * self.rates.get(p, 1.0)  # type: ignore[operator]


class _ById(_Simple):
    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        every = [p for group in self.param_groups for p in group["params"]]
        self.rates = {id(p): 0.5 + k % 3 for k, p in enumerate(every)}

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        return p.grad * self.rates.get(id(p), 1.0)  # type: ignore[operator]


class _ByAttribute(_Simple):
    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        for k, p in enumerate(p for group in self.param_groups for p in group["params"]):
            p.lr_scale = 0.5 + k % 3

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        return p.grad * getattr(p, "lr_scale", 1.0)  # type: ignore[operator]


class _Float32State(_Simple):
    """Momentum in float32 or wider, whatever the parameter's type."""

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(p.dtype, torch.float32)
        state = self.state[p]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(p, dtype=wide)
        state["momentum"].mul_(0.5).add_(p.grad.to(wide))  # type: ignore[union-attr]
        return state["momentum"].to(p.dtype)


class _Normed(_Simple):
    """Each tensor's gradient over its own norm, about as LAMB."""

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        assert p.grad is not None
        state = self.state[p]
        state["seen"] = state.get("seen", 0) + 1
        assert not torch.is_autocast_enabled("cpu")
        return p.grad / (p.grad.norm() + 0.1)


class _Global(_Simple):
    """All gradients over the norm of all of them: couples its tensors."""

    def before(self) -> None:
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        powers = [g.double().square().sum() for g in grads]
        self.norm = float(sum(powers)) ** 0.5

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        return p.grad / (self.norm + 0.1)  # type: ignore[operator]


class _Counting(_Simple):
    """A rate that falls with a count kept in the group, as schedule-free optimizers do."""

    def before(self) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        return p.grad / self.param_groups[0]["count"] ** 0.5  # type: ignore[operator]


class _Replacing(_Simple):
    """Writes to new memory instead of the parameter's."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - group["lr"] * p.grad
        return loss


class _Bound(_Simple):
    """Calls its own method by an attribute."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        self._update = self._single

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        self._update()
        return loss

    def _single(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])


class _Swapping(_Simple):
    """Keeps an average of the parameters, which ``swap()`` exchanges for them."""

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        state = self.state[p]
        if "average" not in state:
            state["average"] = p.detach().clone()
        state["average"].lerp_(p, 0.5)
        return p.grad  # type: ignore[return-value]

    @torch.no_grad()
    def swap(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if "average" in self.state.get(p, {}):
                    kept = p.clone()
                    p.copy_(self.state[p]["average"])
                    self.state[p]["average"].copy_(kept)


class _ByPlace(_Simple):
    """Treats groups by their place, and by the rate of the first."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        decay = 1 - 0.1 * self.param_groups[0]["lr"]
        for place, group in enumerate(self.param_groups):
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(decay).add_(p.grad, alpha=-group["lr"] / (1 + place))
        return loss


class _Scaled(_Simple):
    """Reads an attribute that the program changes between steps."""

    scale = 1.0

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        return p.grad * self.scale  # type: ignore[operator]


def _counted(step: Any) -> Any:
    @functools.wraps(step)
    def outer(self: Any, *args: Any, **kwargs: Any) -> Any:
        group = self.param_groups[0]
        group["calls"] = group.get("calls", 0) + 1
        return step(self, *args, **kwargs)

    return outer


class _Decorated(optim.SGD):
    """PyTorch's own, with a step that a decorator counts in a group."""

    step = _counted(optim.SGD.step)


class _Around(optim.Optimizer):
    """Holds another optimizer, whose groups and state it shows as its own."""

    def __init__(self, base: optim.Optimizer) -> None:
        self.base = base

    param_groups = property(lambda self: self.base.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.base.state)  # type: ignore[assignment]
    defaults = property(lambda self: self.base.defaults)  # type: ignore[assignment]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.base.add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        return self.base.step(closure)  # type: ignore[arg-type]


class _Vector(_Simple):
    """Counts its steps in a tensor of one element, beside state of the parameter's shape."""

    def before(self) -> None:
        assert all("sum" in state for state in self.state.values())

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        state = self.state[p]
        if not state:
            state["count"] = torch.zeros(1)
            state["sum"] = torch.zeros_like(p)
        state["count"] += 1
        state["sum"] += p.grad
        return state["sum"] / float(state["count"])  # type: ignore[no-any-return]


def _patched(groups: Any) -> optim.Optimizer:
    """With a step that was replaced on the instance, and counts in a group."""
    optimizer = optim.SGD(groups, 0.05, momentum=0.5)
    step = optimizer.step

    def counted(self: optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        group = self.param_groups[0]
        group["calls"] = group.get("calls", 0) + 1
        return step(closure)  # type: ignore[arg-type]

    # A method, because PyTorch's schedulers of rates look for its function.
    optimizer.step = MethodType(counted, optimizer)  # type: ignore[method-assign]
    return optimizer


class _NaN(_Simple):
    """Has settings that are no numbers."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        optim.Optimizer.__init__(self, params, {"lr": lr, "clip": math.nan, "ends": (0, math.nan)})


class _Keeping(_Simple):
    """Keeps the last gradient, about as diffGrad's original code does: itself, or a view of it."""

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        assert p.grad is not None
        before, grad = self.state[p].get("before"), p.grad
        self.state[p]["before"] = grad if p.dim() > 1 else grad.detach()
        p.grad = None  # or the next backward pass of this rank would change what is kept
        return grad if before is None else grad - 0.3 * before


class _OwnMethods(_Simple):
    """Has methods that use gradients beside ``step()``, or run backward."""

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        assert p.grad is not None
        total = self.state[p].get("squares")
        return p.grad if total is None else p.grad / (1 + total)

    @torch.no_grad()
    def add(self) -> None:
        """Add up squares of gradients."""
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None:
                square = (p.grad * p.grad.conj()).real
                self.state[p]["squares"] = self.state[p].get("squares", 0) + square

    def finish(self) -> None:
        """Step by a method."""
        self.step()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


@dataclass(frozen=True)
class Kind:
    """One kind of optimizer.

    Args:
        make: from parameter groups.
        nature: ``elementwise``, ``tensor`` or ``coupled``: what decoupling.md says or ought to.
        closure: whether it needs one.
        matrices: whether it takes matrices only.
        rough: whether rounding is amplified: a relative tolerance, or 0.
    """

    make: Callable[[Iterable[Any]], optim.Optimizer]
    nature: str = "elementwise"
    closure: bool = False
    matrices: bool = False
    rough: float = 0.0


# A larger epsilon than by default: with that, what rounding leaves of zero makes full steps.
_E = {"eps": 1e-3}

KINDS: dict[str, Kind] = {
    "sgd": Kind(lambda g: optim.SGD(g, 0.05)),
    "momentum": Kind(lambda g: optim.SGD(g, 0.05, momentum=0.9, weight_decay=0.01)),
    "nesterov": Kind(lambda g: optim.SGD(g, 0.05, momentum=0.9, nesterov=True, foreach=True)),
    "dampened": Kind(lambda g: optim.SGD(g, 0.05, momentum=0.5, dampening=0.3, maximize=True)),
    "fused sgd": Kind(lambda g: optim.SGD(g, 0.05, fused=True)),
    "adam": Kind(lambda g: optim.Adam(g, 0.02, **_E)),
    "rate in a tensor": Kind(lambda g: optim.AdamW(g, torch.tensor(0.02), foreach=False, **_E)),
    "decoupled decay": Kind(
        lambda g: optim.NAdam(g, 0.02, weight_decay=0.05, decoupled_weight_decay=True, **_E)
    ),
    "amsgrad": Kind(lambda g: optim.Adam(g, 0.02, amsgrad=True, foreach=False, **_E)),
    "fused adam": Kind(lambda g: optim.Adam(g, 0.02, fused=True, **_E)),
    "adamw": Kind(lambda g: optim.AdamW(g, 0.02, weight_decay=0.1, **_E)),
    "foreach adamw": Kind(lambda g: optim.AdamW(g, 0.02, foreach=True, maximize=True, **_E)),
    "adamax": Kind(lambda g: optim.Adamax(g, 0.02, **_E)),
    "nadam": Kind(lambda g: optim.NAdam(g, 0.02, **_E)),
    "radam": Kind(lambda g: optim.RAdam(g, 0.02, **_E)),
    "rmsprop": Kind(lambda g: optim.RMSprop(g, 0.02, momentum=0.5, **_E)),
    "centered": Kind(lambda g: optim.RMSprop(g, 0.02, momentum=0.5, centered=True, **_E)),
    "adagrad": Kind(lambda g: optim.Adagrad(g, 0.05, lr_decay=0.01, **_E)),
    "adadelta": Kind(lambda g: optim.Adadelta(g, 0.5, **_E)),
    "asgd": Kind(lambda g: optim.ASGD(g, 0.05, t0=3)),
    "rprop": Kind(lambda g: optim.Rprop(g, 0.01), rough=1e-6),
    "adafactor": Kind(lambda g: optim.Adafactor(g, 0.05, eps=(1e-3, 1e-3)), "tensor"),
    "muon": Kind(lambda g: optim.Muon(g, 0.02), "tensor", matrices=True, rough=0.05),
    "lbfgs": Kind(lambda g: optim.LBFGS(g, 0.1, max_iter=3), "coupled", closure=True, rough=1e-4),
    "wolfe": Kind(
        lambda g: optim.LBFGS(g, 0.5, max_iter=3, line_search_fn="strong_wolfe"),
        "coupled",
        closure=True,
        rough=1e-4,
    ),
    "by parameter": Kind(_ByParameter, "own"),
    "by id": Kind(_ById, "own"),
    "by attribute": Kind(_ByAttribute, "own"),
    "float32 state": Kind(_Float32State),
    "normed": Kind(_Normed, "tensor"),
    "global": Kind(_Global, "coupled"),
    "counting": Kind(_Counting, "own"),
    "replacing": Kind(_Replacing, "tensor"),
    "bound": Kind(_Bound, "own"),
    "swapping": Kind(_Swapping, "own"),
    "by place": Kind(_ByPlace, "own"),
    "scaled": Kind(_Scaled, "own"),
    "decorated": Kind(lambda g: _Decorated(g, 0.05), "own"),
    "around": Kind(lambda g: _Around(optim.SGD(g, 0.05, momentum=0.9)), "own"),
    "nan": Kind(_NaN, "own"),
    "vector": Kind(_Vector, "own"),
    "patched": Kind(_patched, "own"),
    "keeping": Kind(_Keeping, "own"),
    "own methods": Kind(_OwnMethods, "own"),
}
"""``own`` means that wfbp may judge as it likes, as long as the results are right."""
