"""Gradients of plain arrays; leaving and joining again."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import ml_dtypes
import numpy as np
from mpi4py import MPI

import wfbp
import wfbp.torch
from tests.parallel.programs.harness import Checks, raises
from tests.parallel.programs.torch.training import adamw, data, mlp

check = Checks()


@check
def reducer() -> None:
    rank, size = wfbp.rank(), wfbp.size()
    kinds = ["float32", "float64", "float16", ml_dtypes.bfloat16, "float32", "float64"]
    kinds += ["complex64", "complex128"]
    arrays = [np.zeros((k, 3) if k else (), kind) for k, kind in enumerate(kinds)]
    found = wfbp.GradientReducer([(f"t{k}", a) for k, a in enumerate(arrays)])
    kept: list[tuple[Any, Any]] = []  # results and their values
    for step in range(30):
        for k in np.random.default_rng(100 * step + rank).permutation(len(arrays)):
            if k == 4 or (k == 1 and (step + rank) % 2):
                continue  # one that nobody has, one that only some have
            turn = 1 + 2j if arrays[k].dtype.kind == "c" else 1
            found.mark_ready(int(k), np.full_like(arrays[k], turn * (k + step % 4 + rank)))
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
            if step % 3:
                kept.append((result[..., :1] if result.ndim else result, result.copy()))
            if result.dtype.kind == "c":
                assert np.allclose(result, mean * (1 + 2j)), (step, k, result)
                continue
            assert result.dtype == arrays[k].dtype
            assert result.shape == arrays[k].shape
            assert np.allclose(result.astype(np.float64), mean, rtol=2.0**-8), (step, k, result)
    for result, values in kept:
        assert np.array_equal(result, values[..., :1] if values.ndim else values)
    assert found.report().get("num_tensors", 7) in (7, 8)


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
    raises(ValueError, "wfbp.Min", act=lambda: make(op=wfbp.Min))
    raises(ValueError, "no tensors", act=lambda: wfbp.GradientReducer([]))
    raises(ValueError, "int32", act=lambda: wfbp.GradientReducer([("i", np.zeros(2, np.int32))]))
    pairs = [("a", np.zeros(1)), ("a", np.zeros(1))]
    raises(ValueError, "twice", act=lambda: wfbp.GradientReducer(pairs))


@check
def shutdown_and_init_again() -> None:
    config = wfbp.Config(timeout_s=60.0)
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
    wfbp.init(config=wfbp.Config(timeout_s=60.0))


def wfbp_many() -> bool:
    from mpi4py import MPI

    return MPI.COMM_WORLD.size > 1


def wfbp_error() -> type[Exception]:
    from wfbp.errors import NotInitializedError

    return NotInitializedError


@check
def more_reducers_than_mpi_has_communicators() -> None:
    """A reducer that is dropped gives its communicator to the next; MPICH has about 2,000."""
    taken = []
    with suppress(MPI.Exception):
        while True:
            taken.append(MPI.COMM_SELF.Dup())
    assert len(taken) < 2100
    for comm in taken[-40:]:
        comm.Free()
    try:
        for count in range(120):
            found = wfbp.GradientReducer([("w", np.zeros(1, np.float32))], schedule="single")
            if count % 20 == 0:
                found.mark_ready(0, np.full(1, count, np.float32))
                result = found.wait()[0]
                assert result is not None
                assert result[0] == count
    finally:
        for comm in taken[:-40]:
            comm.Free()
