"""What optimizers are, found by experiment, and that nobody notices the experiment."""

from __future__ import annotations

import copy
import random
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from wfbp.torch.optimizer_probe import UpdateCoupling, probe_optimizer

Optimizer = torch.optim.Optimizer
SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW


def parameters() -> list[nn.Parameter]:
    """Tensors of no, 1, 2 and 4 dimensions, larger and smaller than a stand-in."""
    shapes = [(), (7,), (300, 200), (3, 2), (64, 3, 7, 7)]
    return [nn.Parameter(torch.ones(shape)) for shape in shapes]


class Plain(Optimizer):
    """Descends; what follows derives from it."""

    def __init__(self, params: Any, lr: float = 0.1, **defaults: Any) -> None:
        super().__init__(params, {"lr": lr, **defaults})

    def own(self) -> Iterator[tuple[dict[str, Any], nn.Parameter]]:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    yield group, p

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, p in self.own():
            p -= group["lr"] * p.grad


class TrustRatio(Plain):
    """As in LAMB: the update is as long as the tensor."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, p in self.own():
            mean = self.state[p].setdefault("mean", torch.zeros_like(p))
            mean.lerp_(p.grad, 0.1)
            p -= group["lr"] * p.norm() / mean.norm().clamp(min=1e-9) * mean


class Clipping(Plain):
    """Clips the norm of all gradients together."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        nn.utils.clip_grad_norm_([p for _, p in self.own()], 1.0)
        super().step()


class Noisy(Plain):
    """Adds noise of one of the global generators."""

    sources: Any = (
        lambda p: torch.randn_like(p),
        lambda p: random.random(),
        lambda p: np.random.random(),
    )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group, p in self.own():
            p += self.sources[group["source"]](p)


class Counting(Plain):
    """The rate falls with a count that its groups hold."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        for group, p in self.own():
            p -= group["lr"] / group["count"] * p.grad


class CountingCalls(Plain):
    """The rate falls with the number of calls."""

    calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group, p in self.own():
            p -= group["lr"] / self.calls * p.grad


class Distant(Plain):
    """An estimate of how far to go, over all tensors, in the group, as in D-Adaptation."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            total = sum(p.grad.abs().sum().item() for p in group["params"])
            group["d"] = max(group.get("d", 1e-9), 1e-12 * total)
        super().step()


class Factoring(Plain):
    """Elementwise for small matrices only."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, p in self.own():
            factored = p.dim() > 1 and min(p.shape[:2]) >= 128
            p -= group["lr"] * (p.grad / p.grad.norm() if factored else p.grad)


class BySlowSchedule(Plain):
    """Normalizes at every tenth step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, p in self.own():
            state = self.state[p]
            state["step"] = state.get("step", 0) + 1
            p -= group["lr"] * (p.grad / p.grad.norm() if state["step"] % 10 == 0 else p.grad)


class Renewing(SGD):
    """Has another dictionary of state after each step."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.state = defaultdict(dict, self.state)
        return result


class Unlike(Plain):
    """No weight decay for vectors: a flat part of a matrix would be taken for one."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, p in self.own():
            p -= group["lr"] * (p.grad + (0.1 * p if p.dim() > 1 else 0.0))


class StateOfAll(Plain):
    """Holds state under a name of its own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["all"] = {"seen": True}  # type: ignore[index]
        super().step()


class Around(Plain):
    """Drives another optimizer, as Lookahead does."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__([p for g in inner.param_groups for p in g["params"]])
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class Holding(Plain):
    """Keeps its tensors in a list of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.mine = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.mine:
            p += 1.0


class Configured(Plain):
    """Has an object and a method among its attributes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.sign = Sign(-1.0)
        self.rule = self.descend

    def descend(self, rate: float, p: nn.Parameter) -> None:
        p += self.sign.value * rate * p.grad  # type: ignore[operator]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.sign.used = True
        for group, p in self.own():
            self.rule(group["lr"], p)


class Sign:
    def __init__(self, value: float) -> None:
        self.value = value
        self.used = False


class Idle(Plain):
    """Does nothing."""

    def step(self, closure: Any = None) -> None:
        return None


