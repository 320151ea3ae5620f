"""Everything that needs a GPU, in one command of at most eight minutes.

    python tests/gpu/run_all.py                    # all parts
    python tests/gpu/run_all.py --again two jax    # these once more, with NCCL_DEBUG=INFO

The parts follow one another from the simplest to the most complex. Each has a time limit, and one
that fails stops no other. ``results.tar`` in the folder ``--out`` (or ``$OUT``) grows part by part,
so that a run that is cut short keeps what it has. ``--again`` without names repeats what has not
passed according to ``summary.json`` in that folder.

No network is needed: missing packages are installed from ``--wheels``, into the environment of the
interpreter that runs this, because ``mpirun`` belongs beside it. The C++ extension is compiled.

``--dry-run`` needs no GPU: training runs on a software device, and other parts show that their
tests exist.
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
import sysconfig
import tarfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = sys.executable
PACKAGES = ("mpich", "mpi4py", "psutil", "pybind11", "hypothesis", "pytest", "pytest-timeout")
PACKAGES += ("ml_dtypes", "click", "cloudpickle", "rich", "optax")
"""What the package and its tests import, beside PyTorch, JAX and CuPy."""

SCHEDULES = ("auto", "layerwise", "independent", "hybrid")
BUDGET_S = 450.0
LEAST_S = 10.0
"""A part for which less is left is not begun."""
SLOWER = 3
"""A dry run may take so many times as long: it shares its cores with other tests."""
KEPT_BYTES = 1 << 20
"""Of each file of output, its end."""
DUMP_S = 2.0
"""For the stacks of the ranks of a part that takes too long."""


@dataclass(frozen=True, slots=True)
class Part:
    """One question, and the command that answers it.

    Args:
        name: as ``--parts`` has it.
        question: what it answers.
        limit_s: seconds that it may take.
        command: what is run.
        rehearsal: what a dry run runs instead.
        all_run: whether a skipped test counts as failed.
        needs: a program without which the part is left out.
    """

    name: str
    question: str
    limit_s: float
    command: tuple[str, ...]
    rehearsal: tuple[str, ...]
    all_run: bool = False
    needs: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a part.

    Args:
        name: of the part.
        verdict: ``passed``, ``failed``, ``timed out`` or ``left out``.
        seconds: that it took.
        last: its last line, or the reason why it was left out.
    """

    name: str
    verdict: str
    seconds: float
    last: str


def parts(out: Path, wheels: Path) -> list[Part]:
    """The parts, in order. Each writes into a folder of its name in ``out``."""
    pytest = (PYTHON, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-m", "gpu")
    pytest += ("-W", "default")  # a warning of that machine's libraries must hide no answer
    ranks = (str(Path(PYTHON).with_name("mpirun")), "-n", "2", PYTHON)
    sanitizer = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "1")

    def own(name: str, question: str, limit_s: float, option: str, *words: str) -> Part:
        return Part(name, question, limit_s, words, (*words, option))

    def tests(
        name: str, question: str, limit_s: float, *words: str, before: tuple[str, ...] = ()
    ) -> Part:
        command = (*pytest, *words)
        rehearsal = (*command, "--collect-only")
        needs = before[0] if before else ""
        return Part(name, question, limit_s, (*before, *command), rehearsal, True, needs)

    def torch(name: str, question: str, limit_s: float, number: str, library: str) -> Part:
        words = (*ranks[:2], number, PYTHON, "tests/gpu/training_program.py", str(out / name))
        words += (library, "--schedules", *SCHEDULES)
        return own(name, question, limit_s, "--software", *words)

    def jax(name: str, question: str, limit_s: float, library: str) -> Part:
        words = (*ranks, "tests/gpu/jax_program.py", str(out / name), library)
        return own(name, question, limit_s, "--software", *words)

    prepare = (PYTHON, "tests/gpu/run_all.py", "--prepare", "--wheels", str(wheels))
    start = (*ranks, "tests/gpu/start_program.py")
    speed = (PYTHON, "-m", "tests.benchmarks", "gpu", "--parts", "pack", "--rounds", "10")
    speed += ("--json", str(out / "speed" / "speed.json"))
    device = ("tests/gpu/test_training.py", "-k", "not two_ranks")
    kernels = "tests/gpu/test_pack.py"
    few = ("-k", "every_size or more_tensors or captured")
    return [
        own("prepare", "is all there, and is the extension compiled", 120, "--dry-run", *prepare),
        own("start", "do two ranks start", 60, "--without-gpu", *start),
        tests("device", "do streams, events, memory and NCCL work", 60, *device),
        torch("one", "does one rank train over NCCL", 60, "1", "NCCL"),
        torch("two", "do two ranks train as one over NCCL", 80, "2", "NCCL"),
        torch("staged", "and through host memory", 60, "2", "STAGED"),
        jax("jax", "do two ranks train as one with JAX", 100, "NCCL"),
        jax("jax_staged", "and through host memory", 60, "STAGED"),
        tests("pack", "do the kernels pack correctly", 60, kernels),
        own("speed", "how fast are the kernels", 40, "--rehearse", *speed),
        tests("sanitizer", "do they stay within memory", 80, kernels, *few, before=sanitizer),
    ]


