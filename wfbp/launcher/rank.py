"""Runs on each rank before the program: chooses cores, GPU and output, then becomes the program.

``python -m wfbp.launcher.rank [--cores] [--gpu] [--output DIR] [--torch-env HOST:PORT] --
PROGRAM ...``. It imports only the standard library and replaces itself by ``exec``, so signals
reach the program directly. Its names and readers of launchers' variables serve other modules, too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from wfbp.launcher.hosts import expand_counts

WFBPRUN = "WFBPRUN"
"""Variable of ranks that wfbprun has started: the HOST:PORT that it chose for torch.distributed, or
empty."""

RANK_OF_MPI = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
RANK = (*RANK_OF_MPI, "SLURM_PROCID")
_LOCAL_RANK = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
SIZE = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
_LOCAL_SIZE = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")
REMEDY = (
    "expected a program on the PATH, the path of one, or a file that ends in .py, on every host"
)
TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
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


def under_launcher(min_ranks: int = 2) -> bool:
    """Whether the environment describes this process as a rank of ``min_ranks`` ranks or more."""
    size = number(SIZE, os.environ)
    return number(RANK, os.environ) is not None and (size is None or size >= min_ranks)


def meets_by_mpi(url: str) -> bool:
    """Whether PyTorch's ``env://`` is to use MPI: a launcher started this rank, and the program or
    the user has named no other address than wfbprun."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    has_address = address and port and os.environ.get("WFBPRUN") != f"{address}:{port}"
    is_told = has_address and ("RANK" in os.environ or "rank=" in url)
    return under_launcher(min_ranks=1) and not is_told


def contradiction(environment: Mapping[str, str]) -> str:
    """How ``RANK`` or ``WORLD_SIZE`` differs from what MPI's launcher says; empty if neither."""
    for name, names in (("RANK", RANK), ("WORLD_SIZE", SIZE)):
        of_mpi = number(names, environment)
        if of_mpi is not None and environment.get(name, str(of_mpi)) != str(of_mpi):
            return (
                f"rank {number(RANK, environment)}: expected {name}={of_mpi}, as MPI's launcher "
                f"says, found {name}={environment[name]}; unset RANK, WORLD_SIZE and LOCAL_RANK, "
                "or start with wfbprun, which sets them"
            )
    return ""


def local_size(environment: Mapping[str, str]) -> int | None:
    size = number(_LOCAL_SIZE, environment)
    if size is None and "SLURM_STEP_TASKS_PER_NODE" in environment:
        counts = expand_counts(environment["SLURM_STEP_TASKS_PER_NODE"])
        node = number(("SLURM_NODEID",), environment)
        return counts[node] if node is not None and node < len(counts) else None
    return size


def torch_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of torchrun for this rank; empty if its launcher does not tell all of them.

    >>> hydra = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    >>> torch_variables(hydra)
    {'RANK': '1', 'WORLD_SIZE': '2', 'LOCAL_RANK': '1', 'LOCAL_WORLD_SIZE': '2'}
    """
    numbers = [number(names, environment) for names in (RANK, SIZE, _LOCAL_RANK)]
    numbers.append(local_size(environment))
    if None in numbers:
        return {}
    return dict(zip(TORCH_VARIABLES, map(str, numbers), strict=True))


def num_gpus() -> int | None:
    """NVIDIA GPUs of this host, by their device files; None if it has others, as under WSL."""
    if os.path.exists("/dev/dxg"):
        return None
    return sum(name[:6] == "nvidia" and name[6:].isdecimal() for name in os.listdir("/dev"))


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
            rank, size = _place(environment)
            devices = list(filter(None, environment.get("CUDA_VISIBLE_DEVICES", "").split(",")))
            present = None if devices else num_gpus()
            if present is not None and rank >= present:
                raise ValueError(
                    f"--gpu: {size} ranks on this host, which has {present} NVIDIA GPUs; start "
                    "fewer, or train on CPUs without --gpu"
                )
            own = devices[rank % len(devices)] if devices else str(rank)
            environment["CUDA_VISIBLE_DEVICES"] = own
        elif option == "--torch-env" and left:
            outer, master = environment.get(WFBPRUN), left.pop(0)
            environment[WFBPRUN] = master
            if not master:  # of --no-torch-env
                environment["WFBP_TORCH_ENV"] = "0"
                continue
            environment.update(torch_variables(environment))
            found = [environment.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")]
            # The user's stay, but not those of an outer job whose rank starts this one.
            if found == [None, None] or (outer and outer == ":".join(map(str, found))):
                address, _, port = master.rpartition(":")
                environment |= {"MASTER_ADDR": address, "MASTER_PORT": port}
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
