"""Timelines: readable at any time, one clock, and the overlap that training had."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import statistics
import time
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import all_well, run_ranks
from tests.support.trace_events import check
from tests.support.trainer import Trainer, make_specs
from wfbp.config import Config
from wfbp.core.plan import Group, Plan
from wfbp.core.types import TensorSpec
from wfbp.runtime import timeline_files as module
from wfbp.runtime.measuring import StepTimes
from wfbp.runtime.runtime import Runtime
from wfbp.runtime.timeline_files import TraceWriter, clock_offset_s, load, merge, save, summarize

CONFIG = Config(schedule="layerwise", warmup_steps=1, profile_steps=2, replan_threshold=0.0)


def test_optimizers_of_one_name_have_rows_of_their_own(tmp_path: Path) -> None:
    """As the two of a GAN, whose steps lie in each other's iterations."""

    def body(runtime: Runtime) -> None:
        runtime.timeline = timeline = TraceWriter(tmp_path / f"t{runtime.rank}.json", runtime.rank)
        settings = {"schedule": "layerwise", "name": "Adam"}
        trainers = [Trainer(runtime, make_specs([10, 20]), **settings) for _ in range(2)]
        for step in range(6):
            for trainer in trainers[: 1 if step == 5 else 2]:
                trainer.zero()
                for index in (1, 0):
                    trainer.accumulate(index, 1.0)
                trainer.synchronize()
        timeline.close()
        runtime.timeline = None

    all_well(run_ranks(2, body, CONFIG))
    document = merge([load(tmp_path / f"t{rank}.json") for rank in range(2)])
    check(document)
    assert [(row["rank"], row["optimizer"], row["steps"]) for row in summarize(document)] == [
        (rank, name, steps) for rank in range(2) for name, steps in (("Adam", 2), ("Adam-2", 1))
    ]


def test_the_file_can_be_read_after_every_write(tmp_path: Path) -> None:
    timeline = TraceWriter(tmp_path / "folder" / "t.json")
    counts = []
    for number in range(5):
        timeline.operation("allreduce", f"x{number}", time.monotonic(), time.monotonic())
        timeline.flush()
        counts.append(len(load(timeline.path)["traceEvents"]))
    assert counts == [4, 7, 10, 13, 16]  # a name and two spans each
    timeline.close()
    timeline.close()
    assert len(json.loads(timeline.path.read_text())) == 16
    events = load(timeline.path)["traceEvents"]
    assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE"} <= {e["name"] for e in events}
    assert all(e["ts"] >= 0.0 and e.get("dur", 0.0) >= 0.0 for e in events if "ts" in e)


def test_a_part_of_a_write_is_left_out(tmp_path: Path) -> None:
    timeline = TraceWriter(tmp_path / "t.json")
    timeline.operation("allreduce", "x", time.monotonic(), time.monotonic())
    timeline.close()
    whole = timeline.path.read_text()
    for length in range(whole.rfind(",\n") + 3, len(whole) + 1):
        timeline.path.write_text(whole[:length])
        assert len(load(timeline.path)["traceEvents"]) in (3, 4)
    start = '{"otherData": {"start_time_since_epoch_in_micros": %s}, "traceEvents": []}'
    assert load_text(timeline.path, start % "1e15")["traceEvents"] == []
    large = (start % number for number in ("1" + "0" * 400, "-1e300", "NaN"))
    for text in ("", "[]", "{}", "3", '{"otherData": {}', *large):
        with pytest.raises(ValueError, match="no timeline"):
            load_text(timeline.path, text)


def load_text(path: Path, text: str) -> dict[str, Any]:
    path.write_text(text)
    return load(path)


class FullDisk:
    """A file whose disk takes a number of bytes at most, beyond what is there already."""

    def __init__(self, file: FileIO, room: int) -> None:
        self._file = file
        self._most = os.fstat(file.fileno()).st_size + room

    def write(self, data: memoryview) -> int:
        fits = self._most - self._file.tell()
        if fits <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._file.write(data[:fits])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_a_full_disk_ends_the_timeline_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FLUSH_S", 60.0)
    timeline = TraceWriter(tmp_path / "t.json", 3)

    def operate(count: int) -> None:
        for _ in range(count):
            timeline.operation("allreduce", "x", time.monotonic(), time.monotonic())

    operate(1)
    timeline.flush()
    before = timeline.path.read_bytes()
    monkeypatch.setattr(timeline, "_file", FullDisk(timeline._file, 300))
    with caplog.at_level(logging.WARNING, "wfbp"):
        operate(1)
        timeline.flush()  # there is room
        whole = timeline.path.read_bytes()
        assert len(whole) > len(before)
        operate(9)
        timeline.flush()
        assert timeline.path.read_bytes().startswith(whole)
        operate(5)
        assert not timeline._records
        timeline.flush()
        timeline.close()
    (told,) = caplog.messages
    assert told == (
        f"rank 3: the timeline {timeline.path} ends here (No space left on device); training "
        "continues"
    )
    assert 2 + 2 * 2 <= len(load(timeline.path)["traceEvents"]) < 2 + 3 * 2  # names and spans


