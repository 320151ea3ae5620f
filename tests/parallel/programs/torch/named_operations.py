"""Named operations on tensors: ``named_operations.py OUT MODE [NAME ...]`` under mpirun."""

from __future__ import annotations

import math
import random
import time
from functools import partial
from typing import Any

import pytest
import torch
from mpi4py import MPI

import wfbp.horovod.torch as wfbp
import wfbp.torch as wfbp_torch
from tests.parallel.programs.harness import Checks, raises
from wfbp.errors import WfbpError
from wfbp.torch import collectives

check = Checks()

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def ranks_sum() -> int:
    return sum(range(wfbp.size()))


@check
def every_type_and_shape() -> None:
    rank, size = wfbp.rank(), wfbp.size()
    for dtype in (*INTEGERS, *FLOATS):
        for shape in ((), (0,), (3, 2), (4, 0, 2), (60, 20)):  # the last is not small
            tensor = torch.full(shape, rank + 1).to(dtype)
            mean = 1 + ranks_sum() / size
            for op, want in (
                (wfbp.Sum, size + ranks_sum()),
                (wfbp.Min, 1),
                (wfbp.Max, size),
                (wfbp.Product, math.factorial(size)),
                (wfbp.Average, mean if dtype in FLOATS else int(mean)),
            ):
                for by in (wfbp, wfbp_torch):
                    found = by.allreduce(tensor, op=op)
                    assert found.dtype == dtype
                    assert found.shape == tensor.shape
                    assert (found == want).all()
                    assert (tensor == rank + 1).all()
                    mine = tensor.clone()
                    assert by.allreduce_(mine, op=op) is mine
                    assert (mine == want).all()
            found = wfbp.broadcast(tensor, size - 1)
            assert (found == size).all()
            if shape:
                gathered = wfbp.allgather(tensor)
                assert gathered.shape == (size * shape[0], *shape[1:])
                assert wfbp.reducescatter(tensor, op=wfbp.Sum).shape[1:] == shape[1:]
                assert wfbp.alltoall(tensor, [shape[0]] + [0] * (size - 1))[0].dtype == dtype
    flags = torch.tensor([rank == 0, True])
    assert wfbp.allreduce(flags, op=wfbp.Sum).tolist() == [True, True]
    assert wfbp.allreduce(flags, op=wfbp.Min).tolist() == [size == 1, True]
    assert wfbp.allgather(flags).dtype == torch.bool
    numbers = torch.tensor([float("nan") if rank == 0 else 1.0, 2.0])
    for nan in (wfbp.allreduce(numbers), wfbp.allreduce(numbers, prescale_factor=math.nan)):
        assert nan[0].isnan()
    meta = torch.zeros(2, device="meta")
    raises(ValueError, "bool has no average", act=lambda: wfbp.allreduce(flags))
    raises(ValueError, "meta", act=lambda: wfbp.allreduce(meta))
    raises(ValueError, "op", act=lambda: wfbp.allreduce(nan, op="sum"))
    raises(ValueError, f"root_rank is {size}", act=lambda: wfbp.broadcast(nan, size))


