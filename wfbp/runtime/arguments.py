"""Options of gradient reduction and their checks; the same on one rank as on many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

from wfbp.core.planners import check_schedule
from wfbp.core.types import WIRE_DTYPES, Op, TensorSpec

FLOATING = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")


@dataclass(frozen=True, slots=True)
class ReducerOptions:
    """Settings of a reducer, equal on every rank."""

    schedule: str  # a planner's name, or ``auto``
    threshold_bytes: int  # for the ``threshold`` planner, and for others' first plan
    op: Op = Op.AVERAGE
    passes: int = 1  # backward passes per step; a tensor is ready after so many gradients
    decouples: bool = False  # whether each rank may update its shards, and ``Reducer.gather`` them
    name: str = "optimizer"  # for messages
    wire_dtype: str = ""  # of WIRE_DTYPES, for wider gradients; empty for their own

    def check(self, specs: Sequence[TensorSpec], user: str = "") -> None:
        """Raise unless these tensors' gradients can be reduced; ``user`` is for messages."""
        check_schedule(self.schedule, self.decouples, user)
        _check_whole("threshold_bytes", self.threshold_bytes)
        _check_whole("backward_passes_per_step", self.passes)
        if self.threshold_bytes < 1:
            raise ValueError(f"threshold_bytes is {self.threshold_bytes}; expected at least 1")
        if self.op not in (Op.AVERAGE, Op.SUM):
            raise ValueError(
                f"op is {self.op}; gradients can be combined by {Op.AVERAGE} or {Op.SUM}"
            )
        if self.wire_dtype and self.wire_dtype not in WIRE_DTYPES:
            raise ValueError(f"wire_dtype is {self.wire_dtype!r}; expected one of {WIRE_DTYPES}")
        if self.passes < 1:
            raise ValueError(f"backward_passes_per_step is {self.passes}; expected at least 1")
        if not specs:
            raise ValueError("there are no tensors to reduce")
        twice = [name for name, times in Counter(s.name for s in specs).items() if times > 1]
        if twice:
            raise ValueError(f"tensor names must be unique; found twice: {', '.join(twice)}")
        for spec in specs:
            if spec.dtype not in FLOATING:
                raise ValueError(f"{spec.name} is {spec.dtype}; expected one of {FLOATING}")


def _check_whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} is {value!r}; expected a whole number")
