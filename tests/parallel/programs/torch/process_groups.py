"""The operations of the backend ``wfbp`` of torch.distributed, and how they fail."""

from __future__ import annotations

import functools
import gc
import itertools
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import init_device_mesh

import wfbp.torch
import wfbp.torch.distributed
from tests.parallel.programs.harness import Check, Checks, raises
from wfbp.comm.mpi import group_exchange, transfers
from wfbp.errors import DisagreementError, StallError, WfbpError
from wfbp.runtime import process
from wfbp.torch.distributed import groups

check = Checks()

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
OTHERS = (torch.bool, torch.float8_e4m3fn, torch.float8_e5m2)
LARGE = 300_001
"""Elements that take several chunks, and no multiple of the number of ranks."""


@contextmanager
def group(timeout_s: float = 60.0) -> Iterator[tuple[int, int]]:
    """The default process group: rank and size."""
    dist.init_process_group("wfbp", timeout=timedelta(seconds=timeout_s))
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def grouped_in(check: Checks) -> Callable[[Callable[[int, int], None]], Check]:
    """Decorator of checks that run in a default process group."""

    def grouped(function: Callable[[int, int], None]) -> Check:
        @check
        @functools.wraps(function)
        def run() -> None:
            with group() as (rank, size):
                function(rank, size)

        return run

    return grouped


grouped = grouped_in(check)


def values(rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """What a rank contributes: small whole numbers, which every type adds exactly."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    numbers = torch.randint(1, 4, (numel,), generator=generator)
    if dtype.is_complex:
        return (numbers + 1j * numbers.flip(0)).to(dtype)
    return numbers.to(dtype) if dtype is not torch.bool else numbers > 1


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal bits of equal types."""
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    return (
        found.contiguous()
        .flatten()
        .view(torch.uint8)
        .equal(wanted.contiguous().flatten().view(torch.uint8))
    )


def reduced(parts: list[torch.Tensor], op: Any) -> torch.Tensor:
    functions = {
        ReduceOp.SUM: torch.add,
        ReduceOp.AVG: torch.add,
        ReduceOp.PRODUCT: torch.mul,
        ReduceOp.MIN: torch.minimum,
        ReduceOp.MAX: torch.maximum,
        ReduceOp.BAND: torch.bitwise_and,
        ReduceOp.BOR: torch.bitwise_or,
        ReduceOp.BXOR: torch.bitwise_xor,
    }
    if parts[0].is_complex():
        return torch.view_as_complex(reduced([torch.view_as_real(part) for part in parts], op))
    wide = parts
    half = parts[0].dtype in (torch.float16, torch.bfloat16)
    if half:
        wide = [part.float() for part in parts]
    result = functools.reduce(functions[op], wide)
    if op is ReduceOp.AVG:
        whole = None if result.is_floating_point() else "trunc"
        result = result.div(len(parts), rounding_mode=whole)
    return result.to(parts[0].dtype)


@grouped
def all_reductions(rank: int, size: int) -> None:
    arithmetic = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
    bitwise = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
    cases = [
        *itertools.product(FLOATS, arithmetic),
        *itertools.product(INTEGERS, (*arithmetic, *bitwise)),
        *itertools.product(COMPLEX, (ReduceOp.SUM, ReduceOp.AVG)),
        *itertools.product([torch.bool], bitwise),
    ]
    for dtype, op in cases:
        for numel in (0, 1, 7, *([LARGE] if dtype.itemsize in (2, 4) else [])):
            parts = [values(r, numel, dtype) for r in range(size)]
            tensor = parts[rank].clone()
            dist.all_reduce(tensor, op)
            assert same(tensor, reduced(parts, op)), (dtype, op, numel)
            tensor, root = parts[rank].clone(), size - 1
            if dtype.is_complex:
                continue
            dist.reduce(tensor, root, op)
            assert same(tensor, reduced(parts, op) if rank == root else parts[rank])
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar)
    assert scalar == sum(range(size))
    flags = torch.tensor([rank == 0, True, False])
    dist.all_reduce(flags, ReduceOp.SUM)
    assert flags.tolist() == [True, True, False]
    factor = dist.ReduceOp.PREMUL_SUM(0.5)
    tensor = torch.full((5,), float(rank + 1))
    dist.all_reduce(tensor, factor)
    assert (tensor == sum(range(1, size + 1)) / 2).all()
    whole = torch.full((5,), 2 * rank, dtype=torch.int32)
    dist.reduce(whole, 0, factor)
    assert rank > 0 or (whole == sum(range(size))).all()
    raises(ValueError, "BAND", act=lambda: dist.all_reduce(torch.ones(2), ReduceOp.BAND))
    raises(
        ValueError,
        "float8_e5m2",
        act=lambda: dist.all_reduce(torch.ones(2).to(torch.float8_e5m2)),
    )


