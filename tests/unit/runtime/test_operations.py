"""Collectives on arrays, on ranks that are threads; public functions on one rank."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import wfbp
from tests.support.ranks import run_ranks
from wfbp import collectives
from wfbp.core.types import Op
from wfbp.errors import DisagreementError, NotInitializedError
from wfbp.runtime.api import parameters
from wfbp.runtime.consistency import dtype_key, in_native_order
from wfbp.runtime.runtime import Runtime

# Several ranks.


def test_broadcast_many_names_the_first_difference() -> None:
    def body(runtime: Runtime) -> None:
        rows = [("a", "float32", (3,)), ("b" if runtime.rank else "c", "int64", (1,))]
        buffers = [np.zeros(12, np.uint8), np.zeros(8, np.uint8)]
        parameters.broadcast_buffers(runtime, rows, buffers, root_rank=0)

    for result in run_ranks(3, body):
        assert isinstance(result, DisagreementError)
        told = "ranks disagree on c (rank 0: int64(1,); ranks 1, 2: missing), b (rank 0: missing; "
        assert told in str(result)


# One rank.


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<i8", ">i8", "uint8", ml_dtypes.bfloat16])
def test_native_keeps_values(dtype: Any) -> None:
    array = np.array([1, 2, 100]).astype(dtype)
    found = in_native_order(array)
    assert found.dtype.isnative
    assert found.tolist() == array.tolist()
    assert (found is array) == array.dtype.isnative


def test_kinds_of_fields_differ() -> None:
    first, second = np.dtype([("a", "<f4")]), np.dtype([("b", "<i4")])
    assert dtype_key(first) != dtype_key(second)
    assert dtype_key(np.dtype("<f4")) == "float32"


@pytest.mark.usefixtures("alone")
def test_what_cannot_be_filled() -> None:
    fixed = np.zeros(2)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="w is read-only"):
        wfbp.broadcast_parameters({"w": fixed})
    with pytest.raises(TypeError, match="w is a list; expected a NumPy array"):
        wfbp.broadcast_parameters({"w": [1.0]})


@pytest.mark.usefixtures("alone")
def test_alone_everything_is_its_own_answer() -> None:
    array = np.array([[1.5, 2.5]], np.float32)
    for op in Op:
        found = wfbp.allreduce(array, op=op)
        assert np.array_equal(found, array)
        assert found is not array
        assert not np.shares_memory(found, array)
    assert np.array_equal(wfbp.broadcast(array, 0), array)
    assert np.array_equal(wfbp.allgather(array), array)
    assert wfbp.broadcast_object({"a": [1]}) == {"a": [1]}
    assert wfbp.allgather_object("x") == ["x"]
    assert wfbp.join() == 0
    wfbp.barrier()
    assert (wfbp.rank(), wfbp.size(), wfbp.local_rank(), wfbp.local_size()) == (0, 1, 0, 1)
    half = array.astype(ml_dtypes.bfloat16)
    assert wfbp.allreduce(half).dtype == half.dtype
    assert wfbp.allgather(half).dtype == half.dtype


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("root", [-1, 1, 7])
def test_no_such_root(root: int) -> None:
    for call in (
        lambda: wfbp.broadcast(np.zeros(1), root),
        lambda: wfbp.broadcast_object(1, root),
        lambda: wfbp.broadcast_parameters({"a": np.zeros(1)}, root),
    ):
        with pytest.raises(ValueError, match=f"root_rank is {root}; expected "):
            call()


@pytest.mark.usefixtures("alone")
def test_what_cannot_be_reduced() -> None:
    with pytest.raises(ValueError, match="'uint16' cannot be combined"):
        wfbp.allreduce(np.zeros(2, np.uint16))
    with pytest.raises(ValueError, match=r"op is wfbp\.Product; complex128 is combined by"):
        wfbp.allreduce(np.zeros(2, complex), op=wfbp.Product)
    with pytest.raises(ValueError, match=r"op is 'sum'; expected one of wfbp\.Sum, wfbp\.Average"):
        wfbp.allreduce(np.zeros(2), op="sum")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one dimension"):
        wfbp.allgather(np.float64(1))
    with pytest.raises(ValueError, match="object"):
        wfbp.broadcast_parameters({"a": np.array([None])})


@pytest.mark.parametrize(
    "name",
    [
        "rank", "size", "local_rank", "local_size", "barrier", "allreduce", "broadcast",
        "allgather", "broadcast_object", "allgather_object", "broadcast_parameters",
        "GradientReducer",
    ],
)  # fmt: skip
def test_before_init(name: str) -> None:
    arguments: dict[str, tuple[Any, ...]] = {
        "allreduce": (np.zeros(1),),
        "broadcast": (np.zeros(1), 0),
        "allgather": (np.zeros(1),),
        "allgather_object": (1,),
        "broadcast_parameters": ({"a": np.zeros(1)},),
        "GradientReducer": ([("a", np.zeros(1))],),
    }
    with pytest.raises(NotInitializedError, match=rf"{name}\(\) needs .* call wfbp\.init\(\)"):
        getattr(wfbp, name)(*arguments.get(name, ()))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "array",
    [
        np.array(["a", "bc"]),
        np.array([1 + 2j, 3]),
        np.array([(1.5, 2)], [("x", "<f4"), ("y", "i8")]),
        np.array(["2026-01-02"], "datetime64[D]"),
        np.zeros((0, 3), np.uint32),
        np.zeros((2, 0), np.uint64),
    ],
    ids=lambda array: array.dtype.kind + str(array.shape),
)
def test_what_only_travels_may_be_of_any_type(array: Any) -> None:
    for found in (wfbp.broadcast(array, 0), wfbp.allgather(array), wfbp.alltoall(array)):
        assert found.dtype == array.dtype
        assert found.shape == array.shape
        assert found.tolist() == array.tolist()


@pytest.mark.usefixtures("alone")
def test_arrays_in_place() -> None:
    whole = np.arange(12.0).reshape(3, 4)
    columns = whole.T[::2]  # every second column, in another order and with gaps
    assert wfbp.allreduce_(columns, op=wfbp.Sum, prescale_factor=2.0) is columns
    assert whole[0].tolist() == [0.0, 1.0, 4.0, 3.0]
    swapped = np.array([1, 2], ">i4")
    assert wfbp.broadcast_(swapped, 0) is swapped
    assert swapped.tolist() == [1, 2]
    first, second = np.ones(2), np.ones(())
    both = collectives.grouped_allreduce_([first, second], op=wfbp.Sum, postscale_factor=3.0)
    assert both[0] is first
    assert (first.tolist(), second.tolist()) == ([3.0, 3.0], 3.0)
    handle = collectives.allreduce_async_(first)
    assert wfbp.synchronize(handle) is first
    assert wfbp.synchronize(collectives.broadcast_async_(second, 0)) is second
    assert wfbp.synchronize(collectives.grouped_allreduce_async_([first]))[0] is first
    fixed = np.zeros(2)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="array is read-only"):
        wfbp.allreduce_(fixed)
    with pytest.raises(TypeError, match=r"tensors\[1\] is a list; expected a NumPy array"):
        collectives.grouped_allreduce_([first, [1.0]])  # type: ignore[list-item]
    assert wfbp.grouped_allreduce([]) == []


@pytest.mark.usefixtures("alone")
def test_splits() -> None:
    rows, received = wfbp.alltoall(np.arange(3), np.array([3]))
    assert (rows.tolist(), received.tolist(), received.dtype) == ([0, 1, 2], [3], np.int32)
    with pytest.raises(ValueError, match="splits are float64 of shape"):
        wfbp.alltoall(np.arange(3), np.array([3.0]))
    with pytest.raises(ValueError, match="splits are float64 of shape"):
        wfbp.alltoall(np.arange(3), [3.0])
    with pytest.raises(ValueError, match="expected 1 numbers of rows that add up to 3"):
        wfbp.alltoall(np.arange(3), [2])
    with pytest.raises(ValueError, match="alltoall needs at least one dimension"):
        wfbp.alltoall(np.float64(3))


class DeviceArray:
    """What CuPy's arrays are to operations, in memory of the host."""

    __cuda_array_interface__: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, values: Any) -> None:
        self.values = np.array(values)
        self.device = nullcontext()

    def __setitem__(self, where: Any, value: DeviceArray) -> None:
        self.values[where] = value.values


@pytest.mark.usefixtures("alone")
def test_arrays_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def asarray(value: Any) -> DeviceArray:
        return value if isinstance(value, DeviceArray) else DeviceArray(value)

    cupy: Any = ModuleType("cupy")
    cupy.asarray, cupy.asnumpy = asarray, lambda array: array.values.copy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    array: Any = DeviceArray([1.0, 2.0])
    for found in (wfbp.allreduce(array), wfbp.allgather(array), wfbp.broadcast(array, 0)):
        assert isinstance(found, DeviceArray)
        assert found is not array
        assert found.values.tolist() == [1.0, 2.0]
    assert wfbp.allreduce_(array, op=wfbp.Sum, postscale_factor=2.0) is array
    assert array.values.tolist() == [2.0, 4.0]


def test_the_set_of_all_ranks_is_named(alone: None) -> None:
    for made in ([0], wfbp.global_process_set):
        with pytest.raises(ValueError, match=r"exists already: use global_process_set"):
            wfbp.add_process_set(made)
