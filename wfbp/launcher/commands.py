"""The command line that starts a job, for each make of MPI; pure.

A job is the same under every library. Ranks fill the hosts in order and may outnumber cores; the
environment is forwarded. MPI binds no rank to a core: :mod:`wfbp.launcher.rank` does,
because it considers the communication thread.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from wfbp.launcher.hosts import Host
from wfbp.launcher.mpi import Mpi, Vendor

FORWARDED = (
    "CUDA_", "FI_", "GLOO_", "HF_", "HOROVOD_", "JAX_", "MKL_", "MPIR_", "NCCL_", "NUMEXPR_",
    "OMP_", "OPENBLAS_", "PYTHON", "TF_", "TORCH", "TRANSFORMERS_", "UCX_", "WANDB_", "WFBP_",
    "XLA_",
)  # fmt: skip
"""Beginnings of the names of variables that are forwarded to other hosts."""

ALSO_FORWARDED = ("CONDA_PREFIX", "HOME", "LD_LIBRARY_PATH", "LD_PRELOAD", "PATH", "VIRTUAL_ENV")


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """The job to start; empty fields mean this machine alone, or the libraries' defaults.

    ``program`` includes its arguments; ``variables`` are set in addition to forwarded ones;
    ``prefix`` puts the rank before each line of output; ``interface`` is for MPI, NCCL and gloo;
    ``remote_shell`` replaces ssh; ``options`` are passed on to the launcher.
    """

    num_ranks: int
    program: Sequence[str]
    hosts: Sequence[Host] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    prefix: bool = False
    interface: str = ""
    remote_shell: str = ""
    options: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise ValueError(f"{self.num_ranks} ranks were asked for; expected at least 1")
        slots = sum(host.slots for host in self.hosts)
        if self.hosts and slots < self.num_ranks:
            raise ValueError(
                f"{self.num_ranks} ranks were asked for and the hosts have {slots} slots "
                f"({', '.join(map(str, self.hosts))}); name more hosts, or give them more slots"
            )

    def placed(self) -> tuple[Host, ...]:
        """The hosts that get ranks, with each one's number of ranks, in order."""
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


Command = tuple[list[str], dict[str, str]]
"""Program and arguments, and the variables to set in its environment."""


def mpirun_command(
    spec: LaunchSpec, mpi: Mpi, environment: Mapping[str, str], is_root: bool
) -> Command:
    """The ``mpirun`` command of a job, called from this ``environment``, as root or not."""
    variables = _variables(spec)
    words = [mpi.mpirun, "-n", str(spec.num_ranks)]
    hosts = ",".join(map(str, spec.placed()))
    if mpi.vendor is Vendor.OPEN_MPI:
        new = mpi.version >= (5,)
        words += ["--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE"]
        words += ["--allow-run-as-root"] if is_root else []
        words += ["--host", hosts] if hosts else []
        if spec.remote_shell:
            words += ["--prtemca", "prte_plm_ssh_agent"] if new else ["--mca", "plm_rsh_agent"]
            words.append(spec.remote_shell)
        words += ["--mca", "btl_tcp_if_include", spec.interface] if spec.interface else []
        if spec.prefix:
            words += ["--output", "tag"] if new else ["--tag-output"]
        if spec.is_remote:  # only named variables reach other hosts
            known = {n for n in environment if n.startswith(FORWARDED) or n in ALSO_FORWARDED}
            for name in sorted(known | variables.keys()):
                words += ["-x", name]
    else:  # MPICH's hydra, and Intel's; it forwards the whole environment
        words += ["-hosts", hosts] if hosts else []
        if spec.remote_shell:
            words += ["-launcher", "ssh", "-launcher-exec", spec.remote_shell]
        words += ["-iface", spec.interface] if spec.interface else []
        words += ["-prepend-rank"] if spec.prefix else []
        words += ["-genv", "I_MPI_PIN", "off"] if mpi.vendor is Vendor.INTEL else []
    return [*words, *spec.options, *spec.program], variables


def slurm_command(spec: LaunchSpec, vendor: Vendor) -> Command:
    """The ``srun`` command that starts a job: Slurm starts the ranks itself, without ssh."""
    words = ["srun", "--ntasks", str(spec.num_ranks), "--cpu-bind=none", "--export=ALL"]
    words.append("--mpi=pmix" if vendor is Vendor.OPEN_MPI else "--mpi=pmi2")
    if placed := spec.placed():
        words += ["--nodes", str(len(placed)), "--nodelist", ",".join(h.name for h in placed)]
    words += ["--label"] if spec.prefix else []
    return [*words, *spec.options, *spec.program], _variables(spec)


def _variables(spec: LaunchSpec) -> dict[str, str]:
    names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if spec.interface else ()
    return dict(spec.variables) | dict.fromkeys(names, spec.interface)


def rank_program(program: Sequence[str], settings: Sequence[str]) -> list[str]:
    """One rank's command: Python for a script, after :mod:`wfbp.launcher.rank` if ``settings``."""
    words = list(program)
    if words and words[0].endswith(".py"):
        words = [sys.executable, *words]
    elif words and words[0] in ("python", "python3"):
        words[0] = sys.executable
    front = [sys.executable, "-m", "wfbp.launcher.rank", *settings, "--"] if settings else []
    return front + words
