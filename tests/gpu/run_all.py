"""All that a GPU is wanted for, in one command with a time budget, and its output kept.

    python tests/gpu/run_all.py --out runs/gpu --wheels wheels --budget-minutes 45

Parts follow one another in the order of what they tell: whether two ranks start, whether the device
and the kernels do what they should, whether two ranks train as one, and only then how fast all that
is. Each has a time limit, and what it prints is kept in a file of its own as it comes, so that a
run that is cut short has told what it could; one that fails stops no other. A part for which too
little of the budget is left is not begun.

Where commands may last some minutes only, call it again with the same ``--out`` and a small budget
(``--budget-minutes 9``): what has passed is not run again, what has not been tried comes before
what has failed. ``--parts`` chooses some, also those that have passed.

No network is needed: ``--wheels`` is a folder of wheels brought along, of those in :data:`WHEELS`
what the machine lacks. They are installed into the environment of the interpreter that runs this,
because ``mpirun`` must lie beside it. Without it the first part tells what is missing.

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
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON = sys.executable
WHEELS = ("mpich", "mpi4py", "psutil", "pybind11", "hypothesis", "pytest")
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
        question: what it answers.
        limit_s: seconds that it may take.
        least_s: seconds without which it is not begun.
        command: what is run.
        rehearsal: what a dry run runs in its place.
        env: variables beside those of this process.
        all_run: whether a test that is skipped counts as failed.
        needs: a program without which the part is left out.
    """

    name: str
    question: str
    limit_s: float
    least_s: float
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
    # A warning of some library on that machine shall hide no answer.
    pytest = (PYTHON, "-m", "pytest", "-q", "-rs", "-W", "default", "-p", "no:cacheprovider")
    bench = (PYTHON, "-m", "tests.benchmarks", "gpu")
    hello = (str(Path(PYTHON).with_name("mpirun")), "-n", "2", PYTHON, str(out / "hello.py"))
    gpu = (*pytest, "-m", "gpu", "tests/gpu")
    single = (*gpu, "-k", "not two_ranks")
    kernels = (*pytest, "-m", "gpu", "tests/gpu/test_pack.py")
    sanitizer = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "1", *kernels)
    own = (PYTHON, str(Path(__file__).resolve()), "--install", str(wheels or ""))
    collected = "--collect-only"
    nccl = (("NCCL_DEBUG", "INFO"), ("NCCL_DEBUG_FILE", str(out / "nccl.%h.%p.log")))

    def pair(name: str, question: str, words: str) -> Part:
        command = (*gpu, "-k", words)
        return Part(name, question, 540, 120, command, (*command, collected), nccl, all_run=True)

    def measured(name: str, question: str, limit_s: float, *words: str) -> Part:
        file = str(out / f"{name}.json")
        rehearsal = (*bench, "--rehearse", *words, "--rounds", "2", "--json", file)
        return Part(name, question, limit_s, 90, (*bench, *words, "--json", file), rehearsal)

    one, two = ("--parts", "one", "--rounds", "15"), ("--parts", "two", "--rounds", "15")
    costs, ddp = "what does wfbp cost a single rank", "is wfbp as fast as DDP on two ranks"
    return [
        Part("install", "is all there that is needed", 240, 10, own, (*own, "--dry-run")),
        Part("hello", "do two ranks find each other", 90, 20, hello, (*hello, "--without-gpu")),
        Part(
            "single",
            "do device, streams and kernels do what they should",
            420,
            90,
            single,
            (*single, collected),
        ),
        pair("two_ranks", "do two ranks train as one", "two_ranks_train_as_one"),
        pair("two_ranks_jax", "do two ranks train as one with JAX", "two_ranks_train_with_jax"),
        measured("pack", "how fast are the kernels", 180, "--parts", "pack"),
        Part(
            "sanitizer",
            "do the kernels touch what they must not",
            300,
            90,
            sanitizer,
            (*kernels, collected),
            needs="compute-sanitizer",
        ),
        measured("overhead_resnet50", f"{costs}, ResNet-50", 400, *one, "--models", "resnet50"),
        measured("overhead_gpt", f"{costs}, GPT", 400, *one, "--models", "gpt"),
        measured("ddp_gpt", f"{ddp}, GPT", 400, *two, "--timed-only", "--models", "gpt"),
        measured(
            "ddp_resnet50", f"{ddp}, ResNet-50", 400, *two, "--timed-only", "--models", "resnet50"
        ),
        measured("schedules", "does every schedule train the same", 560, *two, "--models", "gpt"),
    ]


