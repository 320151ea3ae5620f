"""One rank's gradients as a framework has them: fresh memory, or the views of the step before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from wfbp.comm.arrays import storage_dtype
from wfbp.core.types import TensorSpec
from wfbp.runtime.arguments import ReducerOptions
from wfbp.runtime.reducer import Reducer
from wfbp.runtime.runtime import Runtime
from wfbp.runtime.step import BufferView, GradientRef


def make_specs(sizes: list[int], dtype: str = "float64") -> list[TensorSpec]:
    """Vectors of these sizes."""
    return [TensorSpec(f"t{k}", (n,), dtype) for k, n in enumerate(sizes)]


def make_engine(runtime: Runtime, specs: Sequence[TensorSpec], **settings: Any) -> Reducer:
    """An engine from fields of its options and from its own arguments."""
    names = {field.name for field in fields(ReducerOptions)}
    options = {k: settings.pop(k) for k in list(settings) if k in names}
    options = {"schedule": "auto", "threshold_bytes": 64, **options}
    return Reducer(runtime, specs, ReducerOptions(**options), **settings)


class Trainer:
    """Accumulates, announces, zeroes and takes what is reduced.

    All elements of a tensor have one value, so a tensor is known by a number.
    """

    def __init__(self, runtime: Runtime, specs: list[TensorSpec], **options: Any) -> None:
        self.rank, self.size = runtime.rank, runtime.size
        self.specs = specs
        self.grads: list[np.ndarray[Any, Any] | None] = [None] * len(specs)
        self.engine = make_engine(runtime, specs, fetch=self.fetch, **options)

    def fetch(self, index: int) -> GradientRef | None:
        grad = self.grads[index]
        return None if grad is None else (address(grad), grad)

    def accumulate(self, index: int, value: float, announce: bool = True) -> None:
        """As autograd does: into what is there, or anew; then the hook."""
        spec = self.specs[index]
        grad = self.grads[index]
        if grad is None:
            grad = self.grads[index] = np.full(spec.shape, value, spec.dtype)
        else:
            grad += value
        if announce:
            self.engine.mark_ready(index, address(grad), grad)

    def synchronize(self) -> list[float | None]:
        """Reduced values, one number per tensor, after checking that all its elements agree."""
        found: list[float | None] = []
        for k, slot in enumerate(self.engine.synchronize()):
            if slot is None:
                assert self.grads[k] is None
                found.append(None)
                continue
            grad = self.grads[k] = view(slot, self.specs[k])
            found.append(number(grad))
        return found

    def forward(self) -> None:
        """What is computed is there at once."""

    backward_ends = finish = forward

    def check(self, wanted: list[float | None], where: str) -> None:
        """Reduce, and compare."""
        assert self.synchronize() == pytest.approx(wanted), where

    def zero(self, to_none: bool = True) -> None:
        self.engine.discard()
        for k, grad in enumerate(self.grads):
            if to_none:
                self.grads[k] = None
            elif grad is not None:
                grad[:] = 0


def number(grad: np.ndarray[Any, Any]) -> float:
    """The value of all elements; 0 where there are none."""
    if not grad.size:
        return 0.0
    assert (grad == grad.flat[0]).all()
    return float(grad.flat[0])


def address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def view(slot: BufferView, spec: TensorSpec) -> np.ndarray[Any, Any]:
    return slot.data.view(storage_dtype(spec.dtype)).reshape(spec.shape)


def mean(values: list[float | None]) -> float | None:
    """Over ranks; one without a gradient sends zero."""
    if all(v is None for v in values):
        return None
    return sum(v or 0.0 for v in values) / len(values)