@pytest.mark.parametrize("has_room", [{0}, set()], ids=["on 1, 2", "on all"])
def test_a_full_disk_is_told_once_for_all_ranks(
    has_room: set[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def body(runtime: Runtime) -> None:
        rank = runtime.rank
        timeline = TraceWriter(tmp_path / f"t{rank}.json", rank, warn=runtime.warn_once)
        if rank not in has_room:
            timeline._file.close()
            timeline._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
        runtime.channel.exchange(b"", "all have begun")
        for _ in range(3):
            timeline.operation("allreduce", "x", time.monotonic(), time.monotonic())
            timeline.flush()
        timeline.close()

    with caplog.at_level(logging.WARNING, "wfbp"):
        all_well(run_ranks(3, body))
    (told,) = caplog.messages
    assert re.fullmatch(
        rf"rank [012]: the timeline {tmp_path}/t\d\.json ends here \(No space left on device\); "
        r"training continues \(shown once; other ranks may have this problem too\)",
        told,
    )
    for rank in range(3):
        document = load(tmp_path / f"t{rank}.json")
        assert any(e["name"] == "ALLREDUCE" for e in document["traceEvents"]) == (rank in has_room)


def test_a_file_that_cannot_be_begun_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: TraceWriter, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(TraceWriter, "_write", full)
    with pytest.raises(OSError, match="No space left"):
        TraceWriter(tmp_path / "t.json")
    assert list(tmp_path.iterdir()) == []


def test_what_began_before_the_timeline_is_left_out(tmp_path: Path) -> None:
    """Viewers take no stamps below 0."""
    before_s = time.monotonic()
    time.sleep(1e-3)
    timeline = TraceWriter(tmp_path / "t.json")
    timeline.operation("allreduce", "x", before_s, time.monotonic())
    timeline.close()
    events = load(timeline.path)["traceEvents"]
    assert [e["name"] for e in events if e["ph"] == "X"] == ["ALLREDUCE"]


def test_several_updates_in_a_step(tmp_path: Path) -> None:
    """The first comes before forward, the others are of parameters that forward reads."""
    timeline = TraceWriter(tmp_path / "t.json")
    at = time.perf_counter() + 1.0
    updates = [(at, at + 1.0), (at + 2.0, at + 3.0)]
    times = StepTimes(at, [at + 7.0], [0.0], at + 5.0, at + 8.0, at + 9.0, updates=updates)
    plan = Plan("layerwise", (TensorSpec("w", (4,), "float32"),), (Group((0,)),))
    timeline.step("SGD", 12, plan, times)
    timeline.close()
    document = load(timeline.path)
    events = [e for e in document["traceEvents"] if e["ph"] != "M"]
    assert sorted(e["name"] for e in events) == [
        "backward", "forward", "update", "update", "w", "wait for gradients",
    ]  # fmt: skip
    assert {e["args"]["step"] for e in events} == {12}
    (forward,) = (e for e in events if e["name"] == "forward")
    assert forward["dur"] == pytest.approx(4e6)
    (row,) = summarize(document)
    assert row["update_s"] == pytest.approx(2.0)


def test_a_document_is_saved_whole_or_not_at_all(tmp_path: Path) -> None:
    save({"a": 1}, tmp_path / "merged.json")
    with pytest.raises(TypeError):
        save({"a": object()}, tmp_path / "merged.json")
    with pytest.raises(OSError, match="directory"):
        save({}, tmp_path / "none" / "merged.json")
    assert json.loads((tmp_path / "merged.json").read_text()) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["merged.json"]


def test_merged_ranks_are_on_one_clock(tmp_path: Path) -> None:
    """Of a rank whose clock is ahead, the offset is taken away."""
    documents = []
    for rank, offset_s in enumerate((0.0, 100.0)):
        timeline = TraceWriter(tmp_path / f"{rank}.json", rank, offset_s=offset_s)
        timeline.operation("barrier", "b", time.monotonic(), time.monotonic())
        timeline.close()
        documents.append(load(timeline.path))
    documents[1]["otherData"]["start_time_since_epoch_in_micros"] += 100_000_000
    merged = merge(documents)
    at_us = {e["pid"]: e["ts"] for e in merged["traceEvents"] if e["name"] == "BARRIER"}
    assert 0.0 <= at_us[1] - at_us[0] < 10e6


def test_clocks_of_hosts_are_compared() -> None:
    offsets = all_well(
        run_ranks(3, lambda runtime: clock_offset_s(runtime.channel.exchange_values), CONFIG)
    )
    assert offsets[0] == 0.0
    assert statistics.mean(map(abs, offsets)) < 0.2  # they share a clock
