"""Timelines: complete JSON at any time, one clock, and the overlap that training had."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import pytest

from tests.support.ranks import all_well, run_ranks
from tests.support.trainer import Trainer, make_specs
from wfbp.config import Config
from wfbp.runtime.runtime import Runtime
from wfbp.runtime.timeline import Timeline, clock_offset_s, load, merge, summarize

CONFIG = Config(schedule="wfbp", warmup_steps=1, profile_steps=2, replan_threshold=0.0)
STEPS = 40


def train(runtime: Runtime, path: Path, window: tuple[int, int]) -> list[float]:
    """Train with compute that is sleep; the waits of which reports have the median."""
    runtime.timeline = timeline = Timeline(path, runtime.rank, steps=window)
    trainer = Trainer(runtime, make_specs([300_000, 50, 400_000]), schedule="wfbp", name="SGD")
    for _ in range(STEPS):
        trainer.zero()
        time.sleep(1e-3)
        trainer.engine.mark_forward_end()
        for index in reversed(range(3)):
            time.sleep(1e-3)
            trainer.accumulate(index, 1.0)
        trainer.synchronize()
    timeline.close()
    runtime.timeline = None
    measured = trainer.engine._tuner._steps
    assert trainer.engine.report()["exposed_s"] is not None
    return [step.done_s - step.closed_s + step.waited_s for step in measured]


def test_it_shows_the_overlap_that_is_reported(tmp_path: Path) -> None:
    def body(runtime: Runtime) -> list[float]:
        return train(runtime, tmp_path / f"timeline.rank{runtime.rank}.json", (STEPS - 4, STEPS))

    reported = all_well(run_ranks(2, body, CONFIG))
    documents = [load(tmp_path / f"timeline.rank{rank}.json") for rank in range(2)]
    for rank, document in enumerate(documents):
        waits: dict[int, float] = {}
        names = {e["name"] for e in document["traceEvents"]}
        assert {"forward", "backward", "pack", "all_reduce", "t0", "t1", "t2"} <= names
        for event in document["traceEvents"]:
            if event["name"] == "wait for gradients":
                step = event["args"]["step"]
                waits[step] = waits.get(step, 0.0) + event["dur"] * 1e-6
        assert set(waits) == set(range(STEPS - 4, STEPS + 1))
        for step, wanted_s in zip(sorted(waits), reported[rank][-5:], strict=True):
            assert waits[step] == pytest.approx(wanted_s, rel=0.05, abs=1e-6)
    rows = summarize(merge(documents))
    assert [(row["rank"], row["optimizer"], row["steps"]) for row in rows] == [
        (0, "SGD", 5),
        (1, "SGD", 5),
    ]
    for row in rows:
        assert row["forward_s"] > 0.9e-3
        assert row["backward_s"] > 2.7e-3
        assert row["iteration_s"] >= row["forward_s"] + row["backward_s"]
        assert 0.0 <= row["hidden"] <= 1.0


def test_the_file_is_complete_after_every_write(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "folder" / "t.json", mark_cycles=True)
    counts = []
    for number in range(5):
        timeline.operation("allreduce", f"x{number}", time.monotonic(), time.monotonic())
        timeline.cycle()
        timeline.flush()
        counts.append(len(json.loads(timeline.path.read_text())["traceEvents"]))
    assert counts == [5, 9, 13, 17, 21]  # a name, two spans and a mark each
    timeline.close()
    timeline.close()
    events = load(timeline.path)["traceEvents"]
    assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "CYCLE_START"} <= {e["name"] for e in events}
    assert all(e["ts"] >= 0.0 and e.get("dur", 0.0) >= 0.0 for e in events if "ts" in e)


def test_a_part_of_a_write_is_left_out(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "t.json")
    timeline.operation("allreduce", "x", time.monotonic(), time.monotonic())
    timeline.close()
    whole = timeline.path.read_text()
    for length in range(whole.rfind(",\n") + 3, len(whole) - 1):
        timeline.path.write_text(whole[:length])
        assert len(load(timeline.path)["traceEvents"]) in (3, 4)
    for text in ("", "[]", "{}", "3", '{"otherData": {}'):
        timeline.path.write_text(text)
        with pytest.raises(ValueError, match="no timeline"):
            load(timeline.path)


def test_merged_ranks_are_on_one_clock(tmp_path: Path) -> None:
    """Of a rank whose clock is ahead, the offset is taken away."""
    documents = []
    for rank, offset_s in enumerate((0.0, 100.0)):
        timeline = Timeline(tmp_path / f"{rank}.json", rank, offset_s=offset_s)
        timeline.operation("barrier", "b", time.monotonic(), time.monotonic())
        timeline.close()
        documents.append(load(timeline.path))
    documents[1]["otherData"]["start_time_since_epoch_in_micros"] += 100_000_000
    merged = merge(documents)
    at_us = {e["pid"]: e["ts"] for e in merged["traceEvents"] if e["name"] == "BARRIER"}
    assert 0.0 <= at_us[1] - at_us[0] < 10e6


def test_clocks_of_hosts_are_compared() -> None:
    def body(runtime: Runtime) -> float:
        runtime.local_size = 1  # as if each had a host of its own
        return clock_offset_s(runtime)

    offsets = all_well(run_ranks(3, body, CONFIG))
    assert offsets[0] == 0.0
    assert statistics.mean(map(abs, offsets)) < 0.2  # they share a clock
