"""Collectives on arrays and objects."""

from __future__ import annotations

from functools import partial

import ml_dtypes
import numpy as np
import torch
from torch import nn

import wfbp
import wfbp.torch
from tests.parallel.programs.harness import Checks, raises
from tests.parallel.programs.torch.collective_values import NUMPY_DTYPES, combined, values
from tests.parallel.programs.torch.training import mlp
from wfbp.core.types import Op
from wfbp.errors import DisagreementError, PeerError

check = Checks()


@check
def allreduce_of_arrays() -> None:
    for name in NUMPY_DTYPES:
        dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
        for op in Op:
            array = np.array(values(wfbp.rank())).astype(dtype)
            found = wfbp.allreduce(array, op=op)
            integer = np.issubdtype(dtype, np.integer)
            wanted = np.array(combined(op, wfbp.size(), integer)).astype(dtype)
            assert found.dtype == dtype
            assert np.array_equal(found, wanted), (name, op, found, wanted)
            assert np.array_equal(array, np.array(values(wfbp.rank())).astype(dtype))
            assert np.array_equal(wfbp.allreduce(np.tile(array, 500), op=op), np.tile(wanted, 500))
    for name in ("int8", "int16"):
        array = np.array(values(wfbp.rank()), name)
        assert wfbp.allreduce(array).tolist() == combined(Op.AVERAGE, wfbp.size(), True)
    flags = np.array([wfbp.rank() == 0, True])
    assert wfbp.allreduce(flags, op=wfbp.Min).tolist() == [wfbp.size() == 1, True]
    assert wfbp.allreduce(3.0, op=wfbp.Sum) == 3.0 * wfbp.size()
    assert wfbp.allreduce(np.float32(3)).shape == ()
    assert wfbp.allreduce([1.0, 2.0]).tolist() == [1.0, 2.0]
    assert wfbp.allreduce(np.zeros((0, 3))).shape == (0, 3)
    transposed = np.arange(6.0).reshape(2, 3).T
    assert np.array_equal(wfbp.allreduce(transposed), transposed)
    raises(ValueError, "object", act=lambda: wfbp.broadcast(np.array([object()]), 0))


@check
def arrays_of_complex_numbers() -> None:
    rank, size = wfbp.rank(), wfbp.size()
    for dtype in ("complex64", "complex128"):
        for times in (1, 5000):

            def of(rank: int, dtype: str = dtype, times: int = times) -> np.ndarray:
                turned = np.array(values(rank)) + 1j * np.array(values(rank + 1))
                return np.tile(turned, times).astype(dtype)

            total = sum(of(r) for r in range(size))
            scaled = wfbp.allreduce(
                of(rank), op=wfbp.Sum, prescale_factor=2.0, postscale_factor=0.25
            )
            assert np.allclose(scaled, 0.5 * total)
            for found in (wfbp.allreduce(of(rank)), wfbp.allreduce_(of(rank))):
                assert found.dtype == dtype
                assert np.allclose(found, total / size)
            for op in (wfbp.Min, wfbp.Max, wfbp.Product):
                raises(
                    ValueError,
                    f"op is {op}; {dtype} is combined by",
                    act=lambda o=op: wfbp.allreduce(of(rank), op=o),
                )
    assert wfbp.allreduce(1j * rank, op=wfbp.Sum) == 1j * sum(range(size))
    mine = np.array(values(rank), "complex64" if rank else "float32")
    if size > 1:
        raises(DisagreementError, "the element type", act=lambda: wfbp.allreduce(mine))