@grouped
def averages_of_integers(rank: int, size: int) -> None:
    """Sums that the type cannot hold, of values that it can; truncated toward zero."""

    def reduced(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        dist.all_reduce(tensor, ReduceOp.AVG)
        yield tensor
        dist.reduce(tensor, size - 1, ReduceOp.AVG)
        yield tensor
        dist.group.WORLD.allreduce_coalesced([tensor], ReduceOp.AVG).wait()
        yield tensor
        output = torch.empty(len(tensor) // size, dtype=tensor.dtype)
        dist.reduce_scatter_single(output, tensor, ReduceOp.AVG)
        yield output
        yield wfbp.torch.allreduce(tensor, "mean")
        yield wfbp.torch.reducescatter(tensor, "means")

    for dtype in INTEGERS:
        limits = torch.iinfo(dtype)
        for value in (limits.max, limits.min, limits.max - 1):
            for numel in (4 * size, LARGE // size * size if dtype is torch.int8 else 5000 * size):
                for found in reduced(torch.full((numel,), value, dtype=dtype)):
                    assert found.eq(value).all(), (dtype, value, found)
            for before, after in ((1.0, 1 / size), (2.0, 1 / (2 * size))):
                scaled = functools.partial(
                    wfbp.torch.allreduce, prescale_factor=before, postscale_factor=after
                )
                whole = torch.full((4,), value, dtype=dtype)
                found = scaled(whole, f"sum of {dtype}", op=wfbp.torch.Sum).to(torch.int64)
                if dtype is not torch.int64:
                    assert found.sub(value).abs().le(1).all(), (dtype, value, found)
        if limits.min < 0:
            tensor = torch.full((3,), limits.min + 1 - rank // (size - 1), dtype=dtype)
            dist.all_reduce(tensor, ReduceOp.AVG)
            assert tensor.eq(limits.min + 1).all(), tensor


@grouped
def memory_of_any_layout(rank: int, size: int) -> None:
    total = sum(range(1, size + 1))
    whole = torch.ones(6, 4) * (rank + 1)
    dist.all_reduce(whole.t()[::2])
    assert whole[:, ::2].eq(total).all()
    assert whole[:, 1::2].eq(rank + 1).all()
    table = torch.arange(12.0).view(3, 4) + rank
    dist.broadcast(table.t(), 0)
    assert table.equal(torch.arange(12.0).view(3, 4))
    outputs = [torch.zeros(4, 3).t() for _ in range(size)]
    dist.all_gather(outputs, (torch.arange(12.0).view(4, 3) + rank).t())
    for r, output in enumerate(outputs):
        assert output.equal((torch.arange(12.0).view(4, 3) + r).t())
    parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
    dist.broadcast(parameter.data, size - 1)
    assert parameter.eq(size - 1).all()


@check
def sparse_tensors() -> None:
    with group() as (rank, size):
        for dtype in (torch.float16, torch.float32, torch.int32):
            for row in ((), (2,), (0,)):
                for counts in ((2,) * size, range(size), (0,) * size):  # values of each rank
                    parts = [
                        torch.sparse_coo_tensor(
                            torch.tensor([[0, r + 1][: counts[r]], [1, 0][: counts[r]]]).long(),
                            torch.full((counts[r], *row), r + 1).to(dtype),
                            (size + 1, 2, *row),
                            check_invariants=True,
                        )
                        for r in range(size)
                    ]
                    wanted = functools.reduce(torch.add, (part.to_dense() for part in parts))
                    tensor = parts[rank]
                    with no_pickles():
                        dist.all_reduce(tensor)
                    assert tensor.is_sparse
                    assert tensor.to_dense().equal(wanted), (dtype, row, tensor)
    for shape, places in (((4, 4), [[3], [3]]), ((3, 3), [[2]]), ((3, 3), [[2], [2]])):
        with group() as (rank, size):
            values = torch.ones(1, 3) if len(places) == 1 else torch.ones(1)
            other = torch.sparse_coo_tensor(places, values, shape, check_invariants=True)
            mine = torch.sparse_coo_tensor([[0], [0]], torch.ones(1), (3, 3), check_invariants=True)
            tensor = other if rank == 0 else mine
            if len(places) == 2 and shape == (3, 3):
                dist.all_reduce(tensor)
                assert tensor.to_dense().sum() == size
            else:
                raises(DisagreementError, "sparse", act=lambda t=tensor: dist.all_reduce(t))


@contextmanager
def no_pickles() -> Iterator[None]:
    """PyTorch's own format of sparse tensors warns when it is read, from 2.14 on."""
    load = torch.load
    torch.load = None  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.load = load


@grouped
def movements(rank: int, size: int) -> None:
    for dtype in (*FLOATS, *INTEGERS, *COMPLEX, *OTHERS):
        numels = [0, 1, 5]
        if dtype in (torch.float32, torch.bool):
            numels.append(LARGE * 4)
        for numel in numels:
            parts = [values(r, numel, dtype) for r in range(size)]
            mine, root = parts[rank], size - 1
            tensor = mine.clone()
            dist.broadcast(tensor, root)
            assert same(tensor, parts[root])
            outputs = [torch.empty_like(mine) for _ in range(size)]
            dist.all_gather(outputs, mine)
            assert all(map(same, outputs, parts))
            whole = torch.empty(size * numel, dtype=dtype)
            dist.all_gather_single(whole, mine)
            assert same(whole, torch.cat(parts))
            outputs = [torch.empty_like(mine) for _ in range(size)] if rank == root else None
            dist.gather(mine, outputs, root)
            assert outputs is None or all(map(same, outputs, parts))
            tensor = torch.empty_like(mine)
            blocks = [part.clone() for part in parts] if rank == root else None
            dist.scatter(tensor, blocks, root)
            assert same(tensor, mine)
            sent = [values(rank, numel, dtype, seed=1 + r) for r in range(size)]
            wanted = [values(r, numel, dtype, seed=1 + rank) for r in range(size)]
            outputs = [torch.empty_like(mine) for _ in range(size)]
            dist.all_to_all(outputs, sent)
            assert all(map(same, outputs, wanted))
            whole = torch.empty(size * numel, dtype=dtype)
            dist.all_to_all_single(whole, torch.cat(sent))
            assert same(whole, torch.cat(wanted))


@grouped
def uneven_movements(rank: int, size: int) -> None:
    parts = [values(r, 3 * r + 1, torch.float32) for r in range(size)]
    outputs = [torch.empty_like(part) for part in parts]
    dist.all_gather(outputs, parts[rank])
    assert all(map(same, outputs, parts))
    # Rank s sends s + r rows to rank r.
    rows = [rank + r for r in range(size)]
    sent = torch.full((sum(rows), 2), float(rank))
    output = torch.empty(sum(rows), 2)
    dist.all_to_all_single(output, sent, rows, rows)
    assert output[:, 0].tolist() == [float(r) for r in range(size) for _ in range(rank + r)]
    outputs = [torch.empty(r) for r in range(size)]
    dist.all_to_all(outputs, [torch.full((rank,), float(rank)) for _ in range(size)])
    assert [output.tolist() for output in outputs] == [[float(r)] * r for r in range(size)]


@grouped
def reduce_scatters(rank: int, size: int) -> None:
    for dtype, op in (
        (torch.float32, ReduceOp.SUM),
        (torch.float32, ReduceOp.AVG),
        (torch.bfloat16, ReduceOp.SUM),
        (torch.int16, ReduceOp.MAX),
        (torch.int64, ReduceOp.BOR),
    ):
        for numel in (0, 1, 5, LARGE):
            wholes = [values(r, size * numel, dtype) for r in range(size)]
            wanted = reduced(wholes, op)[rank * numel : (rank + 1) * numel]
            output = torch.empty(numel, dtype=dtype)
            dist.reduce_scatter_single(output, wholes[rank], op)
            assert same(output, wanted)
            output = torch.empty(numel, dtype=dtype)
            dist.reduce_scatter(
                output,
                list(wholes[rank].chunk(size)) if numel else [torch.empty(0, dtype=dtype)] * size,
                op,
            )
            assert same(output, wanted)
    tensors = [torch.full((n,), float(rank + 1)) for n in (3, 5)]
    dist.group.WORLD.allreduce_coalesced(tensors).wait()
    assert all(tensor.eq(sum(range(1, size + 1))).all() for tensor in tensors)
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor, ReduceOp.MAX)
    whole = torch.full((2,), float(rank))
    with dist._coalescing_manager(device=torch.device("cpu")):
        dist.broadcast(whole, 0)  # waits for itself, though it is part of something larger
        assert whole.eq(0).all()
        last = dist.broadcast(whole, size - 1, async_op=True)
    assert last.is_completed()
    outputs = [torch.empty(size * n) for n in (3, 5)]
    group = dist.group.WORLD
    for several in ([], [torch.ones(2), torch.ones(3)]):  # none, or several in one call
        group._start_coalescing(torch.device("cpu"))
        group.allreduce_coalesced(several)
        work = group._end_coalescing(torch.device("cpu"))
        work.wait()
        assert [t.tolist() for t in work.result()] == [[size] * len(t) for t in several]
    with dist._coalescing_manager(async_ops=True) as manager:
        for output, tensor in zip(outputs, tensors, strict=True):
            dist.all_gather_single(output, tensor * (rank + 1))
    manager.wait()
    total = sum(range(1, size + 1))
    for output, n in zip(outputs, (3, 5), strict=True):
        assert output.tolist() == [float(total * (r + 1)) for r in range(size) for _ in range(n)]


@grouped
def an_exception_while_coalescing(rank: int, size: int) -> None:
    """Later operations are carried out, and their tensors are freed."""
    for device in (None, torch.device("cpu")):
        for collective in (dist.all_reduce, functools.partial(dist.broadcast, src=0)):
            tensor = torch.full((3,), float(rank))
            with (
                suppress(ZeroDivisionError),
                dist._coalescing_manager(device=device, async_ops=True),
            ):
                collective(tensor)
                raise ZeroDivisionError
            later = torch.ones(3)
            freed = weakref.ref(later)
            dist.all_reduce(later)
            assert later.eq(size).all()
            del later
            gc.collect()
            assert freed() is None
            with dist._coalescing_manager(device=device, async_ops=True) as manager:
                dist.all_reduce(tensor.fill_(1.0))
            manager.wait()
            assert tensor.eq(size).all()


@grouped
def arguments_that_do_not_fit(rank: int, size: int) -> None:
    """Errors of this rank alone, before anything is sent; older ways to pass options."""
    three, whole = torch.ones(3), dist.group.WORLD

    def each(numel: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        return [torch.ones(numel, dtype=dtype) for _ in range(size)]

    calls: dict[str, Callable[[], object]] = {
        f"all_gather: {size - 1} tensors": lambda: dist.all_gather(each(3)[1:], three),
        "all_gather: tensors float32[3]": lambda: dist.all_gather(each(2), three),
        "one element type": lambda: whole.alltoall(each(3, torch.int32), each(3)),
        "cannot be split": lambda: whole._allgather_base(torch.empty(3 * size + 1), three),
        "by split sizes": lambda: dist.all_to_all_single(three, three.clone(), [5] * size),
        "reduce_scatter: tensors": lambda: whole.reduce_scatter([torch.ones(2)], [each(3)]),
        "is the root": lambda: whole.broadcast(three, size),
        "MIN of torch.complex64 is not defined": lambda: whole.allreduce(
            torch.ones(2, dtype=torch.complex64), ReduceOp.MIN
        ),
        "BAND of torch.float32 is not defined": lambda: whole.allreduce(three, ReduceOp.BAND),
    }
    for part, call in calls.items():
        raises(ValueError, part, act=call)
    if rank == 0:
        lists = [torch.ones(3) for _ in range(size - 1)] + [torch.ones(4)]
        raises(ValueError, "gather: tensors", act=lambda: dist.gather(three, lists, 0))
    turned = torch.full((2,), 1j, dtype=torch.complex64)
    whole.allreduce(turned, op=ReduceOp.PRODUCT).wait()
    assert turned.eq(1j**size).all()
    outputs = [[torch.zeros(2), torch.zeros(1)] for _ in range(size)]
    inputs = [torch.full((2,), float(rank)), torch.full((1,), float(-rank))]
    whole.allgather_coalesced(outputs, inputs).wait()
    for r, (first, second) in enumerate(outputs):
        assert first.eq(r).all()
        assert second.eq(-r).all()
    negative = torch.imag(torch.full((2,), 1 + 1j).conj())  # lazily negated
    dist.all_reduce(negative)
    assert negative.eq(-size).all()


@grouped
def messages(rank: int, size: int) -> None:
    after, before = (rank + 1) % size, (rank - 1) % size
    for numel in (0, 3, LARGE):
        work = dist.isend(torch.full((numel,), float(rank)), after, tag=7)
        other = dist.isend(torch.full((2,), -1.0), after, tag=70_000)
        first, second = torch.empty(2), torch.empty(numel)
        dist.recv(first, before, tag=70_000)  # tags may be waited for in another order
        dist.recv(second, before, tag=7)
        work.wait()
        other.wait()
        assert first.eq(-1).all()
        assert second.eq(before).all()
    if rank:
        dist.send(torch.tensor([rank]), 0, tag=1)
    else:
        tensor, senders = torch.zeros(1, dtype=torch.int64), set()
        for _ in range(1, size):
            sender = dist.recv(tensor, tag=1)
            assert sender == tensor.item()
            senders.add(sender)
        assert senders == set(range(1, size))
    numbers = [torch.empty(1) for _ in range(3)]
    works = [dist.irecv(number, before, tag=5) for number in numbers]
    for k in range(3):  # messages arrive in the order of calls
        dist.send(torch.tensor([float(k)]), after, tag=5)
    for work in works:
        work.wait()
    assert torch.cat(numbers).tolist() == [0, 1, 2]
    raises(ValueError, "tag -1; expected 0 to", act=lambda: dist.send(numbers[0], after, tag=-1))
    outgoing, incoming = torch.full((4,), float(rank)), torch.empty(4)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, outgoing, after), dist.P2POp(dist.irecv, incoming, before)]
    )
    for work in works:
        work.wait()
    assert incoming.eq(before).all()
    dist.send_object_list([{"from": rank}], after)
    objects: list[Any] = [None]
    dist.recv_object_list(objects, before)
    assert objects == [{"from": before}]


@grouped
def asynchronous_operations(rank: int, size: int) -> None:
    tensors = [torch.full((1000,), float(k)) for k in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    order = list(range(20))
    random.Random(rank).shuffle(order)
    for k in order:
        assert works[k].wait()
        assert works[k].is_completed()
        assert works[k].is_success()
        assert works[k].exception() is None
        assert tensors[k].eq(k * size).all()
    late = torch.full((3,), float(rank))
    if rank == 0:
        time.sleep(0.05)  # another rank's work is not complete before this
    work = dist.all_reduce(late, async_op=True)

    def reduce_again(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        (tensor,) = future.value()
        inner = dist.all_reduce(tensor, async_op=True).get_future()
        return inner.wait()[0] + 1

    result = work.get_future().then(reduce_again).wait()
    assert result.eq(size * sum(range(size)) + 1).all()
    while not work.is_completed():
        time.sleep(0.001)


@grouped
def groups_in_any_order(rank: int, size: int) -> None:
    # Every pair of ranks; each rank makes its own in another order.
    pairs = [pair for pair in itertools.combinations(range(size), 2) if rank in pair]
    made = {}
    for pair in pairs:
        made[pair] = dist.new_group(list(pair), use_local_synchronization=True)
    tensors = {pair: torch.tensor([float(rank)]) for pair in pairs}
    works = [
        dist.all_reduce(tensors[pair], group=made[pair], async_op=True)
        for pair in (pairs if rank % 2 else reversed(pairs))
    ]
    for work in works:
        work.wait()
    for pair in pairs:
        assert tensors[pair].item() == sum(pair)
    for pair in pairs:
        dist.monitored_barrier(made[pair])
    ranks = list(range(size))
    for _ in range(3):  # with the same communicators
        whole = dist.new_group(ranks[::-1])
        tensor = torch.tensor([float(rank)])
        dist.broadcast(tensor, group_src=size - 1, group=whole)
        assert tensor.item() == size - 1
        dist.destroy_process_group(whole)
    halves = [ranks[: size // 2], ranks[size // 2 :]]
    half = dist.split_group(split_ranks=halves)
    mine = next(each for each in halves if rank in each)
    assert dist.get_process_group_ranks(half) == mine
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=half)
    assert tensor.item() == len(mine)
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("replicate", "shard"))
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=mesh.get_group("shard"))
    dist.all_reduce(tensor, group=mesh.get_group("replicate"))
    assert tensor.item() == size


@grouped
def barriers_and_objects(rank: int, size: int) -> None:
    arrived = torch.zeros(1)
    if rank == size - 1:
        time.sleep(0.05)
        arrived += 1
    dist.barrier()
    dist.monitored_barrier()
    dist.barrier(async_op=True).wait()
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * 100 * rank})
    assert [each["rank"] for each in objects] == list(range(size))
    told = ["a", rank] if rank == 0 else [None, None]
    dist.broadcast_object_list(told, 0)
    assert told == ["a", 0]
    gathered: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object((rank,), gathered, 0)
    assert gathered is None or gathered == [(r,) for r in range(size)]
    output: list[Any] = [None]
    dist.scatter_object_list(output, [f"for {r}" for r in range(size)] if rank == 0 else None, 0)
    assert output == [f"for {rank}"]
    assert dist.get_backend() == "wfbp"
    waited = timedelta(seconds=0.1)
    if rank == 0:
        with pytest.raises(StallError, match="Rank 1 failed to pass monitoredBarrier in 100 ms"):
            dist.monitored_barrier(timeout=waited)
    wfbp.torch.allgather_object("the others call it once rank 0 waits no more")
    if rank:
        with pytest.raises(StallError, match="rank 0"):
            dist.monitored_barrier(timeout=waited)
    dist.barrier()


