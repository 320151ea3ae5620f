"""Group buffers: layout, packing, and the flags that travel behind the tensors."""

from __future__ import annotations

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.local import LocalWorld
from wfbp.comm.arrays import Buffer, storage_dtype
from wfbp.comm.memory import Memory
from wfbp.core.plan import ALIGNMENT_BYTES, Group, Plan
from wfbp.core.types import Op, Operation, TensorSpec
from wfbp.runtime.buffers import NUM_STEP_FLAGS, STEP_CYCLE, GroupBuffer, shard_range
from wfbp.runtime.step import Gather, Step

DTYPES = ("float16", "bfloat16", "float32", "float64")


def plan_of(sizes: list[int], dtype: str, cut: int = 0, sharded: bool = False) -> Plan:
    """One group, or two that are cut there."""
    specs = tuple(TensorSpec(f"t{k}", (n,), dtype) for k, n in enumerate(sizes))
    order = tuple(reversed(range(len(sizes))))
    groups = (order[:cut], order[cut:]) if 0 < cut < len(sizes) else (order,)
    if not sharded:
        return Plan("test", specs, tuple(Group(g) for g in groups))
    scatters = [Group(g, Operation.REDUCE_SCATTER) for g in groups]
    gathers = [Group(g, Operation.ALL_GATHER) for g in groups]
    return Plan("test", specs, (*scatters, *gathers))


def real(dtype: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def step_of(
    arrays: list[np.ndarray | None],
    requested: bool = False,
    number: int = 0,
    discards: bool = False,
) -> Step:
    addresses = [0 if a is None else (a.__array_interface__["data"][0] or 1) for a in arrays]
    return Step(number, addresses, list(arrays), [], requested, discards)


def buffers_of(
    plan: Plan, size: int, op: Op, group: int = 0, wire: str = "", direct: int = 32
) -> list[GroupBuffer]:
    """One per rank, on a backend of threads."""
    world = LocalWorld(size)
    members = range(len(plan.tensors))
    memories = [Memory(world.backend(rank), direct) for rank in range(size)]
    return [GroupBuffer(plan, group, members, op, memory, wire) for memory in memories]


def travel(buffers: list[GroupBuffer]) -> None:
    """Send the message of every rank."""
    works = [buffer.send() for buffer in buffers]
    assert all(work.test() for work in works)
    for buffer in buffers:
        buffer.arrived()


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=9),
    st.sampled_from(DTYPES),
    st.sampled_from(["", "float16", "bfloat16"]),
    st.booleans(),
    st.sampled_from([Op.AVERAGE, Op.SUM]),
    st.integers(1, 5),
    st.integers(0, 9),
    st.randoms(use_true_random=False),
)
def test_a_step_of_messages(  # type: ignore[no-untyped-def]
    sizes, dtype, wire, sharded, op, size, cut, chance
) -> None:
    """Values, presence, requests and steps arrive as they were sent, for any plan and ranks; whole
    or in shards, which are then gathered."""
    plan = plan_of(sizes, dtype, cut, sharded)
    values = [
        [
            None
            if chance.random() < 0.4
            else np.array([chance.randint(-4, 4) for _ in range(n)]).astype(real(dtype))
            for n in sizes
        ]
        for _ in range(size)
    ]
    number = chance.randint(0, 1000)
    requests = [chance.random() < 0.3 for _ in range(size)]
    discards = [chance.random() < 0.3 for _ in range(size)]
    steps = [step_of(values[r], requests[r], number, discards[r]) for r in range(size)]
    wholes = [[np.zeros(n, real(dtype)) for n in sizes] for _ in range(size)]
    for group, members in enumerate(plan.groups[: plan.num_backward]):
        buffers = buffers_of(plan, size, op, group, wire)
        for buffer, step in zip(buffers, steps, strict=True):
            buffer.pack(step)
        travel(buffers)
        for rank, buffer in enumerate(buffers):
            for position, k in enumerate(members.tensors):
                start, stop = (
                    shard_range(plan.tensors[k], rank, size)
                    if sharded
                    else (0, plan.tensors[k].nbytes)
                )
                wholes[rank][k].view(np.uint8)[start:stop] = buffer.result(position)
    for buffer, step in zip(buffers, steps, strict=True):
        result = buffer.read_flags(step)
        assert result.present == [any(v[k] is not None for v in values) for k in range(len(sizes))]
        assert result.requested == any(requests)
        assert result.discarded == any(discards)
        assert result.steps_agree
    for group in range(plan.num_backward, len(plan.groups)):
        buffers = buffers_of(plan, size, op, group)
        addresses = [step_of(whole).sources for whole in wholes]
        gathers = [Gather(a, wholes[r], None, ()) for r, a in enumerate(addresses)]
        for buffer, gather in zip(buffers, gathers, strict=True):
            buffer.pack(gather)
        travel(buffers)
        for buffer, gather in zip(buffers, gathers, strict=True):
            buffer.deliver(gather)
    for k, n in enumerate(sizes):
        total = sum(v[k].astype(np.float64) for v in values if v[k] is not None)
        wanted = total / (size if op is Op.AVERAGE else 1) + np.zeros(n)
        for whole in wholes:
            assert np.allclose(whole[k].astype(np.float64), wanted, rtol=2.0**-7, atol=2.0**-9)
            assert whole[k].tobytes() == wholes[0][k].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", [Op.AVERAGE, Op.SUM])
