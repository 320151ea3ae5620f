"""Collectives on tensors and arrays, and gradients of plain arrays, each as one check."""

from __future__ import annotations

import copy
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import nn

import wfbp
import wfbp.torch
from tests.parallel.programs.harness import Checks, raises
from tests.parallel.programs.training import adamw, data, mlp, same
from wfbp.core.types import Op

check = Checks()

TORCH_DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int32,
    torch.int64,
    torch.uint8,
)
NUMPY_DTYPES = ("float16", "bfloat16", "float32", "float64", "int32", "int64", "uint8")


def values(rank: int, count: int = 7) -> list[int]:
    return [(3 * k + rank) % 5 + 1 for k in range(count)]


def combined(op: Op, size: int, integer: bool) -> list[float]:
    """What an operation makes of all ranks' values: small integers, exact in every type."""
    columns = np.array([values(r) for r in range(size)], np.float64)
    result = {
        Op.SUM: columns.sum(0),
        Op.AVERAGE: columns.sum(0) / size,
        Op.MIN: columns.min(0),
        Op.MAX: columns.max(0),
        Op.PRODUCT: columns.prod(0),
    }[op]
    return list(np.trunc(result) if integer else result)


# Tensors.


@check
def allreduce_of_tensors() -> None:
    for dtype in TORCH_DTYPES:
        for op in Op:
            tensor = torch.tensor(values(wfbp.rank()), dtype=dtype)
            before = tensor.clone()
            found = wfbp.torch.allreduce(tensor, op=op)
            wanted = torch.tensor(
                combined(op, wfbp.size(), not dtype.is_floating_point), dtype=torch.float64
            ).to(dtype)
            same(found, wanted, f"{op} of {dtype}")
            same(tensor, before, "the argument")
            assert wfbp.torch.allreduce_(tensor, op=op) is tensor
            same(tensor, wanted, f"{op} of {dtype} in place")


@check
def allreduce_of_odd_tensors() -> None:
    rank, mean = wfbp.rank(), (wfbp.size() - 1) / 2
    for shape in ((), (0,), (0, 3), (1,), (3, 1, 5), (1000, 37)):
        found = wfbp.torch.allreduce(torch.full(shape, float(rank)))
        same(found, torch.full(shape, mean), f"shape {shape}", 1e-6)
    strided = torch.full((4, 6), float(rank))
    wfbp.torch.allreduce_(strided[:, ::2], op=wfbp.Sum)
    assert torch.equal(strided[:, ::2], torch.full((4, 3), 2 * mean * wfbp.size() / 2))
    assert torch.equal(strided[:, 1::2], torch.full((4, 3), float(rank)))
    leaf = torch.full((3,), float(rank), requires_grad=True)
    assert not wfbp.torch.allreduce(leaf).requires_grad
    nan = wfbp.torch.allreduce(torch.tensor([float("nan") if rank == 0 else 1.0, 2.0]))
    assert nan[0].isnan()
    assert nan[1] == 2.0
    raises(ValueError, "complex64", act=lambda: wfbp.torch.allreduce(torch.zeros(2) * 1j))
    raises(ValueError, "meta", act=lambda: wfbp.torch.allreduce(torch.zeros(2, device="meta")))
    raises(ValueError, "op", act=lambda: wfbp.torch.allreduce(torch.zeros(2), op="sum"))


@check
def broadcast_of_tensors() -> None:
    last = wfbp.size() - 1
    for dtype in TORCH_DTYPES:
        tensor = torch.tensor(values(wfbp.rank()), dtype=dtype)
        before = tensor.clone()
        found = wfbp.torch.broadcast(tensor, last)
        same(found, torch.tensor(values(last), dtype=dtype), f"{dtype}")
        same(tensor, before, "the argument")
        assert wfbp.torch.broadcast_(tensor, 0) is tensor
        same(tensor, torch.tensor(values(0), dtype=dtype), f"{dtype} in place")
    raises(ValueError, f"root_rank is {wfbp.size()}", act=lambda: bad_root())


def bad_root() -> None:
    wfbp.torch.broadcast(torch.zeros(1), wfbp.size())


@check
def allgather_of_uneven_tensors() -> None:
    rank, size = wfbp.rank(), wfbp.size()
    for dtype in TORCH_DTYPES:
        for tail in ((), (3,), (2, 0)):
            found = wfbp.torch.allgather(torch.full((2 * rank, *tail), rank, dtype=dtype))
            wanted = torch.cat([torch.full((2 * r, *tail), r, dtype=dtype) for r in range(size)])
            same(found, wanted, f"{dtype} {tail}")
    raises(ValueError, "scalar", act=lambda: wfbp.torch.allgather(torch.tensor(1.0)))