def prepare(wheels: Path, dry_run: bool) -> int:
    """Install missing packages and compile the extension; 1 if anything is missing after that."""
    missing = []
    for name in PACKAGES:
        try:
            print(f"{name} {version(name)} is installed", flush=True)
        except PackageNotFoundError:
            missing.append(name)
    for name in list(missing):
        pip = (PYTHON, "-m", "pip", "install", "-q", "--no-index", "--no-deps")
        words = (*pip, "--find-links", str(wheels), *(("--dry-run",) if dry_run else ()), name)
        print(shlex.join(words), flush=True)
        if subprocess.run(words).returncode == 0:
            missing.remove(name)
    problems = [f"{name} is missing: bring its wheel, in {wheels}" for name in missing]
    try:
        if not dry_run:
            compile_extension()
        subprocess.run((PYTHON, "-c", "import wfbp._native"), cwd=ROOT, check=True)
    except (OSError, ImportError, subprocess.CalledProcessError) as error:
        problems.append(f"the extension was not built: {error}")
    print("; ".join(problems) or "all is there", flush=True)
    return int(bool(problems))


def compile_extension() -> None:
    """Compile ``wfbp._native`` unless it is newer than its sources; ``CalledProcessError``."""
    # Not by setup.py: it needs a new setuptools, and would compile the handlers for JAX, too.
    import pybind11

    target = ROOT / "wfbp" / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    sources = [ROOT / "csrc" / f"{name}.cc" for name in ("native", "pack", "transfers")]
    newest_s = max(path.stat().st_mtime for path in (ROOT / "csrc").iterdir())
    if target.exists() and target.stat().st_mtime > newest_s:
        return
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    include = [f"-I{path}" for path in (pybind11.get_include(), sysconfig.get_path("include"))]
    options = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-pthread", *include]
    objects = [target.with_name(f"{source.stem}.o") for source in sources]

    def run(*words: str) -> None:
        print(shlex.join([*compiler, *words]), flush=True)
        subprocess.run([*compiler, *words], check=True)

    def compile_one(source: Path, made: Path) -> None:
        run(*options, "-c", str(source), "-o", str(made))

    try:
        with ThreadPoolExecutor() as threads:
            list(threads.map(compile_one, sources, objects))
        run("-shared", "-pthread", *map(str, objects), "-o", str(target))
    finally:
        for made in objects:
            made.unlink(missing_ok=True)