@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("apart", [1, STEP_CYCLE // 2, -1])
def test_ranks_at_different_steps_are_found(dtype: str, op: Op, size: int, apart: int) -> None:
    plan = plan_of([3], dtype)
    for step in range(1, 2 * STEP_CYCLE, 7):
        for late in (0, size - 1):
            buffers = buffers_of(plan, size, op)
            numbers = [step + (apart if rank == late else 0) for rank in range(size)]
            steps = [step_of([None], number=number) for number in numbers]
            for buffer, own in zip(buffers, steps, strict=True):
                buffer.pack(own)
            travel(buffers)
            assert not all(
                b.read_flags(own).steps_agree for b, own in zip(buffers, steps, strict=True)
            )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "most"), [("closing_call", 63), ("mark", 15)])
@pytest.mark.parametrize("agree", [True, False])
def test_calls_that_end_a_step_and_marks_of_parameters_are_compared(
    dtype: str, name: str, most: int, agree: bool
) -> None:
    for values in ((5, 5, 5), (None, 7, 7)) if agree else ((5, 6, 5), (0, 0, most)):
        buffers = buffers_of(plan_of([3], dtype), len(values), Op.AVERAGE)
        steps = [step_of([None], number=3) for _ in values]
        for buffer, step, value in zip(buffers, steps, values, strict=True):
            setattr(step, name, value)
            buffer.pack(step)
        travel(buffers)
        for buffer, step in zip(buffers, steps, strict=True):
            result = buffer.read_flags(step)
            found = {"closing_call": result.steps_agree, "mark": result.marks_agree}
            assert found == {"closing_call": True, "mark": True} | {name: agree}


@pytest.mark.parametrize("size", [2, 16, 512, 1024, 50_000])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", [Op.AVERAGE, Op.SUM])
def test_one_flag_among_many_ranks_arrives(size: int, dtype: str, op: Op) -> None:
    """The reduced tail, computed here: one rank in many has a gradient and asks for talk."""
    plan = plan_of([1, 1], dtype)
    (buffer,) = buffers_of(plan, 1, op)
    number = STEP_CYCLE - 1  # the largest number that travels
    one = np.ones(1).astype(real(dtype))
    step = step_of([None, one], True, number, True)
    buffer.pack(step)
    (words,) = buffer._message.tails
    assert words.size == 2 + NUM_STEP_FLAGS
    tail = words.view(real(dtype)).astype(np.float64)
    others = np.concatenate([np.zeros(4), tail[4:]])
    total = tail + (size - 1) * others
    reduced = (total / size if op is Op.AVERAGE else total).astype(real(dtype))
    words[:] = reduced.view(storage_dtype(dtype))
    result = buffer.read_flags(step)
    assert result.present == [False, True]
    assert result.requested
    assert result.discarded
    assert result.steps_agree
    assert not buffer.read_flags(step_of([], number=number - 1)).steps_agree


