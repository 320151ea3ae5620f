"""A plan: the groups of tensors, their order and their operations.

A plan is immutable, equal on every rank, and identified by its digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from wfbp.core.checks import check_format, unique, whole
from wfbp.core.ranks import counted
from wfbp.core.types import Operation, Phase, TensorSpec

T = TypeVar("T")

FORMAT = "wfbp-plan/1"
ALIGNMENT_BYTES = 16
"""Each tensor starts at a multiple of this in its fusion buffer (the width of a vector load)."""


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors sent as one message.

    Args:
        tensors: indices into ``Plan.tensors``, in the order of the fusion buffer.
        operation: the collective that carries the group.
        wire: how its gradients are sent, if the program leaves that to the plan; empty for their
            own type.
    """

    tensors: tuple[int, ...]
    operation: Operation = Operation.ALL_REDUCE
    wire: str = ""

    def __post_init__(self) -> None:
        if not self.tensors:
            raise ValueError("a group needs at least one tensor")

    @property
    def phase(self) -> Phase:
        """Forward for all-gather, backward for all-reduce and reduce-scatter."""
        return Phase.FORWARD if self.operation is Operation.ALL_GATHER else Phase.BACKWARD


@dataclass(frozen=True)
class Plan:
    """Groups in sending order.

    Args:
        schedule: name of the planner that made it.
        tensors: the planned tensors, in forward order.
        groups: in sending order, those of backward first; one element type per group. Each tensor
            is in one group of backward. Each reduce-scattered tensor is also in one group of
            forward, which all-gathers it.
        overlap: whether groups are sent while backward runs. Otherwise they are sent when the step
            closes, which is cheaper if communication takes CPU time from backward.

    Raises:
        ValueError: a tensor is missing or named twice, a group mixes element types, or a group of
            backward follows one of forward.

    Example:
        >>> w, b = TensorSpec("w", (3, 5), "float32"), TensorSpec("b", (5,), "float32")
        >>> plan = Plan("single", (w, b), (Group((1, 0)),))
        >>> plan.offsets(0), plan.nbytes(0)
        ((0, 32), 92)
    """

    schedule: str
    tensors: tuple[TensorSpec, ...]
    groups: tuple[Group, ...]
    overlap: bool = True

    def __post_init__(self) -> None:
        unique("tensors", [spec.name for spec in self.tensors])
        self._check_coverage(len(self.tensors))
        for index, group in enumerate(self.groups):
            kinds = {self.tensors[k].real_dtype for k in group.tensors}
            if len(kinds) > 1:
                raise ValueError(f"group {index} mixes element types {sorted(kinds)}")
            if group.phase is Phase.BACKWARD and index >= self.num_backward:
                raise ValueError(f"group {index} of backward stands behind one of forward")

    def _check_coverage(self, num_tensors: int) -> None:
        members = {
            phase: [k for g in self.groups if g.phase is phase for k in g.tensors]
            for phase in Phase
        }
        for phase, seen in members.items():
            if len(set(seen)) != len(seen):
                raise ValueError(f"a tensor is in two groups of the {phase.value} phase")
            if not set(seen) <= set(range(num_tensors)):
                raise ValueError(f"a group of the {phase.value} phase names an unknown tensor")
        if len(members[Phase.BACKWARD]) != num_tensors:
            raise ValueError("the groups do not cover exactly the tensors of the plan")
        reduced = [g for g in self.groups if g.operation is Operation.REDUCE_SCATTER]
        scattered = {k for g in reduced for k in g.tensors}
        if set(members[Phase.FORWARD]) != scattered:
            raise ValueError("exactly the reduce-scattered tensors have to be all-gathered")

    @cached_property
    def num_backward(self) -> int:
        """The number of groups of backward; those of forward follow them."""
        return sum(group.phase is Phase.BACKWARD for group in self.groups)

    @cached_property
    def num_early(self) -> int:
        """The number of groups that may be sent before backward has ended. The last one of backward
        carries the step's flags."""
        return self.num_backward - 1 if self.overlap else 0

    def dtype(self, group: int) -> str:
        """Element type of a group's messages."""
        return self.tensors[self.groups[group].tensors[0]].real_dtype

    def offsets(self, group: int) -> tuple[int, ...]:
        """Byte offset of each tensor of a group in its fusion buffer."""
        return layout([self.tensors[k].nbytes for k in self.groups[group].tensors])[0]

    def nbytes(self, group: int) -> int:
        """Bytes of a group's tensors in its fusion buffer, including padding between them."""
        return layout([self.tensors[k].nbytes for k in self.groups[group].tensors])[1]

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.tensors)

    @cached_property
    def decoupled(self) -> frozenset[TensorSpec]:
        """The tensors that are reduce-scattered and all-gathered."""
        gathered = self.groups[self.num_backward :]
        return frozenset(self.tensors[k] for group in gathered for k in group.tensors)

    @property
    def decoupled_part(self) -> float:
        """The share of :attr:`decoupled` in all bytes, from 0 to 1."""
        return sum(spec.nbytes for spec in self.decoupled) / max(1, self.total_bytes)

    @cached_property
    def wires(self) -> tuple[str, ...]:
        """How groups of backward are sent, sorted and without repetition."""
        return tuple(sorted({group.wire for group in self.groups[: self.num_backward]}))

    def with_wires(self, wire_of: Callable[[int], str]) -> Plan:
        """The same groups, each of backward sent as ``wire_of`` its index."""
        backward = self.groups[: self.num_backward]
        sent = (replace(group, wire=wire_of(k)) for k, group in enumerate(backward))
        return replace(self, groups=(*sent, *self.groups[self.num_backward :]))

    @property
    def summary(self) -> str:
        """A short description, such as ``single, 1 group after backward``."""
        late = "" if self.overlap else " after backward"
        sent = (
            f" of {' and '.join(wire or 'plain' for wire in self.wires)}" if any(self.wires) else ""
        )
        return f"{self.schedule}, {counted(len(self.groups), 'group')}{sent}{late}"

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the plan's canonical JSON; equal exactly if the plans are equal."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data, format ``wfbp-plan/1``."""
        return {
            "format": FORMAT,
            "schedule": self.schedule,
            "overlap": self.overlap,
            "tensors": [
                {"name": s.name, "shape": list(s.shape), "dtype": s.dtype} for s in self.tensors
            ],
            "groups": [
                {
                    "phase": g.phase.value,
                    "operation": g.operation.value,
                    "tensors": list(g.tensors),
                    **({"wire": g.wire} if g.wire else {}),
                }
                for g in self.groups
            ],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        """The plan that :meth:`to_json` wrote; ``ValueError`` if it is invalid."""
        check_format("a plan", data, FORMAT)
        try:
            tensors = tuple(
                TensorSpec(_is(str, t["name"]), _whole(t["shape"]), _is(str, t["dtype"]))
                for t in data["tensors"]
            )
            groups = tuple(
                Group(_whole(g["tensors"]), Operation(g["operation"]), _is(str, g.get("wire", "")))
                for g in data["groups"]
            )
            whole("elements of all tensors", sum(spec.numel for spec in tensors), 0)
            return cls(_is(str, data["schedule"]), tensors, groups, _is(bool, data["overlap"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a valid {FORMAT} document: {error!r}") from error


def _is(kind: type[T], value: Any) -> T:
    """The value, which must be of exactly this type: in JSON, true is no number."""
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, found {value!r}")
    exact: T = value
    return exact


def _whole(values: Any) -> tuple[int, ...]:
    return tuple(_is(int, value) for value in _is(list, values))


def aligned(nbytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def layout(sizes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Aligned byte offsets of consecutive tensors, and the bytes up to the end of the last.

    >>> layout([20, 60, 4])
    ((0, 32, 96), 100)
    """
    offsets = []
    end = 0
    for size in sizes:
        start = aligned(end)
        offsets.append(start)
        end = start + size
    return tuple(offsets), end


def split_by_dtype(
    tensors: Sequence[TensorSpec],
    runs: Iterable[Sequence[int]],
    operation: Operation = Operation.ALL_REDUCE,
) -> tuple[Group, ...]:
    """Groups from runs of tensors: one per element type in each run, order kept."""
    groups: list[Group] = []
    for run in runs:
        by_dtype: dict[str, list[int]] = {}
        for k in run:
            by_dtype.setdefault(tensors[k].real_dtype, []).append(k)
        groups.extend(Group(tuple(k), operation) for k in by_dtype.values())
    return tuple(groups)