@grouped
def functional_collectives_when_compiled(rank: int, size: int) -> None:
    from torch.distributed import _functional_collectives as functional

    def program(tensor: torch.Tensor) -> torch.Tensor:
        total = functional.all_reduce(tensor, "sum", dist.group.WORLD)
        gathered = functional.all_gather_single(total + 1, 0, dist.group.WORLD)
        parts = functional.reduce_scatter_single(gathered, "sum", 0, dist.group.WORLD)
        moved = functional.all_to_all_single(gathered, None, None, dist.group.WORLD)
        sent = functional.broadcast(moved, 0, dist.group.WORLD)
        return parts + sent.sum()

    tensor = torch.arange(3.0) + rank
    wanted = program(tensor) + 0
    found = torch.compile(program, backend="aot_eager", fullgraph=True)(tensor)
    assert found.equal(wanted)
    total = torch.arange(3.0) * size + sum(range(size)) + 1
    assert found.equal(total * size + total.sum() * size)


@check
def mismatches() -> None:
    def size_of_a_row() -> None:
        # Rank 0 sends one row more to rank 1 than it expects; the others learn of it later.
        size, extra = dist.get_world_size(), int(dist.get_rank() == 0)
        rows = [1, 1 + extra, *[1] * (size - 2)]
        dist.all_to_all_single(torch.empty(size), torch.empty(size + extra), [1] * size, rows)

    def odd() -> bool:
        return dist.get_rank() == dist.get_world_size() - 1

    cases: dict[str, Callable[[], object]] = {
        "broadcast(float32[3], root 0)": lambda: (
            dist.broadcast(torch.ones(3), 0) if odd() else dist.all_reduce(torch.ones(3))
        ),
        "all_reduce(float32[4], SUM)": lambda: dist.all_reduce(torch.ones(4 if odd() else 3)),
        "all_reduce(int32[3], SUM)": lambda: dist.all_reduce(
            torch.ones(3, dtype=torch.int32 if odd() else torch.float32)
        ),
        f"all_reduce(float32[{LARGE}], MAX)": lambda: dist.all_reduce(
            torch.ones(LARGE), ReduceOp.MAX if odd() else ReduceOp.SUM
        ),
        "sends [1, 2": size_of_a_row,
    }

    def run(case: Callable[[], object]) -> None:
        case()
        dist.barrier()

    for part, case in cases.items():
        with group():
            dist.barrier()
            with pytest.raises(DisagreementError) as caught:
                run(case)
            text = str(caught.value).partition(": ")[2]
            # All ranks get the same text, later calls too.
            with pytest.raises(DisagreementError, match="operation 2 of process group"):
                dist.barrier()
            texts = wfbp.torch.allgather_object(text)
            assert len(set(texts)) == 1, texts
            assert part in text
            assert "Every rank of the group must call the same" in text