@pytest.mark.parametrize("size", [2, 1024, 50_000])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", [Op.AVERAGE, Op.SUM])
def test_one_late_rank_among_many_is_found(size: int, dtype: str, op: Op) -> None:
    plan = plan_of([1], dtype)
    for number in (1, 31, 63, 64):
        tails = []
        for own in (number, number - 1):
            (buffer,) = buffers_of(plan, 1, op)
            buffer.pack(step_of([None], number=own))
            (words,) = buffer._message.tails
            tails.append(words.view(real(dtype)).astype(np.float64))
        total = (size - 1) * tails[0] + tails[1]
        reduced = (total / size if op is Op.AVERAGE else total).astype(real(dtype))
        words[:] = reduced.view(storage_dtype(dtype))
        assert not buffer.read_flags(step_of([], number=number)).steps_agree
        assert not buffer.read_flags(step_of([], number=number - 1)).steps_agree


def test_nothing_but_the_flags_is_read_from_a_nan() -> None:
    plan = plan_of([2, 2], "float32")
    (buffer,) = buffers_of(plan, 1, Op.AVERAGE)
    bad = np.array([np.nan, np.inf], np.float32)
    step = step_of([bad, None], number=5)
    buffer.pack(step)
    result = buffer.read_flags(step)
    assert result.present == [True, False]
    assert not result.requested
    assert not result.discarded
    assert result.steps_agree
    assert np.array_equal(buffer.result(1).view(np.float32), bad, equal_nan=True)


def test_memory_without_an_owner_is_not_read_after_packing() -> None:
    plan = plan_of([100], "float32")
    for owned in (True, False):
        buffers = buffers_of(plan, 2, Op.SUM)
        for buffer in buffers:
            gradient = np.ones(100, np.float32)
            step = step_of([gradient])
            buffer.pack(Step(0, step.sources, step.owners if owned else [None], []))
            gradient[:] = 7
        travel(buffers)
        wanted = 14 if owned else 2
        assert (buffers[0].result(0).view(np.float32) == wanted).all()


@given(
    st.integers(0, 200),
    st.integers(1, 9),
    st.sampled_from(["float16", "float64", "complex64", "complex128"]),
)
def test_shards_cut_no_element(numel: int, size: int, dtype: str) -> None:
    spec = TensorSpec("w", (numel,), dtype)
    ranges = [shard_range(spec, rank, size) for rank in range(size)]
    assert all(place % spec.item_bytes == 0 for bounds in ranges for place in bounds)
    assert (ranges[0][0], ranges[-1][1]) == (0, spec.nbytes)
    assert all(a[1] == b[0] for a, b in pairwise(ranges))


def test_results_never_come_to_where_a_gradient_lies() -> None:
    plan = plan_of([3, 0, 5, 1], "float32")
    (buffer, _) = buffers_of(plan, 2, Op.AVERAGE)
    members = plan.groups[0].tensors
    lain: set[tuple[int, ...]] = set()
    for turn in range(6):
        slots: list[Buffer] = [buffer.result(position) for position in range(4)]
        starts = [s.__array_interface__["data"][0] for s in slots]
        lain.add(tuple(starts))
        filled = [(s, slot) for s, slot in zip(starts, slots, strict=True) if slot.size]
        assert all(s % ALIGNMENT_BYTES == 0 for s, _ in filled)
        for k, slot in enumerate(slots):
            slot.view(np.float32)[:] = turn + k
        places = [0] * 4
        for position, k in enumerate(members):
            places[k] = starts[position]
        buffer.pack(Step(0, places, [slots] * 4, []))
        assert buffer.num_moves == turn + 1
        moved = [buffer.result(position) for position in range(4)]
        for k, (slot, new) in enumerate(zip(slots, moved, strict=True)):
            assert not np.shares_memory(slot, new)
            assert (new.view(np.float32) == turn + k).all()
            new.view(np.float32)[:] = -1.0  # the average
            assert (slot.view(np.float32) == turn + k).all()
    assert len(lain) == 2  # back and forth
    held = [buffer.result(0), slots[0]]  # one of either
    places = [0] * 4
    for k, slot in zip((members[0], members[2]), held, strict=True):
        places[k] = slot.__array_interface__["data"][0]
    buffer.pack(Step(0, places, [held] * 4, []))
    assert not any(np.shares_memory(buffer.result(0), slot) for slot in held)
    buffer.pack(step_of([None] * 4))
    assert not any(buffer.result(position).any() for position in range(4))
