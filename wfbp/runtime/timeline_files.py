"""Records training steps and named operations for Perfetto and ``chrome://tracing``.

Every rank writes its own file; :func:`merge` combines them on one clock. Files have Chrome's JSON
array form, which needs no closing bracket, so a file of a killed process can be read.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from wfbp.core.plan import Plan
from wfbp.runtime.measuring import StepTimes

FLUSH_S = 0.5
"""Seconds of records that are lost if a process is killed."""

log = logging.getLogger("wfbp")

Facts = dict[str, Any]
"""An event, or facts about one, in JSON's types."""
Document = dict[str, Any]
"""A whole timeline, as :func:`load` returns it, or a recorded run."""

_START = "start_time_since_epoch_in_micros"
_ROWS = 8
"""Rows of one optimizer, some of them free."""
_TRAINING, _GRADIENTS, _GROUPS = range(3)
_NUM_GROUP_ROWS = 2  # two groups are sent at a time
_FIRST_OPERATION = 1000


class TraceWriter:
    """Writes one rank's timeline; any thread appends to a deque, its own thread writes."""

    def __init__(
        self,
        path: str | Path,
        rank: int = 0,
        *,
        offset_s: float = 0.0,
        steps: tuple[int, int] = (0, 2**62),
        warn: Callable[[str, str], None] | None = None,
    ) -> None:
        self._warn = warn or (lambda _, text: log.warning("%s", text))
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._rank = rank
        self._steps = steps  # first and last step of each optimizer to record
        # All stamps are of time.perf_counter and time.monotonic, which tick alike.
        self._start_s = time.perf_counter()
        self._monotonic_s = time.monotonic() - self._start_s
        start_us = int((time.time() - offset_s) * 1e6)
        self._records: deque[Callable[[], None]] = deque()
        self._optimizers: dict[str, int] = {}  # first rows
        self._operations: dict[str, int] = {}  # rows
        self._ended = False  # records are dropped from then on
        self._events: list[str] = []
        self._lock = threading.Lock()  # of the file
        self._file = open(self.path, "wb", buffering=0)  # noqa: SIM115 - closed by close()
        about = {"name": f"rank {rank}", _START: start_us, "rank": rank, "pid": os.getpid()}
        self._name("process_name", 0, {**about, "host": socket.gethostname()})
        try:
            self._write("[\n" + self._events.pop())
        except OSError:
            self._file.close()
            self.path.unlink()
            raise
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._flush_until_closed, name="wfbp-timeline", daemon=True
        )
        self._thread.start()

    def step(self, optimizer: str, number: int, plan: Plan, times: StepTimes) -> None:
        """Record a step of an optimizer that ran by ``plan``; on its training thread."""
        wanted = self._steps[0] <= number <= self._steps[1] and not self._ended
        if wanted and times.begun_s >= self._start_s:  # else it lacks its beginning
            self._records.append(partial(self._add_step, optimizer, number, plan, times))

    def operation(self, kind: str, name: str, submitted_s: float, ready_s: float) -> None:
        """Record a named operation that ends now; times are of ``time.monotonic``."""
        if not self._ended:
            end_s = time.monotonic()
            self._records.append(
                partial(self._add_operation, kind, name, submitted_s, ready_s, end_s)
            )

    def close(self) -> None:
        """Write what is left, and record no more."""
        self._closing.set()
        self._thread.join()
        self.flush()
        with self._lock, suppress(OSError):
            if not self._ended:
                self._ended = True
                self._write("\n]\n")
            self._file.close()

    def flush(self) -> None:
        """Write all records; if that fails, warn and record no more."""
        with self._lock:
            while self._records:
                self._records.popleft()()
            events, self._events = self._events, []
            if self._ended or not events:
                return
            try:
                self._write("".join(f",\n{event}" for event in events))
            except OSError as error:
                self._ended = True
                self._file.close()
                self._warn(
                    f"timeline {self.path.parent}",
                    f"rank {self._rank}: the timeline {self.path} ends here "
                    f"({error.strerror or error}); training continues",
                )

    def _flush_until_closed(self) -> None:
        while not self._closing.wait(FLUSH_S) and not self._ended:
            self.flush()

    def _write(self, text: str) -> None:
        """Append all of a text; one call of the system may write a part."""
        rest = memoryview(text.encode())
        while rest:
            rest = rest[self._file.write(rest) :]

    def _add_step(self, optimizer: str, number: int, plan: Plan, times: StepTimes) -> None:
        first = self._optimizers.get(optimizer)
        if first is None:
            first = self._optimizers[optimizer] = 1 + len(self._optimizers) * _ROWS
            rows = ["training", "gradients ready"]
            rows += [f"groups {row + 1}" for row in range(_NUM_GROUP_ROWS)]
            for row, text in enumerate(rows, first):
                self._name("thread_name", row, {"name": f"{optimizer}: {text}"})
        training = first + _TRAINING
        step = {"step": number}
        forward_s = times.begun_s
        for position, (start_s, end_s) in enumerate(times.updates):
            if end_s > start_s >= times.begun_s:
                self._span("update", training, start_s, end_s, step)
                if position == 0:  # further ones are of parameters that forward reads
                    forward_s = end_s
        if times.forward_end_s:
            self._span("forward", training, forward_s, times.forward_end_s, step)
            self._span("backward", training, times.forward_end_s, times.closed_s, step)
        else:  # the adapter does not report the end of forward
            self._span("forward and backward", training, forward_s, times.closed_s, step)
        for start_s, end_s in times.waits:
            if end_s > start_s:
                self._span("wait for parameters", training, start_s, end_s, step)
        by_plan = {**step, "plan": plan.digest[:8]}
        self._span(_WAIT, training, times.closed_s, times.done_s, by_plan)
        self._add_gradients(number, plan, times.ready_s, first + _GRADIENTS)
        for sent in (*times.gathers, *times.groups):
            group = plan.groups[sent.group]
            row = first + _GROUPS + sent.group % _NUM_GROUP_ROWS
            nbytes = sum(plan.tensors[k].nbytes for k in group.tensors)
            facts = {**step, "group": sent.group, "bytes": nbytes, "tensors": len(group.tensors)}
            self._span("pack", row, sent.start_s, sent.packed_s, facts)
            self._span(group.operation.value, row, sent.packed_s, sent.end_s, facts)

    def _add_gradients(self, number: int, plan: Plan, ready_s: Sequence[float], row: int) -> None:
        # Most events are such: text takes a tenth of the time of dictionaries.
        facts = f'"ph": "i", "pid": {self._rank}, "tid": {row}, "s": "t"'
        facts += f', "args": {{"step": {number}}}'
        for spec, time_s in zip(plan.tensors, ready_s, strict=True):
            if time_s:
                at_us = (time_s - self._start_s) * 1e6
                name = json.dumps(spec.name)
                self._events.append(f'{{"name": {name}, {facts}, "ts": {at_us:.3f}}}')

    def _add_operation(
        self, kind: str, name: str, submitted_s: float, ready_s: float, end_s: float
    ) -> None:
        label = name if name.startswith(f"{kind}.") else f"{kind}.{name}"
        row = self._operations.get(label)
        if row is None:
            row = self._operations[label] = _FIRST_OPERATION + 1 + len(self._operations)
            self._name("thread_name", row, {"name": label})
        shift_s = self._monotonic_s
        self._span(f"NEGOTIATE_{kind.upper()}", row, submitted_s - shift_s, ready_s - shift_s)
        self._span(kind.upper(), row, ready_s - shift_s, end_s - shift_s)

    def _name(self, what: str, row: int, facts: Facts) -> None:
        event = {"name": what, "ph": "M", "pid": self._rank, "tid": row, "args": facts}
        self._events.append(json.dumps(event))

    def _span(
        self, name: str, row: int, start_s: float, end_s: float, facts: Facts | None = None
    ) -> None:
        if start_s < self._start_s:
            return  # it began before the timeline; viewers take no stamps below 0
        event: Facts = {"name": name, "ph": "X", "pid": self._rank, "tid": row}
        event["ts"] = round((start_s - self._start_s) * 1e6, 3)
        event["dur"] = round(max(end_s - start_s, 0.0) * 1e6, 3)
        if facts:
            event["args"] = facts
        self._events.append(json.dumps(event))