@check
def complex_numbers() -> None:
    """Also lazy conjugates, and derivatives: those of pairs of reals."""
    rank, size = wfbp.rank(), wfbp.size()

    def mine(rank: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rank)
        return torch.randn(shape, dtype=dtype, generator=generator).conj()

    for dtype in (torch.complex64, torch.complex128):
        for shape in ((), (0,), (3, 2), (4, 0, 2), (60, 80)):
            tensors = [mine(r, dtype, *shape) for r in range(size)]
            total = sum(tensors)
            tensor = tensors[rank]
            assert tensor.is_conj()
            same = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
            same(wfbp.allreduce(tensor), total / size)
            same(wfbp.allreduce(tensor, compression=wfbp.Compression.fp16), total / size)
            same(
                wfbp.allreduce(tensor, op=wfbp.Sum, prescale_factor=0.5, postscale_factor=3.0),
                1.5 * total,
            )
            same(wfbp.allreduce_(tensor.clone()), total / size)
            same(wfbp.broadcast(tensor, size - 1), tensors[-1].resolve_conj())
            both = wfbp.grouped_allreduce([tensor, tensor.abs()], op=wfbp.Sum)
            same(both[0], total)
            if not shape:
                continue
            same(wfbp.allgather(tensor), torch.cat(tensors))
            rows = [len(part) for part in torch.empty(shape[0]).tensor_split(size)]
            same(wfbp.reducescatter(tensor, op=wfbp.Sum), total.split(rows)[rank])
            found, counts = wfbp.alltoall(tensor, rows)
            assert counts.tolist() == [rows[rank]] * size
            same(found, torch.cat([t.split(rows)[rank] for t in tensors]))
    weight = mine(rank, torch.complex128, 6)
    for act in (wfbp.allreduce, wfbp.allgather, wfbp.reducescatter):
        grads = []
        for view in (lambda t: t, torch.view_as_real):
            leaf = mine(rank + 9, torch.complex128, 6).resolve_conj().requires_grad_()
            found = act(view(leaf))
            out = found if found.is_complex() else torch.view_as_complex(found)
            (out[:1] * weight[: len(out[:1])]).abs().square().sum().backward()
            grads.append(leaf.grad)
        torch.testing.assert_close(*grads)
    if size & (size - 1) == 0:
        leaf = mine(rank, torch.complex64, 6)
        found = wfbp.allreduce(torch.view_as_real(leaf.resolve_conj()), op=wfbp.Adasum)
        torch.testing.assert_close(
            wfbp.allreduce(leaf, op=wfbp.Adasum), torch.view_as_complex(found)
        )
    for op in (wfbp.Min, wfbp.Max, wfbp.Product):
        refused = partial(wfbp.allreduce, torch.ones(1) * 1j, op=op)
        raises(ValueError, f"op is {op}; complex64 is combined by wfbp.Average", act=refused)


@check
def memory_in_another_order() -> None:
    size = wfbp.size()
    whole = torch.arange(12.0).view(3, 4)
    assert torch.equal(wfbp.allreduce(whole.t()), whole.t())
    wfbp.allreduce_(whole.t()[::2], op=wfbp.Sum)
    assert whole.tolist() == [
        [r * 4 + c if c % 2 else (r * 4 + c) * size for c in range(4)] for r in range(3)
    ]
    target = torch.full((2, 3), float(wfbp.rank())).t()
    assert wfbp.broadcast_(target, 0) is target
    assert not target.any()


@check
def scaled() -> None:
    size = wfbp.size()
    for dtype in INTEGERS[1:]:
        for times in (1, 500):
            tensor = torch.tensor([-3, 3, 5] * times, dtype=dtype)
            found = wfbp.allreduce(tensor, op=wfbp.Sum, prescale_factor=0.5)
            assert found.tolist() == [-size, size, 2 * size] * times
    half = torch.tensor([1.0, 3.0], dtype=torch.float16)
    assert wfbp.allreduce(half, op=wfbp.Sum, postscale_factor=0.1).dtype == torch.float16
    found = wfbp.allreduce(torch.ones(2), prescale_factor=2.0, postscale_factor=3.0)
    assert found.tolist() == [6.0, 6.0]
    part = wfbp.reducescatter(torch.ones(size), op=wfbp.Sum, postscale_factor=0.5)
    assert part.tolist() == [size / 2]


@check
def compressed() -> None:
    for compression in (wfbp.Compression.fp16, wfbp.Compression.bf16):
        tensor = torch.full((4,), wfbp.rank() + 1.0, requires_grad=True)
        found = wfbp.allreduce(tensor, compression=compression, op=wfbp.Sum)
        assert found.dtype == torch.float32
        assert found.tolist() == [wfbp.size() + ranks_sum()] * 4
        found.sum().backward()
        assert tensor.grad is not None
        assert tensor.grad.tolist() == [wfbp.size()] * 4
        whole = wfbp.allreduce(torch.ones(2, dtype=torch.int64), compression=compression)
        assert whole.dtype == torch.int64