@check
def broadcast_of_parameters() -> None:
    torch.manual_seed(100 + wfbp.rank())
    model = nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.LazyLinear(2), nn.Embedding(3, 2)
    )
    model[:4](torch.randn(2, 3, 4, 4))
    model = model.to(memory_format=torch.channels_last)
    model[4].to(torch.bfloat16)
    model.register_buffer("flags", torch.tensor([True, wfbp.rank() == 0]))
    model[1].num_batches_tracked += wfbp.rank()
    root = wfbp.size() - 1
    wanted = wfbp.broadcast_object(copy.deepcopy(model.state_dict()), root)
    wfbp.torch.broadcast_parameters(model.state_dict(), root_rank=root)
    for name, tensor in model.state_dict().items():
        same(tensor, wanted[name], name)
    wfbp.broadcast_parameters(model.named_parameters(), root_rank=0)
    states = wfbp.allgather_object([p.detach() for p in model.parameters()])
    for theirs in states:
        for p, q in zip(states[0], theirs, strict=True):
            same(q, p, "parameter")


@check
def broadcast_of_optimizer_state() -> None:
    """A fresh rank gets Adam's state and goes on as the others do."""
    torch.manual_seed(4)
    model = mlp(5, 7, 3)
    optimizer = wfbp.torch.DistributedOptimizer(adamw(model.parameters()))
    if wfbp.rank() == 0:  # as if resumed from a checkpoint that only rank 0 has read
        for step in range(3):
            plain = copy.deepcopy(model)
            inner = adamw(plain.parameters())
            inner.load_state_dict(optimizer.state_dict())
            plain(data(step, 0, 4, 5)).square().mean().backward()
            inner.step()
            model.load_state_dict(plain.state_dict())
            optimizer.load_state_dict(inner.state_dict())
        optimizer.param_groups[0]["lr"] = 0.123
    wfbp.torch.broadcast_parameters(model.state_dict(), root_rank=0)
    wfbp.torch.broadcast_optimizer_state(optimizer, root_rank=0)
    states = wfbp.allgather_object(optimizer.state_dict())
    for theirs in states:
        assert theirs["param_groups"] == states[0]["param_groups"]
        assert theirs["param_groups"][0]["lr"] == 0.123
        assert theirs["state"].keys() == states[0]["state"].keys() == set(range(4))
        for k, state in states[0]["state"].items():
            for key, value in state.items():
                same(theirs["state"][k][key], value, f"{k} {key}")
    for step in range(3):
        optimizer.zero_grad()
        model(data(step, wfbp.rank(), 4, 5)).square().mean().backward()
        optimizer.step()
    everybody = wfbp.allgather_object([p.detach() for p in model.parameters()])
    for theirs in everybody:
        for p, q in zip(everybody[0], theirs, strict=True):
            same(q, p, "parameter")


@check
def broadcast_of_lbfgs_state_and_of_none() -> None:
    model = mlp(5, 7, 3)
    for optimizer in (
        torch.optim.LBFGS(model.parameters(), max_iter=3),
        torch.optim.SGD(model.parameters(), lr=0.1 * (1 + wfbp.rank()), momentum=0.9),
    ):
        if wfbp.rank() == 0:

            def evaluate(optimizer: Any = optimizer) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(data(0, 0, 4, 5)).square().mean()
                loss.backward()
                return loss

            if isinstance(optimizer, torch.optim.LBFGS):
                optimizer.step(evaluate)
        wfbp.broadcast_optimizer_state(optimizer, root_rank=0)
        for theirs in wfbp.allgather_object(optimizer.state_dict()):
            assert repr(theirs) == repr(optimizer.state_dict())


# Arrays.


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
    assert wfbp.allreduce(3.0, op=wfbp.Sum) == 3.0 * wfbp.size()
    assert wfbp.allreduce(np.float32(3)).shape == ()
    assert wfbp.allreduce([1.0, 2.0]).tolist() == [1.0, 2.0]
    assert wfbp.allreduce(np.zeros((0, 3))).shape == (0, 3)
    transposed = np.arange(6.0).reshape(2, 3).T
    assert np.array_equal(wfbp.allreduce(transposed), transposed)
    raises(ValueError, "complex128", act=lambda: wfbp.allreduce(np.zeros(2) * 1j))
    raises(ValueError, "object", act=lambda: wfbp.broadcast(np.array([object()]), 0))


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


