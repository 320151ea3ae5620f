"""Gradient reduction for plain arrays: any training loop that knows when a gradient exists."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from wfbp.comm.arrays import MemoryAt
from wfbp.core.types import Op, TensorSpec
from wfbp.runtime import process, signals
from wfbp.runtime.arguments import Compression, ReducerOptions, wires_of
from wfbp.runtime.consistency import in_native_order
from wfbp.runtime.reducer import Reducer
from wfbp.runtime.step import BufferView

Array = npt.NDArray[Any]


class GradientReducer:
    """Averages gradients over all ranks while the rest of backward computes.

    For one training thread. Call :meth:`mark_ready` as each gradient appears, in any order, and
    :meth:`wait` when all are needed.

    Args:
        specs: the gradients, in forward order: a ``TensorSpec`` each, or a pair of name and
            array of that shape and element type. Equal on every rank.
        schedule: ``auto``, ``oasr``, ``mgwfbp``, ``layerwise``, ``single`` or ``threshold``; by
            default ``WFBP_SCHEDULE``, or ``auto``.
        threshold_bytes: group size of ``threshold``.
        op: ``Average`` or ``Sum``.
        name: for messages.
        compression: how gradients are sent: ``none``, ``fp16``, ``bf16``, ``int8``, ``fp8`` or
            ``int4``, or a mapping from patterns of names to these, as
            ``{"*.head": "bf16", "*": "int8"}``; by default ``WFBP_COMPRESSION``, or ``none``. The
            last three are for float32 of several dimensions and at least 4 KiB per rank; the rest
            is sent as it is. ``auto:bf16``, ``auto:int8`` and ``auto:int4`` try plans with exact
            and with smaller gradients.

    Raises:
        NotInitializedError: before ``wfbp.init()``.
        TypeError: no pairs of name and array, or an argument of another type.
        ValueError: a bad argument.
        DisagreementError: other ranks passed other tensors or settings.

    Example:
        >>> import wfbp
        >>> wfbp.init()
        >>> reducer = wfbp.GradientReducer([("w", np.zeros(3, np.float32))])
        >>> reducer.mark_ready(0, np.full(3, 2.0, np.float32))
        >>> reducer.wait()[0]
        array([2., 2., 2.], dtype=float32)
    """

    def __init__(
        self,
        specs: Iterable[TensorSpec | tuple[str, Any]],
        *,
        schedule: str | None = None,
        threshold_bytes: int | None = None,
        op: Op = Op.AVERAGE,
        name: str = "reducer",
        compression: Compression | None = None,
    ) -> None:
        runtime = process.current("GradientReducer()")
        self._runtime = runtime
        if not isinstance(specs, Iterable):
            raise TypeError(f"GradientReducer needs pairs of name and array, found {specs!r}")
        self.specs = tuple(_spec(item) for item in specs)
        self._arrays: dict[int, Array] = {}
        self._reducer: Reducer | None = None
        config = runtime.config
        schedule = config.schedule if schedule is None else schedule
        limit_bytes = config.threshold_bytes if threshold_bytes is None else threshold_bytes
        names = [spec.name for spec in self.specs]
        wire, wires = wires_of(config.compression if compression is None else compression, names)
        options = ReducerOptions(schedule, limit_bytes, op, name=name, wire=wire, wires=wires)
        options.check(self.specs, user="GradientReducer")
        if runtime.size > 1:
            self._reducer = Reducer(runtime, self.specs, options)
            weakref.finalize(self, self._reducer.close)

    def mark_ready(self, index: int, array: Array) -> None:
        """Report that a gradient exists; it must not change until :meth:`wait` returns.

        Args:
            index: into the specs.
            array: of the spec's shape and element type.

        Raises:
            TypeError: the index is no integer, or the array is no NumPy array.
            ValueError: wrong index, shape or element type, or marked twice in one step.
        """
        if not isinstance(index, int | np.integer):
            raise TypeError(f"index is {index!r}; expected the gradient's number in specs")
        if not isinstance(array, np.ndarray | np.generic):
            raise TypeError(
                f"gradient {index} is a {type(array).__qualname__}; expected a NumPy array"
            )
        if not 0 <= index < len(self.specs):
            raise ValueError(f"index is {index}; expected 0 to {len(self.specs) - 1}")
        spec = self.specs[index]
        if array.shape != spec.shape or array.dtype.name != spec.dtype:
            raise ValueError(
                f"{spec.name}: expected {spec.dtype}{spec.shape}, "
                f"found {array.dtype.name}{array.shape}"
            )
        if index in self._arrays:
            raise ValueError(f"{spec.name} was marked ready twice; call wait() once per step")
        # Not ascontiguousarray(), which would lose a shape of ().
        array = np.asarray(in_native_order(array), order="C")
        self._arrays[index] = array
        if self._reducer is not None:
            self._reducer.mark_ready(index, array.__array_interface__["data"][0], array)

    def wait(self) -> list[Array | None]:
        """Close the step and wait until every gradient is reduced.

        Signals that arrive meanwhile are handled at the end, when the step is complete.

        Returns:
            Per tensor the reduced gradient; None if no rank had one. Later steps do not overwrite
            arrays that the program keeps.

        Raises:
            WfbpError: ranks disagree, failed, or did not answer in time.
        """
        arrays, self._arrays = self._arrays, {}
        if self._reducer is None:
            self._runtime.check()
            return [arrays.get(index) for index in range(len(self.specs))]
        with signals.deferred:
            views = self._reducer.synchronize()
            return [
                None if view is None else _array(view, spec)
                for view, spec in zip(views, self.specs, strict=True)
            ]

    def report(self) -> dict[str, Any]:
        """The plan in use, and how training goes; empty with one rank.

        Keys and units are those of the report of a PyTorch optimizer
        (:meth:`wfbp.torch.DistributedOptimizerBase.report`).
        """
        return self._reducer.report() if self._reducer is not None else {}


def _spec(item: TensorSpec | tuple[str, Any]) -> TensorSpec:
    if isinstance(item, TensorSpec):
        return item
    if not (isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], str)):
        raise TypeError(
            f"GradientReducer needs pairs of name and array, found {type(item).__qualname__} "
            f"{str(item)[:40]!r}; pass list(arrays.items()) of a mapping"
        )
    name, array = item
    array = np.asarray(array)
    return TensorSpec(name, array.shape, array.dtype.name)


class _LentArray:
    """An array of the program's in memory of a reducer."""

    def __init__(self, block: MemoryAt) -> None:
        self._block = weakref.ref(block)  # which every array in it keeps

    def is_used(self) -> bool:
        return self._block() is not None


def _array(view: BufferView, spec: TensorSpec) -> Array:
    block = MemoryAt(view.address, view.data.nbytes, view.data)
    if view.lent is not None:
        view.lent[:] = [_LentArray(block)]
    data = np.asarray(block)
    if spec.dtype == "bfloat16":
        import ml_dtypes  # noqa: F401 - which adds the type to NumPy's
    return data.view(spec.dtype).reshape(spec.shape)
