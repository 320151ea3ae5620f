"""From time stamps to the trace that all ranks plan with."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wfbp.core.types import TensorSpec
from wfbp.runtime.measuring import GroupTime, StepTimes
from wfbp.runtime.tuning.profile import Profile, combine


def spec(k: int) -> TensorSpec:
    return TensorSpec(f"t{k}", (k + 1,), "float32")


def profile(
    ready_s: list[float],
    closed_s: float,
    forward_s: list[float] | None = None,
    forward_end_s: float = -1.0,
) -> Profile:
    return Profile(ready_s, forward_s or [-1.0] * len(ready_s), forward_end_s, closed_s, 0.0)


# One rank's medians.


def test_times_count_from_the_beginning_and_are_medians() -> None:
    steps = [
        StepTimes(
            begun,
            [begun + a, 0.0],
            [begun + f, 0.0],
            begun + 2.0,
            begun + 9.0,
            begun + 10.0,
            [GroupTime(0, begun + 8.0, begun + 8.0 + p, begun + 9.0)],
        )
        for begun, a, f, p in [
            (100.0, 5.0, 0.5, 0.1),
            (200.0, 7.0, 0.7, 0.3),
            (300.0, 6.0, 0.6, 0.2),
        ]
    ]
    found = Profile.of(steps)
    assert found.ready_s == pytest.approx([6.0, -1.0])
    assert found.forward_s == pytest.approx([0.6, -1.0])
    assert found.forward_end_s == pytest.approx(2.0)
    assert found.closed_s == pytest.approx(9.0)
    assert found.packing_s == pytest.approx(0.2)


def test_waits_for_gathers_are_left_out() -> None:
    """Nothing is gathered behind forward's beginning while compute is measured."""
    undisturbed = StepTimes(100.0, [105.0, 0.0], [101.0, 0.0], 102.0, 109.0, 110.0)
    waiting = StepTimes(
        100.0, [108.0, 0.0], [104.0, 0.0], 105.0, 112.0, 113.0, waits=[(100.0, 103.0)]
    )
    assert Profile.of([waiting]) == Profile.of([undisturbed])
    absent = StepTimes(100.0, [0.0, 0.0], [0.0, 0.0], 0.0, 112.0, 113.0, waits=[(100.0, 103.0)])
    assert Profile.of([undisturbed, absent, absent]).ready_s == [9.0, -1.0]


def test_a_tensor_missing_in_some_steps_is_ready_at_their_close() -> None:
    steps = [StepTimes(0.0, [r], [0.0], closed_s=9.0) for r in (4.0, 0.0, 0.0)]
    assert Profile.of(steps).ready_s == [9.0]
    steps = [StepTimes(0.0, [r], [0.0], closed_s=9.0) for r in (4.0, 5.0, 0.0)]
    assert Profile.of(steps).ready_s == [5.0]


# All ranks' trace.


@st.composite
def profiles(draw: st.DrawFn) -> tuple[list[TensorSpec], list[Profile]]:
    count, size = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    moment = st.floats(0.0, 10.0)
    made = []
    for _ in range(size):
        ready = [draw(st.one_of(st.just(-1.0), moment)) for _ in range(count)]
        closed = max([*ready, 0.0]) + draw(moment)
        forward = [draw(st.one_of(st.just(-1.0), moment)) for _ in range(count)]
        made.append(profile(ready, closed, forward, draw(st.one_of(st.just(-1.0), moment))))
    return [spec(k) for k in range(count)], made


@given(profiles())
def test_the_trace_keeps_what_was_measured(case: tuple[list[TensorSpec], list[Profile]]) -> None:
    specs, made = case
    trace = combine(specs, made)
    seen = [k for k in range(len(specs)) if any(p.ready_s[k] >= 0 for p in made)]
    if trace is None:
        assert not seen
        return
    assert {s.name for s in trace.specs} == {f"t{k}" for k in seen}
    closed_s = max(p.closed_s for p in made)
    ready_s = {
        f"t{k}": max(p.ready_s[k] if p.ready_s[k] >= 0 else closed_s for p in made) for k in seen
    }
    order = [s.name for s in reversed(trace.specs)]
    assert [ready_s[n] for n in order] == sorted(ready_s.values())
    # The iteration takes what it took, from the beginning to the last rank's close.
    total_s = trace.other_s + trace.forward_s + trace.backward_s
    assert math.isclose(total_s, closed_s, rel_tol=1e-9, abs_tol=1e-9)
    # Gaps between gradients are kept (except the last, which is stretched to the close).
    starts = [closed_s - trace.backward_s + r for r in trace.ready_times_s]
    for name, at in list(zip(order, starts, strict=True))[:-1]:
        assert math.isclose(at, ready_s[name], rel_tol=1e-9, abs_tol=1e-9)
    assert all(t.forward_s >= 0 and t.backward_s >= 0 for t in trace.tensors)


def test_forward_times_run_from_first_use_to_the_next() -> None:
    """t0 is used at 0.2, t1 at 0.5, t2 at 0.5 with it; forward ends at 1.0."""
    trace = combine(
        [spec(0), spec(1), spec(2)],
        [profile([4.0, 3.0, 2.0], 4.0, [0.2, 0.5, 0.5], forward_end_s=1.0)],
    )
    assert trace is not None
    assert trace.other_s == pytest.approx(0.2)
    by_name = {t.spec.name: t.forward_s for t in trace.tensors}
    assert by_name["t0"] == pytest.approx(0.3)
    assert by_name["t1"] + by_name["t2"] == pytest.approx(0.5)
    assert trace.forward_s == pytest.approx(0.8)
    assert trace.ready_times_s == pytest.approx([1.0, 2.0, 3.0])


def test_without_a_forward_end_the_first_gradient_costs_an_average_one() -> None:
    trace = combine([spec(k) for k in range(4)], [profile([9.0, 8.0, 7.0, 6.0], 10.0)])
    assert trace is not None
    assert trace.ready_times_s[0] == pytest.approx(1.0)
    assert trace.forward_s + trace.other_s == pytest.approx(5.0)