@check
def names_in_any_order() -> None:
    rank, size = wfbp.rank(), wfbp.size()
    names = [f"n{k}" for k in range(300)]
    random.Random(rank).shuffle(names)
    handles = {}
    for name in names:
        k = int(name[1:])
        if k % 10 == 0:
            handles[name] = wfbp.allgather_async(torch.full((rank + k % 3,), k), name)
        elif k % 10 == 1:
            handles[name] = wfbp.broadcast_async(torch.full((2,), k + rank), k % size, name)
        else:
            handles[name] = wfbp.allreduce_async(torch.full((k,), float(k + rank)), name=name)
    random.Random(100 + rank).shuffle(names)
    wfbp.barrier()
    for name in names:
        k = int(name[1:])
        found = wfbp.synchronize(handles[name])
        if k % 10 == 0:
            assert found.tolist() == [k] * sum(r + k % 3 for r in range(size))
        elif k % 10 == 1:
            assert found.tolist() == [k + k % size] * 2
        else:
            assert found.shape == (k,)
            assert (found - (k + ranks_sum() / size)).abs().max() < 1e-3 if k else True


@check
def handles() -> None:
    tensor, first = torch.ones(2), wfbp.rank() == 0
    begin = partial(wfbp.allreduce_async_, tensor, name="mine", op=wfbp.Sum)
    if first:  # the operation cannot be complete before the other ranks submit it
        handle = begin()
        if wfbp.size() > 1:
            raises(ValueError, "'mine' is pending", act=begin)
    wfbp.barrier()
    if not first:
        handle = begin()
    while not wfbp.poll(handle):
        time.sleep(1e-4)
    # As in Horovod, the name is free before the handle is synchronized, or if it never is.
    wfbp.allreduce_async(torch.ones(1), name="left alone")
    wfbp.barrier()
    for name in ("mine", "left alone"):
        assert wfbp.allgather(torch.ones(1), name).tolist() == [1.0] * wfbp.size()
    assert wfbp.synchronize(handle) is tensor
    assert tensor.tolist() == [wfbp.size()] * 2
    raises(ValueError, "of no pending operation", act=lambda: wfbp.synchronize(handle))
    raises(ValueError, "of no pending operation", act=lambda: wfbp.poll(handle))
    assert wfbp.allreduce(torch.ones(1), name="mine").tolist() == [1.0]
    raises(ValueError, "average and op", act=lambda: wfbp.allreduce(tensor, True, op=wfbp.Sum))


@check
def poll_does_not_claim_too_early() -> None:
    rank, size = wfbp.rank(), wfbp.size()
    handle = -1
    if rank < size - 1:
        handle = wfbp.allreduce_async(torch.ones(1), name="late")
        for _ in range(50):
            assert not wfbp.poll(handle)
    wfbp.barrier()
    if rank == size - 1:
        handle = wfbp.allreduce_async(torch.ones(1), name="late")
    assert wfbp.synchronize(handle).tolist() == [1.0]


@check
def what_does_not_match_is_an_error_on_all_ranks() -> None:
    rank, size = wfbp.rank(), wfbp.size()
    if size == 1:
        return
    odd = rank == size - 1
    others = " 0" if size == 2 else "s " + ", ".join(map(str, range(size - 1)))
    zeros = torch.zeros(2), 0
    for text, act in (
        ("shape", lambda: wfbp.allreduce(torch.ones(2 + odd), name="x")),
        (
            "the element type",
            lambda: wfbp.allreduce(torch.ones(2, dtype=INTEGERS[3 + odd]), name="x"),
        ),
        ("op", lambda: wfbp.allreduce(torch.ones(2), name="x", op=wfbp.Max if odd else wfbp.Sum)),
        ("root_rank", lambda: wfbp.broadcast(torch.ones(2), int(odd), "x")),
        ("all dimensions but the first", lambda: wfbp.allgather(torch.ones(2, 2 + odd), "x")),
        (
            "the operation",
            lambda: wfbp.allgather(torch.ones(2), "x") if odd else wfbp.broadcast(*zeros, "x"),
        ),
    ):
        who = f"rank{others}: ", f"rank {size - 1}: "
        raises(RuntimeError, f"disagree on {text}", "'x'", *who, act=act)
    # The runtime goes on.
    assert wfbp.allreduce(torch.ones(1), name="x").tolist() == [1.0]


@check
def all_to_all() -> None:
    rank, size = wfbp.rank(), wfbp.size()
    rows = torch.arange(size * (rank + 1), dtype=torch.float64)[:, None].expand(-1, 2)
    found, received = wfbp.alltoall(rows, torch.tensor([rank + 1] * size))
    assert received.tolist() == list(range(1, size + 1))
    assert received.dtype == torch.int32
    want = [float(rank * (r + 1) + k) for r in range(size) for k in range(r + 1)]
    assert found[:, 1].tolist() == want
    raises(ValueError, "add up to", act=lambda: wfbp.alltoall(torch.ones(3), [1] * size + [1]))
    raises(ValueError, "float32", act=lambda: wfbp.alltoall(torch.ones(3), torch.ones(size)))
    if size > 1:
        raises(ValueError, "no equal parts", act=lambda: wfbp.alltoall(torch.ones(size + 1)))


