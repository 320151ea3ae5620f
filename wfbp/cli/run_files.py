"""Reads what the runtime recorded: the ``wfbp-run/1`` documents of a directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wfbp.core.checks import number, read_json
from wfbp.core.cost import Costs
from wfbp.core.plan import Plan
from wfbp.core.trace import Trace
from wfbp.runtime.recorder import FORMAT

FIGURES = (
    "predicted_iteration_s",
    "measured_iteration_s",
    "predicted_exposed_s",
    "exposed_s",
    "lower_bound_s",
    "ratio_to_lower_bound",
    "kappa",
)
"""What a report tells in numbers; each may be null."""


@dataclass(frozen=True, slots=True)
class GroupStamps:
    """When one group was taken up, packed, and had arrived; seconds into its iteration."""

    group: int
    start_s: float
    packed_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration of one rank; seconds from its beginning.

    Args:
        ready_s: per tensor of the plan, when its gradient existed; None where it never did.
        closed_s: backward had ended.
        done_s: all gradients were reduced.
        groups: in the order in which they arrived.
    """

    ready_s: tuple[float | None, ...]
    closed_s: float
    done_s: float
    groups: tuple[GroupStamps, ...]


@dataclass(frozen=True, slots=True)
class About:
    """Where and when a rank ran; empty where an older version recorded it.

    Args:
        written: when the document was written, ISO 8601.
        host: of the rank.
        library: what moved bytes, in words.
        versions: by name.
        model: class of the model, where it was seen.
        command: by which the rank was started.
    """

    written: str = ""
    host: str = ""
    library: str = ""
    versions: tuple[tuple[str, str], ...] = ()
    model: str = ""
    command: str = ""


@dataclass(frozen=True, slots=True)
class RankRun:
    """What one rank recorded of one engine.

    Args:
        rank: the rank.
        phase: of the tuner when it was written.
        steps: taken so far.
        figures: of the report, by the names in :data:`FIGURES`.
        plan: by which the iterations ran.
        trace: what was measured of the computation, once it was.
        costs: what was measured of the network, once it was.
        iterations: the last ones, oldest first.
        about: where and when it ran.
    """

    rank: int
    phase: str
    steps: int
    figures: dict[str, float | None]
    plan: Plan
    trace: Trace | None
    costs: Costs | None
    iterations: tuple[Iteration, ...]
    about: About = About()


@dataclass(frozen=True, slots=True)
class Run:
    """One engine over its ranks.

    Args:
        name: of the engine.
        size: number of ranks that took part.
        ranks: those that left a file, by rank.
    """

    name: str
    size: int
    ranks: tuple[RankRun, ...]

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that left no file."""
        here = {r.rank for r in self.ranks}
        return tuple(rank for rank in range(self.size) if rank not in here)

    def slowest(self, key: str) -> float | None:
        """The largest of the ranks' figures of that name; None where no rank has it."""
        return max((v for r in self.ranks if (v := r.figures[key]) is not None), default=None)


def load_runs(directory: str) -> list[Run]:
    """Every engine that the ranks recorded in a directory, by name.

    Raises ``ValueError``, with file and place, if there are no such files or one is wrong.
    """
    folder = Path(directory)
    if not folder.exists():
        raise ValueError(f"{directory}: no such directory")
    if not folder.is_dir():
        raise ValueError(f"{directory}: not a directory; give what WFBP_RECORD_DIR was set to")
    by_name: dict[str, list[tuple[Path, int, RankRun]]] = {}
    for path in sorted(folder.glob("*.json")):
        if path.name.startswith("timeline."):
            continue  # WFBP_TIMELINE may name the same directory
        name, size, run = _load(path)
        by_name.setdefault(name, []).append((path, size, run))
    if not by_name:
        raise ValueError(
            f"{directory}: no recorded run; train with WFBP_RECORD_DIR={directory} on 2 ranks or "
            "more"
        )
    return [_joined(name, rows) for name, rows in sorted(by_name.items())]


