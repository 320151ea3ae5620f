"""How an optimizer couples the elements of its tensors, found by experiment.

Copies of the optimizer step small stand-ins for its tensors, whole and cut; results are compared.
The experiment changes nothing in the optimizer, PyTorch's modes or its random numbers.
"""

from __future__ import annotations

import enum
import logging
import math
import random
import types
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from wfbp.torch.optimizer_inspection import LookupRecorder, refers_to_tensors

MOST_ELEMENTS = 20_000
"""Of a tensor in an experiment."""

_ULPS = 2
"""Rounding errors that may gather in the steps, in units of the largest element's last place."""

_STEPS = 12
_RATE = 0.05
_RANKS = 3
_SIDES = (140, 5)
"""Longest side of stand-ins: larger and smaller than what makes some optimizers change method."""

log = logging.getLogger("wfbp")


class UnknownError(Exception):
    """The experiment cannot tell."""


def private_optimizer(optimizer: torch.optim.Optimizer) -> Any:
    """A copy without groups, state and hooks, made without its constructor.

    Raises ``UnknownError`` if an attribute cannot be copied.
    """
    made: Any = object.__new__(type(optimizer))
    for key, value in optimizer.__dict__.items():
        if key.startswith("_optimizer_") and key.endswith("_hooks"):
            made.__dict__[key] = OrderedDict()
        elif key not in ("param_groups", "state", "step"):
            # (A scheduler puts its own step() on the instance.)
            made.__dict__[key] = private_copy(value, optimizer, made)
    return made


_CONSTANT = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    range,
    slice,
    enum.Enum,
    types.BuiltinFunctionType,
    torch.dtype,
    torch.device,
    torch.memory_format,
)


def private_copy(value: Any, optimizer: Any = None, replacement: Any = None) -> Any:
    """A copy of an attribute, or part of one, that shares nothing mutable; ``replacement`` replaces
    ``optimizer``.

    Raises ``UnknownError`` if it cannot be copied without the optimizer's tensors.
    """

    def again(inner: Any) -> Any:
        return private_copy(inner, optimizer, replacement)

    kind = type(value)
    if isinstance(value, _CONSTANT):
        return value
    if kind is torch.Tensor and value.numel() <= MOST_ELEMENTS:
        return value.detach().clone()
    if kind in (list, tuple) and len(value) > 1 and all(type(v) is float for v in value):
        # Were these settings of tensors by their places, all alike would hide it.
        return kind(v * (1.0 - k % 8 / 32) for k, v in enumerate(value))
    if kind in (list, tuple, set, frozenset, deque):
        return kind(map(again, value))
    if kind in (dict, OrderedDict):
        return kind((k, again(v)) for k, v in value.items())
    if kind is defaultdict:
        return defaultdict(value.default_factory, ((k, again(v)) for k, v in value.items()))
    if isinstance(value, types.MethodType) and value.__self__ is optimizer:
        return types.MethodType(value.__func__, replacement)
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        if all(isinstance(cell, _CONSTANT) for cell in cells):
            return value
    elif not isinstance(value, torch.optim.Optimizer | nn.Module) and _is_ordinary(kind):
        copied = object.__new__(kind)
        copied.__dict__.update({k: again(v) for k, v in vars(value).items()})
        return copied
    raise UnknownError(f"{kind.__qualname__} cannot be copied for an experiment")


def _is_ordinary(kind: Any) -> bool:
    """Whether attributes are all there is to an object of this class."""
    special = ("__reduce_ex__", "__reduce__", "__getstate__")
    return all(getattr(kind, n, None) is getattr(object, n, None) for n in special) and all(
        "__slots__" not in vars(base) for base in kind.__mro__
    )