_ROUNDS = 9


def clock_offset_s(exchange: Callable[[Any, str], list[Any]]) -> float:
    """Seconds that this host's clock is ahead of rank 0's; collective."""
    # A small collective ends on all ranks at about the same time.
    ends_s = []
    for _ in range(_ROUNDS):
        exchange(None, "comparing clocks")
        ends_s.append(time.time())
    first: list[float] = exchange(ends_s, "comparing clocks")[0]
    return statistics.median(own - other for own, other in zip(ends_s, first, strict=True))


def rank_file(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"timeline.rank{rank}.json"


def load(path: str | Path) -> Document:
    """A timeline file's ``otherData`` and ``traceEvents``; ``ValueError`` if it is no timeline."""
    try:
        content = _parse(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no timeline: {error}") from None
    about: object = None
    events: object = None
    if isinstance(content, list) and content and isinstance(content[0], dict):
        about, events = content[0].get("args"), content  # as a rank writes it
    elif isinstance(content, dict):
        about, events = content.get("otherData"), content.get("traceEvents")  # as save() does
    if not (isinstance(about, dict) and _is_number(about.get(_START)) and isinstance(events, list)):
        raise ValueError(f"{path}: no timeline: expected events, and a number for {_START}")
    for number, event in enumerate(events):
        if not _is_event(event):
            raise ValueError(f"{path}: event {number} is none that wfbp writes")
    return {"otherData": about, "traceEvents": events}


def _parse(text: str) -> object:
    whole = text[: text.rfind(",\n")] if ",\n" in text else text  # without a partial event
    for complete in (text, f"{text}\n]"):
        with suppress(json.JSONDecodeError):
            return json.loads(complete)
    return json.loads(f"{whole}\n]")


_MOST_US = 1e18
"""Thirty thousand years; JSON's whole numbers have no limit."""


def _is_number(value: object) -> bool:
    is_bool = isinstance(value, bool)
    return isinstance(value, (int, float)) and not is_bool and abs(value) <= _MOST_US


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and _is_number(value)


def _is_event(event: object) -> bool:
    """Whether it has what is read of it."""
    if not (isinstance(event, dict) and isinstance(event.get("name"), str)):
        return False
    facts = event.get("args", {})
    if not (_is_whole(event.get("pid")) and _is_whole(event.get("tid"))):
        return False
    if not isinstance(facts, dict):
        return False
    if event.get("ph") == "M":
        return isinstance(facts.get("name"), str) and "step" not in facts
    numbers = ("ts", "dur") if event.get("ph") == "X" else ("ts",)
    counted = [facts.get("step", 0)]
    if "group" in facts:
        counted += [facts.get(key) for key in ("group", "tensors", "bytes")]
    if not all(map(_is_whole, counted)):
        return False
    return event.get("ph") in ("X", "i") and all(map(_is_number, map(event.get, numbers)))


def save(document: Document, path: str | Path) -> None:
    """Write a document, whole or not at all."""
    target = Path(path)
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.partial")
    text = json.dumps(document, allow_nan=False)
    try:
        unfinished.write_text(text)
        os.replace(unfinished, target)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(target)) from None


def merge(documents: Sequence[Document]) -> Document:
    """One document of several, as :func:`load` returns them, on the clock of the first."""
    starts_us = [d["otherData"][_START] for d in documents]
    earliest_us = min(starts_us, default=0)
    events = []
    for document, start_us in zip(documents, starts_us, strict=True):
        for event in document["traceEvents"]:
            if "ts" in event:
                event = {**event, "ts": round(event["ts"] + (start_us - earliest_us), 3)}
            events.append(event)
    return {"otherData": {_START: earliest_us}, "traceEvents": events}


def summarize(document: Document) -> list[Facts]:
    """Median seconds by rank and optimizer, of the steps by its last plan.

    ``hidden`` is the hidden share of communication.
    """
    names: dict[tuple[int, int], str] = {}
    events: dict[tuple[int, str], dict[int, list[Facts]]] = {}
    for event in document["traceEvents"]:
        if event["ph"] == "M" and event["name"] == "thread_name":
            names[event["pid"], event["tid"]] = event["args"]["name"]
    for event in document["traceEvents"]:
        step = event.get("args", {}).get("step")
        if event["ph"] == "X" and step is not None:
            engine = names.get((event["pid"], event["tid"]), "").rpartition(":")[0]
            steps = events.setdefault((event["pid"], engine), {})
            steps.setdefault(step, []).append(event)
    rows = []
    for (rank, engine), steps in sorted(events.items()):
        if not (numbers := _by_last_plan(steps)):
            continue
        taken = [_times_of(steps[number]) for number in numbers]
        ends = {step: times["end_s"] for step, times in zip(numbers, taken, strict=True)}
        lengths = [ends[step] - ends[step - 1] for step in ends if step - 1 in ends]
        row: Facts = {"rank": rank, "optimizer": engine, "steps": len(numbers)}
        row |= {"first_step": numbers[0], "last_step": numbers[-1]}
        row["iteration_s"] = statistics.median(lengths) if lengths else None
        for key in ("forward_s", "backward_s", "update_s", "exposed_s", "communication_s"):
            row[key] = statistics.median(times[key] for times in taken)
        sent_s = sum(times["communication_s"] for times in taken)
        exposed_s = sum(times["exposed_s"] for times in taken)
        row["hidden"] = max(0.0, 1.0 - exposed_s / sent_s) if sent_s else None
        rows.append(row)
    return rows


def _by_last_plan(steps: Mapping[int, Sequence[Facts]]) -> list[int]:
    """The last steps that ran by the same plan: those of a profile and a trial are left out."""
    plans = {
        number: event["args"].get("plan")
        for number, events in steps.items()
        for event in events
        if event["name"] == _WAIT
    }  # of whole steps: the rank may have been killed before it wrote the last one
    numbers = sorted(plans)
    last = takewhile(lambda number: plans[number] == plans[numbers[-1]], reversed(numbers))
    return sorted(last)


_WAIT = "wait for gradients"
_WAITS = (_WAIT, "wait for parameters")
_COMPUTE = ("forward", "backward", "update", "forward and backward", "pack")


def _times_of(events: Iterable[Facts]) -> dict[str, float]:
    """Seconds of one step's events by what they are."""
    times = dict.fromkeys(("forward_s", "backward_s", "update_s", "exposed_s", "end_s"), 0.0)
    spans = []
    for event in events:
        name, length_s = event["name"], event["dur"] * 1e-6
        if name in _WAITS:
            times["exposed_s"] += length_s
        elif name not in _COMPUTE:
            spans.append((event["ts"] * 1e-6, event["ts"] * 1e-6 + length_s))
        elif name == "forward and backward":
            times["backward_s"] += length_s
        elif name != "pack":
            times[f"{name}_s"] += length_s
        if name == _WAIT:
            times["end_s"] = event["ts"] * 1e-6 + length_s
    times["communication_s"] = _covered_s(spans)
    return times


def _covered_s(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of some spans."""
    covered_s, last_s = 0.0, float("-inf")
    for start_s, end_s in sorted(spans):
        covered_s += max(0.0, end_s - max(start_s, last_s))
        last_s = max(last_s, end_s)
    return covered_s
