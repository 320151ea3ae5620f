"""Operations on NumPy's and CuPy's arrays; programs call the functions of ``wfbp.collectives``."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from typing import Any

import numpy as np

from wfbp.comm.backend import HALF, Buffer, word_dtype
from wfbp.runtime.collectives import operands
from wfbp.runtime.collectives.arithmetic import ITEM
from wfbp.runtime.collectives.forms import Form
from wfbp.runtime.collectives.named_lane import NamedOperation, Outcome
from wfbp.runtime.collectives.operands import Operand, chosen_op
from wfbp.runtime.collectives.process_sets import ProcessSet
from wfbp.runtime.consistency import (
    Array,
    check_bytes,
    check_writable,
    dtype_key,
    flattened,
    in_native_order,
)


class ArrayOperand(Operand[Any]):
    """Operand of NumPy's or CuPy's arrays, or of values that NumPy converts."""

    def __init__(self, value: Any, in_place: bool = False, label: str = "array") -> None:
        self._on_device = hasattr(value, "__cuda_array_interface__")
        if in_place and not self._on_device:
            check_writable(label, value)
        # Arrays of a device are sent through the host, as those of NumPy.
        source = _cupy().asnumpy(_cupy().asarray(value)) if self._on_device else np.asarray(value)
        check_bytes(label, source)
        self._value, self._source, self._in_place = value, source, in_place
        self._type = source.dtype if source.dtype.isnative else source.dtype.newbyteorder("=")
        self._private: Array = source
        self.dtype = dtype_key(self._type)
        self.shape = source.shape

    def data(self) -> Buffer:
        source = in_native_order(self._source)
        if not (self._in_place and source.flags.c_contiguous):
            source = np.array(source, order="C", copy=True)
        self._private = source
        flat = flattened(source)
        return flat.view(word_dtype(self.dtype)) if self.dtype in HALF else flat

    def whole(self, outcome: Outcome) -> Any:
        if not self._in_place:
            return self._placed(self._private)
        if self._on_device:
            with self._device():
                _cupy().asarray(self._value)[...] = _cupy().asarray(self._private)
        elif self._private is not self._value:
            np.copyto(self._value, self._private)
        return self._value

    def rows(self, outcome: Outcome, count: int) -> Any:
        array = outcome.data.view(np.uint8).view(self._type).reshape(count, *self.shape[1:])
        return self._placed(array)

    def counts(self, rows: tuple[int, ...]) -> Any:
        return np.array(rows, np.int32)

    def _placed(self, array: Array) -> Any:
        """A result on the operand's device."""
        if not self._on_device:
            return array
        with self._device():
            return _cupy().asarray(array)

    def _device(self) -> Any:
        """Makes the operand's device CuPy's current one."""
        return getattr(self._value, "device", None) or nullcontext()


def perform(
    form: Form, value: Any, name: str | None, process_set: ProcessSet, **options: Any
) -> Any:
    """Perform a public function on one array or several; ``options`` are its other arguments."""
    if "op" in options:
        options["op"] = chosen_op(None, options["op"])
    if options.get("splits") is not None:
        counts = np.asarray(options["splits"])
        if counts.ndim != 1 or (counts.size and counts.dtype.kind not in "iu"):
            raise operands.wrong_splits(counts.dtype, counts.shape)
        options["splits"] = counts.tolist()

    def make(each: Any, label: str, member: str | None) -> NamedOperation[Any]:
        label = label if form.grouped else "array"
        operand = ArrayOperand(each, form.in_place, label)
        if "op" in options and operand.dtype not in ITEM:
            raise ValueError(
                f"elements of type {operand.dtype!r} cannot be combined; expected one of "
                f"{', '.join(ITEM)}"
            )
        return operands.make_operation(form.kind, operand, member, process_set, **options)

    return operands.perform(form, value, name, make)


def _cupy() -> Any:
    """CuPy, which programs with arrays of a device have."""
    return importlib.import_module("cupy")