@check
def a_rank_that_does_not_come() -> None:
    with group(timeout_s=0.5) as (rank, size):
        dist.barrier()
        if rank == size - 1:
            time.sleep(2.5)
        with pytest.raises(StallError) as caught:
            dist.all_reduce(torch.ones(3))
        text = str(caught.value).partition(": ")[2]
        assert f"rank {size - 1}: has not called it, after barrier()" in text
        assert len(set(wfbp.torch.allgather_object(text))) == 1
    with group() as (rank, size):
        if rank == 0:
            with pytest.raises(StallError, match=r"recv\(float32\[1\], rank 1, tag 0\).*timed out"):
                dist.irecv(torch.empty(1), 1).wait(timedelta(seconds=0.1))
        dist.barrier()
        if rank == 1:
            dist.send(torch.ones(3), 0)
        if rank == 0:
            raises(
                DisagreementError,
                "expects 2 bytes of torch.int8, but rank 1 of the group sends 12 bytes of "
                "torch.float32",
                act=lambda: dist.recv(torch.empty(2, dtype=torch.int8), 1),
            )
        dist.barrier()


@check
def ranks_that_the_program_numbers() -> None:
    """They are honoured, or an error on every rank."""
    rank, size = wfbp.torch.rank(), wfbp.torch.size()
    dist.init_process_group("wfbp", rank=size - 1 - rank, world_size=size)
    try:
        assert dist.get_rank() == size - 1 - rank
        tensor = torch.tensor([float(rank)])
        dist.broadcast(tensor, 0)
        assert tensor.item() == size - 1
        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, rank)
        assert objects == list(range(size))[::-1]
    finally:
        dist.destroy_process_group()
    for number, count in ((0, size), (rank, size + 1), (rank, size + (rank == 0))):
        told = "expected" if count == size else f"the {size} ranks of MPI, found"
        raises(
            ValueError,
            told,
            act=lambda n=number, c=count: dist.init_process_group("wfbp", rank=n, world_size=c),
        )
    with group() as (found, count):
        assert (found, count) == (rank, size)


