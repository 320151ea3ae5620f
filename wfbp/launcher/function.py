"""``wfbp.run``: calls a function on several ranks of this machine, as from a notebook."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

import cloudpickle

from wfbp.errors import BackendError, PeerError, WfbpError
from wfbp.launcher.commands import LaunchSpec, mpirun_command, rank_program
from wfbp.launcher.hosts import choose_master
from wfbp.launcher.mpi import find_mpi
from wfbp.launcher.rank import RANK, RANK_OF_MPI, number

T = TypeVar("T")

LAST_LINES = 20
"""Lines of ``mpirun``'s standard error in an error's message."""
_GRACE_S = 10.0


def run(
    function: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int = 1,
) -> list[T]:
    """Call a function on every rank of a job on this machine, and wait for its end.

    cloudpickle sends the function, so it may be defined in a notebook. The ranks start as by
    ``wfbprun``, with this process's environment, working directory and ``sys.path``. Their output
    is shown here. For several hosts use ``wfbprun``, or :func:`wfbp.integrations.ray.run`.

    Args:
        function: calls ``wfbp.init()`` and trains.
        args: positional arguments, the same on every rank.
        kwargs: arguments by name.
        np: number of ranks.

    Returns:
        The function's results, by rank.

    Raises:
        ValueError: ``np`` is below 1.
        WfbpError: the function failed on a rank, whose traceback the message has; its error is the
            cause. Or this process is itself a rank of a job.
        BackendError: the job could not be started, or a rank was killed.

    Example:
        >>> import wfbp
        >>> def task(text):
        ...     wfbp.init()
        ...     return f"{text}, rank {wfbp.rank()}"
        >>> wfbp.run(task, ("hello",), np=2)  # doctest: +SKIP
        ['hello, rank 0', 'hello, rank 1']
    """
    if number(RANK_OF_MPI[:2], os.environ) is not None:
        raise WfbpError(
            "run() starts a job, but this process already is a rank of one; call the function "
            "itself, or start the program without mpirun or wfbprun"
        )
    mpi = find_mpi()
    with tempfile.TemporaryDirectory(prefix="wfbp-run-") as folder:
        task = cloudpickle.dumps((function, tuple(args), dict(kwargs or {})))
        Path(folder, "task").write_bytes(cloudpickle.dumps((list(sys.path), task)))
        program = [sys.executable, "-m", __spec__.name, folder]
        settings = ["--torch-env", choose_master(()), "--cores"]
        job = LaunchSpec(np, rank_program(program, settings))
        words, variables = mpirun_command(job, mpi, os.environ, os.geteuid() == 0)
        status, last = _execute(words, os.environ | variables)
        files = [Path(folder, f"{rank}.outcome") for rank in range(np)]
        outcomes = [cloudpickle.loads(f.read_bytes()) if f.exists() else None for f in files]
    return results(outcomes, status, last)


def _execute(words: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """Run ``mpirun`` and show its output; returns its status and the last lines of its errors."""
    last: deque[str] = deque(maxlen=LAST_LINES)
    with subprocess.Popen(
        words,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            # Through Python's streams: a notebook shows nothing else.
            reader = threading.Thread(target=_show, args=(process.stdout, sys.stdout, deque()))
            reader.start()
            _show(process.stderr, sys.stderr, last)
            reader.join()
        except BaseException:
            process.terminate()
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    return process.returncode, "".join(last)


def _show(source: IO[str], target: Any, last: deque[str]) -> None:
    for line in source:
        target.write(line)
        last.append(line)


def results(outcomes: Sequence[tuple[Any, ...] | None], status: int, output: str) -> list[Any]:
    """The results of all ranks; raises the error of the rank that failed first."""
    failures = [(rank, *o[1:]) for rank, o in enumerate(outcomes) if o and o[0] == "raised"]
    if failures:  # the first cause first, not the PeerErrors that followed from it
        failures.sort(key=lambda failure: isinstance(failure[1], PeerError))
        rank, error, text = failures[0]
        raise WfbpError(f"rank {rank} failed:\n{text}") from error
    missing = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
    if missing or status:
        lost = f"; no result of ranks {', '.join(map(str, missing))}" if missing else ""
        raise BackendError(f"mpirun ended with status {status}{lost}\n{output}".rstrip())
    return [outcome[1] for outcome in outcomes if outcome is not None]


def call(task: bytes, outcome: Path) -> None:
    """On a rank: call a pickled function with its arguments, and write its result or its error."""
    try:
        function, arguments, options = cloudpickle.loads(task)
        returned = cloudpickle.dumps(("returned", function(*arguments, **options)))
    except BaseException as error:
        text = traceback.format_exc()
        try:
            left = cloudpickle.dumps(("raised", error, text))
            cloudpickle.loads(left)
        except Exception:  # the error cannot be pickled; its text can
            left = cloudpickle.dumps(("raised", None, text))
        outcome.write_bytes(left)
        raise
    outcome.write_bytes(returned)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    sys.path[:], content = cloudpickle.loads(place.joinpath("task").read_bytes())
    call(content, place / f"{number(RANK, os.environ)}.outcome")
