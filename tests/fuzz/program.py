"""What a training program is: frozen data, as JSON where it is stored.

A program says nothing of ranks or of one process: ``interpreter`` runs it as either. In one process
the loss of a pass is the sum of what the ranks' losses would be, divided by their number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

DECOUPLED = ("independent", "hybrid", "ipart", "dear", "ps", "ps_layerwise")
ALL_REDUCED = ("auto", "oasr", "mgwfbp", "layerwise", "single", "threshold")


@dataclass(frozen=True)
class Layer:
    """One layer; all map rows of ``Program.width`` numbers to such rows."""

    kind: str
    model: int = 0
    size: int = 0
    """Hidden width, vocabulary, or number of parts."""
    of: int = -1
    """The layer whose weight or module is used again, by its place in ``Program.layers``."""
    dtype: str = ""
    """Empty: the program's."""
    when: str = "always"
    """Which ranks use it in which steps; see :func:`used`."""
    checkpoint: str = ""
    """``reentrant`` or ``plain``: activations are computed again in backward."""
    hook: str = ""
    """What a hook does to its gradients; see ``interpreter``."""
    trainable: bool = True
    late: bool = False
    """Whether it joins its optimizer by ``add_param_group``."""


@dataclass(frozen=True)
class Optimizer:
    """One optimizer, and how it is wrapped."""

    kind: str
    model: int = 0
    part: str = "all"
    """``all``, or the ``even`` or ``odd`` of its model's layers."""
    groups: int = 1
    """Parameter groups: 1, or 2 with settings of their own."""
    schedule: str = "auto"
    update: str = "auto"
    threshold_bytes: int = 25 * 2**20
    passes: int = 1
    """``backward_passes_per_step``."""
    op: str = "average"
    named: bool = True
    scheduler: str = ""
    """A learning-rate scheduler made ``before`` or ``after`` wrapping."""
    rates: str = ""
    """How its rate goes: empty for steps of 0.7, or ``cosine``, ``one cycle``, ``chained``."""
    step_hooks: str = ""
    """``pre``, ``post`` or ``both`` observe; ``change`` clips gradients and scales parameters."""
    sparse: bool = False
    """Whether sparse gradients stay sparse; else they are made dense."""


@dataclass(frozen=True)
class Step:
    """A training step: zero, passes, something done to gradients, a step."""

    optimizers: tuple[int, ...] = (0,)
    """Those that step; their models' losses are added up."""
    others: tuple[int, ...] = ()
    """Models whose gradients backward leaves behind, with nobody stepping them."""
    passes: tuple[int, ...] = (1, 1, 1)
    """Backward passes, by rank."""
    zero: str = "optimizer"
    """``optimizer``, ``zeros``, ``model``, ``model zeros``, ``loop``, ``end``; ``list``: in place,
    by a list of gradients that was made once; ``carry``: they are halved."""
    discard: str = ""
    """How gradients that are thrown away before the pass are: empty, or as ``zero``."""
    discarded_on: tuple[int, ...] = (0, 1, 2)
    saliency: bool = False
    """A backward for the input's gradient alone behind the step, dropped by ``zero``."""
    gradients: str = ""
    """What is done to gradients between backward and step; see ``interpreter``."""
    max_norm: float = 0.1
    norm_type: float = 2.0
    scaler: str = ""
    """``plain``, ``unscale``, ``clip`` or ``own clip``: the ways that docs/how-to/clip.md shows."""
    infinite_on: int = -1
    read: str = ""
    """How the program reads its own gradients before the step; see ``interpreter``."""
    threads: bool = False
    """Whether each optimizer is clipped and stepped by a thread of its own."""
    closure: bool = False
    leave_out: bool = False
    """Whether gradients are dropped after they were averaged."""
    error: str = ""
    """``forward``, ``backward``, ``retry``: an exception that the program catches."""
    error_on: tuple[int, ...] = (0, 1, 2)
    forward: str = "call"
    """``call``, ``functional``, ``compiled``, ``autocast`` or ``twice``."""
    compiled: bool = False
    """Whether the optimizer's step is called by a function that is compiled."""
    inference: bool = False
    """Whether ranks step in inference mode."""
    again: bool = False
    """Whether a second step takes the same gradients."""
    penalty: bool = False
    """A gradient penalty: backward through a backward."""
    assigned: bool = False
    """Whether the program sets gradients, computed by ``torch.autograd.grad``."""
    own: str = ""
    """The optimizer's own method that takes part: ``add``, ``finish`` or ``backward``."""


@dataclass(frozen=True)
class Act:
    """Anything else: ``do`` names a method of ``interpreter.Run``."""

    do: str
    how: str = ""
    layer: int = -1
    optimizer: int = 0
    model: int = 0
    value: float = 0.0
    schedule: str = ""


@dataclass(frozen=True)
class Program:
    """A training program with the settings that it runs under."""

    seed: int
    ranks: int
    layers: tuple[Layer, ...]
    optimizers: tuple[Optimizer, ...]
    actions: tuple[Step | Act, ...]
    dtype: str = "float64"
    width: int = 5
    batch: int = 3
    start: str = "equal"
    """``equal``: same weights everywhere; ``broadcast``: the root's."""
    scale: float = 256.0
    """Of the gradient scaler."""
    changing: bool = True
    """Whether plans change every step or two, instead of staying as they begin."""
    shared_memory: bool = True
    direct_bytes: int = 256
    threads: str = ""
    """What a reading thread reads: ``state_dict`` or ``list``."""
    compression: str = ""
    """Of all optimizers; ranks are then on several hosts, and no process trains alike: the same
    program by other plans is the reference."""

    @property
    def name(self) -> str:
        """The same for the same program, everywhere."""
        return hashlib.sha256(dumps(self).encode()).hexdigest()[:10]


def used(when: str, rank: int, step: int, ranks: int, salt: int) -> bool:
    """Whether a rank uses a layer in a step."""
    if when == "first":
        return rank == 0
    if when == "last":
        return rank == ranks - 1
    if when == "turn":
        return step % ranks == rank
    if when == "even":
        return step % 2 == 0
    if when == "later":
        return step >= 3
    if when == "chance":
        return hashlib.sha256(f"{salt} {rank} {step}".encode()).digest()[0] % 3 == 0
    return when == "always"


def dumps(program: Program) -> str:
    """A program as JSON, without what is as by default."""
    return json.dumps(_plain(program), indent=1)


def loads(text: str) -> Program:
    """What :func:`dumps` wrote.

    Raises:
        ValueError: it is no program.
    """
    try:
        found = json.loads(text)
        parts = {
            "layers": tuple(_made(Layer, x) for x in found.pop("layers")),
            "optimizers": tuple(_made(Optimizer, x) for x in found.pop("optimizers")),
            "actions": tuple(_made(Act if "do" in x else Step, x) for x in found.pop("actions")),
        }
        return Program(**parts, **found)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no program: {error}") from error


def _plain(thing: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults."""
    out = {}
    for field in fields(thing):
        value = getattr(thing, field.name)
        if field.default is not MISSING and value == field.default:
            continue
        if isinstance(value, tuple) and value and not isinstance(value[0], int):
            value = [_plain(part) for part in value]
        out[field.name] = value
    return out


def _made(kind: Any, values: Mapping[str, Any]) -> Any:
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def size_of(program: Program) -> int:
    """How much there is to a program: shrinking makes it smaller."""
    return (
        len(json.dumps(_plain(program)))
        + 40 * program.ranks
        + sum(len(str(asdict(part))) for part in (*program.layers, *program.actions))
    )