def nearly_equal(one: Any, other: Any) -> bool:
    """Whether two values are equal but for rounding."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if torch.equal(one, other):
            return True
        if not one.dtype.is_floating_point:
            return False
        # Elements have been as large as the largest, which has left its rounding error in all.
        finite = one.nan_to_num(0.0, 0.0, 0.0)
        allowed = _ULPS * torch.finfo(one.dtype).eps * float(finite.abs().max())
        return torch.allclose(one, other, rtol=0.0, atol=allowed, equal_nan=True)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(nearly_equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(nearly_equal, one, other))
    if isinstance(one, float):
        return one == other or math.isclose(one, other, rel_tol=1e-12)
    if isinstance(one, types.MethodType):
        return one.__func__ is other.__func__
    if isinstance(one, (*_CONSTANT, types.FunctionType, set, frozenset)):
        return bool(one == other)
    return nearly_equal(vars(one), vars(other))


@contextmanager
def global_state_kept(devices: Iterable[torch.device]) -> Iterator[None]:
    """Leave random numbers, modes and everybody's hooks as they are."""
    gpus = sorted({d.index for d in devices if d.type == "cuda"})
    python, numpy = random.getstate(), np.random.get_state()
    hooks: list[dict[Any, Any]] = [
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    ]
    aside = [dict(table) for table in hooks]
    with torch.random.fork_rng(gpus), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for table in hooks:
            table.clear()
        try:
            yield
        finally:
            for table, held in zip(hooks, aside, strict=True):
                table.update(held)
            random.setstate(python)
            np.random.set_state(numpy)


class UpdateCoupling(enum.Enum):
    """What the new value of an element depends on."""

    ELEMENTWISE = "elementwise"
    """On gradients of the same element: tensors may be cut and their parts stepped anywhere."""
    PER_TENSOR = "per tensor"
    """On gradients of the same tensor: tensors may be stepped one after another."""
    COUPLED = "coupled"
    """On others, or on chance, or on the number of calls, or it is unknown."""


def probe_optimizer(optimizer: torch.optim.Optimizer) -> UpdateCoupling:
    """The weakest coupling that holds for every kind of tensor the optimizer has.

    The optimizer, not a distributed one, is not changed. Behaviour that begins after a dozen steps,
    or needs more than 20,000 elements, is not seen.

    Example:
        >>> import torch
        >>> probe_optimizer(torch.optim.Adam([torch.zeros(2)]))
        <UpdateCoupling.ELEMENTWISE: 'elementwise'>
    """
    try:
        if reference := refers_to_tensors(optimizer):
            raise UnknownError(f"{reference} tells its parameters from other tensors")
        subjects = _subjects(optimizer)
        with global_state_kept(s.like.device for s in subjects):
            try:
                return _judge(optimizer, subjects, started=False)
            except Exception:
                # Some, like Adagrad, make their state when they are made.
                return _judge(optimizer, subjects, started=True)
    except Exception as error:
        log.debug("%s is taken to be coupled: %r", type(optimizer).__name__, error)
        return UpdateCoupling.COUPLED


@dataclass(frozen=True, slots=True)
class _Subject:
    """A small tensor in the place of one of the optimizer's."""

    group: int
    like: torch.Tensor
    start: torch.Tensor
    gradients: list[torch.Tensor]