@check
def gradients_of_operations() -> None:
    """Those of the sum of all ranks' losses; some are divided by the number of ranks in Horovod."""
    check_gradients(collectives, 1)
    check_gradients(wfbp, wfbp.size())


def check_gradients(by: Any, divisor: int) -> None:
    rank, size = wfbp.rank(), wfbp.size()
    share = divisor / size
    weight = float(rank + 1)
    total = sum(range(1, size + 1))

    def grad_of(act: object, rows: int = 2) -> list[float]:
        tensor = torch.ones(rows, requires_grad=True)
        (act(tensor) * weight).sum().backward()  # type: ignore[operator]
        assert tensor.grad is not None
        return tensor.grad.tolist()

    assert grad_of(lambda t: by.allreduce(t, op=wfbp.Sum)) == [total] * 2
    assert grad_of(lambda t: by.allreduce(t)) == pytest.approx([total / size] * 2)
    assert grad_of(lambda t: by.allreduce(t, op=wfbp.Sum, prescale_factor=3)) == [3 * total] * 2
    assert grad_of(by.allgather) == pytest.approx([total / divisor] * 2)
    own = total / divisor if rank == 0 else 0
    assert grad_of(lambda t: by.broadcast(t, 0)) == pytest.approx([own] * 2)
    found = grad_of(lambda t: by.alltoall(t, [1] * size)[0], size)
    assert found == [r + 1.0 for r in range(size)]
    found = grad_of(lambda t: by.reducescatter(t, op=wfbp.Sum), size)
    assert found == [divisor * (r + 1.0) for r in range(size)]
    found = grad_of(lambda t: by.reducescatter(t, op=wfbp.Average), size)
    assert found == pytest.approx([share * (r + 1.0) for r in range(size)])
    assert grad_of(lambda t: sum(by.grouped_allreduce([t, 2 * t], op=wfbp.Sum))) == [3 * total] * 2
    assert grad_of(lambda t: torch.cat(by.grouped_allgather([t, t]))) == pytest.approx(
        [2 * total / divisor] * 2
    )
    found = grad_of(lambda t: torch.cat(by.grouped_reducescatter([t, t])), size)
    assert found == pytest.approx([2 * share * (r + 1.0) for r in range(size)])
    with pytest.raises(RuntimeError, match="has no gradient"):
        grad_of(lambda t: by.allreduce(t, op=wfbp.Max))
    # A second derivative: of the sum over ranks of the cube of the sum over ranks.
    x = torch.tensor([1.0], requires_grad=True)
    (first,) = torch.autograd.grad(by.allreduce(x, op=wfbp.Sum) ** 3, x, create_graph=True)
    first.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [6.0 * size**3]


@check
def gradients_that_only_one_rank_wants() -> None:
    rank = wfbp.rank()
    tensor = torch.ones(2, requires_grad=rank == 0)
    found = wfbp.allgather(3 * tensor)
    assert found.requires_grad
    found.sum().backward()
    assert (tensor.grad is None) == (rank > 0)
    if rank == 0:
        assert tensor.grad is not None
        assert tensor.grad.tolist() == [3.0] * 2
    assert not wfbp.allgather(tensor.detach()).requires_grad
    with torch.no_grad():
        assert not wfbp.allreduce(tensor).requires_grad
    assert not wfbp.allreduce(torch.ones(1, dtype=torch.int32)).requires_grad


