"""``wfbp run``, installed as ``wfbprun`` too: starts a job under the MPI library of this Python."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import click

from wfbp.config import Config
from wfbp.errors import BackendError
from wfbp.launcher.commands import LaunchSpec, mpirun_command, rank_program, slurm_command
from wfbp.launcher.hosts import (
    MOST_RANKS,
    MPI_HOSTFILE,
    Host,
    allocation,
    choose_master,
    parse_hosts,
    read_hostfile,
)
from wfbp.launcher.mpi import find_library, find_mpi
from wfbp.launcher.rank import REMEDY, num_gpus

CHECK_S = 10
"""Seconds within which a host must answer."""


@click.command(
    "run", context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False}
)
@click.option(
    "-n",
    "-np",
    "--num-ranks",
    type=click.IntRange(1, MOST_RANKS),
    help="Number of ranks; by default all slots of the allocation or of the given hosts.",
)
@click.option("-H", "--hosts", metavar="A:4,B:4", help="Hosts, and how many ranks each takes.")
@click.option(
    "--hostfile", metavar="FILE", help="File with one host per line: A, A:4 or A slots=4."
)
@click.option("--output", metavar="DIR", help="Write each rank's output to DIR/rank-N.out, .err.")
@click.option("--record", metavar="DIR", help="Record the run there, for wfbp report and timeline.")
@click.option("--prefix/--no-prefix", help="Begin each line of output with its rank.")
@click.option(
    "--bind/--no-bind", default=True, help="Give each rank its own cores, if there are enough."
)
@click.option(
    "--gpu", is_flag=True, help="Show each rank only the GPU with its local rank's number."
)
@click.option(
    "--torch-env/--no-torch-env",
    default=True,
    help="Set RANK, WORLD_SIZE and others as torchrun does.",
)
@click.option("--interface", metavar="NAME", help="Network interface for MPI, NCCL and gloo.")
@click.option(
    "-x",
    "--env",
    "variables",
    metavar="NAME[=VALUE]",
    multiple=True,
    help="Set or forward a variable; those of wfbp, Python, CUDA, NCCL and UCX always are.",
)
@click.option(
    "--launcher",
    type=click.Choice(["mpirun", "srun"]),
    default="mpirun",
    help="Program that starts the ranks: MPI's own, or Slurm's.",
)
@click.option(
    "--mpirun", metavar="PATH", help="Path of mpirun; by default the one that belongs to mpi4py."
)
@click.option(
    "--ssh",
    "remote_shell",
    metavar="PROGRAM",
    help="Program that reaches other hosts; by default ssh.",
)
@click.option("--check/--no-check", default=True, help="Check first that every host answers.")
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(0.0, 1e6),
    default=0.0,
    metavar="SECONDS",
    help="Seconds to wait for hosts that are still starting.",
)
@click.option(
    "--mpi-option", "options", multiple=True, metavar="TEXT", help="Option for mpirun itself."
)
@click.option("-m", "--module", is_flag=True, help="PROGRAM is a module: python -m PROGRAM.")
@click.option("--dry-run", is_flag=True, help="Print the command without running it.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="PROGRAM [ARGUMENT]...")
def command(program: tuple[str, ...], **options: Any) -> None:
    """Start PROGRAM on several ranks: wfbprun -n 4 python train.py

    wfbprun and wfbp run are the same command. It finds the mpirun of this Python's MPI library, and
    passes it the hosts (-H, a hostfile, or the allocation of Slurm, PBS, LSF or Grid Engine) and
    the environment. Root and more ranks than cores are allowed. This Python runs a file that ends
    in .py, or the module of -m. The process becomes mpirun: signals reach the job, and its exit
    status is the job's.
    """
    if not program:
        raise click.UsageError(
            "which program? Name it after the options: wfbprun -n 4 train.py; wfbprun --help "
            "lists them"
        )
    given = SimpleNamespace(**options)
    environment = dict(os.environ)
    if given.module:
        if program[0].endswith(".py") or os.sep in program[0]:
            raise click.UsageError(
                f"-m {program[0]}: expected the name of a module; run a file without -m"
            )
        program = ("python", "-m", *program)
    named = given.hosts or given.hostfile
    system, granted = ("", ()) if named else allocation(environment)
    spec = _job(given, granted, program, environment)
    if given.launcher == "mpirun":
        mpi = find_mpi(given.mpirun)
        words, own = mpirun_command(spec, mpi, environment, os.geteuid() == 0)
    elif system == "Slurm":
        words, own = slurm_command(spec, find_library()[0])
    else:
        raise click.UsageError("--launcher srun needs an allocation of Slurm (salloc, sbatch)")
    if given.dry_run:
        shown = [f"{name}={shlex.quote(value)}" for name, value in own.items()]
        click.echo(" ".join([*shown, shlex.join(words)]))
        return
    environment.update(spec.variables)
    Config.from_environment(environment)  # one message, instead of one from every rank
    if given.check:
        if spec.interface and (not spec.hosts or any(host.is_local for host in spec.placed())):
            _check_interface(spec.interface)
        if given.launcher == "mpirun" and system in ("", MPI_HOSTFILE):
            check_hosts(spec.placed(), spec.remote_shell or "ssh", given.wait_s)
        if not spec.is_remote:
            _check_program(program, environment.get("PATH"))
            if given.gpu:
                _check_gpus(spec.num_ranks, environment)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(words[0], words, environment | own)
    except OSError as error:
        raise BackendError(f"{words[0]} cannot be started: {error.strerror or error}") from None


def _job(
    given: SimpleNamespace,
    granted: Sequence[Host],
    program: Sequence[str],
    environment: dict[str, str],
) -> LaunchSpec:
    """The job of a command line; ``click.UsageError`` if that is not clear."""
    if given.hosts and given.hostfile:
        raise click.UsageError("--hosts and --hostfile both name hosts; give one of them")
    hosts = granted
    if given.hosts or given.hostfile:
        hosts = parse_hosts(given.hosts) if given.hosts else read_hostfile(given.hostfile)
    if given.num_ranks is None and not hosts:
        raise click.UsageError("how many ranks? Give -n N before the program, or name hosts")
    settings = ["--cores"] if given.bind else []
    settings += ["--gpu"] if given.gpu else []
    settings += ["--torch-env", choose_master(hosts) if given.torch_env else ""]
    settings += ["--output", os.path.abspath(given.output)] if given.output else []
    record = {"WFBP_RECORD": os.path.abspath(given.record)} if given.record else {}
    return LaunchSpec(
        given.num_ranks or sum(host.slots for host in hosts),
        rank_program(program, settings),
        hosts,
        _variables(given.variables, environment) | record,
        given.prefix,
        given.interface or "",
        given.remote_shell or "",
        given.options,
    )


def _variables(texts: Sequence[str], environment: dict[str, str]) -> dict[str, str]:
    """The variables of ``-x``, with their values."""
    variables = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name.isidentifier():
            raise click.UsageError(f"-x {text}: {name!r} is not the name of a variable")
        if not equals and name not in environment:
            raise click.UsageError(f"-x {name}: it is not set here; give -x {name}=VALUE")
        variables[name] = value if equals else environment[name]
    return variables


def _check_program(program: Sequence[str], path: str | None) -> None:
    """Raise ``click.UsageError`` if a program cannot run here, before every rank complains."""
    by_python = program[0] in ("python", "python3")
    name = program[:2][-1] if by_python else program[0]
    if name.endswith(".py"):
        if not os.path.exists(name):
            raise click.UsageError(f"{name}: no such file in {os.getcwd()}")
    elif not by_python and shutil.which(name, path=path) is None:
        raise click.UsageError(f"cannot start {name}: {REMEDY}")


def _check_gpus(num_ranks: int, environment: dict[str, str]) -> None:
    """Raise ``click.UsageError`` if this host has too few GPUs, instead of training on CPUs."""
    present = None if environment.get("CUDA_VISIBLE_DEVICES") else num_gpus()
    if present is not None and present < num_ranks:
        raise click.UsageError(
            f"--gpu: {num_ranks} ranks were asked for, and this host has {present} NVIDIA GPUs; "
            "start fewer, or train on CPUs without --gpu"
        )


def _check_interface(text: str) -> None:
    """Raise ``click.UsageError`` if this host lacks an interface; MPI checks networks (CIDR)."""
    present = sorted(name for _, name in socket.if_nameindex())
    for name in text.split(","):
        if "/" not in name and name not in present:
            raise click.UsageError(
                f"--interface {name}: this host has no such interface; it has {', '.join(present)}"
            )


def check_hosts(hosts: Sequence[Host], shell: str, wait_s: float) -> None:
    """Raise ``BackendError`` if other hosts do not answer."""
    others = [host.name for host in hosts if not host.is_local]
    if not others:
        return
    words = shlex.split(shell)
    if shutil.which(words[0]) is None:
        raise BackendError(
            f"{words[0]} is not installed here, and reaches the other hosts "
            f"({', '.join(others)}); install it (Debian: openssh-client) or name another by --ssh"
        )
    deadline = time.monotonic() + wait_s
    with ThreadPoolExecutor(max_workers=min(32, len(others))) as pool:
        while True:
            reasons = pool.map(lambda name: _unreachable(words, name), others)
            failures = [f"{n}: {r}" for n, r in zip(others, reasons, strict=True) if r]
            if not failures or time.monotonic() >= deadline:
                break
            time.sleep(1.0)
    if failures:
        raise BackendError(
            f"{len(failures)} of {len(others)} hosts cannot be reached by {words[0]} without a "
            f"password ({'; '.join(failures)}). Try `ssh {others[0]} true`; install a key with "
            "`ssh-copy-id`, accept the host's key once, or start with --no-check"
        )


def _unreachable(shell: Sequence[str], name: str) -> str:
    """Why a host cannot be reached; empty if it can."""
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CHECK_S}"]
    words = [*shell, *(options if os.path.basename(shell[0]) == "ssh" else []), name, "true"]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=2 * CHECK_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {2 * CHECK_S} s"
    except OSError as error:
        return str(error)
    lines = done.stderr.strip().splitlines() or [f"{shell[0]} ended with status {done.returncode}"]
    return lines[-1].strip() if done.returncode else ""


def main() -> None:
    from wfbp.cli.app import main as wfbp

    wfbp(["run", *sys.argv[1:]], name="wfbprun")