@check
def a_group_that_rank_0_has_left() -> None:
    """Its store answers ranks that are still in ``init_process_group``."""
    with group():
        dist.barrier()  # the next group has its communicators, so ranks do not meet to make them

    class Late(groups.PrefixStore):  # type: ignore[misc]
        def get(self, key: str) -> bytes:
            if wfbp.torch.rank() and key == "0":
                wfbp.torch.barrier()
            found: bytes = super().get(key)
            return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "PrefixStore", Late)
        with group() as (rank, _):
            pass
        if rank == 0:
            wfbp.torch.barrier()


@check
def ranks_that_start_further_apart_than_the_timeout() -> None:
    """It limits operations: the first group waits for its ranks."""

    class Late(groups.PrefixStore):  # type: ignore[misc]
        def set(self, key: str, value: str) -> None:
            time.sleep(0.5 * wfbp.torch.rank())
            super().set(key, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "PrefixStore", Late)
        with group(timeout_s=0.1):
            wfbp.torch.barrier()


@check
def a_receive_that_is_posted_early() -> None:
    """The timeout limits the wait; of a long wait, the time since the last progress."""
    with group(timeout_s=0.6) as (rank, _):
        tensor = torch.zeros(1)
        work = dist.irecv(tensor, 1) if rank == 0 else None
        time.sleep(1.2)
        wfbp.torch.barrier()
        if rank == 1:
            dist.send(torch.full((1,), 7.0), 0)
        wfbp.torch.barrier()
        if work is not None:
            work.wait()
            assert tensor.item() == 7
        if rank == 0:
            with pytest.raises(StallError, match="timed out"):
                dist.recv(tensor, 1)
        wfbp.torch.barrier()


