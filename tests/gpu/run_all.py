"""All that a GPU is wanted for, in one command with a time budget, and its output kept.

    python tests/gpu/run_all.py --out runs/gpu --wheels wheels --budget-minutes 45

Parts follow one another in the order of what they tell: whether two ranks start, whether the device
and the kernels do what they should, whether two ranks train as one, and only then how fast all that
is. Each has a time limit, and the rest of the budget at most; what a part prints is kept in a file
of its own as it comes, so that a run that is cut short has told what it could. ``--parts``
chooses some, so that several commands can share the time: what has passed in the same folder is
not run again, unless it is named.

No network is needed: ``--wheels`` is a folder of wheels brought along, of those in :data:`WHEELS`
what the machine lacks. They are installed into the environment of the interpreter that runs this,
because ``mpirun`` must lie beside it.

``--dry-run`` needs no GPU: it runs what runs without one (two ranks start, a tiny model trains),
and otherwise shows that what a part would run is there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON = sys.executable
WHEELS = ("mpich", "mpi4py", "psutil", "bayesian-optimization", "pybind11", "hypothesis", "pytest")
PLUGINS = ("pytest-timeout", "pytest-xdist", "ml_dtypes", "click", "cloudpickle", "rich", "optax")
"""What the tests need beside them."""

HELLO = """
import sys
from importlib import metadata
from mpi4py import MPI
import wfbp.torch as wfbp
import torch
wfbp.init()
names = "torch jax cupy-cuda12x cupy-cuda13x nvidia-nccl-cu12 nvidia-nccl-cu13 mpi4py".split()
installed = {d.metadata["Name"].lower(): d.version for d in metadata.distributions()}
found = ", ".join(f"{name} {installed[name]}" for name in names if name in installed)
total = float(wfbp.allreduce(torch.tensor([float(wfbp.rank() + 1)]), op=wfbp.Sum))
gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
print(f"rank {wfbp.rank()} of {wfbp.size()}: {MPI.Get_library_version().splitlines()[0]}; {gpu}; "
      f"CUDA {torch.version.cuda}; {found}; the sum of ranks is {total}")
assert (wfbp.size(), total) == (2, 3.0), "two ranks were started, and did not find each other"
if "--without-gpu" not in sys.argv:
    import cupy
    assert torch.cuda.is_available() and cupy.cuda.is_available(), "PyTorch or CuPy finds no GPU"
wfbp.shutdown()
"""


@dataclass(frozen=True, slots=True)
class Part:
    """One thing to find out.

    Args:
        name: as ``--parts`` has it.
        limit_s: seconds that it may take.
        command: what is run.
        rehearsal: what a dry run runs in its place.
        env: variables beside those of this process.
        all_run: whether a test that is skipped counts as failed.
        needs: a program without which the part is left out.
    """

    name: str
    limit_s: float
    command: tuple[str, ...]
    rehearsal: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    all_run: bool = False
    needs: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a part.

    Args:
        name: of the part.
        verdict: ``passed``, ``failed``, ``timed out`` or ``left out``.
        seconds: that it took.
        told: its last line, or why it was left out.
        log: the file with its output; empty where there is none.
    """

    name: str
    verdict: str
    seconds: float
    told: str
    log: str


def parts(out: Path, wheels: Path | None) -> list[Part]:
    """The parts, in order.

    Args:
        out: folder for results.
        wheels: folder of wheels to install; None installs nothing.
    """
    pytest = (PYTHON, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider")
    bench = (PYTHON, "-m", "tests.benchmarks", "gpu")
    hello = (str(Path(PYTHON).with_name("mpirun")), "-n", "2", PYTHON, str(out / "hello.py"))
    single = (*pytest, "-m", "gpu", "tests/gpu", "-k", "not two_ranks")
    pairs = (*pytest, "-m", "gpu", "tests/gpu", "-k", "two_ranks")
    kernels = (*pytest, "-m", "gpu", "tests/gpu/test_pack.py")
    sanitizer = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "1", *kernels)
    rehearsed = (*bench, "--rehearse", "--rounds", "2", "--parts")

    def measured(name: str) -> tuple[str, ...]:
        return (*bench, "--parts", name, "--json", str(out / f"{name}.json"))

    install = (PYTHON, str(Path(__file__).resolve()), "--install", str(wheels)) if wheels else ()
    shown = (*install, "--dry-run") if wheels else ()
    collected = "--collect-only"
    nccl = (("NCCL_DEBUG", "INFO"),)
    found = [
        Part("hello", 90, hello, (*hello, "--without-gpu")),
        Part("single", 420, single, (*single, collected)),
        Part("two_ranks", 600, pairs, (*pairs, collected), nccl, all_run=True),
        Part("pack", 180, measured("pack"), (*bench, "--help")),
        Part("sanitizer", 300, sanitizer, (*kernels, collected), needs="compute-sanitizer"),
        Part("overhead", 600, measured("one"), (*rehearsed, "one")),
        Part("ddp", 600, measured("two"), (*rehearsed, "two")),
    ]
    return [Part("install", 240, install, shown), *found] if wheels else found