def _joined(name: str, rows: Sequence[tuple[Path, int, RankRun]]) -> Run:
    """The ranks of one engine, which must be of one run."""
    first_path, size, first = rows[0]
    for path, other_size, run in rows[1:]:
        if other_size != size:
            raise ValueError(
                f"{path}: of a run with {other_size} ranks, {first_path.name} of one with {size}; "
                "give every run a directory of its own"
            )
        if run.plan != first.plan:
            raise ValueError(
                f"{path}: by another plan than {first_path.name}; give every run a directory of "
                "its own"
            )
    by_rank = {run.rank: run for _, _, run in rows}
    if len(by_rank) < len(rows):
        raise ValueError(f"{first_path.parent}: a rank of {name!r} is there twice")
    return Run(name, size, tuple(by_rank[rank] for rank in sorted(by_rank)))


def _load(path: Path) -> tuple[str, int, RankRun]:
    return read_json(path, _document)


def _document(data: Any) -> tuple[str, int, RankRun]:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        actual = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"not a recorded run: expected format {FORMAT!r}, found {actual!r}")
    size = _whole("size", data.get("size"), 1)
    rank = _whole("rank", data.get("rank"), 0)
    if rank >= size:
        raise ValueError(f"rank: {rank} of {size} ranks")
    report = _object("report", data.get("report"))
    plan = _within("plan", lambda: Plan.from_json(_object("plan", data.get("plan"))))
    trace, costs = data.get("trace"), data.get("costs")
    run = RankRun(
        rank,
        str(report.get("phase", "")),
        _whole("report.steps", report.get("steps"), 0),
        {key: _figure(f"report.{key}", report.get(key)) for key in FIGURES},
        plan,
        None if trace is None else _within("trace", lambda: Trace.from_json(trace)),
        None if costs is None else _within("costs", lambda: Costs.from_json(costs)),
        tuple(
            _iteration(f"iterations[{i}]", row, plan)
            for i, row in enumerate(_list("iterations", data.get("iterations")))
        ),
        _about(_object("about", data.get("about", {}))),
    )
    _check_same_tensors(run)
    return str(data.get("name", "")), size, run


def _about(data: dict[str, Any]) -> About:
    versions = _object("about.versions", data.get("versions", {}))
    return About(
        str(data.get("written", "")),
        str(data.get("host", "")),
        str(data.get("library", "")),
        tuple((name, str(version)) for name, version in versions.items()),
        str(data.get("model", "")),
        str(data.get("command", "")),
    )


def _iteration(place: str, row: Any, plan: Plan) -> Iteration:
    row = _object(place, row)
    ready = _list(f"{place}.ready_s", row.get("ready_s"))
    if len(ready) != len(plan.tensors):
        raise ValueError(
            f"{place}.ready_s: {len(ready)} times for {len(plan.tensors)} tensors of the plan"
        )
    groups = []
    for i, data in enumerate(_list(f"{place}.groups", row.get("groups"))):
        where = f"{place}.groups[{i}]"
        stamps = _object(where, data)
        group = _whole(f"{where}.group", stamps.get("group"), 0)
        if group >= len(plan.groups):
            raise ValueError(f"{where}.group: {group} of {len(plan.groups)} groups of the plan")
        times = (number(f"{where}.{k}", stamps.get(k)) for k in ("start_s", "packed_s", "end_s"))
        groups.append(GroupStamps(group, *times))
    return Iteration(
        tuple(_figure(f"{place}.ready_s[{i}]", at) for i, at in enumerate(ready)),
        number(f"{place}.closed_s", row.get("closed_s")),
        number(f"{place}.done_s", row.get("done_s")),
        tuple(groups),
    )


def _check_same_tensors(run: RankRun) -> None:
    """The plan may have the tensors in another order than the trace, but must have the same."""
    if run.trace is None:
        return
    planned = {(spec.name, spec.nbytes) for spec in run.plan.tensors}
    traced = {(spec.name, spec.nbytes) for spec in run.trace.specs}
    if planned != traced:
        listed = ", ".join(f"{name} of {n} bytes" for name, n in sorted(planned ^ traced)[:3])
        raise ValueError(f"trace: tensors differ from the plan's: {listed}")


def _within(place: str, read: Any) -> Any:
    try:
        return read()
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def _object(place: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{place}: expected an object, found {type(value).__name__}")
    return value


def _list(place: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{place}: expected a list, found {type(value).__name__}")
    return value


def _whole(place: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{place}: expected a whole number of at least {least}, found {value!r}")
    return value


def _figure(place: str, value: Any) -> float | None:
    return None if value is None else number(place, value)
