"""What an optimizer does to its tensors, found by experiment.

Stand-ins of the optimizer step small tensors three times over: all of them in one call; each of
them in a call of its own; and flat thirds of each, one third per stand-in, as ranks would, the last
of which has nothing. Where the second way ends like the first, the optimizer treats every tensor by
itself; where the third does as well, and writes where it read, every element. An optimizer that
cannot be copied, fails, or looks anything up by its tensors (``lookups``) is taken to be coupled.

Ends are compared with a tolerance, since the vectorized body of a kernel and its scalar tail round
differently. Gradients differ so much in scale that a norm over too few elements is off by more.
"""

from __future__ import annotations

import enum
import logging
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from wfbp.torch.isolation import (
    MOST_ELEMENTS,
    UnknownError,
    global_state_kept,
    nearly_equal,
    private_copy,
    stand_in,
)
from wfbp.torch.optimizer_inspection import LookupRecorder, refers_to_tensors

log = logging.getLogger("wfbp")

_STEPS = 12
_RATE = 0.05
_RANKS = 3
_SIDES = (140, 5)
"""Longest side of stand-ins: larger and smaller than what makes some optimizers change method."""


class UpdateCoupling(enum.Enum):
    """What the new value of an element depends on."""

    ELEMENTWISE = "elementwise"
    """On gradients of the same element: tensors may be cut and their parts stepped anywhere."""
    PER_TENSOR = "per tensor"
    """On gradients of the same tensor: tensors may be stepped one after another."""
    COUPLED = "coupled"
    """On others, or on chance, or on the number of calls, or it is unknown."""


def probe_optimizer(optimizer: torch.optim.Optimizer) -> UpdateCoupling:
    """Find out what an optimizer does to its tensors, without touching it.

    What it does only after more than a dozen steps, or only to tensors of more than 20,000
    elements, is not seen.

    Args:
        optimizer: not a distributed one.

    Returns:
        The least coupled nature that it shows on every kind of tensor it has.

    Example:
        >>> import torch
        >>> nature_of(torch.optim.Adam([torch.zeros(2)]))
        <Nature.ELEMENTWISE: 'elementwise'>
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

    def __init__(self, subject: _Subject, rank: int | None, asked: LookupRecorder | None) -> None:
        self.group = subject.group
        self._rank = rank
        start = self._part(subject.start).clone()
        # Ranks step views of parameters, which are no parameters.
        self.param = torch.nn.Parameter(start) if rank is None else start
        if asked is not None:
            self.param = asked.tensor(start)
        self._address = start.data_ptr()
        self.gradients = [self._part(g) for g in subject.gradients]

    def state(self, held: dict[Any, Any], subject: _Subject) -> dict[Any, Any]:
        """What the optimizer holds for the tensor that the subject stands for, cut like it."""
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
    apart = run(*([subject] for subject in subjects))
    if not (
        nearly_equal(whole.params, apart.params)
        and nearly_equal(whole.states, apart.states)
        and _parts_agree(whole, apart)
    ):
        return UpdateCoupling.COUPLED
    asked = LookupRecorder()
    _run(optimizer, [subjects], None, started, asked)
    if asked.things:
        raise UnknownError(f"it asks its parameters for {', '.join(sorted(asked.things))}")
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
    asked: LookupRecorder | None = None,
) -> _End:
    """Let one stand-in take its steps, in one or more calls each.

    Args:
        optimizer: what it stands in for.
        calls: the subjects of each call.
        rank: whose flat parts to step, or None for whole tensors.
        started: whether it begins with the optimizer's state, or with none.
        asked: is to be told what it asks of its tensors, if anybody is.
    """
    made = stand_in(optimizer)
    made.defaults = made.defaults | _SWITCHED_OFF
    made.state = defaultdict(dict) if asked is None else asked.state()
    members: list[_Member] = []
    rounds: list[tuple[list[_Member], dict[int, dict[str, Any]]]] = []
    for subjects in calls:
        part = [_Member(subject, rank, asked) for subject in subjects]
        if started:
            for member, subject in zip(part, subjects, strict=True):
                held = optimizer.state.get(subject.like, {})
                made.state[member.param] = member.state(held, subject)
        members += part
        rounds.append((part, _groups(optimizer, part, asked)))
    for step in range(_STEPS):
        for part, groups in rounds:
            made.param_groups = list(groups.values())
            for member in part:
                member.param.grad = member.gradients[step].clone() if member.param.numel() else None
            made.step()
            if asked is not None:
                made.state = asked.state(made.state)
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
    optimizer: torch.optim.Optimizer, members: Sequence[_Member], asked: LookupRecorder | None
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
            group["param_names"] = names if asked is None else asked.names(names)
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
