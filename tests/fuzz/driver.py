"""Starts jobs of many programs, finds the program that failed, makes it small."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from tests.fuzz.program import Act, Layer, Optimizer, Program, Step, dumps, size_of
from tests.support import launcher

PROGRAM_S = 100.0
"""A program that takes longer is stopped, and its stacks are shown."""


@dataclass(frozen=True)
class Failure:
    """A program and what went wrong."""

    program: Program
    problem: str

    @property
    def kind(self) -> str:
        """What distinguishes this failure from others, roughly."""
        lines = [line for line in self.problem.splitlines() if line.strip()]
        text = lines[-1] if "Traceback" in self.problem else lines[0].split(": ", 1)[-1]
        if "in one process" in text and "observed" not in text:
            return "another result than in one process"
        letters = "".join(c for c in text if not c.isdigit())
        return " ".join(letters.split()[:6])


def run_job(
    programs: Sequence[Program], mpi: str = "mpich", program_s: float = PROGRAM_S
) -> tuple[int, Failure | None]:
    """Run programs of one number of ranks until one fails.

    Returns:
        How many are known to be right, from the first on, and the failure behind them.
    """
    ranks = programs[0].ranks
    with tempfile.TemporaryDirectory() as out:
        Path(out, "programs.json").write_text(json.dumps([dumps(p) for p in programs]))
        run = launcher.mpirun(
            ranks,
            "-m",
            "tests.fuzz.job",
            out,
            program_s,
            mpi=mpi,
            timeout=60 + 3 * program_s + 4 * len(programs),
            env={"WFBP_ZERO_COPY_MIN_BYTES": ""},
            preloaded="torch",
        )
        lines = []
        for r in range(ranks):
            file = Path(out, f"rank{r}.jsonl")
            text = file.read_text() if file.exists() else ""
            lines.append([json.loads(line) for line in text.splitlines() if line.endswith("}")])
    known: dict[int, list[str]] = {}
    begun = -1
    for r, told in enumerate(lines):
        for line in told:
            if "problem" in line:
                text = line["problem"]
                known.setdefault(line["program"], []).append(text and f"rank {r}: {text}")
            else:
                begun = max(begun, line["program"])
    for n, program in enumerate(programs):
        said = known.get(n)
        if said is None:
            if run.rc == 0 and begun >= n:
                raise RuntimeError(f"nothing is known of program {n}: {run}")
            # A crash leaves those before it, whose references had not run, without an answer.
            culprit = begun if begun >= 0 else n
            text = run.stderr + run.stdout
            how = "took too long" if run.rc is None or "Timeout (" in text else "crashed"
            return n, Failure(programs[culprit], f"the job {how} (rc {run.rc})\n{text[-6000:]}")
        told = [text for text in said if text]
        if told:
            first = next((t for t in told if "fails on another" not in t), told[0])
            return n, Failure(program, "\n".join([first, *(t for t in told if t != first)]))
    return len(programs), None


def run_all(
    programs: Iterator[Program],
    until: float,
    mpi: str,
    per_job: int,
    report: Callable[[Failure], None],
) -> int:
    """Run programs, all of one number of ranks, until they or the time end.

    Args:
        programs: in the order in which to run them.
        until: by ``time.monotonic()``.
        mpi: ``mpich`` or ``openmpi``.
        per_job: how many share an mpirun.
        report: what to do with a failure.

    Returns:
        How many ran.
    """
    count = 0
    waiting: list[Program] = []
    while time.monotonic() < until:
        while len(waiting) < per_job and (program := next(programs, None)) is not None:
            waiting.append(program)
        if not waiting:
            break
        right, failure = run_job(waiting, mpi)
        count += right
        if failure is not None:
            count += 1
            report(failure)
        waiting = [p for p in waiting[right:] if failure is None or p.name != failure.program.name]
    return count


def fails(
    candidates: Sequence[Program], kind: str, mpi: str, times: int = 1
) -> tuple[int, Failure] | None:
    """The first of these programs that fails in this way, by its place, and how."""
    todo = [(n, p) for n, p in enumerate(candidates) for _ in range(times)]
    while todo:
        ranks = todo[0][1].ranks
        these = [x for x in todo if x[1].ranks == ranks]
        right, failure = run_job([p for _, p in these], mpi, 40.0)
        if failure is None:
            todo = [x for x in todo if x[1].ranks != ranks]
            continue
        at = next(n for n, p in these[right:] if p == failure.program)
        if failure.kind == kind:
            return at, failure
        # It fails in another way, such as an invalid program: not this one.
        done = {n for n, _ in these[:right]} | {at}
        todo = [x for x in todo if x[0] not in done]
    return None


def shrink(failure: Failure, mpi: str, until: float, times: int = 1) -> Failure:
    """A smaller program that fails in the same way."""
    best = failure
    while time.monotonic() < until:
        smaller = sorted(set(reductions(best.program)), key=size_of)
        smaller = [p for p in smaller if size_of(p) < size_of(best.program)]
        for k in range(0, len(smaller), 40):
            if time.monotonic() > until:
                return best
            found = fails(smaller[k : k + 40], failure.kind, mpi, times)
            if found is not None:
                best = found[1]
                break
        else:
            return best
    return best


def reductions(program: Program) -> Iterator[Program]:
    """Programs that lack something of this one."""
    actions, layers, optimizers = program.actions, program.layers, program.optimizers
    for span in (len(actions) // 2, len(actions) // 4, 2, 1):
        for k in range(0, len(actions), max(span, 1)):
            rest = actions[:k] + actions[k + span :]
            if any(isinstance(a, Step) for a in rest) or span < len(actions):
                yield replace(program, actions=rest)
    for k in range(len(layers)):
        smaller = _without_layer(program, k)
        if smaller is not None:
            yield smaller
    if len(optimizers) > 1:
        for k in range(len(optimizers)):
            smaller = _without_optimizer(program, k)
            if smaller is not None:
                yield smaller
    for k, part in enumerate(layers):
        for plain in _plainer(part, ("kind", "model", "of")):
            yield replace(program, layers=(*layers[:k], plain, *layers[k + 1 :]))
        if part.kind not in ("linear without bias", "again", "tied") and not any(
            other.of == k for other in layers
        ):
            plain = replace(part, kind="linear without bias", size=0)
            yield replace(program, layers=(*layers[:k], plain, *layers[k + 1 :]))
    for k, optimizer in enumerate(optimizers):
        for plain in _plainer(optimizer, ("kind", "model", "part")):
            if plain.schedule == optimizer.schedule or plain.update == optimizer.update:
                yield replace(program, optimizers=(*optimizers[:k], plain, *optimizers[k + 1 :]))
        if optimizer.kind != "sgd":
            plain = replace(optimizer, kind="sgd")
            yield replace(program, optimizers=(*optimizers[:k], plain, *optimizers[k + 1 :]))
    for k, action in enumerate(actions):
        keep = ("do", "layer", "optimizer", "model", "optimizers", "scaler")
        for plain in _plainer(action, keep):
            if not (
                isinstance(plain, Act) and plain.do in ("rewrap", "renew") and not plain.schedule
            ):
                yield replace(program, actions=(*actions[:k], plain, *actions[k + 1 :]))
    if any(isinstance(a, Step) and a.scaler for a in actions):
        without = [replace(a, scaler="") if isinstance(a, Step) else a for a in actions]
        yield replace(program, actions=tuple(without))
    for plain in _plainer(program, ("seed", "ranks", "layers", "optimizers", "actions")):
        yield plain
    if program.ranks > 2:
        yield replace(program, ranks=2)


def _plainer(thing: Any, keep: Sequence[str]) -> Iterator[Any]:
    """The same with one field as by default."""
    for field in fields(thing):
        if field.name not in keep and getattr(thing, field.name) != field.default:
            yield replace(thing, **{field.name: field.default})


def _without_layer(program: Program, k: int) -> Program | None:
    layers: list[Layer] = []
    place: dict[int, int] = {}
    for n, part in enumerate(program.layers):
        if n == k or part.of == k:
            continue
        place[n] = len(layers)
        layers.append(replace(part, of=place[part.of]) if part.of >= 0 else part)
    if {o.model for o in program.optimizers} - {p.model for p in layers}:
        return None
    actions: list[Step | Act] = []
    for action in program.actions:
        if isinstance(action, Act) and action.layer >= 0:
            if action.layer not in place:
                continue
            action = replace(action, layer=place[action.layer])
        actions.append(action)
    return replace(program, layers=tuple(layers), actions=tuple(actions))


def _without_optimizer(program: Program, k: int) -> Program | None:
    """Also without its model, where no other optimizer has that."""
    gone = program.optimizers[k]
    rest = program.optimizers[:k] + program.optimizers[k + 1 :]
    if any(o.model == gone.model for o in rest):
        return None
    layers = tuple(p for p in program.layers if p.model != gone.model)
    place = {
        n: m for m, n in enumerate(n for n, p in enumerate(program.layers) if p.model != gone.model)
    }

    def model(m: int) -> int:
        return m - (m > gone.model)

    def optimizers(numbers: Sequence[int]) -> tuple[int, ...]:
        return tuple(n - (n > k) for n in numbers if n != k)

    actions: list[Step | Act] = []
    for action in program.actions:
        if isinstance(action, Step):
            stepped = optimizers(action.optimizers)
            if stepped:
                others = tuple(model(m) for m in action.others if m != gone.model)
                actions.append(replace(action, optimizers=stepped, others=others))
        elif action.optimizer != k and (action.layer < 0 or action.layer in place):
            actions.append(
                replace(
                    action,
                    optimizer=action.optimizer - (action.optimizer > k),
                    model=model(action.model),
                    layer=place.get(action.layer, -1),
                )
            )
    moved = tuple(replace(p, model=model(p.model)) for p in layers)
    moved = tuple(replace(p, of=place[p.of]) if p.of >= 0 else p for p in moved)
    changed: tuple[Optimizer, ...] = tuple(replace(o, model=model(o.model)) for o in rest)
    return replace(program, layers=moved, optimizers=changed, actions=tuple(actions))