@check
def a_store_that_serves_several_runtimes() -> None:
    """What an earlier runtime has left in it does not count."""
    usual, rank, size = process.current("a check").config, wfbp.torch.rank(), wfbp.torch.size()
    store = dist.FileStore(f"{sys.argv[1]}/store", size)
    for rank_1_calls in (True, False):
        wfbp.torch.shutdown()
        wfbp.torch.init(config=usual)
        dist.init_process_group("wfbp", store=store, rank=rank, world_size=size)
        wait = functools.partial(dist.monitored_barrier, timeout=timedelta(seconds=0.5))
        if rank_1_calls:
            dist.monitored_barrier()
        elif rank == 0:
            raises(StallError, "Rank 1 failed to pass monitoredBarrier in 500 ms", act=wait)
        wfbp.torch.barrier()
        dist.destroy_process_group()


@grouped
def groups_of_the_same_ranks_are_independent(rank: int, size: int) -> None:
    soon = timedelta(seconds=0.5)
    # A message that nobody received must not reach the next group of the same ranks.
    pair = dist.new_group([0, 1])
    if rank == 1:
        dist.destroy_process_group(pair)
    dist.barrier()
    if rank == 0:
        dist.send(torch.full((3,), 111.0), 1, group=pair)
        dist.destroy_process_group(pair)
    pair = dist.new_group([0, 1])
    received = torch.full((3,), 222.0)
    if rank == 0:
        dist.send(received, 1, group=pair)
    elif rank == 1:
        dist.recv(received.zero_(), 0, group=pair)
    assert received.tolist() == [222.0] * 3, received
    # Two groups of the same ranks in different orders are different groups.
    turned = dist.new_group([1, 0], sort_ranks=False)
    dist.monitored_barrier()
    if rank == 0:
        raises(StallError, act=lambda: dist.monitored_barrier(turned, soon))
    dist.barrier()
    if size > 2:
        return
    # A rank that comes after the others have given up gives up too; later groups are made as usual.
    if rank == 1:
        dist.barrier()
    raises(StallError, act=lambda: dist.new_group([0, 1], timeout=soon))
    if rank == 0:
        dist.barrier()
    assert dist.get_world_size(dist.new_group([0, 1])) == 2


