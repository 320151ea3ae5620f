"""Whatever the files hold: an answer, or one line and exit code 2; never a traceback."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.cli_runs import Outcome, assert_refused, wfbp
from tests.support.run_documents import document

TRACE: dict[str, Any] = {
    "format": "wfbp-trace/1",
    "model": "small",
    "other_s": 1e-3,
    "tensors": [
        {"name": f"t{k}", "numel": 1000 * k, "dtype": "float32", "forward_s": 1e-3, "backward_s": k}
        for k in range(4)
    ],
}
COST: dict[str, Any] = {
    "format": "wfbp-cost/1",
    "all_reduce": {"points": [[4, 1e-4], [1e3, 2e-4], [1e6, 1e-2]]},
    "reduce_scatter": {"alpha_s": 1e-4, "beta_s_per_byte": 1e-9},
    "kappa": 0.2,
}
RECORDED = json.loads(json.dumps(document(0, 2)))

NASTY = st.one_of(
    st.sampled_from(
        [None, True, False, 0, -1, 1, -0.0, 1e308, -1e308, 5e-324, 2**53 + 1, 10**400, "", "0"]
    ),
    st.sampled_from([2**24, 2**24 + 1, 2**53, 2**63]),
    st.sampled_from([math.nan, math.inf, -math.inf, [], {}, [[]], [None], {"": None}, "\x00\n\r"]),
    st.sampled_from(["float32", "bfloat16", "all_reduce", "t0", "wfbp-trace/1", "wfbp-cost/1"]),
    st.text(max_size=8),
    st.floats(),
    st.integers(),
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=4),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
        max_leaves=6,
    ),
)


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything in a document."""
    keys = data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    for key in keys:
        yield data, key
        yield from places(data[key])


@st.composite
def spoilt(draw: st.DrawFn, good: dict[str, Any]) -> bytes:
    """A document in which some places hold something else, are gone, or are there twice."""
    data = copy.deepcopy(good)
    for _ in range(draw(st.integers(1, 3))):
        found = list(places(data))
        if not found:
            break
        where, key = found[draw(st.integers(0, len(found) - 1))]
        act = draw(st.sampled_from(["replace", "replace", "replace", "remove", "twice", "swap"]))
        if act == "remove":
            del where[key]
        elif isinstance(where, list) and act == "twice":
            where.insert(key, copy.deepcopy(where[key]))
        elif isinstance(where, list) and act == "swap":
            where.reverse()
        else:
            where[key] = copy.deepcopy(draw(NASTY))  # sampled lists are always the same ones
    text = json.dumps(data, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 9)) == 0:
        text = text[: draw(st.integers(0, len(text)))]
    return text


def check(outcome: Outcome) -> None:
    """An answer without a word on stderr, or a refusal of one line."""
    if outcome.code == 0:
        assert outcome.err == ""
        assert outcome.out
    else:
        assert_refused(outcome)


FUZZ: Callable[[Any], Any] = settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@FUZZ
@given(trace=spoilt(TRACE), cost=spoilt(COST), bad=st.sampled_from(["trace", "cost", "both"]))
@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_any_trace_and_cost(
    command: str, trace: bytes, cost: bytes, bad: str, tmp_path: Path
) -> None:
    trace_file, cost_file = tmp_path / "trace.json", tmp_path / "cost.json"
    trace_file.write_bytes(json.dumps(TRACE).encode() if bad == "cost" else trace)
    cost_file.write_bytes(json.dumps(COST).encode() if bad == "trace" else cost)
    more = ["--schedule", "hybrid"]
    if command == "simulate":
        more = ["--schedule", "oasr,hybrid,dear", "--workers", "1,3"]
    for output in ([], ["--json"]):
        told = wfbp(command, trace_file, "--cost", cost_file, *more, *output)
        check(told)
        if output and told.code == 0:
            json.loads(told.out, parse_constant=refuse_constant)


def refuse_constant(name: str) -> None:
    """NaN and Infinity are no JSON."""
    raise AssertionError(name)


@FUZZ
@given(recorded=spoilt(RECORDED))
def test_any_recorded_run(recorded: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Writing the plotting library into every page would take most of the time.
    monkeypatch.setattr("wfbp.cli.figures.get_plotlyjs", lambda: "")
    (tmp_path / "a.json").write_bytes(recorded)
    (tmp_path / "b.json").write_text(json.dumps(document(1, 2)))
    check(wfbp("report", tmp_path))


def timeline() -> dict[str, Any]:
    """Two steps of one rank, as it writes them."""
    track = {"pid": 0, "tid": 1}
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", **track, "args": {"name": "SGD: training"}}
    ]
    for step in range(2):
        for place, name in enumerate(("forward", "backward", "wait for gradients")):
            facts = {"step": step} | ({"plan": "a"} if place == 2 else {})
            at = {"ts": 100.0 * step + 20 * place, "dur": 20.0, "args": facts}
            events.append({"name": name, "ph": "X", **track, **at})
        facts = {"step": step, "group": 0, "bytes": 8, "tensors": 1}
        sent = {"ts": 100.0 * step + 30, "dur": 9.0, "args": facts}
        events.append({"name": "all_reduce", "ph": "X", **track, **sent})
        events.append({"name": "w", "ph": "i", "s": "t", **track, "ts": 30.0, "args": {"step": 0}})
    return {"otherData": {"start_time_since_epoch_in_micros": 5}, "traceEvents": events}


