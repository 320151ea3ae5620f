"""Arrays of CuPy in named operations; they are sent through the host."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from typing import Any

from wfbp.comm.arrays import Buffer
from wfbp.runtime.collectives.operands import Operand, array_operand


def device_operand(value: Any, in_place: bool, label: str) -> Operand:
    """An array on a device; results lie there, too."""
    cupy = import_module("cupy")
    operand = array_operand(cupy.asnumpy(cupy.asarray(value)), label=label)

    def placed(array: Any) -> Any:
        with getattr(value, "device", None) or nullcontext():
            return cupy.asarray(array)

    def whole() -> Any:
        if not in_place:
            return placed(operand.whole())
        with getattr(value, "device", None) or nullcontext():
            cupy.asarray(value)[...] = cupy.asarray(operand.whole())
        return value

    def rows(data: Buffer, count: int) -> Any:
        return placed(operand.rows(data, count))

    return operand._replace(whole=whole, rows=rows)