@check
def messages_in_pieces() -> None:
    """Longer ones than the MPI library can count, by a lower limit."""
    whole, transfers.PIECE_BYTES = transfers.PIECE_BYTES, 3
    sent: list[int] = []
    split = transfers.split_message

    def noting(data: Any) -> list[Any]:
        pieces = split(data)
        sent.extend(piece.nbytes for piece in pieces)
        return pieces

    group_exchange.split_message = transfers.split_message = noting
    try:
        with group() as (rank, size):
            rows = [rank + r for r in range(size)]
            output = torch.empty(sum(rows))
            mine = torch.full((sum(rows),), float(rank))
            dist.all_to_all_single(output, mine, rows, rows)
            assert output.tolist() == [float(r) for r in range(size) for _ in range(rank + r)]
            received = torch.empty(7)
            work = dist.isend(torch.arange(7.0) + rank, (rank + 1) % size)
            dist.recv(received, (rank - 1) % size)
            work.wait()
            assert received.equal(torch.arange(7.0) + (rank - 1) % size)
            blocks = torch.arange(2.0 * size) + 10 * rank
            found = wfbp.torch.alltoall(blocks)
            assert found.tolist() == [10 * r + 2 * rank + k for r in range(size) for k in (0, 1)]
        assert 0 < max(sent) <= 3, sent
    finally:
        group_exchange.split_message = transfers.split_message = split
        transfers.PIECE_BYTES = whole