def run(part: Part, limit_s: float, out: Path, dry_run: bool, again: bool = False) -> Outcome:
    """Run one part.

    Args:
        part: to run.
        limit_s: seconds after which its processes are ended.
        out: its output goes into a folder of its name there.
        dry_run: whether its rehearsal is run instead.
        again: whether NCCL logs what it does.
    """
    if part.needs and not dry_run and shutil.which(part.needs) is None:
        return Outcome(part.name, "left out", 0.0, f"{part.needs} is not installed")
    folder = out / part.name
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log.txt"
    words = part.rehearsal if dry_run else part.command
    begin_s = time.monotonic()
    with log.open("w") as file:
        print(f"$ {shlex.join(words)}", file=file, flush=True)
        try:
            process = subprocess.Popen(
                words,
                cwd=ROOT,
                env=_environment(folder, again),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:  # such as a program that does not exist
            print(error, file=file)
            return Outcome(part.name, "failed", 0.0, str(error))
        try:
            verdict = "failed" if process.wait(limit_s) else "passed"
        except subprocess.TimeoutExpired:
            _end(process)
            verdict = "timed out"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if verdict == "passed" and part.all_run and re.search(r"\b\d+ skipped\b", lines[-1]):
        verdict = "failed"
    return Outcome(part.name, verdict, time.monotonic() - begin_s, lines[-1][:200])


def _environment(folder: Path, again: bool) -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    caches = ROOT / "build" / "gpu"
    debug = {"NCCL_DEBUG": "WARN"}
    if again:
        debug = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(folder / "nccl.%h.%p.txt")}
    return {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "XDG_CACHE_HOME": str(caches),  # compiled handlers for JAX
        "CUPY_CACHE_DIR": str(caches / "cupy"),
        **os.environ,
        **debug,
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part and all that it has started, in other sessions too: ranks that are left would use
    the GPU beside the next part. Python processes print their stacks first."""
    try:
        import psutil
    except ImportError:  # ``prepare`` itself, which is to install it
        os.killpg(process.pid, signal.SIGKILL)
    else:
        first = psutil.Process(process.pid)
        family = [first, *first.children(recursive=True)]
        for each in family:
            with suppress(psutil.Error):
                if each.name().startswith("python"):
                    each.send_signal(signal.SIGABRT)
        psutil.wait_procs(family, timeout=DUMP_S)
        for each in family:
            with suppress(psutil.Error):
                each.kill()
    process.wait()


def keep(out: Path, name: str) -> None:
    """Move a part's folder into the archive, each file's end at most."""
    folder = out / name
    with tarfile.open(out / "results.tar", "a") as archive:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                if file.stat().st_size > KEPT_BYTES:
                    with file.open("rb") as long:
                        long.seek(-KEPT_BYTES, os.SEEK_END)
                        end = long.read()
                    file.write_bytes(end)
                archive.add(file, str(file.relative_to(out)))
    shutil.rmtree(folder, ignore_errors=True)


def table(chosen: Sequence[Part], outcomes: dict[str, Outcome]) -> str:
    """All outcomes, with their times and last lines."""
    rows = [f"{'part':10} {'verdict':9} {'s':>5}  question; last line of its log"]
    for part in chosen:
        each = outcomes[part.name]
        rows.append(f"{part.name:10} {each.verdict:9} {each.seconds:5.1f}  {part.question}?")
        rows.append(f"{'':27}{each.last}")
    total_s = sum(outcomes[part.name].seconds for part in chosen)
    return "\n".join([*rows, f"{'together':20} {total_s:5.1f}"])


def main(words: Sequence[str]) -> int:
    """Run the parts; 1 if any has not passed."""
    options = arguments(words)
    wheels: Path = options.wheels.resolve()
    if options.prepare:
        return prepare(wheels, options.dry_run)
    end_s = time.monotonic() + options.budget_s
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    summary = out / "summary.json"
    known = parts(out, wheels)
    names = set(options.parts or [part.name for part in known])
    again = options.again is not None
    if again:
        last = json.loads(summary.read_text()) if summary.exists() else []
        passed = {each["name"] for each in last if each["verdict"] == "passed"}
        names = {"prepare", *(options.again or names - passed)}
    (out / "results.tar").unlink(missing_ok=True)
    chosen = [part for part in known if part.name in names]
    outcomes: dict[str, Outcome] = {}
    for part in chosen:
        left_s = end_s - time.monotonic()
        if left_s < LEAST_S:
            outcome = Outcome(part.name, "left out", 0.0, "no time is left")
        else:
            limit_s = min(part.limit_s * (SLOWER if options.dry_run else 1), left_s)
            outcome = run(part, limit_s, out, options.dry_run, again)
            keep(out, part.name)
        outcomes[part.name] = outcome
        summary.write_text(json.dumps([asdict(each) for each in outcomes.values()], indent=1))
        print(f"{part.name}: {outcome.verdict} in {outcome.seconds:.1f} s", flush=True)
    failed = [name for name, each in outcomes.items() if each.verdict != "passed"]
    (out / "table.txt").write_text(shown := table(chosen, outcomes))
    with tarfile.open(out / "results.tar", "a") as archive:
        for file in (summary, out / "table.txt"):
            archive.add(file, file.name)
    print(f"\n{shown}\nall output: {out / 'results.tar'}")
    if failed and not again:
        rest = shlex.join(["--out", str(options.out), "--again", *failed])
        print(f"once more, with NCCL's log: python tests/gpu/run_all.py {rest}")
    return int(bool(failed))


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    names = [part.name for part in parts(Path(), Path())]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    out = Path(os.environ.get("OUT", "gpu-results"))
    parser.add_argument("--out", type=Path, default=out, help=f"for all output (default: {out})")
    parser.add_argument(
        "--wheels", type=Path, default=ROOT / "wheelhouse", help="of missing packages"
    )
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="for everything")
    parser.add_argument("--dry-run", action="store_true", help="needs no GPU")
    parser.add_argument("--parts", nargs="+", choices=names, help="only these")
    parser.add_argument(
        "--again", nargs="*", metavar="PART", help="what has failed, with NCCL_DEBUG=INFO"
    )
    parser.add_argument("--prepare", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if unknown := set(options.again or ()) - set(names):
        parser.error(f"--again names {', '.join(sorted(unknown))}; expected {', '.join(names)}")
    return options


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
