"""What the training thread and the planned lane tell each other of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

CLOSE = -1
DISCARD = -2


@dataclass(slots=True)
class Step:
    """What the training thread tells of one step, indexed by the plan's tensors.

    The training thread writes; the communication thread reads a tensor's entries only after its
    ready event, and everything after the close.

    Args:
        number: the step's.
        addresses: where the gradients lie; 0 where there is none.
        owners: kept alive until the step is over; None where the memory is somebody else's, who
            keeps it only until the step is over or fails.
        requested: whether this rank asks for talk at the step border.
        discards: whether it discards the step.
        targets: where all-reduced gradients are copied to as they arrive, from the close on; 0 for
            those that stay in their fusion buffer.
        marks: of a device, events that groups have to wait for, by group (``device_medium``).
    """

    number: int
    addresses: list[int]
    owners: list[object]
    requested: bool = False
    discards: bool = False
    targets: list[int] = field(default_factory=list)
    dependencies: dict[int, list[Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GatherRequest:
    """The training thread has put the reduced shards to use: all-gathers may go.

    Args:
        addresses: of whole tensors, indexed by the plan's tensors: where this rank's shards are
            sent from and the others' are written. 0 for tensors that are not gathered.
        owners: kept alive until the gathers are over.
        count: how many of the plan's all-gathers may go by now; None for all that are left.
        marks: of a device, events that they have to wait for.
    """

    addresses: list[int]
    owners: object
    count: int | None = None
    dependencies: Sequence[Any] = ()


@dataclass(frozen=True, slots=True)
class GroupTime:
    """When one group was packed and travelled, seconds of ``time.perf_counter``.

    (On a device they are timed events until they are read; see ``marks``.)
    """

    group: int
    start_s: float
    packed_s: float
    end_s: float


@dataclass(slots=True)
class StepResult:
    """What a step's messages brought.

    Args:
        present: per tensor of the plan, whether any rank had a gradient.
        requested: whether any rank asks for talk at the step border.
        discarded: whether any rank discards the step.
        times: when each group travelled.
    """

    present: list[bool]
    requested: bool = False
    discarded: bool = False
    times: list[GroupTime] = field(default_factory=list)