def install(wheels: Path, dry_run: bool) -> int:
    """Install what is lacking, and build the extension where that is possible."""
    from importlib.metadata import PackageNotFoundError, version

    status = 0
    for name in (*WHEELS, *PLUGINS, *_cupy()):
        try:
            print(f"{name} {version(name)} is installed", flush=True)
        except PackageNotFoundError:
            pip = (PYTHON, "-m", "pip", "install", "-q", "--no-index", "--find-links", str(wheels))
            words = (*pip, *(("--dry-run",) if dry_run else ()), name)
            print(shlex.join(words), flush=True)
            status |= subprocess.run(words).returncode
    build = (PYTHON, "setup.py", "-q", "build_ext", "--inplace")
    print(shlex.join(build), flush=True)
    if not dry_run and subprocess.run(build, cwd=ROOT).returncode:
        print("the extension was not built: packing on the host goes through NumPy", flush=True)
    return status


def _cupy() -> tuple[str, ...]:
    """The CuPy for the CUDA that PyTorch is built for, where there is none."""
    if find_spec("cupy") is not None:
        return ()
    import torch

    major = (torch.version.cuda or "").partition(".")[0]
    return (f"cupy-cuda{major}x",) if major else ()


def run(part: Part, limit_s: float, out: Path, dry_run: bool) -> Outcome:
    """Run one part, and keep what it prints.

    Args:
        part: to run.
        limit_s: seconds that it may take, behind which its processes are ended.
        out: folder for its output.
        dry_run: whether its rehearsal is run in its place.
    """
    if part.needs and not dry_run and shutil.which(part.needs) is None:
        return Outcome(part.name, "left out", 0.0, f"{part.needs} is not installed", "")
    log = out / f"{part.name}.log"
    words = part.rehearsal if dry_run else part.command
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {
        **as_root,
        **os.environ,
        **dict(part.env),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    begin_s = time.monotonic()
    with log.open("w") as file:
        print(f"$ {shlex.join(words)}", file=file, flush=True)
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(limit_s)
            verdict = "failed" if status else "passed"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            verdict = "timed out"
    text = log.read_text(errors="replace")
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    if verdict == "passed" and part.all_run and re.search(r"\b\d+ skipped\b", last):
        verdict = "failed"
    return Outcome(part.name, verdict, time.monotonic() - begin_s, last[-200:], str(log))


def main(words: Sequence[str]) -> int:
    """Run the parts that are due; 1 where any has not passed."""
    options = arguments(words)
    if options.install:
        return install(options.install, options.dry_run)
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    (out / "hello.py").write_text(HELLO)
    summary = out / "summary.json"
    before = json.loads(summary.read_text()) if summary.exists() else []
    outcomes = {each["name"]: Outcome(**each) for each in before}
    wheels = options.wheels.resolve() if options.wheels else None
    known = parts(out, wheels)
    chosen = [part for part in known if not options.parts or part.name in options.parts]
    end_s = time.monotonic() + 60 * options.budget_minutes
    for part in chosen:
        done = outcomes.get(part.name)
        if not options.parts and done is not None and done.verdict == "passed":
            print(f"{part.name}: has passed before", flush=True)
            continue
        left_s = end_s - time.monotonic()
        if left_s < 1:
            outcome = Outcome(part.name, "left out", 0.0, "the time budget is spent", "")
        else:
            outcome = run(part, min(part.limit_s, left_s), out, options.dry_run)
        outcomes[part.name] = outcome
        summary.write_text(json.dumps([asdict(each) for each in outcomes.values()], indent=1))
        print(f"{part.name}: {outcome.verdict} in {outcome.seconds:.0f} s: {outcome.told}")
        sys.stdout.flush()
    return int(any(outcomes[part.name].verdict != "passed" for part in chosen))


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="for all output")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install first")
    parser.add_argument("--budget-minutes", type=float, default=45.0)
    parser.add_argument("--dry-run", action="store_true", help="needs no GPU")
    parser.add_argument("--install", type=Path, help=argparse.SUPPRESS)  # the part of that name
    names = [part.name for part in parts(Path(), Path())]
    parser.add_argument("--parts", nargs="+", choices=names, help="only these, also once more")
    return parser.parse_args(words)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
