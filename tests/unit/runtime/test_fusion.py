"""Fusion buffers: layout, packing, and the flags that travel behind the tensors."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.local import LocalWorld
from wfbp.comm.backend import Buffer, storage_dtype
from wfbp.core.plan import ALIGNMENT_BYTES, Group, Plan
from wfbp.core.types import Op, TensorSpec
from wfbp.runtime.step import Step
from wfbp.runtime.transport.buffers import FusionBuffer, aligned_bytes
from wfbp.runtime.transport.flags import NUM_STEP_FLAGS, STEP_CYCLE

DTYPES = ("float16", "bfloat16", "float32", "float64")


def plan_of(sizes: list[int], dtype: str, cut: int = 0) -> Plan:
    """One group, or two that are cut there."""
    specs = tuple(TensorSpec(f"t{k}", (n,), dtype) for k, n in enumerate(sizes))
    order = tuple(reversed(range(len(sizes))))
    groups = (order[:cut], order[cut:]) if 0 < cut < len(sizes) else (order,)
    return Plan("test", specs, tuple(Group(g) for g in groups))


def real(dtype: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def step_of(
    arrays: list[np.ndarray | None],
    requested: bool = False,
    number: int = 0,
    discards: bool = False,
) -> Step:
    addresses = [0 if a is None else (a.__array_interface__["data"][0] or 1) for a in arrays]
    return Step(number, addresses, list(arrays), requested, discards)


def travel(fusions: list[FusionBuffer]) -> None:
    """Reduce the message of every rank."""
    world = LocalWorld(len(fusions))
    works = [fusion.send(world.backend(rank)) for rank, fusion in enumerate(fusions)]
    assert all(work.test() for work in works)


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=9),
    st.sampled_from(DTYPES),
    st.sampled_from([Op.AVERAGE, Op.SUM]),
    st.integers(1, 5),
    st.integers(0, 9),
    st.randoms(use_true_random=False),
)
def test_a_step_of_messages(sizes, dtype, op, size, cut, chance) -> None:  # type: ignore[no-untyped-def]
    """Values, presence, requests and steps arrive as they were sent, for any plan and ranks."""
    plan = plan_of(sizes, dtype, cut)
    values = [
        [
            None
            if chance.random() < 0.4
            else np.array([chance.randint(-4, 4) for _ in range(n)]).astype(real(dtype))
            for n in sizes
        ]
        for _ in range(size)
    ]
    step = chance.randint(0, 1000)
    requests = [chance.random() < 0.3 for _ in range(size)]
    discards = [chance.random() < 0.3 for _ in range(size)]
    for group, members in enumerate(plan.groups):
        fusions = [FusionBuffer(plan, group, op, size, 32) for _ in range(size)]
        for rank, fusion in enumerate(fusions):
            fusion.pack(step_of(values[rank], requests[rank], step, discards[rank]))
        travel(fusions)
        for fusion in fusions:
            arrival = fusion.arrived(step)
            present = [any(v[k] is not None for v in values) for k in members.tensors]
            assert arrival.present == present
            last = group == len(plan.groups) - 1
            assert arrival.requested == (any(requests) and last)
            assert arrival.discarded == (any(discards) and last)
            assert arrival.steps_agree
            for position, k in enumerate(members.tensors):
                total = sum(v[k].astype(np.float64) for v in values if v[k] is not None)
                wanted = total / (size if op is Op.AVERAGE else 1) + np.zeros(sizes[k])
                found = fusion.slot(position).view(real(dtype)).astype(np.float64)
                assert np.allclose(found, wanted, rtol=2.0**-7, atol=2.0**-9)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", [Op.AVERAGE, Op.SUM])
@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("apart", [1, STEP_CYCLE // 2, -1])
def test_ranks_at_different_steps_are_found(dtype: str, op: Op, size: int, apart: int) -> None:
    plan = plan_of([3], dtype)
    for step in range(1, 2 * STEP_CYCLE, 7):
        for late in (0, size - 1):
            fusions = [FusionBuffer(plan, 0, op, size, 32) for _ in range(size)]
            steps = [step + (apart if rank == late else 0) for rank in range(size)]
            for fusion, own in zip(fusions, steps, strict=True):
                fusion.pack(step_of([None], number=own))
            travel(fusions)
            assert not all(
                f.arrived(own).steps_agree for f, own in zip(fusions, steps, strict=True)
            )


@pytest.mark.parametrize("size", [2, 16, 512, 1024, 50_000])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", [Op.AVERAGE, Op.SUM])
def test_one_flag_among_many_ranks_arrives(size: int, dtype: str, op: Op) -> None:
    """The reduced tail, computed here: one rank in many has a gradient and asks for talk."""
    plan = plan_of([1, 1], dtype)
    fusion = FusionBuffer(plan, 0, op, size, 32)
    step = STEP_CYCLE - 1  # the largest number that travels
    one = np.ones(1).astype(real(dtype))
    fusion.pack(step_of([one, None], True, step, True))
    count = 2 + NUM_STEP_FLAGS
    tail = fusion.buffer[-count:].view(real(dtype)).astype(np.float64)
    others = np.concatenate([np.zeros(4), tail[4:]])
    total = tail + (size - 1) * others
    reduced = (total / size if op is Op.AVERAGE else total).astype(real(dtype))
    fusion.buffer[-count:] = reduced.view(storage_dtype(dtype))
    arrival = fusion.arrived(step)
    assert arrival.present == [False, True]  # in the group's order: t1, t0
    assert arrival.requested
    assert arrival.discarded
    assert arrival.steps_agree
    assert not fusion.arrived(step - 1).steps_agree


@pytest.mark.parametrize("size", [2, 1024, 50_000])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", [Op.AVERAGE, Op.SUM])
def test_one_late_rank_among_many_is_found(size: int, dtype: str, op: Op) -> None:
    plan = plan_of([1], dtype)
    for step in (1, 31, 63, 64):
        tails = []
        for own in (step, step - 1):
            fusion = FusionBuffer(plan, 0, op, size, 32)
            fusion.pack(step_of([None], number=own))
            tails.append(fusion.buffer[-NUM_STEP_FLAGS:].view(real(dtype)).astype(np.float64))
        total = (size - 1) * tails[0] + tails[1]
        reduced = (total / size if op is Op.AVERAGE else total).astype(real(dtype))
        fusion.buffer[-NUM_STEP_FLAGS:] = reduced.view(storage_dtype(dtype))
        assert not fusion.arrived(step).steps_agree
        assert not fusion.arrived(step - 1).steps_agree


def test_nothing_but_the_flags_is_read_from_a_nan() -> None:
    plan = plan_of([2, 2], "float32")
    fusion = FusionBuffer(plan, 0, Op.AVERAGE, 1, 32)
    bad = np.array([np.nan, np.inf], np.float32)
    fusion.pack(step_of([bad, None], number=5))
    arrival = fusion.arrived(5)
    assert arrival.present == [False, True]
    assert not arrival.requested
    assert not arrival.discarded
    assert arrival.steps_agree
    assert np.array_equal(fusion.slot(1).view(np.float32), bad, equal_nan=True)


def test_results_never_come_to_where_a_gradient_lies() -> None:
    plan = plan_of([3, 0, 5, 1], "float32")
    fusion = FusionBuffer(plan, 0, Op.AVERAGE, 2, 32)
    members = plan.groups[0].tensors
    lain: set[tuple[int, ...]] = set()
    for turn in range(6):
        slots: list[Buffer] = [fusion.slot(position) for position in range(4)]
        starts = [s.__array_interface__["data"][0] for s in slots]
        lain.add(tuple(starts))
        filled = [(s, slot) for s, slot in zip(starts, slots, strict=True) if slot.size]
        assert all(s % ALIGNMENT_BYTES == 0 for s, _ in filled)
        for k, slot in enumerate(slots):
            slot.view(np.float32)[:] = turn + k
        places = [0] * 4
        for position, k in enumerate(members):
            places[k] = starts[position]
        fusion.pack(Step(0, places, [slots] * 4))
        assert fusion.num_moves == turn + 1
        moved = [fusion.slot(position) for position in range(4)]
        for k, (slot, new) in enumerate(zip(slots, moved, strict=True)):
            assert not np.shares_memory(slot, new)
            assert (new.view(np.float32) == turn + k).all()
            new.view(np.float32)[:] = -1.0  # the average
            assert (slot.view(np.float32) == turn + k).all()
    assert len(lain) == 2  # back and forth
    held = [fusion.slot(0), slots[0]]  # one of either
    places = [0] * 4
    for k, slot in zip((members[0], members[2]), held, strict=True):
        places[k] = slot.__array_interface__["data"][0]
    fusion.pack(Step(0, places, [held] * 4))
    assert not any(np.shares_memory(fusion.slot(0), slot) for slot in held)
    fusion.pack(step_of([None] * 4))
    assert not any(fusion.slot(position).any() for position in range(4))


@pytest.mark.parametrize("size", [0, 1, 63, 64, 1000])
def test_aligned_bytes(size: int) -> None:
    block = aligned_bytes(size)
    assert block.nbytes == size
    assert block.__array_interface__["data"][0] % 64 == 0 or size == 0
    assert not block.any()


def test_memory_without_an_owner_is_not_read_after_packing() -> None:
    plan = plan_of([100], "float32")
    for owned in (True, False):
        fusions = [FusionBuffer(plan, 0, Op.SUM, 2, 32) for _ in range(2)]
        for fusion in fusions:
            gradient = np.ones(100, np.float32)
            step = step_of([gradient])
            fusion.pack(Step(0, step.addresses, step.owners if owned else [None]))
            gradient[:] = 7
        travel(fusions)
        wanted = 14 if owned else 2
        assert (fusions[0].slot(0).view(np.float32) == wanted).all()
