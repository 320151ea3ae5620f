"""Collectives on arrays, on ranks that are threads; public functions on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import wfbp
from tests.support.ranks import all_well, run_ranks
from wfbp.comm.local import LocalWorld
from wfbp.config import Config
from wfbp.core.types import Op
from wfbp.errors import DisagreementError, NotInitializedError, PeerError
from wfbp.runtime.api import array_collectives
from wfbp.runtime.consistency import (
    check_consistent,
    describe_array,
    dtype_key,
    flattened,
    in_native_order,
    sharing_argument_errors,
)
from wfbp.runtime.row_collectives import gather_row_bytes
from wfbp.runtime.runtime import Runtime


@pytest.fixture
def alone() -> Iterator[None]:
    """The public functions, on one rank."""
    wfbp.init(backend=LocalWorld(1).backend(0), config=Config())
    yield
    wfbp.shutdown()


# Several ranks.


@pytest.mark.parametrize("op", list(Op))
def test_reduce(op: Op) -> None:
    def body(runtime: Runtime) -> list[float]:
        buffer = np.array([1.0, runtime.rank + 1.0])
        array_collectives.reduce_in_place(runtime, buffer, "float64", (2,), op, "x")
        return buffer.tolist()

    wanted = {
        Op.SUM: [3.0, 6.0],
        Op.AVERAGE: [1.0, 2.0],
        Op.MIN: [1.0, 1.0],
        Op.MAX: [1.0, 3.0],
        Op.PRODUCT: [1.0, 6.0],
    }[op]
    assert all_well(run_ranks(3, body)) == [wanted] * 3


def test_broadcast_many() -> None:
    def body(runtime: Runtime) -> list[Any]:
        arrays = [np.full(3, runtime.rank, np.float32), np.array([runtime.rank])]
        rows = [("a", "float32", (3,)), ("b", "int64", (1,))]
        buffers = [a.view(np.uint8) for a in arrays]
        array_collectives.broadcast_buffers(runtime, rows, buffers, root_rank=2)
        return [a.tolist() for a in arrays]

    assert all_well(run_ranks(3, body)) == [[[2.0] * 3, [2]]] * 3


def test_broadcast_many_names_the_first_difference() -> None:
    def body(runtime: Runtime) -> None:
        rows = [("a", "float32", (3,)), ("b" if runtime.rank else "c", "int64", (1,))]
        buffers = [np.zeros(12, np.uint8), np.zeros(8, np.uint8)]
        array_collectives.broadcast_buffers(runtime, rows, buffers, root_rank=0)

    for result in run_ranks(3, body):
        assert isinstance(result, DisagreementError)
        assert "ranks disagree: c int64(1,) on rank 0, b int64(1,) on rank 1. Every" in str(result)


def test_broadcast_many_names_what_one_rank_alone_has() -> None:
    def body(runtime: Runtime) -> None:
        rows = [("a", "float32", (3,)), ("b", "int64", (1,))][: 2 - runtime.rank]
        buffers = [np.zeros(12, np.uint8), np.zeros(8, np.uint8)][: len(rows)]
        array_collectives.broadcast_buffers(runtime, rows, buffers, root_rank=0)

    for result in run_ranks(2, body):
        assert "b int64(1,) on rank 0, no more on rank 1" in str(result)


def test_operations_are_told_as_programs_write_them() -> None:
    def body(runtime: Runtime) -> None:
        op = Op.MAX if runtime.rank else Op.SUM
        array_collectives.reduce_in_place(runtime, np.zeros(2), "float64", (2,), op, "x")

    for result in run_ranks(2, body):
        assert "allreduce(x, float64(2,), op=wfbp.Sum) on rank 0" in str(result)
        assert "op=wfbp.Max) on rank 1" in str(result)
    assert all(getattr(wfbp, str(op).removeprefix("wfbp.")) is op for op in Op)


@pytest.mark.parametrize("known", [None, (0, 1, 2)])
def test_gather_rows(known: tuple[int, ...] | None) -> None:
    def body(runtime: Runtime) -> list[list[int]]:
        mine = np.full((runtime.rank, 2), runtime.rank, np.int32)
        raw, rows = gather_row_bytes(
            runtime, flattened(mine).view(np.uint8), "int32", 4, mine.shape, "x", known
        )
        return raw.view(np.int32).reshape(rows, 2).tolist()

    wanted = [[1, 1], [2, 2], [2, 2]]
    assert all_well(run_ranks(3, body)) == [wanted] * 3


def test_agree_returns_what_may_differ() -> None:
    def body(runtime: Runtime) -> list[int]:
        return check_consistent(runtime, "operation", "x", private=10 + runtime.rank)

    assert all_well(run_ranks(3, body)) == [[10, 11, 12]] * 3


def test_agree_tells_every_rank_the_same() -> None:
    def body(runtime: Runtime) -> None:
        check_consistent(
            runtime, "allreduce", "x", describe_array("float32", [3 + (runtime.rank == 1)])
        )

    results = run_ranks(3, body)
    for rank, result in enumerate(results):
        assert isinstance(result, DisagreementError)
        assert str(result).startswith(f"rank {rank} of 3: ranks called different operations")
        told = "allreduce(x, float32(3,)) on rank 0, allreduce(x, float32(4,)) on rank 1. Every"
        assert told in str(result)


def test_a_disagreement_is_not_the_end() -> None:
    def body(runtime: Runtime) -> list[bytes]:
        with pytest.raises(DisagreementError):
            check_consistent(runtime, "one" if runtime.rank else "other")
        return runtime.exchange(b"on", "on")

    assert all_well(run_ranks(2, body)) == [[b"on", b"on"]] * 2


def test_names_are_counted_from_init() -> None:
    """What a rank did before, in another runtime, does not count."""

    def body(runtime: Runtime) -> list[float]:
        if runtime.rank == 1:
            other = Runtime(LocalWorld(1).backend(0), Config())
            array_collectives.reduce_in_place(other, np.ones(1), "float64", (1,), Op.SUM, None)
            other.shutdown()
        buffer = np.ones(2)
        array_collectives.reduce_in_place(runtime, buffer, "float64", (2,), Op.SUM, None)
        return buffer.tolist()

    assert all_well(run_ranks(2, body)) == [[2.0, 2.0]] * 2


def test_a_refusal_is_told_to_all() -> None:
    def body(runtime: Runtime) -> None:
        with sharing_argument_errors(runtime, array_collectives.MANY):
            if runtime.rank == 1:
                raise ValueError("w is read-only")
        array_collectives.broadcast_buffers(runtime, [], [], root_rank=0)

    results = run_ranks(3, body)
    assert isinstance(results[1], ValueError)
    for rank in (0, 2):
        assert isinstance(results[rank], PeerError)
        told = f"rank {rank} of 3: broadcast_parameters: rank 1: w is read-only"
        assert str(results[rank]) == told


# One rank.


@pytest.mark.usefixtures("alone")
def test_other_byte_orders() -> None:
    """Values count; what returns is in this machine's order."""
    for order in "<>":
        array = np.array([1.5, -2.0], f"{order}f4")
        for found in (
            wfbp.allreduce(array), wfbp.broadcast(array, 0), wfbp.allgather(array)
        ):  # fmt: skip
            assert found.tolist() == [1.5, -2.0]
            assert found.dtype == np.float32
        wfbp.broadcast_parameters({"a": array})
        assert array.tolist() == [1.5, -2.0]
        reducer = wfbp.GradientReducer([("a", array)])
        reducer.mark_ready(0, array)
        found = reducer.wait()[0]
        assert found is not None
        assert found.tolist() == [1.5, -2.0]
        assert found.dtype == np.float32


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
        with pytest.raises(ValueError, match=f"root_rank is {root}; expected 0 to 0"):
            call()


@pytest.mark.usefixtures("alone")
def test_what_cannot_be_reduced() -> None:
    with pytest.raises(ValueError, match="'complex128' cannot be sent"):
        wfbp.allreduce(np.zeros(2, complex))
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
def test_a_reducer_alone() -> None:
    reducer = wfbp.GradientReducer([("a", np.zeros((), np.float32)), ("b", np.zeros(2))])
    mine = np.float32(3).reshape(())
    for _ in range(3):
        reducer.mark_ready(0, mine)
        found = reducer.wait()
        assert found[0] is not None
        assert found[0].shape == ()
        assert found[0] == 3
        assert found[1] is None
    assert reducer.report() == {}
