"""Runs on each rank before the program: chooses cores, GPU and output, then becomes the program.

``python -m wfbp.launcher.rank [--cores] [--gpu] [--output DIR] -- PROGRAM ...``. It imports only
the standard library and replaces itself by ``exec``, so signals reach the program directly.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from wfbp.launcher.hosts import expand_counts

RANK = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")
_LOCAL_RANK = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
_LOCAL_SIZE = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")
REMEDY = (
    "expected a program on the PATH, the path of one, or a file that ends in .py, on every host"
)
_MOST_DIGITS = 20
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def share(cores: Sequence[int], local_rank: int, local_size: int) -> list[int]:
    """One rank's contiguous, equal part of the cores; all cores if there are more ranks than cores.

    >>> share([0, 1, 2, 3, 4], 0, 2), share([0, 1, 2, 3, 4], 1, 2), share([0, 1], 2, 3)
    ([0, 1], [2, 3, 4], [0, 1])
    """
    if local_size > len(cores):
        return list(cores)
    begin = len(cores) * local_rank // local_size
    return list(cores)[begin : len(cores) * (local_rank + 1) // local_size]


def number(names: Sequence[str], environment: Mapping[str, str]) -> int | None:
    """The first of these variables that is set, as a number."""
    text = next((environment[name] for name in names if name in environment), "")
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else None


def local_size(environment: Mapping[str, str]) -> int | None:
    size = number(_LOCAL_SIZE, environment)
    if size is None and "SLURM_STEP_TASKS_PER_NODE" in environment:
        counts = expand_counts(environment["SLURM_STEP_TASKS_PER_NODE"])
        node = number(("SLURM_NODEID",), environment)
        return counts[node] if node is not None and node < len(counts) else None
    return size


def prepare(options: Sequence[str], environment: dict[str, str]) -> None:
    """Choose cores, GPU and output; ``ValueError`` for bad options, or ranks without numbers."""
    left = list(options)
    while left:
        option = left.pop(0)
        if option == "--cores":
            rank, size = _place(environment)
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, share(cores, rank, size))
            for name in _THREADS:
                environment.setdefault(name, str(max(1, len(cores) // size)))
        elif option == "--gpu":
            rank, _ = _place(environment)
            devices = list(filter(None, environment.get("CUDA_VISIBLE_DEVICES", "").split(",")))
            own = devices[rank % len(devices)] if devices else str(rank)
            environment["CUDA_VISIBLE_DEVICES"] = own
        elif option == "--output" and left:
            _redirect(Path(left.pop(0)), number(RANK, environment))
        else:
            raise ValueError(f"wfbp.launcher.rank does not know the option {option!r}")


def _place(environment: Mapping[str, str]) -> tuple[int, int]:
    rank, size = number(_LOCAL_RANK, environment), local_size(environment)
    if rank is None or size is None:
        raise ValueError(
            "the launcher does not tell this rank its number on the host (neither "
            f"{_LOCAL_RANK[0]} nor {_LOCAL_RANK[1]} is set): start without binding to cores or GPUs"
        )
    return rank, size


def _redirect(directory: Path, rank: int | None) -> None:
    if rank is None:
        raise ValueError(f"the launcher does not tell this rank its number ({RANK[0]} is not set)")
    for descriptor, ending in ((1, "out"), (2, "err")):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        try:
            directory.mkdir(parents=True, exist_ok=True)
            file = os.open(directory / f"rank-{rank}.{ending}", flags, 0o666)
        except OSError as error:
            raise ValueError(
                f"--output {directory} cannot be written to: {error.strerror}; name a directory "
                "where every rank can write"
            ) from None
        os.dup2(file, descriptor)
        os.close(file)


def main(arguments: Sequence[str]) -> None:
    """Prepare, and become the program."""
    split = list(arguments).index("--")
    options, program = arguments[:split], list(arguments[split + 1 :])
    environment = dict(os.environ)
    try:
        prepare(options, environment)
        os.execvpe(program[0], program, environment)
    except OSError as error:
        reason = f"{error.strerror}; {REMEDY}"
    except ValueError as error:
        reason = str(error)
    sys.exit(f"wfbprun: rank {number(RANK, environment)}: cannot start {program[0]}: {reason}")


if __name__ == "__main__":
    main(sys.argv[1:])
