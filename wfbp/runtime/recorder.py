"""Reports of a reducer, and the record of its last iterations."""

from __future__ import annotations

import atexit
import logging
import platform
import re
import shlex
import socket
import sys
import weakref
from collections import Counter, deque
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from wfbp.core.bound import ratio_to_lower_bound
from wfbp.core.plan import Plan
from wfbp.runtime.measuring import StepTimes
from wfbp.runtime.timeline_files import Document, save
from wfbp.runtime.tuning.tuner import Tuner

if TYPE_CHECKING:  # `wfbp report` reads records without a runtime
    from wfbp.runtime.runtime import Runtime


def make_report(tuner: Tuner, num_steps: int) -> Document:
    """The plan in use and what it costs; times in seconds, None where not yet known."""
    predicted = tuner.predicted
    bound_s = predicted.lower_bound_s if predicted else None
    measured_s, steps = tuner.measured_s, tuner.visit.steps
    # Before the plan has run, the prediction replaces the measurement.
    latest_s = measured_s or (predicted.iteration_s if predicted else None)
    return {
        "schedule": tuner.plan.schedule,
        "plan": tuner.plan.summary,
        "phase": tuner.phase.value,
        "steps": num_steps,
        "num_groups": len(tuner.plan.groups),
        "num_tensors": len(tuner.plan.tensors),
        "total_bytes": tuner.wire_bytes,
        "sent_as": tuner.sent_as,
        "overlap": tuner.plan.overlap,
        "kappa": tuner.costs.kappa if tuner.costs else None,
        "predicted_iteration_s": predicted.iteration_s if predicted else None,
        "measured_iteration_s": measured_s,
        "predicted_exposed_s": predicted.exposed_s if predicted else None,
        "exposed_s": median(s.exposed_s for s in steps) if steps else None,
        "lower_bound_s": bound_s,
        "ratio_to_lower_bound": (
            ratio_to_lower_bound(latest_s, bound_s) if latest_s and bound_s else None
        ),
        "plan_digest": tuner.plan.digest,
    }


def log_summary(name: str, report: Document) -> None:
    """A report in one line, for people."""

    def milliseconds(key: str) -> str:
        return "-" if report[key] is None else f"{report[key] * 1e3:.1f} ms"

    ratio = report["ratio_to_lower_bound"]
    summary.info(
        "%s: step %d: %s, of which %s exposed communication; %.1f MB; T/LB %s; %s (%s)",
        name,
        report["steps"],
        milliseconds("measured_iteration_s"),
        milliseconds("exposed_s"),
        report["total_bytes"] * 1e-6,
        "-" if ratio is None else f"{ratio:.3f}",
        report["plan"],
        report["phase"],
    )


FORMAT = "wfbp-run/1"
KEPT_ITERATIONS = 8

summary = logging.getLogger("wfbp.summary")
"""A separate logger, so that summaries appear at every log level."""
_taken: Counter[Path] = Counter()


class Recorder:
    """Keeps the current plan's last iterations; writes them after 8, 16, ... steps and at exit."""

    def __init__(self, runtime: Runtime, name: str, tuner: Tuner) -> None:
        folder = Path(runtime.config.record)
        folder.mkdir(parents=True, exist_ok=True)
        slug = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")
        slug = "optimizer" if slug in ("", "timeline") else slug  # timelines are there, too
        first = folder / f"{slug}.rank{runtime.rank}.json"
        _taken[first] += 1
        self.name = slug if _taken[first] == 1 else f"{slug}-{_taken[first]}"
        self.path = folder / f"{self.name}.rank{runtime.rank}.json"
        self.model = ""
        """Class of the trained model; the owner sets it."""
        self._runtime = runtime
        self._tuner = tuner
        self._plan: Plan | None = None
        self._installed = False
        self._num_steps = self._num_by_plan = 0
        self._iterations: deque[StepTimes] = deque(maxlen=KEPT_ITERATIONS)
        atexit.register(_write_if_alive, weakref.ref(self))

    def after_step(self, number: int, step: StepTimes) -> None:
        """Take note of a step that ran by the tuner's present plan; before the tuner does."""
        tuner = self._tuner
        if tuner.plan is not self._plan or tuner.installed != self._installed:
            self._plan, self._installed = tuner.plan, tuner.installed
            self._iterations.clear()
            self._num_by_plan = 0
        self._num_steps = number
        self._iterations.append(step)
        self._num_by_plan += 1
        count = self._num_by_plan  # powers of two: writing stays out of measured steps
        if self._installed and count >= KEPT_ITERATIONS and not count & (count - 1):
            self.write()

    def write(self) -> None:
        """Write the document atomically; log the first error, and continue training."""
        if self._plan is None:
            return
        try:
            save(self.document(), self.path)
        except OSError as error:
            self._runtime.warn_once(
                f"record {self.path.parent}",
                f"rank {self._runtime.rank}: the run could not be recorded in {self.path} "
                f"({error.strerror or error}); training continues",
            )

    def document(self) -> Document:
        """The document as plain data. There must have been a step."""
        tuner, runtime = self._tuner, self._runtime
        assert self._plan is not None
        return {
            "format": FORMAT,
            "name": self.name,
            "rank": runtime.rank,
            "size": runtime.size,
            "about": {
                "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "host": socket.gethostname(),
                "library": runtime.library,
                "versions": _versions(),
                "model": self.model,
                "command": _command(),
            },
            "report": make_report(tuner, self._num_steps),
            "plan": self._plan.to_json(),
            "trace": tuner.trace.to_json() if tuner.trace else None,
            "costs": tuner.costs.to_json() if tuner.costs else None,
            "iterations": [_iteration(step) for step in self._iterations],
        }


def _command() -> str:
    """The command that started this process; long arguments, such as of -c, are shortened."""
    words = (
        word if len(word) <= _MOST_LETTERS else word[:_MOST_LETTERS] + "..."
        for word in sys.orig_argv
    )
    return shlex.join(words)


_MOST_LETTERS = 200


def _versions() -> dict[str, str]:
    """Of wfbp, Python, and what computes."""
    versions = {"Python": platform.python_version()}
    for module, name in (("wfbp", "wfbp"), ("torch", "PyTorch"), ("jax", "JAX")):
        if module in sys.modules:
            try:
                versions[name] = metadata.version(module)
            except metadata.PackageNotFoundError:
                versions[name] = "not installed as a package"
    return versions


def _iteration(step: StepTimes) -> Document:
    """One iteration; seconds from its beginning, which is the end of the one before."""

    def since(stamp: float) -> float | None:
        return round(stamp - step.begun_s, 9) if stamp else None

    return {
        "ready_s": [since(s) for s in step.ready_s],
        "forward_s": [since(s) for s in step.forward_s],
        "forward_end_s": since(step.forward_end_s),
        "closed_s": since(step.closed_s),
        "done_s": since(step.done_s),
        "groups": [
            {
                "group": t.group,
                "start_s": since(t.start_s),
                "packed_s": since(t.packed_s),
                "end_s": since(t.end_s),
            }
            for t in (*step.gathers, *step.groups)
        ],
    }


def _write_if_alive(reference: weakref.ref[Recorder]) -> None:
    recorder = reference()
    if recorder is not None:
        recorder.write()