@check
def broadcast_and_allgather_of_arrays() -> None:
    rank, size = wfbp.rank(), wfbp.size()
    for dtype in (*NUMPY_DTYPES[:1], "float64", "int64", "bool", "complex64"):
        array = np.array(values(rank)).astype(dtype)
        found = wfbp.broadcast(array, size - 1)
        assert np.array_equal(found, np.array(values(size - 1)).astype(dtype))
    assert wfbp.broadcast(np.float64(rank), 0).shape == ()
    assert wfbp.broadcast(np.float64(rank), size - 1) == size - 1
    found = wfbp.allgather(np.full((rank, 2), rank, ml_dtypes.bfloat16))
    assert found.dtype == ml_dtypes.bfloat16
    wanted = np.concatenate([np.full((r, 2), r, np.float32) for r in range(size)])
    assert np.array_equal(found.astype(np.float32), wanted)
    raises(ValueError, "scalar", act=lambda: wfbp.allgather(np.float64(1)))
    raises(ValueError, "type object", act=lambda: wfbp.allgather(np.array([rank, None])))
    assert wfbp.allgather(np.full(rank, True)).tolist() == [True] * sum(range(size))
    arrays = {
        "a": np.array(values(rank), np.float32),
        "scalar": np.array(float(rank)),
        "columns": np.full((4, 3), rank).T[::2],
    }
    wfbp.broadcast_parameters(arrays, root_rank=size - 1)
    assert np.array_equal(arrays["a"], np.array(values(size - 1), np.float32))
    assert arrays["scalar"] == size - 1
    assert (arrays["columns"] == size - 1).all()


@check
def byte_orders() -> None:
    """Also where they differ between ranks."""
    rank, size = wfbp.rank(), wfbp.size()
    for name in ("f4", "f8", "i8"):
        mine = np.array(values(rank), (">" if rank else "<") + name)
        wanted = combined(Op.SUM, size, integer=False)
        assert wfbp.allreduce(mine, op=wfbp.Sum).tolist() == wanted
        assert wfbp.broadcast(mine, size - 1).tolist() == values(size - 1)
        found = wfbp.allgather(mine)
        assert found.tolist() == [v for r in range(size) for v in values(r)]
        assert found.dtype == np.dtype(name)
        wfbp.broadcast_parameters({"a": mine}, root_rank=size - 1)
        assert mine.tolist() == values(size - 1)
    mine = np.array(values(rank), (">" if rank else "<") + "f4")
    reducer = wfbp.GradientReducer([("a", mine)], op=wfbp.Sum)
    reducer.mark_ready(0, mine)
    reduced = reducer.wait()[0]
    assert reduced is not None
    assert reduced.tolist() == combined(Op.SUM, size, integer=False)


@check
def what_one_rank_cannot_fill_is_told_to_all() -> None:
    array = np.zeros(3)
    if wfbp.rank() == wfbp.size() - 1:
        array.flags.writeable = False
        raises(ValueError, "w is read-only", act=lambda: wfbp.broadcast_parameters({"w": array}))
    else:
        raises(
            PeerError,
            f"rank {wfbp.size() - 1}: w is read-only",
            act=lambda: wfbp.broadcast_parameters({"w": array}),
        )
    wfbp.barrier()


@check
def the_top_level_chooses_by_type() -> None:
    assert isinstance(wfbp.allreduce(torch.ones(2)), torch.Tensor)
    assert isinstance(wfbp.allreduce(np.ones(2)), np.ndarray)
    assert isinstance(wfbp.broadcast(nn.Parameter(torch.ones(2)), 0), torch.Tensor)
    assert isinstance(wfbp.allgather(torch.ones(2)), torch.Tensor)
    assert wfbp.allgather(torch.ones(2)).shape == (2 * wfbp.size(),)
    model = mlp(5, 7, 3)
    optimizer = wfbp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    assert isinstance(optimizer, torch.optim.SGD)
    wfbp.broadcast_parameters(model.state_dict(), root_rank=0)
    wfbp.broadcast_optimizer_state(optimizer, root_rank=0)
    raises(TypeError, "dict", "GradientReducer", act=lambda: wfbp.DistributedOptimizer({}))
    raises(TypeError, "dict", act=lambda: wfbp.broadcast_optimizer_state({}))


