"""What a caller may ask of gradient reduction; the same on one rank as on many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from wfbp.core.planners.threshold_search import ThresholdSearch
from wfbp.core.types import Op, TensorSpec
from wfbp.runtime.candidates import check_schedule

FLOATING = ("float16", "bfloat16", "float32", "float64")


def check_arguments(
    specs: Sequence[TensorSpec],
    schedule: str,
    threshold_bytes: int,
    op: Op,
    passes: int,
    decouples: bool = False,
    user: str = "",
) -> None:
    """Raise unless gradients can be reduced so.

    Args:
        specs: the tensors.
        schedule: a planner's name, or ``auto``.
        threshold_bytes: for the ``threshold`` planner.
        op: how ranks are combined.
        passes: backward passes per step.
        decouples: whether schedules that decouple all-reduce can be served.
        user: who needs whole gradients where they cannot, for messages.

    Raises:
        ImportError: ``dear`` without the ``search`` extra.
        ValueError: the argument, what it is, and what it may be.
    """
    check_schedule(schedule, decouples, user)
    if schedule == "dear":
        ThresholdSearch()  # a missing library is told now and not in the middle of training
    if threshold_bytes < 1:
        raise ValueError(f"threshold_bytes is {threshold_bytes}; expected at least 1")
    if op not in (Op.AVERAGE, Op.SUM):
        raise ValueError(f"op is {op}; gradients can be combined by {Op.AVERAGE} or {Op.SUM}")
    if passes < 1:
        raise ValueError(f"backward_passes_per_step is {passes}; expected at least 1")
    if not specs:
        raise ValueError("there are no tensors to reduce")
    twice = [name for name, times in Counter(s.name for s in specs).items() if times > 1]
    if twice:
        raise ValueError(f"tensor names must be unique; found twice: {', '.join(twice)}")
    for spec in specs:
        if spec.dtype not in FLOATING:
            raise ValueError(f"{spec.name} is {spec.dtype}; expected one of {FLOATING}")