def install(wheels: Path | None, dry_run: bool) -> int:
    """Install what is lacking, and build the extension where that is possible; 1 where something
    is missing."""
    from importlib.metadata import PackageNotFoundError, version

    status = 0
    for name in (*WHEELS, *PLUGINS, *_cupy()):
        try:
            print(f"{name} {version(name)} is installed", flush=True)
        except PackageNotFoundError:
            if wheels is None:
                print(f"{name} is missing: bring its wheel, in the folder of --wheels", flush=True)
                status = 1
                continue
            pip = (PYTHON, "-m", "pip", "install", "-q", "--no-index", "--find-links", str(wheels))
            words = (*pip, *(("--dry-run",) if dry_run else ()), name)
            print(shlex.join(words), flush=True)
            if subprocess.run(words).returncode:
                status = 1
    build = (PYTHON, "setup.py", "-q", "build_ext", "--inplace")
    print(shlex.join(build), flush=True)
    if not dry_run and subprocess.run(build, cwd=ROOT).returncode:
        print("the extension was not built: packing on the host goes through NumPy", flush=True)
    print("something is missing" if status else "all is there", flush=True)
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
        try:
            process = subprocess.Popen(
                words,
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:  # such as a program that is not there
            print(error, file=file)
            return Outcome(part.name, "failed", 0.0, str(error), str(log))
        try:
            status = process.wait(limit_s)
            verdict = "failed" if status else "passed"
        except subprocess.TimeoutExpired:
            _end(process)
            verdict = "timed out"
    text = log.read_text(errors="replace")
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    if verdict == "passed" and part.all_run and re.search(r"\b\d+ skipped\b", last):
        verdict = "failed"
    return Outcome(part.name, verdict, time.monotonic() - begin_s, last[:200], str(log))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part with all that it has started, also in sessions of their own: ranks that are left
    would use the GPU beside the next part."""
    try:
        import psutil

        family = psutil.Process(process.pid).children(recursive=True)
    except ImportError:  # the first part is to install it
        family = []
    os.killpg(process.pid, signal.SIGKILL)
    for each in family:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


def main(words: Sequence[str]) -> int:
    """Run the parts that are due; 1 where any has not passed."""
    options = arguments(words)
    if options.install is not None:
        return install(Path(options.install) if options.install else None, options.dry_run)
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    (out / "hello.py").write_text(HELLO)
    summary = out / "summary.json"
    before = json.loads(summary.read_text()) if summary.exists() else []
    outcomes = {each["name"]: Outcome(**each) for each in before}
    wheels = options.wheels.resolve() if options.wheels else None
    known = parts(out, wheels)
    chosen = [part for part in known if not options.parts or part.name in options.parts]
    tried = {name for name, each in outcomes.items() if each.verdict != "left out"}
    end_s = time.monotonic() + 60 * options.budget_minutes
    for part in sorted(chosen, key=lambda part: part.name in tried):
        done = outcomes.get(part.name)
        if not options.parts and done is not None and done.verdict == "passed":
            continue
        left_s = end_s - time.monotonic()
        if left_s >= min(part.least_s, part.limit_s):
            outcome = run(part, min(part.limit_s, left_s), out, options.dry_run)
        elif part.name in tried:
            continue
        else:
            told = "too little of the time budget is left: run it again"
            outcome = Outcome(part.name, "left out", 0.0, told, "")
        outcomes[part.name] = outcome
        ordered = [outcomes[each.name] for each in known if each.name in outcomes]
        summary.write_text(json.dumps([asdict(each) for each in ordered], indent=1))
        print(f"{part.name}: {outcome.verdict} in {outcome.seconds:.0f} s", flush=True)
    print(f"\n{'part':18} {'verdict':10} {'s':>4}  question; last line of its log in {out}")
    for part in chosen:
        each = outcomes[part.name]
        print(f"{part.name:18} {each.verdict:10} {each.seconds:4.0f}  {part.question}?")
        print(f"{'':36}{each.told}", flush=True)
    return int(any(outcomes[part.name].verdict != "passed" for part in chosen))


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="for all output")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install first")
    parser.add_argument("--budget-minutes", type=float, default=45.0)
    parser.add_argument("--dry-run", action="store_true", help="needs no GPU")
    parser.add_argument("--install", help=argparse.SUPPRESS)  # the part of that name
    names = [part.name for part in parts(Path(), None)]
    parser.add_argument("--parts", nargs="+", choices=names, help="only these, also once more")
    return parser.parse_args(words)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
