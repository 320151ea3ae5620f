"""Ranks that are forks of a process which has imported PyTorch or JAX already.

These imports take several seconds of a core, more than most jobs do. :func:`servers` starts two
servers, because processes that start by themselves differ in their hash seeds: so do neighbouring
ranks. ``mpirun`` then starts ``forked_rank.py``, which gives its environment, its streams and its
connection to the launcher to a fork of a server. If one of the two ends, so does the other.

Usage: python -m tests.support.fork_server SOCKET SESSION MODULE ..., where SESSION is the process
of the test session, which the server does not outlive.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.support.shared import SESSION, session_folder

PRELOADED = {
    "torch": ("torch", "torch._dynamo", "pytest"),
    "jax": ("jax", "jax.numpy", "optax", "pytest"),
    "torch and jax": ("torch", "torch._dynamo", "jax", "jax.numpy"),
}
"""Modules that servers import, by kind."""

NUM_SERVERS = 2
"""Of each kind; ``forked_rank.py`` knows it."""

ROOT = Path(__file__).resolve().parents[2]
START_S = 100.0
RANK_PROGRAM = Path(__file__).with_name("forked_rank.py")


def servers(kind: str, python: Path, ranks: int) -> Path | None:
    """The folder with the sockets of the servers of so many ranks; None outside a test session.

    Args:
        kind: of :data:`PRELOADED`.
        python: the interpreter, which determines the MPI library.
        ranks: number of ranks.
    """
    if (session := session_folder()) is None:
        return None
    folder = session / f"{kind}-{python.parents[1].name}"
    folder.mkdir(exist_ok=True)
    numbers = range(min(ranks, NUM_SERVERS))
    started = [_start(folder / f"{number}", kind, python) for number in numbers]
    deadline = time.monotonic() + START_S
    for socket_path in started:
        while not socket_path.exists():
            assert time.monotonic() < deadline, socket_path.with_suffix(".log").read_text()
            time.sleep(0.02)
    return folder


def _start(socket_path: Path, kind: str, python: Path) -> Path:
    """Start a server unless a process of this session has done so."""
    try:
        log = socket_path.with_suffix(".log").open("x")
    except FileExistsError:
        return socket_path
    words = [python, "-m", __name__, socket_path, os.environ[SESSION], *PRELOADED[kind]]
    with log:
        subprocess.run(  # which returns at once: the server goes to the background
            [str(word) for word in words],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            check=True,
        )
    return socket_path


def serve(path: Path, session: int) -> list[str]:
    """Fork for each rank that connects; returns its arguments, in the forked process alone."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path.with_suffix(".new")))
    listener.listen()
    path.with_suffix(".new").rename(path)
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    ranks: dict[socket.socket, int] = {}
    while path.exists() and Path(f"/proc/{session}").exists():
        readable, _, _ = select.select([listener, ended, *ranks], [], [], 1.0)
        for source in readable:
            if source is listener:
                connection, _ = listener.accept()
                try:
                    job, descriptors = _receive(connection)
                except struct.error:  # the launcher has ended this rank meanwhile
                    connection.close()
                    continue
                if (child := os.fork()) == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for other in (listener, connection, *ranks):
                        other.close()
                    return _become(job, descriptors)
                ranks[connection] = child
                for descriptor in descriptors:
                    os.close(descriptor)
            elif source is ended:
                os.read(ended, 1000)
                _report_ends(ranks)
            elif source in ranks:  # its other end is gone: the launcher has ended this rank
                os.kill(ranks[source], signal.SIGKILL)
                os.waitpid(ranks.pop(source), 0)
                source.close()
    for child in ranks.values():
        os.kill(child, signal.SIGKILL)
    os._exit(0)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    size, descriptors, _, _ = socket.recv_fds(connection, 4, 4)
    with connection.makefile("rb") as file:
        return json.loads(file.read(*struct.unpack("I", size))), descriptors


def _become(job: dict[str, Any], descriptors: list[int]) -> list[str]:
    """Take over what the launcher gave the rank; returns the rank's arguments."""
    environment: dict[str, str] = job["environment"]
    *streams, launcher = descriptors if "PMI_FD" in environment else [*descriptors, None]
    for stream, descriptor in enumerate(streams):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    if launcher is not None:
        environment["PMI_FD"] = str(launcher)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(job["folder"])
    folders = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [folder for folder in folders if folder and folder not in sys.path]
    arguments: list[str] = job["arguments"]
    return arguments


def _report_ends(ranks: dict[socket.socket, int]) -> None:
    for connection, child in list(ranks.items()):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            with suppress(OSError):  # the launcher may have ended this rank meanwhile
                connection.sendall(struct.pack("i", code))
            del ranks[connection]
            connection.close()


def run(script: str, *arguments: str) -> None:
    """As ``python SCRIPT ARGUMENT ...`` does, or ``-m MODULE ...``, or ``-c CODE ...``."""
    sys.argv = [script, *arguments]
    if script == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    module = sys.modules["__main__"] = ModuleType("__main__")
    if script == "-c":
        script, source = "<string>", sys.argv.pop(1)
    else:
        source = Path(script).read_text()
        module.__file__ = script
        sys.path[0] = str(Path(script).parent)
    exec(compile(source, script, "exec"), module.__dict__)


if __name__ == "__main__":
    if os.fork():
        os._exit(0)
    for name in sys.argv[3:]:
        importlib.import_module(name)
    gc.freeze()
    run(*serve(Path(sys.argv[1]), int(sys.argv[2])))
