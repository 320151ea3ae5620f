"""A trace: sizes and compute times of the tensors of one training step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from wfbp.core.checks import check_format, instance, number, read_json, unique, whole
from wfbp.core.types import TensorSpec

FORMAT = "wfbp-trace/1"


@dataclass(frozen=True, slots=True)
class TraceTensor:
    """One tensor and its compute times.

    Args:
        spec: name, shape and element type.
        forward_s: seconds of forward from this tensor's first use to the next one's.
        backward_s: seconds of backward from the previous gradient to this one's.
    """

    spec: TensorSpec
    forward_s: float
    backward_s: float

    def __post_init__(self) -> None:
        number(f"tensor {self.spec.name!r}: forward_s", self.forward_s)
        number(f"tensor {self.spec.name!r}: backward_s", self.backward_s)


@dataclass(frozen=True)  # no slots: derived values are computed once
class Trace:
    """Tensors in forward order; backward computes them in reverse.

    Args:
        model: name for people.
        tensors: in forward order.
        other_s: seconds of an iteration outside forward and backward (data, optimizer).

    Example:
        >>> w = TraceTensor(TensorSpec("w", (4,), "float32"), forward_s=1e-3, backward_s=2e-3)
        >>> b = TraceTensor(TensorSpec("b", (2,), "float32"), forward_s=0.0, backward_s=1e-3)
        >>> Trace("tiny", (w, b)).ready_times_s
        [0.001, 0.003]
    """

    model: str
    tensors: tuple[TraceTensor, ...]
    other_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.tensors:
            raise ValueError(f"trace {self.model!r} has no tensors")
        unique(f"trace {self.model!r}", [t.spec.name for t in self.tensors])
        number(f"trace {self.model!r}: other_s", self.other_s)
        whole(f"trace {self.model!r}: elements of all tensors", sum(s.numel for s in self.specs), 0)

    @classmethod
    def uniform(cls, names: str, numel: int, forward_s: float, backward_s: float) -> Trace:
        """A model of equal float32 tensors with names of one letter, for examples."""
        specs = [TensorSpec(name, (numel,), "float32") for name in names]
        return cls("uniform", tuple(TraceTensor(s, forward_s, backward_s) for s in specs))

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Specs in forward order."""
        return tuple(t.spec for t in self.tensors)

    @cached_property
    def backward_bytes(self) -> list[int]:
        """Bytes m_1..m_L in backward order."""
        return [t.spec.nbytes for t in reversed(self.tensors)]

    @cached_property
    def ready_times_s(self) -> list[float]:
        """Ready times r_1..r_L in backward order, seconds from the start of backward."""
        return list(accumulate(t.backward_s for t in reversed(self.tensors)))

    @cached_property
    def forward_s(self) -> float:
        """T_f, seconds."""
        return math.fsum(t.forward_s for t in self.tensors)

    @property
    def backward_s(self) -> float:
        """T_b, seconds; the last ready time."""
        return self.ready_times_s[-1]

    def slower(self, factor: float) -> Trace:
        """The same if compute takes ``factor`` times as long."""
        rows = tuple(
            TraceTensor(t.spec, t.forward_s * factor, t.backward_s * factor) for t in self.tensors
        )
        return Trace(self.model, rows, self.other_s * factor)

    def to_json(self) -> dict[str, Any]:
        """The trace as plain data, format ``wfbp-trace/1``."""
        return {
            "format": FORMAT,
            "model": self.model,
            "tensors_in": "forward order",
            "other_s": self.other_s,
            "tensors": [
                {
                    "name": t.spec.name,
                    "numel": t.spec.numel,
                    "dtype": t.spec.dtype,
                    "forward_s": t.forward_s,
                    "backward_s": t.backward_s,
                }
                for t in self.tensors
            ],
        }

    @classmethod
    def from_json(cls, data: Any) -> Trace:
        """The trace in a parsed ``wfbp-trace/1`` document; ``ValueError`` names the wrong place."""
        check_format("a trace", data, FORMAT)
        rows = instance("tensors", data.get("tensors"), list)
        return cls(
            str(data.get("model", "")),
            tuple(_tensor(i, row) for i, row in enumerate(rows)),
            number("other_s", data.get("other_s", 0.0)),
        )

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """The trace in a JSON file; ``ValueError`` starts with the file's name."""
        return read_json(path, cls.from_json)


def _tensor(index: int, row: Any) -> TraceTensor:
    place = f"tensors[{index}]"
    needed = ("name", "numel", "forward_s", "backward_s")
    missing = [key for key in needed if key not in instance(place, row, dict)]
    if missing:
        raise ValueError(f"{place}: missing {', '.join(missing)}")
    numel = whole(f"{place}.numel", row["numel"], 0)
    try:
        return TraceTensor(
            TensorSpec(str(row["name"]), (numel,), str(row.get("dtype", "float32"))),
            number("forward_s", row["forward_s"]),
            number("backward_s", row["backward_s"]),
        )
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