@check
def objects() -> None:
    rank, size = wfbp.rank(), wfbp.size()
    value = {"epoch": 3, "text": "x" * 100_000} if rank == 0 else None
    assert wfbp.broadcast_object(value, root_rank=0)["epoch"] == 3
    assert wfbp.broadcast_object(("last", rank), root_rank=size - 1) == ("last", size - 1)
    assert wfbp.allgather_object({"rank": rank}) == [{"rank": r} for r in range(size)]
    wfbp.barrier()


@check
def places() -> None:
    assert 0 <= wfbp.rank() < wfbp.size()
    assert wfbp.local_size() == wfbp.size()
    assert wfbp.allgather_object(wfbp.local_rank()) == list(range(wfbp.size()))
    assert wfbp.is_initialized()
    wfbp.init()  # again: nothing happens
    assert wfbp.torch.rank() == wfbp.rank()


@check
def an_array_where_other_ranks_have_tensors() -> None:
    """One rank waits at once, the others later."""
    rank, size = wfbp.rank(), wfbp.size()
    if rank == 0:
        assert wfbp.allreduce(np.ones(2), name="late", op=wfbp.Sum).tolist() == [size] * 2
    else:
        handle = wfbp.torch.allreduce_async(
            torch.ones(2, dtype=torch.float64), name="late", op=wfbp.Sum
        )
        assert wfbp.synchronize(handle).tolist() == [size] * 2


@check
def arrays_to_and_from_each_rank() -> None:
    rank, size = wfbp.rank(), wfbp.size()
    rows, received = wfbp.alltoall(np.full(sum(range(size)), rank, np.int16), list(range(size)))
    assert rows.tolist() == [r for r in range(size) for _ in range(rank)]
    assert received.tolist() == [rank] * size
    assert wfbp.alltoall(np.arange(size) + 10 * rank).tolist() == [
        10 * r + rank for r in range(size)
    ]
    part = wfbp.reducescatter(np.arange(7.0), op=wfbp.Sum, postscale_factor=0.5)
    assert part.tolist() == (np.array_split(np.arange(7.0), size)[rank] * size / 2).tolist()
    group = wfbp.grouped_allreduce([np.full(2, rank), np.full((), rank, "f2")], op=wfbp.Sum)
    assert [each.tolist() for each in group] == [[sum(range(size))] * 2, sum(range(size))]
    mine = np.full((2, 3), float(rank)).T
    assert wfbp.broadcast_(mine, size - 1) is mine
    assert (mine == size - 1).all()


@check
def halves_of_arrays_beside_those_of_tensors() -> None:
    """They are answered together, and travel as one message."""
    size = wfbp.size()
    tensor = wfbp.torch.allreduce_async(torch.ones(4000).half(), name="tensor", op=wfbp.Sum)
    array = wfbp.allreduce_async(np.full(3000, 2, "f2"), name="array", op=wfbp.Sum)
    assert wfbp.torch.synchronize(tensor).tolist() == [size] * 4000
    assert wfbp.synchronize(array).tolist() == [2 * size] * 3000


@check
def arrays_in_a_process_set() -> None:
    rank, size = wfbp.rank(), wfbp.size()
    if size == 1:
        return
    some = wfbp.add_process_set([0, size - 1] if size > 2 else [1])
    mine = np.array([rank])
    if some.included():
        assert wfbp.allreduce(mine, op=wfbp.Sum, process_set=some).tolist() == [size - 1]
        assert wfbp.allgather(mine, process_set=some).tolist() == some.ranks
        assert wfbp.broadcast(mine, size - 1, process_set=some).tolist() == [size - 1]
        assert wfbp.allgather_object(rank, process_set=some) == some.ranks
        wfbp.barrier(some)
    else:
        refused = partial(wfbp.allreduce, mine, process_set=some)
        raises(ValueError, "is not in the process set", act=refused)
    assert wfbp.allreduce(mine, op=wfbp.Sum).tolist() == [sum(range(size))]
    assert wfbp.remove_process_set(some)