@FUZZ
@given(spoiled=spoilt(timeline()))
def test_any_timeline(spoiled: bytes, tmp_path: Path) -> None:
    path = tmp_path / "timeline.rank0.json"
    for content in (spoiled, json.dumps(timeline()).encode()):
        path.write_bytes(content)
        told = wfbp("timeline", tmp_path, "--json")
        check(told)
        if told.code == 0:
            json.loads(told.out, parse_constant=refuse_constant)
    assert told.code == 0


@FUZZ
@given(content=st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_bytes(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    good = tmp_path / "good.json"
    good.write_text(json.dumps(TRACE))
    assert_refused(wfbp("plan", path, "--cost", good), str(path))
    assert_refused(wfbp("plan", good, "--cost", path), str(path))
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "file.json").write_bytes(content)
    assert_refused(wfbp("report", tmp_path / "run"), "file.json")


@FUZZ
@given(
    option=st.sampled_from(
        [
            "--workers",
            "--algorithm",
            "--schedule",
            "--measured-on",
            "--ranks-per-host",
            "--within",
        ]
    ),
    value=st.text(max_size=6)
    | st.integers().map(str)
    | st.floats().map(str)
    | st.lists(st.integers(0, 99).map(str) | st.just("...")).map(",".join),
)
def test_any_option(option: str, value: str, tmp_path: Path) -> None:
    trace_file, cost_file = tmp_path / "trace.json", tmp_path / "cost.json"
    trace_file.write_text(json.dumps(TRACE))
    cost_file.write_text(json.dumps(COST))
    few = [] if option == "--workers" else ["--workers", "2"]
    schedule = [] if option == "--schedule" else ["--schedule", "layerwise"]
    algorithm = [] if option == "--algorithm" else ["--algorithm", "hierarchical"]
    arguments = [*few, *schedule, *algorithm, f"{option}={value}"]
    check(wfbp("simulate", trace_file, "--cost", cost_file, *arguments))


def test_what_is_spoilt_here_is_planned_when_whole(tmp_path: Path) -> None:
    """Or the tests above could pass because everything is refused."""
    (tmp_path / "trace.json").write_text(json.dumps(TRACE))
    (tmp_path / "cost.json").write_text(json.dumps(COST))
    told = wfbp("plan", tmp_path / "trace.json", "--cost", tmp_path / "cost.json")
    assert told.code == 0, told.err


def test_a_timeline_sums_up_the_steps_of_the_last_plan(tmp_path: Path) -> None:
    """Not those of its trial; so do the iterations of a report."""
    document = timeline()
    events, template = document["traceEvents"], document["traceEvents"][1:]
    for step in range(2, 9):
        plan = {"plan": "a" if step < 5 else "b"}
        for event in template[:4]:
            facts = event["args"] | {"step": step} | (plan if "plan" in event["args"] else {})
            events.append({**event, "ts": event["ts"] + 100.0 * step, "args": facts})
    (tmp_path / "timeline.rank0.json").write_text(json.dumps(document))
    (row,) = json.loads(wfbp("timeline", tmp_path, "--json").out)["ranks"]
    assert (row["steps"], row["first_step"], row["last_step"]) == (4, 5, 8)
    told = wfbp("timeline", tmp_path).out
    assert " 5-8 " in told
    assert "by the last plan" in told


def test_a_timeline_that_was_cut_is_named(tmp_path: Path) -> None:
    """A rank that was killed in its first step leaves no step."""
    whole, cut = tmp_path / "timeline.rank0.json", tmp_path / "timeline.rank1.json"
    whole.write_text(json.dumps(timeline()))
    events = [{**event, "pid": 1} for event in timeline()["traceEvents"][:1]]
    cut.write_text(json.dumps(timeline() | {"traceEvents": events}))
    told = wfbp("timeline", tmp_path)
    assert told.code == 0, told.err
    assert "Medians of 1 timeline," in told.out
    assert "timeline.rank1.json holds no complete step" in told.out
    document = json.loads(wfbp("timeline", tmp_path, "--json").out)
    assert document["without_steps"] == ["timeline.rank1.json"]
