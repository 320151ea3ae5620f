"""Reads recorded runs: the ``wfbp-run/1`` documents of a directory (format: files.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from wfbp.core.checks import check_format, instance, number, read_json, whole
from wfbp.core.cost import Costs
from wfbp.core.plan import Plan
from wfbp.core.ranks import counted
from wfbp.core.trace import Trace
from wfbp.launcher.hosts import MOST_RANKS

T = TypeVar("T")

FIGURES = (
    "predicted_iteration_s",
    "measured_iteration_s",
    "exposed_s",
    "lower_bound_s",
    "ratio_to_lower_bound",
    "kappa",
)
"""The numbers of a recorded report; each may be null."""

_MOST_LISTED = 16

BELOW_BOUND = (
    "the run was faster than this bound, which rests on compute and network as measured at the "
    "start of the run, and is not exact here"
)


@dataclass(frozen=True, slots=True)
class RankRun:
    """One rank's record of one optimizer.

    ``trace`` and ``costs`` are None before they were measured; ``iterations`` are oldest first.
    """

    rank: int
    phase: str
    steps: int
    figures: dict[str, float | None]
    plan: Plan
    trace: Trace | None
    costs: Costs | None
    iterations: list[dict[str, Any]]
    about: dict[str, str]


@dataclass(frozen=True, slots=True)
class Run:
    """One optimizer on all ranks that left a file, in order."""

    name: str
    size: int
    ranks: tuple[RankRun, ...]

    @property
    def missing(self) -> list[str]:
        """A note of the ranks that left no file, if there are any."""
        present = {run.rank for run in self.ranks}
        if not (number := self.size - len(present)):
            return []
        ranks = list(islice((r for r in range(self.size) if r not in present), _MOST_LISTED))
        listed = ", ".join(map(str, ranks)) + (" and others" if number > len(ranks) else "")
        return [f"{number} of {self.size} ranks left no file here: {listed}."]

    def slowest(self, key: str) -> float | None:
        """The largest of the ranks' figures of that name; None if no rank has it."""
        return max((v for r in self.ranks if (v := r.figures[key]) is not None), default=None)


def load_runs(directory: str) -> list[Run]:
    """Every recorded optimizer, by name; ``ValueError`` if there is no file or a wrong one."""
    folder = Path(directory)
    if not folder.exists():
        raise ValueError(f"{directory}: no such directory")
    if not folder.is_dir():
        raise ValueError(f"{directory}: not a directory; give what WFBP_RECORD was set to")
    by_name: dict[str, list[tuple[Path, int, RankRun]]] = {}
    for path in sorted(folder.glob("*.json")):
        if not path.name.startswith("timeline."):
            name, size, run = read_json(path, _document)
            by_name.setdefault(name, []).append((path, size, run))
    if not by_name:
        raise ValueError(
            f"{directory}: no recorded run; train with WFBP_RECORD={directory} on 2 ranks or more"
        )
    return [_joined(name, rows) for name, rows in sorted(by_name.items())]


def _joined(name: str, rows: Sequence[tuple[Path, int, RankRun]]) -> Run:
    """One optimizer's ranks, which must belong to one run."""
    first_path, size, first = rows[0]
    remedy = "give every run its own directory"
    for path, other_size, run in rows[1:]:
        if other_size != size:
            raise ValueError(
                f"{path}: of a run with {counted(other_size, 'rank')}, {first_path.name} of one "
                f"with {size}; {remedy}"
            )
        if run.plan != first.plan:
            raise ValueError(f"{path}: has another plan than {first_path.name}; {remedy}")
    by_rank = {run.rank: run for _, _, run in rows}
    if len(by_rank) < len(rows):
        raise ValueError(f"{first_path.parent}: a rank of {name!r} has two files")
    return Run(name, size, tuple(by_rank[rank] for rank in sorted(by_rank)))


def _document(data: Any) -> tuple[str, int, RankRun]:
    from wfbp.runtime.recorder import FORMAT

    check_format("a recorded run", data, FORMAT)
    size = whole("size", data.get("size"), 1, MOST_RANKS)
    rank = whole("rank", data.get("rank"), 0, size - 1)
    report = instance("report", data.get("report"), dict)
    about = instance("about", data.get("about", {}), dict)
    versions = instance("about.versions", about.get("versions", {}), dict)
    plan = _within("plan", Plan.from_json, instance("plan", data.get("plan"), dict))
    rows = instance("iterations", data.get("iterations"), list)
    trace, costs = data.get("trace"), data.get("costs")
    run = RankRun(
        rank,
        str(report.get("phase", "")),
        whole("report.steps", report.get("steps"), 0),
        {key: _time(f"report.{key}", report.get(key)) for key in FIGURES},
        plan,
        None if trace is None else _within("trace", Trace.from_json, trace),
        None if costs is None else _within("costs", Costs.from_json, costs),
        [_iteration(f"iterations[{i}]", row, plan) for i, row in enumerate(rows)],
        {key: str(about.get(key, "")) for key in ("written", "host", "library", "model", "command")}
        | {"versions": ", ".join(f"{name} {version}" for name, version in versions.items())},
    )
    if run.trace is not None:  # in another order than the plan's, but the same tensors
        planned = {(spec.name, spec.nbytes) for spec in plan.tensors}
        different = sorted(planned ^ {(spec.name, spec.nbytes) for spec in run.trace.specs})
        if different:
            listed = ", ".join(f"{name} of {n} bytes" for name, n in different[:3])
            raise ValueError(f"trace: tensors differ from the plan's: {listed}")
    return str(data.get("name", "")), size, run


def _iteration(place: str, row: Any, plan: Plan) -> dict[str, Any]:
    """A checked iteration, with the keys that figures read."""
    ready = instance(f"{place}.ready_s", instance(place, row, dict).get("ready_s"), list)
    if len(ready) != len(plan.tensors):
        raise ValueError(
            f"{place}.ready_s: {counted(len(ready), 'time')} for "
            f"{counted(len(plan.tensors), 'tensor')} of the plan"
        )
    groups = []
    for i, stamps in enumerate(instance(f"{place}.groups", row.get("groups"), list)):
        where = f"{place}.groups[{i}]"
        last = len(plan.groups) - 1
        group = whole(f"{where}.group", instance(where, stamps, dict).get("group"), 0, last)
        times = {k: number(f"{where}.{k}", stamps.get(k)) for k in ("start_s", "packed_s", "end_s")}
        groups.append({"group": group, **times})
    return {
        "ready_s": [_time(f"{place}.ready_s[{i}]", at) for i, at in enumerate(ready)],
        "closed_s": number(f"{place}.closed_s", row.get("closed_s")),
        "done_s": number(f"{place}.done_s", row.get("done_s")),
        "groups": groups,
    }


def _within(place: str, read: Callable[[Any], T], value: Any) -> T:
    try:
        return read(value)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def _time(place: str, value: Any) -> float | None:
    return None if value is None else number(place, value)