@check
def sparse() -> None:
    rank, size = wfbp.rank(), wfbp.size()
    dense = torch.zeros(5, 2)
    dense[rank % 5] = rank + 1.0
    found = wfbp.sparse_allreduce_async(dense.to_sparse(), "rows", wfbp.Average)()
    assert torch.allclose(found.to_dense(), wfbp.allreduce(dense))
    found = wfbp.sparse_allreduce_async(dense.to_sparse(), op=wfbp.Sum)()
    assert torch.equal(found.to_dense(), wfbp.allreduce(dense, op=wfbp.Sum))
    assert size
    # What differs is told, also where what travels looks alike; both names are free again then.
    first = rank == 0
    for other, told in (
        (torch.zeros(5, 2, 1 + rank), "(5, 2, 1) with 3 sparse"),
        (torch.zeros(5 + rank, 2), "(6, 2) with 2 sparse"),
        (torch.zeros(5, 2, dtype=torch.float32 if first else torch.float64), "torch.float64 of"),
    ):
        for name in ("apart", None):
            if size > 1:
                wait = wfbp.sparse_allreduce_async(other.to_sparse(), name)
                raises(WfbpError, "ranks disagree", told, "rank 0: sparse_allreduce", act=wait)
    if size > 1:
        hybrid = torch.zeros(5, 2).to_sparse(1 if first else 2)
        wait = wfbp.sparse_allreduce_async(hybrid, "apart")
        raises(RuntimeError, "with 1 sparse", "with 2 sparse", act=wait)
        wait = wfbp.sparse_allreduce_async(
            dense.to_sparse(), "apart", wfbp.Sum if first else wfbp.Average
        )
        raises(RuntimeError, "op=wfbp.Sum", "op=wfbp.Average", act=wait)
    assert wfbp.sparse_allreduce_async(dense.to_sparse(), "apart")().shape == dense.shape


@check
def adasum() -> None:
    rank, size = wfbp.rank(), wfbp.size()
    if size & (size - 1):
        raises(
            ValueError, "power of two", act=lambda: wfbp.allreduce(torch.ones(2), op=wfbp.Adasum)
        )
        return
    alike = wfbp.allreduce(torch.full((3,), 2.0), op=wfbp.Adasum)
    assert alike.tolist() == [2.0] * 3
    apart = torch.zeros(size)
    apart[rank] = rank + 1.0
    assert wfbp.allreduce(apart, op=wfbp.Adasum).tolist() == [r + 1.0 for r in range(size)]
    raises(RuntimeError, "only allreduce", act=lambda: wfbp.reducescatter(apart, op=wfbp.Adasum))


@check
def groups_in_place() -> None:
    group = [torch.full((k,), float(wfbp.rank())) for k in range(4)]
    found = wfbp.grouped_allreduce_(group, name="all of them", op=wfbp.Sum)
    assert [t.tolist() for t in found] == [[float(ranks_sum())] * k for k in range(4)]
    assert all(a is b for a, b in zip(found, group, strict=True))
    # A group of which one tensor cannot be sent is not submitted in part.
    for call, bad in (
        (wfbp.grouped_allreduce_async, torch.ones(1, dtype=torch.uint16)),
        (wfbp.grouped_allreduce, torch.ones(1, dtype=torch.uint16)),
        (wfbp.grouped_allgather_async, torch.tensor(1.0)),
        (wfbp.grouped_allgather, torch.tensor(1.0)),
        (wfbp.grouped_reducescatter, torch.tensor(1.0)),
    ):
        with pytest.raises(ValueError, match=r"uint16|found a scalar"):
            call([torch.ones(2), bad], name="some of them")
        found = wfbp.grouped_allreduce([torch.ones(2)] * 2, name="some of them")
        assert [t.tolist() for t in found] == [[1.0, 1.0]] * 2
    raises(TypeError, "tensors[1] is a int", act=lambda: wfbp.grouped_allreduce([torch.ones(1), 1]))
    # Nor one of which the operation is refused, by whichever ranks: the others' names match on.
    mixed = [torch.ones(2), torch.tensor([True])]
    if wfbp.rank() == 0:  # the others submit it later, so it is pending here
        pending = wfbp.allreduce_async(torch.ones(1), name="pair.2of2")
        for name in (None, "pair"):
            refused = partial(wfbp.grouped_allreduce_async, mixed, name=name)
            raises(ValueError, "bool has no average", act=refused)
        refused = partial(wfbp.grouped_allreduce_async_, [torch.ones(2)] * 2, name="pair")
        if wfbp.size() > 1:
            raises(ValueError, "'pair.2of2' is pending", act=refused)
    wfbp.barrier()
    if wfbp.rank() > 0:
        pending = wfbp.allreduce_async(torch.ones(1), name="pair.2of2")
    wfbp.synchronize(pending)
    for name in (None, "pair"):
        found = wfbp.grouped_allreduce([torch.ones(2)] * 2, name=name, op=wfbp.Sum)
        assert [t.tolist() for t in found] == [[float(wfbp.size())] * 2] * 2
    handle = wfbp.grouped_reducescatter_async([torch.ones(wfbp.size())] * 2, op=wfbp.Sum)
    assert [t.tolist() for t in wfbp.synchronize(handle)] == [[float(wfbp.size())]] * 2


