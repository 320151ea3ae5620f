"""Hosts and their slots: from the command line, from a hostfile, or from a batch system.

Slurm, PBS, LSF and Grid Engine each describe an allocation in variables and files of their own;
here all of them become one tuple of :class:`Host`.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Host:
    """A machine that takes as many ranks as it has slots."""

    name: str
    slots: int = 1

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is not a host name")
        if self.slots < 1:
            raise ValueError(f"host {self.name} has {self.slots} slots; expected at least 1")

    @property
    def is_local(self) -> bool:
        """Whether this is the machine that asks."""
        own = socket.gethostname()
        return self.name in ("localhost", "127.0.0.1", "::1", own, own.partition(".")[0])


@dataclass(frozen=True, slots=True)
class Allocation:
    """Hosts granted by a batch system:

    ``Slurm``, ``PBS``, ``LSF``, ``Grid Engine``, or :data:`MPI_HOSTFILE`.
    """

    system: str
    hosts: tuple[Host, ...]


MPI_HOSTFILE = "mpirun's default host file"
"""Where no batch system granted the hosts, but a variable of the MPI library names a file."""

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")
_SLOTS_KEY = re.compile(r"(slots|max[-_]slots)\s*=\s*(\S+)")


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Hosts as ``-H`` takes them; one that is named twice has the sum of its slots.

    Raises ``ValueError`` if not of the form ``a:4,b:4``.

    Example:
        >>> parse_hosts("node1:4,node2")
        (Host(name='node1', slots=4), Host(name='node2', slots=1))
    """
    hosts = []
    for part in text.split(","):
        name, colon, slots = part.strip().rpartition(":")
        if not colon:
            name, slots = part.strip(), "1"
        if not slots.isdecimal() or not name:
            raise ValueError(f"{part.strip()!r} in {text!r} is not HOST or HOST:SLOTS")
        hosts.append(Host(name, int(slots)))
    return merged(hosts)


def read_hostfile(path: str | Path) -> tuple[Host, ...]:
    """Hosts of a file: one a line, as ``a``, ``a:4`` (MPICH) or ``a slots=4`` (Open MPI).

    Text behind ``#`` is a comment. Raises ``ValueError``, with its number, for any other line.
    """
    hosts: list[Host] = []
    try:
        lines = Path(path).read_text().splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text file: it should name a host in each line") from None
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        name, _, rest = text.partition(" ")
        try:
            settings = dict(_SLOTS_KEY.findall(rest))
            if rest.strip() and not settings:
                raise ValueError(f"{rest.strip()!r} is not slots=N")
            slots = settings.get("slots")
            hosts += parse_hosts(name if slots is None else f"{name}:{slots}")
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    if not hosts:
        raise ValueError(f"{path} names no host")
    return merged(hosts)


def merged(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """The same hosts, each once, with the sum of its slots."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return tuple(Host(name, count) for name, count in slots.items())


def allocation(environment: Mapping[str, str]) -> Allocation | None:
    """The allocation of the batch system that started this process; None outside of one.

    Raises ``ValueError`` or ``OSError`` if its description cannot be read.
    """
    for system, read in _SYSTEMS:
        hosts = read(environment)
        if hosts:
            return Allocation(system, merged(hosts))
    return None


def expand_nodes(text: str) -> list[str]:
    """The names in a Slurm node list; ``ValueError`` for wrong brackets or ranges.

    Example:
        >>> expand_nodes("n[08-10,12],login")
        ['n08', 'n09', 'n10', 'n12', 'login']
    """
    names = []
    for part in _split_outside_brackets(text):
        prefixes = [""]
        for piece in re.split(r"(\[[^\[\]]*\])", part):
            if piece.startswith("["):
                numbers = [n for span in piece[1:-1].split(",") for n in _expand_range(span, text)]
                prefixes = [prefix + number for prefix in prefixes for number in numbers]
            elif "[" in piece or "]" in piece:
                raise ValueError(f"{text!r} is not a Slurm node list")
            else:
                prefixes = [prefix + piece for prefix in prefixes]
        names += prefixes
    return names


def _split_outside_brackets(text: str) -> list[str]:
    return [part for part in re.split(r",(?![^\[]*\])", text) if part]


def _expand_range(span: str, whole: str) -> list[str]:
    first, dash, last = span.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise ValueError(f"{span!r} in {whole!r} is not a range of node numbers")
    if not dash:
        return [first]
    return [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]


def _expand_counts(text: str) -> list[int]:
    """``4(x2),3`` -> 4, 4, 3."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"{text!r} is not a list of Slurm's tasks per node")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _slurm(environment: Mapping[str, str]) -> list[Host]:
    nodes = environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST")
    if not nodes:
        return []
    names = expand_nodes(nodes)
    # Without a number of tasks Slurm grants processors, and starts one task for each by default.
    text = environment.get("SLURM_TASKS_PER_NODE") or environment.get("SLURM_JOB_CPUS_PER_NODE")
    counts = _expand_counts(text) if text else [1] * len(names)
    if len(counts) != len(names):
        raise ValueError(
            f"Slurm names {len(names)} nodes in {nodes!r}, and numbers of tasks for {len(counts)} "
            f"in {text!r}"
        )
    return [Host(name, count) for name, count in zip(names, counts, strict=True)]


def _pbs(environment: Mapping[str, str]) -> list[Host]:
    path = environment.get("PBS_NODEFILE")
    return list(read_hostfile(path)) if path else []


def _lsf(environment: Mapping[str, str]) -> list[Host]:
    path = environment.get("LSB_DJOB_HOSTFILE")
    if path:
        return list(read_hostfile(path))
    words = environment.get("LSB_MCPU_HOSTS", "").split()
    if len(words) % 2 or not all(count.isdecimal() for count in words[1::2]):
        raise ValueError(f"LSB_MCPU_HOSTS={' '.join(words)!r} is not a list of hosts and counts")
    return [Host(name, int(n)) for name, n in zip(words[::2], words[1::2], strict=True)]


def _grid_engine(environment: Mapping[str, str]) -> list[Host]:
    path = environment.get("PE_HOSTFILE")
    if not path:
        return []
    lines = [line.split() for line in Path(path).read_text().splitlines() if line.strip()]
    if any(len(words) < 2 or not words[1].isdecimal() for words in lines):
        raise ValueError(f"{path} is not a host file of Grid Engine")
    return [Host(words[0], int(words[1])) for words in lines]


def _default_hostfile(environment: Mapping[str, str]) -> list[Host]:
    """The file that an administrator, or the MPI operator of Kubernetes, named to ``mpirun``."""
    paths = (environment[name] for name in _HOSTFILES if environment.get(name))
    return next((list(read_hostfile(path)) for path in paths if Path(path).exists()), [])


_HOSTFILES = (
    "HYDRA_HOST_FILE",
    "I_MPI_HYDRA_HOST_FILE",
    "OMPI_MCA_orte_default_hostfile",
    "PRTE_MCA_prte_default_hostfile",
)

_SYSTEMS = (
    ("Slurm", _slurm),
    ("PBS", _pbs),
    ("LSF", _lsf),
    ("Grid Engine", _grid_engine),
    (MPI_HOSTFILE, _default_hostfile),
)