ELEMENTWISE: list[tuple[Any, dict[str, Any]]] = [
    (SGD, {"lr": 0.1}),
    (SGD, {"lr": 0.0, "weight_decay": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    (Adam, {}),
    (Adam, {"lr": torch.tensor(1e-3), "foreach": False}),
    (Adam, {"foreach": True}),
    (Adam, {"fused": True}),
    (Adam, {"capturable": True}),
    (Adam, {"differentiable": True}),
    (Adam, {"amsgrad": True, "maximize": True}),
    (AdamW, {"weight_decay": 0.1}),
    (AdamW, {"fused": True, "lr": torch.tensor(1e-3)}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    (torch.optim.ASGD, {}),
    (torch.optim.Rprop, {}),
    (Plain, {}),
    (Counting, {}),
    (Renewing, {"lr": 0.1, "momentum": 0.9}),
]


@pytest.mark.parametrize(("kind", "options"), ELEMENTWISE)
def test_elementwise(kind: Callable[..., Optimizer], options: dict[str, Any]) -> None:
    assert probe_optimizer(kind(parameters(), **options)) is UpdateCoupling.ELEMENTWISE


@pytest.mark.parametrize("kind", [TrustRatio, Factoring, BySlowSchedule, Unlike])
def test_per_tensor(kind: Callable[..., Optimizer]) -> None:
    assert probe_optimizer(kind(parameters())) is UpdateCoupling.PER_TENSOR


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_per_tensor_of_torch(name: str) -> None:
    kind = getattr(torch.optim, name, None)
    if kind is None:
        pytest.skip(f"this torch has no {name}")
    params = [p for p in parameters() if name != "Muon" or p.dim() == 2]
    assert probe_optimizer(kind(params)) is UpdateCoupling.PER_TENSOR


@pytest.mark.parametrize(
    "kind", [Clipping, Distant, CountingCalls, StateOfAll, Holding, Idle, torch.optim.LBFGS]
)
def test_coupled(kind: Callable[..., Optimizer]) -> None:
    params = parameters()
    assert probe_optimizer(kind(params)) is UpdateCoupling.COUPLED
    assert all(torch.equal(p, torch.ones_like(p)) for p in params)


class Looking(Plain):
    """A rate of its own for the last tensor, which it finds by some look-up."""

    def __init__(self, params: Any, make: Any, look: Any) -> None:
        super().__init__(params)
        self.table = make([p for group in self.param_groups for p in group["params"]])
        self.look = look

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for place, (group, p) in enumerate(self.own()):
            p -= group["lr"] * self.look(self.table, p, place) * p.grad


class Box:
    def __init__(self, held: Any) -> None:
        self.held = held


def mark(params: list[nn.Parameter]) -> None:
    params[-1].lr_scale = 0.5  # type: ignore[attr-defined]


LOOKS: dict[str, tuple[Callable[..., Any], Callable[..., float]]] = {
    "parameter": (lambda ps: {ps[-1]: 0.5}, lambda table, p, place: table.get(p, 1.0)),
    "id": (lambda ps: {id(ps[-1]): 0.5}, lambda table, p, place: table.get(id(p), 1.0)),
    "id in a set": (lambda ps: {id(ps[-1])}, lambda table, p, place: 1.0 - (id(p) in table) / 2),
    "address": (
        lambda ps: {ps[-1].data_ptr(): 0.5},
        lambda table, p, place: table.get(p.data_ptr(), 1.0),
    ),
    "hash": (lambda ps: {}, lambda table, p, place: table.get(hash(p), 1.0)),
    "weak reference": (
        lambda ps: weakref.WeakKeyDictionary({ps[-1]: 0.5}),
        lambda table, p, place: table.get(p, 1.0),
    ),
    "set": (lambda ps: {ps[-1]}, lambda table, p, place: 0.5 if p in table else 1.0),
    "list": (lambda ps: [ps[-1]], lambda table, p, place: 0.5 if p in table else 1.0),
    "identity": (
        lambda ps: [ps[-1]],
        lambda table, p, place: 0.5 if any(p is q for q in table) else 1.0,
    ),
    "identity, filled later": (
        lambda ps: [],
        lambda table, p, place: 0.5 if any(p is q for q in table) else 1.0,
    ),
    "object": (lambda ps: Box({ps[-1]: 0.5}), lambda table, p, place: table.held.get(p, 1.0)),
    "attribute": (mark, lambda table, p, place: getattr(p, "lr_scale", 1.0)),
    "attribute, set later": (lambda ps: None, lambda table, p, place: 1.0 - hasattr(p, "x") / 2),
    "own dictionary": (mark, lambda table, p, place: vars(p).get("lr_scale", 1.0)),
    "hooks": (
        lambda ps: None,
        lambda table, p, place: 0.5 if p._post_accumulate_grad_hooks else 1.0,
    ),
    "place": (lambda ps: [1.0] * 19 + [0.5], lambda table, p, place: table[place]),
    "place in a tuple": (lambda ps: (1.0,) * 20, lambda table, p, place: table[place]),
}


class LookingInGlobals(Plain):
    """Its tables lie outside of it, and are filled later."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, p in self.own():
            p -= group["lr"] * TABLE.get(p, 1.0) * p.grad


class LookingInGlobalsById(Plain):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, p in self.own():
            p -= group["lr"] * scale_by_id(p) * p.grad


class LookingInGlobalsByIdentity(Plain):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, p in self.own():
            p -= group["lr"] * (0.5 if any(p is q for q in SPECIAL) else 1.0) * p.grad


class LookingByName(Plain):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                if p.grad is not None:
                    p -= group["lr"] * (0.5 if name == "bias" else 1.0) * p.grad


TABLE: dict[Any, float] = {}
SPECIAL: list[Any] = []


def scale_by_id(p: Any) -> float:
    return TABLE.get(id(p), 1.0)  # type: ignore[call-overload]


@pytest.mark.parametrize("by", LOOKS)
def test_looking_up_by_tensor_is_coupled(by: str) -> None:
    assert probe_optimizer(Looking(parameters(), *LOOKS[by])) is UpdateCoupling.COUPLED


@pytest.mark.parametrize(
    "kind", [LookingInGlobals, LookingInGlobalsById, LookingInGlobalsByIdentity, LookingByName]
)
def test_looking_up_elsewhere_is_coupled(kind: Callable[..., Optimizer]) -> None:
    model = nn.Linear(3, 2)
    named = kind is LookingByName
    assert probe_optimizer(kind(model.named_parameters() if named else model.parameters())) is (
        UpdateCoupling.COUPLED
    )


def test_what_is_no_look_up() -> None:
    """Attributes of parameters and of the optimizer that no step asks for, and other lists."""
    params = parameters()
    for p in params:
        p.lr_scale = 0.5  # type: ignore[attr-defined]
    optimizer: Any = Configured(params)
    optimizer.betas = [0.9, 0.99]
    optimizer.register_step_post_hook(lambda optimizer, args, kwargs: params)
    assert probe_optimizer(optimizer) is UpdateCoupling.ELEMENTWISE


@pytest.mark.parametrize("source", range(3))
def test_noise_is_coupled(source: int) -> None:
    assert probe_optimizer(Noisy(parameters(), source=source)) is UpdateCoupling.COUPLED


def test_sparse_gradients_only_is_coupled() -> None:
    assert probe_optimizer(torch.optim.SparseAdam(parameters())) is UpdateCoupling.COUPLED


def test_one_that_drives_another_is_not_tried() -> None:
    params = parameters()
    for p in params:
        p.grad = torch.ones_like(p)
    assert probe_optimizer(Around(SGD(params, lr=0.1))) is UpdateCoupling.COUPLED
    assert all(torch.equal(p, torch.ones_like(p)) for p in params)


def test_the_least_separable_group_decides() -> None:
    one, two = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(4))
    groups = [{"params": [two], "source": 0}, {"params": [one], "source": 1}]

    class Mixed(Plain):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group, p in self.own():
                p -= group["lr"] * (p.grad / p.grad.norm() if group["source"] else p.grad)

    assert probe_optimizer(Mixed(groups)) is UpdateCoupling.PER_TENSOR
    assert probe_optimizer(Mixed(groups[:1])) is UpdateCoupling.ELEMENTWISE


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (SGD, torch.float16),  # in which Adam divides by nothing
        *(
            (k, d)
            for k in (SGD, Adam, torch.optim.Adagrad)
            for d in (torch.float64, torch.bfloat16)
        ),
    ],
)
def test_element_types(kind: Callable[..., Optimizer], dtype: torch.dtype) -> None:
    params = [nn.Parameter(p.detach().to(dtype)) for p in parameters()]
    assert probe_optimizer(kind(params, lr=0.1)) is UpdateCoupling.ELEMENTWISE
    assert probe_optimizer(TrustRatio(params)) is UpdateCoupling.PER_TENSOR
    assert probe_optimizer(Clipping(params)) is UpdateCoupling.COUPLED


def test_own_objects_and_methods() -> None:
    optimizer = Configured(parameters())
    assert probe_optimizer(optimizer) is UpdateCoupling.ELEMENTWISE
    assert not optimizer.sign.used


def test_names_of_parameters() -> None:
    assert probe_optimizer(Adam(nn.Linear(3, 2).named_parameters())) is UpdateCoupling.ELEMENTWISE


def test_after_training_and_with_a_scheduler() -> None:
    params = parameters()
    for kind in (Adam, torch.optim.Adagrad):
        optimizer = kind(params)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.0)
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
        assert probe_optimizer(optimizer) is UpdateCoupling.ELEMENTWISE


def test_nobody_notices() -> None:
    params = parameters()
    optimizer = AdamW(params, lr=torch.tensor(0.1), fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("all pre")),
        register_optimizer_step_post_hook(lambda *_: calls.append("all post")),
    ]
    before = copy.deepcopy(optimizer.state_dict())
    attributes = {k: id(v) for k, v in vars(optimizer).items()}
    values, grads = [p.detach().clone() for p in params], [p.grad for p in params]
    chance = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    with torch.no_grad():
        assert probe_optimizer(optimizer) is UpdateCoupling.ELEMENTWISE
        assert probe_optimizer(Noisy(params, source=0)) is UpdateCoupling.COUPLED
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
    assert torch.equal(chance[0], torch.get_rng_state())
    assert chance[1] == random.getstate()
    assert chance[2] == np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    assert not calls
    assert {k: id(v) for k, v in vars(optimizer).items()} == attributes
    assert all(p.grad is g for p, g in zip(params, grads, strict=True))
    assert all(torch.equal(p, v) for p, v in zip(params, values, strict=True))
    after = optimizer.state_dict()
    torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)
    assert after["param_groups"] == before["param_groups"]
    optimizer.step()
    scheduler.step()
    assert calls == ["all pre", "pre", "post", "all post"]
    for handle in handles:
        handle.remove()
