"""The operations on NumPy arrays, and CuPy's; what programs call is in ``wfbp.dispatch``.

What ranks do is that of ``runtime.collectives``, as for tensors.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from wfbp.comm.backend import HALF, Buffer, word_dtype
from wfbp.runtime.collectives import calls
from wfbp.runtime.collectives.arithmetic import ITEM
from wfbp.runtime.collectives.calls import Operand
from wfbp.runtime.collectives.operations import Call, chosen_reduction
from wfbp.runtime.collectives.process_sets import ProcessSet, global_process_set
from wfbp.runtime.collectives.request import Reduction
from wfbp.runtime.consistency import (
    Array,
    check_bytes,
    check_writable,
    dtype_key,
    flattened,
    in_native_order,
)


class ArrayOperand(Operand[Any]):
    """One array on its way into an operation.

    Args:
        value: an array of NumPy or CuPy, or what NumPy makes one of.
        in_place: whether the result goes into it.
        label: of the array, for messages.

    Raises:
        TypeError: no array, where the result goes into it.
        ValueError: an array of Python objects, or one that is read-only.
    """

    def __init__(self, value: Any, in_place: bool = False, label: str = "array") -> None:
        self._on_device = hasattr(value, "__cuda_array_interface__")
        if in_place and not self._on_device:
            check_writable(label, value)
        # Arrays of a device travel by the host, as those of NumPy do.
        source = _cupy().asnumpy(_cupy().asarray(value)) if self._on_device else np.asarray(value)
        check_bytes(label, source)
        self._value, self._source, self._in_place = value, source, in_place
        self._type = source.dtype if source.dtype.isnative else source.dtype.newbyteorder("=")
        self._private: Array | None = None
        self.dtype = dtype_key(self._type)
        self.shape = source.shape

    def data(self) -> Buffer:
        source = in_native_order(self._source)
        if self._in_place and source.flags.c_contiguous:
            self._private = source
        else:
            self._private = np.array(source, order="C", copy=True)
        flat = flattened(self._private)
        return flat.view(word_dtype(self.dtype)) if self.dtype in HALF else flat

    def whole(self, data: Buffer) -> Any:
        assert self._private is not None, "an operation begins with its data"
        if not self._in_place:
            return self._placed(self._private)
        if self._on_device:
            with self._device():
                _cupy().asarray(self._value)[...] = _cupy().asarray(self._private)
        elif self._private is not self._value:
            np.copyto(self._value, self._private)
        return self._value

    def rows(self, data: Buffer, count: int) -> Any:
        array = data.view(np.uint8).view(self._type).reshape(count, *self.shape[1:])
        return self._placed(array)

    def _placed(self, array: Array) -> Any:
        """A result where the operand is."""
        if not self._on_device:
            return array
        with self._device():
            return _cupy().asarray(array)

    def _device(self) -> Any:
        """Makes the operand's device CuPy's current one."""
        return getattr(self._value, "device", None) or nullcontext()


def perform(
    function: str,
    value: Any,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    **options: Any,
) -> Any:
    """What the function of ``wfbp.dispatch`` does with an array, or several.

    Args:
        function: its name, such as ``grouped_allreduce_async_``.
        value: what it was given first.
        name: as there.
        process_set: as there.
        options: its other arguments.

    Returns:
        A result or, of an asynchronous function, a handle.
    """
    words = function.split("_")
    in_place, is_async, is_grouped = words[-1] == "", "async" in words, words[0] == "grouped"
    make = _MAKERS[words[1] if is_grouped else words[0]]
    if not is_grouped:
        call = make(ArrayOperand(value, in_place), name, process_set, **options)
        return calls.submit(call) if is_async else calls.run(call)
    group = [
        make(ArrayOperand(each, in_place, f"tensors[{index}]"), label, process_set, **options)
        for index, (each, label) in enumerate(
            zip(value, calls.member_names(name, len(value)), strict=True)
        )
    ]
    return calls.submit_all(group) if is_async else calls.run_all(group)


def _reducing(make: Callable[..., Call[Any]]) -> Callable[..., Call[Any]]:
    """An operation of ``calls`` that combines arrays, with the arguments that programs give it."""

    def call(
        operand: ArrayOperand,
        name: str | None,
        process_set: ProcessSet,
        op: Reduction,
        prescale_factor: float,
        postscale_factor: float,
    ) -> Call[Any]:
        _check_numbers(operand)
        op = chosen_reduction(None, op)
        return make(operand, name, process_set, op, prescale_factor, postscale_factor)

    return call


def _alltoall(
    operand: ArrayOperand,
    name: str | None,
    process_set: ProcessSet,
    splits: Sequence[int] | Array | None = None,
) -> Call[Any]:
    if splits is None:
        return calls.alltoall(operand, name, process_set, None)
    counts = np.asarray(splits)
    if counts.ndim != 1 or (counts.size and counts.dtype.kind not in "iu"):
        raise calls.wrong_splits(counts.dtype, counts.shape)
    rows: Sequence[int] = counts.tolist()
    return calls.alltoall_counted(
        operand, name, process_set, rows, lambda counts: np.array(counts, np.int32)
    )


_MAKERS: dict[str, Callable[..., Call[Any]]] = {
    "allreduce": _reducing(calls.allreduce),
    "allgather": calls.allgather,
    "broadcast": calls.broadcast,
    "alltoall": _alltoall,
    "reducescatter": _reducing(calls.reducescatter),
}


def _check_numbers(operand: ArrayOperand) -> None:
    """Raise ``ValueError`` unless elements of this type can be combined."""
    if operand.dtype not in ITEM:
        known = ", ".join(ITEM)
        raise ValueError(
            f"elements of type {operand.dtype!r} cannot be combined; expected one of {known}"
        )


def _cupy() -> Any:
    """CuPy, which a program has that has arrays of a device."""
    return importlib.import_module("cupy")