# Gradients of plain arrays.


@check
def reducer() -> None:
    rank, size = wfbp.rank(), wfbp.size()
    kinds = ["float32", "float64", "float16", ml_dtypes.bfloat16, "float32", "float64"]
    arrays = [np.zeros((k, 3) if k else (), kind) for k, kind in enumerate(kinds)]
    found = wfbp.GradientReducer([(f"t{k}", a) for k, a in enumerate(arrays)])
    for step in range(30):
        for k in np.random.default_rng(100 * step + rank).permutation(len(arrays)):
            if k == 4 or (k == 1 and (step + rank) % 2):
                continue  # one that nobody has, one that only some have
            found.mark_ready(int(k), np.full_like(arrays[k], k + step % 4 + rank))
        for k, result in enumerate(found.wait()):
            if k == 4:
                assert result is None
                continue
            who = [r for r in range(size) if k != 1 or (step + r) % 2 == 0]
            if not who:
                assert result is None
                continue
            mean = sum(k + step % 4 + r for r in who) / size
            assert result is not None
            assert result.dtype == arrays[k].dtype
            assert result.shape == arrays[k].shape
            assert np.allclose(result.astype(np.float64), mean, rtol=2.0**-8), (step, k, result)
    assert found.report().get("num_tensors", 5) in (5, 6)


@check
def reducer_sums_and_takes_its_own_results() -> None:
    found = wfbp.GradientReducer(
        [wfbp.TensorSpec("a", (3,), "float32")], op=wfbp.Sum, schedule="single"
    )
    array = np.ones(3, np.float32)
    for step in range(8):
        found.mark_ready(0, array)
        result = found.wait()[0]
        assert result is not None
        assert result.tolist() == [float(wfbp.size() ** (step % 4 + 1))] * 3
        array = result if step % 4 < 3 else np.ones(3, np.float32)


@check
def reducer_errors() -> None:
    def make(**kwargs: Any) -> Any:
        return wfbp.GradientReducer([("a", np.zeros(3, np.float32))], **kwargs)

    found = make()
    raises(ValueError, "index is 1", act=lambda: found.mark_ready(1, np.zeros(3, np.float32)))
    raises(ValueError, "float32(3,)", "(4,)", act=lambda: found.mark_ready(0, np.zeros(4, "f4")))
    raises(ValueError, "float64", act=lambda: found.mark_ready(0, np.zeros(3)))
    found.mark_ready(0, np.zeros(3, np.float32))
    raises(ValueError, "twice", act=lambda: found.mark_ready(0, np.zeros(3, np.float32)))
    found.wait()
    raises(ValueError, "nonsense", act=lambda: make(schedule="nonsense"))
    raises(ValueError, "threshold_bytes is 0", act=lambda: make(threshold_bytes=0))
    raises(ValueError, "MIN", act=lambda: make(op=wfbp.Min))
    raises(ValueError, "no tensors", act=lambda: wfbp.GradientReducer([]))
    raises(ValueError, "int32", act=lambda: wfbp.GradientReducer([("i", np.zeros(2, np.int32))]))
    pairs = [("a", np.zeros(1)), ("a", np.zeros(1))]
    raises(ValueError, "twice", act=lambda: wfbp.GradientReducer(pairs))


@check
def shutdown_and_init_again() -> None:
    config = wfbp.Config(timeout_s=20.0)
    wfbp.shutdown()
    assert not wfbp.is_initialized()
    raises(wfbp_error(), "rank()", "wfbp.init()", act=wfbp.rank)
    raises(wfbp_error(), "allreduce()", act=lambda: wfbp.allreduce(np.zeros(1)))
    wfbp.shutdown()  # again: nothing happens
    wfbp.init(config=config)
    assert wfbp.allreduce(np.ones(1), op=wfbp.Sum)[0] == wfbp.size()


@check
def a_step_after_shutdown_is_an_error() -> None:
    model = mlp(5, 7, 3)
    optimizer = wfbp.torch.DistributedOptimizer(adamw(model.parameters()))
    wfbp.shutdown()
    model(data(0, 0, 4, 5)).sum().backward()
    if wfbp_many():
        raises(wfbp_error(), "wfbp.init()", act=optimizer.step)
    wfbp.init(config=wfbp.Config(timeout_s=20.0))


def wfbp_many() -> bool:
    from mpi4py import MPI

    return MPI.COMM_WORLD.size > 1


def wfbp_error() -> type[Exception]:
    from wfbp.errors import NotInitializedError

    return NotInitializedError


if __name__ == "__main__":
    check.main()