@grouped
def many_receives(rank: int, size: int) -> None:
    """Posted before their messages come, in another order than these, and from any rank."""
    count, after, before = 300, (rank + 1) % size, (rank - 1) % size
    numbers = [torch.empty(1) for _ in range(2 * count)]
    works = [dist.irecv(number, before, tag=k % count) for k, number in enumerate(numbers)]
    anyone = [torch.empty(1) for _ in range(count)]
    works += [dist.group.WORLD.recv_anysource([number], count + 1) for number in anyone]
    dist.barrier()
    for k in reversed(range(2 * count)):
        works.append(dist.isend(torch.tensor([float(k)]), after, tag=k % count))
    works += [dist.isend(torch.tensor([float(k)]), after, tag=count + 1) for k in range(count)]
    for work in works:
        work.wait()
    # Of one tag, in the order of sending.
    assert [number.item() for number in numbers] == [*range(count, 2 * count), *range(count)]
    assert [number.item() for number in anyone] == [*range(count)]


@check
def aborted_groups() -> None:
    with group() as (rank, size):
        other = dist.new_group(list(range(size)))
        work = dist.all_reduce(torch.ones(2), group=other, async_op=True) if rank else None
        dist.barrier()
        other.abort()
        if work is not None:
            raises(WfbpError, "destroyed or aborted", act=work.wait)
            raises(WfbpError, "destroyed or aborted", act=work.get_future().wait)
        raises(WfbpError, act=lambda: dist.all_reduce(torch.ones(2), group=other))
        dist.barrier()


@grouped
def threads(rank: int, size: int) -> None:
    """Each thread has a group."""
    groups = [dist.new_group(list(range(size))) for _ in range(3)]
    problems: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for k in range(30):
                tensor = torch.full((50,), float(k + number))
                dist.all_reduce(tensor, group=groups[number])
                assert tensor.eq((k + number) * size).all()
        except BaseException as error:
            problems.append(error)

    running = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not problems, problems


@grouped
def mixed_operations(rank: int, size: int) -> None:
    stress(rank, size, 400)


def stress(rank: int, size: int, count: int) -> None:
    """Asynchronous operations on overlapping groups, waited for in a random order."""
    ranks = list(range(size))
    members = [ranks, ranks[1:], ranks[:-1], ranks[::2], ranks]
    groups = [dist.new_group(each) for each in members]
    together, alone = random.Random(5), random.Random(rank)
    pending: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
    for _ in range(count):
        which, kind = together.randrange(len(groups)), together.randrange(4)
        numel, seed = together.choice((1, 50, 3000, 60_000)), together.randrange(1000)
        own, team = groups[which], members[which]
        if rank not in team:
            continue
        parts = [values(r, numel, torch.float32, seed) for r in team]
        place = team.index(rank)
        tensor = parts[place].clone()
        if kind == 0:
            work = dist.all_reduce(tensor, group=own, async_op=True)
            wanted = reduced(parts, ReduceOp.SUM)
        elif kind == 1:
            work = dist.broadcast(tensor, team[-1], group=own, async_op=True)
            wanted = parts[-1]
        elif kind == 2:
            source, tensor = tensor, torch.empty(numel * len(team))
            work = dist.all_gather_single(tensor, source, group=own, async_op=True)
            wanted = torch.cat(parts)
        else:
            source, tensor = tensor.repeat(len(team)), torch.empty(numel)
            work = dist.reduce_scatter_single(tensor, source, group=own, async_op=True)
            wanted = reduced(parts, ReduceOp.SUM)
        pending.append((work, tensor, wanted))
        while len(pending) > 30 or (pending and alone.random() < 0.3):
            finished, found, expected = pending.pop(alone.randrange(len(pending)))
            finished.wait()
            assert found.equal(expected)
    for finished, found, expected in pending:
        finished.wait()
        assert found.equal(expected)
    for own, team in zip(groups, members, strict=True):
        if rank in team:
            dist.destroy_process_group(own)  # the next groups of these ranks use its communicators
