"""Events of one step, which the reducer posts (:data:`Event`), and its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from wfbp.comm.arrays import Buffer
from wfbp.comm.memory import Dependencies, Stamp


@dataclass(slots=True)
class Step:
    """One step's gradients, by the reducer's number of the tensor.

    The training thread writes; the communication thread reads a group's entries after its
    :class:`GroupReady`, and everything after the :class:`Close`.
    """

    number: int
    sources: list[int]  # addresses of the gradients; 0 for none
    owners: list[object]  # None if memory is valid only until the step ends or fails
    missing: list[int]  # by group of backward, number of absent gradients
    requested: bool = False  # whether this rank wants a round at the end of the step
    discards: bool = False
    whole: bool = False  # whether this rank needs whole gradients
    targets: Sequence[int] = ()  # copies of all-reduced gradients, from the close on; 0: none
    closing_call: int | None = 0  # which call closes it, below 64; None if this rank cannot know
    mark: int | None = None  # of the parameters, the same on ranks that have the same


class GroupReady(NamedTuple):
    """All gradients of a group of backward exist, and those of all groups before it."""

    step: Step
    group: int
    dependencies: Dependencies


class Used(NamedTuple):
    """The last step's averages were used, multiplied by ``scale``; 0 if they were not, and then no
    error of encoding counts any more. Precedes the next step."""

    scale: float


class Close(NamedTuple):
    """The step has no more gradients: all its groups may be sent, or again if it is repeated."""

    step: Step
    dependencies: Dependencies


@dataclass(slots=True)
class Gather:
    """Shards are updated, so all-gathers may start; lists are by the reducer's numbers."""

    sources: Sequence[int]  # addresses of whole tensors with this rank's shards, to be completed
    owners: Sequence[object]  # kept alive until the gathers end
    count: int | None  # number of all-gathers that may start now; None for all
    dependencies: Dependencies


Event = GroupReady | Close | Gather | Used


@dataclass(frozen=True, slots=True)
class GroupStamps:
    """When one group was packed and travelled."""

    group: int
    start: Stamp
    packed: Stamp
    end: Stamp


@dataclass(slots=True)
class StepResult:
    """Results of a step's messages."""

    present: list[bool]  # by tensor of the plan, whether any rank had a gradient
    requested: bool
    discarded: bool
    whole: bool = False  # whether any rank needs whole gradients
    steps_agree: bool = True  # whether all ranks are at the same step
    marks_agree: bool = True  # whether all ranks that have marked parameters have the same mark
    stamps: list[GroupStamps] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Facts about all ranks that each learns at the end of a step."""

    marks_agree: bool = True  # whether all ranks that had a mark had the same
    sparse: Sequence[int] = ()  # tensors with sparse gradients on any rank
    joined: Sequence[int] = ()  # ranks that have no more data
    evaluated: bool = False  # whether any rank evaluates a closure, if ranks have joined


GradientRef = tuple[int, object]
"""Address of a gradient, and the object that keeps it alive."""


class Lent(Protocol):
    """What a framework has made of a reduced tensor's memory, and the program may keep."""

    def is_used(self) -> bool:
        """Whether the program still uses that memory; any thread may ask."""


class BufferView(NamedTuple):
    """Bytes and address of a reduced tensor, or of this rank's shard unless ``whole``; ``lent`` is
    empty until a framework adds what it makes of them, which is then used again."""

    data: Buffer
    address: int
    whole: bool = True
    lent: list[Lent] | None = None
