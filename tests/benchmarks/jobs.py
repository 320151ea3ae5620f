"""Jobs that benchmarks start: programs of some ranks, in shared memory or over an emulated link."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

LINKS = ("none", "1gbit", "5gbit", "10gbit", "25gbit")
LINK_SCRIPT = Path(__file__).parents[2] / "tools" / "link.py"
GRACE_S = 30.0
"""A launcher that is told to end may have ranks to end and a link to remove."""


def names(known: Collection[str]) -> Callable[[str], list[str]]:
    """A parser of comma-separated names that are known."""

    def parse(text: str) -> list[str]:
        found = [name for name in text.split(",") if name]
        unknown = [name for name in found if name not in known]
        if unknown or not found:
            raise argparse.ArgumentTypeError(
                f"unknown: {', '.join(unknown)}; expected some of {', '.join(known)}"
            )
        return found

    return parse


def document_of(
    words: Sequence[str],
    link: str = "none",
    ranks: int = 2,
    hosts: int = 2,
    variables: Mapping[str, str] = MappingProxyType({}),
    timeout_s: float | None = None,
) -> dict[str, Any] | None:
    """The JSON that a Python program of some ranks prints; None, and a message, if it fails.

    Args:
        words: the program and its arguments, after ``python``.
        link, ranks, hosts: see :func:`launch_command`.
        variables: of the ranks, added to :func:`rank_environment`.
        timeout_s: the job is told to end after this.
    """
    command = [*launch_command(link, ranks, hosts), sys.executable, *words]
    environment = rank_environment()
    if link != "none":
        environment.pop("GLOO_SOCKET_IFNAME")  # the link sets it
    status, output = run_job(command, environment | dict(variables), timeout_s)
    if status:
        print(f"failed with status {status}: {shlex.join(command)}", file=sys.stderr)
        return None
    document: dict[str, Any] = json.loads(output)
    return document


def launch_command(link: str, ranks: int, hosts: int = 2) -> list[str]:
    """The words before the program: ``mpirun``, or the link's script for a link of that rate.

    Args:
        link: rate of the link between the hosts, or "none".
        ranks: their number.
        hosts: number of hosts with a link.

    Raises:
        SystemExit: the launcher is missing.
    """
    if link == "none":
        beside = Path(sys.executable).with_name("mpirun")
        mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
        if mpirun is None:
            raise SystemExit("mpirun not found: pip install mpich")
        return [mpirun, "-np", str(ranks)]
    if not LINK_SCRIPT.exists():
        raise SystemExit(f"--link needs a checkout of the project: {LINK_SCRIPT} not found")
    placed = ["--hosts", str(hosts), "--rate", link, "-np", str(ranks)]
    placed += ["--expect-bytes", "1000000"]  # more than starting a job takes
    return [sys.executable, str(LINK_SCRIPT), "run", *placed, "--"]


def rank_environment() -> dict[str, str]:
    """One compute thread per rank; Open MPI may start as root and put ranks where it likes."""
    defaults = {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
    }
    root = str(Path(__file__).parents[2])  # where the ranks find this package
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    own = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": path}
    return defaults | os.environ | own


def run_job(
    command: Sequence[str], env: Mapping[str, str], timeout_s: float | None = None
) -> tuple[int, str]:
    """Exit status and output of a job; if this program is stopped, the job is told to end first.

    Raises:
        subprocess.TimeoutExpired: it took longer.
        KeyboardInterrupt: this program was interrupted or terminated.

    Example:
        >>> run_job(["echo", "done"], {})
        (0, 'done\\n')
    """
    with (
        _terminations_raised(),
        subprocess.Popen(command, env=dict(env), stdout=subprocess.PIPE, text=True) as job,
    ):
        try:
            output, _ = job.communicate(timeout=timeout_s)
        except BaseException:
            job.terminate()
            try:
                job.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                job.kill()
            raise
        return job.returncode, output


@contextmanager
def _terminations_raised() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