@check
def process_sets() -> None:
    rank, size = wfbp.rank(), wfbp.size()
    assert wfbp.global_process_set.process_set_id == 0
    assert wfbp.global_process_set.ranks == list(range(size))
    raises(ValueError, "exists already", act=lambda: wfbp.add_process_set(range(size)))
    raises(ValueError, "expected different ones", act=lambda: wfbp.add_process_set([0, size]))
    raises(TypeError, "split communicator", act=lambda: wfbp.ProcessSet(MPI.COMM_WORLD))
    stranger = wfbp.ProcessSet([0])
    raises(ValueError, "add_process_set()", act=stranger.size)
    if size == 1:
        return
    last = wfbp.add_process_set(wfbp.ProcessSet([size - 1]))
    raises(ValueError, "exists already", act=lambda: wfbp.add_process_set([size - 1]))
    even = wfbp.add_process_set(range(0, size, 2)) if size > 2 else last
    assert even.included() == (rank in even.ranks)
    if even.included():
        found = wfbp.allreduce(torch.tensor(rank), op=wfbp.Sum, process_set=even)
        assert found == sum(even.ranks)
        assert even.ranks[even.rank()] == rank
        found = wfbp.allgather(torch.tensor([rank]), process_set=even)
        assert found.tolist() == even.ranks
        found = wfbp.broadcast(torch.tensor(rank), even.ranks[-1], process_set=even)
        assert found == even.ranks[-1]
        handle = wfbp.allreduce_async(torch.ones(1), name="mine", process_set=even)
        # Names are those of a set.
        other = wfbp.allreduce_async(torch.ones(1), name="mine")
        wfbp.synchronize(handle)
        wfbp.barrier(even)
    else:
        raises(ValueError, "is not in the process set", act=lambda: wfbp.barrier(even))
        assert even.rank() == -1
        other = wfbp.allreduce_async(torch.ones(1), name="mine")
    wfbp.synchronize(other)
    wfbp.remove_process_set(last)
    raises(ValueError, "add_process_set()", act=last.size)
    if even is not last:
        assert wfbp.remove_process_set(even)
    assert not wfbp.remove_process_set(wfbp.global_process_set)


@check
def uneven_data() -> None:
    rank, size = wfbp.rank(), wfbp.size()
    ones = torch.ones(2)
    for first in range(size):
        if rank != first:
            assert wfbp.allreduce(ones, op=wfbp.Sum).tolist() == [size - 1.0] * 2
            found = wfbp.allreduce(torch.ones(3), op=wfbp.Sum, name="step")
            assert found.tolist() == [size - 1.0] * 3
            found = wfbp.allreduce(torch.ones(500), op=wfbp.Sum, name="large")
            assert found.tolist() == [size - 1.0] * 500
            if size > 1:
                raises(WfbpError, f"rank {first} called join()", act=lambda: wfbp.allgather(ones))
            # A name that has nothing to do with the others' call of join().
            assert wfbp.allreduce(ones, name="join", op=wfbp.Sum).tolist() == [size - 1.0] * 2
        last = wfbp.join()
        assert last != first or size == 1
        assert set(wfbp.allgather(torch.tensor([last])).tolist()) == {last}


@check
def barriers_and_pending_operations() -> None:
    handles = [
        wfbp.broadcast_async(torch.eye(3), 0),
        wfbp.allgather_async(torch.eye(5)),
        wfbp.allreduce_async(torch.eye(5)),
    ]
    if wfbp.rank() == 0:
        wfbp.barrier()
        late = wfbp.allreduce_async(torch.ones(1), name="late")
    else:
        late = wfbp.allreduce_async(torch.ones(1), name="late")
        wfbp.barrier()
    assert torch.equal(wfbp.synchronize(handles[2]), torch.eye(5))
    for handle in (*handles[:2], late):
        wfbp.synchronize(handle)
