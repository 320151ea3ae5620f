"""Plans: what they accept, where tensors lie, and what they are known by."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from wfbp.core.plan import ALIGNMENT_BYTES, Group, Plan, layout, split_by_dtype
from wfbp.core.types import Operation, TensorSpec

A, B, C = (TensorSpec(name, (n,), "float32") for name, n in (("a", 5), ("b", 1), ("c", 7)))
SCATTER, GATHER = Operation.REDUCE_SCATTER, Operation.ALL_GATHER
H = TensorSpec("h", (3,), "float16")


def test_layout_aligns_every_tensor_and_wastes_less_than_one_alignment_each() -> None:
    rng = random.Random(0)
    for _ in range(200):
        sizes = [rng.choice([0, 1, 15, 16, 17, rng.randint(0, 5000)]) for _ in range(8)]
        offsets, end = layout(sizes)
        assert all(offset % ALIGNMENT_BYTES == 0 for offset in offsets)
        ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
        starts = [*offsets[1:], end]
        assert ends[-1] == end
        assert all(0 <= s - e < ALIGNMENT_BYTES for s, e in zip(starts, ends, strict=True))
    assert layout([]) == ((), 0)


def test_offsets_sizes_and_element_types_of_groups() -> None:
    plan = Plan("hand", (A, B, C, H), (Group((2, 1)), Group((3,)), Group((0,))))
    assert [plan.offsets(g) for g in range(3)] == [(0, 32), (0,), (0,)]
    assert [plan.nbytes(g) for g in range(3)] == [36, 6, 20]
    assert [plan.dtype(g) for g in range(3)] == ["float32", "float16", "float32"]
    assert plan.total_bytes == 20 + 4 + 28 + 6


@pytest.mark.parametrize(
    ("tensors", "groups", "message"),
    [
        ((A, A, B, B), (Group((0, 1, 2, 3)),), "names must be unique; found twice: a, b"),
        ((A, B), (Group((0,)),), "do not cover exactly the tensors"),
        ((A, B), (Group((0, 1, 2)),), "a group of the backward phase names an unknown tensor"),
        ((A, B), (Group((0, 1)), Group((1,))), "in two groups of the backward phase"),
        ((A, H), (Group((1, 0)),), r"group 0 mixes element types \['float16', 'float32'\]"),
        (
            (A, B),
            (Group((0, 1)), Group((5,), Operation.ALL_GATHER)),
            "a group of the forward phase names an unknown tensor",
        ),
        (
            (A, B),
            (Group((1,), SCATTER), Group((0,)), Group((0, 1), GATHER)),
            "exactly the reduce-scattered tensors have to be all-gathered",
        ),
        ((A, B), (Group((0, 1), SCATTER),), "exactly the reduce-scattered tensors"),
        (
            (A, B),
            (Group((1,), SCATTER), Group((1,), GATHER), Group((0,))),
            "group 2 of backward stands behind one of forward",
        ),
    ],
)
def test_bad_plans(
    tensors: tuple[TensorSpec, ...], groups: tuple[Group, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Plan("hand", tensors, groups)


def test_a_group_needs_a_tensor() -> None:
    with pytest.raises(ValueError, match="at least one tensor"):
        Group(())


def test_digest_tells_plans_apart_and_survives_a_round_trip() -> None:
    plan = Plan("hand", (A, B, H), (Group((1, 0)), Group((2,))))
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(plan.to_json()).digest == plan.digest
    others = [
        replace(plan, overlap=False),
        replace(plan, schedule="other"),
        replace(plan, groups=(Group((0, 1)), Group((2,)))),
        replace(plan, groups=plan.groups[::-1]),
        replace(plan, tensors=(A, B, replace(H, shape=(4,)))),
        replace(plan, tensors=(A, replace(B, name="x"), H)),
    ]
    assert len({p.digest for p in (plan, *others)}) == 7


@pytest.mark.parametrize(
    "change",
    [{"format": "wfbp-plan/2"}, {"tensors": [{}]}, {"groups": [{"tensors": 3}]}, {"groups": None}],
)
def test_bad_documents(change: dict[str, Any]) -> None:
    document = Plan("hand", (A,), (Group((0,)),)).to_json()
    with pytest.raises(ValueError, match="wfbp-plan/1"):
        Plan.from_json({**document, **change})
    with pytest.raises(ValueError, match="not a plan"):
        Plan.from_json([])  # type: ignore[arg-type]


def test_split_by_dtype_keeps_order_and_makes_one_group_per_type() -> None:
    tensors = (A, H, B, C)
    groups = split_by_dtype(tensors, [(3, 2, 1), (0,)])
    assert [g.tensors for g in groups] == [(3, 2), (1,), (0,)]
    assert all(g.operation is Operation.ALL_REDUCE for g in groups)