class _Member:
    """A subject, or a flat part of it, that one stand-in steps."""

    def __init__(self, subject: _Subject, rank: int | None, lookups: LookupRecorder | None) -> None:
        self.group = subject.group
        self._rank = rank
        start = self._part(subject.start).clone()
        # Ranks step views of parameters, which are no parameters.
        self.param = torch.nn.Parameter(start) if rank is None else start
        if lookups is not None:
            self.param = lookups.tensor(start)
        self._address = start.data_ptr()
        self.gradients = [self._part(g) for g in subject.gradients]

    def state(self, held: dict[Any, Any], subject: _Subject) -> dict[Any, Any]:
        """The optimizer's state for this subject's tensor, cut like it."""
        cut: dict[Any, Any] = {}
        for key, value in held.items():
            if isinstance(value, torch.Tensor) and value.shape == subject.like.shape:
                corner = tuple(slice(0, n) for n in subject.start.shape)
                cut[key] = self._part(value.detach()[corner].contiguous()).clone()
            elif isinstance(value, torch.Tensor) and value.numel() != 1:
                raise UnknownError(f"state {key!r} has a shape of its own")
            else:
                cut[key] = private_copy(value)
        return cut

    @property
    def moved(self) -> bool:
        """Whether the tensor was given other memory, of which a parameter would see nothing."""
        return self.param.data_ptr() != self._address

    def _part(self, whole: torch.Tensor) -> torch.Tensor:
        if self._rank is None:
            return whole
        length = -(-whole.numel() // _RANKS)
        return whole.flatten()[self._rank * length : (self._rank + 1) * length]


def _subjects(optimizer: torch.optim.Optimizer) -> list[_Subject]:
    """For every kind of group and of tensor in it a larger and a smaller stand-in."""
    kinds: dict[Any, tuple[int, torch.Tensor]] = {}
    for number, group in enumerate(optimizer.param_groups):
        kind = repr({k: v for k, v in group.items() if k not in ("params", "param_names", "lr")})
        for p in group["params"]:
            if p.numel() and (p.is_floating_point() or p.is_complex()):
                place = (kind, p.dim(), p.dtype, p.device)
                known = kinds.get(place)
                if known is None or p.numel() > known[1].numel():
                    kinds[place] = (number, p)
    subjects: list[_Subject] = []
    for number, like in kinds.values():
        for side in _SIDES:
            subjects.append(_subject(number, like, _small(like.shape, side), len(subjects)))
    return subjects


def _small(shape: Sequence[int], side: int) -> list[int]:
    while math.prod(small := [min(n, side) for n in shape]) > MOST_ELEMENTS:
        side = side * 3 // 4
    return small


def _subject(group: int, like: torch.Tensor, shape: list[int], number: int) -> _Subject:
    """Values and gradients whose scale changes between thirds, tensors and steps."""
    count = math.prod(shape)
    values = torch.randn(2, count, generator=torch.Generator().manual_seed(number))
    values[1, 3::7] = 0.0
    third = torch.arange(count) // -(-count // _RANKS)
    scales = 1e3 ** (((third + number)[None] + torch.arange(_RANKS)[:, None]) % 3 - 1.0)

    def made(flat: torch.Tensor) -> torch.Tensor:
        return flat.reshape(shape).to(like.device, like.dtype)

    start = values[0] * 10.0 ** -third.float()
    gradients = [made(values[1].roll(s) * scales[s % _RANKS]) for s in range(_STEPS)]
    return _Subject(group, like, made(start), gradients)


def _judge(
    optimizer: torch.optim.Optimizer, subjects: list[_Subject], started: bool
) -> UpdateCoupling:
    def run(*calls: Sequence[_Subject], rank: int | None = None) -> _End:
        return _run(optimizer, calls, rank, started)

    whole = run(subjects)
    for subject, param in zip(subjects, whole.params, strict=True):
        if not param.isfinite().all() or torch.equal(param, subject.start):
            raise UnknownError("its steps did not move every tensor to a finite value")
    separately = run(*([subject] for subject in subjects))
    if not (
        nearly_equal(whole.params, separately.params)
        and nearly_equal(whole.states, separately.states)
        and _parts_agree(whole, separately)
    ):
        return UpdateCoupling.COUPLED
    lookups = LookupRecorder()
    _run(optimizer, [subjects], None, started, lookups)
    if lookups.things:
        raise UnknownError(f"it asks its parameters for {', '.join(sorted(lookups.things))}")
    try:
        ranks = [run(subjects, rank=rank) for rank in range(_RANKS + 1)]
        elementwise = _joins(subjects, whole, ranks)
    except Exception as error:
        log.debug("%s cannot step parts of tensors: %s", type(optimizer).__name__, error)
        elementwise = False
    return UpdateCoupling.ELEMENTWISE if elementwise else UpdateCoupling.PER_TENSOR


@dataclass(frozen=True, slots=True)
class _End:
    """Where the steps of one stand-in led."""

    params: list[torch.Tensor]
    states: list[dict[Any, Any]]
    groups: list[tuple[int, dict[str, Any]]]
    attributes: dict[str, Any]


def _run(
    optimizer: torch.optim.Optimizer,
    calls: Sequence[Sequence[_Subject]],
    rank: int | None,
    started: bool,
    lookups: LookupRecorder | None = None,
) -> _End:
    """Let one stand-in take its steps, in one or more calls each.

    Args:
        optimizer: what it stands in for.
        calls: the subjects of each call.
        rank: whose flat parts to step, or None for whole tensors.
        started: whether it begins with the optimizer's state, or with none.
        lookups: records what it asks of its tensors, if given.
    """
    made = private_optimizer(optimizer)
    made.defaults = made.defaults | _SWITCHED_OFF
    made.state = defaultdict(dict) if lookups is None else lookups.state()
    members: list[_Member] = []
    rounds: list[tuple[list[_Member], dict[int, dict[str, Any]]]] = []
    for subjects in calls:
        part = [_Member(subject, rank, lookups) for subject in subjects]
        if started:
            for member, subject in zip(part, subjects, strict=True):
                held = optimizer.state.get(subject.like, {})
                made.state[member.param] = member.state(held, subject)
        members += part
        rounds.append((part, _groups(optimizer, part, lookups)))
    for step in range(_STEPS):
        for part, groups in rounds:
            made.param_groups = list(groups.values())
            for member in part:
                member.param.grad = member.gradients[step].clone() if member.param.numel() else None
            made.step()
            if lookups is not None:
                made.state = lookups.state(made.state)
    if rank is not None and any(member.moved for member in members):
        raise UnknownError("it replaces the memory of what it steps")
    states = [made.state.pop(member.param, {}) for member in members]
    if made.state:
        raise UnknownError("it has state that belongs to no tensor")
    values = [
        (number, {k: v for k, v in group.items() if k not in ("params", "param_names")})
        for _, groups in rounds
        for number, group in groups.items()
    ]
    kept = {k: v for k, v in made.__dict__.items() if k not in ("param_groups", "state")}
    return _End([m.param.detach() for m in members], states, values, kept)


_SWITCHED_OFF = {"capturable": False, "differentiable": False}
"""About recording the step, not about its result."""


def _groups(
    optimizer: torch.optim.Optimizer, members: Sequence[_Member], lookups: LookupRecorder | None
) -> dict[int, dict[str, Any]]:
    """Copies of the groups of some members, with a learning rate under which they move."""
    groups: dict[int, dict[str, Any]] = {}
    for member in members:
        if member.group not in groups:
            known = optimizer.param_groups[member.group]
            group = {k: private_copy(v) for k, v in known.items() if k != "params"}
            group |= {k: v for k, v in _SWITCHED_OFF.items() if k in group}
            rate = group.get("lr")
            if rate is not None:
                held = isinstance(rate, torch.Tensor)
                group["lr"] = torch.full_like(rate, _RATE) if held else _RATE
            groups[member.group] = group | {"params": []}
        groups[member.group]["params"].append(member.param)
    for group in groups.values():
        if "param_names" in group:
            names = [f"tensor {k}" for k in range(len(group["params"]))]
            group["param_names"] = names if lookups is None else lookups.names(names)
    return groups


def _parts_agree(whole: _End, part: _End) -> bool:
    """Whether groups and attributes ended alike, whatever tensors a stand-in had."""
    known = dict(whole.groups)
    alike = all(nearly_equal(known[number], values) for number, values in part.groups)
    idle = not any(p.numel() for p in part.params)  # some note that they have begun
    return alike and (idle or nearly_equal(whole.attributes, part.attributes))


def _joins(subjects: Sequence[_Subject], whole: _End, ranks: Sequence[_End]) -> bool:
    """Whether the flat parts that ranks stepped make up the tensors, and so their states."""
    for k in range(len(subjects)):
        reached = [end for end in ranks if end.params[k].numel()]
        parts = [end.params[k] for end in reached]
        states = [end.states[k] for end in reached]
        if not nearly_equal(whole.params[k].flatten(), torch.cat(parts)):
            return False
        held = whole.states[k]
        if any(state.keys() != held.keys() for state in states):
            return False
        for key, value in held.items():
            pieces = [state[key] for state in states]
            if all(map(_like, pieces, parts)):
                value, pieces = value.flatten(), [torch.cat(pieces)]
            if not all(nearly_equal(value, piece) for piece in pieces):
                return False
    return all(_parts_agree(whole, end) for end in ranks)


def _like(value: Any, param: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == param.shape
