"""The command line that starts a job, for each make of MPI; pure.

The same request means the same under every library: ranks fill the hosts in their order, the
environment goes along, MPI binds nobody to a core (:mod:`wfbp.launcher.rank` does it, knowing of
the communication thread), and more ranks than cores are allowed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from wfbp.launcher.hosts import Host
from wfbp.launcher.mpi import Mpi, Vendor

FORWARDED = (
    "CUDA_", "FI_", "GLOO_", "HF_", "HOROVOD_", "JAX_", "MKL_", "MPIR_", "NCCL_", "NUMEXPR_",
    "OMP_", "OPENBLAS_", "PYTHON", "TF_", "TORCH", "TRANSFORMERS_", "UCX_", "WANDB_", "WFBP_",
    "XLA_",
)  # fmt: skip
"""Beginnings of the names of variables that go to other hosts."""

ALSO_FORWARDED = ("CONDA_PREFIX", "HOME", "LD_LIBRARY_PATH", "LD_PRELOAD", "PATH", "VIRTUAL_ENV")


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be started.

    Args:
        num_ranks: in all.
        program: the command of one rank, its arguments behind it.
        hosts: where ranks go, in order; this machine alone if empty.
        variables: to be set on every rank, beside those that are forwarded.
        prefix: whether each line of output begins with its rank.
        interface: network interface for MPI, NCCL and gloo; the libraries' choice if empty.
        remote_shell: program that reaches other hosts instead of ssh; empty for the default.
        options: passed on to the launcher as they are.
    """

    num_ranks: int
    program: tuple[str, ...]
    hosts: tuple[Host, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    prefix: bool = False
    interface: str = ""
    remote_shell: str = ""
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise ValueError(f"{self.num_ranks} ranks were asked for; expected at least 1")
        if not self.program:
            raise ValueError("there is no program to start")
        slots = sum(host.slots for host in self.hosts)
        if self.hosts and slots < self.num_ranks:
            raise ValueError(
                f"{self.num_ranks} ranks were asked for and the hosts have {slots} slots "
                f"({', '.join(f'{h.name}:{h.slots}' for h in self.hosts)}); name more hosts, or "
                "give them more slots"
            )

    def placed(self) -> tuple[Host, ...]:
        """The hosts that get ranks, with how many each gets, in order."""
        left, placed = self.num_ranks, []
        for host in self.hosts:
            if left > 0:
                placed.append(Host(host.name, min(host.slots, left)))
                left -= host.slots
        return tuple(placed)

    @property
    def is_remote(self) -> bool:
        """Whether any rank runs on another machine."""
        return any(not host.is_local for host in self.placed())


@dataclass(frozen=True, slots=True)
class Command:
    """A command to be executed.

    Args:
        words: program and arguments.
        variables: to be set in its own environment.
    """

    words: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)


def mpirun_command(job: Job, mpi: Mpi, environment: Mapping[str, str], is_root: bool) -> Command:
    """The ``mpirun`` command that starts a job; ``environment`` and ``is_root`` are of this
    process."""
    build = _BUILDERS[mpi.vendor]
    words = build(job, mpi, environment, is_root)
    own = dict(job.variables) | _interface_variables(job)
    return Command((mpi.mpirun, *words, *job.options, *job.program), own)


def slurm_command(job: Job, vendor: Vendor) -> Command:
    """How Slurm's ``srun`` is told of a job: it starts the ranks itself, without ssh."""
    words = ["srun", "--ntasks", str(job.num_ranks), "--cpu-bind=none", "--export=ALL"]
    words.append("--mpi=pmix" if vendor is Vendor.OPEN_MPI else "--mpi=pmi2")
    if job.hosts:
        placed = job.placed()
        words += ["--nodes", str(len(placed)), "--nodelist", ",".join(h.name for h in placed)]
    if job.prefix:
        words.append("--label")
    own = dict(job.variables) | _interface_variables(job)
    return Command((*words, *job.options, *job.program), own)


def rank_program(program: Sequence[str], settings: Sequence[str], python: str = "") -> list[str]:
    """A program with :mod:`wfbp.launcher.rank` in front of it, if that has ``settings``.

    A Python script is run by ``python``, this interpreter by default; anything else as it is.
    """
    python = python or sys.executable
    words = list(program)
    if words and words[0].endswith(".py"):
        words = [python, *words]
    elif words and words[0] in ("python", "python3"):
        words[0] = python
    return [python, "-m", "wfbp.launcher.rank", *settings, "--", *words] if settings else words


def _interface_variables(job: Job) -> dict[str, str]:
    if not job.interface:
        return {}
    return {"NCCL_SOCKET_IFNAME": job.interface, "GLOO_SOCKET_IFNAME": job.interface}


def _forwarded(job: Job, environment: Mapping[str, str]) -> list[str]:
    """Names of variables that must be named to reach other hosts."""
    names = {n for n in environment if n.startswith(FORWARDED) or n in ALSO_FORWARDED}
    return sorted(names | set(job.variables) | set(_interface_variables(job)))


def _hydra(job: Job, mpi: Mpi, environment: Mapping[str, str], is_root: bool) -> list[str]:
    """MPICH and Intel MPI; all of the environment goes along by itself."""
    words = ["-n", str(job.num_ranks)]
    if job.hosts:
        words += ["-hosts", ",".join(f"{h.name}:{h.slots}" for h in job.placed())]
    if job.remote_shell:
        words += ["-launcher", "ssh", "-launcher-exec", job.remote_shell]
    if job.interface:
        words += ["-iface", job.interface]
    if job.prefix:
        words.append("-prepend-rank")
    if mpi.vendor is Vendor.INTEL:
        words += ["-genv", "I_MPI_PIN", "off"]
    return words


def _open_mpi(job: Job, mpi: Mpi, environment: Mapping[str, str], is_root: bool) -> list[str]:
    """Open MPI; only what is named with -x goes to other hosts."""
    words = ["-n", str(job.num_ranks), "--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE"]
    if is_root:
        words.append("--allow-run-as-root")
    if job.hosts:
        words += ["--host", ",".join(f"{h.name}:{h.slots}" for h in job.placed())]
    if job.remote_shell:
        agent = "prte_plm_ssh_agent" if mpi.version >= (5,) else "plm_rsh_agent"
        words += ["--prtemca" if mpi.version >= (5,) else "--mca", agent, job.remote_shell]
    if job.interface:
        words += ["--mca", "btl_tcp_if_include", job.interface]
    if job.prefix:
        words += ["--output", "tag"] if mpi.version >= (5,) else ["--tag-output"]
    if job.is_remote:
        for name in _forwarded(job, environment):
            words += ["-x", name]
    return words


_Builder = Callable[[Job, Mpi, Mapping[str, str], bool], list[str]]
_BUILDERS: dict[Vendor, _Builder] = {
    Vendor.MPICH: _hydra,
    Vendor.INTEL: _hydra,
    Vendor.OPEN_MPI: _open_mpi,
}
