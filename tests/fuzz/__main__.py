"""``python -m tests.fuzz``: run random training programs, and shrink what fails.

For an hour beside other work: ``python -m tests.fuzz --minutes 60 --log runs/fuzz.log &``.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import time
from pathlib import Path

from tests.fuzz.draw import draw, without
from tests.fuzz.driver import Failure, fails, run_all, run_job, shrink
from tests.fuzz.program import Program, dumps, loads

CASES = Path(__file__).parent / "cases"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", default=time.strftime("%Y%m%d%H%M"), help="any text")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--programs", type=int, default=10**9, help="at most so many")
    parser.add_argument("--ranks", default="2,3", help="numbers of ranks, in turns")
    parser.add_argument("--mpi", choices=["mpich", "openmpi"], default="mpich")
    parser.add_argument("--per-job", type=int, default=30, help="programs that share an mpirun")
    parser.add_argument("--replay", help="a file, or SEED/NUMBER/RANKS as a failure shows it")
    parser.add_argument("--times", type=int, default=1, help="how often to replay")
    parser.add_argument("--shrink", action="store_true", help="make failures small")
    parser.add_argument("--out", default="", help="a folder for failures, as files to replay")
    parser.add_argument("--log", help="a file to write to, at the lowest priority")
    parser.add_argument("--without", default="", help="what to leave out; see draw.without")
    chosen = parser.parse_args()
    chosen.without = [name for name in chosen.without.split(",") if name]
    if chosen.log:
        os.nice(19)
        Path(chosen.log).parent.mkdir(parents=True, exist_ok=True)
        with open(chosen.log, "a", buffering=1) as file, contextlib.redirect_stdout(file):
            return replay(chosen) if chosen.replay else search(chosen)
    return replay(chosen) if chosen.replay else search(chosen)


def search(chosen: argparse.Namespace) -> int:
    """Run programs until the time is over."""
    ranks = [int(n) for n in chosen.ranks.split(",")]
    start = time.monotonic()
    until = start + 60 * chosen.minutes
    failures: dict[str, int] = {}
    count = 0

    def programs(n: int, first: int) -> list[Program]:
        numbers = range(first, first + chosen.per_job)
        return [without(draw(f"{chosen.seed}/{k}", n), chosen.without) for k in numbers]

    names: dict[str, str] = {}

    def report(failure: Failure) -> None:
        failures[failure.kind] = failures.get(failure.kind, 0) + 1
        where = names.get(failure.program.name, "")
        print(f"\n=== FAILED {where} ({failure.program.name}): {failure.kind}", flush=True)
        print(failure.problem[:3000], flush=True)
        if chosen.shrink and failures[failure.kind] == 1:
            failure = shrink(failure, chosen.mpi, time.monotonic() + 120)
            print(f"--- smaller:\n{dumps(failure.program)}\n{failure.problem[:1500]}", flush=True)
        if chosen.out:
            Path(chosen.out).mkdir(parents=True, exist_ok=True)
            file = Path(chosen.out, f"{failure.program.name}.json")
            file.write_text(dumps(failure.program))
            print(f"python -m tests.fuzz --mpi {chosen.mpi} --replay {file}", flush=True)
        else:
            print(f"python -m tests.fuzz --mpi {chosen.mpi} --replay {where}", flush=True)

    for batch in itertools.count():
        left = chosen.programs - count
        if time.monotonic() >= until or left <= 0:
            break
        n = ranks[batch % len(ranks)]
        first = batch * chosen.per_job
        these = programs(n, first)[:left]
        for k, program in enumerate(these, first):
            names[program.name] = f"{chosen.seed}/{k}/{n}"
        count += run_all(iter(these), until, chosen.mpi, chosen.per_job, report)
    print(
        f"\n{count} programs in {time.monotonic() - start:.0f} s, seed {chosen.seed}, "
        f"{chosen.mpi}, {chosen.ranks} ranks; {sum(failures.values())} failed"
    )
    for kind, times in sorted(failures.items(), key=lambda item: -item[1]):
        print(f"{times:4d}  {kind}")
    return bool(failures)


def replay(chosen: argparse.Namespace) -> int:
    """Run one program again, and perhaps make it small."""
    if Path(chosen.replay).exists():
        program = loads(Path(chosen.replay).read_text())
    else:
        seed, ranks = chosen.replay.rsplit("/", 1)
        program = draw(seed, int(ranks))
    print(dumps(program))
    _, failure = run_job([program] * chosen.times, chosen.mpi)
    if failure is None:
        print("right")
        return 0
    print(f"=== {failure.kind}\n{failure.problem}", flush=True)
    if chosen.shrink:
        again = fails([program] * 3, failure.kind, chosen.mpi)
        times = 1 if again is not None and again[0] == 0 else 4
        smaller = shrink(failure, chosen.mpi, time.monotonic() + 60 * chosen.minutes, times)
        print(f"--- smaller:\n{dumps(smaller.program)}\n{smaller.problem}")
        if chosen.out:
            Path(chosen.out).mkdir(parents=True, exist_ok=True)
            file = Path(chosen.out, f"{smaller.program.name}.json")
            file.write_text(dumps(smaller.program))
            print(f"python -m tests.fuzz --mpi {chosen.mpi} --replay {file}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
