"""What is passed on of a training: TensorBoard, Prometheus, the progress bar."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from wfbp import monitoring
from wfbp.runtime import process

STATS: dict[str, Any] = {
    "iteration": 40,
    "iteration_s": 0.025,
    "exposed_s": 0.0015,
    "bytes": 15_790_080,
    "ratio_to_lower_bound": 1.04,
    "predicted_s": None,
    "plan": 'oasr, 4 "groups"',
    "phase": "installed",
}


def parsed(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    parser = pytest.importorskip("prometheus_client.parser")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_prometheus_reads_what_is_written() -> None:
    job = ("job", "mlp\\1")
    assert parsed(monitoring.prometheus_text(STATS, job="mlp\\1")) == {
        ("wfbp_iterations_total", (job,)): 40,
        ("wfbp_iteration_seconds", (job,)): 0.025,
        ("wfbp_exposed_communication_seconds", (job,)): 0.0015,
        ("wfbp_gradient_bytes", (job,)): 15_790_080,
        ("wfbp_ratio_to_lower_bound", (job,)): 1.04,
        (
            "wfbp_plan_info",
            (job, ("phase", "installed"), ("plan", 'oasr, 4 "groups"')),
        ): 1,
    }


def test_prometheus_tells_several_optimizers_apart() -> None:
    text = monitoring.prometheus_text({"actor": STATS, "critic": STATS | {"iteration": 7}})
    found = parsed(text)
    assert found["wfbp_iterations_total", (("optimizer", "actor"),)] == 40
    assert found["wfbp_iterations_total", (("optimizer", "critic"),)] == 7
    assert text.count("# TYPE wfbp_iterations_total counter") == 1


def test_of_one_rank_there_is_nothing_to_tell(tmp_path: Path) -> None:
    assert monitoring.prometheus_text({}) == ""
    monitoring.write_prometheus(tmp_path / "wfbp.prom", {})
    assert (tmp_path / "wfbp.prom").read_text() == ""
    monitoring.TensorBoard(writer=SimpleNamespace()).add({})


def test_a_prometheus_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "wfbp.prom"
    for iteration in (1, 2):
        monitoring.write_prometheus(path, STATS | {"iteration": iteration})
        assert f"wfbp_iterations_total {iteration}\n" in path.read_text()
    assert os.listdir(tmp_path) == ["wfbp.prom"]
    with pytest.raises(OSError, match=r"missing"):
        monitoring.write_prometheus(tmp_path / "missing" / "wfbp.prom", STATS)


def test_tensorboard_reads_what_is_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    board = monitoring.TensorBoard(tmp_path)
    board.add(STATS)
    board.add({"actor": STATS | {"iteration": 50}})
    board.close()
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    scalars = {}
    while data:
        length = int.from_bytes(data[:8], "little")
        event = Event()
        event.ParseFromString(data[12 : 12 + length])
        data = data[16 + length :]
        for value in event.summary.value:
            scalars[value.tag, event.step] = value.simple_value
    assert scalars[("wfbp/iteration_s", 40)] == pytest.approx(0.025)
    assert scalars[("wfbp/actor/exposed_s", 50)] == pytest.approx(0.0015)
    assert len(scalars) == 2 * 4


def test_without_an_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.setattr(process, "rank", lambda: 0)
    with pytest.raises(ImportError, match=r"pip install 'wfbp\[progress\]'"):
        monitoring.progress(range(3))
    with pytest.raises(ImportError, match=r"pip install 'wfbp\[tensorboard\]'"):
        monitoring.TensorBoard("anywhere")


def test_progress_shows_stats_on_rank_0_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tqdm")
    asked: list[int] = []

    def stats() -> dict[str, Any]:
        asked.append(0)
        return STATS

    out = io.StringIO()
    optimizer = SimpleNamespace(stats=stats)
    monkeypatch.setattr(process, "rank", lambda: 0)
    bar = monitoring.progress(range(50), optimizer, file=out, mininterval=0.0, miniters=10)
    assert list(bar) == list(range(50))
    assert "25.0 ms, 1.5 ms exposed, oasr" in out.getvalue()
    assert 1 <= len(asked) <= 6, "only where the bar is drawn"

    asked.clear()
    monkeypatch.setattr(process, "rank", lambda: 1)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert list(monitoring.progress(range(5), optimizer)) == list(range(5))
    assert not asked
